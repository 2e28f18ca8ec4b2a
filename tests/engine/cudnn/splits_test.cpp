// Graphs that cuDNN builds no kernel for, cut in two that it builds.
#include <gtest/gtest.h>

#include "deviceless.h"
#include "front/split.h"

namespace lawson::cudnn {
namespace {

// A matmul more than cuDNN takes passes its support checks and fails to build.
bool builds(const ir::Graph& graph, const std::string& name) {
  Options options;
  options.strength = Strength::built;
  const auto verdict = engine().probe(graph, target(name), options);
  EXPECT_TRUE(verdict.ok()) << (verdict.ok() ? "" : verdict.error().message);
  return verdict.ok() && verdict->decision == Decision::supported;
}

void expect_split(const Json& document, const std::string& text, std::size_t most_probes) {
  const ir::Graph graph = graph_of(document);
  EXPECT_FALSE(builds(graph, "h200"));
  const auto found = front::find_split(graph, most_probes,
                                       [](const ir::Graph& part) { return builds(part, "h200"); });
  ASSERT_TRUE(found.split) << found.probes << " probes";
  EXPECT_EQ(found.split->text, text);
}

TEST(Splits, TwoMatmuls) {
  expect_split(Json::parse(R"({"lawson": 1, "kind": "graph", "name": "mlp",
    "inputs": [{"name": "x", "dtype": "bf16", "shape": [1, 128, 128]},
               {"name": "w", "dtype": "bf16", "shape": [1, 128, 128]},
               {"name": "v", "dtype": "bf16", "shape": [1, 128, 128]}],
    "ops": [{"op": "matmul", "in": ["x", "w"], "out": "h", "source": "mlp.cpp:12"},
            {"op": "gelu", "in": "h", "out": "g", "source": "mlp.cpp:13"},
            {"op": "matmul", "in": ["g", "v"], "out": "y", "source": "mlp.cpp:14"}],
    "outputs": ["y"]})"),
               "cut after op 'gelu' (g, mlp.cpp:13): two kernels, 32 KiB between", 8);
}

TEST(Splits, PointwiseBehindAReduction) {
  expect_split(Json::parse(R"({"lawson": 1, "kind": "graph", "name": "r",
    "inputs": [{"name": "x", "dtype": "bf16", "shape": [1, 128, 128]},
               {"name": "w", "dtype": "bf16", "shape": [1, 128, 128]}],
    "ops": [{"op": "matmul", "in": ["x", "w"], "out": "m", "dtype": "f32"},
            {"op": "reduce_sum", "in": "m", "out": "r", "axes": [2], "keepdims": true},
            {"op": "tanh", "in": "r", "out": "y"}],
    "outputs": ["y"]})"),
               "cut after op 'reduce_sum' (r): two kernels, 512 bytes between", 8);
}

}  // namespace
}  // namespace lawson::cudnn
