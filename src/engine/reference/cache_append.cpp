#include "engine/reference/cache_append.h"

#include <algorithm>

namespace lawson::reference {
namespace {

using Slot = ir::CacheAppend;

std::int64_t integer(const Array& array, std::int64_t at) {
  return static_cast<std::int64_t>(array.value[static_cast<std::size_t>(at)]);
}

struct Place {
  std::int64_t entry = 0;  // sequence or page
  std::int64_t row = 0;
};

// Of token j of sequence b.
Place place_of(const Operands& in, std::int64_t b, std::int64_t j) {
  const Array* table = in[Slot::page_table];
  if (table == nullptr) return {b, j};
  const std::int64_t size = in[Slot::cache]->shape[2];
  return {integer(*table, b * table->shape[2] + j / size), j % size};
}

// Calls visit(b, s, place) for every token of `fresh` that has a place.
template <typename Visit>
void for_each_token(const Operands& in, Visit visit) {
  const Dims& fresh = in[Slot::fresh]->shape;
  for (std::int64_t b = 0; b < fresh[0]; ++b) {
    const std::int64_t first = integer(*in[Slot::seqlen_kv], b) - fresh[2];
    for (std::int64_t s = std::max<std::int64_t>(-first, 0); s < fresh[2]; ++s) {
      visit(b, s, place_of(in, b, first + s));
    }
  }
}

// Calls visit(position in fresh, position in the cache) for each of their elements.
template <typename Visit>
void for_each_element(const Operands& in, Visit visit) {
  const Dims& cache = in[Slot::cache]->shape;
  const std::int64_t tokens = in[Slot::fresh]->shape[2];
  for_each_token(in, [&](std::int64_t b, std::int64_t s, Place place) {
    for (std::int64_t h = 0; h < cache[1]; ++h) {
      const std::int64_t from = ((b * cache[1] + h) * tokens + s) * cache[3];
      const std::int64_t to = ((place.entry * cache[1] + h) * cache[2] + place.row) * cache[3];
      for (std::int64_t c = 0; c < cache[3]; ++c) {
        visit(static_cast<std::size_t>(from + c), static_cast<std::size_t>(to + c));
      }
    }
  });
}

}  // namespace

Status check_cache_append(const Operands& in) {
  const Dims& cache = in[Slot::cache]->shape;
  const Array* table = in[Slot::page_table];
  const std::int64_t capacity = table != nullptr ? table->shape[2] * cache[2] : cache[2];
  for (std::int64_t b = 0; b < in[Slot::fresh]->shape[0]; ++b) {
    const std::int64_t length = integer(*in[Slot::seqlen_kv], b);
    if (length < 0 || length > capacity) {
      return invalid("cache_append: seqlen_kv[{}] is {}; expected 0 to {}", b, length, capacity);
    }
  }
  Status status;
  for_each_token(in, [&](std::int64_t b, std::int64_t, Place place) {
    if (status.ok() && (place.entry < 0 || place.entry >= cache[0])) {
      status = invalid("cache_append: page_table has page {} for sequence {}; expected 0 to {}",
                       place.entry, b, cache[0] - 1);
    }
  });
  return status;
}

void cache_append(const Operands& in, Array& result) {
  result.value = in[Slot::cache]->value;
  for_each_element(in, [&](std::size_t from, std::size_t to) {
    result.value[to] = in[Slot::fresh]->value[from];
  });
}

void add_cache_append_errors(const Operands& in, Array& result) {
  for (std::size_t at = 0; at < result.size(); ++at) {
    result.error[at] = in[Slot::cache]->error_at(at);
  }
  for_each_element(in, [&](std::size_t from, std::size_t to) {
    result.error[to] = in[Slot::fresh]->error_at(from);
  });
}

}  // namespace lawson::reference
