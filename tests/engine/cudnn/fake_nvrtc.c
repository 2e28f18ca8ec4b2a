// Says that it is NVRTC 13.0, which compiles for 7.5 and 9.0.
__attribute__((visibility("default"))) int nvrtcVersion(int* major, int* minor) {
  *major = FAKE_VERSION / 10000 + 4;
  *minor = 0;
  return 0;
}
__attribute__((visibility("default"))) int nvrtcGetNumSupportedArchs(int* count) {
  *count = 2;
  return 0;
}
__attribute__((visibility("default"))) int nvrtcGetSupportedArchs(int* archs) {
  archs[0] = 90;
  archs[1] = 75;
  return 0;
}
