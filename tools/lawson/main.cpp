#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>

#include "verbs.h"

namespace {

using lawson::cli::Failure;
using lawson::cli::Json;
using lawson::cli::Session;

// Usage errors come before the options are known.
bool wants_json(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--json") == 0) return true;
    if (std::strcmp(argv[i], "--") == 0) return false;
  }
  return false;
}

int report(const Failure& failure, bool json) {
  if (json) {
    lawson::cli::emit({{"error", failure.json()}});
  } else {
    fmt::print(stderr, "lawson: {}{}\n",
               failure.exit_code() == lawson::cli::kExitEnvironment
                   ? fmt::format("error ({}): ", failure.kind())
                   : "",
               failure.what());
  }
  return failure.exit_code();
}

int run_action(const Session& session) {
  if (session.cudnn.size() > 1 && !session.several_cudnn) {
    throw lawson::cli::bad_usage("--cudnn is given more than once; only explain compares builds");
  }
  lawson_settings settings{};
  settings.struct_size = sizeof(settings);
  settings.cudnn_path = session.cudnn.empty() ? nullptr : session.cudnn.front().c_str();
  settings.max_workers = session.workers;
  // Always: what the environment says is checked here for every verb.
  lawson::cli::check(lawson_configure(&settings));
  // After a failure the library writes it, at exit.
  if (!session.trace.empty()) lawson::cli::check(lawson_trace_start(session.trace.c_str()));
  const int code = session.action();
  if (!session.trace.empty()) lawson::cli::check(lawson_trace_stop());
  if (std::fflush(stdout) != 0) {
    throw Failure("io", lawson::cli::kExitEnvironment, "standard output cannot be written");
  }
  return code;
}

// CLI11 only says that some subcommand is missing.
void check_verb(const CLI::App& app, const std::string& word) {
  std::vector<std::string> verbs;
  for (const CLI::App* verb : app.get_subcommands(nullptr)) verbs.push_back(verb->get_name());
  if (word.starts_with('-') || std::find(verbs.begin(), verbs.end(), word) != verbs.end()) return;
  throw lawson::cli::bad_usage(
      fmt::format("'{}' is not a verb; expected one of {}", word, fmt::join(verbs, ", ")));
}

int run(int argc, char** argv) {
  Session session;
  CLI::App app{
      "Lawson: will this computation run as one fused GPU kernel, and why not.\n"
      "Exit codes: 0 yes or done, 1 the answer is no, 2 bad usage or input,\n"
      "3 the environment lacks something, an internal error, or undecided."};
  app.name("lawson");
  app.set_version_flag("--version", std::string{"lawson "} + lawson_version());
  app.require_subcommand(1);
  app.failure_message(CLI::FailureMessage::simple);
  lawson::cli::add_check(app, session);
  lawson::cli::add_probe(app, session);
  lawson::cli::add_explain(app, session);
  lawson::cli::add_compile(app, session);
  lawson::cli::add_run(app, session);
  lawson::cli::add_bench(app, session);
  lawson::cli::add_print(app, session);
  lawson::cli::add_targets(app, session);
  lawson::cli::add_cache(app, session);
  lawson::cli::add_info(app, session);
  if (argc == 1) {
    fmt::print(stderr, "{}", app.help());
    return lawson::cli::kExitInput;
  }
  check_verb(app, argv[1]);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& request) {  // --help, --version
    return app.exit(request);
  } catch (const CLI::ParseError& error) {
    const std::string text = error.what();
    throw lawson::cli::bad_usage(text + (text.ends_with('.') ? "" : ".") +
                                 " See: lawson --help, lawson VERB --help");
  }
  return run_action(session);
}

}  // namespace

int main(int argc, char** argv) {
  const bool json = wants_json(argc, argv);
  try {
    try {
      return run(argc, argv);
    } catch (const Failure& failure) {
      return report(failure, json);
    } catch (const std::bad_alloc&) {
      return report({"out_of_memory", lawson::cli::kExitEnvironment, "out of memory"}, json);
    } catch (const std::exception& error) {
      return report({"internal", lawson::cli::kExitEnvironment, error.what()}, json);
    }
  } catch (...) {
    return lawson::cli::kExitEnvironment;
  }
}
