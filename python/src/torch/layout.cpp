#include "torch/layout.h"

#include <algorithm>
#include <array>

#include "torch/torch.h"

namespace lawson::torch {
namespace {

constexpr DLDataType code(DLDataTypeCode type, std::uint8_t bits) {
  return {static_cast<std::uint8_t>(type), bits, 1};
}

constexpr std::array kDtypes{
    Dtype{"f64", "float64", LAWSON_DTYPE_F64, code(kDLFloat, 64)},
    Dtype{"f32", "float32", LAWSON_DTYPE_F32, code(kDLFloat, 32)},
    Dtype{"f16", "float16", LAWSON_DTYPE_F16, code(kDLFloat, 16)},
    Dtype{"bf16", "bfloat16", LAWSON_DTYPE_BF16, code(kDLBfloat, 16)},
    Dtype{"f8e4m3", "float8_e4m3fn", LAWSON_DTYPE_F8E4M3, code(kDLFloat8_e4m3fn, 8)},
    Dtype{"f8e5m2", "float8_e5m2", LAWSON_DTYPE_F8E5M2, code(kDLFloat8_e5m2, 8)},
    Dtype{"f8e8m0", "float8_e8m0fnu", LAWSON_DTYPE_F8E8M0, code(kDLFloat8_e8m0fnu, 8)},
    Dtype{"i64", "int64", LAWSON_DTYPE_I64, code(kDLInt, 64)},
    Dtype{"i32", "int32", LAWSON_DTYPE_I32, code(kDLInt, 32)},
    Dtype{"i8", "int8", LAWSON_DTYPE_I8, code(kDLInt, 8)},
    Dtype{"u8", "uint8", LAWSON_DTYPE_U8, code(kDLUInt, 8)},
    Dtype{"bool", "bool", LAWSON_DTYPE_BOOL, code(kDLBool, 8)},
};

struct Axis {
  std::int64_t size = 0;
  std::int64_t stride = 0;
  bool operator==(const Axis&) const = default;
};

// The axes along which memory moves, outermost first.
std::vector<Axis> axes_of(std::span<const std::int64_t> shape,
                          std::span<const std::int64_t> strides) {
  std::vector<Axis> axes;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (shape[i] != 1 && strides[i] != 0) axes.push_back({shape[i], strides[i]});
  }
  std::sort(axes.begin(), axes.end(), [](const Axis& a, const Axis& b) {
    return a.stride != b.stride ? a.stride > b.stride : a.size > b.size;
  });
  return axes;
}

// Neighbours that are one run become one axis.
std::vector<Axis> merged(const std::vector<Axis>& axes) {
  std::vector<Axis> result;
  for (const Axis& axis : axes) {
    if (!result.empty() && result.back().stride == axis.size * axis.stride) {
      result.back() = {result.back().size * axis.size, axis.stride};
    } else {
      result.push_back(axis);
    }
  }
  return result;
}

bool is_empty(std::span<const std::int64_t> shape) {
  return std::find(shape.begin(), shape.end(), 0) != shape.end();
}

std::string list(std::span<const std::int64_t> values) {
  std::string text = "[";
  for (std::size_t i = 0; i < values.size(); ++i) {
    text += (i == 0 ? "" : ",") + std::to_string(values[i]);
  }
  return text + "]";
}

std::string describe(std::string_view dtype, std::span<const std::int64_t> shape,
                     std::span<const std::int64_t> strides) {
  return std::string{dtype} + list(shape) + " with strides " + list(strides);
}

}  // namespace

const Dtype& dtype_named(std::string_view name, const std::string& what) {
  for (const Dtype& dtype : kDtypes) {
    if (dtype.name == name) return dtype;
  }
  std::string names;
  for (const Dtype& dtype : kDtypes) names += (names.empty() ? "" : ", ") + std::string{dtype.name};
  refuse(what + ": '" + std::string{name} + "' is no dtype of torch's; expected one of " + names);
}

const Dtype* dtype_of(DLDataType code) {
  for (const Dtype& dtype : kDtypes) {
    if (dtype.code.code == code.code && dtype.code.bits == code.bits &&
        dtype.code.lanes == code.lanes) {
      return &dtype;
    }
  }
  return nullptr;
}

Layout layout_of(const DLTensor& tensor) {
  const auto rank = static_cast<std::size_t>(tensor.ndim);
  return {dtype_of(tensor.dtype),
          {tensor.shape, tensor.shape + rank},
          {tensor.strides, tensor.strides + rank}};
}

std::string describe(const Layout& layout) {
  return describe(layout.dtype == nullptr ? "a dtype that Lawson has not" : layout.dtype->name,
                  layout.shape, layout.strides);
}

std::string describe(const DLTensor& tensor) {
  return describe(layout_of(tensor));
}

bool same_axes(const Layout& given, const TensorInfo& wanted) {
  if (given.dtype == nullptr || given.dtype->name != wanted.dtype) return false;
  if (given.shape != wanted.shape) return false;
  if (is_empty(given.shape)) return true;
  for (std::size_t i = 0; i < given.shape.size(); ++i) {
    if (given.shape[i] > 1 && given.strides[i] != wanted.strides[i]) return false;
  }
  return true;
}

bool same_memory(const Layout& given, const TensorInfo& wanted) {
  if (given.dtype == nullptr || given.dtype->name != wanted.dtype) return false;
  if (is_empty(given.shape) || is_empty(wanted.shape)) {
    return is_empty(given.shape) && is_empty(wanted.shape);
  }
  return merged(axes_of(given.shape, given.strides)) ==
         merged(axes_of(wanted.shape, wanted.strides));
}

std::optional<lawson_tensor> shorter(const Layout& given, const TensorInfo& wanted) {
  // The tokens are outermost in memory.
  std::size_t cut = 0;
  for (std::size_t i = 0; i < wanted.shape.size(); ++i) {
    const bool is_first = wanted.shape[cut] <= 1;
    if (wanted.shape[i] > 1 && (is_first || wanted.strides[i] > wanted.strides[cut])) cut = i;
  }
  if (wanted.shape.empty() || given.dtype == nullptr) return std::nullopt;
  TensorInfo candidate = wanted;
  for (const std::int64_t size : given.shape) {
    if (size >= wanted.shape[cut]) continue;
    candidate.shape[cut] = size;
    if (!same_memory(given, candidate)) continue;
    return tensor(nullptr, given.dtype->value, candidate.shape, candidate.strides);
  }
  return std::nullopt;
}

}  // namespace lawson::torch
