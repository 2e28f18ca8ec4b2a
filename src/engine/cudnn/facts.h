// What an attention graph asks for, read off its one node: used to word reasons, to find defects
// and to lower it.
#pragma once

#include <optional>

#include "ir/graph.h"

namespace lawson::cudnn {

struct AttentionFacts {
  const ir::Node* node = nullptr;
  const ir::AttentionRule* rule = nullptr;
  bool backward = false;
  bool deterministic = false;
  std::int64_t batch = 0;
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t s_q = 0;
  std::int64_t s_kv = 0;
  std::int64_t d_qk = 0;
  std::int64_t d_v = 0;
  DType dtype = DType::f32;
  ir::TensorId bias = ir::kNone;
  ir::TensorId sink = ir::kNone;
};

// nullopt when the graph has no attention node.
std::optional<AttentionFacts> attention_facts(const ir::Graph& graph);

}  // namespace lawson::cudnn
