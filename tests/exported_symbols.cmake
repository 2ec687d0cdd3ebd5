# SPDX-License-Identifier: Apache-2.0
# The shared library exports the functions that c.h declares, versioned, and nothing else.
file(READ ${HEADER} text)
string(REGEX MATCHALL "LOGITLESS_API int32_t logitless_[a-z_]+" declarations "${text}")
list(TRANSFORM declarations REPLACE "LOGITLESS_API int32_t " "")
list(SORT declarations)

execute_process(COMMAND ${NM} --dynamic --defined-only ${LIBRARY} OUTPUT_VARIABLE text COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "[^\n]+" lines "${text}")
set(exports)
foreach(line IN LISTS lines)
  string(REGEX REPLACE "^[0-9a-f]+ [A-Za-z] " "" symbol "${line}")
  if(symbol MATCHES "^LOGITLESS_[0-9]+(@@LOGITLESS_[0-9]+)?$")
    continue()  # the version itself
  endif()
  if(NOT symbol MATCHES "@@LOGITLESS_[0-9]+$")
    message(SEND_ERROR "exported without a version: ${line}")
  endif()
  string(REGEX REPLACE "@@.*" "" symbol "${symbol}")
  list(APPEND exports ${symbol})
endforeach()
list(SORT exports)

list(LENGTH declarations count)
if(count EQUAL 0 OR NOT "${exports}" STREQUAL "${declarations}")
  message(FATAL_ERROR "declared: ${declarations}\nexported: ${exports}")
endif()
message(STATUS "exported: ${exports}")
