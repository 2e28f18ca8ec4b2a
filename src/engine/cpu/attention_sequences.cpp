#include "engine/cpu/attention_sequences.h"

#include <cstring>

#include "engine/cpu/pool.h"

namespace lawson::cpu {
namespace {

using Slots = ir::AttentionSlots;

}  // namespace

Rows rows_of(const Location& location, const std::vector<std::byte*>& roots) {
  Rows rows;
  rows.data = roots[static_cast<std::size_t>(location.root)];
  rows.dtype = location.dtype;
  rows.offset = location.offset;
  std::copy(location.strides.begin(), location.strides.end(), rows.strides.begin());
  return rows;
}

std::int64_t integer_at(const Location& location, const std::vector<std::byte*>& roots,
                        std::int64_t offset) {
  const std::byte* data = roots[static_cast<std::size_t>(location.root)];
  if (location.dtype == DType::i64) {  // not every one fits a double
    std::int64_t value = 0;
    std::memcpy(&value, data + (location.offset + offset) * std::int64_t{sizeof value},
                sizeof value);
    return value;
  }
  return static_cast<std::int64_t>(load_element(data, location.dtype, location.offset + offset));
}

std::int64_t Side::most_tiles(std::int64_t batch) const {
  const std::int64_t most = memory_product(batch, blocks(longest, tile));
  // Each sequence but for its last tile fills tiles with tokens of its own.
  return start.empty() ? most : std::min(most, tokens / tile + batch);
}

void Side::count_tiles() {
  first_tile.assign(1, 0);
  for (std::int64_t b = 0; b < sequences(); ++b) {
    first_tile.push_back(first_tile.back() + blocks(covered(b), tile));
  }
}

Side::Tile Side::tile_at(std::int64_t number, std::int64_t heads) const {
  const auto after = std::upper_bound(first_tile.begin(), first_tile.end(), number / heads);
  const std::int64_t b = after - first_tile.begin() - 1;
  const std::int64_t rest = number - heads * first_tile[static_cast<std::size_t>(b)];
  return {b, rest / tiles(b), rest % tiles(b)};
}

Sequences::Sequences(const ir::Graph& graph, const AttentionStep& step,
                     const ir::AttentionRule& rule, const ir::AttentionGeometry& geometry,
                     std::int64_t tile)
    : graph_{graph}, step_{step}, rule_{rule}, batch_{geometry.batch} {
  const ir::Node& node = graph.nodes[static_cast<std::size_t>(step.node)];
  queries_.dense = !geometry.ragged_q;
  queries_.longest = geometry.rows;
  queries_.tile = tile;
  keys_.dense = !geometry.ragged_kv && !geometry.paged;
  keys_.longest = geometry.columns;
  keys_.tile = tile;
  if (geometry.ragged_q) {
    queries_.tokens = graph.tensor(node.inputs[Slots::q]).shape[2];
    queries_.start.assign(1, 0);
  }
  if (geometry.ragged_kv) {
    keys_.tokens = graph.tensor(node.inputs[Slots::k]).shape[2];
    keys_.start.assign(1, 0);
  }
  key_pages_.size = geometry.page_size_k;
  value_pages_.size = geometry.page_size_v;
}

const std::string& Sequences::name(Slot slot) const {
  const ir::Node& node = graph_.nodes[static_cast<std::size_t>(step_.node)];
  return graph_.tensor(node.inputs[slot]).name;
}

Status Sequences::read(const std::vector<std::byte*>& roots) {
  LAWSON_TRY(const std::int64_t count, read_count(roots));
  LAWSON_CHECK(read_side(queries_, Slots::seqlen_q, Slots::cu_seqlens_q, Slots::cu_seqlens_q_padded,
                         count, roots));
  LAWSON_CHECK(read_side(keys_, Slots::seqlen_kv, Slots::cu_seqlens_kv, Slots::cu_seqlens_kv_padded,
                         count, roots));
  LAWSON_CHECK(read_pages(key_pages_, Slots::page_table_k, Slots::k, roots));
  return read_pages(value_pages_, Slots::page_table_v, Slots::v, roots);
}

Result<std::int64_t> Sequences::read_count(const std::vector<std::byte*>& roots) const {
  const AttentionStep::Slot& slot = step_.inputs[Slots::sequences];
  if (!slot.present) return batch_;
  const std::int64_t count = integer_at(slot.at, roots, 0);
  if (count >= 0 && count <= batch_) return count;
  return invalid("cpu engine: '{}' is {}; expected 0 to {}, the sequences that there is room for",
                 name(Slots::sequences), count, batch_);
}

Status Sequences::read_side(Side& side, Slot lengths, Slot offsets, Slot padded, std::int64_t count,
                            const std::vector<std::byte*>& roots) const {
  const auto read = [&](Slot slot, std::int64_t n) {
    const Location& at = step_.inputs[slot].at;
    return integer_at(at, roots, n * at.strides[0]);
  };
  const bool ragged = step_.inputs[offsets].present;
  side.length.assign(static_cast<std::size_t>(count), side.longest);
  if (ragged || step_.inputs[lengths].present) {
    for (std::int64_t n = 0; n < count; ++n) {
      std::int64_t& length = side.length[static_cast<std::size_t>(n)];
      length = ragged ? read(offsets, n + 1) - read(offsets, n) : read(lengths, n);
      if (length < 0 || length > side.longest) {
        return invalid("cpu engine: '{}' gives sequence {} {} tokens; expected 0 to {}",
                       name(ragged ? offsets : lengths), n, length, side.longest);
      }
    }
  }
  if (ragged) LAWSON_CHECK(read_places(side, offsets, padded, count, roots));
  side.count_tiles();
  return {};
}

Status Sequences::read_places(Side& side, Slot offsets, Slot padded, std::int64_t count,
                              const std::vector<std::byte*>& roots) const {
  const Slot places = step_.inputs[padded].present ? padded : offsets;
  const Location& at = step_.inputs[places].at;
  side.start.clear();
  for (std::int64_t n = 0; n <= count; ++n) {
    side.start.push_back(integer_at(at, roots, n * at.strides[0]));
  }
  const std::int64_t first = integer_at(step_.inputs[offsets].at, roots, 0);
  if (first != 0) {
    return invalid("cpu engine: '{}' begins with {}; expected 0", name(offsets), first);
  }
  if (side.start.front() < 0) {
    return invalid("cpu engine: '{}' begins with {}; expected 0 or more", name(places),
                   side.start.front());
  }
  if (side.start.back() > side.tokens) {
    return invalid("cpu engine: '{}' ends with {}; the tensor has {} tokens", name(places),
                   side.start.back(), side.tokens);
  }
  for (std::int64_t n = 0; n < count; ++n) {
    const auto b = static_cast<std::size_t>(n);
    if (side.start[b + 1] - side.start[b] < side.length[b]) {
      return invalid("cpu engine: '{}' has {} tokens of room for sequence {}, which has {}",
                     name(places), side.start[b + 1] - side.start[b], n, side.length[b]);
    }
  }
  return {};
}

Status Sequences::read_pages(Pages& pages, Slot table, Slot cache,
                             const std::vector<std::byte*>& roots) const {
  if (pages.size == 0) return {};
  const ir::Node& node = graph_.nodes[static_cast<std::size_t>(step_.node)];
  const std::int64_t total = graph_.tensor(node.inputs[cache]).shape[0];
  const Location& at = step_.inputs[table].at;
  pages.per_sequence = blocks(keys_.longest, pages.size);
  pages.number.assign(static_cast<std::size_t>(count() * pages.per_sequence), 0);
  for (std::int64_t b = 0; b < count(); ++b) {
    for (std::int64_t p = 0; p * pages.size < keys_.length_of(b); ++p) {
      const std::int64_t page = integer_at(at, roots, b * at.strides[0] + p * at.strides[2]);
      if (page < 0 || page >= total) {
        return invalid("cpu engine: '{}' gives page {} of sequence {} as {}; expected 0 to {}",
                       name(table), p, b, page, total - 1);
      }
      pages.number[static_cast<std::size_t>(b * pages.per_sequence + p)] = page;
    }
  }
  return {};
}

Rows Sequences::query_rows(const Location& location, const std::vector<std::byte*>& roots) const {
  Rows rows = rows_of(location, roots);
  if (!queries_.start.empty()) rows.start = queries_.start.data();
  return rows;
}

Rows Sequences::key_rows(const Location& location, const std::vector<std::byte*>& roots) const {
  Rows rows = rows_of(location, roots);
  if (!keys_.start.empty()) rows.start = keys_.start.data();
  return rows;
}

Rows Sequences::key_cache(const std::vector<std::byte*>& roots) const {
  Rows rows = key_rows(step_.inputs[Slots::k].at, roots);
  if (key_pages_.size > 0) rows.pages = &key_pages_;
  return rows;
}

Rows Sequences::value_cache(const std::vector<std::byte*>& roots) const {
  Rows rows = key_rows(step_.inputs[Slots::v].at, roots);
  if (value_pages_.size > 0) rows.pages = &value_pages_;
  return rows;
}

Span Sequences::visible(std::int64_t b, std::int64_t i) const {
  if (i >= queries_.length_of(b)) return {};
  Span span{0, keys_.length_of(b)};
  const std::int64_t row = aligned_row(b, i);
  // A bound beyond both sides is none; the sums below cannot overflow then.
  const std::int64_t both = queries_.longest + keys_.longest;
  if (rule_.left >= 0 && rule_.left < both) span.begin = std::max(span.begin, row - rule_.left);
  if (rule_.right >= 0 && rule_.right < both) span.end = std::min(span.end, row + rule_.right + 1);
  return span.empty() ? Span{} : span;
}

Span Sequences::visible(std::int64_t b, std::int64_t first, std::int64_t count, Span* spans) const {
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

}  // namespace lawson::cpu
