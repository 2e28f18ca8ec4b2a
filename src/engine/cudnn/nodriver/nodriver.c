// A CUDA driver library without a device. A worker process opens it by absolute path before cuDNN,
// so that "libcuda.so.1", which cuDNN, NVRTC and the CUDA runtime ask for by that name, is this
// one: heuristics and kernel compilation then work on a machine without a GPU. It answers "no
// device" to everything; only what cuDNN does to a compiled image while it builds a plan succeeds,
// with dummy handles. It must never enter a process that has a real driver or runs kernels.
//
// cuDNN looks its names up with dlsym and gives up ("cannot load libcuda") when one is missing; the
// CUDA runtime inside cuDNN asks cuGetProcAddress, which knows every name.
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

enum { SUCCESS = 0, NO_DEVICE = 100 };  // CUresult
enum { DRIVER_VERSION = 13000 };        // what CUDA 13 asks for at least

typedef void (*Entry)(void);
typedef struct Opaque* Handle;

static char handle_target;  // a valid address, in case somebody looks at a handle

static int give_handle(Handle* handle) {
  if (handle) *handle = (Handle)(void*)&handle_target;
  return SUCCESS;
}

// Names with something to say, beyond "no device".
EXPORT int cuDriverGetVersion(int* version) {
  *version = DRIVER_VERSION;
  return SUCCESS;
}

EXPORT int cuDeviceGetCount(int* count) {
  *count = 0;
  return SUCCESS;
}

EXPORT int cuGetErrorName(int error, const char** text) {
  *text = error == SUCCESS ? "CUDA_SUCCESS" : "CUDA_ERROR_NO_DEVICE";
  return SUCCESS;
}

EXPORT int cuGetErrorString(int error, const char** text) {
  *text = error == SUCCESS ? "no error" : "no device (compiling for a target)";
  return SUCCESS;
}

#define GIVES_HANDLE(name)          \
  EXPORT int name(Handle* handle) { \
    return give_handle(handle);     \
  }
GIVES_HANDLE(cuLibraryLoadData)
GIVES_HANDLE(cuLibraryLoadFromFile)
GIVES_HANDLE(cuLibraryGetKernel)
GIVES_HANDLE(cuLibraryGetModule)
GIVES_HANDLE(cuKernelGetFunction)
GIVES_HANDLE(cuModuleLoadData)
GIVES_HANDLE(cuModuleLoadDataEx)
GIVES_HANDLE(cuModuleGetFunction)

#define GIVES_ZERO(name)        \
  EXPORT int name(int* value) { \
    *value = 0;                 \
    return SUCCESS;             \
  }
GIVES_ZERO(cuKernelGetAttribute)
GIVES_ZERO(cuFuncGetAttribute)

#define GIVES_GLOBAL(name)                         \
  EXPORT int name(Handle* address, size_t* size) { \
    if (size) *size = 0;                           \
    return give_handle(address);                   \
  }
GIVES_GLOBAL(cuLibraryGetGlobal)
GIVES_GLOBAL(cuModuleGetGlobal_v2)

#define SUCCEEDS(name)    \
  EXPORT int name(void) { \
    return SUCCESS;       \
  }
SUCCEEDS(cuKernelSetAttribute)
SUCCEEDS(cuKernelSetCacheConfig)
SUCCEEDS(cuFuncSetAttribute)
SUCCEEDS(cuFuncSetCacheConfig)
SUCCEEDS(cuLibraryUnload)
SUCCEEDS(cuModuleUnload)

// Names that cuDNN and NVRTC look up and that have no answer without a device.
#define HAS_NO_DEVICE(name) \
  EXPORT int name(void) {   \
    return NO_DEVICE;       \
  }
HAS_NO_DEVICE(cuInit)
HAS_NO_DEVICE(cuGetExportTable)
HAS_NO_DEVICE(cuDeviceGet)
HAS_NO_DEVICE(cuDeviceGetAttribute)
HAS_NO_DEVICE(cuDeviceGetName)
HAS_NO_DEVICE(cuDevicePrimaryCtxRetain)
HAS_NO_DEVICE(cuDevicePrimaryCtxRelease_v2)
HAS_NO_DEVICE(cuCtxGetCurrent)
HAS_NO_DEVICE(cuCtxSetCurrent)
HAS_NO_DEVICE(cuCtxGetDevice)
HAS_NO_DEVICE(cuCtxGetLimit)
HAS_NO_DEVICE(cuCtxPushCurrent)
HAS_NO_DEVICE(cuCtxPushCurrent_v2)
HAS_NO_DEVICE(cuCtxPopCurrent)
HAS_NO_DEVICE(cuCtxPopCurrent_v2)
HAS_NO_DEVICE(cuStreamGetCtx)
HAS_NO_DEVICE(cuStreamIsCapturing)
HAS_NO_DEVICE(cuLaunchKernel)
HAS_NO_DEVICE(cuLaunchKernelEx)
HAS_NO_DEVICE(cuLaunchCooperativeKernel)
HAS_NO_DEVICE(cuLinkCreate)
HAS_NO_DEVICE(cuLinkCreate_v2)
HAS_NO_DEVICE(cuLinkAddData)
HAS_NO_DEVICE(cuLinkAddData_v2)
HAS_NO_DEVICE(cuLinkComplete)
HAS_NO_DEVICE(cuLinkDestroy)
HAS_NO_DEVICE(cuOccupancyMaxActiveClusters)
HAS_NO_DEVICE(cuOccupancyMaxPotentialClusterSize)
HAS_NO_DEVICE(cuOccupancyMaxActiveBlocksPerMultiprocessor)
HAS_NO_DEVICE(cuTensorMapEncodeTiled)
HAS_NO_DEVICE(cuTensorMapEncodeIm2col)
HAS_NO_DEVICE(cuPointerGetAttribute)

static int no_device(void) {
  return NO_DEVICE;
}

EXPORT int cuGetProcAddress(const char* name, void** function, int version, uint64_t flags);
EXPORT int cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags,
                               int* status);

static Entry entry_of(const char* name, int version) {
  static const struct {
    const char* name;
    Entry entry;
  } entries[] = {
#define ENTRY(name) {#name, (Entry)name}
      ENTRY(cuDriverGetVersion),   ENTRY(cuDeviceGetCount),
      ENTRY(cuGetErrorName),       ENTRY(cuGetErrorString),
      ENTRY(cuLibraryLoadData),    ENTRY(cuLibraryLoadFromFile),
      ENTRY(cuLibraryGetKernel),   ENTRY(cuLibraryGetModule),
      ENTRY(cuKernelGetFunction),  ENTRY(cuModuleLoadData),
      ENTRY(cuModuleLoadDataEx),   ENTRY(cuModuleGetFunction),
      ENTRY(cuKernelGetAttribute), ENTRY(cuFuncGetAttribute),
      ENTRY(cuLibraryGetGlobal),   {"cuModuleGetGlobal", (Entry)cuModuleGetGlobal_v2},
      ENTRY(cuKernelSetAttribute), ENTRY(cuKernelSetCacheConfig),
      ENTRY(cuFuncSetAttribute),   ENTRY(cuFuncSetCacheConfig),
      ENTRY(cuLibraryUnload),      ENTRY(cuModuleUnload),
#undef ENTRY
  };
  if (strcmp(name, "cuGetProcAddress") == 0) {
    return version >= 12000 ? (Entry)cuGetProcAddress_v2 : (Entry)cuGetProcAddress;
  }
  for (size_t i = 0; i < sizeof entries / sizeof entries[0]; ++i) {
    if (strcmp(name, entries[i].name) == 0) return entries[i].entry;
  }
  return (Entry)no_device;
}

int cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags,
                        int* status) {
  (void)flags;
  const Entry entry = entry_of(name, version);
  memcpy(function, &entry, sizeof entry);  // ISO C has no cast from function to object pointer
  if (status) *status = 0;                 // CU_GET_PROC_ADDRESS_SUCCESS
  return SUCCESS;
}

int cuGetProcAddress(const char* name, void** function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
