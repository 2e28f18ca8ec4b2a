// Which rewrites a graph gets, by name, and that a graph that cuDNN has words for gets none.
#include <gtest/gtest.h>

#include <algorithm>

#include "engine/cudnn/native.h"
#include "front/attention.h"

namespace lawson::cudnn {
namespace {

using N = NativeAttention;
using Names = std::vector<std::string>;

ir::Graph graph_of(const Json& changes, const std::string& pass) {
  Json spec{{"lawson", 1}, {"kind", "attention"}, {"pass", pass},     {"dtype", "bf16"},
            {"batch", 2},  {"heads", 4},          {"kv_heads", 2},    {"seqlen_q", 96},
            {"name", "x"}, {"seqlen_kv", 160},    {"head_dim_qk", 64}};
  if (!changes.is_null()) spec.update(changes);
  auto read = front::attention_from_json(spec, "test");
  EXPECT_TRUE(read.ok()) << (read.ok() ? "" : read.error().message);
  auto graph = front::attention_graph(*read, read->pass);
  EXPECT_TRUE(graph.ok()) << (graph.ok() ? "" : graph.error().message);
  return *graph;
}

std::optional<NativeAttention> rewritten(const ir::Graph& graph, const RewriteOptions& options) {
  const auto facts = attention_facts(graph);
  auto native = rewrite_attention(graph, *facts, options);
  EXPECT_TRUE(native.ok()) << (native.ok() ? "" : native.error().message);
  return native.ok() ? std::move(native).value() : std::nullopt;
}

std::optional<NativeAttention> rewritten(const Json& changes, const std::string& pass,
                                         Variant variant = Variant::direct) {
  RewriteOptions options;
  options.variant = variant;
  return rewritten(graph_of(changes, pass), options);
}

Names names_of(const std::optional<NativeAttention>& native) {
  Names names = native ? native->rewrites : Names{"nothing"};
  std::sort(names.begin(), names.end());
  return names;
}

Names steps_of(const std::vector<Step>& steps) {
  Names names;
  for (const Step& step : steps) names.emplace_back(step_name(step));
  return names;
}

std::int64_t uid_of(const ir::Graph& graph, const std::string& name) {
  for (ir::TensorId id = 0; id < graph.input_count + graph.output_count; ++id) {
    if (graph.tensor(id).name == name) return ir::Graph::uid(id);
  }
  ADD_FAILURE() << "no tensor " << name;
  return 0;
}

Names sorted(Names names) {
  std::sort(names.begin(), names.end());
  return names;
}

// The common case costs nothing: no steps, no memory, no further variants.
TEST(RewritesNamed, NothingForWhatCudnnHasWordsFor) {
  const std::vector<Json> plain{
      {},
      {{"mask", "causal"}},
      {{"mask", "causal_bottom_right"}},
      {{"mask", "causal"}, {"window", {16, -1}}},
      {{"bias", "post_scale"}},
      {{"softcap", 30.0}},
      {{"softmax", "learnable"}},
      {{"dropout", 0.1}},
      {{"bias", "alibi"}, {"mask", "causal"}},
      {{"layout", "bhsd"}, {"head_dim_v", 32}},
  };
  for (const Json& changes : plain) {
    for (const char* pass : {"forward", "backward"}) {
      const auto native = rewritten(changes, pass);
      ASSERT_TRUE(native) << changes.dump();
      EXPECT_EQ(native->rewrites, Names{}) << changes.dump();
      EXPECT_TRUE(native->supplies.before.empty()) << changes.dump();
      EXPECT_TRUE(native->supplies.after.empty()) << changes.dump();
      EXPECT_TRUE(native->supplies.own.empty()) << changes.dump();
      EXPECT_TRUE(native->supplies.scalars.empty()) << changes.dump();
      EXPECT_TRUE(native->supplies.derived.empty()) << changes.dump();
      EXPECT_FALSE(native->padding) << changes.dump();
    }
  }
  for (const Variant variant : {Variant::shifted_bounds, Variant::bounds_as_bias}) {
    EXPECT_FALSE(rewritten(Json{}, "forward", variant));
    EXPECT_FALSE(rewritten({{"bias", "post_scale"}}, "backward", variant));
  }
}

struct Expected {
  const char* pass;
  Json changes;
  Names rewrites;
  Names before;
  Names after;
};

TEST(RewritesNamed, EachFeatureHasItsOwn) {
  const Json bool_mask{{"attn_mask", {{"dtype", "bool"}}}};
  const Json float_mask{{"attn_mask", {{"dtype", "bf16"}}}};
  Json both = float_mask;
  both["bias"] = "post_scale";
  const Json ragged{{"layout", "thd"}, {"seqlens_q", {5, 90}}, {"seqlens_kv", {7, 160}}};
  Json gaps = ragged;
  gaps["seqlens_q_padded"] = {8, 96};
  gaps["seqlens_kv_padded"] = {8, 160};
  const Json append{{"mask", "padding"}, {"append", 2}, {"seqlens_kv", {9, 160}}};
  const Json dropout_mask{{"dropout", 0.1}, {"dropout_mask", true}};
  const std::vector<Expected> rows{
      {"forward",
       bool_mask,
       {"bool_mask_as_bias", "empty_rows_cleared"},
       {"score_bias", "masked_rows"},
       {"clear_rows"}},
      {"backward",
       bool_mask,
       {"bool_mask_as_bias", "empty_rows_cleared"},
       {"score_bias", "masked_rows", "stats_of_rows"},
       {"clear_rows"}},
      {"forward", float_mask, {"empty_rows_cleared"}, {"masked_rows"}, {"clear_rows"}},
      {"forward",
       both,
       {"empty_rows_cleared", "mask_as_bias"},
       {"score_bias", "masked_rows"},
       {"clear_rows"}},
      // -inf in a bias that is made becomes finite: rows of nothing else have to be found.
      {"forward",
       {{"bias", "pre_scale"}},
       {"empty_rows_cleared", "pre_scale_bias_folded"},
       {"score_bias", "masked_rows"},
       {"clear_rows"}},
      {"backward",
       {{"bias", "pre_scale"}, {"bias_grad", true}},
       {"bias_gradient_reduced", "empty_rows_cleared", "pre_scale_bias_folded"},
       {"score_bias", "masked_rows", "stats_of_rows"},
       {"reduce_bias_gradient", "clear_rows"}},
      {"backward", {{"bias", "post_scale"}, {"bias_grad", true}}, {}, {}, {}},
      {"backward",
       {{"bias", "post_scale"}, {"bias_grad", true}, {"bias_dtype", "f32"}},
       {"bias_gradient_reduced"},
       {},
       {"reduce_bias_gradient"}},
      {"forward",
       {{"bias", "alibi"}, {"alibi_slopes", true}, {"mask", "causal"}},
       {"alibi_slopes_as_bias"},
       {"score_bias"},
       {}},
      {"forward", {{"softmax", "off_by_one"}}, {"off_by_one_as_zero_sink"}, {}, {}},
      {"forward", {{"return_max_logit", true}}, {}, {}, {}},
      {"forward",
       {{"return_max_logit", true}, {"return_stats", true}},
       {"stats_of_max_and_sum"},
       {},
       {"stats_of_rows"}},
      {"forward",
       {{"mask", "causal_bottom_right"}, {"seqlen_q", 200}},
       {"empty_rows_cleared"},
       {"masked_rows"},
       {"clear_rows"}},
      {"forward", {{"mask", "padding"}}, {"empty_rows_cleared"}, {"masked_rows"}, {"clear_rows"}},
      {"backward",
       {{"mask", "padding"}},
       {"empty_rows_cleared", "unseen_keys_cleared"},
       {"masked_rows", "stats_of_rows"},
       {"clear_rows", "masked_rows", "clear_rows"}},
      {"forward",
       ragged,
       {"empty_rows_cleared", "lengths_of_cu_seqlens"},
       {"ragged", "ragged", "masked_rows"},
       {"clear_rows"}},
      {"forward",
       gaps,
       {"empty_rows_cleared", "gaps_zeroed", "lengths_of_cu_seqlens"},
       {"ragged", "ragged", "masked_rows"},
       {"clear_rows", "zero_gaps"}},
      {"backward",
       gaps,
       {"empty_rows_cleared", "gaps_zeroed", "lengths_of_cu_seqlens", "unseen_keys_cleared"},
       {"ragged", "ragged", "masked_rows", "stats_of_rows"},
       {"clear_rows", "masked_rows", "clear_rows", "zero_gaps", "zero_gaps"}},
      {"forward", dropout_mask, {"dropout_mask_as_values"}, {"convert_mask"}, {}},
      {"backward", dropout_mask, {"dropout_mask_as_values"}, {"convert_mask"}, {}},
      {"forward",
       {{"dropout", 0.1}, {"return_dropout_mask", true}},
       {"dropout_mask_as_bytes"},
       {},
       {"convert_mask"}},
      {"forward",
       append,
       {"cache_append", "empty_rows_cleared"},
       {"cache_append", "cache_append", "masked_rows"},
       {"clear_rows"}},
  };
  for (const Expected& row : rows) {
    const auto native = rewritten(row.changes, row.pass);
    ASSERT_TRUE(native) << row.changes.dump();
    EXPECT_EQ(names_of(native), row.rewrites) << row.pass << row.changes.dump();
    EXPECT_EQ(steps_of(native->supplies.before), row.before) << row.pass << row.changes.dump();
    EXPECT_EQ(steps_of(native->supplies.after), row.after) << row.pass << row.changes.dump();
  }
}

TEST(RewritesNamed, WhatIsAddedHasATypeThatHoldsIt) {
  const auto type_of = [](const Json& changes, Variant variant = Variant::direct) {
    const auto native = rewritten(changes, "forward", variant);
    return native->tensors[N::bias]->dtype;
  };
  EXPECT_EQ(type_of({{"attn_mask", {{"dtype", "bool"}}}}), DType::bf16);
  EXPECT_EQ(type_of({{"attn_mask", {{"dtype", "bool"}}}, {"dtype", "f16"}}), DType::f16);
  EXPECT_EQ(type_of({{"attn_mask", {{"dtype", "bool"}}}, {"bias", "post_scale"}}), DType::bf16);
  EXPECT_EQ(type_of({{"attn_mask", {{"dtype", "bf16"}}}, {"bias", "post_scale"}}), DType::f32);
  EXPECT_EQ(type_of({{"attn_mask", {{"dtype", "f32"}}}}), DType::f32);
  EXPECT_EQ(type_of({{"bias", "pre_scale"}}), DType::f32);
  EXPECT_EQ(type_of({{"bias", "alibi"}, {"alibi_slopes", true}, {"mask", "causal"}}), DType::f32);
  EXPECT_EQ(type_of({{"mask", "causal"}}, Variant::bounds_as_bias), DType::bf16);
}

TEST(RewritesNamed, BoundsGoTheWayThatIsLeft) {
  // 96 rows, 160 columns: row i sees the columns up to i + 64.
  const Json bottom{{"mask", "causal_bottom_right"}, {"bias", "post_scale"}};
  auto native = rewritten(bottom, "forward");
  EXPECT_EQ(native->alignment, ir::Alignment::bottom_right);
  EXPECT_EQ(native->right, 0);
  native = rewritten(bottom, "forward", Variant::shifted_bounds);
  EXPECT_EQ(names_of(native), Names{"bottom_right_as_shifted_bounds"});
  EXPECT_EQ(native->alignment, ir::Alignment::top_left);
  EXPECT_EQ(native->right, 64);
  EXPECT_FALSE(native->left);
  native = rewritten(bottom, "forward", Variant::bounds_as_bias);
  EXPECT_EQ(names_of(native), (Names{"bounds_as_bias", "empty_rows_cleared"}));
  EXPECT_FALSE(native->left || native->right);
  EXPECT_EQ(steps_of(native->supplies.before), (Names{"score_bias", "masked_rows"}));

  // More queries than keys: the first rows see nothing, and no shifted bound says so.
  Json tall = bottom;
  tall["seqlen_q"] = 200;
  EXPECT_FALSE(rewritten(tall, "forward", Variant::shifted_bounds));
  EXPECT_EQ(names_of(rewritten(tall, "forward", Variant::bounds_as_bias)),
            (Names{"bounds_as_bias", "empty_rows_cleared"}));

  // Lengths are not known: nothing to shift by.
  Json padded = bottom;
  padded["mask"] = "padding_causal_bottom_right";
  EXPECT_FALSE(rewritten(padded, "forward", Variant::shifted_bounds));
  EXPECT_EQ(names_of(rewritten(padded, "forward", Variant::bounds_as_bias)),
            (Names{"bounds_as_bias", "empty_rows_cleared"}));

  // As many rows as columns: both alignments are one.
  native = rewritten({{"mask", "causal_bottom_right"}, {"seqlen_q", 160}}, "forward");
  EXPECT_EQ(native->alignment, ir::Alignment::top_left);

  native = rewritten({{"window", {16, 8}}}, "forward");
  EXPECT_EQ(native->left, 16);
  EXPECT_EQ(native->right, 8);
  native = rewritten({{"window", {96 + 160, 96 + 160}}}, "forward");  // beyond every column
  EXPECT_FALSE(native->left || native->right);

  const Json alibi{{"mask", "causal"}, {"bias", "alibi"}};
  EXPECT_EQ(names_of(rewritten(alibi, "forward", Variant::bounds_as_bias)),
            (Names{"alibi_as_bias", "bounds_as_bias"}));
  EXPECT_EQ(names_of(rewritten({{"bias", "alibi"}}, "forward", Variant::bounds_as_bias)),
            Names{"alibi_as_bias"});
}

TEST(RewritesNamed, TensorsAreTheCallersOwn) {
  const ir::Graph masked = graph_of({{"attn_mask", {{"dtype", "bf16"}}}}, "forward");
  EXPECT_EQ(rewritten(masked, {})->tensors[N::bias]->uid, uid_of(masked, "mask"));
  const ir::Graph append =
      graph_of({{"mask", "padding"}, {"append", 2}, {"seqlens_kv", {9, 160}}}, "forward");
  EXPECT_EQ(rewritten(append, {})->tensors[N::k]->uid, uid_of(append, "k"));
  EXPECT_EQ(rewritten(append, {})->tensors[N::v]->uid, uid_of(append, "v"));
}

// Tensors of one row stride share their offsets; beyond 2^31 elements they are 64 bits wide.
TEST(RewritesNamed, OffsetsOfRaggedTensors) {
  Json ragged{{"layout", "thd"}, {"seqlens_q", {5, 90}}, {"seqlens_kv", {7, 160}}};
  auto native = rewritten(ragged, "forward");
  EXPECT_EQ(native->tensors[N::q]->offsets_uid, native->tensors[N::o]->offsets_uid);
  EXPECT_EQ(native->tensors[N::k]->offsets_uid, native->tensors[N::v]->offsets_uid);
  EXPECT_NE(native->tensors[N::q]->offsets_uid, native->tensors[N::k]->offsets_uid);
  EXPECT_EQ(native->tensors[N::q]->offsets_dtype, DType::i32);
  EXPECT_EQ(native->tensors[N::q]->shape[2], 96);
  ragged["total_q"] = std::int64_t{1} << 26;
  native = rewritten(ragged, "forward");
  EXPECT_EQ(native->tensors[N::q]->offsets_dtype, DType::i64);
}

TEST(RewritesNamed, WhatCannotBeSaidIsRefused) {
  const auto reason = [](const Json& changes) -> std::string {
    const ir::Graph graph = graph_of(changes, "forward");
    const auto facts = attention_facts(graph);
    const auto native = rewrite_attention(graph, *facts, {});
    if (native.ok() || native.error().reasons.empty()) return "";
    return native.error().reasons[0].code;
  };
  EXPECT_EQ(reason({{"bias", "pre_scale"}, {"softcap", 30.0}}), "pre_scale_bias");
  EXPECT_EQ(reason({{"bias", "post_scale"}, {"attn_mask", {{"dtype", "f64"}}}}), "rewrite");
  EXPECT_EQ(reason({{"layout", "thd"}, {"seqlen_q", 0}}), "empty_tensor");
  for (const char* softmax : {"off_by_one", "learnable"}) {
    EXPECT_EQ(reason({{"softmax", softmax}, {"return_max_logit", true}}), "max_logit");
  }
}

// ---- repairs ----------------------------------------------------------------------------------

Names repaired(const Json& changes, const std::string& pass, int compute_capability, int version,
               bool dense_stats = false) {
  const ir::Graph graph = graph_of(changes, pass);
  Device device;
  device.kind = Device::Kind::cuda;
  device.compute_capability = compute_capability;
  RewriteOptions options;
  options.repairs = repairs_for(graph, device, version);
  options.dense_stats = dense_stats;
  return names_of(rewritten(graph, options));
}

TEST(RewritesNamed, RepairsOfTheDefectTable) {
  const Json tail{{"seqlen_kv", 192}};
  EXPECT_EQ(repaired(tail, "backward", 900, 91900),
            (Names{"avoids hopper-backward-kv-tail", "full_lengths"}));
  EXPECT_EQ(repaired(tail, "backward", 800, 91900), Names{});
  EXPECT_EQ(repaired(tail, "backward", 900, 91500), Names{});
  EXPECT_EQ(repaired(tail, "forward", 900, 91900), Names{});
  EXPECT_EQ(repaired({{"seqlen_q", 1}, {"seqlen_kv", 128}}, "backward", 900, 92500),
            (Names{"avoids hopper-backward-one-query", "full_lengths"}));
  const Json repeated{{"bias", "post_scale"}, {"bias_shape", {1, 4, 1, 160}}};
  EXPECT_EQ(repaired(repeated, "forward", 900, 91900), Names{});
  EXPECT_EQ(repaired(repeated, "backward", 900, 91900),
            (Names{"avoids bias-repeated-backward", "bias_expanded", "empty_rows_cleared"}));
  // A mask that is added in the place of a bias is as good as one.
  const Json keys{{"attn_mask", {{"dtype", "bf16"}, {"shape", {2, 1, 1, 160}}}}};
  EXPECT_EQ(repaired(keys, "forward", 900, 91900), Names{"empty_rows_cleared"});
  EXPECT_EQ(repaired(keys, "backward", 900, 91900),
            (Names{"avoids bias-repeated-backward", "bias_expanded", "empty_rows_cleared",
                   "mask_as_bias"}));
  const Json per_head{{"bias", "post_scale"}, {"bias_shape", {1, 4, 1, 1}}};
  EXPECT_EQ(repaired(per_head, "forward", 1000, 91900),
            (Names{"avoids bias-per-head-forward", "bias_expanded", "empty_rows_cleared"}));
  EXPECT_EQ(repaired({{"softmax", "learnable"}, {"dropout", 0.1}}, "backward", 900, 91900),
            (Names{"avoids dropout-sink-gradient", "sink_gradient_scaled"}));
  EXPECT_EQ(repaired({{"mask", "padding"}}, "forward", 900, 91900),
            (Names{"avoids padding-empty-keys", "empty_rows_cleared"}));
  EXPECT_EQ(repaired({{"mask", "padding"}, {"seqlen_q", 1}}, "forward", 900, 91900),
            (Names{"avoids decode-empty-query", "empty_rows_cleared"}));
}

TEST(RewritesNamed, RaggedStatisticsWhereTheyHaveToBeDense) {
  const Json ragged{{"layout", "thd"}, {"seqlens_q", {5, 90}}, {"seqlens_kv", {7, 160}}};
  const Names packed = repaired(ragged, "backward", 800, 91900, false);
  Names dense = packed;
  dense.emplace_back("ragged_stats_as_dense");
  EXPECT_EQ(repaired(ragged, "backward", 800, 91900, true), sorted(dense));
  EXPECT_EQ(repaired(ragged, "forward", 800, 91900, true),
            repaired(ragged, "forward", 800, 91900, false));
  const ir::Graph graph = graph_of(ragged, "backward");
  RewriteOptions options;
  options.dense_stats = true;
  const auto native = rewritten(graph, options);
  EXPECT_EQ(native->tensors[N::stats]->offsets_uid, 0);
  EXPECT_EQ(native->tensors[N::stats]->shape, (Dims{native->batch, 4, 96, 1}));
}

}  // namespace
}  // namespace lawson::cudnn
