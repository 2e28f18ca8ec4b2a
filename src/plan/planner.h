// Probe, choose, compile, load, execute: sends each request to where it can be answered. A CUDA
// device that is not present is judged and compiled in worker processes, a present one in-process.
// What is judged, compiled and run is the graph as ir::simplify leaves it.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/engine.h"
#include "plan/plan_cache.h"
#include "plan/tuned_plans.h"
#include "plan/tuner.h"

namespace lawson::plan {

struct PlannerConfig {
  std::vector<std::shared_ptr<Engine>> engines;  // in order of preference
  std::string worker_path;                       // the worker executable
  std::string nodriver_path;                     // the no-driver library
  std::string cudnn_path;                        // --cudnn; empty: search
  int max_workers = 0;                           // 0: one per core, at most 8
  std::size_t max_plans = 1024;                  // loaded plans that the cache holds
  // Where tuned choices are stored; the error, if any, is that of whoever asks for tuning.
  Result<TunedPlans::Config> tuned_plans = TunedPlans::Config{};
  TunerConfig tuner;
};

class Planner {
 public:
  explicit Planner(PlannerConfig config);
  ~Planner();
  Planner(const Planner&) = delete;
  Planner& operator=(const Planner&) = delete;

  // `engine` empty: cudnn for CUDA devices, cpu for the host CPU. An unknown engine is
  // INVALID_ARGUMENT; an engine that cannot run on the device's kind is a verdict with a reason.
  // Strength verified executes on the device and compares with the oracle: UNAVAILABLE without it.
  Result<Verdict> probe(const ir::Graph& graph, const Device& device, std::string_view engine,
                        const Options& options);
  Result<Plan> compile(const ir::Graph& graph, const Device& device, std::string_view engine,
                       const Options& options);
  // As compile with Options::tuning, and how it was chosen. Without the device: what the engine
  // prefers, and the plan and the report say so. `retune`: stored candidates are timed again.
  Result<Tuned> tune(const ir::Graph& graph, const Device& device, std::string_view engine,
                     const Options& options, bool retune);
  // The report on a plan that was tuned, or read as tuned, in this process.
  std::optional<TuningReport> report_of(std::string_view plan_id) const;
  Result<std::shared_ptr<Loaded>> load(const Plan& plan, const Device& device);
  Status execute(const Plan& plan, const Loaded& loaded, std::span<const Binding> bindings,
                 void* workspace, std::size_t workspace_size, void* stream);

  // The loaded plan from the process's cache, compiled and loaded for this device if it is not
  // there: once, however many threads ask. `stream` is where it is going to run: while that
  // captures, a plan that is not ready is INVALID_ARGUMENT.
  Result<std::shared_ptr<Loaded>> acquire(const ir::Graph& graph, const Device& device,
                                          std::string_view engine, const Options& options,
                                          void* stream);
  const PlanCache& cache() const;

  Engine* engine(std::string_view name) const;

  // GPUs of this machine first, then the host CPU, then the target library.
  Result<std::vector<Device>> devices();
  // By name, alias, "cuda" or "cuda:N"; a live GPU wins over a target of the same name.
  Result<Device> find_device(std::string_view name);

  // What `info` shows: engines, libraries found (asked from a worker where there is no GPU),
  // worker pool state.
  Json info();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lawson::plan
