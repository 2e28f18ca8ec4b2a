// Attention as written in ops.h, one row at a time.
#pragma once

#include <span>
#include <vector>

#include "base/status.h"
#include "engine/reference/evaluate.h"
#include "ir/attention.h"

namespace lawson::reference {

// A half-open interval of columns.
struct Span {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  bool holds(std::int64_t j) const { return begin <= j && j < end; }
};

struct Sequence {
  std::int64_t q_length = 0;
  std::int64_t kv_length = 0;
  std::int64_t q_first = 0;  // of a ragged side: where its tokens begin along s
  std::int64_t kv_first = 0;
};

// What is there of the tensors of an attention: they end where the sequences do, in memory too.
// Each function gives the leading box of a tensor's shape.
struct AttentionParts {
  ir::AttentionGeometry geometry;
  std::int64_t sequences = 0;  // of geometry.batch
  std::int64_t end_q = 0;      // of a ragged side: the end of the last sequence's memory along s
  std::int64_t end_kv = 0;

  Dims query(Dims shape) const;      // q, o, dout, stats and alike
  Dims key(Dims shape) const;        // k, v and their gradients
  Dims batch(Dims shape) const;      // [b, ...]
  Dims broadcast(Dims shape) const;  // [b or 1, ...]
  Dims offsets(Dims shape) const;    // [b + 1, ...]
};

// What one row of scores is made of, at the index of its column and only inside `columns`.
struct ScoreRow {
  Span columns;
  std::vector<char> visible;
  std::vector<double> scaled;   // scale * (q.k + pre-scale bias), before the cap
  std::vector<double> score;    // what softmax sees; -infinity where not visible
  std::vector<double> dropout;  // the weight's factor: 0 or 1 / (1 - p); 1 without dropout

  explicit ScoreRow(std::int64_t width);
};

// The operands of forward or backward and what they mean, shared by values and error bounds.
// Sequence b, head h, query i and key j are counted within their sequence.
class AttentionProblem {
 public:
  AttentionProblem(const ir::Graph& graph, const ir::Node& node, const Operands& operands);

  // Is the run-time data (lengths, offsets, pages) what ops.h demands? Nothing of what follows may
  // be used otherwise.
  Status check() const;

  const ir::AttentionRule& rule() const { return rule_; }
  const ir::AttentionGeometry& geometry() const { return parts_.geometry; }
  const Array* operand(int slot) const { return in_[static_cast<std::size_t>(slot)]; }
  const Array& q() const { return *operand(ir::AttentionSlots::q); }
  const Array& k() const { return *operand(ir::AttentionSlots::k); }
  const Array& v() const { return *operand(ir::AttentionSlots::v); }
  const Array* bias() const { return operand(ir::AttentionSlots::bias); }
  const Array* sink() const { return operand(ir::AttentionSlots::sink); }
  const AttentionParts& parts() const { return parts_; }
  // The sequences that are there.
  std::int64_t sequences() const { return parts_.sequences; }
  const Sequence& sequence(std::int64_t b) const { return sequences_[static_cast<std::size_t>(b)]; }

  std::int64_t heads() const { return geometry().heads; }
  std::size_t depth() const { return static_cast<std::size_t>(geometry().depth); }
  std::size_t value_depth() const { return static_cast<std::size_t>(geometry().value_depth); }

  // Numbers of the rows of q (and of o, dout, stats), k and v, counted over [b,h,s].
  std::size_t query(std::int64_t b, std::int64_t h, std::int64_t i) const;
  std::size_t key(std::int64_t b, std::int64_t h, std::int64_t j) const;
  std::size_t value(std::int64_t b, std::int64_t h, std::int64_t j) const;
  // Position of the bias element of a score.
  std::size_t bias_at(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    return position(bias_strides_, b, h, i, j);
  }
  std::size_t mask_at(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    return position(mask_strides_, b, h, i, j);
  }

  // The row's position on the column axis, i' of ops.h.
  std::int64_t aligned_row(std::int64_t b, std::int64_t i) const;
  // The columns that lengths, window and causality leave; of these the mask may hide some.
  Span columns(std::int64_t b, std::int64_t i) const;
  bool visible(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const;

  // 1 when there is no scale operand.
  double scale() const { return scale_; }
  double scale_error() const;
  // The float mask, which is added like a bias; nullptr: none.
  const Array* additive_mask() const;
  double alibi_term(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const;
  double capped(double scaled) const;
  double cap_slope(double scaled) const;  // d capped / d scaled
  // From scale * (q.k + pre-scale bias) to what softmax sees of a visible column.
  double score(double scaled, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const;
  // The logit that joins the denominator without a value: absent for vanilla (-infinity).
  double extra_logit(std::int64_t h) const;

  // Which weights of [b,h,i,from...] dropout keeps.
  void kept(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t from,
            std::span<std::uint8_t> result) const;
  // Columns, visibility and dropout of a row; the same with its scores.
  void begin_row(std::int64_t b, std::int64_t h, std::int64_t i, ScoreRow& row) const;
  void scores(std::int64_t b, std::int64_t h, std::int64_t i, ScoreRow& row) const;

 private:
  std::size_t position(const Dims& strides, std::int64_t b, std::int64_t h, std::int64_t i,
                       std::int64_t j) const {
    return static_cast<std::size_t>(strides[0] * b + strides[1] * h + strides[2] * i +
                                    strides[3] * j);
  }
  std::int64_t kv_head(std::int64_t h) const {
    return h / (geometry().heads / geometry().kv_heads);
  }
  std::int64_t page(int table, std::int64_t b, std::int64_t number) const;
  double slope(std::int64_t h) const;
  Status check_offsets(int valid, int padded, std::int64_t tokens, std::int64_t longest) const;
  Status check_pages(int table, std::int64_t page_size, std::int64_t pages) const;

  const ir::AttentionRule& rule_;
  const Operands& in_;
  AttentionParts parts_;
  std::vector<Sequence> sequences_;
  Dims bias_strides_;  // 0 where it broadcasts
  Dims mask_strides_;
  double scale_ = 1;
};

// sum a b over n elements.
double dot(const double* a, const double* b, std::size_t n);

// What is there of an input of the graph, for what any of its users reads. `loaded`: the graph's
// tensors so far, with `sequences` and cumulative lengths wherever they are operands.
Dims input_part(const ir::Graph& graph, ir::TensorId id, const std::vector<Array>& loaded);
// In which order inputs are to be loaded for that: 0 first.
int load_order(const ir::Graph& graph, ir::TensorId id);

// Absent results (empty shape and no elements) are left alone.
void attention_forward(const ir::Graph& graph, const ir::Node& node, const Operands& operands,
                       std::vector<Array>& results);
void attention_backward(const ir::Graph& graph, const ir::Node& node, const Operands& operands,
                        std::vector<Array>& results);

}  // namespace lawson::reference
