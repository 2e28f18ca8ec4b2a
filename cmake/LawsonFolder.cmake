# One static library per source folder, with an include root of its own made of symlinks, so that
# `#include "ir/graph.h"` compiles only in a target that links lawson_ir: the allowed arrows of
# docs/design.md are exactly the link lines below src/, and any other include fails the build.
#
#   lawson_folder(ir SOURCES graph.cpp ... LINKS lawson_base)
#   lawson_folder(cpu PATH engine/cpu SOURCES ... LINKS lawson_engine)
#   lawson_folder(engine PATH engine FILES engine.h device.h SOURCES device.cpp LINKS lawson_ir)
#
# PATH   the folder below src/ (default: the name); its headers are included by that path.
# FILES  expose only these headers (for a folder that has other folders inside).
# LINKS  folders that may be included here and by whoever links this one.
# PRIVATE  libraries used by the sources only.
function(lawson_folder name)
  cmake_parse_arguments(ARG "" "PATH" "SOURCES;LINKS;PRIVATE;FILES" ${ARGN})
  if(NOT ARG_PATH)
    set(ARG_PATH ${name})
  endif()
  set(root ${CMAKE_BINARY_DIR}/include-roots/${name})
  set(source ${CMAKE_SOURCE_DIR}/src/${ARG_PATH})
  if(ARG_FILES)
    file(MAKE_DIRECTORY ${root}/${ARG_PATH})
    foreach(file IN LISTS ARG_FILES)
      file(CREATE_LINK ${source}/${file} ${root}/${ARG_PATH}/${file} SYMBOLIC)
    endforeach()
  else()
    cmake_path(GET ARG_PATH PARENT_PATH parent)
    file(MAKE_DIRECTORY ${root}/${parent})
    file(CREATE_LINK ${source} ${root}/${ARG_PATH} SYMBOLIC)
  endif()
  list(TRANSFORM ARG_SOURCES PREPEND ${source}/ REGEX "^[^/]")
  add_library(lawson_${name} STATIC ${ARG_SOURCES})
  target_include_directories(lawson_${name} PUBLIC ${root})
  target_link_libraries(lawson_${name}
    PUBLIC lawson_options ${ARG_LINKS}
    PRIVATE ${ARG_PRIVATE})
endfunction()
