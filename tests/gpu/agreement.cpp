// lawson-agreement: does what is judged without a GPU hold on the GPU? Needs a live device.
// For each case of the list: the deviceless verdict for the target equals the live one (for
// attention also the list of plans, in order); every accepted case executes and stays within the
// oracle's bound; and the plan compiled without the device gives the same bits as the one compiled
// on it. Writes one JSON document, prints a short table last. Exits 1 when anything disagrees.
#include <CLI/CLI.hpp>

#include <atomic>
#include <cstring>
#include <fstream>
#include <iostream>
#include <thread>

#include "cases/cases.h"
#include "cases/judge.h"
#include "engine/registry.h"
#include "plan/planner.h"

namespace lawson::cases {
namespace {

struct Flags {
  int attention = 200;
  int fusion = 100;
  int bitwise_every = 4;
  std::uint64_t seed = 2026;
  std::string target = "h200";
  std::string libexec;
  std::string json;
  unsigned threads = std::max(1U, std::thread::hardware_concurrency() / 2);
};

struct Row {
  Case item;
  std::string deviceless;  // supported, unsupported, undecided, error
  std::string live;
  std::string deviceless_reason;
  std::string live_reason;
  bool same_plans = false;
  std::string plan_name;
  std::string plan_id;
  std::string defect;
  std::string executed;  // ok, wrong, error, "" (not accepted)
  std::string detail;
  double ratio = 0;
  std::string bitwise;  // equal, unstable, differs, other plan, wrong, error, "" (not tried)

  bool is_attention() const { return item.spec.at("kind") == "attention"; }
  bool verdicts_differ() const { return deviceless != live && deviceless != "undecided"; }
};

struct Machine {
  plan::Planner& planner;
  Engine& cudnn;
  Engine& reference;
  Device target;  // not present: judged in workers
  Device live;
};

std::string first_reason(const std::vector<Reason>& reasons) {
  return reasons.empty() ? "" : reasons.front().message;
}

bool same_bits(const Judgement& a, const Judgement& b) {
  for (std::size_t i = 0; i < a.outputs.size(); ++i) {
    const auto& x = a.outputs[i];
    if (std::memcmp(x.data(), b.outputs[i].data(), x.bytes()) != 0) return false;
  }
  return true;
}

void compare_bitwise(Machine& machine, const ir::Graph& graph, const JudgeOptions& options,
                     const Judgement& live, Row& row) {
  auto plan = machine.planner.compile(graph, machine.target, "cudnn", options.options);
  if (!plan.ok()) {
    row.bitwise = "error";
    row.detail = plan.error().message;
    return;
  }
  JudgeOptions given = options;
  given.plan = &*plan;
  given.compare = true;  // a plan of another engine config is held to the oracle instead
  auto judged = judge(machine.cudnn, machine.live, graph, machine.reference, given);
  if (!judged.ok()) {
    row.bitwise = "error";
    row.detail = judged.error().message;
  } else if (!judged->comparison.ok()) {
    row.bitwise = "wrong";
    row.detail = judged->comparison.text();
  } else if (plan->plan_name != live.plan.plan_name) {
    row.bitwise = "other plan";
  } else if (same_bits(*judged, live)) {
    row.bitwise = "equal";
  } else {
    // Sums by atomics (dSink, some dQ) differ from run to run of one and the same plan.
    given.plan = &live.plan;
    const auto again = judge(machine.cudnn, machine.live, graph, machine.reference, given);
    row.bitwise = again.ok() && !same_bits(*again, live) ? "unstable" : "differs";
  }
}

void examine(Machine& machine, bool bitwise, Row& row) {
  const auto graph = graph_of(row.item);
  if (!graph.ok()) {
    row.deviceless = row.live = "error";
    row.detail = graph.error().message;
    return;
  }
  const Options options;
  const auto word = [](const Result<Verdict>& verdict, std::string& reason) -> std::string {
    reason = verdict.ok() ? first_reason(verdict->reasons) : verdict.error().message;
    return verdict.ok() ? std::string{to_string(verdict->decision)} : "error";
  };
  const auto deviceless = machine.planner.probe(*graph, machine.target, "cudnn", options);
  const auto live = machine.planner.probe(*graph, machine.live, "cudnn", options);
  row.deviceless = word(deviceless, row.deviceless_reason);
  row.live = word(live, row.live_reason);
  if (!deviceless.ok() || !live.ok()) return;
  row.same_plans = deviceless->plan_names == live->plan_names;
  row.defect = live->defect;
  if (live->decision != Decision::supported) return;

  JudgeOptions how;
  how.seed = row.item.seed;
  how.style = row.item.style;
  const auto judged = judge(machine.cudnn, machine.live, *graph, machine.reference, how);
  if (!judged.ok()) {
    // Accepted by the checks, refused by the build: `judged` is weaker than `built`, and says so.
    row.executed = judged.error().kind == ErrorKind::unsupported ? "not built" : "error";
    row.detail = judged.error().message;
    return;
  }
  row.plan_name = judged->plan.plan_name;
  row.plan_id = judged->plan.plan_id;
  row.ratio = judged->comparison.max_ratio();
  row.executed = judged->comparison.ok() ? "ok" : "wrong";
  if (!judged->comparison.ok()) row.detail = judged->comparison.text();
  // What is wrong by a known defect is wrong in the other plan too.
  if (bitwise && judged->comparison.ok() && live->decision == deviceless->decision) {
    compare_bitwise(machine, *graph, how, *judged, row);
  }
}

Json to_json(const Row& row) {
  Json item{{"case", row.item.name},
            {"text", row.item.text()},
            {"deviceless", row.deviceless},
            {"live", row.live},
            {"same_plan_list", row.same_plans}};
  const auto add = [&item](const char* name, const std::string& value) {
    if (!value.empty()) item[name] = value;
  };
  add("deviceless_reason", row.deviceless_reason);
  add("live_reason", row.live_reason);
  add("plan_name", row.plan_name);
  add("plan_id", row.plan_id);
  add("defect", row.defect);
  add("executed", row.executed);
  add("detail", row.detail);
  add("bitwise", row.bitwise);
  if (row.executed == "ok" || row.executed == "wrong") item["error_over_bound"] = row.ratio;
  return item;
}

struct Counts {
  int cases = 0, differ = 0, undecided = 0, errors = 0, accepted = 0, other_list = 0;
  int ok = 0, wrong = 0, wrong_known = 0, not_built = 0, failed = 0;
  int bitwise_equal = 0, bitwise_unstable = 0, bitwise_other = 0, bitwise_bad = 0;
};

Counts count(const std::vector<Row>& rows, bool attention) {
  Counts c;
  for (const Row& row : rows) {
    if (row.is_attention() != attention) continue;
    ++c.cases;
    c.differ += row.verdicts_differ() ? 1 : 0;
    c.undecided += row.deviceless == "undecided" ? 1 : 0;
    c.errors += row.deviceless == "error" || row.live == "error" ? 1 : 0;
    c.accepted += row.live == "supported" ? 1 : 0;
    c.other_list += row.same_plans ? 0 : 1;
    c.ok += row.executed == "ok" ? 1 : 0;
    c.wrong += row.executed == "wrong" && row.defect.empty() ? 1 : 0;
    c.wrong_known += row.executed == "wrong" && !row.defect.empty() ? 1 : 0;
    c.not_built += row.executed == "not built" ? 1 : 0;
    c.failed += row.executed == "error" ? 1 : 0;
    c.bitwise_equal += row.bitwise == "equal" ? 1 : 0;
    c.bitwise_unstable += row.bitwise == "unstable" ? 1 : 0;
    c.bitwise_other += row.bitwise == "other plan" ? 1 : 0;
    c.bitwise_bad += row.bitwise == "differs" || row.bitwise == "wrong" || row.bitwise == "error";
  }
  return c;
}

Json to_json(const Counts& c) {
  return {{"cases", c.cases},
          {"verdicts_differ", c.differ},
          {"undecided_without_device", c.undecided},
          {"errors", c.errors},
          {"accepted", c.accepted},
          {"other_plan_list", c.other_list},
          {"executed_within_bound", c.ok},
          {"executed_wrong", c.wrong},
          {"executed_wrong_by_known_defect", c.wrong_known},
          {"accepted_but_not_built", c.not_built},
          {"execution_failed", c.failed},
          {"deviceless_plan_bitwise_equal", c.bitwise_equal},
          {"run_to_run_unstable", c.bitwise_unstable},
          {"deviceless_plan_other_config", c.bitwise_other},
          {"deviceless_plan_bad", c.bitwise_bad}};
}

void print(const char* kind, const Counts& c) {
  std::cout << fmt::format("{:<10}{:>6}{:>8}{:>10}{:>8}{:>10}{:>11}{:>7}{:>7}{:>10}{:>9}{:>11}\n",
                           kind, c.cases, c.differ, c.undecided, c.errors, c.accepted,
                           kind[0] == 'a' ? std::to_string(c.other_list) : "-", c.ok,
                           fmt::format("{}+{}", c.wrong, c.wrong_known), c.not_built, c.failed,
                           fmt::format("{}/{}/{}/{}", c.bitwise_equal, c.bitwise_unstable,
                                       c.bitwise_other, c.bitwise_bad));
}

int fail(const Error& error) {
  std::cerr << "lawson-agreement: " << to_string(error.kind) << ": " << error.message << "\n";
  return error.kind == ErrorKind::unavailable ? 77 : 3;  // 77: skipped, no device here
}

int run(const Flags& flags) {
  Engine* cudnn = find_engine("cudnn");
  if (cudnn == nullptr) {
    return fail(error(ErrorKind::unavailable, "this build has no cuDNN engine"));
  }
  auto live = device_of(*cudnn);
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

  std::vector<Row> rows;
  for (auto&& list : {attention_cases(flags.seed, flags.attention, Profile::gpu),
                      fusion_cases(flags.seed, flags.fusion, Profile::gpu)}) {
    for (const Case& item : list) rows.emplace_back().item = item;
  }
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t i = next++; i < rows.size(); i = next++) {
      examine(machine, i % static_cast<std::size_t>(flags.bitwise_every) == 0, rows[i]);
    }
  };
  std::vector<std::jthread> threads;
  for (unsigned i = 0; i < flags.threads; ++i) threads.emplace_back(work);
  threads.clear();

  const Counts attention = count(rows, true);
  const Counts fusion = count(rows, false);
  Json document{{"target", machine.target.title},
                {"device", machine.live.title},
                {"seed", flags.seed},
                {"attention", to_json(attention)},
                {"fusion", to_json(fusion)}};
  Json& list = document["cases"] = Json::array();
  for (const Row& row : rows) list.push_back(to_json(row));
  if (!flags.json.empty()) std::ofstream(flags.json) << document.dump(1) << "\n";

  for (const Row& row : rows) {
    const bool odd = row.verdicts_differ() || row.executed == "wrong" || row.executed == "error" ||
                     row.live == "error" || row.deviceless == "error" ||
                     (row.is_attention() && !row.same_plans) || row.bitwise == "differs" ||
                     row.bitwise == "wrong" || row.bitwise == "error";
    if (!odd) continue;
    std::cout << fmt::format(
        "{}: {} / {} {} {} {} {}\n  {}\n  {}\n", row.item.name, row.deviceless, row.live,
        row.executed, row.bitwise, row.defect, row.detail, row.item.text(),
        row.deviceless_reason.empty() ? row.live_reason : row.deviceless_reason);
  }
  std::cout << "\n          cases  differ undecided  errors  accepted other-list     ok  wrong "
               "not-built   failed bits =/~/o/x\n";
  print("attention", attention);
  print("fusion", fusion);
  const auto bad = [](const Counts& c) {
    return c.differ + c.errors + c.wrong + c.failed + c.bitwise_bad;
  };
  return bad(attention) + attention.other_list + bad(fusion) == 0 ? 0 : 1;
}

}  // namespace
}  // namespace lawson::cases

int main(int argc, char** argv) {
  lawson::cases::Flags flags;
  CLI::App app{"Deviceless verdicts and plans against the live device."};
  app.add_option("--attention", flags.attention, "attention cases");
  app.add_option("--fusion", flags.fusion, "fusion cases");
  app.add_option("--bitwise-every", flags.bitwise_every, "compare plans on every Nth case")
      ->check(CLI::PositiveNumber);
  app.add_option("--seed", flags.seed, "seed of the case list");
  app.add_option("--target", flags.target, "the target that the live device is");
  app.add_option("--libexec", flags.libexec, "folder of the worker and the no-driver library")
      ->required();
  app.add_option("--json", flags.json, "write the result to this file");
  app.add_option("--threads", flags.threads, "cases at once")->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  return lawson::cases::run(flags);
}
