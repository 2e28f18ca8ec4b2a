// The kernels of kernels.h for one instruction set. Compiled several times with different flags, so
// everything has internal linkage and no inline function of another header is called: the linker
// must not pick an AVX-512 copy of a shared function for a machine without AVX-512.
#include <cstdint>
#include <type_traits>

#include "engine/cpu/kernels.h"

#if defined(__AVX512F__)
#define LAWSON_CPU_BYTES 64
#define LAWSON_CPU_MR 8
#define LAWSON_CPU_TILE 128
#elif defined(__AVX2__)
#define LAWSON_CPU_BYTES 32
#define LAWSON_CPU_MR 6
#define LAWSON_CPU_TILE 96
#else
#define LAWSON_CPU_BYTES 16
#define LAWSON_CPU_MR 6
#define LAWSON_CPU_TILE 96
#endif

#if defined(__clang__)
#define LAWSON_UNROLL _Pragma("unroll")
#else
#define LAWSON_UNROLL _Pragma("GCC unroll 16")
#endif

#define LAWSON_CPU_TABLE_(name) kernels_##name
#define LAWSON_CPU_TABLE(name) LAWSON_CPU_TABLE_(name)
#define LAWSON_CPU_STRING_(name) #name
#define LAWSON_CPU_STRING(name) LAWSON_CPU_STRING_(name)

namespace lawson::cpu {
namespace {

using Count = std::int64_t;

constexpr int kMr = LAWSON_CPU_MR;
constexpr int kTile = LAWSON_CPU_TILE;

using VecF = float __attribute__((vector_size(LAWSON_CPU_BYTES)));
using VecD = double __attribute__((vector_size(LAWSON_CPU_BYTES)));
using VecU = std::uint32_t __attribute__((vector_size(LAWSON_CPU_BYTES)));
using VecI = std::int32_t __attribute__((vector_size(LAWSON_CPU_BYTES)));

template <typename T>
struct Simd;
template <>
struct Simd<float> {
  using Vec = VecF;
};
template <>
struct Simd<double> {
  using Vec = VecD;
};
template <>
struct Simd<std::uint32_t> {
  using Vec = VecU;
};

template <typename T>
constexpr int kLanes = LAWSON_CPU_BYTES / static_cast<int>(sizeof(T));
constexpr int kMaxLanes = 16;

template <typename T>
inline typename Simd<T>::Vec load(const T* x) {
  typename Simd<T>::Vec v;
  __builtin_memcpy(&v, x, sizeof v);
  return v;
}

template <typename T>
inline void store(T* y, const typename Simd<T>::Vec& v) {
  __builtin_memcpy(y, &v, sizeof v);
}

template <typename T>
inline typename Simd<T>::Vec splat(T value) {
  typename Simd<T>::Vec v;
  LAWSON_UNROLL
  for (int i = 0; i < kLanes<T>; ++i) v[i] = value;
  return v;
}

// ---- products ----------------------------------------------------------------------------------

// One microtile of kMr rows and two vectors of columns. kRow and kStep are the distances in A of
// the next row and the next k.
template <typename T, int kRow, int kStep>
inline void micro(T* c, Count ldc, const T* a, const T* b, Count k, bool accumulate) {
  using Vec = typename Simd<T>::Vec;
  constexpr int kWidth = kLanes<T>;
  Vec left[kMr];
  Vec right[kMr];
  LAWSON_UNROLL
  for (int i = 0; i < kMr; ++i) {
    left[i] = Vec{};
    right[i] = Vec{};
  }
  for (Count step = 0; step < k; ++step) {
    const Vec b_left = load(b);
    const Vec b_right = load(b + kWidth);
    LAWSON_UNROLL
    for (int i = 0; i < kMr; ++i) {
      const T factor = a[i * kRow];
      left[i] += factor * b_left;
      right[i] += factor * b_right;
    }
    a += kStep;
    b += 2 * kWidth;
  }
  LAWSON_UNROLL
  for (int i = 0; i < kMr; ++i) {
    T* row = c + i * ldc;
    if (accumulate) {
      left[i] += load(row);
      right[i] += load(row + kWidth);
    }
    store(row, left[i]);
    store(row + kWidth, right[i]);
  }
}

template <typename T, AForm kForm>
void product(const TileProduct<T>& p) {
  constexpr int kNr = 2 * kLanes<T>;
  constexpr int kRow = kForm == AForm::tile_rows ? kTile : 1;
  constexpr int kStep = kForm == AForm::packed ? kMr : kForm == AForm::tile_rows ? 1 : kTile;
  const Count a_panel = kForm == AForm::packed      ? p.a_panel
                        : kForm == AForm::tile_rows ? Count{kMr} * kTile
                                                    : Count{kMr};
  const T* b = p.b;
  for (Count j = 0; j < p.n; j += kNr, b += p.b_panel) {
    const T* a = p.a;
    for (Count i = 0; i < p.m; i += kMr, a += a_panel) {
      micro<T, kRow, kStep>(p.c + i * p.ldc + j, p.ldc, a, b, p.k, p.accumulate);
    }
  }
}

template <typename T>
constexpr ProductKernels<T> product_kernels() {
  return {
      2 * kLanes<T>,
      {product<T, AForm::packed>, product<T, AForm::tile_rows>, product<T, AForm::tile_columns>}};
}

// ---- f32 functions -----------------------------------------------------------------------------

inline VecU bits_of(VecF x) {
  return __builtin_bit_cast(VecU, x);
}
inline VecF float_of(VecU x) {
  return __builtin_bit_cast(VecF, x);
}

inline VecF select(VecI mask, VecF a, VecF b) {
  const VecU m = __builtin_bit_cast(VecU, mask);
  return float_of((bits_of(a) & m) | (bits_of(b) & ~m));
}

inline VecF magnitude(VecF x) {
  return float_of(bits_of(x) & splat<std::uint32_t>(0x7fffffffU));
}

inline VecF with_sign_of(VecF x, VecF sign) {
  return float_of(bits_of(x) | (bits_of(sign) & splat<std::uint32_t>(0x80000000U)));
}

// 2^n for the integers n whose power is a normal number.
inline VecF power_of_two(VecU n) {
  return float_of((n + 127U) << 23U);
}

// e^x over the whole range, subnormal results included, within 1.5 units in the last place:
// reduction by multiples of ln 2 in two parts and Cephes' polynomial of degree 7.
inline VecF exp_vector(VecF x) {
  x = select(x > 89.0F, splat(89.0F), x);
  // Products that underflow are slow, and what a mask hides is -infinity.
  const VecI is_zero = x < -104.0F;
  x = select(is_zero, splat(0.0F), x);
  constexpr float kMagic = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer
  const VecF shifted = x * 1.44269504088896341F + kMagic;
  const VecU n = bits_of(shifted) - bits_of(splat(kMagic));
  const VecF whole = shifted - kMagic;
  VecF r = x - whole * 0.693359375F;
  r = r + whole * 2.12194440e-4F;
  VecF p = splat(1.9875691500e-4F);
  p = p * r + 1.3981999507e-3F;
  p = p * r + 8.3334519073e-3F;
  p = p * r + 4.1665795894e-2F;
  p = p * r + 1.6666665459e-1F;
  p = p * r + 5.0000001201e-1F;
  p = p * (r * r) + r + 1.0F;
  // In two factors, since 2^n itself may not be a normal number.
  const VecU half = __builtin_bit_cast(VecU, __builtin_bit_cast(VecI, n) >> 1);
  return select(is_zero, splat(0.0F), p * power_of_two(half) * power_of_two(n - half));
}

// tanh within 2 units in the last place: Cephes' polynomial near 0, else 1 - 2 / (e^2x + 1).
inline VecF tanh_vector(VecF x) {
  const VecF size = magnitude(x);
  const VecF z = x * x;
  VecF p = splat(-5.70498872745e-3F);
  p = p * z + 2.06390887954e-2F;
  p = p * z - 5.37397155531e-2F;
  p = p * z + 1.33314422036e-1F;
  p = p * z - 3.33332819422e-1F;
  const VecF near = p * z * x + x;
  const VecF far = 1.0F - 2.0F / (exp_vector(size + size) + 1.0F);
  return select(size < 0.625F, near, with_sign_of(far, x));
}

inline VecF sigmoid_vector(VecF x) {
  const VecF e = exp_vector(-magnitude(x));
  const VecF denominator = 1.0F + e;
  return select(x < 0.0F, e / denominator, 1.0F / denominator);
}

// Phi(x) with the complementary error function by Press et al. (Numerical Recipes, erfcc), whose
// relative error of 1.2e-7 holds in the tail too.
inline VecF normal_vector(VecF x) {
  const VecF z = magnitude(x) * 0.70710678118654752440F;
  const VecF t = 1.0F / (1.0F + 0.5F * z);
  VecF p = splat(0.17087277F);
  p = p * t - 0.82215223F;
  p = p * t + 1.48851587F;
  p = p * t - 1.13520398F;
  p = p * t + 0.27886807F;
  p = p * t - 0.18628806F;
  p = p * t + 0.09678418F;
  p = p * t + 0.37409196F;
  p = p * t + 1.00002368F;
  p = p * t - 1.26551223F;
  const VecF tail = 0.5F * t * exp_vector(p - z * z);
  return select(x < 0.0F, tail, 1.0F - tail);
}

inline VecF gelu_vector(VecF x) {
  return select(x != x, x, x * normal_vector(x));
}

inline VecF gelu_tanh_vector(VecF x) {
  const VecF inner = 2 * 0.79788456080286535588F * (x + 0.044715F * x * x * x);
  return x * sigmoid_vector(inner);
}

// Derivatives. e^-|x| keeps their relative accuracy where 1 - f(x)^2 and the like would cancel.
inline VecF sigmoid_slope(VecF x) {
  const VecF e = exp_vector(-magnitude(x));
  const VecF denominator = 1.0F + e;
  return e / (denominator * denominator);
}

inline VecF tanh_slope(VecF x) {
  return 4.0F * sigmoid_slope(x + x);
}

// x within +-bound; NaN stays. The slopes below are constant beyond, in f32.
inline VecF bounded(VecF x, float bound) {
  x = select(x > bound, splat(bound), x);
  return select(x < -bound, splat(-bound), x);
}

inline VecF silu_slope(VecF x) {
  x = bounded(x, 128.0F);
  return sigmoid_vector(x) + x * sigmoid_slope(x);
}

inline VecF gelu_slope(VecF x) {
  x = bounded(x, 20.0F);
  return normal_vector(x) + x * 0.39894228040143267794F * exp_vector(-0.5F * x * x);
}

inline VecF gelu_tanh_slope(VecF x) {
  x = bounded(x, 20.0F);
  const VecF square = x * x;
  const VecF inner = 2 * 0.79788456080286535588F * (x + 0.044715F * square * x);
  const VecF inner_slope = 2 * 0.79788456080286535588F * (1.0F + 3 * 0.044715F * square);
  return sigmoid_vector(inner) + x * inner_slope * sigmoid_slope(inner);
}

template <typename F>
inline void map_vector(const float* x, float* y, Count n, F function) {
  constexpr int kWidth = kLanes<float>;
  Count i = 0;
  for (; i + kWidth <= n; i += kWidth) store(y + i, function(load(x + i)));
  if (i < n) {
    float rest[kMaxLanes] = {};
    for (Count j = i; j < n; ++j) rest[j - i] = x[j];
    store(rest, function(load(rest)));
    for (Count j = i; j < n; ++j) y[j] = rest[j - i];
  }
}

template <typename T, typename F>
inline void map(const T* x, T* y, Count n, F function) {
  for (Count i = 0; i < n; ++i) y[i] = function(x[i]);
}

// y = dy slope(x)
template <typename F>
inline void chain_vector(const float* dy, const float* x, float* y, Count n, F slope) {
  constexpr int kWidth = kLanes<float>;
  Count i = 0;
  for (; i + kWidth <= n; i += kWidth) store(y + i, load(dy + i) * slope(load(x + i)));
  if (i < n) {
    float rest[kMaxLanes] = {};
    for (Count j = i; j < n; ++j) rest[j - i] = x[j];
    store(rest, slope(load(rest)));
    for (Count j = i; j < n; ++j) y[j] = dy[j] * rest[j - i];
  }
}

template <typename T, typename F>
inline void chain(const T* dy, const T* x, T* y, Count n, F slope) {
  for (Count i = 0; i < n; ++i) y[i] = dy[i] * slope(x[i]);
}

// The functions of one element, evaluated in double by the C library.
inline double slow_unary(ir::UnaryKind kind, double parameter, double x) {
  using ir::UnaryKind;
  switch (kind) {
    case UnaryKind::exp:
      return __builtin_exp(x);
    case UnaryKind::log:
      return __builtin_log(x);
    case UnaryKind::log1p:
      return __builtin_log1p(x);
    case UnaryKind::expm1:
      return __builtin_expm1(x);
    case UnaryKind::rsqrt:
      return 1.0 / __builtin_sqrt(x);
    case UnaryKind::sin:
      return __builtin_sin(x);
    case UnaryKind::cos:
      return __builtin_cos(x);
    case UnaryKind::tan:
      return __builtin_tan(x);
    case UnaryKind::tanh:
      return __builtin_tanh(x);
    case UnaryKind::erf:
      return __builtin_erf(x);
    case UnaryKind::elu:
      return x < 0 ? parameter * __builtin_expm1(x) : x;
    case UnaryKind::softplus:
      return (x > 0 ? x : 0.0) + __builtin_log1p(__builtin_exp(-__builtin_fabs(x)));
    case UnaryKind::sigmoid:
      return x < 0 ? __builtin_exp(x) / (1.0 + __builtin_exp(x)) : 1.0 / (1.0 + __builtin_exp(-x));
    case UnaryKind::silu:
      return x * slow_unary(UnaryKind::sigmoid, 0, x);
    case UnaryKind::gelu:
      return 0.5 * x * __builtin_erfc(x * -0.70710678118654752440);
    case UnaryKind::gelu_tanh:
      return x * slow_unary(UnaryKind::sigmoid, 0,
                            2 * 0.79788456080286535588 * (x + 0.044715 * x * x * x));
    default:
      return x;
  }
}

// f'(x), in double by the C library.
inline double slow_slope(ir::UnaryKind kind, double parameter, double x) {
  using ir::UnaryKind;
  constexpr double kRoot = 0.79788456080286535588;  // sqrt(2 / pi)
  const auto sigmoid_slope_at = [](double v) {
    const double e = __builtin_exp(-__builtin_fabs(v));
    return e / ((1.0 + e) * (1.0 + e));
  };
  // Beyond, the slopes of silu and the gelus are constant, and their terms overflow.
  const double near = x > 1000 ? 1000.0 : x < -1000 ? -1000.0 : x;
  switch (kind) {
    case UnaryKind::tanh:
      return 4.0 * sigmoid_slope_at(x + x);
    case UnaryKind::sigmoid:
      return sigmoid_slope_at(x);
    case UnaryKind::elu:
      return x > 0 ? 1.0 : parameter * __builtin_exp(x);
    case UnaryKind::softplus:
      return slow_unary(UnaryKind::sigmoid, 0, x);
    case UnaryKind::silu:
      return slow_unary(UnaryKind::sigmoid, 0, near) + near * sigmoid_slope_at(near);
    case UnaryKind::gelu:
      return 0.5 * __builtin_erfc(x * -0.70710678118654752440) +
             near * 0.5 * kRoot * __builtin_exp(-0.5 * near * near);
    case UnaryKind::gelu_tanh: {
      const double inner = 2 * kRoot * (near + 0.044715 * near * near * near);
      const double inner_slope = 2 * kRoot * (1.0 + 3 * 0.044715 * near * near);
      return slow_unary(UnaryKind::sigmoid, 0, inner) +
             near * inner_slope * sigmoid_slope_at(inner);
    }
    default:
      return 0;
  }
}

// The functions that are exact or one rounding in any type; false when `kind` is not one of them.
template <typename T>
inline bool plain_unary(ir::UnaryKind kind, T parameter, const T* x, T* y, Count n) {
  using ir::UnaryKind;
  constexpr T zero = 0;
  constexpr T one = 1;
  constexpr T six = 6;
  switch (kind) {
    case UnaryKind::neg:
      map(x, y, n, [](T v) { return -v; });
      return true;
    case UnaryKind::abs:
      map(x, y, n, [](T v) { return v < zero ? -v : v + zero; });
      return true;
    case UnaryKind::sqrt:
      if constexpr (sizeof(T) == 8) {
        map(x, y, n, [](T v) { return __builtin_sqrt(v); });
      } else {
        map(x, y, n, [](T v) { return __builtin_sqrtf(v); });
      }
      return true;
    case UnaryKind::reciprocal:
      map(x, y, n, [](T v) { return one / v; });
      return true;
    case UnaryKind::ceil:
      map(x, y, n, [](T v) { return static_cast<T>(__builtin_ceil(static_cast<double>(v))); });
      return true;
    case UnaryKind::floor:
      map(x, y, n, [](T v) { return static_cast<T>(__builtin_floor(static_cast<double>(v))); });
      return true;
    case UnaryKind::round:  // half to even
      map(x, y, n, [](T v) { return static_cast<T>(__builtin_rint(static_cast<double>(v))); });
      return true;
    case UnaryKind::sign:
      map(x, y, n, [](T v) { return v > zero ? one : v < zero ? -one : v == zero ? zero : v; });
      return true;
    case UnaryKind::relu:
      map(x, y, n, [](T v) { return v < zero ? zero : v; });
      return true;
    case UnaryKind::leaky_relu:
      map(x, y, n, [parameter](T v) { return v < zero ? parameter * v : v; });
      return true;
    case UnaryKind::relu6:
      map(x, y, n, [](T v) { return v < zero ? zero : v > six ? six : v; });
      return true;
    default:
      return false;
  }
}

void unary_f32(ir::UnaryKind kind, float parameter, const float* x, float* y, Count n) {
  using ir::UnaryKind;
  if (plain_unary(kind, parameter, x, y, n)) return;
  switch (kind) {
    case UnaryKind::exp:
      map_vector(x, y, n, [](VecF v) { return exp_vector(v); });
      return;
    case UnaryKind::tanh:
      map_vector(x, y, n, [](VecF v) { return tanh_vector(v); });
      return;
    case UnaryKind::sigmoid:
      map_vector(x, y, n, [](VecF v) { return sigmoid_vector(v); });
      return;
    case UnaryKind::silu:
      map_vector(x, y, n, [](VecF v) { return v * sigmoid_vector(v); });
      return;
    case UnaryKind::gelu:
      map_vector(x, y, n, [](VecF v) { return gelu_vector(v); });
      return;
    case UnaryKind::gelu_tanh:
      map_vector(x, y, n, [](VecF v) { return gelu_tanh_vector(v); });
      return;
    default:
      map(x, y, n, [kind, parameter](float v) {
        return static_cast<float>(
            slow_unary(kind, static_cast<double>(parameter), static_cast<double>(v)));
      });
  }
}

void unary_f64(ir::UnaryKind kind, double parameter, const double* x, double* y, Count n) {
  if (plain_unary(kind, parameter, x, y, n)) return;
  map(x, y, n, [kind, parameter](double v) { return slow_unary(kind, parameter, v); });
}

// The slopes that are one of two numbers; false when `kind` is not one of them.
template <typename T>
inline bool plain_unary_grad(ir::UnaryKind kind, T parameter, const T* dy, const T* x, T* y,
                             Count n) {
  using ir::UnaryKind;
  constexpr T zero = 0;
  constexpr T one = 1;
  constexpr T six = 6;
  switch (kind) {
    case UnaryKind::relu:
      chain(dy, x, y, n, [](T v) { return v > zero ? one : zero; });
      return true;
    case UnaryKind::leaky_relu:
      chain(dy, x, y, n, [parameter](T v) { return v > zero ? one : parameter; });
      return true;
    case UnaryKind::relu6:
      chain(dy, x, y, n, [](T v) { return v > zero && v < six ? one : zero; });
      return true;
    default:
      return false;
  }
}

void unary_grad_f32(ir::UnaryKind kind, float parameter, const float* dy, const float* x, float* y,
                    Count n) {
  using ir::UnaryKind;
  if (plain_unary_grad(kind, parameter, dy, x, y, n)) return;
  switch (kind) {
    case UnaryKind::tanh:
      chain_vector(dy, x, y, n, [](VecF v) { return tanh_slope(v); });
      return;
    case UnaryKind::sigmoid:
      chain_vector(dy, x, y, n, [](VecF v) { return sigmoid_slope(v); });
      return;
    case UnaryKind::elu:
      chain_vector(dy, x, y, n, [parameter](VecF v) {
        return select(v > 0.0F, splat(1.0F), parameter * exp_vector(v));
      });
      return;
    case UnaryKind::softplus:
      chain_vector(dy, x, y, n, [](VecF v) { return sigmoid_vector(v); });
      return;
    case UnaryKind::silu:
      chain_vector(dy, x, y, n, [](VecF v) { return silu_slope(v); });
      return;
    case UnaryKind::gelu:
      chain_vector(dy, x, y, n, [](VecF v) { return gelu_slope(v); });
      return;
    case UnaryKind::gelu_tanh:
      chain_vector(dy, x, y, n, [](VecF v) { return gelu_tanh_slope(v); });
      return;
    default:
      return;
  }
}

void unary_grad_f64(ir::UnaryKind kind, double parameter, const double* dy, const double* x,
                    double* y, Count n) {
  if (plain_unary_grad(kind, parameter, dy, x, y, n)) return;
  chain(dy, x, y, n, [kind, parameter](double v) { return slow_slope(kind, parameter, v); });
}

template <typename T, typename F>
inline void zip(const T* a, const T* b, T* y, Count n, F function) {
  for (Count i = 0; i < n; ++i) y[i] = function(a[i], b[i]);
}

template <typename T>
void binary(ir::BinaryKind kind, const T* a, const T* b, T* y, Count n) {
  using ir::BinaryKind;
  switch (kind) {
    case BinaryKind::add:
      zip(a, b, y, n, [](T u, T v) { return u + v; });
      return;
    case BinaryKind::sub:
      zip(a, b, y, n, [](T u, T v) { return u - v; });
      return;
    case BinaryKind::mul:
      zip(a, b, y, n, [](T u, T v) { return u * v; });
      return;
    case BinaryKind::div:
      zip(a, b, y, n, [](T u, T v) { return u / v; });
      return;
    case BinaryKind::min:  // NaN wins, from either side
      zip(a, b, y, n, [](T u, T v) { return u != u || v != v ? u + v : u < v ? u : v; });
      return;
    case BinaryKind::max:
      zip(a, b, y, n, [](T u, T v) { return u != u || v != v ? u + v : u > v ? u : v; });
      return;
    case BinaryKind::pow:
      zip(a, b, y, n, [](T u, T v) {
        return static_cast<T>(__builtin_pow(static_cast<double>(u), static_cast<double>(v)));
      });
      return;
    case BinaryKind::mod:
      zip(a, b, y, n, [](T u, T v) {
        return static_cast<T>(__builtin_fmod(static_cast<double>(u), static_cast<double>(v)));
      });
      return;
  }
}

template <typename T>
void compare(ir::CompareKind kind, const T* a, const T* b, T* y, Count n) {
  using ir::CompareKind;
  constexpr T yes = 1;
  constexpr T no = 0;
  switch (kind) {
    case CompareKind::eq:
      zip(a, b, y, n, [](T u, T v) { return u == v ? yes : no; });
      return;
    case CompareKind::ne:
      zip(a, b, y, n, [](T u, T v) { return u != v ? yes : no; });
      return;
    case CompareKind::lt:
      zip(a, b, y, n, [](T u, T v) { return u < v ? yes : no; });
      return;
    case CompareKind::le:
      zip(a, b, y, n, [](T u, T v) { return u <= v ? yes : no; });
      return;
    case CompareKind::gt:
      zip(a, b, y, n, [](T u, T v) { return u > v ? yes : no; });
      return;
    case CompareKind::ge:
      zip(a, b, y, n, [](T u, T v) { return u >= v ? yes : no; });
      return;
  }
}

template <typename T>
void select_elements(const T* predicate, const T* a, const T* b, T* y, Count n) {
  for (Count i = 0; i < n; ++i) y[i] = predicate[i] != T{0} ? a[i] : b[i];
}

template <typename T>
void clamp(T low, T high, const T* x, T* y, Count n) {
  map(x, y, n, [low, high](T v) { return v < low ? low : v > high ? high : v; });
}

// ---- rows of softmax ---------------------------------------------------------------------------

// Partial results per lane, folded in a fixed order.
template <typename T>
T row_max(const T* x, Count n, T start) {
  using Vec = typename Simd<T>::Vec;
  constexpr int kWidth = kLanes<T>;
  Vec lanes = splat(start);
  Count i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    const Vec v = load(x + i);
    lanes = v > lanes ? v : lanes;
  }
  T best = start;
  for (int lane = 0; lane < kWidth; ++lane) best = lanes[lane] > best ? lanes[lane] : best;
  for (; i < n; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

template <typename T>
inline T fold(const typename Simd<T>::Vec& lanes) {
  T sum = 0;
  for (int lane = 0; lane < kLanes<T>; ++lane) sum += lanes[lane];
  return sum;
}

float exp_sum_f32(float* x, Count n, float shift) {
  constexpr int kWidth = kLanes<float>;
  VecF lanes = {};
  Count i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    const VecF e = exp_vector(load(x + i) - shift);
    lanes += e;
    store(x + i, e);
  }
  float sum = fold<float>(lanes);
  if (i < n) {
    float rest[kMaxLanes] = {};
    for (Count j = i; j < n; ++j) rest[j - i] = x[j];
    store(rest, exp_vector(load(rest) - shift));
    for (Count j = i; j < n; ++j) {
      x[j] = rest[j - i];
      sum += x[j];
    }
  }
  return sum;
}

double exp_sum_f64(double* x, Count n, double shift) {
  double sum = 0;
  for (Count i = 0; i < n; ++i) {
    x[i] = __builtin_exp(x[i] - shift);
    sum += x[i];
  }
  return sum;
}

void softcap_f32(float* x, Count n, float cap) {
  map_vector(x, x, n, [cap](VecF v) { return cap * tanh_vector(v / cap); });
}

void softcap_f64(double* x, Count n, double cap) {
  map(x, x, n, [cap](double v) { return cap * __builtin_tanh(v / cap); });
}

template <typename T>
void scale(T* x, Count n, T factor) {
  for (Count i = 0; i < n; ++i) x[i] *= factor;
}

template <typename T>
void add(T* y, const T* x, Count n) {
  for (Count i = 0; i < n; ++i) y[i] += x[i];
}

template <typename T>
void add_scaled(T* y, const T* x, Count n, T factor) {
  for (Count i = 0; i < n; ++i) y[i] += factor * x[i];
}

template <typename T>
void add_scaled_rows(T* __restrict y, const T* const* x, const T* factors, Count n) {
  const T* __restrict x0 = x[0];
  const T* __restrict x1 = x[1];
  const T* __restrict x2 = x[2];
  const T* __restrict x3 = x[3];
  const T f0 = factors[0];
  const T f1 = factors[1];
  const T f2 = factors[2];
  const T f3 = factors[3];
  for (Count i = 0; i < n; ++i) y[i] += f0 * x0[i] + f1 * x1[i] + f2 * x2[i] + f3 * x3[i];
}

template <typename T>
void add_ramp(T* x, Count n, T first, T step) {
  for (Count i = 0; i < n; ++i) x[i] += first + static_cast<T>(static_cast<std::int32_t>(i)) * step;
}

template <typename T>
void gradient(const T* p, T* dp, Count n, T delta) {
  for (Count i = 0; i < n; ++i) dp[i] = p[i] * (dp[i] - delta);
}

template <typename T>
void hide(T* x, const std::uint8_t* kept, Count n, T value) {
  for (Count i = 0; i < n; ++i) x[i] = kept[i] != 0 ? x[i] : value;
}

template <typename T>
void drop(T* x, const std::uint8_t* kept, Count n, T factor) {
  constexpr T zero = 0;
  for (Count i = 0; i < n; ++i) x[i] *= kept[i] != 0 ? factor : zero;
}

template <typename T>
T dot(const T* a, const T* b, Count n) {
  constexpr int kWidth = kLanes<T>;
  typename Simd<T>::Vec lanes = {};
  Count i = 0;
  for (; i + kWidth <= n; i += kWidth) lanes += load(a + i) * load(b + i);
  T sum = fold<T>(lanes);
  for (; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

// x - x is 0 for finite x and NaN otherwise.
template <typename T>
bool finite(const T* x, Count n) {
  constexpr int kWidth = kLanes<T>;
  typename Simd<T>::Vec lanes = {};
  Count i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    const typename Simd<T>::Vec v = load(x + i);
    lanes += v - v;
  }
  T sum = fold<T>(lanes);
  for (; i < n; ++i) sum += x[i] - x[i];
  return sum == T{0};
}

// ---- rows of norms -----------------------------------------------------------------------------

// As many elements as a vector of doubles holds.
template <typename T>
inline VecD load_wide(const T* x) {
  if constexpr (sizeof(T) == sizeof(double)) {
    return load(x);
  } else {
    using Half = float __attribute__((vector_size(LAWSON_CPU_BYTES / 2)));
    Half v;
    __builtin_memcpy(&v, x, sizeof v);
    return __builtin_convertvector(v, VecD);
  }
}

template <typename T>
double norm_sum(const T* x, Count n) {
  constexpr int kWidth = kLanes<double>;
  VecD lanes = {};
  VecD others = {};
  Count i = 0;
  for (; i + 2 * kWidth <= n; i += 2 * kWidth) {
    lanes += load_wide(x + i);
    others += load_wide(x + i + kWidth);
  }
  double sum = fold<double>(lanes + others);
  for (; i < n; ++i) sum += static_cast<double>(x[i]);
  return sum;
}

template <typename T>
double norm_squares(const T* x, Count n, double shift) {
  constexpr int kWidth = kLanes<double>;
  VecD lanes = {};
  VecD others = {};
  Count i = 0;
  for (; i + 2 * kWidth <= n; i += 2 * kWidth) {
    const VecD u = load_wide(x + i) - shift;
    const VecD v = load_wide(x + i + kWidth) - shift;
    lanes += u * u;
    others += v * v;
  }
  double sum = fold<double>(lanes + others);
  for (; i < n; ++i) {
    const double u = static_cast<double>(x[i]) - shift;
    sum += u * u;
  }
  return sum;
}

template <typename T>
void norm_apply(const T* x, const T* scale, const T* bias, T* y, Count n, NormStatistics at) {
  for (Count i = 0; i < n; ++i) {
    const double unit = (static_cast<double>(x[i]) - at.mean) * at.inv_std;
    y[i] = static_cast<T>(unit * static_cast<double>(scale[i]) + static_cast<double>(bias[i]));
  }
}

template <typename T>
NormSums norm_sums(const T* dy, const T* x, const T* scale, Count n, NormStatistics at) {
  constexpr int kWidth = kLanes<double>;
  VecD gradients = {};
  VecD products = {};
  Count i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    const VecD gradient = load_wide(dy + i) * load_wide(scale + i);
    gradients += gradient;
    products += gradient * ((load_wide(x + i) - at.mean) * at.inv_std);
  }
  NormSums sums{fold<double>(gradients), fold<double>(products)};
  for (; i < n; ++i) {
    const double gradient = static_cast<double>(dy[i]) * static_cast<double>(scale[i]);
    sums.gradient += gradient;
    sums.product += gradient * ((static_cast<double>(x[i]) - at.mean) * at.inv_std);
  }
  return sums;
}

template <typename T>
void norm_gradient(const T* dy, const T* x, const T* scale, T* dx, Count n, NormStatistics at,
                   NormSums mean) {
  for (Count i = 0; i < n; ++i) {
    const double unit = (static_cast<double>(x[i]) - at.mean) * at.inv_std;
    const double gradient = static_cast<double>(dy[i]) * static_cast<double>(scale[i]);
    dx[i] = static_cast<T>(at.inv_std * (gradient - mean.gradient - unit * mean.product));
  }
}

template <typename T>
void norm_parameters(const T* dy, const T* x, Count n, NormStatistics at, double* dscale,
                     double* dbias) {
  for (Count i = 0; i < n; ++i) {
    const auto gradient = static_cast<double>(dy[i]);
    dscale[i] += gradient * ((static_cast<double>(x[i]) - at.mean) * at.inv_std);
    dbias[i] += gradient;
  }
}

template <typename T>
constexpr MathKernels<T> common_math() {
  MathKernels<T> math{};
  math.binary = binary<T>;
  math.compare = compare<T>;
  math.select = select_elements<T>;
  math.clamp = clamp<T>;
  math.max = row_max<T>;
  math.scale = scale<T>;
  math.add = add<T>;
  math.add_scaled = add_scaled<T>;
  math.add_scaled_rows = add_scaled_rows<T>;
  math.add_ramp = add_ramp<T>;
  math.gradient = gradient<T>;
  math.hide = hide<T>;
  math.drop = drop<T>;
  math.dot = dot<T>;
  math.finite = finite<T>;
  math.norm_sum = norm_sum<T>;
  math.norm_squares = norm_squares<T>;
  math.norm_apply = norm_apply<T>;
  math.norm_sums = norm_sums<T>;
  math.norm_gradient = norm_gradient<T>;
  math.norm_parameters = norm_parameters<T>;
  return math;
}

constexpr MathKernels<float> math_f32() {
  MathKernels<float> math = common_math<float>();
  math.unary = unary_f32;
  math.unary_grad = unary_grad_f32;
  math.exp_sum = exp_sum_f32;
  math.softcap = softcap_f32;
  return math;
}

constexpr MathKernels<double> math_f64() {
  MathKernels<double> math = common_math<double>();
  math.unary = unary_f64;
  math.unary_grad = unary_grad_f64;
  math.exp_sum = exp_sum_f64;
  math.softcap = softcap_f64;
  return math;
}

// ---- 16-bit formats ----------------------------------------------------------------------------

void bf16_to_f32(const std::uint16_t* x, float* y, Count n) {
  for (Count i = 0; i < n; ++i) {
    y[i] = __builtin_bit_cast(float, static_cast<std::uint32_t>(x[i]) << 16U);
  }
}

void f32_to_bf16(const float* x, std::uint16_t* y, Count n) {
  for (Count i = 0; i < n; ++i) {
    const auto bits = __builtin_bit_cast(std::uint32_t, x[i]);
    const std::uint32_t rounded = (bits + 0x7fffU + ((bits >> 16U) & 1U)) >> 16U;
    const std::uint32_t nan = (bits >> 16U) | 0x40U;
    y[i] = static_cast<std::uint16_t>((bits & 0x7fffffffU) > 0x7f800000U ? nan : rounded);
  }
}

void f16_to_f32(const std::uint16_t* x, float* y, Count n) {
  for (Count i = 0; i < n; ++i) {
    const std::uint32_t half = x[i];
    const std::uint32_t size = half & 0x7fffU;
    // The exponent is off by 112; the product also normalises subnormals.
    const float value = __builtin_bit_cast(float, size << 13U) * 0x1p112F;
    const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, value);
    const std::uint32_t special = (size << 13U) | 0x7f800000U;
    y[i] =
        __builtin_bit_cast(float, (size >= 0x7c00U ? special : bits) | ((half & 0x8000U) << 16U));
  }
}

void f32_to_f16(const float* x, std::uint16_t* y, Count n) {
  for (Count i = 0; i < n; ++i) {
    const auto bits = __builtin_bit_cast(std::uint32_t, x[i]);
    const std::uint32_t sign = bits & 0x80000000U;
    const std::uint32_t size = bits & 0x7fffffffU;
    // Adding a power of two whose last place is f16's rounds to nearest even; it is 2^13 times the
    // value's own power of two, and for subnormal results that of the smallest normal number.
    const float scaled = __builtin_bit_cast(float, size) * 0x1p112F * 0x1p-110F;
    const std::uint32_t exponent = (size << 1U) & 0xff000000U;
    const std::uint32_t least = exponent < 0x71000000U ? 0x71000000U : exponent;
    const float rounded = __builtin_bit_cast(float, (least >> 1U) + 0x07800000U) + scaled;
    const auto result = __builtin_bit_cast(std::uint32_t, rounded);
    const std::uint32_t half = ((result >> 13U) & 0x7c00U) + (result & 0x0fffU);
    y[i] = static_cast<std::uint16_t>((sign >> 16U) | (size > 0x7f800000U ? 0x7e00U : half));
  }
}

// ---- dropout -----------------------------------------------------------------------------------

constexpr int kBlocks = 16;

// Philox4x32-10 of kBlocks counters side by side.
void philox(std::uint64_t seed, std::uint64_t offset, std::uint64_t block,
            std::uint32_t (&words)[4][kBlocks]) {
  for (int i = 0; i < kBlocks; ++i) {
    const std::uint64_t index = block + static_cast<std::uint64_t>(i);
    words[0][i] = static_cast<std::uint32_t>(index);
    words[1][i] = static_cast<std::uint32_t>(index >> 32U);
    words[2][i] = static_cast<std::uint32_t>(offset);
    words[3][i] = static_cast<std::uint32_t>(offset >> 32U);
  }
  auto low_key = static_cast<std::uint32_t>(seed);
  auto high_key = static_cast<std::uint32_t>(seed >> 32U);
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < kBlocks; ++i) {
      const std::uint64_t a = std::uint64_t{0xD2511F53U} * words[0][i];
      const std::uint64_t b = std::uint64_t{0xCD9E8D57U} * words[2][i];
      words[0][i] = static_cast<std::uint32_t>(b >> 32U) ^ words[1][i] ^ low_key;
      words[2][i] = static_cast<std::uint32_t>(a >> 32U) ^ words[3][i] ^ high_key;
      words[1][i] = static_cast<std::uint32_t>(b);
      words[3][i] = static_cast<std::uint32_t>(a);
    }
    low_key += 0x9E3779B9U;
    high_key += 0xBB67AE85U;
  }
}

void keep(std::uint64_t seed, std::uint64_t offset, std::uint32_t threshold, std::uint64_t first,
          std::uint8_t* kept, Count n) {
  Count skipped = static_cast<Count>(first % 4);
  for (std::uint64_t block = first / 4; n > 0; block += kBlocks, skipped = 0) {
    std::uint32_t words[4][kBlocks];
    philox(seed, offset, block, words);
    std::uint8_t bytes[4 * kBlocks];
    for (int i = 0; i < kBlocks; ++i) {
      for (int word = 0; word < 4; ++word)
        bytes[4 * i + word] = words[word][i] >= threshold ? 1 : 0;
    }
    const Count here = 4 * kBlocks - skipped < n ? 4 * kBlocks - skipped : n;
    __builtin_memcpy(kept, bytes + skipped, static_cast<unsigned long>(here));
    kept += here;
    n -= here;
  }
}

}  // namespace

extern const Kernels LAWSON_CPU_TABLE(LAWSON_CPU_NAME);
constinit const Kernels LAWSON_CPU_TABLE(LAWSON_CPU_NAME) = {
    Isa::LAWSON_CPU_NAME,
    LAWSON_CPU_STRING(LAWSON_CPU_NAME),
    kMr,
    kTile,
    product_kernels<float>(),
    product_kernels<double>(),
    product_kernels<std::uint32_t>(),
    math_f32(),
    math_f64(),
    f16_to_f32,
    f32_to_f16,
    bf16_to_f32,
    f32_to_bf16,
    keep,
};

}  // namespace lawson::cpu
