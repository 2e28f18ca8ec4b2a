// How a plan was chosen, how long it takes, and what its device can do.
#include "plan/bench.h"

#include "capi/context.h"
#include "capi/guard.h"
#include "capi/handles.h"
#include "ir/simplify.h"

using namespace lawson;
using namespace lawson::capi;

namespace {

constexpr std::int32_t kMaxRounds = 100'000;

}  // namespace

extern "C" {

lawson_status lawson_graph_simplified(const lawson_graph* graph, lawson_graph** simplified) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(graph, "graph"));
    LAWSON_CHECK(require(simplified, "simplified"));
    *simplified = new lawson_graph{ir::simplify(graph->graph)};
    return {};
  });
}

lawson_status lawson_plan_tuning(const lawson_plan* plan, lawson_text** json) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(plan, "plan"));
    LAWSON_CHECK(require(json, "json"));
    LAWSON_TRY(plan::Planner * planner, capi::planner());
    Json document = Json::object();
    if (const auto report = planner->report_of(plan->plan.plan_id)) {
      document = plan::report_to_json(*report);
    } else if (!plan->plan.choice.empty()) {
      document["choice"] = plan->plan.choice;
    }
    return give_text(dump(document), json);
  });
}

lawson_status lawson_plan_bench(const lawson_plan* plan, uint64_t seed, int32_t rounds,
                                lawson_text** json) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(plan, "plan"));
    LAWSON_CHECK(require(json, "json"));
    if (rounds < 1 || rounds > kMaxRounds) {
      return invalid("argument 'rounds': {} is not allowed; expected 1 to {}", rounds, kMaxRounds);
    }
    const auto executable = plan->current();
    if (executable == nullptr) {
      return invalid("plan {} is not loaded; call lawson_plan_load first", plan->plan.plan_id);
    }
    LAWSON_CHECK(fits_in_memory(plan->graph));
    LAWSON_TRY(plan::Planner * planner, capi::planner());
    LAWSON_TRY(
        const plan::BenchResult result,
        plan::bench(*planner, *executable->loaded, plan->graph, executable->device, seed, rounds));
    return give_text(dump(plan::bench_to_json(result)), json);
  });
}

lawson_status lawson_device_limits(const lawson_device* device, const char* engine,
                                   lawson_text** json) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(device, "device"));
    LAWSON_CHECK(require(json, "json"));
    LAWSON_TRY(plan::Planner * planner, capi::planner());
    LAWSON_TRY(const plan::DeviceLimits limits,
               plan::measure_limits(*planner, device->device, engine == nullptr ? "" : engine));
    return give_text(dump(plan::limits_to_json(limits)), json);
  });
}

}  // extern "C"
