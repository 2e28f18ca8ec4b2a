// Probe, choose, compile, load, execute: sends each request to where it can be answered. A CUDA
// device that is not present is judged and compiled in worker processes, a present one in-process.
// What is judged, compiled and run is the graph as ir::simplify leaves it.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/engine.h"
#include "plan/plan_cache.h"
#include "plan/question.h"
#include "plan/store.h"
#include "plan/tuner.h"
#include "plan/verdict_cache.h"

namespace lawson::plan {

struct PlannerConfig {
  std::vector<std::shared_ptr<Engine>> engines;  // in order of preference
  std::string worker_path;                       // the worker executable
  std::string nodriver_path;                     // the no-driver library
  std::string cudnn_path;                        // --cudnn; empty: search
  int max_workers = 0;                           // 0: one per core, at most 8
  CacheBudget plans;                             // loaded ones
  CacheBudget verdicts{8192, std::uint64_t{32} << 20};
  CacheBudget refusals{8192, std::uint64_t{16} << 20};  // of plans that were asked for
  // What was built and is not loaded, or not yet.
  CacheBudget built{64, std::uint64_t{64} << 20};
  // Where plans, verdicts and tuned choices are stored; the error, if any, is that of whoever asks
  // for tuning.
  Result<Store::Config> store = Store::Config{};
  std::string bundle_path;                     // LAWSON_BUNDLE_PATH: layers.h
  std::function<void(std::string_view)> warn;  // empty: to standard error
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
  // A question that was asked before in this process is answered from memory: in well below 2 us
  // where graph and device are known ones.
  using VerdictPtr = std::shared_ptr<const Verdict>;
  Result<VerdictPtr> verdict(const KnownGraph& graph, const KnownDevice& device,
                             std::string_view engine, const Options& options);
  // What verdict() would answer from memory; nullptr: it would ask. Counts as no question.
  VerdictPtr known_verdict(const KnownGraph& graph, const KnownDevice& device,
                           std::string_view engine, const Options& options);
  Result<Verdict> probe(const ir::Graph& graph, const Device& device, std::string_view engine,
                        const Options& options);
  Result<Plan> compile(const ir::Graph& graph, const Device& device, std::string_view engine,
                       const Options& options);
  // The key that such a plan has, without judging or building.
  Result<std::string> key(const ir::Graph& graph, const Device& device, std::string_view engine,
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
  Status prepare_graph(const Plan& plan, const Loaded& loaded, GraphUse use,
                       std::span<const Binding> bindings, void* workspace,
                       std::size_t workspace_size, void* graph);

  // The loaded plan from the process's cache, compiled and loaded for this device if it is not
  // there: once, however many threads ask. `stream` is where it is going to run: while that
  // captures, a plan that is not ready is INVALID_ARGUMENT.
  // What was refused is refused again with the same words, and nothing is built for it.
  Result<std::shared_ptr<Loaded>> acquire(const KnownGraph& graph, const KnownDevice& device,
                                          std::string_view engine, const Options& options,
                                          void* stream);
  Result<std::shared_ptr<Loaded>> acquire(const ir::Graph& graph, const Device& device,
                                          std::string_view engine, const Options& options,
                                          void* stream);
  // A plan that came from elsewhere, for those who ask for its key on its device. What is there
  // already stays. INVALID_ARGUMENT: the key is not that of its graph with these options.
  Status keep(const Plan& plan, const ir::Graph& graph, const Device& device,
              const Options& options);
  PlanCache& cache();
  VerdictCache& verdicts();
  void set_single_flight(bool value);  // for tests: SharedCache's, of all that is kept

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
