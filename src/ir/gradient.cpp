#include "ir/gradient.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "ir/gradient_tape.h"
#include "ir/json.h"
#include "ir/simplify.h"

namespace lawson::ir {
namespace {

// A dtype that can hold signs and fractions of any size.
bool can_be_differentiated(DType dtype) {
  return is_float(dtype) && dtype != DType::f8e8m0 && dtype != DType::f4e2m1;
}

Result<std::vector<TensorId>> inputs_of(const Graph& forward, const std::vector<std::string>& wrt) {
  if (wrt.empty()) return invalid("no input is named to differentiate by");
  std::vector<TensorId> ids;
  for (const std::string& name : wrt) {
    const auto begin = forward.tensors.begin();
    const auto end = begin + forward.input_count;
    const auto it = std::find_if(begin, end, [&](const Tensor& t) { return t.name == name; });
    if (it == end) {
      std::vector<std::string> names;
      for (auto input = begin; input != end; ++input) names.push_back(input->name);
      return invalid("'{}' is not an input of graph '{}'; its inputs are {}", name, forward.name,
                     fmt::join(names, ", "));
    }
    if (!can_be_differentiated(it->dtype)) {
      return invalid("input '{}' is {}: gradients are of f64, f32, f16, bf16, f8e4m3 and f8e5m2",
                     name, to_string(it->dtype));
    }
    const auto id = static_cast<TensorId>(it - begin);
    if (std::find(ids.begin(), ids.end(), id) != ids.end()) {
      return invalid("input '{}' is named twice to differentiate by", name);
    }
    ids.push_back(id);
  }
  return ids;
}

// The float tensors between what is differentiated by and a float output.
std::vector<bool> between(const Graph& graph, const std::vector<TensorId>& wrt) {
  std::vector<bool> depends(graph.tensors.size(), false);
  const auto at = [](std::vector<bool>& flags, TensorId id) {
    return flags[static_cast<std::size_t>(id)];
  };
  const auto any = [&](std::vector<bool>& flags, const std::vector<TensorId>& ids) {
    return std::any_of(ids.begin(), ids.end(),
                       [&](TensorId id) { return id != kNone && at(flags, id); });
  };
  for (const TensorId id : wrt) at(depends, id) = true;
  for (const Node& node : graph.nodes) {
    if (!any(depends, node.inputs)) continue;
    for (const TensorId id : node.outputs) {
      if (id != kNone) at(depends, id) = is_float(graph.tensor(id).dtype);
    }
  }
  std::vector<bool> reaches(graph.tensors.size(), false);
  for (TensorId id = graph.input_count; graph.is_output(id); ++id) at(reaches, id) = true;
  for (auto node = graph.nodes.rbegin(); node != graph.nodes.rend(); ++node) {
    std::vector<bool> both = reaches;
    for (std::size_t i = 0; i < both.size(); ++i) both[i] = both[i] && depends[i];
    if (!any(both, node->outputs)) continue;
    for (const TensorId id : node->inputs) {
      if (id != kNone) at(reaches, id) = true;
    }
  }
  for (std::size_t i = 0; i < depends.size(); ++i) depends[i] = depends[i] && reaches[i];
  return depends;
}

// Without inputs of the forward graph, the first `of_forward`, that nothing reads.
Graph without_unread_inputs(Graph graph, std::int32_t of_forward) {
  std::vector<bool> read(graph.tensors.size(), false);
  for (const Node& node : graph.nodes) {
    for (const TensorId id : node.inputs) {
      if (id != kNone) read[static_cast<std::size_t>(id)] = true;
    }
  }
  std::vector<TensorId> renumbered;
  std::vector<Tensor> kept;
  for (std::size_t i = 0; i < graph.tensors.size(); ++i) {
    const bool dropped = static_cast<std::int32_t>(i) < of_forward && !read[i];
    renumbered.push_back(dropped ? kNone : static_cast<TensorId>(kept.size()));
    if (dropped) {
      --graph.input_count;
    } else {
      kept.push_back(std::move(graph.tensors[i]));
    }
  }
  graph.tensors = std::move(kept);
  for (Node& node : graph.nodes) {
    for (auto* ids : {&node.inputs, &node.outputs}) {
      for (TensorId& id : *ids) {
        if (id != kNone) id = renumbered[static_cast<std::size_t>(id)];
      }
    }
  }
  return graph;
}

}  // namespace

Result<Graph> gradient(const Graph& forward, const std::vector<std::string>& wrt) {
  LAWSON_TRY(const std::vector<TensorId> inputs, inputs_of(forward, wrt));
  std::vector<std::string> names;
  for (const std::string& name : wrt) names.push_back("d_" + name);
  Tape tape(forward, between(forward, inputs));
  LAWSON_CHECK(tape.write_forward(names));
  for (auto node = forward.nodes.rbegin(); node != forward.nodes.rend(); ++node) {
    LAWSON_CHECK(differentiate(tape, *node));
  }
  std::vector<std::pair<TensorId, std::string>> gradients;
  for (std::size_t i = 0; i < inputs.size(); ++i) gradients.emplace_back(inputs[i], names[i]);
  LAWSON_TRY(Graph graph, std::move(tape).finish(gradients));
  graph = without_unread_inputs(simplify(graph), forward.input_count);
  LAWSON_CHECK(check(graph));
  LAWSON_CHECK(check_size(graph));
  return graph;
}

}  // namespace lawson::ir
