# lawson_cudnn_headers: the include folders of the cuDNN frontend, cuDNN and CUDA; headers only, since
# the libraries are opened at run time. Searched: the kit, .venv (scripts/setup puts there what the
# machine lacks), the CUDA toolkit, the packages of the python3 on PATH (a framework's).
file(GLOB lawson_sites ${CMAKE_SOURCE_DIR}/.venv/lib/python3*/site-packages)
set(lawson_toolkits $ENV{CUDA_HOME} $ENV{CUDA_PATH} /usr/local/cuda)
find_program(LAWSON_PYTHON3 python3)
if(LAWSON_PYTHON3)
  execute_process(COMMAND ${LAWSON_PYTHON3} -c "import sysconfig; print(sysconfig.get_path('purelib'))"
    OUTPUT_VARIABLE lawson_purelib OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()

set(lawson_missing)
macro(lawson_find_header variable header)
  find_path(${variable} ${header} PATHS ${ARGN} NO_DEFAULT_PATH)
  if(NOT ${variable})
    list(APPEND lawson_missing ${header})
  endif()
endmacro()

set(lawson_frontend_places ${lawson_sites} ${lawson_purelib})
list(TRANSFORM lawson_frontend_places APPEND /include)
set(lawson_cudnn_places)
set(lawson_cuda_places)
foreach(site IN LISTS lawson_sites)
  list(APPEND lawson_cudnn_places ${site}/nvidia/cudnn/include)
  list(APPEND lawson_cuda_places ${site}/nvidia/cu13/include)
endforeach()
foreach(toolkit IN LISTS lawson_toolkits)
  list(APPEND lawson_cudnn_places ${toolkit}/include)
  list(APPEND lawson_cuda_places ${toolkit}/include)
endforeach()
if(lawson_purelib)
  list(APPEND lawson_cudnn_places ${lawson_purelib}/nvidia/cudnn/include)
  list(APPEND lawson_cuda_places ${lawson_purelib}/nvidia/cu13/include)
endif()
if(LAWSON_KIT)
  list(PREPEND lawson_frontend_places ${LAWSON_KIT}/include)
endif()

lawson_find_header(LAWSON_FRONTEND_INCLUDE cudnn_frontend.h ${lawson_frontend_places})
lawson_find_header(LAWSON_CUDNN_INCLUDE cudnn.h ${lawson_cudnn_places})
lawson_find_header(LAWSON_CUDA_INCLUDE cuda_runtime.h ${lawson_cuda_places})
lawson_find_header(LAWSON_NVRTC_INCLUDE nvrtc.h ${lawson_cuda_places})
if(lawson_missing)
  list(JOIN lawson_missing ", " lawson_missing)
  message(FATAL_ERROR "The cuDNN engine needs headers that are not here: ${lawson_missing}. "
    "`make setup` fetches them; -DLAWSON_CUDNN=OFF builds without that engine.")
endif()

add_library(lawson_cudnn_headers INTERFACE)
target_include_directories(lawson_cudnn_headers SYSTEM INTERFACE
  ${LAWSON_FRONTEND_INCLUDE} ${LAWSON_CUDNN_INCLUDE} ${LAWSON_CUDA_INCLUDE} ${LAWSON_NVRTC_INCLUDE})
