#include "engine/cpu/convert.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "base/lazy.h"

namespace lawson::cpu {
namespace {

constexpr std::int64_t kBlock = 256;

// The values of the 256 codes of an 8-bit format.
const std::array<float, 256>& byte_table(DType dtype) {
  const auto build = [dtype] {
    std::array<float, 256> table{};
    for (std::size_t code = 0; code < table.size(); ++code) {
      const auto byte = static_cast<std::uint8_t>(code);
      table[code] = static_cast<float>(load_element(&byte, dtype, 0));
    }
    return table;
  };
  static Lazy<const std::array<float, 256>> e4m3;
  static Lazy<const std::array<float, 256>> e5m2;
  static Lazy<const std::array<float, 256>> e8m0;
  auto& table = dtype == DType::f8e4m3 ? e4m3 : dtype == DType::f8e5m2 ? e5m2 : e8m0;
  return table.get(build);
}

// The values of the 16 codes of a 4-bit type.
const std::array<float, 16>& nibble_table(DType dtype) {
  const auto build = [dtype] {
    std::array<float, 16> table{};
    for (std::size_t code = 0; code < table.size(); ++code) {
      const auto byte = static_cast<std::uint8_t>(code);
      table[code] = static_cast<float>(load_element(&byte, dtype, 0));
    }
    return table;
  };
  static Lazy<const std::array<float, 16>> e2m1;
  static Lazy<const std::array<float, 16>> i4;
  return (dtype == DType::f4e2m1 ? e2m1 : i4).get(build);
}

template <typename T, typename Stored>
T converted(Stored value) {
  if constexpr (std::is_same_v<T, std::uint32_t> && std::is_integral_v<Stored>) {
    return static_cast<std::uint32_t>(static_cast<std::uint64_t>(value));
  } else {
    return static_cast<T>(value);
  }
}

template <typename T, typename Stored>
void load_plain(const void* data, std::int64_t first, std::int64_t stride, std::int64_t count,
                T* out) {
  const auto* bytes = static_cast<const char*>(data);
  const auto read = [bytes](std::int64_t index) {
    Stored value;
    std::memcpy(&value, bytes + index * std::int64_t{sizeof value}, sizeof value);
    return converted<T>(value);
  };
  if (stride == 1) {
    if constexpr (std::is_same_v<T, Stored>) {
      std::memcpy(out, bytes + first * std::int64_t{sizeof(T)},
                  static_cast<std::size_t>(count) * sizeof(T));
      return;
    }
    for (std::int64_t i = 0; i < count; ++i) out[i] = read(first + i);
  } else {
    for (std::int64_t i = 0; i < count; ++i) out[i] = read(first + i * stride);
  }
}

// 16-bit floats, a block at a time through the kernels.
template <typename T, typename Convert>
void load_half(const void* data, std::int64_t first, std::int64_t stride, std::int64_t count,
               T* out, Convert convert) {
  std::array<std::uint16_t, kBlock> codes;
  [[maybe_unused]] std::array<float, kBlock> floats;
  const auto* bytes = static_cast<const char*>(data);
  for (std::int64_t done = 0; done < count; done += kBlock) {
    const std::int64_t n = std::min(kBlock, count - done);
    if (stride == 1) {
      std::memcpy(codes.data(), bytes + (first + done) * 2, static_cast<std::size_t>(n) * 2);
    } else {
      for (std::int64_t i = 0; i < n; ++i) {
        std::memcpy(&codes[static_cast<std::size_t>(i)], bytes + (first + (done + i) * stride) * 2,
                    2);
      }
    }
    if constexpr (std::is_same_v<T, float>) {
      convert(codes.data(), out + done, n);
    } else {
      convert(codes.data(), floats.data(), n);
      for (std::int64_t i = 0; i < n; ++i) {
        out[done + i] = static_cast<T>(floats[static_cast<std::size_t>(i)]);
      }
    }
  }
}

template <typename T>
void load_any(const void* data, DType dtype, std::int64_t first, std::int64_t stride,
              std::int64_t count, T* out) {
  for (std::int64_t i = 0; i < count; ++i) {
    const double value = load_element(data, dtype, first + i * stride);
    if constexpr (std::is_same_v<T, std::uint32_t>) {
      out[i] = static_cast<std::uint32_t>(static_cast<std::int64_t>(value));
    } else {
      out[i] = static_cast<T>(value);
    }
  }
}

// A float that rounds to every shorter format as `value` does: rounded to odd (Boldo and
// Melquiond 2008).
float round_to_odd(double value) {
  const auto rounded = static_cast<float>(value);
  const double back = rounded;
  const auto bits = std::bit_cast<std::uint32_t>(rounded);
  if (back == value || std::isnan(value) || (bits & 1U) != 0) return rounded;
  return std::bit_cast<float>(std::fabs(back) > std::fabs(value) ? bits - 1 : bits + 1);
}

// f8e4m3 (saturating, no infinity) and f8e5m2, to nearest even.
template <DType kType>
std::uint8_t byte_float(float value) {
  constexpr bool kHasInfinity = kType == DType::f8e5m2;
  constexpr std::uint32_t kMantissa = kHasInfinity ? 2 : 3;
  constexpr std::uint32_t kBias = kHasInfinity ? 15 : 7;
  constexpr std::uint32_t kOverflow = kHasInfinity ? 0x7c : 0x7e;  // infinity; 448
  constexpr std::uint32_t kShift = 23 - kMantissa;
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = bits >> 24U & 0x80U;
  const std::uint32_t size = bits & 0x7fffffffU;
  if (size > 0x7f800000U) return static_cast<std::uint8_t>(sign | (kHasInfinity ? 0x7eU : 0x7fU));
  std::uint32_t code = 0;
  if (size < ((128U - kBias) << 23U)) {
    // Subnormal: adding 2^23 units of the last place rounds to that place.
    const float magic = std::bit_cast<float>((151U - kBias - kMantissa) << 23U);
    const float rounded = std::bit_cast<float>(size) + magic;
    code = std::bit_cast<std::uint32_t>(rounded) - std::bit_cast<std::uint32_t>(magic);
  } else {
    const std::uint32_t half = (1U << (kShift - 1)) - 1 + (size >> kShift & 1U);
    code = ((size + half) >> kShift) - ((127U - kBias) << kMantissa);
  }
  return static_cast<std::uint8_t>(sign | std::min(code, kOverflow));
}

template <typename Stored, typename T>
Stored saturated(T value) {
  if (std::isnan(value)) return 0;
  const double low = static_cast<double>(std::numeric_limits<Stored>::min());
  const double high = static_cast<double>(std::numeric_limits<Stored>::max());
  return static_cast<Stored>(std::clamp(std::nearbyint(static_cast<double>(value)), low, high));
}

template <typename Stored, typename T, typename Convert>
void store_plain(void* data, std::int64_t first, std::int64_t stride, std::int64_t count,
                 const T* values, Convert convert) {
  auto* bytes = static_cast<char*>(data);
  for (std::int64_t i = 0; i < count; ++i) {
    const Stored value = convert(values[i]);
    std::memcpy(bytes + (first + i * stride) * std::int64_t{sizeof value}, &value, sizeof value);
  }
}

template <typename T, typename Convert>
void store_half(void* data, std::int64_t first, std::int64_t stride, std::int64_t count,
                const T* values, Convert convert) {
  std::array<std::uint16_t, kBlock> codes;
  [[maybe_unused]] std::array<float, kBlock> floats;
  auto* bytes = static_cast<char*>(data);
  for (std::int64_t done = 0; done < count; done += kBlock) {
    const std::int64_t n = std::min(kBlock, count - done);
    if constexpr (std::is_same_v<T, float>) {
      convert(values + done, codes.data(), n);
    } else {
      for (std::int64_t i = 0; i < n; ++i) {
        floats[static_cast<std::size_t>(i)] = round_to_odd(static_cast<double>(values[done + i]));
      }
      convert(floats.data(), codes.data(), n);
    }
    if (stride == 1) {
      std::memcpy(bytes + (first + done) * 2, codes.data(), static_cast<std::size_t>(n) * 2);
    } else {
      for (std::int64_t i = 0; i < n; ++i) {
        std::memcpy(bytes + (first + (done + i) * stride) * 2, &codes[static_cast<std::size_t>(i)],
                    2);
      }
    }
  }
}

}  // namespace

template <typename T>
void load_elements(const Kernels& kernels, const void* data, DType dtype, std::int64_t first,
                   std::int64_t stride, std::int64_t count, T* out) {
  if (count <= 0) return;  // of an empty tensor the address may be null
  if (stride == 0 && count > 1) {
    T value{};
    load_elements(kernels, data, dtype, first, 1, 1, &value);
    std::fill(out, out + count, value);
    return;
  }
  switch (dtype) {
    case DType::f64:
      load_plain<T, double>(data, first, stride, count, out);
      return;
    case DType::f32:
      load_plain<T, float>(data, first, stride, count, out);
      return;
    case DType::i64:
      load_plain<T, std::int64_t>(data, first, stride, count, out);
      return;
    case DType::i32:
      load_plain<T, std::int32_t>(data, first, stride, count, out);
      return;
    case DType::i8:
      load_plain<T, std::int8_t>(data, first, stride, count, out);
      return;
    case DType::u8:
      load_plain<T, std::uint8_t>(data, first, stride, count, out);
      return;
    case DType::f16:
      load_half(data, first, stride, count, out, kernels.f16_to_f32);
      return;
    case DType::bf16:
      load_half(data, first, stride, count, out, kernels.bf16_to_f32);
      return;
    case DType::f8e4m3:
    case DType::f8e5m2:
    case DType::f8e8m0: {
      const auto& table = byte_table(dtype);
      const auto* codes = static_cast<const std::uint8_t*>(data);
      for (std::int64_t i = 0; i < count; ++i) {
        out[i] = static_cast<T>(table[codes[first + i * stride]]);
      }
      return;
    }
    case DType::f4e2m1:
    case DType::i4: {
      const auto& table = nibble_table(dtype);
      const auto* codes = static_cast<const std::uint8_t*>(data);
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t at = first + i * stride;
        const std::uint32_t byte = codes[at / 2];
        const float value = table[at % 2 == 0 ? byte & 15U : byte >> 4U];
        if constexpr (std::is_integral_v<T>) {
          out[i] = static_cast<T>(static_cast<std::int32_t>(value));
        } else {
          out[i] = static_cast<T>(value);
        }
      }
      return;
    }
    case DType::boolean:
      load_any(data, dtype, first, stride, count, out);
      return;
  }
}

template <typename T>
void store_elements(const Kernels& kernels, void* data, DType dtype, std::int64_t first,
                    std::int64_t stride, std::int64_t count, const T* values) {
  if (count <= 0) return;
  switch (dtype) {
    case DType::f64:
      store_plain<double>(data, first, stride, count, values,
                          [](T v) { return static_cast<double>(v); });
      return;
    case DType::f32:
      store_plain<float>(data, first, stride, count, values,
                         [](T v) { return static_cast<float>(v); });
      return;
    case DType::f16:
      store_half(data, first, stride, count, values, kernels.f32_to_f16);
      return;
    case DType::bf16:
      store_half(data, first, stride, count, values, kernels.f32_to_bf16);
      return;
    case DType::i32:
      store_plain<std::int32_t>(data, first, stride, count, values, saturated<std::int32_t, T>);
      return;
    case DType::i8:
      store_plain<std::int8_t>(data, first, stride, count, values, saturated<std::int8_t, T>);
      return;
    case DType::u8:
      store_plain<std::uint8_t>(data, first, stride, count, values, saturated<std::uint8_t, T>);
      return;
    case DType::boolean:
      store_plain<std::uint8_t>(data, first, stride, count, values,
                                [](T v) { return static_cast<std::uint8_t>(v != T{0} ? 1 : 0); });
      return;
    case DType::f8e4m3:
      store_plain<std::uint8_t>(data, first, stride, count, values, [](T v) {
        return byte_float<DType::f8e4m3>(round_to_odd(static_cast<double>(v)));
      });
      return;
    case DType::f8e5m2:
      store_plain<std::uint8_t>(data, first, stride, count, values, [](T v) {
        return byte_float<DType::f8e5m2>(round_to_odd(static_cast<double>(v)));
      });
      return;
    case DType::f8e8m0:
    case DType::f4e2m1:
    case DType::i64:
    case DType::i4:
      for (std::int64_t i = 0; i < count; ++i) {
        store_element(data, dtype, first + i * stride, static_cast<double>(values[i]));
      }
      return;
  }
}

template <typename T>
void round_elements(const Kernels& kernels, DType dtype, std::int64_t count, T* values) {
  if (dtype == DType::f64 || (dtype == DType::f32 && std::is_same_v<T, float>)) return;
  // Through storage, a block at a time; 4-bit types are packed, so a block is whole bytes.
  std::array<std::uint64_t, kBlock> storage;
  for (std::int64_t done = 0; done < count; done += kBlock) {
    const std::int64_t n = std::min(kBlock, count - done);
    store_elements(kernels, storage.data(), dtype, 0, 1, n, values + done);
    load_elements(kernels, storage.data(), dtype, 0, 1, n, values + done);
  }
}

template void load_elements(const Kernels&, const void*, DType, std::int64_t, std::int64_t,
                            std::int64_t, float*);
template void load_elements(const Kernels&, const void*, DType, std::int64_t, std::int64_t,
                            std::int64_t, double*);
template void load_elements(const Kernels&, const void*, DType, std::int64_t, std::int64_t,
                            std::int64_t, std::uint32_t*);
template void store_elements(const Kernels&, void*, DType, std::int64_t, std::int64_t, std::int64_t,
                             const float*);
template void store_elements(const Kernels&, void*, DType, std::int64_t, std::int64_t, std::int64_t,
                             const double*);
template void round_elements(const Kernels&, DType, std::int64_t, float*);
template void round_elements(const Kernels&, DType, std::int64_t, double*);

}  // namespace lawson::cpu
