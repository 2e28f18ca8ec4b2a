#include "engine/cudnn/defects.h"

#include <gtest/gtest.h>

#include "front/attention.h"

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
  EXPECT_EQ(defect_of(attention({{"mask", "padding"}}), 900, 91900), "");
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

}  // namespace
}  // namespace lawson::cudnn
