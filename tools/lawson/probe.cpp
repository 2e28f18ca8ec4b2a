// probe SPEC...: one verdict per spec and target.
#include <fmt/format.h>

#include <algorithm>

#include "input.h"
#include "table.h"
#include "tasks.h"
#include "verbs.h"

namespace lawson::cli {
namespace {

struct ProbeArguments {
  std::vector<std::string> specs;
  std::vector<std::string> targets;
  ProbeOptions options;
  bool build = false;
  bool verify = false;
};

struct Question {
  std::string source;
  Spec spec;
};

Json answer(const Question& question, const Target& target, const ProbeOptions& options) {
  try {
    Json verdict = probe(question.spec, target.device, options);
    verdict["spec"] = question.source;
    return verdict;
  } catch (const Failure& failure) {
    return {{"spec", question.source}, {"target", target.name}, {"error", failure.json()}};
  }
}

std::string table_of(const std::vector<Json>& verdicts) {
  Table table;
  table.column("spec");
  table.column("target");
  table.column("verdict");
  table.column("plan, or why not", Table::Align::left, true);
  for (const Json& verdict : verdicts) {
    std::string detail = verdict.value("plan_name", std::string{});
    if (verdict.contains("error")) {
      detail = verdict["error"].value("message", std::string{});
    } else if (!verdict["reasons"].empty()) {
      detail = verdict["reasons"][0].value("message", std::string{});
    }
    const auto word = verdict.value("verdict", std::string{"error"});
    const Style style = word == "supported"   ? Style::good
                        : word == "undecided" ? Style::warning
                                              : Style::bad;
    table.row({{verdict["spec"].get<std::string>()},
               {verdict["target"].get<std::string>()},
               {word, style},
               {detail, Style::dim}});
  }
  return table.text();
}

int run_probe(const Session& session, const ProbeArguments& arguments) {
  std::vector<Question> questions;
  for (const std::string& path : arguments.specs) {
    const Document document = read_document(path);
    questions.push_back({document.source, read_spec(document)});
  }
  ProbeOptions options = arguments.options;
  if (arguments.build) options.strength = LAWSON_BUILT;
  if (arguments.verify) options.strength = LAWSON_VERIFIED;
  const bool host_engine = options.engine == "cpu" || options.engine == "reference";
  const std::vector<Target> targets = host_engine && arguments.targets.empty()
                                          ? resolve_targets({"cpu"}, {})
                                          : resolve_targets(arguments.targets, {});

  std::vector<Json> verdicts(questions.size() * targets.size());
  {
    Progress progress("probing", verdicts.size());
    run_tasks(verdicts.size(), [&](std::size_t i) {
      verdicts[i] = answer(questions[i / targets.size()], targets[i % targets.size()], options);
      progress.step();
    });
  }
  if (verdicts.size() == 1 && verdicts[0].contains("error")) {
    const Json& error = verdicts[0]["error"];
    throw Failure(error["kind"], worst_exit_code(verdicts), error["message"]);
  }
  if (session.json) {
    emit(verdicts.size() == 1 ? verdicts[0] : Json(verdicts));
  } else if (verdicts.size() == 1) {
    print_out(verdict_text(verdicts[0], lawson_spec_name(questions[0].spec.get())));
  } else {
    print_out(table_of(verdicts));
  }
  return worst_exit_code(verdicts);
}

}  // namespace

void add_probe(CLI::App& app, Session& session) {
  auto arguments = std::make_shared<ProbeArguments>();
  CLI::App* verb = add_verb(app, session, "probe", "the verdict on a spec: does it fuse",
                            "lawson probe examples/specs/seed.json --target h200");
  verb->add_option("spec", arguments->specs, "spec files (docs/spec.md), or - for standard input")
      ->required()
      ->type_name("SPEC...");
  add_target_option(verb, arguments->targets, "");
  verb->add_option("-e,--engine", arguments->options.engine, "cudnn, cpu or reference")
      ->type_name("NAME");
  verb->add_flag("--build", arguments->build, "also compile the kernel");
  verb->add_flag("--verify", arguments->verify,
                 "also run it and compare with the oracle; needs the device");
  add_tuning_options(verb, arguments->options, false);
  verb->callback([arguments, &session] {
    session.action = [arguments, &session] { return run_probe(session, *arguments); };
  });
}

}  // namespace lawson::cli
