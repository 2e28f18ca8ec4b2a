#include "engine/reference/array.h"

#include <cstring>
#include <limits>
#include <utility>

#include "base/dims.h"

namespace lawson::reference {
namespace {

// As for_each_index over the array's shape, only where it is there.
template <typename Visit>
void for_each_there(const Array& array, std::vector<Dims> operand_strides, Visit visit) {
  if (array.there.empty()) {
    for_each_index(array.shape, operand_strides, visit);
    return;
  }
  operand_strides.push_back(contiguous_strides(array.shape));
  for_each_index(array.there, operand_strides,
                 [&](std::size_t, const auto& at) { visit(at.back(), at); });
}

}  // namespace

Array make_array(DType dtype, const Dims& shape) {
  Array array;
  array.dtype = dtype;
  array.shape = shape;
  array.value.resize(static_cast<std::size_t>(element_count(shape).value_or(0)));
  return array;
}

Array load(const ir::Tensor& tensor, const void* data, Dims there) {
  Array array = make_array(tensor.dtype, tensor.shape);
  if (there != tensor.shape) array.there = std::move(there);
  if (tensor.dtype == DType::i64) array.exact.resize(array.size());
  for_each_there(array, {tensor.strides}, [&](std::size_t i, const auto& at) {
    array.value[i] = load_element(data, tensor.dtype, static_cast<std::int64_t>(at[0]));
    if (tensor.dtype == DType::i64) {
      std::memcpy(&array.exact[i], static_cast<const std::int64_t*>(data) + at[0], 8);
    }
  });
  return array;
}

void store(const Array& array, const ir::Tensor& tensor, void* data) {
  for_each_there(array, {tensor.strides}, [&](std::size_t i, const auto& at) {
    store_element(data, tensor.dtype, static_cast<std::int64_t>(at[0]), array.value[i]);
  });
}

void leave_open(Array& array) {
  if (array.there.empty()) return;
  std::vector<double> errors(array.size(), std::numeric_limits<double>::infinity());
  for_each_there(array, {}, [&](std::size_t i, const auto&) { errors[i] = array.error_at(i); });
  array.error = std::move(errors);
}

Dims broadcast_strides(const Dims& from, const Dims& shape) {
  const Dims own = contiguous_strides(from);
  Dims strides(shape.size(), 0);
  const std::size_t skipped = shape.size() - from.size();
  for (std::size_t i = 0; i < from.size(); ++i) {
    strides[skipped + i] = from[i] == 1 ? 0 : own[i];
  }
  return strides;
}

}  // namespace lawson::reference
