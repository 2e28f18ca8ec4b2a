#include "engine/cudnn/fold.h"

#include <gtest/gtest.h>

#include <random>

namespace lawson::cudnn {
namespace {

// The offset of element number `flat` (row-major over the shape).
std::int64_t offset_at(const Layout& layout, std::int64_t flat) {
  std::int64_t offset = layout.offset;
  for (std::size_t i = layout.shape.size(); i-- > 0;) {
    offset += flat % layout.shape[i] * layout.strides[i];
    flat /= layout.shape[i];
  }
  return offset;
}

Layout packed(const Dims& shape) {
  return {shape, contiguous_strides(shape), 0};
}

TEST(Fold, ReshapeKeepsEveryElement) {
  std::mt19937 random{7};
  const auto draw = [&](std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>{low, high}(random);
  };
  int reshaped = 0;
  for (int i = 0; i < 2000; ++i) {
    Dims shape;
    for (std::int64_t rank = draw(1, 5); rank > 0; --rank) shape.push_back(draw(1, 4));
    Layout layout = packed(shape);
    for (std::int64_t& stride : layout.strides) stride *= draw(0, 3) == 0 ? 2 : 1;
    const std::int64_t count = *element_count(shape);
    Dims wanted;
    std::int64_t rest = count;
    while (rest > 1) {
      std::int64_t factor = draw(1, 4);
      if (rest % factor != 0) factor = rest;
      wanted.push_back(factor);
      rest /= factor;
    }
    if (draw(0, 2) == 0) wanted.push_back(1);
    const auto result = reshape_layout(layout, wanted);
    if (!result) continue;
    ++reshaped;
    for (std::int64_t flat = 0; flat < count; ++flat) {
      ASSERT_EQ(offset_at(layout, flat), offset_at(*result, flat))
          << to_string(shape) << " " << to_string(layout.strides) << " -> " << to_string(wanted);
    }
  }
  EXPECT_GT(reshaped, 500);
}

TEST(Fold, ReshapeRefusesWhatNeedsACopy) {
  EXPECT_FALSE(reshape_layout({{4, 4}, {1, 4}, 0}, {16}));
  EXPECT_FALSE(reshape_layout({{4, 4}, {8, 1}, 0}, {2, 8}));
  EXPECT_TRUE(reshape_layout({{4, 4}, {8, 1}, 0}, {2, 2, 2, 2}));
  EXPECT_FALSE(reshape_layout({{4, 4}, {0, 1}, 0}, {16}));
}

TEST(Fold, LowRanksGetUnitDims) {
  const auto vector = fold_layout(packed({5}));
  ASSERT_TRUE(vector);
  EXPECT_EQ(vector->dims, (Dims3{1, 1, 5}));
  EXPECT_EQ(vector->strides, (Dims3{5, 5, 1}));
  EXPECT_EQ(fold_layout(packed({}))->dims, (Dims3{1, 1, 1}));
  const auto column = fold_layout(packed({4, 3, 1}));
  EXPECT_EQ(column->strides, (Dims3{3, 1, 1}));
}

TEST(Fold, LeadingDimsBecomeOneWhereStridesAllow) {
  const auto folded = fold_layout(packed({2, 3, 4, 5}));
  ASSERT_TRUE(folded);
  EXPECT_EQ(folded->dims, (Dims3{6, 4, 5}));
  EXPECT_EQ(folded->strides, (Dims3{20, 5, 1}));
  // [batch, seq, heads, dim] seen as [batch, heads, seq, dim]: heads are inside seq.
  EXPECT_FALSE(fold_layout(transpose_layout(packed({2, 3, 4, 5}), {0, 2, 1, 3})));
}

TEST(Fold, RepeatingDimsBecomeOne) {
  const auto row = broadcast_layout(packed({5}), {2, 3, 4, 5});
  ASSERT_TRUE(row);
  EXPECT_EQ(fold_layout(*row)->dims, (Dims3{1, 1, 5}));
  const auto some = broadcast_layout(packed({3, 4, 5}), {2, 3, 4, 5});
  ASSERT_TRUE(some);
  EXPECT_FALSE(fold_layout(*some));  // one of two leading dims repeats
}

TEST(Fold, SliceMovesTheOffset) {
  const Layout part = slice_layout(packed({4, 8}), {1, 2}, {4, 8}, {2, 3});
  EXPECT_EQ(part.offset, 10);
  EXPECT_EQ(part.shape, (Dims{2, 2}));
  EXPECT_EQ(part.strides, (Dims{16, 3}));
}

TEST(Fold, PackedInAnOrder) {
  EXPECT_TRUE(is_packed(packed({2, 3, 4}), {0, 1, 2}));
  EXPECT_FALSE(is_packed(packed({2, 3, 4}), {0, 2, 1}));
  EXPECT_TRUE(is_packed({{2, 3, 4}, {12, 1, 3}, 0}, {0, 2, 1}));
  EXPECT_FALSE(is_packed({{2, 3, 4}, {16, 4, 1}, 0}, {0, 1, 2}));  // padded
  EXPECT_FALSE(is_packed({{2, 3, 4}, {4, 0, 1}, 0}, {0, 1, 2}));   // repeats
  EXPECT_TRUE(is_packed({{2, 1, 4}, {4, 99, 1}, 7}, {1, 0, 2}));   // a unit dim lies anywhere
  EXPECT_TRUE(is_packed({{5, 3}, {3, 1}, 0}, {1}));                // of some axes
}

TEST(Fold, AxisOfLeadingDims) {
  EXPECT_EQ(fold_axis({2, 3, 4, 5}, 3), 2);
  EXPECT_EQ(fold_axis({2, 3, 4, 5}, 2), 1);
  EXPECT_FALSE(fold_axis({2, 3, 4, 5}, 1));
  EXPECT_EQ(fold_axis({1, 3, 4, 5}, 1), 0);
  EXPECT_EQ(fold_axis({7}, 0), 2);
}

}  // namespace
}  // namespace lawson::cudnn
