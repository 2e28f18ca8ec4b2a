#include "engine/reference/evaluate.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "engine/reference/attention.h"
#include "engine/reference/cache_append.h"
#include "engine/reference/matmul.h"
#include "engine/reference/norm.h"
#include "engine/reference/reduce.h"
#include "engine/reference/scaled_matmul.h"
#include "engine/reference/unary_grad.h"

namespace lawson::reference {
namespace {

using ir::BinaryKind;
using ir::UnaryKind;

double sigmoid(double x) {
  return 1.0 / (1.0 + std::exp(-x));
}

template <typename Function>
Array pointwise(Array result, const Operands& operands, Function function) {
  std::vector<Dims> strides;
  for (const Array* operand : operands) {
    strides.push_back(broadcast_strides(operand->shape, result.shape));
  }
  for_each_index(result.shape, strides,
                 [&](std::size_t i, const auto& at) { result.value[i] = function(at); });
  return result;
}

Array concat(Array result, const ir::Concat& op, const Operands& operands) {
  const Dims strides = contiguous_strides(result.shape);
  std::size_t start = 0;
  for (const Array* x : operands) {
    for_each_index(x->shape, {strides}, [&](std::size_t i, const auto& at) {
      result.value[start + at[0]] = x->value[i];
    });
    const auto axis = static_cast<std::size_t>(op.axis);
    start += static_cast<std::size_t>(x->shape[axis] * strides[axis]);
  }
  return result;
}

}  // namespace

double apply(const ir::Unary& unary, double x) {
  switch (unary.kind) {
    case UnaryKind::neg:
      return -x;
    case UnaryKind::abs:
      return std::fabs(x);
    case UnaryKind::exp:
      return std::exp(x);
    case UnaryKind::log:
      return std::log(x);
    case UnaryKind::log1p:
      return std::log1p(x);
    case UnaryKind::expm1:
      return std::expm1(x);
    case UnaryKind::sqrt:
      return std::sqrt(x);
    case UnaryKind::rsqrt:
      return 1.0 / std::sqrt(x);
    case UnaryKind::reciprocal:
      return 1.0 / x;
    case UnaryKind::sin:
      return std::sin(x);
    case UnaryKind::cos:
      return std::cos(x);
    case UnaryKind::tan:
      return std::tan(x);
    case UnaryKind::tanh:
      return std::tanh(x);
    case UnaryKind::erf:
      return std::erf(x);
    case UnaryKind::ceil:
      return std::ceil(x);
    case UnaryKind::floor:
      return std::floor(x);
    case UnaryKind::round:
      return std::nearbyint(x);  // half to even
    case UnaryKind::sign:
      return std::isnan(x) ? x : x > 0 ? 1.0 : x < 0 ? -1.0 : 0.0;
    case UnaryKind::sigmoid:
      return sigmoid(x);
    case UnaryKind::relu:
      return x < 0 ? 0.0 : x;
    case UnaryKind::leaky_relu:
      return x < 0 ? unary.parameter * x : x;
    case UnaryKind::relu6:
      return x < 0 ? 0.0 : x > 6 ? 6.0 : x;
    case UnaryKind::elu:
      return x < 0 ? unary.parameter * std::expm1(x) : x;
    case UnaryKind::softplus:
      return (x > 0 ? x : 0.0) + std::log1p(std::exp(-std::fabs(x)));
    case UnaryKind::silu:
      return x * sigmoid(x);
    case UnaryKind::gelu:
      return 0.5 * x * std::erfc(-x / std::numbers::sqrt2);
    case UnaryKind::gelu_tanh: {
      const double inner = std::sqrt(2.0 / std::numbers::pi) * (x + 0.044715 * x * x * x);
      return x * sigmoid(2 * inner);  // 0.5 x (1 + tanh(inner))
    }
  }
  return x;
}

double apply(BinaryKind kind, double a, double b, bool integer) {
  const bool unordered = std::isnan(a) || std::isnan(b);
  switch (kind) {
    case BinaryKind::add:
      return a + b;
    case BinaryKind::sub:
      return a - b;
    case BinaryKind::mul:
      return a * b;
    case BinaryKind::div:
      return integer ? std::trunc(a / b) : a / b;
    case BinaryKind::pow:
      return std::pow(a, b);
    case BinaryKind::min:
      return unordered ? a + b : std::min(a, b);
    case BinaryKind::max:
      return unordered ? a + b : std::max(a, b);
    case BinaryKind::mod:
      return std::fmod(a, b);  // the dividend's sign
  }
  return a;
}

bool apply(ir::CompareKind kind, double a, double b) {
  switch (kind) {
    case ir::CompareKind::eq:
      return a == b;
    case ir::CompareKind::ne:
      return a != b;
    case ir::CompareKind::lt:
      return a < b;
    case ir::CompareKind::le:
      return a <= b;
    case ir::CompareKind::gt:
      return a > b;
    case ir::CompareKind::ge:
      return a >= b;
  }
  return false;
}

Dims reduced_strides(const Dims& shape, const Dims& axes) {
  Dims kept = shape;
  for (const std::int64_t axis : axes) kept[static_cast<std::size_t>(axis)] = 1;
  Dims strides = contiguous_strides(kept);
  for (const std::int64_t axis : axes) strides[static_cast<std::size_t>(axis)] = 0;
  return strides;
}

std::pair<std::size_t, Dims> view_of(const ir::Op& op, const Array& x, const Dims& shape) {
  const Dims own = contiguous_strides(x.shape);
  if (const auto* transpose = std::get_if<ir::Transpose>(&op)) {
    Dims strides;
    for (const std::int64_t axis : transpose->perm) {
      strides.push_back(own[static_cast<std::size_t>(axis)]);
    }
    return {0, strides};
  }
  if (const auto* slice = std::get_if<ir::Slice>(&op)) {
    Dims strides(own.size());
    for (std::size_t i = 0; i < own.size(); ++i) strides[i] = own[i] * slice->stride[i];
    return {static_cast<std::size_t>(offset_of(slice->start, own)), strides};
  }
  if (std::holds_alternative<ir::Broadcast>(op)) return {0, broadcast_strides(x.shape, shape)};
  return {0, contiguous_strides(shape)};  // reshape
}

Status check_operands(const ir::Graph& graph, const ir::Node& node, const Operands& operands) {
  if (ir::attention_rule(node.op) != nullptr) {
    return AttentionProblem(graph, node, operands).check();
  }
  if (std::holds_alternative<ir::CacheAppend>(node.op)) return check_cache_append(operands);
  return {};
}

std::vector<Array> evaluate(const ir::Graph& graph, const ir::Node& node,
                            const Operands& operands) {
  std::vector<Array> results;
  for (const ir::TensorId id : node.outputs) {
    results.push_back(id == ir::kNone ? Array{}
                                      : make_array(graph.tensor(id).dtype, graph.tensor(id).shape));
  }
  const bool integer = !results.empty() && is_integer(results[0].dtype);
  const auto unary = [&](auto function) {
    const Array& x = *operands[0];
    results[0] = pointwise(std::move(results[0]), operands,
                           [&](const auto& at) { return function(x.value[at[0]]); });
  };
  const auto binary = [&](auto function) {
    const Array& a = *operands[0];
    const Array& b = *operands[1];
    results[0] = pointwise(std::move(results[0]), operands, [&](const auto& at) -> double {
      return function(a.value[at[0]], b.value[at[1]]);
    });
  };
  const auto view = [&](const ir::Op& op) {
    const auto source = view_of(op, *operands[0], results[0].shape);
    for_each_index(results[0].shape, {source.second}, [&](std::size_t i, const auto& at) {
      results[0].value[i] = operands[0]->value[source.first + at[0]];
    });
  };
  std::visit(
      ir::Overloaded{
          [&](const ir::Matmul&) { matmul(*operands[0], *operands[1], results[0]); },
          [&](const ir::Convert&) { unary([](double x) { return x; }); },
          [&](const ir::Unary& op) { unary([&](double x) { return apply(op, x); }); },
          [&](const ir::Binary& op) {
            // Division truncates only when both operands are integers.
            const bool truncate =
                integer && !is_float(operands[0]->dtype) && !is_float(operands[1]->dtype);
            binary([&](double a, double b) { return apply(op.kind, a, b, truncate); });
          },
          [&](const ir::Compare& op) {
            binary([&](double a, double b) { return apply(op.kind, a, b) ? 1.0 : 0.0; });
          },
          [&](const ir::Logical& op) {
            if (op.kind == ir::LogicalKind::not_) {
              unary([](double x) { return x != 0 ? 0.0 : 1.0; });
              return;
            }
            const bool both = op.kind == ir::LogicalKind::and_;
            binary([&](double a, double b) {
              const bool result = both ? a != 0 && b != 0 : a != 0 || b != 0;
              return result ? 1.0 : 0.0;
            });
          },
          [&](const ir::Select&) {
            results[0] = pointwise(std::move(results[0]), operands, [&](const auto& at) {
              return operands[0]->value[at[0]] != 0 ? operands[1]->value[at[1]]
                                                    : operands[2]->value[at[2]];
            });
          },
          [&](const ir::Clamp& op) {
            unary([&](double x) { return std::isnan(x) ? x : std::clamp(x, op.min, op.max); });
          },
          [&](const ir::Iota& op) {
            const Dims strides = contiguous_strides(op.shape);
            const auto axis = static_cast<std::size_t>(op.axis);
            for (std::size_t i = 0; i < results[0].size(); ++i) {
              results[0].value[i] = static_cast<double>(static_cast<std::int64_t>(i) /
                                                        strides[axis] % op.shape[axis]);
            }
          },
          [&](const ir::Constant& op) { results[0].value[0] = op.value; },
          [&](const ir::Reduce& op) { reduce(op, *operands[0], results[0]); },
          [&](const ir::ScaledMatmul&) { scaled_matmul(graph, node, operands, results[0]); },
          [&](const ir::UnaryGrad& op) {
            binary([&](double dy, double x) { return dy * slope_at(op, x); });
          },
          [&](const ir::Concat& op) { results[0] = concat(std::move(results[0]), op, operands); },
          [&](const ir::Norm& op) { norm(op, operands, results); },
          [&](const ir::NormBackward& op) { norm_backward(op, operands, results); },
          [&](const ir::Attention&) { attention_forward(graph, node, operands, results); },
          [&](const ir::AttentionBackward&) { attention_backward(graph, node, operands, results); },
          [&](const ir::CacheAppend&) { cache_append(operands, results[0]); },
          [&](const ir::Broadcast&) { view(node.op); },
          [&](const ir::Reshape&) { view(node.op); },
          [&](const ir::Transpose&) { view(node.op); },
          [&](const ir::Slice&) { view(node.op); },
      },
      node.op);
  return results;
}

}  // namespace lawson::reference
