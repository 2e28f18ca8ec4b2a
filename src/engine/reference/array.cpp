#include "engine/reference/array.h"

#include "base/dims.h"

namespace lawson::reference {

Array make_array(DType dtype, const Dims& shape) {
  Array array{dtype, shape, {}, {}};
  array.value.resize(static_cast<std::size_t>(element_count(shape).value_or(0)));
  return array;
}

Array load(const ir::Tensor& tensor, const void* data) {
  Array array = make_array(tensor.dtype, tensor.shape);
  for_each_index(tensor.shape, {tensor.strides}, [&](std::size_t i, const auto& at) {
    array.value[i] = load_element(data, tensor.dtype, static_cast<std::int64_t>(at[0]));
  });
  return array;
}

void store(const Array& array, const ir::Tensor& tensor, void* data) {
  for_each_index(tensor.shape, {tensor.strides}, [&](std::size_t i, const auto& at) {
    store_element(data, tensor.dtype, static_cast<std::int64_t>(at[0]), array.value[i]);
  });
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
