# `cmake --install`: the library, its headers, the tool, the worker and what it opens; and the package
# files with which another project's find_package(lawson) gives the target lawson::lawson.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/lawson)

install(TARGETS lawson EXPORT lawson-targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/lawson DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  FILES_MATCHING PATTERN "*.h" PATTERN "*.hpp")
# The library finds these beside its own folder, or one level up (src/capi/context.cpp).
foreach(part lawson-worker lawson-nodriver lawson-nocublaslt)
  if(TARGET ${part})
    install(TARGETS ${part}
      RUNTIME DESTINATION libexec/lawson LIBRARY DESTINATION libexec/lawson)
  endif()
endforeach()

install(EXPORT lawson-targets NAMESPACE lawson:: FILE lawsonTargets.cmake
  DESTINATION ${package_dir})
configure_package_config_file(cmake/lawsonConfig.cmake.in
  ${CMAKE_CURRENT_BINARY_DIR}/lawsonConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/lawsonConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES
  ${CMAKE_CURRENT_BINARY_DIR}/lawsonConfig.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/lawsonConfigVersion.cmake
  DESTINATION ${package_dir})
