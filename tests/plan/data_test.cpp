// Generated inputs and the comparison with the oracle: a verification is worth what these catch.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>

#include "engine/reference/reference.h"
#include "ir/json.h"
#include "plan/inputs.h"
#include "plan/verify.h"

namespace lawson::plan {
namespace {

ir::Graph graph_from(const char* text) {
  auto graph = ir::graph_from_json(Json::parse(text), "test");
  EXPECT_TRUE(graph.ok()) << (graph.ok() ? "" : graph.error().message);
  return *graph;
}

std::vector<Buffer> inputs_of(const ir::Graph& graph, std::uint64_t seed = 1,
                              InputStyle style = InputStyle::normal) {
  auto engine = make_reference_engine();
  auto inputs = make_inputs(graph, seed, *engine, style);
  EXPECT_TRUE(inputs.ok()) << (inputs.ok() ? "" : inputs.error().message);
  return std::move(*inputs);
}

std::vector<double> elements(const ir::Graph& graph, const Buffer& buffer) {
  const ir::Tensor& tensor = graph.tensor(buffer.id());
  std::vector<double> values;
  Dims index(tensor.shape.size(), 0);
  do {
    values.push_back(load_element(buffer.data(), tensor.dtype, offset_of(index, tensor.strides)));
  } while (next_index(index, tensor.shape));
  return values;
}

constexpr const char* kNegate = R"({"lawson": 1, "kind": "graph",
    "inputs": [{"name": "x", "dtype": "f32", "shape": [3, 4]}],
    "ops": [{"op": "neg", "in": ["x"], "out": "y"}],
    "outputs": [{"name": "y", "strides": [6, 1]}]})";

TEST(Inputs, NormalValuesOfEverySeedAndLayout) {
  const auto rows = graph_from(R"({"lawson": 1, "kind": "graph",
      "inputs": [{"name": "x", "dtype": "f32", "shape": [100, 100]}],
      "ops": [{"op": "neg", "in": ["x"], "out": "y"}], "outputs": ["y"]})");
  const auto columns = graph_from(R"({"lawson": 1, "kind": "graph",
      "inputs": [{"name": "x", "dtype": "f32", "shape": [100, 100], "strides": [1, 128]}],
      "ops": [{"op": "neg", "in": ["x"], "out": "y"}], "outputs": ["y"]})");
  const auto x = elements(rows, inputs_of(rows)[0]);
  EXPECT_EQ(x, elements(columns, inputs_of(columns)[0]));
  EXPECT_NE(x, elements(rows, inputs_of(rows, 2)[0]));
  double sum = 0;
  double squares = 0;
  for (const double v : x) {
    sum += v;
    squares += v * v;
  }
  EXPECT_NEAR(sum / 1e4, 0, 0.05);
  EXPECT_NEAR(squares / 1e4, 1, 0.05);
}

TEST(Inputs, IntegersStayInTheirDomainAndGivenValuesAreTaken) {
  const auto graph = graph_from(R"({"lawson": 1, "kind": "graph",
      "inputs": [{"name": "a", "dtype": "i32", "shape": [64], "domain": [3, 5]},
                 {"name": "b", "dtype": "i32", "shape": [64]},
                 {"name": "c", "dtype": "i32", "shape": [2], "values": [7, -9]}],
      "ops": [{"op": "add", "in": ["a", "b"], "out": "y"}, {"op": "neg", "in": ["c"], "out": "z"}],
      "outputs": ["y", "z"]})");
  const auto inputs = inputs_of(graph);
  for (const double v : elements(graph, inputs[0])) EXPECT_TRUE(v >= 3 && v <= 5) << v;
  for (const double v : elements(graph, inputs[1])) EXPECT_TRUE(v >= -8 && v <= 7) << v;
  EXPECT_EQ(elements(graph, inputs[2]), (std::vector<double>{7, -9}));
}

TEST(Inputs, GapsArePoisonAndAlignmentIsNotExceeded) {
  const auto graph = graph_from(R"({"lawson": 1, "kind": "graph",
      "inputs": [{"name": "x", "dtype": "f16", "shape": [2, 3], "strides": [5, 1],
                  "alignment": 8}],
      "ops": [{"op": "neg", "in": ["x"], "out": "y"}], "outputs": ["y"]})");
  const auto inputs = inputs_of(graph);
  EXPECT_EQ(inputs[0].bytes(), 16U);
  for (const std::int64_t gap : {3, 4}) {
    EXPECT_TRUE(std::isnan(load_element(inputs[0].data(), DType::f16, gap)));
  }
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(inputs[0].data()) % 16, 8U);
  EXPECT_TRUE(inputs[0].guards_intact());
}

ir::Graph attention(bool backward, const char* dtype) {
  const std::string text = fmt::format(
      R"({{"lawson": 1, "kind": "graph",
      "inputs": [{{"name": "q", "dtype": "{0}", "shape": [1, 2, 32, 64]}},
                 {{"name": "k", "dtype": "{0}", "shape": [1, 1, 48, 64]}},
                 {{"name": "v", "dtype": "{0}", "shape": [1, 1, 48, 64]}},
                 {{"name": "scale", "dtype": "f32", "shape": [1, 1, 1, 1], "by_value": true,
                   "values": [0.125]}}{1}],
      "ops": [{2}], "outputs": [{3}]}})",
      dtype,
      backward ? fmt::format(R"(, {{"name": "o", "dtype": "{0}", "shape": [1, 2, 32, 64],
                                    "strides": [4096, 64, 128, 1]}},
                     {{"name": "do", "dtype": "{0}", "shape": [1, 2, 32, 64]}},
                     {{"name": "stats", "dtype": "f32", "shape": [1, 2, 32, 1]}})",
                             dtype)
               : "",
      backward ? R"({"op": "attention_backward", "right": 0, "out": ["dq", "dk", "dv"],
                     "in": {"q": "q", "k": "k", "v": "v", "scale": "scale", "o": "o",
                            "do": "do", "stats": "stats"}})"
               : R"({"op": "attention", "right": 0, "in": ["q", "k", "v", "scale"],
                     "out": ["o", "stats"]})",
      backward ? R"("dq", "dk", "dv")" : R"("o", "stats")");
  return graph_from(text.c_str());
}

std::vector<OracleOutput> oracle(const ir::Graph& graph, const std::vector<Buffer>& inputs) {
  const auto bindings = bindings_of(inputs, {});
  auto result = make_reference_engine()->oracle(graph, bindings, {});
  EXPECT_TRUE(result.ok());
  return std::move(*result);
}

TEST(Inputs, BackwardGetsWhatItsForwardReturns) {
  const auto forward = attention(false, "bf16");
  const auto backward = attention(true, "bf16");
  const auto expected = oracle(forward, inputs_of(forward));
  const auto inputs = inputs_of(backward);
  const auto o = elements(backward, inputs[4]);
  const auto stats = elements(backward, inputs[6]);
  for (std::size_t i = 0; i < o.size(); ++i) {
    EXPECT_EQ(o[i], round_to(DType::bf16, expected[0].values[i]));
  }
  for (std::size_t i = 0; i < stats.size(); ++i) {
    EXPECT_EQ(stats[i], round_to(DType::f32, expected[1].values[i]));
  }
}

TEST(Inputs, StylesDoWhatTheySay) {
  const auto graph = attention(false, "bf16");
  const auto large = oracle(graph, inputs_of(graph, 1, InputStyle::large_logits));
  double lowest = 0;
  double highest = 0;
  for (const double lse : large[1].values) {
    lowest = std::min(lowest, lse);
    highest = std::max(highest, lse);
  }
  EXPECT_LT(lowest, -150);
  EXPECT_GT(highest, 150);
  const auto one_hot_inputs = inputs_of(graph, 1, InputStyle::one_hot);
  const auto v = elements(graph, one_hot_inputs[2]);
  const auto one_hot = oracle(graph, one_hot_inputs);
  for (std::size_t i = 0; i < 32 * 64; ++i) EXPECT_NEAR(one_hot[0].values[i], v[i], 1e-9);
  const auto tiny_inputs = inputs_of(graph, 1, InputStyle::denormal);
  const auto tiny = elements(graph, tiny_inputs[0]);
  for (const double x : tiny) EXPECT_LT(std::fabs(x), 0x1p-126);
  EXPECT_NE(tiny[0], 0);
}

// Two sequences of three and two tokens in memory for five and four, of twelve.
ir::Graph ragged() {
  return graph_from(R"({"lawson": 1, "kind": "graph",
      "inputs": [{"name": "q", "dtype": "f32", "shape": [1, 1, 12, 8]},
                 {"name": "k", "dtype": "f32", "shape": [1, 1, 12, 8]},
                 {"name": "v", "dtype": "f32", "shape": [1, 1, 12, 8]},
                 {"name": "mask", "dtype": "f32", "shape": [1, 1, 4, 4]},
                 {"name": "cu", "dtype": "i32", "shape": [4, 1, 1, 1], "values": [0, 3, 5, 5]},
                 {"name": "padded", "dtype": "i32", "shape": [4, 1, 1, 1], "values": [0, 5, 9, 9]},
                 {"name": "count", "dtype": "i32", "shape": [1, 1, 1, 1], "by_value": true,
                  "values": [2]}],
      "ops": [{"op": "attention", "max_q": 4, "max_kv": 4, "out": ["o"],
               "in": {"q": "q", "k": "k", "v": "v", "mask": "mask", "cu_seqlens_q": "cu",
                      "cu_seqlens_kv": "cu", "cu_seqlens_q_padded": "padded",
                      "cu_seqlens_kv_padded": "padded", "sequences": "count"}}],
      "outputs": ["o"]})");
}

TEST(Inputs, RowsThatNoSequenceHas) {
  const auto graph = ragged();
  const std::vector<int> there{1, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0};
  const auto normal = elements(graph, inputs_of(graph)[0]);
  const auto poisoned = elements(graph, inputs_of(graph, 1, InputStyle::poisoned)[0]);
  for (std::size_t row = 0; row < there.size(); ++row) {
    for (std::size_t d = 0; d < 8; ++d) {
      const std::size_t at = row * 8 + d;
      EXPECT_EQ(std::isnan(poisoned[at]), there[row] == 0) << row;
      EXPECT_EQ(normal[at] == 1000, there[row] == 0) << row;
      if (there[row] != 0) {
        EXPECT_EQ(normal[at], poisoned[at]);
      }
    }
  }
}

TEST(Inputs, MasksThatHideAndMasksThatLower) {
  const auto graph = ragged();
  const auto hidden = elements(graph, inputs_of(graph, 1, InputStyle::masked_rows)[3]);
  const auto lowered = elements(graph, inputs_of(graph, 1, InputStyle::low_mask)[3]);
  const std::array<double, 4> shifts{-200, -95, -80, 0};
  int partly = 0;
  for (std::size_t i = 0; i < 16; ++i) {
    const bool infinite = std::isinf(hidden[i]);
    if (i / 4 == 2) {
      EXPECT_TRUE(infinite) << i;
    } else {
      partly += infinite ? 1 : 0;
    }
    EXPECT_NEAR(lowered[i], shifts[i / 4], 6);
  }
  EXPECT_GT(partly, 0);
  EXPECT_LT(partly, 12);
}

struct Sample {
  Sample() : graph{graph_from(kNegate)}, inputs{inputs_of(graph)}, outputs{make_outputs(graph)} {
    expected = oracle(graph, inputs);
    write();
  }
  void write() {
    Dims index(2, 0);
    std::size_t i = 0;
    do {
      store_element(outputs[0].data(), DType::f32, offset_of(index, {6, 1}),
                    expected[0].values[i++]);
    } while (next_index(index, {3, 4}));
  }
  float* data() { return reinterpret_cast<float*>(outputs[0].data()); }
  Comparison result() { return compare(graph, outputs, expected); }

  ir::Graph graph;
  std::vector<Buffer> inputs;
  std::vector<Buffer> outputs;
  std::vector<OracleOutput> expected;
};

TEST(Compare, RightResultsPass) {
  Sample run;
  const Comparison result = run.result();
  EXPECT_TRUE(result.ok()) << result.text();
  EXPECT_EQ(result.outputs[0].elements, 12);
  EXPECT_EQ(result.outputs[0].unjudged, 0);
}

TEST(Compare, NamesTheFirstWrongElement) {
  Sample run;
  run.data()[6 + 2] += 0.25F;
  const Comparison result = run.result();
  EXPECT_FALSE(result.ok());
  EXPECT_EQ(result.outputs[0].wrong, 1);
  EXPECT_EQ(result.outputs[0].first_wrong, (Dims{1, 2}));
  EXPECT_NEAR(result.outputs[0].max_error, 0.25, 1e-6);
  EXPECT_NE(result.text().find("WRONG 1 of 12, first at [1, 2]"), std::string::npos)
      << result.text();
}

TEST(Compare, UnwrittenElementsNaNsGapsAndGuards) {
  {
    Sample run;
    run.outputs = make_outputs(run.graph);
    const Comparison result = run.result();
    EXPECT_EQ(result.outputs[0].unwritten, 12);
    EXPECT_FALSE(result.ok());
  }
  {
    Sample run;
    run.data()[0] = std::numeric_limits<float>::infinity();
    EXPECT_EQ(run.result().outputs[0].wrong_pattern, 1);
  }
  {
    Sample run;
    run.expected[0].values[0] = std::numeric_limits<double>::quiet_NaN();
    EXPECT_EQ(run.result().outputs[0].wrong_pattern, 1);
    run.data()[0] = std::nanf("1");
    EXPECT_TRUE(run.result().ok());
  }
  {
    Sample run;
    run.data()[4] = 1;  // between the rows
    EXPECT_FALSE(run.result().outputs[0].gaps_intact);
    EXPECT_FALSE(run.result().ok());
  }
  for (const std::int64_t beside : {std::int64_t{-1}, std::int64_t{16}}) {
    Sample run;
    std::byte* first = run.outputs[0].data() + 4 * beside;
    *first ^= std::byte{1};
    EXPECT_FALSE(run.result().outputs[0].guards_intact);
    EXPECT_FALSE(run.result().ok());
  }
  {
    Sample run;
    run.outputs.clear();
    EXPECT_FALSE(run.result().ok());
  }
}

TEST(Compare, InfiniteBoundsAcceptAnything) {
  Sample run;
  run.expected[0].bounds[5] = std::numeric_limits<double>::infinity();
  run.data()[6 + 1] = std::nanf("1");
  const Comparison result = run.result();
  EXPECT_TRUE(result.ok());
  EXPECT_EQ(result.outputs[0].unjudged, 1);
}

}  // namespace
}  // namespace lawson::plan
