#include "engine/reference/bounds.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numbers>
#include <span>

#include "engine/reference/cache_append.h"

namespace lawson::reference {
namespace {

using ir::BinaryKind;
using ir::ReduceKind;
using ir::UnaryKind;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Error of value `v` given that a correct result may also be any of `others`.
double distance(double v, std::span<const double> others) {
  double error = 0;
  for (const double other : others) {
    const bool same = other == v || (std::isnan(other) && std::isnan(v));
    const double d = same ? 0.0 : std::fabs(other - v);
    error = std::max(error, std::isnan(d) ? kInfinity : d);
  }
  return error;
}

// Own rounding errors are added to propagated ones; a non-finite value needs no own rounding.
double total(double value, double propagated, double own) {
  if (std::isnan(propagated)) return kInfinity;
  return std::isfinite(value) ? propagated + own : propagated;
}

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
  if (e == 0 || !std::isfinite(x)) return e == 0 || e < kInfinity ? 0.0 : kInfinity;
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
// compute with (gelu through 1 + erf, expm1 through exp - 1, log1p through log(1 + x)).
double own_rounding(const ir::Unary& op, double x, double y, const Arithmetic& arithmetic) {
  const double f = 4 * arithmetic.function_roundoff;
  const double u = arithmetic.accumulate_roundoff;
  const double ax = std::fabs(x);
  const double ay = std::fabs(y);
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
      return f * (1 + ay * ay) * (1 + ax);
    case UnaryKind::tanh:
    case UnaryKind::erf:
    case UnaryKind::sigmoid:
      return f;
    case UnaryKind::elu:
      return x < 0 ? f * (ay + std::fabs(op.parameter)) : 0.0;
    case UnaryKind::silu:
    case UnaryKind::gelu:
    case UnaryKind::gelu_tanh:
      return f * ax;
  }
  return 0;
}

double propagate(BinaryKind kind, double a, double ea, double b, double eb, bool integer,
                 double c) {
  if (ea == 0 && eb == 0) return 0;
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
      // Monotone in both arguments while the base is positive.
      if (a - ea <= 0) return kInfinity;
      break;
    case BinaryKind::mod: {
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

double own_rounding(BinaryKind kind, double a, double b, double c, const Arithmetic& arithmetic) {
  const double u = arithmetic.accumulate_roundoff;
  switch (kind) {
    case BinaryKind::min:
    case BinaryKind::max:
      return 0;
    case BinaryKind::add:
    case BinaryKind::sub:
    case BinaryKind::mul:
      return u * std::fabs(c);
    case BinaryKind::div:
      return (2 * u + 2 * arithmetic.function_roundoff) * std::fabs(c);
    case BinaryKind::pow:
      return 4 * arithmetic.function_roundoff * std::fabs(c) *
             (1 + std::fabs(b * std::log(std::fabs(a))));
    case BinaryKind::mod:
      return u * std::fabs(c);
  }
  return 0;
}

// An integer that a float op takes is first rounded to the float type that the engine computes in.
double operand_error(const Array& x, std::size_t i, const Array& result, double u) {
  double e = x.error_at(i);
  if (!is_float(x.dtype) && is_float(result.dtype) && std::fabs(x.value[i]) * u > 0.5) {
    e += u * std::fabs(x.value[i]);
  }
  return e;
}

void unary_errors(const ir::Unary& op, const Array& x, Array& y, const Arithmetic& arithmetic) {
  const double floor = flush_floor(arithmetic);
  for (std::size_t i = 0; i < y.size(); ++i) {
    const double own = own_rounding(op, x.value[i], y.value[i], arithmetic);
    y.error[i] = total(y.value[i], propagate(op, x.value[i], x.error_at(i), y.value[i]),
                       own > 0 ? own + floor : 0.0);
  }
}

void binary_errors(const ir::Binary& op, const Array& a, const Array& b, Array& c,
                   const Arithmetic& arithmetic) {
  const bool integer = !is_float(c.dtype);
  const bool truncates = integer && !is_float(a.dtype) && !is_float(b.dtype);
  const double u = arithmetic.accumulate_roundoff;
  const std::vector<Dims> strides{broadcast_strides(a.shape, c.shape),
                                  broadcast_strides(b.shape, c.shape)};
  for_each_index(c.shape, strides, [&](std::size_t i, const auto& at) {
    const double x = a.value[at[0]];
    const double y = b.value[at[1]];
    double ex = operand_error(a, at[0], c, u);
    const double ey = operand_error(b, at[1], c, u);
    // The quotient inside mod may be rounded across an integer.
    if (op.kind == BinaryKind::mod && !integer) ex += 2 * u * std::fabs(x);
    // Sums and products of exact operands that f32 can hold are exact in every wider arithmetic.
    const bool basic =
        op.kind == BinaryKind::add || op.kind == BinaryKind::sub || op.kind == BinaryKind::mul;
    const bool exact = basic && ex == 0 && ey == 0 && u <= 0x1p-23 &&
                       round_to(DType::f32, c.value[i]) == c.value[i];
    const double own = integer || exact ? 0.0 : own_rounding(op.kind, x, y, c.value[i], arithmetic);
    c.error[i] = total(c.value[i], propagate(op.kind, x, ex, y, ey, truncates, c.value[i]),
                       own > 0 ? own + flush_floor(arithmetic) : 0.0);
  });
}

// The comparison may go either way where the operands' errors reach each other.
void compare_errors(const Array& a, const Array& b, Array& c) {
  const std::vector<Dims> strides{broadcast_strides(a.shape, c.shape),
                                  broadcast_strides(b.shape, c.shape)};
  for_each_index(c.shape, strides, [&](std::size_t i, const auto& at) {
    const double e = a.error_at(at[0]) + b.error_at(at[1]);
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
    const double e = x.error_at(i);
    const std::array<double, 2> ends{std::clamp(x.value[i] - e, op.min, op.max),
                                     std::clamp(x.value[i] + e, op.min, op.max)};
    const bool at_limit = y.value[i] == op.min || y.value[i] == op.max;
    const bool representable = std::nearbyint(y.value[i] * 256) == y.value[i] * 256;
    const double own =
        at_limit && !representable ? arithmetic.accumulate_roundoff * std::fabs(y.value[i]) : 0.0;
    y.error[i] =
        total(y.value[i], std::isfinite(x.value[i]) ? distance(y.value[i], ends) : 0.0, own);
  }
}

void matmul_errors(const Array& a, const Array& b, Array& c, const Arithmetic& arithmetic) {
  const std::size_t rank = c.shape.size();
  const auto m = static_cast<std::size_t>(c.shape[rank - 2]);
  const auto n = static_cast<std::size_t>(c.shape[rank - 1]);
  const auto k = static_cast<std::size_t>(a.shape.back());
  const bool floating = is_float(a.dtype);
  const double own = !floating ? 0.0
                               : 2 * arithmetic.operand_roundoff +
                                     accumulation_growth(k) * arithmetic.accumulate_roundoff;
  const double floor = floating ? static_cast<double>(k) * flush_floor(arithmetic) : 0.0;
  const Dims batch(c.shape.begin(), c.shape.end() - 2);
  const Dims a_strides = broadcast_strides(Dims(a.shape.begin(), a.shape.end() - 2), batch);
  const Dims b_strides = broadcast_strides(Dims(b.shape.begin(), b.shape.end() - 2), batch);
  const bool exact = a.error.empty() && b.error.empty();
  for_each_index(batch, {a_strides, b_strides}, [&](std::size_t at, const auto& matrices) {
    std::vector<double> column(k);
    std::vector<double> column_error(k);
    for (std::size_t j = 0; j < n; ++j) {
      for (std::size_t l = 0; l < k; ++l) {
        const std::size_t q = (matrices[1] * k + l) * n + j;
        column[l] = std::fabs(b.value[q]);
        column_error[l] = b.error_at(q);
      }
      for (std::size_t i = 0; i < m; ++i) {
        const std::size_t p = (matrices[0] * m + i) * k;
        double magnitude = 0;
        double propagated = 0;
        for (std::size_t l = 0; l < k; ++l) magnitude += std::fabs(a.value[p + l]) * column[l];
        for (std::size_t l = 0; l < k && !exact; ++l) {
          const double ex = a.error_at(p + l);
          const double ey = column_error[l];
          if (ex > 0 || ey > 0) {
            propagated += std::fabs(a.value[p + l]) * ey + column[l] * ex + ex * ey;
          }
        }
        const std::size_t r = (at * m + i) * n + j;
        c.error[r] = total(c.value[r], propagated, own * magnitude + floor);
        // Beyond the accumulator's range engines wrap or saturate.
        if (!floating && magnitude > 2147483647.0) c.error[r] = kInfinity;
      }
    }
  });
}

void reduce_errors(const ir::Reduce& op, const Array& x, Array& y, const Arithmetic& arithmetic) {
  const Dims target = reduced_strides(x.shape, op.axes);
  const std::size_t count = y.size() == 0 ? 0 : x.size() / y.size();
  const double divisor = static_cast<double>(std::max<std::size_t>(count, 1));
  const double u = is_float(y.dtype) ? arithmetic.accumulate_roundoff : 0.0;
  const double own = accumulation_growth(count) * u;
  // For sums: magnitudes and errors of the terms. For extrema: the lowest and highest possible.
  std::vector<double> first(y.size(), 0);
  std::vector<double> second(y.size(), 0);
  const bool smallest = op.kind == ReduceKind::min;
  const bool extremum = smallest || op.kind == ReduceKind::max || op.kind == ReduceKind::amax;
  if (extremum) {
    std::fill(first.begin(), first.end(), smallest ? kInfinity : -kInfinity);
    second = first;
  } else if (op.kind == ReduceKind::prod) {
    std::fill(first.begin(), first.end(), 1.0);
    second = first;
  }
  for_each_index(x.shape, {target}, [&](std::size_t i, const auto& at) {
    const double v = op.kind == ReduceKind::amax ? std::fabs(x.value[i]) : x.value[i];
    const double e = x.error_at(i);
    double& a = first[at[0]];
    double& b = second[at[0]];
    if (extremum) {
      a = smallest ? std::min(a, v - e) : std::max(a, v - e);
      b = smallest ? std::min(b, v + e) : std::max(b, v + e);
    } else if (op.kind == ReduceKind::prod) {
      a *= std::fabs(v);
      b *= std::fabs(v) + e;
    } else if (op.kind == ReduceKind::norm2) {
      a += v * v;
      b += 2 * std::fabs(v) * e + e * e;
    } else {
      a += std::fabs(v);
      b += e;
    }
  });
  for (std::size_t i = 0; i < y.size(); ++i) {
    const double v = y.value[i];
    if (extremum) {
      y.error[i] = total(v, distance(v, std::array{first[i], second[i]}), 0);
    } else if (op.kind == ReduceKind::prod) {
      y.error[i] = total(v, second[i] - first[i], own * second[i]);
    } else if (op.kind == ReduceKind::norm2) {
      const double e = second[i] + own * first[i];
      const double root = std::sqrt(std::max(first[i] - e, 0.0));
      y.error[i] = total(v, std::max(v - root, std::sqrt(first[i] + e) - v), 2 * u * v);
    } else if (op.kind == ReduceKind::mean) {
      y.error[i] = total(v, second[i] / divisor, own * first[i] / divisor + 2 * u * std::fabs(v));
    } else {
      y.error[i] = total(v, second[i], own * first[i]);
    }
    if (!std::isfinite(v) && x.error.empty()) y.error[i] = 0;
  }
}

void view_errors(const ir::Op& op, const Array& x, Array& y) {
  if (x.error.empty()) return;
  const auto view = view_of(op, x, y.shape);
  for_each_index(y.shape, {view.second},
                 [&](std::size_t i, const auto& at) { y.error[i] = x.error[view.first + at[0]]; });
}

}  // namespace

double accumulation_growth(std::size_t count) {
  const auto n = static_cast<double>(count);
  return std::min(n + 1, 8 + 4 * std::sqrt(n) + n / 8);
}

double flush_floor(const Arithmetic& arithmetic) {
  return arithmetic.accumulate_roundoff > 0x1p-40 ? 0x1p-126 : 0x1p-1022;
}

void add_errors(const ir::Graph& graph, const ir::Node& node, const Operands& operands,
                std::vector<Array>& results, const Arithmetic& arithmetic) {
  for (Array& result : results) result.error.assign(result.size(), 0.0);
  Array& y = results[0];
  std::visit(
      ir::Overloaded{
          [&](const ir::Matmul&) { matmul_errors(*operands[0], *operands[1], y, arithmetic); },
          [&](const ir::Convert&) {
            if (!operands[0]->error.empty()) y.error = operands[0]->error;
          },
          [&](const ir::Unary& op) { unary_errors(op, *operands[0], y, arithmetic); },
          [&](const ir::Binary& op) {
            binary_errors(op, *operands[0], *operands[1], y, arithmetic);
          },
          [&](const ir::Compare&) { compare_errors(*operands[0], *operands[1], y); },
          [&](const ir::Logical& op) { logical_errors(op, operands, y); },
          [&](const ir::Select&) { select_errors(operands, y); },
          [&](const ir::Clamp& op) { clamp_errors(op, *operands[0], y, arithmetic); },
          [&](const ir::Iota&) {},
          [&](const ir::Constant&) {},
          [&](const ir::Reduce& op) { reduce_errors(op, *operands[0], y, arithmetic); },
          [&](const ir::ScaledMatmul&) {},
          [&](const ir::UnaryGrad&) {},
          [&](const ir::Concat&) {},
          [&](const ir::Norm&) {},
          [&](const ir::NormBackward&) {},
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

void round_exactly(Array& array) {
  for (std::size_t i = 0; i < array.size(); ++i) {
    const double v = array.value[i];
    const double e = array.error_at(i);
    array.value[i] = round_to(array.dtype, v);
    if (e > 0) {
      array.error[i] = e == kInfinity
                           ? kInfinity
                           : distance(array.value[i], std::array{round_to(array.dtype, v - e),
                                                                 round_to(array.dtype, v + e)});
    }
  }
}

namespace {

// Error of rounding somewhere in [v - e, v + e] to the dtype, on top of e.
double rounding_error(DType dtype, double v, double e, const Arithmetic& arithmetic) {
  const double reach = std::fabs(v) + e;
  if (!std::isfinite(reach)) return e;
  if (e == 0 && round_to(dtype, v) == v) return 0;
  if (!std::isfinite(round_to(dtype, reach))) return kInfinity;
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
      if (overflows || (saturates && low == high)) {
        v = stored;
        e = 0;
        continue;
      }
    }
    e = rounding_error(array.dtype, v, e, arithmetic);
  }
}

}  // namespace lawson::reference
