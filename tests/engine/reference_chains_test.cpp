// The bounds of long chains: random graphs of ops that cancel, divide near 0, overflow, jump,
// reduce in the middle and mix element types, against an f32 engine that errs wherever it may.
#include <random>

#include "engine/reference/evaluate.h"
#include "reference_bench.h"

namespace lawson {
namespace {

using reference::Array;
using Values = std::vector<double>;

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_{seed} {}
  std::size_t below(std::size_t n) {
    return std::uniform_int_distribution<std::size_t>{0, n - 1}(engine_);
  }
  bool chance(std::size_t percent) { return below(100) < percent; }
  double signed_unit() { return std::uniform_real_distribution<double>{-1, 1}(engine_); }
  template <typename T>
  T pick(std::initializer_list<T> list) {
    return *(list.begin() + below(list.size()));
  }

 private:
  std::mt19937_64 engine_;
};

// ---- the graphs ----

constexpr std::int64_t kRows = 4;
constexpr std::int64_t kColumns = 6;

class Chain {
 public:
  explicit Chain(std::uint64_t seed) : random_{seed}, builder_{"chain"} {
    builder_.strict(random_.chance(20));
    for (const Dims& shape : {Dims{kRows, kColumns}, Dims{kRows, kColumns}, Dims{1, kColumns},
                              Dims{kRows, 1}, Dims{kRows, kColumns}}) {
      floats_.push_back(input(random_.pick({DType::f32, DType::bf16, DType::f16}), shape));
    }
    floats_.push_back(input(DType::f8e4m3, {kRows, kColumns}));
    square_ = input(DType::bf16, {kColumns, kColumns});
    scale_ = input(DType::f32, {kColumns});
  }

  ir::Graph take(int length) {
    for (int i = 0; i < length; ++i) step();
    EXPECT_TRUE(builder_.output(floats_.back()).ok());
    for (int i = 0; i < 2; ++i) {
      // An output twice is refused; inputs are no outputs.
      const ir::TensorId id = floats_[6 + random_.below(floats_.size() - 6)];
      (void)builder_.output(id).ok();
    }
    auto graph = std::move(builder_).finish();
    EXPECT_TRUE(graph.ok()) << (graph.ok() ? "" : graph.error().message);
    return *graph;
  }

 private:
  ir::TensorId input(DType dtype, const Dims& shape) {
    ir::Tensor tensor;
    tensor.name = fmt::format("in{}", inputs_++);
    tensor.dtype = dtype;
    tensor.shape = shape;
    return *builder_.input(std::move(tensor));
  }

  ir::TensorId add(const ir::Op& op, std::vector<ir::TensorId> in,
                   std::optional<DType> dtype = std::nullopt) {
    std::vector<ir::Builder::ResultSpec> results(ir::output_slots(op), {"", std::nullopt, false});
    results[0] = {"", dtype, true};
    auto added = builder_.add(op, std::move(in), std::move(results));
    EXPECT_TRUE(added.ok()) << (added.ok() ? "" : added.error().message);
    return (*added)[0];
  }

  // Mostly of late: a chain more than a bush.
  ir::TensorId some() {
    const std::size_t n = floats_.size();
    return random_.chance(60) ? floats_[n - 1 - random_.below(2)] : floats_[random_.below(n)];
  }
  std::optional<DType> some_dtype() {
    if (random_.chance(60)) return std::nullopt;
    return random_.pick({DType::f32, DType::f32, DType::bf16, DType::f16, DType::f8e4m3});
  }
  // Of the full shape.
  ir::TensorId full() {
    const ir::TensorId x = some();
    const Dims shape{kRows, kColumns};
    return builder_.tensor(x).shape == shape ? x : add(ir::Broadcast{shape}, {x});
  }

  void step() {
    const std::size_t kind = random_.below(20);
    if (kind < 6) {
      const auto unary = static_cast<ir::UnaryKind>(random_.below(ir::kUnaryCount));
      const double parameter = unary == ir::UnaryKind::leaky_relu ? 0.1 : 1.5;
      const bool has_parameter = unary == ir::UnaryKind::leaky_relu || unary == ir::UnaryKind::elu;
      floats_.push_back(
          add(ir::Unary{unary, has_parameter ? parameter : 0.0}, {some()}, some_dtype()));
    } else if (kind < 12) {
      const auto binary = static_cast<ir::BinaryKind>(random_.below(ir::kBinaryCount));
      floats_.push_back(add(ir::Binary{binary}, {some(), some()}, some_dtype()));
    } else if (kind == 12) {
      const auto compare = static_cast<ir::CompareKind>(random_.below(ir::kCompareCount));
      const ir::TensorId predicate = add(ir::Compare{compare}, {some(), some()});
      floats_.push_back(add(ir::Select{}, {predicate, some(), some()}));
    } else if (kind == 13) {
      floats_.push_back(add(ir::Clamp{-1.3, random_.pick({0.7, 6.0})}, {some()}));
    } else if (kind == 14) {
      const DType to = random_.pick(
          {DType::bf16, DType::f16, DType::f8e4m3, DType::f8e5m2, DType::i8, DType::f32});
      const ir::TensorId x = add(ir::Convert{}, {some()}, to);
      floats_.push_back(is_float(to) ? x : add(ir::Convert{}, {x}, DType::f32));
    } else if (kind < 17) {
      const auto reduce = static_cast<ir::ReduceKind>(random_.below(ir::kReduceCount));
      floats_.push_back(
          add(ir::Reduce{reduce, {random_.chance(70) ? 1 : 0}, true}, {some()}, some_dtype()));
    } else if (kind == 17) {
      auto grad = static_cast<ir::UnaryKind>(random_.below(ir::kUnaryCount));
      if (!ir::has_gradient_op(grad)) grad = ir::UnaryKind::relu;
      floats_.push_back(add(ir::UnaryGrad{grad, 0.5}, {some(), some()}, some_dtype()));
    } else if (kind == 18) {
      const auto norm = random_.chance(50) ? ir::NormKind::layer : ir::NormKind::rms;
      floats_.push_back(add(ir::Norm{norm, {1}, 1e-3}, {full(), scale_, ir::kNone}));
    } else {
      floats_.push_back(add(ir::Matmul{}, {full(), square_}, DType::f32));
    }
  }

  Random random_;
  ir::Builder builder_;
  std::vector<ir::TensorId> floats_;
  ir::TensorId square_ = ir::kNone;
  ir::TensorId scale_ = ir::kNone;
  int inputs_ = 0;
};

// ---- the engine that errs ----

class Shaken {
 public:
  Shaken(const ir::Graph& graph, std::uint64_t seed)
      : graph_{graph},
        random_{seed},
        flushes_{random_.chance(50)},
        backwards_{random_.chance(50)} {}

  std::vector<Values> run(const std::vector<Values>& inputs) {
    std::vector<Array> arrays(graph_.tensors.size());
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const ir::Tensor& tensor = graph_.tensors[i];
      arrays[i] = reference::make_array(tensor.dtype, tensor.shape);
      arrays[i].value = inputs[i];
    }
    for (const ir::Node& node : graph_.nodes) {
      reference::Operands operands;
      for (const ir::TensorId id : node.inputs) {
        operands.push_back(id == ir::kNone ? nullptr : &arrays[static_cast<std::size_t>(id)]);
      }
      std::vector<Array> results = reference::evaluate(graph_, node, operands);
      for (std::size_t i = 0; i < results.size(); ++i) {
        if (node.outputs[i] == ir::kNone) continue;
        shake(node.op, operands, results[i]);
        arrays[static_cast<std::size_t>(node.outputs[i])] = std::move(results[i]);
      }
    }
    std::vector<Values> outputs;
    for (std::int32_t i = 0; i < graph_.output_count; ++i) {
      const ir::TensorId id = graph_.input_count + i;
      Values values = arrays[static_cast<std::size_t>(id)].value;
      for (double& v : values) v = round_to(graph_.tensor(id).dtype, v);
      outputs.push_back(std::move(values));
    }
    return outputs;
  }

 private:
  double f32(double v) const {
    if (flushes_ && std::fabs(v) < 0x1p-126) return 0;
    return round_to(DType::f32, v);
  }

  // How far the result of an op may be moved, relative to it.
  static double relative(const ir::Op& op) {
    if (const auto* unary = std::get_if<ir::Unary>(&op)) {
      using enum ir::UnaryKind;
      for (const auto exact : {neg, abs, ceil, floor, round, sign, relu, relu6, leaky_relu, elu}) {
        if (unary->kind == exact) return 0;
      }
      return kF32.function_roundoff;
    }
    if (const auto* grad = std::get_if<ir::UnaryGrad>(&op)) {
      const bool chooses = grad->kind == ir::UnaryKind::relu || grad->kind == ir::UnaryKind::relu6;
      return chooses ? 0 : 0x1p-24;
    }
    if (std::holds_alternative<ir::Norm>(op)) return 0x1p-22;
    if (const auto* binary = std::get_if<ir::Binary>(&op)) {
      const bool many = binary->kind == ir::BinaryKind::div || binary->kind == ir::BinaryKind::pow;
      return many ? kF32.function_roundoff : 0;
    }
    return 0;
  }

  void shake(const ir::Op& op, const reference::Operands& operands, Array& result) {
    if (const auto* reduce = std::get_if<ir::Reduce>(&op))
      reduce_f32(*reduce, *operands[0], result);
    if (std::holds_alternative<ir::Matmul>(op)) matmul_f32(*operands[0], *operands[1], result);
    const bool moves = std::holds_alternative<ir::Broadcast>(op) ||
                       std::holds_alternative<ir::Select>(op) ||
                       std::holds_alternative<ir::Convert>(op);
    const bool rounds = !is_float(result.dtype) || graph_.strict || random_.chance(50);
    for (double& v : result.value) {
      if (!moves) v = f32(v * (1 + relative(op) * random_.signed_unit()));
      if (rounds) v = round_to(result.dtype, v);
    }
  }

  void reduce_f32(const ir::Reduce& op, const Array& x, Array& y) const {
    using ir::ReduceKind;
    const bool extremum =
        op.kind == ReduceKind::max || op.kind == ReduceKind::min || op.kind == ReduceKind::amax;
    if (extremum) return;
    const Dims target = reference::reduced_strides(x.shape, op.axes);
    std::vector<std::vector<double>> terms(y.size());
    reference::for_each_index(x.shape, {target}, [&](std::size_t i, const auto& at) {
      terms[at[0]].push_back(x.value[i]);
    });
    for (std::size_t i = 0; i < y.size(); ++i) {
      if (backwards_) std::reverse(terms[i].begin(), terms[i].end());
      double r = op.kind == ReduceKind::prod ? 1 : 0;
      for (const double v : terms[i]) {
        if (op.kind == ReduceKind::prod) r = f32(r * v);
        if (op.kind == ReduceKind::norm1) r = f32(r + std::fabs(v));
        if (op.kind == ReduceKind::norm2) r = f32(r + f32(v * v));
        if (op.kind == ReduceKind::sum || op.kind == ReduceKind::mean) r = f32(r + v);
      }
      const auto count = static_cast<double>(terms[i].size());
      if (op.kind == ReduceKind::mean) r = f32(r * f32(1 / count));
      if (op.kind == ReduceKind::norm2) r = std::sqrt(r);
      y.value[i] = r;
    }
  }

  void matmul_f32(const Array& a, const Array& b, Array& c) const {
    const auto n = static_cast<std::size_t>(c.shape.back());
    const auto k = static_cast<std::size_t>(a.shape.back());
    for (std::size_t i = 0; i < c.size(); ++i) {
      double sum = 0;
      for (std::size_t l = 0; l < k; ++l) {
        const std::size_t at = backwards_ ? k - 1 - l : l;
        sum = f32(sum + f32(a.value[i / n * k + at] * b.value[at * n + i % n]));
      }
      c.value[i] = sum;
    }
  }

  const ir::Graph& graph_;
  Random random_;
  bool flushes_;
  bool backwards_;
};

struct Tally {
  std::size_t judged = 0;
  std::size_t all = 0;
};

// Every judged element of an engine's outputs against the oracle's.
void expect_within(const Bench& bench, const std::vector<OracleOutput>& oracle,
                   const std::vector<Values>& actual, Tally& tally) {
  for (std::size_t o = 0; o < actual.size(); ++o) {
    for (std::size_t i = 0; i < actual[o].size(); ++i) {
      const double bound = oracle[o].bounds[i];
      const double expected = oracle[o].values[i];
      const double got = actual[o][i];
      ++tally.all;
      if (bound == kInfinity) continue;
      ++tally.judged;
      const bool same = got == expected || (std::isnan(got) && std::isnan(expected));
      ASSERT_TRUE(same || std::fabs(got - expected) <= bound)
          << "output " << o << " element " << i << ": " << fmt::format("{:.9g}", got)
          << ", expected " << fmt::format("{:.9g} +- {:.3g}", expected, bound) << "\n"
          << ir::print(bench.graph);
    }
  }
}

TEST(ReferenceChains, AnEngineThatErrsWhereItMayIsWithinTheBounds) {
  Tally tally;
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    SCOPED_TRACE(seed);
    Bench bench(Chain(seed).take(12), seed,
                seed % 11 == 0 ? plan::InputStyle::denormal : plan::InputStyle::normal);
    const auto oracle = bench.oracle(kF32);
    std::vector<Values> inputs;
    for (std::size_t i = 0; i < bench.inputs.size(); ++i) inputs.push_back(bench.input(i));
    for (std::uint64_t run = 0; run < 6; ++run) {
      expect_within(bench, oracle, Shaken(bench.graph, seed * 100 + run).run(inputs), tally);
      if (HasFatalFailure()) return;
    }
  }
  EXPECT_GT(tally.judged * 2, tally.all) << "more than half of all elements should be judged";
}

}  // namespace
}  // namespace lawson
