// Attention and cache append of the reference engine against their definitions: tiny cases by hand,
// and equivalences that follow from the definitions.
#include <cstring>
#include <numbers>

#include "base/philox.h"
#include "reference_bench.h"

namespace lawson {
namespace {

using Slot = ir::AttentionSlots;

TEST(ReferenceAttention, MasksAreTheirDefinition) {
  // With equal keys, a row is the mean of the values it sees; values are one-hot in the column.
  const auto seen = [](Json fields, std::int64_t q, std::int64_t kv) {
    fields.update({{"batch", 1},
                   {"heads", 1},
                   {"kv_heads", 1},
                   {"seqlen_q", q},
                   {"seqlen_kv", kv},
                   {"head_dim_qk", 1},
                   {"head_dim_v", kv}});
    Bench bench(attention_graph(fields));
    set_values(bench.graph, bench.inputs[1], std::vector<double>(static_cast<std::size_t>(kv), 0));
    std::vector<double> identity;
    for (std::int64_t i = 0; i < kv * kv; ++i) identity.push_back(i / kv == i % kv ? 1 : 0);
    set_values(bench.graph, bench.inputs[2], identity);
    bench.execute();
    std::string rows;
    const auto o = bench.output(0);
    for (std::size_t i = 0; i < o.size(); ++i) {
      if (i > 0 && i % static_cast<std::size_t>(kv) == 0) rows += ' ';
      rows += o[i] > 0 ? '1' : '0';
    }
    return rows;
  };
  EXPECT_EQ(seen({}, 2, 3), "111 111");
  EXPECT_EQ(seen({{"mask", "causal"}}, 3, 4), "1000 1100 1110");
  EXPECT_EQ(seen({{"mask", "causal_bottom_right"}}, 2, 4), "1110 1111");
  EXPECT_EQ(seen({{"mask", "causal_bottom_right"}}, 4, 2), "00 00 10 11");
  EXPECT_EQ(seen({{"window", {1, 0}}}, 4, 4), "1000 1100 0110 0011");
  EXPECT_EQ(seen({{"window", {0, 1}}}, 3, 4), "1100 0110 0011");
  EXPECT_EQ(seen({{"window", {1, -1}}}, 3, 4), "1111 1111 0111");
  EXPECT_EQ(seen({{"mask", "padding"}, {"seqlens_q", {2}}, {"seqlens_kv", {3}}}, 3, 4),
            "1110 1110 0000");
  EXPECT_EQ(seen({{"mask", "padding_causal_bottom_right"}, {"seqlens_q", {2}}, {"seqlens_kv", {3}}},
                 3, 4),
            "1100 1110 0000");
  EXPECT_EQ(seen({{"mask", "padding_causal"}, {"seqlens_q", {3}}, {"seqlens_kv", {2}}}, 3, 4),
            "1000 1100 1100");
}

TEST(ReferenceAttention, SmallestExampleByHand) {
  Bench bench(attention_graph({{"batch", 1},
                               {"heads", 1},
                               {"kv_heads", 1},
                               {"seqlen_q", 1},
                               {"seqlen_kv", 2},
                               {"head_dim_qk", 2},
                               {"head_dim_v", 1},
                               {"scale", 0.5}}));
  set_values(bench.graph, bench.inputs[0], {1, 2});
  set_values(bench.graph, bench.inputs[1], {2, 0, 0, 2});
  set_values(bench.graph, bench.inputs[2], {10, 20});
  bench.execute();  // scores 1 and 2
  const double e = std::numbers::e;
  EXPECT_NEAR(bench.output(0)[0], (10 + 20 * e) / (1 + e), 1e-12);
  EXPECT_NEAR(bench.output(1)[0], std::log(e + e * e), 1e-12);
}

TEST(ReferenceAttention, DenominatorsSoftcapAndRowsThatSeeNothing) {
  const auto run = [](Json fields) {
    fields.update({{"batch", 1},
                   {"heads", 1},
                   {"kv_heads", 1},
                   {"seqlen_q", 2},
                   {"seqlen_kv", 1},
                   {"head_dim_qk", 1},
                   {"head_dim_v", 1},
                   {"scale", 1.0},
                   {"mask", "causal_bottom_right"}});
    Bench bench(attention_graph(fields));
    set_values(bench.graph, bench.inputs[0], {3, 2});
    set_values(bench.graph, bench.inputs[1], {1});
    set_values(bench.graph, bench.inputs[2], {8});
    if (bench.inputs.size() > 4) set_values(bench.graph, bench.inputs[4], {0.5});
    bench.execute();
    auto result = bench.output(0);
    for (const double lse : bench.output(1)) result.push_back(lse);
    return result;  // o of both rows, then their statistics; the first row sees nothing
  };
  expect_values(run({}), {0, 8, -kInfinity, 2});
  const double e2 = std::exp(2.0);
  expect_values(run({{"softmax", "off_by_one"}}), {0, 8 * e2 / (1 + e2), 0, std::log(1 + e2)});
  const double sink = std::exp(0.5);
  expect_values(run({{"softmax", "learnable"}}),
                {0, 8 * e2 / (sink + e2), 0.5, std::log(sink + e2)});
  expect_values(run({{"softcap", 1.5}}), {0, 8, -kInfinity, 1.5 * std::tanh(2 / 1.5)});
}

TEST(ReferenceAttention, AlibiSlopes) {
  // Press et al. 2022 for 4 heads: 1/4, 1/16, 1/64, 1/256; for 3: two of 2 heads, one of 4.
  for (const auto& [heads, slopes] :
       {std::pair{4, std::vector<double>{0.25, 0.0625, 0x1p-6, 0x1p-8}},
        std::pair{3, std::vector<double>{0x1p-4, 0x1p-8, 0x1p-2}}}) {
    Bench bench(attention_graph({{"batch", 1},
                                 {"heads", heads},
                                 {"kv_heads", heads},
                                 {"seqlen_q", 1},
                                 {"seqlen_kv", 2},
                                 {"head_dim_qk", 1},
                                 {"head_dim_v", 1},
                                 {"bias", "alibi"},
                                 {"mask", "causal_bottom_right"}}));
    set_values(bench.graph, bench.inputs[0], std::vector<double>(slopes.size(), 0));
    bench.execute();
    for (std::size_t h = 0; h < slopes.size(); ++h) {
      EXPECT_NEAR(bench.output(1)[h], std::log(1 + std::exp(-slopes[h])), 1e-12);
    }
  }
}

// ---- ragged ----

std::vector<double> identity(std::int64_t n) {
  std::vector<double> values;
  for (std::int64_t i = 0; i < n * n; ++i) values.push_back(i / n == i % n ? 1 : 0);
  return values;
}

// One head over ragged tensors, keys all equal and values one-hot in the token: a row of o tells
// which tokens it averages.
struct Ragged {
  std::vector<double> cu_q, cu_kv, padded_q, padded_kv;
  std::int64_t tokens_q, tokens_kv;

  std::vector<Operand> operands() const {
    std::vector<Operand> result{
        {Slot::q, DType::f64, {1, 1, tokens_q, 1}, {}},
        {Slot::k, DType::f64, {1, 1, tokens_kv, 1}, std::vector<double>(size(tokens_kv), 0)},
        {Slot::v, DType::f64, {1, 1, tokens_kv, tokens_kv}, identity(tokens_kv)}};
    for (const auto& [slot, values] :
         {std::pair{Slot::cu_seqlens_q, &cu_q}, std::pair{Slot::cu_seqlens_kv, &cu_kv},
          std::pair{Slot::cu_seqlens_q_padded, &padded_q},
          std::pair{Slot::cu_seqlens_kv_padded, &padded_kv}}) {
      if (values->empty()) continue;
      result.push_back(
          {slot, DType::i32, {static_cast<std::int64_t>(values->size()), 1, 1, 1}, *values});
    }
    return result;
  }
  static std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }
};

// Per row the tokens that it averages ("." for none), or "?" where nothing was written.
std::string seen_tokens(Bench& bench) {
  const auto o = bench.values("o");
  const auto width = static_cast<std::size_t>(bench.graph.tensor(bench.output("o").id()).shape[3]);
  std::string text;
  for (std::size_t row = 0; row < o.size() / width; ++row) {
    if (row > 0) text += ' ';
    std::string tokens;
    for (std::size_t c = 0; c < width; ++c) {
      if (std::isnan(o[row * width + c])) tokens = "?";
      if (o[row * width + c] > 0) tokens += static_cast<char>('0' + c);
    }
    text += tokens.empty() ? "." : tokens;
  }
  return text;
}

ir::AttentionRule ragged_rule(std::int64_t max_q, std::int64_t max_kv) {
  ir::AttentionRule rule;
  rule.max_q = max_q;
  rule.max_kv = max_kv;
  return rule;
}

TEST(ReferenceRagged, PaddingBetweenSequences) {
  // Memory [a,P,b,b,c,P,P,d,d]; what is in P does not matter.
  const std::vector<double> valid{0, 1, 3, 4, 6};
  const std::vector<double> memory{0, 2, 4, 7, 9};
  const Ragged ragged{valid, valid, memory, memory, 9, 9};
  const auto run = [&](const ir::AttentionRule& rule) {
    OpBench bench(ir::Attention{rule}, ragged.operands(), {"o", "stats"});
    for (const char* name : {"q", "k", "v"}) {
      auto values = bench.values(name);
      const std::size_t width = values.size() / 9;
      for (const std::size_t token : {1U, 5U, 6U}) {
        std::fill_n(values.begin() + static_cast<std::ptrdiff_t>(token * width), width, kNaN);
      }
      bench.set(name, values);
    }
    bench.execute();
    const auto stats = bench.values("stats");
    const std::vector<double> at{stats[0], stats[3], stats[4], stats[8]};
    expect_values(at, {0, std::log(2.0), 0, std::log(2.0)});
    EXPECT_TRUE(bench.compare(kF32).ok()) << bench.compare(kF32).text();
    return seen_tokens(bench);
  };
  ir::AttentionRule rule = ragged_rule(2, 2);
  EXPECT_EQ(run(rule), "0 . 23 23 4 . . 78 78");
  rule.right = 0;
  EXPECT_EQ(run(rule), "0 . 2 23 4 . . 7 78");
}

TEST(ReferenceRagged, EverySequenceHasItsOwnDiagonal) {
  // Lengths (2, 3), (1, 2), (0, 1), (3, 1), (2, 0).
  const Ragged ragged{{0, 2, 3, 3, 6, 8}, {0, 3, 5, 6, 7, 7}, {}, {}, 8, 7};
  const auto run = [&](const ir::AttentionRule& rule) {
    OpBench bench(ir::Attention{rule}, ragged.operands(), {"o"});
    bench.execute();
    return seen_tokens(bench);
  };
  ir::AttentionRule rule = ragged_rule(3, 3);
  EXPECT_EQ(run(rule), "012 012 34 6 6 6 . .");
  rule.right = 0;
  EXPECT_EQ(run(rule), "0 01 3 6 6 6 . .");
  rule.left = 0;
  EXPECT_EQ(run(rule), "0 1 3 6 . . . .");
  rule.alignment = ir::Alignment::bottom_right;
  EXPECT_EQ(run(rule), "1 2 4 . . 6 . .");
  rule.left = 1;
  EXPECT_EQ(run(rule), "01 12 34 . . 6 . .");
  rule.left = -1;
  EXPECT_EQ(run(rule), "01 012 34 . . 6 . .");
}

TEST(ReferenceRagged, OneSideIsEnough) {
  // q ragged with lengths 1 and 3; k and v dense with their padding lengths 2 and 1.
  ir::AttentionRule rule;
  rule.max_q = 3;
  rule.padding = true;
  rule.right = 0;
  rule.alignment = ir::Alignment::bottom_right;
  const std::vector<double> one_hot{1, 0, 0, 0, 1, 0, 0, 0, 1};
  std::vector<double> values = one_hot;
  values.insert(values.end(), one_hot.begin(), one_hot.end());
  OpBench bench(ir::Attention{rule},
                {{Slot::q, DType::f64, {1, 1, 4, 1}, {}},
                 {Slot::k, DType::f64, {2, 1, 3, 1}, {0, 0, 0, 0, 0, 0}},
                 {Slot::v, DType::f64, {2, 1, 3, 3}, values},
                 {Slot::cu_seqlens_q, DType::i32, {3, 1, 1, 1}, {0, 1, 4}},
                 {Slot::seqlen_kv, DType::i32, {2, 1, 1, 1}, {2, 1}}},
                {"o"});
  bench.execute();
  EXPECT_EQ(seen_tokens(bench), "01 . . 0");
}

// Room for 4 sequences and 12 tokens, of which 2 sequences with 5 tokens are there: the rest is not
// in memory (the sanitizer watches), and of results it stays as it was.
TEST(ReferenceRagged, WhatIsNotThereIsLeftAlone) {
  const ir::AttentionRule rule = ragged_rule(3, 3);
  std::vector<Operand> operands{{Slot::q, DType::f64, {1, 1, 12, 1}, {}},
                                {Slot::k, DType::f64, {1, 1, 12, 1}, {}},
                                {Slot::v, DType::f64, {1, 1, 12, 1}, {}},
                                {Slot::bias, DType::f64, {4, 1, 1, 3}, {}},
                                {Slot::cu_seqlens_q, DType::i32, {5, 1, 1, 1}, {}},
                                {Slot::cu_seqlens_kv, DType::i32, {5, 1, 1, 1}, {}},
                                {Slot::sequences, DType::i32, {1, 1, 1, 1}, {2}}};
  using Back = ir::AttentionBackward;
  std::vector<Operand> backward = operands;
  backward.push_back({Back::o, DType::f64, {1, 1, 12, 1}, {}});
  backward.push_back({Back::dout, DType::f64, {1, 1, 12, 1}, {}});
  backward.push_back({Back::stats, DType::f64, {1, 1, 12, 1}, {}});
  for (const ir::Graph& graph :
       {graph_of_op(ir::Attention{rule}, operands, {"o", "stats", "max_logit"}),
        graph_of_op(Back{rule}, backward, {"dq", "dk", "dv", "dbias"})}) {
    Bench bench(graph);
    const std::int32_t offsets[] = {0, 2, 5};
    std::vector<std::vector<double>> memory;
    std::vector<std::vector<std::int32_t>> lengths;
    std::int32_t count = 2;
    std::vector<Binding> bindings;
    for (std::int32_t id = 0; id < graph.input_count; ++id) {
      const ir::Tensor& tensor = graph.tensor(id);
      if (tensor.by_value) {
        bindings.push_back({ir::Graph::uid(id), &count});
      } else if (tensor.dtype == DType::i32) {
        lengths.emplace_back(offsets, offsets + 3);
        bindings.push_back({ir::Graph::uid(id), lengths.back().data()});
      } else {
        memory.emplace_back(tensor.name == "bias" ? 6 : 5, 0.5);
        bindings.push_back({ir::Graph::uid(id), memory.back().data()});
      }
    }
    for (const plan::Buffer& buffer : bench.outputs) bindings.push_back(buffer.binding());
    auto loaded = bench.load(graph);
    ASSERT_TRUE(loaded.ok());
    ASSERT_TRUE(bench.engine->execute(**loaded, bindings, nullptr, nullptr).ok());
    auto expected = bench.engine->oracle(graph, bindings, kF32);
    ASSERT_TRUE(expected.ok());
    EXPECT_TRUE(plan::compare(graph, bench.outputs, *expected).ok());
    for (const plan::Buffer& output : bench.outputs) {
      const std::string& name = graph.tensor(output.id()).name;
      const auto values = values_of(graph, output);
      const std::size_t written = name == "dbias" ? 6 : 5;
      for (std::size_t i = 0; i < values.size(); ++i) {
        EXPECT_EQ(std::isnan(values[i]), i >= written) << name << ' ' << i;
      }
      // The comparison sees what is written there.
      auto more = values;
      more[written] = 0;
      set_values(graph, output, more);
      EXPECT_FALSE(plan::compare(graph, bench.outputs, *expected).ok()) << name;
      set_values(graph, output, values);
    }
  }
}

TEST(ReferenceRagged, LengthsThatCannotBeAreErrors) {
  const auto message = [](const Ragged& ragged, const ir::AttentionRule& rule,
                          const std::vector<Operand>& more = {}) {
    auto operands = ragged.operands();
    operands.insert(operands.end(), more.begin(), more.end());
    OpBench bench(ir::Attention{rule}, operands, {"o"});
    const Status status = bench.try_execute();
    const auto oracle =
        bench.engine->oracle(bench.graph, plan::bindings_of(bench.inputs, {}), kF32);
    EXPECT_EQ(status.ok(), oracle.ok());
    return status.ok() ? "" : status.error().message;
  };
  const ir::AttentionRule rule = ragged_rule(3, 3);
  EXPECT_EQ(message({{0, 2, 4}, {0, 1, 4}, {}, {}, 4, 4}, rule), "");
  EXPECT_EQ(message({{1, 2, 4}, {0, 1, 4}, {}, {}, 4, 4}, rule),
            "attention: cu_seqlens_q[0] is 1; expected 0");
  EXPECT_EQ(message({{0, 2, 4}, {0, 3, 1}, {}, {}, 4, 4}, rule),
            "attention: sequence 1 of kv has -2 tokens in memory for -2; expected 0 to 3 that fit");
  EXPECT_EQ(message({{0, 4, 4}, {0, 1, 4}, {}, {}, 4, 4}, rule),
            "attention: sequence 0 of q has 4 tokens in memory for 4; expected 0 to 3 that fit");
  EXPECT_EQ(message({{0, 2, 4}, {0, 1, 4}, {0, 1, 4}, {}, 4, 4}, rule),
            "attention: sequence 0 of q has 2 tokens in memory for 1; expected 0 to 3 that fit");
  EXPECT_EQ(message({{0, 2, 4}, {0, 1, 4}, {}, {0, 2, 6}, 4, 4}, rule),
            "attention: the sequences of kv end at token 6 of 4");
  EXPECT_EQ(message({{0, 2, 4}, {0, 1, 4}, {}, {}, 4, 4}, rule,
                    {{Slot::sequences, DType::i32, {1, 1, 1, 1}, {3}}}),
            "attention: sequences is 3; expected 0 to 2");
}

// ---- masks, biases, denominators ----

// 2 rows and 2 columns; q.k * scale is 1 for column 0 and 2 for column 1.
std::vector<Operand> small_operands(const std::vector<Operand>& more) {
  std::vector<Operand> operands{{Slot::q, DType::f64, {1, 1, 2, 1}, {2, 2}},
                                {Slot::k, DType::f64, {1, 1, 2, 1}, {1, 2}},
                                {Slot::v, DType::f64, {1, 1, 2, 1}, {10, 20}},
                                {Slot::scale, DType::f64, {1, 1, 1, 1}, {0.5}}};
  operands.insert(operands.end(), more.begin(), more.end());
  return operands;
}

TEST(ReferenceAttention, RowsThatAMaskHidesWhole) {
  const Operand sink{Slot::sink, DType::f32, {1, 1, 1, 1}, {0.5}};
  const std::vector<Operand> hiders{
      {Slot::mask, DType::boolean, {1, 1, 2, 2}, {0, 0, 1, 1}},
      {Slot::mask, DType::f64, {1, 1, 2, 1}, {-kInfinity, 0}},
      {Slot::bias, DType::f64, {1, 1, 2, 2}, {-kInfinity, -kInfinity, 0, 0}}};
  const double e = std::numbers::e;
  for (const Operand& hider : hiders) {
    for (const auto softmax :
         {ir::SoftmaxKind::vanilla, ir::SoftmaxKind::off_by_one, ir::SoftmaxKind::learnable}) {
      SCOPED_TRACE(fmt::format("slot {} {}", hider.slot, to_string(softmax)));
      ir::AttentionRule rule;
      rule.softmax = softmax;
      std::vector<Operand> more{hider};
      double extra = softmax == ir::SoftmaxKind::vanilla ? 0 : 1;
      if (softmax == ir::SoftmaxKind::learnable) {
        more.push_back(sink);
        extra = std::exp(0.5);
      }
      auto operands = small_operands(more);
      OpBench forward(ir::Attention{rule}, operands, {"o", "stats", "max_logit"});
      forward.execute();
      const double sum = extra + e + e * e;
      expect_values(forward.values("o"), {0, (10 * e + 20 * e * e) / sum});
      expect_values(forward.values("stats"), {std::log(extra), std::log(sum)});
      expect_values(forward.values("max_logit"), {-kInfinity, 2});
      EXPECT_TRUE(forward.compare(kF32).ok()) << forward.compare(kF32).text();

      using Back = ir::AttentionBackward;
      operands.push_back({Back::o, DType::f64, {1, 1, 2, 1}, forward.values("o")});
      operands.push_back(
          {Back::dout, DType::f64, {1, 1, 2, 1}, {3, 0}});  // for the hidden row only
      operands.push_back({Back::stats, DType::f64, {1, 1, 2, 1}, forward.values("stats")});
      std::vector<std::string> wanted{"dq", "dk", "dv"};
      if (hider.slot == Slot::bias) wanted.emplace_back("dbias");
      if (softmax == ir::SoftmaxKind::learnable) wanted.emplace_back("dsink");
      OpBench backward(Back{rule}, operands, wanted);
      backward.execute();
      for (const std::string& name : wanted) {
        for (const double v : backward.values(name)) EXPECT_EQ(v, 0.0) << name;
      }
      EXPECT_TRUE(backward.compare(kF32).ok()) << backward.compare(kF32).text();
    }
  }
}

TEST(ReferenceAttention, MasksAndBiasesBroadcastOverAnyAxes) {
  // Two sequences, two heads, two rows, two columns with equal keys: what a row sees of each.
  const auto seen = [](int slot, const Dims& shape, const std::vector<double>& values) {
    const bool is_mask = slot == Slot::mask;
    OpBench bench(ir::Attention{},
                  {{Slot::q, DType::f64, {2, 2, 2, 1}, {}},
                   {Slot::k, DType::f64, {2, 1, 2, 1}, {0, 0, 0, 0}},
                   {Slot::v, DType::f64, {2, 1, 2, 2}, {1, 0, 0, 1, 1, 0, 0, 1}},
                   {slot, is_mask ? DType::boolean : DType::f64, shape, values}},
                  {"o"});
    bench.execute();
    return seen_tokens(bench);
  };
  for (const int slot : {int{Slot::mask}, int{Slot::bias}}) {
    const double yes = slot == Slot::mask ? 1 : 0;
    const double no = slot == Slot::mask ? 0 : -kInfinity;
    EXPECT_EQ(seen(slot, {2, 1, 1, 1}, {yes, no}), "01 01 01 01 . . . .");
    EXPECT_EQ(seen(slot, {1, 2, 1, 1}, {no, yes}), ". . 01 01 . . 01 01");
    EXPECT_EQ(seen(slot, {1, 1, 2, 1}, {yes, no}), "01 . 01 . 01 . 01 .");
    EXPECT_EQ(seen(slot, {1, 1, 1, 2}, {yes, no}), "0 0 0 0 0 0 0 0");
    EXPECT_EQ(seen(slot, {2, 1, 1, 2}, {yes, no, no, yes}), "0 0 0 0 1 1 1 1");
    EXPECT_EQ(seen(slot, {1, 2, 2, 2}, {yes, yes, yes, no, no, yes, no, no}), "01 0 1 . 01 0 1 .");
  }
}

TEST(ReferenceAttention, MasksAndBiasesAddBehindTheCap) {
  ir::AttentionRule rule;
  rule.softcap = 2;
  const Operand sink{Slot::sink, DType::f32, {1, 1, 1, 1}, {50}};
  // The largest score, without the sink; column 1 of row 0 is hidden.
  OpBench bench(
      [&] {
        ir::AttentionRule with_sink = rule;
        with_sink.softmax = ir::SoftmaxKind::learnable;
        return ir::Attention{with_sink};
      }(),
      small_operands({{Slot::bias, DType::f64, {1, 1, 1, 2}, {0.25, -1}},
                      {Slot::mask, DType::boolean, {1, 1, 2, 2}, {1, 0, 1, 1}},
                      sink}),
      {"o", "max_logit"});
  bench.execute();
  const double first = 2 * std::tanh(0.5) + 0.25;
  const double second = 2 * std::tanh(1.0) - 1;
  ASSERT_GT(first, second);
  expect_values(bench.values("max_logit"), {first, first});

  OpBench both(ir::Attention{rule},
               small_operands({{Slot::bias, DType::f64, {1, 1, 1, 2}, {0.25, -1}},
                               {Slot::mask, DType::f64, {1, 1, 2, 1}, {3, -7}}}),
               {"o", "stats"});
  both.execute();
  const double sum = std::log(std::exp(first) + std::exp(second));
  expect_values(both.values("stats"), {sum + 3, sum - 7});
}

TEST(ReferenceAttention, PreScaleBias) {
  ir::AttentionRule rule;
  rule.pre_scale_bias = true;
  const Operand bias{Slot::bias, DType::f64, {1, 1, 2, 2}, {1, -3, 0, 5}};
  OpBench bench(ir::Attention{rule}, small_operands({bias}), {"o", "stats"});
  bench.execute();  // scores 1.5, 0.5 and 1, 4.5
  expect_values(bench.values("stats"),
                {std::log(std::exp(1.5) + std::exp(0.5)), std::log(std::exp(1) + std::exp(4.5))});
  rule.softcap = 3;
  OpBench capped(ir::Attention{rule}, small_operands({bias}), {"o", "stats"});
  capped.execute();
  const auto cap = [](double x) { return std::exp(3 * std::tanh(x / 3)); };
  expect_values(capped.values("stats"),
                {std::log(cap(1.5) + cap(0.5)), std::log(cap(1) + cap(4.5))});
}

TEST(ReferenceAttention, GivenSlopesCountFromTheAlignedRow) {
  ir::AttentionRule rule;
  rule.alibi = true;
  rule.padding = true;
  rule.alignment = ir::Alignment::bottom_right;
  // Two heads; lengths (1, 2): i' = 1, distances -1 and 0.
  OpBench bench(ir::Attention{rule},
                {{Slot::q, DType::f64, {1, 2, 2, 1}, {0, 0, 0, 0}},
                 {Slot::k, DType::f64, {1, 1, 3, 1}, {1, 1, 1}},
                 {Slot::v, DType::f64, {1, 1, 3, 1}, {1, 0, 0}},
                 {Slot::seqlen_q, DType::i32, {1, 1, 1, 1}, {1}},
                 {Slot::seqlen_kv, DType::i32, {1, 1, 1, 1}, {2}},
                 {Slot::slopes, DType::f32, {1, 2, 1, 1}, {0.5, -2}}},
                {"o"});
  bench.execute();
  expect_values(bench.values("o"),
                {std::exp(-0.5) / (1 + std::exp(-0.5)), 0, std::exp(2) / (1 + std::exp(2)), 0});
}

// ---- dropout ----

TEST(ReferenceAttention, DropoutIsTheStreamOfSeedAndOffset) {
  ir::AttentionRule rule;
  rule.dropout = 0.375;
  std::vector<double> one_hot;
  for (int n = 0; n < 2; ++n) {
    const auto square = identity(5);
    one_hot.insert(one_hot.end(), square.begin(), square.end());
  }
  const std::vector<Operand> tensors{
      {Slot::q, DType::f64, {2, 2, 3, 1}, std::vector<double>(12, 0)},
      {Slot::k, DType::f64, {2, 1, 5, 1}, {}},
      {Slot::v, DType::f64, {2, 1, 5, 5}, one_hot}};
  auto operands = tensors;
  operands.push_back({Slot::seed, DType::i64, {1, 1, 1, 1}, {}});
  operands.push_back({Slot::offset, DType::i64, {1, 1, 1, 1}, {}});
  OpBench bench(ir::Attention{rule}, operands, {"o", "stats", "dropped"});
  // More bits than a double has; and negative.
  const std::int64_t seed = 0x123456789abcdef1;
  const std::int64_t offset = -7;
  std::memcpy(bench.input("seed").data(), &seed, sizeof(seed));
  std::memcpy(bench.input("offset").data(), &offset, sizeof(offset));
  bench.execute();
  std::vector<double> kept;
  std::vector<double> o;
  for (std::uint32_t index = 0; index < 2 * 2 * 3 * 5; ++index) {
    const auto words = philox({index / 4, 0, 0xfffffff9U, 0xffffffffU}, {0x9abcdef1U, 0x12345678U});
    kept.push_back(words[index % 4] >= 0x60000000U ? 1 : 0);
    o.push_back(kept.back() / 5 / 0.625);
  }
  EXPECT_EQ(bench.values("dropped"), kept);
  expect_values(bench.values("o"), o);
  expect_values(bench.values("stats"), std::vector<double>(12, std::log(5.0)));  // of all weights
  EXPECT_TRUE(bench.compare(kF32).ok()) << bench.compare(kF32).text();

  // The mask as an operand; any value but 0 keeps.
  auto masked = tensors;
  std::vector<double> mask = kept;
  for (double& m : mask) m *= 3;
  masked.push_back({Slot::dropout_mask, DType::u8, {2, 2, 3, 5}, mask});
  OpBench given(ir::Attention{rule}, masked, {"o", "dropped"});
  given.execute();
  EXPECT_EQ(given.values("o"), bench.values("o"));
  EXPECT_EQ(given.values("dropped"), kept);
}

TEST(ReferenceAttention, DropoutOfRaggedCountsWithTheMaxima) {
  const Ragged ragged{{0, 1, 3}, {0, 2, 3}, {}, {}, 3, 3};
  ir::AttentionRule rule = ragged_rule(2, 5);
  rule.dropout = 0.5;
  auto operands = ragged.operands();
  operands.push_back({Slot::seed, DType::i64, {1, 1, 1, 1}, {11}});
  operands.push_back({Slot::offset, DType::i64, {1, 1, 1, 1}, {2}});
  OpBench bench(ir::Attention{rule}, operands, {"o", "dropped"});
  bench.execute();
  std::vector<std::uint8_t> kept(2 * 2 * 5);
  DropoutStream{11, 2, 0.5}.fill(0, kept);
  EXPECT_EQ(bench.values("dropped"), std::vector<double>(kept.begin(), kept.end()));
  // Sequence 0 has row 0 and columns 0, 1; sequence 1 rows 0, 1 and column 0 (token 2).
  expect_values(bench.values("o"),
                {1.0 * kept[0], 1.0 * kept[1], 0, 0, 0, 2.0 * kept[10], 0, 0, 2.0 * kept[15]});
}

// ---- paged caches ----

TEST(ReferencePaged, EqualsTheGatheredCache) {
  ir::AttentionRule rule;
  rule.padding = true;
  rule.right = 0;
  rule.alignment = ir::Alignment::bottom_right;
  const Dims lengths{5, 3};
  std::vector<Operand> shared{{Slot::q, DType::f64, {2, 4, 2, 3}, {}},
                              {Slot::seqlen_q, DType::i32, {2, 1, 1, 1}, {2, 1}},
                              {Slot::seqlen_kv, DType::i32, {2, 1, 1, 1}, {5, 3}}};
  auto dense_operands = shared;
  dense_operands.push_back({Slot::k, DType::f64, {2, 2, 5, 3}, {}});
  dense_operands.push_back({Slot::v, DType::f64, {2, 2, 5, 4}, {}});
  OpBench dense(ir::Attention{rule}, dense_operands, {"o", "stats"});
  dense.execute();

  // Pages of 2 keys and 3 values; what sequence 1 does not need is no page at all.
  const std::vector<double> table_k{6, 0, 3, 2, 5, 99};
  const std::vector<double> table_v{1, 4, 0, 99};
  rule.max_kv = 5;
  auto paged_operands = shared;
  paged_operands.push_back({Slot::k, DType::f64, {7, 2, 2, 3}, {}});
  paged_operands.push_back({Slot::v, DType::f64, {5, 2, 3, 4}, {}});
  paged_operands.push_back({Slot::page_table_k, DType::i32, {2, 1, 3, 1}, table_k});
  paged_operands.push_back({Slot::page_table_v, DType::i32, {2, 1, 2, 1}, table_v});
  OpBench paged(ir::Attention{rule}, paged_operands, {"o", "stats"});
  for (const auto& [name, table, size, depth] :
       {std::tuple{"k", &table_k, 2UL, 3UL}, std::tuple{"v", &table_v, 3UL, 4UL}}) {
    const auto from = dense.values(name);
    std::vector<double> pages(paged.values(name).size(), kNaN);  // where no token is
    for (std::size_t b = 0; b < 2; ++b) {
      for (std::size_t h = 0; h < 2; ++h) {
        for (std::size_t j = 0; j < static_cast<std::size_t>(lengths[b]); ++j) {
          const auto page = static_cast<std::size_t>((*table)[b * table->size() / 2 + j / size]);
          for (std::size_t c = 0; c < depth; ++c) {
            pages[((page * 2 + h) * size + j % size) * depth + c] =
                from[((b * 2 + h) * 5 + j) * depth + c];
          }
        }
      }
    }
    paged.set(name, pages);
  }
  paged.execute();
  EXPECT_EQ(paged.values("o"), dense.values("o"));
  EXPECT_EQ(paged.values("stats"), dense.values("stats"));
  EXPECT_TRUE(paged.compare(kF32).ok()) << paged.compare(kF32).text();

  paged.set("page_table_v", {1, 4, 5, 99});
  const Status status = paged.try_execute();
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().message, "attention: page_table_v[1, 0] is 5; expected 0 to 4");
}

TEST(ReferenceCacheAppend, WritesTheLastTokensOfEverySequence) {
  using Append = ir::CacheAppend;
  const std::vector<Operand> dense{
      {Append::cache, DType::f64, {3, 1, 4, 1}, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}},
      {Append::fresh, DType::f64, {3, 1, 2, 1}, {-1, -2, -3, -4, -5, -6}},
      {Append::seqlen_kv, DType::i32, {3, 1, 1, 1}, {4, 1, 0}}};
  OpBench bench(Append{}, dense, {"result"});
  bench.execute();
  const std::vector<double> appended{1, 2, -1, -2, -4, 6, 7, 8, 9, 10, 11, 12};
  EXPECT_EQ(bench.values("result"), appended);
  EXPECT_TRUE(bench.compare(kF32).ok());
  auto other = appended;
  other[11] = 12.001;
  bench.set("result", other);
  EXPECT_FALSE(bench.compare(kF32).ok());

  // Into the cache's own memory.
  auto loaded = bench.load(bench.graph);
  ASSERT_TRUE(loaded.ok());
  auto bindings = plan::bindings_of(bench.inputs, bench.outputs);
  bindings.back().data = bench.input("cache").data();
  ASSERT_TRUE(bench.engine->execute(**loaded, bindings, nullptr, nullptr).ok());
  EXPECT_EQ(bench.values("cache"), appended);

  bench.set("seqlen_kv", {4, 1, 5});
  const Status status = bench.try_execute();
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().message, "cache_append: seqlen_kv[2] is 5; expected 0 to 4");
}

TEST(ReferenceCacheAppend, Paged) {
  using Append = ir::CacheAppend;
  // Two heads, pages of 2 tokens; tokens 2 and 3 of sequence 0 in page 2, token 0 of sequence 1 in
  // page 1. Elements are (page, head, token).
  OpBench bench(Append{},
                {{Append::cache, DType::f64, {3, 2, 2, 1}, std::vector<double>(12, 0)},
                 {Append::fresh, DType::f64, {2, 2, 2, 1}, {1, 2, 3, 4, 5, 6, 7, 8}},
                 {Append::seqlen_kv, DType::i32, {2, 1, 1, 1}, {4, 1}},
                 {Append::page_table, DType::i32, {2, 1, 2, 1}, {0, 2, 1, 77}}},
                {"result"});
  bench.execute();
  EXPECT_EQ(bench.values("result"), (std::vector<double>{0, 0, 0, 0, 6, 0, 8, 0, 1, 2, 3, 4}));
  bench.set("page_table", {0, 3, 1, 77});
  EXPECT_EQ(bench.try_execute().error().message,
            "cache_append: page_table has page 3 for sequence 0; expected 0 to 2");
}

// ---- nothing to do ----

TEST(ReferenceAttention, EmptyBatchesAndSequences) {
  Bench none(attention_graph({{"batch", 0}, {"pass", "backward"}}));
  none.execute();
  EXPECT_TRUE(none.compare(kF32).ok());
  Bench no_keys(attention_graph({{"seqlen_kv", 0}}));
  no_keys.execute();
  for (const double v : no_keys.values("o")) EXPECT_EQ(v, 0);
  for (const double v : no_keys.values("stats")) EXPECT_EQ(v, -kInfinity);
  const Ragged empty{{0, 0, 0}, {0, 0, 0}, {}, {}, 3, 3};
  OpBench ragged(ir::Attention{ragged_rule(3, 3)}, empty.operands(), {"o"});
  ragged.execute();
  EXPECT_EQ(seen_tokens(ragged), "? ? ?");
}

TEST(ReferenceAttention, InvalidAndUnseeingRowsHaveZeroGradients) {
  Bench bench(attention_graph({{"pass", "backward"},
                               {"mask", "padding_causal_bottom_right"},
                               {"seqlens_q", {4, 7}},
                               {"seqlens_kv", {0, 5}}}));
  bench.execute();
  for (const auto& output : bench.outputs) {
    const auto values = values_of(bench.graph, output);
    for (std::size_t i = 0; i < values.size() / 2; ++i) EXPECT_EQ(values[i], 0.0);  // batch 0
    for (const double v : values) EXPECT_FALSE(std::isnan(v));
  }
  EXPECT_TRUE(bench.compare(kF32).ok());
}

}  // namespace
}  // namespace lawson
