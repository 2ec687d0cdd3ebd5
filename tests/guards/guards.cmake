# The guards detect unintended changes when code moves (CONTRIBUTING.md, Guards); other tests check
# that each guard does.
find_package(Python3 REQUIRED COMPONENTS Interpreter)

if(LOGITLESS_CUDA_LISTING AND LOGITLESS_HAS_SM90A)
  add_test(NAME guards.kernels
           COMMAND Python3::Interpreter -B ${CMAKE_CURRENT_LIST_DIR}/kernels_test.py
                   "$<FILTER:$<TARGET_OBJECTS:logitless_cuda_objects>,INCLUDE,/copy_panel\\.cu\\.o$>")
endif()

add_test(NAME guards.golden COMMAND Python3::Interpreter -B ${CMAKE_CURRENT_LIST_DIR}/golden_test.py)

# Two guards compare what every planner decides and what every call launches with recorded output.
# They need no device.
if(LOGITLESS_WITH_CUDA AND LOGITLESS_WITH_WEBGPU)
  add_library(guard_calls OBJECT guards/plan_calls.cpp)
  add_executable(guard_plans guards/guard_plans.cpp guards/plan_facts.cpp)
  add_executable(guard_launches guards/guard_launches.cpp guards/transcript.cpp)
  find_package(fmt REQUIRED)
  target_link_libraries(guard_launches PRIVATE fmt::fmt)
  link_conformance(guard_calls)
  target_compile_options(guard_calls PRIVATE -O1)
  foreach(name plans launches)
    link_conformance(guard_${name})
    target_compile_options(guard_${name} PRIVATE -O1)
    target_link_libraries(guard_${name} PRIVATE guard_calls)
    add_test(NAME guards.${name} COMMAND Python3::Interpreter -B ${CMAKE_CURRENT_LIST_DIR}/golden.py $<TARGET_FILE:guard_${name}>)
    set_tests_properties(guards.${name} PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 300)
  endforeach()
endif()

# The program of scripts/compare-bits. It runs the case table against a library that it uses only
# through the C interface, and that the script chooses by the loader's path.
set(sources guards/bits.cpp guards/bits_webgpu.cpp)
foreach(part cases data fixture judge memory)
  list(APPEND sources support/${part}.cpp)
endforeach()
foreach(part divergence numbers reference row row_loss statistics tokens top)
  list(APPEND sources ${PROJECT_SOURCE_DIR}/src/reference/${part}.cpp)
endforeach()
if(LOGITLESS_WITH_WEBGPU)
  list(APPEND sources ${PROJECT_SOURCE_DIR}/src/webgpu/library.cpp ${PROJECT_SOURCE_DIR}/src/webgpu/native.cpp)
endif()
add_executable(guard_bits ${sources} ${PROJECT_SOURCE_DIR}/src/call.cpp)
if(CMAKE_CXX_FLAGS MATCHES "-fsanitize")
  set_target_properties(guard_bits PROPERTIES EXCLUDE_FROM_ALL ON)
endif()
set_target_properties(guard_bits PROPERTIES SKIP_BUILD_RPATH ON)
target_include_directories(guard_bits PRIVATE ${PROJECT_SOURCE_DIR})
target_link_libraries(guard_bits PRIVATE logitless hwy::hwy ${CMAKE_DL_LIBS})
target_compile_options(guard_bits PRIVATE ${LOGITLESS_TEST_OPTIONS} $<$<CONFIG:Release>:-O2>)
if(LOGITLESS_WITH_WEBGPU)
  target_include_directories(guard_bits SYSTEM PRIVATE ${LOGITLESS_WEBGPU_INCLUDE})
  target_compile_definitions(guard_bits PRIVATE LOGITLESS_WITH_WEBGPU
                             LOGITLESS_WEBGPU_LIBRARY_FILE="${LOGITLESS_WEBGPU_LIBRARY_FILE}"
                             LOGITLESS_WEBGPU_DRIVER="${LOGITLESS_WEBGPU_DRIVER}")
endif()

if(CMAKE_SYSTEM_NAME STREQUAL Linux AND NOT CMAKE_CROSSCOMPILING AND NOT CMAKE_CXX_FLAGS MATCHES "-fsanitize")
  add_test(NAME guards.abi
           COMMAND Python3::Interpreter -B ${CMAKE_CURRENT_LIST_DIR}/abi_test.py ${PROJECT_SOURCE_DIR}/include/logitless/c.h
                   $<TARGET_FILE:logitless> ${CMAKE_C_COMPILER} ${CMAKE_NM})
endif()

# Limits how much one must read to understand a kernel.
add_test(NAME guards.reading COMMAND Python3::Interpreter -B ${CMAKE_CURRENT_LIST_DIR}/reading_test.py)
