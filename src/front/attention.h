// The attention spec (DESIGN: specs, kind "attention") and the graphs it stands for.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "ir/graph.h"

namespace lawson::front {

enum class Pass { forward, backward, training };
enum class BiasKind { none, pre_scale, post_scale, alibi };

// A paged cache of keys and values.
struct PagedCache {
  std::int64_t page_size_k = 0;
  std::int64_t page_size_v = 0;
  std::int64_t pages = 0;  // in each of the two caches; 0: as many as batch sequences can fill
  bool operator==(const PagedCache&) const = default;
};

// An explicit mask: bool keeps where true, a float type is added to the scores.
struct MaskTensor {
  DType dtype = DType::boolean;
  Dims shape;  // [b,h,sq,skv], each full or 1
  bool operator==(const MaskTensor&) const = default;
};

enum class CpStrategy { ring, all_gather, all_to_all };

struct ContextParallel {
  CpStrategy strategy = CpStrategy::ring;
  std::int64_t size = 1;  // ranks
  bool operator==(const ContextParallel&) const = default;
};

enum class Fp8Recipe { none, delayed, current, mxfp8 };

struct AttentionSpec {
  std::string name = "attention";
  Pass pass = Pass::forward;
  DType dtype = DType::bf16;
  std::optional<DType> output_dtype;  // default: dtype
  std::int64_t batch = 1;
  std::int64_t heads = 1;
  std::int64_t kv_heads = 1;
  std::int64_t seqlen_q = 1;  // of the longest sequence
  std::int64_t seqlen_kv = 1;
  std::int64_t head_dim_qk = 1;
  std::int64_t head_dim_v = 1;
  std::string layout = "bshd";
  std::string mask = "none";
  std::int64_t window_left = -1;
  std::int64_t window_right = -1;
  BiasKind bias = BiasKind::none;
  Dims bias_shape;                  // [b,h,sq,skv], each full or 1; default [1,h,sq,skv]
  std::optional<DType> bias_dtype;  // default: dtype
  bool bias_grad = false;
  std::optional<MaskTensor> attn_mask;
  bool alibi_slopes = false;               // slopes are an operand, not those of the head count
  std::vector<double> alibi_slope_values;  // given slopes, for generated data; one per head
  ir::SoftmaxKind softmax = ir::SoftmaxKind::vanilla;
  double softcap = 0;
  double dropout = 0;
  bool return_dropout_mask = false;  // forward: the mask that was used, u8 [b,h,sq,skv]
  bool dropout_mask_input = false;   // the mask is an operand instead of seed and offset
  std::optional<double> scale;       // default: 1 / sqrt(head_dim_qk)
  bool deterministic = false;
  bool return_stats = false;
  bool return_max_logit = false;
  bool cuda_graph = false;
  std::int64_t total_q = 0;  // tokens of a ragged tensor; 0: batch * seqlen
  std::int64_t total_kv = 0;
  Dims seqlens_q;  // given lengths per batch entry, for generated data
  Dims seqlens_kv;
  Dims seqlens_q_padded;  // given memory lengths of ragged sequences
  Dims seqlens_kv_padded;
  bool has_padded_offsets = false;  // ragged: cu_seqlens_*_padded are operands
  std::optional<PagedCache> paged;
  std::int64_t append = 0;  // new tokens per sequence that are written into the cache first
  Fp8Recipe fp8 = Fp8Recipe::none;
  std::optional<ContextParallel> context_parallel;
  std::map<std::string, Dims> strides;  // q k v o do dq dk dv, in [b,h,s,d] order

  bool operator==(const AttentionSpec&) const = default;
};

// The layout of each of q, k, v, and how they share memory.
struct Layout {
  enum class Packing { separate, qkv_s3hd, qkv_h3d, kv_s2hd, kv_h2d };
  std::array<std::string, 3> words;  // of q, k, v: bshd, sbhd, bhsd or thd
  Packing packing = Packing::separate;
  bool ragged_q() const { return words[0] == "thd"; }
  bool ragged_kv() const { return words[1] == "thd"; }
};
std::optional<Layout> parse_layout(std::string_view layout);  // nullopt: not a layout

// What is wrong with a combination of fields, and the field to blame.
struct FieldProblem {
  std::string field;
  std::string message;
};
// The checks that both ways in (documents and handles) share.
std::optional<FieldProblem> check_attention(const AttentionSpec& spec);

// Reads and checks a spec document. Unknown fields, wrong types and impossible combinations
// (heads not divisible, lengths beyond the maximum, ...) are errors that name the field.
Result<AttentionSpec> attention_from_json(const Json& document, const std::string& source);

// The document with every default filled in; reads back to the same spec.
Json attention_to_json(const AttentionSpec& spec);

// The graph of one pass (forward or backward): ragged batches and token counts are rounded up to
// their buckets. ErrorKind::unsupported with reasons when the spec asks for something that has no
// graph form in this version.
Result<ir::Graph> attention_graph(const AttentionSpec& spec, Pass pass);

}  // namespace lawson::front
