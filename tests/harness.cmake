# Runs cases of the suite's table on a backend and judges them: for the tests and for `logitless check`.
if(NOT TARGET logitless_conformance)
  set(harness cases.cpp data.cpp device.cpp fixture.cpp judge.cpp memory.cpp simulated.cpp)
  list(TRANSFORM harness PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
  add_library(logitless_conformance STATIC ${harness})
  target_include_directories(logitless_conformance PUBLIC ${PROJECT_SOURCE_DIR} ${CMAKE_CURRENT_LIST_DIR})
  target_link_libraries(logitless_conformance PUBLIC logitless_static)
  target_compile_options(logitless_conformance PRIVATE -Wall -Wextra $<$<BOOL:${LOGITLESS_WERROR}>:-Werror>)
endif()
