// Compiles a fusion once, keeps it as bytes, loads the bytes, executes them on data of its own and
// compares with the float64 oracle. On the CPU engine, so it runs anywhere:
//   compile_and_run [DEVICE]      (default cpu; a GPU of this machine: cuda)
#include <lawson/lawson.hpp>

#include <cstring>
#include <iostream>
#include <vector>

namespace {

const char* const kGraph = R"({
  "lawson": 1, "kind": "graph", "name": "linear-gelu",
  "inputs": [{"name": "x", "dtype": "f32", "shape": [1, 64, 128]},
             {"name": "w", "dtype": "f32", "shape": [1, 128, 96]},
             {"name": "b", "dtype": "f32", "shape": [1, 1, 96]}],
  "ops": [{"op": "matmul", "in": ["x", "w"], "out": "m"},
          {"op": "add", "in": ["m", "b"], "out": "a"},
          {"op": "gelu", "in": "a", "out": "y"}],
  "outputs": ["y"]})";

}  // namespace

int main(int argc, char** argv) {
  try {
    const auto graph = lawson::Graph::from_json(kGraph, "compile_and_run.cpp");
    const auto device = lawson::Device::find(argc > 1 ? argv[1] : "cpu");

    // What one process compiles another one may load.
    const std::vector<std::byte> bytes = lawson::compile(graph, device).serialize();
    lawson::Plan plan = lawson::Plan::deserialize(bytes);
    plan.load(device);
    std::cout << "plan " << plan.id() << " (" << plan.engine() << "), " << bytes.size()
              << " bytes, workspace " << plan.workspace_size() << '\n';

    auto data = lawson::Data::generate(graph, 1);
    const std::vector<float> bias(96, 0.5F);
    for (const auto& tensor : graph.tensors()) {
      if (tensor.name == "b") std::memcpy(data.buffer(tensor.uid).data(), bias.data(), tensor.size);
    }
    const auto time = plan.run(data, 20);
    std::cout << "median " << time.milliseconds_median << " ms\n";
    const auto check = data.verify(plan);
    std::cout << (check.ok ? "agrees with the oracle\n" : check.json + "\n");
    return check.ok ? 0 : 1;
  } catch (const lawson::Error& error) {
    std::cerr << error.kind() << ": " << error.what() << '\n';
    return 3;
  }
}
