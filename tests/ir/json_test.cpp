#include "ir/json.h"

#include <gtest/gtest.h>

#include "random_graph.h"

namespace lawson::ir {
namespace {

void expect_equal(const Tensor& a, const Tensor& b) {
  EXPECT_EQ(a.name, b.name);
  EXPECT_EQ(a.dtype, b.dtype) << a.name;
  EXPECT_EQ(a.shape, b.shape) << a.name;
  EXPECT_EQ(a.strides, b.strides) << a.name;
  EXPECT_EQ(a.alignment, b.alignment) << a.name;
  EXPECT_EQ(a.by_value, b.by_value) << a.name;
  EXPECT_EQ(a.values, b.values) << a.name;
  EXPECT_EQ(a.domain, b.domain) << a.name;
}

void expect_equal(const Graph& a, const Graph& b) {
  EXPECT_EQ(a.name, b.name);
  EXPECT_EQ(a.strict, b.strict);
  EXPECT_EQ(a.input_count, b.input_count);
  EXPECT_EQ(a.output_count, b.output_count);
  ASSERT_EQ(a.tensors.size(), b.tensors.size());
  for (std::size_t i = 0; i < a.tensors.size(); ++i) expect_equal(a.tensors[i], b.tensors[i]);
  ASSERT_EQ(a.nodes.size(), b.nodes.size());
  for (std::size_t i = 0; i < a.nodes.size(); ++i) {
    EXPECT_EQ(a.nodes[i].op, b.nodes[i].op) << op_name(a.nodes[i].op);
    EXPECT_EQ(a.nodes[i].inputs, b.nodes[i].inputs);
    EXPECT_EQ(a.nodes[i].outputs, b.nodes[i].outputs);
  }
}

TEST(GraphJson, ReadsBackWhatItWrote) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    const Graph graph = test::random_graph(seed);
    const Json document = graph_to_json(graph);
    // Through text, as it would be in a file.
    const auto read = graph_from_json(Json::parse(document.dump()), "round-trip");
    ASSERT_TRUE(read.ok()) << read.error().message;
    expect_equal(graph, *read);
    EXPECT_EQ(graph_to_json(*read), document);
  }
}

// One graph with every op's attributes away from their defaults.
TEST(GraphJson, KeepsEveryAttribute) {
  const Json document = Json::parse(R"({"lawson": 1, "kind": "graph", "name": "attributes",
    "strict": true,
    "inputs": [
      {"name": "x", "dtype": "f32", "shape": [4, 6], "strides": [8, 1], "alignment": 4,
       "domain": [-1, 2]},
      {"name": "s", "dtype": "f32", "shape": [1], "by_value": true, "values": [0.1]},
      {"name": "q", "dtype": "bf16", "shape": [2, 4, 8, 16]},
      {"name": "k", "dtype": "bf16", "shape": [2, 2, 8, 16]},
      {"name": "scale", "dtype": "f32", "shape": [1, 1, 1, 1], "by_value": true, "values": [0.25]},
      {"name": "n", "dtype": "i32", "shape": [2, 1, 1, 1], "values": [3, 8]},
      {"name": "sink", "dtype": "f32", "shape": [1, 4, 1, 1]}],
    "ops": [
      {"op": "leaky_relu", "in": ["x"], "out": "a", "slope": 0.3},
      {"op": "elu", "in": ["a"], "out": "b", "alpha": 0.7, "dtype": "bf16"},
      {"op": "clamp", "in": ["b"], "out": "c", "min": -0.1, "max": 3.3},
      {"op": "slice", "in": ["c"], "out": "d", "start": [1, 0], "limit": [4, 6], "stride": [2, 3]},
      {"op": "transpose", "in": ["d"], "out": "e", "perm": [1, 0]},
      {"op": "reduce_mean", "in": ["e"], "out": "f", "axes": [0, 1], "keepdims": true},
      {"op": "reshape", "in": ["f"], "out": "g", "shape": [1]},
      {"op": "iota", "out": "i", "shape": [2, 3], "axis": 1, "dtype": "f32"},
      {"op": "constant", "out": "h", "value": 0.1, "dtype": "f16"},
      {"op": "mul", "in": ["g", "h"], "out": "j"},
      {"op": "mul", "in": ["j", "s"], "out": "j2"},
      {"op": "add", "in": ["j2", "i"], "out": "l", "dtype": "f32"},
      {"op": "attention", "in": ["q", "k", "k", "scale", null, "n", "n", "sink"],
       "out": ["o", "stats"], "padding": true, "alignment": "bottom_right", "left": 3, "right": 0,
       "softmax": "learnable", "softcap": 30, "alibi": true}],
    "outputs": ["l", {"name": "o", "strides": [512, 16, 64, 1], "alignment": 32}, "stats"]})");
  const auto graph = graph_from_json(document, "attributes");
  ASSERT_TRUE(graph.ok()) << graph.error().message;
  const auto again = graph_from_json(graph_to_json(*graph), "again");
  ASSERT_TRUE(again.ok()) << again.error().message;
  expect_equal(*graph, *again);
  const auto& rule = std::get<Attention>(graph->nodes.back().op).rule;
  EXPECT_TRUE(rule.padding);
  EXPECT_EQ(rule.alignment, Alignment::bottom_right);
  EXPECT_EQ(rule.left, 3);
  EXPECT_EQ(rule.right, 0);
  EXPECT_EQ(rule.softmax, SoftmaxKind::learnable);
  EXPECT_EQ(rule.softcap, 30);
  EXPECT_TRUE(rule.alibi);
}

TEST(GraphJson, OutputDtypeAddsAConversion) {
  const Json document = Json::parse(R"({"lawson": 1, "kind": "graph",
    "inputs": [{"name": "x", "dtype": "f32", "shape": [4]}],
    "ops": [{"op": "neg", "in": "x", "out": "y"}],
    "outputs": [{"name": "y", "dtype": "bf16"}]})");
  const auto graph = graph_from_json(document, "convert");
  ASSERT_TRUE(graph.ok()) << graph.error().message;
  ASSERT_EQ(graph->nodes.size(), 2U);
  EXPECT_EQ(op_name(graph->nodes[1].op), "convert");
  EXPECT_EQ(graph->tensor(graph->input_count).dtype, DType::bf16);
}

}  // namespace
}  // namespace lawson::ir
