#include "engine/cpu/attention.h"

namespace lawson::cpu {

template <typename T>
AttentionBase<T>::AttentionBase(const Kernels& kernels, const ir::Graph& graph,
                                const AttentionStep& step, const std::vector<std::byte*>& roots)
    : kernels_{kernels},
      step_{step},
      roots_{roots},
      rule_{*ir::attention_rule(graph.nodes[static_cast<std::size_t>(step.node)].op)},
      sizes_{*ir::attention_geometry(graph, graph.nodes[static_cast<std::size_t>(step.node)])},
      sequences_{graph, step, rule_, sizes_, kernels.tile},
      mr_{kernels.mr},
      nr_{kernels.product<T>().nr} {
  sizes_.tile = kernels.tile;
  sizes_.depth_padded = round_up(sizes_.depth, nr_);
  sizes_.value_depth_padded = round_up(sizes_.value_depth, nr_);
}

template <typename T>
Status AttentionBase<T>::prepare() {
  if (input(Slots::scale).present) scale_ = scalar(input(Slots::scale).at, 0);
  bias_ = score_rows(Slots::bias);
  if (const auto mask = score_rows(Slots::mask)) {
    (mask->dtype == DType::boolean ? keep_ : added_mask_) = mask;
  }
  given_dropout_ = score_rows(Slots::dropout_mask);
  if (input(Slots::seed).present) {
    seed_ = static_cast<std::uint64_t>(integer_at(input(Slots::seed).at, roots_, 0));
    offset_ = static_cast<std::uint64_t>(integer_at(input(Slots::offset).at, roots_, 0));
  }
  return sequences_.read(roots_);
}

template <typename T>
std::optional<Rows> AttentionBase<T>::score_rows(int slot) const {
  if (!input(slot).present) return std::nullopt;
  return rows_of(input(slot).at, roots_);
}

template <typename T>
Status AttentionBase<T>::clear_gaps(const Side& side, const Rows& rows, std::int64_t heads,
                                    std::int64_t count) const {
  if (rows.start == nullptr) return {};
  Rows whole = rows;
  whole.start = nullptr;
  const std::int64_t gaps = side.sequences() + 1;
  return parallel_for(heads * gaps, static_cast<std::size_t>(count) * sizeof(T),
                      [&](std::int64_t task, std::byte* scratch) {
                        const std::int64_t b = task % gaps;  // the gap before this sequence
                        T* zeros = reinterpret_cast<T*>(scratch);
                        std::fill(zeros, zeros + count, T{0});
                        const std::int64_t begin =
                            b == 0 ? 0 : rows.start[b - 1] + side.length_of(b - 1);
                        for (std::int64_t s = begin; s < rows.start[b]; ++s) {
                          store_row(whole, 0, task / gaps, s, count, zeros);
                        }
                      });
}

template <typename T>
T AttentionBase<T>::extra_logit(std::int64_t h) const {
  switch (rule_.softmax) {
    case ir::SoftmaxKind::vanilla:
      return -kInfinity;
    case ir::SoftmaxKind::off_by_one:
      return 0;
    case ir::SoftmaxKind::learnable: {
      const Location& sink = input(Slots::sink).at;
      return static_cast<T>(scalar(sink, h * sink.strides[1]));
    }
  }
  return -kInfinity;
}

// Without the operand by Press et al. 2022: powers of 2^(-8/n) for n = 2^k heads; other head counts
// take the slopes of the power of two below, then every second one of twice that power.
template <typename T>
T AttentionBase<T>::slope(std::int64_t h) const {
  if (input(Slots::slopes).present) {
    const Location& slopes = input(Slots::slopes).at;
    return static_cast<T>(scalar(slopes, h * slopes.strides[1]));
  }
  std::int64_t power = 1;
  while (power * 2 <= sizes_.heads) power *= 2;
  const bool regular = h < power;
  const std::int64_t step = regular ? h + 1 : 2 * (h - power) + 1;
  const std::int64_t steps = regular ? power : 2 * power;
  return static_cast<T>(std::exp2(-8.0 * static_cast<double>(step) / static_cast<double>(steps)));
}

template <typename T>
void AttentionBase<T>::add_rows(const Rows& rows, std::int64_t b, std::int64_t h, std::int64_t i,
                                Span span, T* x, T* buffer) const {
  const std::int64_t count = span.end - span.begin;
  const std::int64_t first = rows.at(b, h, i) + span.begin * rows.strides[3];
  load_elements(kernels_, rows.data, rows.dtype, first, rows.strides[3], count, buffer);
  math().add(x, buffer, count);
}

template <typename T>
void AttentionBase<T>::score_row(std::int64_t b, std::int64_t h, std::int64_t i, Span span, T* x,
                                 T* buffer, T* cap_slope) const {
  const std::int64_t count = span.end - span.begin;
  if (bias_ && rule_.pre_scale_bias) add_rows(*bias_, b, h, i, span, x, buffer);
  if (scale_ != 1) math().scale(x, count, static_cast<T>(scale_));
  if (rule_.softcap > 0) {
    const T cap = static_cast<T>(rule_.softcap);
    math().softcap(x, count, cap);
    for (std::int64_t j = 0; cap_slope != nullptr && j < count; ++j) {
      const T t = x[j] / cap;
      cap_slope[j] = 1 - t * t;
    }
  }
  if (bias_ && !rule_.pre_scale_bias) add_rows(*bias_, b, h, i, span, x, buffer);
  if (added_mask_) add_rows(*added_mask_, b, h, i, span, x, buffer);
  if (rule_.alibi) {
    const T step = slope(h);
    const std::int64_t distance = span.begin - sequences_.aligned_row(b, i);
    math().add_ramp(x, count, step * static_cast<T>(distance), step);
  }
  if (keep_) hide(b, h, i, span, x, -kInfinity);
}

template <typename T>
const std::uint8_t* AttentionBase<T>::bytes_at(const Rows& rows, std::int64_t b, std::int64_t h,
                                               std::int64_t i, std::int64_t j) const {
  return reinterpret_cast<const std::uint8_t*>(rows.data) + rows.at(b, h, i) + j * rows.strides[3];
}

template <typename T>
void AttentionBase<T>::hide(std::int64_t b, std::int64_t h, std::int64_t i, Span span, T* x,
                            T value) const {
  const std::uint8_t* keep = bytes_at(*keep_, b, h, i, span.begin);
  const std::int64_t stride = keep_->strides[3];
  const std::int64_t count = span.end - span.begin;
  if (stride == 1) {
    math().hide(x, keep, count, value);
  } else {
    for (std::int64_t j = 0; j < count; ++j) x[j] = keep[j * stride] != 0 ? x[j] : value;
  }
}

template <typename T>
void AttentionBase<T>::fill_kept(std::int64_t b, std::int64_t h, std::int64_t i, Span span,
                                 std::uint8_t* kept) const {
  const std::int64_t count = span.end - span.begin;
  if (given_dropout_) {
    const std::uint8_t* mask = bytes_at(*given_dropout_, b, h, i, span.begin);
    for (std::int64_t j = 0; j < count; ++j) {
      kept[j] = mask[j * given_dropout_->strides[3]] != 0 ? 1 : 0;
    }
    return;
  }
  const std::int64_t row = (b * sizes_.heads + h) * sizes_.rows + i;
  kernels_.keep(seed_, offset_, static_cast<std::uint32_t>(rule_.dropout * 0x1p32),
                static_cast<std::uint64_t>(row * sizes_.columns + span.begin), kept, count);
}

template <typename T>
void AttentionBase<T>::pack_lines(const Rows& from, std::int64_t b, std::int64_t h,
                                  std::int64_t first, std::int64_t count, std::int64_t depth,
                                  std::int64_t width, T* lines, T* packed) const {
  for (std::int64_t panel = 0; panel < sizes_.tile; panel += width, packed += width * depth) {
    const std::int64_t used = std::clamp<std::int64_t>(count - panel, 0, width);
    for (std::int64_t r = 0; r < used; ++r) {
      load_row(from, b, h, first + panel + r, depth, lines + r * depth);
    }
    if (used < width) std::fill(packed, packed + width * depth, T{0});
    for (std::int64_t c = 0; c < depth; ++c) {
      for (std::int64_t r = 0; r < used; ++r) packed[c * width + r] = lines[r * depth + c];
    }
  }
}

template <typename T>
bool AttentionBase<T>::pack_rows(const Rows& from, std::int64_t b, std::int64_t h,
                                 std::int64_t first, std::int64_t count, std::int64_t depth,
                                 std::int64_t depth_padded, T* line, T* packed) const {
  bool finite = true;
  std::fill(line + depth, line + depth_padded, T{0});
  const std::int64_t panels = depth_padded / nr_;
  for (std::int64_t r = 0; r < sizes_.tile; ++r) {
    if (r < count) {
      load_row(from, b, h, first + r, depth, line);
      finite = math().finite(line, depth) && finite;
    } else if (r == count) {
      std::fill(line, line + depth, T{0});
    }
    for (std::int64_t p = 0; p < panels; ++p) {
      std::copy(line + p * nr_, line + (p + 1) * nr_, packed + (p * sizes_.tile + r) * nr_);
    }
  }
  return finite;
}

template <typename T>
void AttentionBase<T>::multiply(AForm form, const T* left, std::int64_t left_panel, const T* right,
                                std::int64_t right_panel, std::int64_t m, std::int64_t n,
                                std::int64_t k, T* c, std::int64_t ldc, bool accumulate) const {
  TileProduct<T> product;
  product.c = c;
  product.ldc = ldc;
  product.a = left;
  product.a_panel = left_panel;
  product.b = right;
  product.b_panel = right_panel;
  product.m = round_up(m, mr_);
  product.n = round_up(n, nr_);
  product.k = k;
  product.accumulate = accumulate;
  kernels_.product<T>().product[static_cast<int>(form)](product);
}

template <typename T>
void AttentionBase<T>::multiply_visible(const TileAt& at, const T* tile, const Span* spans,
                                        bool transposed, const T* right, std::int64_t n,
                                        T* c) const {
  for (std::int64_t row = 0; row < at.rows; ++row) {
    const Span span = intersect(spans[row], {at.start, at.start + sizes_.tile});
    for (std::int64_t column = span.begin; column < span.end; ++column) {
      if (keep_ && *bytes_at(*keep_, at.b, at.h, at.first + row, column) == 0) continue;
      const std::int64_t j = column - at.start;
      const std::int64_t to = transposed ? j : row;
      const std::int64_t from = transposed ? row : j;
      for (std::int64_t p = 0; p < n / nr_; ++p) {
        math().add_scaled(c + to * n + p * nr_, right + (p * sizes_.tile + from) * nr_, nr_,
                          tile[row * sizes_.tile + j]);
      }
    }
  }
}

template class AttentionBase<float>;
template class AttentionBase<double>;

namespace {

std::unique_ptr<AttentionPass> pass_of(const Kernels& kernels, const ir::Graph& graph,
                                       const AttentionStep& step,
                                       const std::vector<std::byte*>& roots, std::byte* workspace) {
  const ir::Node& node = graph.nodes[static_cast<std::size_t>(step.node)];
  return std::holds_alternative<ir::Attention>(node.op)
             ? attention_forward(kernels, graph, step, roots, workspace)
             : attention_backward(kernels, graph, step, roots, workspace);
}

}  // namespace

std::size_t attention_workspace(const Kernels& kernels, const ir::Graph& graph,
                                const AttentionStep& step) {
  const ir::Node& node = graph.nodes[static_cast<std::size_t>(step.node)];
  if (std::holds_alternative<ir::CacheAppend>(node.op)) return 0;
  return pass_of(kernels, graph, step, {}, nullptr)->workspace();
}

Status run_attention(const Kernels& kernels, const ir::Graph& graph, const AttentionStep& step,
                     const std::vector<std::byte*>& roots, std::byte* workspace) {
  const ir::Node& node = graph.nodes[static_cast<std::size_t>(step.node)];
  if (std::holds_alternative<ir::CacheAppend>(node.op)) return run_cache_append(graph, step, roots);
  return pass_of(kernels, graph, step, roots, workspace)->run();
}

}  // namespace lawson::cpu
