// Two right plans agree, and what is wrong does not.
#include "plan/agreement.h"

#include <gtest/gtest.h>

#include <cmath>

#include "engine/cpu/cpu.h"
#include "engine/reference/reference.h"
#include "ir/json.h"

namespace lawson::plan {
namespace {

class Agreement : public testing::Test {
 protected:
  static ir::Graph graph_of(const std::string& ops, const std::string& dtype = "bf16") {
    const std::string text = fmt::format(
        R"({{"lawson": 1, "kind": "graph", "name": "g",
            "inputs": [{{"name": "a", "dtype": "{0}", "shape": [96, 256]}},
                       {{"name": "b", "dtype": "{0}", "shape": [256, 64]}}],
            "ops": [{1}], "outputs": ["y"]}})",
        dtype, ops);
    return ir::graph_from_json(parse_json(text, "test").value(), "test").value();
  }

  static std::vector<Buffer> run(Engine& engine, const ir::Graph& graph) {
    const auto reference = make_reference_engine();
    const auto inputs = make_inputs(graph, 1, *reference).value();
    auto outputs = make_outputs(graph);
    const Plan plan = engine.compile(graph, cpu_device(), {}, std::nullopt, {}).value();
    std::vector<std::byte> workspace(static_cast<std::size_t>(plan.workspace_bytes) + 64);
    EXPECT_TRUE(engine
                    .execute(*engine.load(plan, cpu_device()).value(), bindings_of(inputs, outputs),
                             workspace.data(), nullptr)
                    .ok());
    return outputs;
  }

  // As cuDNN computes.
  static Arithmetic tensor_cores() {
    Arithmetic arithmetic;
    arithmetic.accumulate_roundoff = 0x1p-23;
    arithmetic.function_roundoff = 0x1p-18;
    return arithmetic;
  }

  static std::string compared(const ir::Graph& graph, const std::vector<Buffer>& first,
                              const std::vector<Buffer>& other) {
    return disagreement(graph, tensor_cores(), first, other);
  }

  std::shared_ptr<Engine> cpu_ = make_cpu_engine();
  std::shared_ptr<Engine> reference_ = make_reference_engine();
};

constexpr const char* kGelu =
    R"({"op": "matmul", "in": ["a", "b"], "out": "p"}, {"op": "gelu_tanh", "in": ["p"], "out": "y"})";

TEST_F(Agreement, EnginesThatRoundDifferentlyAgree) {
  // The reference rounds intermediates as written, the cpu engine carries them in f32.
  const ir::Graph graph = graph_of(kGelu);
  EXPECT_EQ(compared(graph, run(*reference_, graph), run(*cpu_, graph)), "");
}

TEST_F(Agreement, OneWrongElementShows) {
  const ir::Graph graph = graph_of(kGelu);
  const auto first = run(*cpu_, graph);
  const auto other = run(*cpu_, graph);
  store_element(other[0].data(), DType::bf16, 777,
                load_element(other[0].data(), DType::bf16, 777) + 1);
  const std::string text = compared(graph, first, other);
  EXPECT_NE(text.find("WRONG 1 of 6144"), std::string::npos) << text;
  EXPECT_NE(compared(graph, first, make_outputs(graph)).find("never written"), std::string::npos);
}

TEST_F(Agreement, AMissingOpShows) {
  const ir::Graph graph = graph_of(kGelu);
  const ir::Graph plain = graph_of(R"({"op": "matmul", "in": ["a", "b"], "out": "y"})");
  EXPECT_NE(compared(graph, run(*cpu_, graph), run(*cpu_, plain)), "");
}

TEST_F(Agreement, IntegersAreExact) {
  const ir::Graph graph = graph_of(R"({"op": "matmul", "in": ["a", "b"], "out": "y"})", "i8");
  const auto first = run(*cpu_, graph);
  const auto other = run(*cpu_, graph);
  EXPECT_EQ(compared(graph, first, other), "");
  store_element(other[0].data(), DType::i32, 5, load_element(other[0].data(), DType::i32, 5) + 1);
  EXPECT_NE(compared(graph, first, other), "");
}

TEST_F(Agreement, AFewElementsMayJump) {
  const ir::Graph graph = graph_of(
      R"({"op": "matmul", "in": ["a", "b"], "out": "p"}, {"op": "round", "in": ["p"], "out": "y"})");
  const auto first = run(*cpu_, graph);
  const auto other = run(*cpu_, graph);
  const auto move = [&](std::int64_t element) {
    store_element(other[0].data(), DType::bf16, element,
                  load_element(other[0].data(), DType::bf16, element) + 4);
  };
  for (std::int64_t i = 0; i < 6; ++i) move(1000 * i);
  EXPECT_EQ(compared(graph, first, other), "");
  move(500);
  EXPECT_NE(compared(graph, first, other), "");
}

}  // namespace
}  // namespace lawson::plan
