#include "plan/bench.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>
#include <vector>

#include "plan/race.h"
#include "plan/tasks.h"
#include "plan/work.h"

namespace lawson::plan {
namespace {

constexpr double kRoundMs = 2;
constexpr int kMaxExecutions = 1000;
constexpr int kLimitRounds = 20;
constexpr std::uint64_t kSeed = 1;
// The largest cache of a GPU is some 100 MB.
constexpr std::int64_t kCopyBytes = std::int64_t{256} << 20;

void set_times(BenchResult& result, std::vector<double> times) {
  const Runner runner{std::move(times), std::nullopt};
  result.rounds = static_cast<int>(runner.times.size());
  result.median_ms = runner.median();
  result.min_ms = runner.min();
  result.max_ms = runner.max();
}

Result<ir::Graph> product_graph(std::int64_t size, DType dtype) {
  ir::Builder builder("limit.product");
  ir::Tensor a;
  a.name = "a";
  a.dtype = dtype;
  a.shape = {1, size, size};
  ir::Tensor b = a;
  b.name = "b";
  LAWSON_TRY(const ir::TensorId left, builder.input(a));
  LAWSON_TRY(const ir::TensorId right, builder.input(b));
  LAWSON_TRY(const ir::TensorId product, builder.add1(ir::Matmul{}, {left, right}, dtype, "c"));
  LAWSON_CHECK(builder.output(product));
  return std::move(builder).finish();
}

// A copy by the one op that only copies, or by one that moves as many bytes where an engine does
// not take that.
Result<ir::Graph> copy_graph(const ir::Op& op) {
  ir::Builder builder("limit.copy");
  ir::Tensor x;
  x.name = "x";
  x.shape = {1, kCopyBytes / 4 / 4096, 4096};
  LAWSON_TRY(const ir::TensorId from, builder.input(x));
  LAWSON_TRY(const ir::TensorId to, builder.add1(op, {from}, DType::f32, "y"));
  LAWSON_CHECK(builder.output(to));
  return std::move(builder).finish();
}

Result<BenchResult> bench_of(Planner& planner, const ir::Graph& graph, const Device& device,
                             std::string_view engine, Tuning tuning) {
  Options options;
  options.tuning = tuning;
  LAWSON_TRY(const Plan plan, planner.compile(graph, device, engine, options));
  LAWSON_TRY(const auto loaded, planner.load(plan, device));
  return bench(planner, *loaded, graph, device, kSeed, kLimitRounds);
}

BenchResult bench_of_memcpy() {
  constexpr std::size_t kPart = std::size_t{1} << 20;
  const auto bytes = static_cast<std::size_t>(kCopyBytes);
  const std::vector<std::byte> from(bytes, std::byte{1});
  std::vector<std::byte> to(bytes);
  const auto copy = [&] {
    run_tasks(bytes / kPart, core_count(), [&](std::size_t i) {
      std::memcpy(to.data() + i * kPart, from.data() + i * kPart, kPart);
    });
  };
  copy();  // touches the pages
  std::vector<double> times;
  for (int i = 0; i < kLimitRounds; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    copy();
    const std::chrono::duration<double, std::milli> spent =
        std::chrono::steady_clock::now() - begin;
    times.push_back(spent.count());
  }
  BenchResult result;
  result.plan_name = "memcpy";
  result.executions = 1;
  result.buffer_sets = 1;
  result.buffer_bytes = 2 * bytes;
  result.bytes = 2 * static_cast<double>(bytes);
  set_times(result, std::move(times));
  return result;
}

}  // namespace

Result<BenchResult> bench(Planner& planner, const Loaded& loaded, const ir::Graph& graph,
                          const Device& device, std::uint64_t seed, int rounds) {
  const Plan& plan = loaded.plan();
  Engine* engine = planner.engine(plan.engine);
  Engine* forward = planner.engine("cpu");
  if (forward == nullptr) forward = planner.engine("reference");
  if (engine == nullptr || forward == nullptr) {
    return error(ErrorKind::unavailable, "this build lacks engine '{}' or one for generated data",
                 plan.engine);
  }
  LAWSON_TRY(Scratch scratch, Scratch::make(*engine, device, graph, seed, *forward, {}));
  LAWSON_TRY(void* workspace, scratch.workspace(plan.workspace_bytes));
  LAWSON_TRY(const auto first, engine->measure(loaded, scratch.sets(), workspace, 1, 1));
  // A round that is long against the clock, and in which every set has its turn where that is not
  // long against the round.
  const double once = std::max(first.at(0), 1e-4);
  const double wanted = std::max(
      kRoundMs / once, std::min(static_cast<double>(scratch.sets().size()), 20 * kRoundMs / once));
  BenchResult result;
  result.executions = static_cast<int>(std::clamp<double>(wanted, 1, kMaxExecutions));
  LAWSON_TRY(auto times,
             engine->measure(loaded, scratch.sets(), workspace, result.executions, rounds));
  set_times(result, std::move(times));
  result.engine = plan.engine;
  result.plan_id = plan.plan_id;
  result.plan_name = plan.plan_name;
  result.key = plan.key;
  result.buffer_sets = scratch.sets().size();
  result.buffer_bytes = scratch.bytes();
  const Work work = work_of(graph);
  result.flops = work.flops;
  result.bytes = work.bytes;
  return result;
}

Result<DeviceLimits> measure_limits(Planner& planner, const Device& device,
                                    std::string_view engine) {
  DeviceLimits limits;
  const bool on_gpu = device.kind == Device::Kind::cuda;
  const std::int64_t size = on_gpu ? 8192 : 1024;
  DType dtype = DType::f32;
  if (on_gpu) dtype = device.compute_capability >= 800 ? DType::bf16 : DType::f16;
  limits.product = fmt::format("{0} x {0} x {0} {1}", size, to_string(dtype));
  LAWSON_TRY(const ir::Graph product, product_graph(size, dtype));
  LAWSON_TRY(limits.gemm,
             bench_of(planner, product, device, engine, on_gpu ? Tuning::quick : Tuning::off));
  if (!on_gpu) {
    limits.copy = fmt::format("memcpy of {} MiB on {} threads", kCopyBytes >> 20, core_count());
    limits.copied = bench_of_memcpy();
    return limits;
  }
  LAWSON_TRY(const ir::Graph copy, copy_graph(ir::Convert{}));
  limits.copy = fmt::format("{} MiB of f32, copied", kCopyBytes >> 20);
  auto copied = bench_of(planner, copy, device, engine, Tuning::quick);
  if (!copied.ok() && copied.error().kind == ErrorKind::unsupported) {
    LAWSON_TRY(const ir::Graph negated, copy_graph(ir::Unary{ir::UnaryKind::neg, 0}));
    limits.copy = fmt::format("{} MiB of f32, negated", kCopyBytes >> 20);
    copied = bench_of(planner, negated, device, engine, Tuning::quick);
  }
  LAWSON_TRY(limits.copied, std::move(copied));
  return limits;
}

Json bench_to_json(const BenchResult& result) {
  return {{"engine", result.engine},
          {"plan_id", result.plan_id},
          {"plan_name", result.plan_name},
          {"key", result.key},
          {"rounds", result.rounds},
          {"executions", result.executions},
          {"buffer_sets", result.buffer_sets},
          {"buffer_bytes", result.buffer_bytes},
          {"milliseconds",
           {{"median", result.median_ms}, {"min", result.min_ms}, {"max", result.max_ms}}},
          {"flops", result.flops},
          {"bytes", result.bytes},
          {"flops_per_second", result.flops_per_second()},
          {"bytes_per_second", result.bytes_per_second()}};
}

Json limits_to_json(const DeviceLimits& limits) {
  Json gemm = bench_to_json(limits.gemm);
  gemm["what"] = limits.product;
  Json copied = bench_to_json(limits.copied);
  copied["what"] = limits.copy;
  return {{"flops_per_second", limits.gemm.flops_per_second()},
          {"bytes_per_second", limits.copied.bytes_per_second()},
          {"product", std::move(gemm)},
          {"copy", std::move(copied)}};
}

}  // namespace lawson::plan
