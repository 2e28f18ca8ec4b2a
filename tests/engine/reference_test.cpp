// The reference engine against facts that do not come from itself: known values, definitions,
// finite differences; and its error bounds against engines that are right and engines that are not.
#include "engine/reference/reference.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <numbers>

#include "cases/cases.h"
#include "cases/judge.h"
#include "ir/json.h"

namespace lawson {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// What a GPU does with f16 and bf16: f32 accumulation, probabilities stored in the operands' type.
constexpr Arithmetic kF32{0, 0x1p-24, 0, 0x1p-22};
constexpr Arithmetic kBf16Storage{0, 0x1p-24, 0x1p-8, 0x1p-22};

ir::Graph graph_from(const Json& document) {
  auto graph = ir::graph_from_json(document, "test");
  EXPECT_TRUE(graph.ok()) << (graph.ok() ? "" : graph.error().message);
  return *graph;
}

ir::Graph graph_of_case(const cases::Case& item) {
  auto graph = cases::graph_of(item);
  EXPECT_TRUE(graph.ok()) << item.text() << (graph.ok() ? "" : graph.error().message);
  return *graph;
}

std::vector<double> values_of(const ir::Graph& graph, const plan::Buffer& buffer) {
  const ir::Tensor& tensor = graph.tensor(buffer.id());
  std::vector<double> values;
  if (element_count(tensor.shape) == 0) return values;
  Dims index(tensor.shape.size(), 0);
  do {
    values.push_back(load_element(buffer.data(), tensor.dtype, offset_of(index, tensor.strides)));
  } while (next_index(index, tensor.shape));
  return values;
}

void set_values(const ir::Graph& graph, const plan::Buffer& buffer,
                const std::vector<double>& values) {
  const ir::Tensor& tensor = graph.tensor(buffer.id());
  if (values.empty()) return;
  Dims index(tensor.shape.size(), 0);
  std::size_t i = 0;
  do {
    store_element(buffer.data(), tensor.dtype, offset_of(index, tensor.strides), values[i++]);
  } while (next_index(index, tensor.shape));
}

// A graph with its data, run by the reference engine.
struct Bench {
  explicit Bench(ir::Graph g, std::uint64_t seed = 1,
                 plan::InputStyle style = plan::InputStyle::normal)
      : graph{std::move(g)}, engine{make_reference_engine()} {
    auto made = plan::make_inputs(graph, seed, *engine, style);
    EXPECT_TRUE(made.ok()) << (made.ok() ? "" : made.error().message);
    inputs = std::move(*made);
    outputs = plan::make_outputs(graph);
  }

  void execute() { execute(graph); }
  // Runs another graph of the same inputs and outputs on this data.
  void execute(const ir::Graph& other) {
    const Device device = cpu_device();
    auto plan = engine->compile(other, device, {}, std::nullopt, {});
    ASSERT_TRUE(plan.ok()) << plan.error().message;
    auto loaded = engine->load(*plan, device);
    ASSERT_TRUE(loaded.ok()) << loaded.error().message;
    const auto bindings = plan::bindings_of(inputs, outputs);
    const Status status = engine->execute(**loaded, bindings, nullptr, nullptr);
    ASSERT_TRUE(status.ok()) << status.error().message;
  }
  std::vector<OracleOutput> oracle(const Arithmetic& arithmetic) {
    const auto bindings = plan::bindings_of(inputs, {});
    auto result = engine->oracle(graph, bindings, arithmetic);
    EXPECT_TRUE(result.ok()) << (result.ok() ? "" : result.error().message);
    return std::move(*result);
  }
  plan::Comparison compare(const Arithmetic& arithmetic) {
    const auto expected = oracle(arithmetic);
    return plan::compare(graph, outputs, expected);
  }
  std::vector<double> input(std::size_t i) { return values_of(graph, inputs[i]); }
  std::vector<double> output(std::size_t i) { return values_of(graph, outputs[i]); }

  ir::Graph graph;
  std::shared_ptr<Engine> engine;
  std::vector<plan::Buffer> inputs;
  std::vector<plan::Buffer> outputs;
};

Json one_op(Json op, const std::string& dtype, const Dims& shape, int operands = 1,
            bool strict = false) {
  Json document{{"lawson", 1}, {"kind", "graph"}, {"outputs", {"y"}}, {"strict", strict}};
  op["in"] = Json::array();
  for (int i = 0; i < operands; ++i) {
    const std::string name(1, static_cast<char>('a' + i));
    document["inputs"].push_back({{"name", name}, {"dtype", dtype}, {"shape", shape}});
    op["in"].push_back(name);
  }
  op["out"] = "y";
  document["ops"] = {op};
  return document;
}

std::vector<double> run_op(const Json& op, const std::string& dtype,
                           const std::vector<std::vector<double>>& operands) {
  const auto count = static_cast<std::int64_t>(operands[0].size());
  Bench bench(graph_from(one_op(op, dtype, {count}, static_cast<int>(operands.size()))));
  for (std::size_t i = 0; i < operands.size(); ++i) {
    set_values(bench.graph, bench.inputs[i], operands[i]);
  }
  bench.execute();
  return bench.output(0);
}

void expect_values(const std::vector<double>& actual, const std::vector<double>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (std::size_t i = 0; i < actual.size(); ++i) {
    if (std::isnan(expected[i])) {
      EXPECT_TRUE(std::isnan(actual[i])) << i;
    } else if (std::isinf(expected[i])) {
      EXPECT_EQ(actual[i], expected[i]) << i;
    } else {
      EXPECT_NEAR(actual[i], expected[i], 1e-14 * std::max(1.0, std::fabs(expected[i]))) << i;
    }
  }
}

TEST(ReferencePointwise, UnaryFollowTheirDefinitions) {
  const std::vector<double> x{-3.5, -1.5, -0.5, -0.0, 0.5, 1.5, 2.5, 7.25};
  const std::map<std::string, std::function<double(double)>> functions{
      {"neg", [](double v) { return -v; }},
      {"abs", [](double v) { return std::abs(v); }},
      {"exp", [](double v) { return std::pow(std::numbers::e, v); }},
      {"expm1", [](double v) { return std::pow(std::numbers::e, v) - 1; }},
      {"reciprocal", [](double v) { return 1 / v; }},
      {"sin", [](double v) { return std::cos(v - std::numbers::pi / 2); }},
      {"cos", [](double v) { return std::sin(v + std::numbers::pi / 2); }},
      {"tan", [](double v) { return std::sin(v) / std::cos(v); }},
      {"tanh", [](double v) { return 1 - 2 / (std::exp(2 * v) + 1); }},
      {"erf", [](double v) { return 1 - std::erfc(v); }},
      {"ceil", [](double v) { return -std::floor(-v); }},
      {"floor", [](double v) { return -std::ceil(-v); }},
      {"round",
       [](double v) { return std::remainder(v, 1.0) == 0 ? v : v - std::remainder(v, 1.0); }},
      {"sign", [](double v) { return v == 0 ? 0.0 : std::copysign(1.0, v); }},
      {"sigmoid", [](double v) { return 0.5 * (1 + std::tanh(v / 2)); }},
      {"relu", [](double v) { return std::max(v, 0.0); }},
      {"leaky_relu", [](double v) { return v < 0 ? 0.01 * v : v; }},
      {"relu6", [](double v) { return std::min(std::max(v, 0.0), 6.0); }},
      {"elu", [](double v) { return v < 0 ? std::exp(v) - 1 : v; }},
      {"softplus", [](double v) { return std::log(1 + std::exp(v)); }},
      {"silu", [](double v) { return v / (1 + std::exp(-v)); }},
      {"gelu", [](double v) { return v * 0.5 * (1 + std::erf(v / std::sqrt(2.0))); }},
      {"gelu_tanh",
       [](double v) {
         return 0.5 * v *
                (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (v + 0.044715 * v * v * v)));
       }},
  };
  for (const auto& [name, function] : functions) {
    SCOPED_TRACE(name);
    std::vector<double> expected;
    for (const double v : x) expected.push_back(function(v));
    expect_values(run_op({{"op", name}}, "f64", {x}), expected);
  }
  const std::vector<double> positive{0.0, 0.25, 1.0, 9.0};
  expect_values(run_op({{"op", "sqrt"}}, "f64", {positive}), {0, 0.5, 1, 3});
  expect_values(run_op({{"op", "rsqrt"}}, "f64", {positive}), {kInfinity, 2, 1, 1.0 / 3});
  expect_values(run_op({{"op", "log"}}, "f64", {positive}),
                {-kInfinity, -2 * std::numbers::ln2, 0, 2 * std::log(3.0)});
  expect_values(run_op({{"op", "log1p"}}, "f64", {positive}),
                {0, std::log(1.25), std::numbers::ln2, std::log(10.0)});
  expect_values(run_op({{"op", "round"}}, "f64", {{0.5, 1.5, 2.5, -0.5}}), {0, 2, 2, -0.0});
}

TEST(ReferencePointwise, EveryUnaryKeepsNaN) {
  for (int i = 0; i < ir::kUnaryCount; ++i) {
    const std::string name{ir::to_string(static_cast<ir::UnaryKind>(i))};
    EXPECT_TRUE(std::isnan(run_op({{"op", name}}, "f32", {{kNaN}})[0])) << name;
  }
}

TEST(ReferencePointwise, Binary) {
  const std::vector<double> a{7, -7, 7.5, 0, kNaN, 2};
  const std::vector<double> b{2, 2, -2, 0, 1, 10};
  const auto check = [&](const char* op, const std::vector<double>& expected) {
    SCOPED_TRACE(op);
    expect_values(run_op({{"op", op}}, "f64", {a, b}), expected);
  };
  check("add", {9, -5, 5.5, 0, kNaN, 12});
  check("sub", {5, -9, 9.5, 0, kNaN, -8});
  check("mul", {14, -14, -15, 0, kNaN, 20});
  check("div", {3.5, -3.5, -3.75, kNaN, kNaN, 0.2});
  check("pow", {49, 49, std::pow(7.5, -2), 1, kNaN, 1024});
  check("min", {2, -7, -2, 0, kNaN, 2});
  check("max", {7, 2, 7.5, 0, kNaN, 10});
  check("mod", {1, -1, 1.5, kNaN, kNaN, 2});
}

TEST(ReferencePointwise, IntegersAreExactAndSaturate) {
  expect_values(run_op({{"op", "div"}}, "i32", {{7, -7, 1}, {2, 2, 3}}), {3, -3, 0});
  expect_values(run_op({{"op", "add"}}, "i8", {{100, -100, 5}, {100, -100, 6}}), {127, -128, 11});
  expect_values(run_op({{"op", "mul"}}, "i32", {{65537, -65537}, {65537, 65537}}),
                {2147483647.0, -2147483648.0});
  expect_values(run_op({{"op", "convert"}, {"dtype", "i8"}}, "f32", {{2.5, 3.5, 300, -300, kNaN}}),
                {2, 4, 127, -128, 0});
  expect_values(run_op({{"op", "convert"}, {"dtype", "i4"}}, "f32", {{6.6, 8, -9}}), {7, 7, -8});
}

TEST(ReferencePointwise, CompareSelectClampLogical) {
  expect_values(run_op({{"op", "compare_lt"}}, "f32", {{1, 2, kNaN}, {2, 2, 1}}), {1, 0, 0});
  expect_values(run_op({{"op", "compare_ne"}}, "f32", {{1, 2, kNaN}, {2, 2, kNaN}}), {1, 0, 1});
  expect_values(run_op({{"op", "clamp"}, {"min", -1}, {"max", 2}}, "f32", {{-3, 0.5, 9, kNaN}}),
                {-1, 0.5, 2, kNaN});
  expect_values(run_op({{"op", "and"}}, "bool", {{0, 0, 1, 1}, {0, 1, 0, 1}}), {0, 0, 0, 1});
  expect_values(run_op({{"op", "or"}}, "bool", {{0, 0, 1, 1}, {0, 1, 0, 1}}), {0, 1, 1, 1});
  expect_values(run_op({{"op", "not"}}, "bool", {{0, 1}}), {1, 0});
}

TEST(ReferenceMatmul, BroadcastStridesAndIntegerSums) {
  const Json document = Json::parse(R"({"lawson": 1, "kind": "graph",
      "inputs": [{"name": "a", "dtype": "i8", "shape": [2, 1, 3], "values": [1, 2, 3, 4, 5, 6]},
                 {"name": "b", "dtype": "i8", "shape": [1, 3, 2], "strides": [9, 1, 4],
                  "values": [1, -1, 2, -2, 127, -128]}],
      "ops": [{"op": "matmul", "in": ["a", "b"], "out": "c"}], "outputs": ["c"]})");
  Bench bench(graph_from(document));
  bench.execute();
  EXPECT_EQ(bench.graph.tensor(2).dtype, DType::i32);
  expect_values(bench.output(0), {386, -389, 776, -782});
}

TEST(ReferenceMovement, ViewsReduceIota) {
  const Json document = Json::parse(R"({"lawson": 1, "kind": "graph",
      "inputs": [{"name": "x", "dtype": "f32", "shape": [2, 3], "values": [1, -2, 3, 4, 5, -6]}],
      "ops": [
        {"op": "transpose", "in": ["x"], "perm": [1, 0], "out": "t"},
        {"op": "slice", "in": ["x"], "start": [0, 0], "limit": [2, 3], "stride": [1, 2], "out": "s"},
        {"op": "reshape", "in": ["x"], "shape": [3, 2], "out": "r"},
        {"op": "broadcast", "in": ["s"], "shape": [2, 2, 2], "out": "b"},
        {"op": "iota", "shape": [2, 3], "axis": 1, "out": "i"},
        {"op": "reduce_sum", "in": ["x"], "axes": [0], "out": "sum"},
        {"op": "reduce_mean", "in": ["x"], "axes": [1], "keepdims": true, "out": "mean"},
        {"op": "reduce_max", "in": ["x"], "axes": [0, 1], "out": "max"},
        {"op": "reduce_min", "in": ["x"], "axes": [1], "out": "min"},
        {"op": "reduce_prod", "in": ["x"], "axes": [1], "out": "prod"},
        {"op": "reduce_amax", "in": ["x"], "axes": [1], "out": "amax"},
        {"op": "reduce_norm1", "in": ["x"], "axes": [1], "out": "norm1"},
        {"op": "reduce_norm2", "in": ["x"], "axes": [0], "out": "norm2"}],
      "outputs": ["t", "s", "r", "b", "i", "sum", "mean", "max", "min", "prod", "amax", "norm1",
                  "norm2"]})");
  Bench bench(graph_from(document));
  bench.execute();
  const std::vector<std::vector<double>> expected{
      {1, 4, -2, 5, 3, -6},
      {1, 3, 4, -6},
      {1, -2, 3, 4, 5, -6},
      {1, 3, 4, -6, 1, 3, 4, -6},
      {0, 1, 2, 0, 1, 2},
      {5, 3, -3},
      {2.0 / 3, 1},
      {5},
      {-2, -6},
      {-6, -120},
      {3, 6},
      {6, 15},
      {std::sqrt(17.0), std::sqrt(29.0), std::sqrt(45.0)}};
  for (std::size_t i = 0; i < expected.size(); ++i) {
    SCOPED_TRACE(bench.graph.tensor(bench.outputs[i].id()).name);
    const auto actual = bench.output(i);
    ASSERT_EQ(actual.size(), expected[i].size());
    for (std::size_t k = 0; k < actual.size(); ++k) {
      EXPECT_NEAR(actual[k], expected[i][k], 1e-6 * std::fabs(expected[i][k]));
    }
  }
}

TEST(ReferenceRounding, StrictRoundsEveryIntermediate) {
  Json document = Json::parse(R"({"lawson": 1, "kind": "graph",
      "inputs": [{"name": "x", "dtype": "f32", "shape": [1], "values": [1.001953125]}],
      "ops": [{"op": "convert", "in": ["x"], "dtype": "bf16", "out": "b"},
              {"op": "convert", "in": ["b"], "dtype": "f32", "out": "y"}], "outputs": ["y"]})");
  {
    Bench wide(graph_from(document));
    wide.execute();
    EXPECT_EQ(wide.output(0)[0], 1.001953125);
    // Either way is within the bound.
    set_values(wide.graph, wide.outputs[0], {1.0});
    EXPECT_TRUE(wide.compare(kF32).ok());
    set_values(wide.graph, wide.outputs[0], {1.0078125});
    EXPECT_FALSE(wide.compare(kF32).ok());
  }
  document["strict"] = true;
  Bench strict(graph_from(document));
  strict.execute();
  EXPECT_EQ(strict.output(0)[0], 1.0);
  set_values(strict.graph, strict.outputs[0], {1.001953125});
  EXPECT_FALSE(strict.compare(kF32).ok());
}

TEST(ReferenceBounds, DecisionsThatCouldFlipCoverBothOutcomes) {
  // x * y is a little above 1; an f32 product may be at or below it.
  const Json document = Json::parse(R"({"lawson": 1, "kind": "graph",
      "inputs": [{"name": "x", "dtype": "f32", "shape": [2], "values": [0.3333333432674408, 5]},
                 {"name": "y", "dtype": "f32", "shape": [2], "values": [3, 1]}],
      "ops": [{"op": "mul", "in": ["x", "y"], "out": "s"},
              {"op": "floor", "in": ["s"], "out": "f"},
              {"op": "constant", "value": 1, "out": "one"},
              {"op": "compare_lt", "in": ["s", "one"], "out": "less"},
              {"op": "select", "in": ["less", "x", "y"], "out": "chosen"}],
      "outputs": ["f", "less", "chosen"]})");
  Bench bench(graph_from(document));
  const auto oracle = bench.oracle(kF32);
  EXPECT_GE(oracle[0].bounds[0], 1.0);
  EXPECT_EQ(oracle[0].bounds[1], 0.0);
  EXPECT_EQ(oracle[1].bounds[0], 1.0);
  EXPECT_EQ(oracle[1].bounds[1], 0.0);
  EXPECT_GE(oracle[2].bounds[0], 2.66);
  EXPECT_LT(oracle[2].bounds[1], 1e-6);
}

TEST(ReferenceBounds, OverflowOfTheOutputIsInfinity) {
  Bench bench(graph_from(one_op({{"op", "convert"}, {"dtype", "f16"}}, "f32", {3})));
  set_values(bench.graph, bench.inputs[0], {70000, -1e30, 65503});
  bench.execute();
  const auto oracle = bench.oracle(kF32);
  EXPECT_EQ(oracle[0].values[0], kInfinity);
  EXPECT_EQ(oracle[0].values[1], -kInfinity);
  EXPECT_TRUE(bench.compare(kF32).ok());
  set_values(bench.graph, bench.outputs[0], {65504, -kInfinity, 65503});
  EXPECT_FALSE(bench.compare(kF32).ok());
}

// ---- attention ----

Json attention(const Json& fields) {
  Json spec{{"lawson", 1},    {"kind", "attention"}, {"pass", "forward"}, {"dtype", "f64"},
            {"batch", 2},     {"heads", 4},          {"kv_heads", 2},     {"seqlen_q", 7},
            {"seqlen_kv", 9}, {"head_dim_qk", 6},    {"head_dim_v", 5},   {"return_stats", true}};
  spec.update(fields);
  if (spec["pass"] == "backward") spec.erase("return_stats");
  return spec;
}

ir::Graph attention_graph(const Json& fields) {
  return graph_of_case({"test", attention(fields), 1, plan::InputStyle::normal});
}

std::size_t input_named(const ir::Graph& graph, const std::string& name) {
  for (std::int32_t i = 0; i < graph.input_count; ++i) {
    if (graph.tensor(i).name == name) return static_cast<std::size_t>(i);
  }
  ADD_FAILURE() << "no input " << name;
  return 0;
}

TEST(ReferenceAttention, MasksAreTheirDefinition) {
  // With equal keys, a row is the mean of the values it sees; values are one-hot in the column.
  const auto seen = [](Json fields, std::int64_t q, std::int64_t kv) {
    fields.update({{"batch", 1},
                   {"heads", 1},
                   {"kv_heads", 1},
                   {"seqlen_q", q},
                   {"seqlen_kv", kv},
                   {"head_dim_qk", 1},
                   {"head_dim_v", kv}});
    Bench bench(attention_graph(fields));
    set_values(bench.graph, bench.inputs[1], std::vector<double>(static_cast<std::size_t>(kv), 0));
    std::vector<double> identity;
    for (std::int64_t i = 0; i < kv * kv; ++i) identity.push_back(i / kv == i % kv ? 1 : 0);
    set_values(bench.graph, bench.inputs[2], identity);
    bench.execute();
    std::string rows;
    const auto o = bench.output(0);
    for (std::size_t i = 0; i < o.size(); ++i) {
      if (i > 0 && i % static_cast<std::size_t>(kv) == 0) rows += ' ';
      rows += o[i] > 0 ? '1' : '0';
    }
    return rows;
  };
  EXPECT_EQ(seen({}, 2, 3), "111 111");
  EXPECT_EQ(seen({{"mask", "causal"}}, 3, 4), "1000 1100 1110");
  EXPECT_EQ(seen({{"mask", "causal_bottom_right"}}, 2, 4), "1110 1111");
  EXPECT_EQ(seen({{"mask", "causal_bottom_right"}}, 4, 2), "00 00 10 11");
  EXPECT_EQ(seen({{"window", {1, 0}}}, 4, 4), "1000 1100 0110 0011");
  EXPECT_EQ(seen({{"window", {0, 1}}}, 3, 4), "1100 0110 0011");
  EXPECT_EQ(seen({{"window", {1, -1}}}, 3, 4), "1111 1111 0111");
  EXPECT_EQ(seen({{"mask", "padding"}, {"seqlens_q", {2}}, {"seqlens_kv", {3}}}, 3, 4),
            "1110 1110 0000");
  EXPECT_EQ(seen({{"mask", "padding_causal_bottom_right"}, {"seqlens_q", {2}}, {"seqlens_kv", {3}}},
                 3, 4),
            "1100 1110 0000");
  EXPECT_EQ(seen({{"mask", "padding_causal"}, {"seqlens_q", {3}}, {"seqlens_kv", {2}}}, 3, 4),
            "1000 1100 1100");
}

TEST(ReferenceAttention, SmallestExampleByHand) {
  Bench bench(attention_graph({{"batch", 1},
                               {"heads", 1},
                               {"kv_heads", 1},
                               {"seqlen_q", 1},
                               {"seqlen_kv", 2},
                               {"head_dim_qk", 2},
                               {"head_dim_v", 1},
                               {"scale", 0.5}}));
  set_values(bench.graph, bench.inputs[0], {1, 2});
  set_values(bench.graph, bench.inputs[1], {2, 0, 0, 2});
  set_values(bench.graph, bench.inputs[2], {10, 20});
  bench.execute();  // scores 1 and 2
  const double e = std::numbers::e;
  EXPECT_NEAR(bench.output(0)[0], (10 + 20 * e) / (1 + e), 1e-12);
  EXPECT_NEAR(bench.output(1)[0], std::log(e + e * e), 1e-12);
}

TEST(ReferenceAttention, DenominatorsSoftcapAndRowsThatSeeNothing) {
  const auto run = [](Json fields) {
    fields.update({{"batch", 1},
                   {"heads", 1},
                   {"kv_heads", 1},
                   {"seqlen_q", 2},
                   {"seqlen_kv", 1},
                   {"head_dim_qk", 1},
                   {"head_dim_v", 1},
                   {"scale", 1.0},
                   {"mask", "causal_bottom_right"}});
    Bench bench(attention_graph(fields));
    set_values(bench.graph, bench.inputs[0], {3, 2});
    set_values(bench.graph, bench.inputs[1], {1});
    set_values(bench.graph, bench.inputs[2], {8});
    if (bench.inputs.size() > 4) set_values(bench.graph, bench.inputs[4], {0.5});
    bench.execute();
    auto result = bench.output(0);
    for (const double lse : bench.output(1)) result.push_back(lse);
    return result;  // o of both rows, then their statistics; the first row sees nothing
  };
  expect_values(run({}), {0, 8, -kInfinity, 2});
  const double e2 = std::exp(2.0);
  expect_values(run({{"softmax", "off_by_one"}}), {0, 8 * e2 / (1 + e2), 0, std::log(1 + e2)});
  const double sink = std::exp(0.5);
  expect_values(run({{"softmax", "learnable"}}),
                {0, 8 * e2 / (sink + e2), 0.5, std::log(sink + e2)});
  expect_values(run({{"softcap", 1.5}}), {0, 8, -kInfinity, 1.5 * std::tanh(2 / 1.5)});
}

TEST(ReferenceAttention, AlibiSlopes) {
  // Press et al. 2022 for 4 heads: 1/4, 1/16, 1/64, 1/256; for 3: two of 2 heads, one of 4.
  for (const auto& [heads, slopes] :
       {std::pair{4, std::vector<double>{0.25, 0.0625, 0x1p-6, 0x1p-8}},
        std::pair{3, std::vector<double>{0x1p-4, 0x1p-8, 0x1p-2}}}) {
    Bench bench(attention_graph({{"batch", 1},
                                 {"heads", heads},
                                 {"kv_heads", heads},
                                 {"seqlen_q", 1},
                                 {"seqlen_kv", 2},
                                 {"head_dim_qk", 1},
                                 {"head_dim_v", 1},
                                 {"bias", "alibi"},
                                 {"mask", "causal_bottom_right"}}));
    set_values(bench.graph, bench.inputs[0], std::vector<double>(slopes.size(), 0));
    bench.execute();
    for (std::size_t h = 0; h < slopes.size(); ++h) {
      EXPECT_NEAR(bench.output(1)[h], std::log(1 + std::exp(-slopes[h])), 1e-12);
    }
  }
}

const std::vector<Json>& variants() {
  static const std::vector<Json> list{
      Json::object(),
      {{"mask", "causal"}},
      {{"mask", "causal_bottom_right"}},
      {{"mask", "causal_bottom_right"}, {"seqlen_q", 9}, {"seqlen_kv", 4}},
      {{"window", {2, 1}}},
      {{"mask", "padding"}, {"seqlens_q", {5, 7}}, {"seqlens_kv", {9, 3}}},
      {{"mask", "padding_causal_bottom_right"}, {"seqlens_q", {6, 0}}, {"seqlens_kv", {4, 9}}},
      {{"bias", "post_scale"}, {"bias_shape", {1, 4, 7, 9}}},
      {{"bias", "post_scale"}, {"bias_shape", {2, 1, 1, 9}}},
      {{"bias", "post_scale"}, {"bias_shape", {1, 1, 7, 1}}, {"softmax", "off_by_one"}},
      {{"bias", "alibi"}, {"mask", "causal"}},
      {{"softcap", 2.0}},
      {{"softcap", 1.0}, {"bias", "post_scale"}, {"bias_shape", {2, 4, 7, 9}}},
      {{"softmax", "off_by_one"}, {"mask", "causal"}},
      {{"softmax", "learnable"}},
      {{"softmax", "learnable"}, {"softcap", 3.0}, {"mask", "causal_bottom_right"}},
      {{"heads", 6}, {"kv_heads", 1}, {"layout", "sbhd_bshd_bhsd"}, {"scale", 0.7}},
  };
  return list;
}

// d(sum dout * O) / d(input element) by central differences of the forward.
TEST(ReferenceAttention, GradientsAreFiniteDifferences) {
  for (const Json& fields : variants()) {
    SCOPED_TRACE(fields.dump());
    Json backward_fields = fields;
    backward_fields["pass"] = "backward";
    if (fields.contains("bias") && fields["bias"] == "post_scale") {
      backward_fields["bias_grad"] = true;
    }
    Bench backward(attention_graph(backward_fields), 5);
    Bench forward(attention_graph(fields), 5);
    backward.execute();
    const auto dout = backward.input(input_named(backward.graph, "do"));
    const auto loss = [&] {
      forward.execute();
      const auto o = forward.output(0);
      double sum = 0;
      for (std::size_t i = 0; i < o.size(); ++i) sum += o[i] * dout[i];
      return sum;
    };
    std::size_t checked = 0;
    for (std::size_t g = 0; g < backward.outputs.size(); ++g) {
      const std::string name = backward.graph.tensor(backward.outputs[g].id()).name;
      SCOPED_TRACE(name);
      const std::size_t of = input_named(forward.graph, name.substr(1));
      const auto gradient = backward.output(g);
      const auto original = forward.input(of);
      ASSERT_EQ(gradient.size(), original.size());
      // The sink is f32 storage: a step that it can represent, and a coarser comparison.
      const bool coarse = forward.graph.tensor(forward.inputs[of].id()).dtype == DType::f32;
      const double step = coarse ? 0x1p-10 : 0x1p-17;
      for (std::size_t i = 0; i < original.size(); i += 1 + original.size() / 23) {
        auto moved = original;
        moved[i] = original[i] + step;
        set_values(forward.graph, forward.inputs[of], moved);
        const double moved_up = forward.input(of)[i];
        const double above = loss();
        moved[i] = original[i] - step;
        set_values(forward.graph, forward.inputs[of], moved);
        const double moved_down = forward.input(of)[i];
        const double below = loss();
        set_values(forward.graph, forward.inputs[of], original);
        EXPECT_NEAR(gradient[i], (above - below) / (moved_up - moved_down), coarse ? 1e-5 : 1e-7)
            << i;
        ++checked;
      }
    }
    EXPECT_GT(checked, 30U);
  }
}

TEST(ReferenceAttention, InvalidAndUnseeingRowsHaveZeroGradients) {
  Bench bench(attention_graph({{"pass", "backward"},
                               {"mask", "padding_causal_bottom_right"},
                               {"seqlens_q", {4, 7}},
                               {"seqlens_kv", {0, 5}}}));
  bench.execute();
  for (const auto& output : bench.outputs) {
    const auto values = values_of(bench.graph, output);
    for (std::size_t i = 0; i < values.size() / 2; ++i) EXPECT_EQ(values[i], 0.0);  // batch 0
    for (const double v : values) EXPECT_FALSE(std::isnan(v));
  }
  EXPECT_TRUE(bench.compare(kF32).ok());
}

// ---- the bounds: right engines pass, wrong ones do not ----

TEST(ReferenceBounds, ItsOwnResultsAreWithinThem) {
  auto engine = make_reference_engine();
  const auto check = [&](const std::vector<cases::Case>& list) {
    for (const cases::Case& item : list) {
      const ir::Graph graph = graph_of_case(item);
      cases::JudgeOptions options;
      options.seed = item.seed;
      options.style = item.style;
      auto result = cases::judge(*engine, cpu_device(), graph, *engine, options);
      ASSERT_TRUE(result.ok()) << item.text() << ": " << result.error().message;
      EXPECT_TRUE(result->comparison.ok()) << item.text() << ": " << result->comparison.text();
    }
  };
  check(cases::attention_cases(100, 15));
  check(cases::fusion_cases(100, 60));
}

// A plain f32 engine for tests: attention forward with f32 accumulation and stored probabilities.
// `round` is applied after every accumulation.
std::vector<double> plain_attention(Bench& bench, double scale, const std::vector<double>& q,
                                    const std::vector<double>& k, const std::vector<double>& v,
                                    DType storage, const std::function<float(float)>& round) {
  const Dims& qs = bench.graph.tensor(0).shape;
  const Dims& ks = bench.graph.tensor(1).shape;
  const std::size_t heads = static_cast<std::size_t>(qs[0] * qs[1]);
  const std::size_t group = static_cast<std::size_t>(qs[1] / ks[1]);
  const auto s = static_cast<std::size_t>(qs[2]);
  const auto t = static_cast<std::size_t>(ks[2]);
  const auto d = static_cast<std::size_t>(qs[3]);
  std::vector<double> o(heads * s * d);
  for (std::size_t h = 0; h < heads; ++h) {
    for (std::size_t i = 0; i < s; ++i) {
      std::vector<float> x(t);
      float m = -1e30F;
      for (std::size_t j = 0; j < t; ++j) {
        float sum = 0;
        for (std::size_t c = 0; c < d; ++c) {
          sum = round(sum +
                      static_cast<float>(q[(h * s + i) * d + c] * k[(h / group * t + j) * d + c]));
        }
        x[j] = sum * static_cast<float>(scale);
        m = std::max(m, x[j]);
      }
      float denominator = 0;
      for (float& e : x) {
        e = std::exp(e - m);
        denominator = round(denominator + e);
      }
      for (std::size_t c = 0; c < d; ++c) {
        float sum = 0;
        for (std::size_t j = 0; j < t; ++j) {
          sum = round(sum + static_cast<float>(round_to(storage, x[j])) *
                                static_cast<float>(v[(h / group * t + j) * d + c]));
        }
        o[(h * s + i) * d + c] = sum / denominator;
      }
    }
  }
  return o;
}

// Swaps the two kv heads of a [b, 2, s, d] tensor.
std::vector<double> swapped_heads(const std::vector<double>& x, const Dims& shape) {
  std::vector<double> result = x;
  const auto half = static_cast<std::size_t>(shape[2] * shape[3]);
  for (std::size_t i = 0; i < x.size(); ++i) {
    result[i] = x[i / half % 2 == 0 ? i + half : i - half];
  }
  return result;
}

TEST(ReferenceBounds, RightAttentionPassesWrongAttentionDoesNot) {
  const Json fields{
      {"dtype", "bf16"},  {"batch", 1},        {"heads", 4},       {"seqlen_q", 64},
      {"seqlen_kv", 128}, {"head_dim_qk", 64}, {"head_dim_v", 64}, {"return_stats", false},
      {"layout", "bhsd"}};
  Bench bench(attention_graph(fields), 3);
  const auto q = bench.input(0);
  const auto k = bench.input(1);
  const auto v = bench.input(2);
  const double scale = 0.125;
  const auto f32 = [](float x) { return x; };
  const auto bf16 = [](float x) { return static_cast<float>(round_to(DType::bf16, x)); };
  const auto judged = [&](const std::vector<double>& o) {
    set_values(bench.graph, bench.outputs[0], o);
    return bench.compare(kBf16Storage);
  };
  const auto right = judged(plain_attention(bench, scale, q, k, v, DType::bf16, f32));
  EXPECT_TRUE(right.ok()) << right.text();
  EXPECT_GT(right.max_ratio(), 0.1) << "the bound is so wide that it means nothing";
  EXPECT_FALSE(judged(plain_attention(bench, scale, q, k, v, DType::bf16, bf16)).ok())
      << "bf16 accumulation";
  EXPECT_FALSE(judged(plain_attention(bench, 1, q, k, v, DType::bf16, f32)).ok())
      << "missing scale";
  const Dims& kv = bench.graph.tensor(1).shape;
  EXPECT_FALSE(
      judged(plain_attention(bench, scale, q, swapped_heads(k, kv), v, DType::bf16, f32)).ok())
      << "swapped key heads";
  EXPECT_FALSE(
      judged(plain_attention(bench, scale, q, k, swapped_heads(v, kv), DType::bf16, f32)).ok())
      << "swapped value heads";
  EXPECT_FALSE(judged(plain_attention(bench, scale * 1.01, q, k, v, DType::bf16, f32)).ok())
      << "a scale that is 1% off";
}

// The same graph with one bound of its rule changed must not pass for the right one.
TEST(ReferenceBounds, WrongMaskBoundsAreCaught) {
  const auto break_rule = [](const ir::Graph& graph,
                             const std::function<void(ir::AttentionRule&)>& change) {
    ir::Graph broken = graph;
    std::visit(ir::Overloaded{[&](ir::Attention& a) { change(a.rule); },
                              [&](ir::AttentionBackward& a) { change(a.rule); }, [](auto&) {}},
               broken.nodes[0].op);
    return broken;
  };
  for (const char* dtype : {"bf16", "f16", "f32"}) {
    for (const char* pass : {"forward", "backward"}) {
      SCOPED_TRACE(fmt::format("{} {}", dtype, pass));
      const Arithmetic arithmetic{0, 0x1p-24, unit_roundoff(*dtype_from_string(dtype)), 0x1p-22};
      const Json shape{{"dtype", dtype},   {"pass", pass},    {"batch", 1},
                       {"seqlen_q", 96},   {"seqlen_kv", 96}, {"head_dim_qk", 32},
                       {"head_dim_v", 32}, {"mask", "causal"}};
      Bench bench(attention_graph(shape), 9);
      bench.execute();
      EXPECT_TRUE(bench.compare(arithmetic).ok()) << bench.compare(arithmetic).text();
      bench.execute(break_rule(bench.graph, [](ir::AttentionRule& r) { r.right = 1; }));
      EXPECT_FALSE(bench.compare(arithmetic).ok()) << "sees one column of the future";

      Json window = shape;
      window["window"] = {40, 0};
      Bench windowed(attention_graph(window), 9);
      for (const std::int64_t left : {39, 41}) {
        windowed.execute(break_rule(windowed.graph, [&](ir::AttentionRule& r) { r.left = left; }));
        EXPECT_FALSE(windowed.compare(arithmetic).ok()) << "left bound " << left;
      }
      Json capped = shape;
      capped["softcap"] = 20.0;
      Bench cap(attention_graph(capped), 9);
      cap.execute(break_rule(cap.graph, [](ir::AttentionRule& r) { r.softcap = 0; }));
      EXPECT_FALSE(cap.compare(arithmetic).ok()) << "softcap left out";
      // The backward has the denominator in its statistics.
      if (std::string{pass} == "backward") continue;
      Json one = shape;
      one["softmax"] = "off_by_one";
      Bench off(attention_graph(one), 9);
      off.execute(break_rule(off.graph,
                             [](ir::AttentionRule& r) { r.softmax = ir::SoftmaxKind::vanilla; }));
      EXPECT_FALSE(off.compare(arithmetic).ok()) << "off-by-one left out";
    }
  }
}

TEST(ReferenceBounds, MatmulAccumulatesInF32) {
  const Json document = Json::parse(R"({"lawson": 1, "kind": "graph",
      "inputs": [{"name": "a", "dtype": "bf16", "shape": [16, 256]},
                 {"name": "b", "dtype": "bf16", "shape": [256, 16]}],
      "ops": [{"op": "matmul", "in": ["a", "b"], "dtype": "f32", "out": "c"}], "outputs": ["c"]})");
  Bench bench(graph_from(document));
  const auto a = bench.input(0);
  const auto b = bench.input(1);
  const auto product = [&](const std::function<float(float)>& round) {
    std::vector<double> c(256);
    for (std::size_t i = 0; i < 16; ++i) {
      for (std::size_t j = 0; j < 16; ++j) {
        float sum = 0;
        for (std::size_t l = 0; l < 256; ++l) {
          sum = round(sum + static_cast<float>(a[i * 256 + l] * b[l * 16 + j]));
        }
        c[i * 16 + j] = sum;
      }
    }
    return c;
  };
  set_values(bench.graph, bench.outputs[0], product([](float x) { return x; }));
  EXPECT_TRUE(bench.compare(kF32).ok()) << bench.compare(kF32).text();
  for (const DType narrow : {DType::bf16, DType::f16}) {
    set_values(bench.graph, bench.outputs[0],
               product([&](float x) { return static_cast<float>(round_to(narrow, x)); }));
    EXPECT_FALSE(bench.compare(kF32).ok()) << to_string(narrow);
  }
}

TEST(ReferenceEngineContract, PlansAndBindings) {
  auto engine = make_reference_engine();
  const Device device = cpu_device();
  const ir::Graph graph = graph_from(one_op({{"op", "neg"}}, "f32", {3}));
  auto verdict = engine->probe(graph, device, {});
  ASSERT_TRUE(verdict.ok());
  EXPECT_EQ(verdict->decision, Decision::supported);
  EXPECT_EQ(verdict->engine, "reference");
  auto plan = engine->compile(graph, device, {}, std::nullopt, {});
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->plan_id, verdict->plan_id);
  EXPECT_EQ(plan->key, verdict->key);
  EXPECT_FALSE(engine->compile(graph, device, {}, Candidate{"other"}, {}).ok());
  Plan foreign = *plan;
  foreign.engine = "cpu";
  EXPECT_FALSE(engine->load(foreign, device).ok());
  auto loaded = engine->load(*plan, device);
  ASSERT_TRUE(loaded.ok());
  float x[3] = {1, 2, 3};
  const Binding only_input{1, x};
  const Status status = engine->execute(**loaded, {&only_input, 1}, nullptr, nullptr);
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.error().message.find("output 'y'"), std::string::npos);
}

}  // namespace
}  // namespace lawson
