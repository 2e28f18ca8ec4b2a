// Gradient graphs against central differences of the forward graph, in f64 on the reference engine.
#include "ir/gradient.h"

#include <array>
#include <map>
#include <random>
#include <set>

#include "engine/reference_bench.h"
#include "ir/simplify.h"

namespace lawson::ir {
namespace {

using Values = std::map<std::string, std::vector<double>>;
using Names = std::vector<std::string>;

Graph gradient_of(const Graph& forward, const Names& wrt) {
  auto graph = gradient(forward, wrt);
  EXPECT_TRUE(graph.ok()) << (graph.ok() ? "" : graph.error().message);
  return graph.ok() ? *std::move(graph) : Graph{};
}

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// A forward graph and its gradient on the same data; the loss is what the cotangents make of the
// outputs.
class Check {
 public:
  Check(const Graph& forward, Names wrt, std::uint64_t seed = 1)
      : forward_{forward, seed}, backward_{gradient_of(forward, wrt), seed}, wrt_{std::move(wrt)} {
    EXPECT_EQ(print(simplify(backward_.graph)), print(backward_.graph));
    for (const std::string& name : wrt_) {
      const Tensor& input = tensor(forward_.graph, name);
      const Tensor& output = tensor(backward_.graph, "d_" + name);
      EXPECT_EQ(output.shape, input.shape) << name;
      EXPECT_EQ(output.dtype, input.dtype) << name;
    }
    for (std::int32_t i = 0; i < forward.output_count; ++i) {
      const Tensor& output = forward.tensor(forward.input_count + i);
      if (is_float(output.dtype)) losses_.push_back(output.name);
    }
  }

  void set(const std::string& name, const std::vector<double>& values) {
    forward_.set(name, values);
  }
  std::vector<double> values(const std::string& name) { return forward_.values(name); }

  // Runs the gradient on the forward's inputs.
  void run() {
    for (plan::Buffer& buffer : backward_.inputs) {
      const std::string& name = backward_.graph.tensor(buffer.id()).name;
      if (forward_.has(forward_.inputs, name)) backward_.set(name, forward_.values(name));
    }
    backward_.execute();
  }
  std::vector<double> gradient_of_input(const std::string& name) {
    return backward_.values("d_" + name);
  }

  double loss() {
    forward_.execute();
    double sum = 0;
    for (const std::string& name : losses_) {
      sum += dot(forward_.values(name), backward_.values("d_" + name));
    }
    return sum;
  }

  // The slope of the loss when each input moves along its direction, to fourth order.
  double slope(const Values& directions, double step) {
    Values origin;
    for (const auto& [name, direction] : directions) origin[name] = forward_.values(name);
    const auto at = [&](double distance) {
      for (const auto& [name, direction] : directions) {
        std::vector<double> moved = origin[name];
        for (std::size_t i = 0; i < moved.size(); ++i) moved[i] += distance * direction[i];
        forward_.set(name, moved);
      }
      return loss();
    };
    const double near = at(step) - at(-step);
    const double far = at(2 * step) - at(-2 * step);
    for (const auto& [name, values] : origin) forward_.set(name, values);
    return (8 * near - far) / (12 * step);
  }

  // Every element of every gradient.
  void each_element(double step = 1e-3) {
    run();
    for (const std::string& name : wrt_) {
      const auto gradient = gradient_of_input(name);
      for (std::size_t i = 0; i < gradient.size(); ++i) {
        std::vector<double> direction(gradient.size(), 0);
        direction[i] = 1;
        const double expected = slope({{name, direction}}, step);
        EXPECT_NEAR(gradient[i], expected, 1e-7 * (1 + std::fabs(expected))) << name << ' ' << i;
      }
    }
  }

  // Along random directions of all inputs at once. The number of directions on which the
  // differences do not agree among themselves: a kink is near.
  int directions(std::uint64_t seed, int count) {
    std::mt19937_64 engine{seed};
    int kinks = 0;
    run();
    for (int k = 0; k < count; ++k) {
      Values directions;
      double actual = 0;
      double size = 0;
      for (const std::string& name : wrt_) {
        const auto gradient = gradient_of_input(name);
        auto& direction = directions[name];
        for (std::size_t i = 0; i < gradient.size(); ++i) {
          direction.push_back(static_cast<double>(engine() % 2001) / 1000 - 1);
          size += std::fabs(gradient[i] * direction[i]);
        }
        actual += dot(gradient, direction);
      }
      const double coarse = slope(directions, 2e-5);
      const double fine = slope(directions, 1e-5);
      const double near = 2e-6 * (1 + size);
      if (!(std::fabs(coarse - fine) < near)) {
        ++kinks;
        continue;
      }
      EXPECT_NEAR(actual, fine, 4 * near) << print(forward_.graph) << print(backward_.graph);
    }
    return kinks;
  }

  const Graph& graph() const { return backward_.graph; }

 private:
  static const Tensor& tensor(const Graph& graph, const std::string& name) {
    for (const Tensor& candidate : graph.tensors) {
      if (candidate.name == name) return candidate;
    }
    ADD_FAILURE() << "no tensor " << name;
    return graph.tensors.front();
  }

  Bench forward_;
  Bench backward_;
  Names wrt_;
  Names losses_;
};

// Distinct values of magnitude 0.23 to 0.93, away from halves and from one another.
std::vector<double> grid(std::size_t count, std::size_t which, bool is_signed) {
  std::vector<double> values;
  for (std::size_t i = 0; i < count; ++i) {
    const double magnitude = 0.23 + 0.07 * static_cast<double>((i * 5 + which * 3) % 11) +
                             0.011 * static_cast<double>(which) +
                             0.003 * static_cast<double>(i / 11);
    values.push_back(is_signed && (i + which) % 3 == 1 ? -magnitude : magnitude);
  }
  return values;
}

struct In {
  std::string name;
  Dims shape;
  bool is_signed = true;
  std::string dtype = "f64";
};

Graph written(const std::vector<In>& inputs, const std::vector<Json>& ops,
              const Json& outputs = {"y"}) {
  Json document{{"lawson", 1}, {"kind", "graph"}, {"name", "t"}, {"outputs", outputs}};
  for (const In& in : inputs) {
    document["inputs"].push_back({{"name", in.name}, {"dtype", in.dtype}, {"shape", in.shape}});
  }
  document["ops"] = ops;
  return graph_from(document);
}

Json op(const std::string& name, const Json& in, const Json& out = "y",
        const Json& attributes = Json::object()) {
  Json item{{"op", name}, {"in", in}, {"out", out}};
  item.update(attributes);
  return item;
}

// Checks the gradients of all float inputs, element by element.
void check_ops(const std::vector<In>& inputs, const std::vector<Json>& ops,
               const Json& outputs = {"y"}) {
  SCOPED_TRACE(Json(ops).dump());
  const Graph forward = written(inputs, ops, outputs);
  Names wrt;
  for (const In& in : inputs) {
    if (in.dtype == "f64") wrt.push_back(in.name);
  }
  Check check(forward, wrt);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const auto count = static_cast<std::size_t>(element_count(inputs[i].shape).value_or(0));
    if (inputs[i].dtype == "f64") check.set(inputs[i].name, grid(count, i, inputs[i].is_signed));
  }
  check.each_element();
}

const std::vector<std::string> kPositive{"log", "sqrt", "rsqrt"};

TEST(Gradient, EveryUnary) {
  for (int i = 0; i < kUnaryCount; ++i) {
    const std::string name{to_string(static_cast<UnaryKind>(i))};
    const bool is_signed = std::find(kPositive.begin(), kPositive.end(), name) == kPositive.end();
    check_ops({{"x", {2, 4}, is_signed}}, {op(name, {"x"})});
  }
  // Both sides of the upper kink, and other parameters.
  check_ops({{"x", {2, 4}}, {"k", {}}},
            {op("constant", Json::array(), "c", {{"value", 9}, {"dtype", "f64"}}),
             op("mul", {"x", "c"}, "z"), op("relu6", {"z"}, "r"), op("mul", {"r", "k"})});
  check_ops({{"x", {8}}}, {op("leaky_relu", {"x"}, "y", {{"slope", -0.3}})});
  check_ops({{"x", {8}}}, {op("elu", {"x"}, "y", {{"alpha", 1.7}})});
}

TEST(Gradient, SecondOrderOfActivations) {
  for (int i = 0; i < kUnaryCount; ++i) {
    if (!has_gradient_op(static_cast<UnaryKind>(i))) continue;
    const std::string name{to_string(static_cast<UnaryKind>(i))};
    check_ops({{"dy", {2, 1}}, {"x", {2, 4}}}, {op(name + "_grad", {"dy", "x"})});
    // The gradient of the gradient graph itself.
    const Graph first = gradient_of(written({{"x", {6}}}, {op(name, {"x"})}), {"x"});
    Check second(first, {"x", "d_y"});
    second.set("x", grid(6, 0, true));
    second.set("d_y", grid(6, 1, true));
    second.each_element();
  }
}

TEST(Gradient, EveryBinaryWithBroadcasting) {
  const std::vector<std::pair<Dims, Dims>> shapes{
      {{2, 3}, {2, 3}}, {{2, 3}, {3}}, {{2, 1}, {1, 3}}, {{}, {2, 3}}, {{4, 1, 2}, {3, 1}}};
  for (int i = 0; i < kBinaryCount; ++i) {
    const std::string name{to_string(static_cast<BinaryKind>(i))};
    for (const auto& [a, b] : shapes) {
      check_ops({{"a", a, name != "pow"}, {"b", b}}, {op(name, {"a", "b"})});
    }
  }
  check_ops({{"a", {5}}}, {op("mul", {"a", "a"})});
}

std::vector<double> gradients(const Graph& forward, const Values& values, const std::string& wrt) {
  Check check(forward, {wrt});
  for (const auto& [name, list] : values) check.set(name, list);
  check.run();
  std::vector<double> result = check.gradient_of_input(wrt);
  const auto cotangents = Bench(check.graph()).values("d_y");
  for (std::size_t i = 0; i < result.size() && result.size() == cotangents.size(); ++i) {
    result[i] /= cotangents[i];
  }
  return result;
}

TEST(Gradient, WhereThereIsNoDerivative) {
  const Values tie{{"a", {1, 2, 3}}, {"b", {1, 3, 2}}};
  const std::vector<In> two{{"a", {3}}, {"b", {3}}};
  expect_values(gradients(written(two, {op("max", {"a", "b"})}), tie, "a"), {0.5, 0, 1});
  expect_values(gradients(written(two, {op("max", {"a", "b"})}), tie, "b"), {0.5, 1, 0});
  expect_values(gradients(written(two, {op("min", {"a", "b"})}), tie, "a"), {0.5, 1, 0});
  const std::vector<In> one{{"x", {3}}};
  const Json limits{{"min", -1}, {"max", 2}};
  expect_values(
      gradients(written(one, {op("clamp", {"x"}, "y", limits)}), {{"x", {-1, 2, 2.5}}}, "x"),
      {1, 1, 0});
  expect_values(gradients(written(one, {op("abs", {"x"})}), {{"x", {-2, 0, 3}}}, "x"), {-1, 0, 1});
  expect_values(gradients(written({{"x", {3}}, {"e", {3}}}, {op("pow", {"x", "e"})}),
                          {{"x", {0, 0, -2}}, {"e", {0, 2, 3}}}, "x"),
                {0, 0, 12});
  expect_values(gradients(written({{"x", {2}}, {"e", {2}}}, {op("pow", {"x", "e"})}),
                          {{"x", {0, 0}}, {"e", {2, 1}}}, "e"),
                {0, 0});
  const auto of_reduction = [](const std::string& kind, const std::vector<double>& x) {
    const Graph forward =
        written({{"x", {3}}}, {op("reduce_" + kind, {"x"}, "y", {{"axes", {0}}})});
    Check check(forward, {"x"});
    check.set("x", x);
    check.run();
    std::vector<double> result = check.gradient_of_input("x");
    const double cotangent = Bench(check.graph()).values("d_y")[0];
    for (double& value : result) value /= cotangent;
    return result;
  };
  expect_values(of_reduction("max", {4, 1, 4}), {0.5, 0, 0.5});
  expect_values(of_reduction("min", {1, 1, 1}), {1.0 / 3, 1.0 / 3, 1.0 / 3});
  expect_values(of_reduction("amax", {-4, 1, 4}), {-0.5, 0, 0.5});
  expect_values(of_reduction("norm1", {-4, 0, 4}), {-1, 0, 1});
  expect_values(of_reduction("norm2", {0, 0, 0}), {0, 0, 0});
  expect_values(of_reduction("prod", {2, 0, 5}), {0, 10, 0});
  expect_values(of_reduction("prod", {0, 0, 5}), {0, 0, 0});
}

TEST(Gradient, SelectClampConvert) {
  check_ops({{"a", {2, 3}}, {"b", {3}}},
            {op("compare_lt", {"a", "b"}, "p"), op("select", {"p", "a", "b"})});
  check_ops({{"a", {}}, {"b", {2, 3}}, {"n", {2, 1}, true, "i8"}},
            {op("constant", Json::array(), "z", {{"value", 0}, {"dtype", "i8"}}),
             op("compare_ge", {"n", "z"}, "p"), op("select", {"p", "a", "b"})});
  check_ops({{"x", {10}}}, {op("clamp", {"x"}, "y", {{"min", -0.45}, {"max", 0.69}})});
  check_ops({{"x", {6}}, {"n", {6}, true, "i8"}}, {op("mul", {"x", "n"})});
  // What goes through integers has no gradient, and what is iota or constant needs none.
  check_ops({{"x", {6}}},
            {op("convert", {"x"}, "n", {{"dtype", "i32"}}),
             op("iota", Json::array(), "i", {{"shape", {6}}, {"axis", 0}, {"dtype", "f64"}}),
             op("mul", {"x", "i"}, "a"), op("add", {"a", "n"}, "y", {{"dtype", "f64"}})});
}

TEST(Gradient, Views) {
  check_ops({{"x", {3}}}, {op("broadcast", {"x"}, "y", {{"shape", {2, 4, 3}}})});
  check_ops({{"x", {2, 1, 3}}}, {op("broadcast", {"x"}, "y", {{"shape", {2, 2, 3}}})});
  check_ops({{"x", {2, 6}}}, {op("reshape", {"x"}, "y", {{"shape", {3, 4}}})});
  check_ops({{"x", {2, 3, 4}}}, {op("transpose", {"x"}, "y", {{"perm", {2, 0, 1}}})});
  check_ops({{"x", {4, 5}}}, {op("slice", {"x"}, "y", {{"start", {1, 0}}, {"limit", {3, 5}}})});
  check_ops({{"x", {4, 5}}},
            {op("slice", {"x"}, "y", {{"start", {1, 0}}, {"limit", {4, 4}}, {"stride", {2, 3}}})});
  check_ops({{"x", {7}}},
            {op("slice", {"x"}, "y", {{"start", {2}}, {"limit", {7}}, {"stride", {2}}})});
  check_ops({{"x", {2, 7, 2}}},
            {op("slice", {"x"}, "y",
                {{"start", {0, 0, 1}}, {"limit", {2, 6, 2}}, {"stride", {1, 3, 1}}})});
  check_ops({{"a", {2, 1}}, {"b", {2, 3}}, {"c", {2, 2}}},
            {op("concat", {"a", "b", "c"}, "y", {{"axis", 1}})});
  check_ops({{"a", {3}}}, {op("concat", {"a", "a"}, "y", {{"axis", 0}})});
}

TEST(Gradient, EveryReduction) {
  for (int i = 0; i < kReduceCount; ++i) {
    const std::string name = "reduce_" + std::string{to_string(static_cast<ReduceKind>(i))};
    for (const bool keepdims : {false, true}) {
      for (const Dims& axes : std::vector<Dims>{{0}, {2}, {0, 2}, {0, 1, 2}}) {
        check_ops({{"x", {2, 3, 2}}},
                  {op(name, {"x"}, "y", {{"axes", axes}, {"keepdims", keepdims}})});
      }
    }
  }
}

TEST(Gradient, Matmul) {
  const std::vector<std::pair<Dims, Dims>> shapes{{{2, 3}, {3, 4}},
                                                  {{2, 2, 3}, {2, 3, 2}},
                                                  {{2, 2, 3}, {3, 2}},
                                                  {{2, 3}, {2, 3, 2}},
                                                  {{1, 2, 3}, {3, 3, 1}},
                                                  {{2, 1, 2, 3}, {3, 3, 2}},
                                                  {{2, 1, 1, 2}, {1, 3, 2, 2}}};
  for (const auto& [a, b] : shapes) check_ops({{"a", a}, {"b", b}}, {op("matmul", {"a", "b"})});
  check_ops({{"a", {3, 3}}}, {op("matmul", {"a", "a"})});
}

TEST(Gradient, Norms) {
  for (const std::string name : {"layer_norm", "rms_norm"}) {
    const bool layer = name == "layer_norm";
    for (const Dims& axes : std::vector<Dims>{{2}, {1, 2}}) {
      const Dims scale = axes.size() == 1 ? Dims{3} : Dims{1, 2, 3};
      const Json attributes{{"axes", axes}, {"eps", 0.01}};
      check_ops({{"x", {2, 2, 3}}, {"s", scale}, {"b", scale}},
                {op(name, {{"x", "x"}, {"scale", "s"}, {"bias", "b"}}, {{"y", "y"}}, attributes)});
      check_ops(
          {{"x", {2, 2, 3}}, {"s", scale}},
          {op(name, {{"x", "x"}, {"scale", "s"}}, {{"y", "n"}}, attributes), op("sin", {"n"})});
      Json out{{"y", "y"}, {"inv_std", "r"}};
      if (layer) out["mean"] = "m";
      Json outputs{"y", "r"};
      if (layer) outputs.push_back("m");
      check_ops({{"x", {2, 2, 3}}, {"s", scale}},
                {op(name, {{"x", "x"}, {"scale", "s"}}, out, attributes)}, outputs);
    }
  }
}

TEST(Gradient, Attention) {
  for (const Json& fields :
       {Json{{"mask", "causal"}, {"softcap", 2.5}},
        Json{{"bias", "post_scale"}, {"bias_shape", {1, 4, 7, 9}}, {"kv_heads", 1}}}) {
    Json spec{{"batch", 1}, {"return_stats", false}};
    spec.update(fields);
    Names wrt{"q", "k", "v"};
    if (fields.contains("bias")) wrt.emplace_back("bias");
    Check check(attention_graph(spec), wrt);
    EXPECT_EQ(check.directions(3, 6), 0);
  }
}

TEST(Gradient, InputsAreThoseThatAreReadAndZerosWhereNothingDepends) {
  const Graph graph = gradient_of(
      written({{"a", {2, 3}}, {"b", {2, 3}}, {"c", {2}}, {"d", {3}}},
              {op("add", {"a", "b"}, "s"), op("mul", {"s", "d"}, "y"), op("neg", {"c"}, "z")},
              {"y", "z"}),
      {"d", "a", "c"});
  Names names;
  for (TensorId id = 0; id < graph.input_count + graph.output_count; ++id) {
    names.push_back(graph.tensor(id).name);
  }
  EXPECT_EQ(names, (Names{"a", "b", "d", "d_y", "d_z", "d_d", "d_a", "d_c"}));

  const Graph apart = gradient_of(written({{"a", {2, 3}}, {"b", {4}}, {"e", {5}}},
                                          {op("exp", {"a"}), op("floor", {"b"}, "z")}, {"y", "z"}),
                                  {"b", "e"});
  EXPECT_EQ(apart.input_count, 2);  // d_y and d_z
  Bench bench(apart);
  bench.execute();
  expect_values(bench.values("d_b"), {0, 0, 0, 0});
  expect_values(bench.values("d_e"), {0, 0, 0, 0, 0});
}

TEST(Gradient, LayoutsOfInputsAreKept) {
  Json document =
      graph_to_json(written({{"a", {2, 3}}, {"b", {3, 4}}}, {op("matmul", {"a", "b"})}));
  document["inputs"][1]["strides"] = {1, 3};
  document["inputs"][1]["alignment"] = 4;
  document["outputs"] = {{{"name", "y"}, {"strides", {1, 2}}}};
  const Graph graph = gradient_of(graph_from(document), {"a"});
  EXPECT_EQ(graph.tensor(0).name, "b");
  EXPECT_EQ(graph.tensor(0).strides, (Dims{1, 3}));
  EXPECT_EQ(graph.tensor(0).alignment, 4);
}

std::string message_of(const Graph& forward, const Names& wrt, ErrorKind kind) {
  const auto graph = gradient(forward, wrt);
  EXPECT_FALSE(graph.ok());
  if (graph.ok()) return {};
  EXPECT_EQ(to_string(graph.error().kind), std::string{to_string(kind)});
  return graph.error().message;
}

void expect_says(const std::string& message, const std::string& part) {
  EXPECT_NE(message.find(part), std::string::npos) << message;
}

TEST(Gradient, ErrorsSayWhatIsWrong) {
  const auto wrong = ErrorKind::invalid_argument;
  const Graph plain = written({{"x", {2}}, {"n", {2}, true, "i8"}}, {op("mul", {"x", "n"})});
  expect_says(message_of(plain, {"z"}, wrong),
              "'z' is not an input of graph 't'; its inputs are x, n");
  expect_says(message_of(plain, {"n"}, wrong), "input 'n' is i8");
  expect_says(message_of(plain, {"x", "x"}, wrong), "named twice");
  expect_says(message_of(plain, {}, wrong), "no input is named");
  expect_says(message_of(written({{"x", {2}}}, {op("convert", {"x"}, "y", {{"dtype", "i8"}})}),
                         {"x"}, wrong),
              "no float output");
  expect_says(
      message_of(written({{"x", {2}}, {"d_y", {2}}}, {op("mul", {"x", "d_y"})}), {"x"}, wrong),
      "'d_y'");
  expect_says(
      message_of(written({{"x", {2}}, {"d_x", {2}}}, {op("mul", {"x", "d_x"})}), {"x"}, wrong),
      "'d_x'");
}

TEST(Gradient, UnsupportedOpsAreNamedWithTheirSource) {
  const auto no = ErrorKind::unsupported;
  Json scaled = op("scaled_matmul", {{"a", "a"}, {"b", "b"}, {"a_scale", "p"}, {"b_scale", "q"}},
                   "y", {{"block", 32}, {"source", "quant.cpp:7"}});
  const std::string message = message_of(written({{"a", {4, 32}, true, "f8e4m3"},
                                                  {"b", {32, 4}, true, "f8e4m3"},
                                                  {"p", {4, 1}, true, "f8e8m0"},
                                                  {"q", {1, 4}, true, "f8e8m0"}},
                                                 {scaled}),
                                         {"a"}, no);
  expect_says(message, "op 'scaled_matmul' (y, quant.cpp:7)");
  expect_says(message, "quantised");
  expect_says(message_of(attention_graph({{"return_stats", true}}), {"q"}, no),
              "no gradient of stats");
  expect_says(
      message_of(attention_graph({{"return_stats", false},
                                  {"attn_mask", {{"dtype", "f64"}, {"shape", {1, 1, 7, 9}}}}}),
                 {"mask"}, no),
      "no gradient of mask");
  const Graph norm = gradient_of(
      written({{"x", {2, 3}}, {"s", {3}}},
              {op("rms_norm", {{"x", "x"}, {"scale", "s"}}, {{"y", "y"}}, {{"axes", {1}}})}),
      {"x"});
  expect_says(message_of(norm, {"x"}, no), "rms_norm_backward");
  // Nothing is asked of what is not on the way.
  EXPECT_TRUE(gradient(norm, {"d_y"}).ok() == false);
}

// A random graph of f64 over every op that has a gradient; values stay small.
class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_{seed}, builder_{"random-" + std::to_string(seed)} {}

  Graph run() {
    std::vector<TensorId> pool;
    const std::int64_t inputs = 1 + below(3);
    for (std::int64_t i = 0; i < inputs; ++i) {
      const std::vector<Dims> shapes{{2, 3, 4}, {3, 4}, {1, 4}, {4}, {2, 1, 4}, {4, 4}, {}};
      Tensor tensor;
      tensor.name = "x" + std::to_string(i);
      tensor.dtype = DType::f64;
      tensor.shape = of(shapes);
      pool.push_back(*builder_.input(std::move(tensor)));
    }
    std::vector<TensorId> computed;
    const std::int64_t wanted = 2 + below(7);
    for (int tries = 0; std::ssize(computed) < wanted && tries < 200; ++tries) {
      // The latest are read most.
      const TensorId a = below(2) == 0 ? pool.back() : of(pool);
      const auto id = step(a, of(pool));
      if (!id.ok() || element_count(builder_.tensor(*id).shape).value_or(0) > 64) continue;
      if (!is_float(builder_.tensor(*id).dtype)) continue;
      const auto bounded = builder_.add1(Unary{UnaryKind::tanh}, {*id});
      pool.push_back(below(3) == 0 ? *bounded : *id);
      computed.push_back(pool.back());
    }
    EXPECT_FALSE(computed.empty());
    EXPECT_TRUE(builder_.output(computed.back()).ok());
    if (computed.size() > 2 && below(2) == 0) {
      EXPECT_TRUE(builder_.output(computed[computed.size() / 2]).ok());
    }
    auto graph = std::move(builder_).finish();
    EXPECT_TRUE(graph.ok());
    return *std::move(graph);
  }

 private:
  std::int64_t below(std::int64_t n) {
    return static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(n));
  }
  template <typename T>
  const T& of(const std::vector<T>& list) {
    return list[static_cast<std::size_t>(below(std::ssize(list)))];
  }

  Result<TensorId> step(TensorId a, TensorId b) {
    const Dims shape = builder_.tensor(a).shape;
    const auto rank = std::ssize(shape);
    switch (below(13)) {
      case 0:
        return builder_.add1(Matmul{}, {a, b});
      case 1: {
        Dims perm(shape.size());
        for (std::size_t i = 0; i < perm.size(); ++i)
          perm[i] = rank - 1 - static_cast<std::int64_t>(i);
        return builder_.add1(Transpose{perm}, {a});
      }
      case 2:
      case 3: {
        Unary unary{static_cast<UnaryKind>(below(kUnaryCount)), 0};
        if (unary.kind == UnaryKind::leaky_relu || unary.kind == UnaryKind::elu)
          unary.parameter = 0.3;
        const std::vector<UnaryKind> positive{UnaryKind::log, UnaryKind::log1p, UnaryKind::sqrt,
                                              UnaryKind::rsqrt, UnaryKind::reciprocal};
        TensorId x = *builder_.add1(Unary{UnaryKind::tanh}, {a});
        if (std::find(positive.begin(), positive.end(), unary.kind) != positive.end()) {
          x = *builder_.add1(Binary{BinaryKind::add},
                             {x, *builder_.add1(Constant{1.6}, {}, DType::f64)});
        }
        return builder_.add1(unary, {x});
      }
      case 4:
      case 5: {
        const auto kind = static_cast<BinaryKind>(below(kBinaryCount));
        if (kind != BinaryKind::div && kind != BinaryKind::pow && kind != BinaryKind::mod) {
          return builder_.add1(Binary{kind}, {a, b});
        }
        // Divisors and bases of 0.7 and more; exponents within [-1, 1].
        const TensorId c = *builder_.add1(Constant{0.7}, {}, DType::f64);
        const auto positive = [&](TensorId x) {
          return *builder_.add1(Binary{BinaryKind::add},
                                {*builder_.add1(Unary{UnaryKind::sigmoid}, {x}), c});
        };
        if (kind == BinaryKind::pow) {
          return builder_.add1(Binary{kind},
                               {positive(a), *builder_.add1(Unary{UnaryKind::tanh}, {b})});
        }
        return builder_.add1(Binary{kind}, {a, positive(b)});
      }
      case 6: {
        auto predicate =
            builder_.add1(Compare{static_cast<CompareKind>(below(kCompareCount))}, {a, b});
        if (!predicate.ok()) return predicate;
        return builder_.add1(Select{}, {*predicate, a, b});
      }
      case 7:
        return builder_.add1(Clamp{-0.8, 0.6 + 0.1 * static_cast<double>(below(4))}, {a});
      case 8: {
        Slice slice{Dims(shape.size(), 0), shape, Dims(shape.size(), 1)};
        for (std::size_t i = 0; i < shape.size(); ++i) {
          if (shape[i] < 2) continue;
          slice.start[i] = below(2);
          slice.stride[i] = 1 + below(3);
        }
        return builder_.add1(slice, {a});
      }
      case 9: {
        if (rank == 0) return builder_.add1(Broadcast{{3}}, {a});
        const auto kind = static_cast<ReduceKind>(below(kReduceCount));
        return builder_.add1(Reduce{kind, {below(rank)}, below(2) == 0}, {a});
      }
      case 10: {
        if (rank == 0) return builder_.add1(Reshape{{1, 1}}, {a});
        if (below(2) == 0) return builder_.add1(Reshape{{*element_count(shape)}}, {a});
        return builder_.add1(Concat{below(rank), 2}, {a, b});
      }
      case 11: {
        const auto kind = static_cast<UnaryKind>(below(kUnaryCount));
        return builder_.add1(UnaryGrad{kind, 0.3}, {b, a});
      }
      default: {
        Dims wider = shape;
        wider.insert(wider.begin(), 2);
        return builder_.add1(Broadcast{wider}, {a});
      }
    }
  }

  std::mt19937_64 engine_;
  Builder builder_;
};

TEST(Gradient, RandomGraphsAgreeWithDifferences) {
  int graphs = 0;
  int checked = 0;
  int kinks = 0;
  std::map<std::string, int> ops;
  for (std::uint64_t seed = 0; seed < 450 && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    const Graph forward = Random(seed).run();
    Names wrt;
    for (TensorId id = 0; id < forward.input_count; ++id) wrt.push_back(forward.tensor(id).name);
    Check check(forward, wrt, seed);
    constexpr int kDirections = 2;
    const int failed = check.directions(seed, kDirections);
    graphs += failed < kDirections ? 1 : 0;
    checked += kDirections - failed;
    kinks += failed;
    for (const Node& node : forward.nodes) ++ops[op_name(node.op)];
  }
  EXPECT_GE(graphs, 360);
  EXPECT_LT(kinks * 5, checked);
  EXPECT_GT(ops.size(), 60U);
}

// A fusion of mixed dtypes has the gradients of the same fusion in f64, but for the rounding of
// what is stored.
Json in_f64(Json document) {
  const auto widen = [](Json& item) {
    const auto dtype = dtype_from_string(item.value("dtype", ""));
    if (!dtype || !is_float(*dtype)) return;
    item["dtype"] = "f64";
    if (item.contains("value")) item["value"] = round_to(*dtype, item["value"].get<double>());
  };
  for (Json& item : document["inputs"]) widen(item);
  for (Json& item : document["ops"]) widen(item);
  return document;
}

TEST(Gradient, MixedDtypesFollowTheSameComputationInF64) {
  int compared = 0;
  for (const cases::Case& item : cases::fusion_cases(11, 120, cases::Profile::any)) {
    SCOPED_TRACE(item.text());
    const Graph forward = graph_of_case(item);
    Names wrt;
    for (TensorId id = 0; id < forward.input_count; ++id) {
      const DType dtype = forward.tensor(id).dtype;
      if (is_float(dtype) && bit_width(dtype) >= 8) wrt.push_back(forward.tensor(id).name);
    }
    if (wrt.empty()) continue;
    const Json wide_document = in_f64(graph_to_json(forward));
    auto narrow = gradient(forward, wrt);
    if (!narrow.ok()) {
      const bool expected = narrow.error().kind == ErrorKind::unsupported ||
                            narrow.error().message.find("no float output") != std::string::npos ||
                            narrow.error().message.find("f8e8m0") != std::string::npos;
      EXPECT_TRUE(expected) << narrow.error().message;
      continue;
    }
    if (forward.strict) continue;  // rounds in between
    auto wide_forward = graph_from_json(wide_document, "wide");
    if (!wide_forward.ok()) continue;  // f64 is not allowed somewhere
    Bench a(*narrow, item.seed);
    Bench b(gradient_of(*wide_forward, wrt), item.seed);
    for (const plan::Buffer& buffer : a.inputs) {
      const std::string& name = a.graph.tensor(buffer.id()).name;
      if (b.has(b.inputs, name)) b.set(name, a.values(name));
    }
    ASSERT_TRUE(a.try_execute().ok());
    ASSERT_TRUE(b.try_execute().ok());
    for (const std::string& name : wrt) {
      const DType dtype = a.graph.tensor(a.output("d_" + name).id()).dtype;
      const auto narrow_values = a.values("d_" + name);
      const auto wide_values = b.values("d_" + name);
      ASSERT_EQ(narrow_values.size(), wide_values.size());
      double size = 0;
      for (const double value : wide_values) {
        if (std::isfinite(value)) size = std::max(size, std::fabs(value));
      }
      for (std::size_t i = 0; i < wide_values.size(); ++i) {
        if (!std::isfinite(wide_values[i]) || std::fabs(wide_values[i]) > max_finite(dtype))
          continue;
        const double bound = 2 * unit_roundoff(dtype) * std::fabs(wide_values[i]) +
                             smallest_subnormal(dtype) +
                             1e-6 * size;  // constants of formulas are f32
        ASSERT_NEAR(narrow_values[i], wide_values[i], bound) << name << ' ' << i;
        ++compared;
      }
    }
  }
  EXPECT_GT(compared, 10000);
}

TEST(Gradient, MatmulsMultiplySixteenBits) {
  for (const auto& [a, b, beside_a, beside_b] :
       std::vector<std::array<std::string, 4>>{{"bf16", "bf16", "bf16", "bf16"},
                                               {"f16", "f16", "f16", "f16"},
                                               {"f8e4m3", "f8e5m2", "bf16", "bf16"},
                                               {"f32", "bf16", "f32", "bf16"}}) {
    SCOPED_TRACE(a + " " + b);
    Json document =
        graph_to_json(written({{"a", {4, 8}}, {"b", {8, 4}}}, {op("matmul", {"a", "b"})}));
    document["inputs"][0]["dtype"] = a;
    document["inputs"][1]["dtype"] = b;
    document["ops"][0]["dtype"] = "f32";
    const Graph graph = gradient_of(graph_from(document), {"a", "b"});
    std::multiset<std::string> products;
    for (const Node& node : graph.nodes) {
      if (!std::holds_alternative<Matmul>(node.op)) continue;
      for (const TensorId id : node.inputs) {
        products.insert(std::string{to_string(graph.tensor(id).dtype)});
      }
    }
    EXPECT_EQ(products, (std::multiset<std::string>{beside_a, beside_a, beside_b, beside_b}));
  }
}

TEST(Gradient, SumsAreRoundedAsTheyAreStored) {
  // No conversion behind the reduction: it ends a kernel.
  const Graph forward =
      written({{"x", {4, 8}, true, "f32"}, {"b", {1, 8}, true, "bf16"}}, {op("add", {"x", "b"})});
  const Graph graph = gradient_of(forward, {"b"});
  ASSERT_EQ(graph.nodes.size(), 1U) << print(graph);
  EXPECT_EQ(op_name(graph.nodes[0].op), "reduce_sum");
  EXPECT_EQ(graph.tensor(graph.nodes[0].outputs[0]).dtype, DType::bf16);
}

TEST(Gradient, TransposesAreOfInputs) {
  // What is multiplied is computed of an input, a column, a row and a scalar.
  const Graph forward =
      written({{"a", {2, 4, 8}}, {"c", {4, 1}}, {"r", {8}}, {"s", {}}, {"b", {2, 8, 4}}},
              {op("mul", {"a", "c"}, "ac"), op("sub", {"ac", "r"}, "ar"), op("tanh", {"ar"}, "t"),
               op("compare_lt", {"t", "s"}, "p"), op("select", {"p", "t", "ar"}, "m"),
               op("exp", {"b"}, "e"), op("matmul", {"m", "e"})});
  const Graph graph = gradient_of(forward, {"a", "b", "r"});
  for (const Node& node : graph.nodes) {
    if (!std::holds_alternative<Transpose>(node.op)) continue;
    EXPECT_TRUE(graph.is_input(node.inputs[0])) << print(graph);
  }
  Check check(forward, {"a", "b", "c", "r", "s"});
  EXPECT_EQ(check.directions(5, 4), 0);
}

}  // namespace
}  // namespace lawson::ir
