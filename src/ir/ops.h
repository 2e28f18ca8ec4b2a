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

enum class ReduceKind : std::uint8_t { sum, max, min, mean, prod, amax, norm1, norm2 };
inline constexpr int kReduceCount = 8;

struct Reduce {
  ReduceKind kind{};
  Dims axes;  // ascending, unique
  bool keepdims = false;
  bool operator==(const Reduce&) const = default;
};

enum class Alignment : std::uint8_t { top_left, bottom_right };
enum class SoftmaxKind : std::uint8_t { vanilla, off_by_one, learnable };

// What forward and backward of one attention have in common. Row i of a sequence with lengths
// (q, k) sees column j iff  i' - left <= j <= i' + right  (a bound of -1 is absent), where i' = i
// for top_left and i' = i + (k - q) for bottom_right; with `padding` also i < q and j < k, and
// (q, k) are the sequence's own lengths. Causal is right = 0.
struct AttentionRule {
  bool padding = false;
  Alignment alignment = Alignment::top_left;
  std::int64_t left = -1;
  std::int64_t right = -1;
  SoftmaxKind softmax = SoftmaxKind::vanilla;
  double softcap = 0;  // 0: none; else scores become softcap * tanh(scores / softcap)
  bool alibi = false;  // adds slope_h * (j - i'), slopes of Press et al. 2022 for this head count
  bool operator==(const AttentionRule&) const = default;
};

// scores = softcap(scale * Q K^T); + bias; + ALiBi; masked; O = softmax(scores) V.
// Logical shapes: q [b,h,sq,d], k [b,hk,skv,d], v [b,hk,skv,dv], o [b,h,sq,dv], bias [b|1,h|1,sq|1,
// skv|1], seqlen_q and seqlen_kv [b,1,1,1] i32, sink [1,h,1,1] f32, stats [b,h,sq,1] f32
// (log-sum-exp with the sink or the implicit zero included), scale: by-value f32 scalar [1,1,1,1].
struct Attention {
  AttentionRule rule;
  enum In { q, k, v, scale, bias, seqlen_q, seqlen_kv, sink, kInputs };
  enum Out { o, stats, kOutputs };
  bool operator==(const Attention&) const = default;
};

struct AttentionBackward {
  AttentionRule rule;
  bool deterministic = false;
  enum In { q, k, v, o, dout, stats, scale, bias, seqlen_q, seqlen_kv, sink, kInputs };
  enum Out { dq, dk, dv, dbias, dsink, kOutputs };
  bool operator==(const AttentionBackward&) const = default;
};

using Op =
    std::variant<Matmul, Convert, Unary, Binary, Compare, Logical, Select, Clamp, Iota, Constant,
                 Broadcast, Reshape, Transpose, Slice, Reduce, Attention, AttentionBackward>;

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

}  // namespace lawson::ir
