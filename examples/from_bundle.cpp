// Ships compiled plans: writes a bundle, opens it as another program would, finds the plan of a
// graph in it and runs that. On the CPU engine, so it runs anywhere; for GPUs, `lawson compile`
// makes the bundle on any machine:
//   from_bundle [DEVICE [BUNDLE]]      (default cpu, and a bundle made here)
#include <lawson/lawson.hpp>

#include <cstdio>
#include <filesystem>
#include <iostream>

namespace {

const char* const kSpec = R"({
  "lawson": 1, "kind": "attention", "name": "chat", "pass": "forward", "dtype": "f32",
  "batch": 1, "heads": 4, "kv_heads": 2, "seqlen_q": 64, "head_dim_qk": 32, "mask": "causal"})";

void make_bundle(const std::string& path, const lawson::Graph& graph,
                 const lawson::Device& device) {
  const lawson::Plan plan = lawson::compile(graph, device);
  const lawson::Plan* const plans[] = {&plan};
  lawson::Bundle::append(path, plans);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const lawson::Spec spec = lawson::Spec::from_json(kSpec, "from_bundle.cpp");
    const auto device = lawson::Device::find(argc > 1 ? argv[1] : "cpu");
    const bool is_given = argc > 2;
    const std::string path =
        is_given ? argv[2] : std::filesystem::temp_directory_path() / "chat.lawson";
    if (!is_given) make_bundle(path, spec.graph(0), device);

    const lawson::Graph graph = spec.graph(0);
    const auto bundle = lawson::Bundle::open(path);
    for (const lawson::BundleEntry& entry : bundle) {
      std::cout << entry.key << "  " << entry.engine << ' ' << entry.engine_version << " on "
                << entry.target << ", " << entry.stored_size << " bytes\n";
    }

    auto plan = bundle.find(graph, device);
    if (!plan) {
      std::cout << "not in " << path << ": it would have to be built\n";
      return 1;
    }
    plan->load(device);
    auto data = lawson::Data::generate(graph, 1);
    std::cout << "median " << plan->run(data, 20).milliseconds_median << " ms\n";
    const auto check = data.verify(*plan);
    std::cout << (check.ok ? "agrees with the oracle\n" : check.json + "\n");
    if (!is_given) std::filesystem::remove(path);
    return check.ok ? 0 : 1;
  } catch (const lawson::Error& error) {
    std::cerr << error.kind() << ": " << error.what() << '\n';
    return 3;
  }
}
