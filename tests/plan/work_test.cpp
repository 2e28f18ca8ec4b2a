#include "plan/work.h"

#include <gtest/gtest.h>

#include "front/spec.h"
#include "ir/json.h"

namespace lawson::plan {
namespace {

ir::Graph graph_of(const char* text) {
  return ir::graph_from_json(parse_json(text, "test").value(), "test").value();
}

TEST(Work, AProductCountsTwoForEachTermAndItsOperandsOnce) {
  const Work work = work_of(graph_of(R"({"lawson": 1, "kind": "graph", "name": "g",
      "inputs": [{"name": "a", "dtype": "bf16", "shape": [2, 16, 32]},
                 {"name": "b", "dtype": "i8", "shape": [32, 8]},
                 {"name": "z", "dtype": "f32", "shape": [2, 16, 8], "strides": [0, 0, 1]}],
      "ops": [{"op": "convert", "in": ["b"], "out": "c", "dtype": "bf16"},
              {"op": "matmul", "in": ["a", "c"], "out": "p", "dtype": "f32"},
              {"op": "add", "in": ["p", "z"], "out": "s"}],
      "outputs": ["s"]})"));
  EXPECT_EQ(work.flops, 2.0 * 2 * 16 * 8 * 32);
  EXPECT_EQ(work.bytes, 2 * 16 * 32 * 2 + 32 * 8 + 8 * 4 + 2 * 16 * 8 * 4);
}

TEST(Work, CausalIsHalfAndBackwardTwoAndAHalf) {
  const auto flops = [](const char* pass, const char* extra) {
    const auto document =
        parse_json(fmt::format(R"({{"lawson": 1, "kind": "attention", "name": "a", "pass": "{}",
            "dtype": "bf16", "batch": 2, "heads": 4, "seqlen_q": 64, "seqlen_kv": 64,
            "head_dim_qk": 32 {}}})",
                               pass, extra),
                   "test");
    const auto spec = front::spec_from_json(*document, "test");
    EXPECT_TRUE(spec.ok()) << spec.error().message;
    return work_of(spec->parts.at(0).graph).flops;
  };
  const double full = 2.0 * 2 * 4 * 64 * 64 * (32 + 32);
  EXPECT_EQ(flops("forward", ""), full);
  EXPECT_EQ(flops("forward", R"(, "mask": "causal")"), full / 2);
  EXPECT_EQ(flops("backward", R"(, "mask": "causal")"), 2.5 * full / 2);
  // Rows see 1, 2, ... 8 and then always 8 keys.
  EXPECT_DOUBLE_EQ(flops("forward", R"(, "mask": "causal", "window": [7, 0])"),
                   full * (36 + 56 * 8) / (64 * 64));
}

}  // namespace
}  // namespace lawson::plan
