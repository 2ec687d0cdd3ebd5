# The programs of make reliability. scripts/reliability runs those of the release build with many
# calls. ctest runs those of the other builds with few calls: sanitizers see more.
list(APPEND LOGITLESS_THREADED_TESTS reliability_soak)  # the program has two callers at once
function(add_reliability_program name)
  add_executable(reliability_${name} reliability/${name}.cpp)
  link_conformance(reliability_${name})
  target_link_libraries(reliability_${name} PRIVATE ${CMAKE_DL_LIBS})
  if(NOT CMAKE_BUILD_TYPE STREQUAL Release)
    add_test(NAME reliability.${name} COMMAND reliability_${name} ${ARGN})
    set_tests_properties(reliability.${name} PROPERTIES TIMEOUT 900 ENVIRONMENT LOGITLESS_WEBGPU_LIBRARY=none)
    if(reliability_${name} IN_LIST LOGITLESS_THREADED_TESTS)
      set_tests_properties(reliability.${name} PROPERTIES LABELS threads)
    endif()
  endif()
endfunction()

add_reliability_program(malformed --calls 5000)
add_reliability_program(hostile --step 13)
target_compile_options(reliability_hostile PRIVATE -O1)
add_reliability_program(bits --runs 8)
add_reliability_program(divergences --calls 300)
add_reliability_program(soak --calls 5000)
# AddressSanitizer aborts if a thread cannot start, ThreadSanitizer if a forked child starts one.
if(NOT CMAKE_CXX_FLAGS MATCHES "-fsanitize=(address|thread)")
  add_reliability_program(faults --forks 20)
endif()

find_package(Python3 REQUIRED COMPONENTS Interpreter)
add_test(NAME reliability.coverage
         COMMAND Python3::Interpreter -B ${CMAKE_CURRENT_SOURCE_DIR}/reliability/coverage_test.py)
