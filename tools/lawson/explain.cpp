// explain SPEC: the verdict, every failing condition, and what would fuse instead.
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "input.h"
#include "tasks.h"
#include "terminal.h"
#include "verbs.h"

extern "C" char** environ;

namespace lawson::cli {
namespace {

struct ExplainArguments {
  std::string spec;
  std::vector<std::string> targets;
  std::string engine;
  std::size_t limit = 0;
  bool build = false;
};

// A pipe or a memory file, closed at the end.
class Descriptor {
 public:
  explicit Descriptor(int value) : value_{value} {
    if (value < 0) {
      throw Failure("io", kExitEnvironment, fmt::format("no descriptor: {}", std::strerror(errno)));
    }
  }
  ~Descriptor() { close(value_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int value() const { return value_; }

 private:
  int value_;
};

void write_all(int descriptor, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = write(descriptor, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) throw Failure("io", kExitEnvironment, "a temporary file cannot be written");
    text.remove_prefix(static_cast<std::size_t>(written));
  }
}

// The other cuDNN build is judged by another process of this tool: one process has one cuDNN.
Json probe_with(const std::string& cudnn, const std::string& spec, const std::string& target,
                bool build) {
  const Descriptor input(memfd_create("spec", MFD_CLOEXEC));
  const Descriptor output(memfd_create("verdict", MFD_CLOEXEC));
  write_all(input.value(), spec);
  lseek(input.value(), 0, SEEK_SET);

  std::vector<std::string> words{"lawson", "probe",  "-",       "--target",
                                 target,   "--json", "--cudnn", cudnn};
  if (build) words.emplace_back("--build");
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions{};
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, input.value(), STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, output.value(), STDOUT_FILENO);
  pid_t child = 0;
  const int code = posix_spawn(&child, "/proc/self/exe", &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (code != 0) {
    throw Failure("io", kExitEnvironment,
                  fmt::format("another process cannot be started: {}", std::strerror(code)));
  }
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  std::string text;
  std::array<char, 4096> block{};
  lseek(output.value(), 0, SEEK_SET);
  for (ssize_t got = 0; (got = read(output.value(), block.data(), block.size())) > 0;) {
    text.append(block.data(), static_cast<std::size_t>(got));
  }
  Json verdict = Json::parse(text, nullptr, false);
  if (!verdict.is_object()) {
    verdict = {{"error", {{"kind", "internal"}, {"message", "that process gave no verdict"}}}};
  }
  return verdict;
}

Json explain_one(const Document& document, const Spec& spec, const Target& target,
                 const ExplainArguments& arguments, const std::vector<std::string>& other_cudnn) {
  ProbeOptions options;
  options.engine = arguments.engine;
  if (arguments.build) options.strength = LAWSON_BUILT;
  const lawson_options c_options = options.c();
  Json answer =
      json_of(lawson_explain, spec.get(), target.device.get(), &c_options, arguments.limit);
  answer["spec"] = document.source;
  answer["verdict"]["spec"] = document.source;
  for (const std::string& cudnn : other_cudnn) {
    Json verdict = probe_with(cudnn, document.text, target.name, arguments.build);
    const auto version = verdict.value("cudnn_version", std::string{});
    answer["neighbours"].push_back(
        {{"change",
          version.empty() ? "with " + cudnn : fmt::format("with cuDNN {} ({})", version, cudnn)},
         {"field", "cudnn"},
         {"kind", "cudnn"},
         {"verdict", std::move(verdict)}});
  }
  return answer;
}

// Another cuDNN build is listed whatever it says; other neighbours are those that fuse.
std::string neighbour_text(const Json& neighbour) {
  const Json& verdict = neighbour["verdict"];
  const auto word = verdict.value("verdict", std::string{"error"});
  std::string why;
  if (verdict.contains("error")) {
    why = ": " + verdict["error"].value("message", std::string{});
  } else if (word != "supported" && !verdict["reasons"].empty()) {
    why = ": " + verdict["reasons"][0].value("message", std::string{});
  }
  return paragraph("  " + verdict_mark(verdict) + " ",
                   neighbour.value("change", std::string{}) + why);
}

std::string explain_text(const Json& answer, const std::string& name) {
  std::string out = verdict_text(answer["verdict"], name);
  const Json conditions = answer.value("conditions", Json::array());
  if (!conditions.empty()) {
    std::vector<std::string> names;
    bool joint = false;
    for (const Json& condition : conditions) {
      auto told = condition.value("field", std::string{});
      if (told.empty()) told = condition.value("message", std::string{});
      if (condition.contains("value")) {
        told += " = " + shortened(condition["value"].dump(), screen_width(std::string::npos) / 2);
      }
      // The conditions of one field differ in what they say of it.
      if (std::find(names.begin(), names.end(), told) == names.end()) names.push_back(told);
      joint = joint || condition.value("enough", "") == "together";
    }
    out += '\n' + paint("Failing conditions", Style::bold) + '\n' +
           paragraph("  ", fmt::format("{}{}", fmt::join(names, joint ? " and " : ", or "),
                                       joint              ? ": these have to change together"
                                       : names.size() > 1 ? ": changing one is enough"
                                                          : ""));
  }
  const Json neighbours = answer.value("neighbours", Json::array());
  const auto probed = answer.value("probed", std::size_t{0});
  if (probed == 0 && neighbours.empty()) return out;
  out += '\n' + paint(fmt::format("What fuses nearby ({} probed)", probed), Style::bold) + '\n';
  if (neighbours.empty()) out += "  nothing of it\n";
  for (const Json& neighbour : neighbours) out += neighbour_text(neighbour);
  return out;
}

int run_explain(const Session& session, const ExplainArguments& arguments) {
  const Document document = read_document(arguments.spec);
  const Spec spec = read_spec(document);
  const std::vector<Target> targets = resolve_targets(arguments.targets, {});
  const std::vector<std::string> others(
      session.cudnn.empty() ? session.cudnn.end() : session.cudnn.begin() + 1, session.cudnn.end());
  std::vector<Json> answers(targets.size());
  {
    Progress progress("explaining", targets.size());
    run_tasks(targets.size(), [&](std::size_t i) {
      answers[i] = explain_one(document, spec, targets[i], arguments, others);
      progress.step();
    });
  }
  std::vector<Json> verdicts;
  std::string out;
  for (const Json& answer : answers) {
    verdicts.push_back(answer["verdict"]);
    if (!out.empty()) out += '\n';
    out += explain_text(answer, lawson_spec_name(spec.get()));
  }
  if (session.json) {
    emit(answers.size() == 1 ? answers[0] : Json(answers));
  } else {
    print_out(out);
  }
  return worst_exit_code(verdicts);
}

}  // namespace

void add_explain(CLI::App& app, Session& session) {
  auto arguments = std::make_shared<ExplainArguments>();
  CLI::App* verb = add_verb(app, session, "explain",
                            "the verdict, every failing condition, and what would fuse instead",
                            "lawson explain examples/specs/attention-softcap.json --target a100");
  verb->get_option("--cudnn")->description(
      "a libcudnn.so.9, or the folder that has it; repeated: other builds to compare with");
  verb->add_option("spec", arguments->spec, "a spec file (docs/spec.md), or - for standard input")
      ->required()
      ->type_name("SPEC");
  add_target_option(verb, arguments->targets, "");
  verb->add_option("-e,--engine", arguments->engine, "cudnn, cpu or reference")->type_name("NAME");
  verb->add_option("--limit", arguments->limit, "the most neighbours to probe")
      ->type_name("N")
      ->check(CLI::Range(1, 1000));
  verb->add_flag("--build", arguments->build, "also compile the kernels");
  verb->callback([arguments, &session] {
    session.several_cudnn = true;
    session.action = [arguments, &session] { return run_explain(session, *arguments); };
  });
}

}  // namespace lawson::cli
