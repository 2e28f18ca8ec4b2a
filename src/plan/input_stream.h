// The random numbers of generated inputs: a stream per seed and tensor name.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <string_view>

#include "base/philox.h"

namespace lawson::plan {

class InputStream {
 public:
  InputStream(std::uint64_t seed, std::string_view name) : seed_{seed}, stream_{hash(name)} {}

  std::array<std::uint32_t, 4> bits(std::uint64_t index) const {
    return philox({low(index), high(index), low(stream_), high(stream_)},
                  {low(seed_), high(seed_)});
  }

  // Box-Muller, cut to multiples of 2^-20 so that libm's last bit does not show, then filled up
  // with random low bits so that float types have full significands.
  double normal(std::uint64_t index) const {
    const auto x = bits(index);
    const double u = (static_cast<double>(x[0]) + 0.5) * 0x1p-32;
    const double angle = static_cast<double>(x[1]) * 0x1p-32 * 2 * std::numbers::pi;
    const double n = std::sqrt(-2 * std::log(u)) * std::cos(angle);
    return std::nearbyint(n * 0x1p20) * 0x1p-20 + static_cast<double>(x[2] >> 2) * 0x1p-50;
  }

  std::int64_t integer(std::uint64_t index, std::int64_t low_bound, std::int64_t high_bound) const {
    const auto x = bits(index);
    const std::uint64_t range = static_cast<std::uint64_t>(high_bound - low_bound) + 1;
    const std::uint64_t word = (std::uint64_t{x[0]} << 32) | x[1];
    return low_bound + static_cast<std::int64_t>(range == 0 ? word : word % range);
  }

 private:
  static std::uint64_t hash(std::string_view name) {  // FNV-1a
    std::uint64_t value = 0xcbf29ce484222325ULL;
    for (const char c : name) {
      value = (value ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
    }
    return value;
  }
  static std::uint32_t low(std::uint64_t x) { return static_cast<std::uint32_t>(x); }
  static std::uint32_t high(std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); }

  std::uint64_t seed_;
  std::uint64_t stream_;
};

}  // namespace lawson::plan
