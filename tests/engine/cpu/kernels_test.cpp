// Every instruction set that this CPU has, against plain loops and the C library in double.
#include <gtest/gtest.h>

#include <bit>
#include <cstdlib>
#include <numbers>

#include "base/philox.h"
#include "engine/cpu/convert.h"
#include "helpers.h"

namespace lawson::cpu {
namespace {

using ir::UnaryKind;

// Floats spread over all bit patterns, specials included.
std::vector<float> sweep(std::uint32_t step) {
  std::vector<float> values{0.0F,    -0.0F,    INFINITY, -INFINITY, NAN,       88.7228F, 88.7229F,
                            -87.33F, -103.97F, -103.98F, 1e-45F,    0.624999F, 0.625F};
  for (std::uint64_t bits = 0; bits < (std::uint64_t{1} << 32); bits += step) {
    values.push_back(std::bit_cast<float>(static_cast<std::uint32_t>(bits)));
  }
  // Most patterns are tiny or huge: as many in the range where functions bend.
  for (int i = -1'000'000; i < 1'000'000; i += 7) values.push_back(static_cast<float>(i) * 1.1e-4F);
  return values;
}

struct Function {
  UnaryKind kind;
  double (*exact)(double);
  // The error allowed, as a multiple of kFunctionRoundoffF32 times this magnitude.
  double (*magnitude)(double x, double y);
};

double of_result(double, double y) {
  return std::fabs(y);
}
double of_operand(double x, double) {
  return std::fabs(x);
}
double logistic(double x) {
  return x < 0 ? std::exp(x) / (1 + std::exp(x)) : 1 / (1 + std::exp(-x));
}

const Function kFunctions[] = {
    {UnaryKind::exp, [](double x) { return std::exp(x); }, of_result},
    {UnaryKind::tanh, [](double x) { return std::tanh(x); }, of_result},
    {UnaryKind::sigmoid, logistic, of_result},
    {UnaryKind::silu, [](double x) { return x * logistic(x); }, of_operand},
    {UnaryKind::gelu, [](double x) { return 0.5 * x * std::erfc(-x / std::numbers::sqrt2); },
     of_operand},
    {UnaryKind::gelu_tanh,
     [](double x) {
       return x * logistic(2 * std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x));
     },
     of_operand},
    {UnaryKind::log, [](double x) { return std::log(x); }, of_result},
    {UnaryKind::erf, [](double x) { return std::erf(x); }, of_result},
    {UnaryKind::expm1, [](double x) { return std::expm1(x); }, of_result},
    {UnaryKind::softplus,
     [](double x) { return std::fmax(x, 0) + std::log1p(std::exp(-std::fabs(x))); }, of_result},
};

TEST(Kernels, FunctionsMeetTheirErrorOverTheWholeRange) {
  const std::vector<float> x = sweep(40'009);
  std::vector<float> y(x.size());
  for (const Kernels* kernels : available_kernels()) {
    for (const Function& function : kFunctions) {
      kernels->math_f32.unary(function.kind, 1, x.data(), y.data(),
                              static_cast<std::int64_t>(x.size()));
      double worst = 0;
      float worst_x = 0;
      int wrong_kind = 0;
      for (std::size_t i = 0; i < x.size(); ++i) {
        const double exact = function.exact(x[i]);
        const auto rounded = static_cast<float>(exact);
        if (std::isnan(exact)) {
          // x sigmoid(x) at -infinity is 0 times infinity in the exact formula too.
          wrong_kind += std::isnan(y[i]) || std::isinf(x[i]) ? 0 : 1;
          continue;
        }
        if (std::isinf(rounded) || std::isinf(y[i])) {
          // An overflow within the error of the largest float is none of our business.
          const bool near = std::fabs(exact) > 0x1.fffffp127;
          wrong_kind += y[i] == rounded || near ? 0 : 1;
          continue;
        }
        const double allowed = kFunctionRoundoffF32 * function.magnitude(x[i], exact) + 0x1p-149;
        const double ratio = std::fabs(y[i] - exact) / allowed;
        if (!(ratio <= worst)) {
          worst = ratio;
          worst_x = x[i];
        }
      }
      EXPECT_LE(worst, 1.0) << kernels->name << ' ' << to_string(function.kind) << " at "
                            << worst_x;
      EXPECT_EQ(wrong_kind, 0) << kernels->name << ' ' << to_string(function.kind);
    }
  }
}

// f'(x) in double.
double slope_of(UnaryKind kind, double parameter, double x) {
  const double density = std::exp(-0.5 * x * x) / std::sqrt(2 * std::numbers::pi);
  const double root = std::sqrt(2 / std::numbers::pi);
  switch (kind) {
    case UnaryKind::tanh:
      return std::pow(std::cosh(x), -2);
    case UnaryKind::sigmoid:
      return logistic(x) * logistic(-x);
    case UnaryKind::relu:
      return x > 0 ? 1 : 0;
    case UnaryKind::leaky_relu:
      return x > 0 ? 1 : parameter;
    case UnaryKind::relu6:
      return x > 0 && x < 6 ? 1 : 0;
    case UnaryKind::elu:
      return x > 0 ? 1 : parameter * std::exp(x);
    case UnaryKind::softplus:
      return logistic(x);
    case UnaryKind::silu:
      return logistic(x) + x * logistic(x) * logistic(-x);
    case UnaryKind::gelu:
      return 0.5 * std::erfc(-x / std::numbers::sqrt2) + (density == 0 ? 0 : x * density);
    case UnaryKind::gelu_tanh: {
      const double u = 2 * root * (x + 0.044715 * x * x * x);
      const double bend = logistic(u) * logistic(-u);
      return logistic(u) + (bend == 0 ? 0 : x * bend * 2 * root * (1 + 0.134145 * x * x));
    }
    default:
      return NAN;
  }
}

TEST(Kernels, SlopesMeetTheirErrorOverTheWholeRange) {
  const std::vector<float> x = sweep(40'009);
  std::vector<float> y(x.size());
  std::vector<float> dy(x.size());
  std::vector<double> wide_x(x.begin(), x.end());
  std::vector<double> wide_dy(x.size());
  std::vector<double> wide_y(x.size());
  std::mt19937 random{8};
  std::normal_distribution<float> normal;
  for (float& v : dy) v = normal(random);
  std::copy(dy.begin(), dy.end(), wide_dy.begin());
  const auto n = static_cast<std::int64_t>(x.size());
  for (int k = 0; k < ir::kUnaryCount; ++k) {
    const auto kind = static_cast<UnaryKind>(k);
    if (!ir::has_gradient_op(kind)) continue;
    const bool has_parameter = kind == UnaryKind::elu || kind == UnaryKind::leaky_relu;
    const double parameter = has_parameter ? 0.75 : 0;
    for (const Kernels* kernels : available_kernels()) {
      kernels->math_f32.unary_grad(kind, static_cast<float>(parameter), dy.data(), x.data(),
                                   y.data(), n);
      kernels->math_f64.unary_grad(kind, parameter, wide_dy.data(), wide_x.data(), wide_y.data(),
                                   n);
      int wrong = 0;
      for (std::size_t i = 0; i < x.size(); ++i) {
        if (!std::isfinite(x[i])) continue;
        const double slope = slope_of(kind, parameter, wide_x[i]);
        const double size = std::fabs(wide_dy[i]);
        const bool near = std::fabs(y[i] - wide_dy[i] * slope) <=
                          kFunctionRoundoffF32 * size * (1 + std::fabs(slope));
        const bool wide_near = std::fabs(wide_y[i] - wide_dy[i] * slope) <=
                               8 * kFunctionRoundoffF64 * size * (1 + std::fabs(slope));
        if (near && wide_near) continue;
        if (++wrong > 3) continue;
        ADD_FAILURE() << kernels->name << ' ' << to_string(kind) << " at " << x[i] << ": "
                      << wide_dy[i] << " * " << slope << ", got " << y[i] << " and " << wide_y[i];
      }
    }
  }
}

// Where 1 - tanh(x)^2 would have cancelled.
TEST(Kernels, SmallSlopesKeepTheirRelativeAccuracy) {
  std::vector<float> x;
  for (int i = 0; i < 2000; ++i) x.push_back(static_cast<float>(i - 1000) * 0.04F);
  const std::vector<float> dy(x.size(), 1.0F);
  std::vector<float> y(x.size());
  for (const Kernels* kernels : available_kernels()) {
    for (const UnaryKind kind : {UnaryKind::tanh, UnaryKind::sigmoid}) {
      kernels->math_f32.unary_grad(kind, 0, dy.data(), x.data(), y.data(),
                                   static_cast<std::int64_t>(x.size()));
      for (std::size_t i = 0; i < x.size(); ++i) {
        const double slope = slope_of(kind, 0, x[i]);
        ASSERT_NEAR(y[i], slope, 2 * kFunctionRoundoffF32 * slope + 0x1p-149)
            << kernels->name << ' ' << to_string(kind) << " at " << x[i];
      }
    }
  }
}

// What a graph's UnaryGrad does to infinities where f' has a limit.
TEST(Kernels, SlopesOfInfinitiesAreTheirLimits) {
  const std::vector<float> x{INFINITY, -INFINITY};
  const std::vector<float> dy{2, 2};
  for (const Kernels* kernels : available_kernels()) {
    for (const UnaryKind kind :
         {UnaryKind::silu, UnaryKind::gelu, UnaryKind::gelu_tanh, UnaryKind::softplus}) {
      std::vector<float> y(2);
      kernels->math_f32.unary_grad(kind, 0, dy.data(), x.data(), y.data(), 2);
      EXPECT_EQ(y, (std::vector<float>{2, 0})) << kernels->name << ' ' << to_string(kind);
      const std::vector<double> wide_x(x.begin(), x.end());
      const std::vector<double> wide_dy{2, 2};
      std::vector<double> wide(2);
      kernels->math_f64.unary_grad(kind, 0, wide_dy.data(), wide_x.data(), wide.data(), 2);
      EXPECT_EQ(wide, (std::vector<double>{2, 0})) << to_string(kind);
    }
  }
}

TEST(Kernels, ExpSumIsExpAndItsSum) {
  std::mt19937 random{3};
  std::normal_distribution<float> normal{0, 40};
  for (const Kernels* kernels : available_kernels()) {
    for (const std::int64_t n : {0, 1, 7, 16, 33, 128}) {
      std::vector<float> x(static_cast<std::size_t>(n));
      for (float& v : x) v = normal(random);
      const float shift = kernels->math_f32.max(x.data(), n, -INFINITY);
      for (const float v : x) EXPECT_LE(v, shift);
      std::vector<float> p = x;
      const float sum = kernels->math_f32.exp_sum(p.data(), n, shift);
      double expected = 0;
      for (std::size_t i = 0; i < x.size(); ++i) {
        const double e = std::exp(double{x[i] - shift});
        EXPECT_NEAR(p[i], e, kFunctionRoundoffF32 * e + 0x1p-149);
        expected += e;
      }
      EXPECT_NEAR(sum, expected, 1e-5 * expected);
    }
  }
}

TEST(Kernels, MaximumIgnoresNanAndFiniteFindsIt) {
  for (const Kernels* kernels : available_kernels()) {
    for (std::size_t at = 0; at < 40; ++at) {
      std::vector<float> x(40, -2.0F);
      x[at] = NAN;
      EXPECT_EQ(kernels->math_f32.max(x.data(), 40, -INFINITY), -2.0F);
      EXPECT_FALSE(kernels->math_f32.finite(x.data(), 40));
      x[at] = -INFINITY;
      EXPECT_FALSE(kernels->math_f32.finite(x.data(), 40));
      x[at] = 3e38F;
      EXPECT_TRUE(kernels->math_f32.finite(x.data(), 40));
      EXPECT_EQ(kernels->math_f32.max(x.data(), 40, -INFINITY), 3e38F);
    }
  }
}

TEST(Kernels, HalfFormatsConvertExactlyAndRoundToNearestEven) {
  const std::vector<float> floats = sweep(40'009);
  for (const Kernels* kernels : available_kernels()) {
    for (const DType dtype : {DType::f16, DType::bf16}) {
      std::vector<std::uint16_t> codes(65536);
      for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<std::uint16_t>(i);
      std::vector<float> values(codes.size());
      const auto widen = dtype == DType::f16 ? kernels->f16_to_f32 : kernels->bf16_to_f32;
      widen(codes.data(), values.data(), 65536);
      int wrong = 0;
      for (std::size_t i = 0; i < codes.size(); ++i) {
        const double expected = load_element(codes.data(), dtype, static_cast<std::int64_t>(i));
        const bool same = std::isnan(expected)
                              ? std::isnan(values[i])
                              : std::bit_cast<std::uint32_t>(values[i]) ==
                                    std::bit_cast<std::uint32_t>(static_cast<float>(expected));
        wrong += same ? 0 : 1;
      }
      EXPECT_EQ(wrong, 0) << kernels->name << ' ' << to_string(dtype);

      const auto narrow = dtype == DType::f16 ? kernels->f32_to_f16 : kernels->f32_to_bf16;
      std::vector<std::uint16_t> narrowed(floats.size());
      narrow(floats.data(), narrowed.data(), static_cast<std::int64_t>(floats.size()));
      wrong = 0;
      for (std::size_t i = 0; i < floats.size(); ++i) {
        std::uint16_t expected = 0;
        store_element(&expected, dtype, 0, floats[i]);
        const bool both_nan =
            std::isnan(floats[i]) &&
            std::isnan(load_element(narrowed.data(), dtype, static_cast<std::int64_t>(i)));
        wrong += both_nan || narrowed[i] == expected ? 0 : 1;
      }
      EXPECT_EQ(wrong, 0) << kernels->name << ' ' << to_string(dtype);
    }
  }
}

TEST(Convert, DoublesRoundOnceToHalfFormats) {
  const Kernels& kernels = best_kernels();
  std::vector<double> values;
  for (std::uint32_t code = 0; code < 0x7c00; code += 13) {
    const auto bits = static_cast<std::uint16_t>(code);
    const auto next = static_cast<std::uint16_t>(code + 1);
    const double low = load_element(&bits, DType::f16, 0);
    const double high = load_element(&next, DType::f16, 0);
    const double middle = (low + high) / 2;
    // Ties, and values nearer to a tie than a float can say.
    for (const double v : {low, middle, middle * (1 + 0x1p-40), middle * (1 - 0x1p-40)}) {
      values.push_back(v);
      values.push_back(-v);
    }
  }
  for (const DType dtype :
       {DType::f16, DType::bf16, DType::f8e4m3, DType::i8, DType::u8, DType::i32, DType::f32}) {
    std::vector<std::uint64_t> stored(values.size());
    store_elements(kernels, stored.data(), dtype, 0, 1, static_cast<std::int64_t>(values.size()),
                   values.data());
    for (std::size_t i = 0; i < values.size(); ++i) {
      EXPECT_EQ(load_element(stored.data(), dtype, static_cast<std::int64_t>(i)),
                round_to(dtype, values[i]))
          << to_string(dtype) << ' ' << values[i];
    }
  }
}

TEST(Convert, ByteFloatsRoundToNearestEven) {
  const std::vector<float> values = sweep(40'009);
  for (const DType dtype : {DType::f8e4m3, DType::f8e5m2}) {
    std::vector<std::uint8_t> stored(values.size());
    store_elements(best_kernels(), stored.data(), dtype, 0, 1,
                   static_cast<std::int64_t>(values.size()), values.data());
    int wrong = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      std::uint8_t expected = 0;
      store_element(&expected, dtype, 0, values[i]);
      wrong += stored[i] == expected ? 0 : 1;
    }
    EXPECT_EQ(wrong, 0) << to_string(dtype);
  }
}

TEST(Convert, StridesAndEveryDtype) {
  const Kernels& kernels = best_kernels();
  for (int d = 0; d < kDTypeCount; ++d) {
    const auto dtype = static_cast<DType>(d);
    for (const std::int64_t stride : {0, 1, 3}) {
      constexpr std::int64_t kCount = 300;
      std::vector<std::byte> data(byte_size(dtype, 5 + 3 * kCount));
      for (std::int64_t i = 0; i < 5 + 3 * kCount; ++i) {
        store_element(data.data(), dtype, i, static_cast<double>(1 + i % 7));  // e8m0 has no 0
      }
      std::vector<float> floats(kCount);
      std::vector<double> doubles(kCount);
      load_elements(kernels, data.data(), dtype, 5, stride, kCount, floats.data());
      load_elements(kernels, data.data(), dtype, 5, stride, kCount, doubles.data());
      for (std::int64_t i = 0; i < kCount; ++i) {
        const double expected = load_element(data.data(), dtype, 5 + i * stride);
        if (std::isnan(expected)) continue;
        EXPECT_EQ(floats[static_cast<std::size_t>(i)], static_cast<float>(expected));
        EXPECT_EQ(doubles[static_cast<std::size_t>(i)], expected);
      }
      if (stride == 0) continue;
      std::vector<std::byte> copy(data.size());
      store_elements(kernels, copy.data(), dtype, 5, stride, kCount, doubles.data());
      for (std::int64_t i = 0; i < kCount; ++i) {
        EXPECT_EQ(load_element(copy.data(), dtype, 5 + i * stride),
                  round_to(dtype, doubles[static_cast<std::size_t>(i)]));
      }
    }
  }
}

// ---- products ----

// The number of an operand's element, small enough for exact sums in every type.
template <typename T>
T element(std::int64_t i, std::int64_t j) {
  return static_cast<T>((i * 5 + j * 3) % 11);
}

template <typename T>
void check_products(const Kernels& kernels) {
  const ProductKernels<T>& products = kernels.template product<T>();
  const std::int64_t tile = kernels.tile;
  const std::int64_t mr = kernels.mr;
  const std::int64_t nr = products.nr;
  ASSERT_EQ(tile % mr, 0);
  ASSERT_EQ(tile % nr, 0);
  for (int f = 0; f < kAFormCount; ++f) {
    const auto form = static_cast<AForm>(f);
    for (const bool accumulate : {false, true}) {
      const std::int64_t m = 2 * mr;
      const std::int64_t n = 2 * nr;
      const std::int64_t k = 19;
      std::vector<T> a(static_cast<std::size_t>(tile * tile));
      std::vector<T> b(static_cast<std::size_t>(n * k));
      std::vector<T> c(static_cast<std::size_t>(m * (n + 3)), T{2});
      for (std::int64_t step = 0; step < k; ++step) {
        for (std::int64_t i = 0; i < m; ++i) {
          const std::int64_t at = form == AForm::packed      ? i / mr * mr * k + step * mr + i % mr
                                  : form == AForm::tile_rows ? i * tile + step
                                                             : step * tile + i;
          a[static_cast<std::size_t>(at)] = element<T>(i, step);
        }
        for (std::int64_t j = 0; j < n; ++j) {
          b[static_cast<std::size_t>(j / nr * nr * k + step * nr + j % nr)] = element<T>(step, j);
        }
      }
      products.product[f](
          {c.data(), n + 3, a.data(), mr * k, b.data(), nr * k, m, n, k, accumulate});
      for (std::int64_t i = 0; i < m; ++i) {
        for (std::int64_t j = 0; j < n + 3; ++j) {
          T expected = accumulate || j >= n ? T{2} : T{0};
          for (std::int64_t step = 0; step < k && j < n; ++step) {
            expected = static_cast<T>(expected + element<T>(i, step) * element<T>(step, j));
          }
          ASSERT_EQ(c[static_cast<std::size_t>(i * (n + 3) + j)], expected)
              << kernels.name << " form " << f << " at " << i << ", " << j;
        }
      }
    }
  }
}

TEST(Kernels, ProductsOfEveryFormAndType) {
  for (const Kernels* kernels : available_kernels()) {
    check_products<float>(*kernels);
    check_products<double>(*kernels);
    check_products<std::uint32_t>(*kernels);
  }
}

TEST(Dispatch, TheVariableForcesKernelsThatAreThere) {
  const std::vector<const Kernels*> all = available_kernels();
  ASSERT_FALSE(all.empty());
  const char* before = std::getenv("LAWSON_CPU_ISA");
  const std::string saved = before == nullptr ? "" : before;
  for (const Kernels* kernels : all) {
    setenv("LAWSON_CPU_ISA", kernels->name, 1);
    EXPECT_STREQ(best_kernels().name, kernels->name);
  }
  setenv("LAWSON_CPU_ISA", "v9", 1);
  testing::internal::CaptureStderr();
  EXPECT_EQ(&best_kernels(), all.back());
  EXPECT_EQ(&best_kernels(), all.back());
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(said.find("lawson: LAWSON_CPU_ISA='v9' is ignored; "), 0U) << said;
  EXPECT_EQ(said.find("v9", said.find("v9") + 1), std::string::npos) << said;
  if (before == nullptr) {
    unsetenv("LAWSON_CPU_ISA");
  } else {
    setenv("LAWSON_CPU_ISA", saved.c_str(), 1);
  }
}

TEST(Kernels, KeepWhatTheDropoutStreamKeeps) {
  std::mt19937_64 random{2};
  for (const Kernels* kernels : available_kernels()) {
    for (const std::size_t count : std::vector<std::size_t>{1, 3, 4, 63, 64, 65, 300}) {
      for (int repetition = 0; repetition < 20; ++repetition) {
        // Block numbers below and beyond 32 bits, at any word of a block.
        const std::uint64_t first = random() >> (2 + repetition * 3);
        const DropoutStream stream{random(), random(), 0.05 * repetition};
        std::vector<std::uint8_t> expected(count);
        std::vector<std::uint8_t> kept(count + 1, 9);
        stream.fill(first, expected);
        kernels->keep(stream.seed, stream.offset,
                      static_cast<std::uint32_t>(stream.probability * 0x1p32), first, kept.data(),
                      static_cast<std::int64_t>(count));
        ASSERT_EQ(kept.back(), 9);
        kept.pop_back();
        ASSERT_EQ(kept, expected) << kernels->name << ' ' << first << ' ' << count;
      }
    }
  }
}

}  // namespace
}  // namespace lawson::cpu
