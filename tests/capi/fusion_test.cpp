// Fused functions and graphs built op by op: what they give, and what every misuse says.
#include <gtest/gtest.h>
#include <lawson/lawson.hpp>

#include <cmath>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

namespace {

using Json = nlohmann::json;
using lawson::Array;
using lawson::FuseOptions;
using lawson::Tensor;
using namespace lawson::dtypes;

bool has(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

template <typename F>
std::pair<lawson_status, std::string> error_of(F&& call) {
  try {
    call();
  } catch (const lawson::Error& error) {
    return {error.status(), error.what()};
  }
  return {LAWSON_OK, ""};
}

#define EXPECT_ERROR(call, wanted, ...)                                   \
  do {                                                                    \
    const auto [status, message] = error_of([&] { call; });               \
    EXPECT_EQ(status, wanted) << message;                                 \
    for (const std::string& part : std::vector<std::string>{__VA_ARGS__}) \
      EXPECT_TRUE(has(message, part)) << part << "\nnot in " << message;  \
  } while (false)

// An environment variable for the time of a test.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_{name} { setenv(name, value, 1); }
  ~Variable() { unsetenv(name_); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
};

template <std::size_t N>
struct Floats {
  alignas(64) std::array<float, N> values{};
  float* data() { return values.data(); }
  void count(float step) {
    for (std::size_t i = 0; i < N; ++i) values[i] = step * static_cast<float>(i % 11);
  }
};

FuseOptions on_cpu(const char* name = "test") {
  return {.name = name, .engines = {"cpu"}};
}

const auto kScaleAndShift = [](Tensor x, Tensor w, Tensor b) {
  return lawson::matmul(x, w) * 2 + b;
};

TEST(Fused, GivesTheNumbersOfItsFunction) {
  const auto fused = lawson::fuse(kScaleAndShift, on_cpu());
  Floats<8> x;
  Floats<6> w;
  Floats<3> b;
  Floats<12> y;
  x.count(1);
  w.count(0.5);
  b.count(3);
  for (int round = 0; round < 3; ++round) {
    y.values.fill(-1);
    fused({{x.data(), {4, 2}}, {w.data(), {2, 3}}, {b.data(), {3}}}, {{y.data(), {4, 3}}});
    for (std::size_t i = 0; i < 12; ++i) {
      const float sum =
          x.values[i / 3 * 2] * w.values[i % 3] + x.values[i / 3 * 2 + 1] * w.values[3 + i % 3];
      EXPECT_EQ(y.values[i], sum * 2 + b.values[i % 3]) << i;
    }
  }
}

TEST(Fused, SeveralOutputsInEveryForm) {
  Floats<6> x;
  Floats<6> y;
  Floats<2> s;
  x.count(1);
  const auto rows = [](Tensor v) { return lawson::reduce_sum(v, {-1}); };
  const auto run = [&](const auto& fused) {
    y.values.fill(0);
    s.values.fill(0);
    fused({{x.data(), {2, 3}}}, {{y.data(), {2, 3}}, {s.data(), {2}}});
    EXPECT_EQ(y.values[5], -x.values[5]);
    EXPECT_EQ(s.values[1], 3.0F + 4 + 5);
  };
  run(lawson::fuse([&](Tensor v) { return std::tuple{-v, rows(v)}; }, on_cpu("tuple")));
  run(lawson::fuse([&](Tensor v) { return std::pair{-v, rows(v)}; }, on_cpu("pair")));
  run(lawson::fuse([&](Tensor v) { return std::array{-v, rows(v)}; }, on_cpu("array")));
  run(lawson::fuse([&](Tensor v) { return std::vector{-v, rows(v)}; }, on_cpu("vector")));
  run(lawson::fuse([&](auto v) { return std::tuple{-v, rows(v)}; }, on_cpu("generic")));
  run(lawson::fuse(
      [&](std::span<const Tensor> v) {
        return std::tuple{-v[0], rows(v[0])};
      },
      on_cpu("span")));
}

TEST(Fused, OutputsMayHaveStridesOfTheirOwn) {
  const auto fused = lawson::fuse([](Tensor x) { return x + 1; }, on_cpu());
  Floats<6> x;
  Floats<6> y;
  x.count(1);
  fused({{x.data(), {2, 3}}}, {{y.data(), {2, 3}, {1, 2}}});
  EXPECT_EQ(y.values[1], x.values[3] + 1);  // row 1, column 0
  fused({{x.data(), {2, 3}}}, {{y.data(), {2, 3}}});
  EXPECT_EQ(y.values[1], x.values[1] + 1);
  fused({{x.data(), {2, 3}, {1, 2}}}, {{y.data(), {2, 3}}});
  EXPECT_EQ(y.values[1], x.values[2] + 1);
}

TEST(Fused, ScalarsAreBoundWhenItRuns) {
  const auto fused = lawson::fuse([](Tensor x, Tensor factor) { return x * factor; }, on_cpu());
  Floats<4> x;
  Floats<4> y;
  x.count(1);
  std::string id;
  for (const float factor : {2.0F, 5.0F}) {
    const std::array inputs{Array{x.data(), {2, 2}}, Array::scalar(factor)};
    const std::array outputs{Array{y.data(), {2, 2}}};
    fused(inputs, outputs);
    EXPECT_EQ(y.values[3], 3 * factor);
    const std::string now{fused.plan(inputs, outputs)->plan().id()};
    EXPECT_TRUE(id.empty() || id == now);
    id = now;
  }
}

// Each op of the set, by its function; the graph is what the specs call it.
TEST(Fused, EveryOpHasAFunction) {
  const auto fused = lawson::fuse(
      [](Tensor x, Tensor w, Tensor p) {
        std::vector<Tensor> all;
        const auto keep = [&](Tensor t) { all.push_back(lawson::reduce_sum(t)); };
        namespace l = lawson;
        for (Tensor t :
             {l::neg(x),        l::abs(x),      l::exp(x),      l::log(x),        l::log1p(x),
              l::expm1(x),      l::sqrt(x),     l::rsqrt(x),    l::reciprocal(x), l::sin(x),
              l::cos(x),        l::tan(x),      l::tanh(x),     l::erf(x),        l::ceil(x),
              l::floor(x),      l::round(x),    l::sign(x),     l::sigmoid(x),    l::relu(x),
              l::leaky_relu(x), l::relu6(x),    l::elu(x, 0.5), l::softplus(x),   l::silu(x),
              l::gelu(x),       l::gelu_tanh(x)}) {
          all.push_back(t);
        }
        Tensor sum = all[0];
        for (std::size_t i = 1; i < all.size(); ++i) sum = sum + all[i];
        all.clear();
        keep(sum);
        keep(x - 1);
        keep(2 / x);
        keep(l::pow(x, 2) + l::min(x, w) + l::max(x, 0) + x % 3);
        keep(l::select((x == w) | ((x != w) & !(x < w)), x, 0.0));
        keep(l::select((x <= w) & (x > 0) & (x >= 0), 1.0, w));
        keep(l::clamp(x, -1, 1));
        keep(x + l::convert(l::iota({4, 4}, -1), f32));
        keep(x + l::constant(0.5));
        keep(l::broadcast(l::reshape(l::reduce_mean(x, {0}), {1, 4}), {4, 4}));
        keep(l::transpose(x, {-1, 0}));
        keep(l::slice(x, {0, 1}, {4, 4}, {1, 2}));
        keep(l::concat({x, w}, -1));
        keep(l::reduce_max(x, {0}, true) + l::reduce_min(x, {-1}, true) + l::reduce_amax(x) +
             l::reduce_norm1(x) + l::reduce_norm2(x) + l::reduce_prod(x, {0, 1}));
        keep(l::tanh_grad(w, x) + l::sigmoid_grad(w, x) + l::relu_grad(w, x) + l::relu6_grad(w, x) +
             l::softplus_grad(w, x) + l::silu_grad(w, x) + l::gelu_grad(w, x) +
             l::gelu_tanh_grad(w, x) + l::leaky_relu_grad(w, x, 0.1) + l::elu_grad(w, x, 2));
        const auto norm = l::layer_norm(x, p, p, {.statistics = true});
        keep(norm.y);
        const auto back = l::layer_norm_backward(w, x, p, norm.mean, norm.inv_std);
        keep(back.dx + back.dscale + back.dbias);
        const auto rms = l::rms_norm(x, p, {}, {.eps = 1e-6, .statistics = true});
        keep(rms.y + l::rms_norm_backward(w, x, p, rms.inv_std, {-1}, 1).dx);
        keep(l::op("matmul", {x, w}, {f32}));
        return all;
      },
      {.name = "all", .inputs = {"x", "w", "p"}});
  const auto graph = fused.graph({{f32, {4, 4}}, {f32, {4, 4}}, {f32, {4}}});
  const Json json = Json::parse(graph.json());
  std::set<std::string> seen;
  for (const Json& op : json["ops"]) {
    seen.insert(op["op"]);
    EXPECT_TRUE(has(op["source"].get<std::string>(), "fusion_test.cpp:")) << op;
  }
  for (const char* name :
       {"matmul", "gelu_tanh", "mod", "compare_ge", "not", "or", "and", "select", "iota", "concat",
        "reduce_norm2", "elu_grad", "layer_norm", "rms_norm_backward", "slice", "broadcast"}) {
    EXPECT_TRUE(seen.contains(name)) << name;
  }
  const auto scaled = lawson::fuse(
      [](Tensor a, Tensor b, Tensor sa, Tensor sb) { return lawson::scaled_matmul(a, b, sa, sb); },
      {});
  EXPECT_TRUE(has(
      scaled.graph({{f8e4m3, {64, 64}}, {f8e4m3, {64, 64}}, {f8e8m0, {64, 2}}, {f8e8m0, {2, 64}}})
          .print(),
      "scaled_matmul"));
}

TEST(Fused, ErrorsNameSourceOpAndOperands) {
  const FuseOptions options{.name = "bad", .engines = {"cpu"}, .inputs = {"x", "w"}};
  const int line = __LINE__ + 1;
  const auto fused = lawson::fuse([](Tensor x, Tensor w) { return lawson::matmul(x, w); }, options);
  const std::string here = "fusion_test.cpp:" + std::to_string(line);
  EXPECT_ERROR((fused.graph({{bf16, {4, 8}}, {bf16, {9, 16}}})), LAWSON_INVALID_ARGUMENT, here,
               "matmul", "x bf16[4, 8]", "w bf16[9, 16]", "8 and 9");
  const auto operators = lawson::fuse([](Tensor x, Tensor w) { return x + w; }, options);
  EXPECT_ERROR((operators.graph({{f32, {4, 8}}, {f32, {9}}})), LAWSON_INVALID_ARGUMENT,
               "fusion_test.cpp:" + std::to_string(line + 4), "add", "x f32[4, 8]");
  EXPECT_ERROR((fused.graph({{f32, {4, 8}}})), LAWSON_INVALID_ARGUMENT,
               "does not take 1 tensors; it takes 2");
  const int by_name = __LINE__ + 3;
  const auto axis = lawson::fuse(
      [](Tensor x) {
        return lawson::op("reduce_sum", {x}, {{"axis", lawson::Dims{1}}});
      },
      options);
  EXPECT_ERROR((axis.graph({{f32, {4, 8}}})), LAWSON_INVALID_ARGUMENT,
               "fusion_test.cpp:" + std::to_string(by_name), "reduce_sum",
               "field 'axes': missing, and there is 'axis'");
}

TEST(Fused, MemoryThatDoesNotFitIsRefused) {
  const auto fused = lawson::fuse([](Tensor x) { return x + 1; }, on_cpu("fit"));
  Floats<6> x;
  Floats<6> y;
  const auto in = Array{x.data(), {2, 3}};
  EXPECT_ERROR((fused({in}, {})), LAWSON_INVALID_ARGUMENT, "gives 1 outputs", "0");
  EXPECT_ERROR((fused({in}, {{y.data(), {3, 2}}})), LAWSON_INVALID_ARGUMENT, "output 0",
               "f32[2, 3]", "f32[3, 2]");
  EXPECT_ERROR((fused({in}, {{y.data(), bf16, {2, 3}}})), LAWSON_INVALID_ARGUMENT, "bf16[2, 3]");
  const auto strided = Array{y.data(), {2, 2}, {3, 1}};
  EXPECT_ERROR((fused({in}, {strided})), LAWSON_INVALID_ARGUMENT, "output 0 is f32[2, 3]",
               "f32[2, 2]");
  EXPECT_ERROR((fused.plan({in}, {strided})), LAWSON_INVALID_ARGUMENT, "output 0 is f32[2, 3]");
  EXPECT_ERROR((fused.plan({in}, {{f32, {3, 2}}})), LAWSON_INVALID_ARGUMENT, "f32[3, 2]");
  EXPECT_ERROR((fused({{f32, {2, 3}}}, {{y.data(), {2, 3}}})), LAWSON_INVALID_ARGUMENT, "input 0",
               "no address");
  EXPECT_ERROR((fused({in}, {{y.data() + 1, {2, 2}}})), LAWSON_INVALID_ARGUMENT, "output 0");
  EXPECT_ERROR((fused({{x.data() + 1, {2, 2}}}, {{y.data(), {2, 2}}})), LAWSON_INVALID_ARGUMENT,
               "no multiple of 16", "aligned");
  fused({Array{x.data() + 1, {2, 2}}.aligned(4)}, {{y.data(), {2, 2}}});
}

TEST(Fused, TensorsLiveInTheirTrace) {
  Tensor kept;
  const auto fused = lawson::fuse(
      [&kept](Tensor x) {
        const Tensor result = kept.rank() == 0 ? x + 1 : x;
        kept = x;
        return result;
      },
      on_cpu());
  EXPECT_ERROR((fused.graph({{f32, {4}}})), LAWSON_INVALID_ARGUMENT, "absent");
  EXPECT_ERROR(static_cast<void>(Tensor{} + 1), LAWSON_INVALID_ARGUMENT, "being traced");
  const auto keeps = lawson::fuse(
      [&kept](Tensor x) {
        kept = x;
        return x + 1;
      },
      on_cpu());
  static_cast<void>(keeps.graph({{f32, {4}}}));
  const auto uses = lawson::fuse([&kept](Tensor x) { return x + kept; }, on_cpu());
  EXPECT_ERROR((uses.graph({{f32, {4}}})), LAWSON_INVALID_ARGUMENT, "another trace");
  const auto gives = lawson::fuse([](Tensor x) { return x; }, on_cpu());
  EXPECT_ERROR((gives.graph({{f32, {4}}})), LAWSON_INVALID_ARGUMENT, "an output must be computed");
}

// What a shape was is known while ops are added, whatever the trace does meanwhile.
TEST(Fused, ShapesOutliveTheOpsAfterThem) {
  const auto fused = lawson::fuse(
      [](Tensor x, Tensor b) {
        const auto& shape = x.shape();
        Tensor sum = b;
        for (int i = 0; i < 64; ++i) sum = sum + 1;
        return lawson::broadcast(sum, shape) + lawson::broadcast(lawson::exp(b), x.shape());
      },
      on_cpu());
  Floats<6> x;
  Floats<1> b;
  Floats<6> y;
  fused({{x.data(), {2, 3}}, {b.data(), {1}}}, {{y.data(), {2, 3}}});
  EXPECT_EQ(y.values[5], 65.0F);
}

TEST(Fused, NumbersBesideIntegersAreExactOrRefused) {
  const auto plus = [](auto number) {
    return lawson::fuse([number](Tensor x) { return x + number; }, on_cpu());
  };
  alignas(16) std::array<std::int64_t, 2> x{1, -2};
  alignas(16) std::array<std::int64_t, 2> y{};
  plus(std::int64_t{3'000'000'000})({{x.data(), {2}}}, {{y.data(), {2}}});
  EXPECT_EQ(y[0], 3'000'000'001);
  plus(-3e12)({{x.data(), {2}}}, {{y.data(), {2}}});
  EXPECT_EQ(y[1], -3'000'000'000'002);
  EXPECT_ERROR((plus(std::int64_t{9'007'199'254'740'993}).graph({{i64, {2}}})),
               LAWSON_INVALID_ARGUMENT, "9007199254740993", "2^53");
  const auto constant = [](auto number) {
    return lawson::fuse(
        [number](Tensor t) { return t + lawson::constant(number, LAWSON_DTYPE_I64); }, on_cpu());
  };
  constant(std::int64_t{9'007'199'254'740'991})({{x.data(), {2}}}, {{y.data(), {2}}});
  EXPECT_EQ(y[1], 9'007'199'254'740'989);
  constant(2.0)({{x.data(), {2}}}, {{y.data(), {2}}});
  EXPECT_EQ(y[0], 3);
  for (const std::int64_t large : {9'007'199'254'740'993, -9'007'199'254'740'993}) {
    EXPECT_ERROR((constant(large).graph({{i64, {2}}})), LAWSON_INVALID_ARGUMENT,
                 "fusion_test.cpp:", "constant: " + std::to_string(large), "less than 2^53");
  }
}

TEST(Fused, AReductionOfOneNumberIsThatNumber) {
  namespace l = lawson;
  const auto fused = l::fuse(
      [](Tensor x) {
        const Tensor s = l::reduce_sum(x);  // of rank 0
        return std::array{l::reduce_sum(s),   l::reduce_max(s),  l::reduce_min(s, {}, true),
                          l::reduce_mean(s),  l::reduce_prod(s), l::reduce_amax(s),
                          l::reduce_norm1(s), l::reduce_norm2(s)};
      },
      on_cpu());
  Floats<2> x;
  x.values[0] = -3;
  x.values[1] = 1;
  std::array<Floats<1>, 8> y;
  fused({{x.data(), {2}}}, {{y[0].data(), {}},
                            {y[1].data(), {}},
                            {y[2].data(), {}},
                            {y[3].data(), {}},
                            {y[4].data(), {}},
                            {y[5].data(), {}},
                            {y[6].data(), {}},
                            {y[7].data(), {}}});
  for (std::size_t i = 0; i < y.size(); ++i) EXPECT_EQ(y[i].values[0], i < 5 ? -2 : 2) << i;
}

TEST(Fused, InputsMayHaveAnyNameAndBeNone) {
  FuseOptions options = on_cpu();
  options.inputs = {"t1", "t2"};
  const auto sum = lawson::fuse([](Tensor a, Tensor b) { return lawson::relu(a) + b; }, options);
  const auto plan = sum.plan({{f32, {4}}, {f32, {4}}});
  EXPECT_EQ(plan->graph().tensors()[0].name, "t1");
  EXPECT_EQ(plan->engine(), "cpu");
  const auto count = lawson::fuse([] { return lawson::iota({4}, 0) * 2; }, on_cpu());
  alignas(16) std::array<std::int32_t, 4> y{};
  count({}, {{y.data(), {4}}});
  EXPECT_EQ(y[3], 6);
  const auto low = lawson::fuse([](Tensor x) { return lawson::reduce_sum(x, {-3}); }, on_cpu());
  EXPECT_ERROR((low.graph({{f32, {4, 4}}})), LAWSON_INVALID_ARGUMENT,
               "fusion_test.cpp:", "reduce_sum: axis -3 of a tensor of rank 2");
  const auto along = lawson::fuse([](Tensor x) { return lawson::iota({4, 4}, -3) + x; }, on_cpu());
  EXPECT_ERROR((along.graph({{f32, {4, 4}}})), LAWSON_INVALID_ARGUMENT, "iota: axis -3");
  const auto turned = lawson::fuse(
      [](Tensor x) {
        return lawson::transpose(x, {0, -3});
      },
      on_cpu());
  EXPECT_ERROR((turned.graph({{f32, {4, 4}}})), LAWSON_INVALID_ARGUMENT, "transpose: axis -3");
}

// What a function does may change: each distinct trace has its own plan, and old ones come back.
TEST(Fused, AFunctionThatChangesIsTracedAgain) {
  double factor = 1;
  int extra = 0;
  const auto fused = lawson::fuse(
      [&](Tensor x) {
        Tensor y = x * factor;
        for (int i = 0; i < extra; ++i) y = y + 1;
        return y;
      },
      on_cpu());
  Floats<4> x;
  Floats<4> y;
  x.count(1);
  for (int round = 0; round < 40; ++round) {
    factor = 1 + round % 5;
    extra = round % 3;
    fused({{x.data(), {4}}}, {{y.data(), {4}}});
    for (std::size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(y.values[i], static_cast<float>(static_cast<double>(i) * factor + extra)) << round;
    }
  }
}

// The workspace that the library keeps for a thread may end before the thread's other objects.
TEST(Fused, DestructorsAtTheEndOfAThreadGetAnErrorOrTheirOwnWorkspace) {
  const auto twice = lawson::fuse(
      [](Tensor x) { return lawson::matmul(lawson::gelu(lawson::matmul(x, x)), x); }, on_cpu());
  static lawson_status at_end = LAWSON_OK;
  static bool with_own = false;
  struct Last {
    decltype(twice)* fused = nullptr;
    ~Last() {
      Floats<4> x;
      Floats<4> y;
      const auto run = [&](const lawson::RunOptions& options) {
        (*fused)({{x.data(), {2, 2}}}, {{y.data(), {2, 2}}}, options);
      };
      at_end = error_of([&] { run({}); }).first;
      alignas(64) std::array<std::byte, 1 << 16> own;
      with_own = error_of([&] {
                   run({.workspace = own.data(), .workspace_size = own.size()});
                 }).first == LAWSON_OK;
    }
  };
  std::thread([&] {
    thread_local Last last;
    last.fused = &twice;
    Floats<4> x;
    Floats<4> y;
    twice({{x.data(), {2, 2}}}, {{y.data(), {2, 2}}});
  }).join();
  EXPECT_EQ(at_end, LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(with_own);
}

TEST(Fused, ManySignaturesStayBounded) {
  const auto fused = lawson::fuse([](Tensor x) { return x + 1; }, on_cpu("bounded"));
  std::vector<float> memory(1024 + 16);
  void* start = memory.data();
  std::size_t space = memory.size() * sizeof(float);
  auto* data = static_cast<float*>(std::align(64, 1024 * sizeof(float), start, space));
  for (std::int64_t n = 1; n <= 600; ++n) {
    data[n - 1] = 0;
    fused({{data, {n}}}, {{data, {n}}});
    EXPECT_EQ(data[n - 1], 1.0F);
  }
}

TEST(Fused, GradientsAreGraphsToo) {
  const auto fused = lawson::fuse([](Tensor x, Tensor w) { return lawson::matmul(x, w); },
                                  {.name = "f", .inputs = {"x", "w"}, .outputs = {"y"}});
  const auto graph = fused.graph({{f32, {2, 3}}, {f32, {3, 4}}});
  const auto backward = lawson::gradient(graph, {"w"});
  const auto tensors = backward.tensors();
  ASSERT_EQ(tensors.size(), 3U);
  EXPECT_EQ(tensors[0].name, "x");
  EXPECT_EQ(tensors[1].name, "d_y");
  EXPECT_EQ(tensors[2].name, "d_w");
  EXPECT_EQ(tensors[2].shape, (std::vector<std::int64_t>{3, 4}));
  const auto fusion = lawson::fuse(backward, on_cpu());
  Floats<6> x;
  Floats<8> dy;
  Floats<12> dw;
  x.count(1);
  dy.count(1);
  const std::vector<lawson::Binding> bindings{{1, x.data()}, {2, dy.data()}, {3, dw.data()}};
  std::vector<std::byte> workspace(fusion.plan().workspace_size() + 64);
  void* aligned = workspace.data();
  std::size_t space = workspace.size();
  std::align(64, fusion.plan().workspace_size(), aligned, space);
  fusion.execute(bindings, aligned, fusion.plan().workspace_size());
  EXPECT_EQ(dw.values[5], x.values[1] * dy.values[1] + x.values[4] * dy.values[5]);
  EXPECT_ERROR(static_cast<void>(lawson::gradient(graph, {"z"})), LAWSON_INVALID_ARGUMENT, "z");
}

// ---- policy ----------------------------------------------------------------------------------

lawson::Graph small_graph() {
  const auto fused = lawson::fuse([](Tensor x) { return lawson::gelu(x) + 1; }, {.name = "small"});
  return fused.graph({{f32, {1, 4, 4}}});
}

TEST(Policy, RequireNeedsItsEngine) {
  const auto graph = small_graph();
  // The engine of a fusion is cudnn: the host CPU is not its platform unless the caller says so.
  EXPECT_ERROR(lawson::fuse(graph, {.device = "cpu"}), LAWSON_UNAVAILABLE, "'small'", "'cudnn'",
               "engines {\"cpu\"}", "LAWSON_ENGINE=cpu");
  if (LAWSON_WITH_CUDNN == 0) {
    EXPECT_ERROR(lawson::fuse(graph), LAWSON_UNAVAILABLE, "'cudnn'", "LAWSON_ENGINE=cpu");
  }
  const auto fusion = lawson::fuse(graph, on_cpu());
  EXPECT_EQ(fusion.engine(), "cpu");
  EXPECT_EQ(fusion.device().name(), "cpu");
  EXPECT_TRUE(fusion.verdict().supported());
  EXPECT_EQ(fusion.verdict().strength(), LAWSON_BUILT);
  EXPECT_EQ(fusion.verdict().plan_id(), fusion.plan().id());
  // What is judged is what runs.
  lawson::Options built;
  built.strength = LAWSON_BUILT;
  const auto judged = lawson::probe(graph, lawson::Device::find("cpu"), built);
  EXPECT_EQ(judged.plan_id(), fusion.plan().id());
  EXPECT_EQ(judged.key(), fusion.verdict().key());
  EXPECT_TRUE(has(fusion.graph().print(), "gelu"));
  const auto again = lawson::fuse(graph, {.device = "cpu", .engines = {"reference"}});
  EXPECT_EQ(again.engine(), "reference");
}

TEST(Policy, AllowTakesEnginesInOrderAndSaysWhy) {
  const auto graph = small_graph();
  const auto fusion = lawson::fuse(
      graph, {.device = "cpu", .policy = LAWSON_POLICY_ALLOW, .engines = {"cudnn", "cpu"}});
  EXPECT_EQ(fusion.engine(), "cpu");
  const Json report = Json::parse(fusion.json());
  EXPECT_EQ(report["policy"], "allow");
  EXPECT_EQ(report["policy_from"], "argument");
  EXPECT_EQ(report["engines"], Json({"cudnn", "cpu"}));
  EXPECT_EQ(report["engines_from"], "argument");
  EXPECT_EQ(report["engine"], "cpu");
  ASSERT_EQ(report["tried"].size(), 1U);
  EXPECT_EQ(report["tried"][0]["engine"], "cudnn");
  EXPECT_EQ(report["tried"][0]["status"], "unavailable");
  EXPECT_FALSE(report["tried"][0]["reasons"].empty());
  EXPECT_EQ(report["plan_id"], fusion.plan().id());
  EXPECT_EQ(report["verdict"]["strength"], "built");
  EXPECT_ERROR(lawson::fuse(graph, {.device = "cpu", .engines = {"cudnn", "cpu"}}),
               LAWSON_INVALID_ARGUMENT, "require", "cudnn, cpu");
  EXPECT_ERROR(lawson::fuse(graph, {.engines = {"cpuu"}}), LAWSON_INVALID_ARGUMENT, "cpuu");
  EXPECT_ERROR(lawson::fuse(graph, {.policy = LAWSON_POLICY_ALLOW, .engines = {"cpuu", "cpu"}}),
               LAWSON_INVALID_ARGUMENT, "cpuu");
}

TEST(Policy, TheEnvironmentFillsWhatIsNotSaid) {
  const auto graph = small_graph();
  {
    const Variable engine{"LAWSON_ENGINE", "reference"};
    const auto fusion = lawson::fuse(graph);
    EXPECT_EQ(fusion.engine(), "reference");
    EXPECT_EQ(Json::parse(fusion.json())["engines_from"], "environment");
    EXPECT_EQ(Json::parse(fusion.json())["policy_from"], "default");
    EXPECT_EQ(lawson::fuse(graph, on_cpu()).engine(), "cpu");
  }
  {
    const Variable policy{"LAWSON_POLICY", "allow"};
    const auto fusion = lawson::fuse(graph, {.device = "cpu"});
    EXPECT_EQ(fusion.engine(), "cpu");
    EXPECT_EQ(Json::parse(fusion.json())["policy_from"], "environment");
    const Variable engines{"LAWSON_ENGINE", "cudnn,reference"};
    EXPECT_EQ(lawson::fuse(graph, {.device = "cpu"}).engine(), "reference");
  }
  {
    const Variable policy{"LAWSON_POLICY", "maybe"};
    EXPECT_ERROR(lawson::fuse(graph, on_cpu()), LAWSON_INVALID_ARGUMENT, "LAWSON_POLICY", "maybe");
  }
  {
    const Variable engine{"LAWSON_ENGINE", "cpu,,"};
    EXPECT_ERROR(lawson::fuse(graph, {.policy = LAWSON_POLICY_REQUIRE}), LAWSON_INVALID_ARGUMENT,
                 "require");
    EXPECT_ERROR(lawson::fuse(graph, {.policy = LAWSON_POLICY_ALLOW}), LAWSON_INVALID_ARGUMENT,
                 "LAWSON_ENGINE", "engine 1 has no name");
  }
}

// An engine without a name is none, not the host's.
TEST(Policy, EnginesHaveNames) {
  const auto graph = small_graph();
  EXPECT_ERROR(lawson::fuse(graph, {.engines = {""}}), LAWSON_INVALID_ARGUMENT,
               "lawson_fuse_options.engines", "engine 0 has no name");
  EXPECT_ERROR(lawson::fuse(graph, {.policy = LAWSON_POLICY_ALLOW, .engines = {"cudnn", ""}}),
               LAWSON_INVALID_ARGUMENT, "engine 1 has no name");
  if (LAWSON_WITH_CUDNN == 0) return;  // knows no h200
  const auto [status, message] =
      error_of([&] { lawson::fuse(graph, {.device = "h200", .engines = {"cpu"}}); });
  EXPECT_EQ(status, LAWSON_UNAVAILABLE);
  EXPECT_TRUE(has(message, "name device 'cpu', or none")) << message;
}

// Two products in a row need memory between them: with a limit just below that, only a cut helps.
TEST(Policy, ARefusalNamesOpSourceAndWhatWouldBeTaken) {
  const auto mlp = [](Tensor x, Tensor w, Tensor v) {
    return lawson::matmul(lawson::gelu(lawson::matmul(x, w)), v);
  };
  const std::array inputs{Array{f32, {1, 64, 128}}, Array{f32, {1, 128, 256}},
                          Array{f32, {1, 256, 128}}};
  const auto whole = lawson::fuse(mlp, on_cpu()).plan(inputs)->plan().workspace_size();
  ASSERT_GT(whole, 1U);
  lawson::Options limited;
  limited.workspace_limit = static_cast<std::int64_t>(whole) - 1;
  const auto fused = lawson::fuse(mlp, {.name = "mlp", .engines = {"cpu"}, .options = limited});
  EXPECT_ERROR(static_cast<void>(fused.plan(inputs)), LAWSON_UNSUPPORTED,
               "fusion 'mlp' does not fuse on 'cpu' with engine 'cpu'", "bytes of workspace",
               "gelu at fusion_test.cpp:", "nearest supported form: ", "cut after op 'gelu'");
}

TEST(Policy, OptionsAreChecked) {
  const auto graph = small_graph();
  lawson_fusion* fusion = nullptr;
  const char* engines[] = {"cpu", nullptr};
  lawson_fuse_options options{};
  const auto fuse = [&] { return lawson_fuse(graph.handle(), nullptr, &options, &fusion); };
  const auto says = [](const char* part) { return has(lawson_last_error_message(), part); };
  EXPECT_EQ(fuse(), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("struct_size"));
  options.struct_size = sizeof(options);
  options.policy = 7;
  EXPECT_EQ(fuse(), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("policy: 7"));
  options.policy = LAWSON_POLICY_ALLOW;
  options.engines = engines;
  EXPECT_EQ(fuse(), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("engine_count: 0"));
  options.engine_count = 2;
  EXPECT_EQ(fuse(), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("engines[1]"));
  options.engine_count = 1;
  lawson_options inner{};
  options.options = &inner;
  EXPECT_EQ(fuse(), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("lawson_options.struct_size"));
  inner.struct_size = sizeof(inner);
  inner.workspace_limit = -1;
  inner.engine = "cpu";
  EXPECT_EQ(fuse(), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("options.engine"));
  inner.engine = nullptr;
  inner.strength = LAWSON_VERIFIED;
  EXPECT_EQ(fuse(), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("strength"));
  inner.strength = LAWSON_JUDGED;
  EXPECT_EQ(lawson_fuse(graph.handle(), nullptr, &options, nullptr), LAWSON_INVALID_ARGUMENT);
  EXPECT_EQ(fuse(), LAWSON_OK) << lawson_last_error_message();
  lawson_fusion_destroy(fusion);
  // A caller that knew only the policy.
  fusion = nullptr;
  options = {};
  options.struct_size = offsetof(lawson_fuse_options, engines);
  options.policy = LAWSON_POLICY_ALLOW;
  options.engines = engines;  // beyond its struct
  options.engine_count = 99;
  EXPECT_EQ(fuse(), LAWSON_OK) << lawson_last_error_message();
  lawson_fusion_destroy(fusion);
}

// ---- on a GPU of this machine ------------------------------------------------------------------

bool has_gpu() {
  return error_of([] { static_cast<void>(lawson::Device::find("cuda")); }).first == LAWSON_OK;
}

TEST(FusedOnGpu, OneKernelWithItsNumbers) {
  if (!has_gpu()) GTEST_SKIP() << "no GPU";
  const auto fused = lawson::fuse(
      [](Tensor x, Tensor y, Tensor z) {
        return lawson::convert(lawson::matmul(lawson::convert(x, bf16), y, f32), f32) + z;
      },
      {.name = "int8"});
  const auto fusion = fused.plan({{i8, {2, 16, 16}}, {bf16, {2, 16, 16}}, {f32, {2, 16, 16}}});
  EXPECT_EQ(fusion->engine(), "cudnn");
  EXPECT_EQ(fusion->verdict().strength(), LAWSON_BUILT);
  std::array<std::int8_t, 512> x{};
  std::array<std::uint16_t, 512> y{};
  std::array<float, 512> z{};
  std::array<float, 512> out{};
  for (std::size_t i = 0; i < 512; ++i) {
    x[i] = static_cast<std::int8_t>(i % 7 - 3);
    y[i] = i % 17 == 0 ? 0x3F80 : 0;  // the identity, twice
    z[i] = static_cast<float>(i);
  }
  y[256] = 0x3F80;
  for (std::size_t i = 257; i < 512; ++i) y[i] = (i - 256) % 17 == 0 ? 0x3F80 : 0;
  lawson::Memory dx{fusion->device(), sizeof(x)};
  lawson::Memory dy{fusion->device(), sizeof(y)};
  lawson::Memory dz{fusion->device(), sizeof(z)};
  const lawson::Memory d_out{fusion->device(), sizeof(out)};
  dx.write(std::span{x});
  dy.write(std::span{y});
  dz.write(std::span{z});
  for (int round = 0; round < 3; ++round) {
    fused({{dx.data(), i8, {2, 16, 16}},
           {dy.data(), bf16, {2, 16, 16}},
           {dz.data(), f32, {2, 16, 16}}},
          {{d_out.data(), f32, {2, 16, 16}}});
  }
  d_out.read(std::span{out});
  for (std::size_t i = 0; i < 512; ++i) EXPECT_EQ(out[i], static_cast<float>(x[i]) + z[i]) << i;
}

TEST(FusedOnGpu, TwoProductsInARowAreRefusedOrTheNextEnginesTurn) {
  if (!has_gpu()) GTEST_SKIP() << "no GPU";
  const auto mlp = [](Tensor x, Tensor w, Tensor v) {
    return lawson::matmul(lawson::gelu(lawson::matmul(x, w)), v);
  };
  const std::array inputs{Array{bf16, {1, 128, 128}}, Array{bf16, {1, 128, 256}},
                          Array{bf16, {1, 256, 128}}};
  EXPECT_ERROR(static_cast<void>(lawson::fuse(mlp, {.name = "mlp"}).plan(inputs)),
               LAWSON_UNSUPPORTED, "fusion 'mlp' does not fuse", "engine 'cudnn'",
               "fusion_test.cpp:", "cut after");
  const auto fusion =
      lawson::fuse(mlp, {.policy = LAWSON_POLICY_ALLOW, .engines = {"cudnn", "cpu"}}).plan(inputs);
  EXPECT_EQ(fusion->engine(), "cpu");
  EXPECT_EQ(fusion->device().name(), "cpu");
  EXPECT_EQ(Json::parse(fusion->json())["tried"][0]["status"], "unsupported");
}

// ---- the builder -----------------------------------------------------------------------------

class Builder : public testing::Test {
 protected:
  void SetUp() override { ASSERT_EQ(lawson_graph_builder_create("b", &builder_), LAWSON_OK); }
  void TearDown() override { lawson_graph_builder_destroy(builder_); }

  lawson_tensor_id input(lawson_dtype dtype, std::initializer_list<std::int64_t> shape,
                         const char* name = nullptr) {
    lawson_graph_input input{};
    input.struct_size = sizeof(input);
    input.name = name;
    input.dtype = dtype;
    input.rank = static_cast<std::int32_t>(shape.size());
    std::copy(shape.begin(), shape.end(), input.shape);
    lawson_tensor_id id = LAWSON_NO_TENSOR;
    EXPECT_EQ(lawson_graph_builder_input(builder_, &input, &id), LAWSON_OK)
        << lawson_last_error_message();
    return id;
  }
  lawson_status op(const char* name, std::vector<lawson_tensor_id> inputs,
                   std::vector<lawson_attribute> attributes = {}) {
    return lawson_graph_builder_op(builder_, name, inputs.data(), inputs.size(), attributes.data(),
                                   attributes.size(), &result_);
  }
  static ::testing::AssertionResult says(const char* part) {
    if (has(lawson_last_error_message(), part)) return ::testing::AssertionSuccess();
    return ::testing::AssertionFailure() << "message: " << lawson_last_error_message();
  }

  lawson_graph_builder* builder_ = nullptr;
  lawson_tensor_id result_ = LAWSON_NO_TENSOR;
};

TEST_F(Builder, TellsItsTensorsFromOthers) {
  const auto x = input(LAWSON_DTYPE_F32, {4});
  lawson_graph_builder* other = nullptr;
  ASSERT_EQ(lawson_graph_builder_create("other", &other), LAWSON_OK);
  EXPECT_EQ(lawson_graph_builder_op(other, "neg", &x, 1, nullptr, 0, &result_),
            LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("another builder"));
  lawson_graph_builder_destroy(other);
  EXPECT_EQ(op("neg", {x + 1}), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("not a tensor of this builder"));
  EXPECT_EQ(op("neg", {-5}), LAWSON_INVALID_ARGUMENT);
  EXPECT_EQ(op("neg", {LAWSON_NO_TENSOR}), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("operand 0 is missing"));
  EXPECT_EQ(lawson_graph_builder_output(builder_, x + 9, nullptr), LAWSON_INVALID_ARGUMENT);
  EXPECT_EQ(result_, LAWSON_NO_TENSOR);
  EXPECT_EQ(op("neg", {x}), LAWSON_OK);
}

TEST_F(Builder, ErrorsLeaveItAsItWas) {
  const auto x = input(LAWSON_DTYPE_BF16, {4, 8}, "x");
  const auto w = input(LAWSON_DTYPE_BF16, {9, 16}, "w");
  ASSERT_EQ(lawson_graph_builder_source(builder_, "mlp.c:12"), LAWSON_OK);
  EXPECT_EQ(op("matmul", {x, w}), LAWSON_INVALID_ARGUMENT);
  EXPECT_STREQ(lawson_last_error_message(),
               "mlp.c:12: matmul: x bf16[4, 8] x w bf16[9, 16]: inner dims 8 and 9 differ");
  EXPECT_EQ(op("matmull", {x, w}), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("did you mean 'matmul'"));
  EXPECT_TRUE(says("mlp.c:12"));
  EXPECT_EQ(op("neg", {x, w}), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("takes 1 operands, got 2"));
  const std::int64_t axes[] = {1};
  EXPECT_EQ(op("reduce_sum", {x}, {LAWSON_INTEGERS("axis", axes)}), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("axes"));
  EXPECT_EQ(op("reduce_sum", {x}, {LAWSON_NUMBER("axes", 1)}), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("axes"));
  EXPECT_EQ(op("clamp", {x}, {LAWSON_NUMBER("min", NAN), LAWSON_NUMBER("max", 1)}),
            LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("finite"));
  EXPECT_EQ(op("convert", {x}, {LAWSON_DTYPE(0)}), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("LAWSON_DTYPE_UNSET"));
  EXPECT_EQ(op("convert", {x}, {LAWSON_DTYPE(LAWSON_DTYPE_F32), LAWSON_DTYPE(LAWSON_DTYPE_F32)}),
            LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("twice"));
  EXPECT_EQ(op("neg", {x}, {{"x", 77, 0, 0, nullptr, nullptr}}), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("type 77"));
  EXPECT_EQ(op("neg", {x}, {{nullptr, 1, 0, 0, nullptr, nullptr}}), LAWSON_INVALID_ARGUMENT);
  lawson_graph* graph = nullptr;
  EXPECT_EQ(lawson_graph_builder_finish(builder_, &graph), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("no output"));
  EXPECT_EQ(lawson_graph_builder_output(builder_, x, nullptr), LAWSON_INVALID_ARGUMENT);
  ASSERT_EQ(op("neg", {x}), LAWSON_OK);
  ASSERT_EQ(lawson_graph_builder_output(builder_, result_, nullptr), LAWSON_OK);
  EXPECT_EQ(lawson_graph_builder_output(builder_, result_, nullptr), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("twice"));
  ASSERT_EQ(lawson_graph_builder_finish(builder_, &graph), LAWSON_OK);
  EXPECT_EQ(lawson_graph_tensor_count(graph), 3U);
  lawson_graph_destroy(graph);
  EXPECT_EQ(op("neg", {x}), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("finished"));
  EXPECT_EQ(lawson_graph_builder_strict(builder_, 1), LAWSON_INVALID_ARGUMENT);
  EXPECT_EQ(lawson_graph_builder_source(builder_, nullptr), LAWSON_INVALID_ARGUMENT);
}

TEST_F(Builder, InputsAndOutputsAreChecked) {
  lawson_graph_input input{};
  lawson_tensor_id id = LAWSON_NO_TENSOR;
  const auto add = [&] { return lawson_graph_builder_input(builder_, &input, &id); };
  EXPECT_EQ(add(), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("struct_size"));
  input.struct_size = sizeof(input);
  EXPECT_EQ(add(), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("dtype"));
  input.dtype = LAWSON_DTYPE_F32;
  input.rank = 9;
  EXPECT_EQ(add(), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("rank 9"));
  input.rank = 2;
  input.shape[0] = -1;
  EXPECT_EQ(add(), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("-1"));
  input.shape[0] = 2;
  input.shape[1] = 3;
  input.by_value = 1;
  EXPECT_EQ(add(), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("by_value"));
  input.by_value = 0;
  input.alignment = 3;
  EXPECT_EQ(add(), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("alignment 3"));
  input.alignment = 0;
  input.name = "a\nb";
  EXPECT_EQ(add(), LAWSON_INVALID_ARGUMENT);
  input.name = "x";
  EXPECT_EQ(id, LAWSON_NO_TENSOR);
  EXPECT_EQ(add(), LAWSON_OK) << lawson_last_error_message();
  EXPECT_EQ(add(), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("used twice"));
  ASSERT_EQ(op("neg", {id}), LAWSON_OK);
  const auto first = result_;
  ASSERT_EQ(op("neg", {first}), LAWSON_OK);
  lawson_graph_output output{};
  output.struct_size = sizeof(output);
  const std::int64_t overlapping[] = {1, 1};
  output.strides = overlapping;
  EXPECT_EQ(lawson_graph_builder_output(builder_, first, &output), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("overlap"));
  output.strides = nullptr;
  output.name = "y";
  EXPECT_EQ(lawson_graph_builder_output(builder_, first, &output), LAWSON_OK);
  EXPECT_EQ(lawson_graph_builder_output(builder_, result_, &output), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("two outputs"));
  output.name = "x";
  ASSERT_EQ(lawson_graph_builder_output(builder_, result_, &output), LAWSON_OK);
  lawson_graph* graph = nullptr;
  EXPECT_EQ(lawson_graph_builder_finish(builder_, &graph), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("an input has this name"));
}

TEST_F(Builder, NamesAreUtf8) {
  lawson_graph_builder* other = nullptr;
  EXPECT_EQ(lawson_graph_builder_create("\xC0", &other), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("UTF-8"));
  lawson_graph_input given{};
  given.struct_size = sizeof(given);
  given.dtype = LAWSON_DTYPE_F32;
  given.name = "\xFF";
  lawson_tensor_id id = LAWSON_NO_TENSOR;
  EXPECT_EQ(lawson_graph_builder_input(builder_, &given, &id), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("UTF-8"));
  EXPECT_EQ(lawson_graph_builder_source(builder_, "\xE2\x82"), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("UTF-8"));
  // A long path is cut between characters.
  for (std::size_t extra = 0; extra < 3; ++extra) {
    std::string path(extra, 'a');
    for (int i = 0; i < 100; ++i) path += "\xE2\x82\xAC";
    ASSERT_EQ(lawson_graph_builder_source(builder_, (path + ".c:1").c_str()), LAWSON_OK);
    ASSERT_EQ(op("neg", {input(LAWSON_DTYPE_F32, {4})}), LAWSON_OK);
    ASSERT_EQ(lawson_graph_builder_output(builder_, result_, nullptr), LAWSON_OK);
  }
  lawson_graph* graph = nullptr;
  ASSERT_EQ(lawson_graph_builder_finish(builder_, &graph), LAWSON_OK);
  const char* const engines[] = {"cpu"};
  const lawson_fuse_options options{sizeof(options), 0, engines, 1, nullptr, nullptr};
  lawson_fusion* fusion = nullptr;
  EXPECT_EQ(lawson_fuse(graph, nullptr, &options, &fusion), LAWSON_OK)
      << lawson_last_error_message();
  lawson_fusion_destroy(fusion);
  lawson_graph_destroy(graph);
}

// A plan carries its graph as a document, which holds so much.
TEST_F(Builder, AGraphIsNoLargerThanADocument) {
  auto last = input(LAWSON_DTYPE_F32, {4}, "x");
  for (int i = 0; i < 4096; ++i) {
    ASSERT_EQ(op("sin", {last}), LAWSON_OK);
    last = result_;
  }
  EXPECT_EQ(op("sin", {last}), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("4096 ops"));
  ASSERT_EQ(lawson_graph_builder_output(builder_, last, nullptr), LAWSON_OK);
}

TEST_F(Builder, AGradientIsNoLargerEither) {
  auto last = input(LAWSON_DTYPE_F32, {4}, "x");
  for (int i = 0; i < 1400; ++i) {
    ASSERT_EQ(op("sin", {last}), LAWSON_OK);
    last = result_;
  }
  ASSERT_EQ(lawson_graph_builder_output(builder_, last, nullptr), LAWSON_OK);
  lawson_graph* graph = nullptr;
  ASSERT_EQ(lawson_graph_builder_finish(builder_, &graph), LAWSON_OK);
  const char* const wrt[] = {"x"};
  lawson_graph* backward = nullptr;
  EXPECT_EQ(lawson_graph_gradient(graph, wrt, 1, &backward), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("at most 4096"));
  EXPECT_EQ(backward, nullptr);
  lawson_graph_destroy(graph);
}

TEST_F(Builder, GradientsOfLongNames) {
  const std::string name(255, 'x');
  ASSERT_EQ(op("sin", {input(LAWSON_DTYPE_F32, {4}, name.c_str())}), LAWSON_OK);
  ASSERT_EQ(lawson_graph_builder_output(builder_, result_, nullptr), LAWSON_OK);
  lawson_graph* graph = nullptr;
  ASSERT_EQ(lawson_graph_builder_finish(builder_, &graph), LAWSON_OK);
  const char* const wrt[] = {name.c_str()};
  lawson_graph* backward = nullptr;
  EXPECT_EQ(lawson_graph_gradient(graph, wrt, 1, &backward), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("257 bytes; at most 256"));
  lawson_graph_destroy(graph);
}

TEST_F(Builder, OptionalSlotsAndResults) {
  const auto x = input(LAWSON_DTYPE_F32, {2, 8}, "x");
  const auto scale = input(LAWSON_DTYPE_F32, {8}, "scale");
  const std::int64_t axes[] = {1};
  const lawson_attribute over[] = {LAWSON_INTEGERS("axes", axes)};
  lawson_tensor_id y = LAWSON_NO_TENSOR;
  lawson_tensor_id inv_std = LAWSON_NO_TENSOR;
  lawson_tensor_id* const wanted[] = {&y, nullptr, &inv_std};
  const lawson_tensor_id operands[] = {x, scale, LAWSON_NO_TENSOR};
  ASSERT_EQ(lawson_graph_builder_op_results(builder_, "rms_norm", operands, 3, over, 1, wanted, 3),
            LAWSON_OK)
      << lawson_last_error_message();
  lawson_tensor_info info{};
  info.struct_size = sizeof(info);
  ASSERT_EQ(lawson_graph_builder_tensor(builder_, inv_std, &info), LAWSON_OK);
  EXPECT_EQ(info.shape[1], 1);
  EXPECT_EQ(info.is_input, 0);
  ASSERT_EQ(lawson_graph_builder_tensor(builder_, x, &info), LAWSON_OK);
  EXPECT_EQ(info.is_input, 1);
  lawson_tensor_id* const none[] = {nullptr};
  EXPECT_EQ(lawson_graph_builder_op_results(builder_, "neg", &x, 1, nullptr, 0, none, 1),
            LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("no result is asked for"));
  EXPECT_EQ(lawson_graph_builder_op_results(builder_, "neg", &x, 1, nullptr, 0, wanted, 3),
            LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(says("has 1 results; 3"));
}

}  // namespace
