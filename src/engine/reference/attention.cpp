#include "engine/reference/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace lawson::reference {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

void set(Array& array, std::size_t at, double value) {
  if (at < array.size()) array.value[at] = value;
}

void add_to(Array& array, std::size_t at, double amount) {
  if (at < array.size()) array.value[at] += amount;
}

// array[at + c] += factor * x[c]; nothing where the array is absent.
void add_row(Array& array, std::size_t at, double factor, const double* x, std::size_t count) {
  if (array.size() == 0) return;
  double* to = array.value.data() + at;
  for (std::size_t c = 0; c < count; ++c) to[c] += factor * x[c];
}

void forward_row(const AttentionProblem& p, std::int64_t b, std::int64_t h, std::int64_t i,
                 ScoreRow& row, std::vector<Array>& results) {
  p.scores(b, h, i, row);
  const std::size_t at = p.query(b, h, i);
  const auto begin = static_cast<std::size_t>(row.columns.begin);
  const auto end = static_cast<std::size_t>(row.columns.end);
  const auto larger = [](double a, double x) { return x > a || std::isnan(x) ? x : a; };
  double max_logit = -kInfinity;
  for (std::size_t j = begin; j < end; ++j) max_logit = larger(max_logit, row.score[j]);
  set(results[ir::Attention::max_logit], at, max_logit);
  const double extra = p.extra_logit(h);
  const double largest = larger(extra, max_logit);
  // A row that sees nothing: output 0, log-sum-exp of the extra logit alone.
  if (largest == -kInfinity) return;
  double sum = std::exp(extra - largest);
  for (std::size_t j = begin; j < end; ++j) sum += std::exp(row.score[j] - largest);
  set(results[ir::Attention::stats], at, largest + std::log(sum));
  for (std::size_t j = begin; j < end; ++j) {
    if (row.visible[j] == 0) continue;
    const double weight = row.dropout[j] * std::exp(row.score[j] - largest) / sum;
    const std::size_t value = p.value(b, h, static_cast<std::int64_t>(j)) * p.value_depth();
    add_row(results[ir::Attention::o], at * p.value_depth(), weight, p.v().value.data() + value,
            p.value_depth());
  }
}

void dropped(const AttentionProblem& p, Array& result) {
  if (result.size() == 0) return;
  const auto width = static_cast<std::size_t>(p.geometry().columns);
  std::vector<std::uint8_t> kept(width);
  std::size_t at = 0;
  for (std::int64_t b = 0; b < p.sequences(); ++b) {
    for (std::int64_t h = 0; h < p.heads(); ++h) {
      for (std::int64_t i = 0; i < p.geometry().rows; ++i, at += width) {
        p.kept(b, h, i, 0, kept);
        std::copy(kept.begin(), kept.end(), result.value.begin() + static_cast<std::ptrdiff_t>(at));
      }
    }
  }
}

// P from the stored log-sum-exp, dP = dropout(dO V^T), dX = P (dP - D) with D = rowsum(dO * O), and
// from it every gradient. Uses o and stats as they were given: they are operands like any other.
void backward_row(const AttentionProblem& p, std::int64_t b, std::int64_t h, std::int64_t i,
                  ScoreRow& row, std::vector<Array>& results) {
  using Slot = ir::AttentionBackward;
  const std::size_t at = p.query(b, h, i);
  const double lse = p.operand(Slot::stats)->value[at];
  if (lse == -kInfinity) return;  // saw nothing
  p.scores(b, h, i, row);
  const std::size_t wide = p.value_depth();
  const std::size_t deep = p.depth();
  const double* dout = p.operand(Slot::dout)->value.data() + at * wide;
  const double* query = p.q().value.data() + at * deep;
  const double d = dot(dout, p.operand(Slot::o)->value.data() + at * wide, wide);
  if (p.sink() != nullptr && row.columns.begin < row.columns.end) {
    add_to(results[Slot::dsink], static_cast<std::size_t>(h),
           -std::exp(p.extra_logit(h) - lse) * d);
  }
  for (std::int64_t j = row.columns.begin; j < row.columns.end; ++j) {
    const auto column = static_cast<std::size_t>(j);
    if (row.visible[column] == 0) continue;
    const double probability = std::exp(row.score[column] - lse);
    const double factor = row.dropout[column];
    const std::size_t value = p.value(b, h, j) * wide;
    const std::size_t key = p.key(b, h, j) * deep;
    add_row(results[Slot::dv], value, factor * probability, dout, wide);
    const double dp = factor * dot(dout, p.v().value.data() + value, wide);
    const double dx = probability * (dp - d);  // gradient of the score after the cap
    const double ds = dx * p.cap_slope(row.scaled[column]) * p.scale();
    if (p.bias() != nullptr) {
      add_to(results[Slot::dbias], p.bias_at(b, h, i, j), p.rule().pre_scale_bias ? ds : dx);
    }
    add_row(results[Slot::dq], at * deep, ds, p.k().value.data() + key, deep);
    add_row(results[Slot::dk], key, ds, query, deep);
  }
}

// Marks what is there of a result.
void limit(Array& result, const AttentionParts& parts, Dims (AttentionParts::*part)(Dims) const) {
  if (result.size() == 0) return;
  Dims there = (parts.*part)(result.shape);
  if (there != result.shape) result.there = std::move(there);
}

}  // namespace

void attention_forward(const ir::Graph& graph, const ir::Node& node, const Operands& operands,
                       std::vector<Array>& results) {
  using Slot = ir::Attention;
  const AttentionProblem p(graph, node, operands);
  for (const auto slot : {Slot::stats, Slot::max_logit}) {
    std::fill(results[slot].value.begin(), results[slot].value.end(), -kInfinity);
  }
  ScoreRow row(p.geometry().columns);
  for (std::int64_t b = 0; b < p.sequences(); ++b) {
    for (std::int64_t h = 0; h < p.heads(); ++h) {
      for (std::int64_t i = 0; i < p.sequence(b).q_length; ++i) {
        forward_row(p, b, h, i, row, results);
      }
    }
  }
  dropped(p, results[Slot::dropped]);
  limit(results[Slot::o], p.parts(), &AttentionParts::query);
  limit(results[Slot::stats], p.parts(), &AttentionParts::query);
  limit(results[Slot::max_logit], p.parts(), &AttentionParts::query);
  limit(results[Slot::dropped], p.parts(), &AttentionParts::batch);
}

void attention_backward(const ir::Graph& graph, const ir::Node& node, const Operands& operands,
                        std::vector<Array>& results) {
  using Slot = ir::AttentionBackward;
  const AttentionProblem p(graph, node, operands);
  ScoreRow row(p.geometry().columns);
  for (std::int64_t b = 0; b < p.sequences(); ++b) {
    for (std::int64_t h = 0; h < p.heads(); ++h) {
      for (std::int64_t i = 0; i < p.sequence(b).q_length; ++i) {
        backward_row(p, b, h, i, row, results);
      }
    }
  }
  limit(results[Slot::dq], p.parts(), &AttentionParts::query);
  limit(results[Slot::dk], p.parts(), &AttentionParts::key);
  limit(results[Slot::dv], p.parts(), &AttentionParts::key);
  limit(results[Slot::dbias], p.parts(), &AttentionParts::broadcast);
}

}  // namespace lawson::reference
