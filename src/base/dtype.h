// Element types and their conversions to and from float. Storage formats: IEEE 754 binary16/32/64,
// bfloat16, OCP FP8 (E4M3 without infinities, E5M2), OCP MX scale E8M0, FP4 E2M1.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace lawson {

enum class DType : std::uint8_t {
  f64,
  f32,
  f16,
  bf16,
  f8e4m3,
  f8e5m2,
  f8e8m0,
  f4e2m1,
  i64,
  i32,
  i8,
  u8,
  i4,
  boolean,
};
inline constexpr int kDTypeCount = 14;

std::string_view to_string(DType dtype);  // the spec's spelling: "f64", ..., "bool"
std::optional<DType> dtype_from_string(std::string_view name);

int bit_width(DType dtype);  // 4 for f4e2m1 and i4; bool is stored as one byte (8)
bool is_float(DType dtype);
bool is_integer(DType dtype);  // i64 i32 i8 u8 i4; not bool

// Bytes of `count` contiguous elements (4-bit types are packed two to a byte, low nibble first).
std::size_t byte_size(DType dtype, std::int64_t count);

// Relative rounding error of storing a normal value: 2^-(precision bits); 0 for integers and bool.
double unit_roundoff(DType dtype);
double max_finite(DType dtype);          // largest finite value (integers: largest value)
double smallest_subnormal(DType dtype);  // absolute error floor of storing a float; 0 for integers

// Element `index` of an array at `data` as double (exact for every type but i64 beyond 2^53).
double load_element(const void* data, DType dtype, std::int64_t index);

// Stores with round-to-nearest-even; integers saturate and round half to even (NaN becomes 0);
// f8e4m3 saturates to +-448 (NaN stays NaN); f16, bf16 and f8e5m2 overflow to infinity.
void store_element(void* data, DType dtype, std::int64_t index, double value);

// The value that a round trip through storage gives.
double round_to(DType dtype, double value);

}  // namespace lawson
