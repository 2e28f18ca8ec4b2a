#include "engine/cudnn/plan_bytes.h"

#include <gtest/gtest.h>

#include "cases/dice.h"
#include "engine/cudnn/step_cases.h"

namespace lawson::cudnn {
namespace {

std::vector<std::byte> sample() {
  PlanHeader header{91900, 900, "0123456789abcdef"};
  PlanBytes plan;
  plan.data = {1, 2, 3, 250, 0, 7};
  plan.workspace = 4096;
  plan.supplies.derived = {{1 << 20, 3, 64}};
  plan.supplies.own = {{(1 << 20) + 1, 128, true}};
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
  ASSERT_EQ(read->bytes.supplies.own.size(), 1U);
  EXPECT_EQ(read->bytes.supplies.own[0].bytes, 128);
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

PlanBytes with_all_steps(std::uint64_t seed) {
  PlanBytes plan;
  plan.data = {9};
  plan.supplies.own = {{kFirstOwnUid, 64, false, true}, {kFirstOwnUid + 1, 0, true, false}};
  plan.supplies.scalars = {{kFirstOwnUid + 2, 1 / 0.9, DType::f32},
                           {kFirstOwnUid + 3, -3, DType::i64}};
  for (std::size_t kind = 0; kind < std::variant_size_v<Step>; ++kind) {
    plan.supplies.before.push_back(cases::random_step(kind, seed).step);
    plan.supplies.after.insert(plan.supplies.after.begin(),
                               cases::random_step(kind, seed + 1).step);
  }
  return plan;
}

TEST(PlanBytes, RoundTripOfEveryStep) {
  for (std::uint64_t seed = 0; seed < 40; ++seed) {
    const PlanBytes plan = with_all_steps(seed);
    const auto read = unpack_plan(pack_plan({91900, 900, "key"}, plan));
    ASSERT_TRUE(read.ok()) << read.error().message;
    const Supplies& supplies = read->bytes.supplies;
    EXPECT_EQ(supplies.before, plan.supplies.before);
    EXPECT_EQ(supplies.after, plan.supplies.after);
    ASSERT_EQ(supplies.scalars.size(), 2U);
    EXPECT_EQ(supplies.scalars[0].value, 1 / 0.9);
    EXPECT_EQ(supplies.scalars[0].dtype, DType::f32);
    EXPECT_EQ(supplies.scalars[1].uid, kFirstOwnUid + 3);
    EXPECT_EQ(supplies.scalars[1].dtype, DType::i64);
    EXPECT_FALSE(supplies.own[0].zero);
    EXPECT_TRUE(supplies.own[1].zero);
    EXPECT_TRUE(supplies.own[0].ones);
    EXPECT_FALSE(supplies.own[1].ones);
  }
}

TEST(PlanBytes, DamagedStepsAreAnError) {
  const std::vector<std::byte> good = pack_plan({91900, 900, "key"}, with_all_steps(3));
  cases::Dice dice{1};
  for (int i = 0; i < 500; ++i) {
    std::vector<std::byte> bad = good;
    bad[static_cast<std::size_t>(dice.below(static_cast<std::int64_t>(bad.size())))] ^=
        static_cast<std::byte>(1 << dice.below(8));
    ASSERT_FALSE(unpack_plan(bad).ok()) << i;
    bad = good;
    bad.resize(static_cast<std::size_t>(dice.below(static_cast<std::int64_t>(bad.size()))));
    ASSERT_FALSE(unpack_plan(bad).ok()) << i;
  }
}

// A checksum that is right says nothing about sizes: those of an impossible step, or of memory that
// nobody has, are refused.
TEST(PlanBytes, ImpossibleSuppliesAreAnError) {
  const auto refusal = [](const PlanBytes& plan) -> std::string {
    const auto read = unpack_plan(pack_plan({91900, 900, "key"}, plan));
    if (read.ok()) return "";
    EXPECT_EQ(read.error().kind, ErrorKind::io);
    return read.error().message;
  };
  for (const std::int64_t bytes : {std::int64_t{-1}, (std::int64_t{1} << 50) + 1}) {
    PlanBytes plan;
    plan.supplies.own = {{kFirstOwnUid, bytes, false}};
    EXPECT_NE(refusal(plan), "") << bytes;
  }
  for (std::size_t kind = 0; kind < std::variant_size_v<Step>; ++kind) {
    PlanBytes plan = with_all_steps(5);
    std::visit(
        [](auto& step) {
          if constexpr (requires { step.scores; }) {
            step.scores.rows = -1;
          } else if constexpr (requires { step.heads; }) {
            step.heads = -1;
          } else if constexpr (requires { step.bucket; }) {
            step.bucket = -1;
          } else {
            step.shape = {1, 1, 1};
          }
        },
        plan.supplies.before[kind]);
    EXPECT_NE(refusal(plan), "") << step_name(plan.supplies.before[kind]);
  }
}

}  // namespace
}  // namespace lawson::cudnn
