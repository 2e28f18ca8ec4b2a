#include "base/dtype.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace lawson {
namespace {

struct Info {
  std::string_view name;
  int bits;
  bool floating;
  bool integer;
  int precision;     // significand bits including the hidden one; 0 for non-floats
  int min_exponent;  // exponent of the smallest normal number
  double max;
};

constexpr std::array<Info, kDTypeCount> kInfo{{
    {"f64", 64, true, false, 53, -1022, std::numeric_limits<double>::max()},
    {"f32", 32, true, false, 24, -126, std::numeric_limits<float>::max()},
    {"f16", 16, true, false, 11, -14, 65504.0},
    {"bf16", 16, true, false, 8, -126, 0x1.fep127},
    {"f8e4m3", 8, true, false, 4, -6, 448.0},
    {"f8e5m2", 8, true, false, 3, -14, 57344.0},
    {"f8e8m0", 8, true, false, 1, -127, 0x1p127},
    {"f4e2m1", 4, true, false, 2, 0, 6.0},
    {"i64", 64, false, true, 0, 0, 0x1p63},
    {"i32", 32, false, true, 0, 0, 2147483647.0},
    {"i8", 8, false, true, 0, 0, 127.0},
    {"u8", 8, false, true, 0, 0, 255.0},
    {"i4", 4, false, true, 0, 0, 7.0},
    {"bool", 8, false, false, 0, 0, 1.0},
}};

const Info& info(DType dtype) {
  return kInfo[static_cast<std::size_t>(dtype)];
}

// A float format small enough to be handled by bit patterns: sign, exponent, mantissa widths.
struct SmallFormat {
  int exponent_bits;
  int mantissa_bits;
  int bias;
  bool has_infinity;  // IEEE-like top exponent
  bool has_nan;       // without infinity: all-ones pattern is NaN (E4M3)
};

SmallFormat small_format(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return {5, 10, 15, true, true};
    case DType::bf16:
      return {8, 7, 127, true, true};
    case DType::f8e5m2:
      return {5, 2, 15, true, true};
    case DType::f8e4m3:
      return {4, 3, 7, false, true};
    default:
      return {2, 1, 1, false, false};  // f4e2m1
  }
}

double decode(std::uint32_t bits, const SmallFormat& f) {
  const std::uint32_t mantissa_mask = (1U << f.mantissa_bits) - 1;
  const std::uint32_t exponent_mask = (1U << f.exponent_bits) - 1;
  const std::uint32_t mantissa = bits & mantissa_mask;
  const std::uint32_t exponent = (bits >> f.mantissa_bits) & exponent_mask;
  const double sign = ((bits >> (f.mantissa_bits + f.exponent_bits)) & 1U) != 0 ? -1.0 : 1.0;
  if (exponent == exponent_mask) {
    if (f.has_infinity) {
      return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN()
                           : sign * std::numeric_limits<double>::infinity();
    }
    if (f.has_nan && mantissa == mantissa_mask) return std::numeric_limits<double>::quiet_NaN();
  }
  if (exponent == 0) {
    return sign * std::ldexp(static_cast<double>(mantissa), 1 - f.bias - f.mantissa_bits);
  }
  return sign * std::ldexp(1.0 + std::ldexp(static_cast<double>(mantissa), -f.mantissa_bits),
                           static_cast<int>(exponent) - f.bias);
}

std::uint32_t encode(double value, DType dtype, const SmallFormat& f) {
  const std::uint32_t sign = std::signbit(value) ? 1U << (f.mantissa_bits + f.exponent_bits) : 0U;
  const std::uint32_t exponent_mask = (1U << f.exponent_bits) - 1;
  const std::uint32_t mantissa_mask = (1U << f.mantissa_bits) - 1;
  const std::uint32_t infinity = exponent_mask << f.mantissa_bits;
  if (std::isnan(value)) {
    if (!f.has_nan) return 0;
    return sign | infinity | (f.has_infinity ? 1U << (f.mantissa_bits - 1) : mantissa_mask);
  }
  const double magnitude = std::fabs(value);
  const double largest = info(dtype).max;
  // Round to a multiple of the last place's unit; std::nearbyint rounds half to even.
  int exponent = 1 - f.bias;
  if (magnitude > 0 && std::isfinite(magnitude))
    exponent = std::max(exponent, std::ilogb(magnitude));
  double rounded =
      std::isfinite(magnitude)
          ? std::ldexp(std::nearbyint(std::ldexp(magnitude, f.mantissa_bits - exponent)),
                       exponent - f.mantissa_bits)
          : magnitude;
  if (rounded > largest) {
    if (f.has_infinity) return sign | infinity;
    rounded = largest;
  }
  if (rounded == 0) return sign;
  exponent = std::ilogb(rounded);
  if (exponent < 1 - f.bias) {
    const double steps = std::ldexp(rounded, f.bias - 1 + f.mantissa_bits);
    return sign | static_cast<std::uint32_t>(steps);
  }
  const double fraction = std::ldexp(rounded, -exponent) - 1.0;
  const auto mantissa = static_cast<std::uint32_t>(std::ldexp(fraction, f.mantissa_bits));
  return sign | (static_cast<std::uint32_t>(exponent + f.bias) << f.mantissa_bits) | mantissa;
}

template <typename T>
T read_as(const void* data, std::int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(data) + index * std::int64_t{sizeof(T)}, sizeof(T));
  return value;
}

template <typename T>
void write_as(void* data, std::int64_t index, T value) {
  std::memcpy(static_cast<char*>(data) + index * std::int64_t{sizeof(T)}, &value, sizeof(T));
}

double saturate(double value, double low, double high) {
  if (std::isnan(value)) return 0.0;
  return std::clamp(std::nearbyint(value), low, high);
}

std::uint8_t nibble(const void* data, std::int64_t index) {
  const auto byte = read_as<std::uint8_t>(data, index / 2);
  return static_cast<std::uint8_t>((index % 2 == 0 ? byte : byte >> 4) & 0xF);
}

void set_nibble(void* data, std::int64_t index, std::uint32_t value) {
  const std::uint32_t byte = read_as<std::uint8_t>(data, index / 2);
  const std::uint32_t merged =
      index % 2 == 0 ? (byte & 0xF0U) | (value & 0xFU) : (byte & 0x0FU) | ((value & 0xFU) << 4);
  write_as(data, index / 2, static_cast<std::uint8_t>(merged));
}

}  // namespace

std::string_view to_string(DType dtype) {
  return info(dtype).name;
}

std::optional<DType> dtype_from_string(std::string_view name) {
  for (int i = 0; i < kDTypeCount; ++i) {
    if (kInfo[static_cast<std::size_t>(i)].name == name) return static_cast<DType>(i);
  }
  return std::nullopt;
}

int bit_width(DType dtype) {
  return info(dtype).bits;
}
bool is_float(DType dtype) {
  return info(dtype).floating;
}
bool is_integer(DType dtype) {
  return info(dtype).integer;
}

std::size_t byte_size(DType dtype, std::int64_t count) {
  return (static_cast<std::size_t>(count) * static_cast<std::size_t>(bit_width(dtype)) + 7) / 8;
}

double unit_roundoff(DType dtype) {
  return is_float(dtype) ? std::ldexp(1.0, -info(dtype).precision) : 0.0;
}

double max_finite(DType dtype) {
  return info(dtype).max;
}

double smallest_subnormal(DType dtype) {
  if (!is_float(dtype)) return 0.0;
  const Info& i = info(dtype);
  return std::ldexp(1.0, i.min_exponent - i.precision + 1);
}

double load_element(const void* data, DType dtype, std::int64_t index) {
  switch (dtype) {
    case DType::f64:
      return read_as<double>(data, index);
    case DType::f32:
      return read_as<float>(data, index);
    case DType::f16:
      return decode(read_as<std::uint16_t>(data, index), small_format(dtype));
    case DType::bf16:
      return std::bit_cast<float>(static_cast<std::uint32_t>(read_as<std::uint16_t>(data, index))
                                  << 16);
    case DType::f8e4m3:
    case DType::f8e5m2:
      return decode(read_as<std::uint8_t>(data, index), small_format(dtype));
    case DType::f8e8m0: {
      const int exponent = read_as<std::uint8_t>(data, index);
      return exponent == 255 ? std::numeric_limits<double>::quiet_NaN()
                             : std::ldexp(1.0, exponent - 127);
    }
    case DType::f4e2m1:
      return decode(nibble(data, index), small_format(dtype));
    case DType::i64:
      return static_cast<double>(read_as<std::int64_t>(data, index));
    case DType::i32:
      return read_as<std::int32_t>(data, index);
    case DType::i8:
      return read_as<std::int8_t>(data, index);
    case DType::u8:
      return read_as<std::uint8_t>(data, index);
    case DType::i4: {
      const int value = nibble(data, index);
      return value >= 8 ? value - 16 : value;
    }
    case DType::boolean:
      return read_as<std::uint8_t>(data, index) != 0 ? 1.0 : 0.0;
  }
  return 0.0;
}

void store_element(void* data, DType dtype, std::int64_t index, double value) {
  switch (dtype) {
    case DType::f64:
      write_as(data, index, value);
      return;
    case DType::f32:
      write_as(data, index, static_cast<float>(value));
      return;
    case DType::f16:
    case DType::bf16:
      write_as(data, index, static_cast<std::uint16_t>(encode(value, dtype, small_format(dtype))));
      return;
    case DType::f8e4m3:
    case DType::f8e5m2:
      write_as(data, index, static_cast<std::uint8_t>(encode(value, dtype, small_format(dtype))));
      return;
    case DType::f8e8m0: {
      const bool valid = value > 0 && std::isfinite(value);
      const int exponent =
          valid ? std::clamp(static_cast<int>(std::lround(std::log2(value))) + 127, 0, 254) : 255;
      write_as(data, index, static_cast<std::uint8_t>(exponent));
      return;
    }
    case DType::f4e2m1:
      set_nibble(data, index, encode(value, dtype, small_format(dtype)));
      return;
    case DType::i64: {
      const double rounded = std::isnan(value) ? 0.0 : std::nearbyint(value);
      const std::int64_t stored = rounded >= 0x1p63   ? std::numeric_limits<std::int64_t>::max()
                                  : rounded < -0x1p63 ? std::numeric_limits<std::int64_t>::min()
                                                      : static_cast<std::int64_t>(rounded);
      write_as(data, index, stored);
      return;
    }
    case DType::i32:
      write_as(data, index,
               static_cast<std::int32_t>(saturate(value, -2147483648.0, 2147483647.0)));
      return;
    case DType::i8:
      write_as(data, index, static_cast<std::int8_t>(saturate(value, -128.0, 127.0)));
      return;
    case DType::u8:
      write_as(data, index, static_cast<std::uint8_t>(saturate(value, 0.0, 255.0)));
      return;
    case DType::i4:
      set_nibble(data, index,
                 static_cast<std::uint32_t>(static_cast<int>(saturate(value, -8.0, 7.0))));
      return;
    case DType::boolean:
      write_as(data, index, static_cast<std::uint8_t>(value != 0 ? 1 : 0));
      return;
  }
}

double round_to(DType dtype, double value) {
  std::uint64_t storage = 0;
  store_element(&storage, dtype, 0, value);
  return load_element(&storage, dtype, 0);
}

}  // namespace lawson
