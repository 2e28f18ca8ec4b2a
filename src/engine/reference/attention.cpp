#include "engine/reference/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace lawson::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

void add_to(Array& array, std::size_t at, double amount) {
  if (at < array.size()) array.value[at] += amount;
}

// Forward and backward name the shared operands alike.
template <typename Slot>
AttentionProblem make_problem(const ir::AttentionRule& rule, const Operands& in) {
  AttentionProblem p{
      rule,           *in[Slot::q],       *in[Slot::k],        *in[Slot::v],   in[Slot::scale],
      in[Slot::bias], in[Slot::seqlen_q], in[Slot::seqlen_kv], in[Slot::sink], {}};
  if (p.bias != nullptr) {
    const Dims scores{p.q.shape[0], p.q.shape[1], p.q.shape[2], p.k.shape[2]};
    const Dims strides = broadcast_strides(p.bias->shape, scores);
    for (std::size_t axis = 0; axis < 4; ++axis) {
      p.bias_strides[axis] = static_cast<std::size_t>(strides[axis]);
    }
  }
  return p;
}

}  // namespace

std::int64_t AttentionProblem::q_length(std::size_t b) const {
  const std::int64_t full = q.shape[2];
  if (seqlen_q == nullptr) return full;
  return std::clamp(static_cast<std::int64_t>(seqlen_q->value[b]), std::int64_t{0}, full);
}

std::int64_t AttentionProblem::kv_length(std::size_t b) const {
  const std::int64_t full = k.shape[2];
  if (seqlen_kv == nullptr) return full;
  return std::clamp(static_cast<std::int64_t>(seqlen_kv->value[b]), std::int64_t{0}, full);
}

std::int64_t AttentionProblem::aligned_row(std::size_t b, std::size_t i) const {
  const auto row = static_cast<std::int64_t>(i);
  if (rule.alignment == ir::Alignment::top_left) return row;
  return row + kv_length(b) - q_length(b);
}

bool AttentionProblem::visible(std::size_t b, std::size_t i, std::size_t j) const {
  const auto column = static_cast<std::int64_t>(j);
  if (!row_is_valid(b, i) || column >= kv_length(b)) return false;
  const std::int64_t row = aligned_row(b, i);
  if (rule.left >= 0 && column < row - rule.left) return false;
  return rule.right < 0 || column <= row + rule.right;
}

double AttentionProblem::slope(std::size_t h) const {
  std::size_t power = 1;
  while (power * 2 <= heads()) power *= 2;
  if (h < power) {
    return std::exp2(-8.0 * static_cast<double>(h + 1) / static_cast<double>(power));
  }
  const std::size_t odd = 2 * (h - power) + 1;
  return std::exp2(-8.0 * static_cast<double>(odd) / static_cast<double>(2 * power));
}

double AttentionProblem::alibi_term(std::size_t b, std::size_t h, std::size_t i,
                                    std::size_t j) const {
  if (!rule.alibi) return 0;
  return slope(h) * static_cast<double>(static_cast<std::int64_t>(j) - aligned_row(b, i));
}

double AttentionProblem::dot(std::size_t b, std::size_t h, std::size_t i, std::size_t j) const {
  const double* query = q.value.data() + q_row(b, h, i);
  const double* key = k.value.data() + k_row(b, h, j);
  double sum = 0;
  for (std::size_t c = 0; c < depth(); ++c) sum += query[c] * key[c];
  return sum;
}

double AttentionProblem::capped(double scaled) const {
  return rule.softcap > 0 ? rule.softcap * std::tanh(scaled / rule.softcap) : scaled;
}

double AttentionProblem::cap_slope(double scaled) const {
  if (rule.softcap <= 0) return 1;
  const double t = std::tanh(scaled / rule.softcap);
  return 1 - t * t;
}

double AttentionProblem::score(std::size_t b, std::size_t h, std::size_t i, std::size_t j) const {
  double x = capped(scale_value() * dot(b, h, i, j));
  if (bias != nullptr) x += bias->value[bias_at(b, h, i, j)];
  return x + alibi_term(b, h, i, j);
}

double AttentionProblem::extra_logit(std::size_t h) const {
  switch (rule.softmax) {
    case ir::SoftmaxKind::vanilla:
      return -kInfinity;
    case ir::SoftmaxKind::off_by_one:
      return 0;
    case ir::SoftmaxKind::learnable:
      return sink->value[h];
  }
  return -kInfinity;
}

AttentionProblem problem_of(const ir::Attention& op, const Operands& operands) {
  return make_problem<ir::Attention>(op.rule, operands);
}

AttentionProblem problem_of(const ir::AttentionBackward& op, const Operands& operands) {
  return make_problem<ir::AttentionBackward>(op.rule, operands);
}

void attention_forward(const ir::Attention& op, const Operands& operands,
                       std::vector<Array>& results) {
  const AttentionProblem p = problem_of(op, operands);
  Array& o = results[ir::Attention::o];
  Array& stats = results[ir::Attention::stats];
  std::vector<double> x(p.columns());
  for (std::size_t b = 0; b < p.batch(); ++b) {
    for (std::size_t h = 0; h < p.heads(); ++h) {
      for (std::size_t i = 0; i < p.rows(); ++i) {
        double largest = p.extra_logit(h);
        for (std::size_t j = 0; j < p.columns(); ++j) {
          x[j] = p.visible(b, i, j) ? p.score(b, h, i, j) : -kInfinity;
          largest = x[j] > largest || std::isnan(x[j]) ? x[j] : largest;
        }
        // A row that sees nothing: output 0, log-sum-exp of the extra logit alone.
        if (largest == -kInfinity) {
          if (stats.size() > 0) stats.value[p.stats_at(b, h, i)] = -kInfinity;
          continue;
        }
        double sum = std::exp(p.extra_logit(h) - largest);
        for (const double logit : x) sum += std::exp(logit - largest);
        if (stats.size() > 0) stats.value[p.stats_at(b, h, i)] = largest + std::log(sum);
        if (o.size() == 0) continue;
        double* out = o.value.data() + p.o_row(b, h, i);
        for (std::size_t j = 0; j < p.columns(); ++j) {
          if (!p.visible(b, i, j)) continue;
          const double probability = std::exp(x[j] - largest) / sum;
          const double* value = p.v.value.data() + p.v_row(b, h, j);
          for (std::size_t c = 0; c < p.value_depth(); ++c) out[c] += probability * value[c];
        }
      }
    }
  }
}

// P from the stored log-sum-exp, D = rowsum(dO * O), dP = dO V^T, dX = P (dP - D), and from it
// every gradient. Uses o and stats as they were given: they are operands like any other.
void attention_backward(const ir::AttentionBackward& op, const Operands& operands,
                        std::vector<Array>& results) {
  using Slot = ir::AttentionBackward;
  const AttentionProblem p = problem_of(op, operands);
  const Array& o = *operands[Slot::o];
  const Array& dout = *operands[Slot::dout];
  const Array& stats = *operands[Slot::stats];
  for (std::size_t b = 0; b < p.batch(); ++b) {
    for (std::size_t h = 0; h < p.heads(); ++h) {
      for (std::size_t i = 0; i < p.rows(); ++i) {
        const double lse = stats.value[p.stats_at(b, h, i)];
        // An invalid row, or one that sees nothing.
        if (!p.row_is_valid(b, i) || lse == -kInfinity) continue;
        const std::size_t row = p.o_row(b, h, i);
        double d = 0;
        for (std::size_t c = 0; c < p.value_depth(); ++c) {
          d += dout.value[row + c] * o.value[row + c];
        }
        if (p.sink != nullptr)
          add_to(results[Slot::dsink], h, -std::exp(p.sink->value[h] - lse) * d);
        for (std::size_t j = 0; j < p.columns(); ++j) {
          if (!p.visible(b, i, j)) continue;
          const double probability = std::exp(p.score(b, h, i, j) - lse);
          const std::size_t value_row = p.v_row(b, h, j);
          double dp = 0;
          for (std::size_t c = 0; c < p.value_depth(); ++c) {
            dp += dout.value[row + c] * p.v.value[value_row + c];
            add_to(results[Slot::dv], value_row + c, probability * dout.value[row + c]);
          }
          const double dx = probability * (dp - d);  // gradient of the score after the cap
          if (p.bias != nullptr) add_to(results[Slot::dbias], p.bias_at(b, h, i, j), dx);
          const double ds = dx * p.cap_slope(p.scale_value() * p.dot(b, h, i, j)) * p.scale_value();
          const std::size_t q_row = p.q_row(b, h, i);
          const std::size_t k_row = p.k_row(b, h, j);
          for (std::size_t c = 0; c < p.depth(); ++c) {
            add_to(results[Slot::dq], q_row + c, ds * p.k.value[k_row + c]);
            add_to(results[Slot::dk], k_row + c, ds * p.q.value[q_row + c]);
          }
        }
      }
    }
  }
}

}  // namespace lawson::reference
