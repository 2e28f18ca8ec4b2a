#include "engine/cudnn/turned.h"

#include <algorithm>
#include <utility>

namespace lawson::cudnn {
namespace {

// All tensors but scalars are brought to one rank first, with dims of 1 in front.
class Turn {
 public:
  explicit Turn(const ir::Graph& graph) : graph_{graph}, result_{graph} {
    for (const ir::Tensor& tensor : graph.tensors) rank_ = std::max(rank_, tensor.shape.size());
  }

  std::optional<ir::Graph> run() && {
    bool product = false;
    for (ir::Tensor& tensor : result_.tensors) lift(tensor);
    for (ir::Node& node : result_.nodes) {
      product = product || std::holds_alternative<ir::Matmul>(node.op);
      if (!turn(node)) return std::nullopt;
    }
    if (!product) return std::nullopt;
    for (ir::Tensor& tensor : result_.tensors) {
      if (tensor.shape.empty()) continue;
      exchange(tensor.shape);
      exchange(tensor.strides);
    }
    return std::move(result_);
  }

 private:
  static void exchange(Dims& dims) { std::swap(dims[dims.size() - 1], dims[dims.size() - 2]); }

  void lift(ir::Tensor& tensor) const {
    if (tensor.shape.empty()) return;
    const std::size_t missing = rank_ - tensor.shape.size();
    tensor.shape.insert(tensor.shape.begin(), missing, 1);
    tensor.strides.insert(tensor.strides.begin(), missing, 1);
  }

  // The axis `axis` of a tensor that had the given rank.
  std::int64_t turned_axis(std::int64_t axis, std::size_t rank) const {
    const auto last = static_cast<std::int64_t>(rank_) - 1;
    const std::int64_t lifted = axis + static_cast<std::int64_t>(rank_ - rank);
    return lifted == last ? last - 1 : lifted == last - 1 ? last : lifted;
  }

  Dims turned_shape(Dims shape) const {
    if (shape.empty()) return shape;
    shape.insert(shape.begin(), rank_ - shape.size(), 1);
    exchange(shape);
    return shape;
  }

  bool turn(ir::Node& node) {
    const ir::TensorId to = node.outputs.empty() ? ir::kNone : node.outputs[0];
    if (to == ir::kNone) return false;
    return std::visit(
        ir::Overloaded{
            [&](ir::Matmul&) {
              std::swap(node.inputs[0], node.inputs[1]);
              return true;
            },
            [&](ir::Constant&) { return !result_.is_output(to); },
            [&](ir::Iota& iota) {
              iota.axis = turned_axis(iota.axis, iota.shape.size());
              iota.shape = turned_shape(iota.shape);
              return true;
            },
            [&](ir::Broadcast& broadcast) {
              broadcast.shape = turned_shape(broadcast.shape);
              return true;
            },
            [&](ir::Transpose& transpose) {
              const std::size_t rank = transpose.perm.size();
              Dims perm(rank_);
              for (std::size_t i = 0; i < rank_; ++i) perm[i] = static_cast<std::int64_t>(i);
              for (std::size_t i = 0; i < rank; ++i) {
                perm[static_cast<std::size_t>(turned_axis(static_cast<std::int64_t>(i), rank))] =
                    turned_axis(transpose.perm[i], rank);
              }
              // Dims in front of a lower rank are 1 and are where they were, turned.
              for (std::size_t i = 0; i < rank_ - rank; ++i) {
                const auto axis = static_cast<std::int64_t>(i);
                perm[static_cast<std::size_t>(turned_axis(axis, rank_))] = turned_axis(axis, rank_);
              }
              transpose.perm = std::move(perm);
              return true;
            },
            [&](ir::Reduce& reduce) {
              const std::size_t rank = graph_.tensor(node.inputs[0]).shape.size();
              ir::Tensor& reduced = result_.tensors[static_cast<std::size_t>(to)];
              if (!reduce.keepdims && !keep(reduce, rank, to, reduced)) return false;
              for (std::int64_t& axis : reduce.axes) axis = turned_axis(axis, rank);
              std::sort(reduce.axes.begin(), reduce.axes.end());
              return true;
            },
            [](ir::Convert&) { return true; },
            [](ir::Unary&) { return true; },
            [](ir::UnaryGrad&) { return true; },
            [](ir::Binary&) { return true; },
            [](ir::Compare&) { return true; },
            [](ir::Logical&) { return true; },
            [](ir::Select&) { return true; },
            [](ir::Clamp&) { return true; },
            [](auto&) { return false; },
        },
        node.op);
  }

  // A reduction that keeps its axes as 1; only where nothing reads the result in its own shape.
  bool keep(ir::Reduce& reduce, std::size_t rank, ir::TensorId to, ir::Tensor& reduced) const {
    for (const ir::Node& node : graph_.nodes) {
      if (std::find(node.inputs.begin(), node.inputs.end(), to) != node.inputs.end()) return false;
    }
    const ir::Tensor& written = graph_.tensor(to);
    Dims shape;
    Dims strides;
    std::size_t at = 0;
    for (std::size_t axis = 0; axis < rank; ++axis) {
      const bool gone = std::find(reduce.axes.begin(), reduce.axes.end(),
                                  static_cast<std::int64_t>(axis)) != reduce.axes.end();
      shape.push_back(gone ? 1 : written.shape[at]);
      strides.push_back(gone ? 1 : written.strides[at]);
      at += gone ? 0 : 1;
    }
    reduce.keepdims = true;
    reduced.shape = std::move(shape);
    reduced.strides = std::move(strides);
    lift(reduced);
    return true;
  }

  const ir::Graph& graph_;
  ir::Graph result_;
  std::size_t rank_ = 2;
};

}  // namespace

std::optional<ir::Graph> turned(const ir::Graph& graph) {
  return Turn{graph}.run();
}

std::string turned_name(std::string_view plan) {
  return std::string{kTurned}.append(plan);
}

bool is_turned(std::string_view plan) {
  return plan.starts_with(kTurned);
}

std::string_view plain_name(std::string_view plan) {
  return is_turned(plan) ? plan.substr(kTurned.size()) : plan;
}

}  // namespace lawson::cudnn
