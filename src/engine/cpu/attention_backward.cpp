// The gradients of attention by recomputation (Dao et al. 2022, algorithm 4): nothing of the size
// of the scores is stored. Operands are packed once into workspace; dQ is then summed by tiles of
// query rows, dK and dV by tiles of key rows, dbias by tiles of the bias: every sum has one owner
// and one order, so the result does not depend on the threads. Each pass computes its tiles anew.
#include <array>

#include "engine/cpu/attention.h"

namespace lawson::cpu {
namespace {

using Slot = ir::AttentionBackward;
constexpr AttentionSlots kSlots{Slot::q,    Slot::k,        Slot::v,         Slot::scale,
                                Slot::bias, Slot::seqlen_q, Slot::seqlen_kv, Slot::sink};

template <typename T>
class AttentionBackward : AttentionBase<T> {
  using Base = AttentionBase<T>;
  using Base::input;
  using Base::kInfinity;
  using Base::math;
  using Base::mr_;
  using Base::nr_;
  using Base::output;
  using Base::sizes_;

 public:
  AttentionBackward(const Kernels& kernels, const ir::Graph& graph, const AttentionStep& step,
                    const std::vector<std::byte*>& roots, std::byte* workspace)
      : Base{kernels,
             graph,
             step,
             roots,
             std::get<ir::AttentionBackward>(graph.nodes[static_cast<std::size_t>(step.node)].op)
                 .rule,
             kSlots},
        bias_shape_{output(Slot::dbias).present
                        ? graph
                              .tensor(graph.nodes[static_cast<std::size_t>(step.node)]
                                          .inputs[static_cast<std::size_t>(Slot::bias)])
                              .shape
                        : Dims{}} {
    Carver carver{workspace};
    const std::int64_t columns = sizes_.batch * sizes_.kv_heads * sizes_.column_tiles();
    const std::int64_t rows = sizes_.batch * sizes_.heads * sizes_.row_tiles();
    const std::int64_t tile = sizes_.tile;
    keys_across_ = carver.template take<T>(columns * tile * sizes_.depth);
    keys_ = carver.template take<T>(columns * tile * sizes_.depth_padded);
    values_ = carver.template take<T>(columns * tile * sizes_.value_depth);
    queries_left_ = carver.template take<T>(rows * tile * sizes_.depth);
    queries_ = carver.template take<T>(rows * tile * sizes_.depth_padded);
    douts_left_ = carver.template take<T>(rows * tile * sizes_.value_depth);
    douts_ = carver.template take<T>(rows * tile * sizes_.value_depth_padded);
    delta_ = carver.template take<T>(rows * tile);
    log_sum_ = carver.template take<T>(rows * tile);
    keys_finite_ = carver.template take<std::uint8_t>(columns);
    rows_finite_ = carver.template take<std::uint8_t>(rows);
    workspace_ = carver.used();
  }

  std::size_t workspace() const { return workspace_; }

  Status run() {
    LAWSON_CHECK(for_tiles(sizes_.kv_heads, sizes_.column_tiles(), pack_scratch(),
                           &AttentionBackward::pack_columns));
    LAWSON_CHECK(
        for_tiles(sizes_.heads, sizes_.row_tiles(), pack_scratch(), &AttentionBackward::pack_rows));
    const std::size_t block = Block{*this, nullptr}.used;
    if (output(Slot::dq).present) {
      LAWSON_CHECK(
          for_tiles(sizes_.heads, sizes_.row_tiles(), block, &AttentionBackward::query_gradient));
    }
    if (output(Slot::dk).present || output(Slot::dv).present) {
      LAWSON_CHECK(for_tiles(sizes_.kv_heads, sizes_.column_tiles(), block,
                             &AttentionBackward::key_gradient));
    }
    if (output(Slot::dbias).present) LAWSON_CHECK(bias_gradient(block));
    if (output(Slot::dsink).present) LAWSON_CHECK(sink_gradient());
    return {};
  }

 private:
  // Scratch memory of one tile of scores and of the sums of its owner.
  struct Block {
    Block(const AttentionBackward& owner, std::byte* scratch) {
      const AttentionSizes& sizes = owner.sizes_;
      Carver carver{scratch};
      probabilities = carver.template take<T>(sizes.tile * sizes.tile);
      gradients = carver.template take<T>(sizes.tile * sizes.tile);
      key_sums = carver.template take<T>(sizes.tile * sizes.depth_padded);
      value_sums = carver.template take<T>(sizes.tile * sizes.value_depth_padded);
      bias_sums = carver.template take<T>(sizes.tile * sizes.tile);
      buffer = carver.template take<T>(sizes.tile);
      cap_slope = carver.template take<T>(sizes.tile);
      visible = carver.template take<Span>(sizes.tile);
      used = carver.used();
    }
    T *probabilities, *gradients, *key_sums, *value_sums, *bias_sums, *buffer, *cap_slope;
    Span* visible;
    std::size_t used;
  };

  // What the gradient tile holds: of the scores (for the bias), or of the products q.k.
  enum class Of : std::uint8_t { scores, products };

  // Calls member(b, head, tile, scratch) for all of them.
  template <typename Member>
  Status for_tiles(std::int64_t heads, std::int64_t tiles, std::size_t scratch_bytes,
                   Member member) {
    return parallel_for(sizes_.batch * heads * tiles, scratch_bytes,
                        [&](std::int64_t task, std::byte* scratch) {
                          const std::int64_t matrix = task / tiles;
                          (this->*member)(matrix / heads, matrix % heads, task % tiles, scratch);
                        });
  }

  std::size_t pack_scratch() const {
    const std::int64_t depth = std::max(sizes_.depth_padded, sizes_.value_depth_padded);
    return static_cast<std::size_t>(std::max(nr_, mr_) * depth * 2) * sizeof(T);
  }

  std::int64_t column_tile(std::int64_t b, std::int64_t kv_head, std::int64_t tile) const {
    return (b * sizes_.kv_heads + kv_head) * sizes_.column_tiles() + tile;
  }
  std::int64_t row_tile(std::int64_t b, std::int64_t h, std::int64_t tile) const {
    return (b * sizes_.heads + h) * sizes_.row_tiles() + tile;
  }

  // ---- packing: each operand as the products need it; padding as zeros ----

  void pack_columns(std::int64_t b, std::int64_t kv_head, std::int64_t tile, std::byte* scratch) {
    const std::int64_t first = tile * sizes_.tile;
    const std::int64_t count = std::clamp<std::int64_t>(Base::kv_length(b) - first, 0, sizes_.tile);
    if (count == 0) return;  // never read
    T* line = reinterpret_cast<T*>(scratch);
    const std::int64_t at = column_tile(b, kv_head, tile);
    const Location& k = input(Slot::k).at;
    Base::pack_lines(k, b, kv_head, first, count, sizes_.depth, nr_, line,
                     keys_across_ + at * sizes_.tile * sizes_.depth);
    keys_finite_[at] =
        Base::pack_rows(k, b, kv_head, first, count, sizes_.depth, sizes_.depth_padded, line,
                        keys_ + at * sizes_.tile * sizes_.depth_padded)
            ? 1
            : 0;
    Base::pack_lines(input(Slot::v).at, b, kv_head, first, count, sizes_.value_depth, nr_, line,
                     values_ + at * sizes_.tile * sizes_.value_depth);
  }

  void pack_rows(std::int64_t b, std::int64_t h, std::int64_t tile, std::byte* scratch) {
    const std::int64_t first = tile * sizes_.tile;
    const std::int64_t count = std::clamp<std::int64_t>(Base::q_length(b) - first, 0, sizes_.tile);
    if (count == 0) return;  // never read
    T* line = reinterpret_cast<T*>(scratch);
    const std::int64_t at = row_tile(b, h, tile);
    const Location& q = input(Slot::q).at;
    const Location& dout = input(Slot::dout).at;
    Base::pack_lines(q, b, h, first, count, sizes_.depth, mr_, line,
                     queries_left_ + at * sizes_.tile * sizes_.depth);
    const bool finite = Base::pack_rows(q, b, h, first, count, sizes_.depth, sizes_.depth_padded,
                                        line, queries_ + at * sizes_.tile * sizes_.depth_padded);
    Base::pack_lines(dout, b, h, first, count, sizes_.value_depth, mr_, line,
                     douts_left_ + at * sizes_.tile * sizes_.value_depth);
    const bool dout_finite =
        Base::pack_rows(dout, b, h, first, count, sizes_.value_depth, sizes_.value_depth_padded,
                        line, douts_ + at * sizes_.tile * sizes_.value_depth_padded);
    rows_finite_[at] = finite && dout_finite ? 1 : 0;
    T* other = line + sizes_.value_depth_padded;
    for (std::int64_t r = 0; r < count; ++r) {
      Base::load_row(input(Slot::o).at, b, h, first + r, sizes_.value_depth, line);
      Base::load_row(dout, b, h, first + r, sizes_.value_depth, other);
      delta_[at * sizes_.tile + r] = math().dot(line, other, sizes_.value_depth);
      Base::load_row(input(Slot::stats).at, b, h, first + r, 1, log_sum_ + at * sizes_.tile + r);
    }
  }

  // ---- one tile of scores ----

  // The columns that the rows of a tile see; rows whose log-sum-exp is -infinity saw nothing.
  Span visible(std::int64_t b, std::int64_t h, std::int64_t tile, Span* spans) const {
    const std::int64_t first = tile * sizes_.tile;
    const std::int64_t count = row_count(tile);
    const Span all = Base::visible(b, first, count, spans);
    for (std::int64_t r = 0; r < count; ++r) {
      if (!spans[r].empty() && log_sum_[row_tile(b, h, tile) * sizes_.tile + r] == -kInfinity) {
        spans[r] = {};
      }
    }
    return all;
  }

  std::int64_t row_count(std::int64_t tile) const {
    return std::min(sizes_.tile, sizes_.rows - tile * sizes_.tile);
  }

  // Fills block.probabilities and block.gradients for a tile of rows by a tile of columns that
  // block.visible intersects. Returns how many columns of it hold anything.
  std::int64_t compute(std::int64_t b, std::int64_t h, std::int64_t rows, std::int64_t columns,
                       Span all, Of of, Block& block) const {
    const std::int64_t tile = sizes_.tile;
    const std::int64_t start = columns * tile;
    const Span here = intersect(all, {start, start + tile});
    const std::int64_t used = here.end - start;
    const std::int64_t whole =
        (used + mr_ - 1) / mr_ * mr_;  // the transposed tile's panels of rows
    const std::int64_t count = row_count(rows);
    const std::int64_t left = row_tile(b, h, rows);
    const std::int64_t right = column_tile(b, h / sizes_.group(), columns);
    Base::multiply(AForm::packed, queries_left_ + left * tile * sizes_.depth, mr_ * sizes_.depth,
                   keys_across_ + right * tile * sizes_.depth, nr_ * sizes_.depth, count, used,
                   sizes_.depth, block.probabilities, tile, false);
    Base::multiply(AForm::packed, douts_left_ + left * tile * sizes_.value_depth,
                   mr_ * sizes_.value_depth, values_ + right * tile * sizes_.value_depth,
                   nr_ * sizes_.value_depth, count, used, sizes_.value_depth, block.gradients, tile,
                   false);
    for (std::int64_t r = 0; r < count; ++r) {
      const Span span = intersect(block.visible[r], here);
      T* p = block.probabilities + r * tile;
      T* g = block.gradients + r * tile;
      if (span.empty()) {
        std::fill(p, p + whole, T{0});
        std::fill(g, g + whole, T{0});
        continue;
      }
      const std::int64_t begin = span.begin - start;
      const std::int64_t end = span.end - start;
      const std::int64_t width = end - begin;
      const bool capped = sizes_.rule.softcap > 0 && of == Of::products;
      Base::score_row(b, h, rows * tile + r, span, p + begin, block.buffer,
                      capped ? block.cap_slope : nullptr);
      math().exp_sum(p + begin, width, log_sum_[left * tile + r]);
      math().gradient(p + begin, g + begin, width, delta_[left * tile + r]);
      if (capped) math().binary(ir::BinaryKind::mul, g + begin, block.cap_slope, g + begin, width);
      if (of == Of::products && Base::scale_ != 1) {
        math().scale(g + begin, width, static_cast<T>(Base::scale_));
      }
      for (T* row : {p, g}) {
        std::fill(row, row + begin, T{0});
        std::fill(row + end, row + whole, T{0});
      }
    }
    return used;
  }

  // ---- the gradients ----

  void query_gradient(std::int64_t b, std::int64_t h, std::int64_t rows, std::byte* scratch) {
    Block block{*this, scratch};
    const std::int64_t tile = sizes_.tile;
    const std::int64_t count = row_count(rows);
    std::fill(block.key_sums, block.key_sums + tile * sizes_.depth_padded, T{0});
    const Span all = visible(b, h, rows, block.visible);
    for (std::int64_t columns = all.begin / tile; columns * tile < all.end; ++columns) {
      const std::int64_t used = compute(b, h, rows, columns, all, Of::products, block);
      const std::int64_t right = column_tile(b, h / sizes_.group(), columns);
      const T* keys = keys_ + right * tile * sizes_.depth_padded;
      if (keys_finite_[right] != 0) {
        Base::multiply(AForm::tile_rows, block.gradients, 0, keys, tile * nr_, count,
                       sizes_.depth_padded, used, block.key_sums, sizes_.depth_padded, true);
      } else {
        Base::multiply_visible(block.gradients, block.visible, count, columns * tile, false, keys,
                               sizes_.depth_padded, block.key_sums);
      }
    }
    for (std::int64_t r = 0; r < count; ++r) {
      Base::store_row(output(Slot::dq).at, b, h, rows * tile + r, sizes_.depth,
                      block.key_sums + r * sizes_.depth_padded);
    }
  }

  void key_gradient(std::int64_t b, std::int64_t kv_head, std::int64_t columns,
                    std::byte* scratch) {
    Block block{*this, scratch};
    const std::int64_t tile = sizes_.tile;
    const Span here{columns * tile, (columns + 1) * tile};
    std::fill(block.key_sums, block.key_sums + tile * sizes_.depth_padded, T{0});
    std::fill(block.value_sums, block.value_sums + tile * sizes_.value_depth_padded, T{0});
    for (std::int64_t h = kv_head * sizes_.group(); h < (kv_head + 1) * sizes_.group(); ++h) {
      for (std::int64_t rows = 0; rows < sizes_.row_tiles(); ++rows) {
        const Span all = visible(b, h, rows, block.visible);
        if (intersect(all, here).empty()) continue;
        const std::int64_t used = compute(b, h, rows, columns, all, Of::products, block);
        const std::int64_t left = row_tile(b, h, rows);
        const std::int64_t count = row_count(rows);
        const T* queries = queries_ + left * tile * sizes_.depth_padded;
        const T* douts = douts_ + left * tile * sizes_.value_depth_padded;
        if (rows_finite_[left] != 0) {
          Base::multiply(AForm::tile_columns, block.gradients, 0, queries, tile * nr_, used,
                         sizes_.depth_padded, count, block.key_sums, sizes_.depth_padded, true);
          Base::multiply(AForm::tile_columns, block.probabilities, 0, douts, tile * nr_, used,
                         sizes_.value_depth_padded, count, block.value_sums,
                         sizes_.value_depth_padded, true);
        } else {
          Base::multiply_visible(block.gradients, block.visible, count, here.begin, true, queries,
                                 sizes_.depth_padded, block.key_sums);
          Base::multiply_visible(block.probabilities, block.visible, count, here.begin, true, douts,
                                 sizes_.value_depth_padded, block.value_sums);
        }
      }
    }
    const std::int64_t count = std::min(tile, sizes_.columns - here.begin);
    for (std::int64_t r = 0; r < count; ++r) {
      if (output(Slot::dk).present) {
        Base::store_row(output(Slot::dk).at, b, kv_head, here.begin + r, sizes_.depth,
                        block.key_sums + r * sizes_.depth_padded);
      }
      if (output(Slot::dv).present) {
        Base::store_row(output(Slot::dv).at, b, kv_head, here.begin + r, sizes_.value_depth,
                        block.value_sums + r * sizes_.value_depth_padded);
      }
    }
  }

  // A range of indices of one axis that share an element of the bias, or a tile of them.
  Span owned(std::size_t axis, std::int64_t at, std::int64_t full) const {
    return bias_shape_[axis] == 1 ? Span{0, full} : Span{at, at + 1};
  }

  Status bias_gradient(std::size_t scratch_bytes) {
    const std::int64_t tile = sizes_.tile;
    const auto tiles = [&](std::size_t axis) { return (bias_shape_[axis] + tile - 1) / tile; };
    const std::int64_t row_tiles = tiles(2);
    const std::int64_t column_tiles = tiles(3);
    return parallel_for(bias_shape_[0] * bias_shape_[1] * row_tiles * column_tiles, scratch_bytes,
                        [&](std::int64_t task, std::byte* scratch) {
                          const std::int64_t columns = task % column_tiles;
                          const std::int64_t rows = task / column_tiles % row_tiles;
                          const std::int64_t h = task / column_tiles / row_tiles % bias_shape_[1];
                          const std::int64_t b = task / column_tiles / row_tiles / bias_shape_[1];
                          Block block{*this, scratch};
                          std::fill(block.bias_sums, block.bias_sums + tile * tile, T{0});
                          const Span bs = owned(0, b, sizes_.batch);
                          const Span hs = owned(1, h, sizes_.heads);
                          const Span row_span = owned(2, rows, sizes_.row_tiles());
                          for (std::int64_t bi = bs.begin; bi < bs.end; ++bi) {
                            for (std::int64_t hi = hs.begin; hi < hs.end; ++hi) {
                              for (std::int64_t ri = row_span.begin; ri < row_span.end; ++ri) {
                                add_bias_gradient(bi, hi, ri,
                                                  owned(3, columns, sizes_.column_tiles()), block);
                              }
                            }
                          }
                          store_bias_gradient(b, h, rows * tile, columns * tile, block);
                        });
  }

  void add_bias_gradient(std::int64_t b, std::int64_t h, std::int64_t rows, Span columns,
                         Block& block) {
    const std::int64_t tile = sizes_.tile;
    const Span all = visible(b, h, rows, block.visible);
    const bool one_row = bias_shape_[2] == 1;
    const bool one_column = bias_shape_[3] == 1;
    for (std::int64_t c = columns.begin; c < columns.end; ++c) {
      if (intersect(all, {c * tile, (c + 1) * tile}).empty()) continue;
      const std::int64_t used = compute(b, h, rows, c, all, Of::scores, block);
      for (std::int64_t r = 0; r < row_count(rows); ++r) {
        const T* from = block.gradients + r * tile;
        T* to = block.bias_sums + (one_row ? 0 : r * tile);
        if (one_column) {
          for (std::int64_t j = 0; j < used; ++j) *to += from[j];
        } else {
          math().add(to, from, used);
        }
      }
    }
  }

  void store_bias_gradient(std::int64_t b, std::int64_t h, std::int64_t row, std::int64_t column,
                           const Block& block) {
    Location to = output(Slot::dbias).at;
    to.offset += column * to.strides[3];
    const std::int64_t rows = std::min(sizes_.tile, bias_shape_[2] - row);
    const std::int64_t columns = std::min(sizes_.tile, bias_shape_[3] - column);
    for (std::int64_t r = 0; r < rows; ++r) {
      Base::store_row(to, b, h, row + r, columns, block.bias_sums + r * sizes_.tile);
    }
  }

  Status sink_gradient() {
    return parallel_for(sizes_.heads, 0, [&](std::int64_t h, std::byte*) {
      const T sink = Base::extra_logit(h);
      double sum = 0;
      for (std::int64_t b = 0; b < sizes_.batch; ++b) {
        for (std::int64_t i = 0; i < Base::q_length(b); ++i) {
          const std::int64_t at = row_tile(b, h, i / sizes_.tile) * sizes_.tile + i % sizes_.tile;
          if (log_sum_[at] == -kInfinity) continue;  // saw nothing
          sum -= std::exp(static_cast<double>(sink) - static_cast<double>(log_sum_[at])) *
                 static_cast<double>(delta_[at]);
        }
      }
      const T result = static_cast<T>(sum);
      Base::store_row(output(Slot::dsink).at, 0, h, 0, 1, &result);
    });
  }

  const Dims bias_shape_;
  // Per tile of columns.
  T* keys_across_ = nullptr;  // transposed right operand of Q K^T
  T* keys_ = nullptr;         // right operand of dS K
  T* values_ = nullptr;       // transposed right operand of dO V^T
  // Per tile of rows.
  T* queries_left_ = nullptr;  // left operand of Q K^T
  T* queries_ = nullptr;       // right operand of dS^T Q
  T* douts_left_ = nullptr;    // left operand of dO V^T
  T* douts_ = nullptr;         // right operand of P^T dO
  T* delta_ = nullptr;         // rowsum(dO * O)
  T* log_sum_ = nullptr;
  std::uint8_t* keys_finite_ = nullptr;
  std::uint8_t* rows_finite_ = nullptr;
  std::size_t workspace_ = 0;
};

}  // namespace

std::size_t attention_backward_workspace(const Kernels& kernels, const ir::Graph& graph,
                                         const AttentionStep& step) {
  return computes_in_f64(graph, step)
             ? AttentionBackward<double>{kernels, graph, step, {}, nullptr}.workspace()
             : AttentionBackward<float>{kernels, graph, step, {}, nullptr}.workspace();
}

Status run_attention_backward(const Kernels& kernels, const ir::Graph& graph,
                              const AttentionStep& step, const std::vector<std::byte*>& roots,
                              std::byte* workspace) {
  return computes_in_f64(graph, step)
             ? AttentionBackward<double>{kernels, graph, step, roots, workspace}.run()
             : AttentionBackward<float>{kernels, graph, step, roots, workspace}.run();
}

}  // namespace lawson::cpu
