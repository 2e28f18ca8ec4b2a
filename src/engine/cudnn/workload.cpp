#include "engine/cudnn/workload.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <vector>

#include "engine/cudnn/facts.h"

namespace lawson::cudnn {
namespace {

constexpr std::array kEpilogues{Epilogue::none, Epilogue::pointwise, Epilogue::addend,
                                Epilogue::reduce, Epilogue::dual};

bool is_view(const ir::Op& op) {
  return std::holds_alternative<ir::Reshape>(op) || std::holds_alternative<ir::Transpose>(op) ||
         std::holds_alternative<ir::Broadcast>(op) || std::holds_alternative<ir::Slice>(op);
}

const ir::Node* maker_of(const ir::Graph& graph, ir::TensorId id) {
  for (const ir::Node& node : graph.nodes) {
    if (std::find(node.outputs.begin(), node.outputs.end(), id) != node.outputs.end()) return &node;
  }
  return nullptr;
}

std::int64_t elements(const ir::Graph& graph, ir::TensorId id) {
  return element_count(graph.tensor(id).shape).value_or(0);
}

// An operand of the product, back to where it is in memory.
struct Operand {
  std::string type;
  char layout = 'x';
};

Operand operand_of(const ir::Graph& graph, ir::TensorId id) {
  const DType multiplied = graph.tensor(id).dtype;
  bool transposed = false;
  while (const ir::Node* node = maker_of(graph, id)) {
    if (const auto* transpose = std::get_if<ir::Transpose>(&node->op)) {
      const auto rank = static_cast<std::int64_t>(transpose->perm.size());
      if (rank >= 2 && transpose->perm.back() == rank - 2) transposed = !transposed;
    }
    ir::TensorId largest = ir::kNone;
    for (const ir::TensorId input : node->inputs) {
      if (input == ir::kNone) continue;
      if (largest == ir::kNone || elements(graph, input) > elements(graph, largest)) {
        largest = input;
      }
    }
    if (largest == ir::kNone) break;  // made of nothing: iota
    id = largest;
  }
  const ir::Tensor& tensor = graph.tensor(id);
  Operand operand;
  operand.type = to_string(tensor.dtype);
  if (tensor.dtype != multiplied) operand.type += fmt::format(">{}", to_string(multiplied));
  const std::size_t rank = tensor.strides.size();
  if (rank >= 2) {
    const bool rows = tensor.strides[rank - 1] == 1 || tensor.shape[rank - 1] == 1;
    const bool columns = tensor.strides[rank - 2] == 1;
    if (rows || columns) operand.layout = rows != transposed ? 'r' : 'c';
  }
  return operand;
}

// What depends on a product.
std::vector<bool> after_product(const ir::Graph& graph) {
  std::vector<bool> after(graph.tensors.size(), false);
  for (const ir::Node& node : graph.nodes) {
    const bool depends = std::holds_alternative<ir::Matmul>(node.op) ||
                         std::any_of(node.inputs.begin(), node.inputs.end(), [&](ir::TensorId id) {
                           return id != ir::kNone && after[static_cast<std::size_t>(id)];
                         });
    if (!depends) continue;
    for (const ir::TensorId id : node.outputs) {
      if (id != ir::kNone) after[static_cast<std::size_t>(id)] = true;
    }
  }
  return after;
}

Epilogue epilogue_of(const ir::Graph& graph, std::int64_t size) {
  const std::vector<bool> after = after_product(graph);
  const auto depends = [&](ir::TensorId id) {
    return id != ir::kNone && after[static_cast<std::size_t>(id)];
  };
  Epilogue result = Epilogue::none;
  const auto at_least = [&](Epilogue epilogue) { result = std::max(result, epilogue); };
  int products = 0;
  for (const ir::Node& node : graph.nodes) {
    if (std::holds_alternative<ir::Matmul>(node.op)) {
      if (++products > 1) at_least(Epilogue::dual);
      continue;
    }
    if (!std::any_of(node.inputs.begin(), node.inputs.end(), depends)) continue;
    if (std::holds_alternative<ir::Convert>(node.op) || is_view(node.op)) continue;
    at_least(std::holds_alternative<ir::Reduce>(node.op) ? Epilogue::reduce : Epilogue::pointwise);
    for (const ir::TensorId id : node.inputs) {
      if (id != ir::kNone && !depends(id) && elements(graph, id) >= size) {
        at_least(Epilogue::addend);
      }
    }
  }
  int outputs = 0;
  for (std::int32_t i = 0; i < graph.output_count; ++i) {
    if (elements(graph, graph.input_count + i) >= size) ++outputs;
  }
  if (outputs > 1) at_least(Epilogue::addend);
  return result;
}

}  // namespace

std::string_view to_string(Epilogue epilogue) {
  switch (epilogue) {
    case Epilogue::none:
      return "none";
    case Epilogue::pointwise:
      return "pointwise";
    case Epilogue::addend:
      return "addend";
    case Epilogue::reduce:
      return "reduce";
    case Epilogue::dual:
      return "dual";
  }
  return "none";
}

std::optional<Epilogue> epilogue_from_string(std::string_view text) {
  for (const Epilogue epilogue : kEpilogues) {
    if (to_string(epilogue) == text) return epilogue;
  }
  return std::nullopt;
}

std::string to_string(const Workload& workload) {
  return fmt::format("{} x {} {} {} {} x {} x {} x {}", workload.a, workload.b, workload.layouts,
                     to_string(workload.epilogue), workload.batch, workload.m, workload.n,
                     workload.k);
}

std::optional<Workload> workload_of(const ir::Graph& graph) {
  if (attention_facts(graph)) return std::nullopt;
  for (const ir::Node& node : graph.nodes) {
    if (!std::holds_alternative<ir::Matmul>(node.op)) continue;
    const Dims& left = graph.tensor(node.inputs[0]).shape;
    const Dims& product = graph.tensor(node.outputs[0]).shape;
    if (left.size() < 2 || product.size() < 2) return std::nullopt;
    const std::size_t rank = product.size();
    const Operand a = operand_of(graph, node.inputs[0]);
    const Operand b = operand_of(graph, node.inputs[1]);
    Workload workload;
    workload.a = a.type;
    workload.b = b.type;
    workload.layouts = {a.layout, b.layout};
    workload.m = product[rank - 2];
    workload.n = product[rank - 1];
    workload.k = left.back();
    const std::int64_t size = element_count(product).value_or(0);
    if (size == 0) return std::nullopt;
    workload.batch = size / (workload.m * workload.n);
    workload.epilogue = epilogue_of(graph, size);
    return workload;
  }
  return std::nullopt;
}

}  // namespace lawson::cudnn
