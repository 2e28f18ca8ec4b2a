#include "plan/agreement.h"

#include <algorithm>
#include <cmath>

#include "ir/attention.h"

namespace lawson::plan {
namespace {

// Products and exponentials of intermediates make their errors larger than those of sums.
constexpr double kAmplification = 4;
// Beyond a quarter of the output's own size nothing agrees.
constexpr double kMostError = 0.25;
constexpr double kOtherSide = 1e-3;

bool is_integral(const ir::Graph& graph) {
  return std::none_of(graph.tensors.begin(), graph.tensors.end(),
                      [](const ir::Tensor& tensor) { return is_float(tensor.dtype); });
}

double terms_of(const ir::Graph& graph, const ir::Node& node) {
  const auto count = [&](ir::TensorId id) {
    return static_cast<double>(element_count(graph.tensor(id).shape).value_or(0));
  };
  if (std::holds_alternative<ir::Matmul>(node.op) ||
      std::holds_alternative<ir::ScaledMatmul>(node.op)) {
    return static_cast<double>(graph.tensor(node.inputs[0]).shape.back());
  }
  if (const auto geometry = ir::attention_geometry(graph, node)) {
    return static_cast<double>(geometry->depth + std::max(geometry->columns, geometry->rows));
  }
  const bool reduces = std::holds_alternative<ir::Reduce>(node.op) ||
                       std::holds_alternative<ir::Norm>(node.op) ||
                       std::holds_alternative<ir::NormBackward>(node.op);
  if (!reduces) return 1;
  double least = count(node.inputs[0]);
  for (const ir::TensorId id : node.outputs) {
    if (id != ir::kNone) least = std::min(least, count(id));
  }
  return count(node.inputs[0]) / std::max(least, 1.0);
}

double error_of(const ir::Graph& graph, const Arithmetic& arithmetic) {
  double error = 0;
  for (const ir::Node& node : graph.nodes) {
    error += terms_of(graph, node) * arithmetic.accumulate_roundoff;
    error += 2 * arithmetic.operand_roundoff + arithmetic.function_roundoff;
    if (ir::attention_rule(node.op) != nullptr) {
      error += arithmetic.probability_roundoff + arithmetic.partial_roundoff;
    }
    for (const ir::TensorId id : node.outputs) {
      if (id != ir::kNone && !graph.is_output(id)) error += unit_roundoff(graph.tensor(id).dtype);
    }
  }
  return std::min(kAmplification * error, kMostError);
}

// Does a small difference of operands make a large one of results?
bool jumps(const ir::Graph& graph) {
  return std::any_of(graph.nodes.begin(), graph.nodes.end(), [&](const ir::Node& node) {
    if (std::holds_alternative<ir::Compare>(node.op)) return true;
    if (std::holds_alternative<ir::UnaryGrad>(node.op)) return true;  // at an activation's kink
    if (std::holds_alternative<ir::Convert>(node.op)) {
      return is_float(graph.tensor(node.inputs[0]).dtype) &&
             !is_float(graph.tensor(node.outputs[0]).dtype);
    }
    if (const auto* unary = std::get_if<ir::Unary>(&node.op)) {
      using ir::UnaryKind;
      return unary->kind == UnaryKind::ceil || unary->kind == UnaryKind::floor ||
             unary->kind == UnaryKind::round || unary->kind == UnaryKind::sign;
    }
    const auto* binary = std::get_if<ir::Binary>(&node.op);
    return binary != nullptr && binary->kind == ir::BinaryKind::mod;
  });
}

OracleOutput expectation(const ir::Tensor& tensor, const Buffer& buffer, double error) {
  OracleOutput expected;
  expected.id = buffer.id();
  double squares = 0;
  std::size_t finite = 0;
  if (element_count(tensor.shape).value_or(0) > 0) {
    Dims index(tensor.shape.size(), 0);
    do {
      const double value =
          load_element(buffer.data(), tensor.dtype, offset_of(index, tensor.strides));
      expected.values.push_back(value);
      if (!std::isfinite(value)) continue;
      squares += value * value;
      ++finite;
    } while (next_index(index, tensor.shape));
  }
  const double size = finite > 0 ? std::sqrt(squares / static_cast<double>(finite)) : 0;
  const double roundoff = unit_roundoff(tensor.dtype);
  const double floor = smallest_subnormal(tensor.dtype);
  expected.bounds.reserve(expected.values.size());
  for (const double value : expected.values) {
    expected.bounds.push_back(2 * (roundoff * std::fabs(value) + error * size) + floor);
  }
  return expected;
}

}  // namespace

std::string disagreement(const ir::Graph& graph, const Arithmetic& arithmetic,
                         std::span<const Buffer> first, std::span<const Buffer> other) {
  const double error = is_integral(graph) ? 0 : error_of(graph, arithmetic);
  const bool may_jump = jumps(graph);
  for (const Buffer& buffer : first) {
    // One output at a time: values and bounds take eight bytes for each element.
    const std::vector<OracleOutput> expected{expectation(graph.tensor(buffer.id()), buffer, error)};
    Comparison comparison = compare(graph, other, expected);
    OutputComparison& output = comparison.outputs.front();
    const double wrong = static_cast<double>(output.wrong);
    const bool few = wrong <= kOtherSide * static_cast<double>(output.elements);
    if (may_jump && few && output.unwritten == 0) output.wrong = 0;
    if (!comparison.ok()) return comparison.text();
  }
  return {};
}

}  // namespace lawson::plan
