// The builder: canonical numbering, and what it refuses.
#include "ir/graph.h"

#include <gtest/gtest.h>

namespace lawson::ir {
namespace {

Tensor input(std::string name, Dims shape, Dims strides = {}) {
  Tensor tensor;
  tensor.name = std::move(name);
  tensor.shape = std::move(shape);
  tensor.strides = std::move(strides);
  return tensor;
}

template <typename T>
std::string message(const T& result) {
  return result.ok() ? "ok" : result.error().message;
}

bool has(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

TEST(Builder, NumbersInputsOutputsThenIntermediates) {
  Builder builder("numbers");
  const TensorId x = *builder.input(input("x", {4}));
  const TensorId a = *builder.add1(Unary{UnaryKind::exp}, {x}, std::nullopt, "a");
  const TensorId dead = *builder.add1(Unary{UnaryKind::neg}, {x}, std::nullopt, "dead");
  const TensorId b = *builder.add1(Unary{UnaryKind::neg}, {a}, std::nullopt, "b");
  const TensorId y = *builder.input(input("y", {4}));
  const TensorId c = *builder.add1(Binary{BinaryKind::add}, {b, y}, std::nullopt, "c");
  ASSERT_TRUE(builder.output(c).ok());
  ASSERT_TRUE(builder.output(a).ok());
  static_cast<void>(dead);
  const auto graph = std::move(builder).finish();
  ASSERT_TRUE(graph.ok()) << graph.error().message;
  std::vector<std::string> names;
  for (const Tensor& tensor : graph->tensors) names.push_back(tensor.name);
  EXPECT_EQ(names, (std::vector<std::string>{"x", "y", "c", "a", "b"}));
  EXPECT_EQ(graph->input_count, 2);
  EXPECT_EQ(graph->output_count, 2);
  EXPECT_EQ(graph->nodes.size(), 3U);
  EXPECT_EQ(Graph::uid(0), 1);
}

TEST(Builder, HandlesDeepAndSharedGraphs) {
  Builder builder("deep");
  TensorId id = *builder.input(input("x", {1}));
  // Each op reads its operand twice: 2^2000 paths, 2000 ops.
  for (int i = 0; i < 2000; ++i) id = *builder.add1(Binary{BinaryKind::add}, {id, id});
  ASSERT_TRUE(builder.output(id).ok());
  const auto graph = std::move(builder).finish();
  ASSERT_TRUE(graph.ok()) << graph.error().message;
  EXPECT_EQ(graph->nodes.size(), 2000U);
}

TEST(Builder, RefusesBadInputs) {
  Builder builder("bad");
  ASSERT_TRUE(builder.input(input("x", {4})).ok());
  EXPECT_TRUE(has(message(builder.input(input("x", {4}))), "'x' is used twice"));
  EXPECT_TRUE(has(message(builder.input(input("", {4}))), "no name"));
  EXPECT_TRUE(has(message(builder.input(input("a", {-1}))), "dim -1"));
  EXPECT_TRUE(has(message(builder.input(input("a", {INT64_MAX}))), "9223372036854775807"));
  EXPECT_TRUE(has(message(builder.input(input("a", {kMaxDim, kMaxDim}))), "elements"));
  EXPECT_TRUE(has(message(builder.input(input("a", Dims(9, 1)))), "rank 9"));
  EXPECT_TRUE(has(message(builder.input(input("a", {2}, {1, 1}))), "2 strides"));
  EXPECT_TRUE(has(message(builder.input(input("a", {2}, {-1}))), "negative"));
  EXPECT_TRUE(has(message(builder.input(input("a", {2}, {INT64_MAX}))), "strides"));
  Tensor unaligned = input("a", {2});
  unaligned.alignment = 3;
  EXPECT_TRUE(has(message(builder.input(unaligned)), "alignment 3"));
}

TEST(Builder, RefusesBadOutputs) {
  Builder builder("bad");
  const TensorId x = *builder.input(input("x", {4, 4}));
  const TensorId y = *builder.add1(Unary{UnaryKind::neg}, {x}, std::nullopt, "y");
  EXPECT_TRUE(has(message(builder.output(x)), "is an input"));
  EXPECT_TRUE(has(message(builder.output(y, {1, 1})), "overlap"));
  EXPECT_TRUE(has(message(builder.output(y, {0, 1})), "overlap"));
  EXPECT_TRUE(has(message(builder.output(y, {3, 1})), "overlap"));
  EXPECT_TRUE(has(message(builder.output(y, {4, 1}, 5)), "alignment 5"));
  EXPECT_TRUE(builder.output(y, {1, 4}).ok());
  EXPECT_TRUE(has(message(builder.output(y)), "twice"));
  Builder empty("empty");
  EXPECT_TRUE(has(message(std::move(empty).finish()), "no output"));
}

TEST(Builder, ResultNamesAreUnique) {
  Builder builder("names");
  const TensorId x = *builder.input(input("x", {4}));
  EXPECT_TRUE(has(message(builder.add1(Unary{}, {x}, std::nullopt, "x")), "used twice"));
}

TEST(Builder, AttentionHasItsResults) {
  using Back = AttentionBackward;
  Builder builder("attention");
  const TensorId x = *builder.input(input("x", {1, 2, 8, 8}));
  const TensorId stats = *builder.input(input("stats", {1, 2, 8, 1}));
  std::vector<TensorId> in(Attention::kInputs, kNone);
  in[Attention::q] = in[Attention::k] = in[Attention::v] = x;
  EXPECT_TRUE(
      has(message(builder.add(Attention{}, in, {{"", {}, false}, {"s", {}, true}})), "result 0"));
  EXPECT_TRUE(builder.add(Attention{}, in, {{"o", {}, true}}).ok());
  std::vector<TensorId> back(Back::kInputs, kNone);
  back[Back::q] = back[Back::k] = back[Back::v] = back[Back::o] = back[Back::dout] = x;
  back[Back::stats] = stats;
  EXPECT_TRUE(has(message(builder.add(Back{}, back, {{"dq", {}, true}})), "result 1"));
  std::vector<Builder::ResultSpec> all{{"dq", {}, true}, {"dk", {}, true}, {"dv", {}, true}};
  all.push_back({"dbias", {}, true});
  EXPECT_TRUE(has(message(builder.add(Back{}, back, all)), "dbias needs the operand bias"));
  all.back() = {"", {}, false};
  all.push_back({"dsink", {}, true});
  EXPECT_TRUE(has(message(builder.add(Back{}, back, all)), "dsink needs the operand sink"));
  all.pop_back();
  EXPECT_TRUE(builder.add(Back{}, back, all).ok());
}

TEST(Dot, QuotesNames) {
  Builder builder("a \"quoted\" name\\");
  const TensorId x = *builder.input(input("x \"1\"", {4}));
  ASSERT_TRUE(builder.output(*builder.add1(Unary{}, {x}, std::nullopt, "y")).ok());
  const auto graph = std::move(builder).finish();
  const std::string dot = to_dot(*graph);
  EXPECT_TRUE(has(dot, "digraph \"a \\\"quoted\\\" name\\\\\""));
  EXPECT_TRUE(has(dot, "x \\\"1\\\""));
  EXPECT_TRUE(has(dot, "t0 -> n0"));
}

}  // namespace
}  // namespace lawson::ir
