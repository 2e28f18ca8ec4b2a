// check MODEL...: what of a model fuses, on which GPU, why not, and what to change.
#include "check.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <map>
#include <optional>
#include <set>

#include "input.h"
#include "tasks.h"
#include "terminal.h"
#include "verbs.h"

namespace lawson::cli {
namespace {

const std::vector<std::string> kDefaultTargets{"a100", "l40s", "h200", "b200"};

// Neighbours of one "no" that are probed at most; after the budget only those cells that would
// otherwise have no probed neighbour at all are still explained.
constexpr std::size_t kNeighbourLimit = 20;
constexpr double kNeighbourBudgetSeconds = 15;

struct CheckArguments {
  std::vector<std::string> models;
  std::vector<std::string> targets;
  ModelOptions options;
  bool require = false;
  bool build = false;
};

// One distinct spec.
struct Question {
  Spec spec;
};

using CellIndex = std::pair<std::size_t, std::size_t>;  // question, target

class Checker {
 public:
  explicit Checker(const CheckArguments& arguments) {
    options_.strength = arguments.build ? LAWSON_BUILT : LAWSON_JUDGED;
    for (const std::string& path : arguments.models) {
      add_model(workloads_of(read_document(path), arguments.options), path);
    }
    targets_ = resolve_targets(arguments.targets, kDefaultTargets);
    std::map<std::string, std::string> capabilities;
    for (const Json& device : json_of(lawson_devices_json)) {
      const auto name = device.value("name", std::string{});
      capabilities[name] = device.value("compute_capability", std::string{});
      titles_[name] = device.value("title", name);
    }
    for (const Target& target : targets_) {
      check_.targets.push_back(target.name);
      check_.capabilities.push_back(capabilities[target.name]);
    }
    check_.cells.assign(questions_.size(), std::vector<CheckCell>(targets_.size()));
  }

  Check run() {
    const Stopwatch clock;
    judge();
    find_neighbours();
    check_.probes += probes_;
    check_.seconds = clock.seconds();
    return std::move(check_);
  }

 private:
  void add_model(const Json& model, const std::string& path) {
    check_.models.push_back({model.value("model", path), model.value("model_type", std::string{}),
                             model.value("layers", std::int64_t{0})});
    for (const Json& workload : model["workloads"]) {
      CheckRow row;
      row.model = check_.models.size() - 1;
      row.name = workload["name"];
      row.group = workload["group"];
      row.layers = workload["layers"];
      row.note = workload["note"];
      row.spec = workload["spec"];
      row.question = question_of(row.spec, path);
      check_.rows.push_back(std::move(row));
    }
  }

  std::size_t question_of(const Json& spec, const std::string& source) {
    Json key = spec;
    key.erase("name");
    const auto [it, added] = question_index_.emplace(key.dump(), questions_.size());
    if (added) questions_.push_back({read_spec(spec.dump(), source)});
    return it->second;
  }

  // Without the libraries every probe fails alike: the first one ends the check.
  void judge() {
    const std::size_t count = questions_.size() * targets_.size();
    std::atomic<bool> answered{false};
    Progress progress("judging", count);
    run_tasks(count, [&](std::size_t i) {
      const auto [question, target] =
          std::div(static_cast<long>(i), static_cast<long>(targets_.size()));
      CheckCell& cell = at({static_cast<std::size_t>(question), static_cast<std::size_t>(target)});
      try {
        cell.verdict = probe(questions_[static_cast<std::size_t>(question)].spec,
                             targets_[static_cast<std::size_t>(target)].device, options_);
        answered = true;
      } catch (const Failure& failure) {
        if (failure.kind() == "unavailable" && !answered) throw;
        cell.verdict = {{"error", failure.json()}};
      }
      ++probes_;
      progress.step();
    });
  }

  void find_neighbours() {
    share_targets();
    const std::vector<CellIndex> jobs = explain_jobs();
    const Stopwatch clock;
    Progress progress("probing what would help", jobs.size());
    run_tasks(jobs.size(), [&](std::size_t i) {
      CheckCell& cell = at(jobs[i]);
      const bool lacks_any = cell.neighbours.empty();
      if (lacks_any || clock.seconds() < kNeighbourBudgetSeconds) explain(jobs[i], cell);
      progress.step();
    });
  }

  void explain(const CellIndex& index, CheckCell& cell) {
    const lawson_options options = options_.c();
    try {
      const Json answer = json_of(lawson_explain, questions_[index.first].spec.get(),
                                  targets_[index.second].device.get(), &options, kNeighbourLimit);
      cell.tried += answer.value("probed", std::size_t{0});
      probes_ += answer.value("probed", std::size_t{0});
      for (const Json& neighbour : answer.value("neighbours", Json::array())) {
        const bool known =
            std::any_of(cell.neighbours.begin(), cell.neighbours.end(), [&](const Json& other) {
              return other["verdict"]["target"] == neighbour["verdict"]["target"] &&
                     other["change"] == neighbour["change"];
            });
        if (!known) cell.neighbours.push_back(neighbour);
      }
    } catch (const Failure& failure) {
      print_warning(fmt::format("no neighbours of a refusal on {}: {}", targets_[index.second].name,
                                failure.what()));
    }
  }

  // The nearest target of this check that takes the same workload: probed already.
  void share_targets() {
    const auto distance = [&](std::size_t a, std::size_t b) {
      return std::abs(std::strtod(check_.capabilities[a].c_str(), nullptr) -
                      std::strtod(check_.capabilities[b].c_str(), nullptr));
    };
    for (std::size_t q = 0; q < questions_.size(); ++q) {
      for (std::size_t t = 0; t < targets_.size(); ++t) {
        CheckCell& cell = at({q, t});
        if (decision_of(cell.verdict) != "unsupported") continue;
        cell.neighbours = Json::array();
        std::optional<std::size_t> best;
        for (std::size_t other = 0; other < targets_.size(); ++other) {
          if (decision_of(at({q, other}).verdict) != "supported") continue;
          if (!best || distance(t, other) < distance(t, *best)) best = other;
        }
        cell.tried = targets_.size() - 1;
        if (!best) continue;
        const std::string& name = targets_[*best].name;
        cell.neighbours.push_back({{"change", "on " + titles_[name]},
                                   {"field", "target"},
                                   {"kind", "target"},
                                   {"target", name},
                                   {"exact", true},
                                   {"verdict", at({q, *best}).verdict}});
      }
    }
  }

  // The "no" cells to explain, those first that tell most: one per distinct reason, then one per
  // distinct reason and question, then the rest. A target that refuses everything, where another
  // takes it, needs no attribute changed.
  std::vector<CellIndex> explain_jobs() {
    std::array<std::vector<CellIndex>, 3> by_rank;
    std::set<std::string> reasons;
    std::set<std::pair<std::string, std::size_t>> reasons_of_question;
    for (std::size_t t = 0; t < targets_.size(); ++t) {
      const bool refuses_all = std::all_of(
          check_.cells.begin(), check_.cells.end(),
          [&](const auto& row) { return decision_of(row[t].verdict) == "unsupported"; });
      for (std::size_t q = 0; q < questions_.size(); ++q) {
        const CheckCell& cell = at({q, t});
        if (decision_of(cell.verdict) != "unsupported") continue;
        if (refuses_all && !cell.neighbours.empty()) continue;
        const std::string reason = cell.verdict.value("reasons", Json::array()).dump();
        const bool new_reason = reasons.insert(reason).second;
        const bool new_question = reasons_of_question.insert({reason, q}).second;
        by_rank[new_reason ? 0 : new_question ? 1 : 2].emplace_back(q, t);
      }
    }
    std::vector<CellIndex> jobs;
    for (const auto& rank : by_rank) jobs.insert(jobs.end(), rank.begin(), rank.end());
    return jobs;
  }

  CheckCell& at(const CellIndex& index) { return check_.cells[index.first][index.second]; }

  Check check_;
  ProbeOptions options_;
  std::vector<Question> questions_;
  std::map<std::string, std::size_t> question_index_;
  std::vector<Target> targets_;
  std::map<std::string, std::string> titles_;
  std::atomic<std::size_t> probes_{0};
};

int exit_code(const Check& check, bool require) {
  bool no = false;
  bool undecided = false;
  for (const auto& row : check.cells) {
    for (const CheckCell& cell : row) {
      const std::string decision = decision_of(cell.verdict);
      if (decision == "error") return kExitEnvironment;
      no = no || decision == "unsupported";
      undecided = undecided || decision == "undecided";
    }
  }
  if (!require) return kExitOk;
  return no ? kExitNo : undecided ? kExitEnvironment : kExitOk;
}

int run_check(const Session& session, const CheckArguments& arguments) {
  const Check check = Checker{arguments}.run();
  if (session.json) {
    emit(report_json(check));
  } else {
    print_out(report_text(check));
  }
  return exit_code(check, arguments.require);
}

}  // namespace

std::string decision_of(const Json& verdict) {
  return verdict.contains("error") ? "error" : verdict.value("verdict", std::string{"error"});
}

Json report_json(const Check& check) {
  std::vector<Json> models;
  for (const CheckModel& model : check.models) {
    models.push_back(
        {{"model", model.name}, {"targets", check.targets}, {"workloads", Json::array()}});
    if (!model.model_type.empty()) {
      models.back()["model_type"] = model.model_type;
      models.back()["layers"] = model.layers;
    }
  }
  for (const CheckRow& row : check.rows) {
    Json verdicts = Json::object();
    Json neighbours = Json::object();
    for (std::size_t t = 0; t < check.targets.size(); ++t) {
      const CheckCell& cell = check.cell(row, t);
      verdicts[check.targets[t]] = cell.verdict;
      if (!cell.neighbours.empty()) neighbours[check.targets[t]] = cell.neighbours;
    }
    models[row.model]["workloads"].push_back({{"name", row.name},
                                              {"group", row.group},
                                              {"layers", row.layers},
                                              {"note", row.note},
                                              {"spec", row.spec},
                                              {"verdicts", std::move(verdicts)},
                                              {"neighbours", std::move(neighbours)}});
  }
  return models.size() == 1 ? models[0] : Json(models);
}

void add_check(CLI::App& app, Session& session) {
  auto arguments = std::make_shared<CheckArguments>();
  CLI::App* verb = add_verb(
      app, session, "check", "what of a model fuses, on which GPU, why not, and what to change",
      "lawson check examples/models/llama-3.1-8b.json --target a100,h200 --seqlen 8192");
  verb->add_option(
          "model", arguments->models,
          "a model's config.json (Hugging Face form), its folder, or a spec file; - for standard "
          "input")
      ->required()
      ->type_name("MODEL...");
  add_target_option(verb, arguments->targets,
                    fmt::format(", else {}", fmt::join(kDefaultTargets, ",")));
  add_model_options(verb, arguments->options);
  verb->add_flag("--require", arguments->require, "exit 1 when any verdict is a no");
  verb->add_flag("--build", arguments->build, "also compile every kernel");
  add_trace_option(verb, session);
  verb->callback([arguments, &session] {
    session.action = [arguments, &session] { return run_check(session, *arguments); };
  });
}

}  // namespace lawson::cli
