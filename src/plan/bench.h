// How long a plan takes, and what its device can do at most.
#pragma once

#include <cstdint>
#include <string>

#include "engine/engine.h"
#include "plan/planner.h"
#include "plan/scratch.h"

namespace lawson::plan {

struct BenchResult {
  std::string engine;  // of the plan that ran, as the plan itself says
  std::string plan_id;
  std::string plan_name;
  std::string key;
  int rounds = 0;
  int executions = 0;  // of a round
  std::size_t buffer_sets = 0;
  std::size_t buffer_bytes = 0;
  double median_ms = 0;
  double min_ms = 0;
  double max_ms = 0;
  double flops = 0;  // of one execution (plan/work.h)
  double bytes = 0;

  double flops_per_second() const { return flops / (1e-3 * median_ms); }
  double bytes_per_second() const { return bytes / (1e-3 * median_ms); }
};

// Times a loaded plan of the graph on generated data, with sets of buffers in turn.
Result<BenchResult> bench(Planner& planner, const Loaded& loaded, const ir::Graph& graph,
                          const Device& device, std::uint64_t seed, int rounds);

// What was measured as the most that the device does, and with what.
struct DeviceLimits {
  std::string product;  // "8192 x 8192 x 8192 bf16"
  BenchResult gemm;
  std::string copy;  // "256 MiB f32, converted to itself"
  BenchResult copied;
};

// A large product through the named engine (tuned quick on a GPU), and a copy: on a GPU through the
// engine, on the host CPU memcpy on all cores.
Result<DeviceLimits> measure_limits(Planner& planner, const Device& device,
                                    std::string_view engine);

Json bench_to_json(const BenchResult& result);
Json limits_to_json(const DeviceLimits& limits);

}  // namespace lawson::plan
