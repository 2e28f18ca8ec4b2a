// Cuts of graphs: both halves together are the graph, and a search asks no more than it may.
#include "front/split.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

#include "ir/json.h"

namespace lawson::front {
namespace {

using ir::Graph;

Graph read(const Json& document) {
  auto graph = ir::graph_from_json(document, "test");
  EXPECT_TRUE(graph.ok()) << (graph.ok() ? "" : graph.error().message);
  return graph.ok() ? *std::move(graph) : Graph{};
}

// A chain of matmuls with a gelu after each but the last, in bf16, `n` wide; written in mlp.cpp.
Graph chain(int matmuls, std::int64_t n = 64) {
  Json document{{"lawson", 1}, {"kind", "graph"}, {"name", "mlp"}, {"outputs", {"y"}}};
  document["inputs"].push_back({{"name", "x"}, {"dtype", "bf16"}, {"shape", {1, n, n}}});
  std::string value = "x";
  for (int i = 0; i < matmuls; ++i) {
    const std::string weight = fmt::format("w{}", i);
    const bool last = i + 1 == matmuls;
    document["inputs"].push_back({{"name", weight}, {"dtype", "bf16"}, {"shape", {1, n, n}}});
    const std::string product = last ? "y" : fmt::format("h{}", i);
    document["ops"].push_back({{"op", "matmul"},
                               {"in", {value, weight}},
                               {"out", product},
                               {"source", fmt::format("mlp.cpp:{}", 10 + i)}});
    value = fmt::format("g{}", i);
    if (!last) document["ops"].push_back({{"op", "gelu"}, {"in", product}, {"out", value}});
  }
  return read(document);
}

int matmuls_of(const Graph& graph) {
  return static_cast<int>(std::count_if(
      graph.nodes.begin(), graph.nodes.end(),
      [](const ir::Node& node) { return std::holds_alternative<ir::Matmul>(node.op); }));
}

std::set<std::string> names(const Graph& graph, bool inputs) {
  std::set<std::string> result;
  for (std::int32_t i = 0; i < graph.input_count + graph.output_count; ++i) {
    if (graph.is_input(i) == inputs) result.insert(graph.tensor(i).name);
  }
  return result;
}
using NameSet = std::set<std::string>;

// As cuDNN: one matmul, and nothing pointwise behind a reduction.
bool one_matmul(const Graph& graph) {
  if (matmuls_of(graph) > 1) return false;
  std::set<ir::TensorId> reduced;
  for (const ir::Node& node : graph.nodes) {
    const bool after = std::any_of(node.inputs.begin(), node.inputs.end(),
                                   [&](ir::TensorId id) { return reduced.contains(id); });
    if (after) return false;
    if (std::holds_alternative<ir::Reduce>(node.op)) reduced.insert(node.outputs[0]);
  }
  return true;
}

TEST(Split, TwoMatmulsAreCutBehindTheActivation) {
  const auto found = find_split(chain(2, 4096), 8, one_matmul);
  ASSERT_TRUE(found.split);
  EXPECT_EQ(found.split->text, "cut after op 'gelu' (g0): two kernels, 32 MiB between");
  EXPECT_EQ(found.split->bytes, std::int64_t{2} * 4096 * 4096);
  ASSERT_EQ(found.split->parts.size(), 2U);
  EXPECT_EQ(names(found.split->parts[0], true), (NameSet{"x", "w0"}));
  EXPECT_EQ(names(found.split->parts[0], false), NameSet{"g0"});
  EXPECT_EQ(names(found.split->parts[1], true), (NameSet{"g0", "w1"}));
  EXPECT_EQ(names(found.split->parts[1], false), NameSet{"y"});
  EXPECT_EQ(found.split->parts[1].name, "mlp-2");
  EXPECT_EQ(found.probes, 2U);
}

TEST(Split, ThreeMatmulsAreCutTwice) {
  const auto found = find_split(chain(3), 32, one_matmul);
  ASSERT_TRUE(found.split);
  EXPECT_EQ(found.split->text,
            "cut after op 'gelu' (g0) and after op 'gelu' (g1): three kernels, 16 KiB between");
  ASSERT_EQ(found.split->parts.size(), 3U);
  for (const Graph& part : found.split->parts) EXPECT_EQ(matmuls_of(part), 1);
  EXPECT_EQ(names(found.split->parts[2], false), NameSet{"y"});
  EXPECT_FALSE(find_split(chain(4), 64, one_matmul).split);
}

TEST(Split, TheOpIsNamedWithItsSource) {
  const auto product_only = [](const Graph& graph) {
    return one_matmul(graph) && (matmuls_of(graph) == 0 || graph.nodes.size() == 1 ||
                                 ir::op_name(graph.nodes.back().op) == "matmul");
  };
  const auto found = find_split(chain(2), 16, product_only);
  ASSERT_TRUE(found.split);
  EXPECT_EQ(found.split->text,
            "cut after op 'matmul' (h0, mlp.cpp:10): two kernels, 8 KiB between");
}

TEST(Split, APointwiseOpBehindAReductionStartsAnotherKernel) {
  const Graph graph = read(Json::parse(R"({"lawson": 1, "kind": "graph", "name": "r",
    "inputs": [{"name": "x", "dtype": "bf16", "shape": [2, 64, 32]},
               {"name": "w", "dtype": "bf16", "shape": [2, 32, 64]},
               {"name": "b", "dtype": "f32", "shape": [1, 1, 64]}],
    "ops": [{"op": "matmul", "in": ["x", "w"], "out": "m", "dtype": "f32"},
            {"op": "add", "in": ["m", "b"], "out": "a"},
            {"op": "reduce_sum", "in": "a", "out": "r", "axes": [2], "keepdims": true},
            {"op": "exp", "in": "r", "out": "y"}],
    "outputs": ["y"]})"));
  const auto found = find_split(graph, 8, one_matmul);
  ASSERT_TRUE(found.split);
  EXPECT_EQ(found.split->text, "cut after op 'reduce_sum' (r): two kernels, 512 bytes between");
  EXPECT_EQ(found.split->parts[1].nodes.size(), 1U);
}

TEST(Split, ConstantsAndViewsOfInputsAreMadeWhereTheyAreRead) {
  const Graph graph = read(Json::parse(R"({"lawson": 1, "kind": "graph", "name": "c",
    "inputs": [{"name": "x", "dtype": "bf16", "shape": [1, 8, 8]},
               {"name": "w", "dtype": "bf16", "shape": [1, 8, 8]}],
    "ops": [{"op": "constant", "out": "two", "value": 2, "dtype": "bf16"},
            {"op": "transpose", "in": "w", "out": "wt", "perm": [0, 2, 1]},
            {"op": "matmul", "in": ["x", "wt"], "out": "m"},
            {"op": "mul", "in": ["m", "two"], "out": "a"},
            {"op": "convert", "in": "a", "out": "wide", "dtype": "f32"},
            {"op": "convert", "in": "wide", "out": "narrow", "dtype": "bf16"},
            {"op": "matmul", "in": ["narrow", "wt"], "out": "n"},
            {"op": "mul", "in": ["n", "two"], "out": "y"}],
    "outputs": ["y"]})"));
  for (const Split& split : two_way_splits(graph, 100)) {
    ASSERT_EQ(split.parts.size(), 2U);
    for (const Graph& part : split.parts) {
      for (std::int32_t i = 0; i < part.input_count + part.output_count; ++i) {
        EXPECT_NE(part.tensor(i).name, "two");
        EXPECT_NE(part.tensor(i).name, "wt");
      }
    }
  }
  const auto found = find_split(graph, 16, one_matmul);
  ASSERT_TRUE(found.split);
  EXPECT_EQ(found.split->bytes, 128);  // bf16, not f32
}

TEST(Split, PartsTogetherAreTheGraph) {
  // Two outputs, one read again; a view between; a side branch that is computed first.
  const Graph graph = read(Json::parse(R"({"lawson": 1, "kind": "graph", "name": "p",
    "inputs": [{"name": "x", "dtype": "bf16", "shape": [2, 16, 8], "strides": [256, 1, 16]},
               {"name": "w", "dtype": "bf16", "shape": [2, 8, 32]},
               {"name": "v", "dtype": "i8", "shape": [2, 16, 4]}],
    "ops": [{"op": "convert", "in": "v", "out": "vb", "dtype": "bf16"},
            {"op": "neg", "in": "vb", "out": "vn"},
            {"op": "matmul", "in": ["x", "w"], "out": "m"},
            {"op": "relu", "in": "m", "out": "h"},
            {"op": "transpose", "in": "h", "out": "t", "perm": [0, 2, 1]},
            {"op": "matmul", "in": ["t", "vn"], "out": "n", "dtype": "f32"},
            {"op": "reduce_max", "in": "n", "out": "y", "axes": [2]}],
    "outputs": [{"name": "h", "strides": [512, 1, 16]}, "y"]})"));
  const std::vector<Split> splits = two_way_splits(graph, 100);
  EXPECT_GE(splits.size(), 4U);
  std::int64_t last = 0;
  std::set<std::string> seen;
  for (const Split& split : splits) {
    SCOPED_TRACE(split.text);
    EXPECT_GE(split.bytes, last);
    last = split.bytes;
    EXPECT_TRUE(
        seen.insert(ir::canonical_text(split.parts[0]) + "|" + ir::canonical_text(split.parts[1]))
            .second);
    // Put together again: the ops of both parts, from the inputs of the whole.
    Json whole = ir::graph_to_json(graph);
    whole["ops"] = Json::array();
    std::set<std::string> made;
    std::map<std::string, const ir::Tensor*> stored;
    for (const Graph& part : split.parts) {
      EXPECT_TRUE(ir::check(part).ok());
      for (std::int32_t i = 0; i < part.input_count + part.output_count; ++i) {
        const ir::Tensor& tensor = part.tensor(i);
        const auto [known, fresh] = stored.emplace(tensor.name, &tensor);
        EXPECT_EQ(known->second->strides, tensor.strides) << tensor.name;
        EXPECT_EQ(known->second->dtype, tensor.dtype) << tensor.name;
      }
      const Json document = ir::graph_to_json(part);
      for (const Json& op : document["ops"]) {
        if (made.insert(op["out"][0].get<std::string>()).second) whole["ops"].push_back(op);
      }
    }
    EXPECT_EQ(ir::canonical_text(read(whole)), ir::canonical_text(graph));
  }
}

TEST(Split, NothingIsAskedTwiceOrBeyondTheLimit) {
  for (const std::size_t limit : {0U, 1U, 2U, 3U, 5U, 9U, 40U}) {
    std::set<std::string> asked;
    std::size_t probes = 0;
    const auto none = [&](const Graph& graph) {
      EXPECT_TRUE(asked.insert(ir::canonical_text(graph)).second);
      ++probes;
      return graph.nodes.size() == 1;
    };
    const auto found = find_split(chain(4), limit, none);
    EXPECT_FALSE(found.split);
    EXPECT_EQ(found.probes, probes);
    EXPECT_LE(probes, limit);
  }
}

TEST(Split, OneOpHasNoCut) {
  EXPECT_TRUE(two_way_splits(chain(1), 10).empty());
  const auto found = find_split(chain(1), 10, [](const Graph&) { return true; });
  EXPECT_FALSE(found.split);
  EXPECT_EQ(found.probes, 0U);
}

}  // namespace
}  // namespace lawson::front
