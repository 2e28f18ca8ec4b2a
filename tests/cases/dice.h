// Draws that are the same on every platform (the standard's distributions are not).
#pragma once

#include <cstdint>
#include <initializer_list>
#include <random>
#include <vector>

namespace lawson::cases {

class Dice {
 public:
  explicit Dice(std::uint64_t seed) : engine_{seed} {}

  std::int64_t below(std::int64_t n) {
    return static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(n));
  }
  bool chance(int percent) { return below(100) < percent; }

  template <typename T>
  T pick(std::initializer_list<T> values) {
    return *(values.begin() + below(static_cast<std::int64_t>(values.size())));
  }
  template <typename T>
  const T& pick(const std::vector<T>& values) {
    return values[static_cast<std::size_t>(below(static_cast<std::int64_t>(values.size())))];
  }

 private:
  std::mt19937_64 engine_;
};

}  // namespace lawson::cases
