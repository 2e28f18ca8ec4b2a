// What forward and backward of attention share: how operands are packed, what turns a tile of
// products into scores, and the dropout mask.
//
// Everything works on square tiles of kernels.tile query rows by as many key columns. Tiles outside
// of the intervals that rows see are skipped. What a mask hides is never read into a sum: masked
// probabilities are zeros written by us, padding rows are packed as zeros, and where an operand
// tile holds infinities or NaNs, sums run over the visible elements alone.
#pragma once

#include <cmath>
#include <limits>
#include <memory>
#include <optional>

#include "engine/cpu/attention_sequences.h"
#include "engine/cpu/convert.h"
#include "engine/cpu/pool.h"

namespace lawson::cpu {

// Hands out pieces of one allocation. With a null base it only counts.
class Carver {
 public:
  explicit Carver(std::byte* base) : base_{base} {}

  template <typename T>
  T* take(std::int64_t rows, std::int64_t width = 1) {
    const std::int64_t count = memory_product(rows, width);
    T* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += align_up(static_cast<std::size_t>(count) * sizeof(T));
    return piece;
  }
  std::size_t used() const { return used_; }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};

struct AttentionSizes : ir::AttentionGeometry {
  std::int64_t tile = 0;
  std::int64_t depth_padded = 0;  // to whole panels of a right operand
  std::int64_t value_depth_padded = 0;

  std::int64_t group() const { return heads / kv_heads; }
};

// Forward or backward of one node, for one execution.
class AttentionPass {
 public:
  virtual ~AttentionPass() = default;
  virtual std::size_t workspace() const = 0;
  virtual Status run() = 0;
};

// Null roots and workspace: only to be asked for its workspace.
std::unique_ptr<AttentionPass> attention_forward(const Kernels& kernels, const ir::Graph& graph,
                                                 const AttentionStep& step,
                                                 const std::vector<std::byte*>& roots,
                                                 std::byte* workspace);
std::unique_ptr<AttentionPass> attention_backward(const Kernels& kernels, const ir::Graph& graph,
                                                  const AttentionStep& step,
                                                  const std::vector<std::byte*>& roots,
                                                  std::byte* workspace);

template <typename T>
class AttentionBase : public AttentionPass {
 public:
  AttentionBase(const Kernels& kernels, const ir::Graph& graph, const AttentionStep& step,
                const std::vector<std::byte*>& roots);

 protected:
  using Slots = ir::AttentionSlots;
  static constexpr T kInfinity = std::numeric_limits<T>::infinity();

  const MathKernels<T>& math() const { return kernels_.math<T>(); }

  const AttentionStep::Slot& input(int slot) const {
    return step_.inputs[static_cast<std::size_t>(slot)];
  }
  const AttentionStep::Slot& output(int slot) const {
    return step_.outputs[static_cast<std::size_t>(slot)];
  }
  const Side& queries() const { return sequences_.queries(); }
  const Side& keys() const { return sequences_.keys(); }

  // What has to be known before rows can be found; the first thing in run().
  Status prepare();

  // Row [b, h, s, :] of an operand or result.
  void load_row(const Rows& from, std::int64_t b, std::int64_t h, std::int64_t s,
                std::int64_t count, T* out) const {
    load_elements(kernels_, from.data, from.dtype, from.at(b, h, s), from.strides[3], count, out);
  }
  void store_row(const Rows& to, std::int64_t b, std::int64_t h, std::int64_t s, std::int64_t count,
                 const T* values) const {
    store_elements(kernels_, to.data, to.dtype, to.at(b, h, s), to.strides[3], count, values);
  }
  Rows query_rows(const AttentionStep::Slot& slot) const {
    return sequences_.query_rows(slot.at, roots_);
  }
  Rows key_rows(const AttentionStep::Slot& slot) const {
    return sequences_.key_rows(slot.at, roots_);
  }
  // Zeros in the rows of a ragged result that lie between sequences.
  Status clear_gaps(const Side& side, const Rows& rows, std::int64_t heads,
                    std::int64_t count) const;

  // The logit that joins the denominator without a value; -infinity: none.
  T extra_logit(std::int64_t h) const;

  // Turns products q.k of columns `span` of row i, at x[0], into scores; -infinity where an
  // explicit mask hides. `cap_slope`, if not null, gets d score / d (scale q.k).
  void score_row(std::int64_t b, std::int64_t h, std::int64_t i, Span span, T* x, T* buffer,
                 T* cap_slope) const;
  bool has_keep_mask() const { return keep_.has_value(); }
  // Sets x, at columns `span` of row i, to `value` where an explicit mask hides.
  void hide(std::int64_t b, std::int64_t h, std::int64_t i, Span span, T* x, T value) const;

  bool drops() const { return rule_.dropout > 0; }
  T kept_scale() const { return static_cast<T>(1 / (1 - rule_.dropout)); }
  // 1 where dropout keeps the weights of columns `span` of row i, else 0.
  void fill_kept(std::int64_t b, std::int64_t h, std::int64_t i, Span span,
                 std::uint8_t* kept) const;

  // Rows [first, first + count) of a tile, element c of row r to panel[c * width + r]: the left
  // operand (width mr) or the transposed right operand (width nr) of a product over `depth`.
  // Rows from `count` to the tile's end become zeros. `lines` holds width * depth elements.
  void pack_lines(const Rows& from, std::int64_t b, std::int64_t h, std::int64_t first,
                  std::int64_t count, std::int64_t depth, std::int64_t width, T* lines,
                  T* packed) const;
  // The same rows as a right operand whose k are the rows: panels of nr columns. Returns whether
  // every element is finite. `line` holds the padded depth.
  bool pack_rows(const Rows& from, std::int64_t b, std::int64_t h, std::int64_t first,
                 std::int64_t count, std::int64_t depth, std::int64_t depth_padded, T* line,
                 T* packed) const;

  // c[rows, n] (+)= left[rows, k] right[k, n], and c += tile * right, c += tile^T * right.
  void multiply(AForm form, const T* left, std::int64_t left_panel, const T* right,
                std::int64_t right_panel, std::int64_t m, std::int64_t n, std::int64_t k, T* c,
                std::int64_t ldc, bool accumulate) const;

  // A tile of scores: `rows` rows from `first` on, columns from `start` on.
  struct TileAt {
    std::int64_t b, h, first, rows, start;
  };
  // c[row, :] += sum of tile[row, j] right[j, :] over the columns j that the row sees; transposed:
  // c[j, :] += tile[row, j] right[row, :]. For right operands that are not finite.
  void multiply_visible(const TileAt& at, const T* tile, const Span* spans, bool transposed,
                        const T* right, std::int64_t n, T* c) const;

  const Kernels& kernels_;
  const AttentionStep& step_;
  const std::vector<std::byte*>& roots_;
  const ir::AttentionRule& rule_;
  AttentionSizes sizes_;
  Sequences sequences_;
  std::int64_t mr_;
  std::int64_t nr_;
  double scale_ = 1;

 private:
  double scalar(const Location& location, std::int64_t offset) const {
    return load_element(roots_[static_cast<std::size_t>(location.root)], location.dtype,
                        location.offset + offset);
  }
  // Operands of the scores' shape; strides of axes that broadcast are 0.
  std::optional<Rows> score_rows(int slot) const;
  void add_rows(const Rows& rows, std::int64_t b, std::int64_t h, std::int64_t i, Span span, T* x,
                T* buffer) const;
  T slope(std::int64_t h) const;
  const std::uint8_t* bytes_at(const Rows& rows, std::int64_t b, std::int64_t h, std::int64_t i,
                               std::int64_t j) const;

  std::optional<Rows> bias_;
  std::optional<Rows> added_mask_;
  std::optional<Rows> keep_;
  std::optional<Rows> given_dropout_;
  std::uint64_t seed_ = 0;
  std::uint64_t offset_ = 0;
};

template <template <typename> class Pass>
std::unique_ptr<AttentionPass> make_pass(const Kernels& kernels, const ir::Graph& graph,
                                         const AttentionStep& step,
                                         const std::vector<std::byte*>& roots,
                                         std::byte* workspace) {
  const ir::Node& node = graph.nodes[static_cast<std::size_t>(step.node)];
  if (graph.tensor(node.inputs[ir::AttentionSlots::q]).dtype == DType::f64) {
    return std::make_unique<Pass<double>>(kernels, graph, step, roots, workspace);
  }
  return std::make_unique<Pass<float>>(kernels, graph, step, roots, workspace);
}

}  // namespace lawson::cpu
