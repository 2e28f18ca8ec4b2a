#include "base/philox.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

namespace lawson {
namespace {

TEST(Philox, KnownAnswers) {  // from the authors' Random123 distribution
  using Words = std::array<std::uint32_t, 4>;
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}),
            (Words{0x6627e8d5U, 0xe169c58dU, 0xbc57ac4cU, 0x9b00dbd8U}));
  const std::uint32_t ones = 0xffffffffU;
  EXPECT_EQ(philox({ones, ones, ones, ones}, {ones, ones}),
            (Words{0x408f276dU, 0x41c83b0eU, 0xa20bc7c6U, 0x6d5451fdU}));
  // The digits of pi, as the authors have them.
  EXPECT_EQ(
      philox({0x243f6a88U, 0x85a308d3U, 0x13198a2eU, 0x03707344U}, {0xa4093822U, 0x299f31d0U}),
      (Words{0xd16cfe09U, 0x94fdccebU, 0x5001e420U, 0x24126ea1U}));
}

std::vector<std::uint8_t> kept(const DropoutStream& stream, std::uint64_t first,
                               std::size_t count) {
  std::vector<std::uint8_t> result(count, 7);
  stream.fill(first, result);
  return result;
}

TEST(Dropout, IsWordOfItsBlockAgainstTheThreshold) {
  // Every part of counter and key has its own value, so that none can stand for another.
  const DropoutStream stream{0x299f31d0a4093822U, 0x0370734413198a2eU, 0.5};
  const std::uint64_t first = 4 * 0x85a308d3243f6a88U;  // the product's top bits fall away
  const std::uint64_t block = first / 4;
  const auto words = philox({static_cast<std::uint32_t>(block),
                             static_cast<std::uint32_t>(block >> 32), 0x13198a2eU, 0x03707344U},
                            {0xa4093822U, 0x299f31d0U});
  const auto bits = kept(stream, first, 4);
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(bits[i], words[i] >= 0x80000000U ? 1 : 0) << i;

  // The first block of seed 0, offset 0: 0x6627e8d5 0xe169c58d 0xbc57ac4c 0x9b00dbd8.
  const auto at = [](double p) { return kept({0, 0, p}, 0, 4); };
  using Bits = std::vector<std::uint8_t>;
  EXPECT_EQ(at(0), (Bits{1, 1, 1, 1}));
  EXPECT_EQ(at(0.5), (Bits{0, 1, 1, 1}));
  EXPECT_EQ(at(0.75), (Bits{0, 1, 0, 0}));
  EXPECT_EQ(at(0x6627e8d5p-32), (Bits{1, 1, 1, 1}));  // at the threshold: kept
  EXPECT_EQ(at(0x6627e8d6p-32), (Bits{0, 1, 1, 1}));
  EXPECT_EQ(at(0x6627e8d5.8p-32), (Bits{1, 1, 1, 1}));  // rounded down
}

TEST(Dropout, DoesNotDependOnWhereAFillBegins) {
  const DropoutStream stream{3, 5, 0.4};
  const auto whole = kept(stream, 1000, 40);
  for (std::size_t skip = 0; skip < 9; ++skip) {
    const auto part = kept(stream, 1000 + skip, 40 - skip);
    EXPECT_TRUE(
        std::equal(part.begin(), part.end(), whole.begin() + static_cast<std::ptrdiff_t>(skip)))
        << skip;
  }
}

TEST(Dropout, DropsItsShare) {
  for (const double p : {0.1, 0.5, 0.9}) {
    const auto bits = kept({17, 4, p}, 0, 100000);
    const double share = std::accumulate(bits.begin(), bits.end(), 0.0) / 100000;
    EXPECT_NEAR(share, 1 - p, 5 * 0.5 / 316) << p;  // five deviations
  }
  EXPECT_NE(kept({1, 0, 0.5}, 0, 64), kept({2, 0, 0.5}, 0, 64));
  EXPECT_NE(kept({1, 0, 0.5}, 0, 64), kept({1, 1, 0.5}, 0, 64));
}

}  // namespace
}  // namespace lawson
