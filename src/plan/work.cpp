#include "plan/work.h"

#include <algorithm>

#include "ir/attention.h"

namespace lawson::plan {
namespace {

double elements_of(const ir::Tensor& tensor) {
  return static_cast<double>(element_count(tensor.shape).value_or(0));
}

double product_flops(const ir::Graph& graph, const ir::Node& node) {
  const ir::Tensor& a = graph.tensor(node.inputs[0]);
  return 2 * elements_of(graph.tensor(node.outputs[0])) * static_cast<double>(a.shape.back());
}

// The part of the rows x columns scores that the bounds of the rule show, lengths aside.
double visible_part(const ir::AttentionRule& rule, const ir::AttentionGeometry& geometry) {
  if (rule.left < 0 && rule.right < 0) return 1;
  if (rule.left < 0 && rule.right == 0 && geometry.rows == geometry.columns) return 0.5;
  const std::int64_t shift =
      rule.alignment == ir::Alignment::bottom_right ? geometry.columns - geometry.rows : 0;
  double seen = 0;
  for (std::int64_t row = 0; row < geometry.rows; ++row) {
    const std::int64_t center = row + shift;
    const std::int64_t first = rule.left < 0 ? 0 : std::max<std::int64_t>(center - rule.left, 0);
    const std::int64_t last =
        rule.right < 0 ? geometry.columns - 1 : std::min(center + rule.right, geometry.columns - 1);
    seen += static_cast<double>(std::max<std::int64_t>(last - first + 1, 0));
  }
  return seen / (static_cast<double>(geometry.rows) * static_cast<double>(geometry.columns));
}

double attention_flops(const ir::Graph& graph, const ir::Node& node) {
  const auto geometry = ir::attention_geometry(graph, node);
  if (!geometry || geometry->rows == 0 || geometry->columns == 0) return 0;
  const auto size = [](std::int64_t n) { return static_cast<double>(n); };
  const double forward = 2 * size(geometry->batch) * size(geometry->heads) * size(geometry->rows) *
                         size(geometry->columns) *
                         (size(geometry->depth) + size(geometry->value_depth)) *
                         visible_part(*ir::attention_rule(node.op), *geometry);
  return std::holds_alternative<ir::AttentionBackward>(node.op) ? 2.5 * forward : forward;
}

}  // namespace

Work work_of(const ir::Graph& graph) {
  Work work;
  for (const ir::Node& node : graph.nodes) {
    if (std::holds_alternative<ir::Matmul>(node.op) ||
        std::holds_alternative<ir::ScaledMatmul>(node.op)) {
      work.flops += product_flops(graph, node);
    } else if (ir::attention_rule(node.op) != nullptr) {
      work.flops += attention_flops(graph, node);
    }
  }
  for (ir::TensorId id = 0; id < static_cast<ir::TensorId>(graph.tensors.size()); ++id) {
    const ir::Tensor& tensor = graph.tensor(id);
    work.elements += elements_of(tensor);
    if ((graph.is_input(id) && !tensor.by_value) || graph.is_output(id)) {
      // What repeats along a stride of 0 is there once.
      work.bytes += static_cast<double>(byte_size(
          tensor.dtype, std::min(element_count(tensor.shape).value_or(0),
                                 storage_extent(tensor.shape, tensor.strides).value_or(0))));
    }
  }
  return work;
}

}  // namespace lawson::plan
