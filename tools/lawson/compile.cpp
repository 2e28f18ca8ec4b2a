// compile SPEC... -o BUNDLE: plans ahead of time, for GPUs that need not be here.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>

#include "input.h"
#include "saver.h"
#include "table.h"
#include "tasks.h"
#include "verbs.h"

namespace lawson::cli {
namespace {

struct CompileArguments {
  std::vector<std::string> specs;
  std::vector<std::string> targets;
  std::string bundle;
  bool fresh = false;
  std::size_t jobs = 0;
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
  enum class Status { interrupted, compiled, kept, refused, failed };

  Status status = Status::interrupted;  // what is not begun stays so
  std::string plan_id;
  std::string key;
  std::string engine;
  std::string plan_name;
  std::size_t workspace_bytes = 0;
  std::size_t bytes = 0;
  Json reasons;  // when it does not fuse
  Json error;    // when it failed
  double seconds = 0;

  bool has_plan() const { return status == Status::compiled || status == Status::kept; }
};

const char* word_of(Outcome::Status status) {
  switch (status) {
    case Outcome::Status::interrupted:
      return "interrupted";
    case Outcome::Status::compiled:
      return "compiled";
    case Outcome::Status::kept:
      return "kept";
    case Outcome::Status::refused:
      return "unsupported";
    case Outcome::Status::failed:
      return "error";
  }
  return "error";
}

// The bundle that an earlier call left, whose plans are not built again. Of a damaged plan it is
// told, and it is.
class Earlier {
 public:
  explicit Earlier(const std::string& path) {
    std::error_code code;
    if (!std::filesystem::exists(path, code)) return;
    try {
      bundle_ = open_bundle(path);
    } catch (const Failure& failure) {
      const bool is_file = std::filesystem::is_regular_file(path, code);
      throw Failure(failure.kind(), failure.exit_code(),
                    failure.what() + std::string{is_file ? "; --fresh replaces it" : ""});
    }
  }

  // Null when there is none.
  Plan find(const Graph& graph, const Target& target, const lawson_options& options) const {
    // The bundle's may have been chosen where the device was not, without any tuning.
    const bool tunes =
        options.tuning != LAWSON_TUNING_OFF && lawson_device_is_present(target.device.get()) != 0;
    if (bundle_ == nullptr || tunes) return nullptr;
    try {
      const std::string key =
          text_of(lawson_compile_key, graph.get(), target.device.get(), &options);
      return make<Plan>(lawson_bundle_find, bundle_.get(), key.c_str());
    } catch (const Failure& failure) {
      // Whoever compiles will say better what the environment lacks.
      if (failure.kind() == "invalid_argument") print_warning(failure.what());
      return nullptr;
    }
  }

 private:
  Bundle bundle_;
};

// A new bundle takes its place beside it first (beside what a link points to): so does this file.
void check_writable(const std::string& path) {
  std::error_code code;
  if (std::filesystem::is_directory(path, code)) {
    throw bad_input(fmt::format("{}: is a directory; expected the bundle to write", path));
  }
  const std::filesystem::path there = std::filesystem::canonical(path, code);
  if (code && code != std::errc::no_such_file_or_directory) {
    throw bad_input(fmt::format("{}: cannot be written ({})", path, code.message()));
  }
  std::string trial = (code ? path : there.string()) + ".XXXXXX";
  const int file = ::mkstemp(trial.data());
  if (file < 0) {
    throw bad_input(fmt::format("{}: cannot be written ({})", path, std::strerror(errno)));
  }
  ::close(file);
  ::unlink(trial.c_str());
}

class Compiler {
 public:
  explicit Compiler(const CompileArguments& arguments)
      : options_{arguments.options}, jobs_{arguments.jobs}, path_{arguments.bundle} {
    if (!arguments.fresh && !options_.retune) earlier_.emplace(path_);
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
    check_writable(path_);
  }

  // What was compiled is in the bundle also when something else does not fuse, or after an
  // interrupt.
  void run(bool fresh) {
    outcomes_.resize(work_.size() * targets_.size());
    Saver saver(path_, fresh);
    Progress progress("compiling", outcomes_.size());
    const auto build = [&](std::size_t i) {
      if (Interrupt::signal() != 0) return;
      Plan plan;
      outcomes_[i] = compile(work_[i / targets_.size()], targets_[i % targets_.size()], plan);
      if (plan) saver.add(std::move(plan));
      progress.step();
    };
    try {
      run_tasks(outcomes_.size(), build, jobs_);
    } catch (const Failure&) {  // of the saver: without a place for them the rest is for nothing
      throw;
    } catch (...) {
      saver.flush();
      throw;
    }
    saver.flush();
    const auto plans = std::count_if(outcomes_.begin(), outcomes_.end(),
                                     [](const Outcome& outcome) { return outcome.has_plan(); });
    plans_ = static_cast<std::size_t>(plans);
  }

  Json json() const {
    Json plans = Json::array();
    Json refused = Json::array();
    Json errors = Json::array();
    Json interrupted = Json::array();
    each([&](const Work& work, const Target& target, const Outcome& outcome) {
      Json item{{"spec", work.source},
                {"target", target.name},
                {"status", word_of(outcome.status)},
                {"seconds", outcome.seconds}};
      if (work.graph) item["graph"] = lawson_graph_name(work.graph.get());
      if (outcome.has_plan()) {
        item.update({{"plan_id", outcome.plan_id},
                     {"key", outcome.key},
                     {"engine", outcome.engine},
                     {"plan_name", outcome.plan_name},
                     {"workspace_bytes", outcome.workspace_bytes},
                     {"bytes", outcome.bytes}});
        plans.push_back(std::move(item));
      } else if (outcome.status == Outcome::Status::refused) {
        item["reasons"] = outcome.reasons;
        refused.push_back(std::move(item));
      } else if (outcome.status == Outcome::Status::failed) {
        item["error"] = outcome.error;
        errors.push_back(std::move(item));
      } else {
        interrupted.push_back(std::move(item));
      }
    });
    return {{"bundle", plans_ > 0 ? Json(path_) : Json()},
            {"bundle_bytes", file_bytes()},
            {"plans", std::move(plans)},
            {"refused", std::move(refused)},
            {"errors", std::move(errors)},
            {"interrupted", std::move(interrupted)}};
  }

  std::string text() const {
    Table table;
    table.column("compiled", Table::Align::left);
    table.column("target");
    table.column("plan id");
    table.column("engine config", Table::Align::left, true);
    table.column("workspace", Table::Align::right);
    table.column("size", Table::Align::right);
    table.column("time", Table::Align::right);
    std::string refusals;
    std::size_t interrupted = 0;
    each([&](const Work& work, const Target& target, const Outcome& outcome) {
      if (outcome.has_plan()) {
        table.row(
            {{label(work)},
             {target.name},
             {outcome.plan_id.substr(0, 12), Style::dim},
             {outcome.plan_name, Style::dim},
             {bytes_text(static_cast<double>(outcome.workspace_bytes))},
             {bytes_text(static_cast<double>(outcome.bytes))},
             {outcome.status == Outcome::Status::kept ? "kept" : seconds_text(outcome.seconds)}});
        return;
      }
      if (outcome.status == Outcome::Status::interrupted) {
        ++interrupted;
        return;
      }
      refusals += paint(word_of(outcome.status), Style::bad) + "  " +
                  paint(label(work), Style::bold) + " on " + target.name + '\n';
      if (outcome.status == Outcome::Status::failed) {
        refusals += paragraph("  ", outcome.error.value("message", std::string{}));
      }
      for (const Json& reason : outcome.reasons) {
        refusals += paragraph("  - ", reason.value("message", std::string{}));
      }
    });
    std::string out = plans_ > 0 ? table.text() + '\n' : std::string{};
    out += refusals;
    if (interrupted > 0) {
      out += fmt::format("Interrupted: {} left; the same command goes on from here.\n",
                         counted(interrupted, "plan"));
    }
    if (plans_ == 0) return out + "Nothing to write: no plan was compiled.\n";
    return out + fmt::format("{} in {} ({})\n", counted(plans_, "plan"), path_,
                             bytes_text(static_cast<double>(file_bytes())));
  }

  // An environment that lacks everything is one error, not one per plan.
  int exit_code() const {
    bool no = false;
    const Outcome* failed = nullptr;
    for (const Outcome& outcome : outcomes_) {
      if (outcome.status == Outcome::Status::failed) failed = &outcome;
      no = no || outcome.status == Outcome::Status::refused;
    }
    const bool is_input = failed != nullptr && failed->error["kind"] == "invalid_argument";
    const int failure = is_input ? kExitInput : kExitEnvironment;
    if (failed != nullptr && plans_ == 0 && !no) {
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

  std::uintmax_t file_bytes() const {
    std::error_code code;
    const auto size = std::filesystem::file_size(path_, code);
    return code ? 0 : size;
  }

  // `compiled`: the plan, where there was none yet.
  Outcome compile(const Work& work, const Target& target, Plan& compiled) const {
    Outcome outcome;
    const Stopwatch clock;
    const lawson_options options = options_.c();
    try {
      if (work.graph) {
        if (Plan plan = earlier_ ? earlier_->find(work.graph, target, options) : nullptr) {
          describe(*plan, outcome);
          outcome.status = Outcome::Status::kept;
          outcome.seconds = clock.seconds();
          return outcome;
        }
        lawson_plan* plan = nullptr;
        const lawson_status status =
            lawson_compile(work.graph.get(), target.device.get(), &options, &plan);
        if (status == LAWSON_OK) {
          compiled.reset(plan);
          describe(*compiled, outcome);
          outcome.status = Outcome::Status::compiled;
          outcome.seconds = clock.seconds();
          return outcome;
        }
        if (status != LAWSON_UNSUPPORTED) throw last_failure(status);
      }
      outcome.reasons = reasons_of(work, target, work.graph ? lawson_last_error_message() : "");
      outcome.status = Outcome::Status::refused;
    } catch (const Failure& failure) {
      outcome.error = failure.json();
      outcome.status = Outcome::Status::failed;
    }
    outcome.seconds = clock.seconds();
    return outcome;
  }

  static void describe(const lawson_plan& plan, Outcome& outcome) {
    outcome.plan_id = lawson_plan_id(&plan);
    outcome.key = lawson_plan_key(&plan);
    outcome.engine = lawson_plan_engine(&plan);
    outcome.plan_name = lawson_plan_name(&plan);
    outcome.workspace_bytes = lawson_plan_workspace_size(&plan);
    outcome.bytes = lawson_text_size(make<Text>(lawson_plan_serialize, &plan).get());
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
  std::size_t jobs_;
  std::string path_;
  std::optional<Earlier> earlier_;
  std::vector<Spec> specs_;
  std::vector<Work> work_;
  std::map<std::string, std::size_t> known_;
  std::vector<Target> targets_;
  std::vector<Outcome> outcomes_;
  std::size_t plans_ = 0;  // compiled or kept
};

int run_compile(const Session& session, const CompileArguments& arguments) {
  Compiler compiler(arguments);
  const Interrupt interrupt;
  compiler.run(arguments.fresh);
  const int code = compiler.exit_code();
  if (session.json) {
    emit(compiler.json());
  } else {
    print_out(compiler.text());
  }
  if (Interrupt::signal() != 0) std::fflush(stdout);
  Interrupt::obey();
  return code;
}

}  // namespace

void add_compile(CLI::App& app, Session& session) {
  auto arguments = std::make_shared<CompileArguments>();
  CLI::App* verb = add_verb(app, session, "compile", "plans ahead of time, into one bundle",
                            "lawson compile examples/specs/seed.json --target h200 -o seed.lawson");
  verb->add_option("spec", arguments->specs,
                   "spec files, or models' config.json; - for standard input")
      ->required()
      ->type_name("SPEC...");
  add_target_option(verb, arguments->targets, "", "GPUs to compile for");
  verb->add_option("-o,--output", arguments->bundle, "the bundle to write")
      ->required()
      ->type_name("BUNDLE");
  verb->add_flag("--fresh", arguments->fresh,
                 "start anew; else plans that BUNDLE has are not built again, and others stay");
  verb->add_option("-j,--jobs", arguments->jobs, "plans built at once; 0: one for each core")
      ->type_name("N")
      ->check(CLI::Range(0, 1024));
  verb->add_option("-e,--engine", arguments->options.engine, "cudnn, cpu or reference")
      ->type_name("NAME");
  add_tuning_options(verb, arguments->options, true);
  add_model_options(verb, arguments->model);
  add_trace_option(verb, session);
  verb->callback([arguments, &session] {
    if (arguments->jobs == 0) arguments->jobs = core_count();
    session.workers = static_cast<int>(arguments->jobs);
    session.action = [arguments, &session] { return run_compile(session, *arguments); };
  });
}

}  // namespace lawson::cli
