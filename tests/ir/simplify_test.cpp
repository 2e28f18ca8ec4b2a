// Simplified graphs compute the same bits, by fewer ops, and equal computations become equal
// graphs.
#include "ir/simplify.h"

#include <cstring>

#include "engine/reference_bench.h"
#include "random_graph.h"
#include "redundant.h"

namespace lawson::ir {
namespace {

// x (f32), h (f16), b (bf16), n (i8), p (bool), all [2, 3], and s (f32, rank 0).
Graph written(const std::vector<Json>& ops, const Json& outputs = {"y"}, bool strict = false) {
  Json document{{"lawson", 1}, {"kind", "graph"}, {"name", "t"}, {"outputs", outputs}};
  if (strict) document["strict"] = true;
  for (const auto& [name, dtype] : std::vector<std::pair<std::string, std::string>>{
           {"x", "f32"}, {"h", "f16"}, {"b", "bf16"}, {"n", "i8"}, {"p", "bool"}}) {
    document["inputs"].push_back({{"name", name}, {"dtype", dtype}, {"shape", {2, 3}}});
  }
  document["inputs"].push_back({{"name", "s"}, {"dtype", "f32"}, {"shape", Json::array()}});
  document["ops"] = ops;
  return graph_from(document);
}

Json op(const std::string& name, const Json& in, const std::string& out,
        const Json& attributes = Json::object()) {
  Json item{{"op", name}, {"in", in}, {"out", out}};
  item.update(attributes);
  return item;
}
Json convert(const std::string& in, const std::string& out, const std::string& dtype) {
  return op("convert", {in}, out, {{"dtype", dtype}});
}
Json constant(double value, const std::string& out, const std::string& dtype = "f32") {
  return op("constant", Json::array(), out, {{"value", value}, {"dtype", dtype}});
}

std::vector<std::string> op_names(const Graph& graph) {
  std::vector<std::string> names;
  for (const Node& node : graph.nodes) names.push_back(op_name(node.op));
  return names;
}
using Names = std::vector<std::string>;

// The names of the ops that are left when `ops` stand before y = tanh(last).
Names left(std::vector<Json> ops, bool strict = false) {
  ops.push_back(op("tanh", {ops.back()["out"]}, "y"));
  Names names = op_names(simplify(written(ops, {"y"}, strict)));
  EXPECT_EQ(names.back(), "tanh");
  names.pop_back();
  return names;
}

TEST(Simplify, WhatChangesNoBitGoes) {
  const Names none;
  EXPECT_EQ(left({convert("x", "a", "f32")}), none);
  const Json over_nothing{{"axes", Json::array()}};
  for (const char* name :
       {"reduce_sum", "reduce_mean", "reduce_max", "reduce_min", "reduce_prod"}) {
    EXPECT_EQ(left({op(name, {"s"}, "a", over_nothing)}, true), none) << name;
  }
  for (const char* name : {"reduce_amax", "reduce_norm1", "reduce_norm2"}) {
    EXPECT_EQ(left({op(name, {"s"}, "a", over_nothing)}, true), Names{"abs"}) << name;
  }
  EXPECT_EQ(left({convert("h", "a", "f32"), convert("a", "c", "f16")}, true), none);
  EXPECT_EQ(left({convert("b", "a", "f32"), convert("a", "c", "f64")}), Names{"convert"});
  EXPECT_EQ(left({convert("n", "a", "i32"), convert("a", "c", "f32")}), Names{"convert"});
  EXPECT_EQ(left({op("transpose", {"x"}, "a", {{"perm", {1, 0}}}),
                  op("transpose", {"a"}, "c", {{"perm", {1, 0}}})}),
            none);
  EXPECT_EQ(left({op("transpose", {"x"}, "a", {{"perm", {0, 1}}})}), none);
  EXPECT_EQ(left({op("reshape", {"x"}, "a", {{"shape", {6}}}),
                  op("reshape", {"a"}, "c", {{"shape", {3, 2}}})}),
            Names{"reshape"});
  EXPECT_EQ(left({op("reshape", {"x"}, "a", {{"shape", {6}}}),
                  op("reshape", {"a"}, "c", {{"shape", {2, 3}}})}),
            none);
  EXPECT_EQ(left({op("broadcast", {"x"}, "a", {{"shape", {2, 3}}})}), none);
  EXPECT_EQ(left({op("broadcast", {"x"}, "a", {{"shape", {1, 2, 3}}}),
                  op("broadcast", {"a"}, "c", {{"shape", {4, 2, 3}}})}),
            Names{"broadcast"});
  EXPECT_EQ(left({op("slice", {"x"}, "a", {{"start", {0, 0}}, {"limit", {2, 3}}})}), none);
  EXPECT_EQ(left({op("neg", {"x"}, "a"), op("neg", {"a"}, "c")}), none);
  EXPECT_EQ(left({op("relu", {"x"}, "a"), op("relu", {"a"}, "c")}), Names{"relu"});
  EXPECT_EQ(left({op("clamp", {"x"}, "a", {{"min", 0}, {"max", 1}}),
                  op("clamp", {"a"}, "c", {{"min", -1}, {"max", 1}})}),
            Names{"clamp"});
  EXPECT_EQ(
      left({op("clamp", {"n"}, "a", {{"min", -128}, {"max", 200}}), convert("a", "c", "f32")}),
      Names{"convert"});
  EXPECT_EQ(left({op("select", {"p", "x", "x"}, "a")}), none);
  EXPECT_EQ(
      left({op("not", {"p"}, "a"), op("not", {"a"}, "c"), op("select", {"c", "x", "s"}, "d")}),
      Names{"select"});
  EXPECT_EQ(left({constant(1, "one"), op("mul", {"one", "x"}, "a")}), none);
  EXPECT_EQ(left({constant(1, "one"), op("div", {"x", "one"}, "a")}), none);
  EXPECT_EQ(left({constant(-0.0, "zero"), op("add", {"x", "zero"}, "a")}), none);
  EXPECT_EQ(left({constant(0, "zero"), op("sub", {"x", "zero"}, "a")}), none);
  EXPECT_EQ(left({op("broadcast", {"s"}, "a", {{"shape", {2, 3}}}), op("add", {"x", "a"}, "c")}),
            Names{"add"});
}

TEST(Simplify, WhatMayChangeABitStays) {
  EXPECT_EQ(left({convert("x", "a", "bf16"), convert("a", "c", "f32")}).size(), 2U);
  EXPECT_EQ(left({convert("h", "a", "bf16"), convert("a", "c", "f16")}).size(), 2U);
  EXPECT_EQ(left({convert("x", "a", "i32"), convert("a", "c", "f32")}).size(), 2U);
  EXPECT_EQ(left({convert("n", "a", "f8e4m3"), convert("a", "c", "f32")}).size(), 2U);
  EXPECT_EQ(left({constant(0, "zero"), op("add", {"x", "zero"}, "a")}).size(), 2U);
  EXPECT_EQ(left({constant(-0.0, "zero"), op("sub", {"x", "zero"}, "a")}).size(), 2U);
  EXPECT_EQ(left({constant(1, "one"), op("div", {"one", "x"}, "a")}).size(), 2U);
  EXPECT_EQ(left({constant(0, "zero"), op("mul", {"x", "zero"}, "a")}).size(), 2U);
  // -(-128) saturates.
  EXPECT_EQ(left({op("neg", {"n"}, "a"), op("neg", {"a"}, "c"), convert("c", "d", "f32")}).size(),
            3U);
  EXPECT_EQ(left({op("clamp", {"x"}, "a", {{"min", 0}, {"max", 1}}),
                  op("clamp", {"a"}, "c", {{"min", -1}, {"max", 0.5}})})
                .size(),
            2U);
  EXPECT_EQ(left({op("transpose", {"x"}, "a", {{"perm", {1, 0}}})}).size(), 1U);
  EXPECT_EQ(left({op("exp", {"x"}, "a"), op("log", {"a"}, "c")}).size(), 2U);
  // Both operands may be needed for the shape.
  EXPECT_EQ(
      left({op("broadcast", {"s"}, "a", {{"shape", {2, 3}}}), op("add", {"s", "a"}, "c")}).size(),
      2U);
}

double folded(const std::vector<Json>& ops, bool strict = false) {
  std::vector<Json> all = ops;
  all.push_back(op("mul", {"x", ops.back()["out"]}, "y"));
  const Graph graph = simplify(written(all, {"y"}, strict));
  if (graph.nodes.size() != 2) return kNaN;
  const auto* value = std::get_if<Constant>(&graph.nodes[0].op);
  return value == nullptr ? kNaN : value->value;
}

TEST(Simplify, ScalarsAreFoldedWhereExact) {
  EXPECT_EQ(folded({constant(2, "c"), constant(3, "d"), op("mul", {"c", "d"}, "e")}), 6);
  EXPECT_EQ(folded({constant(7, "c"), op("neg", {"c"}, "d"), convert("d", "e", "f16")}), -7);
  EXPECT_EQ(folded({constant(4, "c"), op("reciprocal", {"c"}, "d")}), 0.25);
  EXPECT_EQ(folded({constant(7, "c", "i32"), constant(2, "d", "i32"), op("div", {"c", "d"}, "e")}),
            3);
  EXPECT_EQ(folded({constant(1, "c"), constant(2, "d"), op("compare_lt", {"c", "d"}, "e"),
                    op("select", {"e", "d", "c"}, "f")}),
            2);
  // 0.1 is rounded to its type first; the sum of two f32 values is rounded in a strict graph only.
  EXPECT_EQ(folded({constant(0.1, "c")}), static_cast<double>(0.1F));
  const std::vector<Json> sum{constant(0.1, "c"), constant(0.7, "d"), op("add", {"c", "d"}, "e")};
  EXPECT_TRUE(std::isnan(folded(sum)));
  EXPECT_EQ(folded(sum, true), static_cast<double>(0.1F + 0.7F));
  EXPECT_TRUE(std::isnan(folded({constant(2, "c"), op("exp", {"c"}, "d")})));
  EXPECT_TRUE(std::isnan(folded({constant(0, "c"), op("reciprocal", {"c"}, "d")})));
  EXPECT_TRUE(std::isnan(folded({constant(100, "c", "i8"), op("mul", {"c", "c"}, "e")})));
}

TEST(Simplify, EqualThingsAreComputedOnce) {
  EXPECT_EQ(op_names(simplify(written(
                {op("exp", {"x"}, "a"), op("exp", {"x"}, "c"), op("add", {"a", "c"}, "y")}))),
            (Names{"exp", "add"}));
  EXPECT_EQ(op_names(simplify(written({op("mul", {"x", "s"}, "a"), op("mul", {"s", "x"}, "c"),
                                       op("sub", {"a", "c"}, "y")}))),
            (Names{"mul", "sub"}));
  // max(0, -0) is not max(-0, 0), and another dtype is another result.
  EXPECT_EQ(simplify(written({op("max", {"x", "s"}, "a"), op("max", {"s", "x"}, "c"),
                              op("sub", {"a", "c"}, "y")}))
                .nodes.size(),
            3U);
  EXPECT_EQ(simplify(written({op("exp", {"x"}, "a"), op("exp", {"x"}, "c", {{"dtype", "f64"}}),
                              op("sub", {"a", "c"}, "y")}))
                .nodes.size(),
            3U);
}

TEST(Simplify, OutputsStayOutputs) {
  // Two outputs of one value, an output that is an input, an output that others read.
  const Graph graph =
      written({op("exp", {"x"}, "first"), op("exp", {"x"}, "second"), convert("h", "same", "f16"),
               op("neg", {"second"}, "n1"), op("neg", {"n1"}, "n2"), op("tanh", {"n2"}, "last")},
              {"second", "first", "same", "last"});
  const Graph simple = simplify(graph);
  ASSERT_EQ(simple.output_count, 4);
  for (TensorId id = 0; id < graph.input_count + graph.output_count; ++id) {
    EXPECT_EQ(simple.tensor(id).name, graph.tensor(id).name);
  }
  Names names = op_names(simple);
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names, (Names{"convert", "convert", "exp", "tanh"}));
  EXPECT_TRUE(check(simple).ok());
  EXPECT_EQ(canonical_text(simplify(simple)), canonical_text(simple));
}

TEST(Simplify, AttentionAndCachesAreLeftAlone) {
  const Graph graph = attention_graph({{"mask", "causal"}, {"bias", "post_scale"}});
  EXPECT_EQ(print(simplify(graph)), print(graph));
}

TEST(Simplify, SourcesStay) {
  const Graph graph = simplify(
      written({convert("x", "a", "f32"), op("tanh", {"a"}, "y", {{"source", "mlp.cpp:12"}})}));
  ASSERT_EQ(graph.nodes.size(), 1U);
  EXPECT_EQ(graph.nodes[0].source, "mlp.cpp:12");
}

// Results of a graph on the inputs of the bench, byte by byte.
std::vector<std::vector<std::byte>> bytes_of(Bench& bench, const Graph& graph) {
  bench.outputs = plan::make_outputs(bench.graph);
  bench.execute(graph);
  std::vector<std::vector<std::byte>> result;
  for (const plan::Buffer& buffer : bench.outputs) {
    result.emplace_back(buffer.data(), buffer.data() + buffer.bytes());
  }
  return result;
}

struct Totals {
  std::size_t before = 0;
  std::size_t after = 0;
  std::size_t twin = 0;
};

void examine(const Graph& graph, std::uint64_t seed, Totals& totals) {
  const Graph simple = simplify(graph);
  const Graph twin = test::redundant(graph, seed);
  ASSERT_TRUE(check(simple).ok());
  ASSERT_EQ(simple.input_count, graph.input_count);
  ASSERT_EQ(simple.output_count, graph.output_count);
  for (TensorId id = 0; id < graph.input_count + graph.output_count; ++id) {
    EXPECT_EQ(simple.tensor(id).name, graph.tensor(id).name);
    EXPECT_EQ(simple.tensor(id).strides, graph.tensor(id).strides);
    EXPECT_EQ(simple.tensor(id).alignment, graph.tensor(id).alignment);
  }
  EXPECT_EQ(print(simplify(simple)), print(simple));
  EXPECT_EQ(canonical_text(simplify(twin)), canonical_text(simple))
      << print(graph) << print(simple) << print(twin) << print(simplify(twin));
  Bench bench(graph, seed);
  const auto expected = bytes_of(bench, graph);
  EXPECT_EQ(bytes_of(bench, simple), expected) << print(graph) << print(simple);
  totals.before += graph.nodes.size();
  totals.after += simple.nodes.size();
  totals.twin += twin.nodes.size();
}

TEST(Simplify, RandomGraphsKeepTheirBits) {
  Totals totals;
  for (std::uint64_t seed = 0; seed < 1600 && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    examine(test::random_graph(seed), seed, totals);
  }
  EXPECT_LT(totals.after, totals.before);
  EXPECT_GT(totals.twin, totals.before * 3 / 2);
}

TEST(Simplify, RandomFusionsKeepTheirBits) {
  Totals totals;
  for (const cases::Case& item : cases::fusion_cases(5, 500, cases::Profile::any)) {
    SCOPED_TRACE(item.text());
    examine(graph_of_case(item), item.seed, totals);
    if (HasFailure()) break;
  }
  EXPECT_LE(totals.after, totals.before);
}

}  // namespace
}  // namespace lawson::ir
