#include "engine/cudnn/facts.h"

#include <algorithm>

namespace lawson::cudnn {

std::optional<AttentionFacts> attention_facts(const ir::Graph& graph) {
  for (const ir::Node& node : graph.nodes) {
    const auto sizes = ir::attention_geometry(graph, node);
    if (!sizes) continue;
    AttentionFacts facts;
    facts.node = &node;
    facts.rule = ir::attention_rule(node.op);
    if (const auto* backward = std::get_if<ir::AttentionBackward>(&node.op)) {
      facts.backward = true;
      facts.deterministic = backward->deterministic;
    }
    facts.batch = sizes->batch;
    facts.heads = sizes->heads;
    facts.kv_heads = sizes->kv_heads;
    facts.s_q = sizes->rows;
    facts.s_kv = sizes->columns;
    facts.d_qk = sizes->depth;
    facts.d_v = sizes->value_depth;
    facts.ragged_q = sizes->ragged_q;
    facts.ragged_kv = sizes->ragged_kv;
    facts.paged = sizes->paged;
    facts.dtype = graph.tensor(node.inputs[ir::AttentionSlots::q]).dtype;
    facts.bias = node.inputs[ir::AttentionSlots::bias];
    return facts;
  }
  return std::nullopt;
}

bool has_matmul(const ir::Graph& graph) {
  return std::any_of(graph.nodes.begin(), graph.nodes.end(), [](const ir::Node& node) {
    return std::holds_alternative<ir::Matmul>(node.op) ||
           std::holds_alternative<ir::ScaledMatmul>(node.op);
  });
}

bool has_reduction(const ir::Graph& graph) {
  return std::any_of(graph.nodes.begin(), graph.nodes.end(), [](const ir::Node& node) {
    return std::holds_alternative<ir::Reduce>(node.op);
  });
}

ir::TensorId first_result(const ir::Node& node) {
  for (const ir::TensorId id : node.outputs) {
    if (id != ir::kNone) return id;
  }
  return ir::kNone;
}

std::string result_of(const ir::Graph& graph, const ir::Node& node) {
  const ir::TensorId id = first_result(node);
  return id == ir::kNone ? std::string{} : graph.tensor(id).name;
}

std::string label_of(const ir::Graph& graph, const ir::Node& node) {
  return fmt::format("op '{}' ({}{}{})", ir::op_name(node.op), result_of(graph, node),
                     node.source.empty() ? "" : ", at ", node.source);
}

}  // namespace lawson::cudnn
