# Tests of the machine code for Hopper and of ptxas's messages, one source file at a time, from a
# build that keeps both (LOGITLESS_CUDA_LISTING). Compilers before CUDA 12.8 are left out, because
# ptxas 12.4 fails (docs/kernels/cuda.md).
find_package(Python3 REQUIRED COMPONENTS Interpreter)
function(add_sass_test name)
  add_test(NAME ${name} COMMAND Python3::Interpreter -B ${CMAKE_CURRENT_SOURCE_DIR}/cuda/sass_test.py ${ARGN})
  set_tests_properties(${name} PROPERTIES LABELS sass SKIP_RETURN_CODE 77 TIMEOUT 600)
endfunction()

if(NOT LOGITLESS_WITH_CUDA)
  add_sass_test(sass)
elseif(LOGITLESS_CUDA_LISTING AND CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
  file(GLOB_RECURSE kernels CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/cuda/*.cu)
  foreach(source ${kernels})
    cmake_path(GET source STEM name)
    cmake_path(GET source FILENAME file)
    if(name IN_LIST LOGITLESS_CUDA_UNOPTIMIZED)
      continue()
    endif()
    add_sass_test(sass.${name} "$<FILTER:$<TARGET_OBJECTS:logitless_cuda_objects>,INCLUDE,/${file}\\.o$>")
  endforeach()
endif()
