// lawson-parity: the case list on one engine.
//   --mode parity   execute and compare with the oracle (exit 1 when anything is wrong)
//   --mode perf     execute and print the time
//   --mode support  print the verdict
//   --mode specs    write the cases as spec files into --out
#include <CLI/CLI.hpp>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <thread>

#include "cases/cases.h"
#include "cases/judge.h"
#include "engine/registry.h"

namespace lawson::cases {
namespace {

struct Flags {
  std::string engine = "cpu";
  std::string mode = "parity";
  std::string kind = "all";
  std::string profile = "any";
  std::string only;  // part of a case's name
  std::string json;
  std::string out;
  int count = 100;
  int sample = 0;  // of the random cases of each kind; 0: all
  std::uint64_t seed = 1;
  std::uint64_t sample_seed = 1;
  int shard = 1;
  int shards = 1;
  int threads = 1;
  bool verbose = false;
};

std::vector<Case> chosen_cases(const Flags& flags) {
  const Profile profile = flags.profile == "gpu" ? Profile::gpu : Profile::any;
  std::vector<Case> cases;
  int number = 0;
  const auto append = [&](std::vector<Case> more) {
    for (Case& item : more) {
      if (number++ % flags.shards != flags.shard - 1) continue;
      if (item.name.find(flags.only) != std::string::npos) cases.push_back(std::move(item));
    }
  };
  const auto some = [&](std::vector<Case> list) {
    if (flags.sample == 0) return list;
    return sampled(std::move(list), static_cast<std::size_t>(flags.sample), flags.sample_seed);
  };
  const bool all = flags.kind == "all";
  if (all || flags.kind == "attention") {
    append(some(attention_cases(flags.seed, flags.count, profile)));
  }
  if (all || flags.kind == "fusion") append(some(fusion_cases(flags.seed, flags.count, profile)));
  if (all || flags.kind == "edge") append(edge_cases());
  if (all || flags.kind == "xla") append(xla_cases());
  return cases;
}

std::string first_reason(const Error& error) {
  return error.message.empty() && !error.reasons.empty() ? error.reasons[0].message : error.message;
}

// What happened to one case; `word` is one of ok, wrong, unsupported, undecided, error.
struct Outcome {
  std::string word;
  std::string detail;
  double ratio = 0;  // largest error / bound
  double seconds = 0;
  std::int64_t elements = 0;
  std::int64_t unjudged = 0;
};

Outcome support(Engine& engine, const Device& device, const ir::Graph& graph) {
  auto verdict = engine.probe(graph, device, {});
  if (!verdict.ok()) return {"error", verdict.error().message};
  if (verdict->decision == Decision::supported) return {"ok", verdict->plan_name};
  return {std::string{to_string(verdict->decision)},
          verdict->reasons.empty() ? "" : verdict->reasons[0].message};
}

Outcome parity(Engine& engine, const Device& device, const ir::Graph& graph, Engine& reference,
               const Case& item, bool perf) {
  JudgeOptions options;
  options.seed = item.seed;
  options.style = item.style;
  options.repetitions = perf ? 5 : 1;
  options.compare = !perf;
  options.in_place = item.seed % 2 == 1;
  auto result = judge(engine, device, graph, reference, options);
  if (!result.ok()) {
    const bool refused = result.error().kind == ErrorKind::unsupported;
    return {refused ? "unsupported" : "error", first_reason(result.error())};
  }
  if (perf) return {"ok", fmt::format("{:.1f} us", result->seconds * 1e6), 0, result->seconds};
  const plan::Comparison& comparison = result->comparison;
  Outcome outcome{result->ok() ? "ok" : "wrong", result->text(), comparison.max_ratio(),
                  result->seconds};
  for (const plan::OutputComparison& output : comparison.outputs) {
    outcome.elements += output.elements;
    outcome.unjudged += output.unjudged;
  }
  return outcome;
}

Outcome outcome_of(const Flags& flags, Engine& engine, const Device& device, Engine& reference,
                   const Case& item) {
  const auto graph = graph_of(item);
  if (!graph.ok()) {
    const bool refused = graph.error().kind == ErrorKind::unsupported;
    return {refused ? "unsupported" : "error", first_reason(graph.error())};
  }
  if (flags.mode == "support") return support(engine, device, *graph);
  return parity(engine, device, *graph, reference, item, flags.mode == "perf");
}

// In the order of the cases.
std::vector<Outcome> outcomes_of(const Flags& flags, Engine& engine, const Device& device,
                                 Engine& reference, const std::vector<Case>& cases) {
  std::vector<Outcome> outcomes(cases.size());
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t i = next++; i < cases.size(); i = next++) {
      outcomes[i] = outcome_of(flags, engine, device, reference, cases[i]);
    }
  };
  std::vector<std::jthread> threads;
  for (int i = 1; i < flags.threads; ++i) threads.emplace_back(work);
  work();
  threads.clear();
  return outcomes;
}

int write_specs(const Flags& flags, const std::vector<Case>& cases) {
  std::filesystem::create_directories(flags.out);
  for (const Case& item : cases) {
    std::ofstream file(std::filesystem::path(flags.out) / (item.name + ".json"));
    file << item.spec.dump(1) << '\n';
    if (!file) {
      std::cerr << "cannot write into " << flags.out << '\n';
      return 3;
    }
  }
  std::cout << fmt::format("{} specs in {}\n", cases.size(), flags.out);
  return 0;
}

int run(const Flags& flags) {
  const std::vector<Case> cases = chosen_cases(flags);
  if (flags.mode == "specs") return write_specs(flags, cases);
  Engine* engine = find_engine(flags.engine);
  Engine* reference = find_engine("reference");
  if (engine == nullptr || reference == nullptr) {
    std::cerr << fmt::format("no engine '{}' in this build\n", flags.engine);
    return 3;
  }
  auto device = device_of(*engine);
  if (!device.ok()) {
    std::cerr << device.error().message << '\n';
    return 3;
  }
  Json report{{"engine", flags.engine}, {"mode", flags.mode},     {"kind", flags.kind},
              {"seed", flags.seed},     {"device", device->name}, {"cases", Json::array()}};
  std::map<std::string, int> tally;
  double worst = 0;
  std::int64_t elements = 0;
  std::int64_t unjudged = 0;
  const std::vector<Outcome> outcomes = outcomes_of(flags, *engine, *device, *reference, cases);
  for (std::size_t i = 0; i < cases.size(); ++i) {
    const Case& item = cases[i];
    const Outcome& outcome = outcomes[i];
    ++tally[outcome.word];
    worst = std::max(worst, outcome.ratio);
    elements += outcome.elements;
    unjudged += outcome.unjudged;
    const bool bad = outcome.word == "wrong" || outcome.word == "error";
    if (bad || flags.verbose || flags.mode != "parity") {
      std::cout << fmt::format("{:<12} {}\n             {}\n", outcome.word, item.text(),
                               outcome.detail);
    }
    report["cases"].push_back({{"name", item.name},
                               {"outcome", outcome.word},
                               {"detail", outcome.detail},
                               {"ratio", outcome.ratio},
                               {"seconds", outcome.seconds},
                               {"unjudged", outcome.unjudged},
                               {"style", plan::to_string(item.style)},
                               {"seed", item.seed},
                               {"spec", item.spec}});
  }
  std::string summary =
      fmt::format("{} {} on {}: {} cases", flags.engine, flags.mode, device->name, cases.size());
  for (const auto& [word, count] : tally) summary += fmt::format(", {} {}", count, word);
  if (flags.mode == "parity") {
    summary += fmt::format(", largest error {:.3f} of its bound, {} of {} elements not judged",
                           worst, unjudged, elements);
  }
  std::cout << summary << '\n';
  report["summary"] = tally;
  if (!flags.json.empty()) {
    std::ofstream file(flags.json);
    file << report.dump(1, ' ', false, Json::error_handler_t::replace) << '\n';
    if (!file) {
      std::cerr << "cannot write " << flags.json << '\n';
      return 3;
    }
  }
  return tally.contains("wrong") || tally.contains("error") ? 1 : 0;
}

}  // namespace
}  // namespace lawson::cases

int main(int argc, char** argv) {
  lawson::cases::Flags flags;
  CLI::App app{"The parity case list on one engine"};
  app.footer(
      "CI runs samples of the lists:\n"
      "  lawson-parity --kind attention --count 20000 --sample 2000 --threads 2\n"
      "  lawson-parity --kind fusion --count 3000 --sample 600 --threads 2\n"
      "All of them (attention: about half an hour on two cores):\n"
      "  lawson-parity --kind attention --count 20000 --threads 2\n"
      "  lawson-parity --kind fusion --count 3000 --threads 2");
  app.add_option("--engine", flags.engine, "cpu, reference or cudnn");
  app.add_option("--mode", flags.mode)
      ->check(CLI::IsMember({"parity", "perf", "support", "specs"}));
  app.add_option("--kind", flags.kind)
      ->check(CLI::IsMember({"all", "attention", "fusion", "edge", "xla"}));
  app.add_option("--profile", flags.profile, "what is drawn: anything, or what GPUs usually take")
      ->check(CLI::IsMember({"any", "gpu"}));
  app.add_option("--count", flags.count, "random cases of each kind");
  app.add_option("--seed", flags.seed, "of the list");
  app.add_option("--sample", flags.sample,
                 "of the random cases of each kind: covering rows and a draw of the others");
  app.add_option("--sample-seed", flags.sample_seed);
  app.add_option("--shard", flags.shard, "which part of --shards, from 1 on")
      ->check(CLI::PositiveNumber);
  app.add_option("--shards", flags.shards)->check(CLI::PositiveNumber);
  app.add_option("--threads", flags.threads, "cases at once")->check(CLI::PositiveNumber);
  app.add_option("--only", flags.only, "cases whose name contains this");
  app.add_option("--json", flags.json, "write a report");
  app.add_option("--out", flags.out, "folder for --mode specs");
  app.add_flag("--verbose", flags.verbose, "print every case");
  CLI11_PARSE(app, argc, argv);
  if (flags.shard > flags.shards) {
    std::cerr << fmt::format("--shard {} of {}\n", flags.shard, flags.shards);
    return 2;
  }
  return lawson::cases::run(flags);
}
