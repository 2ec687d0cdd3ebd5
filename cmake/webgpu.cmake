# The WebGPU backend, where the headers of wgpu-native are (scripts/fetch_webgpu). Its library is found at run time. The
# shaders are compiled in as text.
set(LOGITLESS_WEBGPU AUTO CACHE STRING "The WebGPU backend: AUTO (where webgpu.h is found), ON or OFF")
set_property(CACHE LOGITLESS_WEBGPU PROPERTY STRINGS AUTO ON OFF)

set(LOGITLESS_WITH_WEBGPU OFF)
if(NOT LOGITLESS_WEBGPU STREQUAL OFF AND NOT WIN32)
  find_path(LOGITLESS_WEBGPU_INCLUDE webgpu.h HINTS ${PROJECT_SOURCE_DIR}/third_party/webgpu NO_DEFAULT_PATH
            DOC "Where webgpu.h and wgpu.h of wgpu-native are")
  mark_as_advanced(LOGITLESS_WEBGPU_INCLUDE)
  if(LOGITLESS_WEBGPU_INCLUDE)
    set(LOGITLESS_WITH_WEBGPU ON)
  elseif(LOGITLESS_WEBGPU STREQUAL ON)
    message(FATAL_ERROR "LOGITLESS_WEBGPU is ON and no webgpu.h was found (scripts/fetch_webgpu); allowed: AUTO, ON, OFF")
  else()
    message(STATUS "logitless: no webgpu.h found (scripts/fetch_webgpu), the WebGPU backend is left out")
  endif()
endif()
if(NOT LOGITLESS_WITH_WEBGPU)
  return()
endif()

file(GLOB_RECURSE LOGITLESS_SHADERS CONFIGURE_DEPENDS src/webgpu/shaders/*.wgsl)
set(shaders ${PROJECT_BINARY_DIR}/webgpu_shaders.cpp)
add_custom_command(OUTPUT ${shaders} DEPENDS ${LOGITLESS_SHADERS} cmake/embed_shaders.cmake VERBATIM
                   COMMAND ${CMAKE_COMMAND} -D "FILES=${LOGITLESS_SHADERS}" -D OUTPUT=${shaders}
                           -P ${PROJECT_SOURCE_DIR}/cmake/embed_shaders.cmake)
file(GLOB LOGITLESS_WEBGPU_SOURCES CONFIGURE_DEPENDS src/webgpu/*.cpp)
add_library(logitless_webgpu_objects OBJECT ${LOGITLESS_WEBGPU_SOURCES} ${shaders})
target_include_directories(logitless_webgpu_objects PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR})
target_include_directories(logitless_webgpu_objects SYSTEM PRIVATE ${LOGITLESS_WEBGPU_INCLUDE})
target_compile_definitions(logitless_webgpu_objects PRIVATE LOGITLESS_WITH_WEBGPU)
target_compile_options(logitless_webgpu_objects PRIVATE -Wall -Wextra -Wno-overloaded-virtual
                                                        $<$<BOOL:${LOGITLESS_WERROR}>:-Werror>)
