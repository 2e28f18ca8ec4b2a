#include "ir/norm.h"

#include <algorithm>
#include <cmath>

namespace lawson::ir {
namespace {

bool contains(const Dims& axes, std::size_t axis) {
  return std::find(axes.begin(), axes.end(), static_cast<std::int64_t>(axis)) != axes.end();
}

std::string describe(const Tensor& tensor) {
  return fmt::format("{} {}{}", tensor.name, to_string(tensor.dtype), to_string(tensor.shape));
}

Status check_float(const Op& op, const Tensor& tensor) {
  if (is_float(tensor.dtype)) return {};
  return invalid("{}: operand {} must have a float dtype", op_name(op), describe(tensor));
}

Status check_axes(const Op& op, const Dims& axes, const Tensor& x) {
  const auto rank = static_cast<std::int64_t>(x.shape.size());
  if (axes.empty()) return invalid("{}: field 'axes' is empty; name at least one", op_name(op));
  for (std::size_t i = 0; i < axes.size(); ++i) {
    if (axes[i] < 0 || axes[i] >= rank || (i > 0 && axes[i] <= axes[i - 1])) {
      return invalid("{}: axes {} must be ascending, unique and in [0, {})", op_name(op),
                     to_string(axes), rank);
    }
    if (x.shape[static_cast<std::size_t>(axes[i])] == 0) {
      return invalid("{}: axis {} of {} is empty", op_name(op), axes[i], describe(x));
    }
  }
  return {};
}

// `shape` is `wanted`, of which leading 1s may be missing.
Status check_shape(const Op& op, const Tensor& tensor, const Dims& wanted) {
  const std::size_t missing = wanted.size() - std::min(wanted.size(), tensor.shape.size());
  const bool ok = tensor.shape.size() <= wanted.size() &&
                  std::equal(tensor.shape.begin(), tensor.shape.end(),
                             wanted.begin() + static_cast<std::ptrdiff_t>(missing)) &&
                  std::all_of(wanted.begin(), wanted.begin() + static_cast<std::ptrdiff_t>(missing),
                              [](std::int64_t dim) { return dim == 1; });
  if (ok) return {};
  return invalid("{}: operand {} must have shape {}, of which leading 1s may be missing",
                 op_name(op), describe(tensor), to_string(wanted));
}

Status check_stats(const Op& op, const Tensor& stats, const Tensor& x, const Dims& axes) {
  if (stats.shape == norm_stats_shape(x.shape, axes)) return {};
  return invalid("{}: operand {} must have shape {}", op_name(op), describe(stats),
                 to_string(norm_stats_shape(x.shape, axes)));
}

DType stats_dtype(const Tensor& x) {
  return x.dtype == DType::f64 ? DType::f64 : DType::f32;
}

}  // namespace

Dims norm_stats_shape(const Dims& x, const Dims& axes) {
  Dims shape = x;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (contains(axes, i)) shape[i] = 1;
  }
  return shape;
}

Dims norm_scale_shape(const Dims& x, const Dims& axes) {
  Dims shape = x;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (!contains(axes, i)) shape[i] = 1;
  }
  return shape;
}

Result<std::vector<Inferred>> infer_norm(const Norm& op, const std::vector<const Tensor*>& in,
                                         std::optional<DType> dtype) {
  const Tensor& x = *in[Norm::x];
  LAWSON_CHECK(check_axes(op, op.axes, x));
  if (!(op.eps >= 0) || !std::isfinite(op.eps)) {
    return invalid("{}: eps {} must be a number of at least 0", op_name(op), op.eps);
  }
  for (const Tensor* tensor : in) {
    if (tensor == nullptr) continue;
    LAWSON_CHECK(check_float(op, *tensor));
    if (tensor != &x) LAWSON_CHECK(check_shape(op, *tensor, norm_scale_shape(x.shape, op.axes)));
  }
  const Inferred stats{stats_dtype(x), norm_stats_shape(x.shape, op.axes)};
  return std::vector<Inferred>{{dtype.value_or(x.dtype), x.shape}, stats, stats};
}

Result<std::vector<Inferred>> infer_norm_backward(const NormBackward& op,
                                                  const std::vector<const Tensor*>& in,
                                                  std::optional<DType> dtype) {
  const Tensor& x = *in[NormBackward::x];
  const Tensor& dy = *in[NormBackward::dy];
  const Tensor& scale = *in[NormBackward::scale];
  const Tensor* mean = in[NormBackward::mean];
  LAWSON_CHECK(check_axes(op, op.axes, x));
  for (const Tensor* tensor : in) {
    if (tensor != nullptr) LAWSON_CHECK(check_float(op, *tensor));
  }
  if (dy.shape != x.shape) {
    return invalid("{}: operand {} must have the shape of {}", op_name(op), describe(dy),
                   describe(x));
  }
  LAWSON_CHECK(check_shape(op, scale, norm_scale_shape(x.shape, op.axes)));
  if ((mean != nullptr) != (op.kind == NormKind::layer)) {
    return invalid("{}: operand mean {}", op_name(op),
                   mean == nullptr ? "is missing" : "is not allowed: rms_norm has no mean");
  }
  if (mean != nullptr) LAWSON_CHECK(check_stats(op, *mean, x, op.axes));
  LAWSON_CHECK(check_stats(op, *in[NormBackward::inv_std], x, op.axes));
  const Inferred parameter{scale.dtype, scale.shape};
  return std::vector<Inferred>{{dtype.value_or(x.dtype), x.shape}, parameter, parameter};
}

}  // namespace lawson::ir
