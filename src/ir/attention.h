// The sizes of an attention, read off its operands, and the checks of the attention ops.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "ir/graph.h"
#include "ir/infer.h"

namespace lawson::ir {

struct AttentionGeometry {
  std::int64_t batch = 0;  // sequences that the operands have room for
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t rows = 0;         // queries of the longest sequence
  std::int64_t columns = 0;      // keys of the longest sequence
  std::int64_t depth = 0;        // of q and k
  std::int64_t value_depth = 0;  // of v and o
  bool ragged_q = false;
  bool ragged_kv = false;
  bool paged = false;
  std::int64_t page_size_k = 0;
  std::int64_t page_size_v = 0;

  // The logical shape of scores, bias, mask and dropout mask.
  Dims scores() const { return {batch, heads, rows, columns}; }
};

using Operands = std::vector<const Tensor*>;  // one per slot, nullptr where absent

// Of operands in the slots of AttentionSlots that were checked.
AttentionGeometry attention_geometry(const AttentionRule& rule, const Operands& operands);
// Of a node of a finished graph; nullopt when it is no attention.
std::optional<AttentionGeometry> attention_geometry(const Graph& graph, const Node& node);
const AttentionRule* attention_rule(const Op& op);  // nullptr when it is no attention

// The input whose memory an output has to share where an engine works in place (the cache of a
// CacheAppend); kNone for other outputs.
TensorId shared_memory_input(const Graph& graph, TensorId output);

Result<std::vector<Inferred>> infer_attention(const Attention& op, const Operands& operands,
                                              std::optional<DType> dtype);
Result<std::vector<Inferred>> infer_attention_backward(const AttentionBackward& op,
                                                       const Operands& operands,
                                                       std::optional<DType> dtype);
Result<std::vector<Inferred>> infer_cache_append(const CacheAppend& op, const Operands& operands);

}  // namespace lawson::ir
