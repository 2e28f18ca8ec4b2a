// What a fused function costs beside its kernel: tracing it again and finding its plan. CPU engine,
// so it runs anywhere; what is timed is the same on a GPU. Results: NOTES.md.
#include <benchmark/benchmark.h>
#include <lawson/lawson.hpp>

#include <vector>

namespace {

using lawson::Tensor;
using namespace lawson::dtypes;

// `count` ops: a matmul, then pointwise ops in turn.
class Chain {
 public:
  explicit Chain(int count) : count_{count} {}
  Tensor operator()(Tensor x, Tensor w, Tensor b) const {
    Tensor y = lawson::matmul(x, w);
    for (int i = 1; i < count_; ++i) {
      switch (i % 4) {
        case 0:
          y = y * b;
          break;
        case 1:
          y = y + b;
          break;
        case 2:
          y = lawson::tanh(y);
          break;
        default:
          y = lawson::clamp(y, -4, 4);
      }
    }
    return y;
  }

 private:
  int count_;
};

lawson::FuseOptions on_cpu() {
  return {.name = "chain", .engines = {"cpu"}};
}

// The same signature again: the op sequence is compared, and its plan handed out.
void retrace_and_find(benchmark::State& state) {
  const auto fused = lawson::fuse(Chain{static_cast<int>(state.range(0))}, on_cpu());
  const lawson::Array x{f32, {1, 64, 64}};
  const lawson::Array w{f32, {1, 64, 64}};
  const lawson::Array b{f32, {1, 1, 64}};
  for (auto _ : state) benchmark::DoNotOptimize(fused.plan({x, w, b}));
}
BENCHMARK(retrace_and_find)->Arg(1)->Arg(30)->Arg(100)->ThreadRange(1, 2);

// One of 20 signatures in turn.
void retrace_many_signatures(benchmark::State& state) {
  const auto fused = lawson::fuse(Chain{30}, on_cpu());
  std::int64_t i = 0;
  for (auto _ : state) {
    const std::int64_t rows = 8 + i++ % 20;
    benchmark::DoNotOptimize(
        fused.plan({{f32, {1, rows, 64}}, {f32, {1, 64, 64}}, {f32, {1, 1, 64}}}));
  }
}
BENCHMARK(retrace_many_signatures);

// What the first call costs beside building: a graph through the C ABI.
void trace_afresh(benchmark::State& state) {
  const auto fused = lawson::fuse(Chain{static_cast<int>(state.range(0))}, on_cpu());
  for (auto _ : state) {
    benchmark::DoNotOptimize(
        fused.graph({{f32, {1, 64, 64}}, {f32, {1, 64, 64}}, {f32, {1, 1, 64}}}));
  }
}
BENCHMARK(trace_afresh)->Arg(30)->Unit(benchmark::kMicrosecond);

// The whole of a call, with a kernel as small as it gets.
void call(benchmark::State& state) {
  const auto fused = lawson::fuse(Chain{static_cast<int>(state.range(0))}, on_cpu());
  alignas(64) static float x[16], w[16], b[16], y[16];
  for (auto _ : state) {
    fused({{x, {1, 4, 4}}, {w, {1, 4, 4}}, {b, {1, 1, 4}}}, {{y, {1, 4, 4}}});
  }
}
BENCHMARK(call)->Arg(1)->Arg(30);

}  // namespace

BENCHMARK_MAIN();
