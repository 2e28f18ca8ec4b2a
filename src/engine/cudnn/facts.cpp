#include "engine/cudnn/facts.h"

namespace lawson::cudnn {
namespace {

template <typename Op>
AttentionFacts facts_of(const ir::Graph& graph, const ir::Node& node, const Op& op) {
  const auto tensor = [&](typename Op::In slot) -> const ir::Tensor& {
    return graph.tensor(node.inputs[slot]);
  };
  AttentionFacts facts;
  facts.node = &node;
  facts.rule = &op.rule;
  const Dims& q = tensor(Op::q).shape;
  const Dims& k = tensor(Op::k).shape;
  facts.batch = q[0];
  facts.heads = q[1];
  facts.kv_heads = k[1];
  facts.s_q = q[2];
  facts.s_kv = k[2];
  facts.d_qk = q[3];
  facts.d_v = tensor(Op::v).shape[3];
  facts.dtype = tensor(Op::q).dtype;
  facts.bias = node.inputs[Op::bias];
  facts.sink = node.inputs[Op::sink];
  return facts;
}

}  // namespace

std::optional<AttentionFacts> attention_facts(const ir::Graph& graph) {
  for (const ir::Node& node : graph.nodes) {
    if (const auto* forward = std::get_if<ir::Attention>(&node.op)) {
      return facts_of(graph, node, *forward);
    }
    if (const auto* backward = std::get_if<ir::AttentionBackward>(&node.op)) {
      AttentionFacts facts = facts_of(graph, node, *backward);
      facts.backward = true;
      facts.deterministic = backward->deterministic;
      return facts;
    }
  }
  return std::nullopt;
}

}  // namespace lawson::cudnn
