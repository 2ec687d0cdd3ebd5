# find_package(logitless CONFIG): logitless::logitless (shared) and logitless::logitless_static.
include(CMakeFindDependencyMacro)
find_dependency(Threads)
include(${CMAKE_CURRENT_LIST_DIR}/logitlessTargets.cmake)
