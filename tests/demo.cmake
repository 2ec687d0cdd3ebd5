# The demo's parts; the command as a whole by its lines and its files.
if(TARGET logitless_cli)
  find_package(CLI11 REQUIRED)
  find_package(nlohmann_json REQUIRED)
  find_package(fmt REQUIRED)
  set(demo_sources baseline find head network product text train)
  list(TRANSFORM demo_sources REPLACE "(.+)" "${PROJECT_SOURCE_DIR}/cli/demo_\\1.cpp")
  add_logitless_test(demo_test demo_test.cpp demo_text_test.cpp ${demo_sources} ${PROJECT_SOURCE_DIR}/cli/text.cpp
                     ${PROJECT_SOURCE_DIR}/cli/buffer.cpp)
  target_link_libraries(demo_test PRIVATE CLI11::CLI11 nlohmann_json::nlohmann_json fmt::fmt)
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  add_test(NAME cli_demo COMMAND Python3::Interpreter -B ${CMAKE_CURRENT_SOURCE_DIR}/cli/demo_test.py)
  set_tests_properties(cli_demo PROPERTIES TIMEOUT 900
                       ENVIRONMENT LOGITLESS_PROGRAM=$<TARGET_FILE:logitless_cli>)
endif()
