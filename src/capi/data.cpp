// Generated inputs, a timed run, and the check of its results.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>

#include "capi/context.h"
#include "capi/guard.h"
#include "capi/handles.h"
#include "ir/simplify.h"
#include "plan/device_data.h"
#include "plan/inputs.h"
#include "plan/oracle.h"
#include "plan/verify.h"

struct lawson_data {
  lawson::ir::Graph graph;
  std::vector<lawson::plan::Buffer> inputs;
  std::vector<lawson::plan::Buffer> outputs;
};

namespace lawson::capi {
namespace {

constexpr std::array kRunPrefixes{offsetof(lawson_run_result, milliseconds_min),
                                  offsetof(lawson_run_result, milliseconds_median),
                                  offsetof(lawson_run_result, milliseconds_max)};
constexpr std::int32_t kMaxRepetitions = 1'000'000;

plan::Buffer* find_buffer(lawson_data& data, std::int64_t uid) {
  for (auto* list : {&data.inputs, &data.outputs}) {
    for (plan::Buffer& buffer : *list) {
      if (ir::Graph::uid(buffer.id()) == uid) return &buffer;
    }
  }
  return nullptr;
}

struct Run {
  const lawson_plan& plan;
  const lawson_plan::Executable& executable;
  plan::Planner& planner;
  Engine& engine;
  plan::DeviceData data;

  Status once() {
    return planner.execute(plan.plan, *executable.loaded, data.bindings(), data.workspace(),
                           static_cast<std::size_t>(plan.plan.workspace_bytes), nullptr);
  }

  // Milliseconds per execution of `count` executions, by the host's clock around a synchronise:
  // on a GPU launch overhead is included, and hidden where kernels are longer than launches.
  Result<double> timed(int count) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < count; ++i) LAWSON_CHECK(once());
    LAWSON_CHECK(engine.synchronize(executable.device, nullptr));
    const std::chrono::duration<double, std::milli> elapsed =
        std::chrono::steady_clock::now() - begin;
    return elapsed.count() / count;
  }
};

Result<lawson_run_result> measure(Run& run, std::int32_t repetitions) {
  lawson_run_result result{};
  LAWSON_TRY(const double warm_up, run.timed(1));
  if (repetitions == 0) {
    result.milliseconds_min = result.milliseconds_median = result.milliseconds_max = warm_up;
    return result;
  }
  // On a GPU a sample of less than about 2 ms would measure the synchronise.
  int batch = 1;
  if (run.executable.device.kind == Device::Kind::cuda) {
    LAWSON_TRY(const double second, run.timed(1));
    batch = std::clamp(static_cast<int>(2.0 / std::max(second, 1e-3)), 1, 100);
  }
  std::vector<double> times;
  for (std::int32_t i = 0; i < repetitions; ++i) {
    LAWSON_TRY(const double time, run.timed(batch));
    times.push_back(time);
  }
  std::sort(times.begin(), times.end());
  result.milliseconds_min = times.front();
  result.milliseconds_max = times.back();
  const std::size_t middle = times.size() / 2;
  result.milliseconds_median =
      times.size() % 2 == 1 ? times[middle] : (times[middle - 1] + times[middle]) / 2;
  return result;
}

Status same_graph(const lawson_plan& plan, const lawson_data& data) {
  const std::string text = ir::canonical_text(plan.graph);
  if (text == ir::canonical_text(data.graph)) return {};
  if (text == ir::canonical_text(ir::simplify(data.graph))) return {};
  return invalid("the data is for graph '{}', the plan for another graph ('{}')", data.graph.name,
                 plan.graph.name);
}

Json comparison_to_json(const plan::Comparison& comparison) {
  Json outputs = Json::array();
  for (const plan::OutputComparison& output : comparison.outputs) {
    plan::Comparison alone;
    alone.outputs.push_back(output);
    outputs.push_back({{"name", output.name},
                       {"elements", output.elements},
                       {"max_error", output.max_error},
                       {"max_error_over_bound", output.max_ratio},  // null: the bound is 0
                       {"wrong", output.wrong},
                       {"unjudged", output.unjudged},
                       {"ok", output.ok()},
                       {"message", alone.text()}});
  }
  return {{"ok", comparison.ok()}, {"outputs", std::move(outputs)}};
}

}  // namespace
}  // namespace lawson::capi

using namespace lawson;
using namespace lawson::capi;

extern "C" {

lawson_status lawson_data_generate(const lawson_graph* graph, uint64_t seed, lawson_data** data) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(graph, "graph"));
    LAWSON_CHECK(require(data, "data"));
    LAWSON_CHECK(fits_in_memory(graph->graph));
    LAWSON_TRY(plan::Planner * planner, capi::planner());
    Engine* reference = planner->engine("reference");
    if (reference == nullptr) {
      return error(ErrorKind::internal, "this build has no reference engine");
    }
    LAWSON_TRY(auto inputs, plan::make_inputs(graph->graph, seed, *reference));
    auto outputs = plan::make_outputs(graph->graph);
    *data = new lawson_data{graph->graph, std::move(inputs), std::move(outputs)};
    return {};
  });
}

void lawson_data_destroy(lawson_data* data) {
  delete data;
}

lawson_status lawson_data_buffer(lawson_data* data, int64_t uid, void** buffer, size_t* size) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(data, "data"));
    LAWSON_CHECK(require(buffer, "buffer"));
    plan::Buffer* found = find_buffer(*data, uid);
    if (found == nullptr) {
      return invalid("argument 'uid': {} is not an input or output of graph '{}' (1 to {})", uid,
                     data->graph.name, data->inputs.size() + data->outputs.size());
    }
    *buffer = found->data();
    if (size != nullptr) *size = found->bytes();
    return {};
  });
}

lawson_status lawson_plan_run(const lawson_plan* plan, lawson_data* data, int32_t repetitions,
                              lawson_run_result* result) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(plan, "plan"));
    LAWSON_CHECK(require(data, "data"));
    if (repetitions < 0 || repetitions > kMaxRepetitions) {
      return invalid("argument 'repetitions': {} is not allowed; expected 0 to {}", repetitions,
                     kMaxRepetitions);
    }
    if (result != nullptr) {
      LAWSON_CHECK(check_struct_size(*result, "lawson_run_result", kRunPrefixes));
    }
    LAWSON_CHECK(same_graph(*plan, *data));
    const auto executable = plan->current();
    if (executable == nullptr) {
      return invalid("plan {} is not loaded; call lawson_plan_load first", plan->plan.plan_id);
    }
    LAWSON_TRY(plan::Planner * planner, capi::planner());
    Engine* engine = planner->engine(plan->plan.engine);
    if (engine == nullptr) {
      return error(ErrorKind::internal, "the loaded plan's engine '{}' is not in this build",
                   plan->plan.engine);
    }
    Run run{*plan, *executable, *planner, *engine, {*engine, executable->device}};
    LAWSON_CHECK(
        run.data.place(data->graph, data->inputs, data->outputs, plan->plan.workspace_bytes));
    LAWSON_TRY(const lawson_run_result measured, measure(run, repetitions));
    LAWSON_CHECK(run.data.fetch());
    if (result == nullptr) return {};
    return write_struct(measured, result, "lawson_run_result", kRunPrefixes);
  });
}

lawson_status lawson_data_verify(const lawson_plan* plan, const lawson_data* data, int* ok,
                                 lawson_text** json) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(plan, "plan"));
    LAWSON_CHECK(require(data, "data"));
    LAWSON_CHECK(require(ok, "ok"));
    LAWSON_CHECK(same_graph(*plan, *data));
    LAWSON_TRY(plan::Planner * planner, capi::planner());
    Engine* engine = planner->engine(plan->plan.engine);
    Engine* reference = planner->engine("reference");
    if (engine == nullptr || reference == nullptr) {
      return error(ErrorKind::unavailable,
                   "verifying needs the engines '{}' and 'reference'; "
                   "this build lacks one",
                   plan->plan.engine);
    }
    LAWSON_TRY(const auto expected, plan::expected_outputs(*engine, *reference, data->graph,
                                                           data->inputs, data->outputs));
    const plan::Comparison comparison = plan::compare(data->graph, data->outputs, expected);
    if (json != nullptr) LAWSON_CHECK(give_text(dump(comparison_to_json(comparison)), json));
    *ok = comparison.ok() ? 1 : 0;
    return {};
  });
}

}  // extern "C"
