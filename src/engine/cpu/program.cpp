#include "engine/cpu/program.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "engine/cpu/pool.h"

namespace lawson::cpu {
namespace {

using ir::TensorId;

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

class Planner {
 public:
  Planner(const ir::Graph& graph, const Kernels& kernels) : graph_{graph} {
    program_.graph = graph;
    program_.kernels = &kernels;
    program_.memory.resize(graph.tensors.size());
    states_.resize(graph.tensors.size());
    consumers_.resize(graph.tensors.size());
    for (std::size_t n = 0; n < graph.nodes.size(); ++n) {
      for (const TensorId id : graph.nodes[n].inputs) {
        if (id != ir::kNone) consumers_[static_cast<std::size_t>(id)].push_back(n);
      }
    }
  }

  Program plan() && {
    for (TensorId id = 0; id < graph_.input_count; ++id) state(id).location = own_location(id);
    for (std::size_t n = 0; n < graph_.nodes.size(); ++n) {
      const ir::Node& node = graph_.nodes[n];
      std::visit(ir::Overloaded{
                     [&](const ir::Matmul&) { plan_matmul(node); },
                     [&](const ir::Reduce& op) { plan_reduce(node, op); },
                     [&](const ir::Attention&) { plan_attention(n); },
                     [&](const ir::AttentionBackward&) { plan_attention(n); },
                     [&](const ir::CacheAppend&) { plan_attention(n); },
                     [&](const ir::Constant& op) { plan_constant(node, op); },
                     [&](const ir::Iota& op) { plan_iota(node, op); },
                     [&](const ir::Broadcast&) { plan_view(node); },
                     [&](const ir::Reshape&) { plan_view(node); },
                     [&](const ir::Transpose&) { plan_view(node); },
                     [&](const ir::Slice&) { plan_view(node); },
                     [&](const auto&) { plan_pointwise(node); },
                 },
                 node.op);
    }
    finish();
    return std::move(program_);
  }

 private:
  // How far planning has come with a tensor: computed as a value of a step, or somewhere.
  struct State {
    int step = -1;
    int value = -1;
    std::optional<Location> location;
  };

  State& state(TensorId id) { return states_[static_cast<std::size_t>(id)]; }
  const ir::Tensor& tensor(TensorId id) const { return graph_.tensor(id); }
  int step_count() const { return static_cast<int>(program_.steps.size()); }

  Location own_location(TensorId id) const {
    Location location;
    location.root = id;
    location.dtype = tensor(id).dtype;
    location.strides = tensor(id).strides;
    return location;
  }

  // A contiguous tensor in workspace of our own.
  Location temporary(const Dims& shape, DType dtype) {
    Location location;
    location.root = static_cast<Root>(program_.memory.size());
    location.dtype = dtype;
    location.strides = contiguous_strides(shape);
    program_.memory.emplace_back();
    program_.memory.back().bytes =
        static_cast<std::int64_t>(byte_size(dtype, element_count(shape).value_or(0)));
    return location;
  }

  // Makes the tensor of an intermediate need workspace.
  void allocate(TensorId id) {
    if (graph_.is_input(id) || graph_.is_output(id)) return;
    program_.memory[static_cast<std::size_t>(id)].bytes = static_cast<std::int64_t>(
        byte_size(tensor(id).dtype, element_count(tensor(id).shape).value_or(0)));
  }

  // The expression whose values other pointwise ops may join.
  Expression* open_expression(int step) {
    if (step < 0) return nullptr;
    Step& s = program_.steps[static_cast<std::size_t>(step)];
    if (auto* pointwise = std::get_if<PointwiseStep>(&s)) return &pointwise->expression;
    if (auto* matmul = std::get_if<MatmulStep>(&s)) return &matmul->epilogue;
    return nullptr;
  }

  // Where a tensor is stored; from now on it is.
  Location stored(TensorId id) {
    State& s = state(id);
    if (!s.location) {
      s.location = own_location(id);
      allocate(id);
      open_expression(s.step)->sinks.push_back({s.value, *s.location});
    }
    return *s.location;
  }

  // The number of a tensor as a value of an expression of `step` over `shape`.
  int use(TensorId id, int step, Expression& expression) {
    const State& s = state(id);
    if (s.step == step && s.value >= 0) return s.value;
    const Location location = broadcast_location(stored(id), tensor(id).shape, expression.shape);
    return expression.add({location, tensor(id).dtype});
  }

  void produced(TensorId id, int step, int value) {
    state(id).step = step;
    state(id).value = value;
    if (graph_.is_output(id)) stored(id);
  }

  // Copies a location to another, in a step of its own.
  void plan_copy(const Location& from, const Location& to, const Dims& shape) {
    PointwiseStep step;
    step.expression.shape = shape;
    const int value = step.expression.add({from, from.dtype});
    step.expression.sinks.push_back({value, to});
    program_.steps.emplace_back(std::move(step));
  }

  // A result that is only a way to read something else; outputs get a copy.
  void place(TensorId id, const Location& location) {
    state(id).location = location;
    if (!graph_.is_output(id)) return;
    state(id).step = step_count();
    plan_copy(location, own_location(id), tensor(id).shape);
    state(id).location = own_location(id);
  }

  void plan_pointwise(const ir::Node& node) {
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

  // The operand of a matmul or a reduction: the pointwise group that computes it, when nobody else
  // needs that group, or the tensor read from memory.
  Expression operand(TensorId id, std::size_t reader) {
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

  // Whether all that a step computes is read inside it, but for `id`, read once by `reader`.
  bool private_to(int step, TensorId id, std::size_t reader) {
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

  std::size_t number_of(const ir::Node& node) const {
    return static_cast<std::size_t>(&node - graph_.nodes.data());
  }

  void plan_matmul(const ir::Node& node) {
    const TensorId a = node.inputs[0];
    const TensorId b = node.inputs[1];
    const TensorId out = node.outputs[0];
    MatmulStep step;
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

  void plan_reduce(const ir::Node& node, const ir::Reduce& op) {
    const TensorId x = node.inputs[0];
    const TensorId out = node.outputs[0];
    ReduceStep step;
    step.kind = op.kind;
    step.operand = operand(x, number_of(node));
    step.reduced.assign(tensor(x).shape.size(), false);
    for (const std::int64_t axis : op.axes) step.reduced[static_cast<std::size_t>(axis)] = true;
    allocate(out);
    step.to = own_location(out);
    state(out).location = step.to;
    state(out).step = step_count();
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

  void plan_attention(std::size_t n) {
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
      allocate(id);
      state(id).location = own_location(id);
      state(id).step = step_count();
      step.outputs.push_back({true, own_location(id)});
      zero_unit_strides(id, step.outputs.back().at);
    }
    program_.steps.emplace_back(std::move(step));
  }

  // So that attention may index operands that broadcast as if they did not.
  void zero_unit_strides(TensorId id, Location& location) const {
    for (std::size_t i = 0; i < location.strides.size(); ++i) {
      if (tensor(id).shape[i] == 1) location.strides[i] = 0;
    }
  }

  // A tensor as memory, also when it is a constant or an index.
  Location in_memory(TensorId id) {
    Location location = stored(id);
    if (location.kind == Location::Kind::memory) return location;
    Location copy = temporary(tensor(id).shape, tensor(id).dtype);
    plan_copy(location, copy, tensor(id).shape);
    return copy;
  }

  void plan_constant(const ir::Node& node, const ir::Constant& op) {
    Location location;
    location.kind = Location::Kind::constant;
    location.dtype = tensor(node.outputs[0]).dtype;
    location.constant = round_to(location.dtype, op.value);
    place(node.outputs[0], location);
  }

  void plan_iota(const ir::Node& node, const ir::Iota& op) {
    Location location;
    location.kind = Location::Kind::index;
    location.dtype = tensor(node.outputs[0]).dtype;
    location.strides.assign(op.shape.size(), 0);
    location.strides[static_cast<std::size_t>(op.axis)] = 1;
    place(node.outputs[0], location);
  }

  void plan_view(const ir::Node& node) {
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

  static void visit_memory(const Expression& expression, const auto& visit) {
    for (const Value& value : expression.values) {
      const auto* location = std::get_if<Location>(&value.from);
      if (location != nullptr && location->kind == Location::Kind::memory) visit(location->root);
    }
    for (const Sink& sink : expression.sinks) visit(sink.to.root);
  }

  static void visit_memory(const Step& step, const auto& visit) {
    std::visit(ir::Overloaded{
                   [&](const PointwiseStep& s) { visit_memory(s.expression, visit); },
                   [&](const MatmulStep& s) {
                     visit_memory(s.a, visit);
                     visit_memory(s.b, visit);
                     visit_memory(s.epilogue, visit);
                   },
                   [&](const ReduceStep& s) {
                     visit_memory(s.operand, visit);
                     visit(s.to.root);
                   },
                   [&](const AttentionStep& s) {
                     for (const auto& slot : s.inputs) {
                       if (slot.present) visit(slot.at.root);
                     }
                     for (const auto& slot : s.outputs) {
                       if (slot.present) visit(slot.at.root);
                     }
                   },
               },
               step);
  }

  void finish() {
    std::erase_if(program_.steps, [](const Step& step) {
      const auto* pointwise = std::get_if<PointwiseStep>(&step);
      return pointwise != nullptr && pointwise->expression.sinks.empty();
    });
    for (Step& step : program_.steps) {
      if (auto* pointwise = std::get_if<PointwiseStep>(&step)) merge_axes(pointwise->expression);
      const std::size_t bytes = std::visit(
          ir::Overloaded{
              [&](const MatmulStep& s) { return matmul_workspace(*program_.kernels, s); },
              [&](const AttentionStep& s) {
                return attention_workspace(*program_.kernels, graph_, s);
              },
              [](const auto&) { return std::size_t{0}; },
          },
          step);
      program_.step_memory.push_back(bytes == 0 ? -1 : static_cast<Root>(program_.memory.size()));
      if (bytes > 0) {
        program_.memory.emplace_back();
        program_.memory.back().bytes = static_cast<std::int64_t>(bytes);
      }
    }
    for (int i = 0; i < step_count(); ++i) {
      const auto touch = [&](Root root) {
        Program::Memory& memory = program_.memory[static_cast<std::size_t>(root)];
        if (memory.first_step < 0) memory.first_step = i;
        memory.last_step = i;
      };
      visit_memory(program_.steps[static_cast<std::size_t>(i)], touch);
      const Root own = program_.step_memory[static_cast<std::size_t>(i)];
      if (own >= 0) touch(own);
    }
    assign_offsets();
  }

  // First fit among the pieces that are alive at the same time.
  void assign_offsets() {
    std::vector<Program::Memory*> placed;
    std::int64_t total = 0;
    for (Program::Memory& memory : program_.memory) {
      if (memory.bytes == 0 || memory.first_step < 0) continue;
      const auto size = static_cast<std::int64_t>(align_up(static_cast<std::size_t>(memory.bytes)));
      std::int64_t offset = 0;
      for (bool moved = true; moved;) {
        moved = false;
        for (const Program::Memory* other : placed) {
          const auto other_end =
              other->offset +
              static_cast<std::int64_t>(align_up(static_cast<std::size_t>(other->bytes)));
          const bool alive =
              other->first_step <= memory.last_step && memory.first_step <= other->last_step;
          if (alive && offset < other_end && other->offset < offset + size) {
            offset = other_end;
            moved = true;
          }
        }
      }
      memory.offset = offset;
      placed.push_back(&memory);
      total = std::max(total, offset + size);
    }
    program_.workspace_bytes = total;
  }

  const ir::Graph& graph_;
  Program program_;
  std::vector<State> states_;
  std::vector<std::vector<std::size_t>> consumers_;
};

}  // namespace

Program make_program(const ir::Graph& graph, const Kernels& kernels) {
  return Planner{graph, kernels}.plan();
}

Status run_program(const Program& program, std::vector<std::byte*> roots, std::byte* workspace) {
  roots.resize(program.memory.size(), nullptr);
  for (std::size_t i = 0; i < program.memory.size(); ++i) {
    if (program.memory[i].bytes > 0) roots[i] = workspace + program.memory[i].offset;
  }
  const Kernels& kernels = *program.kernels;
  for (std::size_t i = 0; i < program.steps.size(); ++i) {
    const Root own = program.step_memory[i];
    std::byte* step_workspace = own < 0 ? nullptr : roots[static_cast<std::size_t>(own)];
    LAWSON_CHECK(std::visit(
        ir::Overloaded{
            [&](const PointwiseStep& s) { return run_expression(kernels, s.expression, roots); },
            [&](const MatmulStep& s) { return run_matmul(kernels, s, roots, step_workspace); },
            [&](const ReduceStep& s) { return run_reduce(kernels, s, roots); },
            [&](const AttentionStep& s) {
              return run_attention(kernels, program.graph, s, roots, step_workspace);
            },
        },
        program.steps[i]));
  }
  return {};
}

}  // namespace lawson::cpu
