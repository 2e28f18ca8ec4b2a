// What forward and backward of attention share: the problem's sizes, which columns a row sees, how
// operands are packed, and what turns a tile of products into scores.
//
// Everything works on square tiles of kernels.tile query rows by as many key columns. A row sees
// one interval of columns (causal, window and padding are intervals), so a mask is two numbers per
// row, and whole tiles outside of it are skipped. What a mask hides is never read into a sum:
// masked probabilities are zeros written by us, padding rows are packed as zeros, and where an
// operand tile holds infinities or NaNs, sums run over the visible elements alone.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "engine/cpu/convert.h"
#include "engine/cpu/pool.h"
#include "engine/cpu/program.h"

namespace lawson::cpu {

// Hands out pieces of one allocation. With a null base it only counts.
class Carver {
 public:
  explicit Carver(std::byte* base) : base_{base} {}

  template <typename T>
  T* take(std::int64_t count) {
    T* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += align_up(static_cast<std::size_t>(count) * sizeof(T));
    return piece;
  }
  std::size_t used() const { return used_; }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};

// A half-open interval of columns.
struct Span {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  bool empty() const { return begin >= end; }
};

inline Span intersect(Span a, Span b) {
  return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
}

// Sizes and rule of one attention node.
struct AttentionSizes {
  ir::AttentionRule rule;
  std::int64_t batch = 0;
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t depth = 0;
  std::int64_t value_depth = 0;
  std::int64_t tile = 0;
  std::int64_t depth_padded = 0;  // to whole panels of a right operand
  std::int64_t value_depth_padded = 0;

  std::int64_t row_tiles() const { return (rows + tile - 1) / tile; }
  std::int64_t column_tiles() const { return (columns + tile - 1) / tile; }
  std::int64_t group() const { return heads / kv_heads; }
};

// The operands that both directions have.
struct AttentionSlots {
  int q, k, v, scale, bias, seqlen_q, seqlen_kv, sink;
};

template <typename T>
class AttentionBase {
 public:
  AttentionBase(const Kernels& kernels, const ir::Graph& graph, const AttentionStep& step,
                const std::vector<std::byte*>& roots, const ir::AttentionRule& rule,
                const AttentionSlots& slots);

  const AttentionSizes& sizes() const { return sizes_; }

 protected:
  static constexpr T kInfinity = std::numeric_limits<T>::infinity();

  const MathKernels<T>& math() const { return kernels_.math<T>(); }
  const ProductKernels<T>& products() const { return kernels_.product<T>(); }

  const AttentionStep::Slot& input(int slot) const {
    return step_.inputs[static_cast<std::size_t>(slot)];
  }
  const AttentionStep::Slot& output(int slot) const {
    return step_.outputs[static_cast<std::size_t>(slot)];
  }

  // Row [b, h, s, :] of a rank-4 operand or result.
  void load_row(const Location& from, std::int64_t b, std::int64_t h, std::int64_t s,
                std::int64_t count, T* out) const;
  void store_row(const Location& to, std::int64_t b, std::int64_t h, std::int64_t s,
                 std::int64_t count, const T* values) const;

  std::int64_t q_length(std::int64_t b) const { return length(slots_.seqlen_q, b, sizes_.rows); }
  std::int64_t kv_length(std::int64_t b) const {
    return length(slots_.seqlen_kv, b, sizes_.columns);
  }
  // The row's position on the column axis, i' of ops.h.
  std::int64_t aligned_row(std::int64_t b, std::int64_t i) const;
  Span visible(std::int64_t b, std::int64_t i) const;
  // The same of `count` rows from `first` on; returns the columns that some row of them sees.
  Span visible(std::int64_t b, std::int64_t first, std::int64_t count, Span* spans) const;

  // The logit that joins the denominator without a value; -infinity: none.
  T extra_logit(std::int64_t h) const;
  T alibi_slope(std::int64_t h) const;

  // Turns products q.k of columns `span` of row i, at x[0], into scores. `cap_slope`, if not null,
  // gets d score / d (scale q.k).
  void score_row(std::int64_t b, std::int64_t h, std::int64_t i, Span span, T* x, T* buffer,
                 T* cap_slope) const;

  // Rows [first, first + count) of a tile, element c of row r to panel[c * width + r]: the left
  // operand (width mr) or the transposed right operand (width nr) of a product over `depth`.
  // Rows from `count` to the tile's end become zeros. `lines` holds width * depth elements.
  void pack_lines(const Location& from, std::int64_t b, std::int64_t h, std::int64_t first,
                  std::int64_t count, std::int64_t depth, std::int64_t width, T* lines,
                  T* packed) const;
  // The same rows as a right operand whose k are the rows: panels of nr columns. Returns whether
  // every element is finite. `line` holds the padded depth.
  bool pack_rows(const Location& from, std::int64_t b, std::int64_t h, std::int64_t first,
                 std::int64_t count, std::int64_t depth, std::int64_t depth_padded, T* line,
                 T* packed) const;

  // c[rows, n] (+)= left[rows, k] right[k, n], and c += tile * right, c += tile^T * right.
  void multiply(AForm form, const T* left, std::int64_t left_panel, const T* right,
                std::int64_t right_panel, std::int64_t m, std::int64_t n, std::int64_t k, T* c,
                std::int64_t ldc, bool accumulate) const;

  // c[row, :] += sum of tile[row, j] right[j, :] over the columns that the row sees of the tile
  // that begins at column `start`; transposed: c[j, :] += tile[row, j] right[row, :]. For right
  // operands that are not finite.
  void multiply_visible(const T* tile, const Span* spans, std::int64_t rows, std::int64_t start,
                        bool transposed, const T* right, std::int64_t n, T* c) const;

  const Kernels& kernels_;
  const AttentionStep& step_;
  const std::vector<std::byte*>& roots_;
  AttentionSlots slots_;
  AttentionSizes sizes_;
  std::int64_t mr_;
  std::int64_t nr_;
  double scale_ = 1;

 private:
  std::byte* data(const Location& location) const {
    return roots_[static_cast<std::size_t>(location.root)];
  }
  double scalar(const Location& location, std::int64_t offset) const {
    return load_element(data(location), location.dtype, location.offset + offset);
  }
  std::int64_t length(int slot, std::int64_t b, std::int64_t full) const;
};

inline bool computes_in_f64(const ir::Graph& graph, const AttentionStep& step) {
  const ir::Node& node = graph.nodes[static_cast<std::size_t>(step.node)];
  return graph.tensor(node.inputs[0]).dtype == DType::f64;  // q
}

std::size_t attention_forward_workspace(const Kernels& kernels, const ir::Graph& graph,
                                        const AttentionStep& step);
std::size_t attention_backward_workspace(const Kernels& kernels, const ir::Graph& graph,
                                         const AttentionStep& step);
Status run_attention_forward(const Kernels& kernels, const ir::Graph& graph,
                             const AttentionStep& step, const std::vector<std::byte*>& roots,
                             std::byte* workspace);
Status run_attention_backward(const Kernels& kernels, const ir::Graph& graph,
                              const AttentionStep& step, const std::vector<std::byte*>& roots,
                              std::byte* workspace);

}  // namespace lawson::cpu
