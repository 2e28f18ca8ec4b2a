// The seam between the engine and its arithmetic: plain functions over contiguous arrays and
// packed panels, compiled once per instruction set from kernels_body.h and chosen by cpuid.
//
// Panels. A (left operand) is cut into panels of kMr rows, B (right operand) into panels of `nr`
// columns; both are padded with zeros, so that the microkernel never sees an edge:
//   packed A: a[panel * a_panel + k * kMr + row]      packed B: b[panel * b_panel + k * nr +
//   column]
#pragma once

#include <cstdint>

#include "ir/ops.h"

namespace lawson::cpu {

enum class Isa : std::uint8_t { generic, v2, v3, v4 };  // v2..v4: the x86-64 levels
inline constexpr int kIsaCount = 4;

// How a left operand lies in memory: packed panels, or a square tile of `tile` columns read by
// rows or, transposed, by columns.
enum class AForm : std::uint8_t { packed, tile_rows, tile_columns };
inline constexpr int kAFormCount = 3;

// C[m, n] (+)= A[m, k] B[k, n]; m a multiple of mr, n a multiple of nr.
template <typename T>
struct TileProduct {
  T* c = nullptr;
  std::int64_t ldc = 0;
  const T* a = nullptr;
  std::int64_t a_panel = 0;  // elements between panels; packed form only
  const T* b = nullptr;
  std::int64_t b_panel = 0;
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  bool accumulate = false;
};

template <typename T>
struct ProductKernels {
  int nr = 0;  // columns of a B panel
  void (*product[kAFormCount])(const TileProduct<T>& p) = {};
};

// Of one slice that a norm normalises; an rms norm's mean is 0.
struct NormStatistics {
  double mean = 0;
  double inv_std = 0;
};

// Sums, or means, over a slice: dy scale, and that times the normalised x.
struct NormSums {
  double gradient = 0;
  double product = 0;
};

// Pointwise functions and the row functions of softmax and of norms. Results may alias operands
// exactly.
template <typename T>
struct MathKernels {
  void (*unary)(ir::UnaryKind kind, T parameter, const T* x, T* y, std::int64_t n);
  void (*unary_grad)(ir::UnaryKind kind, T parameter, const T* dy, const T* x, T* y,
                     std::int64_t n);
  void (*binary)(ir::BinaryKind kind, const T* a, const T* b, T* y, std::int64_t n);
  void (*compare)(ir::CompareKind kind, const T* a, const T* b, T* y, std::int64_t n);
  void (*select)(const T* predicate, const T* a, const T* b, T* y, std::int64_t n);
  void (*clamp)(T low, T high, const T* x, T* y, std::int64_t n);

  T (*max)(const T* x, std::int64_t n, T start);  // ignores NaN
  T (*exp_sum)(T* x, std::int64_t n, T shift);    // x = exp(x - shift); returns the sum
  void (*softcap)(T* x, std::int64_t n, T cap);   // x = cap tanh(x / cap)
  void (*scale)(T* x, std::int64_t n, T factor);
  void (*add)(T* y, const T* x, std::int64_t n);                   // y += x
  void (*add_scaled)(T* y, const T* x, std::int64_t n, T factor);  // y += factor x
  // y += factors[0] x[0] + ... + factors[3] x[3]; y is none of the x.
  void (*add_scaled_rows)(T* y, const T* const* x, const T* factors, std::int64_t n);
  void (*add_ramp)(T* x, std::int64_t n, T first, T step);       // x[i] += first + i step
  void (*gradient)(const T* p, T* dp, std::int64_t n, T delta);  // dp = p (dp - delta)
  void (*hide)(T* x, const std::uint8_t* kept, std::int64_t n,
               T value);  // x = value where not kept
  void (*drop)(T* x, const std::uint8_t* kept, std::int64_t n, T factor);  // x *= factor, or 0
  T (*dot)(const T* a, const T* b, std::int64_t n);
  bool (*finite)(const T* x, std::int64_t n);

  // Norms compute in double whatever T is, so that a large mean does not swallow the variance.
  double (*norm_sum)(const T* x, std::int64_t n);
  double (*norm_squares)(const T* x, std::int64_t n, double shift);  // of x - shift
  void (*norm_apply)(const T* x, const T* scale, const T* bias, T* y, std::int64_t n,
                     NormStatistics at);
  NormSums (*norm_sums)(const T* dy, const T* x, const T* scale, std::int64_t n, NormStatistics at);
  void (*norm_gradient)(const T* dy, const T* x, const T* scale, T* dx, std::int64_t n,
                        NormStatistics at, NormSums mean);
  // Adds one slice's share.
  void (*norm_parameters)(const T* dy, const T* x, std::int64_t n, NormStatistics at,
                          double* dscale, double* dbias);
};

struct Kernels {
  Isa isa = Isa::generic;
  const char* name = "";
  int mr = 0;    // rows of an A panel
  int tile = 0;  // side of a square tile; a multiple of mr and of every nr
  ProductKernels<float> product_f32;
  ProductKernels<double> product_f64;
  ProductKernels<std::uint32_t> product_i32;  // wraps, as two's complement does
  MathKernels<float> math_f32;
  MathKernels<double> math_f64;

  void (*f16_to_f32)(const std::uint16_t* x, float* y, std::int64_t n);
  void (*f32_to_f16)(const float* x, std::uint16_t* y, std::int64_t n);
  void (*bf16_to_f32)(const std::uint16_t* x, float* y, std::int64_t n);
  void (*f32_to_bf16)(const float* x, std::uint16_t* y, std::int64_t n);

  // What DropoutStream of base/philox.h keeps of the n weights from `first` on; the threshold is
  // floor(probability * 2^32).
  void (*keep)(std::uint64_t seed, std::uint64_t offset, std::uint32_t threshold,
               std::uint64_t first, std::uint8_t* kept, std::int64_t n);

  template <typename T>
  const ProductKernels<T>& product() const {
    if constexpr (sizeof(T) == 8) {
      return product_f64;
    } else if constexpr (static_cast<T>(0.5) != 0) {
      return product_f32;
    } else {
      return product_i32;
    }
  }
  template <typename T>
  const MathKernels<T>& math() const {
    if constexpr (sizeof(T) == 8) {
      return math_f64;
    } else {
      return math_f32;
    }
  }
};

// The kernels of an instruction set, or nullptr where this build or this CPU lacks it.
const Kernels* kernels_for(Isa isa);

// What LAWSON_CPU_ISA (generic, v2, v3, v4) names if it is there, else the best there is; what it
// names that is not there is told once.
const Kernels& best_kernels();

// Relative error of the kernels' own functions in f32 and of the C library's in f64.
inline constexpr double kFunctionRoundoffF32 = 0x1p-22;
inline constexpr double kFunctionRoundoffF64 = 0x1p-50;

}  // namespace lawson::cpu
