#include "engine/reference/bounds.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numbers>

#include "engine/reference/cache_append.h"
#include "engine/reference/matmul.h"
#include "engine/reference/norm.h"
#include "engine/reference/reduce.h"
#include "engine/reference/scaled_matmul.h"
#include "engine/reference/unary_grad.h"

namespace lawson::reference {
namespace {

using ir::BinaryKind;
using ir::UnaryKind;

// Where a piecewise monotone function turns, so that an interval's image is known.
struct Turns {
  std::array<double, 2> at{};
  std::size_t count = 0;
};

Turns turns_of(UnaryKind kind) {
  switch (kind) {
    case UnaryKind::abs:
      return {{0.0, 0.0}, 1};
    case UnaryKind::silu:
      return {{-1.2784645427610738, 0.0}, 1};
    case UnaryKind::gelu:
      return {{-0.7517916243741344, 0.0}, 1};
    case UnaryKind::gelu_tanh:
      return {{-0.7524614220710163, 0.0}, 1};
    case UnaryKind::leaky_relu:
    case UnaryKind::elu:
      return {{0.0, 0.0}, 1};  // a negative slope makes a turn
    default:
      return {};
  }
}

double propagate(const ir::Unary& op, double x, double e, double y) {
  if (e == kInfinity) return kInfinity;  // a NaN too
  // The sign of a zero is not followed.
  const bool signed_pole = op.kind == UnaryKind::reciprocal || op.kind == UnaryKind::rsqrt;
  if (x == 0 && signed_pole) return kInfinity;
  if (e == 0 || !std::isfinite(x)) return 0;
  const double low = x - e;
  const double high = x + e;
  switch (op.kind) {
    case UnaryKind::sin:
    case UnaryKind::cos:
      return std::min(e, 2.0);
    case UnaryKind::tan: {
      // Poles at odd multiples of pi/2.
      const auto branch = [](double t) { return std::floor(t / std::numbers::pi + 0.5); };
      if (branch(low) != branch(high)) return kInfinity;
      break;
    }
    case UnaryKind::reciprocal:
      if (low <= 0 && high >= 0) return kInfinity;
      break;
    case UnaryKind::rsqrt:
    case UnaryKind::log:
      if (low <= 0) return kInfinity;
      break;
    case UnaryKind::log1p:
      if (low <= -1) return kInfinity;
      break;
    case UnaryKind::sqrt:
      if (low < 0) return kInfinity;
      break;
    default:
      break;
  }
  std::array<double, 4> ends{apply(op, low), apply(op, high), y, y};
  const Turns turns = turns_of(op.kind);
  for (std::size_t i = 0; i < turns.count; ++i) {
    if (low < turns.at[i] && turns.at[i] < high) ends[2 + i] = apply(op, turns.at[i]);
  }
  return distance(y, ends);
}

// Own rounding of y = f(x): function_roundoff times the magnitude that usual implementations
// compute with (gelu through 1 + erf, expm1 through exp - 1, log1p through log(1 + x)). `low` is
// the least that x may be, ax and ay the largest |x| and |y|.
double own_rounding(const ir::Unary& op, double low, double ax, double ay,
                    const Arithmetic& arithmetic) {
  const double f = 4 * arithmetic.function_roundoff;
  const double u = arithmetic.accumulate_roundoff;
  switch (op.kind) {
    case UnaryKind::neg:
    case UnaryKind::abs:
    case UnaryKind::ceil:
    case UnaryKind::floor:
    case UnaryKind::round:
    case UnaryKind::sign:
    case UnaryKind::relu:
    case UnaryKind::relu6:
      return 0;
    case UnaryKind::leaky_relu:
      return 2 * u * ay;
    case UnaryKind::exp:
      return f * ay * (1 + ax);
    case UnaryKind::expm1:
      return f * (ay * (1 + ax) + std::min(ax, 1.0) + 0.25);
    case UnaryKind::log:
    case UnaryKind::log1p:
    case UnaryKind::softplus:
      return f * (1 + ay);
    case UnaryKind::sqrt:
    case UnaryKind::rsqrt:
    case UnaryKind::reciprocal:
      return f * ay;
    case UnaryKind::sin:
    case UnaryKind::cos:
      return f * (1 + ax);
    case UnaryKind::tan:
      // Where the argument's own rounding may cross a pole.
      if (f * (1 + ax) * (1 + ay) > 0.25) return kInfinity;
      return f * (1 + ay * ay) * (1 + ax);
    case UnaryKind::tanh:
    case UnaryKind::erf:
    case UnaryKind::sigmoid:
      return f;
    case UnaryKind::elu:
      return low < 0 ? f * (ay + std::fabs(op.parameter)) : 0.0;
    case UnaryKind::silu:
    case UnaryKind::gelu:
    case UnaryKind::gelu_tanh:
      return f * ax;
  }
  return 0;
}

double propagate(BinaryKind kind, double a, double ea, double b, double eb, bool integer,
                 double c) {
  // The sign of a zero is not followed.
  if (kind == BinaryKind::div && b == 0 && a != 0 && !std::isnan(a)) return kInfinity;
  if (kind == BinaryKind::pow && a == 0 && b < 0) return kInfinity;
  if (ea == 0 && eb == 0) return 0;
  if (ea == kInfinity || eb == kInfinity) return kInfinity;  // a NaN too
  switch (kind) {
    case BinaryKind::add:
    case BinaryKind::sub:
      return ea + eb;
    case BinaryKind::mul:
      return std::fabs(a) * eb + std::fabs(b) * ea + ea * eb;
    case BinaryKind::min:
    case BinaryKind::max:
      break;
    case BinaryKind::div:
      if (std::fabs(b) <= eb) return kInfinity;
      break;
    case BinaryKind::pow:
      // Of 1 and NaN, and of NaN and 0, it is 1.
      if (std::isnan(a) || std::isnan(b)) return kInfinity;
      // Monotone in both arguments while the base is positive; for an integral exponent on both
      // sides of 0.
      if (a - ea > 0) break;
      if (eb > 0 || b != std::trunc(b) || (b < 0 && a + ea >= 0)) return kInfinity;
      return distance(c, std::array{std::pow(a - ea, b), std::pow(a + ea, b),
                                    a + ea >= 0 ? std::pow(0.0, b) : c});
    case BinaryKind::mod: {
      if (std::fabs(b) <= eb) return kInfinity;
      const double quotient = std::trunc(a / b);
      for (const double da : {-ea, ea}) {
        for (const double db : {-eb, eb}) {
          if (std::trunc((a + da) / (b + db)) != quotient) return ea + 2 * (std::fabs(b) + eb);
        }
      }
      return ea + std::fabs(quotient) * eb;
    }
  }
  const std::array<double, 4> corners{
      apply(kind, a - ea, b - eb, integer), apply(kind, a - ea, b + eb, integer),
      apply(kind, a + ea, b - eb, integer), apply(kind, a + ea, b + eb, integer)};
  return distance(c, corners);
}

// In the largest magnitudes of the operands and of the result.
double own_rounding(BinaryKind kind, double a, double b, double c, const Arithmetic& arithmetic) {
  const double u = arithmetic.accumulate_roundoff;
  switch (kind) {
    case BinaryKind::min:
    case BinaryKind::max:
      return 0;
    case BinaryKind::add:
    case BinaryKind::sub:
    case BinaryKind::mul:
      return u * c;
    case BinaryKind::div:
      // The reciprocal of what is larger may be flushed (the f32 range ends where 1 / 2^126 is).
      if (b > 1 / flush_floor(arithmetic)) return c;
      return (2 * u + 2 * arithmetic.function_roundoff) * c;
    case BinaryKind::pow:
      return 4 * arithmetic.function_roundoff * c *
             (1 + (a > 0 && b > 0 ? std::fabs(b * std::log(a)) : 0));
    case BinaryKind::mod:
      return u * c;
  }
  return 0;
}

void unary_errors(const ir::Unary& op, const Array& x, Array& y, const Arithmetic& arithmetic) {
  const bool in_float = is_float(x.dtype) || is_float(y.dtype);
  for (std::size_t i = 0; i < y.size(); ++i) {
    const double v = x.value[i];
    const double e = operand_error(x, i, in_float, arithmetic);
    const double propagated = propagate(op, v, e, y.value[i]);
    const double own =
        own_rounding(op, v - e, std::fabs(v) + e, std::fabs(y.value[i]) + propagated, arithmetic);
    y.error[i] = with_own(y.value[i], propagated, own > 0 ? own + flush_floor(arithmetic) : 0.0);
  }
}

void binary_errors(const ir::Binary& op, const Array& a, const Array& b, Array& c,
                   const Arithmetic& arithmetic) {
  const bool integer = !is_float(c.dtype) && !is_float(a.dtype) && !is_float(b.dtype);
  const double u = arithmetic.accumulate_roundoff;
  const double floor = flush_floor(arithmetic);
  const bool basic =
      op.kind == BinaryKind::add || op.kind == BinaryKind::sub || op.kind == BinaryKind::mul;
  const std::vector<Dims> strides{broadcast_strides(a.shape, c.shape),
                                  broadcast_strides(b.shape, c.shape)};
  for_each_index(c.shape, strides, [&](std::size_t i, const auto& at) {
    const double x = a.value[at[0]];
    const double y = b.value[at[1]];
    const double z = c.value[i];
    double ex = operand_error(a, at[0], !integer, arithmetic);
    const double ey = operand_error(b, at[1], !integer, arithmetic);
    // The quotient inside mod may be rounded across an integer.
    if (op.kind == BinaryKind::mod && !integer) ex += 2 * u * std::fabs(x);
    // Sums and products of exact operands that f32 can hold are exact in every wider arithmetic.
    const bool exact = basic && ex == 0 && ey == 0 && u <= 0x1p-23 &&
                       (z == 0 || std::fabs(z) >= floor) && round_to(DType::f32, z) == z;
    const double propagated = propagate(op.kind, x, ex, y, ey, integer, z);
    const double own = integer || exact
                           ? 0.0
                           : own_rounding(op.kind, std::fabs(x) + ex, std::fabs(y) + ey,
                                          std::fabs(z) + propagated, arithmetic);
    c.error[i] = with_own(z, propagated, own > 0 ? own + floor : 0.0);
  });
}

// The comparison may go either way where the operands' errors reach each other.
void compare_errors(const Array& a, const Array& b, Array& c, const Arithmetic& arithmetic) {
  const bool in_float = is_float(a.dtype) || is_float(b.dtype);
  const std::vector<Dims> strides{broadcast_strides(a.shape, c.shape),
                                  broadcast_strides(b.shape, c.shape)};
  for_each_index(c.shape, strides, [&](std::size_t i, const auto& at) {
    const double e = operand_error(a, at[0], in_float, arithmetic) +
                     operand_error(b, at[1], in_float, arithmetic);
    const double gap = std::fabs(a.value[at[0]] - b.value[at[1]]);
    c.error[i] = e > 0 && !(gap > e) ? 1.0 : 0.0;
  });
}

void logical_errors(const ir::Logical& op, const Operands& operands, Array& c) {
  std::vector<Dims> strides;
  for (const Array* x : operands) strides.push_back(broadcast_strides(x->shape, c.shape));
  for_each_index(c.shape, strides, [&](std::size_t i, const auto& at) {
    bool uncertain = false;
    bool decided = false;  // a certain operand that decides alone
    for (std::size_t k = 0; k < operands.size(); ++k) {
      const bool unsure = operands[k]->error_at(at[k]) > 0;
      const bool value = operands[k]->value[at[k]] != 0;
      uncertain = uncertain || unsure;
      if (op.kind == ir::LogicalKind::and_) decided = decided || (!unsure && !value);
      if (op.kind == ir::LogicalKind::or_) decided = decided || (!unsure && value);
    }
    c.error[i] = uncertain && !decided ? 1.0 : 0.0;
  });
}

void select_errors(const Operands& operands, Array& c) {
  std::vector<Dims> strides;
  for (const Array* x : operands) strides.push_back(broadcast_strides(x->shape, c.shape));
  for_each_index(c.shape, strides, [&](std::size_t i, const auto& at) {
    const bool first = operands[0]->value[at[0]] != 0;
    const std::size_t chosen = first ? 1 : 2;
    const std::size_t other = first ? 2 : 1;
    double e = operands[chosen]->error_at(at[chosen]);
    if (operands[0]->error_at(at[0]) > 0) {
      const std::array<double, 1> alternative{operands[other]->value[at[other]]};
      e = std::max(e, distance(c.value[i], alternative) + operands[other]->error_at(at[other]));
    }
    c.error[i] = e;
  });
}

void clamp_errors(const ir::Clamp& op, const Array& x, Array& y, const Arithmetic& arithmetic) {
  for (std::size_t i = 0; i < y.size(); ++i) {
    const double e = operand_error(x, i, is_float(x.dtype), arithmetic);
    const std::array<double, 2> ends{std::clamp(x.value[i] - e, op.min, op.max),
                                     std::clamp(x.value[i] + e, op.min, op.max)};
    // Limits are rounded where they are not few bits.
    const double u = arithmetic.accumulate_roundoff;
    double own = 0;
    for (const double limit : {op.min, op.max}) {
      const bool reached = ends[0] == limit || ends[1] == limit;
      const bool representable = std::nearbyint(limit * 256) == limit * 256;
      if (reached && !representable) own = std::max(own, u * std::fabs(limit));
    }
    const double propagated = e == kInfinity              ? kInfinity
                              : std::isfinite(x.value[i]) ? distance(y.value[i], ends)
                                                          : 0.0;
    y.error[i] = with_own(y.value[i], propagated, own);
  }
}

void concat_errors(const ir::Concat& op, const Operands& operands, Array& y) {
  const Dims strides = contiguous_strides(y.shape);
  std::size_t start = 0;
  for (const Array* x : operands) {
    if (!x->error.empty()) {
      for_each_index(x->shape, {strides},
                     [&](std::size_t i, const auto& at) { y.error[start + at[0]] = x->error[i]; });
    }
    const auto axis = static_cast<std::size_t>(op.axis);
    start += static_cast<std::size_t>(x->shape[axis] * strides[axis]);
  }
}

void view_errors(const ir::Op& op, const Array& x, Array& y) {
  if (x.error.empty()) return;
  const auto view = view_of(op, x, y.shape);
  for_each_index(y.shape, {view.second},
                 [&](std::size_t i, const auto& at) { y.error[i] = x.error[view.first + at[0]]; });
}

}  // namespace

double distance(double v, std::span<const double> others) {
  double error = 0;
  for (const double other : others) {
    const bool same = other == v || (std::isnan(other) && std::isnan(v));
    const double d = same ? 0.0 : std::fabs(other - v);
    error = std::max(error, std::isnan(d) ? kInfinity : d);
  }
  return error;
}

double with_own(double value, double propagated, double own) {
  const double error = std::isfinite(value) ? propagated + own : propagated;
  return std::isnan(error) ? kInfinity : error;
}

double of_nan(double operand_errors) {
  return std::isfinite(operand_errors) ? 0.0 : kInfinity;
}

double operand_error(const Array& x, std::size_t i, bool in_float, const Arithmetic& arithmetic) {
  double e = x.error_at(i);
  if (!in_float) return e;
  const double v = std::fabs(x.value[i]);
  const double u = arithmetic.accumulate_roundoff;
  if (!is_float(x.dtype)) return v * u > 0.5 ? e + u * v : e;
  return v > 0 && v - e < flush_floor(arithmetic) ? std::max(e, v) : e;
}

double accumulation_growth(std::size_t count) {
  const auto n = static_cast<double>(count);
  return std::min(n + 1, 8 + 4 * std::sqrt(n) + n / 8);
}

double flush_floor(const Arithmetic& arithmetic) {
  return arithmetic.accumulate_roundoff > 0x1p-40 ? 0x1p-126 : 0x1p-1022;
}

double accumulator_range(const Arithmetic& arithmetic) {
  return max_finite(arithmetic.accumulate_roundoff > 0x1p-40 ? DType::f32 : DType::f64);
}

void add_errors(const ir::Graph& graph, const ir::Node& node, const Operands& operands,
                std::vector<Array>& results, const Arithmetic& arithmetic) {
  for (Array& result : results) result.error.assign(result.size(), 0.0);
  Array& y = results[0];
  std::visit(
      ir::Overloaded{
          [&](const ir::Matmul&) { add_matmul_errors(*operands[0], *operands[1], y, arithmetic); },
          [&](const ir::Convert&) {
            if (!operands[0]->error.empty()) y.error = operands[0]->error;
          },
          [&](const ir::Unary& op) { unary_errors(op, *operands[0], y, arithmetic); },
          [&](const ir::Binary& op) {
            binary_errors(op, *operands[0], *operands[1], y, arithmetic);
          },
          [&](const ir::Compare&) { compare_errors(*operands[0], *operands[1], y, arithmetic); },
          [&](const ir::Logical& op) { logical_errors(op, operands, y); },
          [&](const ir::Select&) { select_errors(operands, y); },
          [&](const ir::Clamp& op) { clamp_errors(op, *operands[0], y, arithmetic); },
          [&](const ir::Iota&) {},
          [&](const ir::Constant&) {},
          [&](const ir::Reduce& op) { add_reduce_errors(op, *operands[0], y, arithmetic); },
          [&](const ir::ScaledMatmul&) {
            add_scaled_matmul_errors(graph, node, operands, y, arithmetic);
          },
          [&](const ir::UnaryGrad& op) {
            add_unary_grad_errors(op, *operands[0], *operands[1], y, arithmetic);
          },
          [&](const ir::Concat& op) { concat_errors(op, operands, y); },
          [&](const ir::Norm& op) { add_norm_errors(op, operands, results, arithmetic); },
          [&](const ir::NormBackward& op) {
            add_norm_backward_errors(op, operands, results, arithmetic);
          },
          [&](const ir::Attention&) {
            add_attention_errors(graph, node, operands, results, arithmetic);
          },
          [&](const ir::AttentionBackward&) {
            add_attention_backward_errors(graph, node, operands, results, arithmetic);
          },
          [&](const ir::CacheAppend&) { add_cache_append_errors(operands, y); },
          [&](const ir::Broadcast&) { view_errors(node.op, *operands[0], y); },
          [&](const ir::Reshape&) { view_errors(node.op, *operands[0], y); },
          [&](const ir::Transpose&) { view_errors(node.op, *operands[0], y); },
          [&](const ir::Slice&) { view_errors(node.op, *operands[0], y); },
      },
      node.op);
  for (Array& result : results) leave_open(result);
}

void drop_zero_errors(Array& array) {
  const bool exact =
      std::all_of(array.error.begin(), array.error.end(), [](double e) { return e == 0; });
  if (exact) array.error = {};
}

void round_exactly(Array& array) {
  for (std::size_t i = 0; i < array.size(); ++i) {
    const double v = array.value[i];
    const double e = array.error_at(i);
    array.value[i] = round_to(array.dtype, v);
    if (e == kInfinity) array.error[i] = kInfinity;
    if (e == 0 || e == kInfinity) continue;
    // Rounding is monotone, but for bool: what is not 0 is 1.
    const double zero = array.dtype == DType::boolean && std::fabs(v) <= e ? 0 : array.value[i];
    array.error[i] = distance(array.value[i], std::array{round_to(array.dtype, v - e),
                                                         round_to(array.dtype, v + e), zero});
  }
}

namespace {

// Error of rounding somewhere in [v - e, v + e] to the dtype, on top of e.
double rounding_error(DType dtype, double v, double e, const Arithmetic& arithmetic) {
  const double reach = std::fabs(v) + e;
  if (!std::isfinite(v)) {
    // Formats without infinity saturate, those without NaN store something else.
    const std::array<double, 1> stored{round_to(dtype, v)};
    return std::max(e, distance(v, stored));
  }
  if (!std::isfinite(reach)) return e;
  if (e == 0 && round_to(dtype, v) == v) return 0;
  // f8e8m0 has neither zero nor negative numbers.
  for (const double end : {v - e, v + e}) {
    if (!std::isfinite(round_to(dtype, end))) return kInfinity;
  }
  double floor = smallest_subnormal(dtype) / 2;
  if (dtype == DType::f32 || dtype == DType::bf16) {
    floor = std::max(floor, flush_floor(arithmetic));
  }
  // Formats without infinity saturate.
  const double excess = std::max(reach - max_finite(dtype), 0.0);
  return e + unit_roundoff(dtype) * reach + floor + excess;
}

}  // namespace

void allow_rounding(Array& array, const Arithmetic& arithmetic) {
  if (!is_float(array.dtype)) {
    round_exactly(array);
    return;
  }
  for (std::size_t i = 0; i < array.size(); ++i) {
    array.error[i] = rounding_error(array.dtype, array.value[i], array.error[i], arithmetic);
  }
}

void round_output(Array& array, const Arithmetic& arithmetic) {
  if (!is_float(array.dtype)) {
    round_exactly(array);
    return;
  }
  for (std::size_t i = 0; i < array.size(); ++i) {
    double& v = array.value[i];
    double& e = array.error[i];
    if (std::isfinite(v) && e < kInfinity) {
      const double low = round_to(array.dtype, v - e);
      const double high = round_to(array.dtype, v + e);
      const double stored = round_to(array.dtype, v);
      const bool overflows = std::isinf(low) && low == high;
      const bool saturates = std::isfinite(stored) && std::fabs(v) > max_finite(array.dtype);
      const bool has_no_form = std::isnan(high);  // of f8e8m0: not above zero
      if (overflows || has_no_form || (saturates && low == high)) {
        v = stored;
        e = 0;
        continue;
      }
    } else if (e < kInfinity) {
      v = round_to(array.dtype, v);
    }
    e = rounding_error(array.dtype, v, e, arithmetic);
  }
}

}  // namespace lawson::reference
