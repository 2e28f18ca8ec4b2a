#include "base/status.h"

#include <gtest/gtest.h>

#include <memory>
#include <set>

#include "base/hash.h"

namespace lawson {
namespace {

Result<int> half(int value) {
  if (value % 2 != 0) return invalid("{} is odd", value);
  return value / 2;
}

Result<int> quarter(int value) {
  LAWSON_TRY(const int once, half(value));
  LAWSON_TRY(const int twice, half(once));
  return twice;
}

Status even(int value) {
  LAWSON_CHECK(half(value));
  return {};
}

TEST(Status, TryReturnsTheFirstError) {
  EXPECT_EQ(quarter(8).value(), 2);
  ASSERT_FALSE(quarter(6).ok());
  EXPECT_EQ(quarter(6).error().message, "3 is odd");
  EXPECT_EQ(quarter(6).error().kind, ErrorKind::invalid_argument);
  EXPECT_TRUE(even(2).ok());
  EXPECT_FALSE(even(3).ok());
}

TEST(Status, ResultHoldsWhatCannotBeCopied) {
  Result<std::unique_ptr<int>> result{std::make_unique<int>(3)};
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(*std::move(result).value(), 3);
}

TEST(Status, UnsupportedCarriesItsReason) {
  const Error error = unsupported("no_kernel", "head_dim 3: a multiple of 8 is needed", "head_dim");
  EXPECT_EQ(error.kind, ErrorKind::unsupported);
  ASSERT_EQ(error.reasons.size(), 1U);
  EXPECT_EQ(error.reasons[0].code, "no_kernel");
  EXPECT_EQ(error.reasons[0].field, "head_dim");
  EXPECT_EQ(error.message, error.reasons[0].message);
}

TEST(Status, EveryKindHasItsOwnName) {
  std::set<std::string> names;
  for (int kind = 0; kind <= static_cast<int>(ErrorKind::internal); ++kind) {
    names.insert(to_string(static_cast<ErrorKind>(kind)));
  }
  EXPECT_EQ(names.size(), static_cast<std::size_t>(ErrorKind::internal) + 1);
}

TEST(Hash, IsStableAndSensitive) {
  EXPECT_EQ(hash_hex("").size(), 32U);
  // XXH3-128 of the empty input with seed 0, from the algorithm's own test vectors.
  EXPECT_EQ(hash_hex(""), "99aa06d3014798d86001c324468d497f");
  EXPECT_NE(hash_hex("a"), hash_hex("b"));
  EXPECT_NE(hash_hex(std::string_view{"\0", 1}), hash_hex(""));
}

}  // namespace
}  // namespace lawson
