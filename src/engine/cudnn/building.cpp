#include "engine/cudnn/building.h"

#include <algorithm>
#include <condition_variable>
#include <set>
#include <thread>

#include "base/lazy.h"
#include "diag/diag.h"
#include "engine/cudnn/control.h"
#include "engine/cudnn/facts.h"
#include "engine/cudnn/handles.h"
#include "engine/cudnn/loaded_plan.h"
#include "engine/cudnn/reasons.h"
#include "engine/cudnn/short_attention.h"
#include "engine/cudnn/tuning_table.h"
#include "engine/cudnn/turned.h"

namespace lawson::cudnn {
namespace {

constexpr int kKernelKnob = 24;        // CUDNN_KNOB_TYPE_KERNEL_CFG: the kernel, tiles and pipeline
constexpr std::int64_t kCublasLt = 0;  // the engine
constexpr int kSplitKnob = 17;         // CUDNN_KNOB_TYPE_SPLIT_K_SLC: parts of K, summed afterwards
// A product of fewer tiles than this leaves most of a GPU idle unless a long K is split.
constexpr std::int64_t kFewTiles = 64;
constexpr std::int64_t kManyTiles = 128;
constexpr std::int64_t kTile = 128;
constexpr std::int64_t kLongK = 1024;
// What quick tuning looks at: with so many on the list, the rest need not be asked for.
constexpr std::size_t kQuick = 8;

void append_new(std::vector<std::string>& list, const std::string& name) {
  if (std::find(list.begin(), list.end(), name) == list.end()) list.push_back(name);
}

// The turned graph, judged; nullptr: there is none, or cuDNN does not take it.
Lowered* turned_of(Judged& judged, const Question& question) {
  if (judged.turned || judged.turned_refused || !judged.again_turned) return judged.turned.get();
  judged.turned_refused = true;
  auto lowered = judged.again_turned();
  const auto handle = handle_for(question.device);
  if (lowered.ok()) diag::record(diag::Event::create_graph);
  if (lowered.ok() && handle.ok() && !(*lowered)->judge(handle->get())) {
    judged.turned = std::move(lowered).value();
  }
  return judged.turned.get();
}

// cuDNN gives graphs to cuBLASLt whose epilogue computes something else: relu without the clip or
// the slope (measured on an H200: relu6 beyond 6), and the tanh form of gelu for gelu.
bool is_wrong_epilogue(const ir::Graph& graph, std::string_view plan) {
  const std::string_view name = plain_name(plan);
  if (name != "eng0" && !name.starts_with("eng0_")) return false;
  return std::any_of(graph.nodes.begin(), graph.nodes.end(), [](const ir::Node& node) {
    const auto* unary = std::get_if<ir::Unary>(&node.op);
    return unary != nullptr &&
           (unary->kind == ir::UnaryKind::relu6 || unary->kind == ir::UnaryKind::leaky_relu ||
            unary->kind == ir::UnaryKind::gelu);
  });
}

// Engine 2 builds a kernel for a seventh of the device where cuDNN does not know what that holds at
// once (occupancy.h).
bool needs_occupancy(std::string_view plan) {
  const std::string_view name = plain_name(plan);
  return name == "eng2" || name.starts_with("eng2_");
}

// Nobody who does not name it gets it.
bool is_passed_over(const Judged& judged, const Question& question, const std::string& plan) {
  return is_wrong_epilogue(question.graph, plan) ||
         (!judged.lowered->knows_occupancy() && needs_occupancy(plan));
}

// The judged object that a plan of this name is of; nullptr: cuDNN does not take it.
Lowered* owner_of(Judged& judged, const Question& question, std::string_view name) {
  return is_turned(name) ? turned_of(judged, question) : judged.lowered.get();
}

bool offers(Judged& judged, const Question& question, const std::string& name) {
  Lowered* const lowered = owner_of(judged, question, name);
  std::size_t index = 0;
  return lowered != nullptr && !lowered->find_plan(std::string{plain_name(name)}, index);
}

void find_preferred(Judged& judged, const Question& question) {
  if (!judged.preferred.empty()) return;
  if (const auto workload = workload_of(question.graph)) {
    const auto nearest =
        nearest_row(tuning_tables(), question.device, question.found.cudnn_version, *workload);
    if (nearest) {
      for (const RankedPlan& plan : nearest->row->plans) judged.preferred.push_back(plan.name);
      judged.from_table = judged.preferred.size();
      judged.basis = nearest->text();
    }
  } else if (std::string name = plan_for_few_keys(question.graph, question.device,
                                                  question.found.cudnn_version, judged.plan_names);
             !name.empty()) {
    judged.preferred = {std::move(name)};
    judged.from_table = 1;
    judged.basis = kFewKeysBasis;
  }
  for (const std::string& name : judged.plan_names) append_new(judged.preferred, name);
  const auto wrong = [&](const std::string& name) {
    return is_passed_over(judged, question, name);
  };
  judged.from_table -= static_cast<std::size_t>(std::count_if(
      judged.preferred.begin(),
      judged.preferred.begin() + static_cast<std::ptrdiff_t>(judged.from_table), wrong));
  std::erase_if(judged.preferred, wrong);
}

std::vector<std::string> configs_of(const EngineKnobs& engine,
                                    const std::vector<std::int64_t>& splits) {
  std::vector<std::string> names;
  const auto knob = [&](int type) -> const EngineKnobs::Knob* {
    for (const EngineKnobs::Knob& candidate : engine.knobs) {
      if (candidate.type == type) return &candidate;
    }
    return nullptr;
  };
  const EngineKnobs::Knob* kernel = knob(kKernelKnob);
  if (kernel == nullptr) return {fmt::format("eng{}", engine.engine)};
  for (std::int64_t value = kernel->least; value <= kernel->most; value += kernel->step) {
    names.push_back(fmt::format("eng{}_k{}={}", engine.engine, kKernelKnob, value));
    if (knob(kSplitKnob) == nullptr) continue;
    for (const std::int64_t parts : splits) {
      names.push_back(
          fmt::format("eng{}_k{}={}_k{}={}", engine.engine, kSplitKnob, parts, kKernelKnob, value));
    }
  }
  return names;
}

// In how many parts K may be worth splitting.
std::vector<std::int64_t> splits_of(const ir::Graph& graph) {
  const auto workload = workload_of(graph);
  if (!workload || workload->k < kLongK) return {};
  const auto tiles = [](std::int64_t size) { return (size + kTile - 1) / kTile; };
  const std::int64_t count = tiles(workload->m) * tiles(workload->n) * workload->batch;
  if (count >= kFewTiles) return {};
  std::int64_t parts = 2;
  while (parts < 16 && parts * count < kManyTiles) parts *= 2;
  return {parts, 2 * parts};
}

// What cuDNN's heuristics think of the turned graph, and cuBLASLt's plans of it.
void add_turned(Judged& judged, const Question& question, std::vector<std::string>& all) {
  Lowered* lowered = turned_of(judged, question);
  if (lowered == nullptr) return;
  for (const std::string& name : lowered->plan_names()) append_new(all, turned_name(name));
  for (const EngineKnobs& engine : lowered->engines()) {
    if (engine.engine != kCublasLt) continue;
    for (const std::string& name : configs_of(engine, {})) {
      if (offers(judged, question, turned_name(name))) append_new(all, turned_name(name));
    }
  }
}

void find_all(Judged& judged, const Question& question) {
  if (!judged.all.empty()) return;
  std::vector<std::string> all;
  const auto keep = [&] {
    std::erase_if(all,
                  [&](const std::string& name) { return is_passed_over(judged, question, name); });
    judged.all = std::move(all);
  };
  for (const std::string& name : judged.preferred) {
    if (offers(judged, question, name)) all.push_back(name);
  }
  if (has_matmul(question.graph)) {
    // Their failure says only that they have nothing to add.
    static_cast<void>(judged.lowered->add_other_heuristics());
    for (const std::string& name : judged.lowered->plan_names()) append_new(all, name);
    if (question.options.tuning == Tuning::quick && all.size() >= kQuick) {
      keep();
      return;
    }
    add_turned(judged, question, all);
    // Tuning builds no config that was never among the fastest on such a device.
    std::set<std::string> proven;
    if (question.options.tuning == Tuning::exhaustive) {
      proven = proven_plans(tuning_tables(), question.device, question.found.cudnn_version);
    }
    const std::vector<std::int64_t> splits = splits_of(question.graph);
    for (const EngineKnobs& engine : judged.lowered->engines()) {
      for (const std::string& name : configs_of(engine, splits)) {
        if (!proven.empty() && !proven.contains(name)) continue;
        if (offers(judged, question, name)) append_new(all, name);
      }
    }
  }
  keep();
}

// As many graphs as there are cores are built at once beyond the judged ones: each has its own
// object and, while it lasts, a handle.
class Seat {
 public:
  Seat() {
    std::unique_lock lock{room().mutex};
    room().freed.wait(lock, [] { return room().taken < room().seats; });
    ++room().taken;
  }
  ~Seat() {
    {
      const std::lock_guard lock{room().mutex};
      --room().taken;
    }
    room().freed.notify_one();
  }
  Seat(const Seat&) = delete;
  Seat& operator=(const Seat&) = delete;

 private:
  struct Room {
    std::mutex mutex;
    std::condition_variable freed;
    unsigned seats = std::max(1U, std::thread::hardware_concurrency());
    unsigned taken = 0;
  };
  static Room& room() {
    static Lazy<Room> shared;
    return shared.get();
  }
};

Error refusal(std::vector<Reason> reasons, std::string_view fallback) {
  Error result = error(ErrorKind::unsupported, "{}",
                       reasons.empty() ? fallback : std::string_view{reasons.front().message});
  result.reasons = std::move(reasons);
  return result;
}

Error refusal_or_error(const StageError& failure, const Question& question) {
  const Fault fault = classify(failure, !question.device.present());
  if (fault != Fault::unsupported && fault != Fault::undecided) {
    return to_error(failure, fault, question.device);
  }
  return refusal(explain(failure, question.graph, question.device, question.found.cudnn_version),
                 failure.text);
}

// The first of `names` that compiles within the options. The first `optional` of them may be
// unknown to cuDNN.
using Find = std::function<Lowered*(const std::string& name)>;
Result<Built> build_first(const Find& find, const std::vector<std::string>& names,
                          std::size_t optional, const Question& question,
                          const std::stop_token& stop) {
  const auto& [graph, device, options, found] = question;
  std::vector<Reason> reasons;
  std::optional<StageError> not_compiled;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (stop.stop_requested()) return error(ErrorKind::cancelled, "compiling was cancelled");
    Lowered* const lowered = find(names[i]);
    std::size_t index = 0;
    if (lowered == nullptr) {
      if (i < optional) continue;
      return refusal(
          {{"no_such_plan",
            fmt::format("cuDNN does not take the graph that plan {} is of", names[i]), ""}},
          "");
    }
    if (const Failure failure = lowered->find_plan(std::string{plain_name(names[i])}, index)) {
      if (i < optional) continue;
      return refusal_or_error(*failure, question);
    }
    if (const Failure failure = lowered->build(index)) {
      const Fault fault = classify(*failure, !device.present());
      if (fault == Fault::compile_failed) {
        not_compiled = *failure;
      } else if (fault != Fault::unsupported) {
        return to_error(*failure, fault, device);
      }
      // Passed over for its workspace before it was built: said by check_support already.
      if (failure->text.find("Deselecting") != std::string::npos) continue;
      for (Reason& reason : explain(*failure, graph, device, found.cudnn_version)) {
        if (std::find(reasons.begin(), reasons.end(), reason) == reasons.end()) {
          reasons.push_back(std::move(reason));
        }
      }
      continue;
    }
    Built built;
    built.name = is_turned(names[i]) ? turned_name(lowered->built_name()) : lowered->built_name();
    if (const Failure failure = lowered->serialize(built.bytes)) {
      return to_error(*failure, classify(*failure, !device.present()), device);
    }
    built.workspace = whole_workspace(built.bytes);
    if (options.workspace_limit >= 0 && built.workspace > options.workspace_limit) {
      reasons.push_back({"workspace",
                         fmt::format("plan {} needs a workspace of {} bytes; {} are allowed",
                                     built.name, built.workspace, options.workspace_limit),
                         "workspace_limit"});
      continue;
    }
    return built;
  }
  if (not_compiled && !control_plan_builds(device)) {
    return to_error(*not_compiled, Fault::compile_failed, device);
  }
  return refusal(std::move(reasons), "no plan was built");
}

}  // namespace

Result<std::vector<Candidate>> candidates(Judged& judged, const Question& question) {
  if (!judged.lowered) return std::vector<Candidate>{{kNothing}};
  const std::lock_guard lock{judged.mutex};
  if (question.device.present()) LAWSON_CHECK(driver_on(question.device));
  find_preferred(judged, question);
  find_all(judged, question);
  std::vector<Candidate> list;
  for (const std::string& name : judged.all) list.push_back({name});
  return list;
}

Result<Built> build(Judged& judged, const Question& question,
                    const std::optional<Candidate>& candidate, const std::stop_token& stop) {
  if (!judged.lowered) return Built{kNothing, {}, 0, {}};
  if (question.device.present()) LAWSON_CHECK(driver_on(question.device));
  std::unique_lock lock{judged.mutex, std::defer_lock};
  const Find own = [&](const std::string& name) { return owner_of(judged, question, name); };
  if (!candidate) {
    lock.lock();
    find_preferred(judged, question);
    if (judged.preferred.empty()) {
      return refusal({{"known_defect",
                       "cuDNN offers cuBLASLt's plans alone, whose epilogues compute another "
                       "activation than the graph's",
                       ""}},
                     "");
    }
    LAWSON_TRY(Built built, build_first(own, judged.preferred, judged.from_table, question, stop));
    const auto table = judged.preferred.begin() + static_cast<std::ptrdiff_t>(judged.from_table);
    if (std::find(judged.preferred.begin(), table, built.name) != table) {
      built.basis = judged.basis;
    }
    return built;
  }
  // Lists have none of these; a caller may name one.
  if (is_wrong_epilogue(question.graph, candidate->name)) {
    return refusal({{"known_defect",
                     fmt::format("plan {} is cuBLASLt's, whose epilogues compute another "
                                 "activation than the graph's",
                                 candidate->name),
                     ""}},
                   "");
  }
  const std::vector<std::string> named{candidate->name};
  if (lock.try_lock()) return build_first(own, named, 0, question, stop);
  const Seat seat;
  if (stop.stop_requested()) return error(ErrorKind::cancelled, "compiling was cancelled");
  const Judged::Lower& fresh = is_turned(candidate->name) ? judged.again_turned : judged.again;
  if (!fresh) return build_first([](const auto&) { return nullptr; }, named, 0, question, stop);
  LAWSON_TRY(const auto lowered, fresh());
  LAWSON_TRY(const Handle handle, handle_for(question.device));
  diag::record(diag::Event::create_graph);
  if (const Failure failure = lowered->judge(handle.get())) {
    return refusal_or_error(*failure, question);
  }
  return build_first([&](const auto&) { return lowered.get(); }, named, 0, question, stop);
}

}  // namespace lawson::cudnn
