# Highway: the tarball that scripts/fetch_highway brought, else upstream's; or the target `hwy` of a project that holds us
# and has its own. Private, static, hidden. URL and hash change together.
set(LOGITLESS_HIGHWAY_HASH 07b3c1ba2c1096878a85a31a5b9b3757427af963b1141ca904db2f9f4afe0bc2)
set(default_url https://github.com/google/highway/archive/refs/tags/1.3.0.tar.gz)
if(EXISTS ${PROJECT_SOURCE_DIR}/third_party/highway-1.3.0.tar.gz)
  set(default_url ${PROJECT_SOURCE_DIR}/third_party/highway-1.3.0.tar.gz)
elseif(EXISTS ${PROJECT_SOURCE_DIR}/third_party/highway-1.2.0.tar.gz)
  set(LOGITLESS_HIGHWAY_HASH 7e0be78b8318e8bdbf6fa545d2ecb4c90f947df03f7aadc42c1967f019e63343)
  set(default_url ${PROJECT_SOURCE_DIR}/third_party/highway-1.2.0.tar.gz)
endif()
set(LOGITLESS_HIGHWAY_URL ${default_url} CACHE STRING "Highway's release tarball: a URL or a path")

# A function, so that what Highway is told stays out of the cache of a project that holds us.
function(logitless_add_highway)
  include(FetchContent)
  set(CMAKE_POLICY_DEFAULT_CMP0077 NEW)  # Highway's options obey these variables
  set(CMAKE_POLICY_DEFAULT_CMP0126 NEW)
  set(HWY_ENABLE_TESTS OFF)
  set(HWY_ENABLE_EXAMPLES OFF)
  set(HWY_ENABLE_CONTRIB OFF)
  set(HWY_ENABLE_INSTALL OFF)
  set(HWY_FORCE_STATIC_LIBS ON)
  # SYSTEM comes first: CMake 3.25 takes it for a part of a keyword's value anywhere else.
  FetchContent_Declare(highway SYSTEM URL ${LOGITLESS_HIGHWAY_URL} URL_HASH SHA256=${LOGITLESS_HIGHWAY_HASH}
                       DOWNLOAD_EXTRACT_TIMESTAMP TRUE)
  FetchContent_MakeAvailable(highway)
  set_target_properties(hwy_test hwy_list_targets PROPERTIES EXCLUDE_FROM_ALL ON)
endfunction()
if(NOT TARGET hwy)
  logitless_add_highway()
endif()
if(NOT TARGET hwy::hwy)
  add_library(hwy::hwy ALIAS hwy)
endif()
if(LOGITLESS_HIGHWAY_URL MATCHES "1\\.2\\.0")
  target_compile_definitions(hwy INTERFACE HWY_AVX10_2=0)  # a target it does not know yet
endif()

set(LOGITLESS_HIGHWAY_DEFINITIONS)
if(LOGITLESS_CPU_TARGETS STREQUAL baseline)
  set(LOGITLESS_HIGHWAY_DEFINITIONS HWY_COMPILE_ONLY_STATIC)
elseif(LOGITLESS_CPU_TARGETS STREQUAL some)  # x86: SSE2, AVX2, AVX3_ZEN4 and AVX3_SPR stay; other machines keep all
  set(LOGITLESS_HIGHWAY_DEFINITIONS
      "HWY_DISABLED_TARGETS=(HWY_SSSE3|HWY_SSE4|HWY_AVX3|HWY_AVX3_DL|HWY_AVX10_2)")
elseif(NOT LOGITLESS_CPU_TARGETS STREQUAL all)
  message(FATAL_ERROR "LOGITLESS_CPU_TARGETS is \"${LOGITLESS_CPU_TARGETS}\"; allowed: all, some, baseline")
endif()
