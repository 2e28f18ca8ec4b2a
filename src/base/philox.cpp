#include "base/philox.h"

namespace lawson {
namespace {

std::uint32_t low(std::uint64_t x) {
  return static_cast<std::uint32_t>(x);
}
std::uint32_t high(std::uint64_t x) {
  return static_cast<std::uint32_t>(x >> 32);
}

}  // namespace

std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter,
                                    std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53U} * counter[0];
    const std::uint64_t b = std::uint64_t{0xCD9E8D57U} * counter[2];
    counter = {high(b) ^ counter[1] ^ key[0], low(b), high(a) ^ counter[3] ^ key[1], low(a)};
    key[0] += 0x9E3779B9U;
    key[1] += 0xBB67AE85U;
  }
  return counter;
}

void DropoutStream::fill(std::uint64_t first, std::span<std::uint8_t> kept) const {
  const auto threshold = static_cast<std::uint32_t>(probability * 0x1p32);
  std::array<std::uint32_t, 4> words{};
  for (std::size_t i = 0; i < kept.size(); ++i) {
    const std::uint64_t index = first + i;
    if (i == 0 || index % 4 == 0) {
      const std::uint64_t block = index / 4;
      words = philox({low(block), high(block), low(offset), high(offset)}, {low(seed), high(seed)});
    }
    kept[i] = words[index % 4] >= threshold ? 1 : 0;
  }
}

}  // namespace lawson
