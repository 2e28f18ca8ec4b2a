#include "ir/infer.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "ir/attention.h"
#include "ir/norm.h"

namespace lawson::ir {
namespace {

using Results = std::vector<Inferred>;

std::string describe(const Tensor& tensor) {
  return fmt::format("{} {}{}", tensor.name, to_string(tensor.dtype), to_string(tensor.shape));
}

Error wrong(const Op& op, std::string_view message) {
  return invalid("{}: {}", op_name(op), message);
}

// Pointwise result: broadcast of all operands.
Result<Dims> common_shape(const Op& op, const Operands& operands) {
  Dims shape = operands[0]->shape;
  for (std::size_t i = 1; i < operands.size(); ++i) {
    const auto merged = broadcast_shape(shape, operands[i]->shape);
    if (!merged) {
      return wrong(op, fmt::format("{} and {} do not broadcast to one shape",
                                   describe(*operands[0]), describe(*operands[i])));
    }
    shape = *merged;
  }
  return shape;
}

Status require_dtype(const Op& op, const Tensor& tensor, DType wanted) {
  if (tensor.dtype == wanted) return {};
  return wrong(op,
               fmt::format("operand {} must have dtype {}", describe(tensor), to_string(wanted)));
}

Result<Results> infer_matmul(const Op& op, const Operands& in, std::optional<DType> dtype) {
  const Tensor& a = *in[0];
  const Tensor& b = *in[1];
  if (a.shape.size() < 2 || b.shape.size() < 2) {
    return wrong(
        op, fmt::format("{} x {}: both operands need rank 2 or more", describe(a), describe(b)));
  }
  const std::int64_t k = a.shape.back();
  if (k != b.shape[b.shape.size() - 2]) {
    return wrong(op, fmt::format("{} x {}: inner dims {} and {} differ", describe(a), describe(b),
                                 k, b.shape[b.shape.size() - 2]));
  }
  if (is_float(a.dtype) != is_float(b.dtype)) {
    return wrong(op, fmt::format("{} x {}: float with integer operand; convert one first",
                                 describe(a), describe(b)));
  }
  if (a.dtype == DType::boolean || b.dtype == DType::boolean) {
    return wrong(op, "bool operands are not allowed; convert first");
  }
  const auto batch = broadcast_shape(Dims(a.shape.begin(), a.shape.end() - 2),
                                     Dims(b.shape.begin(), b.shape.end() - 2));
  if (!batch) {
    return wrong(op, fmt::format("{} x {}: batch dims do not broadcast", describe(a), describe(b)));
  }
  Dims shape = *batch;
  shape.push_back(a.shape[a.shape.size() - 2]);
  shape.push_back(b.shape.back());
  const DType natural = is_float(a.dtype) ? promote(a.dtype, b.dtype) : DType::i32;
  return Results{{dtype.value_or(natural), shape}};
}

bool is_block_scale(DType dtype) {
  return dtype == DType::f8e8m0 || dtype == DType::f8e4m3 || dtype == DType::f32;
}

// The scales of one operand, [.., rows, blocks], with the operand's leading dims.
Status check_scales(const Op& op, const ScaledMatmul& scaled, const Tensor& values,
                    const Tensor& scales, bool transposed) {
  if (!is_block_scale(scales.dtype)) {
    return wrong(op, fmt::format("{} must have dtype f8e8m0, f8e4m3 or f32", describe(scales)));
  }
  Dims wanted = values.shape;
  const std::size_t rank = wanted.size();
  std::int64_t& blocks = wanted[transposed ? rank - 2 : rank - 1];
  std::int64_t& rows = wanted[transposed ? rank - 1 : rank - 2];
  const auto up = [](std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; };
  blocks = up(blocks, scaled.block) / scaled.block;
  if (scaled.swizzled) {
    blocks = up(blocks, 4);
    rows = up(rows, 128);
  }
  if (scales.shape == wanted) return {};
  return wrong(op, fmt::format("{} must have shape {} (blocks of {} along K of {}{})",
                               describe(scales), to_string(wanted), scaled.block, describe(values),
                               scaled.swizzled ? ", padded to 128 rows and 4 blocks" : ""));
}

Result<Results> infer_scaled_matmul(const Op& op, const ScaledMatmul& scaled, const Operands& in,
                                    std::optional<DType> dtype) {
  using Scaled = ScaledMatmul;
  if (scaled.block < 1) return wrong(op, fmt::format("block {} must be at least 1", scaled.block));
  for (const Scaled::In slot : {Scaled::a, Scaled::b}) {
    if (!is_float(in[slot]->dtype) || bit_width(in[slot]->dtype) > 8) {
      return wrong(op,
                   fmt::format("{} must have a float dtype of 4 or 8 bits", describe(*in[slot])));
    }
  }
  LAWSON_TRY(Results product, infer_matmul(op, {in[Scaled::a], in[Scaled::b]}, dtype));
  LAWSON_CHECK(check_scales(op, scaled, *in[Scaled::a], *in[Scaled::a_scale], false));
  LAWSON_CHECK(check_scales(op, scaled, *in[Scaled::b], *in[Scaled::b_scale], true));
  product[0].dtype = dtype.value_or(DType::f32);
  return product;
}

Result<Results> infer_pointwise(const Op& op, const Operands& in, std::optional<DType> dtype) {
  LAWSON_TRY(Dims shape, common_shape(op, in));
  DType natural = in[0]->dtype;
  for (const Tensor* tensor : in) {
    if (tensor->dtype == DType::boolean) {
      return wrong(op, fmt::format("operand {} is bool; convert it first", describe(*tensor)));
    }
    natural = promote(natural, tensor->dtype);
  }
  if (const auto* unary = std::get_if<Unary>(&op); unary != nullptr && !is_float(natural)) {
    const bool keeps_integers = unary->kind == UnaryKind::neg || unary->kind == UnaryKind::abs ||
                                unary->kind == UnaryKind::sign || unary->kind == UnaryKind::relu;
    if (!keeps_integers) {
      return wrong(op, fmt::format("operand {} is an integer; convert it to a float type first",
                                   describe(*in[0])));
    }
  }
  return Results{{dtype.value_or(natural), shape}};
}

Result<Results> infer_select(const Op& op, const Operands& in, std::optional<DType> dtype) {
  LAWSON_CHECK(require_dtype(op, *in[0], DType::boolean));
  LAWSON_TRY(Dims shape, common_shape(op, in));
  return Results{{dtype.value_or(promote(in[1]->dtype, in[2]->dtype)), shape}};
}

Result<Results> infer_reduce(const Op& op, const Reduce& reduce, const Tensor& x,
                             std::optional<DType> dtype) {
  const auto rank = static_cast<std::int64_t>(x.shape.size());
  if (reduce.axes.empty() && rank > 0) {
    return wrong(op, "field 'axes' is empty; name at least one axis");
  }
  for (std::size_t i = 0; i < reduce.axes.size(); ++i) {
    const std::int64_t axis = reduce.axes[i];
    if (axis < 0 || axis >= rank || (i > 0 && axis <= reduce.axes[i - 1])) {
      return wrong(op, fmt::format("axes {} must be ascending, unique and in [0, {})",
                                   to_string(reduce.axes), rank));
    }
  }
  if (x.dtype == DType::boolean) return wrong(op, "bool operand; convert it first");
  Dims shape;
  for (std::int64_t i = 0; i < rank; ++i) {
    const bool reduced = std::find(reduce.axes.begin(), reduce.axes.end(), i) != reduce.axes.end();
    if (!reduced) {
      shape.push_back(x.shape[static_cast<std::size_t>(i)]);
    } else if (reduce.keepdims) {
      shape.push_back(1);
    }
    const bool has_identity = reduce.kind == ReduceKind::sum || reduce.kind == ReduceKind::prod ||
                              reduce.kind == ReduceKind::norm1 || reduce.kind == ReduceKind::norm2;
    if (reduced && x.shape[static_cast<std::size_t>(i)] == 0 && !has_identity) {
      return wrong(op, fmt::format("axis {} of {} is empty", i, describe(x)));
    }
  }
  return Results{{dtype.value_or(x.dtype), shape}};
}

Result<Results> infer_reshape(const Op& op, const Reshape& reshape, const Tensor& x) {
  const auto from = element_count(x.shape);
  const auto to = element_count(reshape.shape);
  if (!from || !to || *from != *to) {
    return wrong(op, fmt::format("{} cannot become shape {}: element counts differ", describe(x),
                                 to_string(reshape.shape)));
  }
  return Results{{x.dtype, reshape.shape}};
}

Result<Results> infer_broadcast(const Op& op, const Broadcast& broadcast, const Tensor& x) {
  const auto merged = broadcast_shape(x.shape, broadcast.shape);
  if (!merged || *merged != broadcast.shape) {
    return wrong(op, fmt::format("{} does not broadcast to shape {}", describe(x),
                                 to_string(broadcast.shape)));
  }
  return Results{{x.dtype, broadcast.shape}};
}

Result<Results> infer_transpose(const Op& op, const Transpose& transpose, const Tensor& x) {
  Dims sorted = transpose.perm;
  std::sort(sorted.begin(), sorted.end());
  bool is_permutation = sorted.size() == x.shape.size();
  for (std::size_t i = 0; is_permutation && i < sorted.size(); ++i) {
    is_permutation = sorted[i] == static_cast<std::int64_t>(i);
  }
  if (!is_permutation) {
    return wrong(op, fmt::format("perm {} is not a permutation of the {} axes of {}",
                                 to_string(transpose.perm), x.shape.size(), describe(x)));
  }
  Dims shape;
  for (const std::int64_t axis : transpose.perm) {
    shape.push_back(x.shape[static_cast<std::size_t>(axis)]);
  }
  return Results{{x.dtype, shape}};
}

Result<Results> infer_slice(const Op& op, const Slice& slice, const Tensor& x) {
  const std::size_t rank = x.shape.size();
  if (slice.start.size() != rank || slice.limit.size() != rank || slice.stride.size() != rank) {
    return wrong(op,
                 fmt::format("start, limit and stride need {} entries for {}", rank, describe(x)));
  }
  Dims shape;
  for (std::size_t i = 0; i < rank; ++i) {
    if (slice.start[i] < 0 || slice.limit[i] < slice.start[i] || slice.limit[i] > x.shape[i] ||
        slice.stride[i] < 1) {
      return wrong(op, fmt::format("axis {}: [{}:{}:{}] is not inside [0, {}] with stride >= 1", i,
                                   slice.start[i], slice.limit[i], slice.stride[i], x.shape[i]));
    }
    shape.push_back((slice.limit[i] - slice.start[i] + slice.stride[i] - 1) / slice.stride[i]);
  }
  return Results{{x.dtype, shape}};
}

Result<Results> infer_unary_grad(const Op& op, const UnaryGrad& grad, const Operands& in,
                                 std::optional<DType> dtype) {
  if (!has_gradient_op(grad.kind)) {
    return wrong(op, fmt::format("{} has no gradient op", to_string(grad.kind)));
  }
  for (const Tensor* tensor : in) {
    if (!is_float(tensor->dtype)) {
      return wrong(op, fmt::format("operand {} must have a float dtype", describe(*tensor)));
    }
  }
  return infer_pointwise(op, in, dtype);
}

Result<Results> infer_concat(const Op& op, const Concat& concat, const Operands& in) {
  Inferred result{in[0]->dtype, in[0]->shape};
  const auto rank = static_cast<std::int64_t>(result.shape.size());
  if (concat.axis < 0 || concat.axis >= rank) {
    return wrong(op, fmt::format("axis {} is not an axis of {}", concat.axis, describe(*in[0])));
  }
  const auto axis = static_cast<std::size_t>(concat.axis);
  for (std::size_t i = 1; i < in.size(); ++i) {
    Dims shape = in[i]->shape;
    const std::int64_t length = shape.size() == result.shape.size() ? shape[axis] : 0;
    if (shape.size() == result.shape.size()) shape[axis] = result.shape[axis];
    if (shape != result.shape || in[i]->dtype != result.dtype) {
      return wrong(op, fmt::format("{} and {} differ in more than axis {}", describe(*in[0]),
                                   describe(*in[i]), concat.axis));
    }
    result.shape[axis] += length;
  }
  return Results{result};
}

bool is_optional(const Op& op, std::size_t slot) {
  if (attention_rule(op) != nullptr) {
    return slot >= AttentionSlots::scale && slot < AttentionSlots::kShared;
  }
  if (std::holds_alternative<Norm>(op)) return slot == Norm::bias;
  if (std::holds_alternative<NormBackward>(op)) return slot == NormBackward::mean;
  return std::holds_alternative<CacheAppend>(op) && slot == CacheAppend::page_table;
}

}  // namespace

DType promote(DType a, DType b) {
  if (a == b) return a;
  if (is_float(a) != is_float(b)) return is_float(a) ? a : b;
  if (bit_width(a) != bit_width(b)) return bit_width(a) > bit_width(b) ? a : b;
  if (!is_float(a)) return DType::i32;                  // i8 with u8
  return bit_width(a) == 16 ? DType::f32 : DType::f16;  // f16 with bf16; two 8-bit formats
}

std::size_t input_slots(const Op& op) {
  using Count = std::size_t;
  return std::visit(
      Overloaded{
          [](const Matmul&) { return Count{2}; },
          [](const ScaledMatmul&) { return Count{ScaledMatmul::kInputs}; },
          [](const UnaryGrad&) { return Count{2}; },
          [](const Concat& c) { return static_cast<Count>(std::max<std::int64_t>(c.operands, 2)); },
          [](const Norm&) { return Count{Norm::kInputs}; },
          [](const NormBackward&) { return Count{NormBackward::kInputs}; },
          [](const Binary&) { return Count{2}; },
          [](const Compare&) { return Count{2}; },
          [](const Logical& l) { return Count{l.kind == LogicalKind::not_ ? 1U : 2U}; },
          [](const Select&) { return Count{3}; },
          [](const Iota&) { return Count{0}; },
          [](const Constant&) { return Count{0}; },
          [](const Attention&) { return Count{Attention::kInputs}; },
          [](const AttentionBackward&) { return Count{AttentionBackward::kInputs}; },
          [](const CacheAppend&) { return Count{CacheAppend::kInputs}; },
          [](const auto&) { return Count{1}; },
      },
      op);
}

std::size_t output_slots(const Op& op) {
  if (std::holds_alternative<Attention>(op)) return Attention::kOutputs;
  if (std::holds_alternative<AttentionBackward>(op)) return AttentionBackward::kOutputs;
  if (std::holds_alternative<Norm>(op)) return Norm::kOutputs;
  if (std::holds_alternative<NormBackward>(op)) return NormBackward::kOutputs;
  return 1;
}

Result<std::vector<Inferred>> infer(const Op& op, const Operands& operands,
                                    std::optional<DType> dtype) {
  if (operands.size() != input_slots(op)) {
    return wrong(op, fmt::format("takes {} operands, got {}", input_slots(op), operands.size()));
  }
  for (std::size_t i = 0; i < operands.size(); ++i) {
    if (operands[i] == nullptr && !is_optional(op, i)) {
      const auto names = slot_names(op);
      return wrong(op, names.empty() ? fmt::format("operand {} is missing", i)
                                     : fmt::format("operand {} is missing", names[i]));
    }
  }
  return std::visit(
      Overloaded{
          [&](const Matmul&) { return infer_matmul(op, operands, dtype); },
          [&](const ScaledMatmul& m) { return infer_scaled_matmul(op, m, operands, dtype); },
          [&](const UnaryGrad& u) { return infer_unary_grad(op, u, operands, dtype); },
          [&](const Concat& c) { return infer_concat(op, c, operands); },
          [&](const Norm& n) { return infer_norm(n, operands, dtype); },
          [&](const NormBackward& n) { return infer_norm_backward(n, operands, dtype); },
          [&](const Convert&) -> Result<Results> {
            if (!dtype) return wrong(op, "field 'dtype' is missing");
            return Results{{*dtype, operands[0]->shape}};
          },
          [&](const Unary&) { return infer_pointwise(op, operands, dtype); },
          [&](const Binary&) { return infer_pointwise(op, operands, dtype); },
          [&](const Clamp& clamp) -> Result<Results> {
            if (std::isnan(clamp.min) || std::isnan(clamp.max) || clamp.min > clamp.max) {
              return wrong(op, fmt::format("min {} and max {} must be numbers with min <= max",
                                           clamp.min, clamp.max));
            }
            return infer_pointwise(op, operands, dtype);
          },
          [&](const Compare&) -> Result<Results> {
            LAWSON_TRY(Dims shape, common_shape(op, operands));
            return Results{{DType::boolean, shape}};
          },
          [&](const Logical&) -> Result<Results> {
            for (const Tensor* tensor : operands) {
              LAWSON_CHECK(require_dtype(op, *tensor, DType::boolean));
            }
            LAWSON_TRY(Dims shape, common_shape(op, operands));
            return Results{{DType::boolean, shape}};
          },
          [&](const Select&) { return infer_select(op, operands, dtype); },
          [&](const Iota& iota) -> Result<Results> {
            if (iota.axis < 0 || iota.axis >= static_cast<std::int64_t>(iota.shape.size())) {
              return wrong(op, fmt::format("axis {} is not an axis of shape {}", iota.axis,
                                           to_string(iota.shape)));
            }
            return Results{{dtype.value_or(DType::i32), iota.shape}};
          },
          [&](const Constant&) -> Result<Results> {
            return Results{{dtype.value_or(DType::f32), {}}};
          },
          [&](const Broadcast& b) { return infer_broadcast(op, b, *operands[0]); },
          [&](const Reshape& r) { return infer_reshape(op, r, *operands[0]); },
          [&](const Transpose& t) { return infer_transpose(op, t, *operands[0]); },
          [&](const Slice& s) { return infer_slice(op, s, *operands[0]); },
          [&](const Reduce& r) { return infer_reduce(op, r, *operands[0], dtype); },
          [&](const Attention& a) { return infer_attention(a, operands, dtype); },
          [&](const AttentionBackward& a) { return infer_attention_backward(a, operands, dtype); },
          [&](const CacheAppend& a) { return infer_cache_append(a, operands); },
      },
      op);
}

}  // namespace lawson::ir
