#include "front/buckets.h"

#include <gtest/gtest.h>

#include <limits>
#include <utility>
#include <vector>

#include "base/dims.h"

namespace lawson::front {
namespace {

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kMin = std::numeric_limits<std::int64_t>::min();
using Cases = std::vector<std::pair<std::int64_t, std::int64_t>>;

TEST(Buckets, BatchAtEveryBoundary) {
  const Cases cases{{kMin, 32},   {-1, 32},       {0, 32},      {1, 32},      {31, 32},
                    {32, 32},     {33, 64},       {63, 64},     {64, 64},     {65, 128},
                    {127, 128},   {128, 128},     {129, 256},   {255, 256},   {256, 256},
                    {257, 512},   {511, 512},     {512, 512},   {513, 1024},  {1023, 1024},
                    {1024, 1024}, {1025, 1536},   {1535, 1536}, {1536, 1536}, {1537, 2048},
                    {2049, 2560}, {99999, 100352}};
  for (const auto& [n, expected] : cases) EXPECT_EQ(bucket_batch(n), expected) << n;
}

TEST(Buckets, TokensAtEveryBoundary) {
  const Cases cases{{kMin, 1024},   {-1, 1024},     {0, 1024},       {1, 1024},
                    {1023, 1024},   {1024, 1024},   {1025, 2048},    {2047, 2048},
                    {2048, 2048},   {2049, 4096},   {4095, 4096},    {4096, 4096},
                    {4097, 8192},   {8191, 8192},   {8192, 8192},    {8193, 16384},
                    {16383, 16384}, {16384, 16384}, {16385, 32768},  {32767, 32768},
                    {32768, 32768}, {32769, 65536}, {65535, 65536},  {65536, 65536},
                    {65537, 98304}, {98304, 98304}, {98305, 131072}, {131073, 163840}};
  for (const auto& [n, expected] : cases) EXPECT_EQ(bucket_tokens(n), expected) << n;
}

TEST(Buckets, LargestSizesOfASpec) {
  EXPECT_EQ(bucket_batch(kMaxDim), kMaxDim);
  EXPECT_EQ(bucket_batch(kMaxDim - 1), kMaxDim);
  EXPECT_EQ(bucket_batch(kMaxDim + 1), kMaxDim + 512);
  EXPECT_EQ(bucket_tokens(kMaxDim), kMaxDim);
  EXPECT_EQ(bucket_tokens(kMaxDim - 1), kMaxDim);
  EXPECT_EQ(bucket_tokens(kMaxDim + 1), kMaxDim + 32768);
}

TEST(Buckets, BeyondInt64IsItsLargest) {
  EXPECT_EQ(bucket_batch(kMax), kMax);
  EXPECT_EQ(bucket_batch(kMax - 511), kMax - 511);  // the last multiple of 512
  EXPECT_EQ(bucket_batch(kMax - 510), kMax);
  EXPECT_EQ(bucket_tokens(kMax), kMax);
  EXPECT_EQ(bucket_tokens(kMax - 32767), kMax - 32767);
  EXPECT_EQ(bucket_tokens(kMax - 32766), kMax);
}

// At every power of two of int64 and its neighbours: holds n, is a bucket, and never falls.
TEST(Buckets, HoldsAndIsStableAndMonotone) {
  for (const auto bucket : {bucket_batch, bucket_tokens}) {
    std::int64_t last = 0;
    for (int bit = 0; bit < 62; ++bit) {
      for (const std::int64_t delta : {-1, 0, 1}) {
        const std::int64_t n = (std::int64_t{1} << bit) + delta;
        const std::int64_t rounded = bucket(n);
        EXPECT_GE(rounded, n);
        EXPECT_EQ(bucket(rounded), rounded) << n;
        EXPECT_GE(rounded, last) << n;
        last = rounded;
      }
    }
  }
}

}  // namespace
}  // namespace lawson::front
