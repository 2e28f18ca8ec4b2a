// A sublibrary of cuDNN, by its name.
__attribute__((visibility("default"))) int cudnn_ops_of_a_test(void) {
  return FAKE_VERSION;
}
