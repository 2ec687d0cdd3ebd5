# The conformance suite compares every backend with the reference on one table of cases.
include(${CMAKE_CURRENT_LIST_DIR}/../support/harness.cmake)

set(conformance_objects)
function(link_conformance name)
  target_link_libraries(${name} PRIVATE logitless_conformance GTest::gtest)
  target_compile_options(${name} PRIVATE ${LOGITLESS_TEST_OPTIONS})
endfunction()
add_library(conformance_main OBJECT conformance/main.cpp)
link_conformance(conformance_main)

function(add_conformance_test name parts)
  add_library(${name}_objects OBJECT conformance/${name}.cpp)
  link_conformance(${name}_objects)
  add_executable(${name} $<TARGET_OBJECTS:${name}_objects> $<TARGET_OBJECTS:conformance_main>)
  link_conformance(${name})
  add_parts(${name} ${parts} ${name})
endfunction()

# The tests of CUDA are one program: the library is large, and is copied to the device machine once.
# Each suite runs with the best engine, and most run again with the engines for sm_80.
option(LOGITLESS_DEVICE_TESTS "Build the tests that need an NVIDIA GPU, where the CUDA backend is built" ON)
if(LOGITLESS_DEVICE_TESTS AND LOGITLESS_CUDA_UNOPTIMIZED)
  message(FATAL_ERROR "LOGITLESS_CUDA_UNOPTIMIZED is \"${LOGITLESS_CUDA_UNOPTIMIZED}\"; allowed with LOGITLESS_DEVICE_TESTS: \"\"")
endif()
set(device_suites)
function(add_device_test suite parts)
  if(NOT LOGITLESS_WITH_CUDA OR NOT LOGITLESS_DEVICE_TESTS)
    return()
  endif()
  math(EXPR last "${parts} - 1")
  foreach(kernels own portable sm80)
    if("${kernels}.${suite}" MATCHES "^(portable|sm80)\\.(Offsets|Cuda[DEOPT].*)$|^portable\\.Cuda[HK].*$|^sm80\\.CudaRows$")
      continue()
    endif()
    set(test device.${kernels}.${suite})
    string(REPLACE own "" named ${kernels})  # "": the best engine
    add_parts(${test} ${parts} device_suite --gtest_filter=*/${suite}.*)
    foreach(part RANGE ${last})
      set_property(TEST ${test}.${part} APPEND PROPERTY ENVIRONMENT "LOGITLESS_TEST_DEVICES=cuda"
                                                                    "LOGITLESS_CUDA_KERNELS=${named}")
      set_tests_properties(${test}.${part} PROPERTIES LABELS device SKIP_RETURN_CODE 77)
    endforeach()
  endforeach()
endfunction()

# These two test the comparison itself. They reach no library code that other tests do not, so the
# sanitizer builds leave them out.
if(NOT CMAKE_CXX_FLAGS MATCHES "-fsanitize")
  add_conformance_test(harness_test 1)
  add_conformance_test(bounds_test 1)
endif()
foreach(test conformance:Conformance:8 determinism:Determinism:4 invariance:Invariance:4 edges:Edges:1
             nonfinite:NonFinite:1 invariants:Invariants:1 shards:Shards:1 combine:Combines:1 kept:KeptState:1 kept_shards:KeptShards:1 offsets:Offsets:1 workspace:WorkspaceSizes:4
             temperatures:Temperatures:1 divergence:Divergences:1 divergence_shards:DivergenceShards:1 statistics:TokenStatistics:1 inactive:InactiveTokens:1
             chosen:ChosenColumns:1 topk:TopK:1)
  string(REPLACE ":" ";" test ${test})
  list(GET test 0 name)
  list(GET test 1 suite)
  list(GET test 2 parts)
  add_conformance_test(${name}_test ${parts})
  add_device_test(${suite} ${parts})
  list(APPEND device_suites $<TARGET_OBJECTS:${name}_test_objects>)
endforeach()
target_sources(nonfinite_test_objects PRIVATE conformance/nonfinite_state_test.cpp)
target_sources(kept_test_objects PRIVATE conformance/kept_inactive_test.cpp)
if(NOT CMAKE_CXX_FLAGS MATCHES "-fsanitize=thread")  # ThreadSanitizer has its own operator new
  add_conformance_test(allocation_test 1)
  target_sources(allocation_test PRIVATE support/allocation_count.cpp)
endif()
