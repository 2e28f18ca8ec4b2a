// Says that it is cuDNN of the version that it was compiled with, built for CUDA 13.
#include <stddef.h>
__attribute__((visibility("default"))) size_t cudnnGetVersion(void) {
  return FAKE_VERSION;
}
__attribute__((visibility("default"))) size_t cudnnGetCudartVersion(void) {
  return 13000;
}
