# The conformance suite: one case table, every backend against the reference.
include(${CMAKE_CURRENT_LIST_DIR}/harness.cmake)

# `parts`: as how many tests a program is registered, for tests that run side by side; a process for
# each of its hundreds of cases would cost more than the cases.
function(add_conformance_test name parts)
  add_executable(${name} ${name}.cpp)
  target_link_libraries(${name} PRIVATE logitless_conformance GTest::gtest GTest::gtest_main)
  target_compile_options(${name} PRIVATE -Wall -Wextra $<$<BOOL:${LOGITLESS_WERROR}>:-Werror>)
  math(EXPR last "${parts} - 1")
  foreach(part RANGE ${last})
    add_test(NAME ${name}.${part} COMMAND ${name} --gtest_brief=1)
    set_tests_properties(${name}.${part} PROPERTIES TIMEOUT 1800 ENVIRONMENT
                         "GTEST_TOTAL_SHARDS=${parts};GTEST_SHARD_INDEX=${part}")
  endforeach()
endfunction()

add_conformance_test(harness_test 1)
add_conformance_test(bounds_test 1)
add_conformance_test(conformance_test 8)
add_conformance_test(determinism_test 4)
add_conformance_test(invariance_test 4)
add_conformance_test(edges_test 1)
add_conformance_test(nonfinite_test 1)
add_conformance_test(invariants_test 1)
add_conformance_test(shards_test 1)
add_conformance_test(offsets_test 1)
add_conformance_test(workspace_test 4)
add_conformance_test(allocation_test 1)
