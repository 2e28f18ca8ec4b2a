#include "plan/chooser.h"

#include <algorithm>
#include <chrono>

#include "plan/question.h"

namespace lawson::plan {
namespace {

constexpr std::size_t kMaxChosen = 4096;

// What is bound at run time is no part of a question: a choice has nobody's defaults, and each
// caller gets the names and values of the graph that it asked with.
void set_graph(Plan& plan, const ir::Graph& graph) {
  plan.graph_json = plan_graph_json(graph);
}

// Is it worth being kept? Not the best of what a deadline left, and nothing that was not timed.
bool is_lasting(const TuningReport& report) {
  if (report.deadline_passed) return false;
  std::size_t usable = 0;
  bool timed = false;
  for (const CandidateReport& candidate : report.candidates) {
    timed = timed || candidate.rounds > 0;
    usable += candidate.standing == Standing::chosen || candidate.standing == Standing::not_timed;
  }
  return timed || usable == 1;
}

// What an earlier report says of candidates that were not tried again.
void add_untried(TuningReport& report, const TuningReport& earlier) {
  for (const CandidateReport& old : earlier.candidates) {
    const bool tried =
        std::any_of(report.candidates.begin(), report.candidates.end(),
                    [&](const CandidateReport& now) { return now.name == old.name; });
    if (!tried) report.candidates.push_back(old);
  }
}

}  // namespace

Chooser::Chooser(Result<std::shared_ptr<Store>> store, TunerConfig tuner)
    : environment_{store.ok() ? Status{} : Status{store.error()}},
      stored_{store.ok() ? std::move(store).value() : std::make_shared<Store>(Store::Config{})},
      tuner_{tuner} {}

Result<Tuned> Chooser::choose(const ir::Graph& graph, const Device& device, const Options& options,
                              const Engines& engines, bool retune) {
  if (!environment_.ok()) return environment_.error();
  const auto asked = std::chrono::steady_clock::now();
  std::unique_lock lock{tuning_, std::defer_lock};
  if (options.deadline_ms < 0) {
    lock.lock();
  } else {
    // By the system's clock: the thread sanitizer of GCC 12 does not know pthread_mutex_clocklock,
    // which waits by the steady one.
    const auto until = std::chrono::system_clock::now() +
                       std::chrono::microseconds{
                           static_cast<std::int64_t>(1e3 * std::min(options.deadline_ms, 1e9))};
    if (!lock.try_lock_until(until)) return unchosen(graph, device, options, engines.engine);
  }
  const std::chrono::duration<double, std::milli> waited = std::chrono::steady_clock::now() - asked;
  const TunedPlans::Question question{graph, device, engines.engine, options};
  const Id id{question.id(), device.ordinal};
  if (auto known = chosen(id); known && !retune) {
    set_graph(known->plan, graph);
    return std::move(*known);
  }
  LAWSON_TRY(Tuned tuned, find_or_tune(question, engines, retune, waited.count()));
  tuned.built.clear();
  set_graph(tuned.plan, graph);
  const std::lock_guard guard{mutex_};
  if (chosen_.size() >= kMaxChosen) chosen_.erase(chosen_.begin());
  chosen_.insert_or_assign(id, tuned);
  return tuned;
}

std::optional<Tuned> Chooser::chosen(const Id& id) const {
  const std::lock_guard lock{mutex_};
  const auto known = chosen_.find(id);
  return known == chosen_.end() ? std::nullopt : std::optional{known->second};
}

std::optional<TuningReport> Chooser::report_of(std::string_view plan_id) const {
  const std::lock_guard lock{mutex_};
  for (const auto& [id, tuned] : chosen_) {
    if (tuned.plan.plan_id == plan_id) return tuned.report;
  }
  return std::nullopt;
}

Result<Tuned> Chooser::find_or_tune(const TunedPlans::Question& question, const Engines& engines,
                                    bool retune, double waited_ms) {
  Tuner tuner(engines.engine, engines.reference, engines.forward, tuner_);
  const ir::Graph shared = without_values(question.graph);
  const auto keep = [&](Tuned& tuned) {
    set_graph(tuned.plan, shared);
    for (Plan& plan : tuned.built) set_graph(plan, shared);
    if (is_lasting(tuned.report)) stored_.keep(question, tuned);
  };
  if (auto found = stored_.find(question)) {
    set_graph(found->plan, question.graph);
    for (Plan& plan : found->built) set_graph(plan, question.graph);
    if (!retune) {
      const auto loaded = engines.engine.load(found->plan, question.device);
      if (loaded.ok()) return std::move(*found);
      stored_.reject(question, loaded.error().message);
    } else {
      auto again = tuner.tune_again(question.graph, question.device, question.options,
                                    std::move(found->built), waited_ms);
      if (again.ok()) {
        add_untried(again->report, found->report);
        keep(*again);
        return again;
      }
      stored_.reject(question, again.error().message);
    }
  }
  LAWSON_TRY(Tuned tuned, tuner.tune(question.graph, question.device, question.options, waited_ms));
  keep(tuned);
  return tuned;
}

Result<Tuned> Chooser::unchosen(const ir::Graph& graph, const Device& device,
                                const Options& options, Engine& engine) {
  Tuned tuned;
  LAWSON_TRY(tuned.plan, engine.compile(graph, device, options, std::nullopt, {}));
  tuned.report.tuning = options.tuning;
  tuned.report.deadline_passed = true;
  tuned.report.choice = fmt::format(
      "tuned ({}): the engine's first choice: the deadline of {:g} ms passed while another plan "
      "was "
      "tuned",
      to_string(options.tuning), options.deadline_ms);
  tuned.plan.choice = tuned.report.choice;
  return tuned;
}

}  // namespace lawson::plan
