// Between storage of any dtype and stride and contiguous arrays of the type that is computed in.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "engine/cpu/kernels.h"

namespace lawson::cpu {

// out[i] = element first + i * stride; T: float, double, or uint32_t (an integer, wrapping).
template <typename T>
void load_elements(const Kernels& kernels, const void* data, DType dtype, std::int64_t first,
                   std::int64_t stride, std::int64_t count, T* out);

// The reverse; rounds as base/dtype.h says.
template <typename T>
void store_elements(const Kernels& kernels, void* data, DType dtype, std::int64_t first,
                    std::int64_t stride, std::int64_t count, const T* values);

// What a round trip through storage of `dtype` gives.
template <typename T>
void round_elements(const Kernels& kernels, DType dtype, std::int64_t count, T* values);

}  // namespace lawson::cpu
