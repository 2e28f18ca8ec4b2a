// The verbs, and what they have in common.
#pragma once

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "api.h"

namespace lawson::cli {

// One call of the tool: filled by the command line, run by main.
struct Session {
  bool json = false;
  std::vector<std::string> cudnn;  // --cudnn
  bool several_cudnn = false;      // may the verb be given more than one?
  std::string trace;               // --trace; empty: none
  int workers = 0;                 // processes at once that build for GPUs elsewhere; 0: as usual
  std::function<int()> action;     // of the verb that was named; returns the exit code
};

// A verb with the option that all have: --json.
CLI::App* add_plain_verb(CLI::App& app, Session& session, const std::string& name,
                         const std::string& description, const std::string& example);
// And --cudnn, where engines are asked.
CLI::App* add_verb(CLI::App& app, Session& session, const std::string& name,
                   const std::string& description, const std::string& example);

void add_targets(CLI::App& app, Session& session);
void add_check(CLI::App& app, Session& session);
void add_probe(CLI::App& app, Session& session);
void add_explain(CLI::App& app, Session& session);
void add_compile(CLI::App& app, Session& session);
void add_run(CLI::App& app, Session& session);
void add_bench(CLI::App& app, Session& session);
void add_print(CLI::App& app, Session& session);
void add_cache(CLI::App& app, Session& session);
void add_info(CLI::App& app, Session& session);

// Options that several verbs share.
void add_target_option(CLI::App* verb, std::vector<std::string>& targets,
                       const std::string& fallback, const std::string& what = "GPUs to judge for");
void add_model_options(CLI::App* verb, struct ModelOptions& options);
// --tuning, --deadline and, where plans are compiled, --retune.
void add_tuning_options(CLI::App* verb, ProbeOptions& options, bool compiles);
// --trace FILE.
void add_trace_option(CLI::App* verb, Session& session);
// --seed of generated inputs.
void add_seed_option(CLI::App* verb, std::uint64_t& seed);

// --json: the one document on standard output.
void emit(const Json& document);

struct Target {
  std::string name;
  Device device;
};

// The named devices; when none is named this machine's GPUs, and without one `fallback`.
std::vector<Target> resolve_targets(const std::vector<std::string>& given,
                                    const std::vector<std::string>& fallback);

// A verdict's line and details for people, as probe and explain show it.
std::string verdict_text(const Json& verdict, const std::string& subject);
// " supported", "unsupported", ... in its colour.
std::string verdict_word(const Json& verdict);
std::string verdict_mark(const Json& verdict);  // one sign
// Exit code of one verdict: 0 supported, 1 unsupported, 3 undecided or an error.
int exit_code_of(const Json& verdict);
// Of several: what went wrong (3, 2) wins over "no" (1), and that over undecided (3).
int worst_exit_code(const std::vector<Json>& verdicts);

}  // namespace lawson::cli
