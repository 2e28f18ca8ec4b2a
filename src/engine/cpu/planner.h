// Turns a graph into the steps of a program. Private to planner.cpp, planner_steps.cpp and
// planner_views.cpp.
#pragma once

#include <optional>
#include <vector>

#include "engine/cpu/program.h"

namespace lawson::cpu {

class Planner {
 public:
  Planner(const ir::Graph& graph, const Kernels& kernels);

  // Steps and memory, without places in the workspace.
  Program plan() &&;

 private:
  using TensorId = ir::TensorId;

  // How far planning has come with a tensor: computed as a value of a step, or somewhere.
  struct State {
    int step = -1;
    int value = -1;
    std::optional<Location> location;
  };

  // Where the parts of a concatenation are stored at once: the result's memory from `start` on.
  struct Home {
    TensorId whole = ir::kNone;
    std::int64_t axis = 0;
    std::int64_t start = 0;
  };

  State& state(TensorId id) { return states_[static_cast<std::size_t>(id)]; }
  const ir::Tensor& tensor(TensorId id) const { return graph_.tensor(id); }
  int step_count() const { return static_cast<int>(program_.steps.size()); }
  std::size_t number_of(const ir::Node& node) const {
    return static_cast<std::size_t>(&node - graph_.nodes.data());
  }

  // ---- planner.cpp: tensors and the expressions that compute them

  void claim_homes(const ir::Node& node, const ir::Concat& op);
  Location own_location(TensorId id) const;
  Location part_location(const Home& home) const;
  // A contiguous tensor in workspace of our own.
  Location temporary(const Dims& shape, DType dtype);
  // Makes the tensor of an intermediate need workspace.
  void allocate(TensorId id);
  // The expression whose values other pointwise ops may join.
  Expression* open_expression(int step);
  // Where a tensor is stored; from now on it is.
  Location stored(TensorId id);
  // A tensor as memory, also when it is a constant or an index.
  Location in_memory(TensorId id);
  // The number of a tensor as a value of an expression of `step`.
  int use(TensorId id, int step, Expression& expression);
  void produced(TensorId id, int step, int value);
  // The result of a step that is about to be added and that stores it.
  Location stored_by_next_step(TensorId id);
  // Copies a location to another, in a step of its own.
  void plan_copy(const Location& from, const Location& to, const Dims& shape);
  // A result that is only a way to read something else; outputs get a copy.
  void place(TensorId id, const Location& location);
  // The operand of a matmul or a reduction: the pointwise group that computes it, when nobody else
  // needs that group, or the tensor read from memory.
  Expression operand(TensorId id, std::size_t reader);
  // Whether all that a step computes is read inside it, but for `id`, read once by `reader`.
  bool private_to(int step, TensorId id, std::size_t reader);

  // ---- planner_steps.cpp: ops that compute

  void plan_pointwise(const ir::Node& node);
  void plan_matmul(const ir::Node& node, MatmulStep step);
  void plan_scaled_matmul(const ir::Node& node, const ir::ScaledMatmul& op);
  void plan_reduce(const ir::Node& node, const ir::Reduce& op);
  void plan_norm(const ir::Node& node, NormStep step, TensorId x, const Dims& axes);
  void plan_attention(std::size_t n);
  // So that attention may index operands that broadcast as if they did not.
  void zero_unit_strides(TensorId id, Location& location) const;

  // ---- planner_views.cpp: ops that move or make up elements

  void plan_constant(const ir::Node& node, const ir::Constant& op);
  void plan_iota(const ir::Node& node, const ir::Iota& op);
  void plan_view(const ir::Node& node);
  void plan_concat(const ir::Node& node, const ir::Concat& op);

  const ir::Graph& graph_;
  Program program_;
  std::vector<State> states_;
  std::vector<std::vector<std::size_t>> consumers_;
  std::vector<Home> homes_;
};

}  // namespace lawson::cpu
