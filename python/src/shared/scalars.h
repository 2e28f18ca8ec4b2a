// Inputs that are by value: their bytes, in the dtype that the graph has.
#ifndef LAWSON_PYTHON_SHARED_SCALARS_H_
#define LAWSON_PYTHON_SHARED_SCALARS_H_

#include <lawson/lawson.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace lawson::python {

struct Scalar {
  std::int64_t uid = 0;
  alignas(8) std::array<std::byte, 8> bytes{};
};

// Throws lawson::Error for a dtype that is no scalar's.
inline Scalar scalar_of(const TensorInfo& tensor, double value) {
  Scalar scalar;
  scalar.uid = tensor.uid;
  const auto store = [&](auto typed) { std::memcpy(scalar.bytes.data(), &typed, sizeof(typed)); };
  if (tensor.dtype == "f32") {
    store(static_cast<float>(value));
  } else if (tensor.dtype == "f64") {
    store(value);
  } else if (tensor.dtype == "i32") {
    store(static_cast<std::int32_t>(value));
  } else if (tensor.dtype == "i64") {
    store(static_cast<std::int64_t>(value));
  } else {
    throw Error(LAWSON_INVALID_ARGUMENT, "input '" + tensor.name + "' is by value and " +
                                             tensor.dtype + "; expected f32, f64, i32 or i64");
  }
  return scalar;
}

}  // namespace lawson::python

#endif  // LAWSON_PYTHON_SHARED_SCALARS_H_
