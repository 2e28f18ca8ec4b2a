#include "engine/cudnn/kernel_families.h"

#include <gtest/gtest.h>

#include "ir/json.h"

namespace lawson::cudnn {
namespace {

Json product(std::int64_t m, std::int64_t k, std::int64_t n, const std::string& activation) {
  return {{"lawson", 1},
          {"kind", "graph"},
          {"name", "g"},
          {"inputs",
           {{{"name", "x"}, {"dtype", "bf16"}, {"shape", {m, k}}},
            {{"name", "w"}, {"dtype", "bf16"}, {"shape", {k, n}}}}},
          {"ops",
           {{{"op", "matmul"}, {"in", {"x", "w"}}, {"out", "p"}, {"dtype", "f32"}},
            {{"op", activation}, {"in", {"p"}}, {"out", "y"}}}},
          {"outputs", {"y"}}};
}

std::string family_of(const Json& document) {
  const auto graph = ir::graph_from_json(document, "test");
  EXPECT_TRUE(graph.ok()) << (graph.ok() ? "" : graph.error().message);
  return family_text(*graph);
}

TEST(KernelFamilies, RowsAreNoPartButWhatTheyAreMultiplesOf) {
  const std::string family = family_of(product(256, 64, 128, "relu"));
  EXPECT_EQ(family_of(product(4096, 64, 128, "relu")), family);
  EXPECT_EQ(family_of(product(1024, 64, 128, "relu")), family);
  EXPECT_NE(family_of(product(256, 512, 128, "relu")), family);
  EXPECT_NE(family_of(product(256, 64, 1024, "relu")), family);
  for (const std::int64_t m : {1, 77, 78, 84}) {
    EXPECT_NE(family_of(product(m, 64, 128, "relu")), family) << m;
  }
  EXPECT_NE(family_of(product(256, 64, 128, "gelu")), family);
  Json turned = product(256, 64, 128, "relu");
  turned["inputs"][1]["strides"] = {1, 64};
  EXPECT_NE(family_of(turned), family);
  Json other = product(256, 64, 128, "relu");
  for (Json& input : other["inputs"]) input["dtype"] = "f16";
  EXPECT_NE(family_of(other), family);
}

}  // namespace
}  // namespace lawson::cudnn
