// Shapes of any rank in cuDNN's rank 3, and views as strides.
#pragma once

#include <array>
#include <optional>

#include "base/dims.h"

namespace lawson::cudnn {

using Dims3 = std::array<std::int64_t, 3>;

// A tensor in memory, seen through views: element (i...) is at offset + sum of i * stride. A stride
// of 0 is a dim that repeats.
struct Layout {
  Dims shape;
  Dims strides;
  std::int64_t offset = 0;
};

// NumPy's reshape without a copy; nullopt when the layout does not allow it.
std::optional<Layout> reshape_layout(const Layout& layout, const Dims& shape);
std::optional<Layout> broadcast_layout(const Layout& layout, const Dims& shape);
Layout transpose_layout(const Layout& layout, const Dims& perm);
Layout slice_layout(const Layout& layout, const Dims& start, const Dims& limit, const Dims& step);

// [..., x, y] -> [product of the others, x, y], missing dims are 1.
Dims3 fold_shape(const Dims& shape);

struct Folded {
  Dims3 dims;
  Dims3 strides;
};

// Memory in rank 3. Repeating dims become 1 (the operation broadcasts them). nullopt: the leading
// dims cannot be one dim.
std::optional<Folded> fold_layout(const Layout& layout);

// The axis of rank 3 that axis `axis` of a tensor of this shape is; nullopt when it is one of
// several leading dims above 1.
std::optional<int> fold_axis(const Dims& shape, std::int64_t axis);

// Whether the layout, its axes in this order, lies packed in memory: the last axis contiguous, each
// other one behind the next. Axes of size 1 lie anywhere.
bool is_packed(const Layout& layout, const Dims& order);

Dims3 packed_strides(const Dims3& dims);

}  // namespace lawson::cudnn
