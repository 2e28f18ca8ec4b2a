// Plans with dynamic shapes in the real cuDNN, without a device.
#include <algorithm>
#include <cstdlib>

#include "cases/cases.h"
#include "engine/cudnn/deviceless.h"
#include "engine/cudnn/kernel_families.h"

namespace lawson::cudnn {
namespace {

ir::Graph product(std::int64_t m) {
  return graph_of({{"lawson", 1},
                   {"kind", "graph"},
                   {"name", "g"},
                   {"inputs",
                    {{{"name", "x"}, {"dtype", "bf16"}, {"shape", {m, 256}}},
                     {{"name", "w"}, {"dtype", "bf16"}, {"shape", {256, 512}}}}},
                   {"ops",
                    {{{"op", "matmul"}, {"in", {"x", "w"}}, {"out", "p"}, {"dtype", "f32"}},
                     {{"op", "relu"}, {"in", {"p"}}, {"out", "y"}, {"dtype", "bf16"}}}},
                   {"outputs", {"y"}}});
}

ir::Graph attention(const char* pass, std::int64_t length) {
  auto graph = cases::graph_of({"a",
                                {{"lawson", 1},
                                 {"kind", "attention"},
                                 {"name", "a"},
                                 {"pass", pass},
                                 {"dtype", "bf16"},
                                 {"heads", 4},
                                 {"seqlen_q", length},
                                 {"head_dim_qk", 64},
                                 {"mask", "causal"}},
                                1,
                                plan::InputStyle::normal});
  EXPECT_TRUE(graph.ok());
  return std::move(graph).value();
}

Options with_dynamic_shapes() {
  Options options;
  options.dynamic_shapes = true;
  return options;
}

bool is_dynamic(const Verdict& verdict) {
  return std::count(verdict.rewrites.begin(), verdict.rewrites.end(), kDynamicShapes) == 1;
}

Plan compiled(const ir::Graph& graph, const Options& options) {
  auto plan = engine().compile(graph, target("h200"), options, std::nullopt, {});
  EXPECT_TRUE(plan.ok()) << (plan.ok() ? "" : plan.error().message);
  return plan.ok() ? *std::move(plan) : Plan{};
}

TEST(DynamicShapes, AVerdictSaysSoAndItsKeyAndPlanAreOthers) {
  Options options = with_dynamic_shapes();
  options.strength = Strength::built;
  for (const char* name : {"a100", "h200", "b200"}) {
    const Verdict verdict = probe(product(512), name, options);
    ASSERT_EQ(verdict.decision, Decision::supported) << name;
    EXPECT_TRUE(is_dynamic(verdict)) << name;
  }
  Options own;
  own.strength = Strength::built;
  const Verdict dynamic = probe(product(512), "h200", options);
  const Verdict fixed = probe(product(512), "h200", own);
  EXPECT_FALSE(is_dynamic(fixed));
  EXPECT_NE(dynamic.key, fixed.key);
  EXPECT_NE(dynamic.plan_id, fixed.plan_id);
  const Plan plan = compiled(product(512), options);
  EXPECT_EQ(plan.plan_id, dynamic.plan_id);
  EXPECT_TRUE(engine().load(plan, target("h200")).ok());
}

// The kernel is most of a plan; one for other sizes has other code.
TEST(DynamicShapes, AnotherSizeTakesTheKernelThatIsThere) {
  const Plan first = compiled(product(512), with_dynamic_shapes());
  int shared = 0;
  for (const std::int64_t m : {8, 64, 256, 384, 448, 504}) {
    const Plan other = compiled(product(m), with_dynamic_shapes());
    if (other.plan_name != first.plan_name) continue;  // the heuristics' choice is another
    ++shared;
    EXPECT_LT(std::abs(static_cast<std::int64_t>(first.bytes.size() - other.bytes.size())), 500)
        << m;
  }
  EXPECT_GT(shared, 0);
}

// cuDNN 9.19 takes a forward attention with dynamic shapes and computes all lengths but the first
// wrongly; its backward engines refuse ("does not support dynamic shape").
TEST(DynamicShapes, AttentionGetsPlansForItsOwnShapes) {
  for (const char* pass : {"forward", "backward"}) {
    const Verdict verdict = probe(attention(pass, 256), "h200", with_dynamic_shapes());
    EXPECT_EQ(verdict.decision, Decision::supported) << pass;
    EXPECT_FALSE(is_dynamic(verdict)) << pass;
  }
}

}  // namespace
}  // namespace lawson::cudnn
