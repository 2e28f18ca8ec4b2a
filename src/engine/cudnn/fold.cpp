#include "engine/cudnn/fold.h"

#include <algorithm>

namespace lawson::cudnn {
namespace {

std::size_t index(std::int64_t value) {
  return static_cast<std::size_t>(value);
}

}  // namespace

std::optional<Layout> reshape_layout(const Layout& layout, const Dims& shape) {
  Layout result{shape, Dims(shape.size(), 0), layout.offset};
  // Groups of old dims and of new dims with equal products, from the last dim to the first.
  auto from = static_cast<std::int64_t>(layout.shape.size()) - 1;
  auto to = static_cast<std::int64_t>(shape.size()) - 1;
  while (from >= 0 || to >= 0) {
    // One contiguous run of old dims: extent and innermost stride.
    std::int64_t extent = 1;
    std::int64_t stride = 0;
    std::int64_t wanted = 1;
    const std::int64_t first_to = to;
    const auto take_old = [&]() -> bool {
      const std::int64_t size = layout.shape[index(from)];
      const std::int64_t step = layout.strides[index(from)];
      --from;
      if (size == 1) return true;
      if (extent == 1) {
        stride = step;
      } else if (step != stride * extent || stride == 0) {
        return false;
      }
      extent *= size;
      return true;
    };
    if (from >= 0 && !take_old()) return std::nullopt;
    if (to >= 0) wanted *= shape[index(to--)];
    while (extent != wanted) {
      if (extent < wanted) {
        if (from < 0 || !take_old()) return std::nullopt;
      } else {
        if (to < 0) return std::nullopt;
        wanted *= shape[index(to--)];
      }
    }
    std::int64_t run = stride;
    for (std::int64_t i = first_to; i > to; --i) {
      result.strides[index(i)] = run;
      run *= shape[index(i)];
    }
  }
  return result;
}

std::optional<Layout> broadcast_layout(const Layout& layout, const Dims& shape) {
  if (shape.size() < layout.shape.size()) return std::nullopt;
  Layout result{shape, Dims(shape.size(), 0), layout.offset};
  const std::size_t lead = shape.size() - layout.shape.size();
  for (std::size_t i = 0; i < layout.shape.size(); ++i) {
    if (layout.shape[i] == shape[lead + i]) {
      result.strides[lead + i] = layout.strides[i];
    } else if (layout.shape[i] != 1) {
      return std::nullopt;
    }
  }
  return result;
}

Layout transpose_layout(const Layout& layout, const Dims& perm) {
  Layout result{Dims(perm.size()), Dims(perm.size()), layout.offset};
  for (std::size_t i = 0; i < perm.size(); ++i) {
    result.shape[i] = layout.shape[index(perm[i])];
    result.strides[i] = layout.strides[index(perm[i])];
  }
  return result;
}

Layout slice_layout(const Layout& layout, const Dims& start, const Dims& limit, const Dims& step) {
  Layout result = layout;
  for (std::size_t i = 0; i < layout.shape.size(); ++i) {
    result.offset += start[i] * layout.strides[i];
    result.shape[i] = (limit[i] - start[i] + step[i] - 1) / step[i];
    result.strides[i] = layout.strides[i] * step[i];
  }
  return result;
}

Dims3 fold_shape(const Dims& shape) {
  Dims3 dims{1, 1, 1};
  const std::size_t rank = shape.size();
  for (std::size_t i = 0; i < rank; ++i) {
    const std::size_t from_last = rank - 1 - i;
    if (from_last == 0) {
      dims[2] = shape[i];
    } else if (from_last == 1) {
      dims[1] = shape[i];
    } else {
      dims[0] *= shape[i];
    }
  }
  return dims;
}

std::optional<Folded> fold_layout(const Layout& layout) {
  const std::size_t rank = layout.shape.size();
  // Dims that repeat become 1; leading dims either all repeat or none.
  Layout real = layout;
  for (std::size_t i = 0; i < rank; ++i) {
    if (real.strides[i] == 0 && real.shape[i] > 1) real.shape[i] = 1;
  }
  Folded folded{fold_shape(real.shape), {0, 0, 0}};
  if (rank > 3) {
    const bool repeats = folded.dims[0] == 1;
    if (!repeats && folded.dims[0] != fold_shape(layout.shape)[0]) return std::nullopt;
    Layout lead{Dims(real.shape.begin(), real.shape.end() - 2),
                Dims(real.strides.begin(), real.strides.end() - 2), 0};
    const auto merged = reshape_layout(lead, {folded.dims[0]});
    if (!merged) return std::nullopt;
    folded.strides[0] = merged->strides[0];
  } else if (rank == 3) {
    folded.strides[0] = real.strides[0];
  }
  if (rank >= 2) folded.strides[1] = real.strides[rank - 2];
  if (rank >= 1) folded.strides[2] = real.strides[rank - 1];
  // Strides of unit dims mean nothing; cuDNN wants them as if packed.
  if (folded.dims[2] == 1) folded.strides[2] = 1;
  if (folded.dims[1] == 1) folded.strides[1] = folded.strides[2] * folded.dims[2];
  if (folded.dims[0] == 1) {
    folded.strides[0] =
        std::max(folded.strides[1] * folded.dims[1], folded.strides[2] * folded.dims[2]);
  }
  return folded;
}

std::optional<int> fold_axis(const Dims& shape, std::int64_t axis) {
  const auto rank = static_cast<std::int64_t>(shape.size());
  const std::int64_t from_last = rank - 1 - axis;
  if (from_last == 0) return 2;
  if (from_last == 1) return 1;
  for (std::int64_t i = 0; i < rank - 2; ++i) {
    if (i != axis && shape[index(i)] != 1) return std::nullopt;
  }
  return 0;
}

bool is_packed(const Layout& layout, const Dims& order) {
  std::int64_t run = 1;
  for (std::size_t i = order.size(); i-- > 0;) {
    const std::int64_t size = layout.shape[index(order[i])];
    if (size == 1) continue;
    if (layout.strides[index(order[i])] != run) return false;
    run *= size;
  }
  return true;
}

Dims3 packed_strides(const Dims3& dims) {
  return {dims[1] * dims[2], dims[2], 1};
}

}  // namespace lawson::cudnn
