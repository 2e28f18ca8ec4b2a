// compile SPEC... -o BUNDLE: plans ahead of time, for GPUs that need not be here.
#include <fmt/format.h>

#include <chrono>
#include <filesystem>
#include <map>

#include "input.h"
#include "table.h"
#include "tasks.h"
#include "verbs.h"

namespace lawson::cli {
namespace {

struct CompileArguments {
  std::vector<std::string> specs;
  std::vector<std::string> targets;
  std::string bundle;
  ProbeOptions options;
  ModelOptions model;
};

// One graph to compile; equal graphs of several specs are one.
struct Work {
  std::string source;  // "model.json attention.full.prefill" or a spec file
  std::size_t spec = 0;
  Graph graph;
};

struct Outcome {
  Plan plan;     // null when it does not fuse or failed
  Json reasons;  // when it does not fuse
  Json error;    // when it failed
  std::size_t bytes = 0;
  double seconds = 0;
};

class Compiler {
 public:
  explicit Compiler(const CompileArguments& arguments) {
    options_ = arguments.options;
    for (const std::string& path : arguments.specs) {
      const Document document = read_document(path);
      const Json model = workloads_of(document, arguments.model);
      for (const Json& workload : model["workloads"]) {
        const bool is_model = workload["group"] != "spec";
        add_spec(workload["spec"], is_model ? model["model"].get<std::string>() + ' ' +
                                                  workload["name"].get<std::string>()
                                            : document.source);
      }
    }
    targets_ = resolve_targets(arguments.targets, {});
  }

  void run() {
    outcomes_.resize(work_.size() * targets_.size());
    Progress progress("compiling", outcomes_.size());
    run_tasks(outcomes_.size(), [&](std::size_t i) {
      outcomes_[i] = compile(work_[i / targets_.size()], targets_[i % targets_.size()]);
      progress.step();
    });
  }

  // What was compiled is written also when something else does not fuse.
  void write(const std::string& path) {
    std::vector<const lawson_plan*> plans;
    for (const Outcome& outcome : outcomes_) {
      if (outcome.plan) plans.push_back(outcome.plan.get());
    }
    if (plans.empty()) return;
    check(lawson_bundle_write(path.c_str(), plans.data(), plans.size()));
    plans_written_ = plans.size();
  }

  Json json(const std::string& bundle) const {
    Json plans = Json::array();
    Json refused = Json::array();
    Json errors = Json::array();
    each([&](const Work& work, const Target& target, const Outcome& outcome) {
      Json item{{"spec", work.source}, {"target", target.name}};
      if (work.graph) item["graph"] = lawson_graph_name(work.graph.get());
      if (outcome.plan) {
        const lawson_plan* plan = outcome.plan.get();
        item.update({{"plan_id", lawson_plan_id(plan)},
                     {"key", lawson_plan_key(plan)},
                     {"engine", lawson_plan_engine(plan)},
                     {"plan_name", lawson_plan_name(plan)},
                     {"workspace_bytes", lawson_plan_workspace_size(plan)},
                     {"bytes", outcome.bytes},
                     {"seconds", outcome.seconds}});
        plans.push_back(std::move(item));
      } else if (outcome.error.is_null()) {
        item["reasons"] = outcome.reasons;
        refused.push_back(std::move(item));
      } else {
        item["error"] = outcome.error;
        errors.push_back(std::move(item));
      }
    });
    return {{"bundle", plans_written_ > 0 ? Json(bundle) : Json()},
            {"plans", std::move(plans)},
            {"refused", std::move(refused)},
            {"errors", std::move(errors)}};
  }

  std::string text(const std::string& bundle) const {
    Table table;
    table.column("compiled", Table::Align::left);
    table.column("target");
    table.column("plan id");
    table.column("engine config", Table::Align::left, true);
    table.column("workspace", Table::Align::right);
    table.column("size", Table::Align::right);
    table.column("time", Table::Align::right);
    std::string refusals;
    each([&](const Work& work, const Target& target, const Outcome& outcome) {
      if (outcome.plan) {
        const lawson_plan* plan = outcome.plan.get();
        table.row({{label(work)},
                   {target.name},
                   {std::string{lawson_plan_id(plan)}.substr(0, 12), Style::dim},
                   {lawson_plan_name(plan), Style::dim},
                   {bytes_text(static_cast<double>(lawson_plan_workspace_size(plan)))},
                   {bytes_text(static_cast<double>(outcome.bytes))},
                   {seconds_text(outcome.seconds)}});
        return;
      }
      const bool failed = !outcome.error.is_null();
      refusals += paint(failed ? "error" : "unsupported", Style::bad) + "  " +
                  paint(label(work), Style::bold) + " on " + target.name + '\n';
      if (failed) {
        refusals += paragraph("  ", outcome.error.value("message", std::string{}));
      }
      for (const Json& reason : outcome.reasons) {
        refusals += paragraph("  - ", reason.value("message", std::string{}));
      }
    });
    std::string out = plans_written_ > 0 ? table.text() + '\n' : std::string{};
    out += refusals;
    if (plans_written_ == 0) return out + "Nothing to write: no plan was compiled.\n";
    std::error_code code;
    const auto size = std::filesystem::file_size(bundle, code);
    return out + fmt::format("{} in {} ({})\n", counted(plans_written_, "plan"), bundle,
                             bytes_text(code ? 0.0 : static_cast<double>(size)));
  }

  // An environment that lacks everything is one error, not one per plan.
  int exit_code() const {
    bool no = false;
    const Outcome* failed = nullptr;
    for (const Outcome& outcome : outcomes_) {
      if (!outcome.error.is_null()) failed = &outcome;
      no = no || (!outcome.plan && outcome.error.is_null());
    }
    const bool is_input = failed != nullptr && failed->error["kind"] == "invalid_argument";
    const int failure = is_input ? kExitInput : kExitEnvironment;
    if (failed != nullptr && plans_written_ == 0 && !no) {
      throw Failure(failed->error["kind"], failure, failed->error["message"]);
    }
    return failed != nullptr ? failure : no ? kExitNo : kExitOk;
  }

 private:
  template <typename F>
  void each(F function) const {
    for (std::size_t i = 0; i < outcomes_.size(); ++i) {
      function(work_[i / targets_.size()], targets_[i % targets_.size()], outcomes_[i]);
    }
  }

  // The spec, and which of its graphs where it has two.
  std::string label(const Work& work) const {
    if (!work.graph || lawson_spec_graph_count(specs_[work.spec].get()) < 2) return work.source;
    const std::string name = lawson_graph_name(work.graph.get());
    const std::size_t dot = name.rfind('.');
    if (dot == std::string::npos) return work.source;
    // A step of context_parallel has a name of its own.
    const bool own = name.substr(0, dot) != lawson_spec_name(specs_[work.spec].get());
    return own ? work.source + ' ' + name : work.source + name.substr(dot);
  }

  void add_spec(const Json& document, const std::string& source) {
    specs_.push_back(read_spec(document.dump(), source));
    const Spec& spec = specs_.back();
    const std::size_t count = lawson_spec_graph_count(spec.get());
    if (count == 0) work_.push_back({source, specs_.size() - 1, nullptr});
    for (std::size_t i = 0; i < count; ++i) {
      Graph graph = make<Graph>(lawson_spec_graph, spec.get(), i);
      Json key = json_of(lawson_graph_json, graph.get());
      key.erase("name");
      if (!known_.emplace(key.dump(), work_.size()).second) continue;
      work_.push_back({source, specs_.size() - 1, std::move(graph)});
    }
  }

  Outcome compile(const Work& work, const Target& target) const {
    Outcome outcome;
    const Stopwatch clock;
    const lawson_options options = options_.c();
    try {
      if (work.graph) {
        lawson_plan* plan = nullptr;
        const lawson_status status =
            lawson_compile(work.graph.get(), target.device.get(), &options, &plan);
        if (status == LAWSON_OK) {
          outcome.plan.reset(plan);
          outcome.bytes =
              lawson_text_size(make<Text>(lawson_plan_serialize, outcome.plan.get()).get());
          outcome.seconds = clock.seconds();
          return outcome;
        }
        if (status != LAWSON_UNSUPPORTED) throw last_failure(status);
      }
      outcome.reasons = reasons_of(work, target, work.graph ? lawson_last_error_message() : "");
    } catch (const Failure& failure) {
      outcome.error = failure.json();
    }
    return outcome;
  }

  // As a verdict words them; a refusal that only building found has its own message.
  Json reasons_of(const Work& work, const Target& target, const std::string& message) const {
    const lawson_options options = options_.c();
    const Verdict verdict =
        work.graph ? make<Verdict>(lawson_probe, work.graph.get(), target.device.get(), &options)
                   : make<Verdict>(lawson_probe_spec, specs_[work.spec].get(), target.device.get(),
                                   &options);
    Json reasons = json_of(lawson_verdict_json, verdict.get()).value("reasons", Json::array());
    if (reasons.empty()) reasons.push_back({{"code", "does_not_build"}, {"message", message}});
    return reasons;
  }

  ProbeOptions options_;
  std::vector<Spec> specs_;
  std::vector<Work> work_;
  std::map<std::string, std::size_t> known_;
  std::vector<Target> targets_;
  std::vector<Outcome> outcomes_;
  std::size_t plans_written_ = 0;
};

int run_compile(const Session& session, const CompileArguments& arguments) {
  Compiler compiler(arguments);
  compiler.run();
  compiler.write(arguments.bundle);
  const int code = compiler.exit_code();
  if (session.json) {
    emit(compiler.json(arguments.bundle));
  } else {
    print_out(compiler.text(arguments.bundle));
  }
  return code;
}

}  // namespace

void add_compile(CLI::App& app, Session& session) {
  auto arguments = std::make_shared<CompileArguments>();
  CLI::App* verb = add_verb(app, session, "compile", "plans ahead of time, into one bundle",
                            "lawson compile examples/specs/seed.json --target h200 -o seed.bundle");
  verb->add_option("spec", arguments->specs, "spec files, or models' config.json")
      ->required()
      ->type_name("SPEC...");
  add_target_option(verb, arguments->targets, "");
  verb->add_option("-o,--output", arguments->bundle, "the bundle to write")
      ->required()
      ->type_name("BUNDLE");
  verb->add_option("-e,--engine", arguments->options.engine, "cudnn, cpu or reference")
      ->type_name("NAME");
  add_tuning_options(verb, arguments->options, true);
  add_model_options(verb, arguments->model);
  add_trace_option(verb, session);
  verb->callback([arguments, &session] {
    session.action = [arguments, &session] { return run_compile(session, *arguments); };
  });
}

}  // namespace lawson::cli
