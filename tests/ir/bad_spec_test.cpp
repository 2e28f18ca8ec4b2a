// Specs from strangers: each fault is refused with a message that names it, and none is a crash
// (this runs under the address and undefined-behaviour sanitizers).
#include <gtest/gtest.h>

#include <chrono>

#include "front/spec.h"
#include "ir/json.h"

namespace lawson {
namespace {

struct BadSpec {
  std::string name;
  Json change;                     // a merge patch of the good document
  std::vector<std::string> parts;  // what the message must contain
};

void PrintTo(const BadSpec& item, std::ostream* out) {
  *out << item.name;
}  // NOLINT: gtest's name

const Json kAttention = {{"lawson", 1}, {"kind", "attention"}, {"batch", 2},
                         {"heads", 8},  {"seqlen_q", 64},      {"head_dim_qk", 64}};
const Json kGraph = Json::parse(R"({"lawson": 1, "kind": "graph",
  "inputs": [{"name": "x", "dtype": "f32", "shape": [4, 4]}],
  "ops": [{"op": "neg", "in": ["x"], "out": "y"}], "outputs": ["y"]})");

std::string refusal(const Json& document) {
  const auto spec = front::spec_from_json(document, "bad.json");
  if (spec.ok()) return "accepted";
  EXPECT_EQ(spec.error().kind, ErrorKind::invalid_argument) << spec.error().message;
  EXPECT_LT(spec.error().message.size(), 1000U);
  return spec.error().message;
}

void expect_parts(const std::string& message, const std::vector<std::string>& parts) {
  EXPECT_TRUE(message.starts_with("bad.json")) << message;
  for (const std::string& part : parts) {
    EXPECT_NE(message.find(part), std::string::npos) << "'" << part << "' is not in: " << message;
  }
}

class BadAttention : public testing::TestWithParam<BadSpec> {};

TEST_P(BadAttention, IsRefusedByName) {
  Json document = kAttention;
  document.merge_patch(GetParam().change);
  expect_parts(refusal(document), GetParam().parts);
}

const std::uint64_t k2To63 = std::uint64_t{1} << 63;

INSTANTIATE_TEST_SUITE_P(
    Specs, BadAttention,
    testing::Values(
        BadSpec{"no_version", {{"lawson", nullptr}}, {"'lawson'", "missing"}},
        BadSpec{"other_version", {{"lawson", 2}}, {"'lawson'", "2"}},
        BadSpec{"no_kind", {{"kind", nullptr}}, {"'kind'", "missing"}},
        BadSpec{"other_kind", {{"kind", "atention"}}, {"'kind'", "atention", "attention"}},
        BadSpec{"unknown_field", {{"head_dim", 64}}, {"'head_dim'", "did you mean 'head_dim_v'"}},
        BadSpec{"no_heads", {{"heads", nullptr}}, {"'heads'", "missing"}},
        BadSpec{"zero_heads", {{"heads", 0}}, {"'heads'", "0"}},
        BadSpec{"text_for_number", {{"heads", "8"}}, {"'heads'", "\"8\"", "integer"}},
        BadSpec{"fraction", {{"heads", 8.5}}, {"'heads'", "8.5"}},
        BadSpec{"list_for_number", {{"heads", {8}}}, {"'heads'", "[8]"}},
        BadSpec{"bool_for_number", {{"heads", true}}, {"'heads'", "true"}},
        BadSpec{"negative", {{"seqlen_q", -1}}, {"'seqlen_q'", "-1"}},
        BadSpec{"two_to_63", {{"seqlen_q", k2To63}}, {"'seqlen_q'", "9223372036854775808"}},
        BadSpec{"two_to_62", {{"seqlen_q", std::int64_t{1} << 62}}, {"'seqlen_q'"}},
        BadSpec{"product_overflows",
                {{"batch", std::int64_t{1} << 40}, {"seqlen_q", std::int64_t{1} << 40}},
                {"elements"}},
        BadSpec{"strides_overflow",
                {{"seqlen_q", std::int64_t{1} << 40}, {"head_dim_qk", std::int64_t{1} << 40}},
                {"elements"}},
        BadSpec{"heads_not_divisible", {{"kv_heads", 3}}, {"'kv_heads'", "3", "8"}},
        BadSpec{"zero_head_dim", {{"head_dim_qk", 0}}, {"'head_dim_qk'", "0"}},
        BadSpec{"dtype", {{"dtype", "float16"}}, {"'dtype'", "float16", "f16"}},
        BadSpec{"integer_dtype", {{"dtype", "i8"}}, {"'dtype'", "i8"}},
        BadSpec{"mask", {{"mask", "casual"}}, {"'mask'", "casual", "nearest: causal"}},
        BadSpec{"layout", {{"layout", "bshx"}}, {"'layout'", "bshx"}},
        BadSpec{"window_of_one", {{"window", {1}}}, {"'window'", "1 entries"}},
        BadSpec{"window_below", {{"window", {-2, 0}}}, {"window[0]", "-2"}},
        BadSpec{"window_object", {{"window", {{"left", 1}}}}, {"'window'"}},
        BadSpec{"bias_shape",
                {{"bias", "post_scale"}, {"bias_shape", {1, 3, 64, 64}}},
                {"'bias_shape'", "[1, 3, 64, 64]"}},
        BadSpec{"bias_shape_alone", {{"bias_shape", {1, 1, 64, 64}}}, {"'bias_shape'"}},
        BadSpec{"bias_grad_alone", {{"bias_grad", true}}, {"'bias_grad'"}},
        BadSpec{"softcap", {{"softcap", -30}}, {"'softcap'", "negative"}},
        BadSpec{"dropout", {{"dropout", 1}}, {"'dropout'", "1"}},
        BadSpec{"scale_text", {{"scale", "1"}}, {"'scale'", "a finite number"}},
        BadSpec{"lengths_count",
                {{"mask", "padding"}, {"seqlens_q", {1, 2, 3}}},
                {"'seqlens_q'", "3 lengths for batch 2"}},
        BadSpec{
            "lengths_range", {{"mask", "padding"}, {"seqlens_q", {1, 65}}}, {"seqlens_q[1]", "65"}},
        BadSpec{"lengths_without_mask", {{"seqlens_q", {1, 2}}}, {"'seqlens_q'", "padding"}},
        BadSpec{"strides_rank", {{"strides", {{"q", {1, 2, 3}}}}}, {"strides.q", "4 strides"}},
        BadSpec{"strides_negative", {{"strides", {{"q", {-1, 2, 3, 1}}}}}, {"strides.q[0]"}},
        BadSpec{"strides_name", {{"strides", {{"qq", {1, 2, 3, 1}}}}}, {"strides.qq"}},
        BadSpec{"strides_type", {{"strides", 3}}, {"strides"}},
        BadSpec{"output_overlaps", {{"strides", {{"o", {1, 1, 1, 1}}}}}, {"overlap"}},
        BadSpec{"name_is_a_number", {{"name", 3}}, {"'name'", "a string"}},
        BadSpec{"long_name", {{"name", std::string(241, 'n')}}, {"'name'", "240"}}),
    [](const auto& item) { return item.param.name; });

class BadGraph : public testing::TestWithParam<BadSpec> {};

TEST_P(BadGraph, IsRefusedByName) {
  Json document = kGraph;
  document.merge_patch(GetParam().change);
  expect_parts(refusal(document), GetParam().parts);
}

Json input(const Json& fields) {
  Json item{{"name", "x"}, {"dtype", "f32"}, {"shape", {4, 4}}};
  item.merge_patch(fields);
  return {{"inputs", {item}}};
}

Json ops(const std::string& text) {
  return {{"ops", Json::parse(text)}};
}

INSTANTIATE_TEST_SUITE_P(
    Specs, BadGraph,
    testing::Values(
        BadSpec{"unknown_field", {{"nodes", Json::array()}}, {"'nodes'"}},
        BadSpec{"inputs_type", {{"inputs", 3}}, {"'inputs'", "a list"}},
        BadSpec{"input_type", {{"inputs", {3}}}, {"inputs[0]"}},
        BadSpec{"no_outputs", {{"outputs", nullptr}}, {"'outputs'", "missing"}},
        BadSpec{"unknown_output", {{"outputs", {"w"}}}, {"outputs[0]", "'w'"}},
        BadSpec{"input_as_output", {{"outputs", {"x"}}}, {"outputs[0]", "input"}},
        BadSpec{"two_outputs_alike", {{"outputs", {"y", "y"}}}, {"outputs[1]", "twice"}},
        BadSpec{"output_dtype",
                {{"outputs", {{{"name", "y"}, {"dtype", "half"}}}}},
                {"outputs[0].dtype", "half"}},
        BadSpec{"long_name_of_a_converted_output",
                {{"ops", Json::parse(R"([{"op": "neg", "in": "x", "out": ")" +
                                     std::string(253, 'n') + R"("}])")},
                 {"outputs", {{{"name", std::string(253, 'n')}, {"dtype", "bf16"}}}}},
                {"outputs[0].name", "252"}},
        BadSpec{"output_strides",
                {{"outputs", {{{"name", "y"}, {"strides", {1, 1}}}}}},
                {"outputs[0]", "overlap"}},
        BadSpec{"dtype", input({{"dtype", "f33"}}), {"inputs[0].dtype", "f33", "f32"}},
        BadSpec{"no_dtype", input({{"dtype", nullptr}}), {"inputs[0].dtype", "missing"}},
        BadSpec{"no_name", input({{"name", nullptr}}), {"inputs[0].name", "missing"}},
        BadSpec{"empty_name", input({{"name", ""}}), {"inputs[0]", "no name"}},
        BadSpec{"input_field", input({{"stride", {4, 1}}}), {"inputs[0].stride", "strides"}},
        BadSpec{"negative_dim", input({{"shape", {4, -4}}}), {"inputs[0].shape[1]", "-4"}},
        BadSpec{"dim_2_to_63",
                input({{"shape", {k2To63, 4}}}),
                {"inputs[0].shape[0]", "9223372036854775808"}},
        BadSpec{"overflow",
                input({{"shape", {std::int64_t{1} << 40, std::int64_t{1} << 40}}}),
                {"inputs[0]", "elements"}},
        BadSpec{"overflow_of_three",
                input({{"shape",
                        {std::int64_t{1} << 40, std::int64_t{1} << 40, std::int64_t{1} << 40}}}),
                {"inputs[0]", "elements"}},
        BadSpec{"rank_9", input({{"shape", {1, 1, 1, 1, 1, 1, 1, 1, 1}}}), {"rank 9"}},
        BadSpec{"strides_rank", input({{"strides", {1}}}), {"inputs[0].strides", "1 strides"}},
        BadSpec{"strides_2_to_63", input({{"strides", {k2To63, 1}}}), {"inputs[0].strides[0]"}},
        BadSpec{"strides_reach", input({{"strides", {std::int64_t{1} << 46, 1}}}), {"strides"}},
        BadSpec{"alignment", input({{"alignment", 3}}), {"alignment 3"}},
        BadSpec{"by_value_shape", input({{"by_value", true}}), {"inputs[0].by_value"}},
        BadSpec{"values_count", input({{"values", {1, 2}}}), {"inputs[0].values", "16 numbers"}},
        BadSpec{"domain", input({{"domain", {3, 2}}}), {"inputs[0].domain", "low <= high"}},
        BadSpec{"op_name",
                ops(R"([{"op": "negg", "in": "x", "out": "y"}])"),
                {"ops[0].op", "'negg'", "'neg'"}},
        BadSpec{"op_missing", ops(R"([{"in": "x", "out": "y"}])"), {"ops[0].op", "missing"}},
        BadSpec{"op_field",
                ops(R"([{"op": "neg", "in": "x", "out": "y", "alpha": 1}])"),
                {"ops[0].alpha", "unknown field"}},
        BadSpec{"operand", ops(R"([{"op": "neg", "in": "w", "out": "y"}])"), {"ops[0].in", "'w'"}},
        BadSpec{
            "later_operand",
            ops(R"([{"op": "neg", "in": "z", "out": "y"}, {"op": "neg", "in": "x", "out": "z"}])"),
            {"ops[0].in", "'z'"}},
        BadSpec{"too_many_operands",
                ops(R"([{"op": "neg", "in": ["x", "x"], "out": "y"}])"),
                {"ops[0].in", "1 operands, got 2"}},
        BadSpec{"operand_type", ops(R"([{"op": "neg", "in": [3], "out": "y"}])"), {"ops[0].in"}},
        BadSpec{"null_operand",
                ops(R"([{"op": "neg", "in": [null], "out": "y"}])"),
                {"ops[0]", "missing"}},
        BadSpec{"no_result", ops(R"([{"op": "neg", "in": "x"}])"), {"ops[0].out", "missing"}},
        BadSpec{"null_result",
                ops(R"([{"op": "neg", "in": "x", "out": [null]}])"),
                {"ops[0]", "result 0"}},
        BadSpec{"two_results",
                ops(R"([{"op": "neg", "in": "x", "out": ["y", "z"]}])"),
                {"ops[0].out", "1 results, got 2"}},
        BadSpec{
            "result_twice",
            ops(R"([{"op": "neg", "in": "x", "out": "y"}, {"op": "neg", "in": "x", "out": "y"}])"),
            {"ops[1]", "'y' is used twice"}},
        BadSpec{"axes",
                ops(R"([{"op": "reduce_sum", "in": "x", "out": "y", "axes": [2]}])"),
                {"ops[0]", "[0, 2)"}},
        BadSpec{
            "constant", ops(R"([{"op": "constant", "out": "y"}])"), {"ops[0].value", "missing"}},
        BadSpec{
            "reshape_2_to_63",
            ops(R"([{"op": "reshape", "in": "x", "out": "y", "shape": [9223372036854775808]}])"),
            {"ops[0].shape[0]", "9223372036854775808"}},
        BadSpec{"broadcast_overflow",
                ops(R"([{"op": "broadcast", "in": "x", "out": "y",
                         "shape": [1099511627776, 1099511627776, 4, 4]}])"),
                {"ops[0]", "elements"}},
        BadSpec{"iota_overflow",
                ops(R"([{"op": "iota", "out": "y", "shape": [1099511627776, 1099511627776]}])"),
                {"ops[0]", "elements"}},
        BadSpec{"slice_stride",
                ops(R"([{"op": "slice", "in": "x", "out": "y", "start": [0, 0], "limit": [4, 4],
                         "stride": [0, 1]}])"),
                {"ops[0].stride[0]", "0"}}),
    [](const auto& item) { return item.param.name; });

TEST(BadSpec, NumbersThatAreNone) {
  for (const char* text : {R"({"lawson": 1, "kind": "attention", "heads": 1, "seqlen_q": 1,
                              "head_dim_qk": 8, "scale": NaN})",
                           R"({"lawson": 1, "kind": "attention", "heads": 1, "seqlen_q": 1,
                              "head_dim_qk": 8, "scale": 1e999})",
                           R"({"lawson": 1, "kind": "attention", "heads": 1, "seqlen_q": 1,
                              "head_dim_qk": 8, "scale": -Infinity})"}) {
    EXPECT_FALSE(parse_json(text, "bad.json").ok());
  }
}

// Integers that a double does not hold would be other numbers.
TEST(BadSpec, ConstantsAreExact) {
  Json document = kGraph;
  const auto set = [&](const Json& value) {
    document["ops"] = {{{"op", "constant"}, {"value", value}, {"dtype", "i64"}, {"out", "y"}}};
    return refusal(document);
  };
  expect_parts(set(std::int64_t{9'007'199'254'740'993}),
               {"'ops[0].value'", "9007199254740993", "2^53"});
  expect_parts(set(INT64_MIN), {"'ops[0].value'", "2^53"});
  EXPECT_EQ(set(std::int64_t{9'007'199'254'740'991}), "accepted");
  EXPECT_EQ(set(0x1p60), "accepted");
}

TEST(BadSpec, TooManyEntries) {
  Json document = kGraph;
  Json& list = document["ops"];
  for (int i = 0; i < 5000; ++i) {
    list.push_back({{"op", "neg"}, {"in", "x"}, {"out", "t" + std::to_string(i)}});
  }
  expect_parts(refusal(document), {"'ops'", "4096"});
}

TEST(BadSpec, LongNamesMakeShortMessages) {
  const std::string name(1'000'000, 'n');
  for (const Json& change :
       {ops(R"([{"op": ")" + name + R"(", "in": "x", "out": "y"}])"),
        ops(R"([{"op": "neg", "in": ")" + name + R"(", "out": "y"}])"), Json{{"outputs", {name}}},
        Json{{name, 1}}, Json{{"kind", name}}, input({{"name", name}})}) {
    Json document = kGraph;
    document.merge_patch(change);
    refusal(document);
  }
}

TEST(BadSpec, LargestGraphIsReadInASecond) {
  Json document = kGraph;
  Json& list = document["ops"];
  list.clear();
  std::string last = "x";
  for (int i = 0; i < 4096; ++i) {
    const std::string out = i == 4095 ? "y" : "t" + std::to_string(i);
    list.push_back({{"op", "add"}, {"in", {last, last}}, {"out", out}});
    last = out;
  }
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(refusal(document), "accepted");
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
  EXPECT_LT(elapsed.count(), 5.0);  // sanitizers included
}

}  // namespace
}  // namespace lawson
