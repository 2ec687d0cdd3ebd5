# If Highway cannot be fetched, configuring stops at once with one sentence that says what to do.
set(wrong ${CMAKE_CURRENT_LIST_DIR}/highway.cmake)
foreach(url file:///nonexistent/highway.tar.gz /nonexistent/highway.tar.gz ${wrong})
  execute_process(COMMAND ${CMAKE_COMMAND} -S ${SOURCE} -B ${OUT} -D CMAKE_C_COMPILER=${C} -D CMAKE_CXX_COMPILER=${CXX}
                          -D LOGITLESS_CUDA=OFF -D LOGITLESS_HIGHWAY_URL=${url}
                  TIMEOUT 60 RESULT_VARIABLE code OUTPUT_VARIABLE output ERROR_VARIABLE output)
  string(REGEX REPLACE "[ \n]+" " " words "${output}")  # CMake breaks lines anywhere
  string(REGEX MATCHALL "CMake Error" errors "${output}")
  list(LENGTH errors count)
  if(code STREQUAL 0 OR NOT count EQUAL 1 OR
     NOT words MATCHES "Highway could not be had from ${url} .*scripts/fetch_highway.*the release tarball of Highway 1.3.0")
    message(FATAL_ERROR "${url}: ended with ${code} and ${count} errors\n${output}")
  endif()
endforeach()
