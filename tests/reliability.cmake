# The programs of make reliability (scripts/reliability), which the tests run with few calls too: with the sanitizers a
# call that is refused, or that meets a fault, shows what nothing else does.
function(add_reliability_program name)
  add_executable(reliability_${name} reliability/${name}.cpp)
  link_conformance(reliability_${name})
  target_link_libraries(reliability_${name} PRIVATE ${CMAKE_DL_LIBS})
  add_test(NAME reliability.${name} COMMAND reliability_${name} ${ARGN})
  set_tests_properties(reliability.${name} PROPERTIES TIMEOUT 900 ENVIRONMENT LOGITLESS_WEBGPU_LIBRARY=none)
endfunction()

add_reliability_program(malformed --calls 5000)
add_reliability_program(hostile --step 13)
add_reliability_program(bits --runs 8)
add_reliability_program(soak --calls 5000)
if(NOT CMAKE_CXX_FLAGS MATCHES "-fsanitize=thread")  # which refuses threads in a forked child
  add_reliability_program(faults --forks 20)
endif()
