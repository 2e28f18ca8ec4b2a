#include "ir/graph.h"

#include <algorithm>
#include <functional>
#include <iterator>

#include "ir/infer.h"

namespace lawson::ir {
namespace {

Status check_layout(const Tensor& tensor) {
  const auto count = element_count(tensor.shape);
  if (tensor.shape.size() > static_cast<std::size_t>(kMaxRank)) {
    return invalid("tensor '{}': rank {} is more than {}", tensor.name, tensor.shape.size(),
                   kMaxRank);
  }
  for (const std::int64_t dim : tensor.shape) {
    if (dim < 0 || dim > kMaxDim) {
      return invalid("tensor '{}': dim {} is not in [0, {}]", tensor.name, dim, kMaxDim);
    }
  }
  if (!count || *count > kMaxElements) {
    return invalid("tensor '{}': shape {} has more than {} elements", tensor.name,
                   to_string(tensor.shape), kMaxElements);
  }
  if (tensor.strides.size() != tensor.shape.size()) {
    return invalid("tensor '{}': {} strides for rank {}", tensor.name, tensor.strides.size(),
                   tensor.shape.size());
  }
  const auto extent = storage_extent(tensor.shape, tensor.strides);
  if (!extent || *extent > kMaxElements) {
    return invalid("tensor '{}': strides {} reach beyond {} elements or are negative", tensor.name,
                   to_string(tensor.strides), kMaxElements);
  }
  if (tensor.alignment < 1 || tensor.alignment > 4096 ||
      (tensor.alignment & (tensor.alignment - 1)) != 0) {
    return invalid("tensor '{}': alignment {} is not a power of two up to 4096 bytes", tensor.name,
                   tensor.alignment);
  }
  return {};
}

// An output must not let two indices share one element.
bool overlaps(const Tensor& tensor) {
  if (element_count(tensor.shape) == 0) return false;
  std::vector<std::pair<std::int64_t, std::int64_t>> axes;
  for (std::size_t i = 0; i < tensor.shape.size(); ++i) {
    if (tensor.shape[i] > 1) axes.emplace_back(tensor.strides[i], tensor.shape[i]);
  }
  std::sort(axes.begin(), axes.end());
  std::int64_t reach = 1;  // elements covered by the axes so far
  for (const auto& [stride, dim] : axes) {
    if (stride < reach) return true;
    reach = stride * (dim - 1) + reach;
  }
  return false;
}

// Which results may be left out, and which there are only with their operand.
Status check_result(const Op& op, std::size_t slot, bool wanted,
                    const std::vector<const Tensor*>& operands) {
  using Back = AttentionBackward;
  const auto needs = [&](bool there, std::string_view result, std::string_view what) -> Status {
    if (!wanted || there) return {};
    return invalid("{}: {} needs {}", op_name(op), result, what);
  };
  if (const auto* attention = std::get_if<Attention>(&op)) {
    if (slot == Attention::dropped) return needs(attention->rule.dropout > 0, "dropped", "dropout");
    if (wanted || slot != Attention::o) return {};
  } else if (std::holds_alternative<Back>(op) && slot == Back::dbias) {
    return needs(operands[Back::bias] != nullptr, "dbias", "the operand bias");
  } else if (std::holds_alternative<Back>(op) && slot == Back::dsink) {
    return needs(operands[Back::sink] != nullptr, "dsink", "the operand sink");
  } else if (const auto* norm = std::get_if<Norm>(&op); norm != nullptr && slot != Norm::y) {
    return needs(slot != Norm::mean || norm->kind == NormKind::layer, "mean", "a layer_norm");
  } else if (wanted || std::holds_alternative<NormBackward>(op)) {
    return {};
  }
  return invalid("{}: result {} has no name", op_name(op), slot);
}

std::vector<const Tensor*> operands_of(const Graph& graph, const Node& node) {
  std::vector<const Tensor*> operands;
  for (const TensorId id : node.inputs) {
    operands.push_back(id == kNone ? nullptr : &graph.tensor(id));
  }
  return operands;
}

}  // namespace

Result<TensorId> Builder::input(Tensor tensor) {
  if (tensor.name.empty()) return invalid("an input has no name");
  if (find(tensor.name)) return invalid("the name '{}' is used twice", tensor.name);
  if (tensor.strides.empty()) tensor.strides = contiguous_strides(tensor.shape);
  LAWSON_CHECK(check_layout(tensor));
  const auto id = static_cast<TensorId>(graph_.tensors.size());
  graph_.tensors.push_back(std::move(tensor));
  inputs_.push_back(id);
  return id;
}

Result<std::vector<TensorId>> Builder::add(Op op, std::vector<TensorId> inputs,
                                           std::vector<ResultSpec> results) {
  // Trailing operands that are optional may be left away.
  if (inputs.size() < input_slots(op) && !slot_names(op).empty()) {
    inputs.resize(input_slots(op), kNone);
  }
  std::vector<const Tensor*> operands;
  for (const TensorId id : inputs) {
    operands.push_back(id == kNone ? nullptr : &graph_.tensor(id));
  }
  const std::size_t slots = output_slots(op);
  results.resize(slots, ResultSpec{{}, std::nullopt, false});
  LAWSON_TRY(auto inferred, infer(op, operands, results[0].dtype));
  for (std::size_t i = 0; i < slots; ++i) {
    LAWSON_CHECK(check_result(op, i, results[i].wanted, operands));
  }
  // A refused node leaves nothing behind.
  std::vector<TensorId> ids;
  std::vector<Tensor> made;
  for (std::size_t i = 0; i < slots; ++i) {
    if (!results[i].wanted) {
      ids.push_back(kNone);
      continue;
    }
    const std::size_t next = graph_.tensors.size() + made.size();
    Tensor tensor;
    const auto is_taken = [&](const std::string& name) {
      return find(name) || std::any_of(made.begin(), made.end(),
                                       [&](const Tensor& other) { return other.name == name; });
    };
    tensor.name = std::move(results[i].name);
    if (tensor.name.empty()) {
      tensor.name = fmt::format("t{}", next);
      while (is_taken(tensor.name)) tensor.name += '_';
    } else if (is_taken(tensor.name)) {
      return invalid("the name '{}' is used twice", tensor.name);
    }
    tensor.dtype = i > 0 && results[i].dtype ? *results[i].dtype : inferred[i].dtype;
    tensor.shape = inferred[i].shape;
    tensor.strides = contiguous_strides(tensor.shape);
    LAWSON_CHECK(check_layout(tensor));
    ids.push_back(static_cast<TensorId>(next));
    made.push_back(std::move(tensor));
  }
  std::move(made.begin(), made.end(), std::back_inserter(graph_.tensors));
  graph_.nodes.push_back({std::move(op), std::move(inputs), ids, source_});
  return ids;
}

Result<TensorId> Builder::add1(Op op, std::vector<TensorId> inputs, std::optional<DType> dtype,
                               std::string name) {
  LAWSON_TRY(auto ids, add(std::move(op), std::move(inputs), {{std::move(name), dtype, true}}));
  return ids[0];
}

Status Builder::output(TensorId id, Dims strides, int alignment) {
  const Tensor& tensor = graph_.tensor(id);
  if (std::find(inputs_.begin(), inputs_.end(), id) != inputs_.end()) {
    return invalid("output '{}' is an input; an output must be computed", tensor.name);
  }
  for (const Output& other : outputs_) {
    if (other.id == id) return invalid("output '{}' is listed twice", tensor.name);
  }
  if (strides.empty()) strides = contiguous_strides(tensor.shape);
  Tensor laid_out = tensor;
  laid_out.strides = strides;
  laid_out.alignment = alignment;
  LAWSON_CHECK(check_layout(laid_out));
  if (overlaps(laid_out)) {
    return invalid("output '{}': strides {} make elements of shape {} overlap", tensor.name,
                   to_string(strides), to_string(tensor.shape));
  }
  outputs_.push_back({id, std::move(strides), alignment});
  return {};
}

std::optional<TensorId> Builder::find(const std::string& name) const {
  for (std::size_t i = 0; i < graph_.tensors.size(); ++i) {
    if (graph_.tensors[i].name == name) return static_cast<TensorId>(i);
  }
  return std::nullopt;
}

Result<Graph> Builder::finish() && {
  if (outputs_.empty()) return invalid("graph '{}' has no output", graph_.name);
  constexpr TensorId kUnset = -2;
  std::vector<TensorId> renumbered(graph_.tensors.size(), kUnset);
  Graph result;
  result.name = graph_.name;
  result.strict = graph_.strict;
  const auto place = [&](TensorId id) {
    if (renumbered[static_cast<std::size_t>(id)] != kUnset) return;
    renumbered[static_cast<std::size_t>(id)] = static_cast<TensorId>(result.tensors.size());
    result.tensors.push_back(graph_.tensor(id));
  };
  for (const TensorId id : inputs_) place(id);
  for (const Output& output : outputs_) {
    place(output.id);
    result.tensors.back().strides = output.strides;
    result.tensors.back().alignment = output.alignment;
  }
  result.input_count = static_cast<std::int32_t>(inputs_.size());
  result.output_count = static_cast<std::int32_t>(outputs_.size());

  std::vector<std::int32_t> producer(graph_.tensors.size(), -1);
  for (std::size_t n = 0; n < graph_.nodes.size(); ++n) {
    for (const TensorId id : graph_.nodes[n].outputs) {
      if (id != kNone) producer[static_cast<std::size_t>(id)] = static_cast<std::int32_t>(n);
    }
  }
  // Nodes in depth-first order from the outputs: independent of the order they were written in,
  // and without dead ones. Builder order is a dependency order, so an explicit stack suffices.
  std::vector<char> state(graph_.nodes.size(), 0);  // 0 new, 1 open, 2 emitted
  std::vector<std::size_t> stack;
  std::vector<std::size_t> order;
  for (const Output& output : outputs_) {
    stack.push_back(static_cast<std::size_t>(producer[static_cast<std::size_t>(output.id)]));
    while (!stack.empty()) {
      const std::size_t n = stack.back();
      if (state[n] == 2) {
        stack.pop_back();
        continue;
      }
      if (state[n] == 1) {
        state[n] = 2;
        order.push_back(n);
        stack.pop_back();
        continue;
      }
      state[n] = 1;
      const auto& inputs = graph_.nodes[n].inputs;
      for (auto it = inputs.rbegin(); it != inputs.rend(); ++it) {
        if (*it == kNone) continue;
        const std::int32_t p = producer[static_cast<std::size_t>(*it)];
        if (p >= 0 && state[static_cast<std::size_t>(p)] == 0) {
          stack.push_back(static_cast<std::size_t>(p));
        }
      }
    }
  }
  for (const std::size_t n : order) {
    Node node = graph_.nodes[n];
    for (TensorId& id : node.outputs) {
      if (id == kNone) continue;
      place(id);
      id = renumbered[static_cast<std::size_t>(id)];
    }
    for (TensorId& id : node.inputs) {
      if (id != kNone) id = renumbered[static_cast<std::size_t>(id)];
    }
    result.nodes.push_back(std::move(node));
  }
  LAWSON_CHECK(check(result));
  return result;
}

Status check(const Graph& graph) {
  std::vector<bool> defined(graph.tensors.size(), false);
  for (std::int32_t i = 0; i < graph.input_count; ++i) defined[static_cast<std::size_t>(i)] = true;
  for (const Tensor& tensor : graph.tensors) LAWSON_CHECK(check_layout(tensor));
  for (const Node& node : graph.nodes) {
    const std::string name = op_name(node.op);
    for (const TensorId id : node.inputs) {
      if (id != kNone && !defined[static_cast<std::size_t>(id)]) {
        return error(ErrorKind::internal, "{}: operand used before it is defined", name);
      }
    }
    const TensorId first = node.outputs.empty() ? kNone : node.outputs[0];
    const std::optional<DType> dtype =
        first == kNone ? std::nullopt : std::optional{graph.tensor(first).dtype};
    LAWSON_TRY(auto inferred, infer(node.op, operands_of(graph, node), dtype));
    for (std::size_t i = 0; i < node.outputs.size(); ++i) {
      const TensorId id = node.outputs[i];
      if (id == kNone) continue;
      if (defined[static_cast<std::size_t>(id)]) {
        return error(ErrorKind::internal, "{}: result defined twice", name);
      }
      defined[static_cast<std::size_t>(id)] = true;
      if (graph.tensor(id).shape != inferred[i].shape) {
        return error(ErrorKind::internal, "{}: result shape {} differs from inferred {}", name,
                     to_string(graph.tensor(id).shape), to_string(inferred[i].shape));
      }
    }
  }
  if (std::find(defined.begin(), defined.end(), false) != defined.end()) {
    return error(ErrorKind::internal, "graph '{}' has an undefined tensor", graph.name);
  }
  return {};
}

}  // namespace lawson::ir
