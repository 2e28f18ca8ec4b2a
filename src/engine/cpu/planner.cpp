#include "engine/cpu/planner.h"

#include <algorithm>
#include <utility>

namespace lawson::cpu {

Planner::Planner(const ir::Graph& graph, const Kernels& kernels) : graph_{graph} {
  program_.graph = graph;
  program_.kernels = &kernels;
  program_.memory.resize(graph.tensors.size());
  states_.resize(graph.tensors.size());
  consumers_.resize(graph.tensors.size());
  homes_.resize(graph.tensors.size());
  for (std::size_t n = 0; n < graph.nodes.size(); ++n) {
    const ir::Node& node = graph.nodes[n];
    for (const TensorId id : node.inputs) {
      if (id != ir::kNone) consumers_[static_cast<std::size_t>(id)].push_back(n);
    }
    if (const auto* concat = std::get_if<ir::Concat>(&node.op)) claim_homes(node, *concat);
  }
}

Program Planner::plan() && {
  for (TensorId id = 0; id < graph_.input_count; ++id) state(id).location = own_location(id);
  for (std::size_t n = 0; n < graph_.nodes.size(); ++n) {
    const ir::Node& node = graph_.nodes[n];
    const auto plan_pointwise_of = [&](const auto&) { plan_pointwise(node); };
    std::visit(ir::Overloaded{
                   [&](const ir::Matmul&) { plan_matmul(node, {}); },
                   [&](const ir::ScaledMatmul& op) { plan_scaled_matmul(node, op); },
                   [&](const ir::Reduce& op) { plan_reduce(node, op); },
                   [&](const ir::Norm& op) {
                     NormStep step;
                     step.kind = op.kind;
                     step.eps = op.eps;
                     plan_norm(node, std::move(step), node.inputs[ir::Norm::x], op.axes);
                   },
                   [&](const ir::NormBackward& op) {
                     NormStep step;
                     step.kind = op.kind;
                     step.backward = true;
                     plan_norm(node, std::move(step), node.inputs[ir::NormBackward::x], op.axes);
                   },
                   [&](const ir::Attention&) { plan_attention(n); },
                   [&](const ir::AttentionBackward&) { plan_attention(n); },
                   [&](const ir::CacheAppend&) { plan_attention(n); },
                   [&](const ir::Constant& op) { plan_constant(node, op); },
                   [&](const ir::Iota& op) { plan_iota(node, op); },
                   [&](const ir::Broadcast&) { plan_view(node); },
                   [&](const ir::Reshape&) { plan_view(node); },
                   [&](const ir::Transpose&) { plan_view(node); },
                   [&](const ir::Slice&) { plan_view(node); },
                   [&](const ir::Concat& op) { plan_concat(node, op); },
                   [&](const ir::Convert& op) { plan_pointwise_of(op); },
                   [&](const ir::Unary& op) { plan_pointwise_of(op); },
                   [&](const ir::UnaryGrad& op) { plan_pointwise_of(op); },
                   [&](const ir::Binary& op) { plan_pointwise_of(op); },
                   [&](const ir::Compare& op) { plan_pointwise_of(op); },
                   [&](const ir::Logical& op) { plan_pointwise_of(op); },
                   [&](const ir::Select& op) { plan_pointwise_of(op); },
                   [&](const ir::Clamp& op) { plan_pointwise_of(op); },
               },
               node.op);
  }
  std::erase_if(program_.steps, [](const Step& step) {
    const auto* pointwise = std::get_if<PointwiseStep>(&step);
    return pointwise != nullptr && pointwise->expression.sinks.empty();
  });
  for (Step& step : program_.steps) {
    if (auto* pointwise = std::get_if<PointwiseStep>(&step)) merge_axes(pointwise->expression);
  }
  return std::move(program_);
}

void Planner::claim_homes(const ir::Node& node, const ir::Concat& op) {
  std::int64_t start = 0;
  for (const TensorId id : node.inputs) {
    Home& home = homes_[static_cast<std::size_t>(id)];
    const bool is_free = !graph_.is_input(id) && !graph_.is_output(id) && home.whole == ir::kNone;
    if (is_free) home = {node.outputs[0], op.axis, start};
    start += tensor(id).shape[static_cast<std::size_t>(op.axis)];
  }
}

Location Planner::own_location(TensorId id) const {
  const Home& home = homes_[static_cast<std::size_t>(id)];
  if (home.whole != ir::kNone) return part_location(home);
  Location location;
  location.root = id;
  location.dtype = tensor(id).dtype;
  location.strides = tensor(id).strides;
  return location;
}

Location Planner::part_location(const Home& home) const {
  Location location = own_location(home.whole);
  location.offset += home.start * location.strides[static_cast<std::size_t>(home.axis)];
  return location;
}

Location Planner::temporary(const Dims& shape, DType dtype) {
  Location location;
  location.root = static_cast<Root>(program_.memory.size());
  location.dtype = dtype;
  location.strides = contiguous_strides(shape);
  program_.memory.emplace_back();
  program_.memory.back().bytes =
      static_cast<std::int64_t>(byte_size(dtype, element_count(shape).value_or(0)));
  return location;
}

void Planner::allocate(TensorId id) {
  const Home& home = homes_[static_cast<std::size_t>(id)];
  if (home.whole != ir::kNone) {
    allocate(home.whole);
    return;
  }
  if (graph_.is_input(id) || graph_.is_output(id)) return;
  program_.memory[static_cast<std::size_t>(id)].bytes = static_cast<std::int64_t>(
      byte_size(tensor(id).dtype, element_count(tensor(id).shape).value_or(0)));
}

Expression* Planner::open_expression(int step) {
  if (step < 0) return nullptr;
  Step& s = program_.steps[static_cast<std::size_t>(step)];
  if (auto* pointwise = std::get_if<PointwiseStep>(&s)) return &pointwise->expression;
  if (auto* matmul = std::get_if<MatmulStep>(&s)) return &matmul->epilogue;
  return nullptr;
}

Location Planner::stored(TensorId id) {
  State& s = state(id);
  if (!s.location) {
    s.location = own_location(id);
    allocate(id);
    open_expression(s.step)->sinks.push_back({s.value, *s.location});
  }
  return *s.location;
}

Location Planner::in_memory(TensorId id) {
  Location location = stored(id);
  if (location.kind == Location::Kind::memory) return location;
  Location copy = temporary(tensor(id).shape, tensor(id).dtype);
  plan_copy(location, copy, tensor(id).shape);
  return copy;
}

int Planner::use(TensorId id, int step, Expression& expression) {
  const State& s = state(id);
  if (s.step == step && s.value >= 0) return s.value;
  const Location location = broadcast_location(stored(id), tensor(id).shape, expression.shape);
  return expression.add({location, tensor(id).dtype});
}

void Planner::produced(TensorId id, int step, int value) {
  state(id).step = step;
  state(id).value = value;
  if (graph_.is_output(id)) stored(id);
}

Location Planner::stored_by_next_step(TensorId id) {
  allocate(id);
  state(id).location = own_location(id);
  state(id).step = step_count();
  return *state(id).location;
}

void Planner::plan_copy(const Location& from, const Location& to, const Dims& shape) {
  PointwiseStep step;
  step.expression.shape = shape;
  const int value = step.expression.add({from, from.dtype});
  step.expression.sinks.push_back({value, to});
  program_.steps.emplace_back(std::move(step));
}

void Planner::place(TensorId id, const Location& location) {
  state(id).location = location;
  if (!graph_.is_output(id)) return;
  state(id).step = step_count();
  plan_copy(location, own_location(id), tensor(id).shape);
  state(id).location = own_location(id);
}

Expression Planner::operand(TensorId id, std::size_t reader) {
  const int step = state(id).step;
  auto* group = step < 0
                    ? nullptr
                    : std::get_if<PointwiseStep>(&program_.steps[static_cast<std::size_t>(step)]);
  if (group != nullptr && state(id).value >= 0 && group->expression.sinks.empty() &&
      private_to(step, id, reader)) {
    Expression expression = std::move(group->expression);
    expression.result = state(id).value;
    group->expression = Expression{{0}, false, {}, {}, 0};
    return expression;
  }
  Expression expression;
  expression.shape = tensor(id).shape;
  expression.result = expression.add({stored(id), tensor(id).dtype});
  return expression;
}

bool Planner::private_to(int step, TensorId id, std::size_t reader) {
  for (std::size_t t = 0; t < states_.size(); ++t) {
    if (states_[t].step != step) continue;
    const auto& readers = consumers_[t];
    if (static_cast<TensorId>(t) == id) {
      if (readers.size() != 1 || readers[0] != reader) return false;
      continue;
    }
    for (const std::size_t n : readers) {
      const TensorId result = graph_.nodes[n].outputs[0];
      if (result == ir::kNone || state(result).step != step) return false;
    }
  }
  return true;
}

}  // namespace lawson::cpu
