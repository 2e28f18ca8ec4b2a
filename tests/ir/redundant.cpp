#include "redundant.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

namespace lawson::ir::test {
namespace {

std::optional<DType> wider(DType dtype) {
  switch (dtype) {
    case DType::f16:
    case DType::bf16:
    case DType::f8e4m3:
    case DType::f8e5m2:
      return DType::f32;
    case DType::f32:
    case DType::i32:
      return DType::f64;
    case DType::i8:
      return DType::bf16;
    case DType::u8:
      return DType::i32;
    case DType::boolean:
      return DType::i8;
    default:
      return std::nullopt;
  }
}

class Rewriter {
 public:
  Rewriter(const Graph& graph, std::uint64_t seed)
      : graph_{graph}, builder_{graph.name}, engine_{seed}, values_(graph.tensors.size()) {
    builder_.strict(graph.strict);
  }

  Graph run() {
    for (TensorId id = 0; id < graph_.input_count; ++id) {
      values(id) = {*builder_.input(graph_.tensor(id))};
    }
    for (const Node& node : graph_.nodes) {
      copy(node);
      if (below(4) == 0) copy(node);
    }
    for (std::int32_t i = 0; i < graph_.output_count; ++i) {
      const Tensor& output = graph_.tensor(graph_.input_count + i);
      TensorId id = wrapped(values(graph_.input_count + i).front());
      const bool taken = std::find(outputs_.begin(), outputs_.end(), id) != outputs_.end();
      if (taken || id < graph_.input_count) id = add(Convert{}, {id}, output.dtype);
      outputs_.push_back(id);
      EXPECT_TRUE(builder_.output(id, output.strides, output.alignment).ok());
    }
    auto finished = std::move(builder_).finish();
    EXPECT_TRUE(finished.ok()) << finished.error().message;
    return *std::move(finished);
  }

 private:
  std::vector<TensorId>& values(TensorId old) { return values_[static_cast<std::size_t>(old)]; }
  std::int64_t below(std::int64_t n) {
    return static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(n));
  }
  TensorId add(Op op, std::vector<TensorId> in, DType dtype) {
    auto id = builder_.add1(std::move(op), std::move(in), dtype, fmt::format("r{}'", count_++));
    EXPECT_TRUE(id.ok()) << id.error().message;
    return *id;
  }

  // Computes the node on operands that are wrapped or not; another time, once more.
  void copy(const Node& node) {
    std::vector<TensorId> in;
    for (const TensorId id : node.inputs) {
      if (id == kNone) {
        in.push_back(kNone);
        continue;
      }
      const auto& same = values(id);
      TensorId operand = same[static_cast<std::size_t>(below(std::ssize(same)))];
      if (below(3) == 0) operand = wrapped(operand);
      in.push_back(operand);
    }
    std::vector<Builder::ResultSpec> results;
    for (const TensorId id : node.outputs) {
      const bool is_wanted = id != kNone;
      results.push_back({fmt::format("r{}'", count_++),
                         is_wanted ? std::optional{graph_.tensor(id).dtype} : std::nullopt,
                         is_wanted});
    }
    auto ids = builder_.add(node.op, in, results);
    ASSERT_TRUE(ids.ok()) << ids.error().message;
    for (std::size_t i = 0; i < ids->size(); ++i) {
      if (node.outputs[i] != kNone) values(node.outputs[i]).push_back((*ids)[i]);
    }
  }

  TensorId wrapped(TensorId x) {
    const DType dtype = builder_.tensor(x).dtype;
    const Dims shape = builder_.tensor(x).shape;
    const std::size_t rank = shape.size();
    const bool is_bool = dtype == DType::boolean;
    switch (below(12)) {
      case 0:
        return add(Convert{}, {x}, dtype);
      case 1:
        if (!wider(dtype)) return x;
        return add(Convert{}, {add(Convert{}, {x}, *wider(dtype))}, dtype);
      case 2: {
        if (rank < 2) return x;
        Dims perm(rank);
        std::iota(perm.begin(), perm.end(), 0);
        std::rotate(perm.begin(), perm.begin() + 1, perm.end());
        Dims back(rank);
        for (std::size_t i = 0; i < rank; ++i) {
          back[static_cast<std::size_t>(perm[i])] = static_cast<std::int64_t>(i);
        }
        return add(Transpose{back}, {add(Transpose{perm}, {x}, dtype)}, dtype);
      }
      case 3:
        return add(Reshape{shape}, {add(Reshape{{*element_count(shape)}}, {x}, dtype)}, dtype);
      case 4:
        return add(Broadcast{shape}, {x}, dtype);
      case 5:
        return add(Slice{Dims(rank, 0), shape, Dims(rank, 1)}, {x}, dtype);
      case 6:
        if (is_bool) {
          return add(Logical{LogicalKind::not_}, {add(Logical{LogicalKind::not_}, {x}, dtype)},
                     dtype);
        }
        if (!is_float(dtype) || dtype == DType::f8e8m0) return x;
        return add(Unary{UnaryKind::neg}, {add(Unary{UnaryKind::neg}, {x}, dtype)}, dtype);
      case 7:
        if (is_bool) return add(Logical{LogicalKind::and_}, {x, x}, dtype);
        return add(Binary{BinaryKind::mul}, {add(Constant{1}, {}, dtype), x}, dtype);
      case 8: {
        const TensorId predicate = add(Constant{static_cast<double>(below(2))}, {}, DType::boolean);
        return add(Select{}, {predicate, x, x}, dtype);
      }
      case 9: {
        if (is_bool || dtype == DType::f8e8m0) return x;  // the latter has no zero
        const TensorId one = add(Constant{1}, {}, dtype);
        const TensorId zero = add(Binary{BinaryKind::sub}, {one, one}, dtype);
        return add(Binary{BinaryKind::sub}, {x, zero}, dtype);
      }
      case 10:
        if (is_bool) return x;
        add(Unary{UnaryKind::abs}, {x}, dtype);  // nothing reads it
        return x;
      default:
        if (is_bool) return x;
        return add(Binary{BinaryKind::max}, {x, x}, dtype);
    }
  }

  const Graph& graph_;
  Builder builder_;
  std::mt19937_64 engine_;
  std::vector<std::vector<TensorId>> values_;  // tensors of equal value
  std::vector<TensorId> outputs_;
  int count_ = 0;
};

}  // namespace

Graph redundant(const Graph& graph, std::uint64_t seed) {
  Graph result = Rewriter(graph, seed).run();
  for (std::int32_t i = 0; i < graph.output_count; ++i) {
    const auto at = static_cast<std::size_t>(graph.input_count + i);
    result.tensors[at].name = graph.tensors[at].name;
  }
  return result;
}

}  // namespace lawson::ir::test
