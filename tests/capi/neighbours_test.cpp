// Proposals near a spec: valid, different, one field each, exact ones first.
#include "front/neighbours.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

namespace lawson::front {
namespace {

Spec spec_of(const Json& document) {
  auto spec = spec_from_json(document, "test");
  EXPECT_TRUE(spec.ok()) << spec.error().message;
  return *std::move(spec);
}

Json attention(const Json& change) {
  Json document{{"lawson", 1}, {"kind", "attention"}, {"batch", 2},
                {"heads", 8},  {"seqlen_q", 128},     {"head_dim_qk", 64}};
  document.merge_patch(change);
  return document;
}

// The documents after each proposed change of a field.
std::vector<Json> changed(const Json& document, const std::string& field) {
  const Spec spec = spec_of(document);
  std::vector<Json> documents;
  for (const Neighbour& neighbour : neighbours(spec)) {
    const auto after = apply(spec, {&neighbour});
    EXPECT_TRUE(after.ok()) << neighbour.change << ": " << after.error().message;
    if (after.ok() && neighbour.field == field) documents.push_back(after->document);
  }
  return documents;
}

bool any_has(const std::vector<Json>& documents, const Json& fields) {
  return std::any_of(documents.begin(), documents.end(), [&](const Json& document) {
    Json merged = document;
    merged.merge_patch(fields);
    return merged == document;
  });
}

TEST(AttentionNeighbours, HeadDimsAreRoundedUpExactly) {
  const Json document = attention({{"head_dim_qk", 100}, {"head_dim_v", 60}});
  EXPECT_TRUE(
      any_has(changed(document, "head_dim_qk"), {{"head_dim_qk", 104}, {"head_dim_v", 64}}));
  EXPECT_TRUE(
      any_has(changed(document, "head_dim_qk"), {{"head_dim_qk", 128}, {"head_dim_v", 128}}));
  // The scale is the one of the true head dim.
  for (const Json& after : changed(document, "head_dim_qk")) EXPECT_EQ(after["scale"], 0.1);
  const Spec spec = spec_of(document);
  const auto list = neighbours(spec);
  ASSERT_FALSE(list.empty());
  EXPECT_TRUE(list.front().exact);
  EXPECT_NE(list.front().change.find("100 -> 104"), std::string::npos) << list.front().change;
}

TEST(AttentionNeighbours, EachFeatureCanBeLeftOut) {
  const Json document = attention({{"mask", "padding_causal_bottom_right"},
                                   {"window", {16, -1}},
                                   {"bias", "post_scale"},
                                   {"bias_shape", {1, 1, 1, 128}},
                                   {"softcap", 30},
                                   {"softmax", "learnable"},
                                   {"kv_heads", 2},
                                   {"return_stats", true},
                                   {"layout", "sbhd"},
                                   {"dtype", "f32"},
                                   {"output_dtype", "bf16"}});
  EXPECT_TRUE(any_has(changed(document, "mask"), {{"mask", "padding_causal"}}));
  EXPECT_TRUE(any_has(changed(document, "mask"), {{"mask", "none"}}));
  EXPECT_TRUE(any_has(changed(document, "window"), {{"window", {-1, -1}}}));
  EXPECT_TRUE(any_has(changed(document, "bias"), {{"bias", "none"}}));
  EXPECT_TRUE(any_has(changed(document, "bias_shape"), {{"bias_shape", {1, 8, 128, 128}}}));
  EXPECT_TRUE(any_has(changed(document, "softcap"), {{"softcap", 0}}));
  EXPECT_TRUE(any_has(changed(document, "softmax"), {{"softmax", "vanilla"}}));
  EXPECT_TRUE(any_has(changed(document, "kv_heads"), {{"kv_heads", 8}}));
  EXPECT_TRUE(any_has(changed(document, "return_stats"), {{"return_stats", false}}));
  EXPECT_TRUE(any_has(changed(document, "layout"), {{"layout", "bshd"}}));
  EXPECT_TRUE(any_has(changed(document, "dtype"), {{"dtype", "bf16"}}));
  EXPECT_FALSE(changed(document, "output_dtype").empty());
}

TEST(AttentionNeighbours, FeaturesCanBeLeftOut) {
  EXPECT_FALSE(changed(attention({{"dropout", 0.1}}), "dropout").empty());
  EXPECT_FALSE(changed(attention({{"paged", {{"page_size_k", 16}}}}), "paged").empty());
  const auto dense = changed(attention({{"layout", "thd"}}), "layout");
  EXPECT_TRUE(any_has(dense, {{"layout", "bshd"}, {"mask", "padding"}}));
}

TEST(AttentionNeighbours, OtherSplits) {
  const Json ring{{"strategy", "ring"}, {"size", 2}};
  const auto splits = changed(attention({{"context_parallel", ring}}), "context_parallel");
  for (const char* other : {"all_gather", "all_to_all"}) {
    EXPECT_TRUE(any_has(splits, {{"context_parallel", {{"strategy", other}, {"size", 2}}}}));
  }
}

TEST(AttentionNeighbours, ExactRewritesOfMasks) {
  EXPECT_TRUE(
      any_has(changed(attention({{"mask", "causal_bottom_right"}}), "mask"), {{"mask", "causal"}}));
  EXPECT_TRUE(any_has(
      changed(attention({{"mask", "causal_bottom_right"}, {"seqlen_q", 1}, {"seqlen_kv", 512}}),
              "mask"),
      {{"mask", "none"}}));
  const Json padded = attention({{"seqlen_q", 100}, {"mask", "causal"}});
  const auto longer = changed(padded, "seqlen_q");
  EXPECT_TRUE(any_has(longer, {{"seqlen_q", 128},
                               {"seqlen_kv", 128},
                               {"mask", "padding_causal"},
                               {"seqlens_q", {100, 100}},
                               {"seqlens_kv", {100, 100}}}));
}

TEST(AttentionNeighbours, TrainingCanBeInference) {
  const Json document = attention({{"pass", "training"}, {"deterministic", true}});
  EXPECT_TRUE(any_has(changed(document, "pass"), {{"pass", "forward"}}));
  EXPECT_TRUE(any_has(changed(document, "deterministic"), {{"deterministic", false}}));
}

TEST(AttentionNeighbours, BiasFollowsTheSizes) {
  const Json document = attention({{"seqlen_q", 100}, {"bias", "post_scale"}});
  for (const Json& after : changed(document, "seqlen_q")) {
    EXPECT_EQ(after["bias_shape"][2], after["seqlen_q"]);
    EXPECT_EQ(after["bias_shape"][3], after["seqlen_kv"]);
  }
}

TEST(Neighbours, AreDistinctAndPlain) {
  for (const Json& document :
       {attention(Json::object()), attention({{"bias", "alibi"}, {"mask", "causal"}}),
        attention({{"pass", "backward"}, {"dtype", "f64"}, {"seqlen_q", 1}})}) {
    const Spec spec = spec_of(document);
    std::set<std::string> sentences;
    bool exact = true;
    for (const Neighbour& neighbour : neighbours(spec)) {
      EXPECT_TRUE(sentences.insert(neighbour.change).second) << neighbour.change;
      EXPECT_TRUE(exact || !neighbour.exact) << neighbour.change << " comes after inexact ones";
      exact = neighbour.exact;
    }
  }
}

const char* const kFusion = R"({"lawson": 1, "kind": "graph", "name": "f",
  "inputs": [{"name": "x", "dtype": "i8", "shape": [2, 16, 32]},
             {"name": "y", "dtype": "f64", "shape": [2, 16, 32], "strides": [1024, 64, 2]},
             {"name": "b", "dtype": "f32", "shape": [16]}],
  "ops": [{"op": "convert", "in": "x", "out": "xf", "dtype": "f64"},
          {"op": "transpose", "in": "y", "out": "yt", "perm": [0, 2, 1]},
          {"op": "matmul", "in": ["xf", "yt"], "out": "m", "dtype": "f32"},
          {"op": "add", "in": ["m", "b"], "out": "a"},
          {"op": "gelu", "in": "a", "out": "g"},
          {"op": "reduce_sum", "in": "g", "out": "r", "axes": [2]},
          {"op": "neg", "in": "r", "out": "n"}],
  "outputs": ["n", "g"]})";

// As many as somebody reads, and no more graphs made for them than a second allows.
TEST(GraphNeighbours, OfALargeGraphAreFew) {
  Json ops = Json::array();
  std::string last = "x";
  for (int i = 0; i < 2048; ++i) {
    const std::string name = "t" + std::to_string(i);
    ops.push_back({{"op", "sin"}, {"in", {last}}, {"out", name}});
    last = name;
  }
  const Json document{
      {"lawson", 1},    {"kind", "graph"},
      {"strict", true}, {"inputs", {{{"name", "x"}, {"dtype", "f32"}, {"shape", {4}}}}},
      {"ops", ops},     {"outputs", {last}}};
  const auto found = neighbours(spec_of(document));
  EXPECT_GE(found.size(), 3U);
  EXPECT_LE(found.size(), 32U);
  EXPECT_EQ(found[0].field, "strict");
}

TEST(GraphNeighbours, OperandsOpsAndViews) {
  const Spec spec = spec_of(Json::parse(kFusion));
  std::set<std::string> fields;
  std::string sentences;
  for (const Neighbour& neighbour : neighbours(spec)) {
    fields.insert(neighbour.field);
    sentences += neighbour.change + "\n";
    EXPECT_TRUE(apply(spec, {&neighbour}).ok()) << neighbour.change;
  }
  for (const char* field : {"inputs.dtype", "inputs[0].dtype", "inputs[1].dtype",
                            "inputs[1].strides", "outputs[0]", "ops[0].dtype"}) {
    EXPECT_TRUE(fields.contains(field)) << field << "\n" << sentences;
  }
  for (const char* part :
       {"every matmul operand as bf16", "input 'y' contiguous", "(transpose 'yt')",
        "without ops[6] (neg 'n')", "output 'n' alone", "input 'x' converted to f64 before"}) {
    EXPECT_NE(sentences.find(part), std::string::npos) << part << "\n" << sentences;
  }
}

}  // namespace
}  // namespace lawson::front
