// Attention with an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022): keys and values
// are packed once into workspace, then every tile of query rows walks over the column tiles that it
// sees, keeping the running maximum, the running denominator and the unnormalised output.
#include "engine/cpu/attention.h"

namespace lawson::cpu {
namespace {

using Slot = ir::Attention;

template <typename T>
class AttentionForward : public AttentionBase<T> {
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
  AttentionForward(const Kernels& kernels, const ir::Graph& graph, const AttentionStep& step,
                   const std::vector<std::byte*>& roots, std::byte* workspace)
      : Base{kernels, graph, step, roots} {
    Carver carver{workspace};
    const std::int64_t tiles = memory_product(sizes_.kv_heads, keys().most_tiles(sizes_.batch));
    packed_keys_ = carver.template take<T>(tiles, key_elements());
    packed_values_ = carver.template take<T>(tiles, value_elements());
    values_finite_ = carver.template take<std::uint8_t>(tiles);
    const bool empty = sizes_.batch == 0 || sizes_.heads == 0 || sizes_.rows == 0;
    workspace_ = empty ? 0 : carver.used();
  }

  std::size_t workspace() const override { return workspace_; }

  Status run() override {
    LAWSON_CHECK(Base::prepare());
    if (queries().tiles_of_all(sizes_.heads) > 0) {
      LAWSON_CHECK(parallel_for(keys().tiles_of_all(sizes_.kv_heads), pack_scratch(),
                                [&](std::int64_t task, std::byte* scratch) {
                                  pack(task, reinterpret_cast<T*>(scratch));
                                }));
    }
    LAWSON_CHECK(parallel_for(queries().tiles_of_all(sizes_.heads), Block{*this, nullptr}.used,
                              [&](std::int64_t task, std::byte* scratch) {
                                Block block{*this, scratch};
                                rows(queries().tile_at(task, sizes_.heads), block);
                              }));
    for (const int slot : {Slot::o, Slot::stats, Slot::max_logit}) {
      if (!output(slot).present) continue;
      LAWSON_CHECK(Base::clear_gaps(queries(), Base::query_rows(output(slot)), sizes_.heads,
                                    slot == Slot::o ? sizes_.value_depth : 1));
    }
    return output(Slot::dropped).present ? store_dropout() : Status{};
  }

 private:
  using TileAt = typename Base::TileAt;

  // Scratch memory of one tile of query rows.
  struct Block {
    Block(const AttentionForward& owner, std::byte* scratch) {
      const AttentionSizes& sizes = owner.sizes_;
      Carver carver{scratch};
      queries = carver.template take<T>(sizes.tile * sizes.depth);
      lines = carver.template take<T>(owner.mr_ * sizes.depth);
      scores = carver.template take<T>(sizes.tile * sizes.tile);
      sums = carver.template take<T>(sizes.tile * sizes.value_depth_padded);
      buffer = carver.template take<T>(sizes.tile);
      maximum = carver.template take<T>(sizes.tile);
      denominator = carver.template take<T>(sizes.tile);
      largest = carver.template take<T>(sizes.tile);
      visible = carver.template take<Span>(sizes.tile);
      kept = carver.template take<std::uint8_t>(sizes.tile);
      used = carver.used();
    }
    T *queries, *lines, *scores, *sums, *buffer, *maximum, *denominator, *largest;
    Span* visible;
    std::uint8_t* kept;
    std::size_t used;
  };

  std::int64_t key_elements() const { return sizes_.tile * sizes_.depth; }
  std::int64_t value_elements() const { return sizes_.tile * sizes_.value_depth_padded; }

  std::size_t pack_scratch() const {
    const std::int64_t elements = std::max(nr_ * sizes_.depth, sizes_.value_depth_padded);
    return static_cast<std::size_t>(elements) * sizeof(T);
  }

  void pack(std::int64_t number, T* line) {
    const auto [b, kv_head, tile] = keys().tile_at(number, sizes_.kv_heads);
    const std::int64_t first = tile * sizes_.tile;
    const std::int64_t count = std::min(sizes_.tile, keys().length_of(b) - first);
    if (count <= 0) return;  // padding: never read
    Base::pack_lines(sequences_.key_cache(roots_), b, kv_head, first, count, sizes_.depth, nr_,
                     line, packed_keys_ + number * key_elements());
    const bool finite = Base::pack_rows(sequences_.value_cache(roots_), b, kv_head, first, count,
                                        sizes_.value_depth, sizes_.value_depth_padded, line,
                                        packed_values_ + number * value_elements());
    values_finite_[number] = finite ? 1 : 0;
  }

  void rows(const Side::Tile& tile, Block& block) {
    const std::int64_t first = tile.tile * sizes_.tile;
    const TileAt at{tile.b, tile.head, first,
                    std::min(sizes_.tile, queries().covered(tile.b) - first), 0};
    const std::int64_t valid =
        std::clamp<std::int64_t>(queries().length_of(at.b) - first, 0, at.rows);
    const T extra = Base::extra_logit(at.h);
    for (std::int64_t r = 0; r < at.rows; ++r) {
      // Of an extra logit, the first term of the denominator; -infinity adds nothing.
      block.maximum[r] = std::isnan(extra) ? -kInfinity : extra;
      block.denominator[r] = extra == -kInfinity ? T{0} : std::isnan(extra) ? extra : T{1};
      block.largest[r] = -kInfinity;
    }
    std::fill(block.sums, block.sums + value_elements(), T{0});
    const Span all = sequences_.visible(at.b, first, at.rows, block.visible);
    if (!all.empty()) {
      Base::pack_lines(Base::query_rows(input(Slots::q)), at.b, at.h, first, valid, sizes_.depth,
                       mr_, block.lines, block.queries);
      for (std::int64_t column = all.begin / sizes_.tile * sizes_.tile; column < all.end;
           column += sizes_.tile) {
        columns({at.b, at.h, first, at.rows, column}, all, block);
      }
    }
    finish(at, block);
  }

  // One tile of scores and what it adds.
  void columns(const TileAt& at, Span all, Block& block) {
    const Span here = intersect(all, {at.start, at.start + sizes_.tile});
    const std::int64_t used = here.end - at.start;
    const std::int64_t number =
        keys().tile_number({at.b, at.h / sizes_.group(), at.start / sizes_.tile}, sizes_.kv_heads);
    Base::multiply(AForm::packed, block.queries, mr_ * sizes_.depth,
                   packed_keys_ + number * key_elements(), nr_ * sizes_.depth, at.rows, used,
                   sizes_.depth, block.scores, sizes_.tile, false);
    for (std::int64_t r = 0; r < at.rows; ++r) {
      const Span span = intersect(block.visible[r], here);
      T* row = block.scores + r * sizes_.tile;
      if (span.empty()) {
        std::fill(row, row + used, T{0});
        continue;
      }
      T* x = row + (span.begin - at.start);
      const std::int64_t width = span.end - span.begin;
      Base::score_row(at.b, at.h, at.first + r, span, x, block.buffer, nullptr);
      std::fill(row, x, T{0});
      std::fill(x + width, row + used, T{0});
      update(r, x, width, block);
      if (Base::drops()) {
        // The denominator has all weights; those that are kept grow in finish().
        Base::fill_kept(at.b, at.h, at.first + r, span, block.kept);
        math().drop(x, block.kept, width, 1);
      }
    }
    const T* values = packed_values_ + number * value_elements();
    if (values_finite_[number] != 0) {
      Base::multiply(AForm::tile_rows, block.scores, 0, values, sizes_.tile * nr_, at.rows,
                     sizes_.value_depth_padded, used, block.sums, sizes_.value_depth_padded, true);
    } else {
      Base::multiply_visible(at, block.scores, block.visible, false, values,
                             sizes_.value_depth_padded, block.sums);
    }
  }

  // Scores x become probabilities relative to the row's running maximum.
  void update(std::int64_t r, T* x, std::int64_t width, Block& block) {
    if (output(Slot::max_logit).present) {
      bool is_nan = std::isnan(block.largest[r]);
      for (std::int64_t j = 0; j < width; ++j) is_nan |= x[j] != x[j];
      block.largest[r] =
          is_nan ? std::numeric_limits<T>::quiet_NaN() : math().max(x, width, block.largest[r]);
    }
    const T before = block.maximum[r];
    const T now = math().max(x, width, before);
    block.maximum[r] = now;
    // Where all is -infinity so far, any finite shift makes zeros of it (and keeps NaNs).
    const T sum = math().exp_sum(x, width, now == -kInfinity ? T{0} : now);
    if (now != before && before != -kInfinity) {
      const T factor = std::exp(before - now);
      block.denominator[r] *= factor;
      math().scale(block.sums + r * sizes_.value_depth_padded, sizes_.value_depth_padded, factor);
    }
    block.denominator[r] += sum;
  }

  void finish(const TileAt& at, Block& block) {
    for (std::int64_t r = 0; r < at.rows; ++r) {
      const T denominator = block.denominator[r];
      const auto store = [&](int slot, std::int64_t count, const T* values) {
        Base::store_row(Base::query_rows(output(slot)), at.b, at.h, at.first + r, count, values);
      };
      T* sums = block.sums + r * sizes_.value_depth_padded;
      if (denominator == 0) {  // saw nothing; the zeros times infinite values are no numbers
        std::fill(sums, sums + sizes_.value_depth, T{0});
      } else {
        math().scale(sums, sizes_.value_depth, Base::kept_scale() / denominator);
      }
      store(Slot::o, sizes_.value_depth, sums);
      if (output(Slot::stats).present) {
        const T log_sum = denominator == 0 ? -kInfinity : block.maximum[r] + std::log(denominator);
        store(Slot::stats, 1, &log_sum);
      }
      if (output(Slot::max_logit).present) store(Slot::max_logit, 1, block.largest + r);
    }
  }

  // The dropout mask of every weight, also of those that no row sees.
  Status store_dropout() {
    if (sizes_.columns == 0) return {};
    const Rows to = rows_of(output(Slot::dropped).at, roots_);
    return parallel_for(sequences_.count() * sizes_.heads * sizes_.rows, 0,
                        [&](std::int64_t task, std::byte*) {
                          const std::int64_t i = task % sizes_.rows;
                          const std::int64_t h = task / sizes_.rows % sizes_.heads;
                          const std::int64_t b = task / sizes_.rows / sizes_.heads;
                          auto* kept = reinterpret_cast<std::uint8_t*>(to.data) + to.at(b, h, i);
                          if (to.strides[3] == 1 || sizes_.columns == 1) {
                            Base::fill_kept(b, h, i, {0, sizes_.columns}, kept);
                            return;
                          }
                          for (std::int64_t j = 0; j < sizes_.columns; ++j) {
                            Base::fill_kept(b, h, i, {j, j + 1}, kept + j * to.strides[3]);
                          }
                        });
  }

  T* packed_keys_ = nullptr;    // per tile: transposed right operands of Q K^T
  T* packed_values_ = nullptr;  // per tile: right operands of P V
  std::uint8_t* values_finite_ = nullptr;
  std::size_t workspace_ = 0;
};

}  // namespace

std::unique_ptr<AttentionPass> attention_forward(const Kernels& kernels, const ir::Graph& graph,
                                                 const AttentionStep& step,
                                                 const std::vector<std::byte*>& roots,
                                                 std::byte* workspace) {
  return make_pass<AttentionForward>(kernels, graph, step, roots, workspace);
}

}  // namespace lawson::cpu
