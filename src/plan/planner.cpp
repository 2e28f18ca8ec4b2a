#include "plan/planner.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cctype>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <stop_token>
#include <thread>
#include <utility>

#include "ir/attention.h"
#include "ir/simplify.h"
#include "plan/chooser.h"
#include "plan/verified_run.h"
#include "plan/worker_client.h"

namespace lawson::plan {
namespace {

constexpr std::string_view kCudnn = "cudnn";
constexpr std::string_view kReference = "reference";
constexpr std::string_view kCpu = "cpu";
constexpr std::uint64_t kVerifySeed = 1;
// What engines may rely on for the workspace's start, in bytes.
constexpr std::uintptr_t kWorkspaceAlignment = 16;

std::string lowered(std::string_view text) {
  std::string result{text};
  for (char& c : result) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return result;
}

std::string joined(const std::vector<std::string>& words) {
  return fmt::format("{}", fmt::join(words, ", "));
}

std::string_view kind_text(Device::Kind kind) {
  return kind == Device::Kind::cuda ? "GPUs" : "the host CPU";
}

Error not_here(const Device& device) {
  return error(ErrorKind::unavailable,
               "a plan is loaded where it runs, and '{}' is not on this machine", device.name);
}

Error no_cudnn_engine(const Device& device) {
  return error(
      ErrorKind::unavailable,
      "'{}' is a GPU, and this build of Lawson has no cuDNN engine (it was configured with "
      "LAWSON_CUDNN=OFF)",
      device.name);
}

// "cuda" -> -1, "cuda:1" -> 1; nullopt: another name.
Result<std::optional<int>> cuda_ordinal(const std::string& name) {
  if (name == "cuda") return std::optional<int>{-1};
  if (!name.starts_with("cuda:")) return std::optional<int>{};
  const std::string digits = name.substr(5);
  const bool number = !digits.empty() && digits.size() <= 4 &&
                      std::all_of(digits.begin(), digits.end(),
                                  [](unsigned char c) { return std::isdigit(c) != 0; });
  if (!number) {
    return invalid("device '{}': expected 'cuda' or 'cuda:N' with N counting from 0", name);
  }
  return std::optional<int>{std::stoi(digits)};
}

// The graph that is judged, compiled and run. Attention alone, which runs through here at every
// call, has nothing to be simplified.
class Simplified {
 public:
  explicit Simplified(const ir::Graph& graph) : given_{graph} {
    const bool is_attention =
        std::all_of(graph.nodes.begin(), graph.nodes.end(), [](const ir::Node& node) {
          return ir::attention_rule(node.op) != nullptr ||
                 std::holds_alternative<ir::CacheAppend>(node.op);
        });
    if (!is_attention) simplified_ = ir::simplify(graph);
  }
  const ir::Graph& operator*() const { return simplified_ ? *simplified_ : given_; }

 private:
  const ir::Graph& given_;
  std::optional<ir::Graph> simplified_;
};

// Asks a build to stop after so many milliseconds; negative: never.
class Deadline {
 public:
  explicit Deadline(double ms) {
    if (ms < 0) return;
    timer_ = std::jthread([this, ms](const std::stop_token& over) {
      std::mutex mutex;
      std::unique_lock lock{mutex};
      std::condition_variable_any sleep;
      const std::chrono::duration<double, std::milli> time{std::min(ms, 1e9)};
      sleep.wait_for(lock, over, time, [&] { return over.stop_requested(); });
      if (!over.stop_requested()) build_.request_stop();
    });
  }
  std::stop_token token() const { return build_.get_token(); }

 private:
  std::stop_source build_;
  std::jthread timer_;  // ends first
};

// A refusal without a word is still told in words.
Verdict with_text(Verdict verdict) {
  if (verdict.decision != Decision::unsupported) return verdict;
  std::erase_if(verdict.reasons, [](const Reason& reason) { return reason.message.empty(); });
  if (verdict.reasons.empty()) {
    verdict.reasons.push_back({"no_reason",
                               fmt::format("engine '{}' refuses this on '{}' and gives no reason",
                                           verdict.engine, verdict.target),
                               ""});
  }
  return verdict;
}

}  // namespace

class Planner::Impl {
 public:
  explicit Impl(PlannerConfig config)
      : config_{std::move(config)},
        workers_{worker_pool_config(config_)},
        cache_{config_.max_plans},
        chooser_{config_.tuned_plans, config_.tuner} {}

  Result<Verdict> probe(const ir::Graph& graph, const Device& device, std::string_view name,
                        const Options& options) {
    LAWSON_TRY(Engine * engine, choose(device, name));
    if (!engine->accepts(device)) return wrong_device(*engine, graph, device, options);
    if (options.strength == Strength::verified && !device.present()) {
      return error(ErrorKind::unavailable,
                   "strength 'verified' executes on the device, and '{}' is not on this machine",
                   device.name);
    }
    // An engine may build while it judges; where the plan itself is wanted, that would be for
    // nothing.
    Options asked = options;
    const bool tunes = options.tuning != Tuning::off && !needs_worker(device);
    if (options.strength == Strength::verified || tunes) asked.strength = Strength::judged;
    LAWSON_TRY(Verdict verdict, judge(*engine, graph, device, asked));
    if (verdict.decision != Decision::supported) return verdict;
    if (tunes) {
      // What the engine prefers is not what will run.
      verdict.strength = Strength::judged;
      verdict.plan_id.clear();
      verdict.plan_name.clear();
      verdict.workspace_bytes.reset();
    } else if (options.tuning != Tuning::off) {
      verdict.choice = untuned_text(device, options);
    }
    if (verdict.strength >= options.strength) return verdict;
    auto plan = build(*engine, graph, device, options);
    verdict.strength = Strength::built;
    if (!plan.ok()) return not_built(std::move(verdict), std::move(plan).error());
    verdict.plan_id = plan->plan_id;
    verdict.plan_name = plan->plan_name;
    verdict.workspace_bytes = plan->workspace_bytes;
    verdict.choice = plan->choice;
    if (options.strength == Strength::built) return verdict;
    return verify(*engine, std::move(verdict), graph, *plan, device);
  }

  Result<Plan> compile(const ir::Graph& graph, const Device& device, std::string_view name,
                       const Options& options) {
    LAWSON_TRY(Engine * engine, accepting(graph, device, name, options));
    return build(*engine, graph, device, options);
  }

  Result<Tuned> tune(const ir::Graph& graph, const Device& device, std::string_view name,
                     const Options& options, bool retune) {
    LAWSON_TRY(Engine * engine, accepting(graph, device, name, options));
    if (options.tuning != Tuning::off && !needs_worker(device)) {
      return chosen(*engine, graph, device, options, retune);
    }
    Tuned tuned;
    LAWSON_TRY(tuned.plan, build(*engine, graph, device, options));
    tuned.report.tuning = options.tuning;
    tuned.report.choice = tuned.plan.choice;
    return tuned;
  }

  Result<std::shared_ptr<Loaded>> load(const Plan& plan, const Device& device) {
    LAWSON_TRY(Engine * engine, engine_of(plan));
    if (!engine->accepts(device)) {
      return invalid("the plan for '{}' is the {} engine's, which does not run on '{}'",
                     plan.target, plan.engine, device.name);
    }
    if (!device.present()) return not_here(device);
    return engine->load(plan, device);
  }

  Status execute(const Plan& plan, const Loaded& loaded, std::span<const Binding> bindings,
                 void* workspace, std::size_t workspace_size, void* stream) {
    LAWSON_TRY(Engine * engine, engine_of(plan));
    const auto needed = static_cast<std::size_t>(std::max<std::int64_t>(plan.workspace_bytes, 0));
    if (workspace_size < needed) {
      return invalid("the workspace has {} bytes; this plan needs {}", workspace_size, needed);
    }
    if (needed > 0 && workspace == nullptr) {
      return invalid("the workspace is a null pointer; this plan needs {} bytes", needed);
    }
    if (needed > 0 && std::bit_cast<std::uintptr_t>(workspace) % kWorkspaceAlignment != 0) {
      return invalid("the workspace is at {}; its address has to be a multiple of {} bytes",
                     fmt::ptr(workspace), kWorkspaceAlignment);
    }
    return engine->execute(loaded, bindings, workspace, stream);
  }

  Result<std::shared_ptr<Loaded>> acquire(const ir::Graph& graph, const Device& device,
                                          std::string_view name, const Options& options,
                                          void* stream) {
    LAWSON_TRY(Engine * engine, choose(device, name));
    if (!engine->accepts(device)) {
      return unsupported("engine_device", wrong_kind_text(*engine, device), "engine");
    }
    if (!device.present()) return not_here(device);
    // An engine's build does not change while the process lives.
    const PlanCache::Id id{make_key(graph, device, engine->name(), "", options), device.ordinal};
    if (auto ready = cache_.find(id)) return ready;
    LAWSON_TRY(const bool capturing, engine->capturing(device, stream));
    if (capturing) {
      return invalid(
          "the stream is being captured, and the plan for this config is not ready on '{}': "
          "nothing "
          "is built or loaded during a capture; run it once, or ask for its plan, before",
          device.name);
    }
    return cache_.get(id, [&]() -> Result<std::shared_ptr<Loaded>> {
      // What is bound at run time is no part of a key: the plan has no defaults of one caller's.
      ir::Graph shared = graph;
      for (ir::Tensor& tensor : shared.tensors) tensor.values.clear();
      LAWSON_TRY(const Plan plan, compile(shared, device, name, options));
      return load(plan, device);
    });
  }

  const PlanCache& cache() const { return cache_; }
  const Chooser& chooser() const { return chooser_; }

  Engine* engine(std::string_view name) const {
    for (const auto& candidate : config_.engines) {
      if (candidate->name() == name) return candidate.get();
    }
    return nullptr;
  }

  // An environment without a working driver still has targets: the fault is reported where a GPU of
  // this machine is asked for, and by info().
  Result<std::vector<Device>> devices() {
    auto live = live_devices();
    std::vector<Device> all = live.ok() ? std::move(live).value() : std::vector<Device>{};
    all.push_back(cpu_device());
    for (const auto& engine : config_.engines) {
      for (Device& target : engine->known_targets()) all.push_back(std::move(target));
    }
    return all;
  }

  Result<Device> find_device(std::string_view given) {
    const std::string name = lowered(given);
    LAWSON_TRY(const std::optional<int> ordinal, cuda_ordinal(name));
    if (ordinal) return live_device(name, *ordinal);
    LAWSON_TRY(const std::vector<Device> all, devices());
    for (const Device& device : all) {
      if (lowered(device.name) == name) return device;
    }
    for (const Device& device : all) {
      for (const std::string& alias : device.aliases) {
        if (lowered(alias) == name) return device;
      }
    }
    return unknown_device(given, all);
  }

  Json info() {
    Json engines = Json::object();
    for (const auto& engine : config_.engines) {
      engines[std::string{engine->name()}] = engine->info();
    }
    Json document{{"engines", std::move(engines)}};
    auto live = live_devices();
    if (live.ok()) {
      document["gpus"] = Json::array();
      for (const Device& device : *live) document["gpus"].push_back(device_to_json(device));
    } else {
      document["gpus_error"] = error_to_json(live.error());
    }
    if (has_cudnn()) document["worker"] = worker_info();
    return document;
  }

 private:
  static WorkerPoolConfig worker_pool_config(const PlannerConfig& config) {
    WorkerPoolConfig pool;
    pool.worker_path = config.worker_path;
    pool.arguments = {"--nodriver", config.nodriver_path};
    if (!config.cudnn_path.empty()) {
      pool.arguments.insert(pool.arguments.end(), {"--cudnn", config.cudnn_path});
    }
    pool.max_workers = config.max_workers;
    return pool;
  }

  bool has_cudnn() const { return engine(kCudnn) != nullptr; }

  std::vector<std::string> engine_names() const {
    std::vector<std::string> names;
    for (const auto& engine : config_.engines) names.emplace_back(engine->name());
    return names;
  }

  Result<Engine*> choose(const Device& device, std::string_view name) const {
    if (name.empty()) {
      for (const auto& engine : config_.engines) {
        if (engine->accepts(device)) return engine.get();
      }
      return no_cudnn_engine(device);
    }
    if (Engine* found = engine(name)) return found;
    if (name == kCudnn) return no_cudnn_engine(device);
    const std::string near = nearest_name(name, engine_names());
    return invalid("engine '{}' does not exist; known: {}{}", name, joined(engine_names()),
                   near.empty() ? "" : fmt::format("; did you mean '{}'?", near));
  }

  Result<Engine*> engine_of(const Plan& plan) const {
    if (Engine* found = engine(plan.engine)) return found;
    return error(ErrorKind::unavailable,
                 "the plan for '{}' is for engine '{}', which this build does not have (it has {})",
                 plan.target, plan.engine, joined(engine_names()));
  }

  static Verdict wrong_device(const Engine& engine, const ir::Graph& graph, const Device& device,
                              const Options& options) {
    Verdict verdict;
    verdict.decision = Decision::unsupported;
    verdict.evidence = device.evidence;
    verdict.engine = std::string{engine.name()};
    verdict.target = device.name;
    verdict.key = make_key(graph, device, engine.name(), "", options);
    verdict.reasons.push_back({"engine_device", wrong_kind_text(engine, device), "engine"});
    return verdict;
  }

  static std::string wrong_kind_text(const Engine& engine, const Device& device) {
    const auto other = device.kind == Device::Kind::cuda ? Device::Kind::cpu : Device::Kind::cuda;
    return fmt::format("engine '{}' runs on {}; '{}' is of another kind (one of {})", engine.name(),
                       kind_text(other), device.name, kind_text(device.kind));
  }

  // The two ways to an answer: in this process, or for a GPU that is not here in a worker.
  static bool needs_worker(const Device& device) {
    return device.kind == Device::Kind::cuda && !device.present();
  }

  Result<Verdict> judge(Engine& engine, const ir::Graph& graph, const Device& device,
                        const Options& options) {
    if (needs_worker(device)) return workers_.probe(graph, device, options);
    return engine.probe(graph, device, options);
  }

  Result<Plan> build(Engine& engine, const ir::Graph& graph, const Device& device,
                     const Options& options) {
    if (needs_worker(device)) {
      LAWSON_TRY(Plan plan, workers_.compile(graph, device, options, std::nullopt));
      if (options.tuning != Tuning::off) plan.choice = untuned_text(device, options);
      return plan;
    }
    if (options.tuning != Tuning::off) {
      LAWSON_TRY(Tuned tuned, chosen(engine, graph, device, options, false));
      return std::move(tuned.plan);
    }
    const Deadline deadline{options.deadline_ms};
    auto plan = engine.compile(graph, device, options, std::nullopt, deadline.token());
    if (!plan.ok() && plan.error().kind == ErrorKind::cancelled) {
      return error(ErrorKind::cancelled, "the deadline of {:g} ms passed before a plan was built",
                   options.deadline_ms);
    }
    return plan;
  }

  Result<Tuned> chosen(Engine& engine, const ir::Graph& graph, const Device& device,
                       const Options& options, bool retune) {
    Engine* reference = this->engine(kReference);
    if (reference == nullptr) {
      return error(ErrorKind::unavailable,
                   "tuning checks the numbers of what it chooses with the reference engine, which "
                   "is not here");
    }
    Engine* forward = this->engine(kCpu);
    return chooser_.choose(graph, device, options,
                           {engine, *reference, forward != nullptr ? *forward : *reference},
                           retune);
  }

  static std::string untuned_text(const Device& device, const Options& options) {
    return fmt::format(
        "not tuned ({}): the engine's first choice from its table, for '{}' is not on this machine",
        to_string(options.tuning), device.name);
  }

  Result<Engine*> accepting(const ir::Graph& graph, const Device& device, std::string_view name,
                            const Options& options) const {
    LAWSON_TRY(Engine * engine, choose(device, name));
    if (engine->accepts(device)) return engine;
    const Verdict verdict = wrong_device(*engine, graph, device, options);
    return Error{ErrorKind::unsupported, verdict.reasons.front().message, verdict.reasons};
  }

  // "Does not build" is an answer only when the engine says so.
  static Result<Verdict> not_built(Verdict verdict, Error why) {
    if (why.kind != ErrorKind::unsupported) return why;
    verdict.decision = Decision::unsupported;
    verdict.plan_id.clear();
    verdict.plan_name.clear();
    verdict.workspace_bytes.reset();
    verdict.reasons = std::move(why.reasons);
    if (verdict.reasons.empty()) verdict.reasons.push_back({"not_built", why.message, ""});
    return verdict;
  }

  Result<Verdict> verify(Engine& engine, Verdict verdict, const ir::Graph& graph, const Plan& plan,
                         const Device& device) {
    Engine* reference = this->engine(kReference);
    if (reference == nullptr) {
      return error(ErrorKind::unavailable,
                   "strength 'verified' compares with the reference engine, which is not here");
    }
    const auto compared = run_and_compare(graph, plan, engine, *reference, device, kVerifySeed);
    if (!compared.ok()) {
      if (compared.error().kind != ErrorKind::unsupported) return compared.error();
      verdict.reasons = compared.error().reasons;  // built, and why not more
      return verdict;
    }
    const Comparison& comparison = *compared;
    verdict.strength = Strength::verified;
    if (!comparison.ok()) {
      verdict.decision = Decision::unsupported;
      verdict.reasons.push_back({"wrong_result",
                                 fmt::format("executed on '{}', and its results are wrong: {}",
                                             device.name, comparison.text()),
                                 ""});
    }
    return verdict;
  }

  Result<std::vector<Device>> live_devices() {
    std::vector<Device> all;
    for (const auto& engine : config_.engines) {
      LAWSON_TRY(auto live, engine->live_devices());
      for (Device& device : live) all.push_back(std::move(device));
    }
    return all;
  }

  Result<Device> live_device(const std::string& name, int ordinal) {
    if (!has_cudnn()) {
      return error(ErrorKind::unavailable,
                   "device '{}': this build of Lawson has no cuDNN engine (it was configured with "
                   "LAWSON_CUDNN=OFF)",
                   name);
    }
    LAWSON_TRY(const std::vector<Device> live, live_devices());
    for (const Device& device : live) {
      if (ordinal < 0 || device.ordinal == ordinal) return device;
    }
    return error(ErrorKind::unavailable, "device '{}': this machine has {}", name,
                 live.empty() ? "no GPU that the CUDA driver can see"
                              : fmt::format("{} GPU(s), numbered from 0", live.size()));
  }

  Error unknown_device(std::string_view name, const std::vector<Device>& all) const {
    std::vector<std::string> known;
    std::vector<std::string> spellings;
    for (const Device& device : all) {
      if (std::find(known.begin(), known.end(), device.name) == known.end()) {
        known.push_back(device.name);
      }
      spellings.push_back(device.name);
      spellings.insert(spellings.end(), device.aliases.begin(), device.aliases.end());
    }
    if (!has_cudnn()) {
      return error(ErrorKind::unavailable,
                   "device '{}': this build of Lawson has no cuDNN engine and with it no GPUs (it "
                   "was configured with LAWSON_CUDNN=OFF); known: {}",
                   name, joined(known));
    }
    const std::string near = nearest_name(lowered(name), spellings);
    return invalid("device '{}' is not known; known: {}, cuda, cuda:N{}", name, joined(known),
                   near.empty() ? "" : fmt::format("; did you mean '{}'?", near));
  }

  Json worker_info() {
    Json document{{"path", config_.worker_path}, {"nodriver", config_.nodriver_path}};
    auto loaded = workers_.pool().worker_info();
    if (loaded.ok()) {
      document["libraries"] = std::move(loaded).value();
    } else {
      document["error"] = error_to_json(loaded.error());
    }
    document["pool"] = workers_.pool().state();
    return document;
  }

  PlannerConfig config_;
  WorkerClient workers_;
  PlanCache cache_;
  Chooser chooser_;
};

Planner::Planner(PlannerConfig config) : impl_{std::make_unique<Impl>(std::move(config))} {}
Planner::~Planner() = default;

Result<Verdict> Planner::probe(const ir::Graph& graph, const Device& device,
                               std::string_view engine, const Options& options) {
  const Simplified simple{graph};
  LAWSON_TRY(Verdict verdict, impl_->probe(*simple, device, engine, options));
  return with_text(std::move(verdict));
}

Result<Plan> Planner::compile(const ir::Graph& graph, const Device& device, std::string_view engine,
                              const Options& options) {
  const Simplified simple{graph};
  return impl_->compile(*simple, device, engine, options);
}

Result<Tuned> Planner::tune(const ir::Graph& graph, const Device& device, std::string_view engine,
                            const Options& options, bool retune) {
  const Simplified simple{graph};
  return impl_->tune(*simple, device, engine, options, retune);
}

Result<std::shared_ptr<Loaded>> Planner::load(const Plan& plan, const Device& device) {
  return impl_->load(plan, device);
}

Status Planner::execute(const Plan& plan, const Loaded& loaded, std::span<const Binding> bindings,
                        void* workspace, std::size_t workspace_size, void* stream) {
  return impl_->execute(plan, loaded, bindings, workspace, workspace_size, stream);
}

Result<std::shared_ptr<Loaded>> Planner::acquire(const ir::Graph& graph, const Device& device,
                                                 std::string_view engine, const Options& options,
                                                 void* stream) {
  const Simplified simple{graph};
  return impl_->acquire(*simple, device, engine, options, stream);
}

const PlanCache& Planner::cache() const {
  return impl_->cache();
}

std::optional<TuningReport> Planner::report_of(std::string_view plan_id) const {
  return impl_->chooser().report_of(plan_id);
}

Engine* Planner::engine(std::string_view name) const {
  return impl_->engine(name);
}
Result<std::vector<Device>> Planner::devices() {
  return impl_->devices();
}
Result<Device> Planner::find_device(std::string_view name) {
  return impl_->find_device(name);
}
Json Planner::info() {
  return impl_->info();
}

}  // namespace lawson::plan
