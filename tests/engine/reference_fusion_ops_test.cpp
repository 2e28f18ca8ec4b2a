// Gradients of activations, concatenation, norms and block-scaled products: values from their
// definitions, finite differences, and plain f32 implementations within their bounds.
#include <functional>
#include <map>
#include <numbers>

#include "engine/reference/evaluate.h"
#include "reference_bench.h"

namespace lawson {
namespace {

using Values = std::vector<double>;

// A document of one op; operands in slot order, {"name", "dtype", "shape"}.
Json document_of(Json op, const Json& inputs, const Json& out) {
  Json document{{"lawson", 1}, {"kind", "graph"}, {"inputs", Json::array()}};
  op["in"] = Json::array();
  for (const Json& input : inputs) {
    if (!input.is_null()) document["inputs"].push_back(input);
    op["in"].push_back(input.is_null() ? Json{} : input["name"]);
  }
  op["out"] = out;
  document["ops"] = {op};
  document["outputs"] = Json::array();
  for (const Json& name : out.is_array() ? out : Json::array({out})) {
    if (!name.is_null()) document["outputs"].push_back(name);
  }
  return document;
}

Json tensor(const char* name, const char* dtype, const Dims& shape) {
  return {{"name", name}, {"dtype", dtype}, {"shape", shape}};
}

double activation(const std::string& kind, double x) {
  auto op = std::get<ir::Unary>(*ir::op_from_name(kind));
  return reference::apply(op, x);
}

const std::vector<std::string> kActivations{"tanh", "sigmoid",  "relu", "leaky_relu", "relu6",
                                            "elu",  "softplus", "silu", "gelu",       "gelu_tanh"};

// ---- values ----

TEST(ReferenceGrad, IsTheDifferenceQuotient) {
  const Values x{-9, -3.1, -1.3, -0.4, -1e-3, 2e-3, 0.3, 1.1, 2.4, 5.9, 6.2, 11};
  Values dy;
  for (std::size_t i = 0; i < x.size(); ++i) dy.push_back(i % 2 == 0 ? 1.5 : -0.75);
  for (const std::string& kind : kActivations) {
    SCOPED_TRACE(kind);
    const Dims shape{static_cast<std::int64_t>(x.size())};
    Bench bench(graph_from(document_of(
        {{"op", kind + "_grad"}}, {tensor("dy", "f64", shape), tensor("x", "f64", shape)}, "y")));
    bench.set("x", x);
    bench.set("dy", dy);
    bench.execute();
    const Values y = bench.values("y");
    for (std::size_t i = 0; i < x.size(); ++i) {
      constexpr double kStep = 1e-4;
      const auto f = [&](double steps) { return activation(kind, x[i] + steps * kStep); };
      const double slope = (8 * (f(1) - f(-1)) - (f(2) - f(-2))) / (12 * kStep);
      EXPECT_NEAR(y[i], dy[i] * slope, 1e-10) << x[i];
    }
  }
}

TEST(ReferenceGrad, KinksTailsAndNaN) {
  const auto grad = [](Json op, const Values& dy, const Values& x) {
    const Dims shape{static_cast<std::int64_t>(x.size())};
    Bench bench(graph_from(
        document_of(std::move(op), {tensor("dy", "f64", shape), tensor("x", "f64", shape)}, "y")));
    bench.set("x", x);
    bench.set("dy", dy);
    bench.execute();
    return bench.values("y");
  };
  expect_values(grad({{"op", "relu_grad"}}, {2, 2, 2}, {-1, 0, 1}), {0, 0, 2});
  expect_values(grad({{"op", "relu6_grad"}}, {2, 2, 2, 2}, {0, 3, 6, 7}), {0, 2, 0, 0});
  expect_values(grad({{"op", "leaky_relu_grad"}, {"slope", 0.25}}, {2, 2, 2}, {-1, 0, 1}),
                {0.5, 0.5, 2});
  expect_values(grad({{"op", "elu_grad"}, {"alpha", 3.0}}, {2, 2, 2}, {-1, 0, 1}),
                {6 / std::numbers::e, 6, 2});
  for (const std::string& kind : kActivations) {
    SCOPED_TRACE(kind);
    const double left = kind == "leaky_relu" ? 0.01 : 0;
    const double right = kind == "tanh" || kind == "sigmoid" || kind == "relu6" ? 0 : 1;
    expect_values(grad({{"op", kind + "_grad"}}, {1, 1, 1, kNaN}, {-900, 900, kNaN, 1}),
                  {left, right, kNaN, kNaN});
  }
}

TEST(ReferenceConcat, OneBehindTheOther) {
  const Json document = Json::parse(R"({"lawson": 1, "kind": "graph",
      "inputs": [{"name": "a", "dtype": "i8", "shape": [2, 1], "values": [1, 2]},
                 {"name": "b", "dtype": "i8", "shape": [2, 3], "strides": [1, 2],
                  "values": [3, 4, 5, 6, 7, 8]},
                 {"name": "c", "dtype": "i8", "shape": [2, 0]}],
      "ops": [{"op": "concat", "in": ["a", "b", "c", "a"], "axis": 1, "out": "wide"},
              {"op": "concat", "in": ["wide", "wide"], "axis": 0, "out": "tall"}],
      "outputs": ["wide", "tall"]})");
  Bench bench(graph_from(document));
  bench.execute();
  const Values wide{1, 3, 4, 5, 1, 2, 6, 7, 8, 2};
  expect_values(bench.values("wide"), wide);
  Values twice = wide;
  twice.insert(twice.end(), wide.begin(), wide.end());
  expect_values(bench.values("tall"), twice);
}

TEST(ReferenceNorm, ByHand) {
  {
    Bench bench(graph_from(document_of(
        {{"op", "layer_norm"}, {"axes", {1}}, {"eps", 0}},
        {tensor("x", "f64", {2, 2}), tensor("scale", "f64", {2}), tensor("bias", "f64", {1, 2})},
        {"y", "mean", "inv_std"})));
    bench.set("x", {1, 3, -4, 4});
    bench.set("scale", {10, 20});
    bench.set("bias", {1, 2});
    bench.execute();
    expect_values(bench.values("mean"), {2, 0});
    expect_values(bench.values("inv_std"), {1, 0.25});
    expect_values(bench.values("y"), {-9, 22, -9, 22});
  }
  {
    Bench bench(graph_from(
        document_of({{"op", "rms_norm"}, {"axes", {0, 2}}, {"eps", 0.5}},
                    {tensor("x", "f64", {2, 2, 1}), tensor("scale", "f64", {2, 1, 1}), Json{}},
                    {"y", Json{}, "inv_std"})));
    bench.set("x", {3, 1, 4, 0});  // slices (3, 4) and (1, 0)
    bench.set("scale", {1, -2});
    bench.execute();
    expect_values(bench.values("inv_std"), {1 / std::sqrt(13.0), 1});
    expect_values(bench.values("y"), {3 / std::sqrt(13.0), 1, -8 / std::sqrt(13.0), 0});
  }
}

struct NormCase {
  std::string op;
  Dims shape;
  Dims axes;
  Dims scale;
};
const std::vector<NormCase> kNorms{
    {"layer_norm", {3, 5}, {1}, {5}},          {"rms_norm", {3, 5}, {1}, {1, 5}},
    {"layer_norm", {2, 3, 4}, {1, 2}, {3, 4}}, {"rms_norm", {2, 3, 4}, {0, 2}, {2, 1, 4}},
    {"layer_norm", {4, 3}, {0}, {4, 1}},       {"rms_norm", {3, 2, 2}, {0, 1, 2}, {3, 2, 2}}};

Json norm_document(const NormCase& c, const char* dtype, double eps = 1e-2) {
  return document_of(
      {{"op", c.op}, {"axes", c.axes}, {"eps", eps}},
      {tensor("x", dtype, c.shape), tensor("scale", dtype, c.scale),
       tensor("bias", dtype, c.scale)},
      c.op == "layer_norm" ? Json{"y", "mean", "inv_std"} : Json{"y", Json{}, "inv_std"});
}

Json norm_backward_document(const NormCase& c, const char* dtype) {
  Dims stats = c.shape;
  for (const std::int64_t axis : c.axes) stats[static_cast<std::size_t>(axis)] = 1;
  const char* stats_dtype = std::string{dtype} == "f64" ? "f64" : "f32";
  return document_of(
      {{"op", c.op + "_backward"}, {"axes", c.axes}},
      {tensor("dy", dtype, c.shape), tensor("x", dtype, c.shape), tensor("scale", dtype, c.scale),
       c.op == "layer_norm" ? tensor("mean", stats_dtype, stats) : Json{},
       tensor("inv_std", stats_dtype, stats)},
      {"dx", "dscale", "dbias"});
}

TEST(ReferenceNorm, BackwardIsTheDifferenceQuotient) {
  for (const NormCase& c : kNorms) {
    SCOPED_TRACE(fmt::format("{} {}", c.op, to_string(c.axes)));
    Bench forward(graph_from(norm_document(c, "f64")), 4);
    Bench backward(graph_from(norm_backward_document(c, "f64")), 5);
    forward.execute();
    for (const char* name : {"x", "scale"}) backward.set(name, forward.values(name));
    for (const char* name : {"mean", "inv_std"}) {
      if (forward.has(forward.outputs, name)) backward.set(name, forward.values(name));
    }
    backward.execute();
    const Values dy = backward.values("dy");
    const auto loss = [&] {
      forward.execute();
      const Values y = forward.values("y");
      double sum = 0;
      for (std::size_t i = 0; i < y.size(); ++i) sum += dy[i] * y[i];
      return sum;
    };
    const std::map<std::string, std::string> gradients{
        {"x", "dx"}, {"scale", "dscale"}, {"bias", "dbias"}};
    for (const auto& entry : gradients) {
      const std::string& of = entry.first;
      const std::string& gradient = entry.second;
      const Values at = forward.values(of);
      const Values result = backward.values(gradient);
      ASSERT_EQ(at.size(), result.size());
      for (std::size_t i = 0; i < at.size(); ++i) {
        constexpr double kStep = 1e-4;
        const auto f = [&](double steps) {
          Values moved = at;
          moved[i] += steps * kStep;
          forward.set(of, moved);
          return loss();
        };
        const double slope = (8 * (f(1) - f(-1)) - (f(2) - f(-2))) / (12 * kStep);
        EXPECT_NEAR(result[i], slope, 1e-8 * (1 + std::fabs(slope))) << gradient << " " << i;
      }
      forward.set(of, at);
    }
  }
}

// ---- block-scaled products ----

struct Quantised {
  const char* name;
  const char* values;
  const char* scales;
  std::int64_t block;
};
const std::vector<Quantised> kQuantised{{"mxfp8", "f8e4m3", "f8e8m0", 32},
                                        {"mxfp8 e5m2", "f8e5m2", "f8e8m0", 32},
                                        {"nvfp4", "f4e2m1", "f8e4m3", 16},
                                        {"f32 scales", "f8e4m3", "f32", 7}};

struct ScaledCase {
  std::int64_t batch_a, batch_b, m, n, k;
  bool swizzled;
  bool b_by_columns;
};

std::int64_t up(std::int64_t n, std::int64_t to) {
  return (n + to - 1) / to * to;
}

Json scaled_document(const Quantised& q, const ScaledCase& c) {
  const std::int64_t blocks = up(c.k, q.block) / q.block;
  const auto rows = [&](std::int64_t n) { return c.swizzled ? up(n, 128) : n; };
  const std::int64_t columns = c.swizzled ? up(blocks, 4) : blocks;
  Json b_scale = tensor("b_scale", q.scales, {c.batch_b, columns, rows(c.n)});
  if (c.b_by_columns) b_scale["strides"] = {columns * rows(c.n), 1, columns};
  return document_of(
      {{"op", "scaled_matmul"}, {"block", q.block}, {"swizzled", c.swizzled}},
      {tensor("a", q.values, {c.batch_a, c.m, c.k}), tensor("b", q.values, {c.batch_b, c.k, c.n}),
       tensor("a_scale", q.scales, {c.batch_a, rows(c.m), columns}), b_scale},
      "c");
}

// The scale of (row, block), read off its memory as ops.h says.
double scale_at(const Bench& bench, const plan::Buffer& buffer, bool swizzled, bool of_b,
                std::int64_t batch, std::int64_t row, std::int64_t block) {
  const ir::Tensor& t = bench.graph.tensor(buffer.id());
  const std::int64_t matrix = t.shape[1] * t.shape[2];
  std::int64_t offset =
      of_b ? block * t.strides[1] + row * t.strides[2] : row * t.strides[1] + block * t.strides[2];
  if (swizzled) {
    const std::int64_t tiles = (of_b ? t.shape[1] : t.shape[2]) / 4;
    offset = (row / 128 * tiles + block / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4;
  }
  return load_element(buffer.data(), t.dtype, batch * matrix + offset);
}

// Every scale as a function of its place, NaN where nothing may be read.
void fill_scales(Bench& bench, const Quantised& q, const ScaledCase& c, bool of_b) {
  plan::Buffer& buffer = bench.input(of_b ? "b_scale" : "a_scale");
  const ir::Tensor& t = bench.graph.tensor(buffer.id());
  const std::int64_t matrix = t.shape[1] * t.shape[2];
  const std::int64_t blocks = up(c.k, q.block) / q.block;
  if (c.swizzled) {
    for (std::int64_t i = 0; i < t.shape[0] * matrix; ++i) {
      store_element(buffer.data(), t.dtype, i, kNaN);
    }
  }
  for (std::int64_t batch = 0; batch < t.shape[0]; ++batch) {
    for (std::int64_t row = 0; row < (of_b ? c.n : c.m); ++row) {
      for (std::int64_t block = 0; block < blocks; ++block) {
        std::int64_t offset = of_b ? block * t.strides[1] + row * t.strides[2]
                                   : row * t.strides[1] + block * t.strides[2];
        if (c.swizzled) {
          const std::int64_t across = (of_b ? t.shape[1] : t.shape[2]) / 4;
          const std::int64_t tile = row / 128 * across + block / 4;
          offset = tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4;
        }
        const double power = static_cast<double>((batch * 3 + row * 5 + block * 7) % 6) - 3;
        const double fraction = std::string{q.scales} == "f8e8m0" ? 1 : 1.25;
        store_element(buffer.data(), t.dtype, batch * matrix + offset, fraction * std::exp2(power));
      }
    }
  }
}

// Sums in `T`: each element scaled, or each block's sum.
template <typename T>
Values plain_scaled(Bench& bench, const Quantised& q, const ScaledCase& c, bool per_block,
                    std::int64_t block_shift = 0) {
  const Values a = bench.values("a");
  const Values b = bench.values("b");
  const std::int64_t batches = std::max(c.batch_a, c.batch_b);
  const std::int64_t blocks = up(c.k, q.block) / q.block;
  Values result;
  for (std::int64_t batch = 0; batch < batches; ++batch) {
    const std::int64_t of_a = c.batch_a == 1 ? 0 : batch;
    const std::int64_t of_b = c.batch_b == 1 ? 0 : batch;
    for (std::int64_t i = 0; i < c.m; ++i) {
      for (std::int64_t j = 0; j < c.n; ++j) {
        T sum = 0;
        for (std::int64_t block = 0; block < blocks; ++block) {
          const auto s = static_cast<T>(scale_at(bench, bench.input("a_scale"), c.swizzled, false,
                                                 of_a, i, (block + block_shift) % blocks));
          const auto t = static_cast<T>(
              scale_at(bench, bench.input("b_scale"), c.swizzled, true, of_b, j, block));
          T inner = 0;
          for (std::int64_t l = block * q.block; l < std::min((block + 1) * q.block, c.k); ++l) {
            const auto x = static_cast<T>(a[static_cast<std::size_t>((of_a * c.m + i) * c.k + l)]);
            const auto y = static_cast<T>(b[static_cast<std::size_t>((of_b * c.k + l) * c.n + j)]);
            if (per_block) {
              inner += x * y;
            } else {
              sum += (x * s) * (y * t);
            }
          }
          if (per_block) sum += inner * (s * t);
        }
        result.push_back(static_cast<double>(sum));
      }
    }
  }
  return result;
}

TEST(ReferenceScaledMatmul, DequantisesAndMultiplies) {
  const std::vector<ScaledCase> sizes{{1, 1, 3, 4, 64, false, false},
                                      {2, 1, 5, 3, 75, false, true},
                                      {2, 2, 1, 2, 9, false, false},
                                      {1, 2, 130, 3, 75, true, false},
                                      {2, 2, 3, 133, 150, true, true}};
  for (const Quantised& q : kQuantised) {
    for (const ScaledCase& c : sizes) {
      SCOPED_TRACE(fmt::format("{} {}x{}x{} swizzled {}", q.name, c.m, c.n, c.k, c.swizzled));
      Bench bench(graph_from(scaled_document(q, c)), 6);
      fill_scales(bench, q, c, false);
      fill_scales(bench, q, c, true);
      bench.execute();
      const Values expected = plain_scaled<double>(bench, q, c, false);
      const Values actual = bench.values("c");
      ASSERT_EQ(actual.size(), expected.size());
      EXPECT_EQ(bench.graph.tensor(bench.outputs[0].id()).dtype, DType::f32);
      for (std::size_t i = 0; i < actual.size(); ++i) {
        ASSERT_NEAR(actual[i], expected[i], 1e-6 * std::fabs(expected[i])) << i;
      }
      for (const bool per_block : {false, true}) {
        bench.set("c", plain_scaled<float>(bench, q, c, per_block));
        EXPECT_TRUE(bench.compare(kF32).ok()) << bench.compare(kF32).text();
      }
      double largest = 0;
      for (const double v : expected) largest = std::max(largest, std::fabs(v));
      const auto oracle = bench.oracle(kF32);
      for (const double bound : oracle[0].bounds) EXPECT_LT(bound, 1e-3 * largest);
      if (up(c.k, q.block) > q.block) {
        bench.set("c", plain_scaled<float>(bench, q, c, true, 1));
        EXPECT_FALSE(bench.compare(kF32).ok()) << "a block's scale for the next one's";
      }
    }
  }
}

TEST(ReferenceScaledMatmul, NaNScalesAndRangeOfF32) {
  const ScaledCase c{1, 1, 2, 1, 64, false, false};
  Bench bench(graph_from(scaled_document(kQuantised[0], c)), 6);
  bench.set("a", Values(128, 1));
  bench.set("b", Values(64, 1));
  bench.set("a_scale", {1, kNaN, 1, 1});
  bench.set("b_scale", {1, 2});
  bench.execute();
  expect_values(bench.values("c"), {kNaN, 96});
  EXPECT_TRUE(bench.compare(kF32).ok());
  EXPECT_EQ(bench.oracle(kF32)[0].bounds[0], 0.0);
  // Either product of scales is 1, but not what an engine may compute on the way.
  bench.set("a_scale", {0x1p127, 0x1p127, 1, 1});
  bench.set("b_scale", {0x1p-127, 0x1p-127});
  bench.execute();
  expect_values(bench.values("c"), {64, 64 * 0x1p-127});
  EXPECT_EQ(bench.oracle(kF32)[0].bounds[0], kInfinity);
}

// ---- bounds: plain f32 implementations pass, wrong ones do not ----

float activation_slope(const std::string& kind, float x) {
  const auto sigmoid = [](float v) { return 1.0F / (1.0F + std::exp(-v)); };
  if (kind == "tanh") return 1.0F - std::tanh(x) * std::tanh(x);
  if (kind == "sigmoid") return sigmoid(x) * (1.0F - sigmoid(x));
  if (kind == "relu") return x > 0 ? 1.0F : 0.0F;
  if (kind == "leaky_relu") return x > 0 ? 1.0F : 0.01F;
  if (kind == "relu6") return x > 0 && x < 6 ? 1.0F : 0.0F;
  if (kind == "elu") return x > 0 ? 1.0F : std::exp(x);
  if (kind == "softplus") return sigmoid(x);
  if (kind == "silu") return sigmoid(x) * (1.0F + x * (1.0F - sigmoid(x)));
  if (kind == "gelu") {
    return 0.5F * (1.0F + std::erf(x * 0.70710678F)) + x * 0.39894228F * std::exp(-0.5F * x * x);
  }
  const float t = std::tanh(0.79788456F * (x + 0.044715F * x * x * x));
  return 0.5F * (1.0F + t) +
         0.5F * x * (1.0F - t * t) * 0.79788456F * (1.0F + 3 * 0.044715F * x * x);
}

TEST(ReferenceGrad, PlainF32IsWithinTheBounds) {
  for (const std::string& kind : kActivations) {
    SCOPED_TRACE(kind);
    Bench bench(graph_from(
        document_of({{"op", kind + "_grad"}},
                    {tensor("dy", "f32", {64, 32}), tensor("x", "f32", {64, 32})}, "y")));
    Values x = bench.values("x");
    for (double& v : x) v *= 2.5;
    bench.set("x", x);
    x = bench.values("x");
    const Values dy = bench.values("dy");
    const auto result = [&](double off) {
      Values y;
      for (std::size_t i = 0; i < x.size(); ++i) {
        y.push_back(static_cast<float>(dy[i]) *
                    activation_slope(kind, static_cast<float>(x[i] + off)));
      }
      return y;
    };
    bench.set("y", result(0));
    EXPECT_TRUE(bench.compare(kF32).ok()) << bench.compare(kF32).text();
    bench.set("y", result(1e-2));
    EXPECT_FALSE(bench.compare(kF32).ok());
    const auto oracle = bench.oracle(kF32);
    for (std::size_t i = 0; i < x.size(); ++i) {
      EXPECT_LT(oracle[0].bounds[i], 1e4 * 0x1p-24 * (std::fabs(dy[i]) + 1e-3)) << x[i];
    }
  }
}

// dy, a and b are inputs, x = a + b is computed: its rounding may carry it over a kink.
TEST(ReferenceGrad, KinksWithinReachAreInTheBound) {
  const auto bounds = [](Json op, const Values& a, const Values& b) {
    op["in"] = {"dy", "x"};
    op["out"] = "y";
    const Dims shape{static_cast<std::int64_t>(a.size())};
    Json document{
        {"lawson", 1},
        {"kind", "graph"},
        {"inputs",
         {tensor("dy", "f32", shape), tensor("a", "f32", shape), tensor("b", "f32", shape)}},
        {"ops", {{{"op", "add"}, {"in", {"a", "b"}}, {"out", "x"}}, op}},
        {"outputs", {"y"}}};
    Bench bench(graph_from(document));
    bench.set("a", a);
    bench.set("b", b);
    bench.set("dy", Values(a.size(), 2));
    return bench.oracle(kF32)[0].bounds;
  };
  const double near = 0x1p-24;  // of 1
  // 1 + (-1 + near) is exact; (6 + near) is not.
  const Values a{1, 6, 3};
  const Values b{-1 + near, near, 0.1};
  EXPECT_EQ(bounds({{"op", "relu_grad"}}, a, b)[0], 0.0);
  EXPECT_GE(bounds({{"op", "relu6_grad"}}, a, b)[1], 2.0);
  EXPECT_EQ(bounds({{"op", "relu6_grad"}}, a, b)[2], 0.0);
  EXPECT_GT(bounds({{"op", "silu_grad"}}, a, b)[2], 0.0);
  EXPECT_LT(bounds({{"op", "silu_grad"}}, a, b)[2], 1e-4);
}

TEST(ReferenceConcat, KeepsTheErrorsOfItsOperands) {
  const Json document = Json::parse(R"({"lawson": 1, "kind": "graph",
      "inputs": [{"name": "a", "dtype": "f32", "shape": [2, 2]}],
      "ops": [{"op": "exp", "in": ["a"], "out": "e"},
              {"op": "concat", "in": ["a", "e"], "axis": 1, "out": "y"}],
      "outputs": ["e", "y"]})");
  Bench bench(graph_from(document));
  const auto oracle = bench.oracle(kF32);
  for (const std::size_t row : {0U, 1U}) {
    for (const std::size_t column : {0U, 1U}) {
      EXPECT_EQ(oracle[1].bounds[row * 4 + column], 0.0);
      EXPECT_GT(oracle[1].bounds[row * 4 + 2 + column], oracle[0].bounds[row * 2 + column] / 2);
      EXPECT_LT(oracle[1].bounds[row * 4 + 2 + column], oracle[0].bounds[row * 2 + column] * 2);
    }
  }
}

// layer_norm and rms_norm over the last of two dims, in f32, in the ways that libraries have.
enum class Way { two_pass, welford, folded };
struct NormResult {
  Values y, mean, inv_std;
};
NormResult plain_norm(Bench& bench, bool layer, Way way, float eps, float divisor_less = 0) {
  const Values x = bench.values("x");
  const Values scale = bench.values("scale");
  const Values bias = bench.values("bias");
  const std::size_t n = scale.size();
  NormResult result;
  for (std::size_t row = 0; row < x.size() / n; ++row) {
    const auto at = [&](std::size_t i) { return static_cast<float>(x[row * n + i]); };
    float mean = 0;
    float square = 0;
    if (way == Way::welford && layer) {
      for (std::size_t i = 0; i < n; ++i) {
        const float delta = at(i) - mean;
        mean += delta / static_cast<float>(i + 1);
        square += delta * (at(i) - mean);
      }
    } else {
      for (std::size_t i = 0; layer && i < n; ++i) mean += at(i);
      mean /= static_cast<float>(n);
      for (std::size_t i = 0; i < n; ++i) square += (at(i) - mean) * (at(i) - mean);
    }
    const float inv_std = 1.0F / std::sqrt(square / (static_cast<float>(n) - divisor_less) + eps);
    result.mean.push_back(static_cast<double>(mean));
    result.inv_std.push_back(static_cast<double>(inv_std));
    for (std::size_t i = 0; i < n; ++i) {
      const auto s = static_cast<float>(scale[i]);
      const auto b = static_cast<float>(bias[i]);
      const float y = way == Way::folded ? at(i) * (inv_std * s) + (b - mean * (inv_std * s))
                                         : (at(i) - mean) * inv_std * s + b;
      result.y.push_back(static_cast<double>(y));
    }
  }
  return result;
}

TEST(ReferenceNorm, PlainF32IsWithinTheBounds) {
  for (const char* op : {"layer_norm", "rms_norm"}) {
    for (const char* dtype : {"f32", "bf16"}) {
      for (const double shift : {0.0, 30.0}) {
        SCOPED_TRACE(fmt::format("{} {} around {}", op, dtype, shift));
        const bool layer = std::string{op} == "layer_norm";
        const NormCase c{op, {8, 193}, {1}, {193}};
        Bench bench(graph_from(norm_document(c, dtype, 1e-5)), 8);
        Values x = bench.values("x");
        for (double& v : x) v += shift;
        bench.set("x", x);
        const auto judged = [&](const NormResult& r) {
          bench.set("y", r.y);
          bench.set("inv_std", r.inv_std);
          if (layer) bench.set("mean", r.mean);
          return bench.compare(kF32);
        };
        for (const Way way : {Way::two_pass, Way::welford, Way::folded}) {
          const auto comparison = judged(plain_norm(bench, layer, way, 1e-5F));
          EXPECT_TRUE(comparison.ok()) << comparison.text();
          EXPECT_GT(comparison.max_ratio(), 1e-3) << "a bound that means nothing";
        }
        EXPECT_FALSE(judged(plain_norm(bench, layer, Way::two_pass, 1e-5F, 1)).ok())
            << "divisor n - 1";
        if (layer || shift == 0) {  // next to a mean square of 900 it makes no difference
          EXPECT_FALSE(judged(plain_norm(bench, layer, Way::two_pass, 5e-3F)).ok())
              << "another eps";
        }
        EXPECT_FALSE(judged(plain_norm(bench, !layer, Way::two_pass, 1e-5F)).ok())
            << "the other norm";
      }
    }
  }
}

TEST(ReferenceNorm, SmallVarianceAndInfinitiesWidenTheBounds) {
  const NormCase c{"layer_norm", {4, 4}, {1}, {4}};
  Bench bench(graph_from(norm_document(c, "f32", 0)), 8);
  bench.set("scale", {1, 1, 1, 1});
  const float tiny = std::nextafter(1.0F, 2.0F);
  bench.set("x", {1, 1, 1, tiny, 1, kInfinity, 2, 3, 1, 2, kNaN, 4, 1, 2, 3, 4});
  bench.execute();
  const auto oracle = bench.oracle(kF32);
  const auto& y = oracle[0];
  const auto& mean = oracle[1];
  EXPECT_GT(y.bounds[0], 1.0);  // the variance is of the size of its error
  EXPECT_LT(mean.bounds[0], 1e-5);
  EXPECT_EQ(mean.bounds[1], kInfinity);  // infinity or NaN
  for (const std::size_t i : {4U, 5U, 8U, 11U}) {
    EXPECT_TRUE(std::isnan(y.values[i])) << i;
    EXPECT_EQ(y.bounds[i], 0.0) << i;
  }
  EXPECT_TRUE(std::isnan(mean.values[2]));
  EXPECT_EQ(mean.bounds[2], 0.0);
  EXPECT_LT(y.bounds[12], 1e-5);
  EXPECT_TRUE(bench.compare(kF32).ok());
  // Squares beyond f32.
  bench.set("x", {1e30, 2e30, 3e30, 4e30, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4});
  EXPECT_EQ(bench.oracle(kF32)[0].bounds[0], kInfinity);
  EXPECT_LT(bench.oracle(kF32)[0].bounds[4], 1e-5);
}

// Backward over the last of two dims in f32: from (x - mean), or from x with the mean's share
// taken off at the end.
void plain_norm_backward(Bench& bench, bool layer, bool late_mean, bool forget = false) {
  const Values dy = bench.values("dy");
  const Values x = bench.values("x");
  const Values scale = bench.values("scale");
  const Values means = layer ? bench.values("mean") : Values{};
  const Values inv_stds = bench.values("inv_std");
  const std::size_t n = scale.size();
  const auto count = static_cast<float>(n);
  Values dx(x.size());
  std::vector<float> dscale(n);
  std::vector<float> dbias(n);
  for (std::size_t row = 0; row < inv_stds.size(); ++row) {
    const auto r = static_cast<float>(inv_stds[row]);
    const float m = layer ? static_cast<float>(means[row]) : 0.0F;
    float sum = 0;
    float sum_h = 0;
    const auto g = [&](std::size_t i) {
      return static_cast<float>(dy[row * n + i]) * static_cast<float>(scale[i]);
    };
    for (std::size_t i = 0; i < n; ++i) {
      const auto v = static_cast<float>(x[row * n + i]);
      sum += g(i);
      sum_h += late_mean ? g(i) * v : g(i) * ((v - m) * r);
      dscale[i] += static_cast<float>(dy[row * n + i]) * ((v - m) * r);
      dbias[i] += static_cast<float>(dy[row * n + i]);
    }
    if (late_mean) sum_h = (sum_h - sum * m) * r;
    for (std::size_t i = 0; i < n; ++i) {
      const auto v = static_cast<float>(x[row * n + i]);
      const float centre = layer && !forget ? sum / count : 0.0F;
      dx[row * n + i] = static_cast<double>(r * (g(i) - centre - (v - m) * r * (sum_h / count)));
    }
  }
  bench.set("dx", dx);
  bench.set("dscale", Values(dscale.begin(), dscale.end()));
  bench.set("dbias", Values(dbias.begin(), dbias.end()));
}

TEST(ReferenceNorm, PlainF32BackwardIsWithinTheBounds) {
  for (const char* op : {"layer_norm", "rms_norm"}) {
    for (const char* dtype : {"f32", "f16"}) {
      SCOPED_TRACE(fmt::format("{} {}", op, dtype));
      const bool layer = std::string{op} == "layer_norm";
      const NormCase c{op, {37, 96}, {1}, {96}};
      Bench bench(graph_from(norm_backward_document(c, dtype)), 9);
      Values inv_std = bench.values("inv_std");
      for (double& v : inv_std) v = 1 + 0.1 * v;
      bench.set("inv_std", inv_std);
      for (const bool late_mean : {false, true}) {
        plain_norm_backward(bench, layer, late_mean);
        const auto comparison = bench.compare(kF32);
        EXPECT_TRUE(comparison.ok()) << comparison.text();
        for (const auto& output : comparison.outputs) {
          EXPECT_GT(output.max_ratio, 1e-3) << output.name << ": a bound that means nothing";
        }
      }
      if (layer) {
        plain_norm_backward(bench, layer, false, true);
        EXPECT_FALSE(bench.compare(kF32).ok()) << "without the mean of g";
      }
      inv_std[3] *= 1.001;
      plain_norm_backward(bench, layer, false);
      bench.set("inv_std", inv_std);
      EXPECT_FALSE(bench.compare(kF32).ok()) << "an inverse deviation that is 0.1% off";
    }
  }
}

}  // namespace
}  // namespace lawson
