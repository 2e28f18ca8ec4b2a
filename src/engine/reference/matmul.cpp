#include "engine/reference/matmul.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "engine/reference/attention.h"
#include "engine/reference/bounds.h"
#include "engine/reference/parallel.h"

namespace lawson::reference {
namespace {

// Integers whose products and sums may exceed 64 bits.
__extension__ using Wide = __int128;

struct Sizes {
  std::size_t m;
  std::size_t n;
  std::size_t k;
  Dims batch;

  Sizes(const Array& a, const Array& c)
      : m{static_cast<std::size_t>(c.shape[c.shape.size() - 2])},
        n{static_cast<std::size_t>(c.shape.back())},
        k{static_cast<std::size_t>(a.shape.back())},
        batch(c.shape.begin(), c.shape.end() - 2) {}
};

Dims batch_strides(const Array& x, const Dims& batch) {
  return broadcast_strides(Dims(x.shape.begin(), x.shape.end() - 2), batch);
}

// The columns of a matrix [k, n] as rows [n, k].
void transpose(std::span<const double> matrix, const Sizes& s, std::vector<double>& columns) {
  columns.resize(s.n * s.k);
  for (std::size_t l = 0; l < s.k; ++l) {
    for (std::size_t j = 0; j < s.n; ++j) columns[j * s.k + l] = matrix[l * s.n + j];
  }
}

// Calls element(row i, column j) for all of a block of rows before the next column.
template <typename Element>
void for_each_element(const Sizes& s, const Element& element) {
  constexpr std::size_t kRows = 16;
  const double operations =
      static_cast<double>(s.m) * static_cast<double>(s.n) * static_cast<double>(s.k);
  for_row_runs(s.m, operations, [&](std::size_t begin, std::size_t end) {
    for (std::size_t first = begin; first < end; first += kRows) {
      const std::size_t last = std::min(first + kRows, end);
      for (std::size_t j = 0; j < s.n; ++j) {
        for (std::size_t i = first; i < last; ++i) element(i, j);
      }
    }
  });
}

double exact_sum(const double* a, const double* b, std::size_t k) {
  Wide sum = 0;
  for (std::size_t l = 0; l < k; ++l) {
    sum += Wide{static_cast<std::int64_t>(a[l])} * static_cast<std::int64_t>(b[l]);
  }
  return static_cast<double>(sum);
}

// What errors ea of a and eb of b do to a . b.
double propagated(const double* a, const double* ea, const double* b, const double* eb,
                  std::size_t k) {
  double error = 0;
  for (std::size_t l = 0; l < k; ++l) {
    const double x = ea == nullptr ? 0 : ea[l];
    const double y = eb == nullptr ? 0 : eb[l];
    if (x > 0 || y > 0) error += std::fabs(a[l]) * y + std::fabs(b[l]) * x + x * y;
  }
  return error;
}

}  // namespace

void matmul(const Array& a, const Array& b, Array& c) {
  const Sizes s(a, c);
  // Sums of products of few bits are exact in float64 too.
  const bool few_bits = bit_width(a.dtype) + bit_width(b.dtype) <= 32 && s.k < (1U << 20);
  const bool in_double = is_float(a.dtype) || few_bits;
  std::vector<double> columns;
  for_each_index(s.batch, {batch_strides(a, s.batch), batch_strides(b, s.batch)},
                 [&](std::size_t at, const auto& matrices) {
                   const double* rows = a.value.data() + matrices[0] * s.m * s.k;
                   transpose({b.value.data() + matrices[1] * s.k * s.n, s.k * s.n}, s, columns);
                   double* result = c.value.data() + at * s.m * s.n;
                   for_each_element(s, [&](std::size_t i, std::size_t j) {
                     const double* x = rows + i * s.k;
                     const double* y = columns.data() + j * s.k;
                     result[i * s.n + j] = in_double ? dot(x, y, s.k) : exact_sum(x, y, s.k);
                   });
                 });
}

void add_product_errors(const Array& a, const Array& b, Array& c, const ProductRounding& rounding) {
  const Sizes s(a, c);
  std::vector<double> magnitudes(s.m * s.k);
  std::vector<double> columns;
  std::vector<double> column_errors;
  const bool exact = a.error.empty() && b.error.empty();
  for_each_index(
      s.batch, {batch_strides(a, s.batch), batch_strides(b, s.batch)},
      [&](std::size_t at, const auto& matrices) {
        const std::size_t a_at = matrices[0] * s.m * s.k;
        const std::size_t b_at = matrices[1] * s.k * s.n;
        transpose({b.value.data() + b_at, s.k * s.n}, s, columns);
        for (double& y : columns) y = std::fabs(y);
        if (!b.error.empty()) transpose({b.error.data() + b_at, s.k * s.n}, s, column_errors);
        for (std::size_t i = 0; i < s.m * s.k; ++i) magnitudes[i] = std::fabs(a.value[a_at + i]);
        for_each_element(s, [&](std::size_t i, std::size_t j) {
          const double* x = magnitudes.data() + i * s.k;
          const double* y = columns.data() + j * s.k;
          const double from_operands =
              exact ? 0
                    : propagated(x, a.error.empty() ? nullptr : a.error.data() + a_at + i * s.k, y,
                                 b.error.empty() ? nullptr : column_errors.data() + j * s.k, s.k);
          const double magnitude = dot(x, y, s.k) + from_operands;
          const std::size_t r = (at * s.m + i) * s.n + j;
          c.error[r] =
              with_own(c.value[r], from_operands, rounding.relative * magnitude + rounding.floor);
          if (std::isfinite(c.value[r]) && magnitude > rounding.range) c.error[r] = kInfinity;
        });
      });
}

void add_matmul_errors(const Array& a, const Array& b, Array& c, const Arithmetic& arithmetic) {
  if (!is_float(a.dtype)) {
    // Beyond the accumulator's range engines wrap or saturate.
    add_product_errors(a, b, c, {0, 0, max_finite(DType::i32)});
    return;
  }
  const auto k = static_cast<std::size_t>(a.shape.back());
  add_product_errors(
      a, b, c,
      {2 * arithmetic.operand_roundoff + accumulation_growth(k) * arithmetic.accumulate_roundoff,
       static_cast<double>(k) * flush_floor(arithmetic), accumulator_range(arithmetic)});
}

}  // namespace lawson::reference
