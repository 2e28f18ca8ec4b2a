#include "base/dims.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace lawson {
namespace {

constexpr std::int64_t kBig = std::int64_t{1} << 62;

TEST(Dims, ElementCountIsTheProduct) {
  EXPECT_EQ(element_count({}), 1);
  EXPECT_EQ(element_count({2, 3, 4}), 24);
  EXPECT_EQ(element_count({2, 0, 4}), 0);
}

TEST(Dims, ElementCountRefusesNegativeDimsAndOverflow) {
  EXPECT_EQ(element_count({2, -1}), std::nullopt);
  EXPECT_EQ(element_count({kBig, 2}), std::nullopt);
  EXPECT_EQ(element_count({INT64_MAX, INT64_MAX}), std::nullopt);
  EXPECT_EQ(element_count({INT64_MIN}), std::nullopt);
}

TEST(Dims, ContiguousStridesAreRowMajor) {
  EXPECT_EQ(contiguous_strides({2, 3, 4}), (Dims{12, 4, 1}));
  EXPECT_EQ(contiguous_strides({}), Dims{});
  EXPECT_EQ(contiguous_strides({5, 0, 4}), (Dims{4, 4, 1}));
}

TEST(Dims, ContiguousStridesOfImpossibleShapesAreDefined) {
  // Their value does not matter (the shape is refused); computing it must not overflow.
  EXPECT_EQ(contiguous_strides({kBig, kBig, kBig}).size(), 3U);
  EXPECT_EQ(contiguous_strides({INT64_MAX, INT64_MAX, 2, 3}).size(), 4U);
}

TEST(Dims, StorageExtentReachesTheLastElement) {
  EXPECT_EQ(storage_extent({2, 3}, {3, 1}), 6);
  EXPECT_EQ(storage_extent({2, 3}, {10, 2}), 15);
  EXPECT_EQ(storage_extent({2, 3}, {0, 1}), 3);
  EXPECT_EQ(storage_extent({2, 0}, {10, 1}), 0);
  EXPECT_EQ(storage_extent({}, {}), 1);
}

TEST(Dims, StorageExtentRefusesNegativeStridesAndOverflow) {
  EXPECT_EQ(storage_extent({2}, {-1}), std::nullopt);
  EXPECT_EQ(storage_extent({3}, {kBig}), std::nullopt);
  EXPECT_EQ(storage_extent({2}, {INT64_MAX}), std::nullopt);
  EXPECT_EQ(storage_extent({2, 2}, {INT64_MAX, INT64_MAX}), std::nullopt);
}

TEST(Dims, BroadcastIsNumPys) {
  EXPECT_EQ(broadcast_shape({2, 1, 4}, {3, 1}), (Dims{2, 3, 4}));
  EXPECT_EQ(broadcast_shape({}, {2}), Dims{2});
  EXPECT_EQ(broadcast_shape({1}, {0}), Dims{0});
  EXPECT_EQ(broadcast_shape({2}, {3}), std::nullopt);
  EXPECT_EQ(broadcast_shape({0}, {3}), std::nullopt);
}

TEST(Dims, NextIndexVisitsEveryPositionOnceInOrder) {
  const Dims shape{2, 3, 2};
  const Dims strides = contiguous_strides(shape);
  Dims index(3, 0);
  std::int64_t expected = 0;
  do {
    EXPECT_EQ(offset_of(index, strides), expected++);
  } while (next_index(index, shape));
  EXPECT_EQ(expected, 12);
  Dims scalar;
  EXPECT_FALSE(next_index(scalar, {}));
}

TEST(Dims, Text) {
  EXPECT_EQ(to_string(Dims{}), "[]");
  EXPECT_EQ(to_string(Dims{2, -1, 16}), "[2, -1, 16]");
}

}  // namespace
}  // namespace lawson
