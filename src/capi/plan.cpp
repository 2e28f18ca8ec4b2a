// Plans: compile, serialise, load, execute.
#include <array>
#include <cstring>
#include <span>
#include <vector>

#include "capi/context.h"
#include "capi/guard.h"
#include "capi/handles.h"
#include "ir/json.h"

namespace lawson::capi {

Result<std::unique_ptr<lawson_plan>> make_plan_handle(Plan plan) {
  LAWSON_TRY(Json document, parse_json(plan.graph_json, "the plan's graph"));
  LAWSON_TRY(ir::Graph graph, ir::graph_from_json(document, "the plan's graph"));
  if (plan.workspace_bytes < 0) {
    return invalid("not a usable plan: workspace of {} bytes", plan.workspace_bytes);
  }
  auto handle = std::make_unique<lawson_plan>();
  handle->plan = std::move(plan);
  handle->graph = std::move(graph);
  handle->operands = static_cast<std::size_t>(handle->graph.input_count) +
                     static_cast<std::size_t>(handle->graph.output_count);
  return handle;
}

namespace {

constexpr std::size_t kUsualBindings = 64;

// A caller that only sees the message still sees every reason.
Error with_all_reasons(Error error) {
  if (error.kind != ErrorKind::unsupported || error.reasons.size() < 2) return error;
  error.message.clear();
  for (const Reason& reason : error.reasons) {
    if (!error.message.empty()) error.message += "; ";
    error.message += reason.message;
  }
  return error;
}

Status require_distinct(const lawson_plan& plan, std::span<const Binding> bound) {
  for (std::size_t i = 0; i < bound.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (bound[j].uid != bound[i].uid) continue;
      const auto tensors = static_cast<std::int64_t>(plan.graph.tensors.size());
      const std::int64_t uid = bound[i].uid;
      return invalid(
          "bindings: uid {}{} is in bindings[{}] and bindings[{}]; expected once", uid,
          uid < 1 || uid > tensors
              ? std::string{}
              : fmt::format(" ('{}')", plan.graph.tensor(static_cast<ir::TensorId>(uid - 1)).name),
          j, i);
    }
  }
  return {};
}

// Calls `use(loaded, bindings)` of a plan that is loaded. Where one uid is bound twice there are
// more bindings than operands, or an operand lacks one: else nothing is looked for.
template <typename Use>
Status with_bindings(const lawson_plan* plan, const lawson_binding* bindings, std::size_t count,
                     const Use& use) {
  LAWSON_CHECK(require(plan, "plan"));
  if (count > 0) LAWSON_CHECK(require(bindings, "bindings"));
  const auto executable = plan->current();
  if (executable == nullptr) {
    return invalid("plan {} is not loaded; call lawson_plan_load first", plan->plan.plan_id);
  }
  const auto call = [&](std::span<Binding> bound) -> Status {
    for (std::size_t i = 0; i < count; ++i) bound[i] = {bindings[i].uid, bindings[i].data};
    if (count > plan->operands) [[unlikely]] {
      LAWSON_CHECK(require_distinct(*plan, bound));
    }
    Status status = use(*executable->loaded, std::span<const Binding>{bound});
    if (!status.ok() && status.error().kind == ErrorKind::invalid_argument) [[unlikely]] {
      LAWSON_CHECK(require_distinct(*plan, bound));
    }
    return status;
  };
  std::array<Binding, kUsualBindings> usual;  // no allocation for them
  if (count <= usual.size()) return call({usual.data(), count});
  std::vector<Binding> many(count);
  return call(many);
}

}  // namespace
}  // namespace lawson::capi

using namespace lawson;
using namespace lawson::capi;

extern "C" {

lawson_status lawson_compile(const lawson_graph* graph, const lawson_device* device,
                             const lawson_options* options, lawson_plan** plan) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(graph, "graph"));
    LAWSON_CHECK(require(device, "device"));
    LAWSON_CHECK(require(plan, "plan"));
    LAWSON_TRY(Asked asked, read_options(options));
    LAWSON_TRY(plan::Planner * planner, capi::planner());
    auto tuned =
        planner->tune(graph->graph, device->device, asked.engine, asked.options, asked.retune);
    if (!tuned.ok()) return with_all_reasons(std::move(tuned).error());
    LAWSON_TRY(auto handle, make_plan_handle(std::move(tuned->plan)));
    *plan = handle.release();
    return {};
  });
}

void lawson_plan_destroy(lawson_plan* plan) {
  delete plan;
}

const char* lawson_plan_id(const lawson_plan* plan) {
  return plan == nullptr ? "" : plan->plan.plan_id.c_str();
}

const char* lawson_plan_key(const lawson_plan* plan) {
  return plan == nullptr ? "" : plan->plan.key.c_str();
}

const char* lawson_plan_engine(const lawson_plan* plan) {
  return plan == nullptr ? "" : plan->plan.engine.c_str();
}

const char* lawson_plan_name(const lawson_plan* plan) {
  return plan == nullptr ? "" : plan->plan.plan_name.c_str();
}

const char* lawson_plan_target(const lawson_plan* plan) {
  return plan == nullptr ? "" : plan->plan.target.c_str();
}

size_t lawson_plan_workspace_size(const lawson_plan* plan) {
  return plan == nullptr ? 0 : static_cast<std::size_t>(plan->plan.workspace_bytes);
}

lawson_status lawson_plan_graph(const lawson_plan* plan, lawson_graph** graph) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(plan, "plan"));
    LAWSON_CHECK(require(graph, "graph"));
    *graph = new lawson_graph{plan->graph};
    return {};
  });
}

lawson_status lawson_plan_serialize(const lawson_plan* plan, lawson_text** bytes) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(plan, "plan"));
    LAWSON_CHECK(require(bytes, "bytes"));
    const std::vector<std::byte> serialized = plan_to_bytes(plan->plan);
    return give_text({reinterpret_cast<const char*>(serialized.data()), serialized.size()}, bytes);
  });
}

lawson_status lawson_plan_deserialize(const void* data, size_t size, lawson_plan** plan) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(data, "data"));
    LAWSON_CHECK(require(plan, "plan"));
    LAWSON_TRY(Plan read, plan_from_bytes({static_cast<const std::byte*>(data), size}));
    LAWSON_TRY(auto handle, make_plan_handle(std::move(read)));
    *plan = handle.release();
    return {};
  });
}

lawson_status lawson_plan_keep(const lawson_plan* plan, const lawson_device* device,
                               const lawson_options* options) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(plan, "plan"));
    LAWSON_CHECK(require(device, "device"));
    LAWSON_TRY(const Asked asked, read_options(options));
    LAWSON_TRY(plan::Planner * planner, capi::planner());
    return planner->keep(plan->plan, plan->graph, device->device, asked.options);
  });
}

lawson_status lawson_plan_load(lawson_plan* plan, const lawson_device* device) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(plan, "plan"));
    LAWSON_CHECK(require(device, "device"));
    LAWSON_TRY(plan::Planner * planner, capi::planner());
    LAWSON_TRY(auto loaded, planner->load(plan->plan, device->device));
    auto executable = std::make_shared<const lawson_plan::Executable>(
        lawson_plan::Executable{std::move(loaded), device->device});
    const std::lock_guard lock{plan->mutex};
    plan->executable = std::move(executable);
    return {};
  });
}

lawson_status lawson_plan_execute(const lawson_plan* plan, const lawson_binding* bindings,
                                  size_t count, void* workspace, size_t workspace_size,
                                  void* stream) {
  return guard([&]() -> Status {
    return with_bindings(plan, bindings, count, [&](const auto& loaded, auto bound) -> Status {
      LAWSON_TRY(plan::Planner * planner, capi::planner());
      return planner->execute(plan->plan, loaded, bound, workspace, workspace_size, stream);
    });
  });
}

lawson_status lawson_plan_prepare_graph(const lawson_plan* plan, lawson_graph_use use,
                                        const lawson_binding* bindings, size_t count,
                                        void* workspace, size_t workspace_size, void* cuda_graph) {
  return guard([&]() -> Status {
    int asked = 0;  // a caller's value may be outside the enum
    static_assert(sizeof(asked) == sizeof(use));
    std::memcpy(&asked, &use, sizeof(asked));
    if (asked != LAWSON_GRAPH_ADD && asked != LAWSON_GRAPH_UPDATE) {
      return invalid(
          "use: {} is not allowed; expected LAWSON_GRAPH_ADD (0) or LAWSON_GRAPH_UPDATE (1)",
          asked);
    }
    LAWSON_CHECK(require(cuda_graph, "cuda_graph"));
    return with_bindings(plan, bindings, count, [&](const auto& loaded, auto bound) -> Status {
      LAWSON_TRY(plan::Planner * planner, capi::planner());
      return planner->prepare_graph(plan->plan, loaded,
                                    asked == LAWSON_GRAPH_ADD ? GraphUse::add : GraphUse::update,
                                    bound, workspace, workspace_size, cuda_graph);
    });
  });
}

}  // extern "C"
