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
    return std::holds_alternative<ir::Matmul>(node.op);
  });
}

}  // namespace lawson::cudnn
