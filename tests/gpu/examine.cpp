#include "gpu/examine.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <optional>

#include "cases/expected.h"

namespace lawson::cases {
namespace {

class Stopwatch {
 public:
  explicit Stopwatch(double& total) : total_{total} {}
  ~Stopwatch() {
    total_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& total_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

bool same_bits(const Judgement& a, const Judgement& b) {
  for (std::size_t i = 0; i < a.outputs.size(); ++i) {
    const auto& x = a.outputs[i];
    if (std::memcmp(x.data(), b.outputs[i].data(), x.bytes()) != 0) return false;
  }
  return true;
}

bool has_stream(const Case& item) {
  return item.spec.at("kind") == "attention" && item.spec.value("dropout", 0.0) > 0 &&
         !item.spec.value("dropout_mask", false);
}

// ---- execution ----

void note(const Judgement& judged, Row& row) {
  row.ratio = judged.comparison.max_ratio();
  row.executed = judged.ok() ? "ok" : "wrong";
  if (!judged.ok()) row.detail = judged.text();
}

void failed(const Error& error, Row& row) {
  // Accepted by the checks, refused by the build: `judged` is weaker than `built`, and says so.
  row.executed = error.kind == ErrorKind::unsupported ? "not built" : "error";
  row.detail = error.message;
  row.context_lost = error.kind == ErrorKind::cuda;
}

// No oracle: two runs of one plan give the same bits, and no NaN where everything is finite.
void repeat(Machine& machine, const ir::Graph& graph, const Plan& plan, Row& row) {
  auto inputs = plan::make_inputs(graph, row.item.seed, machine.reference, row.item.style);
  if (!inputs.ok()) return failed(inputs.error(), row);
  auto first = judge(machine.cudnn, machine.live, graph, plan, *inputs, {}, {});
  if (!first.ok()) return failed(first.error(), row);
  auto second = judge(machine.cudnn, machine.live, graph, plan, *inputs, {}, {});
  if (!second.ok()) return failed(second.error(), row);
  row.dropout = "repeated";
  const bool exact = !row.is_backward() || row.item.spec.value("deterministic", false);
  const bool same = !exact || same_bits(*first, *second);
  row.executed = same && first->damage.empty() ? "ok" : "wrong";
  if (row.executed == "wrong") {
    row.detail = same ? first->damage : "two runs with one seed and offset differ";
  }
}

Result<Expected> expected_for(Machine& machine, const ir::Graph& graph, Row& row) {
  const Stopwatch watch(row.seconds.oracle);
  if (!has_stream(row.item)) {
    return expected_of(machine.cudnn, machine.reference, row.item, graph);
  }
  auto dumped = dumped_mask(machine.cudnn, machine.live, machine.reference, row.item);
  const bool no_dump = !dumped.ok() && dumped.error().kind == ErrorKind::unsupported;
  if (no_dump) {
    dumped = read_mask(machine.cudnn, machine.live, machine.reference, row.item);
  }
  LAWSON_TRY(std::vector<double> mask, std::move(dumped));
  row.dropout = no_dump ? "judged by read weights" : "judged by dumped mask";
  row.detail = wrong_rate(mask, row.item.spec.value("dropout", 0.0), row.kept);
  return expected_with_mask(machine.cudnn, machine.reference, row.item, graph, std::move(mask));
}

void compare_bitwise(Machine& machine, const ir::Graph& graph, const Plan& live_plan,
                     const Judgement& live, Expected& expected, Row& row) {
  const Stopwatch watch(row.seconds.bitwise);
  auto plan = machine.planner.compile(graph, machine.target, "cudnn", {});
  const auto broken = [&](const Error& error) {
    row.bitwise = "error";
    row.detail = error.message;
  };
  if (!plan.ok()) return broken(plan.error());
  auto judged =
      judge(machine.cudnn, machine.live, graph, *plan, expected.inputs, expected.outputs, {});
  if (!judged.ok()) return broken(judged.error());
  if (!judged->ok()) {
    row.bitwise = "wrong";
    row.detail = judged->text();
  } else if (plan->plan_name != live_plan.plan_name) {
    row.bitwise = "other plan";
  } else if (same_bits(*judged, live)) {
    row.bitwise = "equal";
  } else {
    // Sums by atomics (dSink, some dQ) differ from run to run of one and the same plan.
    const auto again =
        judge(machine.cudnn, machine.live, graph, live_plan, expected.inputs, {}, {});
    row.bitwise = again.ok() && !same_bits(*again, live) ? "unstable" : "differs";
  }
}

// What was judged and is refused when it is built has to be so without the device as well.
void refused_by_build(Machine& machine, const ir::Graph& graph, const Error& refusal, Row& row) {
  Options build;
  build.strength = Strength::built;
  const Stopwatch watch(row.seconds.deviceless);
  const auto deviceless = machine.planner.probe(graph, machine.target, "cudnn", build);
  row.deviceless = deviceless.ok() ? std::string{to_string(deviceless->decision)} : "error";
  if (!deviceless.ok()) row.message = deviceless.error().message;
  row.live = "unsupported";
  row.reasons = refusal.reasons;
  row.not_built = true;
  row.same_reasons = true;  // each names the plan that it tried
}

// A plan of the engine that was asked for, of this very question.
std::string foreign(const Plan& plan, const std::string& key, bool tuned) {
  if (plan.engine != "cudnn") return fmt::format("ran on engine '{}'", plan.engine);
  if (plan.plan_id.empty()) return "ran without a plan id";
  return tuned || plan.key == key ? "" : "ran a plan with another key than its verdict's";
}

void execute(Machine& machine, const ir::Graph& graph, const std::string& key, bool bitwise,
             Row& row) {
  std::optional<Plan> plan;
  {
    const Stopwatch watch(row.seconds.compile);
    Options options;
    if (row.tuned) options.tuning = Tuning::quick;
    auto made = machine.planner.compile(graph, machine.live, "cudnn", options);
    if (!made.ok() && made.error().kind == ErrorKind::unsupported && !row.is_attention()) {
      return refused_by_build(machine, graph, made.error(), row);
    }
    if (!made.ok()) return failed(made.error(), row);
    plan = std::move(*made);
  }
  row.engine = plan->engine;
  row.plan_name = plan->plan_name;
  row.plan_id = plan->plan_id;
  row.detail = foreign(*plan, key, row.tuned);
  if (!row.detail.empty()) {
    row.executed = "wrong";
    return;
  }
  auto expected = expected_for(machine, graph, row);
  if (!expected.ok()) {
    const bool no_dump = has_stream(row.item) && expected.error().kind == ErrorKind::unsupported;
    return no_dump ? repeat(machine, graph, *plan, row) : failed(expected.error(), row);
  }
  const std::string rate = row.detail;
  std::optional<Judgement> judged;
  {
    const Stopwatch watch(row.seconds.run);
    auto result =
        judge(machine.cudnn, machine.live, graph, *plan, expected->inputs, expected->outputs, {});
    if (!result.ok()) return failed(result.error(), row);
    judged = std::move(*result);
  }
  note(*judged, row);
  if (row.executed == "ok" && !rate.empty()) {
    row.executed = "wrong";
    row.detail = rate;
  }
  if (bitwise && row.executed == "ok") {
    compare_bitwise(machine, graph, *plan, *judged, *expected, row);
  }
}

bool same_texts(const std::vector<Reason>& a, const std::vector<Reason>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Reason& x, const Reason& y) { return x.message == y.message; });
}

}  // namespace

void examine(Machine& machine, bool bitwise, Row& row) {
  const auto graph = graph_of(row.item);
  if (!graph.ok()) {
    row.deviceless = row.live = "error";
    row.message = graph.error().message;
    return;
  }
  const auto probe = [&](const Device& device, double& seconds) {
    const Stopwatch watch(seconds);
    return machine.planner.probe(*graph, device, "cudnn", {});
  };
  const auto deviceless = probe(machine.target, row.seconds.deviceless);
  const auto live = machine.live.present() ? probe(machine.live, row.seconds.live) : deviceless;
  const auto word = [&](const Result<Verdict>& verdict) -> std::string {
    if (!verdict.ok()) row.message = verdict.error().message;
    return verdict.ok() ? std::string{to_string(verdict->decision)} : "error";
  };
  row.deviceless = word(deviceless);
  row.live = word(live);
  if (!deviceless.ok() || !live.ok()) return;
  row.same_plans = deviceless->plan_names == live->plan_names;
  row.same_reasons = same_texts(deviceless->reasons, live->reasons);
  row.reasons = live->reasons.empty() ? deviceless->reasons : live->reasons;
  row.rewrites = live->rewrites;
  row.defect = live->defect;
  if (live->decision != Decision::supported || !machine.live.present()) return;
  execute(machine, *graph, live->key, bitwise && deviceless->decision == live->decision, row);
}

}  // namespace lawson::cases
