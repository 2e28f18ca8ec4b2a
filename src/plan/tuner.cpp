#include "plan/tuner.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <numeric>
#include <utility>

#include "plan/agreement.h"
#include "plan/oracle.h"
#include "plan/tasks.h"
#include "plan/verify.h"
#include "plan/work.h"

namespace lawson::plan {
namespace {

constexpr std::size_t kQuick = 8;

constexpr std::array kStandings{std::pair{Standing::chosen, "chosen"},
                                std::pair{Standing::slower, "slower"},
                                std::pair{Standing::not_timed, "not_timed"},
                                std::pair{Standing::not_built, "not_built"},
                                std::pair{Standing::workspace_limit, "workspace_limit"},
                                std::pair{Standing::wrong_result, "wrong_result"},
                                std::pair{Standing::failed, "failed"}};

// Milliseconds since it was made.
class Watch {
 public:
  double ms() const {
    const std::chrono::duration<double, std::milli> spent =
        std::chrono::steady_clock::now() - start_;
    return spent.count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

std::string text_of(const Error& error) {
  if (error.reasons.size() < 2) return error.message;
  std::vector<std::string> messages;
  for (const Reason& reason : error.reasons) messages.push_back(reason.message);
  return fmt::format("{}", fmt::join(messages, "; "));
}

struct Entry {
  CandidateReport report;
  std::optional<Plan> plan;
  std::optional<Error> error;
  std::shared_ptr<Loaded> loaded;

  void drop(Standing standing, std::string why) {
    report.standing = standing;
    report.failure = std::move(why);
    loaded.reset();
  }
  void fail(Error why) {
    drop(why.kind == ErrorKind::unsupported ? Standing::not_built : Standing::failed, text_of(why));
    error = std::move(why);
  }
};

class Session {
 public:
  Session(Engine& engine, Engine& reference, Engine& forward, const TunerConfig& config,
          const ir::Graph& graph, const Device& device, const Options& options, double waited_ms)
      : engine_{engine},
        reference_{reference},
        forward_{forward},
        config_{config},
        graph_{graph},
        device_{device},
        options_{options},
        waited_ms_{waited_ms} {
    report_.tuning = options.tuning;
  }

  Result<Tuned> run() {
    LAWSON_TRY(const std::vector<Candidate> candidates,
               engine_.candidates(graph_, device_, options_));
    for (const Candidate& candidate : candidates)
      entries_.emplace_back().report.name = candidate.name;
    std::size_t first = entries_.size();
    if (options_.tuning == Tuning::quick) first = std::min(first, kQuick);
    build(0, first);
    // As without tuning, one that can be used is found however far back it is.
    while (usable().empty() && first < entries_.size()) {
      const std::size_t next = std::min(first + threads(), entries_.size());
      build(first, next);
      first = next;
    }
    entries_.resize(first);
    report_.build_ms = watch_.ms();
    return choose();
  }

  Result<Tuned> run_again(std::vector<Plan> built) {
    for (Plan& plan : built) {
      Entry& entry = entries_.emplace_back();
      entry.report.name = plan.plan_name;
      take(entry, std::move(plan));
    }
    return choose();
  }

 private:
  std::size_t threads() const { return config_.threads > 0 ? config_.threads : core_count(); }

  bool is_late() const {
    return options_.deadline_ms >= 0 && waited_ms_ + watch_.ms() > options_.deadline_ms;
  }

  bool passed() {
    report_.deadline_passed = report_.deadline_passed || is_late();
    return is_late();
  }

  std::vector<std::size_t> usable() const {
    std::vector<std::size_t> list;
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      if (entries_[i].loaded != nullptr) list.push_back(i);
    }
    return list;
  }

  void build(std::size_t begin, std::size_t end) {
    std::vector<std::optional<Result<Plan>>> plans(end - begin);
    std::atomic<bool> any = false;
    std::atomic<bool> late = false;
    run_tasks(plans.size(), threads(), [&](std::size_t i) {
      // What is being built when the deadline passes is built to its end.
      if (any && is_late()) {
        late = true;
        return;
      }
      plans[i] = engine_.compile(graph_, device_, options_,
                                 Candidate{entries_[begin + i].report.name}, {});
      if (plans[i]->ok()) any = true;
    });
    if (late) report_.deadline_passed = true;
    for (std::size_t i = 0; i < plans.size(); ++i) {
      Entry& entry = entries_[begin + i];
      if (!plans[i]) {
        entry.drop(Standing::not_built, deadline_text());
      } else if (!plans[i]->ok()) {
        entry.fail(std::move(*plans[i]).error());
      } else {
        take(entry, std::move(*plans[i]).value());
      }
    }
  }

  std::string deadline_text() const {
    return fmt::format("the deadline of {:g} ms had passed", options_.deadline_ms);
  }

  void take(Entry& entry, Plan plan) {
    entry.report.workspace_bytes = plan.workspace_bytes;
    if (options_.workspace_limit >= 0 && plan.workspace_bytes > options_.workspace_limit) {
      entry.fail(
          unsupported("workspace",
                      fmt::format("plan {} needs a workspace of {} bytes; {} are allowed",
                                  plan.plan_name, plan.workspace_bytes, options_.workspace_limit),
                      "workspace_limit"));
      entry.report.standing = Standing::workspace_limit;
      return;
    }
    auto loaded = engine_.load(plan, device_);
    if (!loaded.ok()) {
      entry.fail(std::move(loaded).error());
      entry.report.standing = Standing::failed;
      return;
    }
    entry.loaded = std::move(loaded).value();
    entry.plan = std::move(plan);
    entry.report.standing = Standing::not_timed;
  }

  Result<Tuned> choose() {
    const std::vector<std::size_t> all = usable();
    if (all.empty()) return nothing_usable();
    if (all.size() == 1) {
      std::string choice =
          fmt::format("the only one of {} candidates that can be used", entries_.size());
      if (report_.deadline_passed) choice += "; " + deadline_text() + " before all were built";
      return finish(all[0], std::move(choice));
    }
    if (passed()) {
      return finish(all[0],
                    "the first that can be used: " + deadline_text() + " before any was timed");
    }
    auto scratch = Scratch::make(engine_, device_, graph_, config_.seed, forward_, config_.scratch);
    if (!scratch.ok()) return untimed(all[0], scratch.error());
    report_.buffer_sets = scratch->sets().size();
    report_.buffer_bytes = scratch->bytes();
    LAWSON_TRY(const std::vector<std::size_t> order, time(all, *scratch));
    if (order.empty()) {
      return finish(all[0], "the first that can be used: " + why_untimed_);
    }
    LAWSON_TRY(const std::size_t winner, verified(order, *scratch));
    const CandidateReport& best = entries_[winner].report;
    std::string choice = fmt::format("the fastest of {} timed on '{}', {:.4g} ms", order.size(),
                                     device_.name, best.median_ms);
    if (report_.deadline_passed) choice += "; " + deadline_text() + " before all was known";
    return finish(winner, std::move(choice));
  }

  // Whatever kept the candidates from being timed, the engine's own order is still there.
  Result<Tuned> untimed(std::size_t first, const Error& why) {
    return finish(first, "the first that can be used, for none can be timed: " + text_of(why));
  }

  Result<Tuned> nothing_usable() const {
    Error refusal = error(ErrorKind::unsupported, "the engine lists no candidate");
    for (const Entry& entry : entries_) {
      if (!entry.error) continue;
      if (entry.error->kind != ErrorKind::unsupported) return *entry.error;
      std::vector<Reason> reasons = entry.error->reasons;
      if (reasons.empty()) reasons.push_back({"not_built", entry.error->message, ""});
      for (Reason& reason : reasons) {
        const auto& known = refusal.reasons;
        if (std::find(known.begin(), known.end(), reason) == known.end()) {
          refusal.reasons.push_back(std::move(reason));
        }
      }
    }
    if (!refusal.reasons.empty()) refusal.message = refusal.reasons.front().message;
    return refusal;
  }

  // The timed candidates, the fastest first; none: nobody can be timed, and why_untimed_ says why.
  Result<std::vector<std::size_t>> time(const std::vector<std::size_t>& all, Scratch& scratch) {
    const Watch watch;
    RaceRules rules = config_.race;
    rules.executions = scratch.sets().size();
    const RaceResult result = race(
        all.size(), rules,
        [&](std::size_t i, int executions, int rounds) -> Result<std::vector<double>> {
          const Loaded& loaded = *entries_[all[i]].loaded;
          LAWSON_TRY(void* workspace, scratch.workspace(loaded.plan().workspace_bytes));
          return engine_.measure(loaded, scratch.sets(), workspace, executions, rounds);
        },
        [&] { return passed(); });
    report_.time_ms = watch.ms();
    std::optional<Error> fault;
    for (std::size_t i = 0; i < all.size(); ++i) {
      const Runner& runner = result.runners[i];
      Entry& entry = entries_[all[i]];
      if (runner.failure) {
        if (!fault) fault = runner.failure;
        if (runner.failure->kind == ErrorKind::unavailable) continue;
        entry.fail(*runner.failure);
        entry.report.standing = Standing::failed;
      } else if (!runner.times.empty()) {
        entry.report.standing = Standing::slower;
        entry.report.rounds = static_cast<int>(runner.times.size());
        entry.report.median_ms = runner.median();
        entry.report.min_ms = runner.min();
        entry.report.max_ms = runner.max();
      }
    }
    std::vector<std::size_t> order;
    for (const std::size_t i : result.order) order.push_back(all[i]);
    if (!order.empty()) return order;
    if (fault && fault->kind != ErrorKind::unavailable) return *fault;
    why_untimed_ = fault ? text_of(*fault) : deadline_text() + " before any was timed";
    return order;
  }

  // The first of the order whose numbers are right.
  Result<std::size_t> verified(const std::vector<std::size_t>& order, Scratch& scratch) {
    const Watch watch;
    const Work work = work_of(graph_);
    bool oracle = work.flops / 2 + work.elements <= config_.oracle_work;
    std::optional<std::vector<Buffer>> first;
    std::optional<std::size_t> first_index;
    std::string last;
    for (const std::size_t i : order) {
      Entry& entry = entries_[i];
      std::optional<std::vector<Buffer>> outputs;
      if (oracle) {
        LAWSON_TRY(outputs, outputs_of(entry, scratch));
        if (!outputs) continue;
        auto expected = expected_outputs(engine_, reference_, graph_, scratch.inputs(), *outputs);
        if (expected.ok()) {
          report_.compared_with = "oracle";
          const Comparison comparison = compare(graph_, *outputs, *expected);
          report_.verify_ms = watch.ms();
          if (comparison.ok()) return i;
          last = comparison.text();
          entry.drop(Standing::wrong_result, "wrong results: " + last);
          continue;
        }
        if (expected.error().kind != ErrorKind::unsupported) return expected.error();
        oracle = false;
      }
      while (!first) {
        const std::vector<std::size_t> left = usable();
        if (left.empty()) break;
        LAWSON_TRY(first, outputs_of(entries_[left[0]], scratch));
        first_index = left[0];
      }
      if (entry.loaded == nullptr) continue;
      if (first_index == i) return i;
      report_.compared_with = "first plan";
      if (!outputs) {
        LAWSON_TRY(outputs, outputs_of(entry, scratch));
        if (!outputs) continue;
      }
      last = disagreement(graph_, engine_.arithmetic(graph_), *first, *outputs);
      report_.verify_ms = watch.ms();
      if (last.empty()) return i;
      entry.drop(Standing::wrong_result,
                 fmt::format("differs from {}: {}", entries_[*first_index].report.name, last));
    }
    if (last.empty()) return nothing_usable().error();
    return unsupported("wrong_result", fmt::format("every candidate that was run on '{}' has wrong "
                                                   "results: {}",
                                                   device_.name, last));
  }

  // Nothing when running it failed, which is then the candidate's own failure.
  Result<std::optional<std::vector<Buffer>>> outputs_of(Entry& entry, Scratch& scratch) {
    auto outputs = scratch.execute(*entry.loaded);
    if (outputs.ok()) return std::optional{std::move(outputs).value()};
    entry.fail(std::move(outputs).error());
    entry.report.standing = Standing::failed;
    return std::optional<std::vector<Buffer>>{};
  }

  Result<Tuned> finish(std::size_t winner, std::string choice) {
    entries_[winner].report.standing = Standing::chosen;
    report_.choice = fmt::format("tuned ({}): {}", to_string(options_.tuning), choice);
    Tuned tuned;
    tuned.plan = *entries_[winner].plan;
    tuned.plan.choice = report_.choice;
    for (Entry& entry : entries_) {
      report_.candidates.push_back(std::move(entry.report));
      const Standing standing = report_.candidates.back().standing;
      const bool good = standing == Standing::chosen || standing == Standing::slower ||
                        standing == Standing::not_timed;
      if (entry.plan && good) tuned.built.push_back(std::move(*entry.plan));
    }
    tuned.report = std::move(report_);
    return tuned;
  }

  Engine& engine_;
  Engine& reference_;
  Engine& forward_;
  const TunerConfig& config_;
  const ir::Graph& graph_;
  const Device& device_;
  const Options& options_;
  const double waited_ms_;
  const Watch watch_;
  std::vector<Entry> entries_;
  TuningReport report_;
  std::string why_untimed_;
};

}  // namespace

std::string_view to_string(Standing standing) {
  for (const auto& [value, word] : kStandings) {
    if (value == standing) return word;
  }
  return "failed";
}

Json report_to_json(const TuningReport& report) {
  Json candidates = Json::array();
  for (const CandidateReport& candidate : report.candidates) {
    Json item{{"name", candidate.name},
              {"standing", to_string(candidate.standing)},
              {"workspace_bytes", candidate.workspace_bytes},
              {"rounds", candidate.rounds}};
    if (!candidate.failure.empty()) item["failure"] = candidate.failure;
    if (candidate.rounds > 0) {
      item["milliseconds"] = {
          {"median", candidate.median_ms}, {"min", candidate.min_ms}, {"max", candidate.max_ms}};
    }
    candidates.push_back(std::move(item));
  }
  Json document{
      {"tuning", to_string(report.tuning)},
      {"choice", report.choice},
      {"deadline_passed", report.deadline_passed},
      {"stored", report.stored},
      {"buffer_sets", report.buffer_sets},
      {"buffer_bytes", report.buffer_bytes},
      {"milliseconds",
       {{"build", report.build_ms}, {"time", report.time_ms}, {"verify", report.verify_ms}}},
      {"candidates", std::move(candidates)}};
  if (!report.compared_with.empty()) document["compared_with"] = report.compared_with;
  return document;
}

Result<TuningReport> report_from_json(const Json& document) {
  TuningReport report;
  try {
    const auto tuning = tuning_from_string(document.at("tuning").get<std::string>());
    if (!tuning) return error(ErrorKind::io, "a tuning report of an unknown kind");
    report.tuning = *tuning;
    report.choice = document.at("choice").get<std::string>();
    report.compared_with = document.value("compared_with", "");
    report.deadline_passed = document.at("deadline_passed").get<bool>();
    report.stored = document.at("stored").get<bool>();
    report.buffer_sets = document.at("buffer_sets").get<std::size_t>();
    report.buffer_bytes = document.at("buffer_bytes").get<std::size_t>();
    const Json& spent = document.at("milliseconds");
    report.build_ms = spent.at("build").get<double>();
    report.time_ms = spent.at("time").get<double>();
    report.verify_ms = spent.at("verify").get<double>();
    for (const Json& item : document.at("candidates")) {
      CandidateReport& candidate = report.candidates.emplace_back();
      candidate.name = item.at("name").get<std::string>();
      const auto word = item.at("standing").get<std::string>();
      const auto known = std::find_if(kStandings.begin(), kStandings.end(),
                                      [&](const auto& pair) { return word == pair.second; });
      if (known == kStandings.end()) {
        return error(ErrorKind::io, "a tuning report of a candidate that is '{}'", word);
      }
      candidate.standing = known->first;
      candidate.failure = item.value("failure", "");
      candidate.workspace_bytes = item.at("workspace_bytes").get<std::int64_t>();
      candidate.rounds = item.at("rounds").get<int>();
      if (!item.contains("milliseconds")) continue;
      const Json& times = item.at("milliseconds");
      candidate.median_ms = times.at("median").get<double>();
      candidate.min_ms = times.at("min").get<double>();
      candidate.max_ms = times.at("max").get<double>();
    }
  } catch (const Json::exception& e) {
    return error(ErrorKind::io, "a tuning report that cannot be read: {}", e.what());
  }
  return report;
}

Result<Tuned> Tuner::tune(const ir::Graph& graph, const Device& device, const Options& options,
                          double waited_ms) {
  return Session(engine_, reference_, forward_, config_, graph, device, options, waited_ms).run();
}

Result<Tuned> Tuner::tune_again(const ir::Graph& graph, const Device& device,
                                const Options& options, std::vector<Plan> built, double waited_ms) {
  return Session(engine_, reference_, forward_, config_, graph, device, options, waited_ms)
      .run_again(std::move(built));
}

}  // namespace lawson::plan
