// Opens cuDNN, NVRTC and the CUDA runtime at run time; nothing is linked. Everything missing or
// mismatching is an `unavailable` error that says what was searched and what to do about it.
#pragma once

#include <string>
#include <vector>

#include "base/json.h"
#include "base/status.h"

namespace lawson::cudnn {

struct Library {
  std::string path;     // the file that was loaded, as the dynamic loader names it
  std::string version;  // read from the library itself
  std::string found;    // which rule of the search found it
  void* handle = nullptr;
};

struct Libraries {
  Library cudnn;
  int cudnn_version = 0;  // 91900
  Library nvrtc;
  std::vector<int> nvrtc_archs;  // ascending, not empty: 75, 80, ...
};

// Opens them once per process. Search order for cuDNN: LAWSON_CUDNN (a file or a folder, never
// passed over), already loaded in this process, $VIRTUAL_ENV's and the site-packages of the python3
// on PATH, folders found when Lawson was built, the CUDA toolkit, the system's loader. NVRTC:
// LAWSON_NVRTC, already loaded, beside cuDNN, then the same places. A failure is not remembered.
Result<const Libraries*> libraries();

// The caller's choice (--cudnn, lawson_settings.cudnn_path): a file or a folder that comes before
// the whole search and is never passed over. Before the first call of libraries().
void choose_cudnn(const std::string& path);

// Another cuDNN build, or a sublibrary from another folder, in this process is an error that names
// both files.
Status check_one_cudnn();

// Puts the no-driver library in the driver's place, for the rest of the process. For worker
// processes only, before anything else of CUDA; refused when a driver library is loaded.
Status enter_deviceless(const std::string& nodriver_path);
bool is_deviceless();

// What `info` shows: the libraries, or the error that would be given.
Json library_report();

// dlopen for the frontend's headers, which ask for the driver and the CUDA runtime by name: the
// CUDA runtime comes from the same places as cuDNN, and only in cuDNN's major version.
void* open_for_frontend(const char* name, int flags);

// cuBLASLt, which cuDNN's engine for plain products opens: cuDNN aborts the process when it is
// missing. In a worker a stand-in beside the no-driver library (nodriver/nocublaslt.c).
Status need_cublaslt();

// The driver, by its name: libcuda.so.1 (in a worker: the no-driver library).
Result<void*> driver();

std::string version_text(int cudnn_version);  // 91900: "9.19.0"

}  // namespace lawson::cudnn
