#include "engine/reference/norm.h"

#include <cmath>

namespace lawson::reference {

std::size_t slice_size(const Dims& shape, const Dims& axes) {
  std::size_t count = 1;
  for (const std::int64_t axis : axes) {
    count *= static_cast<std::size_t>(shape[static_cast<std::size_t>(axis)]);
  }
  return count;
}

NormStats norm_stats(const ir::Norm& op, const Array& x) {
  const std::size_t count = slice_size(x.shape, op.axes);
  const std::size_t slices = x.size() / count;  // no axis is empty
  const auto n = static_cast<double>(count);
  const Dims strides = reduced_strides(x.shape, op.axes);
  NormStats stats{std::vector<double>(slices), std::vector<double>(slices), {}};
  if (op.kind == ir::NormKind::layer) {
    for_each_index(x.shape, {strides},
                   [&](std::size_t i, const auto& at) { stats.mean[at[0]] += x.value[i]; });
    for (double& mean : stats.mean) mean /= n;
  }
  for_each_index(x.shape, {strides}, [&](std::size_t i, const auto& at) {
    const double d = x.value[i] - stats.mean[at[0]];
    stats.variance[at[0]] += d * d;
  });
  for (double& variance : stats.variance) {
    variance /= n;
    stats.inv_std.push_back(1 / std::sqrt(variance + op.eps));
  }
  return stats;
}

void norm(const ir::Norm& op, const Operands& operands, std::vector<Array>& results) {
  using Slot = ir::Norm;
  const Array& x = *operands[Slot::x];
  const Array& scale = *operands[Slot::scale];
  const Array* bias = operands[Slot::bias];
  const NormStats stats = norm_stats(op, x);
  Array& y = results[Slot::y];
  if (!y.value.empty()) {
    for_each_in_slices(x, op.axes, scale, [&](std::size_t i, std::size_t slice, std::size_t s) {
      y.value[i] = (x.value[i] - stats.mean[slice]) * stats.inv_std[slice] * scale.value[s];
      if (bias != nullptr) y.value[i] += bias->value[s];
    });
  }
  if (!results[Slot::mean].value.empty()) results[Slot::mean].value = stats.mean;
  if (!results[Slot::inv_std].value.empty()) results[Slot::inv_std].value = stats.inv_std;
}

void norm_backward(const ir::NormBackward& op, const Operands& operands,
                   std::vector<Array>& results) {
  using Slot = ir::NormBackward;
  const Array& dy = *operands[Slot::dy];
  const Array& x = *operands[Slot::x];
  const Array& scale = *operands[Slot::scale];
  const Array* mean = operands[Slot::mean];
  const Array& inv_std = *operands[Slot::inv_std];
  const bool layer = op.kind == ir::NormKind::layer;
  const auto n = static_cast<double>(slice_size(x.shape, op.axes));
  const auto normalized = [&](std::size_t i, std::size_t slice) {
    return (x.value[i] - (mean == nullptr ? 0 : mean->value[slice])) * inv_std.value[slice];
  };
  // Of the gradient of the normalized values, g = dy * scale: mean(g) and mean(g * normalized).
  std::vector<double> mean_g(inv_std.size());
  std::vector<double> mean_gh(inv_std.size());
  Array& dscale = results[Slot::dscale];
  Array& dbias = results[Slot::dbias];
  for_each_in_slices(x, op.axes, scale, [&](std::size_t i, std::size_t slice, std::size_t s) {
    const double h = normalized(i, slice);
    const double g = dy.value[i] * scale.value[s];
    if (layer) mean_g[slice] += g / n;
    mean_gh[slice] += g * h / n;
    if (!dscale.value.empty()) dscale.value[s] += dy.value[i] * h;
    if (!dbias.value.empty()) dbias.value[s] += dy.value[i];
  });
  Array& dx = results[Slot::dx];
  if (dx.value.empty()) return;
  for_each_in_slices(x, op.axes, scale, [&](std::size_t i, std::size_t slice, std::size_t s) {
    const double g = dy.value[i] * scale.value[s];
    dx.value[i] =
        inv_std.value[slice] * (g - mean_g[slice] - normalized(i, slice) * mean_gh[slice]);
  });
}

}  // namespace lawson::reference
