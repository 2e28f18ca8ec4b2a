// A logical tensor as float64, contiguous in row-major order, whatever its storage was.
// Integers are exact up to 2^53 in magnitude (i64 beyond that is rounded to double).
#pragma once

#include <cstdint>
#include <vector>

#include "base/dims.h"
#include "base/dtype.h"
#include "ir/graph.h"

namespace lawson::reference {

struct Array {
  DType dtype = DType::f64;
  Dims shape;
  std::vector<double> value;
  // Per element, how far a correct engine may be away from `value`; infinite where anything goes.
  // Empty means exact.
  std::vector<double> error;
  // Where not empty: the leading box of `shape` that is there. What lies outside of it is neither
  // read nor written, and not in memory perhaps; its values are 0 here.
  Dims there;
  // Of i64 that was loaded: every bit.
  std::vector<std::int64_t> exact;

  std::size_t size() const { return value.size(); }
  double error_at(std::size_t i) const { return error.empty() ? 0.0 : error[i]; }
};

// An array of zeros of the tensor's dtype and shape.
Array make_array(DType dtype, const Dims& shape);

// Reads and writes the strided storage of a tensor, as far as it is there.
Array load(const ir::Tensor& tensor, const void* data, Dims there = {});
void store(const Array& array, const ir::Tensor& tensor, void* data);

// Strides that read an operand of shape `from` at the indices of `shape` (0 where it broadcasts).
Dims broadcast_strides(const Dims& from, const Dims& shape);

// Makes the error of what is not there infinite.
void leave_open(Array& array);

// Calls visit(result position, operand positions...) for every index of `shape`, in order.
template <typename Visit>
void for_each_index(const Dims& shape, const std::vector<Dims>& operand_strides, Visit visit) {
  if (element_count(shape).value_or(0) == 0) return;
  const std::int64_t width = shape.empty() ? 1 : shape.back();
  const Dims rows(shape.begin(), shape.empty() ? shape.end() : shape.end() - 1);
  Dims index(rows.size(), 0);
  std::vector<std::size_t> positions(operand_strides.size());
  std::vector<std::size_t> steps;
  for (const Dims& strides : operand_strides) {
    steps.push_back(strides.empty() ? 0 : static_cast<std::size_t>(strides.back()));
  }
  std::size_t position = 0;
  do {
    for (std::size_t i = 0; i < positions.size(); ++i) {
      positions[i] = static_cast<std::size_t>(offset_of(index, operand_strides[i]));
    }
    for (std::int64_t column = 0; column < width; ++column) {
      visit(position++, positions);
      for (std::size_t i = 0; i < positions.size(); ++i) positions[i] += steps[i];
    }
  } while (next_index(index, rows));
}

}  // namespace lawson::reference
