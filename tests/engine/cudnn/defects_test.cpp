#include "engine/cudnn/defects.h"

#include <gtest/gtest.h>

#include "front/attention.h"
#include "ir/json.h"

namespace lawson::cudnn {
namespace {

ir::Graph attention(Json changes, const std::string& pass = "backward") {
  Json spec{{"lawson", 1},    {"kind", "attention"}, {"pass", pass},    {"dtype", "bf16"},
            {"batch", 1},     {"heads", 2},          {"seqlen_q", 320}, {"head_dim_qk", 64},
            {"mask", "none"}, {"name", "case"}};
  if (!changes.is_null()) spec.update(changes);
  auto read = front::attention_from_json(spec, "test");
  EXPECT_TRUE(read.ok()) << (read.ok() ? "" : read.error().message);
  auto graph = front::attention_graph(*read, read->pass);
  EXPECT_TRUE(graph.ok()) << (graph.ok() ? "" : graph.error().message);
  return *graph;
}

std::string defect_of(const ir::Graph& graph, int compute_capability, int version) {
  Device device;
  device.kind = Device::Kind::cuda;
  device.compute_capability = compute_capability;
  const auto defect = known_defect(graph, device, version);
  return defect ? defect->id : "";
}

TEST(Defects, HopperBackwardWithHalfATileOfKeys) {
  const std::string id = "hopper-backward-kv-tail";
  for (const int length : {64, 192, 320, 704}) {
    EXPECT_EQ(defect_of(attention({{"seqlen_q", length}}), 900, 91900), id) << length;
  }
  for (const int length : {128, 63, 65, 256, 1000}) {
    EXPECT_EQ(defect_of(attention({{"seqlen_q", length}}), 900, 91900), "") << length;
  }
  EXPECT_EQ(defect_of(attention({}), 800, 91900), "");
  EXPECT_EQ(defect_of(attention({}), 1000, 91900), "");
  EXPECT_EQ(defect_of(attention({}, "forward"), 900, 91900), "");
  EXPECT_EQ(defect_of(attention({}), 900, 91500), "");  // the frontend adds a padding mask there
  // The tail is masked anyway.
  EXPECT_NE(defect_of(attention({{"mask", "padding"}}), 900, 91900), id);
  EXPECT_EQ(defect_of(attention({{"mask", "causal"}}), 900, 91900), "");
  // A window without a right bound, and one that reaches past the last key, do not mask it.
  EXPECT_EQ(defect_of(attention({{"window", {64, -1}}}), 900, 91900), id);
  EXPECT_EQ(defect_of(attention({{"window", {64, 8}}}), 900, 91900), id);
}

TEST(Defects, BarredVersions) {
  EXPECT_EQ(defect_of(attention({}, "forward"), 900, 91000), "attention-9.10");
  EXPECT_EQ(defect_of(attention({}, "forward"), 900, 91001), "attention-9.10");
  EXPECT_EQ(defect_of(attention({}, "forward"), 900, 91002), "");
  const ir::Graph window = attention({{"window", {128, -1}}, {"seqlen_q", 2048}}, "forward");
  EXPECT_EQ(defect_of(window, 900, 91400), "window-9.14.0");
  EXPECT_EQ(defect_of(window, 900, 91401), "");
  EXPECT_EQ(
      defect_of(attention({{"window", {128, -1}}, {"seqlen_q", 1024}}, "forward"), 900, 91400), "");
}

TEST(Defects, RepeatedBias) {
  const auto with_bias = [](const Dims& shape, const std::string& pass) {
    return attention({{"bias", "post_scale"}, {"bias_shape", shape}, {"seqlen_q", 256}}, pass);
  };
  EXPECT_EQ(defect_of(with_bias({1, 2, 256, 256}, "backward"), 900, 91900), "");
  EXPECT_EQ(defect_of(with_bias({1, 1, 256, 256}, "backward"), 900, 91900), "");
  EXPECT_EQ(defect_of(with_bias({1, 2, 1, 256}, "backward"), 900, 91900), "bias-repeated-backward");
  EXPECT_EQ(defect_of(with_bias({1, 2, 256, 1}, "backward"), 900, 91900), "bias-repeated-backward");
  EXPECT_EQ(defect_of(with_bias({1, 2, 1, 256}, "forward"), 900, 91900), "");
  EXPECT_EQ(defect_of(with_bias({1, 2, 1, 1}, "forward"), 900, 91900), "bias-per-head-forward");
}

// A mask of a float type is added like a bias where there is none; a bool mask never is.
TEST(Defects, RepeatedMask) {
  const auto with_mask = [](const std::string& dtype, const Dims& shape, const std::string& pass) {
    return attention({{"attn_mask", {{"dtype", dtype}, {"shape", shape}}}, {"seqlen_q", 256}},
                     pass);
  };
  EXPECT_EQ(defect_of(with_mask("bf16", {1, 1, 256, 256}, "backward"), 900, 91900), "");
  EXPECT_EQ(defect_of(with_mask("bf16", {1, 1, 1, 256}, "backward"), 900, 91900),
            "bias-repeated-backward");
  EXPECT_EQ(defect_of(with_mask("bf16", {1, 1, 1, 256}, "forward"), 900, 91900), "");
  EXPECT_EQ(defect_of(with_mask("f32", {1, 1, 1, 1}, "forward"), 900, 91900),
            "bias-per-head-forward");
  EXPECT_EQ(defect_of(with_mask("bool", {1, 1, 1, 256}, "backward"), 900, 91900), "");
}

TEST(Defects, LengthsThatNoPlanKnows) {
  const ir::Graph decode =
      attention({{"mask", "padding"}, {"seqlen_q", 1}, {"seqlen_kv", 256}}, "forward");
  EXPECT_EQ(defect_of(decode, 900, 91900), "decode-empty-query");
  const ir::Graph padded = attention({{"mask", "padding"}, {"seqlen_q", 256}}, "forward");
  EXPECT_EQ(defect_of(padded, 900, 91900), "padding-empty-keys");
  EXPECT_EQ(defect_of(attention({{"seqlen_q", 256}}, "forward"), 900, 91900), "");
}

// What is only repaired does not stand before what bars.
TEST(Defects, BarredBeforeRepaired) {
  const Json window{{"window", {64, -1}}, {"seqlen_q", 2048 + 64}};
  EXPECT_EQ(defect_of(attention(window), 900, 91400), "window-9.14.0");
  EXPECT_EQ(defect_of(attention(window), 900, 91600), "hopper-backward-kv-tail");
  const Json repeated{{"bias", "post_scale"}, {"bias_shape", {1, 2, 1, 1}}};
  EXPECT_EQ(defect_of(attention(repeated), 900, 91001), "attention-9.10");
}

// Of the caller's masks cuDNN takes those of a forward (as values: rewrite_attention.cpp).
TEST(Defects, DropoutMasks) {
  const Json mask{{"dropout", 0.1}, {"dropout_mask", true}, {"seqlen_q", 256}};
  EXPECT_EQ(defect_of(attention(mask, "forward"), 900, 91900), "");
  const ir::Graph backward = attention(mask);
  Device device;
  device.kind = Device::Kind::cuda;
  for (const int compute_capability : {800, 900, 1000}) {
    device.compute_capability = compute_capability;
    const auto defect = known_defect(backward, device, 91900);
    ASSERT_TRUE(defect);
    EXPECT_EQ(defect->id, "dropout-mask-backward");
    EXPECT_EQ(defect->field, "dropout_mask");
    EXPECT_TRUE(defect->barred);
    EXPECT_TRUE(repairs_for(backward, device, 91900).defects.empty());
  }
  EXPECT_EQ(defect_of(attention({{"dropout", 0.1}, {"seqlen_q", 256}}), 900, 91900), "");
}

TEST(Defects, ManySequences) {
  for (const char* field : {"batch", "heads"}) {
    for (const char* pass : {"forward", "backward"}) {
      const auto with = [&](std::int64_t count) {
        Json spec{{"batch", 1}, {"heads", 1}, {"seqlen_q", 128}, {"seqlen_kv", 128}};
        spec[field] = count;
        return defect_of(attention(spec, pass), 900, 91900);
      };
      EXPECT_EQ(with(65535), "") << field << ' ' << pass;
      EXPECT_EQ(with(65536), "many-sequences") << field << ' ' << pass;
    }
  }
}

TEST(Defects, StatisticsOfRaggedDecode) {
  const std::string id = "ragged-decode-stats";
  const Json base{{"layout", "thd"}, {"seqlen_q", 1}, {"seqlen_kv", 256}};
  const auto with = [&](const char* field, const Json& value) {
    Json changed = base;
    changed["return_stats"] = true;
    changed[field] = value;
    return defect_of(attention(changed, "forward"), 900, 91900);
  };
  EXPECT_EQ(with("return_stats", true), id);
  EXPECT_EQ(with("return_max_logit", true), id);
  EXPECT_NE(with("return_stats", false), id);
  EXPECT_NE(with("seqlen_q", 2), id);
  EXPECT_NE(with("heads", 1), id);
  EXPECT_NE(with("layout", "bshd"), id);
}

Repairs repairs_of(const ir::Graph& graph, int compute_capability, int version) {
  Device device;
  device.kind = Device::Kind::cuda;
  device.compute_capability = compute_capability;
  return repairs_for(graph, device, version);
}

TEST(Defects, RepairsByVersionAndDevice) {
  using Ids = std::vector<std::string>;
  const ir::Graph tail = attention({});
  Repairs repairs = repairs_of(tail, 900, 91900);
  EXPECT_TRUE(repairs.full_lengths);
  EXPECT_FALSE(repairs.expand_bias);
  EXPECT_EQ(repairs.defects, Ids{"hopper-backward-kv-tail"});
  EXPECT_FALSE(repairs_of(tail, 900, 91500).full_lengths);
  EXPECT_FALSE(repairs_of(tail, 800, 91900).full_lengths);
  EXPECT_FALSE(repairs_of(tail, 1000, 91900).full_lengths);

  const ir::Graph one = attention({{"seqlen_q", 1}, {"seqlen_kv", 64}});
  EXPECT_EQ(repairs_of(one, 900, 91900).defects, Ids{"hopper-backward-kv-tail"});
  EXPECT_EQ(repairs_of(one, 900, 92500).defects,
            (Ids{"hopper-backward-kv-tail", "hopper-backward-one-query"}));

  repairs =
      repairs_of(attention({{"bias", "post_scale"}, {"bias_shape", {1, 2, 1, 1}}}), 900, 91900);
  EXPECT_TRUE(repairs.full_lengths && repairs.expand_bias);
  EXPECT_EQ(repairs.defects,
            (Ids{"hopper-backward-kv-tail", "bias-repeated-backward", "bias-per-head-forward"}));

  repairs = repairs_of(attention({{"mask", "padding"}}, "forward"), 800, 91900);
  EXPECT_FALSE(repairs.full_lengths || repairs.expand_bias);
  EXPECT_EQ(repairs.defects, Ids{"padding-empty-keys"});

  const Json sink{{"softmax", "learnable"}, {"dropout", 0.1}, {"seqlen_q", 256}};
  repairs = repairs_of(attention(sink), 1000, 91900);
  EXPECT_TRUE(repairs.scale_sink_gradient);
  EXPECT_EQ(repairs.defects, Ids{"dropout-sink-gradient"});
  EXPECT_FALSE(repairs_of(attention(sink, "forward"), 1000, 91900).scale_sink_gradient);
  EXPECT_FALSE(repairs_of(attention({{"softmax", "learnable"}, {"seqlen_q", 256}}), 1000, 91900)
                   .scale_sink_gradient);

  // Rows that bar repair nothing.
  EXPECT_TRUE(repairs_of(attention({{"seqlen_q", 256}}, "forward"), 900, 91000).defects.empty());
}

TEST(Defects, FusionThatRepeatsAnInputTwice) {
  const auto fusion = [](const Dims& small, bool matmul) {
    Json ops = Json::array();
    if (matmul) ops.push_back({{"op", "matmul"}, {"in", {"x", "y"}}, {"out", "p"}});
    ops.push_back({{"op", "add"}, {"in", {matmul ? "p" : "x", "b"}}, {"out", "z"}});
    Json inputs{{{"name", "x"}, {"dtype", "f32"}, {"shape", {4, 8, 8}}},
                {{"name", "b"}, {"dtype", "f32"}, {"shape", small}}};
    if (matmul) inputs.push_back({{"name", "y"}, {"dtype", "f32"}, {"shape", {4, 8, 8}}});
    auto graph = ir::graph_from_json({{"lawson", 1},
                                      {"kind", "graph"},
                                      {"name", "fusion"},
                                      {"inputs", inputs},
                                      {"ops", ops},
                                      {"outputs", {"z"}}},
                                     "test");
    EXPECT_TRUE(graph.ok()) << (graph.ok() ? "" : graph.error().message);
    return *graph;
  };
  EXPECT_EQ(defect_of(fusion({8}, false), 900, 91900), "pointwise-repeated-vector");
  EXPECT_EQ(defect_of(fusion({1, 8, 1}, false), 900, 91900), "pointwise-repeated-vector");
  EXPECT_EQ(defect_of(fusion({1, 8, 8}, false), 900, 91900), "");
  EXPECT_EQ(defect_of(fusion({8}, true), 900, 91900), "");
}

TEST(Defects, MixedOperandWithUnalignedRows) {
  const auto mixed = [](const std::string& dtype, const Dims& strides) {
    Json operand{{"name", "x"}, {"dtype", dtype}, {"shape", {2, 73, 48}}, {"strides", strides}};
    auto graph = ir::graph_from_json(
        {{"lawson", 1},
         {"kind", "graph"},
         {"inputs", {operand, {{"name", "y"}, {"dtype", "bf16"}, {"shape", {2, 48, 64}}}}},
         {"ops",
          {{{"op", "convert"}, {"in", {"x"}}, {"out", "c"}, {"dtype", "bf16"}},
           {{"op", "matmul"}, {"in", {"c", "y"}}, {"out", "z"}}}},
         {"outputs", {"z"}}},
        "test");
    EXPECT_TRUE(graph.ok()) << (graph.ok() ? "" : graph.error().message);
    return *graph;
  };
  EXPECT_EQ(defect_of(mixed("i8", {3504, 1, 73}), 900, 91900), "mixed-operand-unaligned");
  EXPECT_EQ(defect_of(mixed("i8", {3650, 50, 1}), 900, 91900), "mixed-operand-unaligned");
  EXPECT_EQ(defect_of(mixed("i8", {3504, 48, 1}), 900, 91900), "");
  EXPECT_EQ(defect_of(mixed("f16", {3504, 1, 73}), 900, 91900), "");
}

TEST(Defects, NormsAndSlicesRepeatNothing) {
  const auto graph = [](const char* ops, const char* outputs) {
    auto made = ir::graph_from_json(
        Json::parse(fmt::format(R"({{"lawson": 1, "kind": "graph", "name": "case",
          "inputs": [{{"name": "x", "dtype": "f32", "shape": [4, 96]}},
                     {{"name": "s", "dtype": "f32", "shape": [96]}},
                     {{"name": "i", "dtype": "f32", "shape": [4, 1]}}],
          "ops": [{}], "outputs": [{}]}})",
                                ops, outputs)),
        "test");
    EXPECT_TRUE(made.ok()) << (made.ok() ? "" : made.error().message);
    return *made;
  };
  EXPECT_EQ(
      defect_of(graph(R"({"op": "add", "in": ["x", "s"], "out": "y"})", R"("y")"), 900, 91900),
      "pointwise-repeated-vector");
  EXPECT_EQ(defect_of(graph(R"({"op": "rms_norm", "in": {"x": "x", "scale": "s"}, "out": {"y": "y"},
                                "axes": [1]})",
                            R"("y")"),
                      900, 91900),
            "");
  EXPECT_EQ(defect_of(graph(R"({"op": "rms_norm_backward", "axes": [1],
                                "in": {"dy": "x", "x": "x", "scale": "s", "inv_std": "i"},
                                "out": {"dscale": "d"}})",
                            R"("d")"),
                      900, 91900),
            "");
  EXPECT_EQ(defect_of(graph(R"({"op": "slice", "in": ["s"], "out": "t", "start": [0],
                                "limit": [48]}, {"op": "exp", "in": ["t"], "out": "y"})",
                            R"("y")"),
                      900, 91900),
            "");
}

}  // namespace
}  // namespace lawson::cudnn
