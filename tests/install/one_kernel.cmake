# Configures the project in SOURCE, which holds the library, in FOLDER with OPTIONS, and compiles one of its kernels.
execute_process(COMMAND ${CMAKE_COMMAND} -S ${SOURCE} -B ${FOLDER} -G ${GENERATOR} ${OPTIONS} COMMAND_ERROR_IS_FATAL ANY)
if(GENERATOR STREQUAL Ninja)
  set(object _deps/logitless-build/CMakeFiles/logitless_cuda_objects.dir/src/cuda/scale.cu.o)
  execute_process(COMMAND ${CMAKE_COMMAND} --build ${FOLDER} --target ${object} COMMAND_ERROR_IS_FATAL ANY)
endif()
