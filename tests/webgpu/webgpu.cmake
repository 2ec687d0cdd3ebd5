if(NOT LOGITLESS_WITH_WEBGPU)
  return()
endif()

# Needs no driver: the program contains a fake wgpu-native.
add_executable(webgpu_library_test webgpu/library_test.cpp webgpu/paper_wgpu.cpp)
set_target_properties(webgpu_library_test PROPERTIES ENABLE_EXPORTS ON CXX_VISIBILITY_PRESET default)
target_include_directories(webgpu_library_test PRIVATE ${PROJECT_SOURCE_DIR})
target_include_directories(webgpu_library_test SYSTEM PRIVATE ${LOGITLESS_WEBGPU_INCLUDE})
target_link_libraries(webgpu_library_test PRIVATE logitless_static GTest::gtest)
target_compile_options(webgpu_library_test PRIVATE -Wall -Wextra $<$<BOOL:${LOGITLESS_WERROR}>:-Werror>)
add_test(NAME webgpu_library_test COMMAND webgpu_library_test --gtest_brief=1)

find_package(Python3 REQUIRED COMPONENTS Interpreter)
add_test(NAME webgpu.names COMMAND Python3::Interpreter -B ${CMAKE_CURRENT_SOURCE_DIR}/webgpu/shared_names_test.py)

# The suite on WebGPU, on any Vulkan driver or a software one (Mesa's lavapipe), with the limits
# that every device has. One program has all suites, and runs a seeded eighth of the option pairs
# unless LOGITLESS_TEST_FULL is set.
if(CMAKE_CXX_FLAGS MATCHES "-fsanitize")  # a driver under a sanitizer is not ours to judge
  return()
endif()
file(GLOB lavapipe /usr/share/vulkan/icd.d/lvp_icd.*.json)
set(LOGITLESS_WEBGPU_DRIVER "${lavapipe}" CACHE STRING
    "Vulkan driver file for the WebGPU tests; empty: the loader's own choice")
set(LOGITLESS_WEBGPU_LIBRARY_FILE ${LOGITLESS_WEBGPU_INCLUDE}/libwgpu_native-release.so)
set(webgpu_environment LOGITLESS_TEST_DEVICES=webgpu LOGITLESS_WEBGPU_LIBRARY=${LOGITLESS_WEBGPU_LIBRARY_FILE})
if(LOGITLESS_WEBGPU_DRIVER)
  list(APPEND webgpu_environment VK_DRIVER_FILES=${LOGITLESS_WEBGPU_DRIVER} VK_ICD_FILENAMES=${LOGITLESS_WEBGPU_DRIVER})
endif()

function(add_webgpu_test name program filter)
  add_test(NAME webgpu.${name} COMMAND ${program} --gtest_brief=1 --gtest_filter=${filter})
  set(environment ${webgpu_environment} ${ARGN})
  if(NOT "$ENV{LOGITLESS_TEST_FULL}")
    list(APPEND environment LOGITLESS_TEST_EIGHTH=1 LOGITLESS_TEST_SLOW=1)
  endif()
  set_tests_properties(webgpu.${name} PROPERTIES TIMEOUT 1800 LABELS webgpu ENVIRONMENT "${environment}")
endfunction()

set(defaults LOGITLESS_WEBGPU_LIMITS=default)
set(webgpu_suites)
foreach(suite conformance divergence divergence_shards determinism invariance edges nonfinite invariants shards workspace kept temperatures statistics inactive
              combine chosen)
  list(APPEND webgpu_suites $<TARGET_OBJECTS:${suite}_test_objects>)
endforeach()
add_executable(webgpu_suite ${webgpu_suites} webgpu/webgpu_test.cpp webgpu/token_test.cpp webgpu/kept_test.cpp webgpu/chosen_test.cpp webgpu/flushing_test.cpp
               $<TARGET_OBJECTS:conformance_main>)
link_conformance(webgpu_suite)
add_webgpu_test(conformance webgpu_suite */Conformance.*-*EveryInstructionSet* ${defaults})
# Shaders compute in f32, and other dtypes are converted to it. So most tests of finite values run
# in f32 alone.
set(edges */Edges.*:*/NonFinite.StaysInItsRow*:*/NonFinite.*_f32:*/Invariants.*_f32:*/Shards.*:WebGpu.*:WebGpuToken.*:WebGpuFaint.*)
if("$ENV{LOGITLESS_TEST_FULL}")
  set(edges */Edges.*:*/NonFinite.*:*/Invariants.*:*/Shards.*:WebGpu.*:WebGpuToken.*:WebGpuFaint.*)
endif()
add_webgpu_test(edges webgpu_suite ${edges} ${defaults})
add_webgpu_test(combine webgpu_suite */Combines.* ${defaults})
add_webgpu_test(divergences webgpu_suite */Divergences.*:*/DivergenceShards.WebGPU* ${defaults})
add_webgpu_test(chosen webgpu_suite */ChosenColumns.*:WebGpuChosen.* ${defaults})
add_webgpu_test(kept webgpu_suite */KeptState.*:WebGpuKept.* ${defaults})
add_webgpu_test(options webgpu_suite */Temperatures.*_f32:*/TokenStatistics.*_f32:*/InactiveTokens.*_f32 ${defaults})
# Each of these cases is many runs, which on a CPU's Vulkan are mostly loading and compiling.
add_webgpu_test(sizes webgpu_suite */WorkspaceSizes.*linear_forward_bf16:*/WorkspaceSizes.*divergence_forward_backward_bf16:*/WorkspaceSizes.*AskedWithoutData*:*/WorkspaceSizes.LessThan*
                ${defaults})
add_webgpu_test(bits webgpu_suite
                */Determinism.*_linear_forward_backward_bf16:*/Determinism.*_forward_backward_bf16:*/Invariance.* ${defaults})

# GPUs flush subnormals; with LOGITLESS_TEST_FLUSH this driver does too.
set(faint WebGpuFlushing.*:WebGpuFaint.*:*/Temperatures.*_f32:*/KeptState.Serves*_f32:*/Edges.*_f32:*/Combines.*_f32:*/Divergences.*_f32)
if("$ENV{LOGITLESS_TEST_FULL}")
  set(faint *-*EveryInstructionSet*:*Offsets*)
endif()
add_webgpu_test(faint webgpu_suite ${faint} ${defaults} LOGITLESS_TEST_FLUSH=1)

# Failures of the library's own device; one run has the adapter's limits.
add_executable(webgpu_device_test webgpu/device_test.cpp)
target_link_libraries(webgpu_device_test PRIVATE logitless_conformance GTest::gtest ${CMAKE_DL_LIBS})
target_compile_options(webgpu_device_test PRIVATE ${LOGITLESS_TEST_OPTIONS})
add_webgpu_test(device webgpu_device_test *-*AdaptersLimits ${defaults})
add_webgpu_test(limits webgpu_device_test *AdaptersLimits)

add_logitless_test(webgpu_plan_test webgpu/plan_test.cpp)
target_compile_options(webgpu_plan_test PRIVATE -O1)
