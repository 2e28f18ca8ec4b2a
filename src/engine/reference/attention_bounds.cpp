// Error analysis of attention. Notation per row: x_j visible scores, P_j probabilities,
// delta_j the absolute error of x_j (with the exponential's own), L the denominator.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "engine/reference/attention.h"
#include "engine/reference/bounds.h"

namespace lawson::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Absolute error of storing a probability of at most 1 (or a score's gradient) in the format that
// has this unit roundoff, when it may be cut off instead of rounded.
double storage_floor(const Arithmetic& arithmetic) {
  if (arithmetic.probability_roundoff >= 0x1p-5) return 0x1p-10;   // e4m3
  if (arithmetic.probability_roundoff == 0x1p-11) return 0x1p-24;  // f16
  return flush_floor(arithmetic);
}

struct Dot {
  double value = 0;
  double magnitude = 0;  // sum |a b|
  double error = 0;
};

// sum |x y|, in the order of reference::dot.
double magnitude(const double* x, const double* y, std::size_t n) {
  std::array<double, 4> sums{};
  std::size_t c = 0;
  for (; c + 4 <= n; c += 4) {
    for (std::size_t lane = 0; lane < 4; ++lane) sums[lane] += std::fabs(x[c + lane] * y[c + lane]);
  }
  for (; c < n; ++c) sums[0] += std::fabs(x[c] * y[c]);
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// a . b over n elements, with the errors of the operands and of an engine's accumulation.
Dot dot(const Array& a, std::size_t a_at, const Array& b, std::size_t b_at, std::size_t n,
        double own, double floor) {
  const double* x = a.value.data() + a_at;
  const double* y = b.value.data() + b_at;
  Dot result;
  result.value = reference::dot(x, y, n);
  result.magnitude = magnitude(x, y, n);
  if (!a.error.empty() || !b.error.empty()) {
    for (std::size_t c = 0; c < n; ++c) {
      const double ex = a.error_at(a_at + c);
      const double ey = b.error_at(b_at + c);
      result.error += std::fabs(x[c]) * ey + std::fabs(y[c]) * ex + ex * ey;
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
  double scaled = 0;  // scale * (q.k + pre-scale bias), before the cap
  double scaled_error = 0;
};

// Adds a term to the score; -infinity (a mask) is exact, whatever it is added to.
void add_term(const Roundoff& r, double term, double error, Score& s) {
  s.value += term;
  s.error =
      s.value == -kInfinity ? 0 : s.error + error + r.sum * (std::fabs(term) + std::fabs(s.value));
}

Score score_of(const AttentionProblem& p, const Roundoff& r, std::int64_t b, std::int64_t h,
               std::int64_t i, std::int64_t j) {
  Dot qk = dot(p.q(), p.query(b, h, i) * p.depth(), p.k(), p.key(b, h, j) * p.depth(), p.depth(),
               r.matmul(p.depth()), r.floor);
  if (p.rule().pre_scale_bias) {
    const std::size_t at = p.bias_at(b, h, i, j);
    const double bias = p.bias()->value[at];
    qk.value += bias;
    qk.magnitude += 3 * std::fabs(bias);  // q.k and bias may be scaled one by one
    qk.error += p.bias()->error_at(at);
  }
  Score s;
  const double scale = p.scale();
  s.scaled = scale * qk.value;
  // Engines scale q, the product, or fold the scale into the exponent: up to three roundings.
  if (std::isfinite(s.scaled)) {
    s.scaled_error = std::fabs(scale) * qk.error + std::fabs(qk.value) * p.scale_error() +
                     3 * r.sum * std::fabs(s.scaled) + r.sum * std::fabs(scale) * qk.magnitude;
  }
  s.value = p.capped(s.scaled);
  s.error = s.scaled_error;
  if (p.rule().softcap > 0) {
    // cap * tanh: the slope is at most 1, and falls off where the cap bites.
    const double near = std::max(std::fabs(s.scaled) - s.scaled_error, 0.0);
    s.error = s.scaled_error * p.cap_slope(near) +
              (r.function + 2 * r.sum) * std::max(std::fabs(s.value), 0.25 * p.rule().softcap);
  }
  if (p.bias() != nullptr && !p.rule().pre_scale_bias) {
    const std::size_t at = p.bias_at(b, h, i, j);
    add_term(r, p.bias()->value[at], p.bias()->error_at(at), s);
  }
  if (const Array* mask = p.additive_mask()) {
    const std::size_t at = p.mask_at(b, h, i, j);
    add_term(r, mask->value[at], mask->error_at(at), s);
  }
  if (p.rule().alibi) {
    // Engines may take slope * j and slope * i' one by one.
    const double term = p.alibi_term(b, h, i, j);
    const double first = p.alibi_term(b, h, i, 0);
    add_term(r, term, 2 * r.sum * (std::fabs(first) + std::fabs(term - first)), s);
  }
  return s;
}

// Error of the weight exp(x - m) when x has absolute error `error`: the subtraction (or the fused
// multiply-add in base 2) rounds at the magnitude of its operands.
double weight_error(const Roundoff& r, double x, double error, double m) {
  if (x == -kInfinity) return 0;
  const double delta = error + 3 * r.sum * (std::fabs(x) + std::fabs(m));
  if (delta > 0.5) return std::exp(x - m + delta);
  return std::exp(x - m) * (delta * (1 + delta) + r.function + 2 * r.sum);  // >= exp(delta) - 1
}

// Non-finite values are judged by pattern; NaN errors mean that anything goes.
void settle(Array& array) {
  for (std::size_t i = 0; i < array.size(); ++i) {
    if (std::isnan(array.error[i])) array.error[i] = kInfinity;
    if (std::isnan(array.value[i])) array.error[i] = 0;
  }
}

void set_error(Array& array, std::size_t at, double error) {
  if (at < array.size()) array.error[at] = error;
}

void add_error(Array& array, std::size_t at, double error) {
  if (at < array.size()) array.error[at] += error;
}

// What the factor 1 / (1 - p) of dropout adds, relative to what it multiplies: computing 1 - p and
// its reciprocal, and the product.
double dropout_roundoff(const AttentionProblem& p, const Roundoff& r) {
  return p.rule().dropout > 0 ? 3 * r.sum / (1 - p.rule().dropout) : 0.0;
}

// ---- forward ----

// With relative errors |eps_j| <= E_j of the weights in numerator and denominator alike:
//   O' - O = sum P_j (1 + eps_j) (v_j - O) / sum P_j (1 + eps_j),
// so |O' - O| <= sum P_j E_j |v_j - O| / (1 - sum P_j E_j), and never more than the spread of the
// values; with dropout, v_j is the value times its factor. Storage of P touches the numerator only;
// then come the second matmul and the division.
struct Forward {
  Forward(const AttentionProblem& problem, std::vector<Array>& results,
          const Arithmetic& arithmetic)
      : p{problem},
        r{arithmetic},
        o{results[ir::Attention::o]},
        stats{results[ir::Attention::stats]},
        max_logit{results[ir::Attention::max_logit]},
        row{p.geometry().columns},
        x(row.score.size()),
        weight(row.score.size()),
        uncertainty(row.score.size()),
        sums(kSums * p.value_depth()),
        spread(p.value_depth()) {
    const auto columns = static_cast<std::size_t>(p.geometry().columns);
    second = r.matmul(columns) + r.probability + dropout_roundoff(p, r) +
             (std::log2(static_cast<double>(columns) + 1) + 2) *
                 (r.function + 2 * r.sum);  // rescaling of an online softmax
  }

  void run() {
    // The statistics of rows that no sequence has mean nothing.
    std::fill(stats.error.begin(), stats.error.end(), kInfinity);
    std::fill(max_logit.error.begin(), max_logit.error.end(), kInfinity);
    for (std::int64_t b = 0; b < p.sequences(); ++b) {
      for (std::int64_t h = 0; h < p.heads(); ++h) {
        for (std::int64_t i = 0; i < p.sequence(b).q_length; ++i) one_row(b, h, i);
      }
    }
    settle(o);
    settle(stats);
    settle(max_logit);
  }

  void one_row(std::int64_t b, std::int64_t h, std::int64_t i) {
    const std::size_t at = p.query(b, h, i);
    p.begin_row(b, h, i, row);
    const auto begin = static_cast<std::size_t>(row.columns.begin);
    const auto end = static_cast<std::size_t>(row.columns.end);
    const double extra = p.extra_logit(h);
    const double extra_error =
        p.sink() != nullptr ? p.sink()->error_at(static_cast<std::size_t>(h)) : 0.0;
    double largest = -kInfinity;
    double highest = -kInfinity;  // what the largest could be at most and at least
    double lowest = -kInfinity;
    std::size_t visible = 0;
    for (std::size_t j = begin; j < end; ++j) {
      if (row.visible[j] == 0) continue;
      x[j] = score_of(p, r, b, h, i, static_cast<std::int64_t>(j));
      largest = std::max(largest, x[j].value);
      highest = std::max(highest, x[j].value + x[j].error);
      lowest = std::max(lowest, x[j].value - x[j].error);
      ++visible;
    }
    // Engines keep logits in base 2, too.
    set_error(max_logit, at,
              largest == -kInfinity
                  ? 0.0
                  : std::max(highest - largest, largest - lowest) + 4 * r.sum * std::fabs(largest));
    const double m = std::max(largest, extra);
    if (m == -kInfinity) {
      set_error(stats, at, 0);
      return;
    }
    double sum = std::exp(extra - m);
    const double extra_uncertainty = weight_error(r, extra, extra_error, m);
    double uncertain = extra_uncertainty;  // sum of weights times E
    for (std::size_t j = begin; j < end; ++j) {
      if (row.visible[j] == 0) continue;
      weight[j] = std::exp(x[j].value - m);
      uncertainty[j] = weight_error(r, x[j].value, x[j].error, m);
      sum += weight[j];
      uncertain += uncertainty[j];
    }
    const double mixed = uncertain / sum;  // sum P_j E_j
    const double inverse = mixed < 1 ? 1 / (1 - mixed) : kInfinity;
    const double lse = m + std::log(sum);
    if (visible == 0) {
      // A sink that nothing visible joins is returned as it is.
      set_error(stats, at, extra_error + 8 * r.sum * std::fabs(lse));
      return;
    }
    set_error(stats, at,
              mixed * inverse + accumulation_growth(visible) * r.sum +
                  (r.function + 2 * r.sum) * (std::log(sum) + 1) +
                  (std::log2(static_cast<double>(visible) + 1) + 2) * r.function +
                  4 * r.sum * (std::fabs(m) + std::fabs(lse)));
    if (o.size() == 0) return;
    const std::size_t wide = p.value_depth();
    const double* out = o.value.data() + at * wide;
    std::fill(sums.begin(), sums.end(), 0.0);
    for (std::size_t j = begin; j < end; ++j) {
      if (row.visible[j] != 0) add_value(b, h, j, sum, out);
    }
    // sum P_j E_j |v_j - O| is at most sum P_j E_j times the spread, so that the spread is the
    // lesser only where it is far from certain which column has the weight.
    if (mixed >= 0.5) find_spread(b, h, extra, out);
    for (std::size_t c = 0; c < wide; ++c) {
      double error = sums[kError * wide + c] + extra_uncertainty / sum * std::fabs(out[c]);
      error *= inverse;
      if (mixed >= 0.5) error = mixed < 1 ? std::min(error, spread[c]) : spread[c];
      o.error[at * wide + c] =
          error + sums[kOperand * wide + c] + second * sums[kMagnitude * wide + c] +
          r.stored_floor * sums[kFloor * wide + c] + r.floor * static_cast<double>(visible) +
          (accumulation_growth(visible) + 4) * r.sum * std::fabs(out[c]);
    }
  }

  void add_value(std::int64_t b, std::int64_t h, std::size_t j, double sum, const double* out) {
    const std::size_t wide = p.value_depth();
    const std::size_t at = p.value(b, h, static_cast<std::int64_t>(j)) * wide;
    const double* v = p.v().value.data() + at;
    double* error = sums.data() + kError * wide;
    double* magnitudes = sums.data() + kMagnitude * wide;
    double* floor = sums.data() + kFloor * wide;
    const double factor = row.dropout[j];
    const double probability = weight[j] / sum;
    const double own = uncertainty[j] / sum;
    for (std::size_t c = 0; c < wide; ++c) {
      const double value = factor * v[c];
      error[c] += own * std::fabs(value - out[c]);
      magnitudes[c] += probability * std::fabs(value);
      floor[c] += std::fabs(value);
    }
    if (p.v().error.empty()) return;
    for (std::size_t c = 0; c < wide; ++c) {
      sums[kOperand * wide + c] += probability * factor * p.v().error[at + c];
    }
  }

  void find_spread(std::int64_t b, std::int64_t h, double extra, const double* out) {
    const std::size_t wide = p.value_depth();
    // The extra logit's value is 0.
    for (std::size_t c = 0; c < wide; ++c) spread[c] = extra > -kInfinity ? std::fabs(out[c]) : 0;
    for (std::int64_t j = row.columns.begin; j < row.columns.end; ++j) {
      const auto column = static_cast<std::size_t>(j);
      if (row.visible[column] == 0) continue;
      const double* v = p.v().value.data() + p.value(b, h, j) * wide;
      for (std::size_t c = 0; c < wide; ++c) {
        spread[c] = std::max(spread[c], std::fabs(row.dropout[column] * v[c] - out[c]));
      }
    }
  }

  // What `sums` has for every element of a row of O: the sums over the columns of P E |v - O|,
  // P |v|, P times the error of v, and |v|.
  enum : std::size_t { kError, kMagnitude, kOperand, kFloor, kSums };

  const AttentionProblem& p;
  const Roundoff r;
  Array& o;
  Array& stats;
  Array& max_logit;
  ScoreRow row;
  std::vector<Score> x;
  std::vector<double> weight;
  std::vector<double> uncertainty;
  std::vector<double> sums;
  std::vector<double> spread;
  double second = 0;
};

// ---- backward ----

// array.error[at + c] += a |x[c]| + b x's own error + floor; nothing where the array is absent.
void add_errors_of(Array& array, std::size_t at, const Array& x, std::size_t x_at,
                   std::size_t count, double a, double b, double floor) {
  if (array.size() == 0) return;
  double* to = array.error.data() + at;
  const double* from = x.value.data() + x_at;
  for (std::size_t c = 0; c < count; ++c) to[c] += a * std::fabs(from[c]) + floor;
  if (x.error.empty()) return;
  for (std::size_t c = 0; c < count; ++c) to[c] += b * x.error[x_at + c];
}

struct Backward {
  using Slot = ir::AttentionBackward;

  Backward(const AttentionProblem& problem, std::vector<Array>& all, const Arithmetic& arithmetic)
      : p{problem},
        r{arithmetic},
        results{all},
        dout{*p.operand(Slot::dout)},
        stats{*p.operand(Slot::stats)},
        row{p.geometry().columns} {
    const ir::AttentionGeometry& g = p.geometry();
    const auto rows = static_cast<std::size_t>(g.rows);
    const auto columns = static_cast<std::size_t>(g.columns);
    const auto group = static_cast<std::size_t>(g.heads / g.kv_heads);
    over_columns = r.matmul(columns);
    over_rows = r.matmul(rows * group);
    partial = group > 1 ? static_cast<double>(group) * r.partial : 0;
    const auto matrices = static_cast<std::size_t>(p.sequences() * g.heads);
    const std::size_t biases = results[Slot::dbias].size();
    // dBias adds the gradients of the scores as they are stored for dQ and dK, in that format at
    // worst: one rounding for each matrix that is added.
    if (biases > 0) {
      const Dims& shape = results[Slot::dbias].shape;
      const auto shares = static_cast<double>(matrices) / static_cast<double>(shape[0] * shape[1]);
      over_bias = accumulation_growth(matrices * rows * columns / biases) * r.sum +
                  r.partial * std::max(1.0, shares);
    }
    over_sink = accumulation_growth(static_cast<std::size_t>(p.sequences()) * rows) * r.sum;
    dropout = dropout_roundoff(p, r);
    head_dk.resize(columns * p.depth());
    head_dv.resize(columns * p.value_depth());
  }

  void run() {
    for (std::int64_t b = 0; b < p.sequences(); ++b) {
      for (std::int64_t h = 0; h < p.heads(); ++h) {
        for (std::int64_t i = 0; i < p.sequence(b).q_length; ++i) one_row(b, h, i);
        if (partial > 0) store_shares(b, h);
      }
    }
    for (Array& result : results) settle(result);
  }

  void one_row(std::int64_t b, std::int64_t h, std::int64_t i) {
    const std::size_t at = p.query(b, h, i);
    const double lse = stats.value[at];
    if (lse == -kInfinity) return;
    p.begin_row(b, h, i, row);
    if (row.columns.begin == row.columns.end) return;
    const double lse_error = stats.error_at(at);
    const std::size_t wide = p.value_depth();
    const Dot d = dot(dout, at * wide, *p.operand(Slot::o), at * wide, wide,
                      accumulation_growth(wide) * r.sum, r.floor);
    if (p.sink() != nullptr) sink_error(h, lse, lse_error, d);
    for (std::int64_t j = row.columns.begin; j < row.columns.end; ++j) {
      if (row.visible[static_cast<std::size_t>(j)] != 0) one_score(b, h, i, j, lse, lse_error, d);
    }
  }

  void sink_error(std::int64_t h, double lse, double lse_error, const Dot& d) {
    const auto at = static_cast<std::size_t>(h);
    const double sink = p.sink()->value[at];
    const double weight = std::exp(sink - lse);
    const double uncertain = weight_error(r, sink, p.sink()->error_at(at) + lse_error, lse);
    add_error(results[Slot::dsink], at,
              weight * d.error + (uncertain + over_sink * weight) * (std::fabs(d.value) + d.error));
  }

  void one_score(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j, double lse,
                 double lse_error, const Dot& d) {
    const std::size_t wide = p.value_depth();
    const std::size_t deep = p.depth();
    const std::size_t query = p.query(b, h, i);
    const std::size_t key = p.key(b, h, j) * deep;
    const std::size_t value = p.value(b, h, j) * wide;
    const Score s = score_of(p, r, b, h, i, j);
    const double probability = std::exp(s.value - lse);
    const double probability_error = weight_error(r, s.value, s.error + lse_error, lse) + r.floor;
    const double factor = row.dropout[static_cast<std::size_t>(j)];
    Dot dp = dot(dout, query * wide, p.v(), value, wide, r.matmul(wide), r.floor);
    dp.value *= factor;
    dp.error = factor * dp.error + dropout * std::fabs(dp.value);
    const double difference = std::fabs(dp.value - d.value);
    const double difference_error =
        dp.error + d.error + r.sum * (std::fabs(dp.value) + std::fabs(d.value));
    // Gradient of the score after the cap, then before it, then of q.k.
    const double dx = probability * difference;
    const double dx_error = probability_error * (difference + difference_error) +
                            probability * difference_error + r.sum * dx;
    double slope = 1;
    double slope_error = 0;
    if (p.rule().softcap > 0) {
      slope = p.cap_slope(s.scaled);
      // |d(1 - tanh^2)| <= 0.77 |dt|
      slope_error = 0.77 * s.scaled_error / p.rule().softcap + 2 * r.function + 2 * r.sum;
    }
    const double ds = dx * slope;
    const double ds_error =
        dx_error * (slope + slope_error) + dx * slope_error + (r.probability + 2 * r.sum) * ds;
    const double scale = std::fabs(p.scale());
    const double scaled = scale * ds;
    const double bias_floor = r.stored_floor / std::clamp(scale, 0x1p-20, 1.0);
    // The gradient of a score is stored before or after the scale.
    const double scaled_error = scale * ds_error + p.scale_error() * ds + 2 * r.sum * scaled +
                                std::max(1.0, scale) * r.stored_floor;
    if (p.bias() != nullptr) {
      add_error(results[Slot::dbias], p.bias_at(b, h, i, j),
                p.rule().pre_scale_bias ? scaled_error + over_bias * scaled
                                        : dx_error + over_bias * dx + 2 * bias_floor);
    }
    add_errors_of(results[Slot::dq], query * deep, p.k(), key, deep,
                  scaled_error + over_columns * scaled, scaled, r.floor);
    add_errors_of(results[Slot::dk], key, p.q(), query * deep, deep,
                  scaled_error + over_rows * scaled, scaled, r.floor);
    // P as it is stored for dV; exactly 0 where dropped.
    const double weight = factor * probability;
    const double stored =
        factor * (probability_error + r.stored_floor) + (r.probability + dropout) * weight;
    add_errors_of(results[Slot::dv], value, dout, query * wide, wide, stored + over_rows * weight,
                  weight + stored, factor > 0 ? r.floor : 0.0);
    if (partial == 0) return;
    const auto column = static_cast<std::size_t>(j);
    const double signed_ds = dp.value < d.value ? -scaled : scaled;
    for (std::size_t c = 0; c < deep; ++c) {
      head_dk[column * deep + c] += signed_ds * p.q().value[query * deep + c];
    }
    for (std::size_t c = 0; c < wide; ++c) {
      head_dv[column * wide + c] += weight * dout.value[query * wide + c];
    }
  }

  // Each head's share of dK and dV is stored, then the shares are added, in that format at worst.
  void store_shares(std::int64_t b, std::int64_t h) {
    const std::size_t wide = p.value_depth();
    const std::size_t deep = p.depth();
    for (std::int64_t j = 0; j < p.sequence(b).kv_length; ++j) {
      const auto column = static_cast<std::size_t>(j);
      for (std::size_t c = 0; c < deep; ++c) {
        add_error(results[Slot::dk], p.key(b, h, j) * deep + c,
                  partial * std::fabs(head_dk[column * deep + c]) + r.stored_floor);
      }
      for (std::size_t c = 0; c < wide; ++c) {
        add_error(results[Slot::dv], p.value(b, h, j) * wide + c,
                  partial * std::fabs(head_dv[column * wide + c]) + r.stored_floor);
      }
    }
    std::fill(head_dk.begin(), head_dk.end(), 0.0);
    std::fill(head_dv.begin(), head_dv.end(), 0.0);
  }

  const AttentionProblem& p;
  const Roundoff r;
  std::vector<Array>& results;
  const Array& dout;
  const Array& stats;
  ScoreRow row;
  // Rounding of sums over columns (dQ) and over the rows of a group of heads (dK, dV), relative to
  // sum |terms|; of each head's share of dK and dV; of the sums of dBias and dSink.
  double over_columns = 0;
  double over_rows = 0;
  double partial = 0;
  double over_bias = 0;
  double over_sink = 0;
  double dropout = 0;
  std::vector<double> head_dk;
  std::vector<double> head_dv;
};

}  // namespace

void add_attention_errors(const ir::Graph& graph, const ir::Node& node, const Operands& operands,
                          std::vector<Array>& results, const Arithmetic& arithmetic) {
  const AttentionProblem problem(graph, node, operands);
  Forward(problem, results, arithmetic).run();
}

void add_attention_backward_errors(const ir::Graph& graph, const ir::Node& node,
                                   const Operands& operands, std::vector<Array>& results,
                                   const Arithmetic& arithmetic) {
  const AttentionProblem problem(graph, node, operands);
  Backward(problem, results, arithmetic).run();
}

}  // namespace lawson::reference
