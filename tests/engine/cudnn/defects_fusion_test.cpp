// What an H200 showed of fusions: each row of the table, and the nearest graph that is right.
#include <gtest/gtest.h>

#include "engine/cudnn/defects.h"
#include "ir/json.h"

namespace lawson::cudnn {
namespace {

Json in(const std::string& name, const std::string& dtype, const Dims& shape,
        const Dims& strides = {}) {
  Json item{{"name", name}, {"dtype", dtype}, {"shape", shape}};
  if (!strides.empty()) item["strides"] = strides;
  return item;
}

Json op(const std::string& name, const Json& operands, const std::string& out,
        const Json& attributes = Json::object()) {
  Json item = attributes;
  item["op"] = name;
  item["in"] = operands;
  item["out"] = out;
  return item;
}

std::string defect_of(const Json& inputs, const Json& ops, const Json& outputs) {
  const auto graph = ir::graph_from_json(
      {{"lawson", 1}, {"kind", "graph"}, {"inputs", inputs}, {"ops", ops}, {"outputs", outputs}},
      "test");
  EXPECT_TRUE(graph.ok()) << (graph.ok() ? "" : graph.error().message);
  Device device;
  device.kind = Device::Kind::cuda;
  device.compute_capability = 900;
  const auto defect = known_defect(*graph, device, 91900);
  return defect ? defect->id : "";
}

const Json kF32{{"dtype", "f32"}};

TEST(FusionDefects, ProductsOfTwoDepths) {
  const auto sum = [](std::int64_t k) {
    return defect_of(
        {in("a", "f16", {32, 96}), in("b", "f16", {96, 48}), in("c", "f16", {32, k}),
         in("d", "f16", {k, 48})},
        {op("matmul", {"a", "b"}, "p"), op("matmul", {"c", "d"}, "q"), op("add", {"p", "q"}, "y")},
        {"y"});
  };
  EXPECT_EQ(sum(32), "products-of-two-depths");
  EXPECT_EQ(sum(96), "");
  // One made from the other is no such pair: it does not compile.
  EXPECT_EQ(
      defect_of({in("a", "f16", {32, 96}), in("b", "f16", {96, 48}), in("d", "f16", {48, 16})},
                {op("matmul", {"a", "b"}, "p"), op("matmul", {"p", "d"}, "y")}, {"y"}),
      "chained-product");
}

TEST(FusionDefects, AProductThatIsRepeatedOverTheBatch) {
  const auto add = [](std::int64_t batch) {
    return defect_of(
        {in("a", "f16", {1, 8, 16}), in("b", "f16", {1, 16, 8}), in("x", "f16", {batch, 1, 8})},
        {op("matmul", {"a", "b"}, "p"), op("add", {"p", "x"}, "y")}, {"y"});
  };
  EXPECT_EQ(add(2), "product-repeated-over-batch");
  EXPECT_EQ(add(1), "");
}

TEST(FusionDefects, Int4InsideOfAFusion) {
  const Json inputs{in("a", "f16", {8, 16}), in("b", "f16", {16, 8})};
  const Json narrow = op("convert", {"p"}, "n", {{"dtype", "i4"}});
  EXPECT_EQ(
      defect_of(inputs,
                {op("matmul", {"a", "b"}, "p", kF32), narrow, op("convert", {"n"}, "y", kF32)},
                {"y"}),
      "int4-intermediate");
  EXPECT_EQ(defect_of(inputs, {op("matmul", {"a", "b"}, "p", kF32), narrow}, {"n"}), "");
}

TEST(FusionDefects, AColumnBesideItsReduction) {
  const auto reduced = [](std::int64_t columns, const Json& outputs) {
    return defect_of({in("a", "f16", {2, 41, 97}), in("b", "f16", {2, 97, columns})},
                     {op("matmul", {"a", "b"}, "p", kF32), op("tanh", {"p"}, "t"),
                      op("reduce_amax", {"t"}, "m", {{"axes", {0, 1}}, {"keepdims", true}})},
                     outputs);
  };
  EXPECT_EQ(reduced(1, {"t", "m"}), "column-beside-its-reduction");
  EXPECT_EQ(reduced(1, {"m"}), "");
  EXPECT_EQ(reduced(8, {"t", "m"}), "");
}

TEST(FusionDefects, BytesThatAreRepeatedBeforeAProduct) {
  const auto selected = [](const Json& predicate) {
    return defect_of({in("a", "bf16", {4, 48, 112}), predicate, in("x", "bf16", {4, 48, 1}),
                      in("b", "bf16", {4, 112, 64})},
                     {op("select", {"p", "x", "a"}, "s"), op("matmul", {"s", "b"}, "y")}, {"y"});
  };
  EXPECT_EQ(selected(in("p", "bool", {4, 48, 1})), "byte-vector-before-product");
  EXPECT_EQ(selected(in("p", "bool", {4, 48, 112}, {5376, 112, 0})), "byte-vector-before-product");
  EXPECT_EQ(selected(in("p", "bool", {4, 48, 112})), "");
  EXPECT_EQ(selected(in("p", "bool", {1, 48, 112})), "");
  // Views repeat nothing.
  EXPECT_EQ(
      defect_of({in("x", "i8", {4, 3, 16, 32}), in("b", "bf16", {12, 32, 64})},
                {op("reshape", {"x"}, "r", {{"shape", {12, 16, 32}}}),
                 op("convert", {"r"}, "a", {{"dtype", "bf16"}}), op("matmul", {"a", "b"}, "y")},
                {"y"}),
      "");
}

TEST(FusionDefects, F32OperandsMadeFromEightBitFloats) {
  const auto product = [](const std::string& stored, const std::string& dtype) {
    return defect_of(
        {in("a", stored, {32, 64}), in("b", dtype, {64, 32})},
        {op("convert", {"a"}, "w", {{"dtype", dtype}}), op("matmul", {"w", "b"}, "y", kF32)},
        {"y"});
  };
  EXPECT_EQ(product("f8e5m2", "f32"), "f32-operand-from-8-bit-float");
  EXPECT_EQ(product("f8e5m2", "bf16"), "");
  EXPECT_EQ(product("i8", "f32"), "");
}

TEST(FusionDefects, AVectorThatStridesRepeat) {
  const auto maximum = [](const Dims& strides) {
    return defect_of({in("a", "f16", {3, 43}, strides), in("b", "f16", {3, 43})},
                     Json::array({op("max", {"a", "b"}, "y")}), {"y"});
  };
  EXPECT_EQ(maximum({43, 0}), "pointwise-repeated-vector");
  EXPECT_EQ(maximum({43, 1}), "");
}

}  // namespace
}  // namespace lawson::cudnn
