#include "engine/cpu/attention.h"

namespace lawson::cpu {
namespace {

std::int64_t round_up(std::int64_t value, std::int64_t unit) {
  return (value + unit - 1) / unit * unit;
}

}  // namespace

template <typename T>
AttentionBase<T>::AttentionBase(const Kernels& kernels, const ir::Graph& graph,
                                const AttentionStep& step, const std::vector<std::byte*>& roots,
                                const ir::AttentionRule& rule, const AttentionSlots& slots)
    : kernels_{kernels},
      step_{step},
      roots_{roots},
      slots_{slots},
      mr_{kernels.mr},
      nr_{kernels.product<T>().nr} {
  const ir::Node& node = graph.nodes[static_cast<std::size_t>(step.node)];
  const auto shape = [&](int slot) -> const Dims& {
    return graph.tensor(node.inputs[static_cast<std::size_t>(slot)]).shape;
  };
  const Dims& q = shape(slots.q);
  const Dims& k = shape(slots.k);
  sizes_.rule = rule;
  sizes_.batch = q[0];
  sizes_.heads = q[1];
  sizes_.kv_heads = k[1];
  sizes_.rows = q[2];
  sizes_.columns = k[2];
  sizes_.depth = q[3];
  sizes_.value_depth = shape(slots.v)[3];
  sizes_.tile = kernels.tile;
  sizes_.depth_padded = round_up(sizes_.depth, nr_);
  sizes_.value_depth_padded = round_up(sizes_.value_depth, nr_);
  if (!roots.empty() && input(slots.scale).present) scale_ = scalar(input(slots.scale).at, 0);
}

template <typename T>
void AttentionBase<T>::load_row(const Location& from, std::int64_t b, std::int64_t h,
                                std::int64_t s, std::int64_t count, T* out) const {
  const Dims& strides = from.strides;
  load_elements(kernels_, data(from), from.dtype,
                from.offset + b * strides[0] + h * strides[1] + s * strides[2], strides[3], count,
                out);
}

template <typename T>
void AttentionBase<T>::store_row(const Location& to, std::int64_t b, std::int64_t h, std::int64_t s,
                                 std::int64_t count, const T* values) const {
  const Dims& strides = to.strides;
  store_elements(kernels_, data(to), to.dtype,
                 to.offset + b * strides[0] + h * strides[1] + s * strides[2], strides[3], count,
                 values);
}

template <typename T>
std::int64_t AttentionBase<T>::length(int slot, std::int64_t b, std::int64_t full) const {
  if (!input(slot).present) return full;
  const Location& lengths = input(slot).at;
  const auto value = static_cast<std::int64_t>(scalar(lengths, b * lengths.strides[0]));
  return std::clamp(value, std::int64_t{0}, full);
}

template <typename T>
std::int64_t AttentionBase<T>::aligned_row(std::int64_t b, std::int64_t i) const {
  if (sizes_.rule.alignment == ir::Alignment::top_left) return i;
  return i + kv_length(b) - q_length(b);
}

template <typename T>
Span AttentionBase<T>::visible(std::int64_t b, std::int64_t i) const {
  if (i >= q_length(b)) return {};
  Span span{0, kv_length(b)};
  const std::int64_t row = aligned_row(b, i);
  const ir::AttentionRule& rule = sizes_.rule;
  // A bound beyond the tensor is none; the sums below cannot overflow then.
  if (rule.left >= 0 && rule.left < sizes_.rows + sizes_.columns) {
    span.begin = std::max(span.begin, row - rule.left);
  }
  if (rule.right >= 0 && rule.right < sizes_.rows + sizes_.columns) {
    span.end = std::min(span.end, row + rule.right + 1);
  }
  return span.empty() ? Span{} : span;
}

template <typename T>
Span AttentionBase<T>::visible(std::int64_t b, std::int64_t first, std::int64_t count,
                               Span* spans) const {
  // Both ends of the interval grow with the row, but rows that see nothing have none.
  Span all;
  for (std::int64_t r = 0; r < count; ++r) {
    spans[r] = visible(b, first + r);
    if (spans[r].empty()) continue;
    if (all.empty()) all.begin = spans[r].begin;
    all.end = spans[r].end;
  }
  return all;
}

template <typename T>
T AttentionBase<T>::extra_logit(std::int64_t h) const {
  switch (sizes_.rule.softmax) {
    case ir::SoftmaxKind::vanilla:
      return -kInfinity;
    case ir::SoftmaxKind::off_by_one:
      return 0;
    case ir::SoftmaxKind::learnable: {
      const Location& sink = input(slots_.sink).at;
      return static_cast<T>(scalar(sink, h * sink.strides[1]));
    }
  }
  return -kInfinity;
}

// Press et al. 2022: powers of 2^(-8/n) for n = 2^k heads; other head counts take the slopes of
// the power of two below, then every second one of twice that power.
template <typename T>
T AttentionBase<T>::alibi_slope(std::int64_t h) const {
  std::int64_t power = 1;
  while (power * 2 <= sizes_.heads) power *= 2;
  const bool regular = h < power;
  const std::int64_t step = regular ? h + 1 : 2 * (h - power) + 1;
  const std::int64_t steps = regular ? power : 2 * power;
  return static_cast<T>(std::exp2(-8.0 * static_cast<double>(step) / static_cast<double>(steps)));
}

template <typename T>
void AttentionBase<T>::score_row(std::int64_t b, std::int64_t h, std::int64_t i, Span span, T* x,
                                 T* buffer, T* cap_slope) const {
  const std::int64_t count = span.end - span.begin;
  const ir::AttentionRule& rule = sizes_.rule;
  if (scale_ != 1) math().scale(x, count, static_cast<T>(scale_));
  if (rule.softcap > 0) {
    const T cap = static_cast<T>(rule.softcap);
    math().softcap(x, count, cap);
    for (std::int64_t j = 0; cap_slope != nullptr && j < count; ++j) {
      const T t = x[j] / cap;
      cap_slope[j] = 1 - t * t;
    }
  }
  if (input(slots_.bias).present) {
    // Strides of broadcast axes are 0 (see run_attention).
    Location bias = input(slots_.bias).at;
    bias.offset += span.begin * bias.strides[3];
    load_row(bias, b, h, i, count, buffer);
    math().add(x, buffer, count);
  }
  if (rule.alibi) {
    const T slope = alibi_slope(h);
    math().add_ramp(x, count, slope * static_cast<T>(span.begin - aligned_row(b, i)), slope);
  }
}

template <typename T>
void AttentionBase<T>::pack_lines(const Location& from, std::int64_t b, std::int64_t h,
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
bool AttentionBase<T>::pack_rows(const Location& from, std::int64_t b, std::int64_t h,
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
  products().product[static_cast<int>(form)](product);
}

template <typename T>
void AttentionBase<T>::multiply_visible(const T* tile, const Span* spans, std::int64_t rows,
                                        std::int64_t start, bool transposed, const T* right,
                                        std::int64_t n, T* c) const {
  for (std::int64_t row = 0; row < rows; ++row) {
    const Span span = intersect(spans[row], {start, start + sizes_.tile});
    for (std::int64_t j = span.begin - start; j < span.end - start; ++j) {
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

std::size_t attention_workspace(const Kernels& kernels, const ir::Graph& graph,
                                const AttentionStep& step) {
  const ir::Node& node = graph.nodes[static_cast<std::size_t>(step.node)];
  return std::holds_alternative<ir::Attention>(node.op)
             ? attention_forward_workspace(kernels, graph, step)
             : attention_backward_workspace(kernels, graph, step);
}

Status run_attention(const Kernels& kernels, const ir::Graph& graph, const AttentionStep& step,
                     const std::vector<std::byte*>& roots, std::byte* workspace) {
  const ir::Node& node = graph.nodes[static_cast<std::size_t>(step.node)];
  return std::holds_alternative<ir::Attention>(node.op)
             ? run_attention_forward(kernels, graph, step, roots, workspace)
             : run_attention_backward(kernels, graph, step, roots, workspace);
}

}  // namespace lawson::cpu
