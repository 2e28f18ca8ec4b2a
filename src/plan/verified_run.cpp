#include "plan/verified_run.h"

#include <memory>

#include "plan/device_data.h"
#include "plan/inputs.h"
#include "plan/oracle.h"

namespace lawson::plan {

Result<Comparison> run_and_compare(const ir::Graph& graph, const Plan& plan, Engine& engine,
                                   Engine& reference, const Device& device, std::uint64_t seed) {
  LAWSON_TRY(const auto inputs, make_inputs(graph, seed, reference));
  const auto outputs = make_outputs(graph);
  LAWSON_TRY(const std::shared_ptr<Loaded> loaded, engine.load(plan, device));
  DeviceData data(engine, device);
  LAWSON_CHECK(data.place(graph, inputs, outputs, plan.workspace_bytes));
  LAWSON_CHECK(engine.execute(*loaded, data.bindings(), data.workspace(), nullptr));
  LAWSON_CHECK(data.fetch());
  LAWSON_TRY(const auto expected, expected_outputs(engine, reference, graph, inputs, outputs));
  return compare(graph, outputs, expected);
}

}  // namespace lawson::plan
