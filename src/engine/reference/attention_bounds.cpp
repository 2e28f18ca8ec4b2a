// Error analysis of attention. Notation per row: x_j visible scores, P_j probabilities,
// delta_j the absolute error of x_j (with the exponential's own), L the denominator.
#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/reference/attention.h"
#include "engine/reference/bounds.h"

namespace lawson::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Absolute error of storing a probability of at most 1 (or a score's gradient) in the format that
// has this unit roundoff.
double storage_floor(const Arithmetic& arithmetic) {
  if (arithmetic.probability_roundoff >= 0x1p-5) return 0x1p-10;   // e4m3
  if (arithmetic.probability_roundoff == 0x1p-11) return 0x1p-25;  // f16
  return flush_floor(arithmetic);
}

struct Dot {
  double value = 0;
  double magnitude = 0;  // sum |a b|
  double error = 0;
};

// a . b over n elements, with the errors of the operands and of an engine's accumulation.
Dot dot(const Array& a, std::size_t a_at, const Array& b, std::size_t b_at, std::size_t n,
        double own, double floor) {
  Dot result;
  for (std::size_t c = 0; c < n; ++c) {
    const double x = a.value[a_at + c];
    const double y = b.value[b_at + c];
    result.value += x * y;
    result.magnitude += std::fabs(x * y);
    if (!a.error.empty() || !b.error.empty()) {
      const double ex = a.error_at(a_at + c);
      const double ey = b.error_at(b_at + c);
      result.error += std::fabs(x) * ey + std::fabs(y) * ex + ex * ey;
    }
  }
  result.error += own * result.magnitude + static_cast<double>(n) * floor;
  return result;
}

// The constants of one analysis.
struct Roundoff {
  double operand;      // both operands of a matmul
  double sum;          // one addition or multiplication
  double function;     // exp, log, tanh
  double probability;  // storage between the two matmuls
  double partial;      // storage of one head's share of a sum over heads
  double floor;
  double stored_floor;

  explicit Roundoff(const Arithmetic& a)
      : operand{2 * a.operand_roundoff},
        sum{a.accumulate_roundoff},
        function{2 * a.function_roundoff},
        probability{a.probability_roundoff},
        partial{a.partial_roundoff},
        floor{flush_floor(a)},
        stored_floor{storage_floor(a)} {}

  double matmul(std::size_t count) const { return operand + accumulation_growth(count) * sum; }
};

struct Score {
  double value = 0;
  double error = 0;
  double scaled = 0;  // scale * q.k, before the cap
  double scaled_error = 0;
};

Score score_of(const AttentionProblem& p, const Roundoff& r, std::size_t b, std::size_t h,
               std::size_t i, std::size_t j) {
  const Dot qk =
      dot(p.q, p.q_row(b, h, i), p.k, p.k_row(b, h, j), p.depth(), r.matmul(p.depth()), r.floor);
  Score s;
  const double scale = p.scale_value();
  const double scale_error = p.scale != nullptr ? p.scale->error_at(0) : 0.0;
  s.scaled = scale * qk.value;
  // Engines scale q, the product, or fold the scale into the exponent: up to three roundings.
  s.scaled_error = std::fabs(scale) * qk.error + std::fabs(qk.value) * scale_error +
                   3 * r.sum * std::fabs(s.scaled) + r.sum * std::fabs(scale) * qk.magnitude;
  s.value = p.capped(s.scaled);
  s.error = s.scaled_error;
  if (p.rule.softcap > 0) {
    // cap * tanh: the slope is at most 1, and falls off where the cap bites.
    const double near = std::max(std::fabs(s.scaled) - s.scaled_error, 0.0);
    s.error = s.scaled_error * p.cap_slope(near) +
              (r.function + 2 * r.sum) * std::max(std::fabs(s.value), 0.25 * p.rule.softcap);
  }
  if (p.bias != nullptr) {
    const std::size_t at = p.bias_at(b, h, i, j);
    s.value += p.bias->value[at];
    if (s.value == -kInfinity) return {s.value, 0, 0, 0};  // an additive mask
    s.error += p.bias->error_at(at) + r.sum * (std::fabs(p.bias->value[at]) + std::fabs(s.value));
  }
  if (p.rule.alibi) {
    const double term = p.alibi_term(b, h, i, j);
    s.value += term;
    s.error += 3 * r.sum * std::fabs(term) + r.sum * std::fabs(s.value);
  }
  return s;
}

// Error of the weight exp(x - m) when x has absolute error `error`: the subtraction (or the fused
// multiply-add in base 2) rounds at the magnitude of its operands.
double weight_error(const Roundoff& r, double x, double error, double m) {
  if (x == -kInfinity) return 0;
  const double delta = error + 3 * r.sum * (std::fabs(x) + std::fabs(m));
  if (delta > 0.5) return std::exp(x - m + delta);
  return std::exp(x - m) * (std::expm1(delta) + r.function + 2 * r.sum);
}

double extra_error(const AttentionProblem& p, const Roundoff& r, std::size_t h, double m) {
  return weight_error(r, p.extra_logit(h), p.sink != nullptr ? p.sink->error_at(h) : 0.0, m);
}

void add_error(Array& array, std::size_t at, double amount) {
  if (at < array.size()) array.error[at] += std::isnan(amount) ? kInfinity : amount;
}

// Non-finite values are judged by pattern; NaN errors mean that anything goes.
void settle(Array& array) {
  for (std::size_t i = 0; i < array.size(); ++i) {
    if (std::isnan(array.error[i])) array.error[i] = kInfinity;
    if (std::isnan(array.value[i])) array.error[i] = 0;
  }
}

}  // namespace

// With relative errors |eps_j| <= E_j of the weights in numerator and denominator alike:
//   O' - O = sum P_j (1 + eps_j) (v_j - O) / sum P_j (1 + eps_j),
// so |O' - O| <= sum P_j E_j |v_j - O| / (1 - sum P_j E_j), and never more than the spread of the
// values. Storage of P touches the numerator only; then come the second matmul and the division.
void add_attention_errors(const ir::Attention& op, const Operands& operands,
                          std::vector<Array>& results, const Arithmetic& arithmetic) {
  const AttentionProblem p = problem_of(op, operands);
  const Roundoff r(arithmetic);
  Array& o = results[ir::Attention::o];
  Array& stats = results[ir::Attention::stats];
  std::vector<Score> x(p.columns());
  std::vector<double> weight(p.columns());
  std::vector<double> uncertainty(p.columns());
  const double second = r.matmul(p.columns()) + r.probability +
                        (std::log2(static_cast<double>(p.columns()) + 1) + 2) *
                            (r.function + 2 * r.sum);  // rescaling of an online softmax
  for (std::size_t b = 0; b < p.batch(); ++b) {
    for (std::size_t h = 0; h < p.heads(); ++h) {
      for (std::size_t i = 0; i < p.rows(); ++i) {
        if (!p.row_is_valid(b, i)) {
          // Output 0; the statistics of a padding row mean nothing.
          if (stats.size() > 0) stats.error[p.stats_at(b, h, i)] = kInfinity;
          continue;
        }
        const double extra = p.extra_logit(h);
        double m = extra;
        std::size_t visible = 0;
        for (std::size_t j = 0; j < p.columns(); ++j) {
          if (!p.visible(b, i, j)) continue;
          x[j] = score_of(p, r, b, h, i, j);
          m = std::max(m, x[j].value);
          ++visible;
        }
        if (m == -kInfinity) continue;
        double sum = std::exp(extra - m);
        const double extra_uncertainty = extra_error(p, r, h, m);
        double uncertain = extra_uncertainty;  // sum of weights times E
        for (std::size_t j = 0; j < p.columns(); ++j) {
          if (!p.visible(b, i, j)) continue;
          weight[j] = std::exp(x[j].value - m);
          uncertainty[j] = weight_error(r, x[j].value, x[j].error, m);
          sum += weight[j];
          uncertain += uncertainty[j];
        }
        const double mixed = uncertain / sum;  // sum P_j E_j
        const double inverse = mixed < 1 ? 1 / (1 - mixed) : kInfinity;
        if (stats.size() > 0) {
          const std::size_t at = p.stats_at(b, h, i);
          const double lse = m + std::log(sum);
          stats.error[at] = mixed * inverse + accumulation_growth(visible) * r.sum +
                            (r.function + 2 * r.sum) * (std::log(sum) + 1) +
                            (std::log2(static_cast<double>(visible) + 1) + 2) * r.function +
                            4 * r.sum * (std::fabs(m) + std::fabs(lse));
          // A sink that nothing visible joins is returned as it is.
          if (visible == 0) stats.error[at] = p.sink != nullptr ? p.sink->error_at(h) : 0.0;
          if (visible == 0) stats.error[at] += 8 * r.sum * std::fabs(lse);
        }
        if (o.size() == 0 || visible == 0) continue;
        for (std::size_t c = 0; c < p.value_depth(); ++c) {
          const std::size_t at = p.o_row(b, h, i) + c;
          const double out = o.value[at];
          double error = extra_uncertainty / sum * std::fabs(out);
          double spread = extra > -kInfinity ? std::fabs(out) : 0.0;
          double magnitude = 0;
          double operand = 0;
          double floor = 0;
          for (std::size_t j = 0; j < p.columns(); ++j) {
            if (!p.visible(b, i, j)) continue;
            const std::size_t value_at = p.v_row(b, h, j) + c;
            const double v = p.v.value[value_at];
            const double probability = weight[j] / sum;
            error += uncertainty[j] / sum * std::fabs(v - out);
            spread = std::max(spread, std::fabs(v - out));
            magnitude += probability * std::fabs(v);
            operand += probability * p.v.error_at(value_at);
            floor += std::fabs(v);
          }
          error = std::min(mixed < 1 ? error * inverse : kInfinity, spread);
          o.error[at] = error + operand + second * magnitude + r.stored_floor * floor +
                        r.floor * static_cast<double>(visible) +
                        (accumulation_growth(visible) + 4) * r.sum * std::fabs(out);
        }
      }
    }
  }
  settle(o);
  settle(stats);
}

void add_attention_errors(const ir::AttentionBackward& op, const Operands& operands,
                          std::vector<Array>& results, const Arithmetic& arithmetic) {
  using Slot = ir::AttentionBackward;
  const AttentionProblem p = problem_of(op, operands);
  const Roundoff r(arithmetic);
  const Array& o = *operands[Slot::o];
  const Array& dout = *operands[Slot::dout];
  const Array& stats = *operands[Slot::stats];
  const std::size_t group = p.heads() / p.kv_heads();
  // Sums over columns (dQ) and over rows of a group of heads (dK, dV): relative to sum |terms|.
  const double over_columns = r.matmul(p.columns());
  const double over_rows = r.matmul(p.rows() * group);
  // Each head's share is stored, then the shares are added, in that format at worst.
  const double partial = group > 1 ? static_cast<double>(group) * r.partial : 0;
  const std::size_t scores = p.batch() * p.heads() * p.rows() * p.columns();
  Array& dbias = results[Slot::dbias];
  Array& dsink = results[Slot::dsink];
  // dBias adds the gradients of the scores as they are stored for dQ and dK.
  const double over_bias =
      dbias.size() == 0 ? 0 : accumulation_growth(scores / dbias.size()) * r.sum + r.partial;
  const double over_sink = accumulation_growth(p.batch() * p.rows()) * r.sum;
  const double scale = std::fabs(p.scale_value());
  const double scale_error = p.scale != nullptr ? p.scale->error_at(0) : 0.0;

  // What one head gives to dK and dV.
  std::vector<double> head_dk(p.columns() * p.depth());
  std::vector<double> head_dv(p.columns() * p.value_depth());

  for (std::size_t b = 0; b < p.batch(); ++b) {
    for (std::size_t h = 0; h < p.heads(); ++h) {
      std::fill(head_dk.begin(), head_dk.end(), 0.0);
      std::fill(head_dv.begin(), head_dv.end(), 0.0);
      for (std::size_t i = 0; i < p.rows(); ++i) {
        const double lse = stats.value[p.stats_at(b, h, i)];
        if (!p.row_is_valid(b, i) || lse == -kInfinity) continue;
        const double lse_error = stats.error_at(p.stats_at(b, h, i));
        const std::size_t row = p.o_row(b, h, i);
        const Dot d = dot(dout, row, o, row, p.value_depth(),
                          accumulation_growth(p.value_depth()) * r.sum, r.floor);
        if (p.sink != nullptr && dsink.size() > 0) {
          const double weight = std::exp(p.sink->value[h] - lse);
          const double uncertain =
              weight_error(r, p.sink->value[h], p.sink->error_at(h) + lse_error, lse);
          add_error(
              dsink, h,
              weight * d.error + (uncertain + over_sink * weight) * (std::fabs(d.value) + d.error));
        }
        for (std::size_t j = 0; j < p.columns(); ++j) {
          if (!p.visible(b, i, j)) continue;
          const Score s = score_of(p, r, b, h, i, j);
          const double probability = std::exp(s.value - lse);
          const double probability_error =
              weight_error(r, s.value, s.error + lse_error, lse) + r.floor;
          const std::size_t value_row = p.v_row(b, h, j);
          const Dot dp =
              dot(dout, row, p.v, value_row, p.value_depth(), r.matmul(p.value_depth()), r.floor);
          const double difference = std::fabs(dp.value - d.value);
          const double difference_error =
              dp.error + d.error + r.sum * (std::fabs(dp.value) + std::fabs(d.value));
          // Gradient of the score after the cap, then before it.
          const double dx = probability * difference;
          const double dx_error = probability_error * (difference + difference_error) +
                                  probability * difference_error + r.sum * dx;
          if (p.bias != nullptr && dbias.size() > 0) {
            add_error(dbias, p.bias_at(b, h, i, j), dx_error + over_bias * dx);
          }
          double slope = 1;
          double slope_error = 0;
          if (p.rule.softcap > 0) {
            slope = p.cap_slope(s.scaled);
            // |d(1 - tanh^2)| <= 0.77 |dt|
            slope_error = 0.77 * s.scaled_error / p.rule.softcap + 2 * r.function + 2 * r.sum;
          }
          const double ds = dx * slope;
          const double ds_error = dx_error * (slope + slope_error) + dx * slope_error +
                                  (r.probability + 2 * r.sum) * ds + r.stored_floor;
          const double scaled = scale * ds;
          const double scaled_error = scale * ds_error + scale_error * ds + 2 * r.sum * scaled;
          const std::size_t q_row = p.q_row(b, h, i);
          const std::size_t k_row = p.k_row(b, h, j);
          const double signed_ds = dp.value < d.value ? -scaled : scaled;
          for (std::size_t c = 0; c < p.depth(); ++c) {
            head_dk[j * p.depth() + c] += signed_ds * p.q.value[q_row + c];
            const double q = std::fabs(p.q.value[q_row + c]);
            const double k = std::fabs(p.k.value[k_row + c]);
            add_error(results[Slot::dq], q_row + c,
                      scaled_error * k + scaled * p.k.error_at(k_row + c) +
                          over_columns * scaled * k + r.floor);
            add_error(results[Slot::dk], k_row + c,
                      scaled_error * q + scaled * p.q.error_at(q_row + c) + over_rows * scaled * q +
                          r.floor);
          }
          const double stored = probability_error + r.probability * probability + r.stored_floor;
          for (std::size_t c = 0; c < p.value_depth(); ++c) {
            head_dv[j * p.value_depth() + c] += probability * dout.value[row + c];
            const double g = std::fabs(dout.value[row + c]);
            add_error(results[Slot::dv], value_row + c,
                      stored * g + (probability + stored) * dout.error_at(row + c) +
                          over_rows * probability * g + r.floor);
          }
        }
      }
      for (std::size_t j = 0; j < p.columns() && partial > 0; ++j) {
        for (std::size_t c = 0; c < p.depth(); ++c) {
          add_error(results[Slot::dk], p.k_row(b, h, j) + c,
                    partial * std::fabs(head_dk[j * p.depth() + c]));
        }
        for (std::size_t c = 0; c < p.value_depth(); ++c) {
          add_error(results[Slot::dv], p.v_row(b, h, j) + c,
                    partial * std::fabs(head_dv[j * p.value_depth() + c]));
        }
      }
    }
  }
  for (Array& result : results) settle(result);
}

}  // namespace lawson::reference
