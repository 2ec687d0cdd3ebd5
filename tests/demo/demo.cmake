# Parts of the demo; tests/cli checks the command as a whole, by its output and its files.
if(TARGET logitless_cli AND LOGITLESS_CLI_COMMANDS MATCHES "all|demo")
  add_logitless_test(demo_test demo/demo_test.cpp demo/text_test.cpp)
  target_link_libraries(demo_test PRIVATE logitless_cli_objects)
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  add_test(NAME cli_demo COMMAND Python3::Interpreter -B ${CMAKE_CURRENT_SOURCE_DIR}/cli/demo_test.py)
  set_tests_properties(cli_demo PROPERTIES TIMEOUT 900
                       ENVIRONMENT LOGITLESS_PROGRAM=$<TARGET_FILE:logitless_cli>)
endif()
