#include "random_graph.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "ir/json.h"

namespace lawson::ir::test {
namespace {

class Dice {
 public:
  explicit Dice(std::uint64_t seed) : engine_{seed} {}
  // Portable where std::uniform_int_distribution is not.
  std::int64_t below(std::int64_t n) {
    return static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(n));
  }
  bool coin() { return below(2) == 0; }
  template <typename T>
  const T& of(const std::vector<T>& list) {
    return list[static_cast<std::size_t>(below(static_cast<std::int64_t>(list.size())))];
  }

 private:
  std::mt19937_64 engine_;
};

Tensor random_input(Dice& dice, std::size_t index, Dims shape) {
  Tensor tensor;
  tensor.name = "x" + std::to_string(index);
  tensor.dtype = dice.of(std::vector{DType::f32, DType::f16, DType::bf16, DType::f64, DType::i8});
  tensor.shape = std::move(shape);
  if (dice.coin()) {
    tensor.strides = contiguous_strides(tensor.shape);
    if (tensor.strides.size() >= 2) tensor.strides[0] += 16;
  }
  tensor.alignment = dice.coin() ? 16 : 4;
  if (dice.below(3) == 0) tensor.domain = std::pair<std::int64_t, std::int64_t>{-2, 5};
  return tensor;
}

// One op over what is there already; refused ones (a shape or a type that does not fit) are fine.
Result<TensorId> random_op(Dice& dice, Builder& builder, const std::vector<TensorId>& pool) {
  const TensorId a = dice.of(pool);
  const TensorId b = dice.of(pool);
  const Dims& shape = builder.tensor(a).shape;
  const auto rank = static_cast<std::int64_t>(shape.size());
  switch (dice.below(12)) {
    case 0:
      return builder.add1(Matmul{}, {a, b});
    case 1:
      return builder.add1(Convert{}, {a}, dice.of(std::vector{DType::f32, DType::bf16}));
    case 2: {
      Unary unary{static_cast<UnaryKind>(dice.below(kUnaryCount)), 0};
      if (unary.kind == UnaryKind::leaky_relu || unary.kind == UnaryKind::elu) {
        unary.parameter = 0.125;
      }
      return builder.add1(unary, {a});
    }
    case 3:
      return builder.add1(Binary{static_cast<BinaryKind>(dice.below(kBinaryCount))}, {a, b});
    case 4: {
      auto predicate =
          builder.add1(Compare{static_cast<CompareKind>(dice.below(kCompareCount))}, {a, b});
      if (!predicate.ok()) return predicate;
      return builder.add1(Select{}, {*predicate, a, b});
    }
    case 5:
      return builder.add1(Clamp{-1.5, static_cast<double>(dice.below(4))}, {a});
    case 6:
      return builder.add1(
          Binary{BinaryKind::mul},
          {a, *builder.add1(Constant{0.1 * static_cast<double>(dice.below(9))}, {})});
    case 7: {
      Dims perm(shape.size());
      for (std::size_t i = 0; i < perm.size(); ++i) perm[i] = static_cast<std::int64_t>(i);
      std::reverse(perm.begin(), perm.end());
      return builder.add1(Transpose{perm}, {a});
    }
    case 8: {
      Slice slice{Dims(shape.size(), 0), shape, Dims(shape.size(), 1)};
      if (rank > 0 && shape[0] > 1) slice.start[0] = 1;
      return builder.add1(slice, {a});
    }
    case 9:
      return builder.add1(Reshape{{element_count(shape).value_or(1)}}, {a});
    case 10:
      if (rank == 0) return builder.add1(Broadcast{{3}}, {a});
      return builder.add1(
          Reduce{
              static_cast<ReduceKind>(dice.below(kReduceCount)), {dice.below(rank)}, dice.coin()},
          {a});
    default: {
      Dims wider = shape;
      wider.insert(wider.begin(), 2);
      if (dice.coin()) return builder.add1(Broadcast{wider}, {a});
      return builder.add1(Iota{0, {4}}, {}, DType::f32);
    }
  }
}

}  // namespace

Graph random_graph(std::uint64_t seed) {
  Dice dice{seed};
  Builder builder("random-" + std::to_string(seed));
  builder.strict(dice.below(4) == 0);
  std::vector<TensorId> pool;
  const std::int64_t inputs = 1 + dice.below(3);
  for (std::int64_t i = 0; i < inputs; ++i) {
    const Dims shape = dice.of(std::vector<Dims>{{2, 4, 4}, {4, 4}, {1, 4}, {4}, {2, 1, 4}});
    pool.push_back(*builder.input(random_input(dice, static_cast<std::size_t>(i), shape)));
  }
  std::vector<TensorId> computed;
  while (computed.size() < 6) {
    const auto id = random_op(dice, builder, pool);
    if (!id.ok()) continue;
    computed.push_back(*id);
    pool.push_back(*id);
  }
  EXPECT_TRUE(builder.output(computed.back()).ok());
  const TensorId second = computed[2];
  const bool strided = builder.tensor(second).shape.size() == 2;
  Dims strides;
  if (strided) strides = {1, builder.tensor(second).shape[0]};
  EXPECT_TRUE(builder.output(second, strides, dice.coin() ? 16 : 8).ok());
  auto graph = std::move(builder).finish();
  EXPECT_TRUE(graph.ok()) << graph.error().message;
  return *std::move(graph);
}

Json rewritten(const Graph& graph, std::uint64_t seed) {
  Dice dice{seed};
  Json document = graph_to_json(graph);
  std::map<std::string, std::string> renamed;
  for (const Tensor& tensor : graph.tensors) {
    renamed[tensor.name] = "renamed " + std::to_string(renamed.size() * 7 % 1000);
  }
  const auto rename = [&](Json& name) {
    if (name.is_string()) name = renamed.at(name.get<std::string>());
  };
  document["name"] = "another";
  for (Json& input : document["inputs"]) {
    rename(input["name"]);
    input["domain"] = {0, 1};
    const auto count = element_count(input["shape"].get<Dims>()).value_or(0);
    if (count == 1) input["values"] = {0.5};
  }
  for (Json& op : document["ops"]) {
    for (Json& name : op["in"]) rename(name);
    for (Json& name : op["out"]) rename(name);
  }
  for (Json& output : document["outputs"]) rename(output["name"]);

  // Another dependency order: take any op whose operands are there.
  std::vector<std::string> known;
  for (const Json& input : document["inputs"]) known.push_back(input["name"]);
  std::vector<Json> waiting(document["ops"].begin(), document["ops"].end());
  Json ordered = Json::array();
  while (!waiting.empty()) {
    const auto ready = [&](const Json& op) {
      return std::all_of(op["in"].begin(), op["in"].end(), [&](const Json& name) {
        return name.is_null() ||
               std::find(known.begin(), known.end(), name.get<std::string>()) != known.end();
      });
    };
    const auto start =
        static_cast<std::size_t>(dice.below(static_cast<std::int64_t>(waiting.size())));
    for (std::size_t i = 0; i < waiting.size(); ++i) {
      const std::size_t at = (start + i) % waiting.size();
      if (!ready(waiting[at])) continue;
      for (const Json& name : waiting[at]["out"]) known.push_back(name);
      ordered.push_back(waiting[at]);
      waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(at));
      break;
    }
  }
  ordered.insert(ordered.begin(), Json{{"op", "constant"}, {"out", "dead"}, {"value", 3}});
  ordered.push_back({{"op", "neg"}, {"in", "dead"}, {"out", "dead too"}});
  document["ops"] = std::move(ordered);
  return document;
}

}  // namespace lawson::ir::test
