// Attention as written in ops.h, one row at a time, nothing skipped.
#pragma once

#include <array>
#include <vector>

#include "engine/reference/evaluate.h"

namespace lawson::reference {

// The operands of forward or backward and what they mean, shared by values and error bounds.
struct AttentionProblem {
  const ir::AttentionRule& rule;
  const Array& q;
  const Array& k;
  const Array& v;
  const Array* scale;
  const Array* bias;
  const Array* seqlen_q;
  const Array* seqlen_kv;
  const Array* sink;
  std::array<std::size_t, 4> bias_strides{};  // 0 where the bias broadcasts

  std::size_t batch() const { return static_cast<std::size_t>(q.shape[0]); }
  std::size_t heads() const { return static_cast<std::size_t>(q.shape[1]); }
  std::size_t kv_heads() const { return static_cast<std::size_t>(k.shape[1]); }
  std::size_t rows() const { return static_cast<std::size_t>(q.shape[2]); }
  std::size_t columns() const { return static_cast<std::size_t>(k.shape[2]); }
  std::size_t depth() const { return static_cast<std::size_t>(q.shape[3]); }
  std::size_t value_depth() const { return static_cast<std::size_t>(v.shape[3]); }

  std::size_t kv_head(std::size_t h) const { return h / (heads() / kv_heads()); }
  // Positions of the first element of a row.
  std::size_t q_row(std::size_t b, std::size_t h, std::size_t i) const {
    return ((b * heads() + h) * rows() + i) * depth();
  }
  std::size_t k_row(std::size_t b, std::size_t h, std::size_t j) const {
    return ((b * kv_heads() + kv_head(h)) * columns() + j) * depth();
  }
  std::size_t v_row(std::size_t b, std::size_t h, std::size_t j) const {
    return ((b * kv_heads() + kv_head(h)) * columns() + j) * value_depth();
  }
  std::size_t o_row(std::size_t b, std::size_t h, std::size_t i) const {
    return ((b * heads() + h) * rows() + i) * value_depth();
  }
  std::size_t stats_at(std::size_t b, std::size_t h, std::size_t i) const {
    return (b * heads() + h) * rows() + i;
  }

  // 1 when there is no scale operand.
  double scale_value() const { return scale != nullptr ? scale->value[0] : 1.0; }
  // Lengths of sequence b: its own with padding, else the tensors'.
  std::int64_t q_length(std::size_t b) const;
  std::int64_t kv_length(std::size_t b) const;
  bool row_is_valid(std::size_t b, std::size_t i) const {
    return static_cast<std::int64_t>(i) < q_length(b);
  }
  // The row's position on the column axis, i' of ops.h.
  std::int64_t aligned_row(std::size_t b, std::size_t i) const;
  bool visible(std::size_t b, std::size_t i, std::size_t j) const;

  // Position of the bias element of a score, and of any [b,h,sq,skv] broadcast like it.
  std::size_t bias_at(std::size_t b, std::size_t h, std::size_t i, std::size_t j) const {
    return bias_strides[0] * b + bias_strides[1] * h + bias_strides[2] * i + bias_strides[3] * j;
  }
  // Press et al. 2022: powers of 2^(-8/n) for n = 2^k heads; other head counts take the slopes of
  // the power of two below, then every second one of twice that power.
  double slope(std::size_t h) const;
  double alibi_term(std::size_t b, std::size_t h, std::size_t i, std::size_t j) const;

  double dot(std::size_t b, std::size_t h, std::size_t i, std::size_t j) const;
  double capped(double scaled) const;
  // d capped / d scaled.
  double cap_slope(double scaled) const;
  // The visible score of (i, j): what softmax sees.
  double score(std::size_t b, std::size_t h, std::size_t i, std::size_t j) const;
  // The logit that joins the denominator without a value: absent for vanilla (-infinity).
  double extra_logit(std::size_t h) const;
};

AttentionProblem problem_of(const ir::Attention& op, const Operands& operands);
AttentionProblem problem_of(const ir::AttentionBackward& op, const Operands& operands);

// Absent results (empty shape and no elements) are left alone.
void attention_forward(const ir::Attention& op, const Operands& operands,
                       std::vector<Array>& results);
void attention_backward(const ir::AttentionBackward& op, const Operands& operands,
                        std::vector<Array>& results);

}  // namespace lawson::reference
