// The reference engine against facts that do not come from itself: known values, definitions,
// finite differences; and its error bounds against engines that are right and engines that are not.
#include <cmath>
#include <functional>
#include <map>
#include <numbers>

#include "reference_bench.h"

namespace lawson {
namespace {

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
