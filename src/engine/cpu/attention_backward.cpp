// The gradients of attention by recomputation (Dao et al. 2022, algorithm 4): nothing of the size
// of the scores is stored. Operands are packed once into workspace; dQ is then summed by tiles of
// query rows, dK and dV by tiles of key rows, dbias by tiles of the bias: every sum has one owner
// and one order, so the result does not depend on the threads. Each pass computes its tiles anew.
#include "engine/cpu/attention.h"

namespace lawson::cpu {
namespace {

using Slot = ir::AttentionBackward;

template <typename T>
class AttentionBackward : public AttentionBase<T> {
  using Base = AttentionBase<T>;
  using Slots = ir::AttentionSlots;
  using Base::input;
  using Base::keys;
  using Base::kInfinity;
  using Base::math;
  using Base::mr_;
  using Base::nr_;
  using Base::output;
  using Base::queries;
  using Base::roots_;
  using Base::sequences_;
  using Base::sizes_;

 public:
  AttentionBackward(const Kernels& kernels, const ir::Graph& graph, const AttentionStep& step,
                    const std::vector<std::byte*>& roots, std::byte* workspace)
      : Base{kernels, graph, step, roots} {
    if (output(Slot::dbias).present) {
      const ir::Node& node = graph.nodes[static_cast<std::size_t>(step.node)];
      bias_shape_ = graph.tensor(node.inputs[Slots::bias]).shape;
    }
    Carver carver{workspace};
    const std::int64_t columns = memory_product(sizes_.kv_heads, keys().most_tiles(sizes_.batch));
    const std::int64_t rows = memory_product(sizes_.heads, queries().most_tiles(sizes_.batch));
    const std::int64_t tile = sizes_.tile;
    keys_across_ = carver.template take<T>(columns, tile * sizes_.depth);
    keys_ = carver.template take<T>(columns, tile * sizes_.depth_padded);
    values_ = carver.template take<T>(columns, tile * sizes_.value_depth);
    queries_left_ = carver.template take<T>(rows, tile * sizes_.depth);
    queries_ = carver.template take<T>(rows, tile * sizes_.depth_padded);
    douts_left_ = carver.template take<T>(rows, tile * sizes_.value_depth);
    douts_ = carver.template take<T>(rows, tile * sizes_.value_depth_padded);
    delta_ = carver.template take<T>(rows, tile);
    log_sum_ = carver.template take<T>(rows, tile);
    keys_finite_ = carver.template take<std::uint8_t>(columns);
    rows_finite_ = carver.template take<std::uint8_t>(rows);
    workspace_ = carver.used();
  }

  std::size_t workspace() const override { return workspace_; }

  Status run() override {
    LAWSON_CHECK(Base::prepare());
    const std::size_t block = Block{*this, nullptr}.used;
    LAWSON_CHECK(
        for_tiles(keys(), sizes_.kv_heads, pack_scratch(), &AttentionBackward::pack_columns));
    LAWSON_CHECK(for_tiles(queries(), sizes_.heads, pack_scratch(), &AttentionBackward::pack_rows));
    LAWSON_CHECK(for_tiles(queries(), sizes_.heads, block, &AttentionBackward::query_gradient));
    LAWSON_CHECK(for_tiles(keys(), sizes_.kv_heads, block, &AttentionBackward::key_gradient));
    LAWSON_CHECK(Base::clear_gaps(queries(), Base::query_rows(output(Slot::dq)), sizes_.heads,
                                  sizes_.depth));
    LAWSON_CHECK(
        Base::clear_gaps(keys(), Base::key_rows(output(Slot::dk)), sizes_.kv_heads, sizes_.depth));
    LAWSON_CHECK(Base::clear_gaps(keys(), Base::key_rows(output(Slot::dv)), sizes_.kv_heads,
                                  sizes_.value_depth));
    if (output(Slot::dbias).present) LAWSON_CHECK(bias_gradient(block));
    return output(Slot::dsink).present ? sink_gradient() : Status{};
  }

 private:
  using TileAt = typename Base::TileAt;

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
      kept = carver.template take<std::uint8_t>(sizes.tile);
      used = carver.used();
    }
    T *probabilities, *gradients, *key_sums, *value_sums, *bias_sums, *buffer, *cap_slope;
    Span* visible;
    std::uint8_t* kept;
    std::size_t used;
  };

  // What the gradient tile holds: of the scores (for a bias that is added to them), or of the
  // products q.k.
  enum class Of : std::uint8_t { scores, products };

  // Calls member(number, scratch) for all tiles of a side.
  template <typename Member>
  Status for_tiles(const Side& side, std::int64_t heads, std::size_t scratch_bytes, Member member) {
    return parallel_for(
        side.tiles_of_all(heads), scratch_bytes,
        [&](std::int64_t number, std::byte* scratch) { (this->*member)(number, scratch); });
  }

  std::size_t pack_scratch() const {
    const std::int64_t depth = std::max(sizes_.depth_padded, sizes_.value_depth_padded);
    return static_cast<std::size_t>(std::max(nr_, mr_) * depth * 2) * sizeof(T);
  }

  std::int64_t row_tile(std::int64_t b, std::int64_t h, std::int64_t tile) const {
    return queries().tile_number({b, h, tile}, sizes_.heads);
  }

  // ---- packing: each operand as the products need it; padding as zeros ----

  void pack_columns(std::int64_t number, std::byte* scratch) {
    const auto [b, head, tile] = keys().tile_at(number, sizes_.kv_heads);
    const std::int64_t first = tile * sizes_.tile;
    const std::int64_t count = std::min(keys().length_of(b) - first, sizes_.tile);
    if (count <= 0) return;  // never read
    T* line = reinterpret_cast<T*>(scratch);
    const Rows k = sequences_.key_cache(roots_);
    Base::pack_lines(k, b, head, first, count, sizes_.depth, nr_, line,
                     keys_across_ + number * sizes_.tile * sizes_.depth);
    const bool finite = Base::pack_rows(k, b, head, first, count, sizes_.depth, sizes_.depth_padded,
                                        line, keys_ + number * sizes_.tile * sizes_.depth_padded);
    keys_finite_[number] = finite ? 1 : 0;
    Base::pack_lines(sequences_.value_cache(roots_), b, head, first, count, sizes_.value_depth, nr_,
                     line, values_ + number * sizes_.tile * sizes_.value_depth);
  }

  void pack_rows(std::int64_t number, std::byte* scratch) {
    const auto [b, h, tile] = queries().tile_at(number, sizes_.heads);
    const std::int64_t first = tile * sizes_.tile;
    const std::int64_t count = std::min(queries().length_of(b) - first, sizes_.tile);
    if (count <= 0) return;  // never read
    T* line = reinterpret_cast<T*>(scratch);
    const Rows q = Base::query_rows(input(Slots::q));
    const Rows o = Base::query_rows(input(Slot::o));
    const Rows dout = Base::query_rows(input(Slot::dout));
    const Rows stats = Base::query_rows(input(Slot::stats));
    Base::pack_lines(q, b, h, first, count, sizes_.depth, mr_, line,
                     queries_left_ + number * sizes_.tile * sizes_.depth);
    const bool finite =
        Base::pack_rows(q, b, h, first, count, sizes_.depth, sizes_.depth_padded, line,
                        queries_ + number * sizes_.tile * sizes_.depth_padded);
    Base::pack_lines(dout, b, h, first, count, sizes_.value_depth, mr_, line,
                     douts_left_ + number * sizes_.tile * sizes_.value_depth);
    const bool dout_finite =
        Base::pack_rows(dout, b, h, first, count, sizes_.value_depth, sizes_.value_depth_padded,
                        line, douts_ + number * sizes_.tile * sizes_.value_depth_padded);
    rows_finite_[number] = finite && dout_finite ? 1 : 0;
    T* other = line + sizes_.value_depth_padded;
    for (std::int64_t r = 0; r < count; ++r) {
      Base::load_row(o, b, h, first + r, sizes_.value_depth, line);
      Base::load_row(dout, b, h, first + r, sizes_.value_depth, other);
      delta_[number * sizes_.tile + r] = math().dot(line, other, sizes_.value_depth);
      Base::load_row(stats, b, h, first + r, 1, log_sum_ + number * sizes_.tile + r);
    }
  }

  // ---- one tile of scores ----

  TileAt tile_of(std::int64_t b, std::int64_t h, std::int64_t row_tile,
                 std::int64_t column_tile) const {
    const std::int64_t first = row_tile * sizes_.tile;
    return {b, h, first, std::min(sizes_.tile, queries().covered(b) - first),
            column_tile * sizes_.tile};
  }

  // The columns that the rows of a tile see; rows whose log-sum-exp is -infinity saw nothing.
  Span visible(const TileAt& at, Span* spans) const {
    const Span all = sequences_.visible(at.b, at.first, at.rows, spans);
    const T* log_sum = log_sum_ + row_tile(at.b, at.h, at.first / sizes_.tile) * sizes_.tile;
    for (std::int64_t r = 0; r < at.rows; ++r) {
      if (!spans[r].empty() && log_sum[r] == -kInfinity) spans[r] = {};
    }
    return all;
  }

  // Fills block.probabilities and block.gradients for a tile that block.visible intersects. Returns
  // how many columns of it hold anything.
  std::int64_t compute(const TileAt& at, Span all, Of of, Block& block) const {
    const std::int64_t tile = sizes_.tile;
    const Span here = intersect(all, {at.start, at.start + tile});
    const std::int64_t used = here.end - at.start;
    const std::int64_t whole = round_up(used, mr_);  // the transposed tile's panels of rows
    const std::int64_t left = row_tile(at.b, at.h, at.first / tile);
    const std::int64_t right =
        keys().tile_number({at.b, at.h / sizes_.group(), at.start / tile}, sizes_.kv_heads);
    Base::multiply(AForm::packed, queries_left_ + left * tile * sizes_.depth, mr_ * sizes_.depth,
                   keys_across_ + right * tile * sizes_.depth, nr_ * sizes_.depth, at.rows, used,
                   sizes_.depth, block.probabilities, tile, false);
    Base::multiply(AForm::packed, douts_left_ + left * tile * sizes_.value_depth,
                   mr_ * sizes_.value_depth, values_ + right * tile * sizes_.value_depth,
                   nr_ * sizes_.value_depth, at.rows, used, sizes_.value_depth, block.gradients,
                   tile, false);
    for (std::int64_t r = 0; r < at.rows; ++r) {
      const Span span = intersect(block.visible[r], here);
      T* p = block.probabilities + r * tile;
      T* g = block.gradients + r * tile;
      if (span.empty()) {
        std::fill(p, p + whole, T{0});
        std::fill(g, g + whole, T{0});
        continue;
      }
      const std::int64_t begin = span.begin - at.start;
      const std::int64_t end = span.end - at.start;
      compute_row(at, r, span, log_sum_[left * tile + r], delta_[left * tile + r], of, p + begin,
                  g + begin, block);
      for (T* row : {p, g}) {
        std::fill(row, row + begin, T{0});
        std::fill(row + end, row + whole, T{0});
      }
    }
    return used;
  }

  // From products q.k in p and dO.v in g to weights (as they met the values) and gradients.
  void compute_row(const TileAt& at, std::int64_t r, Span span, T log_sum, T delta, Of of, T* p,
                   T* g, Block& block) const {
    const std::int64_t i = at.first + r;
    const std::int64_t width = span.end - span.begin;
    const bool capped = Base::rule_.softcap > 0 && of == Of::products;
    Base::score_row(at.b, at.h, i, span, p, block.buffer, capped ? block.cap_slope : nullptr);
    math().exp_sum(p, width, log_sum);
    if (Base::drops()) {
      Base::fill_kept(at.b, at.h, i, span, block.kept);
      math().drop(g, block.kept, width, Base::kept_scale());
    }
    math().gradient(p, g, width, delta);
    if (Base::drops()) math().drop(p, block.kept, width, Base::kept_scale());
    if (capped) math().binary(ir::BinaryKind::mul, g, block.cap_slope, g, width);
    if (of == Of::products && Base::scale_ != 1) {
      math().scale(g, width, static_cast<T>(Base::scale_));
    }
    if (Base::has_keep_mask()) {
      Base::hide(at.b, at.h, i, span, p, 0);
      Base::hide(at.b, at.h, i, span, g, 0);
    }
  }

  // ---- the gradients ----

  void query_gradient(std::int64_t number, std::byte* scratch) {
    Block block{*this, scratch};
    const auto [b, h, row_tile] = queries().tile_at(number, sizes_.heads);
    const std::int64_t tile = sizes_.tile;
    TileAt at = tile_of(b, h, row_tile, 0);
    std::fill(block.key_sums, block.key_sums + tile * sizes_.depth_padded, T{0});
    const Span all = visible(at, block.visible);
    for (at.start = all.begin / tile * tile; at.start < all.end; at.start += tile) {
      const std::int64_t used = compute(at, all, Of::products, block);
      const std::int64_t right =
          keys().tile_number({b, h / sizes_.group(), at.start / tile}, sizes_.kv_heads);
      const T* right_keys = keys_ + right * tile * sizes_.depth_padded;
      if (keys_finite_[right] != 0) {
        Base::multiply(AForm::tile_rows, block.gradients, 0, right_keys, tile * nr_, at.rows,
                       sizes_.depth_padded, used, block.key_sums, sizes_.depth_padded, true);
      } else {
        Base::multiply_visible(at, block.gradients, block.visible, false, right_keys,
                               sizes_.depth_padded, block.key_sums);
      }
    }
    const Rows dq = Base::query_rows(output(Slot::dq));
    for (std::int64_t r = 0; r < at.rows; ++r) {
      Base::store_row(dq, b, h, at.first + r, sizes_.depth,
                      block.key_sums + r * sizes_.depth_padded);
    }
  }

  void key_gradient(std::int64_t number, std::byte* scratch) {
    Block block{*this, scratch};
    const auto [b, kv_head, column_tile] = keys().tile_at(number, sizes_.kv_heads);
    const std::int64_t tile = sizes_.tile;
    const Span here{column_tile * tile, (column_tile + 1) * tile};
    std::fill(block.key_sums, block.key_sums + tile * sizes_.depth_padded, T{0});
    std::fill(block.value_sums, block.value_sums + tile * sizes_.value_depth_padded, T{0});
    for (std::int64_t h = kv_head * sizes_.group(); h < (kv_head + 1) * sizes_.group(); ++h) {
      for (std::int64_t rows = 0; rows < queries().tiles(b); ++rows) {
        const TileAt at = tile_of(b, h, rows, column_tile);
        const Span all = visible(at, block.visible);
        if (intersect(all, here).empty()) continue;
        const std::int64_t used = compute(at, all, Of::products, block);
        const std::int64_t left = row_tile(b, h, rows);
        const T* right_queries = queries_ + left * tile * sizes_.depth_padded;
        const T* right_douts = douts_ + left * tile * sizes_.value_depth_padded;
        if (rows_finite_[left] != 0) {
          Base::multiply(AForm::tile_columns, block.gradients, 0, right_queries, tile * nr_, used,
                         sizes_.depth_padded, at.rows, block.key_sums, sizes_.depth_padded, true);
          Base::multiply(AForm::tile_columns, block.probabilities, 0, right_douts, tile * nr_, used,
                         sizes_.value_depth_padded, at.rows, block.value_sums,
                         sizes_.value_depth_padded, true);
        } else {
          Base::multiply_visible(at, block.gradients, block.visible, true, right_queries,
                                 sizes_.depth_padded, block.key_sums);
          Base::multiply_visible(at, block.probabilities, block.visible, true, right_douts,
                                 sizes_.value_depth_padded, block.value_sums);
        }
      }
    }
    const Rows dk = Base::key_rows(output(Slot::dk));
    const Rows dv = Base::key_rows(output(Slot::dv));
    for (std::int64_t j = here.begin; j < std::min(here.end, keys().covered(b)); ++j) {
      const std::int64_t r = j - here.begin;
      Base::store_row(dk, b, kv_head, j, sizes_.depth, block.key_sums + r * sizes_.depth_padded);
      Base::store_row(dv, b, kv_head, j, sizes_.value_depth,
                      block.value_sums + r * sizes_.value_depth_padded);
    }
  }

  // The range of indices of one axis that share index `at` of the bias. Of rows and columns the
  // indices count tiles.
  Span owned(std::size_t axis, std::int64_t at, std::int64_t full) const {
    return bias_shape_[axis] == 1 ? Span{0, full} : intersect({at, at + 1}, {0, full});
  }

  Status bias_gradient(std::size_t scratch_bytes) {
    const std::int64_t tile = sizes_.tile;
    const std::int64_t row_tiles = blocks(bias_shape_[2], tile);
    const std::int64_t column_tiles = blocks(bias_shape_[3], tile);
    // Batch entries behind the last sequence are not there.
    const std::int64_t batch =
        bias_shape_[0] == 1 ? 1 : std::min(bias_shape_[0], sequences_.count());
    return parallel_for(batch * bias_shape_[1] * row_tiles * column_tiles, scratch_bytes,
                        [&](std::int64_t task, std::byte* scratch) {
                          const std::int64_t columns = task % column_tiles;
                          const std::int64_t rows = task / column_tiles % row_tiles;
                          const std::int64_t h = task / column_tiles / row_tiles % bias_shape_[1];
                          const std::int64_t b = task / column_tiles / row_tiles / bias_shape_[1];
                          Block block{*this, scratch};
                          std::fill(block.bias_sums, block.bias_sums + tile * tile, T{0});
                          const Span bs = owned(0, b, sequences_.count());
                          const Span hs = owned(1, h, sizes_.heads);
                          for (std::int64_t bi = bs.begin; bi < bs.end; ++bi) {
                            const Span ri = owned(2, rows, queries().tiles(bi));
                            const Span ci = owned(3, columns, keys().tiles(bi));
                            for (std::int64_t hi = hs.begin; hi < hs.end; ++hi) {
                              for (std::int64_t row = ri.begin; row < ri.end; ++row) {
                                add_bias_gradient(bi, hi, row, ci, block);
                              }
                            }
                          }
                          store_bias_gradient(b, h, rows * tile, columns * tile, block);
                        });
  }

  void add_bias_gradient(std::int64_t b, std::int64_t h, std::int64_t rows, Span columns,
                         Block& block) {
    const std::int64_t tile = sizes_.tile;
    TileAt at = tile_of(b, h, rows, 0);
    const Span all = visible(at, block.visible);
    const bool one_row = bias_shape_[2] == 1;
    const bool one_column = bias_shape_[3] == 1;
    const Of of = Base::rule_.pre_scale_bias ? Of::products : Of::scores;
    for (std::int64_t c = columns.begin; c < columns.end; ++c) {
      at.start = c * tile;
      if (intersect(all, {at.start, at.start + tile}).empty()) continue;
      const std::int64_t used = compute(at, all, of, block);
      for (std::int64_t r = 0; r < at.rows; ++r) {
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
    Rows to = rows_of(output(Slot::dbias).at, roots_);
    to.offset += column * to.strides[3];
    const std::int64_t rows = std::min(sizes_.tile, bias_shape_[2] - row);
    const std::int64_t columns = std::min(sizes_.tile, bias_shape_[3] - column);
    for (std::int64_t r = 0; r < rows; ++r) {
      Base::store_row(to, b, h, row + r, columns, block.bias_sums + r * sizes_.tile);
    }
  }

  Status sink_gradient() {
    const Rows dsink = rows_of(output(Slot::dsink).at, roots_);
    return parallel_for(sizes_.heads, 0, [&](std::int64_t h, std::byte*) {
      const T sink = Base::extra_logit(h);
      double sum = 0;
      for (std::int64_t b = 0; b < sequences_.count(); ++b) {
        for (std::int64_t i = 0; i < queries().length_of(b); ++i) {
          const std::int64_t at = row_tile(b, h, i / sizes_.tile) * sizes_.tile + i % sizes_.tile;
          if (log_sum_[at] == -kInfinity || sequences_.visible(b, i).empty()) continue;
          sum -= std::exp(static_cast<double>(sink) - static_cast<double>(log_sum_[at])) *
                 static_cast<double>(delta_[at]);
        }
      }
      const T result = static_cast<T>(sum);
      Base::store_row(dsink, 0, h, 0, 1, &result);
    });
  }

  Dims bias_shape_;
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

std::unique_ptr<AttentionPass> attention_backward(const Kernels& kernels, const ir::Graph& graph,
                                                  const AttentionStep& step,
                                                  const std::vector<std::byte*>& roots,
                                                  std::byte* workspace) {
  return make_pass<AttentionBackward>(kernels, graph, step, roots, workspace);
}

}  // namespace lawson::cpu
