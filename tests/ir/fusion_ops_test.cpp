// Inference and spec form of the ops beside matmul and pointwise ones: scaled products, gradients
// of activations, concatenation, norms.
#include <gtest/gtest.h>

#include "ir/infer.h"
#include "ir/json.h"

namespace lawson::ir {
namespace {

Json input(const std::string& name, const std::string& dtype, const Dims& shape) {
  return {{"name", name}, {"dtype", dtype}, {"shape", shape}};
}

Result<Graph> read(const Json& inputs, const Json& op, const Json& outputs) {
  return graph_from_json({{"lawson", 1},
                          {"kind", "graph"},
                          {"inputs", inputs},
                          {"ops", Json::array({op})},
                          {"outputs", outputs}},
                         "test.json");
}

std::string fault(const Result<Graph>& graph) {
  return graph.ok() ? "no error" : graph.error().message;
}

const Tensor& output(const Graph& graph, int index) {
  return graph.tensor(graph.input_count + index);
}

void expect_message(const Result<Graph>& graph, const std::string& part) {
  EXPECT_NE(fault(graph).find(part), std::string::npos) << fault(graph);
}

Json scaled_inputs(Dims a_scale, Dims b_scale, const std::string& scales = "f8e8m0") {
  return {input("a", "f8e4m3", {2, 100, 72}), input("b", "f8e5m2", {72, 40}),
          input("sa", scales, a_scale), input("sb", scales, b_scale)};
}

TEST(ScaledMatmul, HasOneScalePerBlockAlongK) {
  const Json op{{"op", "scaled_matmul"}, {"in", {"a", "b", "sa", "sb"}}, {"out", "c"}};
  const auto graph = read(scaled_inputs({2, 100, 3}, {3, 40}), op, {"c"});
  ASSERT_TRUE(graph.ok()) << fault(graph);
  EXPECT_EQ(output(*graph, 0).shape, (Dims{2, 100, 40}));
  EXPECT_EQ(output(*graph, 0).dtype, DType::f32);
  expect_message(read(scaled_inputs({2, 100, 2}, {3, 40}), op, {"c"}),
                 "sa f8e8m0[2, 100, 2] must have shape [2, 100, 3] (blocks of 32 along K");
  expect_message(read(scaled_inputs({2, 100, 3}, {3, 40}, "bf16"), op, {"c"}),
                 "must have dtype f8e8m0, f8e4m3 or f32");
}

TEST(ScaledMatmul, PadsSwizzledScales) {
  const Json op{{"op", "scaled_matmul"},
                {"in", {{"a", "a"}, {"b", "b"}, {"a_scale", "sa"}, {"b_scale", "sb"}}},
                {"out", "c"},
                {"block", 16},
                {"swizzled", true}};
  const auto graph = read(scaled_inputs({2, 128, 8}, {8, 128}), op, {"c"});
  ASSERT_TRUE(graph.ok()) << fault(graph);
  EXPECT_EQ(canonical_text(*graph).find("block=16, swizzled") == std::string::npos, false);
  expect_message(read(scaled_inputs({2, 100, 5}, {8, 128}), op, {"c"}),
                 "padded to 128 rows and 4 blocks");
}

TEST(ScaledMatmul, TakesNarrowOperandsOnly) {
  const Json inputs{input("a", "bf16", {4, 32}), input("b", "f8e4m3", {32, 4}),
                    input("sa", "f8e8m0", {4, 1}), input("sb", "f8e8m0", {1, 4})};
  expect_message(
      read(inputs, {{"op", "scaled_matmul"}, {"in", {"a", "b", "sa", "sb"}}, {"out", "c"}}, {"c"}),
      "a bf16[4, 32] must have a float dtype of 4 or 8 bits");
}

TEST(UnaryGrad, TakesCotangentAndValue) {
  const Json inputs{input("dy", "f32", {3, 1}), input("x", "bf16", {4})};
  const auto graph =
      read(inputs, {{"op", "leaky_relu_grad"}, {"in", {"dy", "x"}}, {"out", "dx"}, {"slope", 0.2}},
           {"dx"});
  ASSERT_TRUE(graph.ok()) << fault(graph);
  EXPECT_EQ(output(*graph, 0).shape, (Dims{3, 4}));
  EXPECT_EQ(output(*graph, 0).dtype, DType::f32);
  EXPECT_EQ(std::get<UnaryGrad>(graph->nodes[0].op).parameter, 0.2);
  expect_message(read(inputs, {{"op", "exp_grad"}, {"in", {"dy", "x"}}, {"out", "dx"}}, {"dx"}),
                 "'exp_grad' is not an op");
  const Json integers{input("dy", "f32", {4}), input("x", "i32", {4})};
  expect_message(read(integers, {{"op", "gelu_grad"}, {"in", {"dy", "x"}}, {"out", "dx"}}, {"dx"}),
                 "operand x i32[4] must have a float dtype");
}

TEST(Concat, AddsUpAlongItsAxis) {
  const Json inputs{input("a", "f16", {2, 3}), input("b", "f16", {2, 0}),
                    input("c", "f16", {2, 5})};
  const auto graph =
      read(inputs, {{"op", "concat"}, {"in", {"a", "b", "c"}}, {"out", "y"}, {"axis", 1}}, {"y"});
  ASSERT_TRUE(graph.ok()) << fault(graph);
  EXPECT_EQ(output(*graph, 0).shape, (Dims{2, 8}));
  EXPECT_EQ(std::get<Concat>(graph->nodes[0].op).operands, 3);
  expect_message(read(inputs, {{"op", "concat"}, {"in", {"a", "b"}}, {"out", "y"}}, {"y"}),
                 "differ in more than axis 0");
  expect_message(
      read(inputs, {{"op", "concat"}, {"in", {"a", "b"}}, {"out", "y"}, {"axis", 2}}, {"y"}),
      "axis 2 is not an axis of a f16[2, 3]");
  expect_message(read(inputs, {{"op", "concat"}, {"in", {"a"}}, {"out", "y"}}, {"y"}),
                 "concat: operand 1 is missing");
}

TEST(Norm, GivesStatisticsWithTheAxesKept) {
  const Json inputs{input("x", "bf16", {2, 3, 8}), input("w", "f32", {8}),
                    input("b", "f32", {1, 1, 8})};
  const auto graph = read(inputs,
                          {{"op", "layer_norm"},
                           {"in", {"x", "w", "b"}},
                           {"out", {"y", "mean", "inv_std"}},
                           {"axes", {2}},
                           {"eps", 1e-6}},
                          {"y", "mean", "inv_std"});
  ASSERT_TRUE(graph.ok()) << fault(graph);
  EXPECT_EQ(output(*graph, 0).dtype, DType::bf16);
  EXPECT_EQ(output(*graph, 1).shape, (Dims{2, 3, 1}));
  EXPECT_EQ(output(*graph, 2).dtype, DType::f32);
  const auto again = graph_from_json(graph_to_json(*graph), "again");
  ASSERT_TRUE(again.ok()) << fault(again);
  EXPECT_EQ(canonical_text(*again), canonical_text(*graph));

  expect_message(
      read(inputs, {{"op", "rms_norm"}, {"in", {"x", "w"}}, {"out", {"y", "m"}}, {"axes", {2}}},
           {"y", "m"}),
      "mean needs a layer_norm");
  expect_message(
      read(inputs, {{"op", "rms_norm"}, {"in", {"x", "w"}}, {"out", "y"}, {"axes", {1}}}, {"y"}),
      "operand w f32[8] must have shape [1, 3, 1], of which leading 1s may be missing");
  expect_message(
      read(inputs, {{"op", "layer_norm"}, {"in", {"x", "w"}}, {"out", "y"}, {"axes", {3}}}, {"y"}),
      "axes [3] must be ascending, unique and in [0, 3)");
  expect_message(
      read(inputs,
           {{"op", "layer_norm"}, {"in", {"x", "w"}}, {"out", "y"}, {"axes", {2}}, {"eps", -1}},
           {"y"}),
      "eps -1 must be a number of at least 0");
}

TEST(NormBackward, HasOnlyTheResultsThatAreNamed) {
  const Json inputs{input("dy", "f32", {6, 8}), input("x", "f32", {6, 8}), input("w", "f32", {8}),
                    input("m", "f32", {6, 1}), input("r", "f32", {6, 1})};
  const Json slots{{"dy", "dy"}, {"x", "x"}, {"scale", "w"}, {"mean", "m"}, {"inv_std", "r"}};
  const auto graph = read(inputs,
                          {{"op", "layer_norm_backward"},
                           {"in", slots},
                           {"out", {{"dscale", "dw"}, {"dbias", "db"}}},
                           {"axes", {1}}},
                          {"dw", "db"});
  ASSERT_TRUE(graph.ok()) << fault(graph);
  EXPECT_EQ(graph->nodes[0].outputs[NormBackward::dx], kNone);
  EXPECT_EQ(output(*graph, 0).shape, (Dims{8}));
  expect_message(
      read(inputs, {{"op", "rms_norm_backward"}, {"in", slots}, {"out", "dx"}, {"axes", {1}}},
           {"dx"}),
      "operand mean is not allowed");
}

TEST(Source, IsKeptAndIsNoPartOfAKey) {
  const Json inputs{input("x", "f32", {4})};
  const auto at = [&](const std::string& source) {
    return read(inputs, {{"op", "exp"}, {"in", {"x"}}, {"out", "y"}, {"source", source}}, {"y"});
  };
  const auto graph = at("mlp.cpp:12");
  ASSERT_TRUE(graph.ok()) << fault(graph);
  EXPECT_EQ(graph->nodes[0].source, "mlp.cpp:12");
  EXPECT_EQ(graph_to_json(*graph)["ops"][0]["source"], "mlp.cpp:12");
  EXPECT_NE(print(*graph).find("# mlp.cpp:12"), std::string::npos);
  EXPECT_EQ(canonical_text(*graph), canonical_text(*at("mlp.cpp:13")));
}

}  // namespace
}  // namespace lawson::ir
