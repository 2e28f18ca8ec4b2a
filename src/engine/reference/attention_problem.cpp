// What the operands of attention mean: which sequences there are, where their tokens lie, what a
// row sees, and what its scores are.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <tuple>

#include "base/philox.h"
#include "engine/reference/attention.h"

namespace lawson::reference {
namespace {

using Slot = ir::AttentionSlots;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::int64_t integer(const Array& array, std::int64_t at) {
  return static_cast<std::int64_t>(array.value[static_cast<std::size_t>(at)]);
}

std::uint64_t bits(const Array& array) {
  const std::int64_t word = array.exact.empty() ? integer(array, 0) : array.exact[0];
  return static_cast<std::uint64_t>(word);
}

// `padded` or, without it, `valid`.
std::int64_t end_of(const Array* valid, const Array* padded, std::int64_t sequences,
                    std::int64_t tokens) {
  const Array* offsets = padded != nullptr ? padded : valid;
  if (offsets == nullptr) return tokens;
  return std::clamp(integer(*offsets, sequences), std::int64_t{0}, tokens);
}

// `operand(slot)` gives what is loaded of it.
template <typename Operand>
AttentionParts parts_of(const ir::AttentionGeometry& geometry, std::int64_t tokens_q,
                        std::int64_t tokens_kv, Operand operand) {
  AttentionParts parts{geometry, geometry.batch, 0, 0};
  if (const Array* sequences = operand(Slot::sequences)) {
    parts.sequences = std::clamp(integer(*sequences, 0), std::int64_t{0}, geometry.batch);
  }
  parts.end_q = end_of(operand(Slot::cu_seqlens_q), operand(Slot::cu_seqlens_q_padded),
                       parts.sequences, tokens_q);
  parts.end_kv = end_of(operand(Slot::cu_seqlens_kv), operand(Slot::cu_seqlens_kv_padded),
                        parts.sequences, tokens_kv);
  return parts;
}

Dims part_of_operand(const AttentionParts& parts, std::size_t slot, const Dims& shape) {
  switch (slot) {
    case Slot::q:
    case ir::AttentionBackward::o:
    case ir::AttentionBackward::dout:
    case ir::AttentionBackward::stats:
      return parts.query(shape);
    case Slot::k:
    case Slot::v:
      return parts.key(shape);
    case Slot::bias:
    case Slot::mask:
      return parts.broadcast(shape);
    case Slot::seqlen_q:
    case Slot::seqlen_kv:
    case Slot::page_table_k:
    case Slot::page_table_v:
    case Slot::dropout_mask:
      return parts.batch(shape);
    case Slot::cu_seqlens_q:
    case Slot::cu_seqlens_kv:
    case Slot::cu_seqlens_q_padded:
    case Slot::cu_seqlens_kv_padded:
      return parts.offsets(shape);
    default:
      return shape;
  }
}

bool is_offsets(std::size_t slot) {
  return slot == Slot::cu_seqlens_q || slot == Slot::cu_seqlens_kv ||
         slot == Slot::cu_seqlens_q_padded || slot == Slot::cu_seqlens_kv_padded;
}

}  // namespace

// ---- what is there ----

Dims AttentionParts::query(Dims shape) const {
  if (geometry.ragged_q) {
    shape[2] = end_q;
  } else {
    shape[0] = sequences;
  }
  return shape;
}

Dims AttentionParts::key(Dims shape) const {
  if (geometry.ragged_kv) {
    shape[2] = end_kv;
  } else if (!geometry.paged) {
    shape[0] = sequences;
  }
  return shape;
}

Dims AttentionParts::batch(Dims shape) const {
  shape[0] = sequences;
  return shape;
}

Dims AttentionParts::broadcast(Dims shape) const {
  return shape[0] == 1 ? shape : batch(shape);
}

Dims AttentionParts::offsets(Dims shape) const {
  shape[0] = sequences + 1;
  return shape;
}

int load_order(const ir::Graph& graph, ir::TensorId id) {
  int order = 2;
  for (const ir::Node& node : graph.nodes) {
    if (ir::attention_rule(node.op) == nullptr) continue;
    for (std::size_t slot = 0; slot < node.inputs.size(); ++slot) {
      if (node.inputs[slot] != id) continue;
      if (slot == Slot::sequences) order = 0;
      if (is_offsets(slot)) order = std::min(order, 1);
    }
  }
  return order;
}

Dims input_part(const ir::Graph& graph, ir::TensorId id, const std::vector<Array>& loaded) {
  const ir::Tensor& tensor = graph.tensor(id);
  Dims part(tensor.shape.size(), 0);
  for (const ir::Node& node : graph.nodes) {
    const auto geometry = ir::attention_geometry(graph, node);
    for (std::size_t slot = 0; slot < node.inputs.size(); ++slot) {
      if (node.inputs[slot] != id) continue;
      if (!geometry) return tensor.shape;
      const auto operand = [&](std::size_t other) -> const Array* {
        const ir::TensorId operand_id = node.inputs[other];
        if (operand_id == ir::kNone) return nullptr;
        const Array& array = loaded[static_cast<std::size_t>(operand_id)];
        return array.size() > 0 ? &array : nullptr;
      };
      const AttentionParts parts = parts_of(*geometry, graph.tensor(node.inputs[Slot::q]).shape[2],
                                            graph.tensor(node.inputs[Slot::k]).shape[2], operand);
      const Dims own = part_of_operand(parts, slot, tensor.shape);
      for (std::size_t axis = 0; axis < part.size(); ++axis) {
        part[axis] = std::max(part[axis], own[axis]);
      }
    }
  }
  return part;
}

// ---- the problem ----

ScoreRow::ScoreRow(std::int64_t width)
    : visible(static_cast<std::size_t>(width)),
      scaled(visible.size()),
      score(visible.size()),
      dropout(visible.size(), 1.0) {}

AttentionProblem::AttentionProblem(const ir::Graph& graph, const ir::Node& node,
                                   const Operands& operands)
    : rule_{*ir::attention_rule(node.op)}, in_{operands} {
  parts_ = parts_of(*ir::attention_geometry(graph, node), q().shape[2], k().shape[2],
                    [&](int slot) { return operand(slot); });
  const auto strides = [&](const Array* array) {
    return array != nullptr ? broadcast_strides(array->shape, geometry().scores()) : Dims(4, 0);
  };
  bias_strides_ = strides(bias());
  mask_strides_ = strides(operand(Slot::mask));
  if (const Array* scale = operand(Slot::scale)) scale_ = scale->value[0];
  const auto side = [&](int valid, int padded, int lengths, std::int64_t full, std::int64_t b,
                        std::int64_t& length, std::int64_t& first) {
    length = full;
    if (const Array* own = operand(lengths)) length = integer(*own, b);
    if (const Array* offsets = operand(valid)) {
      first = integer(*offsets, b);
      length = integer(*offsets, b + 1) - first;
    }
    if (const Array* offsets = operand(padded)) first = integer(*offsets, b);
  };
  for (std::int64_t b = 0; b < parts_.sequences; ++b) {
    Sequence s;
    side(Slot::cu_seqlens_q, Slot::cu_seqlens_q_padded, Slot::seqlen_q, geometry().rows, b,
         s.q_length, s.q_first);
    side(Slot::cu_seqlens_kv, Slot::cu_seqlens_kv_padded, Slot::seqlen_kv, geometry().columns, b,
         s.kv_length, s.kv_first);
    sequences_.push_back(s);
  }
}

Status AttentionProblem::check() const {
  if (const Array* given = operand(Slot::sequences)) {
    const std::int64_t count = integer(*given, 0);
    if (count < 0 || count > geometry().batch) {
      return invalid("attention: sequences is {}; expected 0 to {}", count, geometry().batch);
    }
  }
  for (const auto& [slot, name, longest] :
       {std::tuple{Slot::seqlen_q, "seqlen_q", geometry().rows},
        std::tuple{Slot::seqlen_kv, "seqlen_kv", geometry().columns}}) {
    const Array* lengths = operand(slot);
    for (std::int64_t b = 0; lengths != nullptr && b < sequences(); ++b) {
      const std::int64_t length = integer(*lengths, b);
      if (length < 0 || length > longest) {
        return invalid("attention: {}[{}] is {}; expected 0 to {}", name, b, length, longest);
      }
    }
  }
  LAWSON_CHECK(
      check_offsets(Slot::cu_seqlens_q, Slot::cu_seqlens_q_padded, q().shape[2], geometry().rows));
  LAWSON_CHECK(check_offsets(Slot::cu_seqlens_kv, Slot::cu_seqlens_kv_padded, k().shape[2],
                             geometry().columns));
  LAWSON_CHECK(check_pages(Slot::page_table_k, geometry().page_size_k, k().shape[0]));
  return check_pages(Slot::page_table_v, geometry().page_size_v, v().shape[0]);
}

Status AttentionProblem::check_offsets(int valid, int padded, std::int64_t tokens,
                                       std::int64_t longest) const {
  const Array* offsets = operand(valid);
  if (offsets == nullptr) return {};
  const char* side = valid == Slot::cu_seqlens_q ? "q" : "kv";
  if (integer(*offsets, 0) != 0) {
    return invalid("attention: cu_seqlens_{}[0] is {}; expected 0", side, integer(*offsets, 0));
  }
  const Array& memory = operand(padded) != nullptr ? *operand(padded) : *offsets;
  if (integer(memory, 0) < 0) {
    return invalid("attention: cu_seqlens_{}_padded[0] is {}; expected 0 or more", side,
                   integer(memory, 0));
  }
  for (std::int64_t b = 0; b < sequences(); ++b) {
    const std::int64_t length = integer(*offsets, b + 1) - integer(*offsets, b);
    const std::int64_t room = integer(memory, b + 1) - integer(memory, b);
    if (length < 0 || length > longest || length > room) {
      return invalid(
          "attention: sequence {} of {} has {} tokens in memory for {}; expected 0 to {} that fit",
          b, side, length, room, longest);
    }
  }
  if (integer(memory, sequences()) > tokens) {
    return invalid("attention: the sequences of {} end at token {} of {}", side,
                   integer(memory, sequences()), tokens);
  }
  return {};
}

Status AttentionProblem::check_pages(int table, std::int64_t page_size, std::int64_t pages) const {
  const Array* entries = operand(table);
  for (std::int64_t b = 0; entries != nullptr && b < sequences(); ++b) {
    for (std::int64_t n = 0; n * page_size < sequence(b).kv_length; ++n) {
      if (page(table, b, n) < 0 || page(table, b, n) >= pages) {
        return invalid("attention: page_table_{}[{}, {}] is {}; expected 0 to {}",
                       table == Slot::page_table_k ? "k" : "v", b, n, page(table, b, n), pages - 1);
      }
    }
  }
  return {};
}

// ---- where things are ----

std::size_t AttentionProblem::query(std::int64_t b, std::int64_t h, std::int64_t i) const {
  const std::int64_t entry = geometry().ragged_q ? 0 : b;
  return static_cast<std::size_t>((entry * heads() + h) * q().shape[2] + sequence(b).q_first + i);
}

std::int64_t AttentionProblem::page(int table, std::int64_t b, std::int64_t number) const {
  const Array& entries = *operand(table);
  return integer(entries, b * entries.shape[2] + number);
}

namespace {

std::size_t row_number(std::int64_t entry, std::int64_t head, std::int64_t s, const Array& array) {
  return static_cast<std::size_t>((entry * array.shape[1] + head) * array.shape[2] + s);
}

}  // namespace

std::size_t AttentionProblem::key(std::int64_t b, std::int64_t h, std::int64_t j) const {
  const std::int64_t size = geometry().page_size_k;
  if (geometry().paged) {
    return row_number(page(Slot::page_table_k, b, j / size), kv_head(h), j % size, k());
  }
  return row_number(geometry().ragged_kv ? 0 : b, kv_head(h), sequence(b).kv_first + j, k());
}

std::size_t AttentionProblem::value(std::int64_t b, std::int64_t h, std::int64_t j) const {
  const std::int64_t size = geometry().page_size_v;
  if (geometry().paged) {
    return row_number(page(Slot::page_table_v, b, j / size), kv_head(h), j % size, v());
  }
  return row_number(geometry().ragged_kv ? 0 : b, kv_head(h), sequence(b).kv_first + j, v());
}

// ---- what a row sees ----

std::int64_t AttentionProblem::aligned_row(std::int64_t b, std::int64_t i) const {
  if (rule_.alignment == ir::Alignment::top_left) return i;
  return i + sequence(b).kv_length - sequence(b).q_length;
}

Span AttentionProblem::columns(std::int64_t b, std::int64_t i) const {
  if (i >= sequence(b).q_length) return {};
  Span span{0, sequence(b).kv_length};
  const std::int64_t row = aligned_row(b, i);
  // Bounds beyond any row or column, but within what can be added to them.
  constexpr std::int64_t kFar = 4 * kMaxDim;
  if (rule_.left >= 0) span.begin = std::max(span.begin, row - std::min(rule_.left, kFar));
  if (rule_.right >= 0) span.end = std::min(span.end, row + std::min(rule_.right, kFar) + 1);
  return span.begin < span.end ? span : Span{};
}

bool AttentionProblem::visible(std::int64_t b, std::int64_t h, std::int64_t i,
                               std::int64_t j) const {
  if (!columns(b, i).holds(j)) return false;
  const Array* mask = operand(Slot::mask);
  return mask == nullptr || mask->dtype != DType::boolean || mask->value[mask_at(b, h, i, j)] != 0;
}

// ---- scores ----

double dot(const double* a, const double* b, std::size_t n) {
  std::array<double, 4> sums{};
  std::size_t c = 0;
  for (; c + 4 <= n; c += 4) {
    for (std::size_t lane = 0; lane < 4; ++lane) sums[lane] += a[c + lane] * b[c + lane];
  }
  for (; c < n; ++c) sums[0] += a[c] * b[c];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

double AttentionProblem::scale_error() const {
  const Array* scale = operand(Slot::scale);
  return scale != nullptr ? scale->error_at(0) : 0.0;
}

const Array* AttentionProblem::additive_mask() const {
  const Array* mask = operand(Slot::mask);
  return mask != nullptr && mask->dtype != DType::boolean ? mask : nullptr;
}

// Press et al. 2022: powers of 2^(-8/n) for n = 2^k heads; other head counts take the slopes of the
// power of two below, then every second one of twice that power.
double AttentionProblem::slope(std::int64_t h) const {
  if (const Array* slopes = operand(Slot::slopes)) {
    return slopes->value[static_cast<std::size_t>(h)];
  }
  std::int64_t power = 1;
  while (power * 2 <= heads()) power *= 2;
  if (h < power) {
    return std::exp2(-8.0 * static_cast<double>(h + 1) / static_cast<double>(power));
  }
  const std::int64_t odd = 2 * (h - power) + 1;
  return std::exp2(-8.0 * static_cast<double>(odd) / static_cast<double>(2 * power));
}

double AttentionProblem::alibi_term(std::int64_t b, std::int64_t h, std::int64_t i,
                                    std::int64_t j) const {
  if (!rule_.alibi) return 0;
  return slope(h) * static_cast<double>(j - aligned_row(b, i));
}

double AttentionProblem::capped(double scaled) const {
  return rule_.softcap > 0 ? rule_.softcap * std::tanh(scaled / rule_.softcap) : scaled;
}

double AttentionProblem::cap_slope(double scaled) const {
  if (rule_.softcap <= 0) return 1;
  const double t = std::tanh(scaled / rule_.softcap);
  return 1 - t * t;
}

double AttentionProblem::score(double scaled, std::int64_t b, std::int64_t h, std::int64_t i,
                               std::int64_t j) const {
  double x = capped(scaled);
  if (bias() != nullptr && !rule_.pre_scale_bias) x += bias()->value[bias_at(b, h, i, j)];
  if (const Array* mask = additive_mask()) x += mask->value[mask_at(b, h, i, j)];
  return x + alibi_term(b, h, i, j);
}

double AttentionProblem::extra_logit(std::int64_t h) const {
  switch (rule_.softmax) {
    case ir::SoftmaxKind::vanilla:
      return -kInfinity;
    case ir::SoftmaxKind::off_by_one:
      return 0;
    case ir::SoftmaxKind::learnable:
      return sink()->value[static_cast<std::size_t>(h)];
  }
  return -kInfinity;
}

void AttentionProblem::kept(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t from,
                            std::span<std::uint8_t> result) const {
  const auto first = static_cast<std::size_t>(
      ((b * heads() + h) * geometry().rows + i) * geometry().columns + from);
  if (const Array* mask = operand(Slot::dropout_mask)) {
    for (std::size_t n = 0; n < result.size(); ++n) result[n] = mask->value[first + n] != 0 ? 1 : 0;
    return;
  }
  const DropoutStream stream{bits(*operand(Slot::seed)), bits(*operand(Slot::offset)),
                             rule_.dropout};
  stream.fill(first, result);
}

void AttentionProblem::begin_row(std::int64_t b, std::int64_t h, std::int64_t i,
                                 ScoreRow& row) const {
  row.columns = columns(b, i);
  for (std::int64_t j = row.columns.begin; j < row.columns.end; ++j) {
    row.visible[static_cast<std::size_t>(j)] = visible(b, h, i, j) ? 1 : 0;
  }
  if (rule_.dropout == 0) return;
  std::vector<std::uint8_t> bits_of_row(
      static_cast<std::size_t>(row.columns.end - row.columns.begin));
  kept(b, h, i, row.columns.begin, bits_of_row);
  const double factor = 1 / (1 - rule_.dropout);
  for (std::size_t n = 0; n < bits_of_row.size(); ++n) {
    row.dropout[static_cast<std::size_t>(row.columns.begin) + n] = bits_of_row[n] != 0 ? factor : 0;
  }
}

void AttentionProblem::scores(std::int64_t b, std::int64_t h, std::int64_t i, ScoreRow& row) const {
  begin_row(b, h, i, row);
  const double* query_row = q().value.data() + query(b, h, i) * depth();
  for (std::int64_t j = row.columns.begin; j < row.columns.end; ++j) {
    const auto at = static_cast<std::size_t>(j);
    row.score[at] = -kInfinity;
    if (row.visible[at] == 0) continue;
    double product = dot(query_row, k().value.data() + key(b, h, j) * depth(), depth());
    if (rule_.pre_scale_bias) product += bias()->value[bias_at(b, h, i, j)];
    row.scaled[at] = scale_ * product;
    row.score[at] = score(row.scaled[at], b, h, i, j);
  }
}

}  // namespace lawson::reference
