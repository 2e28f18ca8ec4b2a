#include "cases/judge.h"

#include <algorithm>
#include <chrono>

#include "cases/memory.h"

namespace lawson::cases {

std::string Judgement::text() const {
  const std::string text = comparison.text();
  return damage.empty() ? text : fmt::format("{}; WRITTEN: {}", text, damage);
}

Result<Device> device_of(Engine& engine) {
  const Device cpu = cpu_device();
  if (engine.accepts(cpu)) return cpu;
  LAWSON_TRY(auto live, engine.live_devices());
  for (const Device& device : live) {
    if (engine.accepts(device)) return device;
  }
  return error(ErrorKind::unavailable, "engine '{}' has no device on this machine", engine.name());
}

Result<Plan> compiled(Engine& engine, const Device& device, const ir::Graph& graph,
                      const Options& options) {
  LAWSON_TRY(Verdict verdict, engine.probe(graph, device, options));
  if (verdict.decision != Decision::supported) {
    Error refusal =
        unsupported("engine", fmt::format("engine '{}' does not take the graph", engine.name()));
    if (!verdict.reasons.empty())
      refusal = Error{ErrorKind::unsupported, verdict.reasons[0].message, verdict.reasons};
    return refusal;
  }
  return engine.compile(graph, device, options, std::nullopt, {});
}

Result<Judgement> judge(Engine& engine, const Device& device, const ir::Graph& graph,
                        const Plan& plan, std::vector<plan::Buffer>& inputs,
                        std::span<const OracleOutput> expected, const JudgeOptions& options) {
  Judgement result;
  result.plan = plan;
  LAWSON_TRY(auto loaded, engine.load(plan, device));
  result.outputs = plan::make_outputs(graph);
  Memory memory(engine, device, options.in_place);
  LAWSON_CHECK(memory.place(graph, inputs, result.outputs, plan.workspace_bytes));
  for (int i = 0; i < options.repetitions; ++i) {
    const auto start = std::chrono::steady_clock::now();
    LAWSON_CHECK(engine.execute(*loaded, memory.bindings(), memory.workspace(), nullptr));
    if (device.kind == Device::Kind::cuda) LAWSON_CHECK(engine.synchronize(device, nullptr));
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    result.seconds = i == 0 ? taken.count() : std::min(result.seconds, taken.count());
  }
  LAWSON_CHECK(memory.fetch());
  result.damage = memory.damage();
  if (!expected.empty()) result.comparison = plan::compare(graph, result.outputs, expected);
  return result;
}

Result<Judgement> judge(Engine& engine, const Device& device, const ir::Graph& graph,
                        Engine& reference, const JudgeOptions& options) {
  Plan own;
  if (options.plan == nullptr) {
    LAWSON_TRY(own, compiled(engine, device, graph, options.options));
  }
  LAWSON_TRY(auto inputs, plan::make_inputs(graph, options.seed, reference, options.style));
  std::vector<OracleOutput> expected;
  if (options.compare) {
    const auto host_inputs = plan::bindings_of(inputs, {});
    LAWSON_TRY(expected, reference.oracle(graph, host_inputs, engine.arithmetic(graph)));
  }
  return judge(engine, device, graph, options.plan == nullptr ? own : *options.plan, inputs,
               expected, options);
}

}  // namespace lawson::cases
