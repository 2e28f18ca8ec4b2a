// lawson-bench-cpu: the embedded engine on one core (or LAWSON_NUM_THREADS), as a fraction of what
// the core can do. Causal attention counts half of the products; a backward counts 2.5 forwards.
#include <benchmark/benchmark.h>
#include <time.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <random>

#include "cpu_peak.h"
#include "engine/cpu/cpu.h"
#include "engine/cpu/kernels.h"
#include "ir/graph.h"

namespace lawson::bench {
namespace {

using ir::TensorId;

template <typename T>
T value_or_exit(Result<T> result) {
  if (result.ok()) return std::move(result).value();
  std::cerr << result.error().message << '\n';
  std::exit(3);
}

void check_or_exit(const Status& status) {
  if (status.ok()) return;
  std::cerr << status.error().message << '\n';
  std::exit(3);
}

ir::Tensor tensor(std::string name, DType dtype, Dims shape) {
  ir::Tensor result;
  result.name = std::move(name);
  result.dtype = dtype;
  result.shape = std::move(shape);
  return result;
}

// A loaded plan with memory: normal inputs (bool: half of them true), seed fixed.
class Workload {
 public:
  explicit Workload(ir::Graph graph) : graph_{std::move(graph)}, engine_{make_cpu_engine()} {
    const Plan plan = value_or_exit(
        engine_->compile(graph_, cpu_device(), Options{}, std::nullopt, std::stop_token{}));
    loaded_ = value_or_exit(engine_->load(plan, cpu_device()));
    workspace_.resize(static_cast<std::size_t>(plan.workspace_bytes));
    std::mt19937 random{1};
    std::normal_distribution<float> normal;
    for (TensorId id = 0; id < graph_.input_count + graph_.output_count; ++id) {
      const ir::Tensor& t = graph_.tensor(id);
      const std::int64_t count = storage_extent(t.shape, t.strides).value_or(0);
      memory_.emplace_back(byte_size(t.dtype, count));
      for (std::int64_t i = 0; graph_.is_input(id) && i < count; ++i) {
        const float drawn = normal(random);
        const float value = is_integer(t.dtype)         ? std::rint(10 * drawn)
                            : t.dtype == DType::boolean ? static_cast<float>(drawn > 0)
                                                        : drawn;
        store_element(memory_.back().data(), t.dtype, i, static_cast<double>(value));
      }
      bindings_.push_back({ir::Graph::uid(id), memory_.back().data()});
    }
  }

  // Log-sum-exp that makes the backward's probabilities reasonable.
  void fill(TensorId id, double value) {
    const ir::Tensor& t = graph_.tensor(id);
    for (std::int64_t i = 0; i < element_count(t.shape).value_or(0); ++i) {
      store_element(memory_[static_cast<std::size_t>(id)].data(), t.dtype, i, value);
    }
  }

  void run() { check_or_exit(engine_->execute(*loaded_, bindings_, workspace_.data(), nullptr)); }

 private:
  ir::Graph graph_;
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Loaded> loaded_;
  std::vector<std::byte> workspace_;
  std::vector<std::vector<std::byte>> memory_;
  std::vector<Binding> bindings_;
};

// CPU time, so that other processes on the machine do not count.
double process_seconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Seconds of CPU time that an execution takes.
double seconds(benchmark::State& state, Workload& workload) {
  workload.run();
  const double start = process_seconds();
  for (auto step : state) {
    (void)step;
    workload.run();
  }
  state.SetLabel(cpu::best_kernels().name);
  return (process_seconds() - start) / static_cast<double>(state.iterations());
}

void measure(benchmark::State& state, Workload& workload, double flops) {
  const double peak = peak_gflops(cpu::best_kernels().name);
  const double rate = flops / seconds(state, workload) * 1e-9;
  state.counters["GFLOP/s"] = rate;
  state.counters["of_peak"] = rate / peak;
}

void matmul(benchmark::State& state, DType dtype, std::vector<ir::UnaryKind> epilogue, bool bias,
            bool b_by_columns) {
  const std::int64_t m = state.range(0);
  const std::int64_t n = state.range(1);
  const std::int64_t k = state.range(2);
  ir::Builder builder{"matmul"};
  const TensorId a = value_or_exit(builder.input(tensor("a", dtype, {m, k})));
  ir::Tensor right = tensor("b", dtype, {k, n});
  if (b_by_columns) right.strides = {1, k};
  const TensorId b = value_or_exit(builder.input(right));
  TensorId c = value_or_exit(builder.add1(ir::Matmul{}, {a, b}, DType::f32));
  if (bias) {
    const TensorId addend = value_or_exit(builder.input(tensor("bias", DType::f32, {n})));
    c = value_or_exit(builder.add1(ir::Binary{ir::BinaryKind::add}, {c, addend}));
  }
  for (const ir::UnaryKind kind : epilogue) {
    c = value_or_exit(builder.add1(ir::Unary{kind}, {c}));
  }
  check_or_exit(builder.output(c));
  Workload workload{value_or_exit(std::move(builder).finish())};
  measure(state, workload,
          2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k));
}

// Block-scaled operands, MXFP8 or NVFP4.
void scaled_matmul(benchmark::State& state, DType dtype, DType scale, std::int64_t block) {
  const std::int64_t n = state.range(0);
  ir::Builder builder{"scaled"};
  const TensorId a = value_or_exit(builder.input(tensor("a", dtype, {n, n})));
  ir::Tensor right = tensor("b", dtype, {n, n});
  right.strides = {1, n};
  const TensorId b = value_or_exit(builder.input(right));
  const TensorId a_scale = value_or_exit(builder.input(tensor("sa", scale, {n, n / block})));
  const TensorId b_scale = value_or_exit(builder.input(tensor("sb", scale, {n / block, n})));
  const TensorId c =
      value_or_exit(builder.add1(ir::ScaledMatmul{block, false}, {a, b, a_scale, b_scale}));
  check_or_exit(builder.output(c));
  Workload workload{value_or_exit(std::move(builder).finish())};
  const auto size = static_cast<double>(n);
  measure(state, workload, 2.0 * size * size * size);
}

enum class Pass : std::uint8_t { forward, backward };

// Over rows; bytes are those of the large tensors, once each.
void norm(benchmark::State& state, ir::NormKind kind, DType dtype, Pass pass) {
  const std::int64_t rows = state.range(0);
  const std::int64_t length = state.range(1);
  ir::Builder builder{"norm"};
  const bool layer = kind == ir::NormKind::layer;
  const TensorId x = value_or_exit(builder.input(tensor("x", dtype, {rows, length})));
  const TensorId scale = value_or_exit(builder.input(tensor("scale", DType::f32, {length})));
  const auto stats = [&](const char* name) {
    return value_or_exit(builder.input(tensor(name, DType::f32, {rows, 1})));
  };
  double tensors = 2;
  if (pass == Pass::forward) {
    const TensorId bias =
        layer ? value_or_exit(builder.input(tensor("bias", DType::f32, {length}))) : ir::kNone;
    const auto out =
        value_or_exit(builder.add(ir::Norm{kind, {1}}, {x, scale, bias},
                                  {{"y", {}, true}, {"", {}, false}, {"", {}, false}}));
    check_or_exit(builder.output(out[0]));
  } else {
    tensors = 3;
    const TensorId dy = value_or_exit(builder.input(tensor("dy", dtype, {rows, length})));
    const TensorId mean = layer ? stats("mean") : ir::kNone;
    const auto out =
        value_or_exit(builder.add(ir::NormBackward{kind, {1}}, {dy, x, scale, mean, stats("r")},
                                  {{"dx", {}, true}, {"dscale", {}, true}, {"dbias", {}, layer}}));
    for (const TensorId id : out) {
      if (id != ir::kNone) check_or_exit(builder.output(id));
    }
  }
  Workload workload{value_or_exit(std::move(builder).finish())};
  const auto bytes = tensors * static_cast<double>(byte_size(dtype, rows * length));
  state.counters["GB/s"] = bytes / seconds(state, workload) * 1e-9;
}

// x int8 -> bf16, times bf16, plus f32.
void mixed_matmul(benchmark::State& state) {
  const std::int64_t n = state.range(0);
  ir::Builder builder{"mixed"};
  const TensorId x = value_or_exit(builder.input(tensor("x", DType::i8, {4, n, n})));
  const TensorId y = value_or_exit(builder.input(tensor("y", DType::bf16, {4, n, n})));
  const TensorId z = value_or_exit(builder.input(tensor("z", DType::f32, {4, n, n})));
  const TensorId a = value_or_exit(builder.add1(ir::Convert{}, {x}, DType::bf16));
  const TensorId c = value_or_exit(builder.add1(ir::Matmul{}, {a, y}, DType::bf16));
  const TensorId f = value_or_exit(builder.add1(ir::Convert{}, {c}, DType::f32));
  const TensorId sum = value_or_exit(builder.add1(ir::Binary{ir::BinaryKind::add}, {f, z}));
  check_or_exit(builder.output(sum));
  Workload workload{value_or_exit(std::move(builder).finish())};
  const auto size = static_cast<double>(n);
  measure(state, workload, 8.0 * size * size * size);
}

enum class Extra : std::uint8_t { none, mask, dropout };

struct AttentionShape {
  std::int64_t heads, kv_heads, length, depth;
  bool causal;
  DType dtype;
  Extra extra = Extra::none;
};

// The operands of an extra.
void add_extra(ir::Builder& builder, const AttentionShape& shape, std::vector<TensorId>& in) {
  using Slot = ir::AttentionSlots;
  const auto input = [&](const char* name, DType dtype, Dims dims) {
    return value_or_exit(builder.input(tensor(name, dtype, std::move(dims))));
  };
  if (shape.extra == Extra::mask) {
    in[Slot::mask] = input("mask", DType::boolean, {1, 1, shape.length, shape.length});
  }
  if (shape.extra == Extra::dropout) {
    in[Slot::seed] = input("seed", DType::i64, {1, 1, 1, 1});
    in[Slot::offset] = input("offset", DType::i64, {1, 1, 1, 1});
  }
}

double attention_flops(const AttentionShape& shape) {
  const auto pairs = static_cast<double>(shape.heads) * static_cast<double>(shape.length) *
                     static_cast<double>(shape.length) * (shape.causal ? 0.5 : 1.0);
  return 4.0 * pairs * static_cast<double>(shape.depth);
}

ir::AttentionRule rule_of(const AttentionShape& shape) {
  ir::AttentionRule rule;
  rule.right = shape.causal ? 0 : -1;
  rule.dropout = shape.extra == Extra::dropout ? 0.1 : 0;
  return rule;
}

ir::Tensor scale_of(const AttentionShape& shape) {
  ir::Tensor scale = tensor("scale", DType::f32, {1, 1, 1, 1});
  scale.by_value = true;
  scale.values = {1 / std::sqrt(static_cast<double>(shape.depth))};
  return scale;
}

void attention(benchmark::State& state, AttentionShape shape) {
  ir::Builder builder{"attention"};
  const Dims q_shape{1, shape.heads, shape.length, shape.depth};
  const Dims k_shape{1, shape.kv_heads, shape.length, shape.depth};
  const TensorId q = value_or_exit(builder.input(tensor("q", shape.dtype, q_shape)));
  const TensorId k = value_or_exit(builder.input(tensor("k", shape.dtype, k_shape)));
  const TensorId v = value_or_exit(builder.input(tensor("v", shape.dtype, k_shape)));
  const TensorId scale = value_or_exit(builder.input(scale_of(shape)));
  std::vector<TensorId> inputs{q, k, v, scale};
  inputs.resize(ir::AttentionSlots::kShared, ir::kNone);
  add_extra(builder, shape, inputs);
  const auto out =
      value_or_exit(builder.add(ir::Attention{rule_of(shape)}, inputs,
                                {{"o", std::nullopt, true}, {"stats", std::nullopt, true}}));
  check_or_exit(builder.output(out[0]));
  check_or_exit(builder.output(out[1]));
  Workload workload{value_or_exit(std::move(builder).finish())};
  workload.fill(scale, 1 / std::sqrt(static_cast<double>(shape.depth)));
  measure(state, workload, attention_flops(shape));
}

void attention_backward(benchmark::State& state, AttentionShape shape) {
  ir::Builder builder{"attention_backward"};
  const Dims q_shape{1, shape.heads, shape.length, shape.depth};
  const Dims k_shape{1, shape.kv_heads, shape.length, shape.depth};
  using Slot = ir::AttentionBackward;
  std::vector<TensorId> inputs(Slot::kInputs, ir::kNone);
  for (const auto& [slot, name] : std::initializer_list<std::pair<int, const char*>>{
           {Slot::q, "q"}, {Slot::k, "k"}, {Slot::v, "v"}, {Slot::o, "o"}, {Slot::dout, "dout"}}) {
    const bool is_key = slot == Slot::k || slot == Slot::v;
    inputs[static_cast<std::size_t>(slot)] =
        value_or_exit(builder.input(tensor(name, shape.dtype, is_key ? k_shape : q_shape)));
  }
  const TensorId stats =
      value_or_exit(builder.input(tensor("stats", DType::f32, {1, shape.heads, shape.length, 1})));
  const TensorId scale = value_or_exit(builder.input(scale_of(shape)));
  inputs[Slot::stats] = stats;
  add_extra(builder, shape, inputs);
  inputs[Slot::scale] = scale;
  const auto out = value_or_exit(builder.add(
      ir::AttentionBackward{rule_of(shape), true}, inputs,
      {{"dq", std::nullopt, true}, {"dk", std::nullopt, true}, {"dv", std::nullopt, true}}));
  for (int i = 0; i < 3; ++i) check_or_exit(builder.output(out[static_cast<std::size_t>(i)]));
  Workload workload{value_or_exit(std::move(builder).finish())};
  workload.fill(stats, std::log(static_cast<double>(shape.length)) + 0.5);
  workload.fill(scale, 1 / std::sqrt(static_cast<double>(shape.depth)));
  measure(state, workload, 2.5 * attention_flops(shape));
}

void register_all() {
  using benchmark::RegisterBenchmark;
  const auto add_matmul = [](const char* name, DType dtype, std::vector<ir::UnaryKind> epilogue,
                             bool bias, std::vector<std::int64_t> mnk, bool b_by_columns = false) {
    RegisterBenchmark(name, matmul, dtype, std::move(epilogue), bias, b_by_columns)
        ->Args(mnk)
        ->Unit(benchmark::kMillisecond);
  };
  const std::vector<std::int64_t> square{1024, 1024, 1024};
  add_matmul("matmul/f32", DType::f32, {}, false, square);
  add_matmul("matmul/f32", DType::f32, {}, false, {2048, 2048, 2048});
  add_matmul("matmul/f32", DType::f32, {}, false, {256, 256, 256});
  add_matmul("matmul/f32", DType::f32, {}, false, {128, 4096, 4096});
  for (const std::int64_t m : {1, 4, 16}) {
    add_matmul("matmul/f32", DType::f32, {}, false, {m, 4096, 4096});
    add_matmul("matmul_by_columns/f32", DType::f32, {}, false, {m, 4096, 4096}, true);
    add_matmul("matmul_by_columns/bf16", DType::bf16, {}, false, {m, 4096, 4096}, true);
  }
  add_matmul("matmul/bf16", DType::bf16, {}, false, square);
  add_matmul("matmul/f16", DType::f16, {}, false, square);
  add_matmul("matmul_bias_gelu/f32", DType::f32, {ir::UnaryKind::gelu}, true, square);
  add_matmul("matmul_bias_gelu_tanh/f32", DType::f32, {ir::UnaryKind::gelu_tanh}, true, square);
  add_matmul("matmul_bias_silu/f32", DType::f32, {ir::UnaryKind::silu}, true, square);
  RegisterBenchmark("matmul_i8_bf16_add/4x", mixed_matmul)
      ->Arg(1024)
      ->Unit(benchmark::kMillisecond);

  RegisterBenchmark("scaled_matmul/mxfp8", scaled_matmul, DType::f8e4m3, DType::f8e8m0, 32)
      ->Arg(1024)
      ->Unit(benchmark::kMillisecond);
  RegisterBenchmark("scaled_matmul/nvfp4", scaled_matmul, DType::f4e2m1, DType::f8e4m3, 16)
      ->Arg(1024)
      ->Unit(benchmark::kMillisecond);
  for (const auto& [name, kind] :
       {std::pair{"layer_norm", ir::NormKind::layer}, std::pair{"rms_norm", ir::NormKind::rms}}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const Pass pass : {Pass::forward, Pass::backward}) {
        const std::string full = fmt::format(
            "{}{}/{}", name, pass == Pass::forward ? "" : "_backward", to_string(dtype));
        RegisterBenchmark(full.c_str(), norm, kind, dtype, pass)
            ->Args({4096, 4096})
            ->Args({65536, 128})
            ->Unit(benchmark::kMillisecond);
      }
    }
  }

  const auto add_attention = [](const char* name, auto run, AttentionShape shape) {
    RegisterBenchmark(name, run, shape)->Unit(benchmark::kMillisecond);
  };
  add_attention("attention/8x2048x128/f32", attention, {8, 8, 2048, 128, false, DType::f32});
  add_attention("attention/8x2048x128/f32/causal", attention, {8, 8, 2048, 128, true, DType::f32});
  add_attention("attention/8:2x2048x128/bf16/causal", attention,
                {8, 2, 2048, 128, true, DType::bf16});
  add_attention("attention/8x2048x64/f32", attention, {8, 8, 2048, 64, false, DType::f32});
  add_attention("attention/8x256x128/f32", attention, {8, 8, 256, 128, false, DType::f32});
  add_attention("attention_backward/8x2048x128/f32", attention_backward,
                {8, 8, 2048, 128, false, DType::f32});
  add_attention("attention_backward/8x2048x128/f32/causal", attention_backward,
                {8, 8, 2048, 128, true, DType::f32});
  for (const auto& [name, extra] :
       {std::pair{"mask", Extra::mask}, std::pair{"dropout", Extra::dropout}}) {
    const AttentionShape shape{8, 8, 2048, 128, false, DType::f32, extra};
    add_attention(fmt::format("attention/8x2048x128/f32/{}", name).c_str(), attention, shape);
    add_attention(fmt::format("attention_backward/8x2048x128/f32/{}", name).c_str(),
                  attention_backward, shape);
  }
}

}  // namespace
}  // namespace lawson::bench

int main(int argc, char** argv) {
  setenv("LAWSON_NUM_THREADS", "1", 0);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  const char* kernels = lawson::cpu::best_kernels().name;
  std::cerr << fmt::format("kernels {}: peak {:.1f} GFLOP/s per core, LAWSON_NUM_THREADS={}\n",
                           kernels, lawson::bench::peak_gflops(kernels),
                           std::getenv("LAWSON_NUM_THREADS"));
  lawson::bench::register_all();
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}
