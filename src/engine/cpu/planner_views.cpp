// Ops that compute nothing: constants, indices, views as strides, and concatenations, whose parts
// are stored where the result has them.
#include <algorithm>
#include <optional>
#include <utility>

#include "engine/cpu/planner.h"

namespace lawson::cpu {
namespace {

// Strides of `to` over the elements of (from, strides) in row-major order; nullopt when there are
// none.
std::optional<Dims> reshape_strides(const Dims& from, const Dims& strides, const Dims& to) {
  if (element_count(from).value_or(0) == 0) return contiguous_strides(to);
  // Cut both shapes into the shortest runs of axes with equal products.
  Dims result(to.size(), 0);
  std::size_t i = 0;
  std::size_t j = 0;
  while (j < to.size()) {
    if (to[j] == 1) {
      ++j;
      continue;
    }
    while (i < from.size() && from[i] == 1) ++i;
    const std::size_t first_i = i;
    const std::size_t first_j = j;
    std::int64_t have = from[i++];
    std::int64_t want = to[j++];
    while (have != want) {
      if (have < want) {
        have *= from[i++];
      } else {
        want *= to[j++];
      }
    }
    // The run's axes of `from` must step like one.
    std::int64_t step = 0;
    std::int64_t expected = -1;
    for (std::size_t axis = i; axis-- > first_i;) {
      if (from[axis] == 1) continue;
      if (expected < 0) {
        step = strides[axis];
      } else if (strides[axis] != expected) {
        return std::nullopt;
      }
      expected = strides[axis] * from[axis];
    }
    for (std::size_t axis = j; axis-- > first_j;) {
      result[axis] = step;
      step *= to[axis];
    }
  }
  return result;
}

}  // namespace

void Planner::plan_constant(const ir::Node& node, const ir::Constant& op) {
  Location location;
  location.kind = Location::Kind::constant;
  location.dtype = tensor(node.outputs[0]).dtype;
  location.constant = round_to(location.dtype, op.value);
  place(node.outputs[0], location);
}

void Planner::plan_iota(const ir::Node& node, const ir::Iota& op) {
  Location location;
  location.kind = Location::Kind::index;
  location.dtype = tensor(node.outputs[0]).dtype;
  location.strides.assign(op.shape.size(), 0);
  location.strides[static_cast<std::size_t>(op.axis)] = 1;
  place(node.outputs[0], location);
}

void Planner::plan_view(const ir::Node& node) {
  const TensorId x = node.inputs[0];
  const TensorId out = node.outputs[0];
  const Dims& from = tensor(x).shape;
  const Dims& to = tensor(out).shape;
  Location location = stored(x);
  state(out).step = state(x).step;
  if (const auto* transpose = std::get_if<ir::Transpose>(&node.op)) {
    Dims strides;
    for (const std::int64_t axis : transpose->perm) {
      strides.push_back(location.strides[static_cast<std::size_t>(axis)]);
    }
    location.strides = std::move(strides);
  } else if (const auto* slice = std::get_if<ir::Slice>(&node.op)) {
    for (std::size_t i = 0; i < from.size(); ++i) {
      location.offset += slice->start[i] * location.strides[i];
      location.strides[i] *= slice->stride[i];
    }
  } else if (std::holds_alternative<ir::Broadcast>(node.op)) {
    location = broadcast_location(location, from, to);
  } else if (location.kind == Location::Kind::constant) {
    location.strides.assign(to.size(), 0);
  } else if (const auto strides = reshape_strides(from, location.strides, to)) {
    location.strides = *strides;
  } else {
    const Location copy = temporary(from, location.dtype);
    state(out).step = step_count();
    plan_copy(location, copy, from);
    location = copy;
    location.strides = contiguous_strides(to);
  }
  place(out, location);
}

void Planner::plan_concat(const ir::Node& node, const ir::Concat& op) {
  const TensorId out = node.outputs[0];
  allocate(out);
  int last = -1;
  Home part{out, op.axis, 0};
  for (const TensorId id : node.inputs) {
    const Location to = part_location(part);
    const Location from = stored(id);
    if (from == to) {
      last = std::max(last, state(id).step);
    } else {
      last = step_count();
      plan_copy(from, to, tensor(id).shape);
    }
    part.start += tensor(id).shape[static_cast<std::size_t>(op.axis)];
  }
  state(out).step = last;
  state(out).location = own_location(out);
}

}  // namespace lawson::cpu
