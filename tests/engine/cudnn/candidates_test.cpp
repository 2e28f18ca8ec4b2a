// Which engine configs there are for a graph, their order, and building them side by side; with the
// real cuDNN, without a device.
#include <algorithm>
#include <set>
#include <thread>

#include "deviceless.h"
#include "engine/cudnn/engine.h"
#include "engine/cudnn/tuning_table.h"
#include "front/attention.h"

namespace lawson::cudnn {
namespace {

ir::Graph product(std::int64_t m, std::int64_t n, std::int64_t k, const char* dtype = "bf16") {
  return graph_of({{"lawson", 1},
                   {"kind", "graph"},
                   {"name", "product"},
                   {"inputs",
                    {{{"name", "x"}, {"dtype", dtype}, {"shape", {m, k}}},
                     {{"name", "y"}, {"dtype", dtype}, {"shape", {k, n}}}}},
                   {"ops",
                    {{{"op", "matmul"}, {"in", {"x", "y"}}, {"out", "p"}, {"dtype", "f32"}},
                     {{"op", "gelu_tanh"}, {"in", {"p"}}, {"out", "q"}},
                     {{"op", "convert"}, {"in", {"q"}}, {"out", "r"}, {"dtype", dtype}}}},
                   {"outputs", Json::array({"r"})}});
}

std::vector<std::string> names(const ir::Graph& graph, const std::string& device,
                               const Options& options = {}) {
  const auto list = engine().candidates(graph, target(device), options);
  EXPECT_TRUE(list.ok()) << (list.ok() ? "" : list.error().message);
  std::vector<std::string> result;
  if (list.ok()) {
    for (const Candidate& candidate : *list) result.push_back(candidate.name);
  }
  return result;
}

std::size_t of_engine(const std::vector<std::string>& list, const std::string& prefix) {
  return static_cast<std::size_t>(std::count_if(
      list.begin(), list.end(), [&](const std::string& name) { return name.starts_with(prefix); }));
}

// What the table prefers for that graph on that device; empty: it says nothing.
std::vector<std::string> table_for(const ir::Graph& graph, const std::string& device) {
  const auto workload = workload_of(graph);
  const auto found = libraries();
  if (!workload || !found.ok()) return {};
  const auto nearest =
      nearest_row(tuning_tables(), target(device), (*found)->cudnn_version, *workload);
  std::vector<std::string> result;
  if (nearest) {
    for (const RankedPlan& plan : nearest->row->plans) result.push_back(plan.name);
  }
  return result;
}

TEST(Candidates, TheTablesThenTheHeuristicsThenEveryConfigThatCudnnTakes) {
  const ir::Graph graph = product(4096, 4096, 4096);
  const std::vector<std::string> table = table_for(graph, "h200");
  if (table.empty()) GTEST_SKIP() << "no rows for this version of cuDNN";
  const std::vector<std::string> list = names(graph, "h200");
  EXPECT_EQ(std::set<std::string>(list.begin(), list.end()).size(), list.size());
  ASSERT_FALSE(list.empty());
  // The table's, without those that need a device.
  std::vector<std::string> taken;
  for (const std::string& name : table) {
    if (std::find(list.begin(), list.end(), name) != list.end()) taken.push_back(name);
  }
  ASSERT_FALSE(taken.empty());
  EXPECT_TRUE(std::equal(taken.begin(), taken.end(), list.begin()));
  const std::vector<std::string> heuristics = probe(graph, "h200").plan_names;
  auto last = list.begin();
  for (const std::string& name : heuristics) {
    const auto at = std::find(list.begin(), list.end(), name);
    ASSERT_NE(at, list.end()) << name;
    if (std::find(taken.begin(), taken.end(), name) != taken.end()) continue;
    EXPECT_GT(at, last) << name;
    last = at;
  }
  // The engines that plan their grid for what the device holds at once are there because the target
  // says what that is.
  for (const char* name : {"eng1_", "eng2_", "eng4_", "eng7_"}) {
    EXPECT_GT(of_engine(list, name), 10U) << name;
  }
}

TEST(Candidates, WithoutTheDevicesOccupancyTwoEnginesAreLeftOut) {
  const ir::Graph graph = product(4096, 4096, 4096);
  Device unknown = target("h200");
  ASSERT_FALSE(unknown.occupancy.empty());
  unknown.occupancy = Json::object();
  // Keys do not tell the two apart, so what an engine has judged it does not judge again.
  const auto list = make_cudnn_engine()->candidates(graph, unknown, {});
  ASSERT_TRUE(list.ok()) << list.error().message;
  std::vector<std::string> all;
  for (const Candidate& candidate : *list) all.push_back(candidate.name);
  EXPECT_EQ(of_engine(all, "eng2"), 0U);
  EXPECT_EQ(of_engine(all, "eng4"), 0U);
  EXPECT_GT(of_engine(all, "eng1_"), 10U);
}

TEST(Candidates, AFewTilesAreSplitAlongK) {
  const auto has_split = [](const std::vector<std::string>& list) {
    return std::any_of(list.begin(), list.end(),
                       [](const std::string& name) { return name.starts_with("eng1_k17="); });
  };
  EXPECT_TRUE(has_split(names(product(16, 4096, 4096), "h200")));
  EXPECT_FALSE(has_split(names(product(4096, 4096, 4096), "h200")));
}

TEST(Candidates, OtherGraphsHaveTheHeuristicsList) {
  const ir::Graph graph =
      graph_of({{"lawson", 1},
                {"kind", "graph"},
                {"name", "pointwise"},
                {"inputs", Json::array({{{"name", "x"}, {"dtype", "f32"}, {"shape", {64, 64}}}})},
                {"ops", Json::array({{{"op", "relu"}, {"in", {"x"}}, {"out", "y"}}})},
                {"outputs", Json::array({"y"})}});
  EXPECT_EQ(names(graph, "h200"), probe(graph, "h200").plan_names);
}

TEST(Candidates, CompilingForTheDeviceOfTheTableTakesItsFirstConfig) {
  const ir::Graph graph = product(4096, 4096, 4096);
  if (table_for(graph, "h200").empty()) GTEST_SKIP() << "no rows for this version of cuDNN";
  const std::string first = names(graph, "h200").front();
  const auto plan = engine().compile(graph, target("h200"), {}, std::nullopt, {});
  ASSERT_TRUE(plan.ok()) << plan.error().message;
  EXPECT_EQ(plan->plan_name, first);
  EXPECT_NE(plan->choice.find("tuning table"), std::string::npos) << plan->choice;
  Options built;
  built.strength = Strength::built;
  const Verdict verdict = probe(graph, "h200", built);
  EXPECT_EQ(verdict.plan_name, first);
  EXPECT_EQ(verdict.plan_id, plan->plan_id);
  EXPECT_EQ(verdict.choice, plan->choice);
}

TEST(Candidates, WhereTheTableSaysNothingTheHeuristicsChoose) {
  const ir::Graph graph = product(4096, 4096, 4096);
  ASSERT_TRUE(table_for(graph, "a100").empty());
  const auto plan = engine().compile(graph, target("a100"), {}, std::nullopt, {});
  ASSERT_TRUE(plan.ok()) << plan.error().message;
  EXPECT_EQ(plan->plan_name, probe(graph, "a100").plan_names.front());
  EXPECT_EQ(plan->choice, "");
}

ir::Graph attention(std::int64_t length, std::int64_t depth, const char* pass = "forward") {
  const auto spec = front::attention_from_json({{"lawson", 1},
                                                {"kind", "attention"},
                                                {"pass", pass},
                                                {"dtype", "bf16"},
                                                {"batch", 2},
                                                {"heads", 4},
                                                {"seqlen_q", length},
                                                {"head_dim_qk", depth},
                                                {"mask", "causal"}},
                                               "test");
  EXPECT_TRUE(spec.ok()) << (spec.ok() ? "" : spec.error().message);
  auto graph = front::attention_graph(*spec, spec->pass);
  EXPECT_TRUE(graph.ok()) << (graph.ok() ? "" : graph.error().message);
  return std::move(graph).value();
}

Plan first_plan(const ir::Graph& graph, const char* device) {
  auto plan = engine().compile(graph, target(device), {}, {}, {});
  EXPECT_TRUE(plan.ok()) << (plan.ok() ? "" : plan.error().message);
  return plan.ok() ? std::move(plan).value() : Plan{};
}

TEST(Candidates, AttentionOverFewKeysHasNoCounterToClear) {
  const auto found = libraries();
  ASSERT_TRUE(found.ok());
  if ((*found)->cudnn_version / 100 != 919) GTEST_SKIP() << "measured with cuDNN 9.19 alone";
  for (const auto& [length, depth] : {std::pair{64, 64}, {64, 128}, {128, 64}}) {
    const ir::Graph graph = attention(length, depth);
    const Plan plan = first_plan(graph, "h200");
    EXPECT_TRUE(plan.plan_name.ends_with("_k24=3")) << length << ' ' << plan.plan_name;
    EXPECT_EQ(plan.workspace_bytes, 0);
    EXPECT_NE(plan.choice.find("short attention"), std::string::npos) << plan.choice;
    // It is one of cuDNN's own list, and tuning times the others too.
    const std::vector<std::string> list = names(graph, "h200");
    EXPECT_EQ(list.front(), plan.plan_name);
    EXPECT_GT(list.size(), 1U);
  }
  for (const auto& [length, depth] : {std::pair{128, 128}, {256, 64}, {4096, 64}}) {
    const Plan plan = first_plan(attention(length, depth), "h200");
    EXPECT_TRUE(plan.plan_name.ends_with("_k24=7")) << length << ' ' << plan.plan_name;
    EXPECT_EQ(plan.choice, "");
  }
  EXPECT_EQ(first_plan(attention(64, 64), "a100").choice, "");
  EXPECT_EQ(first_plan(attention(64, 64, "backward"), "h200").choice, "");
}

TEST(Candidates, ANamedOneIsBuiltOrSaysWhyNot) {
  const ir::Graph graph = product(256, 256, 256);
  const auto plan = engine().compile(graph, target("h200"), {}, Candidate{"eng7_k24=2"}, {});
  ASSERT_TRUE(plan.ok()) << plan.error().message;
  EXPECT_EQ(plan->plan_name, "eng7_k24=2");
  for (const char* name : {"eng7_k24=9999", "eng6", "eng99"}) {
    const auto refused = engine().compile(graph, target("h200"), {}, Candidate{name}, {});
    ASSERT_FALSE(refused.ok()) << name;
    EXPECT_FALSE(refused.error().message.empty()) << name;
  }
}

TEST(Candidates, SeveralAreBuiltSideBySideAndAreTheSamePlans) {
  const ir::Graph graph = product(512, 512, 512);
  const Device device = target("h200");
  const std::vector<std::string> wanted{"eng7_k24=1", "eng7_k24=2", "eng7_k24=3", "eng7_k24=4"};
  std::vector<Result<Plan>> plans(wanted.size(), error(ErrorKind::internal, "not built"));
  {
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      threads.emplace_back(
          [&, i] { plans[i] = engine().compile(graph, device, {}, Candidate{wanted[i]}, {}); });
    }
  }
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    ASSERT_TRUE(plans[i].ok()) << wanted[i] << ": " << plans[i].error().message;
    const auto alone = engine().compile(graph, device, {}, Candidate{wanted[i]}, {});
    ASSERT_TRUE(alone.ok()) << alone.error().message;
    EXPECT_EQ(plans[i]->plan_name, wanted[i]);
    EXPECT_EQ(plans[i]->plan_id, alone->plan_id);
    // Not the same bytes: cuDNN writes structs with their padding, and what the stack left in it.
    EXPECT_EQ(plans[i]->bytes.size(), alone->bytes.size());
    const auto loaded = engine().load(*plans[i], device);
    EXPECT_TRUE(loaded.ok()) << loaded.error().message;
  }
}

}  // namespace
}  // namespace lawson::cudnn
