// Inside gradient: the graph that is being written, and formulas in it.
#pragma once

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ir/graph.h"

namespace lawson::ir {

// "Old" tensors are those of the forward graph, other ids those of the graph that is being written.
class Tape {
 public:
  // `differentiable`: per old tensor, whether its value depends on what is differentiated by, and
  // whether a float output depends on it.
  Tape(const Graph& forward, std::vector<bool> differentiable)
      : forward_{forward},
        differentiable_{std::move(differentiable)},
        builder_{forward.name + ".gradient"},
        values_(forward.tensors.size(), kNone),
        producers_(forward.tensors.size(), nullptr),
        cotangents_(forward.tensors.size()) {
    builder_.strict(forward.strict);
    for (const Node& node : forward.nodes) {
      for (const TensorId id : node.outputs) {
        if (id != kNone) producers_[static_cast<std::size_t>(id)] = &node;
      }
    }
  }

  const Graph& forward() const { return forward_; }
  const Tensor& old(TensorId id) const { return forward_.tensor(id); }
  bool wanted(TensorId old) const {
    return old != kNone && differentiable_[static_cast<std::size_t>(old)];
  }

  // The inputs, and the forward's nodes with the results that their backward reads.
  Status write_forward(const std::vector<std::string>& gradients);
  TensorId value(TensorId old) const {
    return old == kNone ? kNone : values_[static_cast<std::size_t>(old)];
  }
  // The node that makes an old tensor; nullptr for an input.
  const Node* producer(TensorId old) const { return producers_[static_cast<std::size_t>(old)]; }
  // A result that the forward graph itself may not have asked for.
  TensorId result(const Node& node, std::size_t slot) const;

  // The dtype that the cotangent of a tensor is carried in.
  static DType work(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }
  // Adds a part of a tensor's cotangent; dims that the op broadcast are still to be summed.
  void add(TensorId old, TensorId part);
  // Their sum, in the tensor's shape and its own work dtype; kNone where there is none.
  TensorId cotangent(TensorId old);

  // From here on formulas compute in this dtype, for this node.
  void begin(const Node& node, DType dtype);
  DType dtype() const { return dtype_; }

  // The first error makes everything after it kNone.
  TensorId emit(Op op, std::vector<TensorId> in, DType dtype);
  TensorId emit(Op op, std::vector<TensorId> in) {
    return emit(std::move(op), std::move(in), dtype_);
  }
  std::vector<TensorId> emit_all(Op op, std::vector<TensorId> in, const std::vector<bool>& results);
  TensorId constant(double number) { return emit(Constant{number}, {}); }
  TensorId convert(TensorId x, DType to);
  TensorId reshape(TensorId x, const Dims& shape);
  TensorId broadcast(TensorId x, const Dims& shape);
  TensorId zeros(const Dims& shape) { return broadcast(constant(0), shape); }
  TensorId concat(const std::vector<TensorId>& parts, std::size_t axis);
  Dims shape(TensorId x) const;
  DType dtype_of(TensorId x) const { return x == kNone ? dtype_ : builder_.tensor(x).dtype; }

  const Status& status() const { return failure_; }
  void fail(Error error) {
    if (failure_.ok()) failure_ = std::move(error);
  }

  // The gradient of each input as an output of that name and dtype.
  Result<Graph> finish(const std::vector<std::pair<TensorId, std::string>>& gradients) &&;

 private:
  // The cotangent of an input, to be rounded to its dtype.
  TensorId gradient(TensorId input);
  TensorId sum_to(TensorId x, const Dims& shape, DType dtype);
  std::string unused_name(std::string name) const;
  Status write_node(std::size_t n);

  const Graph& forward_;
  std::vector<bool> differentiable_;
  Builder builder_;
  std::vector<TensorId> values_;
  std::vector<const Node*> producers_;
  std::map<std::pair<const Node*, std::size_t>, TensorId> results_;
  std::size_t emitted_ = 0;
  std::vector<std::vector<TensorId>> cotangents_;
  std::set<std::string> reserved_;
  DType dtype_ = DType::f32;
  Status failure_;
};

// A tensor in a formula.
struct Term {
  Tape* tape = nullptr;
  TensorId id = kNone;
};

Term operator+(Term a, Term b);
Term operator-(Term a, Term b);
Term operator*(Term a, Term b);
Term operator/(Term a, Term b);
Term operator+(Term a, double b);
Term operator-(double a, Term b);
Term operator*(double a, Term b);
Term operator-(Term a);
Term apply(UnaryKind kind, Term x);
Term pow(Term a, Term b);
Term compare(CompareKind kind, Term a, Term b);
Term compare(CompareKind kind, Term a, double b);
Term both(Term a, Term b);
Term select(Term predicate, Term a, Term b);
Term select(Term predicate, Term a, double b);
Term select(Term predicate, double a, Term b);
Term reduce(ReduceKind kind, Term x, const Dims& axes);  // keeps dims

// Adds to the cotangents of a node's operands what follows from those of its results.
Status differentiate(Tape& tape, const Node& node);
// The same for norms and attention.
Status differentiate(Tape& tape, const Node& node, const Norm& norm);
Status differentiate(Tape& tape, const Node& node, const Attention& attention);

}  // namespace lawson::ir
