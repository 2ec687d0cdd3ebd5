# What every planner decides for thousands of calls, against what was recorded: plans.txt.xz. Planning is arithmetic, so any
# build serves that has every backend.
if(NOT LOGITLESS_WITH_CUDA OR NOT LOGITLESS_WITH_WEBGPU)
  return()
endif()
add_executable(guard_plans guards/guard_plans.cpp guards/plan_calls.cpp guards/plan_facts.cpp)
link_conformance(guard_plans)
add_test(NAME guards.plans COMMAND Python3::Interpreter -B ${CMAKE_CURRENT_SOURCE_DIR}/guards/plans.py $<TARGET_FILE:guard_plans>)
set_tests_properties(guards.plans PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 300)
