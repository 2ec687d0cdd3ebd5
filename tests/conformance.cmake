# The conformance suite: one case table, every backend against the reference.
include(${CMAKE_CURRENT_LIST_DIR}/harness.cmake)

set(conformance_objects)
function(link_conformance name)
  target_link_libraries(${name} PRIVATE logitless_conformance GTest::gtest)
  target_compile_options(${name} PRIVATE -Wall -Wextra $<$<BOOL:${LOGITLESS_WERROR}>:-Werror>)
endfunction()
add_library(conformance_main OBJECT main.cpp)
link_conformance(conformance_main)

# `parts`: as how many tests a program is registered, for tests that run side by side; a process for
# each of its hundreds of cases would cost more than the cases.
function(add_parts test parts)
  math(EXPR last "${parts} - 1")
  foreach(part RANGE ${last})
    add_test(NAME ${test}.${part} COMMAND ${ARGN} --gtest_brief=1)
    set_tests_properties(${test}.${part} PROPERTIES TIMEOUT 1800 ENVIRONMENT
                         "GTEST_TOTAL_SHARDS=${parts};GTEST_SHARD_INDEX=${part}")
  endforeach()
endfunction()

function(add_conformance_test name parts)
  add_library(${name}_objects OBJECT ${name}.cpp)
  link_conformance(${name}_objects)
  add_executable(${name} $<TARGET_OBJECTS:${name}_objects> $<TARGET_OBJECTS:conformance_main>)
  link_conformance(${name})
  add_parts(${name} ${parts} ${name})
endfunction()

# The same tests on the device, all in one program: its library, of which most bytes are kernels, is
# carried to another machine once. And again with the kernels that every architecture runs.
set(device_suites)
function(add_device_test suite parts)
  if(NOT LOGITLESS_WITH_CUDA)
    return()
  endif()
  math(EXPR last "${parts} - 1")
  foreach(kernels own portable)
    if(kernels STREQUAL portable AND suite MATCHES "^(Offsets|Cuda[EHOP].*)$")
      continue()
    endif()
    set(test device.${kernels}.${suite})
    add_parts(${test} ${parts} device_suite --gtest_filter=*/${suite}.*)
    foreach(part RANGE ${last})
      set_property(TEST ${test}.${part} APPEND PROPERTY ENVIRONMENT "LOGITLESS_TEST_DEVICES=cuda"
                                                                    "LOGITLESS_CUDA_KERNELS=${kernels}")
      set_tests_properties(${test}.${part} PROPERTIES LABELS device SKIP_RETURN_CODE 77)
    endforeach()
  endforeach()
endfunction()

add_conformance_test(harness_test 1)
add_conformance_test(bounds_test 1)
foreach(test conformance:Conformance:8 determinism:Determinism:4 invariance:Invariance:4 edges:Edges:1
             nonfinite:NonFinite:1 invariants:Invariants:1 shards:Shards:1 offsets:Offsets:1 workspace:WorkspaceSizes:4)
  string(REPLACE ":" ";" test ${test})
  list(GET test 0 name)
  list(GET test 1 suite)
  list(GET test 2 parts)
  add_conformance_test(${name}_test ${parts})
  add_device_test(${suite} ${parts})
  list(APPEND device_suites $<TARGET_OBJECTS:${name}_test_objects>)
endforeach()
if(LOGITLESS_WITH_CUDA)
  add_executable(device_suite ${device_suites} cuda_test.cpp cuda_launches_test.cpp cuda_processes_test.cpp cuda_offsets_test.cpp cuda_rows_test.cpp
                 $<TARGET_OBJECTS:conformance_main>)
  link_conformance(device_suite)
  add_device_test(Cuda 4)
  add_device_test(CudaLaunches 2)
  add_device_test(CudaErrors 42)
  add_device_test(CudaProcesses 4)
  add_device_test(CudaOffsets 1)
  add_device_test(CudaHeads 1)
  add_device_test(CudaRows 4)
endif()
if(NOT CMAKE_CXX_FLAGS MATCHES "-fsanitize=thread")  # which has its own operator new
  add_conformance_test(allocation_test 1)
endif()
