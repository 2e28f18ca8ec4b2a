#include "front/buckets.h"

#include <bit>
#include <limits>

namespace lawson::front {
namespace {

// Powers of two from `smallest` to `step`, then multiples of `step`.
std::int64_t bucket(std::int64_t n, std::int64_t smallest, std::int64_t step) {
  if (n <= smallest) return smallest;
  if (n <= step) {
    return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(n)));
  }
  const std::int64_t multiples = (n - 1) / step + 1;
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  return multiples > kMax / step ? kMax : multiples * step;
}

}  // namespace

std::int64_t bucket_batch(std::int64_t n) {
  return bucket(n, 32, 512);
}

std::int64_t bucket_tokens(std::int64_t n) {
  return bucket(n, 1024, 32768);
}

}  // namespace lawson::front
