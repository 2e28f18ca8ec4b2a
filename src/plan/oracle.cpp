#include "plan/oracle.h"

#include <algorithm>
#include <map>

#include "ir/attention.h"

namespace lawson::plan {
namespace {

using Slot = ir::AttentionSlots;

// The attention whose dropout comes from a stream; null when there is none.
const ir::Node* dropout_node(const ir::Graph& graph) {
  for (const ir::Node& node : graph.nodes) {
    if (ir::attention_rule(node.op) != nullptr && node.inputs[Slot::seed] != ir::kNone) {
      return &node;
    }
  }
  return nullptr;
}

// The same graph with the mask as an operand, at the end of the inputs, instead of seed and offset.
Result<ir::Graph> with_mask(const ir::Graph& graph, const ir::Node& dropping) {
  ir::Builder builder(graph.name);
  std::map<ir::TensorId, ir::TensorId> ids{{ir::kNone, ir::kNone}};
  for (ir::TensorId id = 0; id < graph.input_count; ++id) {
    if (id == dropping.inputs[Slot::seed] || id == dropping.inputs[Slot::offset]) continue;
    LAWSON_TRY(ids[id], builder.input(graph.tensor(id)));
  }
  ir::Tensor mask;
  mask.name = "lawson.dropout_mask";
  mask.dtype = DType::u8;
  mask.shape = ir::attention_geometry(graph, dropping)->scores();
  LAWSON_TRY(const ir::TensorId mask_id, builder.input(std::move(mask)));
  for (const ir::Node& node : graph.nodes) {
    std::vector<ir::TensorId> operands;
    for (const ir::TensorId id : node.inputs) {
      operands.push_back(ids.contains(id) ? ids.at(id) : ir::kNone);
    }
    if (&node == &dropping) operands[Slot::dropout_mask] = mask_id;
    std::vector<ir::Builder::ResultSpec> results;
    for (const ir::TensorId id : node.outputs) {
      if (id == ir::kNone) {
        results.push_back({"", std::nullopt, false});
      } else {
        results.push_back({graph.tensor(id).name, graph.tensor(id).dtype, true});
      }
    }
    LAWSON_TRY(const auto made, builder.add(node.op, operands, std::move(results)));
    for (std::size_t i = 0; i < made.size(); ++i) ids[node.outputs[i]] = made[i];
    ids[ir::kNone] = ir::kNone;
  }
  for (std::int32_t i = 0; i < graph.output_count; ++i) {
    const ir::TensorId id = graph.input_count + i;
    const ir::Tensor& tensor = graph.tensor(id);
    LAWSON_CHECK(builder.output(ids.at(id), tensor.strides, tensor.alignment));
  }
  return std::move(builder).finish();
}

}  // namespace

Result<std::vector<OracleOutput>> expected_outputs(Engine& engine, Engine& reference,
                                                   const ir::Graph& graph,
                                                   std::span<const Buffer> inputs,
                                                   std::span<const Buffer> outputs) {
  const Arithmetic arithmetic = engine.arithmetic(graph);
  const ir::Node* node = dropout_node(graph);
  if (!arithmetic.own_dropout || node == nullptr) {
    return reference.oracle(graph, bindings_of(inputs, {}), arithmetic);
  }
  const bool forward = std::holds_alternative<ir::Attention>(node->op);
  const ir::TensorId dropped = forward ? node->outputs[ir::Attention::dropped] : ir::kNone;
  const auto given = std::find_if(outputs.begin(), outputs.end(), [&](const Buffer& buffer) {
    return dropped != ir::kNone && buffer.id() == dropped;
  });
  if (given == outputs.end()) {
    return unsupported("own_dropout_stream",
                       fmt::format("engine '{}' draws its dropout from a stream of its own: only a "
                                   "forward with return_dropout_mask can be compared",
                                   engine.name()),
                       "dropout");
  }
  LAWSON_TRY(const ir::Graph masked, with_mask(graph, *node));
  std::vector<Binding> bindings;
  ir::TensorId next = 0;
  for (const Buffer& buffer : inputs) {
    const ir::TensorId id = buffer.id();
    if (id == node->inputs[Slot::seed] || id == node->inputs[Slot::offset]) continue;
    bindings.push_back({ir::Graph::uid(next++), buffer.data()});
  }
  bindings.push_back({ir::Graph::uid(next), given->data()});
  LAWSON_TRY(auto expected, reference.oracle(masked, bindings, arithmetic));
  for (OracleOutput& output : expected) {
    output.id += graph.input_count - masked.input_count;
  }
  return expected;
}

}  // namespace lawson::plan
