// A turned graph computes what the graph does, in the same memory.
#include "engine/cudnn/turned.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "cases/cases.h"
#include "engine/reference/reference.h"
#include "ir/json.h"
#include "plan/inputs.h"

namespace lawson::cudnn {
namespace {

// Values by their place in memory: output number and offset in elements.
using Placed = std::map<std::pair<ir::TensorId, std::int64_t>, double>;

Placed evaluate(Engine& engine, const ir::Graph& graph, const std::vector<plan::Buffer>& inputs) {
  std::vector<Binding> bindings;
  for (const plan::Buffer& input : inputs) bindings.push_back(input.binding());
  const auto outputs = engine.oracle(graph, bindings, Arithmetic{});
  Placed placed;
  if (!outputs.ok()) {
    ADD_FAILURE() << outputs.error().message;
    return placed;
  }
  for (const OracleOutput& output : *outputs) {
    const ir::Tensor& tensor = graph.tensor(output.id);
    Dims index(tensor.shape.size(), 0);
    for (const double value : output.values) {
      std::int64_t offset = 0;
      for (std::size_t i = 0; i < index.size(); ++i) offset += index[i] * tensor.strides[i];
      placed[{output.id, offset}] = value;
      for (std::size_t i = index.size(); i-- > 0;) {
        if (++index[i] < tensor.shape[i]) break;
        index[i] = 0;
      }
    }
  }
  return placed;
}

void expect_equal(const Placed& a, const Placed& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size()) << what;
  for (const auto& [place, value] : a) {
    const auto found = b.find(place);
    ASSERT_NE(found, b.end()) << what << " output " << place.first << " at " << place.second;
    // Sums over both of the exchanged axes are in another order.
    const bool same = value == found->second || (std::isnan(value) && std::isnan(found->second)) ||
                      std::fabs(value - found->second) <= 1e-9 * (1 + std::fabs(value));
    ASSERT_TRUE(same) << what << " output " << place.first << " at " << place.second << ": "
                      << value << " and " << found->second;
  }
}

TEST(Turned, ComputesTheSameInTheSameMemory) {
  const auto engine = make_reference_engine();
  int compared = 0;
  for (const cases::Case& item : cases::fusion_cases(4, 500)) {
    const auto graph = cases::graph_of(item);
    ASSERT_TRUE(graph.ok()) << graph.error().message;
    const auto other = turned(*graph);
    if (!other) continue;
    const auto inputs = plan::make_inputs(*graph, item.seed, *engine);
    ASSERT_TRUE(inputs.ok()) << inputs.error().message;
    expect_equal(evaluate(*engine, *graph, *inputs), evaluate(*engine, *other, *inputs),
                 item.name + "\n" + ir::print(*graph) + ir::print(*other));
    if (HasFatalFailure()) return;
    ++compared;
  }
  EXPECT_GT(compared, 100);
}

TEST(Turned, PutsAVectorAlongTheRows) {
  const Json spec{{"lawson", 1},
                  {"kind", "graph"},
                  {"inputs",
                   {{{"name", "a"}, {"dtype", "bf16"}, {"shape", {3, 5}}},
                    {{"name", "b"}, {"dtype", "bf16"}, {"shape", {5, 7}}},
                    {{"name", "bias"}, {"dtype", "bf16"}, {"shape", {7}}}}},
                  {"ops",
                   {{{"op", "matmul"}, {"in", {"a", "b"}}, {"out", "p"}, {"dtype", "f32"}},
                    {{"op", "add"}, {"in", {"p", "bias"}}, {"out", "c"}}}},
                  {"outputs", {"c"}}};
  const auto graph = ir::graph_from_json(spec, "test");
  ASSERT_TRUE(graph.ok()) << graph.error().message;
  const auto other = turned(*graph);
  ASSERT_TRUE(other.has_value());
  EXPECT_EQ(other->tensor(0).shape, (Dims{5, 3}));
  EXPECT_EQ(other->tensor(0).strides, (Dims{1, 5}));
  EXPECT_EQ(other->tensor(2).shape, (Dims{7, 1}));
  EXPECT_EQ(other->tensor(3).shape, (Dims{7, 3}));
  EXPECT_EQ(other->tensor(3).strides, (Dims{1, 7}));
  EXPECT_EQ(other->nodes[0].inputs, (std::vector<ir::TensorId>{1, 0}));
}

TEST(Turned, IsNothingWithoutAProduct) {
  const Json spec{{"lawson", 1},
                  {"kind", "graph"},
                  {"inputs", {{{"name", "a"}, {"dtype", "f32"}, {"shape", {3, 5}}}}},
                  {"ops", {{{"op", "exp"}, {"in", {"a"}}, {"out", "c"}}}},
                  {"outputs", {"c"}}};
  const auto graph = ir::graph_from_json(spec, "test");
  ASSERT_TRUE(graph.ok());
  EXPECT_FALSE(turned(*graph).has_value());
}

}  // namespace
}  // namespace lawson::cudnn
