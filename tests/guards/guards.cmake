# What shows whether moving code about changed something (CONTRIBUTING.md, Guards), and that each would show it.
find_package(Python3 REQUIRED COMPONENTS Interpreter)

if(LOGITLESS_CUDA_LISTING AND LOGITLESS_HAS_SM90A)
  add_test(NAME guards.kernels
           COMMAND Python3::Interpreter -B ${CMAKE_CURRENT_LIST_DIR}/kernels_test.py
                   "$<FILTER:$<TARGET_OBJECTS:logitless_cuda_objects>,INCLUDE,/copy_panel\\.cu\\.o$>")
endif()
