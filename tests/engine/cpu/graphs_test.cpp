// Random graphs of the whole op set: what joins which step, what is stored where and for how long
// must never show in the numbers.
#include "engine/cpu/program.h"
#include "in_child.h"
#include "oracle.h"

namespace lawson::cpu {
namespace {

using ir::BinaryKind;
using ir::ReduceKind;
using ir::TensorId;
using ir::UnaryKind;

class RandomGraph {
 public:
  explicit RandomGraph(std::uint64_t seed) : random_{seed} {}

  ir::Graph make() {
    const std::int64_t rank = below(9);
    Dims shape;
    std::int64_t elements = 1;
    for (std::int64_t i = 0; i < rank; ++i) {
      const std::int64_t most = elements > 300 ? 2 : rank > 4 ? 4 : 12;
      shape.push_back(chance(2) ? 0 : 1 + below(most));
      elements *= shape.back();
    }
    const DType dtype = pick({DType::f32, DType::f32, DType::bf16, DType::f16, DType::f64});
    x_ = input(dtype, shape);
    const std::int64_t ops = 4 + below(20);
    for (std::int64_t i = 0; i < ops; ++i) {
      x_ = next();
      values_.push_back(x_);
      if (chance(15)) x_ = values_[static_cast<std::size_t>(below(count(values_)))];
    }
    std::vector<TensorId> outputs{values_.back()};
    for (std::int64_t i = below(4); i > 0; --i) {
      const TensorId id = values_[static_cast<std::size_t>(below(count(values_)))];
      if (std::find(outputs.begin(), outputs.end(), id) == outputs.end()) outputs.push_back(id);
    }
    for (const TensorId id : outputs) {
      g_.output(id, chance(30) ? random_strides(random_, g_.tensor(id).shape) : Dims{});
    }
    return g_.finish();
  }

 private:
  std::int64_t below(std::int64_t n) {
    return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(n));
  }
  bool chance(int percent) { return below(100) < percent; }
  template <typename T>
  T pick(std::initializer_list<T> items) {
    return items.begin()[below(static_cast<std::int64_t>(items.size()))];
  }
  static std::int64_t count(const auto& items) { return static_cast<std::int64_t>(items.size()); }

  const Dims& shape() const { return g_.tensor(x_).shape; }
  DType dtype() const { return g_.tensor(x_).dtype; }
  std::int64_t rank() const { return count(shape()); }
  bool is_empty() const { return element_count(shape()).value() == 0; }

  TensorId input(DType type, const Dims& dims) {
    const std::string name = fmt::format("x{}", inputs_++);
    return g_.input(name, type, dims, chance(40) ? random_strides(random_, dims) : Dims{});
  }

  TensorId unary(UnaryKind kind, TensorId x) { return g_.op(ir::Unary{kind}, {x}); }

  // Another operand for x: an earlier value of its shape, or an input that broadcasts to it.
  TensorId other() {
    std::vector<TensorId> same;
    for (const TensorId id : values_) {
      if (g_.tensor(id).shape == shape() && g_.tensor(id).dtype == dtype()) same.push_back(id);
    }
    if (!same.empty() && chance(50)) return same[static_cast<std::size_t>(below(count(same)))];
    Dims dims = shape();
    for (std::int64_t& dim : dims) {
      if (chance(30)) dim = 1;
    }
    while (!dims.empty() && dims[0] == 1 && chance(50)) dims.erase(dims.begin());
    return input(dtype(), dims);
  }

  Dims some_axes() {
    Dims axes;
    for (std::int64_t i = 0; i < rank(); ++i) {
      if (chance(40)) axes.push_back(i);
    }
    if (axes.empty()) axes.push_back(below(rank()));
    return axes;
  }

  TensorId next() {
    switch (below(rank() == 0 ? 6 : is_empty() ? 10 : rank() == 1 ? 13 : 15)) {
      case 0:
      case 1:
        return unary(pick({UnaryKind::relu, UnaryKind::tanh, UnaryKind::sigmoid, UnaryKind::gelu,
                           UnaryKind::silu, UnaryKind::neg, UnaryKind::abs, UnaryKind::softplus,
                           UnaryKind::gelu_tanh, UnaryKind::erf, UnaryKind::sin}),
                     x_);
      case 2:
        return g_.op(ir::Binary{pick({BinaryKind::add, BinaryKind::sub, BinaryKind::mul,
                                      BinaryKind::min, BinaryKind::max})},
                     {x_, other()});
      case 3:
        return g_.op(ir::UnaryGrad{pick({UnaryKind::tanh, UnaryKind::sigmoid, UnaryKind::softplus,
                                         UnaryKind::silu, UnaryKind::gelu, UnaryKind::gelu_tanh})},
                     {x_, other()});
      case 4: {
        const TensorId y = other();
        const TensorId less = g_.op(ir::Compare{ir::CompareKind::lt}, {x_, y});
        return g_.op(ir::Select{}, {less, x_, g_.op(ir::Clamp{-1, 2}, {y})});
      }
      case 5:
        return g_.op(ir::Convert{}, {x_},
                     pick({DType::f32, DType::f32, DType::bf16, DType::f16, DType::f64}));
      case 6: {
        const auto axis = static_cast<std::size_t>(below(rank()));
        Dims perm;
        for (std::int64_t i = 0; i < rank(); ++i) perm.push_back(i);
        std::swap(perm[axis], perm.back());
        return g_.op(ir::Transpose{perm}, {x_});
      }
      case 7: {
        Dims flat{1};
        for (const std::int64_t dim : shape()) {
          if (chance(50)) {
            flat.back() *= dim;
          } else {
            flat.push_back(dim);
          }
        }
        return g_.op(ir::Reshape{flat}, {x_});
      }
      case 8: {
        const std::int64_t axis = below(rank());
        std::vector<TensorId> parts{x_, chance(50) ? x_ : input(dtype(), shape())};
        if (chance(50)) parts.push_back(unary(UnaryKind::tanh, x_));
        return g_.op(ir::Concat{axis, count(parts)}, parts);
      }
      case 9: {
        ir::Slice slice;
        for (const std::int64_t dim : shape()) {
          slice.start.push_back(dim > 1 ? below(dim / 2) : 0);
          slice.limit.push_back(dim > 1 ? dim - below(dim / 2) : dim);
          slice.stride.push_back(dim > 3 && chance(30) ? 2 : 1);
        }
        return g_.op(slice, {x_});
      }
      case 10:
        return g_.op(ir::Reduce{pick({ReduceKind::sum, ReduceKind::mean, ReduceKind::max,
                                      ReduceKind::amax, ReduceKind::norm2}),
                                some_axes(), chance(70)},
                     {x_});
      case 11: {  // and its subtraction
        const TensorId least = g_.op(ir::Reduce{ReduceKind::min, some_axes(), true}, {x_});
        return g_.op(ir::Binary{BinaryKind::sub}, {x_, least});
      }
      case 12: {
        const Dims axes = some_axes();
        Dims parameters(shape().size(), 1);
        for (const std::int64_t axis : axes) {
          parameters[static_cast<std::size_t>(axis)] = shape()[static_cast<std::size_t>(axis)];
        }
        const bool layer = chance(50);
        const TensorId scale = input(dtype(), parameters);
        const auto out = g_.results(
            ir::Norm{layer ? ir::NormKind::layer : ir::NormKind::rms, axes, 0.1},
            {x_, scale, chance(50) ? input(dtype(), parameters) : ir::kNone}, {true, layer, true});
        values_.push_back(out[2]);
        if (chance(50)) return out[0];
        const auto back =
            g_.results(ir::NormBackward{layer ? ir::NormKind::layer : ir::NormKind::rms, axes},
                       {out[0], x_, scale, out[1], out[2]}, {true, true, true});
        values_.push_back(back[1]);
        values_.push_back(back[2]);
        return back[0];
      }
      default: {
        const std::int64_t n = 1 + below(9);
        const TensorId b = input(dtype(), {shape().back(), n});
        return g_.op(ir::Matmul{}, {x_, chance(30) ? unary(UnaryKind::tanh, b) : b}, dtype());
      }
    }
  }

  std::mt19937_64 random_;
  GraphOf g_;
  TensorId x_ = ir::kNone;
  std::vector<TensorId> values_;
  int inputs_ = 0;
};

TEST(CpuGraphs, RandomGraphsMeetTheOracle) {
  double judged = 0;
  constexpr int kGraphs = 600;
  for (int i = 0; i < kGraphs && !testing::Test::HasFailure(); ++i) {
    Execution e{RandomGraph{static_cast<std::uint64_t>(i)}.make()};
    e.fill(static_cast<std::uint64_t>(i) + 1);
    judged += expect_oracle(e, fmt::format("graph {}", i));
  }
  EXPECT_GT(judged, 0.8 * kGraphs);
}

TEST(CpuGraphs, ResultsDoNotDependOnTheNumberOfThreads) {
  LAWSON_NEEDS_FORK();
  for (const char* threads : {"1", "5"}) {
    const int differ = in_child([&] {
      // What this process has, and what a child of its own gets.
      std::vector<std::vector<std::byte>> expected;
      const auto run = [](std::uint64_t seed) {
        Execution e{RandomGraph{seed}.make()};
        e.fill(seed);
        e.run();
        std::vector<std::byte> all;
        for (int i = 0; i < e.graph().output_count; ++i) {
          all.insert(all.end(), e.bytes(e.output(i)).begin(), e.bytes(e.output(i)).end());
        }
        return all;
      };
      for (std::uint64_t seed = 0; seed < 100; ++seed) expected.push_back(run(seed));
      return in_child([&] {
        setenv("LAWSON_NUM_THREADS", threads, 1);
        int wrong = 0;
        for (std::uint64_t seed = 0; seed < 100; ++seed) {
          wrong += run(seed) == expected[seed] ? 0 : 1;
        }
        return std::min(wrong, 100);
      });
    });
    EXPECT_EQ(differ, 0) << threads << " threads";
  }
}

// Twelve and more ops behind a matmul are one step with it, several of their values outputs.
TEST(CpuGraphs, ALongChainIsTheMatmulsEpilogue) {
  GraphOf g;
  const auto a = g.input("a", DType::bf16, {37, 29});
  const auto b = g.input("b", DType::bf16, {29, 53});
  auto c = g.op(ir::Matmul{}, {a, b}, DType::f32);
  std::vector<TensorId> outputs;
  for (int i = 0; i < 40; ++i) {
    const auto addend =
        g.input(fmt::format("y{}", i), DType::f32, i % 2 == 0 ? Dims{53} : Dims{37, 1});
    c = g.op(ir::Binary{i % 3 == 0 ? BinaryKind::mul : BinaryKind::add}, {c, addend});
    if (i % 2 == 0) c = g.op(ir::Unary{i % 4 == 0 ? UnaryKind::tanh : UnaryKind::silu}, {c});
    if (i % 13 == 5) outputs.push_back(c);
  }
  outputs.push_back(g.op(ir::Convert{}, {c}, DType::f16));
  const ir::Graph graph = g.finish(outputs);
  EXPECT_EQ(make_program(graph, best_kernels()).steps.size(), 1U);
  Execution e{graph};
  e.fill(3);
  EXPECT_EQ(expect_oracle(e, "chain"), 1.0);
}

}  // namespace
}  // namespace lawson::cpu
