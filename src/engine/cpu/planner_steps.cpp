// Ops that compute: which step each becomes, or joins.
#include <algorithm>
#include <utility>

#include "engine/cpu/planner.h"

namespace lawson::cpu {
namespace {

// The strides of a location over the axes `first`, then those over `second`.
void reorder(Location& location, const Dims& first, const Dims& second) {
  Dims strides;
  for (const Dims* axes : {&first, &second}) {
    for (const std::int64_t axis : *axes) {
      strides.push_back(location.strides[static_cast<std::size_t>(axis)]);
    }
  }
  location.strides = std::move(strides);
}

// Leaves out axes of size 1 of `dims`, whose strides begin at `first` in every location, and merges
// neighbours that all locations step through as if they were one.
void merge_axes(Dims& dims, std::size_t first, const std::vector<Location*>& locations) {
  const auto erase = [&](std::size_t axis, std::size_t stride) {
    dims.erase(dims.begin() + static_cast<std::ptrdiff_t>(axis));
    for (Location* location : locations) {
      location->strides.erase(location->strides.begin() + static_cast<std::ptrdiff_t>(stride));
    }
  };
  for (std::size_t i = dims.size(); i-- > 0;) {
    if (dims[i] == 1) erase(i, first + i);
  }
  for (std::size_t i = dims.size(); i-- > 1;) {
    const bool mergeable = std::all_of(locations.begin(), locations.end(), [&](const Location* l) {
      return l->strides[first + i - 1] == l->strides[first + i] * dims[i];
    });
    if (!mergeable) continue;
    dims[i - 1] *= dims[i];
    erase(i, first + i - 1);
  }
}

// Whether the last two axes fill one piece of memory without gaps.
bool is_dense_matrix(const Dims& strides, const Dims& shape) {
  const std::size_t rank = shape.size();
  const std::int64_t rows = shape[rank - 2];
  const std::int64_t columns = shape[rank - 1];
  const bool by_rows = strides[rank - 1] == 1 && strides[rank - 2] == columns;
  const bool by_columns = strides[rank - 2] == 1 && strides[rank - 1] == rows;
  return by_rows || by_columns;
}

}  // namespace

void Planner::plan_pointwise(const ir::Node& node) {
  const TensorId out = node.outputs[0];
  const Dims& shape = tensor(out).shape;
  // The first step after which all operands are there, and whether it is one to join.
  int ready = 0;
  bool joins = false;
  for (const TensorId id : node.inputs) {
    const State& s = state(id);
    if (s.step < 0) continue;
    const Expression* open = s.value >= 0 ? open_expression(s.step) : nullptr;
    const bool joinable = open != nullptr && open->shape == shape;
    const int after = joinable ? s.step : s.step + 1;
    if (after > ready || (after == ready && joinable)) joins = joinable;
    ready = std::max(ready, after);
  }
  int step = ready;
  if (!joins) {
    step = step_count();
    PointwiseStep fresh;
    fresh.expression.shape = shape;
    program_.steps.emplace_back(std::move(fresh));
  }
  Apply apply{node.op, {}, true};
  for (std::size_t i = 0; i < node.inputs.size(); ++i) {
    const TensorId id = node.inputs[i];
    apply.integer = apply.integer && !is_float(tensor(id).dtype);
    Expression& expression = *open_expression(step);
    apply.operands[i] = use(id, step, expression);
  }
  for (std::size_t i = node.inputs.size(); i < apply.operands.size(); ++i) {
    apply.operands[i] = apply.operands[0];
  }
  apply.integer = apply.integer && !is_float(tensor(out).dtype);
  produced(out, step, open_expression(step)->add({std::move(apply), tensor(out).dtype}));
}

void Planner::plan_matmul(const ir::Node& node, MatmulStep step) {
  const TensorId a = node.inputs[0];
  const TensorId b = node.inputs[1];
  const TensorId out = node.outputs[0];
  const bool integer = !is_float(tensor(a).dtype);
  const bool wide = tensor(a).dtype == DType::f64 || tensor(b).dtype == DType::f64;
  step.compute = integer ? MatmulStep::Compute::i32
                 : wide  ? MatmulStep::Compute::f64
                         : MatmulStep::Compute::f32;
  step.k = tensor(a).shape.back();
  step.a = operand(a, number_of(node));
  step.b = operand(b, number_of(node));
  step.epilogue.shape = tensor(out).shape;
  step.epilogue.wide = integer || wide;
  const int value = step.epilogue.add({Accumulator{}, tensor(out).dtype});
  program_.steps.emplace_back(std::move(step));
  produced(out, step_count() - 1, value);
}

void Planner::plan_scaled_matmul(const ir::Node& node, const ir::ScaledMatmul& op) {
  const auto scales = [&](TensorId id, bool transposed) {
    const Dims& shape = tensor(id).shape;
    BlockScales result;
    result.at = in_memory(id);
    result.block = op.block;
    if (!op.swizzled) return result;
    result.tiles_per_row = shape[shape.size() - (transposed ? 2 : 1)] / 4;
    // The order within a matrix is the memory's own, whatever the strides say of it.
    if (!is_dense_matrix(result.at.strides, shape)) {
      const Location copy = temporary(shape, result.at.dtype);
      plan_copy(result.at, copy, shape);
      result.at = copy;
    }
    return result;
  };
  MatmulStep step;
  step.a_scales = scales(node.inputs[ir::ScaledMatmul::a_scale], false);
  step.b_scales = scales(node.inputs[ir::ScaledMatmul::b_scale], true);
  plan_matmul(node, std::move(step));
}

void Planner::plan_reduce(const ir::Node& node, const ir::Reduce& op) {
  const TensorId x = node.inputs[0];
  const TensorId out = node.outputs[0];
  ReduceStep step;
  step.kind = op.kind;
  step.operand = operand(x, number_of(node));
  step.reduced.assign(tensor(x).shape.size(), false);
  for (const std::int64_t axis : op.axes) step.reduced[static_cast<std::size_t>(axis)] = true;
  step.to = stored_by_next_step(out);
  if (!op.keepdims) {
    Dims strides;
    std::size_t kept = 0;
    for (const bool reduced : step.reduced) {
      strides.push_back(reduced ? 0 : step.to.strides[kept++]);
    }
    step.to.strides = std::move(strides);
  } else {
    for (const std::int64_t axis : op.axes) step.to.strides[static_cast<std::size_t>(axis)] = 0;
  }
  program_.steps.emplace_back(std::move(step));
}

void Planner::plan_norm(const ir::Node& node, NormStep step, TensorId x, const Dims& axes) {
  const Dims& shape = tensor(x).shape;
  for (const TensorId id : node.inputs) {
    auto& slot = step.inputs.emplace_back();
    if (id != ir::kNone) slot = broadcast_location(in_memory(id), tensor(id).shape, shape);
  }
  for (const TensorId id : node.outputs) {
    auto& slot = step.outputs.emplace_back();
    if (id == ir::kNone) continue;
    slot = broadcast_location(stored_by_next_step(id), tensor(id).shape, shape);
  }
  Dims kept_axes;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    const auto axis = static_cast<std::int64_t>(i);
    const bool reduced = std::find(axes.begin(), axes.end(), axis) != axes.end();
    (reduced ? step.slice : step.kept).push_back(shape[i]);
    if (!reduced) kept_axes.push_back(axis);
  }
  std::vector<Location*> locations;
  for (auto* slots : {&step.inputs, &step.outputs}) {
    for (auto& slot : *slots) {
      if (!slot) continue;
      reorder(*slot, kept_axes, axes);
      step.wide = step.wide || slot->dtype == DType::f64;
      locations.push_back(&*slot);
    }
  }
  merge_axes(step.slice, step.kept.size(), locations);
  merge_axes(step.kept, 0, locations);
  if (step.slice.empty()) {
    step.slice.push_back(1);
    for (Location* location : locations) location->strides.push_back(0);
  }
  program_.steps.emplace_back(std::move(step));
}

void Planner::plan_attention(std::size_t n) {
  const ir::Node& node = graph_.nodes[n];
  AttentionStep step;
  step.node = static_cast<std::int32_t>(n);
  for (const TensorId id : node.inputs) {
    step.inputs.push_back(id == ir::kNone ? AttentionStep::Slot{}
                                          : AttentionStep::Slot{true, in_memory(id)});
    if (id != ir::kNone) zero_unit_strides(id, step.inputs.back().at);
  }
  for (const TensorId id : node.outputs) {
    if (id == ir::kNone) {
      step.outputs.emplace_back();
      continue;
    }
    step.outputs.push_back({true, stored_by_next_step(id)});
    zero_unit_strides(id, step.outputs.back().at);
  }
  program_.steps.emplace_back(std::move(step));
}

void Planner::zero_unit_strides(TensorId id, Location& location) const {
  for (std::size_t i = 0; i < location.strides.size(); ++i) {
    if (tensor(id).shape[i] == 1) location.strides[i] = 0;
  }
}

}  // namespace lawson::cpu
