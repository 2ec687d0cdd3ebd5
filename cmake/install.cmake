# What `cmake --install` brings: headers, both libraries, the CMake package and the pkg-config file. All relocatable.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/logitless)

install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/logitless DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING
        PATTERN *.h)
install(TARGETS logitless logitless_static EXPORT logitlessTargets)
install(EXPORT logitlessTargets NAMESPACE logitless:: DESTINATION ${package_dir})

write_basic_package_version_file(${PROJECT_BINARY_DIR}/logitlessConfigVersion.cmake COMPATIBILITY SameMinorVersion)
configure_file(${PROJECT_SOURCE_DIR}/cmake/logitlessConfig.cmake.in ${PROJECT_BINARY_DIR}/logitlessConfig.cmake @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/logitlessConfig.cmake ${PROJECT_BINARY_DIR}/logitlessConfigVersion.cmake
        DESTINATION ${package_dir})

set(LOGITLESS_PC_CUDA)
if(LOGITLESS_WITH_CUDA)  # the one path of this machine's: the toolkit has no pkg-config file for the static library
  set(LOGITLESS_PC_CUDA "-L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt ")
endif()
file(RELATIVE_PATH LOGITLESS_PC_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(${PROJECT_SOURCE_DIR}/cmake/logitless.pc.in ${PROJECT_BINARY_DIR}/logitless.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/logitless.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
