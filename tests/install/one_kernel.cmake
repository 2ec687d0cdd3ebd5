# Configures the project in SOURCE, which contains the library, in FOLDER with OPTIONS, and compiles
# its own file and, with Ninja, one of the library's kernels.
execute_process(COMMAND ${CMAKE_COMMAND} -S ${SOURCE} -B ${FOLDER} -G ${GENERATOR} ${OPTIONS} COMMAND_ERROR_IS_FATAL ANY)
set(targets own_objects)
if(GENERATOR STREQUAL Ninja)
  list(APPEND targets _deps/logitless-build/CMakeFiles/logitless_cuda_objects.dir/src/cuda/scale.cu.o)
endif()
execute_process(COMMAND ${CMAKE_COMMAND} --build ${FOLDER} --target ${targets} COMMAND_ERROR_IS_FATAL ANY)
