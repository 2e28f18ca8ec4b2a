# Headers, zstd and what the tests need: from Debian's packages, or from a kit folder
# (scripts/gpu-kit) on machines that have no package registry.
find_package(Threads REQUIRED)
add_library(lawson_deps INTERFACE)
if(LAWSON_KIT)
  target_include_directories(lawson_deps SYSTEM INTERFACE ${LAWSON_KIT}/include)
  set(ZSTD_LIBRARY ${LAWSON_KIT}/lib/libzstd.a)
  if(LAWSON_TESTS)
    set(INSTALL_GTEST OFF)
    add_subdirectory(${LAWSON_KIT}/googletest ${CMAKE_BINARY_DIR}/googletest EXCLUDE_FROM_ALL)
    if(NOT TARGET GTest::gtest)
      add_library(GTest::gtest ALIAS gtest)
      add_library(GTest::gtest_main ALIAS gtest_main)
    endif()
  endif()
else()
  find_package(nlohmann_json 3.11 REQUIRED)
  find_package(fmt 9 REQUIRED)
  find_path(XXHASH_INCLUDE_DIR xxhash.h REQUIRED)
  find_path(ZSTD_INCLUDE_DIR zstd.h REQUIRED)
  # The static one is not compiled for shared libraries; it links into liblawson.so because the
  # version script makes its symbols local.
  find_library(ZSTD_LIBRARY NAMES libzstd.a zstd REQUIRED)
  find_path(CLI11_INCLUDE_DIR CLI/CLI.hpp REQUIRED)
  target_include_directories(lawson_deps SYSTEM INTERFACE
    ${XXHASH_INCLUDE_DIR} ${ZSTD_INCLUDE_DIR} ${CLI11_INCLUDE_DIR}
    $<TARGET_PROPERTY:nlohmann_json::nlohmann_json,INTERFACE_INCLUDE_DIRECTORIES>
    $<TARGET_PROPERTY:fmt::fmt-header-only,INTERFACE_INCLUDE_DIRECTORIES>)
  if(LAWSON_TESTS)
    find_package(GTest REQUIRED)
  endif()
endif()
target_link_libraries(lawson_deps INTERFACE ${ZSTD_LIBRARY})
if(LAWSON_CUDNN)
  include(LawsonCudnn)
endif()

# fmt is compiled once: header-only use costs every other translation unit seconds.
add_library(lawson_fmt STATIC ${CMAKE_CURRENT_LIST_DIR}/deps/fmt.cpp)
target_include_directories(lawson_fmt SYSTEM PRIVATE
  $<TARGET_PROPERTY:lawson_deps,INTERFACE_SYSTEM_INCLUDE_DIRECTORIES>)
target_link_libraries(lawson_deps INTERFACE lawson_fmt)
