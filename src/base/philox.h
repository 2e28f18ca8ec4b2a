// The one source of random bits: the counter-based generator Philox4x32-10 (Salmon et al. 2011).
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace lawson {

std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter,
                                    std::array<std::uint32_t, 2> key);

// Which softmax weights dropout keeps, by their linear index in [b,h,max_q,max_kv]. Weight n has
// word n % 4 of the block with counter (n / 4, offset) and key seed, low words first, and is kept
// iff that word is at least floor(probability * 2^32).
struct DropoutStream {
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
  double probability = 0;  // of being dropped, in [0, 1)

  // For the weights from `first` on: 1 where kept, 0 where dropped.
  void fill(std::uint64_t first, std::span<std::uint8_t> kept) const;
};

}  // namespace lawson
