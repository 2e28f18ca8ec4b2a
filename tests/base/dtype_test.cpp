// Conversions of the small float formats, exhaustively: decoding against other formulations of the
// formats, encoding against "the nearest of all values, ties to the even pattern".
#include "base/dtype.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

namespace lawson {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr std::int64_t kManyElements = std::int64_t{1} << 46;

double decode(DType dtype, std::uint32_t bits) {
  const std::uint64_t storage = bits;  // little-endian: the low bytes are the element
  return load_element(&storage, dtype, 0);
}

std::uint32_t encode(DType dtype, double value) {
  std::uint64_t storage = 0;
  store_element(&storage, dtype, 0, value);
  return static_cast<std::uint32_t>(storage);
}

bool same(double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  return a == b && std::signbit(a) == std::signbit(b);
}

// binary16 by moving the bits into a binary32 and scaling by the difference of the biases.
double half_by_scaling(std::uint32_t bits) {
  const std::uint32_t magnitude = bits & 0x7FFFU;
  float value = std::bit_cast<float>(magnitude << 13U) * 0x1p112F;
  if (magnitude >= 0x7C00U) value = magnitude == 0x7C00U ? INFINITY : NAN;
  return (bits & 0x8000U) != 0 ? -value : value;
}

// E4M3 as in the table of the OCP FP8 specification: S.EEEE.MMM, bias 7, no infinity.
double e4m3_by_sum(std::uint32_t bits) {
  const std::uint32_t exponent = (bits >> 3U) & 15U;
  const std::uint32_t mantissa = bits & 7U;
  if (exponent == 15 && mantissa == 7) return kNaN;
  double value = exponent == 0 ? 0.0 : 8.0;
  for (std::uint32_t bit = 0; bit < 3; ++bit) value += (mantissa >> bit & 1U) != 0 ? 1U << bit : 0;
  for (std::uint32_t e = std::max(exponent, 1U); e < 10; ++e) value /= 2;
  for (std::uint32_t e = 10; e < exponent; ++e) value *= 2;
  return (bits & 128U) != 0 ? -value : value;
}

TEST(DType, HalfDecodesEveryPattern) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    ASSERT_TRUE(same(decode(DType::f16, bits), half_by_scaling(bits))) << bits;
  }
}

TEST(DType, BfloatDecodesEveryPattern) {
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const int exponent = static_cast<int>(bits >> 7U & 255U);
    const int mantissa = static_cast<int>(bits & 127U);
    double value =
        exponent == 0 ? std::ldexp(mantissa, -133) : std::ldexp(128 + mantissa, exponent - 134);
    if (exponent == 255) value = mantissa == 0 ? kInfinity : kNaN;
    if ((bits & 0x8000U) != 0) value = -value;
    ASSERT_TRUE(same(decode(DType::bf16, bits), value)) << bits;
  }
}

TEST(DType, E5M2IsTheUpperByteOfHalf) {
  for (std::uint32_t bits = 0; bits < 256; ++bits) {
    ASSERT_TRUE(same(decode(DType::f8e5m2, bits), half_by_scaling(bits << 8U))) << bits;
  }
}

TEST(DType, E4M3DecodesEveryPattern) {
  for (std::uint32_t bits = 0; bits < 256; ++bits) {
    ASSERT_TRUE(same(decode(DType::f8e4m3, bits), e4m3_by_sum(bits)))
        << bits << ": " << decode(DType::f8e4m3, bits) << " " << e4m3_by_sum(bits);
  }
}

TEST(DType, E2M1AndI4DecodeEveryPattern) {
  const std::array<double, 8> magnitudes{0, 0.5, 1, 1.5, 2, 3, 4, 6};
  for (std::uint32_t bits = 0; bits < 16; ++bits) {
    const double value = bits < 8 ? magnitudes[bits] : -magnitudes[bits - 8];
    EXPECT_TRUE(same(decode(DType::f4e2m1, bits), value)) << bits;
    EXPECT_EQ(decode(DType::i4, bits), bits < 8 ? bits : static_cast<double>(bits) - 16);
  }
}

TEST(DType, E8M0HoldsPowersOfTwo) {
  for (std::uint32_t bits = 0; bits < 255; ++bits) {
    const double value = std::ldexp(1.0, static_cast<int>(bits) - 127);
    EXPECT_EQ(decode(DType::f8e8m0, bits), value);
    EXPECT_EQ(encode(DType::f8e8m0, value), bits);
  }
  EXPECT_TRUE(std::isnan(decode(DType::f8e8m0, 255)));
  for (const double value : {0.0, -1.0, kNaN, kInfinity}) {
    EXPECT_EQ(encode(DType::f8e8m0, value), 255U) << value;
  }
}

struct SmallFormat {
  DType dtype;
  std::uint32_t magnitudes;  // patterns without the sign bit
  bool overflows;            // to infinity; else saturates
};

class SmallFloat : public testing::TestWithParam<SmallFormat> {};

// Between two neighbouring values every double goes to the nearer one, the middle to the one with
// the even pattern. (Neighbouring values have neighbouring patterns.)
TEST_P(SmallFloat, EncodesToTheNearestValueTiesToEven) {
  const auto [dtype, count, overflows] = GetParam();
  std::vector<std::uint32_t> finite;
  for (std::uint32_t bits = 0; bits < count; ++bits) {
    if (std::isfinite(decode(dtype, bits))) finite.push_back(bits);
  }
  for (std::size_t i = 0; i + 1 < finite.size(); ++i) {
    const double low = decode(dtype, finite[i]);
    const double high = decode(dtype, finite[i + 1]);
    ASSERT_LT(low, high);
    ASSERT_EQ(finite[i] + 1, finite[i + 1]);
    const double middle = low + (high - low) / 2;
    const std::uint32_t even = finite[i] % 2 == 0 ? finite[i] : finite[i + 1];
    for (const bool negative : {false, true}) {
      const double sign = negative ? -1 : 1;
      const std::uint32_t sign_bit = negative ? count : 0;
      ASSERT_EQ(encode(dtype, sign * low), sign_bit | finite[i]) << low;
      ASSERT_EQ(encode(dtype, sign * std::nextafter(middle, 0)), sign_bit | finite[i]) << low;
      ASSERT_EQ(encode(dtype, sign * middle), sign_bit | even) << middle;
      ASSERT_EQ(encode(dtype, sign * std::nextafter(middle, high)), sign_bit | finite[i + 1])
          << low;
      ASSERT_EQ(encode(dtype, sign * std::nextafter(high, 0)), sign_bit | finite[i + 1]) << high;
    }
  }
  const double largest = decode(dtype, finite.back());
  EXPECT_EQ(largest, max_finite(dtype));
  EXPECT_EQ(decode(dtype, 1), smallest_subnormal(dtype));
  EXPECT_EQ(encode(dtype, std::numeric_limits<double>::denorm_min()), 0U);

  // One step of the last binade beyond the largest value, halfway and more.
  const double step = largest - decode(dtype, finite[finite.size() - 2]);
  const double beyond = overflows ? kInfinity : largest;
  EXPECT_EQ(round_to(dtype, std::nextafter(largest + step / 2, 0)), largest);
  EXPECT_EQ(round_to(dtype, largest + step / 2), beyond);
  EXPECT_EQ(round_to(dtype, largest + step), beyond);
  EXPECT_EQ(round_to(dtype, 1e300), beyond);
  EXPECT_EQ(round_to(dtype, kInfinity), beyond);
  EXPECT_EQ(round_to(dtype, -kInfinity), -beyond);
}

INSTANTIATE_TEST_SUITE_P(
    Formats, SmallFloat,
    testing::Values(SmallFormat{DType::f16, 0x8000, true}, SmallFormat{DType::bf16, 0x8000, true},
                    SmallFormat{DType::f8e5m2, 0x80, true}, SmallFormat{DType::f8e4m3, 0x80, false},
                    SmallFormat{DType::f4e2m1, 0x8, false}),
    [](const auto& format) { return std::string{to_string(format.param.dtype)}; });

TEST(DType, NaNStaysNaNWhereTheFormatHasOne) {
  for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16, DType::f8e5m2,
                            DType::f8e4m3, DType::f8e8m0}) {
    EXPECT_TRUE(std::isnan(round_to(dtype, kNaN))) << to_string(dtype);
  }
}

TEST(DType, ZeroKeepsItsSign) {
  for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16, DType::f8e5m2,
                            DType::f8e4m3, DType::f4e2m1}) {
    EXPECT_TRUE(same(round_to(dtype, 0.0), 0.0)) << to_string(dtype);
    EXPECT_TRUE(same(round_to(dtype, -0.0), -0.0)) << to_string(dtype);
  }
}

TEST(DType, IntegersSaturateAndRoundHalfToEven) {
  struct Range {
    DType dtype;
    double low;
    double high;
  };
  for (const auto& [dtype, low, high] :
       {Range{DType::i4, -8, 7}, Range{DType::i8, -128, 127}, Range{DType::u8, 0, 255},
        Range{DType::i32, -2147483648.0, 2147483647.0}}) {
    SCOPED_TRACE(std::string{to_string(dtype)});
    EXPECT_EQ(round_to(dtype, low), low);
    EXPECT_EQ(round_to(dtype, low - 1), low);
    EXPECT_EQ(round_to(dtype, -kInfinity), low);
    EXPECT_EQ(round_to(dtype, high), high);
    EXPECT_EQ(round_to(dtype, high + 0.5), high);
    EXPECT_EQ(round_to(dtype, kInfinity), high);
    EXPECT_EQ(round_to(dtype, kNaN), 0);
    EXPECT_EQ(round_to(dtype, 0.5), 0);
    EXPECT_EQ(round_to(dtype, 1.5), 2);
    EXPECT_EQ(round_to(dtype, 2.5), 2);
    EXPECT_EQ(round_to(dtype, 2.500001), 3);
  }
}

TEST(DType, LongsSaturateWithoutOverflow) {
  std::int64_t value = 0;
  store_element(&value, DType::i64, 0, 0x1p63);
  EXPECT_EQ(value, INT64_MAX);
  store_element(&value, DType::i64, 0, -0x1p63);
  EXPECT_EQ(value, INT64_MIN);
  store_element(&value, DType::i64, 0, -1e300);
  EXPECT_EQ(value, INT64_MIN);
  store_element(&value, DType::i64, 0, kNaN);
  EXPECT_EQ(value, 0);
  store_element(&value, DType::i64, 0, 0x1p53 - 1);
  EXPECT_EQ(value, (std::int64_t{1} << 53) - 1);
}

TEST(DType, BoolIsOneByteThatIsZeroOrNot) {
  std::uint8_t byte = 0;
  store_element(&byte, DType::boolean, 0, -0.25);
  EXPECT_EQ(byte, 1);
  byte = 77;
  EXPECT_EQ(load_element(&byte, DType::boolean, 0), 1);
}

TEST(DType, FourBitElementsShareBytesLowNibbleFirst) {
  std::array<std::uint8_t, 2> bytes{0xFF, 0xFF};
  store_element(bytes.data(), DType::i4, 0, 1);
  EXPECT_EQ(bytes[0], 0xF1);
  store_element(bytes.data(), DType::i4, 1, -2);
  EXPECT_EQ(bytes[0], 0xE1);
  store_element(bytes.data(), DType::i4, 3, 7);
  EXPECT_EQ(bytes[1], 0x7F);
  EXPECT_EQ(load_element(bytes.data(), DType::i4, 1), -2);
}

TEST(DType, SizesInBytes) {
  EXPECT_EQ(byte_size(DType::f64, 3), 24U);
  EXPECT_EQ(byte_size(DType::bf16, 3), 6U);
  EXPECT_EQ(byte_size(DType::boolean, 3), 3U);
  EXPECT_EQ(byte_size(DType::i4, 3), 2U);
  EXPECT_EQ(byte_size(DType::i4, 0), 0U);
  EXPECT_EQ(byte_size(DType::f64, kManyElements), 8 * static_cast<std::size_t>(kManyElements));
}

TEST(DType, NamesReadBack) {
  for (int i = 0; i < kDTypeCount; ++i) {
    const auto dtype = static_cast<DType>(i);
    EXPECT_EQ(dtype_from_string(to_string(dtype)), dtype);
  }
  EXPECT_EQ(dtype_from_string("float32"), std::nullopt);
  EXPECT_EQ(dtype_from_string(""), std::nullopt);
}

TEST(DType, RoundoffIsHalfTheSpacingAboveOne) {
  for (const DType dtype : {DType::f16, DType::bf16, DType::f8e5m2, DType::f8e4m3, DType::f4e2m1}) {
    const double next = decode(dtype, encode(dtype, 1.0) + 1);
    EXPECT_EQ(unit_roundoff(dtype), (next - 1) / 2) << to_string(dtype);
  }
  EXPECT_EQ(unit_roundoff(DType::f32), std::numeric_limits<float>::epsilon() / 2);
  EXPECT_EQ(unit_roundoff(DType::f64), std::numeric_limits<double>::epsilon() / 2);
  EXPECT_EQ(unit_roundoff(DType::i8), 0);
}

}  // namespace
}  // namespace lawson
