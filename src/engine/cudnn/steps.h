// What the cuDNN engine runs before and after a cuDNN plan: small kernels of Lawson's own that make
// a rewrite of the graph exact. A step is a plain value that the rewriting emits and the plan's
// bytes carry; launching one allocates nothing and waits for nothing, so that it can be captured.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <variant>
#include <vector>

#include "base/dims.h"
#include "base/dtype.h"
#include "base/json.h"
#include "base/status.h"
#include "engine/cudnn/driver.h"
#include "ir/ops.h"

namespace lawson::cudnn {
namespace steps {

// A tensor that a step reads or writes. uid 0: absent. `strides` are in elements, one for each axis
// that the step names, and 0 along an axis that the tensor is repeated over. "By value" means that
// the pointer bound to it is the host's, to one element that is read while launching (no strides).
struct Operand {
  std::int64_t uid = 0;
  DType dtype = DType::f32;
  Dims strides;

  bool operator==(const Operand&) const = default;
};

// Sequences that lie one after another in tensors of `tokens` rows: sequence n has the rows
// offsets[n] ... offsets[n + 1] - 1, those between its length and its end included. Where a step
// has a packing, its tensors' strides along b are not used. Absent: dense tensors.
struct Packing {
  Operand offsets;  // i32 [batch + 1]
  std::int64_t tokens = 0;

  bool operator==(const Packing&) const = default;
};

// The scores [batch, heads, rows, columns] and which of them a row sees (ir::AttentionRule).
struct Scores {
  std::int64_t batch = 0;
  std::int64_t heads = 0;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  Operand seqlen_q;   // i32 [batch]; absent: all have `rows`. Clamped to [0, rows]
  Operand seqlen_kv;  // i32 [batch]; absent: all have `columns`. Clamped to [0, columns]
  Operand sequences;  // by value, integer [1]: later ones have length 0; absent: batch
  ir::Alignment alignment = ir::Alignment::top_left;
  std::int64_t left = -1;
  std::int64_t right = -1;

  bool operator==(const Scores&) const = default;
};

// What is added to a score and comes from memory: factor * bias + mask, where bool masks (u8 or
// bool) that are false hide the score. f32, f16 or bf16, strides [b, h, i, j].
struct Terms {
  Operand bias;
  Operand
      factor;  // by value, float [1]: the attention scale, for a bias before the scale; absent: 1
  Operand mask;

  bool operator==(const Terms&) const = default;
};

// A tensor [b, h, s, depth] whose rows are set to 0.
struct ClearedTensor {
  Operand tensor;  // strides [b, h, s, d]
  std::int64_t depth = 0;

  bool operator==(const ClearedTensor&) const = default;
};

struct RowOffsets {
  Operand offsets;          // i32 or i64 [bucket + 1]
  std::int64_t stride = 0;  // elements from one row of the tensor to the next

  bool operator==(const RowOffsets&) const = default;
};

// Lengths and offsets as cuDNN wants them, for a bucket of sequences of which `sequences` are
// there: seqlen[n] = cu_seqlens[n + 1] - cu_seqlens[n] (or lengths[n]) clamped to [0, max_length]
// (with neither: max_length),
// 0 for those that are not there; offsets[n] = start of n * stride with the start from
// cu_seqlens_padded (absent: cu_seqlens), from the last end on for those that are not there. What
// is not there is not read.
struct Ragged {
  std::int64_t bucket = 0;
  std::int64_t max_length = 0;
  Operand cu_seqlens;         // i32 [bucket + 1]
  Operand cu_seqlens_padded;  // i32 [bucket + 1]
  Operand lengths;            // i32 [bucket], instead of cu_seqlens; then there are no offsets
  Operand sequences;          // by value, integer [1]; absent: bucket
  Operand seqlen;             // out, i32 [bucket]
  std::vector<RowOffsets> outputs;  // out, at most kMaxRowOffsets

  bool operator==(const Ragged&) const = default;
};
inline constexpr std::size_t kMaxRowOffsets = 6;

// out = factor * bias + mask + slope_h * (j - i'), and a large negative finite value where the
// score is hidden: by a bool mask, by -inf, or (`hide_unseen`) because the row does not see it.
// Finite because cuDNN gives NaN for a row that has -inf everywhere; what value: steps_rules.h,
// kHidden. scores.batch and scores.heads are those of `out`: 1 where nothing differs along them.
struct ScoreBias {
  Scores scores;
  Terms terms;
  bool alibi = false;
  Operand slopes;  // f32 [h]; absent: those of Press et al. 2022 for scores.heads heads
  bool hide_unseen = false;
  Operand out;  // f32, f16 or bf16, strides [b, h, i, j]

  bool operator==(const ScoreBias&) const = default;
};

// flags[b, h, i] = 1 where row i sees no key, else 0. A key whose added terms are -inf is not seen.
struct MaskedRows {
  Scores scores;  // heads 1 where nothing differs along them
  Terms terms;
  Operand flags;  // out, u8, strides [b, h, i]

  bool operator==(const MaskedRows&) const = default;
};

// The flagged rows of up to kMaxCleared tensors become 0, of stats the extra logit alone (vanilla
// -inf, off_by_one 0, learnable the sink), of max_logit -inf. Rows behind the end of a packed
// sequence are left alone.
struct ClearRows {
  std::int64_t batch = 0;
  std::int64_t heads = 0;
  std::int64_t rows = 0;
  Operand flags;      // u8, strides [b, h, i]
  Operand sequences;  // by value, integer [1]; absent: batch
  Packing packing;
  std::vector<ClearedTensor> tensors;
  Operand stats;      // f32, strides [b, h, i]
  Operand max_logit;  // f32, strides [b, h, i]
  ir::SoftmaxKind softmax = ir::SoftmaxKind::vanilla;
  Operand sink;  // f32 [h], for learnable

  bool operator==(const ClearRows&) const = default;
};
inline constexpr std::size_t kMaxCleared = 3;

// out = stats + log(sum_exp), but +inf in flagged rows: there the backward's exp(score - stats) is
// 0. `stats` and `out` may be the same memory.
struct StatsOfRows {
  std::int64_t batch = 0;
  std::int64_t heads = 0;
  std::int64_t rows = 0;
  Operand flags;      // u8, strides [b, h, i]; absent: none is flagged
  Operand sequences;  // by value, integer [1]; absent: batch
  Packing packing;
  Operand stats;    // f32, strides [b, h, i]
  Operand sum_exp;  // f32, placed like stats; absent: 1
  Operand out;      // f32, strides [b, h, i]
  // `out` is [batch, heads, rows] whatever the packing; +inf behind the end of a packed sequence.
  bool dense_out = false;

  bool operator==(const StatsOfRows&) const = default;
};

// bias_gradient = factor * gradient, summed over the axes that `shape` has 1 along; in one order,
// so that two runs give the same bits. One block sums one element where the last axis is reduced:
// to reduce a long last axis and others as well, chain two steps through f32 scratch.
struct ReduceBiasGradient {
  Dims full;              // of the gradient: [b, h, sq, skv]
  Dims shape;             // of the bias: 1 or full along each axis
  Operand gradient;       // f32, f16 or bf16
  Operand factor;         // by value, float [1]; absent: 1
  Operand sequences;      // by value, integer [1]; absent: full[0]. Where b is summed, later ones
                          // count as 0; where it is not, their elements are left as they are
  Operand bias_gradient;  // f32, f16 or bf16

  bool operator==(const ReduceBiasGradient&) const = default;
};

// Rows of sequence n from its length on become 0: up to the sequence's end (packed), or up to
// `rows` (dense).
struct ZeroGaps {
  std::int64_t batch = 0;
  std::int64_t heads = 0;
  std::int64_t rows = 0;
  Operand lengths;    // i32 [batch]
  Operand sequences;  // by value, integer [1]; absent: batch
  Packing packing;
  std::vector<ClearedTensor> tensors;  // at most kMaxCleared

  bool operator==(const ZeroGaps&) const = default;
};

// ir::CacheAppend into the cache's own memory. Tokens that would lie outside of the cache (a length
// above `capacity`, a page that is not there) are left out.
struct CacheAppend {
  std::int64_t batch = 0;
  std::int64_t heads = 0;
  std::int64_t fresh_rows = 0;
  std::int64_t depth = 0;
  std::int64_t capacity = 0;   // tokens of a sequence: skv, or pages of a sequence * page_size
  std::int64_t page_size = 0;  // 0: dense
  std::int64_t pages = 0;      // of the whole cache
  Operand cache;               // strides [b, h, s, d]; paged: [page, h, s, d]
  Operand fresh;               // the same dtype, strides [b, h, s, d]
  Operand seqlen_kv;           // i32 [b]
  Operand page_table;          // i32, strides [b, page of the sequence]

  bool operator==(const CacheAppend&) const = default;
};

// out = 1 where in is not 0, else 0: dropout masks between the types that cuDNN and graphs have.
// Where in is NaN, out is left as it is.
struct ConvertMask {
  Dims shape;  // four axes
  Operand in;  // u8, f32, f16 or bf16
  Operand out;

  bool operator==(const ConvertMask&) const = default;
};

}  // namespace steps

using Step = std::variant<steps::Ragged, steps::ScoreBias, steps::MaskedRows, steps::ClearRows,
                          steps::StatsOfRows, steps::ReduceBiasGradient, steps::ZeroGaps,
                          steps::CacheAppend, steps::ConvertMask>;

std::string_view step_name(const Step& step);  // "ragged", "score_bias", ...

// The uids of a step's operands, 0 for each that is absent; launch() wants the pointers in this
// order.
std::vector<std::int64_t> step_uids(const Step& step);

// Are all sizes, strides, element types and operands possible together? What launch() relies on.
Status check_step(const Step& step);

Json step_to_json(const Step& step);
Result<Step> step_from_json(const Json& json);  // checked

// False in a build without the kernels (LAWSON_CUDA_KERNELS=OFF, or no nvcc).
bool steps_are_built();

// Loads the kernels on that device, which a capture cannot: before the first launch there.
Status prepare_steps(int ordinal, const Driver& driver);

// `pointers` as step_uids() lists them, nullptr for what is absent; the step's device has to be
// current. `unavailable` in a build without the kernels.
Status launch(const Step& step, std::span<void* const> pointers, void* stream,
              const Driver& driver);

}  // namespace lawson::cudnn
