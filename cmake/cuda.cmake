# The CUDA backend, where a CUDA compiler is found. cudart is linked statically and cuBLASLt found at run time, so one
# library loads with and without a GPU.
set(LOGITLESS_CUDA AUTO CACHE STRING "The CUDA backend: AUTO (where nvcc is found and compiles for this machine), ON or OFF")
set_property(CACHE LOGITLESS_CUDA PROPERTY STRINGS AUTO ON OFF)
set(LOGITLESS_CUDA_ARCHITECTURES "" CACHE STRING
    "Architectures of the CUDA backend, as in CMAKE_CUDA_ARCHITECTURES; empty: those of the GPUs here, or all; all: all served")
foreach(architecture IN LISTS LOGITLESS_CUDA_ARCHITECTURES)
  if(LOGITLESS_CUDA_ARCHITECTURES STREQUAL all)
    break()
  elseif(NOT architecture MATCHES "^([0-9]+)[af]?(-real|-virtual)?$" OR CMAKE_MATCH_1 LESS 80)
    message(FATAL_ERROR "LOGITLESS_CUDA_ARCHITECTURES has \"${architecture}\"; allowed: all, or numbers from 80, like 80-real "
                        "(A100), 89-real (Ada), 90a-real (Hopper), 100-real and 120-real (Blackwell), with ; between them")
  endif()
endforeach()

option(LOGITLESS_CUDA_LISTING "Keep the kernels' machine code uncompressed and what ptxas says of it in OBJECT.log, for tests" OFF)

# What is built, and how long that takes on these cores; what ccache has takes none of it. The seconds are those of one
# core of an EPYC server, for everything and for the file that takes longest.
function(logitless_say what everything longest)
  set(cores $ENV{CMAKE_BUILD_PARALLEL_LEVEL})
  if(NOT cores GREATER 0)
    cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)
  endif()
  math(EXPR seconds "${everything} / ${cores}")
  if(seconds LESS longest)
    set(seconds ${longest})
  endif()
  math(EXPR minutes "(${seconds} + 59) / 60")
  set(line "logitless: ${what}: about ${minutes} min on ${cores} cores")
  message(STATUS "${line}")
  if(SKBUILD AND UNIX)  # pip keeps a build's output to itself, unless -v asks for it; who waits before a terminal is told
    execute_process(COMMAND sh -c "printf '\\n  %s\\n' \"$0\" >/dev/tty" "${line}" OUTPUT_QUIET ERROR_QUIET)
  endif()
endfunction()

set(LOGITLESS_WITH_CUDA OFF)
if(NOT LOGITLESS_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "LOGITLESS_CUDA is \"${LOGITLESS_CUDA}\"; allowed: AUTO, ON, OFF")
elseif(LOGITLESS_CUDA STREQUAL OFF)
  logitless_say("LOGITLESS_CUDA is OFF, the CUDA backend is left out" 60 20)
elseif(LOGITLESS_CUDA STREQUAL AUTO AND CMAKE_CROSSCOMPILING)
  logitless_say("another machine's library, the CUDA backend is left out" 60 20)
else()
  include(CheckLanguage)
  if(NOT CMAKE_CUDA_COMPILER)  # that none was found is remembered: one that was installed since would not be looked for
    unset(CMAKE_CUDA_COMPILER CACHE)
  endif()
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(LOGITLESS_WITH_CUDA ON)
  elseif(LOGITLESS_CUDA STREQUAL ON)
    message(FATAL_ERROR "LOGITLESS_CUDA is ON and no CUDA compiler was found; allowed: AUTO, ON, OFF")
  else()
    logitless_say("no CUDA compiler found, the CUDA backend is left out" 60 20)
  endif()
endif()
if(NOT LOGITLESS_WITH_CUDA)
  return()
endif()

set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
# The compiler's version is known after enable_language, which wants some architecture.
set(CMAKE_CUDA_ARCHITECTURES 80)
if(CCACHE_PROGRAM AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
endif()
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
# Machine code for every architecture served; PTX of the lowest and the highest for those to come. A device of 9.0 runs the
# code of sm_90a, so there is none of sm_90 beside it: of two that fit, the driver would choose.
set(CMAKE_CUDA_ARCHITECTURES 80 89-real 90a-real 100-real 120)
set(LOGITLESS_CUDA_COMPRESSES --compress-mode=size)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
  set(CMAKE_CUDA_ARCHITECTURES 80 89-real 90-virtual 90a-real)
  set(LOGITLESS_CUDA_COMPRESSES)
  message(STATUS "logitless: CUDA ${CMAKE_CUDA_COMPILER_VERSION}: no code for sm_100 and newer, and slow Hopper kernels")
endif()
set(why)
if(LOGITLESS_CUDA_ARCHITECTURES AND NOT LOGITLESS_CUDA_ARCHITECTURES STREQUAL all)
  set(CMAKE_CUDA_ARCHITECTURES ${LOGITLESS_CUDA_ARCHITECTURES})
elseif(NOT LOGITLESS_CUDA_ARCHITECTURES)
  include(${CMAKE_CURRENT_LIST_DIR}/gpus.cmake)
  logitless_find_gpus("${CMAKE_CUDA_ARCHITECTURES}" found why)
  set(why " (${why})")
  if(found)
    set(CMAKE_CUDA_ARCHITECTURES ${found})
  endif()
endif()
set(LOGITLESS_HAS_SM90A OFF)
if("90a" IN_LIST CMAKE_CUDA_ARCHITECTURES OR "90a-real" IN_LIST CMAKE_CUDA_ARCHITECTURES)
  set(LOGITLESS_HAS_SM90A ON)
  list(REMOVE_ITEM CMAKE_CUDA_ARCHITECTURES 90 90-real)
endif()
list(LENGTH CMAKE_CUDA_ARCHITECTURES count)
math(EXPR everything "60 + 30 * ${count}")
set(longest 40)
if(LOGITLESS_HAS_SM90A)
  math(EXPR everything "${everything} + 150")
  set(longest 90)
endif()
list(JOIN CMAKE_CUDA_ARCHITECTURES " " architectures)
logitless_say("CUDA ${CMAKE_CUDA_COMPILER_VERSION} (${CMAKE_CUDA_COMPILER}), kernels for ${architectures}${why}" ${everything} ${longest})

file(GLOB_RECURSE LOGITLESS_CUDA_SOURCES CONFIGURE_DEPENDS src/cuda/*.cu src/cuda/*.cpp)
add_library(logitless_cuda_objects OBJECT ${LOGITLESS_CUDA_SOURCES})
target_include_directories(logitless_cuda_objects PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR})
target_include_directories(logitless_cuda_objects SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
target_compile_definitions(logitless_cuda_objects PRIVATE LOGITLESS_WITH_CUDA
  LOGITLESS_HAS_SM90A=$<BOOL:${LOGITLESS_HAS_SM90A}>)
if(LOGITLESS_CUDA_LISTING)
  set(LOGITLESS_CUDA_COMPRESSES -Xptxas=-v --no-compress)
  set_target_properties(logitless_cuda_objects PROPERTIES
    CUDA_COMPILER_LAUNCHER "${PROJECT_SOURCE_DIR}/cmake/compile_and_log.sh;${CMAKE_CUDA_COMPILER_LAUNCHER}")
endif()
# As on the CPU, a product and a sum become one rounding where the source says fma and nowhere else.
set(LOGITLESS_CUDA_OPTIONS -fmad=false --expt-relaxed-constexpr)
target_compile_options(logitless_cuda_objects PRIVATE
  $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off -Wall -Wextra -Wno-overloaded-virtual>
  "$<$<COMPILE_LANGUAGE:CXX>:${LOGITLESS_FRAME_OPTIONS}>"
  "$<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${LOGITLESS_FRAMES}>>:-Xcompiler=-g1,-fno-optimize-sibling-calls>"
  "$<$<COMPILE_LANGUAGE:CUDA>:${LOGITLESS_CUDA_OPTIONS};${LOGITLESS_CUDA_COMPRESSES};-Xcompiler=-Wall>"
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${LOGITLESS_WERROR}>>:-Werror>
  $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${LOGITLESS_WERROR}>>:-Werror=all-warnings>)
