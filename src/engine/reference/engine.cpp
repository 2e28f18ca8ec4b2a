#include <algorithm>
#include <map>

#include "engine/reference/attention.h"
#include "engine/reference/bounds.h"
#include "engine/reference/evaluate.h"
#include "engine/reference/reference.h"
#include "ir/infer.h"
#include "ir/json.h"

namespace lawson {
namespace {

using reference::Array;

constexpr std::string_view kName = "reference";

struct ReferencePlan final : Loaded {
  Plan stored;
  ir::Graph graph;
  const Plan& plan() const override { return stored; }
};

// Elements as they are, in another place.
bool only_moves(const ir::Op& op) {
  return std::holds_alternative<ir::Broadcast>(op) || std::holds_alternative<ir::Reshape>(op) ||
         std::holds_alternative<ir::Transpose>(op) || std::holds_alternative<ir::Slice>(op) ||
         std::holds_alternative<ir::Concat>(op);
}

// Data of every input, from its binding or (by-value scalars) its own value.
Result<std::vector<Array>> load_inputs(const ir::Graph& graph, std::span<const Binding> bindings) {
  std::map<std::int64_t, const void*> data;
  for (const Binding& binding : bindings) data[binding.uid] = binding.data;
  std::vector<ir::TensorId> order;
  for (ir::TensorId id = 0; id < graph.input_count; ++id) order.push_back(id);
  std::stable_sort(order.begin(), order.end(), [&](ir::TensorId a, ir::TensorId b) {
    return reference::load_order(graph, a) < reference::load_order(graph, b);
  });
  std::vector<Array> arrays(graph.tensors.size());
  for (const ir::TensorId id : order) {
    const ir::Tensor& tensor = graph.tensor(id);
    const auto bound = data.find(ir::Graph::uid(id));
    if (bound != data.end() && bound->second != nullptr) {
      arrays[static_cast<std::size_t>(id)] =
          reference::load(tensor, bound->second, reference::input_part(graph, id, arrays));
      continue;
    }
    Array array = reference::make_array(tensor.dtype, tensor.shape);
    if (tensor.by_value && tensor.values.size() == array.size()) {
      for (std::size_t i = 0; i < array.size(); ++i) {
        array.value[i] = round_to(tensor.dtype, tensor.values[i]);
      }
    } else if (array.size() > 0) {
      return invalid("input '{}' (uid {}) is not bound", tensor.name, ir::Graph::uid(id));
    }
    arrays[static_cast<std::size_t>(id)] = std::move(array);
  }
  return arrays;
}

// Computes every tensor and returns the outputs, before they are rounded to their storage (what a
// later op reads may be rounded). `arithmetic` null: values only.
Result<std::vector<Array>> run(const ir::Graph& graph, std::vector<Array> arrays,
                               const Arithmetic* arithmetic) {
  std::vector<Array> outputs(static_cast<std::size_t>(graph.output_count));
  for (const ir::Node& node : graph.nodes) {
    reference::Operands operands;
    for (const ir::TensorId id : node.inputs) {
      operands.push_back(id == ir::kNone ? nullptr : &arrays[static_cast<std::size_t>(id)]);
    }
    LAWSON_CHECK(reference::check_operands(graph, node, operands));
    std::vector<Array> results = reference::evaluate(graph, node, operands);
    if (arithmetic != nullptr) reference::add_errors(graph, node, operands, results, *arithmetic);
    for (std::size_t i = 0; i < results.size(); ++i) {
      if (node.outputs[i] == ir::kNone) continue;
      Array& result = results[i];
      const bool literal = std::holds_alternative<ir::Constant>(node.op);
      const bool exact = graph.strict || literal || !is_float(result.dtype);
      if (exact) reference::round_exactly(result);
      const ir::TensorId id = node.outputs[i];
      if (graph.is_output(id)) outputs[static_cast<std::size_t>(id - graph.input_count)] = result;
      if (arithmetic != nullptr && !exact && !only_moves(node.op)) {
        reference::allow_rounding(result, *arithmetic);
      }
      reference::drop_zero_errors(result);
      arrays[static_cast<std::size_t>(id)] = std::move(result);
    }
  }
  return outputs;
}

class ReferenceEngine final : public Engine {
 public:
  std::string_view name() const override { return kName; }
  bool accepts(const Device& device) const override { return device.kind == Device::Kind::cpu; }
  Result<std::string> version() override { return std::string{kVersion}; }

  Result<Verdict> probe(const ir::Graph& graph, const Device& device,
                        const Options& options) override {
    LAWSON_CHECK(ir::check(graph));
    Verdict verdict;
    verdict.decision = Decision::supported;
    verdict.strength = options.strength == Strength::judged ? Strength::judged : Strength::built;
    verdict.evidence = Evidence::live;
    verdict.engine = kName;
    verdict.key = make_key(graph, device, kName, kVersion, options);
    verdict.plan_id = make_plan_id(verdict.key, kName, {});
    verdict.target = device.name;
    verdict.engine_version = kVersion;
    verdict.workspace_bytes = 0;
    verdict.plan_name = kName;
    verdict.plan_names = {std::string{kName}};
    return verdict;
  }

  Result<std::vector<Candidate>> candidates(const ir::Graph& graph, const Device&,
                                            const Options&) override {
    LAWSON_CHECK(ir::check(graph));
    return std::vector<Candidate>{{std::string{kName}}};
  }

  Result<Plan> compile(const ir::Graph& graph, const Device& device, const Options& options,
                       const std::optional<Candidate>& candidate, std::stop_token) override {
    LAWSON_CHECK(ir::check(graph));
    if (candidate && candidate->name != kName) {
      return invalid("the reference engine has no candidate '{}'; its only one is '{}'",
                     candidate->name, kName);
    }
    Plan plan;
    plan.key = make_key(graph, device, kName, kVersion, options);
    plan.plan_id = make_plan_id(plan.key, kName, {});
    plan.engine = kName;
    plan.engine_version = kVersion;
    plan.target = device.name;
    plan.device_fingerprint = fingerprint(device);
    plan.plan_name = kName;
    plan.graph_json = plan_graph_json(graph);
    return plan;
  }

  Result<std::shared_ptr<Loaded>> load(const Plan& plan, const Device&) override {
    if (plan.engine != kName) {
      return invalid("a plan of engine '{}' cannot be loaded by '{}'", plan.engine, kName);
    }
    LAWSON_TRY(Json document, parse_json(plan.graph_json, "plan"));
    auto loaded = std::make_shared<ReferencePlan>();
    LAWSON_TRY(loaded->graph, ir::graph_from_json(document, "plan"));
    loaded->stored = plan;
    return std::shared_ptr<Loaded>{std::move(loaded)};
  }

  Status execute(const Loaded& loaded, std::span<const Binding> bindings, void*, void*) override {
    const auto* plan = dynamic_cast<const ReferencePlan*>(&loaded);
    if (plan == nullptr) return invalid("the plan belongs to another engine");
    const ir::Graph& graph = plan->graph;
    LAWSON_TRY(auto arrays, load_inputs(graph, bindings));
    LAWSON_TRY(const std::vector<Array> outputs, run(graph, std::move(arrays), nullptr));
    for (std::int32_t i = 0; i < graph.output_count; ++i) {
      const ir::TensorId id = graph.input_count + i;
      const ir::Tensor& tensor = graph.tensor(id);
      const Array& array = outputs[static_cast<std::size_t>(i)];
      const auto bound = std::find_if(bindings.begin(), bindings.end(), [&](const Binding& b) {
        return b.uid == ir::Graph::uid(id) && b.data != nullptr;
      });
      if (bound != bindings.end()) {
        reference::store(array, tensor, bound->data);
      } else if (array.size() > 0) {
        return invalid("output '{}' (uid {}) is not bound", tensor.name, ir::Graph::uid(id));
      }
    }
    return {};
  }

  Arithmetic arithmetic(const ir::Graph&) const override {
    return {0, 0x1p-53, 0, 0x1p-52};  // libm's functions are within one unit in the last place
  }

  Result<std::vector<OracleOutput>> oracle(const ir::Graph& graph, std::span<const Binding> inputs,
                                           const Arithmetic& arithmetic) override {
    LAWSON_CHECK(ir::check(graph));
    LAWSON_TRY(auto arrays, load_inputs(graph, inputs));
    // What is compared is two computations: the engine's and this one in float64.
    Arithmetic both = arithmetic;
    both.accumulate_roundoff += 0x1p-53;
    both.function_roundoff += 0x1p-52;
    LAWSON_TRY(std::vector<Array> results, run(graph, std::move(arrays), &both));
    std::vector<OracleOutput> outputs;
    for (std::int32_t i = 0; i < graph.output_count; ++i) {
      const ir::TensorId id = graph.input_count + i;
      Array& array = results[static_cast<std::size_t>(i)];
      reference::round_output(array, both);
      outputs.push_back(
          {id, std::move(array.value), std::move(array.error), std::move(array.there)});
    }
    return outputs;
  }

 private:
  static constexpr const char* kVersion = "0.1.0";
};

}  // namespace

std::shared_ptr<Engine> make_reference_engine() {
  return std::make_shared<ReferenceEngine>();
}

}  // namespace lawson
