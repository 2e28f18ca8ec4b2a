#include "engine/cudnn/plan_bytes.h"

#include <gtest/gtest.h>

namespace lawson::cudnn {
namespace {

std::vector<std::byte> sample() {
  PlanHeader header{91900, 900, "0123456789abcdef"};
  PlanBytes plan;
  plan.data = {1, 2, 3, 250, 0, 7};
  plan.workspace = 4096;
  plan.supplies.derived = {{1 << 20, 3, 64}};
  plan.supplies.zeros = {{(1 << 20) + 1, 128}};
  return pack_plan(header, plan);
}

TEST(PlanBytes, RoundTrip) {
  const auto read = unpack_plan(sample());
  ASSERT_TRUE(read.ok()) << read.error().message;
  EXPECT_EQ(read->header.cudnn_version, 91900);
  EXPECT_EQ(read->header.compute_capability, 900);
  EXPECT_EQ(read->header.key, "0123456789abcdef");
  EXPECT_EQ(read->bytes.data, (std::vector<std::uint8_t>{1, 2, 3, 250, 0, 7}));
  EXPECT_EQ(read->bytes.workspace, 4096);
  ASSERT_EQ(read->bytes.supplies.derived.size(), 1U);
  EXPECT_EQ(read->bytes.supplies.derived[0].byte_offset, 64);
  ASSERT_EQ(read->bytes.supplies.zeros.size(), 1U);
  EXPECT_EQ(read->bytes.supplies.zeros[0].bytes, 128);
}

TEST(PlanBytes, EveryDamagedByteIsAnError) {
  const std::vector<std::byte> good = sample();
  for (std::size_t i = 0; i < good.size(); ++i) {
    std::vector<std::byte> bad = good;
    bad[i] ^= std::byte{0x20};
    const auto read = unpack_plan(bad);
    ASSERT_FALSE(read.ok()) << "byte " << i;
    EXPECT_EQ(read.error().kind, ErrorKind::io);
  }
}

TEST(PlanBytes, EveryTruncationIsAnError) {
  const std::vector<std::byte> good = sample();
  for (std::size_t size = 0; size < good.size(); ++size) {
    EXPECT_FALSE(unpack_plan(std::span{good}.first(size)).ok()) << size;
  }
  std::vector<std::byte> longer = good;
  longer.push_back(std::byte{0});
  EXPECT_FALSE(unpack_plan(longer).ok());
}

}  // namespace
}  // namespace lawson::cudnn
