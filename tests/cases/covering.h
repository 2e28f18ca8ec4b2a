// Covering arrays: rows of levels, one level per axis, such that every pair of levels of two axes
// that can go together occurs in some row. What can go together, the caller's `accept` says.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cases/dice.h"

namespace lawson::cases {

// Level 0 is the one that permits most: a pair is tried with level 0 of all other axes first.
struct Axis {
  std::string name;
  std::vector<std::string> levels;
  std::size_t plain = 0;   // what is usual
  bool feature = false;    // counted against `most_features` where its level is not the plain one
  int plain_percent = 50;  // how often a random row takes the plain level
};

using Row = std::vector<std::size_t>;

class Covering {
 public:
  using Accept = std::function<bool(const Row&)>;

  Covering(const std::vector<Axis>& axes, std::uint64_t seed, std::size_t most_features,
           Accept accept);

  // The next row; it has pairs that no row before it had. nullopt: every pair was in a row or is
  // impossible. Greedy, as AETG (Cohen et al. 1997).
  std::optional<Row> next();

  std::size_t pairs() const { return pairs_.size(); }
  // "layout bs3hd, heads gqa" of every pair that no accepted row can have (known after the last
  // next()): with it, at most one other axis was moved away from level 0.
  const std::vector<std::string>& impossible() const { return impossible_; }

 private:
  struct Pair {
    std::size_t axis_a, level_a, axis_b, level_b;
  };

  bool open(std::size_t axis_a, std::size_t level_a, std::size_t axis_b, std::size_t level_b) const;
  void cover(const Row& row);
  std::optional<Row> start(const Pair& pair, std::vector<bool>& fixed);
  bool is_feature(std::size_t axis, std::size_t level) const;
  std::vector<std::size_t> preferred(std::size_t axis, const Row& row,
                                     const std::vector<bool>& fixed);

  const std::vector<Axis>& axes_;
  Dice dice_;
  std::size_t most_features_;
  Accept accept_;
  std::vector<std::size_t> first_;  // number of each axis's level 0
  std::size_t levels_ = 0;
  std::vector<char> open_;   // by the numbers of two levels
  std::vector<Pair> pairs_;  // in random order
  std::size_t next_pair_ = 0;
  std::vector<std::string> impossible_;
};

// One level per axis at random. Levels that do not go together with those before them stay 0, or
// plain where that is accepted.
Row random_row(const std::vector<Axis>& axes, Dice& dice, const Covering::Accept& accept);

}  // namespace lawson::cases
