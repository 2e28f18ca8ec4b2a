#include "engine/cudnn/defects_fusion.h"

#include <algorithm>
#include <vector>

#include "engine/cudnn/facts.h"

namespace lawson::cudnn {
namespace {

std::size_t at(ir::TensorId id) {
  return static_cast<std::size_t>(id);
}

// A dim with stride 0 repeats one element.
Dims distinct_dims(const ir::Tensor& tensor) {
  Dims dims = tensor.shape;
  for (std::size_t i = 0; i < dims.size(); ++i) {
    if (tensor.strides[i] == 0) dims[i] = std::min<std::int64_t>(dims[i], 1);
  }
  return dims;
}

bool is_product(const ir::Op& op) {
  return std::holds_alternative<ir::Matmul>(op) || std::holds_alternative<ir::ScaledMatmul>(op);
}

// Which tensors are made from the results of nodes that `is_source` accepts.
template <typename IsSource>
std::vector<bool> made_from(const ir::Graph& graph, const IsSource& is_source) {
  std::vector<bool> made(graph.tensors.size(), false);
  for (const ir::Node& node : graph.nodes) {
    const bool any = is_source(node) ||
                     std::any_of(node.inputs.begin(), node.inputs.end(),
                                 [&](ir::TensorId id) { return id != ir::kNone && made[at(id)]; });
    for (const ir::TensorId id : node.outputs) {
      if (id != ir::kNone && any) made[at(id)] = true;
    }
  }
  return made;
}

bool is_view(const ir::Op& op) {
  return std::holds_alternative<ir::Reshape>(op) || std::holds_alternative<ir::Transpose>(op) ||
         std::holds_alternative<ir::Broadcast>(op) || std::holds_alternative<ir::Slice>(op) ||
         std::holds_alternative<ir::Concat>(op);
}

std::int64_t batches(const Dims& shape) {
  std::int64_t count = 1;
  for (std::size_t i = 0; i + 2 < shape.size(); ++i) count *= shape[i];
  return count;
}

// Whether a smaller operand of the op is one that it repeats.
bool repeats_operands(const ir::Op& op) {
  return !std::holds_alternative<ir::Reduce>(op) && !std::holds_alternative<ir::Slice>(op) &&
         !std::holds_alternative<ir::Concat>(op) && !std::holds_alternative<ir::Norm>(op) &&
         !std::holds_alternative<ir::NormBackward>(op);
}

}  // namespace

const ir::Node* repeats_a_vector(const ir::Graph& graph) {
  for (const ir::Node& node : graph.nodes) {
    if (!repeats_operands(node.op)) continue;
    const auto out = element_count(graph.tensor(first_result(node)).shape);
    for (const ir::TensorId id : node.inputs) {
      if (id == ir::kNone) continue;
      const ir::Tensor& in = graph.tensor(id);
      if (in.shape.empty() || in.by_value) continue;
      const Dims dims = distinct_dims(in);
      if (element_count(dims) == out) continue;
      const auto above_one =
          std::count_if(dims.begin(), dims.end(), [](std::int64_t dim) { return dim > 1; });
      if (above_one <= 1) return &node;
    }
  }
  return nullptr;
}

namespace {

// Strides of an 8-bit input, in bytes: all multiples of 4 but the unit one.
bool is_word_aligned(const ir::Tensor& tensor) {
  for (std::size_t axis = 0; axis < tensor.shape.size(); ++axis) {
    if (tensor.shape[axis] > 1 && tensor.strides[axis] > 1 && tensor.strides[axis] % 4 != 0) {
      return false;
    }
  }
  return true;
}

}  // namespace

const ir::Node* mixes_unaligned_operand(const ir::Graph& graph) {
  std::vector<bool> unaligned(graph.tensors.size(), false);  // made from such an input
  for (ir::TensorId id = 0; id < graph.input_count; ++id) {
    const ir::Tensor& tensor = graph.tensor(id);
    unaligned[static_cast<std::size_t>(id)] =
        bit_width(tensor.dtype) == 8 && !tensor.by_value && !is_word_aligned(tensor);
  }
  for (const ir::Node& node : graph.nodes) {
    const bool any = std::any_of(node.inputs.begin(), node.inputs.end(), [&](ir::TensorId id) {
      return id != ir::kNone && unaligned[static_cast<std::size_t>(id)];
    });
    if (!any) continue;
    if (std::holds_alternative<ir::Matmul>(node.op)) {
      for (const ir::TensorId id : node.inputs) {
        if (unaligned[static_cast<std::size_t>(id)] && !graph.is_input(id)) return &node;
      }
    } else {
      for (const ir::TensorId id : node.outputs) {
        if (id != ir::kNone) unaligned[static_cast<std::size_t>(id)] = true;
      }
    }
  }
  return nullptr;
}

const ir::Node* chained_product(const ir::Graph& graph) {
  const auto made = made_from(graph, [](const ir::Node& node) { return is_product(node.op); });
  for (const ir::Node& node : graph.nodes) {
    const bool reads = std::any_of(node.inputs.begin(), node.inputs.end(), [&](ir::TensorId id) {
      return id != ir::kNone && made[at(id)];
    });
    if (is_product(node.op) && reads) return &node;
  }
  return nullptr;
}

const ir::Node* has_products_of_two_depths(const ir::Graph& graph) {
  const ir::Node* first = nullptr;
  for (const ir::Node& node : graph.nodes) {
    if (!is_product(node.op)) continue;
    if (first == nullptr) {
      first = &node;
      continue;
    }
    const auto later = made_from(graph, [&](const ir::Node& other) { return &other == first; });
    const bool apart = std::none_of(node.inputs.begin(), node.inputs.end(),
                                    [&](ir::TensorId id) { return later[at(id)]; });
    if (apart &&
        graph.tensor(node.inputs[0]).shape.back() != graph.tensor(first->inputs[0]).shape.back()) {
      return &node;
    }
  }
  return nullptr;
}

const ir::Node* repeats_a_product(const ir::Graph& graph) {
  const auto made = made_from(graph, [](const ir::Node& node) { return is_product(node.op); });
  std::int64_t most = 0;
  for (const ir::Node& node : graph.nodes) {
    if (is_product(node.op)) most = std::max(most, batches(graph.tensor(node.outputs[0]).shape));
  }
  for (const ir::Node& node : graph.nodes) {
    const bool moves = is_view(node.op) && !std::holds_alternative<ir::Broadcast>(node.op);
    const ir::TensorId result = first_result(node);
    if (is_product(node.op) || moves || !made[at(result)]) continue;
    if (batches(graph.tensor(result).shape) > most) return &node;
  }
  return nullptr;
}

const ir::Node* makes_int4(const ir::Graph& graph) {
  for (const ir::Node& node : graph.nodes) {
    const ir::TensorId result = first_result(node);
    if (graph.tensor(result).dtype != DType::i4) continue;
    const bool read =
        std::any_of(graph.nodes.begin(), graph.nodes.end(), [&](const ir::Node& reader) {
          return std::find(reader.inputs.begin(), reader.inputs.end(), result) !=
                 reader.inputs.end();
        });
    if (read && std::holds_alternative<ir::Convert>(node.op)) return &node;
  }
  return nullptr;
}

const ir::Node* reduces_a_stored_column(const ir::Graph& graph) {
  if (!has_matmul(graph)) return nullptr;
  for (const ir::Node& node : graph.nodes) {
    if (!std::holds_alternative<ir::Reduce>(node.op)) continue;
    const ir::TensorId from = node.inputs[0];
    const Dims& shape = graph.tensor(from).shape;
    if (graph.is_output(from) && !shape.empty() && shape.back() == 1) return &node;
  }
  return nullptr;
}

const ir::Node* widens_bytes_to_f32(const ir::Graph& graph) {
  std::vector<bool> bytes(graph.tensors.size(), false);  // made from a float of 8 bits
  for (ir::TensorId id = 0; id < graph.input_count; ++id) {
    const DType dtype = graph.tensor(id).dtype;
    bytes[at(id)] = is_float(dtype) && bit_width(dtype) == 8;
  }
  for (const ir::Node& node : graph.nodes) {
    const bool product = is_product(node.op);
    for (const ir::TensorId id : node.inputs) {
      if (id == ir::kNone || !bytes[at(id)]) continue;
      if (product && graph.tensor(id).dtype == DType::f32) return &node;
      for (const ir::TensorId result : node.outputs) {
        if (result != ir::kNone && !product) bytes[at(result)] = true;
      }
    }
  }
  return nullptr;
}

const ir::Node* repeats_bytes_before_product(const ir::Graph& graph) {
  const auto made = made_from(graph, [](const ir::Node& node) { return is_product(node.op); });
  std::vector<bool> needed(graph.tensors.size(), false);  // by a product
  for (auto node = graph.nodes.rbegin(); node != graph.nodes.rend(); ++node) {
    const bool before =
        is_product(node->op) ||
        std::any_of(node->outputs.begin(), node->outputs.end(),
                    [&](ir::TensorId id) { return id != ir::kNone && needed[at(id)]; });
    for (const ir::TensorId id : node->inputs) {
      if (id != ir::kNone && before) needed[at(id)] = true;
    }
  }
  for (const ir::Node& node : graph.nodes) {
    const ir::TensorId result = first_result(node);
    if (!repeats_operands(node.op) || is_view(node.op) || is_product(node.op) ||
        !needed[at(result)] || made[at(result)]) {
      continue;
    }
    const Dims& whole = graph.tensor(result).shape;
    for (const ir::TensorId id : node.inputs) {
      if (id == ir::kNone || !graph.is_input(id)) continue;
      const Dims dims = distinct_dims(graph.tensor(id));
      if (bit_width(graph.tensor(id).dtype) > 8 || element_count(dims) == 1) continue;
      // Repeated over the batch alone it is right.
      for (std::size_t back = 1; back <= std::min<std::size_t>(2, whole.size()); ++back) {
        const std::int64_t dim = back <= dims.size() ? dims[dims.size() - back] : 1;
        if (dim != whole[whole.size() - back]) return &node;
      }
    }
  }
  return nullptr;
}

}  // namespace lawson::cudnn
