// The error bounds against engines that are right and engines that are not.
#include <functional>

#include "ir/json.h"
#include "reference_bench.h"

namespace lawson {
namespace {

// ---- the bounds: right engines pass, wrong ones do not ----

TEST(ReferenceBounds, ItsOwnResultsAreWithinThem) {
  auto engine = make_reference_engine();
  const auto check = [&](const std::vector<cases::Case>& list) {
    for (const cases::Case& item : list) {
      const ir::Graph graph = graph_of_case(item);
      cases::JudgeOptions options;
      options.seed = item.seed;
      options.style = item.style;
      auto result = cases::judge(*engine, cpu_device(), graph, *engine, options);
      ASSERT_TRUE(result.ok()) << item.text() << ": " << result.error().message;
      EXPECT_TRUE(result->comparison.ok()) << item.text() << ": " << result->comparison.text();
    }
  };
  check(cases::attention_cases(100, 15));
  check(cases::fusion_cases(100, 60));
}

// f8e8m0 has neither zero nor negative numbers: they are NaN, and what may be on either side of
// zero is not judged.
TEST(ReferenceBounds, OfWhatF8e8m0CannotHold) {
  auto engine = make_reference_engine();
  for (const char* op : {R"({"op": "convert", "in": ["x"], "out": "y", "dtype": "f8e8m0"})",
                         R"({"op": "sin", "in": ["x"], "out": "y", "dtype": "f8e8m0"})"}) {
    const Json document = {
        {"lawson", 1},
        {"kind", "graph"},
        {"inputs",
         {{{"name", "x"}, {"dtype", "f32"}, {"shape", {5}}, {"values", {-4, 3, 0, 3e-39, 1e30}}}}},
        {"ops", {Json::parse(op)}},
        {"outputs", {"y"}}};
    const auto graph = ir::graph_from_json(document, "test");
    ASSERT_TRUE(graph.ok()) << graph.error().message;
    const auto result = cases::judge(*engine, cpu_device(), *graph, *engine, {});
    ASSERT_TRUE(result.ok()) << result.error().message;
    EXPECT_TRUE(result->comparison.ok()) << op << ": " << result->comparison.text();
    EXPECT_LE(result->comparison.outputs[0].unjudged, 3U);
  }
}

// A plain f32 engine for tests: attention forward with f32 accumulation and stored probabilities.
// `round` is applied after every accumulation.
std::vector<double> plain_attention(Bench& bench, double scale, const std::vector<double>& q,
                                    const std::vector<double>& k, const std::vector<double>& v,
                                    DType storage, const std::function<float(float)>& round) {
  const Dims& qs = bench.graph.tensor(0).shape;
  const Dims& ks = bench.graph.tensor(1).shape;
  const std::size_t heads = static_cast<std::size_t>(qs[0] * qs[1]);
  const std::size_t group = static_cast<std::size_t>(qs[1] / ks[1]);
  const auto s = static_cast<std::size_t>(qs[2]);
  const auto t = static_cast<std::size_t>(ks[2]);
  const auto d = static_cast<std::size_t>(qs[3]);
  std::vector<double> o(heads * s * d);
  for (std::size_t h = 0; h < heads; ++h) {
    for (std::size_t i = 0; i < s; ++i) {
      std::vector<float> x(t);
      float m = -1e30F;
      for (std::size_t j = 0; j < t; ++j) {
        float sum = 0;
        for (std::size_t c = 0; c < d; ++c) {
          sum = round(sum +
                      static_cast<float>(q[(h * s + i) * d + c] * k[(h / group * t + j) * d + c]));
        }
        x[j] = sum * static_cast<float>(scale);
        m = std::max(m, x[j]);
      }
      float denominator = 0;
      for (float& e : x) {
        e = std::exp(e - m);
        denominator = round(denominator + e);
      }
      for (std::size_t c = 0; c < d; ++c) {
        float sum = 0;
        for (std::size_t j = 0; j < t; ++j) {
          sum = round(sum + static_cast<float>(round_to(storage, x[j])) *
                                static_cast<float>(v[(h / group * t + j) * d + c]));
        }
        o[(h * s + i) * d + c] = sum / denominator;
      }
    }
  }
  return o;
}

// Swaps the two kv heads of a [b, 2, s, d] tensor.
std::vector<double> swapped_heads(const std::vector<double>& x, const Dims& shape) {
  std::vector<double> result = x;
  const auto half = static_cast<std::size_t>(shape[2] * shape[3]);
  for (std::size_t i = 0; i < x.size(); ++i) {
    result[i] = x[i / half % 2 == 0 ? i + half : i - half];
  }
  return result;
}

TEST(ReferenceBounds, RightAttentionPassesWrongAttentionDoesNot) {
  const Json fields{
      {"dtype", "bf16"},  {"batch", 1},        {"heads", 4},       {"seqlen_q", 64},
      {"seqlen_kv", 128}, {"head_dim_qk", 64}, {"head_dim_v", 64}, {"return_stats", false},
      {"layout", "bhsd"}};
  Bench bench(attention_graph(fields), 3);
  const auto q = bench.input(0);
  const auto k = bench.input(1);
  const auto v = bench.input(2);
  const double scale = 0.125;
  const auto f32 = [](float x) { return x; };
  const auto bf16 = [](float x) { return static_cast<float>(round_to(DType::bf16, x)); };
  const auto judged = [&](const std::vector<double>& o) {
    set_values(bench.graph, bench.outputs[0], o);
    return bench.compare(kBf16Storage);
  };
  const auto right = judged(plain_attention(bench, scale, q, k, v, DType::bf16, f32));
  EXPECT_TRUE(right.ok()) << right.text();
  EXPECT_GT(right.max_ratio(), 0.1) << "the bound is so wide that it means nothing";
  EXPECT_FALSE(judged(plain_attention(bench, scale, q, k, v, DType::bf16, bf16)).ok())
      << "bf16 accumulation";
  EXPECT_FALSE(judged(plain_attention(bench, 1, q, k, v, DType::bf16, f32)).ok())
      << "missing scale";
  const Dims& kv = bench.graph.tensor(1).shape;
  EXPECT_FALSE(
      judged(plain_attention(bench, scale, q, swapped_heads(k, kv), v, DType::bf16, f32)).ok())
      << "swapped key heads";
  EXPECT_FALSE(
      judged(plain_attention(bench, scale, q, k, swapped_heads(v, kv), DType::bf16, f32)).ok())
      << "swapped value heads";
  EXPECT_FALSE(judged(plain_attention(bench, scale * 1.01, q, k, v, DType::bf16, f32)).ok())
      << "a scale that is 1% off";
}

// The same graph with one bound of its rule changed must not pass for the right one.
TEST(ReferenceBounds, WrongMaskBoundsAreCaught) {
  const auto break_rule = [](const ir::Graph& graph,
                             const std::function<void(ir::AttentionRule&)>& change) {
    ir::Graph broken = graph;
    std::visit(ir::Overloaded{[&](ir::Attention& a) { change(a.rule); },
                              [&](ir::AttentionBackward& a) { change(a.rule); }, [](auto&) {}},
               broken.nodes[0].op);
    return broken;
  };
  for (const char* dtype : {"bf16", "f16", "f32"}) {
    for (const char* pass : {"forward", "backward"}) {
      SCOPED_TRACE(fmt::format("{} {}", dtype, pass));
      const Arithmetic arithmetic{0, 0x1p-24, unit_roundoff(*dtype_from_string(dtype)), 0x1p-22};
      const Json shape{{"dtype", dtype},   {"pass", pass},    {"batch", 1},
                       {"seqlen_q", 96},   {"seqlen_kv", 96}, {"head_dim_qk", 32},
                       {"head_dim_v", 32}, {"mask", "causal"}};
      Bench bench(attention_graph(shape), 9);
      bench.execute();
      EXPECT_TRUE(bench.compare(arithmetic).ok()) << bench.compare(arithmetic).text();
      bench.execute(break_rule(bench.graph, [](ir::AttentionRule& r) { r.right = 1; }));
      EXPECT_FALSE(bench.compare(arithmetic).ok()) << "sees one column of the future";

      Json window = shape;
      window["window"] = {40, 0};
      Bench windowed(attention_graph(window), 9);
      for (const std::int64_t left : {39, 41}) {
        windowed.execute(break_rule(windowed.graph, [&](ir::AttentionRule& r) { r.left = left; }));
        EXPECT_FALSE(windowed.compare(arithmetic).ok()) << "left bound " << left;
      }
      Json capped = shape;
      capped["softcap"] = 20.0;
      Bench cap(attention_graph(capped), 9);
      cap.execute(break_rule(cap.graph, [](ir::AttentionRule& r) { r.softcap = 0; }));
      EXPECT_FALSE(cap.compare(arithmetic).ok()) << "softcap left out";
      // The backward has the denominator in its statistics.
      if (std::string{pass} == "backward") continue;
      Json one = shape;
      one["softmax"] = "off_by_one";
      Bench off(attention_graph(one), 9);
      off.execute(break_rule(off.graph,
                             [](ir::AttentionRule& r) { r.softmax = ir::SoftmaxKind::vanilla; }));
      EXPECT_FALSE(off.compare(arithmetic).ok()) << "off-by-one left out";
    }
  }
}

// Data or rule of one feature changed a little: what comes out must not pass for the right one.
TEST(ReferenceBounds, WrongFeaturesAreCaught) {
  struct Wrong {
    const char* what;
    Json fields;
    std::function<void(Bench&, ir::AttentionRule&)> change;
  };
  const auto one_value = [](const char* name, auto change) {
    return [=](Bench& bench, ir::AttentionRule&) {
      auto values = bench.values(name);
      change(values);
      bench.set(name, values);
    };
  };
  using Values = std::vector<double>;
  const auto rule = [](auto change) { return [=](Bench&, ir::AttentionRule& of) { change(of); }; };
  const Json thd{{"layout", "thd"}, {"seqlens_q", {40, 0, 24}}, {"seqlens_kv", {48, 8, 30}}};
  const auto with = [](Json fields, const Json& more) {
    fields.update(more);
    return fields;
  };
  const std::vector<Wrong> list{
      {"another offset", {{"dropout", 0.2}}, one_value("offset", [](Values& v) { v[0] += 1; })},
      {"another probability",
       {{"dropout", 0.2}, {"dropout_mask", true}},
       rule([](ir::AttentionRule& r) { r.dropout = 0.22; })},
      {"another dropout mask",
       {{"dropout", 0.2}, {"dropout_mask", true}},
       one_value("dropout_mask", [](Values& v) { v[5] = 1 - v[5]; })},
      {"bias behind the scale", {{"bias", "pre_scale"}}, rule([](ir::AttentionRule& r) {
         r.pre_scale_bias = false;
       })},
      {"another mask bit",
       {{"attn_mask", {{"dtype", "bool"}}}},
       one_value("mask", [](Values& v) { v[7] = 1 - v[7]; })},
      {"another mask value",
       {{"attn_mask", {{"dtype", "bf16"}}}},
       one_value("mask", [](Values& v) { v[7] += 1; })},
      {"another slope",
       {{"bias", "alibi"}, {"alibi_slopes", true}},
       one_value("slopes", [](Values& v) { v[1] *= 1.1; })},
      {"a sequence one key shorter", thd, one_value("cu_seqlens_kv", [](Values& v) { v[1] -= 1; })},
      {"a sequence one query later",
       with(thd, {{"padded_offsets", true},
                  {"seqlens_q_padded", {42, 0, 24}},
                  {"seqlens_kv_padded", {48, 8, 30}}}),
       one_value("cu_seqlens_q_padded", [](Values& v) { v[0] += 1; })},
      {"rows aligned to the top", with(thd, {{"mask", "causal_bottom_right"}}),
       rule([](ir::AttentionRule& r) { r.alignment = ir::Alignment::top_left; })},
      {"pages swapped",
       {{"paged", {{"page_size_k", 16}, {"page_size_v", 8}}}},
       one_value("page_table_v", [](Values& v) { std::swap(v[0], v[1]); })},
  };
  for (const Wrong& wrong : list) {
    for (const char* pass : {"forward", "backward"}) {
      const bool backward = std::string{pass} == "backward";
      if (backward && wrong.fields.contains("paged")) continue;
      SCOPED_TRACE(fmt::format("{} {}", wrong.what, pass));
      Json fields{{"dtype", "bf16"}, {"pass", pass},      {"batch", 3},      {"seqlen_q", 40},
                  {"seqlen_kv", 48}, {"head_dim_qk", 32}, {"head_dim_v", 32}};
      fields.update(wrong.fields);
      Bench bench(attention_graph(fields), 5);
      bench.execute();
      EXPECT_TRUE(bench.compare(kBf16Storage).ok()) << bench.compare(kBf16Storage).text();
      const auto expected = bench.oracle(kBf16Storage);
      ir::Graph other = bench.graph;
      std::visit(ir::Overloaded{[&](ir::Attention& a) { wrong.change(bench, a.rule); },
                                [&](ir::AttentionBackward& a) { wrong.change(bench, a.rule); },
                                [](auto&) {}},
                 other.nodes[0].op);
      bench.execute(other);
      EXPECT_FALSE(plan::compare(bench.graph, bench.outputs, expected).ok());
    }
  }
}

}  // namespace
}  // namespace lawson
