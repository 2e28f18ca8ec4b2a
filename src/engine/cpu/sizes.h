// Arithmetic of sizes in memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace lawson::cpu {

// Rounded up to whole cache lines.
inline constexpr std::size_t align_up(std::size_t bytes) {
  return (bytes + 63) & ~std::size_t{63};
}

// a * b, but at most what no machine has: a size of memory that absurd shapes ask for must not
// wrap.
inline std::int64_t memory_product(std::int64_t a, std::int64_t b) {
  constexpr std::int64_t kMost = std::int64_t{1} << 56;
  std::int64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? kMost : std::min(product, kMost);
}

// How many units hold `value`, and their size together.
inline constexpr std::int64_t blocks(std::int64_t value, std::int64_t unit) {
  return (value + unit - 1) / unit;
}
inline constexpr std::int64_t round_up(std::int64_t value, std::int64_t unit) {
  return blocks(value, unit) * unit;
}

}  // namespace lawson::cpu
