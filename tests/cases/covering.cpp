#include "cases/covering.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

namespace lawson::cases {
namespace {

template <typename T>
void shuffle(std::vector<T>& items, Dice& dice) {
  for (std::size_t i = items.size(); i > 1; --i) {
    std::swap(items[i - 1],
              items[static_cast<std::size_t>(dice.below(static_cast<std::int64_t>(i)))]);
  }
}

std::vector<std::size_t> shuffled(std::size_t count, Dice& dice) {
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  shuffle(order, dice);
  return order;
}

}  // namespace

Covering::Covering(const std::vector<Axis>& axes, std::uint64_t seed, std::size_t most_features,
                   Accept accept)
    : axes_{axes}, dice_{seed}, most_features_{most_features}, accept_{std::move(accept)} {
  for (const Axis& axis : axes_) {
    first_.push_back(levels_);
    levels_ += axis.levels.size();
  }
  open_.assign(levels_ * levels_, 0);
  for (std::size_t a = 0; a < axes_.size(); ++a) {
    for (std::size_t b = a + 1; b < axes_.size(); ++b) {
      for (std::size_t x = 0; x < axes_[a].levels.size(); ++x) {
        for (std::size_t y = 0; y < axes_[b].levels.size(); ++y) {
          pairs_.push_back({a, x, b, y});
          open_[(first_[a] + x) * levels_ + first_[b] + y] = 1;
        }
      }
    }
  }
  shuffle(pairs_, dice_);
}

bool Covering::open(std::size_t axis_a, std::size_t level_a, std::size_t axis_b,
                    std::size_t level_b) const {
  if (axis_a > axis_b) return open(axis_b, level_b, axis_a, level_a);
  return open_[(first_[axis_a] + level_a) * levels_ + first_[axis_b] + level_b] != 0;
}

void Covering::cover(const Row& row) {
  for (std::size_t a = 0; a < axes_.size(); ++a) {
    for (std::size_t b = a + 1; b < axes_.size(); ++b) {
      open_[(first_[a] + row[a]) * levels_ + first_[b] + row[b]] = 0;
    }
  }
}

bool Covering::is_feature(std::size_t axis, std::size_t level) const {
  return axes_[axis].feature && level != axes_[axis].plain;
}

// A row with the pair that is accepted; `fixed` are the axes that made it so.
std::optional<Row> Covering::start(const Pair& pair, std::vector<bool>& fixed) {
  Row row(axes_.size(), 0);
  row[pair.axis_a] = pair.level_a;
  row[pair.axis_b] = pair.level_b;
  fixed.assign(axes_.size(), false);
  fixed[pair.axis_a] = fixed[pair.axis_b] = true;
  if (accept_(row)) return row;
  for (const std::size_t axis : shuffled(axes_.size(), dice_)) {
    if (fixed[axis]) continue;
    for (const std::size_t level : shuffled(axes_[axis].levels.size(), dice_)) {
      row[axis] = level;
      if (level == 0 || !accept_(row)) continue;
      fixed[axis] = true;
      return row;
    }
    row[axis] = 0;
  }
  return std::nullopt;
}

// Levels of an axis, those first that are in most open pairs with the axes that are fixed.
std::vector<std::size_t> Covering::preferred(std::size_t axis, const Row& row,
                                             const std::vector<bool>& fixed) {
  std::vector<std::size_t> order = shuffled(axes_[axis].levels.size(), dice_);
  std::vector<int> gain(order.size(), 0);
  std::size_t features = 0;
  for (std::size_t other = 0; other < axes_.size(); ++other) {
    if (!fixed[other]) continue;
    if (is_feature(other, row[other])) ++features;
    for (const std::size_t level : order) {
      if (open(axis, level, other, row[other])) ++gain[level];
    }
  }
  const bool full = axes_[axis].feature && features >= most_features_;
  if (full) gain[axes_[axis].plain] = static_cast<int>(axes_.size());
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t x, std::size_t y) { return gain[x] > gain[y]; });
  return order;
}

std::optional<Row> Covering::next() {
  for (; next_pair_ < pairs_.size(); ++next_pair_) {
    const Pair& pair = pairs_[next_pair_];
    if (!open(pair.axis_a, pair.level_a, pair.axis_b, pair.level_b)) continue;
    std::vector<bool> fixed;
    std::optional<Row> row = start(pair, fixed);
    if (!row) {
      const Axis& a = axes_[pair.axis_a];
      const Axis& b = axes_[pair.axis_b];
      impossible_.push_back(fmt::format("{} {}, {} {}", a.name, a.levels[pair.level_a], b.name,
                                        b.levels[pair.level_b]));
      open_[(first_[pair.axis_a] + pair.level_a) * levels_ + first_[pair.axis_b] + pair.level_b] =
          0;
      continue;
    }
    for (const std::size_t axis : shuffled(axes_.size(), dice_)) {
      if (fixed[axis]) continue;
      for (const std::size_t level : preferred(axis, *row, fixed)) {
        const std::size_t before = std::exchange((*row)[axis], level);
        if (level == before || accept_(*row)) break;
        (*row)[axis] = before;
      }
      fixed[axis] = true;
    }
    cover(*row);
    return row;
  }
  return std::nullopt;
}

Row random_row(const std::vector<Axis>& axes, Dice& dice, const Covering::Accept& accept) {
  Row wanted;
  for (const Axis& axis : axes) {
    wanted.push_back(
        dice.chance(axis.plain_percent)
            ? axis.plain
            : static_cast<std::size_t>(dice.below(static_cast<std::int64_t>(axis.levels.size()))));
  }
  Row row(axes.size(), 0);
  const std::vector<std::size_t> order = shuffled(axes.size(), dice);
  const auto move = [&](std::size_t axis, std::size_t level) {
    const std::size_t before = std::exchange(row[axis], level);
    if (level != before && !accept(row)) row[axis] = before;
  };
  // Twice: what one axis needs, a later one may have brought.
  for (int round = 0; round < 2; ++round) {
    for (const std::size_t axis : order) move(axis, wanted[axis]);
  }
  for (const std::size_t axis : order) {
    if (row[axis] != wanted[axis]) move(axis, axes[axis].plain);
  }
  return row;
}

}  // namespace lawson::cases
