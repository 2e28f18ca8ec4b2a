// layer_norm and rms_norm, forward and backward.
#include "in_child.h"
#include "oracle.h"

namespace lawson::cpu {
namespace {

using ir::NormKind;
using ir::TensorId;

Dims scale_shape(const Dims& x, const Dims& axes) {
  Dims shape(x.size(), 1);
  for (const std::int64_t axis : axes) {
    shape[static_cast<std::size_t>(axis)] = x[static_cast<std::size_t>(axis)];
  }
  return shape;
}

Dims stats_shape(Dims x, const Dims& axes) {
  for (const std::int64_t axis : axes) x[static_cast<std::size_t>(axis)] = 1;
  return x;
}

struct Problem {
  Dims shape;
  Dims axes;
  NormKind kind = NormKind::layer;
  DType x = DType::f32;
  DType scale = DType::f32;
  bool bias = true;
};

Problem random_problem(std::mt19937_64& random) {
  const auto below = [&](std::uint64_t n) { return static_cast<std::int64_t>(random() % n); };
  constexpr std::array kDTypes{DType::f32, DType::bf16, DType::f16, DType::f64, DType::f8e4m3};
  Problem p;
  const std::int64_t rank = 1 + below(5);
  for (std::int64_t i = 0; i < rank; ++i) p.shape.push_back(below(6) == 0 ? 1 : 1 + below(9));
  p.shape[static_cast<std::size_t>(below(static_cast<std::uint64_t>(rank)))] = 1 + below(300);
  for (std::int64_t i = 0; i < rank; ++i) {
    if (below(2) == 0) p.axes.push_back(i);
  }
  if (p.axes.empty()) p.axes.push_back(rank - 1);
  p.kind = below(2) == 0 ? NormKind::layer : NormKind::rms;
  p.x = kDTypes[static_cast<std::size_t>(below(kDTypes.size()))];
  p.scale = p.x == DType::f64 ? DType::f64 : below(2) == 0 ? DType::f32 : DType::bf16;
  p.bias = below(2) == 0;
  return p;
}

ir::Graph forward(const Problem& p, std::mt19937_64& random) {
  GraphOf g;
  const auto x = g.input("x", p.x, p.shape, random_strides(random, p.shape));
  Dims parameters = scale_shape(p.shape, p.axes);
  const Dims strides = random_strides(random, parameters);
  const auto scale = g.input("scale", p.scale, parameters, strides);
  // Leading ones may be missing.
  while (parameters.size() > 1 && parameters[0] == 1) parameters.erase(parameters.begin());
  const auto bias = p.bias ? g.input("bias", p.scale, parameters) : ir::kNone;
  const bool statistics = random() % 2 == 0;
  const auto out = g.results(ir::Norm{p.kind, p.axes, 1e-3}, {x, scale, bias},
                             {true, statistics && p.kind == NormKind::layer, statistics});
  g.output(out[0], random_strides(random, p.shape));
  std::vector<TensorId> others;
  for (const TensorId id : {out[1], out[2]}) {
    if (id != ir::kNone) others.push_back(id);
  }
  return g.finish(others);
}

ir::Graph backward(const Problem& p, std::mt19937_64& random) {
  GraphOf g;
  const auto dy = g.input("dy", p.x, p.shape, random_strides(random, p.shape));
  const auto x = g.input("x", p.x, p.shape, random_strides(random, p.shape));
  const auto scale = g.input("scale", p.scale, scale_shape(p.shape, p.axes));
  const DType wide = p.x == DType::f64 ? DType::f64 : DType::f32;
  const Dims stats = stats_shape(p.shape, p.axes);
  const auto mean = p.kind == NormKind::layer ? g.input("mean", wide, stats) : ir::kNone;
  const auto inv_std = g.input("inv_std", wide, stats);
  const bool all = random() % 2 == 0;
  const auto out = g.results(ir::NormBackward{p.kind, p.axes}, {dy, x, scale, mean, inv_std},
                             {all || random() % 2 == 0, true, all});
  std::vector<TensorId> present;
  for (const TensorId id : out) {
    if (id != ir::kNone) present.push_back(id);
  }
  return g.finish(present);
}

std::string text(const Problem& p, int i) {
  return fmt::format("problem {}: {}{} axes {}", i, to_string(p.x), to_string(p.shape),
                     to_string(p.axes));
}

TEST(CpuNorm, RandomForwardsMeetTheOracle) {
  std::mt19937_64 random{1};
  double judged = 0;
  constexpr int kProblems = 150;
  for (int i = 0; i < kProblems && !testing::Test::HasFailure(); ++i) {
    const Problem p = random_problem(random);
    Execution e{forward(p, random)};
    e.fill(static_cast<std::uint64_t>(i));
    judged += expect_oracle(e, text(p, i));
  }
  EXPECT_GT(judged, 0.9 * kProblems);
}

TEST(CpuNorm, RandomBackwardsMeetTheOracle) {
  std::mt19937_64 random{2};
  double judged = 0;
  constexpr int kProblems = 150;
  for (int i = 0; i < kProblems && !testing::Test::HasFailure(); ++i) {
    const Problem p = random_problem(random);
    Execution e{backward(p, random)};
    e.fill(static_cast<std::uint64_t>(i));
    judged += expect_oracle(e, text(p, i));
  }
  EXPECT_GT(judged, 0.9 * kProblems);
}

// Slices longer than what is at hand at once, and so many of them that the parameters' gradients
// are summed in blocks.
TEST(CpuNorm, LongSlicesAndManySlices) {
  std::mt19937_64 random{3};
  for (const Dims& shape : {Dims{3, 9001}, Dims{700, 13}, Dims{2, 4096}}) {
    for (const NormKind kind : {NormKind::layer, NormKind::rms}) {
      const Problem p{shape, {1}, kind};
      Execution f{forward(p, random)};
      f.fill(5);
      EXPECT_EQ(expect_oracle(f, text(p, 0)), 1.0);
      Execution b{backward(p, random)};
      b.fill(6);
      EXPECT_EQ(expect_oracle(b, text(p, 1)), 1.0);
    }
  }
}

// The variance of values around 3e4 with a deviation of 1, of which f32 keeps nine bits: squares
// in f32 would be off by more than the variance itself.
TEST(CpuNorm, ALargeMeanKeepsTheVariance) {
  constexpr std::int64_t kLength = 5000;
  for (const Kernels* kernels : available_kernels()) {
    GraphOf g;
    const auto x = g.input("x", DType::f32, {1, kLength});
    const auto scale = g.input("scale", DType::f32, {kLength});
    Execution e{g.finish(g.ops(ir::Norm{NormKind::layer, {1}, 0}, {x, scale, ir::kNone}, 3)),
                kernels->name};
    e.fill(7);
    double mean = 0;
    for (std::int64_t i = 0; i < kLength; ++i) {
      e.set(0, i, e.at(0, i) + 3e4);
      mean += e.at(0, i) / kLength;
    }
    double variance = 0;
    for (std::int64_t i = 0; i < kLength; ++i) {
      variance += (e.at(0, i) - mean) * (e.at(0, i) - mean) / kLength;
    }
    e.run();
    EXPECT_NEAR(e.at(e.output(2), 0), 1 / std::sqrt(variance), 1e-7);
    for (std::int64_t i = 0; i < kLength; ++i) {
      const double expected = (e.at(0, i) - mean) / std::sqrt(variance) * e.at(1, i);
      ASSERT_NEAR(e.at(e.output(), i), expected, 2e-7 * (1 + std::fabs(expected)));
    }
  }
}

TEST(CpuNorm, WithoutSlicesTheParametersGetNoGradient) {
  for (const NormKind kind : {NormKind::layer, NormKind::rms}) {
    std::mt19937_64 random{4};
    const Problem p{{0, 5}, {1}, kind};
    Execution e{backward(p, random)};
    e.fill(8);
    for (int i = 0; i < e.graph().output_count; ++i) {
      const std::int64_t count = element_count(e.graph().tensor(e.output(i)).shape).value();
      for (std::int64_t j = 0; j < count; ++j) e.set(e.output(i), j, 77);
    }
    expect_oracle(e, "no slices");
  }
}

// Bit for bit, in a child that gets as many threads as it says.
TEST(CpuNorm, ResultsDoNotDependOnTheNumberOfThreads) {
  LAWSON_NEEDS_FORK();
  std::mt19937_64 random{9};
  for (const Problem& p : {Problem{{800, 40}, {1}}, Problem{{7, 3000}, {1}},
                           Problem{{6, 50, 7}, {0, 2}, NormKind::rms, DType::bf16}}) {
    for (const bool is_backward : {false, true}) {
      Execution e{is_backward ? backward(p, random) : forward(p, random)};
      e.fill(10);
      e.run();
      for (const char* threads : {"1", "3", "8"}) {
        const int differs = in_child([&] {
          setenv("LAWSON_NUM_THREADS", threads, 1);
          Execution other{e.graph()};
          other.fill(10);
          other.run();
          for (int i = 0; i < e.graph().output_count; ++i) {
            if (other.bytes(other.output(i)) != e.bytes(e.output(i))) return 1;
          }
          return 0;
        });
        EXPECT_EQ(differs, 0) << threads << " threads, " << text(p, is_backward ? 1 : 0);
      }
    }
  }
}

}  // namespace
}  // namespace lawson::cpu
