// One verdict for a spec of several graphs.
#include "capi/judge.h"

#include <gtest/gtest.h>

namespace lawson::capi {
namespace {

Verdict part(Decision decision) {
  Verdict verdict;
  verdict.decision = decision;
  verdict.engine = "cudnn";
  verdict.target = "h200";
  verdict.key = "key";
  verdict.plan_id = "plan";
  return verdict;
}

TEST(Combine, AllMustHold) {
  using enum Decision;
  const auto joint = [](Decision a, Decision b) {
    return combine({"forward", "backward"}, {part(a), part(b)}).decision;
  };
  EXPECT_EQ(joint(supported, supported), supported);
  EXPECT_EQ(joint(supported, unsupported), unsupported);
  EXPECT_EQ(joint(undecided, unsupported), unsupported);
  EXPECT_EQ(joint(unsupported, undecided), unsupported);
  EXPECT_EQ(joint(supported, undecided), undecided);
}

TEST(Combine, TakesTheWeakestAndNamesThePass) {
  Verdict forward = part(Decision::supported);
  forward.strength = Strength::built;
  forward.workspace_bytes = 10;
  forward.rewrites = {"pad"};
  Verdict backward = part(Decision::unsupported);
  backward.key = "other";
  backward.plan_id.clear();
  backward.evidence = Evidence::deviceless_published_target;
  backward.workspace_bytes = 30;
  backward.defect = "row 1";
  backward.reasons = {{"head_dim", "head_dim_qk 512: at most 256", "head_dim_qk"}};
  const Verdict all = combine({"forward", "backward"}, {forward, backward});
  EXPECT_EQ(all.strength, Strength::judged);
  EXPECT_EQ(all.evidence, Evidence::deviceless_published_target);
  EXPECT_EQ(all.workspace_bytes, 30);
  EXPECT_EQ(all.defect, "row 1");
  EXPECT_EQ(all.plan_id, "");
  EXPECT_EQ(all.rewrites, std::vector<std::string>{"forward: pad"});
  ASSERT_EQ(all.reasons.size(), 1U);
  EXPECT_EQ(all.reasons[0].message, "backward: head_dim_qk 512: at most 256");
  EXPECT_EQ(all.reasons[0].field, "head_dim_qk");
}

TEST(Combine, KeyCoversEveryPart) {
  const Verdict a = part(Decision::supported);
  Verdict b = a;
  b.key = "other";
  const auto key = [](const Verdict& x, const Verdict& y) {
    return combine({"forward", "backward"}, {x, y}).key;
  };
  EXPECT_NE(key(a, b), key(a, a));
  EXPECT_NE(key(a, b), key(b, a));
  EXPECT_EQ(key(a, b), key(a, b));
  EXPECT_EQ(combine({"forward", "backward"}, {a, b}).plan_id.size(), 32U);
}

const char* const kTraining = R"({"lawson": 1, "kind": "attention", "pass": "training", "heads": 2,
  "seqlen_q": 16, "head_dim_qk": 16})";

front::Spec spec_of(const char* text, const Json& change = Json::object()) {
  Json document = Json::parse(text);
  document.merge_patch(change);
  auto spec = front::spec_from_json(document, "test");
  EXPECT_TRUE(spec.ok()) << spec.error().message;
  return *std::move(spec);
}

TEST(Judge, GivesThePartsInOrder) {
  const auto judged =
      judge(spec_of(kTraining), cpu_device(), "cpu", [](const ir::Graph& graph) -> Result<Verdict> {
        Verdict verdict = part(Decision::supported);
        verdict.key = graph.name;
        return verdict;
      });
  ASSERT_TRUE(judged.ok());
  ASSERT_EQ(judged->json["parts"].size(), 2U);
  EXPECT_EQ(judged->json["parts"][0]["name"], "forward");
  EXPECT_EQ(judged->json["parts"][1]["name"], "backward");
  EXPECT_EQ(judged->json["parts"][1]["key"], "attention.backward");
}

TEST(Judge, AnErrorOfOnePartIsAnError) {
  const auto judged =
      judge(spec_of(kTraining), cpu_device(), "cpu", [](const ir::Graph& graph) -> Result<Verdict> {
        if (graph.name.ends_with("backward")) {
          return error(ErrorKind::cuda, "the driver is gone");
        }
        return part(Decision::unsupported);
      });
  ASSERT_FALSE(judged.ok());
  EXPECT_EQ(judged.error().kind, ErrorKind::cuda);
}

TEST(Judge, AnExceptionOfOnePartArrives) {
  EXPECT_THROW(static_cast<void>(judge(spec_of(kTraining), cpu_device(), "cpu",
                                       [](const ir::Graph&) -> Result<Verdict> { throw 7; })),
               int);
}

const char* const kRing = R"({"lawson": 1, "kind": "attention", "pass": "training", "heads": 2,
  "seqlen_q": 64, "head_dim_qk": 16, "mask": "causal",
  "context_parallel": {"strategy": "ring", "size": 4}})";

// Each graph's name is its key; the backward of the second distinct step is refused.
Result<Verdict> refuse_one(const ir::Graph& graph) {
  const bool refused = graph.name == "ring step 1 of rank 0.backward";
  Verdict verdict = part(refused ? Decision::unsupported : Decision::supported);
  verdict.key = graph.name;
  verdict.plan_id = graph.name;
  if (refused) verdict.reasons = {{"rows", "16 rows: at least 17", "seqlen_q"}};
  return verdict;
}

TEST(Judge, StepsAreListedWithTheirParts) {
  const auto judged = judge(spec_of(kRing), cpu_device(), "cpu", refuse_one);
  ASSERT_TRUE(judged.ok());
  const Json& steps = judged->json["steps"];
  ASSERT_EQ(steps.size(), 3U);
  EXPECT_FALSE(judged->json.contains("parts"));
  EXPECT_EQ(steps[0]["name"], "ring step 0 of rank 0");
  EXPECT_EQ(steps[2]["name"], "ring step 1 of rank 1");
  EXPECT_EQ(steps[2]["rank"], 1);
  EXPECT_EQ(steps[2]["step"], 1);
  EXPECT_EQ(steps[0]["verdict"], "supported");
  EXPECT_EQ(steps[1]["verdict"], "unsupported");
  ASSERT_EQ(steps[1]["parts"].size(), 2U);
  EXPECT_EQ(steps[1]["parts"][1]["name"], "backward");
  EXPECT_EQ(steps[1]["parts"][1]["key"], "ring step 1 of rank 0.backward");
}

TEST(Judge, OneRefusedStepRefusesAllAndIsNamed) {
  const auto judged = judge(spec_of(kRing), cpu_device(), "cpu", refuse_one);
  ASSERT_TRUE(judged.ok());
  EXPECT_EQ(judged->verdict.decision, Decision::unsupported);
  ASSERT_EQ(judged->verdict.reasons.size(), 1U);
  EXPECT_EQ(judged->verdict.reasons[0].message,
            "ring step 1 of rank 0: backward: 16 rows: at least 17");
  EXPECT_EQ(judged->verdict.reasons[0].field, "seqlen_q");
  const auto forward =
      judge(spec_of(kRing, {{"pass", "forward"}}), cpu_device(), "cpu", refuse_one);
  EXPECT_EQ(forward->verdict.decision, Decision::supported);
  EXPECT_FALSE(forward->json["steps"][0].contains("parts"));
  EXPECT_EQ(forward->json["steps"][0]["plan_id"], "ring step 0 of rank 0.forward");
}

TEST(Judge, TheJointKeyIsThatOfTheSteps) {
  const auto key = [](const Json& change) {
    const auto judged = judge(spec_of(kRing, change), cpu_device(), "cpu",
                              [](const ir::Graph& graph) -> Result<Verdict> {
                                Verdict verdict = part(Decision::supported);
                                verdict.key = ir::canonical_text(graph);
                                return verdict;
                              });
    EXPECT_TRUE(judged.ok());
    return judged->verdict.key;
  };
  const std::string ring = key(Json::object());
  EXPECT_EQ(ring.size(), 32U);
  EXPECT_EQ(ring, key({{"name", "other"}, {"scale", 2}}));
  EXPECT_EQ(ring, key({{"seqlen_q", 128}, {"context_parallel", {{"size", 8}}}}));  // the same steps
  EXPECT_NE(ring, key({{"context_parallel", {{"size", 2}}}}));
  EXPECT_NE(ring, key({{"context_parallel", {{"strategy", "all_gather"}}}}));
}

TEST(Judge, AnErrorOfOneStepIsAnError) {
  const auto judged =
      judge(spec_of(kRing), cpu_device(), "cpu", [](const ir::Graph& graph) -> Result<Verdict> {
        if (graph.name == "ring step 1 of rank 1.backward") {
          return error(ErrorKind::cuda, "the driver is gone");
        }
        return part(Decision::supported);
      });
  ASSERT_FALSE(judged.ok());
  EXPECT_EQ(judged.error().kind, ErrorKind::cuda);
}

// A split that cannot be made.
TEST(Judge, WhatHasNoGraphIsUnsupportedWithoutAsking) {
  int asked = 0;
  const auto judged_as = [&](const Json& change) {
    Json changes{{"softmax", "learnable"}, {"window", {4, 0}}};
    changes.merge_patch(change);
    return judge(spec_of(kRing, changes), cpu_device(), "cpu",
                 [&](const ir::Graph&) -> Result<Verdict> {
                   ++asked;
                   return part(Decision::supported);
                 });
  };
  const auto judged = judged_as(Json::object());
  ASSERT_TRUE(judged.ok());
  EXPECT_EQ(asked, 0);
  EXPECT_EQ(judged->verdict.decision, Decision::unsupported);
  EXPECT_EQ(judged->verdict.reasons.size(), 2U);
  EXPECT_FALSE(judged->json.contains("steps"));
  EXPECT_EQ(judged->verdict.engine, "cpu");
  EXPECT_EQ(judged->verdict.key.size(), 32U);
  EXPECT_EQ(judged_as({{"name", "n"}})->verdict.key, judged->verdict.key);
  // Bound at run time: no part of a key.
  EXPECT_EQ(judged_as({{"scale", 3}})->verdict.key, judged->verdict.key);
  EXPECT_NE(judged_as({{"seqlen_q", 32}})->verdict.key, judged->verdict.key);
}

}  // namespace
}  // namespace lawson::capi
