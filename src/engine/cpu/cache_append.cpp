// New keys or values into a cache, dense or paged. Bound to the cache's own memory the result costs
// the new tokens alone; elsewhere the cache is copied first.
#include <algorithm>
#include <cstring>

#include "engine/cpu/attention_sequences.h"
#include "engine/cpu/pool.h"

namespace lawson::cpu {
namespace {

using Slot = ir::CacheAppend;

void copy_row(const Rows& from, std::int64_t from_first, const Rows& to, std::int64_t to_first,
              std::int64_t count) {
  if (count == 0) return;
  if (bit_width(from.dtype) < 8) {
    for (std::int64_t i = 0; i < count; ++i) {
      store_element(to.data, to.dtype, to_first + i * to.strides[3],
                    load_element(from.data, from.dtype, from_first + i * from.strides[3]));
    }
    return;
  }
  const std::int64_t bytes = bit_width(from.dtype) / 8;
  const bool whole = count == 1 || (from.strides[3] == 1 && to.strides[3] == 1);
  const std::int64_t pieces = whole ? 1 : count;
  for (std::int64_t i = 0; i < pieces; ++i) {
    std::memcpy(to.data + (to_first + i * to.strides[3]) * bytes,
                from.data + (from_first + i * from.strides[3]) * bytes,
                static_cast<std::size_t>(count / pieces * bytes));
  }
}

class CacheAppend {
 public:
  CacheAppend(const ir::Graph& graph, const AttentionStep& step,
              const std::vector<std::byte*>& roots)
      : graph_{graph},
        node_{graph.nodes[static_cast<std::size_t>(step.node)]},
        step_{step},
        roots_{roots},
        cache_{rows_of(step.inputs[Slot::cache].at, roots)},
        fresh_{rows_of(step.inputs[Slot::fresh].at, roots)},
        result_{rows_of(step.outputs[0].at, roots)},
        shape_{tensor(Slot::cache).shape},
        batch_{tensor(Slot::fresh).shape[0]},
        tokens_{tensor(Slot::fresh).shape[2]} {}

  Status run() {
    LAWSON_CHECK(read());
    const bool in_place = cache_.data == result_.data && cache_.offset == result_.offset;
    if (in_place && cache_.strides != result_.strides) {
      return invalid("cpu engine: the result in the memory of '{}' has other strides",
                     tensor(Slot::cache).name);
    }
    if (!in_place) {
      LAWSON_CHECK(for_each(shape_[0] * shape_[1], [&](std::int64_t task) {
        for (std::int64_t s = 0; s < shape_[2]; ++s) {
          const std::int64_t b = task / shape_[1];
          const std::int64_t h = task % shape_[1];
          copy_row(cache_, cache_.at(b, h, s), result_, result_.at(b, h, s), shape_[3]);
        }
      }));
    }
    Rows to = result_;
    if (pages_.size > 0) to.pages = &pages_;
    return for_each(batch_ * shape_[1], [&](std::int64_t task) {
      const std::int64_t b = task / shape_[1];
      const std::int64_t h = task % shape_[1];
      const std::int64_t end = length_[static_cast<std::size_t>(b)];
      for (std::int64_t s = std::max(std::int64_t{0}, end - tokens_); s < end; ++s) {
        copy_row(fresh_, fresh_.at(b, h, s - (end - tokens_)), to, to.at(b, h, s), shape_[3]);
      }
    });
  }

 private:
  const ir::Tensor& tensor(Slot::In slot) const { return graph_.tensor(node_.inputs[slot]); }

  // Elements of 4 bits share bytes: one thread writes them.
  template <typename Body>
  Status for_each(std::int64_t count, Body body) const {
    const std::int64_t tasks =
        bit_width(cache_.dtype) < 8 ? std::min<std::int64_t>(count, 1) : count;
    return parallel_for(tasks, 0, [&](std::int64_t first, std::byte*) {
      for (std::int64_t i = first; i < count; i += tasks) body(i);
    });
  }

  // Lengths and pages, checked before anything is written.
  Status read() {
    const bool paged = step_.inputs[Slot::page_table].present;
    const std::int64_t table = paged ? tensor(Slot::page_table).shape[2] : 1;
    const Location& lengths = step_.inputs[Slot::seqlen_kv].at;
    pages_.size = paged ? shape_[2] : 0;
    pages_.per_sequence = table;
    pages_.number.assign(static_cast<std::size_t>(paged ? batch_ * table : 0), 0);
    for (std::int64_t b = 0; b < batch_; ++b) {
      const std::int64_t end = integer_at(lengths, roots_, b * lengths.strides[0]);
      if (end < 0 || end > table * shape_[2]) {
        return invalid("cpu engine: '{}' of sequence {} is {}; expected 0 to {}",
                       tensor(Slot::seqlen_kv).name, b, end, table * shape_[2]);
      }
      length_.push_back(end);
      const std::int64_t begin = std::max(std::int64_t{0}, end - tokens_);
      if (paged && begin < end) LAWSON_CHECK(read_pages(b, begin / shape_[2], end));
    }
    return {};
  }

  Status read_pages(std::int64_t b, std::int64_t first, std::int64_t end) {
    const Location& table = step_.inputs[Slot::page_table].at;
    for (std::int64_t p = first; p * shape_[2] < end; ++p) {
      const std::int64_t page =
          integer_at(table, roots_, b * table.strides[0] + p * table.strides[2]);
      if (page < 0 || page >= shape_[0]) {
        return invalid("cpu engine: '{}' gives page {} of sequence {} as {}; expected 0 to {}",
                       tensor(Slot::page_table).name, p, b, page, shape_[0] - 1);
      }
      pages_.number[static_cast<std::size_t>(b * pages_.per_sequence + p)] = page;
    }
    return {};
  }

  const ir::Graph& graph_;
  const ir::Node& node_;
  const AttentionStep& step_;
  const std::vector<std::byte*>& roots_;
  Rows cache_;
  Rows fresh_;
  Rows result_;
  const Dims& shape_;  // of the cache
  std::int64_t batch_;
  std::int64_t tokens_;  // fresh ones of each sequence
  std::vector<std::int64_t> length_;
  Pages pages_;
};

}  // namespace

Status run_cache_append(const ir::Graph& graph, const AttentionStep& step,
                        const std::vector<std::byte*>& roots) {
  return CacheAppend{graph, step, roots}.run();
}

}  // namespace lawson::cpu
