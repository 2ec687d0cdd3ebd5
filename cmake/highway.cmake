# Highway comes from the tarball in LOGITLESS_HIGHWAY_URL, else from scripts/fetch_highway's, else from upstream; or it is the
# target `hwy` of an enclosing project. It is linked privately and statically. URL and hash change together. The default URL
# is not cached, so that a run after scripts/fetch_highway finds its tarball even if an earlier run failed.
set(LOGITLESS_HIGHWAY_URL "" CACHE STRING
    "Highway's release tarball, a URL or a path; empty: the one in third_party, else upstream's")
set(LOGITLESS_HIGHWAY_HASH 07b3c1ba2c1096878a85a31a5b9b3757427af963b1141ca904db2f9f4afe0bc2)
set(upstream https://github.com/google/highway/archive/refs/tags/1.3.0.tar.gz)
set(highway_url "${LOGITLESS_HIGHWAY_URL}")
if(highway_url STREQUAL "" OR highway_url STREQUAL upstream)
  set(highway_url ${upstream})
  if(EXISTS ${PROJECT_SOURCE_DIR}/third_party/highway-1.3.0.tar.gz)
    set(highway_url ${PROJECT_SOURCE_DIR}/third_party/highway-1.3.0.tar.gz)
  elseif(EXISTS ${PROJECT_SOURCE_DIR}/third_party/highway-1.2.0.tar.gz)
    set(highway_url ${PROJECT_SOURCE_DIR}/third_party/highway-1.2.0.tar.gz)
  endif()
endif()
if(highway_url MATCHES "1\\.2\\.0")
  set(LOGITLESS_HIGHWAY_HASH 7e0be78b8318e8bdbf6fa545d2ecb4c90f947df03f7aadc42c1967f019e63343)
endif()

# Finds or downloads the tarball: FetchContent would retry an unreachable URL for minutes and then print a page of log.
function(logitless_find_highway result)
  set(${result} ${highway_url} PARENT_SCOPE)
  if(FETCHCONTENT_FULLY_DISCONNECTED OR FETCHCONTENT_SOURCE_DIR_HIGHWAY)
    return()  # FetchContent then downloads nothing
  endif()
  get_filename_component(file ${highway_url} ABSOLUTE)
  set(reason "there is no such file")
  if(highway_url MATCHES "^[A-Za-z]+://")
    set(file ${PROJECT_BINARY_DIR}/highway.tar.gz)
    set(hash)
    if(EXISTS ${file})
      file(SHA256 ${file} hash)
    endif()
    if(NOT hash STREQUAL LOGITLESS_HIGHWAY_HASH)
      file(DOWNLOAD ${highway_url} ${file} STATUS status TIMEOUT 60)
      list(GET status 0 code)
      list(GET status 1 reason)
      if(NOT code EQUAL 0)
        file(REMOVE ${file})
      endif()
    endif()
  endif()
  if(EXISTS ${file} AND NOT IS_DIRECTORY ${file})
    file(SHA256 ${file} hash)
    set(reason "its SHA-256 is ${hash}; allowed: ${LOGITLESS_HIGHWAY_HASH}")
    if(hash STREQUAL LOGITLESS_HIGHWAY_HASH)
      set(${result} ${file} PARENT_SCOPE)
      return()
    endif()
  endif()
  set(define -D)
  set(again "the same command again")
  if(SKBUILD)
    set(define "-C cmake.define.")
    set(again "pip again")
  endif()
  set(advice "run scripts/fetch_highway and then ${again}, or pass ${define}LOGITLESS_HIGHWAY_URL=FILE with")
  if("${highway_url}" STREQUAL "${LOGITLESS_HIGHWAY_URL}")
    set(advice "LOGITLESS_HIGHWAY_URL names it; allowed: none (${define}LOGITLESS_HIGHWAY_URL= after scripts/fetch_highway), or")
  endif()
  message(FATAL_ERROR "Highway could not be had from ${highway_url} (${reason}): ${advice} the release tarball of Highway 1.3.0")
endfunction()

# A function, so that the settings for Highway stay out of an enclosing project's cache.
function(logitless_add_highway)
  include(FetchContent)
  logitless_find_highway(tarball)
  set(CMAKE_POLICY_DEFAULT_CMP0077 NEW)  # Highway's options obey these variables
  set(CMAKE_POLICY_DEFAULT_CMP0126 NEW)
  set(HWY_ENABLE_TESTS OFF)
  set(HWY_ENABLE_EXAMPLES OFF)
  set(HWY_ENABLE_CONTRIB OFF)
  set(HWY_ENABLE_INSTALL OFF)
  set(HWY_FORCE_STATIC_LIBS ON)
  # SYSTEM comes first: anywhere else CMake 3.25 takes it for a part of another keyword's value.
  FetchContent_Declare(highway SYSTEM URL ${tarball} URL_HASH SHA256=${LOGITLESS_HIGHWAY_HASH}
                       DOWNLOAD_EXTRACT_TIMESTAMP TRUE)
  FetchContent_MakeAvailable(highway)
  set_target_properties(hwy_test hwy_list_targets PROPERTIES EXCLUDE_FROM_ALL ON)
  # This project calls neither file. per_target.cc is compiled for every instruction set, as long as all other files together.
  get_target_property(sources hwy SOURCES)
  list(FILTER sources EXCLUDE REGEX "/(per_target|nanobenchmark)\\.cc$")
  set_property(TARGET hwy PROPERTY SOURCES ${sources})
endfunction()
if(NOT TARGET hwy)
  logitless_add_highway()
endif()
if(NOT TARGET hwy::hwy)
  add_library(hwy::hwy ALIAS hwy)
endif()
if(highway_url MATCHES "1\\.2\\.0")
  target_compile_definitions(hwy INTERFACE HWY_AVX10_2=0)  # Highway 1.2.0 does not know this target
endif()

# Finds the best instruction set of this machine by the library's own rule (src/cpu/dispatch.cpp): Highway's detection among
# the targets that this compiler supports. The program is compiled once in a build folder and runs at every configuration,
# so that a folder copied to another machine is rebuilt for that machine.
function(logitless_find_native result)
  if(CMAKE_CROSSCOMPILING)
    message(FATAL_ERROR "LOGITLESS_CPU_TARGETS is \"native\" in a build for another machine; allowed: all, some, baseline")
  endif()
  get_target_property(folder hwy SOURCE_DIR)
  set(source ${PROJECT_SOURCE_DIR}/cmake/native_target.cpp)
  set(program ${PROJECT_BINARY_DIR}/native_target-${LOGITLESS_HIGHWAY_HASH})
  if(NOT EXISTS ${program} OR ${source} IS_NEWER_THAN ${program}
     OR ${PROJECT_SOURCE_DIR}/src/cpu/targets.h IS_NEWER_THAN ${program})
    try_compile(compiled ${PROJECT_BINARY_DIR}/native_target
                SOURCES ${source} ${folder}/hwy/targets.cc ${folder}/hwy/abort.cc
                CMAKE_FLAGS "-DINCLUDE_DIRECTORIES=${folder};${PROJECT_SOURCE_DIR}" CXX_STANDARD 20
                COPY_FILE ${program} OUTPUT_VARIABLE log)
    if(NOT compiled)
      message(FATAL_ERROR "LOGITLESS_CPU_TARGETS is \"native\", and ${source} could not be compiled:\n${log}")
    endif()
  endif()
  execute_process(COMMAND ${program} OUTPUT_VARIABLE name OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  set(${result} ${name} PARENT_SCOPE)
endfunction()

set(LOGITLESS_HIGHWAY_DEFINITIONS)
if(LOGITLESS_CPU_TARGETS STREQUAL baseline)
  set(LOGITLESS_HIGHWAY_DEFINITIONS HWY_COMPILE_ONLY_STATIC)
elseif(LOGITLESS_CPU_TARGETS STREQUAL some)  # x86: SSE2, AVX2, AVX3_ZEN4 and AVX3_SPR stay; other machines keep all
  set(LOGITLESS_HIGHWAY_DEFINITIONS
      "HWY_DISABLED_TARGETS=(HWY_SSSE3|HWY_SSE4|HWY_AVX3|HWY_AVX3_DL|HWY_AVX10_2)")
elseif(LOGITLESS_CPU_TARGETS STREQUAL native)  # the baseline stays, so that the library runs on every machine, if slowly
  logitless_find_native(native)
  set(LOGITLESS_HIGHWAY_DEFINITIONS "HWY_DISABLED_TARGETS=(~(HWY_${native}|HWY_BASELINE_TARGETS))")
  message(STATUS "logitless: CPU kernels for ${native}, this machine's, and the baseline")
elseif(NOT LOGITLESS_CPU_TARGETS STREQUAL all)
  message(FATAL_ERROR "LOGITLESS_CPU_TARGETS is \"${LOGITLESS_CPU_TARGETS}\"; allowed: all, some, baseline, native")
endif()
