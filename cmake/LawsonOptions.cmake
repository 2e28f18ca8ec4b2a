# Flags that every target of the project gets, through lawson_options.
add_library(lawson_options INTERFACE)
target_compile_options(lawson_options INTERFACE
  -Wall -Wextra -Wpedantic -Werror
  $<$<COMPILE_LANGUAGE:CXX>:-Wshadow -Wconversion -Wsign-conversion -Wnon-virtual-dtor
    -Woverloaded-virtual -Wimplicit-fallthrough>)
# g++ 12 sees an overlapping copy in `literal + string` where there is none (GCC bug 105651).
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(lawson_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
endif()
if(LAWSON_SANITIZE)
  target_compile_options(lawson_options INTERFACE
    -fsanitize=${LAWSON_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -O1 -g1)
  target_link_options(lawson_options INTERFACE -fsanitize=${LAWSON_SANITIZE})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # GCC's manual: with sanitizers the warnings that follow data flow have false positives.
    target_compile_options(lawson_options INTERFACE -Wno-maybe-uninitialized)
  endif()
endif()

# The CPU engine's kernels ask for -O3 themselves; elsewhere it costs compile time only.
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -DNDEBUG")
set(CMAKE_C_FLAGS_RELEASE "-O2 -DNDEBUG")

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM)
  set(CMAKE_C_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
endif()

# cudnn_frontend.h costs about 1 minute and 2 GB: never two of these compiles at once.
set_property(GLOBAL APPEND PROPERTY JOB_POOLS heavy_compile=1)
