// What an attention graph asks for, read off its attention node: used to word reasons, to find
// defects and to rewrite it.
#pragma once

#include <optional>
#include <string>

#include "ir/attention.h"
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
  std::int64_t s_q = 0;  // of the longest sequence
  std::int64_t s_kv = 0;
  std::int64_t d_qk = 0;
  std::int64_t d_v = 0;
  bool ragged_q = false;
  bool ragged_kv = false;
  bool paged = false;
  DType dtype = DType::f32;
  ir::TensorId bias = ir::kNone;

  // Lengths are known when a plan runs, not before.
  bool has_lengths() const { return rule->padding || ragged_q || ragged_kv; }
  bool ragged() const { return ragged_q || ragged_kv; }
};

// nullopt when the graph has no attention node.
std::optional<AttentionFacts> attention_facts(const ir::Graph& graph);

bool has_matmul(const ir::Graph& graph);  // a matmul or a scaled_matmul
bool has_reduction(const ir::Graph& graph);

// The first result that a node has, and its name.
ir::TensorId first_result(const ir::Node& node);
std::string result_of(const ir::Graph& graph, const ir::Node& node);
// How messages name a node: "op 'tan' (t, at mlp.cpp:12)".
std::string label_of(const ir::Graph& graph, const ir::Node& node);

}  // namespace lawson::cudnn
