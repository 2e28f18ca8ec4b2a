#include "verbs.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <system_error>

#include "input.h"
#include "terminal.h"

namespace lawson::cli {
namespace {

// The name under which the library finds each GPU of this machine.
std::vector<std::string> gpus_of_this_machine() {
  std::vector<std::string> names;
  for (const Json& device : json_of(lawson_devices_json)) {
    const int ordinal = device.value("ordinal", -1);
    if (ordinal < 0) continue;
    const auto name = device.value("name", fmt::format("cuda:{}", ordinal));
    // Several GPUs of one kind get one verdict.
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  return names;
}

std::string details(const Json& verdict) {
  std::string out;
  const auto line = [&out](const char* name, const std::string& value) {
    if (!value.empty()) out += paragraph(fmt::format("  {:<11}", name), value);
  };
  const auto text = [&verdict](const char* field) { return verdict.value(field, std::string{}); };
  line("plan", text("plan_name"));
  if (verdict.contains("workspace_bytes")) {
    line("workspace", bytes_text(verdict["workspace_bytes"].get<double>()));
  }
  if (const auto rewrites = verdict.value("rewrites", std::vector<std::string>{});
      !rewrites.empty()) {
    line("rewrites", fmt::format("{}", fmt::join(rewrites, ", ")));
  }
  line("choice", text("choice"));
  line("defect", text("defect"));
  line("plan id", text("plan_id"));
  line("key", text("key"));
  return out;
}

constexpr std::size_t kMaxStepLines = 16;

// The distinct steps under context parallelism: those that stand in the way first.
std::string steps_text(const Json& verdict) {
  std::vector<const Json*> steps;
  for (const Json& step : verdict["steps"]) steps.push_back(&step);
  std::stable_partition(steps.begin(), steps.end(), [](const Json* step) {
    return step->value("verdict", std::string{}) != "supported";
  });
  std::string out = fmt::format("  {}\n", counted(steps.size(), "distinct step"));
  for (std::size_t i = 0; i < std::min(steps.size(), kMaxStepLines); ++i) {
    const auto name = steps[i]->value("name", std::string{});
    const auto plan = steps[i]->value("plan_name", std::string{});
    out += paragraph(fmt::format("    {} ", verdict_mark(*steps[i])),
                     plan.empty() ? name : fmt::format("{}, plan {}", name, plan));
  }
  if (steps.size() > kMaxStepLines) {
    out += fmt::format("    and {} more; all of them with --json\n", steps.size() - kMaxStepLines);
  }
  return out;
}

}  // namespace

CLI::App* add_plain_verb(CLI::App& app, Session& session, const std::string& name,
                         const std::string& description, const std::string& example) {
  CLI::App* verb = app.add_subcommand(name, description);
  verb->add_flag("--json", session.json, "one JSON document on standard output");
  verb->footer("Example:\n  " + example);
  return verb;
}

CLI::App* add_verb(CLI::App& app, Session& session, const std::string& name,
                   const std::string& description, const std::string& example) {
  CLI::App* verb = add_plain_verb(app, session, name, description, example);
  verb->add_option("--cudnn", session.cudnn, "a libcudnn.so.9, or the folder that has it")
      ->type_name("PATH")
      ->allow_extra_args(false);
  return verb;
}

void add_target_option(CLI::App* verb, std::vector<std::string>& targets,
                       const std::string& fallback, const std::string& what) {
  verb->add_option("-t,--target", targets,
                   what + ", as in `lawson targets`; default: this machine's GPU" + fallback)
      ->type_name("NAME,...")
      ->allow_extra_args(false);
}

void add_model_options(CLI::App* verb, ModelOptions& options) {
  const CLI::Range sizes(std::int64_t{1}, (std::int64_t{1} << 31) - 1, "1 to 2^31-1");
  verb->add_option("--batch", options.batch, "sequences in a batch of a model (default 1)")
      ->type_name("N")
      ->check(sizes);
  verb->add_option("--seqlen", options.seqlen,
                   "tokens per sequence in prefill and training (default 4096)")
      ->type_name("N")
      ->check(sizes);
  verb->add_option("--context", options.context, "tokens in the cache at decode (default 8192)")
      ->type_name("N")
      ->check(sizes);
  verb->add_option("--pass", options.passes,
                   "prefill, decode, training: which of them (default all)")
      ->type_name("LIST");
  verb->add_option("--dtype", options.dtype, "f16, bf16 or f32 (default: the model's, else bf16)")
      ->type_name("TYPE");
}

void add_tuning_options(CLI::App* verb, ProbeOptions& options, bool compiles) {
  verb->add_option(
          "--tuning", options.tuning,
          "off (the engine's first choice), or the fastest on this machine's device of the "
          "first eight candidates (quick) or of all (exhaustive)")
      ->type_name("KIND")
      ->check(CLI::IsMember({"off", "quick", "exhaustive"}));
  verb->add_option("--deadline", options.deadline_ms,
                   "milliseconds for building and tuning; tuning then gives its best so far")
      ->type_name("MS")
      ->check(CLI::Range(1.0, 1e9, "1 to 1e9"));
  verb->add_flag(
      "--dynamic-shapes", options.dynamic_shapes,
      "products: plans that share kernels with those of other rows, where cuDNN has such");
  if (!compiles) return;
  verb->add_flag("--retune", options.retune,
                 "time the stored candidates again, without building (with --tuning)");
}

void add_trace_option(CLI::App* verb, Session& session) {
  verb->add_option("--trace", session.trace,
                   "write what was done when, for ui.perfetto.dev or chrome://tracing")
      ->type_name("FILE")
      ->check([](const std::string& path) { return path.empty() ? "a file's name" : ""; }, "");
}

void add_seed_option(CLI::App* verb, std::uint64_t& seed) {
  verb->add_option("--seed", seed, "of the generated inputs (default 0)")
      ->type_name("N")
      ->check(
          [](const std::string& text) {
            std::uint64_t value = 0;
            const auto [end, error] =
                std::from_chars(text.data(), text.data() + text.size(), value);
            const bool ok = error == std::errc{} && end == text.data() + text.size();
            return ok ? std::string{} : "Value " + text + " not in range 0 to 2^64 - 1";
          },
          "");
}

void emit(const Json& document) {
  print_out(document.dump(2, ' ', false, Json::error_handler_t::replace) + "\n");
}

std::vector<Target> resolve_targets(const std::vector<std::string>& given,
                                    const std::vector<std::string>& fallback) {
  std::vector<std::string> names = split_list(given);
  if (names.empty()) names = gpus_of_this_machine();
  if (names.empty()) names = fallback;
  if (names.empty()) {
    throw bad_usage(
        "--target is missing, and this machine has no GPU to take instead; `lawson "
        "targets` lists what can be named (for example --target h200)");
  }
  std::vector<Target> targets;
  for (const std::string& name : names) {
    Device device = find_device(name);
    std::string found = lawson_device_name(device.get());
    const bool known = std::any_of(targets.begin(), targets.end(),
                                   [&](const Target& target) { return target.name == found; });
    if (!known) targets.push_back({std::move(found), std::move(device)});
  }
  return targets;
}

std::string verdict_word(const Json& verdict) {
  if (verdict.contains("error")) return paint("error", Style::bad);
  const auto word = verdict.value("verdict", std::string{"undecided"});
  return paint(word, word == "supported"     ? Style::good
                     : word == "unsupported" ? Style::bad
                                             : Style::warning);
}

std::string verdict_text(const Json& verdict, const std::string& subject) {
  std::string out = verdict_word(verdict) + "  " + paint(subject, Style::bold);
  if (verdict.contains("error")) {
    out += '\n' + paragraph("  ", verdict["error"].value("message", std::string{}));
    return out;
  }
  const auto engine = verdict.value("engine", std::string{});
  const auto version =
      verdict.value("cudnn_version", verdict.value("engine_version", std::string{}));
  // A graph that no build has words for is refused without asking one.
  out += paint(
      fmt::format("  on {} · {}{} · {}, {}", verdict.value("target", std::string{}), engine,
                  version.empty() ? "" : ' ' + version, verdict.value("strength", std::string{}),
                  verdict.value("evidence", std::string{})),
      Style::dim);
  out += '\n';
  for (const Json& reason : verdict.value("reasons", Json::array())) {
    out += paragraph("  - ", reason.value("message", std::string{}));
  }
  if (verdict.contains("steps")) out += steps_text(verdict);
  return out + details(verdict);
}

std::string verdict_mark(const Json& verdict) {
  const auto word = verdict.value("verdict", std::string{"error"});
  return word == "supported"   ? paint("✓", Style::good)
         : word == "undecided" ? paint("?", Style::warning)
                               : paint("✗", Style::bad);
}

int exit_code_of(const Json& verdict) {
  const auto word = verdict.value("verdict", std::string{"error"});
  return word == "supported" ? kExitOk : word == "unsupported" ? kExitNo : kExitEnvironment;
}

int worst_exit_code(const std::vector<Json>& verdicts) {
  bool no = false;
  bool undecided = false;
  for (const Json& verdict : verdicts) {
    if (verdict.contains("error")) {
      return verdict["error"].value("kind", "") == "invalid_argument" ? kExitInput
                                                                      : kExitEnvironment;
    }
    no = no || exit_code_of(verdict) == kExitNo;
    undecided = undecided || exit_code_of(verdict) == kExitEnvironment;
  }
  return no ? kExitNo : undecided ? kExitEnvironment : kExitOk;
}

}  // namespace lawson::cli
