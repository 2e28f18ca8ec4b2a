// lawson-agreement: does what is judged without a GPU hold on the GPU? Needs a live device.
// For each case of the list: the deviceless verdict for the target equals the live one (for
// attention also the list of plans, in order; for fusions, where the live build refuses what was
// judged, the build without the device refuses it too); every refusal has a reason; every accepted
// case executes on the engine and plan that were asked for, stays within the oracle's bound, writes
// its outputs and nothing else; and the plan compiled without the device is right too, and of the
// same name gives the same bits. Writes one JSON
// document, prints a short table last. Exits 1 when anything disagrees.
#include <CLI/CLI.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <iostream>
#include <set>
#include <thread>

#include "cases/xla.h"
#include "engine/registry.h"
#include "gpu/examine.h"
#include "gpu/result.h"
#include "gpu/tables.h"

namespace lawson::cases {
namespace {

using Clock = std::chrono::steady_clock;

struct Flags {
  int forward = 1500;
  int backward = 1000;
  int fusion = 1000;
  bool xla = true;
  int bitwise_every = 8;
  bool edges = true;
  bool judge_only = false;  // without a device
  std::uint64_t seed = 2026;
  std::string target = "h200";
  std::string libexec;
  std::string json;
  std::string only;  // part of a case's name
  double budget = 300;
  double case_budget = 30;
  unsigned threads = std::max(1U, std::thread::hardware_concurrency());
};

// So many forward and backward cases, the covering rows first.
std::vector<Case> attention_list(const Flags& flags) {
  const int drawn = 2 * (flags.forward + flags.backward);
  int forward = flags.forward;
  int backward = flags.backward;
  std::vector<Case> list;
  for (Case& item : attention_cases(flags.seed, drawn, Profile::gpu)) {
    int& left = item.spec.at("pass") == "backward" ? backward : forward;
    if (left-- > 0) list.push_back(std::move(item));
  }
  return list;
}

std::vector<Row> rows_of(const Flags& flags) {
  std::vector<Row> rows;
  const auto append = [&](std::vector<Case> list) {
    for (Case& item : list) {
      if (item.name.find(flags.only) == std::string::npos) continue;
      // cuDNN multiplies masked values by 0: what no sequence has must be finite
      // (docs/attention.md).
      if (item.style == plan::InputStyle::poisoned) continue;
      rows.emplace_back().item = std::move(item);
    }
  };
  append(attention_list(flags));
  if (flags.edges) append(edge_cases());
  append(fusion_cases(flags.seed, flags.fusion, Profile::gpu));
  if (!flags.xla) return rows;
  std::vector<Case> named;
  std::set<std::string> executable;
  for (XlaCase& item : xla_list()) {
    if (item.executable) executable.insert(item.item.name);
    named.push_back(std::move(item.item));
  }
  append(std::move(named));
  for (Row& row : rows) {
    row.must_run = executable.contains(row.item.name);
    row.tuned = row.item.name == "xla-autotuning-s8-bf16";
  }
  return rows;
}

// ---- what went wrong ----

bool bad_bits(const Row& row) {
  return row.bitwise == "differs" || row.bitwise == "wrong" || row.bitwise == "error";
}

// "" when nothing did.
std::string fault(const Flags& flags, const Row& row) {
  if (row.live == "error" || row.deviceless == "error") return "error: " + row.message;
  if (row.verdicts_differ()) return "verdicts differ";
  if (row.is_attention() && !row.same_plans) return "other list of plans";
  // A fusion's refusal names the engines that were asked; without the device one of them cannot be.
  if (row.live == "unsupported" && row.is_attention() && !row.same_reasons) return "other reasons";
  if (row.live == "unsupported" && (row.reasons.empty() || row.reasons.front().message.empty())) {
    return "refused without a reason";
  }
  if (row.live == "undecided") return "undecided on the device";
  if (row.must_run && row.live != "supported") return "has to run, and is refused";
  if (row.executed == "wrong") return row.defect.empty() ? "wrong" : "wrong, known defect";
  if (row.executed == "error" || row.executed == "not built") return row.executed;
  if (bad_bits(row)) return "bits: " + row.bitwise;
  const Seconds& s = row.seconds;
  if (s.deviceless + s.live + s.compile + s.oracle + s.run > flags.case_budget) return "too slow";
  return "";
}

// ---- counts ----

struct Counts {
  std::map<std::string, int> of;
  std::map<std::string, int> engines;  // cuDNN's engine of what ran
  std::map<std::string, int> rewrites;
  std::map<std::string, int> dropout;
  std::set<std::string> plans;
};

// "eng9" of "eng9_k24=7".
std::string engine_of(const std::string& plan_name) {
  return plan_name.substr(0, plan_name.find('_'));
}

Counts count(const Flags& flags, const std::vector<Row>& rows, const std::string& group) {
  Counts c;
  for (const char* word : {"cases", "accepted", "refused", "within_bound", "faults"})
    c.of[word] = 0;
  for (const Row& row : rows) {
    const bool edge = row.item.name.starts_with("edge") || row.item.name.starts_with("nan");
    const std::string own = row.is_named()        ? "xla"
                            : !row.is_attention() ? "fusion"
                            : edge                ? "edges"
                            : row.is_backward()   ? "backward"
                                                  : "forward";
    if (own != group) continue;
    if (row.live.empty()) {
      ++c.of["not_examined"];
      continue;
    }
    ++c.of["cases"];
    ++c.of[row.live == "supported" ? "accepted" : "refused"];
    c.of["within_bound"] += row.executed == "ok" ? 1 : 0;
    if (!fault(flags, row).empty()) {
      ++c.of["faults"];
      ++c.of["faults: " + fault(flags, row).substr(0, fault(flags, row).find(':'))];
    }
    if (row.deviceless == "undecided") ++c.of["undecided_without_device"];
    if (row.not_built) ++c.of["judged_and_not_built"];
    if (row.live == "unsupported" && row.deviceless == row.live && !row.same_reasons) {
      ++c.of["refused_in_other_words"];
    }
    if (!row.bitwise.empty()) ++c.of["deviceless_plan: " + row.bitwise];
    if (row.executed.empty()) continue;
    ++c.engines[engine_of(row.plan_name)];
    c.plans.insert(row.plan_id);
    for (const std::string& rewrite : row.rewrites) ++c.rewrites[rewrite];
    if (!row.dropout.empty()) ++c.dropout[row.dropout];
  }
  return c;
}

Json to_json(const Counts& c) {
  return {{"counts", c.of},
          {"engines", c.engines},
          {"rewrites", c.rewrites},
          {"dropout", c.dropout},
          {"distinct_plan_ids", c.plans.size()}};
}

Json to_json(const Row& row, const std::string& what) {
  Json item{{"case", row.item.name},
            {"fault", what},
            {"input", plan::to_string(row.item.style)},
            {"seed", row.item.seed},
            {"deviceless", row.deviceless},
            {"live", row.live},
            {"spec", row.item.spec}};
  const auto add = [&item](const char* name, const std::string& value) {
    if (!value.empty()) item[name] = value;
  };
  add("reason", row.reasons.empty() ? "" : row.reasons.front().message);
  add("plan_name", row.plan_name);
  add("plan_id", row.plan_id);
  add("defect", row.defect);
  add("executed", row.executed);
  add("detail", row.detail);
  add("bitwise", row.bitwise);
  if (!row.rewrites.empty()) item["rewrites"] = row.rewrites;
  return item;
}

Json seconds_of(const std::vector<Row>& rows, double wall) {
  Seconds sum;
  double slowest = 0;
  for (const Row& row : rows) {
    const Seconds& s = row.seconds;
    sum.deviceless += s.deviceless;
    sum.live += s.live;
    sum.compile += s.compile;
    sum.oracle += s.oracle;
    sum.run += s.run;
    sum.bitwise += s.bitwise;
    slowest = std::max(slowest, s.deviceless + s.live + s.compile + s.oracle + s.run);
  }
  const auto rounded = [](double x) { return std::round(x * 10) / 10; };
  return {{"wall", rounded(wall)},
          {"deviceless_probes", rounded(sum.deviceless)},
          {"live_probes", rounded(sum.live)},
          {"builds", rounded(sum.compile)},
          {"oracle", rounded(sum.oracle)},
          {"runs", rounded(sum.run)},
          {"bitwise", rounded(sum.bitwise)},
          {"slowest_case", rounded(slowest)}};
}

// ---- the run ----

void examine_all(const Flags& flags, Machine& machine, std::vector<Row>& rows) {
  const auto end = Clock::now() + std::chrono::duration<double>(flags.budget);
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t i = next++; i < rows.size() && Clock::now() < end; i = next++) {
      const bool bitwise = i % static_cast<std::size_t>(flags.bitwise_every) == 0;
      examine(machine, bitwise || rows[i].is_named(), rows[i]);
      // One of those in flight did it; what came after would only fail in its wake.
      if (rows[i].context_lost) next = rows.size();
    }
  };
  std::vector<std::jthread> threads;
  for (unsigned i = 0; i < flags.threads; ++i) threads.emplace_back(work);
}

// Every named case with what ran.
Json named_table(const std::vector<Row>& rows) {
  Json list = Json::array();
  for (const Row& row : rows) {
    if (!row.is_named()) continue;
    list.push_back({{"case", row.item.name},
                    {"deviceless", row.deviceless},
                    {"live", row.live},
                    {"executed", row.executed},
                    {"engine", row.engine},
                    {"plan_name", row.plan_name},
                    {"plan_id", row.plan_id},
                    {"deviceless_plan", row.bitwise}});
  }
  return list;
}

int fail(const Error& error) {
  std::cerr << "lawson-agreement: " << to_string(error.kind) << ": " << error.message << "\n";
  return error.kind == ErrorKind::unavailable ? 77 : 3;  // 77: skipped, no device here
}

int report(const Flags& flags, const Machine& machine, const std::vector<Row>& rows, double wall) {
  Json document{{"target", machine.target.title},
                {"device", machine.live.title},
                {"seed", flags.seed},
                {"seconds", seconds_of(rows, wall)}};
  int bad = 0;
  std::cout << fmt::format("{:<10}{:>7}{:>10}{:>9}{:>8}{:>8}{:>9}\n", "", "cases", "accepted",
                           "refused", "ok", "faults", "not run");
  for (const char* group : {"forward", "backward", "edges", "fusion", "xla"}) {
    Counts c = count(flags, rows, group);
    std::cout << fmt::format("{:<10}{:>7}{:>10}{:>9}{:>8}{:>8}{:>9}\n", group, c.of["cases"],
                             c.of["accepted"], c.of["refused"], c.of["within_bound"],
                             c.of["faults"], c.of["not_examined"]);
    bad += c.of["faults"] + c.of["not_examined"];
    document[group] = to_json(c);
  }
  document["features"] = feature_table(rows);
  document["ops"] = op_table(rows);
  document["reasons"] = reason_table(rows);
  document["named"] = named_table(rows);
  Json& failures = document["failures"] = Json::array();
  for (const Row& row : rows) {
    const std::string what = row.live.empty() ? "" : fault(flags, row);
    if (!what.empty()) failures.push_back(to_json(row, what));
  }
  std::size_t printed = 0;
  for (const Json& failure : failures) {
    if (++printed > 40) break;
    std::cout << fmt::format("{}: {}\n  {}\n", failure["case"].get<std::string>(),
                             failure["fault"].get<std::string>(),
                             failure.value("detail", failure.value("reason", std::string{})));
  }
  std::cout << document["seconds"].dump() << '\n';
  if (const Status written = write_result(flags.json, document); !written.ok()) {
    return fail(written.error());
  }
  return bad == 0 ? 0 : 1;
}

int run(const Flags& flags) {
  Engine* cudnn = find_engine("cudnn");
  if (cudnn == nullptr) {
    return fail(error(ErrorKind::unavailable, "this build has no cuDNN engine"));
  }
  auto live = flags.judge_only ? Result<Device>{Device{}} : device_of(*cudnn);
  if (!live.ok()) return fail(live.error());
  plan::PlannerConfig config;
  config.engines = engines();
  config.worker_path = flags.libexec + "/lawson-worker";
  config.nodriver_path = flags.libexec + "/liblawson-nodriver.so";
  config.max_workers = static_cast<int>(flags.threads);
  plan::Planner planner(std::move(config));
  Machine machine{planner, *cudnn, *find_engine("reference"), {}, *live};
  for (const Device& device : cudnn->known_targets()) {
    if (device.name == flags.target) machine.target = device;
  }
  if (machine.target.name.empty()) return fail(invalid("no target '{}'", flags.target));
  if (flags.judge_only) machine.live = machine.target;

  const auto start = Clock::now();
  std::vector<Row> rows = rows_of(flags);
  examine_all(flags, machine, rows);
  const std::chrono::duration<double> wall = Clock::now() - start;
  return report(flags, machine, rows, wall.count());
}

}  // namespace
}  // namespace lawson::cases

int main(int argc, char** argv) {
  lawson::cases::Flags flags;
  CLI::App app{"Deviceless verdicts and plans against the live device."};
  app.add_option("--forward", flags.forward, "forward attention cases");
  app.add_option("--backward", flags.backward, "backward attention cases");
  app.add_option("--fusion", flags.fusion, "fusion cases");
  app.add_option("--edges", flags.edges, "the edge cases too");
  app.add_option("--xla", flags.xla, "what XLA's tests prove too");
  app.add_flag("--judge-only", flags.judge_only, "only the deviceless verdicts, on any machine");
  app.add_option("--only", flags.only, "cases whose name contains this");
  app.add_option("--bitwise-every", flags.bitwise_every, "compare plans on every Nth case")
      ->check(CLI::PositiveNumber);
  app.add_option("--seed", flags.seed, "seed of the case list");
  app.add_option("--target", flags.target, "the target that the live device is");
  app.add_option("--libexec", flags.libexec, "folder of the worker and the no-driver library")
      ->required();
  app.add_option("--json", flags.json, "write the result to this file");
  app.add_option("--threads", flags.threads, "cases at once")->check(CLI::PositiveNumber);
  app.add_option("--budget", flags.budget,
                 "seconds; cases that were not begun by then count as bad");
  app.add_option("--case-budget", flags.case_budget, "seconds of one case");
  CLI11_PARSE(app, argc, argv);
  return lawson::cases::run(flags);
}
