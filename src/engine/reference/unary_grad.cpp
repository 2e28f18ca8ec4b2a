#include "engine/reference/unary_grad.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <vector>

namespace lawson::reference {
namespace {

using ir::UnaryKind;

double sigmoid(double x) {
  return 1.0 / (1.0 + std::exp(-x));
}

bool has_kink(UnaryKind kind) {
  return kind == UnaryKind::relu || kind == UnaryKind::leaky_relu || kind == UnaryKind::relu6 ||
         kind == UnaryKind::elu;
}

// How far f' may move when x does by e: f' is monotone between its turns, and jumps at kinks.
double slope_error(const ir::UnaryGrad& op, double x, double e, double slope) {
  if (e == 0) return 0;
  const double low = x - e;
  const double high = x + e;
  std::array<double, 4> others{slope_at(op, low), slope_at(op, high), slope, slope};
  const auto turn = [&](std::size_t i, double at) {
    if (low < at && at < high) others[2 + i] = slope_at(op, at);
  };
  const auto turns = [&](double at) {
    turn(0, -at);
    turn(1, at);
  };
  switch (op.kind) {
    case UnaryKind::tanh:
    case UnaryKind::sigmoid:
      turn(0, 0);
      break;
    case UnaryKind::silu:
      turns(2.3993572805154677);
      break;
    case UnaryKind::gelu:
      turns(std::numbers::sqrt2);
      break;
    case UnaryKind::gelu_tanh:
      turns(1.4185040087908284);
      break;
    case UnaryKind::relu6:
      if (low < 6 && high > 0) others[2] = 1;
      break;
    case UnaryKind::elu:
      if (low <= 0 && high >= 0) others[2] = op.parameter;
      if (low <= 0 && high >= 0) others[3] = 1;
      break;
    default:
      break;
  }
  return distance(slope, others);
}

// The rounding of f' itself, in the magnitudes that its usual formulas go through; low and reach
// are the least x and the largest |x|.
double slope_rounding(const ir::UnaryGrad& op, double low, double reach,
                      const Arithmetic& arithmetic) {
  const double f = 4 * arithmetic.function_roundoff;
  switch (op.kind) {
    case UnaryKind::leaky_relu:
      return arithmetic.accumulate_roundoff * std::fabs(op.parameter);
    case UnaryKind::elu:
      return low <= 0 ? 2 * f * std::fabs(op.parameter) : 0.0;
    case UnaryKind::softplus:
    case UnaryKind::sigmoid:
      return 2 * f;
    case UnaryKind::tanh:
    case UnaryKind::gelu:
      return 3 * f;
    case UnaryKind::silu:
      return f * (1 + 2 * reach);
    case UnaryKind::gelu_tanh: {
      // 1 - tanh^2 of the cubic, times its slope; from 8 on tanh is 1 in every format.
      const double r = std::min(reach, 8.0);
      return f * (1 + r * (1 + 0.134145 * r * r));
    }
    default:
      return 0;
  }
}

}  // namespace

double slope_at(const ir::UnaryGrad& op, double x) {
  if (std::isnan(x)) return x;
  switch (op.kind) {
    case UnaryKind::tanh: {
      const double c = std::cosh(x);
      return 1 / (c * c);
    }
    case UnaryKind::sigmoid:
      return sigmoid(x) * sigmoid(-x);
    case UnaryKind::relu:
      return x > 0 ? 1 : 0;
    case UnaryKind::leaky_relu:
      return x > 0 ? 1 : op.parameter;
    case UnaryKind::relu6:
      return x > 0 && x < 6 ? 1 : 0;
    case UnaryKind::elu:
      return x > 0 ? 1 : op.parameter * std::exp(x);
    case UnaryKind::softplus:
      return sigmoid(x);
    case UnaryKind::silu:
      return sigmoid(x) * (1 + x * sigmoid(-x));
    case UnaryKind::gelu:
      return 0.5 * std::erfc(-x / std::numbers::sqrt2) +
             x * std::exp(-0.5 * x * x) / std::sqrt(2 * std::numbers::pi);
    case UnaryKind::gelu_tanh: {
      const double scale = std::sqrt(2 / std::numbers::pi);
      const double inner = scale * (x + 0.044715 * x * x * x);
      const double s = sigmoid(2 * inner);
      const double width = s * sigmoid(-2 * inner);  // (1 - tanh^2) / 4
      return width == 0 ? s : s + 2 * x * width * scale * (1 + 0.134145 * x * x);
    }
    default:
      return 0;
  }
}

void add_unary_grad_errors(const ir::UnaryGrad& op, const Array& dy, const Array& x, Array& y,
                           const Arithmetic& arithmetic) {
  const bool steps = op.kind == UnaryKind::relu || op.kind == UnaryKind::relu6;
  const double product = steps ? 0 : 3 * arithmetic.accumulate_roundoff;
  const double floor = steps ? 0 : flush_floor(arithmetic);
  const std::vector<Dims> strides{broadcast_strides(dy.shape, y.shape),
                                  broadcast_strides(x.shape, y.shape)};
  for_each_index(y.shape, strides, [&](std::size_t i, const auto& at) {
    const double g = dy.value[at[0]];
    const double eg = operand_error(dy, at[0], true, arithmetic);
    const double v = x.value[at[1]];
    const double ev = operand_error(x, at[1], true, arithmetic);
    const double slope = slope_at(op, v);
    // 0 * infinity, and where frameworks choose a branch by comparison, is defined differently.
    if ((slope == 0 && !std::isfinite(g)) || (std::isnan(v) && has_kink(op.kind)) ||
        std::isinf(v) || eg == kInfinity || ev == kInfinity) {
      y.error[i] = kInfinity;
      return;
    }
    const double es =
        slope_error(op, v, ev, slope) + slope_rounding(op, v - ev, std::fabs(v) + ev, arithmetic);
    const double steepest = std::fabs(slope) + es;
    const double largest = std::fabs(g) + eg;
    const double error = with_own(y.value[i], std::fabs(slope) * eg + largest * es,
                                  product * largest * steepest + floor * (1 + largest + steepest));
    y.error[i] = std::isnan(y.value[i]) ? 0.0 : error;
  });
}

}  // namespace lawson::reference
