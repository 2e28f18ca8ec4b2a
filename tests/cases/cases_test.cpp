// What the case list promises to hold.
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "cases/cases.h"
#include "cases/expected.h"
#include "cases/judge.h"
#include "engine/cpu/cpu.h"
#include "engine/reference/reference.h"
#include "front/attention.h"

namespace lawson::cases {
namespace {

// "heads gqa, layout bs3hd": the two axes.
std::string axes_of(const std::string& pair) {
  const std::size_t comma = pair.find(", ");
  const auto axis = [&](std::size_t from) {
    return pair.substr(from, pair.find(' ', from) - from);
  };
  return axis(0) + " " + axis(comma + 2);
}

TEST(AttentionCases, EveryPairThatTheFrontTakesIsThere) {
  const std::set<std::string> may_exclude{
      "heads layout",     "layout head_dim", "layout length", "layout cache",
      "layout sequences", "cache sequences", "cache mask",    "cache length",
      "pass cache",       "attn_mask style", "bias dbias",    "length sequences"};
  for (const Profile profile : {Profile::any, Profile::gpu}) {
    const AttentionCoverage coverage = attention_coverage(1, profile);
    EXPECT_GT(coverage.pairs, 10000U);
    EXPECT_LT(coverage.rows, 1000U) << "too many for the sample that CI runs";
    EXPECT_LT(coverage.impossible.size(), 240U);
    for (const std::string& pair : coverage.impossible) {
      EXPECT_TRUE(may_exclude.contains(axes_of(pair))) << pair;
    }
  }
}

TEST(AttentionCases, EverySpecHasAGraphAndReadsBack) {
  for (const Profile profile : {Profile::any, Profile::gpu}) {
    std::set<std::string> names;
    std::map<std::string, int> seen;
    for (const Case& item : attention_cases(7, 3000, profile)) {
      EXPECT_TRUE(names.insert(item.name).second) << item.name;
      const auto graph = graph_of(item);
      ASSERT_TRUE(graph.ok()) << item.text() << ": " << graph.error().message;
      const auto spec = front::attention_from_json(item.spec, item.name);
      ASSERT_TRUE(spec.ok()) << spec.error().message;
      const auto again =
          front::attention_from_json(front::attention_to_json(*spec), "written and read");
      ASSERT_TRUE(again.ok());
      EXPECT_EQ(front::attention_to_json(*again), front::attention_to_json(*spec)) << item.text();
      ++seen[fmt::format("head dim {}", spec->head_dim_qk)];
      ++seen[fmt::format("layout {}", spec->layout)];
      ++seen[spec->pass == front::Pass::backward ? "backward" : "forward"];
    }
    for (int d = 8; d <= 512; d += 8) EXPECT_GT(seen[fmt::format("head dim {}", d)], 0) << d;
    for (const char* layout : {"t3hd", "sbhd_sbh2d", "thd_bshd_bshd", "bshd_sbhd_sbhd"}) {
      EXPECT_GT(seen[fmt::format("layout {}", layout)], 20) << layout;
    }
    EXPECT_GT(seen["backward"], 700);
    EXPECT_GT(seen["forward"], 1500);
  }
}

TEST(AttentionCases, TheSameSeedGivesTheSameList) {
  const auto first = attention_cases(3, 700);
  const auto again = attention_cases(3, 700);
  const auto other = attention_cases(4, 700);
  for (std::size_t i = 0; i < first.size(); ++i) EXPECT_EQ(first[i].spec, again[i].spec);
  EXPECT_NE(first[0].spec, other[0].spec);
}

TEST(AttentionCases, ASampleKeepsTheCoveringRowsAndTheOrder) {
  const auto all = attention_cases(5, 1500);
  const auto sample = sampled(all, 900, 1);
  ASSERT_EQ(sample.size(), 900U);
  std::size_t pairs = 0;
  std::size_t at = 0;
  for (const Case& item : sample) {
    while (at < all.size() && all[at].name != item.name) ++at;
    ASSERT_LT(at, all.size()) << item.name;
    if (item.name.starts_with("pairs-")) ++pairs;
  }
  EXPECT_EQ(pairs, attention_coverage(5, Profile::any).rows);
  EXPECT_EQ(sampled(all, 2000, 1).size(), all.size());
  EXPECT_NE(sampled(all, 900, 2).back().name + sampled(all, 900, 2)[800].name,
            sample.back().name + sample[800].name);
}

TEST(EdgeCases, AreSpecsWithNamesOfTheirOwn) {
  std::set<std::string> names;
  for (const Case& item : edge_cases()) {
    EXPECT_TRUE(names.insert(item.name).second) << item.name;
    const auto graph = graph_of(item);
    EXPECT_TRUE(graph.ok()) << item.name << ": " << (graph.ok() ? "" : graph.error().message);
  }
  EXPECT_TRUE(names.contains("edge-defect-20-gaps-causal-poisoned-backward"));
  EXPECT_TRUE(names.contains("nan-table-192-d128-float-shifted"));
}

// A mask that is dumped and one that is read off the output are the same where a row sees, and with
// it as an operand the oracle is right about the engine's forward and backward.
TEST(EngineMask, ReadsWhatTheEngineDrops) {
  const auto cpu = make_cpu_engine();
  const auto reference = make_reference_engine();
  const Device device = cpu_device();
  for (const char* layout : {"bshd", "thd", "sbhd_thd_thd"}) {
    for (const char* pass : {"forward", "backward"}) {
      Json spec{{"lawson", 1},
                {"kind", "attention"},
                {"pass", pass},
                {"dtype", "bf16"},
                {"batch", 3},
                {"heads", 4},
                {"kv_heads", 2},
                {"seqlen_q", 39},
                {"seqlen_kv", 43},
                {"head_dim_qk", 8},
                {"dropout", 0.3},
                {"layout", layout},
                {"mask", "padding_causal"}};
      const Case item{"dropout", spec, 5, plan::InputStyle::normal};
      const auto dumped = dumped_mask(*cpu, device, *reference, item);
      auto read = read_mask(*cpu, device, *reference, item);
      ASSERT_TRUE(dumped.ok()) << dumped.error().message;
      ASSERT_TRUE(read.ok()) << read.error().message;
      int seen = 0;
      // One may be in a larger bucket than the other: [b, ...].
      for (std::size_t i = 0; i < std::min(read->size(), dumped->size()); ++i) {
        if ((*read)[i] > 1) continue;
        ++seen;
        ASSERT_EQ((*read)[i], (*dumped)[i]) << layout << ' ' << i;
      }
      EXPECT_GT(seen, 500);
      double kept = 0;
      EXPECT_EQ(wrong_rate(*read, 0.3, kept), "");
      EXPECT_NE(wrong_rate(*read, 0.5, kept), "");

      const auto graph = graph_of(item);
      ASSERT_TRUE(graph.ok());
      auto expected = expected_with_mask(*cpu, *reference, item, *graph, *read);
      ASSERT_TRUE(expected.ok()) << expected.error().message;
      const auto plan = compiled(*cpu, device, *graph, {});
      ASSERT_TRUE(plan.ok()) << plan.error().message;
      const auto right =
          judge(*cpu, device, *graph, *plan, expected->inputs, expected->outputs, {});
      ASSERT_TRUE(right.ok()) << right.error().message;
      EXPECT_TRUE(right->ok()) << layout << ' ' << pass << ": " << right->text();
      for (double& keep : *read) keep = keep == 1 ? 0 : 1;
      expected = expected_with_mask(*cpu, *reference, item, *graph, *read);
      const auto wrong =
          judge(*cpu, device, *graph, *plan, expected->inputs, expected->outputs, {});
      EXPECT_FALSE(wrong.ok() && wrong->ok()) << "another mask is as good";
    }
  }
}

}  // namespace
}  // namespace lawson::cases
