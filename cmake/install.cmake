# What `cmake --install` installs besides the command line: headers, both libraries, the CMake package, the pkg-config file and
# the licence. All are relocatable, except CUDA's folder in the pkg-config file.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/logitless)

install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/logitless DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING
        PATTERN *.h)
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(TARGETS logitless logitless_static EXPORT logitlessTargets)
install(EXPORT logitlessTargets NAMESPACE logitless:: DESTINATION ${package_dir})

write_basic_package_version_file(${PROJECT_BINARY_DIR}/logitlessConfigVersion.cmake COMPATIBILITY SameMinorVersion)
# What a C++ compiler links by itself, for those who link the static library with a C compiler.
set(LOGITLESS_CXX_LIBRARIES ${CMAKE_CXX_IMPLICIT_LINK_LIBRARIES})
list(FILTER LOGITLESS_CXX_LIBRARIES INCLUDE REGEX "^(stdc\\+\\+|c\\+\\+|c\\+\\+abi|m)$")
list(REMOVE_DUPLICATES LOGITLESS_CXX_LIBRARIES)
list(TRANSFORM LOGITLESS_CXX_LIBRARIES PREPEND -l OUTPUT_VARIABLE LOGITLESS_PC_CXX)
list(JOIN LOGITLESS_PC_CXX " " LOGITLESS_PC_CXX)
list(JOIN LOGITLESS_CXX_LIBRARIES " " LOGITLESS_CXX_LIBRARIES)
configure_file(${PROJECT_SOURCE_DIR}/cmake/logitlessConfig.cmake.in ${PROJECT_BINARY_DIR}/logitlessConfig.cmake @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/logitlessConfig.cmake ${PROJECT_BINARY_DIR}/logitlessConfigVersion.cmake
        DESTINATION ${package_dir})

set(LOGITLESS_PC_CUDA)
set(LOGITLESS_PC_CUDA_DIR)
if(LOGITLESS_WITH_CUDA)
  # The only absolute path, because the toolkit has no pkg-config file for its static library. It is a variable, so that
  # another machine can set it with --define-variable=cudalibdir=FOLDER.
  set(LOGITLESS_PC_CUDA_DIR "cudalibdir=${CUDAToolkit_LIBRARY_DIR}\n")
  set(LOGITLESS_PC_CUDA "-L\${cudalibdir} -lcudart_static -ldl -lrt ")
endif()
file(RELATIVE_PATH LOGITLESS_PC_PREFIX /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(${PROJECT_SOURCE_DIR}/cmake/logitless.pc.in ${PROJECT_BINARY_DIR}/logitless.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/logitless.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
