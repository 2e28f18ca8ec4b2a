// Dtypes and layouts of torch's tensors against those of a graph's.
#ifndef LAWSON_PYTHON_TORCH_LAYOUT_H_
#define LAWSON_PYTHON_TORCH_LAYOUT_H_

#include <dlpack/dlpack.h>
#include <lawson/lawson.hpp>

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lawson::torch {

struct Dtype {
  std::string_view name;        // Lawson's
  std::string_view torch_name;  // an attribute of the module torch
  lawson_dtype value;
  DLDataType code;
};

// Throws Error for a name that is none, `what` first.
const Dtype& dtype_named(std::string_view name, const std::string& what);
// Null: one that Lawson has not.
const Dtype* dtype_of(DLDataType code);

// A tensor apart from its memory.
struct Layout {
  const Dtype* dtype = nullptr;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;  // elements
};
Layout layout_of(const DLTensor& tensor);
std::string describe(const DLTensor& tensor);
std::string describe(const Layout& layout);

// Whether they are the same, axis by axis.
bool same_axes(const Layout& given, const TensorInfo& wanted);
// Whether both go over the same elements in memory, whatever the order, the number and the size-1
// dims of their axes: which axis is which, the graph says.
bool same_memory(const Layout& given, const TensorInfo& wanted);

// The graph's tensor with one axis shorter, where `given` is that: a ragged tensor with fewer
// tokens (or offsets) than the plan has room for.
std::optional<lawson_tensor> shorter(const Layout& given, const TensorInfo& wanted);

}  // namespace lawson::torch

#endif  // LAWSON_PYTHON_TORCH_LAYOUT_H_
