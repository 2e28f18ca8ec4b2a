// An attention in cuDNN's own form: what lowering hands to the frontend, and what Lawson runs
// before and after the plan so that the whole is exactly what the graph says.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/cudnn/defects.h"
#include "engine/cudnn/facts.h"
#include "engine/cudnn/supplies.h"

namespace lawson::cudnn {

struct NativeTensor {
  std::int64_t uid = 0;  // the graph's, or one of Lawson's own
  std::string name;
  DType dtype = DType::f32;
  Dims shape;  // [b, h, s, d]; ragged: s is the longest sequence
  Dims strides;
  bool by_value = false;
  std::int64_t offsets_uid = 0;  // ragged: where each sequence begins, in elements
  DType offsets_dtype = DType::i32;
};

struct NativeAttention {
  enum Role {
    q,
    k,
    v,
    o,
    dout,
    stats,
    scale,
    bias,
    seqlen_q,
    seqlen_kv,
    sink,
    page_table_k,
    page_table_v,
    seed,
    offset,
    dropout_mask,
    dropout_scale,
    dropout_scale_inverse,
    max_logit,
    sum_exp,
    dropped,
    dq,
    dk,
    dv,
    dbias,
    dsink,
    kRoles
  };
  std::array<std::optional<NativeTensor>, kRoles> tensors;

  bool backward = false;
  bool deterministic = false;
  DType io = DType::bf16;
  std::int64_t batch = 0;
  std::int64_t heads = 0;
  std::int64_t rows = 0;
  std::int64_t columns = 0;

  bool padding = false;  // seqlen_q and seqlen_kv are there
  ir::Alignment alignment = ir::Alignment::top_left;
  std::optional<std::int64_t> left;  // inclusive; absent: unbounded
  std::optional<std::int64_t> right;
  bool alibi = false;
  double softcap = 0;
  double dropout = 0;
  std::optional<std::int64_t> tokens_q;  // of a ragged side
  std::optional<std::int64_t> tokens_kv;
  std::optional<std::int64_t> longest_paged;  // paged k and v

  Supplies supplies;
  std::vector<std::string> rewrites;  // what was changed, by name
};

// How far a graph is rewritten. The next is tried where cuDNN refuses the one before.
enum class Variant {
  direct,          // what has to be: raggedness, masks and biases that cuDNN has no words for
  shifted_bounds,  // bottom-right bounds counted from the top left: the same for full lengths
  bounds_as_bias,  // windows, causality and ALiBi written into an additive bias
};
inline constexpr std::array kVariants{Variant::direct, Variant::shifted_bounds,
                                      Variant::bounds_as_bias};

struct RewriteOptions {
  Variant variant = Variant::direct;
  Repairs repairs;
  bool deterministic = false;
  bool dense_stats = false;  // ragged log-sum-exps do not go into the backward as they are
};

// nullopt: the variant changes nothing that an earlier one left.
Result<std::optional<NativeAttention>> rewrite_attention(const ir::Graph& graph,
                                                         const AttentionFacts& facts,
                                                         const RewriteOptions& options);

}  // namespace lawson::cudnn
