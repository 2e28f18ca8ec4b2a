// The closed set of operations. Each op is a plain struct with its attributes; operands live in the
// Node. Printing, hashing, inference and every engine visit the variant, so a forgotten op is a
// compile error. Semantics: docs/design.md ("Operations") and the reference engine.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/dims.h"
#include "base/dtype.h"

namespace lawson::ir {

// [.., M, K] x [.., K, N] -> [.., M, N]; leading dims broadcast. Accumulates in f32 (f64 for f64
// operands, i32 exactly for integer operands); the result has the output tensor's dtype.
struct Matmul {
  bool operator==(const Matmul&) const = default;
};

// To the output tensor's dtype: nearest even; integers saturate.
struct Convert {
  bool operator==(const Convert&) const = default;
};

// [a, b, a_scale, b_scale]: a [.., M, K] x b [.., K, N] of block-scaled values, each element times
// the scale of its block of `block` neighbours along K (the last block may be shorter). Scales are
// a_scale [.., M, B] and b_scale [.., B, N] with B = ceil(K / block); they broadcast over the
// leading dims as a and b do. MXFP8: f8e4m3 or f8e5m2 with f8e8m0 scales per 32; NVFP4: f4e2m1 with
// f8e4m3 scales per 16. Accumulates in f32; the result is f32 unless its dtype says otherwise.
struct ScaledMatmul {
  std::int64_t block = 32;
  // The scales' memory is in the order that tensor cores read: M (N) is padded to a multiple of 128
  // and B to one of 4 in the operand's shape, and element (r, c) of a_scale (of b_scale transposed)
  // is at tile (r / 128, c / 4) * 512 + (r % 32) * 16 + (r % 128) / 32 * 4 + c % 4, tiles row by
  // row. The padding is not read.
  bool swizzled = false;
  enum In { a, b, a_scale, b_scale, kInputs };
  bool operator==(const ScaledMatmul&) const = default;
};

enum class UnaryKind : std::uint8_t {
  neg,
  abs,
  exp,
  log,
  log1p,
  expm1,
  sqrt,
  rsqrt,
  reciprocal,
  sin,
  cos,
  tan,
  tanh,
  erf,
  ceil,
  floor,
  round,
  sign,
  sigmoid,
  relu,
  leaky_relu,
  relu6,
  elu,
  softplus,
  silu,
  gelu,
  gelu_tanh,
};
inline constexpr int kUnaryCount = 27;

struct Unary {
  UnaryKind kind{};
  double parameter = 0;  // leaky_relu: slope; elu: alpha; otherwise 0
  bool operator==(const Unary&) const = default;
};

// [dy, x]: dy * f'(x) for f the activation of that kind (has_gradient_op). Where f has a kink:
// relu 0 at 0, relu6 0 at 0 and 6, leaky_relu its slope at 0, elu alpha at 0.
struct UnaryGrad {
  UnaryKind kind{};
  double parameter = 0;  // as Unary's
  bool operator==(const UnaryGrad&) const = default;
};
// tanh, sigmoid, relu, leaky_relu, relu6, elu, softplus, silu, gelu, gelu_tanh.
bool has_gradient_op(UnaryKind kind);

enum class BinaryKind : std::uint8_t { add, sub, mul, div, pow, min, max, mod };
inline constexpr int kBinaryCount = 8;

struct Binary {
  BinaryKind kind{};
  bool operator==(const Binary&) const = default;
};

enum class CompareKind : std::uint8_t { eq, ne, lt, le, gt, ge };
inline constexpr int kCompareCount = 6;

struct Compare {  // result is bool
  CompareKind kind{};
  bool operator==(const Compare&) const = default;
};

enum class LogicalKind : std::uint8_t { and_, or_, not_ };
inline constexpr int kLogicalCount = 3;

struct Logical {  // bool operands, bool result; not_ takes one operand
  LogicalKind kind{};
  bool operator==(const Logical&) const = default;
};

struct Select {  // [predicate, a, b]: predicate ? a : b
  bool operator==(const Select&) const = default;
};

struct Clamp {
  double min = 0;
  double max = 0;
  bool operator==(const Clamp&) const = default;
};

struct Iota {  // element = its index along `axis`
  std::int64_t axis = 0;
  Dims shape;
  bool operator==(const Iota&) const = default;
};

struct Constant {  // a scalar of rank 0
  double value = 0;
  bool operator==(const Constant&) const = default;
};

struct Broadcast {
  Dims shape;
  bool operator==(const Broadcast&) const = default;
};

struct Reshape {
  Dims shape;
  bool operator==(const Reshape&) const = default;
};

struct Transpose {  // result dim i is operand dim perm[i]
  Dims perm;
  bool operator==(const Transpose&) const = default;
};

struct Slice {
  Dims start;
  Dims limit;
  Dims stride;
  bool operator==(const Slice&) const = default;
};

// Operands one behind the other along `axis`; two or more, equal in dtype and in all other dims.
struct Concat {
  std::int64_t axis = 0;
  std::int64_t operands = 2;  // how many; a spec's `in` says so
  bool operator==(const Concat&) const = default;
};

enum class ReduceKind : std::uint8_t { sum, max, min, mean, prod, amax, norm1, norm2 };
inline constexpr int kReduceCount = 8;

struct Reduce {
  ReduceKind kind{};
  Dims axes;  // ascending, unique
  bool keepdims = false;
  bool operator==(const Reduce&) const = default;
};

enum class NormKind : std::uint8_t { layer, rms };

// [x, scale, bias?] -> y = (x - mean) * inv_std * scale + bias, per slice of x along `axes`:
// layer: mean and inv_std = 1 / sqrt(variance + eps), the variance with divisor n;
// rms: no mean, inv_std = 1 / sqrt(mean(x^2) + eps).
// scale and bias have x's dims on `axes`, and 1 or nothing in front of them elsewhere. Results:
// y (x's dtype), mean and inv_std (x's shape with 1 on `axes`; f32, f64 for f64). rms has no mean.
struct Norm {
  NormKind kind{};
  Dims axes;  // ascending, unique
  double eps = 1e-5;
  enum In { x, scale, bias, kInputs };
  enum Out { y, mean, inv_std, kOutputs };
  bool operator==(const Norm&) const = default;
};

// [dy, x, scale, mean (layer only), inv_std] -> dx (x's dtype), dscale and dbias (scale's shape and
// dtype), each optional.
struct NormBackward {
  NormKind kind{};
  Dims axes;
  enum In { dy, x, scale, mean, inv_std, kInputs };
  enum Out { dx, dscale, dbias, kOutputs };
  bool operator==(const NormBackward&) const = default;
};

enum class Alignment : std::uint8_t { top_left, bottom_right };
enum class SoftmaxKind : std::uint8_t { vanilla, off_by_one, learnable };

// What forward and backward of one attention have in common. Row i of a sequence with lengths
// (q, k) sees column j iff  i' - left <= j <= i' + right  (a bound of -1 is absent), where i' = i
// for top_left and i' = i + (k - q) for bottom_right; and i < q and j < k. The lengths are those of
// the sequence where a side has them (`padding`, ragged), else the tensor's. Causal is right = 0.
struct AttentionRule {
  bool padding = false;  // every side that is not ragged has its lengths: seqlen_q, seqlen_kv
  Alignment alignment = Alignment::top_left;
  std::int64_t left = -1;
  std::int64_t right = -1;
  SoftmaxKind softmax = SoftmaxKind::vanilla;
  double softcap = 0;  // 0: none; else scores become softcap * tanh(scores / softcap)
  // adds slope_h * (j - i'), with the operand `slopes` or those of Press et al. 2022
  bool alibi = false;
  bool pre_scale_bias = false;  // the bias is added to Q K^T before the scale
  double dropout = 0;           // probability that a softmax weight is dropped; others * 1/(1-p)
  std::int64_t max_q = 0;       // ragged q: the longest sequence; 0 where q is dense
  std::int64_t max_kv = 0;      // ragged or paged k and v: the longest sequence; else 0
  bool operator==(const AttentionRule&) const = default;
};

// Operands of attention, in the same slots forward and backward. Optional from `scale` on.
//
// Dense: q [b,h,sq,d], k [b,hk,skv,d], v [b,hk,skv,dv]. Ragged (cu_seqlens_q or cu_seqlens_kv is
// there): the sequences lie one after another along s of one tensor with b = 1, q [1,h,tq,d],
// k [1,hk,tkv,d]; sequence n has cu_seqlens[n+1] - cu_seqlens[n] tokens, from token
// cu_seqlens_padded[n] on (without the operand: cu_seqlens[n]). Paged (page_table_k is there):
// k [pages,hk,page_size_k,d], v [pages,hk,page_size_v,dv]; token j of sequence n is in page
// page_table[n, j / page_size].
struct AttentionSlots {
  enum Shared {
    q,
    k,
    v,
    scale,                 // by-value f32 (f64 with q of f64) [1,1,1,1]; absent: 1
    bias,                  // float [b|1,h|1,sq|1,skv|1] (ragged, paged: the maxima)
    seqlen_q,              // i32 [b,1,1,1]
    seqlen_kv,             // i32 [b,1,1,1]
    sink,                  // f32 [1,h,1,1]
    mask,                  // like bias; bool: true keeps; float: added to the scores like a bias
    slopes,                // f32 [1,h,1,1]
    cu_seqlens_q,          // i32 [b+1,1,1,1], from 0 on, never falling
    cu_seqlens_kv,         // i32 [b+1,1,1,1]
    cu_seqlens_q_padded,   // i32 [b+1,1,1,1]
    cu_seqlens_kv_padded,  // i32 [b+1,1,1,1]
    sequences,             // by-value i32 [1,1,1,1]: the first so many of b are there; absent: all.
                           // Operands along b are not read beyond (cu_seqlens: one more)
    page_table_k,          // i32 [b,1,pages per sequence,1]
    page_table_v,          // i32 [b,1,pages per sequence,1]
    seed,                  // i64 [1,1,1,1]: dropout keeps what base/philox.h's DropoutStream says
                           // of the linear index in [b,h,sq,skv] (ragged, paged: the maxima)
    offset,                // i64 [1,1,1,1]
    dropout_mask,          // u8 [b,h,sq,skv]: 0 drops; instead of seed and offset
    kShared
  };
};

// scores = softcap(scale * (Q K^T + pre-scale bias)); + bias, mask, ALiBi; masked;
// O = dropout(softmax(scores)) V. Results: o (q's shape with dv), stats (q's with 1; f32, for f64
// operands f64: the log-sum-exp, with the sink or the implicit zero included), max_logit (like
// stats: the largest visible score, -inf without one), dropped u8 [b,h,sq,skv]: the dropout mask
// that was used. Rows that see nothing, and rows of a ragged tensor between sequences, are 0 in o.
// Rows of a ragged result behind the last sequence's end (cu_seqlens_padded[sequences]) are left as
// they are.
struct Attention {
  AttentionRule rule;
  using enum AttentionSlots::Shared;
  enum In { kInputs = kShared };
  enum Out { o, stats, max_logit, dropped, kOutputs };
  bool operator==(const Attention&) const = default;
};

struct AttentionBackward {
  AttentionRule rule;
  bool deterministic = false;
  using enum AttentionSlots::Shared;
  enum In { o = kShared, dout, stats, kInputs };
  enum Out { dq, dk, dv, dbias, dsink, kOutputs };
  bool operator==(const AttentionBackward&) const = default;
};

// Writes new keys or values into a cache: [cache, fresh, seqlen_kv, page_table?] -> cache. Cache
// dense [b,hk,skv,d] or paged [pages,hk,page_size,d]; fresh [b,hk,s,d]: the last s tokens of each
// sequence, at positions seqlen_kv - s ... seqlen_kv - 1 (those below 0 are left out). The result
// may be bound to the cache's own memory, and on a GPU has to be.
struct CacheAppend {
  enum In { cache, fresh, seqlen_kv, page_table, kInputs };
  bool operator==(const CacheAppend&) const = default;
};

using Op = std::variant<Matmul, ScaledMatmul, Convert, Unary, UnaryGrad, Binary, Compare, Logical,
                        Select, Clamp, Iota, Constant, Broadcast, Reshape, Transpose, Slice, Concat,
                        Reduce, Norm, NormBackward, Attention, AttentionBackward, CacheAppend>;

// For std::visit with one lambda per op.
template <typename... Ts>
struct Overloaded : Ts... {
  using Ts::operator()...;
};
template <typename... Ts>
Overloaded(Ts...) -> Overloaded<Ts...>;

using lawson::to_string;  // of Dims and DType, which the overloads below would hide
std::string_view to_string(UnaryKind kind);
std::string_view to_string(BinaryKind kind);
std::string_view to_string(CompareKind kind);
std::string_view to_string(LogicalKind kind);
std::string_view to_string(ReduceKind kind);
std::string_view to_string(Alignment alignment);
std::string_view to_string(SoftmaxKind kind);

// The spec's name of an op: "matmul", "gelu_tanh", "compare_lt", "reduce_sum", "attention", ...
std::string op_name(const Op& op);
// The op of that name with default attributes; nullopt when there is none.
std::optional<Op> op_from_name(std::string_view name);
std::vector<std::string> all_op_names();
// The names of an op's operand slots and of its results, in slot order; empty for ops whose
// operands are told apart by position, or that have one result.
std::vector<std::string_view> slot_names(const Op& op);
std::vector<std::string_view> result_names(const Op& op);

}  // namespace lawson::ir
