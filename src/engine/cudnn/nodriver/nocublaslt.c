// Stands in for cuBLASLt in a worker process. cuDNN's engine 0 hands plain matrix products to
// cuBLASLt, which can answer only on a device; but cuDNN aborts the process when it cannot load it.
// With this one (opened by absolute path, found by its SONAME) engine 0 gets as far as creating a
// handle and fails there, exactly as the real library does without a device: the verdict is then
// "undecided", never a no. It also spares the worker 540 MB of library.
#include <stddef.h>

#define EXPORT __attribute__((visibility("default")))

enum { SUCCESS = 0, NOT_INITIALIZED = 1 };  // cublasStatus_t

typedef struct Opaque* Handle;
static char handle_target;

// NOLINTBEGIN(readability-identifier-naming): the names are cuBLASLt's.
EXPORT size_t cublasLtGetVersion(void) {
  return 130000;
}

EXPORT int cublasLtGetProperty(int property, int* value) {
  *value = property == 0 ? 13 : 0;  // major, minor, patch
  return SUCCESS;
}

EXPORT int cublasLtCreate(Handle* handle) {
  *handle = NULL;
  return NOT_INITIALIZED;
}

#define GIVES_HANDLE(name)                   \
  EXPORT int name(Handle* handle) {          \
    *handle = (Handle)(void*)&handle_target; \
    return SUCCESS;                          \
  }
GIVES_HANDLE(cublasLtMatmulDescCreate)
GIVES_HANDLE(cublasLtMatrixLayoutCreate)
GIVES_HANDLE(cublasLtMatmulPreferenceCreate)

#define SUCCEEDS(name)    \
  EXPORT int name(void) { \
    return SUCCESS;       \
  }
SUCCEEDS(cublasLtDestroy)
SUCCEEDS(cublasLtMatmulDescDestroy)
SUCCEEDS(cublasLtMatmulDescSetAttribute)
SUCCEEDS(cublasLtMatrixLayoutDestroy)
SUCCEEDS(cublasLtMatrixLayoutSetAttribute)
SUCCEEDS(cublasLtMatmulPreferenceDestroy)
SUCCEEDS(cublasLtMatmulPreferenceSetAttribute)

#define FAILS(name)         \
  EXPORT int name(void) {   \
    return NOT_INITIALIZED; \
  }
FAILS(cublasLtMatmulAlgoGetHeuristic)
FAILS(cublasLtMatmulAlgoGetIds)
FAILS(cublasLtMatmulAlgoInit)
FAILS(cublasLtMatmulAlgoCheck)
FAILS(cublasLtMatmulAlgoCapGetAttribute)
FAILS(cublasLtMatmulAlgoConfigGetAttribute)
FAILS(cublasLtMatmulAlgoConfigSetAttribute)
FAILS(cublasLtMatmul)
// NOLINTEND(readability-identifier-naming)
