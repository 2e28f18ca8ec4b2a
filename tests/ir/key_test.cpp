// Keys: what changes the computation or its layout changes the key; how it is written does not.
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "engine/engine.h"
#include "front/spec.h"
#include "ir/json.h"
#include "random_graph.h"

namespace lawson::ir {
namespace {

Graph read(const Json& document) {
  auto graph = graph_from_json(document, "key");
  EXPECT_TRUE(graph.ok()) << graph.error().message << "\n" << document.dump(1);
  return graph.ok() ? *std::move(graph) : Graph{};
}

TEST(Key, IgnoresNamesOrderDeadOpsAndValues) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(seed);
    const Graph graph = test::random_graph(seed);
    const Graph other = read(test::rewritten(graph, seed));
    EXPECT_EQ(canonical_text(graph), canonical_text(other));
    EXPECT_NE(print(graph), print(other));
  }
}

TEST(Key, FinishedGraphsPassTheirOwnCheck) {
  for (std::uint64_t seed = 0; seed < 100; ++seed) {
    const Graph graph = test::random_graph(seed);
    EXPECT_TRUE(check(graph).ok());
    for (std::int32_t i = 0; i < graph.input_count; ++i) EXPECT_TRUE(graph.is_input(i));
  }
}

const char* const kMatmul = R"({"lawson": 1, "kind": "graph", "name": "base",
  "inputs": [{"name": "x", "dtype": "bf16", "shape": [2, 16, 32]},
             {"name": "y", "dtype": "bf16", "shape": [2, 32, 16]},
             {"name": "z", "dtype": "f32", "shape": [2, 16, 16]}],
  "ops": [{"op": "matmul", "in": ["x", "y"], "out": "m", "dtype": "f32"},
          {"op": "leaky_relu", "in": ["m"], "out": "r", "slope": 0.125},
          {"op": "sub", "in": ["r", "z"], "out": "s"},
          {"op": "clamp", "in": ["s"], "out": "c", "min": -1, "max": 1},
          {"op": "slice", "in": ["c"], "out": "d", "start": [0, 0, 0], "limit": [2, 8, 16]},
          {"op": "reduce_sum", "in": ["d"], "out": "e", "axes": [2], "keepdims": true}],
  "outputs": ["e"]})";

TEST(Key, EveryFieldOfAGraphThatMattersChangesIt) {
  const Json base = Json::parse(kMatmul);
  // JSON patches, each of them another computation or another layout.
  const std::vector<Json> changes = {
      {{{"op", "add"}, {"path", "/strict"}, {"value", true}}},
      {{{"op", "replace"}, {"path", "/inputs/0/dtype"}, {"value", "f16"}}},
      {{{"op", "add"}, {"path", "/inputs/0/strides"}, {"value", {512, 1, 16}}}},
      {{{"op", "add"}, {"path", "/inputs/0/alignment"}, {"value", 8}}},
      {{{"op", "replace"}, {"path", "/inputs/0/shape/0"}, {"value", 1}}},
      {{{"op", "replace"}, {"path", "/inputs/2/shape"}, {"value", {1, 16, 16}}}},
      {{{"op", "add"},
        {"path", "/inputs/-"},
        {"value", {{"name", "w"}, {"dtype", "f32"}, {"shape", {1}}}}}},
      {{{"op", "replace"}, {"path", "/ops/0/dtype"}, {"value", "bf16"}}},
      {{{"op", "replace"}, {"path", "/ops/1/slope"}, {"value", 0.1250000000000001}}},
      {{{"op", "replace"},
        {"path", "/ops/1"},
        {"value", {{"op", "relu"}, {"in", "m"}, {"out", "r"}}}}},
      {{{"op", "replace"}, {"path", "/ops/2/in"}, {"value", {"z", "r"}}}},
      {{{"op", "replace"}, {"path", "/ops/2/op"}, {"value", "add"}}},
      {{{"op", "replace"}, {"path", "/ops/3/min"}, {"value", -2}}},
      {{{"op", "replace"}, {"path", "/ops/3/max"}, {"value", 2}}},
      {{{"op", "replace"}, {"path", "/ops/4/start/1"}, {"value", 1}}},
      {{{"op", "replace"}, {"path", "/ops/4/limit/1"}, {"value", 7}}},
      {{{"op", "add"}, {"path", "/ops/4/stride"}, {"value", {1, 2, 1}}}},
      {{{"op", "replace"}, {"path", "/ops/5/axes"}, {"value", {1}}}},
      {{{"op", "replace"}, {"path", "/ops/5/keepdims"}, {"value", false}}},
      {{{"op", "replace"}, {"path", "/ops/5/op"}, {"value", "reduce_max"}}},
      {{{"op", "replace"},
        {"path", "/outputs/0"},
        {"value", {{"name", "e"}, {"strides", {8, 1, 8}}}}}},
      {{{"op", "replace"}, {"path", "/outputs/0"}, {"value", {{"name", "e"}, {"alignment", 4}}}}},
      {{{"op", "replace"}, {"path", "/outputs/0"}, {"value", {{"name", "e"}, {"dtype", "f16"}}}}},
      {{{"op", "add"}, {"path", "/outputs/-"}, {"value", "d"}}},
      {{{"op", "replace"}, {"path", "/outputs"}, {"value", {"d", "e"}}}},
  };
  std::map<std::string, std::string> seen{{canonical_text(read(base)), "the base"}};
  for (const Json& change : changes) {
    const std::string text = canonical_text(read(base.patch(change)));
    const auto [known, is_new] = seen.emplace(text, change.dump());
    EXPECT_TRUE(is_new) << change.dump() << " has the key of " << known->second;
  }
}

const char* const kAttention = R"({"lawson": 1, "kind": "attention", "dtype": "bf16", "batch": 2,
  "heads": 8, "kv_heads": 4, "seqlen_q": 64, "seqlen_kv": 128, "head_dim_qk": 64,
  "head_dim_v": 64})";

std::string attention_text(const Json& fields, const Json& base = Json::parse(kAttention)) {
  Json document = base;
  document.merge_patch(fields);
  auto spec = front::spec_from_json(document, "key");
  EXPECT_TRUE(spec.ok()) << spec.error().message;
  std::string text;
  if (spec.ok()) {
    EXPECT_FALSE(spec->parts.empty()) << fields.dump();
    for (const auto& part : spec->parts) text += canonical_text(part.graph);
  }
  return text;
}

TEST(Key, EveryFieldOfAnAttentionThatMattersChangesIt) {
  const std::vector<Json> changes = {
      {{"pass", "backward"}},
      {{"pass", "training"}},
      {{"dtype", "f16"}},
      {{"output_dtype", "f32"}},
      {{"batch", 3}},
      {{"heads", 4}},
      {{"kv_heads", 8}},
      {{"seqlen_q", 65}},
      {{"seqlen_kv", 129}},
      {{"head_dim_qk", 72}},
      {{"head_dim_v", 72}},
      {{"layout", "sbhd"}},
      {{"layout", "bhsd"}},
      {{"layout", "sbhd_bshd_bshd"}},
      {{"mask", "padding"}},
      {{"mask", "causal"}},
      {{"mask", "causal_bottom_right"}},
      {{"mask", "padding_causal"}},
      {{"mask", "padding_causal_bottom_right"}},
      {{"window", {5, -1}}},
      {{"window", {5, 3}}},
      {{"window", {-1, 3}}},
      {{"bias", "post_scale"}},
      {{"bias", "post_scale"}, {"bias_shape", {1, 1, 64, 128}}},
      {{"bias", "post_scale"}, {"bias_dtype", "f32"}},
      {{"bias", "alibi"}},
      {{"softmax", "off_by_one"}},
      {{"softmax", "learnable"}},
      {{"softcap", 30}},
      {{"softcap", 30.000000000000004}},
      {{"return_stats", true}},
      {{"strides", {{"q", {40000, 64, 512, 1}}}}},
      {{"strides", {{"o", {40000, 64, 512, 1}}}}},
  };
  std::map<std::string, std::string> seen{{attention_text(Json::object()), "the base"}};
  for (const Json& change : changes) {
    const auto [known, is_new] = seen.emplace(attention_text(change), change.dump());
    EXPECT_TRUE(is_new) << change.dump() << " has the key of " << known->second;
  }
  const Json backward{{"pass", "backward"}, {"bias", "post_scale"}};
  std::set<std::string> texts{attention_text(backward)};
  for (const Json& change : {Json{{"deterministic", true}}, Json{{"bias_grad", true}},
                             Json{{"strides", {{"dq", {40000, 64, 512, 1}}}}},
                             Json{{"strides", {{"do", {40000, 64, 512, 1}}}}}}) {
    Json fields = backward;
    fields.merge_patch(change);
    EXPECT_TRUE(texts.insert(attention_text(fields)).second) << change.dump();
  }
}

TEST(Key, WhatIsBoundAtRunTimeIsNotInIt) {
  const std::string base = attention_text(Json::object());
  EXPECT_EQ(attention_text({{"scale", 0.3}}), base);
  EXPECT_EQ(attention_text({{"name", "other"}}), base);
  const Json padding{{"mask", "padding"}};
  Json lengths = padding;
  lengths["seqlens_q"] = {3, 64};
  lengths["seqlens_kv"] = {128, 1};
  EXPECT_EQ(attention_text(lengths), attention_text(padding));
}

TEST(Key, OneFormForOneComputation) {
  EXPECT_EQ(attention_text({{"mask", "causal"}}), attention_text({{"window", {-1, 0}}}));
  EXPECT_EQ(attention_text({{"layout", "bshd"}}), attention_text({{"layout", "bshd_bshd_bshd"}}));
  EXPECT_EQ(attention_text({{"head_dim_v", nullptr}}), attention_text(Json::object()));
}

TEST(Key, CoversDeviceEngineBuildAndOptions) {
  const Graph graph = read(Json::parse(kMatmul));
  Device h200;
  h200.kind = Device::Kind::cuda;
  h200.properties = {{"deviceVer", 900}, {"multiProcessorCount", 132}};
  Device b200 = h200;
  b200.properties["deviceVer"] = 1000;
  Options limited;
  limited.workspace_limit = 0;
  Options deterministic;
  deterministic.deterministic = true;
  std::set<std::string> keys{
      make_key(graph, h200, "cudnn", "9.19.0", {}),
      make_key(graph, b200, "cudnn", "9.19.0", {}),
      make_key(graph, cpu_device(), "cudnn", "9.19.0", {}),
      make_key(graph, h200, "cpu", "9.19.0", {}),
      make_key(graph, h200, "cudnn", "9.19.1", {}),
      make_key(graph, h200, "cudnn", "9.19.0", limited),
      make_key(graph, h200, "cudnn", "9.19.0", deterministic),
  };
  EXPECT_EQ(keys.size(), 7U);

  // What does not bind a plan: which card it is, its name, how strong a verdict was asked for.
  Device same = h200;
  same.name = "other";
  same.ordinal = 3;
  same.properties["deviceName"] = "another";
  same.properties["pciDeviceId"] = 77;
  same.properties["smClockRateKHz"] = 1;
  Options built;
  built.strength = Strength::built;
  EXPECT_TRUE(keys.contains(make_key(graph, same, "cudnn", "9.19.0", built)));
}

TEST(Key, PlanIdCoversConfigAndRewrites) {
  const std::set<std::string> ids{make_plan_id("k", "eng1", {}), make_plan_id("l", "eng1", {}),
                                  make_plan_id("k", "eng2", {}), make_plan_id("k", "eng1", {"pad"}),
                                  make_plan_id("k", "eng1", {"pad", "fold"})};
  EXPECT_EQ(ids.size(), 5U);
}

}  // namespace
}  // namespace lawson::ir
