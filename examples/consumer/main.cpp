// Does this attention fuse on the named device? Exit 0: yes, 1: no, 3: no answer.
#include <lawson/lawson.hpp>

#include <iostream>

int main(int argc, char** argv) {
  const std::string target = argc > 1 ? argv[1] : "cpu";
  try {
    const auto spec = lawson::Spec::from_json(R"({
      "lawson": 1, "kind": "attention", "name": "example", "dtype": "bf16",
      "heads": 8, "kv_heads": 2, "seqlen_q": 256, "head_dim_qk": 128, "mask": "causal"})");
    const auto device = lawson::Device::find(target);
    const auto verdict = lawson::probe(spec, device);
    std::cout << "lawson " << lawson::version() << ": " << spec.name() << " on " << device.name()
              << ": " << (verdict.supported() ? "supported" : "not supported") << " by "
              << verdict.engine() << '\n';
    for (const auto& reason : verdict.reasons()) std::cout << "  " << reason.message << '\n';
    return verdict.supported() ? 0 : 1;
  } catch (const lawson::Error& error) {
    std::cerr << error.kind() << ": " << error.what() << '\n';
    return 3;
  }
}
