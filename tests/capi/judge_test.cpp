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

TEST(Judge, WhatHasNoGraphIsUnsupportedWithoutAsking) {
  int asked = 0;
  const auto probe = [&](const ir::Graph&) -> Result<Verdict> {
    ++asked;
    return part(Decision::supported);
  };
  const auto spec = spec_of(kTraining, {{"dropout", 0.1}, {"layout", "thd"}});
  const auto judged = judge(spec, cpu_device(), "cpu", probe);
  ASSERT_TRUE(judged.ok());
  EXPECT_EQ(asked, 0);
  EXPECT_EQ(judged->verdict.decision, Decision::unsupported);
  EXPECT_EQ(judged->verdict.reasons.size(), 2U);
  EXPECT_EQ(judged->verdict.engine, "cpu");
  EXPECT_EQ(judged->verdict.key.size(), 32U);
  const auto renamed =
      judge(spec_of(kTraining, {{"dropout", 0.1}, {"layout", "thd"}, {"name", "n"}}), cpu_device(),
            "cpu", probe);
  EXPECT_EQ(renamed->verdict.key, judged->verdict.key);
  // Bound at run time: no part of a key.
  const auto scaled = judge(spec_of(kTraining, {{"dropout", 0.1}, {"layout", "thd"}, {"scale", 3}}),
                            cpu_device(), "cpu", probe);
  EXPECT_EQ(scaled->verdict.key, judged->verdict.key);
  const auto longer =
      judge(spec_of(kTraining, {{"dropout", 0.1}, {"layout", "thd"}, {"seqlen_q", 32}}),
            cpu_device(), "cpu", probe);
  EXPECT_NE(longer->verdict.key, judged->verdict.key);
}

}  // namespace
}  // namespace lawson::capi
