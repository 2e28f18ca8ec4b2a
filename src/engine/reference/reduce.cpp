#include "engine/reference/reduce.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace lawson::reference {
namespace {

using ir::BinaryKind;
using ir::ReduceKind;

// The operand of one result, as far as its error depends on it.
struct Terms {
  double magnitude = 0;   // sum |x| (norm2: of squares)
  double propagated = 0;  // sum of errors (norm2: of squares)
  double lowest = 0;      // extrema: the least that the result may be, and the most
  double highest = 0;
  double product = 1;  // prod: of |x|, of |x| + error, and of those factors above 1
  double product_above = 1;
  double product_large = 1;
};

bool is_extremum(ReduceKind kind) {
  return kind == ReduceKind::max || kind == ReduceKind::min || kind == ReduceKind::amax;
}

void add_term(ReduceKind kind, double v, double e, Terms& t) {
  const double size = std::fabs(v);
  if (is_extremum(kind)) {
    const double x = kind == ReduceKind::amax ? size : v;
    const double low = e == kInfinity ? -kInfinity : x - e;
    const double high = e == kInfinity ? kInfinity : x + e;
    const bool least = kind == ReduceKind::min;
    t.lowest = least ? std::min(t.lowest, low) : std::max(t.lowest, low);
    t.highest = least ? std::min(t.highest, high) : std::max(t.highest, high);
  } else if (kind == ReduceKind::prod) {
    t.product *= size;
    t.product_above *= size + e;
    t.product_large *= std::max(size + e, 1.0);
  } else if (kind == ReduceKind::norm2) {
    t.magnitude += v * v;
    t.propagated += 2 * size * e + e * e;
  } else {
    t.magnitude += size;
    t.propagated += e;
  }
}

double error_of(ReduceKind kind, double v, const Terms& t, std::size_t count, double u,
                const Arithmetic& arithmetic) {
  const double own = accumulation_growth(count) * u;
  const double range = accumulator_range(arithmetic);
  const double n = static_cast<double>(std::max<std::size_t>(count, 1));
  const double flushed = u > 0 ? flush_floor(arithmetic) : 0.0;
  const double floor = n * flushed;
  if (is_extremum(kind)) {
    return with_own(v, distance(v, std::array{t.lowest, t.highest}),
                    v != 0 && std::fabs(v) < flushed ? flushed : 0.0);
  }
  if (kind == ReduceKind::prod) {
    if (std::isfinite(v) && t.product_large > range) return kInfinity;
    return with_own(v, t.product_above - t.product,
                    own * t.product_above + floor * t.product_large);
  }
  const double magnitude = t.magnitude + t.propagated;
  if (std::isfinite(v) && magnitude > range) return kInfinity;
  switch (kind) {
    case ReduceKind::norm2: {
      const double e = t.propagated + own * magnitude + floor;
      const double low = std::sqrt(std::max(t.magnitude - e, 0.0));
      const double high = std::sqrt(t.magnitude + e);
      return with_own(v, std::max(v - low, high - v),
                      u > 0 ? (2 * u + 4 * arithmetic.function_roundoff) * high : 0.0);
    }
    case ReduceKind::mean:
      return with_own(v, t.propagated / n, (own + 2 * u) * magnitude / n + floor);
    default:
      return with_own(v, t.propagated, own * magnitude + floor);
  }
}

}  // namespace

void reduce(const ir::Reduce& op, const Array& x, Array& y) {
  const Dims target = reduced_strides(x.shape, op.axes);
  double initial = 0;
  if (op.kind == ReduceKind::max) initial = -kInfinity;
  if (op.kind == ReduceKind::min) initial = kInfinity;
  if (op.kind == ReduceKind::prod) initial = 1;
  std::fill(y.value.begin(), y.value.end(), initial);
  for_each_index(x.shape, {target}, [&](std::size_t i, const auto& at) {
    double& r = y.value[at[0]];
    const double v = x.value[i];
    switch (op.kind) {
      case ReduceKind::sum:
      case ReduceKind::mean:
        r += v;
        break;
      case ReduceKind::max:
        r = apply(BinaryKind::max, r, v, false);
        break;
      case ReduceKind::min:
        r = apply(BinaryKind::min, r, v, false);
        break;
      case ReduceKind::prod:
        r *= v;
        break;
      case ReduceKind::amax:
        r = apply(BinaryKind::max, r, std::fabs(v), false);
        break;
      case ReduceKind::norm1:
        r += std::fabs(v);
        break;
      case ReduceKind::norm2:
        r += v * v;
        break;
    }
  });
  const double count =
      static_cast<double>(x.size()) / static_cast<double>(std::max<std::size_t>(y.size(), 1));
  for (double& r : y.value) {
    if (op.kind == ReduceKind::mean) r /= count;
    if (op.kind == ReduceKind::norm2) r = std::sqrt(r);
  }
}

void add_reduce_errors(const ir::Reduce& op, const Array& x, Array& y,
                       const Arithmetic& arithmetic) {
  const Dims target = reduced_strides(x.shape, op.axes);
  const std::size_t count = y.size() == 0 ? 0 : x.size() / y.size();
  const bool integer = !is_float(x.dtype) && !is_float(y.dtype);
  Terms initial;
  initial.lowest = initial.highest = op.kind == ReduceKind::min ? kInfinity : -kInfinity;
  std::vector<Terms> terms(y.size(), initial);
  for_each_index(x.shape, {target}, [&](std::size_t i, const auto& at) {
    add_term(op.kind, x.value[i], x.error_at(i), terms[at[0]]);
  });
  for (std::size_t i = 0; i < y.size(); ++i) {
    // Integers are exact in f32 up to 2^24; reductions accumulate in f32 or wider.
    const double reached = op.kind == ReduceKind::prod ? terms[i].product_above
                                                       : terms[i].magnitude + terms[i].propagated;
    const bool exact = integer && op.kind != ReduceKind::mean && reached <= 0x1p24;
    y.error[i] = error_of(op.kind, y.value[i], terms[i], count,
                          exact ? 0.0 : arithmetic.accumulate_roundoff, arithmetic);
    if (!std::isfinite(y.value[i]) && x.error.empty()) y.error[i] = 0;
    // Beyond an i32 accumulator's range engines wrap or saturate.
    if (integer && reached > max_finite(DType::i32)) y.error[i] = kInfinity;
  }
}

}  // namespace lawson::reference
