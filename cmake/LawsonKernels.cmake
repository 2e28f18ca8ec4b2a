# Lawson's own CUDA kernels, compiled to one fat binary and embedded as bytes:
#
#   lawson_embed_kernels(VARIABLE steps.cu DEPENDS steps_rules.h ...)
#
# sets VARIABLE to the generated source that defines steps_image(). By nvcc of the CUDA toolkit; or,
# where there is none, from the kit (scripts/gpu-kit), whose file has the hash of these very sources
# in its name; else the image is empty, and what needs a kernel is unavailable at run time.
option(LAWSON_CUDA_KERNELS "Build Lawson's own CUDA kernels (with nvcc, or from the kit)" ON)

set(lawson_nvcc_places $ENV{CUDA_HOME} $ENV{CUDA_PATH} /usr/local/cuda)
list(TRANSFORM lawson_nvcc_places APPEND /bin)
find_program(LAWSON_NVCC nvcc PATHS ${lawson_nvcc_places})

# Machine code for one GPU of each kind in use, and PTX for the driver to compile for all others.
function(lawson_kernel_flags variable)
  execute_process(COMMAND ${LAWSON_NVCC} --list-gpu-code OUTPUT_VARIABLE known ERROR_QUIET)
  execute_process(COMMAND ${LAWSON_NVCC} --help OUTPUT_VARIABLE help ERROR_QUIET)
  set(flags -gencode=arch=compute_80,code=compute_80)
  foreach(architecture IN ITEMS 80 90 100)
    if(known MATCHES "sm_${architecture}\n")
      list(APPEND flags -gencode=arch=compute_${architecture},code=sm_${architecture})
    endif()
  endforeach()
  if(help MATCHES "--compress-mode")  # CUDA 12.8 or later; a fifth of the size
    list(APPEND flags --compress-mode=size)
  endif()
  set(${variable} ${flags} PARENT_SCOPE)
endfunction()

function(lawson_embed_kernels variable source)
  cmake_parse_arguments(ARG "" "" "DEPENDS" ${ARGN})
  cmake_path(GET source STEM name)
  set(sources ${CMAKE_CURRENT_SOURCE_DIR}/${source} ${ARG_DEPENDS})
  set(text "")
  foreach(file IN LISTS sources)
    file(SHA256 ${file} hash)
    string(APPEND text ${hash})
  endforeach()
  string(SHA256 hash "${text}")
  string(SUBSTRING ${hash} 0 16 hash)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${sources})

  set(image ${CMAKE_CURRENT_BINARY_DIR}/${name}-${hash}.fatbin)
  set(carried ${LAWSON_KIT}/kernels/${name}-${hash}.fatbin)
  if(NOT LAWSON_CUDA_KERNELS)
    message(STATUS "CUDA kernels: left out (LAWSON_CUDA_KERNELS=OFF)")
    set(image "")
  elseif(LAWSON_NVCC)
    message(STATUS "CUDA kernels: with ${LAWSON_NVCC}")
    lawson_kernel_flags(flags)
    # Not contracted to fused multiply-adds: the host computes the same bits.
    add_custom_command(OUTPUT ${image} DEPENDS ${sources}
      COMMAND ${LAWSON_NVCC} -fatbin -O3 -std=c++20 -fmad=false ${flags}
        -I${CMAKE_SOURCE_DIR}/src ${CMAKE_CURRENT_SOURCE_DIR}/${source} -o ${image}
      COMMENT "Compiling CUDA kernels ${source}" VERBATIM)
  elseif(LAWSON_KIT AND EXISTS ${carried})
    message(STATUS "CUDA kernels: from the kit (no nvcc here)")
    set(image ${carried})
  else()
    message(STATUS "CUDA kernels: left out (no nvcc on PATH, in CUDA_HOME or in /usr/local/cuda)")
    set(image "")
  endif()

  set(embedded ${CMAKE_CURRENT_BINARY_DIR}/${name}_image.cpp)
  set(embed ${CMAKE_SOURCE_DIR}/cmake/LawsonEmbed.cmake)
  add_custom_command(OUTPUT ${embedded} DEPENDS ${image} ${embed}
    COMMAND ${CMAKE_COMMAND} -DIMAGE=${image} -DNAME=${name} -DOUTPUT=${embedded} -P ${embed}
    COMMENT "Embedding CUDA kernels" VERBATIM)
  set(${variable} ${embedded} PARENT_SCOPE)
endfunction()
