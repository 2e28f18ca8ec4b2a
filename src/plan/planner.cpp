#include "plan/planner.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cctype>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <mutex>
#include <optional>
#include <stop_token>
#include <thread>
#include <utility>

#include "base/process.h"
#include "diag/diag.h"
#include "diag/lines.h"
#include "engine/subject.h"
#include "plan/chooser.h"
#include "plan/layers.h"
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

Status check_workspace(const Plan& plan, const void* workspace, std::size_t workspace_size) {
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
  return {};
}

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

// Reasons may name tensors and places: they are stored for graphs with the same words.
std::string refusal_key(std::string_view key, const KnownGraph& graph) {
  return hash_hex(
      fmt::format("refusal 1\n{}\n{:x} {:x}\n", key, graph.words().high, graph.words().low));
}

void take_plan(Verdict& verdict, const Plan& plan) {
  verdict.strength = std::max(verdict.strength, Strength::built);
  verdict.plan_id = plan.plan_id;
  verdict.plan_name = plan.plan_name;
  verdict.workspace_bytes = plan.workspace_bytes;
  verdict.choice = plan.choice;
}

void warn_on_stderr(std::string_view text) {
  std::fprintf(stderr, "lawson: warning: %.*s\n", static_cast<int>(text.size()), text.data());
}

Result<std::shared_ptr<Store>> open_store(const Result<Store::Config>& config,
                                          const std::function<void(std::string_view)>& warn) {
  LAWSON_TRY(Store::Config given, config);
  if (!given.warn) given.warn = warn;
  return std::make_shared<Store>(std::move(given));
}

}  // namespace

class Planner::Impl {
 public:
  explicit Impl(PlannerConfig config)
      : config_{std::move(config)},
        warn_{config_.warn ? config_.warn : warn_on_stderr},
        workers_{worker_pool_config(config_)},
        plans_{config_.plans},
        verdicts_{config_.verdicts},
        refusals_{config_.refusals},
        built_{config_.built,
               {.bytes = [](const Plan& plan) { return std::uint64_t{host_bytes(plan)}; },
                .inserted = {},
                .evicted = {}}},
        layers_{config_.bundle_path, warn_} {
    auto store = open_store(config_.store, warn_);
    store_ = store.ok() ? *store : std::make_shared<Store>(Store::Config{});
    chooser_.emplace(std::move(store), config_.tuner);
  }

  Result<VerdictPtr> verdict(const KnownGraph& graph, const KnownDevice& device,
                             std::string_view name, const Options& options) {
    LAWSON_TRY(Engine * engine, choose(device.device(), name));
    const Question question{*engine, graph, device, options};
    if (!engine->accepts(device.device())) {
      return std::make_shared<const Verdict>(wrong_device(question));
    }
    LAWSON_CHECK(usable_here(device.device()));
    if (options.strength == Strength::verified && !device.device().present()) {
      return error(ErrorKind::unavailable,
                   "strength 'verified' executes on the device, and '{}' is not on this machine",
                   device.device().name);
    }
    bool asked = false;
    const auto ask = [&]() -> Result<VerdictPtr> {
      asked = true;
      LAWSON_TRY(Verdict fresh, judge_afresh(question));
      return std::make_shared<const Verdict>(with_text(std::move(fresh)));
    };
    VerdictPtr answer = known_verdict(question);
    if (answer == nullptr) {
      const QuestionId id = verdict_question(graph, device, engine->name(), options);
      LAWSON_TRY(answer, verdicts_.get(id, ask, options.deadline_ms));
    }
    if (!asked) diag::record(diag::Event::hit, subject_of(question, answer->key));
    return answer;
  }

  VerdictPtr known_verdict(const KnownGraph& graph, const KnownDevice& device,
                           std::string_view name, const Options& options) {
    const auto engine = choose(device.device(), name);
    if (!engine.ok() || !usable_here(device.device()).ok()) return nullptr;
    return known_verdict({**engine, graph, device, options});
  }

  Result<Plan> compile(const KnownGraph& graph, const KnownDevice& device, std::string_view name,
                       const Options& options) {
    LAWSON_TRY(Engine * engine, accepting(graph, device, name, options));
    return plan_for({*engine, graph, device, options});
  }

  Result<std::string> key(const KnownGraph& graph, const KnownDevice& device, std::string_view name,
                          const Options& options) {
    LAWSON_TRY(Engine * engine, accepting(graph, device, name, options));
    const Question question{*engine, graph, device, options};
    LAWSON_CHECK(question.is_remote() ? workers_.version() : engine->version());
    return key_of(question);
  }

  Result<Tuned> tune(const KnownGraph& graph, const KnownDevice& device, std::string_view name,
                     const Options& options, bool retune) {
    LAWSON_TRY(Engine * engine, accepting(graph, device, name, options));
    const Question question{*engine, graph, device, options};
    if (is_tuned(question)) return chosen(question, retune);
    Tuned tuned;
    LAWSON_TRY(tuned.plan, plan_for(question));
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
    LAWSON_CHECK(usable_here(device));
    return loaded_by(*engine, plan, device, pass_of_plan(plan));
  }

  Status execute(const Plan& plan, const Loaded& loaded, std::span<const Binding> bindings,
                 void* workspace, std::size_t workspace_size, void* stream) {
    LAWSON_TRY(Engine * engine, engine_of(plan));
    if (loaded.label.ordinal >= 0) LAWSON_CHECK(gpu_survived_fork());
    LAWSON_CHECK(check_workspace(plan, workspace, workspace_size));
    const diag::Span span{"execute", plan::subject_of(loaded)};
    Status status = engine->execute(loaded, bindings, workspace, stream);
    if (status.ok()) diag::record(diag::Event::execute, plan::subject_of(loaded));
    return status;
  }

  Status prepare_graph(const Plan& plan, const Loaded& loaded, GraphUse use,
                       std::span<const Binding> bindings, void* workspace,
                       std::size_t workspace_size, void* graph) {
    LAWSON_TRY(Engine * engine, engine_of(plan));
    if (loaded.label.ordinal >= 0) LAWSON_CHECK(gpu_survived_fork());
    LAWSON_CHECK(check_workspace(plan, workspace, workspace_size));
    return engine->prepare_graph(loaded, use, bindings, workspace, graph);
  }

  Result<std::shared_ptr<Loaded>> acquire(const KnownGraph& graph, const KnownDevice& device,
                                          std::string_view name, const Options& options,
                                          void* stream) {
    LAWSON_TRY(Engine * engine, choose(device.device(), name));
    if (!engine->accepts(device.device())) {
      return unsupported("engine_device", wrong_kind_text(*engine, device.device()), "engine");
    }
    if (!device.device().present()) return not_here(device.device());
    LAWSON_CHECK(usable_here(device.device()));
    const Question question{*engine, graph, device, options};
    const QuestionId id = plan_question(graph, device, engine->name(), options);
    if (auto ready = plans_.find(id)) {
      diag::record(diag::Event::hit, plan::subject_of(*ready));
      return ready;
    }
    LAWSON_CHECK(not_refused(question));
    LAWSON_TRY(const bool capturing, engine->capturing(device.device(), stream));
    if (capturing) {
      return invalid(
          "the stream is being captured, and the plan for this config is not ready on '{}': "
          "nothing "
          "is built or loaded during a capture; run it once, or ask for its plan, before",
          device.device().name);
    }
    bool asked = false;
    auto loaded = plans_.get(
        id,
        [&] {
          asked = true;
          return build_and_load(question);
        },
        options.deadline_ms);
    if (loaded.ok() && !asked) diag::record(diag::Event::hit, plan::subject_of(**loaded));
    return loaded;
  }

  Status keep(const Plan& plan, const KnownGraph& graph, const KnownDevice& device,
              const Options& options) {
    LAWSON_TRY(Engine * engine, accepting(graph, device, plan.engine, options));
    if (!device.device().present()) return not_here(device.device());
    const Question question{*engine, graph, device, options};
    const QuestionId id = plan_question(graph, device, engine->name(), options);
    if (plans_.find(id) != nullptr) return {};
    if (const std::string key = key_of(question); key != plan.key) {
      return invalid("plan {} has the key {}; its graph has {} with these options on '{}'",
                     plan.plan_id, plan.key, key, device.device().name);
    }
    Plan shared = plan;
    shared.graph_json = plan_graph_json(without_values(graph.graph()));
    LAWSON_TRY(auto loaded, loaded_by(*engine, shared, device.device(), graph.pass()));
    plans_.put(id, loaded);
    return {};
  }

  PlanCache& plans() { return plans_; }
  void set_single_flight(bool value) {
    plans_.set_single_flight(value);
    verdicts_.set_single_flight(value);
    built_.set_single_flight(value);
  }
  VerdictCache& verdicts() { return verdicts_; }
  const Chooser& chooser() const { return *chooser_; }

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
    if (Device cpu = cpu_device(); name == cpu.name) return cpu;
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

  // All of what was asked; the parts outlive the answer.
  struct Question {
    Engine& engine;
    const KnownGraph& graph;
    const KnownDevice& known;
    const Options& options;
    bool is_judged = false;  // by this very call, whose verdict is not kept yet

    const Device& device() const { return known.device(); }
    bool is_remote() const { return needs_worker(device()); }
  };

  static diag::Subject subject_of(const Question& question, std::string_view key) {
    return {question.engine.name(), question.graph.pass(), key, question.device().ordinal};
  }

  // LAWSON_DEBUG: which engine answers, and why no other does. With `reasons` it refuses.
  void tell_choice(const Question& question, std::string_view key, std::string_view plan,
                   const std::vector<Reason>& reasons = {}) const {
    const int level = diag::choice_level();
    if (level == 0) return;
    std::vector<diag::Passed> passed;
    for (const Reason& reason : reasons) {
      passed.push_back({std::string{question.engine.name()}, reason.message});
    }
    const Device& device = question.device();
    for (const auto& other : config_.engines) {
      if (level < 2 || other.get() == &question.engine) continue;
      passed.push_back({std::string{other->name()},
                        other->accepts(device)
                            ? fmt::format("'{}' was named, or is the first choice for '{}'",
                                          question.engine.name(), device.name)
                            : wrong_kind_text(*other, device)});
    }
    diag::Subject subject = subject_of(question, key);
    if (!reasons.empty()) subject.engine = {};
    diag::print_choice({question.graph.graph().name, subject, device.name, plan}, passed);
  }

  static Verdict wrong_device(const Question& question) {
    const Device& device = question.device();
    Verdict verdict;
    verdict.decision = Decision::unsupported;
    verdict.evidence = device.evidence;
    verdict.engine = std::string{question.engine.name()};
    verdict.target = device.name;
    verdict.key = make_key(question.graph.graph(), device, verdict.engine, "", question.options);
    verdict.reasons.push_back(
        {"engine_device", wrong_kind_text(question.engine, device), "engine"});
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

  static bool is_tuned(const Question& question) {
    return question.options.tuning != Tuning::off && !question.is_remote();
  }

  // The host's engines answer faster than a disk.
  static bool is_stored(const Question& question, const std::string& key) {
    return !key.empty() && question.options.tuning == Tuning::off &&
           question.device().kind == Device::Kind::cuda;
  }

  // CUDA does not survive a fork: neither its contexts nor what was loaded into them.
  static Status usable_here(const Device& device) {
    if (device.kind != Device::Kind::cuda || !device.present()) return {};
    return gpu_survived_fork();
  }

  static Status gpu_survived_fork() {
    const int used = cuda_used_in().load(std::memory_order_relaxed);
    if (used < 0 || used == fork_count()) return {};
    return error(ErrorKind::unavailable,
                 "this process was forked from one that had used its GPUs, and CUDA does not "
                 "survive a fork: start such processes anew (Python: the 'spawn' start method), or "
                 "fork before the first use of a GPU; the cpu engine works here");
  }

  // The fork_count() of the process that found GPUs first; -1: none did.
  static std::atomic<int>& cuda_used_in() {
    static std::atomic<int> process{-1};
    return process;
  }

  // The key of a question, with the build of the engine that answers it; empty where there is none,
  // which whoever is asked next says better.
  std::string key_of(const Question& question) {
    const auto version = question.is_remote() ? workers_.version() : question.engine.version();
    if (!version.ok() || version->empty()) return {};
    return make_key(question.graph.graph(), question.device(), question.engine.name(), *version,
                    question.options);
  }

  VerdictPtr known_verdict(const Question& question) {
    Options options = question.options;
    for (const Strength strength :
         {options.strength, Strength::verified, Strength::built, Strength::judged}) {
      options.strength = strength;
      auto known = verdicts_.find(
          verdict_question(question.graph, question.known, question.engine.name(), options));
      if (known != nullptr && settles(*known, question.options.strength)) return known;
    }
    return nullptr;
  }

  Result<Verdict> judge_afresh(const Question& question) {
    const std::string key = question.options.tuning == Tuning::off ? key_of(question) : "";
    diag::record(diag::Event::miss, subject_of(question, key));
    const diag::Span span{"probe", subject_of(question, key)};
    LAWSON_TRY(Verdict verdict, stored_or_judged(question, key));
    if (verdict.decision != Decision::supported) {
      tell_choice(question, verdict.key, "", verdict.reasons);
      return verdict;
    }
    Question judged = question;
    judged.is_judged = true;
    if (is_tuned(question)) {
      // What the engine prefers is not what will run.
      verdict.strength = Strength::judged;
      verdict.plan_id.clear();
      verdict.plan_name.clear();
      verdict.workspace_bytes.reset();
    } else if (question.options.tuning != Tuning::off) {
      verdict.choice = untuned_text(question.device(), question.options);
    } else if (const auto kept = kept_plan(question, key)) {
      // What will run. Where the device is, the disk's plan counts once it is loaded there.
      if (question.is_remote()) {
        take_plan(verdict, *kept);
      } else if (const auto plan = plan_for(judged); plan.ok()) {
        take_plan(verdict, *plan);
      }
    }
    if (verdict.strength >= question.options.strength) {
      tell_choice(question, verdict.key, verdict.plan_name);
      return verdict;
    }
    auto plan = plan_for(judged);
    verdict.strength = Strength::built;
    if (!plan.ok()) return not_built(std::move(verdict), std::move(plan).error());
    take_plan(verdict, *plan);
    if (question.options.strength == Strength::built) return verdict;
    return verify(question, std::move(verdict), *plan);
  }

  // Stored verdicts answer for devices that are here as little or as much as they were: evidence
  // is a part of what is asked.
  Result<Verdict> stored_or_judged(const Question& question, const std::string& key) {
    // Where the device is, a plan is built beside the verdict, to be kept; a worker builds while it
    // judges. What is verified is always executed here.
    Options asked = question.options;
    if (!question.is_remote() || asked.strength == Strength::verified)
      asked.strength = Strength::judged;
    const Device& device = question.device();
    const bool stores = is_stored(question, key);
    const std::string refused = stores ? refusal_key(key, question.graph) : "";
    if (stores) {
      const auto fits = [&](const std::optional<Verdict>& stored) {
        return stored && stored->engine == question.engine.name() &&
               (stored->evidence == Evidence::live) == device.present();
      };
      auto stored = store_->verdict(key, asked.strength, question.is_remote());
      if (!fits(stored) || stored->decision != Decision::supported) {
        stored = store_->verdict(refused, asked.strength, question.is_remote());
      }
      if (fits(stored)) {
        stored->key = key;
        stored->target = device.name;
        stored->evidence = device.present() ? Evidence::live : device.evidence;
        return std::move(*stored);
      }
    }
    LAWSON_TRY(Verdict verdict, judge(question, asked));
    if (stores && verdict.key == key) {
      Verdict kept = verdict;
      if (kept.decision != Decision::supported) kept.key = refused;
      store_->keep(kept);
    }
    return verdict;
  }

  Result<Verdict> judge(const Question& question, const Options& asked) {
    const ir::Graph& graph = question.graph.graph();
    auto verdict = question.is_remote() ? workers_.probe(graph, question.device(), asked)
                                        : question.engine.probe(graph, question.device(), asked);
    const diag::Subject subject =
        subject_of(question, verdict.ok() ? std::string_view{verdict->key} : "");
    if (!question.engine.tells_graphs()) diag::record(diag::Event::create_graph, subject);
    if (!verdict.ok()) return verdict;
    diag::record(diag::Event::verdict, subject);
    if (asked.strength == Strength::built && verdict->strength == Strength::built) {
      diag::record(diag::Event::build_plans, subject);
    }
    return verdict;
  }

  // What bundles or the store have for the question.
  std::optional<Plan> kept_plan(const Question& question, const std::string& key) {
    if (auto plan = plan_of_layers(question, key)) return plan;
    return stored_plan(question, key);
  }

  std::optional<Plan> plan_of_layers(const Question& question, const std::string& key) {
    const bool tunes = question.options.tuning != Tuning::off;
    if (config_.bundle_path.empty() || key.empty() || tunes) return std::nullopt;
    const std::string fingerprint = lawson::fingerprint(question.device());
    const auto version = question.is_remote() ? workers_.version() : question.engine.version();
    return layers_.plan(key, {question.engine.name(), version.ok() ? *version : "",
                              question.device().name, fingerprint});
  }

  // One that was chosen without the device is none of a process that has it, and the other way
  // round.
  std::optional<Plan> stored_plan(const Question& question, const std::string& key) {
    if (!is_stored(question, key)) return std::nullopt;
    auto plan = store_->plan(key, question.is_remote());
    if (plan && plan->deviceless == question.is_remote() &&
        plan->engine == question.engine.name()) {
      return plan;
    }
    return std::nullopt;
  }

  using PlanPtr = std::shared_ptr<const Plan>;
  using LoadedPtr = std::shared_ptr<Loaded>;

  // With the names and values of who asks.
  Result<Plan> plan_for(const Question& question) {
    Plan plan;
    if (is_tuned(question)) {
      LAWSON_TRY(Tuned tuned, chosen(question, false));
      plan = std::move(tuned.plan);
    } else {
      LAWSON_TRY(const PlanPtr shared, shared_plan(question, nullptr));
      plan = *shared;
    }
    plan.graph_json = plan_graph_json(question.graph.graph());
    return plan;
  }

  // Without anybody's values. `loaded`: what it was tried with, where that was necessary.
  Result<PlanPtr> shared_plan(const Question& question, LoadedPtr* loaded) {
    const QuestionId id =
        plan_question(question.graph, question.known, question.engine.name(), question.options);
    if (auto ready = plans_.find(id)) return std::make_shared<const Plan>(ready->plan());
    return built_.get(
        id,
        [&]() -> Result<PlanPtr> {
          const std::string key = key_of(question);
          const diag::Span span{"compile", subject_of(question, key)};
          LoadedPtr tried;
          std::optional<Plan> kept;
          // The disk's plans have the values and names of who compiled them.
          const std::string graph_json = plan_graph_json(without_values(question.graph.graph()));
          if (auto plan = plan_of_layers(question, key)) {
            plan->graph_json = graph_json;
            if (loads(question, *plan, tried, "a bundle's plan")) kept = std::move(plan);
          }
          if (!kept) {
            if (auto plan = stored_plan(question, key)) {
              plan->graph_json = graph_json;
              if (loads(question, *plan, tried, "")) kept = std::move(plan);
            }
          }
          if (loaded != nullptr) *loaded = std::move(tried);
          if (kept) {
            tell_choice(question, kept->key, kept->plan_name);
            return std::make_shared<const Plan>(*std::move(kept));
          }
          LAWSON_TRY(Plan plan, build(question));
          tell_choice(question, plan.key, plan.plan_name);
          if (is_stored(question, key) && plan.key == key) store_->keep(plan);
          return std::make_shared<const Plan>(std::move(plan));
        },
        question.options.deadline_ms);
  }

  // Whether a plan from the disk is of use; a device that is not here cannot say.
  bool loads(const Question& question, const Plan& plan, LoadedPtr& loaded,
             std::string_view layer) {
    if (question.is_remote()) return true;
    auto tried = loaded_by(question.engine, plan, question.device(), question.graph.pass());
    if (tried.ok()) {
      loaded = *std::move(tried);
      return true;
    }
    const std::string& why = tried.error().message;
    if (layer.empty()) {
      store_->reject(EntryKind::plan, plan.key, why);
    } else if (!layer_warned_.exchange(true)) {
      warn_(fmt::format("{}, {}, is of no use and is built anew: {}", layer, plan.plan_id, why));
    }
    return false;
  }

  Result<LoadedPtr> build_and_load(const Question& question) {
    // The judged graph is the one that is compiled.
    const VerdictPtr judged = known_verdict(question);
    const diag::Event found = judged != nullptr ? diag::Event::hit : diag::Event::miss;
    LoadedPtr loaded;
    PlanPtr plan;
    Status made;
    if (is_tuned(question)) {
      auto tuned = chosen(question, false);
      if (tuned.ok()) {
        tuned->plan.graph_json = plan_graph_json(without_values(question.graph.graph()));
        plan = std::make_shared<const Plan>(std::move(tuned->plan));
      } else {
        made = std::move(tuned).error();
      }
    } else {
      auto shared = shared_plan(question, &loaded);
      if (shared.ok()) {
        plan = *shared;
      } else {
        made = std::move(shared).error();
      }
    }
    diag::record(found, subject_of(question, plan != nullptr ? std::string_view{plan->key} : ""));
    if (!made.ok()) {
      if (made.error().kind == ErrorKind::unsupported) {
        refusals_.put(refusal_id(question), std::make_shared<const Error>(made.error()));
      }
      return made.error();
    }
    if (loaded != nullptr) return loaded;
    return loaded_by(question.engine, *plan, question.device(), question.graph.pass());
  }

  // Whose words a refusal is in does not depend on the strength that was asked for.
  static QuestionId refusal_id(const Question& question) {
    Options options = question.options;
    options.strength = Strength::judged;
    return verdict_question(question.graph, question.known, question.engine.name(), options);
  }

  Status not_refused(const Question& question) {
    const auto why = refusals_.find(refusal_id(question));
    if (why == nullptr) return {};
    diag::record(diag::Event::hit, subject_of(question, ""));
    return *why;
  }

  static Result<LoadedPtr> loaded_by(Engine& engine, const Plan& plan, const Device& device,
                                     std::string_view pass) {
    const diag::Span span{diag::Stage::load, {engine.name(), pass, plan.key, device.ordinal}};
    LAWSON_TRY(LoadedPtr loaded, engine.load(plan, device));
    if (loaded == nullptr) {
      return error(ErrorKind::internal, "an engine loaded a plan and handed out nothing");
    }
    loaded->label = {pass, device.ordinal};
    diag::record(diag::Event::load, plan::subject_of(*loaded));
    return loaded;
  }

  // Without reading the whole graph: it is for diagnostics only.
  static std::string_view pass_of_plan(const Plan& plan) {
    const auto has = [&](std::string_view op) {
      return plan.graph_json.find(fmt::format("\"op\":\"{}\"", op)) != std::string::npos;
    };
    if (has("attention_backward")) return diag::kBackward;
    return has("attention") ? diag::kForward : diag::kFusion;
  }

  Result<Plan> build(const Question& question) {
    const Options& options = question.options;
    const ir::Graph shared = without_values(question.graph.graph());
    const bool is_new = !question.is_judged && known_verdict(question) == nullptr;
    auto plan = [&]() -> Result<Plan> {
      if (question.is_remote()) {
        return workers_.compile(shared, question.device(), options, std::nullopt);
      }
      const Deadline deadline{options.deadline_ms};
      return question.engine.compile(shared, question.device(), options, std::nullopt,
                                     deadline.token());
    }();
    const diag::Subject subject =
        subject_of(question, plan.ok() ? std::string_view{plan->key} : "");
    if (is_new && !question.engine.tells_graphs()) {
      diag::record(diag::Event::create_graph, subject);
    }
    diag::record(diag::Event::build_plans, subject);
    if (!plan.ok()) {
      if (question.is_remote() || plan.error().kind != ErrorKind::cancelled) return plan;
      return error(ErrorKind::cancelled, "the deadline of {:g} ms passed before a plan was built",
                   options.deadline_ms);
    }
    plan->deviceless = question.is_remote();
    plan->graph_json = plan_graph_json(shared);
    if (question.is_remote() && options.tuning != Tuning::off) {
      plan->choice = untuned_text(question.device(), options);
    }
    return plan;
  }

  Result<Tuned> chosen(const Question& question, bool retune) {
    Engine* reference = this->engine(kReference);
    if (reference == nullptr) {
      return error(ErrorKind::unavailable,
                   "tuning checks the numbers of what it chooses with the reference engine, which "
                   "is not here");
    }
    Engine* forward = this->engine(kCpu);
    return chooser_->choose(
        question.graph.graph(), question.device(), question.options,
        {question.engine, *reference, forward != nullptr ? *forward : *reference}, retune);
  }

  static std::string untuned_text(const Device& device, const Options& options) {
    return fmt::format(
        "not tuned ({}): the engine's first choice from its table, for '{}' is not on this machine",
        to_string(options.tuning), device.name);
  }

  Result<Engine*> accepting(const KnownGraph& graph, const KnownDevice& device,
                            std::string_view name, const Options& options) const {
    LAWSON_TRY(Engine * engine, choose(device.device(), name));
    if (engine->accepts(device.device())) {
      LAWSON_CHECK(usable_here(device.device()));
      return engine;
    }
    const Verdict verdict = wrong_device({*engine, graph, device, options});
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

  Result<Verdict> verify(const Question& question, Verdict verdict, const Plan& plan) {
    const Device& device = question.device();
    Engine* reference = this->engine(kReference);
    if (reference == nullptr) {
      return error(ErrorKind::unavailable,
                   "strength 'verified' compares with the reference engine, which is not here");
    }
    const auto compared = run_and_compare(question.graph.graph(), plan, question.engine, *reference,
                                          device, kVerifySeed);
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
    LAWSON_CHECK(gpu_survived_fork());
    std::vector<Device> all;
    for (const auto& engine : config_.engines) {
      LAWSON_TRY(auto live, engine->live_devices());
      for (Device& device : live) all.push_back(std::move(device));
    }
    int none = -1;
    if (!all.empty()) cuda_used_in().compare_exchange_strong(none, fork_count());
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
  std::function<void(std::string_view)> warn_;
  WorkerClient workers_;
  PlanCache plans_;
  VerdictCache verdicts_;
  RefusalCache refusals_;
  SharedCache<const Plan> built_;
  Layers layers_;
  std::atomic<bool> layer_warned_{false};
  std::shared_ptr<Store> store_;
  std::optional<Chooser> chooser_;
};

Planner::Planner(PlannerConfig config) : impl_{std::make_unique<Impl>(std::move(config))} {}
Planner::~Planner() = default;

Result<Planner::VerdictPtr> Planner::verdict(const KnownGraph& graph, const KnownDevice& device,
                                             std::string_view engine, const Options& options) {
  return impl_->verdict(graph, device, engine, options);
}

Planner::VerdictPtr Planner::known_verdict(const KnownGraph& graph, const KnownDevice& device,
                                           std::string_view engine, const Options& options) {
  return impl_->known_verdict(graph, device, engine, options);
}

Result<Verdict> Planner::probe(const ir::Graph& graph, const Device& device,
                               std::string_view engine, const Options& options) {
  LAWSON_TRY(const VerdictPtr verdict,
             impl_->verdict(KnownGraph{graph}, KnownDevice{device}, engine, options));
  return *verdict;
}

Result<Plan> Planner::compile(const ir::Graph& graph, const Device& device, std::string_view engine,
                              const Options& options) {
  return impl_->compile(KnownGraph{graph}, KnownDevice{device}, engine, options);
}

Result<std::string> Planner::key(const ir::Graph& graph, const Device& device,
                                 std::string_view engine, const Options& options) {
  return impl_->key(KnownGraph{graph}, KnownDevice{device}, engine, options);
}

Result<Tuned> Planner::tune(const ir::Graph& graph, const Device& device, std::string_view engine,
                            const Options& options, bool retune) {
  return impl_->tune(KnownGraph{graph}, KnownDevice{device}, engine, options, retune);
}

Result<std::shared_ptr<Loaded>> Planner::load(const Plan& plan, const Device& device) {
  return impl_->load(plan, device);
}

Status Planner::execute(const Plan& plan, const Loaded& loaded, std::span<const Binding> bindings,
                        void* workspace, std::size_t workspace_size, void* stream) {
  return impl_->execute(plan, loaded, bindings, workspace, workspace_size, stream);
}

Status Planner::prepare_graph(const Plan& plan, const Loaded& loaded, GraphUse use,
                              std::span<const Binding> bindings, void* workspace,
                              std::size_t workspace_size, void* graph) {
  return impl_->prepare_graph(plan, loaded, use, bindings, workspace, workspace_size, graph);
}

Result<std::shared_ptr<Loaded>> Planner::acquire(const KnownGraph& graph, const KnownDevice& device,
                                                 std::string_view engine, const Options& options,
                                                 void* stream) {
  return impl_->acquire(graph, device, engine, options, stream);
}

Result<std::shared_ptr<Loaded>> Planner::acquire(const ir::Graph& graph, const Device& device,
                                                 std::string_view engine, const Options& options,
                                                 void* stream) {
  return impl_->acquire(KnownGraph{graph}, KnownDevice{device}, engine, options, stream);
}

Status Planner::keep(const Plan& plan, const ir::Graph& graph, const Device& device,
                     const Options& options) {
  return impl_->keep(plan, KnownGraph{graph}, KnownDevice{device}, options);
}

PlanCache& Planner::cache() {
  return impl_->plans();
}

VerdictCache& Planner::verdicts() {
  return impl_->verdicts();
}

void Planner::set_single_flight(bool value) {
  impl_->set_single_flight(value);
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
