// Explaining with an engine whose rules are known: the conditions found are exactly its rules.
#include "capi/explain.h"

#include <gtest/gtest.h>

#include <atomic>
#include <set>

namespace lawson::capi {
namespace {

// Stops at its first failing condition, as cuDNN does.
Result<SpecVerdict> picky(const front::Spec& spec, const Device& device) {
  const Json& d = spec.document;
  Verdict verdict;
  verdict.engine = "cudnn";
  verdict.target = device.name;
  verdict.key = "key";
  const auto refuse = [&](const char* code, const char* message) {
    verdict.reasons.push_back({code, message, ""});
  };
  if (spec.parts.empty()) {
    verdict.reasons = spec.unsupported;
  } else if (d["head_dim_qk"].get<int>() % 8 != 0) {
    refuse("head_dim", "head dim is not a multiple of 8");
  } else if (d["softcap"].get<double>() != 0) {
    refuse("softcap", "softcap");
  } else if (d["dtype"] == "f32" && device.compute_capability < 1000) {
    refuse("dtype", "f32 needs compute capability 10.0");
  }
  verdict.decision = verdict.reasons.empty() ? Decision::supported : Decision::unsupported;
  Json json = verdict_to_json(verdict);
  return SpecVerdict{std::move(verdict), std::move(json)};
}

Device gpu(const char* name, int compute_capability) {
  Device device;
  device.kind = Device::Kind::cuda;
  device.name = name;
  device.title = name;
  device.compute_capability = compute_capability;
  return device;
}

front::Spec spec_of(const Json& change) {
  Json document{
      {"lawson", 1}, {"kind", "attention"}, {"heads", 8}, {"seqlen_q", 128}, {"head_dim_qk", 64}};
  document.merge_patch(change);
  auto spec = front::spec_from_json(document, "test");
  EXPECT_TRUE(spec.ok()) << spec.error().message;
  return *std::move(spec);
}

Json explained(const Json& change, const ProbeSpec& probe = picky, std::size_t limit = 0,
               const std::vector<Device>& targets = {}) {
  auto answer = explain(spec_of(change), gpu("h200", 900), targets, limit, 2, probe);
  EXPECT_TRUE(answer.ok()) << answer.error().message;
  return answer.ok() ? *std::move(answer) : Json{};
}

std::set<std::string> fields_of(const Json& list) {
  std::set<std::string> fields;
  for (const Json& item : list) fields.insert(item["field"].get<std::string>());
  return fields;
}

using Fields = std::set<std::string>;

TEST(Explain, NothingToExplainWhenItFuses) {
  const Json answer = explained(Json::object());
  EXPECT_EQ(answer["verdict"]["verdict"], "supported");
  EXPECT_TRUE(answer["neighbours"].empty());
  EXPECT_TRUE(answer["conditions"].empty());
  EXPECT_EQ(answer["probed"], 0);
}

TEST(Explain, OneConditionIsFoundAlone) {
  const Json answer = explained({{"head_dim_qk", 100}, {"bias", "alibi"}, {"mask", "causal"}});
  EXPECT_EQ(fields_of(answer["conditions"]), Fields{"head_dim_qk"});
  const Json& condition = answer["conditions"][0];
  EXPECT_EQ(condition["value"], 100);
  EXPECT_EQ(condition["enough"], "alone");
  EXPECT_EQ(condition["message"], "head dim is not a multiple of 8");
  const Json& nearest = answer["neighbours"][0];
  EXPECT_EQ(nearest["kind"], "attribute");
  EXPECT_EQ(nearest["exact"], true);
  EXPECT_EQ(nearest["verdict"]["verdict"], "supported");
  EXPECT_EQ(nearest["spec"]["head_dim_qk"], 104);
}

TEST(Explain, TwoConditionsAreFoundTogether) {
  const Json answer = explained({{"head_dim_qk", 100}, {"softcap", 30}});
  EXPECT_EQ(fields_of(answer["conditions"]), (Fields{"head_dim_qk", "softcap"}));
  for (const Json& condition : answer["conditions"]) {
    EXPECT_EQ(condition["enough"], "together");
    const bool head_dim = condition["field"] == "head_dim_qk";
    EXPECT_EQ(condition["message"], head_dim ? "head dim is not a multiple of 8" : "softcap");
  }
}

TEST(Explain, ThreeConditionsAreFoundTogether) {
  const Json answer = explained({{"head_dim_qk", 100}, {"softcap", 30}, {"dtype", "f32"}});
  EXPECT_EQ(fields_of(answer["conditions"]), (Fields{"head_dim_qk", "softcap", "dtype"}));
}

TEST(Explain, GivingUpThePassDoesNotEndTheSearch) {
  // Takes training only without a softcap and only in 16 bits.
  const auto probe = [](const front::Spec& spec, const Device& device) -> Result<SpecVerdict> {
    if (spec.document["pass"] == "forward") {
      return picky(spec_of(Json::object()), device);
    }
    return picky(spec, device);
  };
  const Json answer = explained({{"pass", "training"}, {"softcap", 30}, {"dtype", "f32"}}, probe);
  EXPECT_EQ(fields_of(answer["conditions"]), (Fields{"pass", "softcap", "dtype"}));
}

TEST(Explain, FieldsWithoutAGraphAreConditions) {
  const Json answer = explained(
      {{"softmax", "off_by_one"}, {"context_parallel", {{"strategy", "ring"}, {"size", 2}}}});
  EXPECT_EQ(fields_of(answer["conditions"]), (Fields{"context_parallel", "softmax"}));
}

TEST(Explain, OtherTargetsAreAskedToo) {
  const Json answer =
      explained({{"dtype", "f32"}}, picky, 0, {gpu("a100", 800), gpu("b200", 1000)});
  std::vector<std::string> targets;
  for (const Json& neighbour : answer["neighbours"]) {
    if (neighbour["kind"] == "target") targets.push_back(neighbour["target"]);
  }
  EXPECT_EQ(targets, std::vector<std::string>{"b200"});
}

TEST(Explain, EveryNeighbourWasProbed) {
  std::atomic<std::size_t> probes{0};
  const auto counting = [&](const front::Spec& spec, const Device& device) {
    ++probes;
    return picky(spec, device);
  };
  for (const std::size_t limit : std::vector<std::size_t>{1, 2, 3, 5, 8, 13, 64}) {
    probes = 0;
    const Json answer = explained({{"head_dim_qk", 100}, {"softcap", 30}, {"dtype", "f32"}},
                                  counting, limit, {gpu("a100", 800), gpu("b200", 1000)});
    EXPECT_LE(probes, limit + 1) << limit;  // and the spec's own
    EXPECT_EQ(answer["probed"].get<std::size_t>() + 1, probes.load()) << limit;
    EXPECT_LE(answer["neighbours"].size(), limit);
    for (const Json& neighbour : answer["neighbours"]) {
      EXPECT_EQ(neighbour["verdict"]["verdict"], "supported");
    }
  }
}

TEST(Explain, AFaultOfANeighbourIsNotAnAnswer) {
  std::atomic<int> probes{0};
  const auto faulty = [&](const front::Spec& spec, const Device& device) -> Result<SpecVerdict> {
    const int count = probes++;
    if (count == 0) return picky(spec, device);
    if (count % 3 == 0) return error(ErrorKind::internal, "the worker crashed");
    if (count % 3 == 1) throw 7;
    return picky(spec, device);
  };
  const Json answer = explained({{"softcap", 30}, {"bias", "alibi"}, {"mask", "causal"}}, faulty);
  EXPECT_FALSE(answer["errors"].empty());
  EXPECT_EQ(answer["verdict"]["verdict"], "unsupported");

  const auto broken = [](const front::Spec&, const Device&) -> Result<SpecVerdict> {
    return error(ErrorKind::unavailable, "no cuDNN");
  };
  const auto own = explain(spec_of(Json::object()), gpu("h200", 900), {}, 0, 2, broken);
  ASSERT_FALSE(own.ok());
  EXPECT_EQ(own.error().kind, ErrorKind::unavailable);
}

TEST(Explain, GraphsAreExplainedToo) {
  const Json document = Json::parse(R"({"lawson": 1, "kind": "graph", "name": "f",
    "inputs": [{"name": "x", "dtype": "f64", "shape": [4, 8]},
               {"name": "y", "dtype": "f64", "shape": [8, 4]}],
    "ops": [{"op": "matmul", "in": ["x", "y"], "out": "m"},
            {"op": "erf", "in": "m", "out": "e"}, {"op": "neg", "in": "e", "out": "n"}],
    "outputs": ["n"]})");
  // Takes neither f64 operands nor erf.
  const auto probe = [](const front::Spec& spec, const Device&) -> Result<SpecVerdict> {
    Verdict verdict;
    verdict.decision = Decision::supported;
    for (const auto& node : spec.parts[0].graph.nodes) {
      if (ir::op_name(node.op) == "erf") verdict.reasons.push_back({"op", "erf", "ops[1]"});
    }
    if (verdict.reasons.empty()) {
      for (const auto& tensor : spec.parts[0].graph.tensors) {
        if (tensor.dtype == DType::f64) verdict.reasons = {{"dtype", "f64", ""}};
      }
    }
    if (!verdict.reasons.empty()) verdict.decision = Decision::unsupported;
    return SpecVerdict{verdict, verdict_to_json(verdict)};
  };
  auto spec = front::spec_from_json(document, "test");
  ASSERT_TRUE(spec.ok()) << spec.error().message;
  const auto answer = explain(*spec, gpu("h200", 900), {}, 200, 2, probe);
  ASSERT_TRUE(answer.ok());
  for (const Json& neighbour : (*answer)["neighbours"]) {
    EXPECT_EQ(neighbour["verdict"]["verdict"], "supported");
  }
}

// Takes one matmul to a kernel, and not in f64.
Result<SpecVerdict> one_matmul(const front::Spec& spec, const Device& device) {
  const ir::Graph& graph = spec.parts[0].graph;
  Verdict verdict;
  verdict.engine = "cudnn";
  verdict.target = device.name;
  verdict.key = ir::canonical_text(graph);
  int products = 0;
  for (const auto& node : graph.nodes) products += ir::op_name(node.op) == "matmul" ? 1 : 0;
  if (products > 1) verdict.reasons.push_back({"matmuls", "two matmuls", "ops"});
  if (graph.tensor(0).dtype == DType::f64) verdict.reasons.push_back({"dtype", "f64", ""});
  verdict.decision = verdict.reasons.empty() ? Decision::supported : Decision::unsupported;
  Json json = verdict_to_json(verdict);
  return SpecVerdict{std::move(verdict), std::move(json)};
}

Json two_matmuls(const std::string& dtype) {
  Json document = Json::parse(R"({"lawson": 1, "kind": "graph", "name": "mlp",
    "inputs": [{"name": "x", "shape": [1, 64, 32]}, {"name": "w", "shape": [1, 32, 32]},
               {"name": "v", "shape": [1, 32, 16]}],
    "ops": [{"op": "matmul", "in": ["x", "w"], "out": "h", "source": "mlp.cpp:12"},
            {"op": "matmul", "in": ["h", "v"], "out": "n"},
            {"op": "tanh", "in": "n", "out": "y"}],
    "outputs": ["y"]})");
  for (Json& input : document["inputs"]) input["dtype"] = dtype;
  return document;
}

TEST(Explain, AGraphIsCutWhereBothHalvesFuse) {
  auto spec = front::spec_from_json(two_matmuls("bf16"), "test");
  ASSERT_TRUE(spec.ok());
  const auto answer = explain(*spec, gpu("h200", 900), {}, 16, 2, one_matmul);
  ASSERT_TRUE(answer.ok());
  ASSERT_FALSE((*answer)["neighbours"].empty());
  const Json& split = (*answer)["neighbours"][0];
  EXPECT_EQ(split["change"], "cut after op 'matmul' (h, mlp.cpp:12): two kernels, 4 KiB between");
  EXPECT_EQ(split["kind"], "split");
  EXPECT_EQ(split["exact"], true);
  EXPECT_EQ(split["bytes_between"], 4096);
  EXPECT_EQ(split["verdict"]["verdict"], "supported");
  EXPECT_EQ((*answer)["conditions"].back()["message"], "two matmuls");
  ASSERT_EQ(split["verdicts"].size(), 2U);
  ASSERT_EQ(split["specs"].size(), 2U);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(split["verdicts"][i]["verdict"], "supported");
    const auto half = front::spec_from_json(split["specs"][i], "half");
    ASSERT_TRUE(half.ok()) << half.error().message;
    EXPECT_EQ(split["verdicts"][i]["key"], ir::canonical_text(half->parts[0].graph));
  }
}

// Each condition once, with the spec's value; what all operands need is not said of one again.
TEST(Explain, ConditionsHaveValuesAndAreTold) {
  auto spec = front::spec_from_json(two_matmuls("f64"), "test");
  ASSERT_TRUE(spec.ok());
  const auto old = [](const front::Spec& changed, const Device& device) -> Result<SpecVerdict> {
    Verdict verdict;
    verdict.target = device.name;
    std::set<std::string> types;
    for (const Json& input : changed.document["inputs"]) types.insert(input["dtype"]);
    if (types.contains("f64")) {
      verdict.reasons.push_back({"dtype", "f64", "inputs.dtype"});
    } else if (types.size() > 1) {
      verdict.reasons.push_back({"mixed", "mixed types", ""});
    } else {
      verdict.reasons.push_back({"capability", "first: too old", "target"});
      verdict.reasons.push_back({"capability", "second: too old", "target"});
    }
    Json json = verdict_to_json(verdict);
    return SpecVerdict{std::move(verdict), std::move(json)};
  };
  const auto answer = explain(*spec, gpu("v100", 700), {}, 64, 2, old);
  ASSERT_TRUE(answer.ok());
  const Json& conditions = (*answer)["conditions"];
  ASSERT_EQ(conditions.size(), 2U) << conditions;
  EXPECT_EQ(conditions[0]["field"], "inputs.dtype");
  EXPECT_EQ(conditions[0]["value"], (Json{"f64", "f64", "f64"}));
  EXPECT_EQ(conditions[1]["field"], "target");
  EXPECT_EQ(conditions[1]["value"], "v100");
  EXPECT_EQ(conditions[1]["enough"], "unknown");
}

TEST(Explain, CutsStayWithinTheLimit) {
  auto spec = front::spec_from_json(two_matmuls("f64"), "test");
  ASSERT_TRUE(spec.ok());
  std::atomic<std::size_t> probes{0};
  const auto counting = [&](const front::Spec& changed, const Device& device) {
    ++probes;
    return one_matmul(changed, device);
  };
  for (const std::size_t limit : std::vector<std::size_t>{1, 2, 3, 5, 8, 40}) {
    probes = 0;
    const auto answer = explain(*spec, gpu("h200", 900), {gpu("b200", 1000)}, limit, 2, counting);
    ASSERT_TRUE(answer.ok());
    EXPECT_LE(probes, limit + 1) << limit;
    EXPECT_EQ((*answer)["probed"].get<std::size_t>() + 1, probes.load()) << limit;
    for (const Json& neighbour : (*answer)["neighbours"]) {
      EXPECT_NE(neighbour["kind"], "split");  // f64 is refused on both sides of a cut
    }
  }
}

}  // namespace
}  // namespace lawson::capi
