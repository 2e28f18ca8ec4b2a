# NVTX version 3, header-only: ranges for NVIDIA's profilers. Optional, from wherever CUDA's headers are.
file(GLOB lawson_nvtx_places ${CMAKE_SOURCE_DIR}/.venv/lib/python3*/site-packages/nvidia/*/include)
find_path(LAWSON_NVTX_INCLUDE nvtx3/nvToolsExt.h NO_DEFAULT_PATH
  PATHS ${LAWSON_KIT}/include ${lawson_nvtx_places} $ENV{CUDA_HOME}/include $ENV{CUDA_PATH}/include
    /usr/local/cuda/include /usr/include)
if(NOT LAWSON_NVTX_INCLUDE)
  message(STATUS "Without NVTX ranges: nvtx3/nvToolsExt.h is not here (it comes with the CUDA toolkit)")
endif()
