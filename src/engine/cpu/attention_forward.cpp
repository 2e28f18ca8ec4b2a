// Attention with an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022): keys and values
// are packed once into workspace, then every tile of query rows walks over the column tiles that it
// sees, keeping the running maximum, the running denominator and the unnormalised output.
#include "engine/cpu/attention.h"

namespace lawson::cpu {
namespace {

using Slot = ir::Attention;
constexpr AttentionSlots kSlots{Slot::q,    Slot::k,        Slot::v,         Slot::scale,
                                Slot::bias, Slot::seqlen_q, Slot::seqlen_kv, Slot::sink};

template <typename T>
class AttentionForward : AttentionBase<T> {
  using Base = AttentionBase<T>;
  using Base::input;
  using Base::kInfinity;
  using Base::math;
  using Base::mr_;
  using Base::nr_;
  using Base::output;
  using Base::sizes_;

 public:
  AttentionForward(const Kernels& kernels, const ir::Graph& graph, const AttentionStep& step,
                   const std::vector<std::byte*>& roots, std::byte* workspace)
      : Base{kernels,
             graph,
             step,
             roots,
             std::get<ir::Attention>(graph.nodes[static_cast<std::size_t>(step.node)].op).rule,
             kSlots} {
    Carver carver{workspace};
    const std::int64_t tiles = sizes_.batch * sizes_.kv_heads * sizes_.column_tiles();
    keys_ = carver.template take<T>(tiles * key_elements());
    values_ = carver.template take<T>(tiles * value_elements());
    values_finite_ = carver.template take<std::uint8_t>(tiles);
    workspace_ = sizes_.batch * sizes_.heads * sizes_.rows == 0 ? 0 : carver.used();
  }

  std::size_t workspace() const { return workspace_; }

  Status run() {
    if (sizes_.batch * sizes_.heads * sizes_.rows == 0) return {};
    const std::int64_t column_tiles = sizes_.column_tiles();
    LAWSON_CHECK(parallel_for(sizes_.batch * sizes_.kv_heads * column_tiles, pack_scratch(),
                              [&](std::int64_t task, std::byte* scratch) {
                                const std::int64_t matrix = task / column_tiles;
                                pack(matrix / sizes_.kv_heads, matrix % sizes_.kv_heads,
                                     task % column_tiles, scratch);
                              }));
    const std::int64_t row_tiles = sizes_.row_tiles();
    return parallel_for(sizes_.batch * sizes_.heads * row_tiles, Block{*this, nullptr}.used,
                        [&](std::int64_t task, std::byte* scratch) {
                          const std::int64_t matrix = task / row_tiles;
                          Block block{*this, scratch};
                          rows(matrix / sizes_.heads, matrix % sizes_.heads,
                               task % row_tiles * sizes_.tile, block);
                        });
  }

 private:
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
      visible = carver.template take<Span>(sizes.tile);
      used = carver.used();
    }
    Span* visible;
    T *queries, *lines, *scores, *sums, *buffer, *maximum, *denominator;
    std::size_t used;
  };

  std::int64_t key_elements() const { return sizes_.tile * sizes_.depth; }
  std::int64_t value_elements() const { return sizes_.tile * sizes_.value_depth_padded; }
  std::int64_t column_tile(std::int64_t b, std::int64_t kv_head, std::int64_t tile) const {
    return (b * sizes_.kv_heads + kv_head) * sizes_.column_tiles() + tile;
  }

  std::size_t pack_scratch() const {
    const std::int64_t elements = std::max(nr_ * sizes_.depth, sizes_.value_depth_padded);
    return static_cast<std::size_t>(elements) * sizeof(T);
  }

  void pack(std::int64_t b, std::int64_t kv_head, std::int64_t tile, std::byte* scratch) {
    const std::int64_t first = tile * sizes_.tile;
    const std::int64_t count = std::min(sizes_.tile, Base::kv_length(b) - first);
    if (count <= 0) return;  // padding: never read
    T* line = reinterpret_cast<T*>(scratch);
    const std::int64_t at = column_tile(b, kv_head, tile);
    Base::pack_lines(input(Slot::k).at, b, kv_head, first, count, sizes_.depth, nr_, line,
                     keys_ + at * key_elements());
    const bool finite =
        Base::pack_rows(input(Slot::v).at, b, kv_head, first, count, sizes_.value_depth,
                        sizes_.value_depth_padded, line, values_ + at * value_elements());
    values_finite_[at] = finite ? 1 : 0;
  }

  void rows(std::int64_t b, std::int64_t h, std::int64_t first, Block& block) {
    const std::int64_t count = std::min(sizes_.tile, sizes_.rows - first);
    const std::int64_t valid = std::clamp<std::int64_t>(Base::q_length(b) - first, 0, count);
    const T extra = Base::extra_logit(h);
    for (std::int64_t r = 0; r < count; ++r) {
      // Of an extra logit, the first term of the denominator; -infinity adds nothing.
      block.maximum[r] = std::isnan(extra) ? -kInfinity : extra;
      block.denominator[r] = extra == -kInfinity ? T{0} : std::isnan(extra) ? extra : T{1};
    }
    std::fill(block.sums, block.sums + value_elements(), T{0});
    const Span all = Base::visible(b, first, count, block.visible);
    if (!all.empty()) {
      Base::pack_lines(input(Slot::q).at, b, h, first, valid, sizes_.depth, mr_, block.lines,
                       block.queries);
      for (std::int64_t tile = all.begin / sizes_.tile; tile * sizes_.tile < all.end; ++tile) {
        columns(b, h, first, count, tile, all, block);
      }
    }
    finish(b, h, first, count, block);
  }

  // One tile of scores and what it adds.
  void columns(std::int64_t b, std::int64_t h, std::int64_t first, std::int64_t count,
               std::int64_t tile, Span all, Block& block) {
    const std::int64_t start = tile * sizes_.tile;
    const Span here = intersect(all, {start, start + sizes_.tile});
    const std::int64_t used = here.end - start;
    const std::int64_t at = column_tile(b, h / sizes_.group(), tile);
    Base::multiply(AForm::packed, block.queries, mr_ * sizes_.depth, keys_ + at * key_elements(),
                   nr_ * sizes_.depth, count, used, sizes_.depth, block.scores, sizes_.tile, false);
    for (std::int64_t r = 0; r < count; ++r) {
      const Span span = intersect(block.visible[r], here);
      T* row = block.scores + r * sizes_.tile;
      if (span.empty()) {
        std::fill(row, row + used, T{0});
        continue;
      }
      T* x = row + (span.begin - start);
      const std::int64_t width = span.end - span.begin;
      Base::score_row(b, h, first + r, span, x, block.buffer, nullptr);
      std::fill(row, x, T{0});
      std::fill(x + width, row + used, T{0});
      update(r, x, width, block);
    }
    if (values_finite_[at] != 0) {
      Base::multiply(AForm::tile_rows, block.scores, 0, values_ + at * value_elements(),
                     sizes_.tile * nr_, count, sizes_.value_depth_padded, used, block.sums,
                     sizes_.value_depth_padded, true);
    } else {
      Base::multiply_visible(block.scores, block.visible, count, start, false,
                             values_ + at * value_elements(), sizes_.value_depth_padded,
                             block.sums);
    }
  }

  // Scores x become probabilities relative to the row's running maximum.
  void update(std::int64_t r, T* x, std::int64_t width, Block& block) {
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

  void finish(std::int64_t b, std::int64_t h, std::int64_t first, std::int64_t count,
              Block& block) {
    for (std::int64_t r = 0; r < count; ++r) {
      const T denominator = block.denominator[r];
      T* sums = block.sums + r * sizes_.value_depth_padded;
      if (output(Slot::o).present) {
        if (denominator != 0) math().scale(sums, sizes_.value_depth, 1 / denominator);
        Base::store_row(output(Slot::o).at, b, h, first + r, sizes_.value_depth, sums);
      }
      if (output(Slot::stats).present) {
        const T log_sum = denominator == 0 ? -kInfinity : block.maximum[r] + std::log(denominator);
        Base::store_row(output(Slot::stats).at, b, h, first + r, 1, &log_sum);
      }
    }
  }

  T* keys_ = nullptr;    // per tile: transposed right operands of Q K^T
  T* values_ = nullptr;  // per tile: right operands of P V
  std::uint8_t* values_finite_ = nullptr;
  std::size_t workspace_ = 0;
};

}  // namespace

std::size_t attention_forward_workspace(const Kernels& kernels, const ir::Graph& graph,
                                        const AttentionStep& step) {
  return computes_in_f64(graph, step)
             ? AttentionForward<double>{kernels, graph, step, {}, nullptr}.workspace()
             : AttentionForward<float>{kernels, graph, step, {}, nullptr}.workspace();
}

Status run_attention_forward(const Kernels& kernels, const ir::Graph& graph,
                             const AttentionStep& step, const std::vector<std::byte*>& roots,
                             std::byte* workspace) {
  return computes_in_f64(graph, step)
             ? AttentionForward<double>{kernels, graph, step, roots, workspace}.run()
             : AttentionForward<float>{kernels, graph, step, roots, workspace}.run();
}

}  // namespace lawson::cpu
