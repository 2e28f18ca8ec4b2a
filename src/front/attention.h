// The attention spec (DESIGN: specs, kind "attention") and the graphs it stands for.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "ir/graph.h"

namespace lawson::front {

enum class Pass { forward, backward, training };
enum class BiasKind { none, pre_scale, post_scale, alibi };

struct AttentionSpec {
  std::string name = "attention";
  Pass pass = Pass::forward;
  DType dtype = DType::bf16;
  std::optional<DType> output_dtype;  // default: dtype
  std::int64_t batch = 1;
  std::int64_t heads = 1;
  std::int64_t kv_heads = 1;
  std::int64_t seqlen_q = 1;
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
  ir::SoftmaxKind softmax = ir::SoftmaxKind::vanilla;
  double softcap = 0;
  double dropout = 0;
  std::optional<double> scale;  // default: 1 / sqrt(head_dim_qk)
  bool deterministic = false;
  bool return_stats = false;
  bool return_max_logit = false;
  bool cuda_graph = false;
  Dims seqlens_q;  // given lengths per batch entry, for generated data
  Dims seqlens_kv;
  std::map<std::string, Dims> strides;  // q k v o do dq dk dv, in [b,h,s,d] order

  // Fields of the spec that this version reads but does not lower yet, as "field=value".
  std::vector<std::pair<std::string, std::string>> not_lowered;
};

// Reads and checks a spec document. Unknown fields, wrong types and impossible combinations
// (heads not divisible, lengths beyond the maximum, ...) are errors that name the field.
Result<AttentionSpec> attention_from_json(const Json& document, const std::string& source);

// The document with every default filled in; reads back to the same spec.
Json attention_to_json(const AttentionSpec& spec);

// The graph of one pass (forward or backward). ErrorKind::unsupported with reasons when the spec
// asks for something that has no graph form in this version.
Result<ir::Graph> attention_graph(const AttentionSpec& spec, Pass pass);

}  // namespace lawson::front
