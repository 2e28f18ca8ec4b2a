#include <algorithm>
#include <set>

#include "front/neighbours_list.h"
#include "ir/json.h"

namespace lawson::front {
namespace {

using ir::Graph;
using ir::Node;
using ir::Tensor;
using ir::TensorId;

bool is_view(const ir::Op& op) {
  return std::holds_alternative<ir::Transpose>(op) || std::holds_alternative<ir::Slice>(op) ||
         std::holds_alternative<ir::Reshape>(op) || std::holds_alternative<ir::Broadcast>(op);
}

// Rewires every reader of `name`, outputs included, to `replacement` and removes the op.
void replace_op(Json& document, std::size_t index, const std::string& name,
                const std::string& replacement) {
  document["ops"].erase(index);
  for (Json& op : document["ops"]) {
    for (Json& operand : op["in"]) {
      if (operand == name) operand = replacement;
    }
  }
  for (Json& output : document["outputs"]) {
    if (output["name"] == name) output = {{"name", replacement}};
  }
}

class GraphNeighbours {
 public:
  GraphNeighbours(const Graph& graph, NeighbourList& list) : graph_{graph}, list_{list} {}

  void all() {
    layouts();
    for (std::size_t n = 0; n < graph_.nodes.size(); ++n) materialised_view(n);
    if (graph_.strict) {
      list_.add("strict", "strict true -> false (intermediates may be kept wider than written)",
                [](Json& d) { d.erase("strict"); });
    }
    output_dtypes();
    operand_dtypes();
    for (std::size_t n = graph_.nodes.size(); n-- > 0;) without_op(n);
    single_outputs();
  }

 private:
  std::string op_label(std::size_t n) const {
    return fmt::format("ops[{}] ({} '{}')", n, ir::op_name(graph_.nodes[n].op),
                       graph_.tensor(graph_.nodes[n].outputs[0]).name);
  }

  void layouts() {
    for (TensorId id = 0; id < graph_.input_count + graph_.output_count; ++id) {
      const Tensor& t = graph_.tensor(id);
      const bool input = graph_.is_input(id);
      const char* list = input ? "inputs" : "outputs";
      const auto index = static_cast<std::size_t>(input ? id : id - graph_.input_count);
      if (t.strides != contiguous_strides(t.shape)) {
        list_.exact(fmt::format("{}[{}].strides", list, index),
                    fmt::format("{} '{}' contiguous instead of strides {} (copied {})",
                                input ? "input" : "output", t.name, to_string(t.strides),
                                input ? "before" : "after"),
                    [list, index](Json& d) { d[list][index].erase("strides"); });
      }
      if (t.alignment < 16 && !t.by_value) {
        list_.exact(fmt::format("{}[{}].alignment", list, index),
                    fmt::format("'{}' aligned to 16 bytes instead of {}", t.name, t.alignment),
                    [list, index](Json& d) { d[list][index].erase("alignment"); });
      }
    }
  }

  // A view of an input becomes an input of its own: made before, by another kernel.
  void materialised_view(std::size_t n) {
    const Node& node = graph_.nodes[n];
    if (!is_view(node.op) || !graph_.is_input(node.inputs[0])) return;
    const Tensor result = graph_.tensor(node.outputs[0]);
    if (graph_.is_output(node.outputs[0])) return;
    list_.structural(
        fmt::format("ops[{}]", n),
        fmt::format("{} made before, in memory, as an input", op_label(n)), true,
        [n, result](Json& d) {
          d["ops"].erase(n);
          d["inputs"].push_back(
              {{"name", result.name}, {"dtype", to_string(result.dtype)}, {"shape", result.shape}});
          prune_inputs(d);
        });
  }

  void output_dtypes() {
    for (std::size_t n = 0; n < graph_.nodes.size(); ++n) {
      const TensorId id = graph_.nodes[n].outputs[0];
      if (id == ir::kNone || !graph_.is_output(id) || !is_float(graph_.tensor(id).dtype)) continue;
      for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
        if (dtype == graph_.tensor(id).dtype) continue;
        list_.add(fmt::format("ops[{}].dtype", n),
                  fmt::format("output '{}' {} -> {}", graph_.tensor(id).name,
                              to_string(graph_.tensor(id).dtype), to_string(dtype)),
                  [n, dtype](Json& d) { d["ops"][n]["dtype"] = to_string(dtype); });
      }
    }
  }

  // Where the type of a matmul's operand comes from: inputs that reach it through views only, and
  // conversions that do.
  struct Sources {
    std::set<std::size_t> inputs;
    std::set<std::size_t> converts;  // indices of ops
  };

  Sources operand_sources() const {
    Sources sources;
    std::set<TensorId> reached;
    for (std::size_t n = graph_.nodes.size(); n-- > 0;) {
      const Node& node = graph_.nodes[n];
      if (std::holds_alternative<ir::Matmul>(node.op)) {
        reached.insert(node.inputs.begin(), node.inputs.end());
      } else if (is_view(node.op) && reached.contains(node.outputs[0])) {
        reached.insert(node.inputs[0]);
      } else if (std::holds_alternative<ir::Convert>(node.op) &&
                 reached.contains(node.outputs[0])) {
        sources.converts.insert(n);
      }
    }
    for (const TensorId id : reached) {
      if (graph_.is_input(id)) sources.inputs.insert(static_cast<std::size_t>(id));
    }
    return sources;
  }

  void operand_dtypes() {
    const Sources sources = operand_sources();
    if (sources.inputs.empty() && sources.converts.empty()) return;
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
      // All operands of the matmuls at once: mixed types are the usual trouble.
      list_.add("inputs.dtype", fmt::format("every matmul operand as {}", to_string(dtype)),
                [sources, dtype](Json& d) {
                  for (const std::size_t i : sources.inputs) {
                    d["inputs"][i]["dtype"] = to_string(dtype);
                  }
                  for (const std::size_t n : sources.converts) {
                    d["ops"][n]["dtype"] = to_string(dtype);
                  }
                });
    }
    for (const std::size_t index : sources.inputs) {
      const Tensor& t = graph_.tensor(static_cast<TensorId>(index));
      for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
        if (t.dtype == dtype) continue;
        list_.add(fmt::format("inputs[{}].dtype", index),
                  fmt::format("input '{}' {} -> {}", t.name, to_string(t.dtype), to_string(dtype)),
                  [index, dtype](Json& d) { d["inputs"][index]["dtype"] = to_string(dtype); });
      }
    }
    for (const std::size_t n : sources.converts) {
      const TensorId from = graph_.nodes[n].inputs[0];
      const DType to = graph_.tensor(graph_.nodes[n].outputs[0]).dtype;
      for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
        if (to == dtype) continue;
        list_.add(
            fmt::format("ops[{}].dtype", n),
            fmt::format("{} to {} instead of {}", op_label(n), to_string(dtype), to_string(to)),
            [n, dtype](Json& d) { d["ops"][n]["dtype"] = to_string(dtype); });
      }
      if (!graph_.is_input(from)) continue;
      list_.exact(
          fmt::format("inputs[{}].dtype", from),
          fmt::format("input '{}' converted to {} before", graph_.tensor(from).name, to_string(to)),
          [index = static_cast<std::size_t>(from), to](Json& d) {
            d["inputs"][index]["dtype"] = to_string(to);
          });
    }
  }

  // Leaves one op out, where an operand can take the result's place.
  void without_op(std::size_t n) {
    const Node& node = graph_.nodes[n];
    if (std::holds_alternative<ir::Matmul>(node.op) || node.outputs.size() != 1) return;
    const Tensor& result = graph_.tensor(node.outputs[0]);
    for (const TensorId id : node.inputs) {
      if (id == ir::kNone || graph_.tensor(id).shape != result.shape) continue;
      const Tensor& operand = graph_.tensor(id);
      if ((operand.dtype == DType::boolean) != (result.dtype == DType::boolean)) continue;
      if (graph_.is_input(id) && graph_.is_output(node.outputs[0])) continue;
      list_.structural(fmt::format("ops[{}]", n), fmt::format("without {}", op_label(n)), false,
                       [n, name = result.name, replacement = operand.name](Json& d) {
                         replace_op(d, n, name, replacement);
                         prune_inputs(d);
                       });
      return;
    }
  }

  void single_outputs() {
    if (graph_.output_count < 2) return;
    for (std::int32_t i = 0; i < graph_.output_count; ++i) {
      const std::string& name = graph_.tensor(graph_.input_count + i).name;
      list_.structural(fmt::format("outputs[{}]", i), fmt::format("output '{}' alone", name), false,
                       [index = static_cast<std::size_t>(i)](Json& d) {
                         const Json kept = d["outputs"][index];
                         d["outputs"] = Json::array({kept});
                         prune_inputs(d);
                       });
    }
  }

  // Inputs that nothing reads any more would still have to be bound.
  static void prune_inputs(Json& document) {
    std::set<std::string> needed;
    for (const Json& output : document["outputs"]) {
      needed.insert(output["name"].get<std::string>());
    }
    Json& ops = document["ops"];
    for (std::size_t n = ops.size(); n-- > 0;) {
      const Json& out = ops[n]["out"];
      const bool live = std::any_of(out.begin(), out.end(), [&](const Json& name) {
        return name.is_string() && needed.contains(name.get<std::string>());
      });
      if (!live) continue;
      for (const Json& name : ops[n]["in"]) {
        if (name.is_string()) needed.insert(name.get<std::string>());
      }
    }
    Json kept = Json::array();
    for (const Json& input : document["inputs"]) {
      if (needed.contains(input["name"].get<std::string>())) kept.push_back(input);
    }
    document["inputs"] = std::move(kept);
  }

  const Graph& graph_;
  NeighbourList& list_;
};

}  // namespace

void add_graph_neighbours(const Graph& graph, NeighbourList& list) {
  GraphNeighbours(graph, list).all();
}

}  // namespace lawson::front
