// Error analysis of the norms. Notation, per slice of n elements: m the mean, v the variance (rms:
// the mean square), r = 1 / sqrt(v + eps), h = (x - m) r; a name followed by _error is the absolute
// error of that value.
#include <algorithm>
#include <array>
#include <cmath>

#include "engine/reference/norm.h"

namespace lawson::reference {
namespace {

// The constants of one analysis.
struct Rounding {
  double u;         // one addition or multiplication
  double function;  // a reciprocal square root
  double floor;
  double range;

  explicit Rounding(const Arithmetic& a)
      : u{a.accumulate_roundoff},
        function{4 * a.function_roundoff},
        floor{flush_floor(a)},
        range{accumulator_range(a)} {}

  double sum(std::size_t count) const { return accumulation_growth(count) * u; }
};

// Sums over the elements of one slice of x.
struct Moments {
  double size = 0;            // |x|
  double error = 0;           // of x
  double square = 0;          // (|x| + error)^2
  double weighted_error = 0;  // |x - m| error
  double squared_error = 0;   // error^2
};

struct StatsErrors {
  double mean = 0;
  double inv_std = 0;
  // A slice with NaN or infinity gives NaN, except that its mean may be either.
  bool finite = true;
};

StatsErrors stats_errors(const ir::Norm& op, const Moments& s, double m, double v, double r,
                         std::size_t count, const Rounding& rounding) {
  const auto n = static_cast<double>(count);
  const double growth = rounding.sum(count);
  const bool layer = op.kind == ir::NormKind::layer;
  StatsErrors e;
  e.finite = std::isfinite(s.size);
  // Of summing up; the error of the elements comes on top.
  const double own_mean = growth * (s.size + s.error) / n + 2 * rounding.u * std::fabs(m);
  if (layer) e.mean = s.error / n + own_mean + rounding.floor;
  // var(x + d) = var(x) + 2 cov(x, d) + var(d).
  const double propagated = 2 * s.weighted_error / n + s.squared_error / n;
  // In two passes: the terms' relative error, and the square of the mean's. In one (Welford): times
  // the root of mean square by variance (Chan, Golub, LeVeque 1983).
  const double terms = (growth + 4 * rounding.u) * (v + propagated);
  const double one_pass =
      (growth + 4 * rounding.u) * std::sqrt(v + propagated) * (layer ? std::fabs(m) + e.mean : 0);
  const double variance_error =
      propagated + terms + (layer ? one_pass + own_mean * own_mean : 0) + rounding.floor;
  const double low = std::max(v - variance_error, 0.0) + op.eps;
  if (low < rounding.floor || !(s.square <= rounding.range)) {
    e.inv_std = kInfinity;
    return e;
  }
  const double ends =
      distance(r, std::array{1 / std::sqrt(low), 1 / std::sqrt(v + variance_error + op.eps)});
  e.inv_std = ends + (rounding.function + 2 * rounding.u) * (r + ends);
  return e;
}

}  // namespace

void add_norm_errors(const ir::Norm& op, const Operands& operands, std::vector<Array>& results,
                     const Arithmetic& arithmetic) {
  using Slot = ir::Norm;
  const Rounding rounding(arithmetic);
  const Array& x = *operands[Slot::x];
  const Array& scale = *operands[Slot::scale];
  const Array* bias = operands[Slot::bias];
  const NormStats stats = norm_stats(op, x);
  const std::size_t count = slice_size(x.shape, op.axes);
  std::vector<Moments> moments(stats.mean.size());
  for_each_in_slices(x, op.axes, scale, [&](std::size_t i, std::size_t slice, std::size_t) {
    const double v = std::fabs(x.value[i]);
    const double e = operand_error(x, i, true, arithmetic);
    Moments& sums = moments[slice];
    sums.size += v;
    sums.error += e;
    sums.square += (v + e) * (v + e);
    if (e > 0) sums.weighted_error += std::fabs(x.value[i] - stats.mean[slice]) * e;
    sums.squared_error += e * e;
  });
  std::vector<StatsErrors> errors;
  for (std::size_t i = 0; i < moments.size(); ++i) {
    errors.push_back(stats_errors(op, moments[i], stats.mean[i], stats.variance[i],
                                  stats.inv_std[i], count, rounding));
    const double m = stats.mean[i];
    const double r = stats.inv_std[i];
    const bool open_mean = !errors[i].finite && !std::isnan(m);
    if (Array& mean = results[Slot::mean]; !mean.value.empty()) {
      mean.error[i] = open_mean       ? kInfinity
                      : std::isnan(m) ? of_nan(moments[i].error)
                                      : with_own(m, errors[i].mean, 0);
    }
    if (Array& inv_std = results[Slot::inv_std]; !inv_std.value.empty()) {
      inv_std.error[i] =
          errors[i].finite ? with_own(r, errors[i].inv_std, 0) : of_nan(moments[i].error);
    }
  }
  Array& y = results[Slot::y];
  if (y.value.empty()) return;
  for_each_in_slices(x, op.axes, scale, [&](std::size_t i, std::size_t slice, std::size_t s) {
    const StatsErrors& e = errors[slice];
    const double b = bias == nullptr ? 0 : std::fabs(bias->value[s]);
    const double b_error = bias == nullptr ? 0 : bias->error_at(s);
    const double s_error = operand_error(scale, s, true, arithmetic);
    if (!e.finite || std::isnan(scale.value[s]) || std::isnan(b)) {
      y.error[i] = of_nan(moments[slice].error + s_error + b_error);
      return;
    }
    const double m = stats.mean[slice];
    const double r = stats.inv_std[slice];
    const double x_error = operand_error(x, i, true, arithmetic);
    const double d = std::fabs(x.value[i] - m);
    const double steepest = r + e.inv_std;
    const double largest = std::fabs(scale.value[s]) + s_error;
    const double propagated = (x_error + e.mean) * steepest * largest + d * e.inv_std * largest +
                              d * r * s_error + b_error;
    // As (x - m) r scale + bias or as x (r scale) + (bias - m r scale).
    const double size = std::fabs(x.value[i]) + x_error + std::fabs(m) + e.mean;
    const double own = 4 * rounding.u * size * steepest * largest + 2 * rounding.u * (b + b_error) +
                       rounding.floor * (1 + steepest) * (1 + largest);
    y.error[i] = with_own(y.value[i], propagated + own, 0);
  });
}

void add_norm_backward_errors(const ir::NormBackward& op, const Operands& operands,
                              std::vector<Array>& results, const Arithmetic& arithmetic) {
  using Slot = ir::NormBackward;
  const Rounding rounding(arithmetic);
  const Array& dy = *operands[Slot::dy];
  const Array& x = *operands[Slot::x];
  const Array& scale = *operands[Slot::scale];
  const Array* mean = operands[Slot::mean];
  const Array& inv_std = *operands[Slot::inv_std];
  const std::size_t count = slice_size(x.shape, op.axes);
  const auto n = static_cast<double>(count);
  const bool layer = op.kind == ir::NormKind::layer;

  // One element: g = dy scale, h = (x - m) r, and what h is made of where x r and m r are apart.
  struct Element {
    double g, g_error, h, h_error, parts;
    double g_most() const { return std::fabs(g) + g_error; }
    double parts_most() const { return parts + h_error; }
  };
  const auto element = [&](std::size_t i, std::size_t slice, double s, double s_error) {
    const double m = mean == nullptr ? 0 : mean->value[slice];
    const double m_error = mean == nullptr ? 0 : mean->error_at(slice);
    const double r = inv_std.value[slice];
    const double r_error = operand_error(inv_std, slice, true, arithmetic);
    const double g_error = operand_error(dy, i, true, arithmetic);
    const double d = x.value[i] - m;
    const double d_error = operand_error(x, i, true, arithmetic) + m_error;
    const double r_most = std::fabs(r) + r_error;
    Element e{};
    e.g = dy.value[i] * s;
    e.g_error = g_error * (std::fabs(s) + s_error) + std::fabs(dy.value[i]) * s_error;
    e.g_error += rounding.u * e.g_most() + rounding.floor;
    e.h = d * r;
    e.parts = (std::fabs(x.value[i]) + std::fabs(m) + d_error) * r_most;
    e.h_error = d_error * r_most + std::fabs(d) * r_error + 3 * rounding.u * e.parts +
                rounding.floor * (1 + r_most);
    return e;
  };

  struct Sums {
    double g = 0, g_error = 0, g_most = 0;     // mean of g
    double gh = 0, gh_error = 0, gh_most = 0;  // mean of g h
    double operand_errors = 0;
    bool has_nan = false;  // among the operands
    double of_nan() const { return reference::of_nan(has_nan ? operand_errors : kInfinity); }
  };
  std::vector<Sums> slices(inv_std.size());
  std::vector<Sums> columns(scale.size());  // sums of dy and of dy h, for dbias and dscale
  const auto add = [](const Element& e, Sums& sums, double by) {
    sums.g += e.g / by;
    sums.g_error += e.g_error / by;
    sums.g_most += e.g_most() / by;
    sums.gh += e.g * e.h / by;
    sums.gh_error += (std::fabs(e.g) * e.h_error + e.g_error * (std::fabs(e.h) + e.h_error)) / by;
    sums.gh_most += e.g_most() * e.parts_most() / by;
  };
  for_each_in_slices(x, op.axes, scale, [&](std::size_t i, std::size_t slice, std::size_t s) {
    const double s_error = operand_error(scale, s, true, arithmetic);
    add(element(i, slice, scale.value[s], s_error), slices[slice], n);
    add(element(i, slice, 1, 0), columns[s], 1);
    const double all = dy.error_at(i) + x.error_at(i) + inv_std.error_at(slice) +
                       (mean == nullptr ? 0 : mean->error_at(slice));
    const bool has_nan = std::isnan(dy.value[i]) || std::isnan(x.value[i]) ||
                         std::isnan(inv_std.value[slice]) ||
                         (mean != nullptr && std::isnan(mean->value[slice]));
    slices[slice].operand_errors += all + s_error;
    slices[slice].has_nan |= has_nan || std::isnan(scale.value[s]);
    columns[s].operand_errors += all;
    columns[s].has_nan |= has_nan;
  });

  const std::size_t rows = x.size() / std::max<std::size_t>(scale.size(), 1);
  const double over_rows = rounding.sum(rows) + 2 * rounding.u;
  const double row_floor = static_cast<double>(rows) * rounding.floor;
  for (std::size_t s = 0; s < columns.size(); ++s) {
    const Sums& sums = columns[s];
    const auto settle = [&](Array& result, double propagated, double most) {
      if (result.value.empty()) return;
      const double v = result.value[s];
      const double own = over_rows * most + row_floor;
      const bool overflows = std::isfinite(v) && !(most <= rounding.range);
      result.error[s] = overflows       ? kInfinity
                        : std::isnan(v) ? sums.of_nan()
                                        : with_own(v, propagated + own, 0);
    };
    settle(results[Slot::dscale], sums.gh_error, sums.gh_most);
    settle(results[Slot::dbias], sums.g_error, sums.g_most);
  }

  Array& dx = results[Slot::dx];
  if (dx.value.empty()) return;
  const double over_slice = rounding.sum(count) + 2 * rounding.u;
  for_each_in_slices(x, op.axes, scale, [&](std::size_t i, std::size_t slice, std::size_t s) {
    const Sums& sums = slices[slice];
    const Element e = element(i, slice, scale.value[s], operand_error(scale, s, true, arithmetic));
    const double a = layer ? std::fabs(sums.g) : 0;
    const double a_error = layer ? sums.g_error + over_slice * sums.g_most : 0;
    const double b = std::fabs(sums.gh);
    const double b_error = sums.gh_error + over_slice * sums.gh_most + rounding.floor;
    const double h = std::fabs(e.h);
    const double t_error =
        e.g_error + a_error + h * b_error + b * e.h_error + b_error * e.h_error +
        4 * rounding.u * (e.g_most() + a + a_error + e.parts_most() * (b + b_error));
    const double t = std::fabs(e.g - (layer ? sums.g : 0) - e.h * sums.gh);
    const double r = std::fabs(inv_std.value[slice]);
    const double r_error = operand_error(inv_std, slice, true, arithmetic);
    const double own = 2 * rounding.u * (t + t_error) * (r + r_error) +
                       rounding.floor * (1 + r + r_error) * (1 + h + b + b_error);
    const double v = dx.value[i];
    const bool overflows = std::isfinite(v) && !(n * sums.gh_most <= rounding.range);
    dx.error[i] = overflows       ? kInfinity
                  : std::isnan(v) ? sums.of_nan()
                                  : with_own(v, t * r_error + (r + r_error) * t_error + own, 0);
  });
}

}  // namespace lawson::reference
