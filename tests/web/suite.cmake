# Builds the conformance suite as a wasm module, for a page that lends it a device
# (tests/web/suite.js), with the native suite's cases and bounds, and some of its tests. The suite
# waits for the device through JSPI, which the library itself never needs.
#   cmake --build build/web --target suite        -> build/web/suite/suite.wasm
find_path(LOGITLESS_GTEST_SOURCE src/gtest-all.cc PATHS /usr/src/googletest/googletest NO_DEFAULT_PATH
          NO_CMAKE_FIND_ROOT_PATH DOC "GoogleTest's sources (Debian: googletest)")
mark_as_advanced(LOGITLESS_GTEST_SOURCE)
if(NOT LOGITLESS_GTEST_SOURCE)
  return()
endif()
set(suite_sources ${root}/src/c_api.cpp ${root}/src/run.cpp ${root}/src/reference/backend.cpp ${root}/tests/web/suite.cpp)
foreach(name cases data fixture judge memory shards simulated)
  list(APPEND suite_sources ${root}/tests/support/${name}.cpp)
endforeach()
foreach(name chosen combine conformance divergence edges nonfinite nonfinite_state invariants shards)
  list(APPEND suite_sources ${root}/tests/conformance/${name}_test.cpp)
endforeach()
add_executable(suite EXCLUDE_FROM_ALL ${suite_sources} $<TARGET_OBJECTS:core> ${LOGITLESS_GTEST_SOURCE}/src/gtest-all.cc)
set_target_properties(suite PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/suite)
target_include_directories(suite PRIVATE ${root} ${root}/include)
target_include_directories(suite SYSTEM PRIVATE ${LOGITLESS_GTEST_SOURCE}/include ${LOGITLESS_GTEST_SOURCE})
target_compile_definitions(suite PRIVATE LOGITLESS_WITH_WEBGPU GTEST_HAS_PTHREAD=0 GTEST_HAS_STREAM_REDIRECTION=0 GTEST_HAS_DEATH_TEST=0
                                         GTEST_HAS_EXCEPTIONS=0 GTEST_HAS_FILE_SYSTEM=0 _WASI_EMULATED_SIGNAL)
# A throw ends the page's call, and suite.cpp reports it. Tests compile with little optimization,
# the code under test is in `core`.
target_compile_options(suite PRIVATE -fno-rtti -fignore-exceptions -ffp-contract=off -O1)
target_link_options(suite PRIVATE -mexec-model=reactor -Wl,--strip-all,--gc-sections,--stack-first,-z,stack-size=4194304)
target_link_libraries(suite PRIVATE wasi-emulated-signal)
