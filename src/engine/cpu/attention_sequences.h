// Where the tokens of each sequence of an attention are in memory, how each side is cut into tiles,
// and which columns a row sees. A row sees an interval of columns: causal, window and padding are
// intervals. An explicit mask hides some of them again.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/cpu/program.h"
#include "ir/attention.h"

namespace lawson::cpu {

// A half-open interval of columns.
struct Span {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  bool empty() const { return begin >= end; }
};

inline Span intersect(Span a, Span b) {
  return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
}

// One side of the scores, the queries or the keys: its sequences, and its tiles in the order of
// sequence, head and row. Batch entries behind the last sequence have neither.
struct Side {
  bool dense = true;  // each sequence has as many rows in memory as the longest
  std::int64_t longest = 0;
  std::int64_t tokens = 0;  // ragged: rows of the tensor
  std::int64_t tile = 0;
  std::vector<std::int64_t> length;
  std::vector<std::int64_t> start;       // ragged: first row in memory, and the last one's end
  std::vector<std::int64_t> first_tile;  // of each sequence, of one head; then the sum

  std::int64_t sequences() const { return static_cast<std::int64_t>(length.size()); }
  std::int64_t length_of(std::int64_t b) const { return length[static_cast<std::size_t>(b)]; }
  // Rows that tiles cover: of a dense side the padding too, since results have it.
  std::int64_t covered(std::int64_t b) const { return dense ? longest : length_of(b); }
  std::int64_t tiles(std::int64_t b) const {
    const auto at = static_cast<std::size_t>(b);
    return first_tile[at + 1] - first_tile[at];
  }
  std::int64_t tiles_of_all(std::int64_t heads) const { return heads * first_tile.back(); }
  // More than any lengths make of `batch` sequences.
  std::int64_t most_tiles(std::int64_t batch) const;

  struct Tile {
    std::int64_t b, head, tile;
  };
  Tile tile_at(std::int64_t number, std::int64_t heads) const;
  std::int64_t tile_number(const Tile& at, std::int64_t heads) const {
    const auto b = static_cast<std::size_t>(at.b);
    return heads * first_tile[b] + at.head * tiles(at.b) + at.tile;
  }
  void count_tiles();
};

struct Pages {
  std::int64_t size = 0;  // tokens; 0: not paged
  std::int64_t per_sequence = 0;
  std::vector<std::int64_t> number;
};

// A rank-4 operand or result [b, h, s, d] whose s runs over the rows of a sequence.
struct Rows {
  std::byte* data = nullptr;
  DType dtype = DType::f32;
  std::int64_t offset = 0;
  std::array<std::int64_t, 4> strides{};  // 0 where the size is 1
  const std::int64_t* start = nullptr;    // ragged: Side::start
  const Pages* pages = nullptr;

  std::int64_t at(std::int64_t b, std::int64_t h, std::int64_t s) const {
    if (pages != nullptr) {
      b = pages->number[static_cast<std::size_t>(b * pages->per_sequence + s / pages->size)];
      s %= pages->size;
    } else if (start != nullptr) {
      s += start[b];
    }
    return offset + b * strides[0] + h * strides[1] + s * strides[2];
  }
};

Rows rows_of(const Location& location, const std::vector<std::byte*>& roots);

class Sequences {
 public:
  Sequences(const ir::Graph& graph, const AttentionStep& step, const ir::AttentionRule& rule,
            const ir::AttentionGeometry& geometry, std::int64_t tile);

  // Reads lengths, offsets and page tables. What would lead outside of the tensors is an error that
  // names operand, sequence and what is allowed.
  Status read(const std::vector<std::byte*>& roots);

  const Side& queries() const { return queries_; }
  const Side& keys() const { return keys_; }
  std::int64_t count() const { return queries_.sequences(); }

  Rows query_rows(const Location& location, const std::vector<std::byte*>& roots) const;
  Rows key_rows(const Location& location, const std::vector<std::byte*>& roots) const;
  // Of the caches themselves, which may be paged.
  Rows key_cache(const std::vector<std::byte*>& roots) const;
  Rows value_cache(const std::vector<std::byte*>& roots) const;

  // The row's position on the column axis, i' of ops.h.
  std::int64_t aligned_row(std::int64_t b, std::int64_t i) const {
    if (rule_.alignment == ir::Alignment::top_left) return i;
    return i + keys_.length_of(b) - queries_.length_of(b);
  }
  Span visible(std::int64_t b, std::int64_t i) const;
  // The same of `count` rows from `first` on; returns the columns that some row of them sees.
  Span visible(std::int64_t b, std::int64_t first, std::int64_t count, Span* spans) const;

 private:
  using Slot = ir::AttentionSlots::Shared;

  const std::string& name(Slot slot) const;
  Result<std::int64_t> read_count(const std::vector<std::byte*>& roots) const;
  Status read_side(Side& side, Slot lengths, Slot offsets, Slot padded, std::int64_t count,
                   const std::vector<std::byte*>& roots) const;
  Status read_places(Side& side, Slot offsets, Slot padded, std::int64_t count,
                     const std::vector<std::byte*>& roots) const;
  Status read_pages(Pages& pages, Slot table, Slot cache,
                    const std::vector<std::byte*>& roots) const;

  const ir::Graph& graph_;
  const AttentionStep& step_;
  const ir::AttentionRule& rule_;
  std::int64_t batch_;
  Side queries_;
  Side keys_;
  Pages key_pages_;
  Pages value_pages_;
};

// An element of an operand of integers.
std::int64_t integer_at(const Location& location, const std::vector<std::byte*>& roots,
                        std::int64_t offset);

}  // namespace lawson::cpu
