// What the list of fusions promises to hold.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "cases/cases.h"
#include "cases/fusion_writer.h"
#include "engine/cpu/cpu.h"
#include "engine/reference/reference.h"
#include "ir/infer.h"
#include "ir/json.h"

namespace lawson::cases {
namespace {

constexpr std::uint64_t kSeed = 1;  // the list that lawson-parity runs
constexpr int kAll = 3000;

const std::vector<Case>& all_cases() {
  static const std::vector<Case> cases = fusion_cases(kSeed, kAll);
  return cases;
}

using Counts = std::map<std::string, int>;

bool is_product(const Json& op) {
  return op["op"] == "matmul" || op["op"] == "scaled_matmul";
}

// Ops behind the first product; 0 without a product.
int post_ops(const Json& spec) {
  int count = 0;
  bool behind = false;
  for (const Json& op : spec["ops"]) {
    if (behind && is_counted(op["op"].get<std::string>())) ++count;
    behind = behind || is_product(op);
  }
  return count;
}

std::vector<DType> all_dtypes() {
  std::vector<DType> dtypes;
  for (int i = 0; i < kDTypeCount; ++i) dtypes.push_back(static_cast<DType>(i));
  return dtypes;
}

// Does what is reduced go on, or is it the end?
void count_reductions(const ir::Graph& graph, Counts& seen) {
  for (const ir::Node& node : graph.nodes) {
    const auto* reduce = std::get_if<ir::Reduce>(&node.op);
    if (reduce == nullptr) continue;
    const ir::TensorId id = node.outputs[0];
    const bool read = std::any_of(graph.nodes.begin(), graph.nodes.end(), [&](const ir::Node& n) {
      return std::find(n.inputs.begin(), n.inputs.end(), id) != n.inputs.end();
    });
    ++seen[read ? "reduction in the middle" : "reduction at the exit"];
    std::string axes;
    for (const std::int64_t axis : reduce->axes) axes += std::to_string(axis);
    ++seen[fmt::format("rank {} axes {}", graph.tensor(node.inputs[0]).shape.size(), axes)];
  }
}

void count_layouts(const ir::Graph& graph, Counts& seen) {
  for (ir::TensorId id = 0; id < graph.input_count + graph.output_count; ++id) {
    const ir::Tensor& t = graph.tensor(id);
    const std::size_t r = t.shape.size();
    const char* side = graph.is_input(id) ? "input" : "output";
    ++seen[fmt::format("{} rank {}", side, r)];
    ++seen[fmt::format("{} {}", side, to_string(t.dtype))];
    for (std::size_t axis = 0; axis < r; ++axis) {
      if (t.shape[axis] == 1) ++seen["unit dim"];
      if (t.shape[axis] % 2 == 1) ++seen["odd dim"];
      if (t.strides[axis] == 0 && t.shape[axis] > 1) ++seen["repeated dim"];
    }
    if (r < 2 || t.shape[r - 1] <= 1 || t.shape[r - 2] <= 1) continue;
    if (t.strides[r - 2] == 1) ++seen[fmt::format("{} column-major", side)];
    if (t.strides[r - 1] == 1 && t.strides[r - 2] > t.shape[r - 1]) {
      ++seen[fmt::format("{} padded rows", side)];
    }
    if (r == 4 && t.shape[0] > 1 && t.shape[1] > 1) {
      const bool folds = t.strides[0] == t.strides[1] * t.shape[1];
      ++seen[folds ? "rank 4 that folds" : "rank 4 that does not fold"];
    }
  }
}

TEST(FusionCases, EverySpecHasAGraphThatReadsBack) {
  for (const Profile profile : {Profile::any, Profile::gpu}) {
    std::set<std::string> names;
    for (const Case& item : fusion_cases(2026, 1000, profile)) {
      EXPECT_TRUE(names.insert(item.name).second) << item.name;
      const auto graph = graph_of(item);
      ASSERT_TRUE(graph.ok()) << item.text() << ": " << graph.error().message << "\n"
                              << item.spec.dump();
      const auto again = ir::graph_from_json(ir::graph_to_json(*graph), "written and read");
      ASSERT_TRUE(again.ok()) << item.text() << ": " << again.error().message;
      EXPECT_EQ(ir::canonical_text(*again), ir::canonical_text(*graph)) << item.text();
    }
  }
}

TEST(FusionCases, EveryOpIsThere) {
  Counts seen;
  for (const Case& item : all_cases()) {
    for (const Json& op : item.spec["ops"]) ++seen[op["op"].get<std::string>()];
  }
  for (const std::string& name : ir::all_op_names()) {
    if (name.starts_with("attention") || name == "cache_append") continue;
    EXPECT_GE(seen[name], 15) << name;
  }
}

TEST(FusionCases, EveryPairOfTypesThatAMatmulMayHaveIsThere) {
  std::set<std::pair<DType, DType>> seen;
  for (const Case& item : all_cases()) {
    const auto graph = graph_of(item);
    ASSERT_TRUE(graph.ok()) << item.text() << ": " << graph.error().message;
    for (const ir::Node& node : graph->nodes) {
      if (!std::holds_alternative<ir::Matmul>(node.op)) continue;
      seen.emplace(graph->tensor(node.inputs[0]).dtype, graph->tensor(node.inputs[1]).dtype);
    }
  }
  int allowed = 0;
  for (const DType a : all_dtypes()) {
    for (const DType b : all_dtypes()) {
      ir::Tensor x;
      x.shape = {2, 2};
      x.strides = {2, 1};
      ir::Tensor y = x;
      x.dtype = a;
      y.dtype = b;
      if (!ir::infer(ir::Matmul{}, {&x, &y}, std::nullopt).ok()) continue;
      ++allowed;
      EXPECT_TRUE(seen.contains({a, b})) << to_string(a) << " x " << to_string(b);
    }
  }
  EXPECT_GT(allowed, 80);
}

TEST(FusionCases, EveryCountOfPostOpsEveryRankEveryLayout) {
  Counts seen;
  std::map<int, int> behind;
  for (const Case& item : all_cases()) {
    ++behind[post_ops(item.spec)];
    const auto graph = graph_of(item);
    ASSERT_TRUE(graph.ok()) << item.text();
    count_reductions(*graph, seen);
    count_layouts(*graph, seen);
    if (graph->output_count > 1) ++seen["several outputs"];
    if (graph->output_count > 2) ++seen["three outputs or more"];
    if (graph->strict) ++seen["strict"];
    int products = 0;
    for (const ir::Node& node : graph->nodes) {
      const bool plain = std::holds_alternative<ir::Matmul>(node.op);
      products += plain ? 1 : 0;
      if (!plain) continue;
      const ir::Tensor& a = graph->tensor(node.inputs[0]);
      if (a.shape.back() == 1) ++seen["K = 1"];
      ++seen[fmt::format("matmul rank {}", a.shape.size())];
      if (!graph->is_input(node.inputs[0])) ++seen["pre-ops on A"];
      if (!graph->is_input(node.inputs[1])) ++seen["pre-ops on B"];
    }
    ++seen[fmt::format("{} products", products)];
    for (const Json& op : item.spec["ops"]) {
      if (op["op"] == "scaled_matmul") {
        ++seen[op.value("swizzled", false) ? "scales swizzled" : "scales in rows"];
      }
    }
  }
  for (int count = 1; count <= 12; ++count) EXPECT_GE(behind[count], 60) << count << " post-ops";
  EXPECT_GE(behind[0], 300) << "graphs that end in their product, or have none";
  for (const auto& [what, at_least] :
       std::vector<std::pair<const char*, int>>{{"several outputs", 700},
                                                {"three outputs or more", 100},
                                                {"strict", 200},
                                                {"K = 1", 100},
                                                {"unit dim", 1000},
                                                {"odd dim", 3000},
                                                {"repeated dim", 400},
                                                {"rank 4 that folds", 100},
                                                {"rank 4 that does not fold", 100},
                                                {"input column-major", 400},
                                                {"input padded rows", 400},
                                                {"output column-major", 60},
                                                {"output padded rows", 60},
                                                {"matmul rank 2", 300},
                                                {"matmul rank 3", 500},
                                                {"matmul rank 4", 200},
                                                {"pre-ops on A", 400},
                                                {"pre-ops on B", 200},
                                                {"0 products", 500},
                                                {"1 products", 1000},
                                                {"2 products", 200},
                                                {"scales swizzled", 30},
                                                {"scales in rows", 30},
                                                {"reduction at the exit", 300},
                                                {"reduction in the middle", 300}}) {
    EXPECT_GE(seen[what], at_least) << what;
  }
  // Every set of axes of every rank, and every type in memory.
  for (int rank = 1; rank <= 4; ++rank) {
    for (int bits = 1; bits < 1 << rank; ++bits) {
      std::string axes;
      for (int i = 0; i < rank; ++i) {
        if ((bits >> i) & 1) axes += std::to_string(i);
      }
      EXPECT_GE(seen[fmt::format("rank {} axes {}", rank, axes)], 3) << rank << ": " << axes;
    }
  }
  for (const DType dtype : all_dtypes()) {
    EXPECT_GE(seen[fmt::format("input {}", to_string(dtype))], 20) << to_string(dtype);
    // i64 and scales of blocks are only read.
    if (dtype == DType::i64 || dtype == DType::f8e8m0) continue;
    EXPECT_GE(seen[fmt::format("output {}", to_string(dtype))], 10) << to_string(dtype);
  }
}

TEST(FusionCases, TheSameSeedGivesTheSameList) {
  const auto again = fusion_cases(3, 200);
  const auto first = fusion_cases(3, 200);
  const auto other = fusion_cases(4, 200);
  int different = 0;
  for (std::size_t i = 0; i < first.size(); ++i) {
    EXPECT_EQ(first[i].spec, again[i].spec);
    different += first[i].spec == other[i].spec ? 0 : 1;
  }
  EXPECT_GT(different, 190);
}

// An element that has no bound, or a bound as large as the values, shows nothing.
TEST(FusionCases, TheOracleHasBoundsForMostElements) {
  const auto cpu = make_cpu_engine();
  const auto reference = make_reference_engine();
  int cases = 0;
  int useless = 0;
  int loose = 0;
  for (const Case& item : sampled(all_cases(), 150, 3)) {
    const auto graph = graph_of(item);
    ASSERT_TRUE(graph.ok()) << item.text();
    const auto inputs = plan::make_inputs(*graph, item.seed, *reference, item.style);
    ASSERT_TRUE(inputs.ok()) << item.text() << ": " << inputs.error().message;
    const auto expected =
        reference->oracle(*graph, plan::bindings_of(*inputs, {}), cpu->arithmetic(*graph));
    ASSERT_TRUE(expected.ok()) << item.text() << ": " << expected.error().message;
    std::size_t elements = 0;
    std::size_t bound = 0;
    std::size_t tight = 0;
    for (const OracleOutput& output : *expected) {
      double size = 0;
      for (const double value : output.values) {
        if (std::isfinite(value)) size = std::max(size, std::fabs(value));
      }
      for (std::size_t i = 0; i < output.values.size(); ++i) {
        ++elements;
        const bool finite = std::isfinite(output.values[i]) && std::isfinite(output.bounds[i]);
        bound += finite ? 1U : 0U;
        tight += finite && output.bounds[i] <= std::max(0.25 * size, 1e-12) ? 1U : 0U;
      }
    }
    ++cases;
    useless += 2 * bound < elements ? 1 : 0;
    loose += 2 * tight < elements ? 1 : 0;
  }
  EXPECT_EQ(cases, 150);
  EXPECT_LE(useless, 3) << "cases most of whose elements anything is right for";
  EXPECT_LE(loose, 12) << "cases most of whose bounds are as large as the values";
}

}  // namespace
}  // namespace lawson::cases
