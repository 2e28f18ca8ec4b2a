// What masks, biases, slopes and dropout do to attention.
#include "base/philox.h"
#include "helpers.h"

namespace lawson::cpu {
namespace {

using Slot = ir::AttentionSlots;

constexpr std::int64_t kBatch = 2;
constexpr std::int64_t kHeads = 4;
constexpr std::int64_t kKvHeads = 2;
constexpr std::int64_t kRows = 150;
constexpr std::int64_t kColumns = 170;
constexpr std::int64_t kDepth = 16;

// Forward and backward of one problem: the backward gets what the forward gave. `extra` adds the
// operands that a test is about; they are the inputs from 3 (forward) or 4 (backward) on, in order.
struct Both {
  using Extra = std::function<void(GraphOf&, std::vector<ir::TensorId>&)>;

  Both(const ir::AttentionRule& rule, const Extra& extra, bool dbias = false, bool dropped = false)
      : forward{forward_graph(rule, extra, dropped)}, backward{backward_graph(rule, extra, dbias)} {
    // The same whatever other inputs there are.
    for (Execution* e : {&forward, &backward}) {
      e->fill(7);
      for (const char* name : {"q", "k", "v", "dout"}) {
        if (name[0] == 'd' && e == &forward) continue;
        const ir::TensorId id = find(*e, name);
        std::mt19937_64 random{static_cast<std::uint64_t>(name[0])};
        std::normal_distribution<double> normal;
        const std::int64_t count = element_count(e->graph().tensor(id).shape).value();
        for (std::int64_t i = 0; i < count; ++i) e->set(id, i, normal(random));
      }
    }
  }

  static std::vector<ir::TensorId> shared(GraphOf& g, const Extra& extra) {
    auto in =
        operands({{Slot::q, g.input("q", DType::f32, {kBatch, kHeads, kRows, kDepth})},
                  {Slot::k, g.input("k", DType::f32, {kBatch, kKvHeads, kColumns, kDepth})},
                  {Slot::v, g.input("v", DType::f32, {kBatch, kKvHeads, kColumns, kColumns})}});
    extra(g, in);
    return in;
  }
  static ir::Graph forward_graph(const ir::AttentionRule& rule, const Extra& extra, bool dropped) {
    GraphOf g;
    auto out = g.results(ir::Attention{rule}, shared(g, extra), {true, true, true, dropped});
    if (!dropped) out.pop_back();
    return g.finish(out);
  }
  static ir::Graph backward_graph(const ir::AttentionRule& rule, const Extra& extra, bool dbias) {
    GraphOf g;
    const auto in = shared(g, extra);
    const Dims o{kBatch, kHeads, kRows, kColumns};
    const auto given =
        backward_operands(in, g.input("o", DType::f32, o), g.input("dout", DType::f32, o),
                          g.input("stats", DType::f32, {kBatch, kHeads, kRows, 1}));
    const bool sink = in[Slot::sink] != ir::kNone;
    auto out = g.results(ir::AttentionBackward{rule}, given, {true, true, true, dbias, sink});
    std::erase(out, ir::kNone);
    return g.finish(out);
  }

  // Number of the input `name` in either graph.
  static ir::TensorId find(const Execution& e, std::string_view name) {
    for (ir::TensorId id = 0; id < e.graph().input_count; ++id) {
      if (e.graph().tensor(id).name == name) return id;
    }
    ADD_FAILURE() << "no input '" << name << "'";
    return 0;
  }
  void set(std::string_view name, std::int64_t at, double value) {
    forward.set(find(forward, name), at, value);
    backward.set(find(backward, name), at, value);
  }
  void fill(std::string_view name, std::int64_t count, const auto& value) {
    for (std::int64_t i = 0; i < count; ++i) set(name, i, static_cast<double>(value(i)));
  }
  void run() {
    forward.run();
    for (const auto& [input, output] : {std::pair{"o", 0}, {"stats", 1}}) {
      const auto& bytes = forward.bytes(forward.output(output));
      std::copy(bytes.begin(), bytes.end(), backward.data(find(backward, input)));
    }
    for (const char* name : {"q", "k", "v"}) {
      const auto& bytes = forward.bytes(find(forward, name));
      std::copy(bytes.begin(), bytes.end(), backward.data(find(backward, name)));
    }
    backward.run();
  }
  std::vector<std::vector<double>> results() const {
    std::vector<std::vector<double>> all;
    for (const Execution* e : {&forward, &backward}) {
      for (int i = 0; i < e->graph().output_count; ++i) {
        std::vector<double> values;
        const auto count = element_count(e->graph().tensor(e->output(i)).shape).value_or(0);
        for (std::int64_t at = 0; at < count; ++at) values.push_back(e->at(e->output(i), at));
        all.push_back(std::move(values));
      }
    }
    return all;
  }

  Execution forward;
  Execution backward;
};

void none(GraphOf&, std::vector<ir::TensorId>&) {}

// Of the same outputs: equal infinities, no NaN, and values within `tolerance`, absolute and
// relative.
void expect_near(const Both& a, const Both& b, double tolerance) {
  const auto left = a.results();
  const auto right = b.results();
  ASSERT_EQ(left.size(), right.size());
  for (std::size_t r = 0; r < left.size(); ++r) {
    ASSERT_EQ(left[r].size(), right[r].size());
    for (std::size_t i = 0; i < left[r].size(); ++i) {
      if (std::isinf(right[r][i])) {
        ASSERT_EQ(left[r][i], right[r][i]) << "result " << r << " at " << i;
      } else {
        ASSERT_NEAR(left[r][i], right[r][i], tolerance * (1 + std::fabs(right[r][i])))
            << "result " << r << " at " << i;
      }
    }
  }
}

const Dims kScores{kBatch, kHeads, kRows, kColumns};

// Causal from the bottom right: the columns that row i sees end here.
std::int64_t causal_end(std::int64_t i) {
  return i + kColumns - kRows + 1;
}

TEST(CpuAttention, AnExplicitMaskHidesWhatAnIntervalHides) {
  ir::AttentionRule causal;
  causal.right = 0;
  causal.alignment = ir::Alignment::bottom_right;
  for (const auto softmax : {ir::SoftmaxKind::vanilla, ir::SoftmaxKind::off_by_one}) {
    causal.softmax = softmax;
    ir::AttentionRule open;
    open.softmax = softmax;
    Both interval{causal, none};
    interval.run();
    for (const DType dtype : {DType::boolean, DType::f32, DType::bf16}) {
      const bool keeps = dtype == DType::boolean;
      Both masked{open, [&](GraphOf& g, auto& in) {
                    in[Slot::mask] = g.input("mask", dtype, {1, 1, kRows, kColumns});
                  }};
      masked.fill("mask", kRows * kColumns, [&](std::int64_t at) {
        const bool seen = at % kColumns < causal_end(at / kColumns);
        return keeps ? (seen ? 1 : 0) : (seen ? 0 : -INFINITY);
      });
      masked.run();
      expect_near(masked, interval, 2e-5);
    }
  }
}

// NaN and infinite keys and values behind an explicit mask reach nothing, and rows that it hides
// altogether are 0, with gradients of 0.
TEST(CpuAttention, WhatAMaskHidesIsNeverRead) {
  for (const auto softmax :
       {ir::SoftmaxKind::vanilla, ir::SoftmaxKind::off_by_one, ir::SoftmaxKind::learnable}) {
    ir::AttentionRule rule;
    rule.softmax = softmax;
    const auto build = [&](double poison) {
      auto both = std::make_unique<Both>(rule, [&](GraphOf& g, auto& in) {
        in[Slot::mask] = g.input("mask", DType::boolean, {1, kHeads, kRows, kColumns});
        if (softmax == ir::SoftmaxKind::learnable) {
          in[Slot::sink] = g.input("sink", DType::f32, {1, kHeads, 1, 1});
        }
      });
      // Row 20 sees nothing, no row sees columns 3 and 140.
      both->fill("mask", kHeads * kRows * kColumns, [](std::int64_t at) {
        const std::int64_t j = at % kColumns;
        const std::int64_t i = at / kColumns % kRows;
        return i != 20 && j != 3 && j != 140 && (i + j) % 3 != 0 ? 1 : 0;
      });
      if (softmax == ir::SoftmaxKind::learnable) {
        both->fill("sink", kHeads, [](std::int64_t h) { return 0.5 * static_cast<double>(h); });
      }
      for (std::int64_t head = 0; head < kBatch * kKvHeads; ++head) {
        for (const std::int64_t j : {3, 140}) {
          both->forward.set(1, (head * kColumns + j) * kDepth + 2, poison);
          both->forward.set(2, (head * kColumns + j) * kColumns + 5, poison);
        }
      }
      both->run();
      return both;
    };
    const auto clean = build(1);
    for (const double poison : {double{NAN}, double{INFINITY}}) {
      // Where an operand is not finite, sums run in another order.
      expect_near(*build(poison), *clean, 2e-4);
    }
    for (std::int64_t head = 0; head < kBatch * kHeads; ++head) {
      const std::int64_t row = head * kRows + 20;
      for (std::int64_t c = 0; c < kColumns; ++c) {
        ASSERT_EQ(clean->forward.at(clean->forward.output(), row * kColumns + c), 0);
      }
      for (std::int64_t c = 0; c < kDepth; ++c) {
        ASSERT_EQ(clean->backward.at(clean->backward.output(), row * kDepth + c), 0);
      }
      const double extra = softmax == ir::SoftmaxKind::vanilla ? -INFINITY
                           : softmax == ir::SoftmaxKind::off_by_one
                               ? 0
                               : 0.5 * static_cast<double>(head % kHeads);
      ASSERT_EQ(clean->forward.at(clean->forward.output(1), row), extra);
      ASSERT_EQ(clean->forward.at(clean->forward.output(2), row), -INFINITY);
    }
  }
}

TEST(CpuAttention, GivenSlopesAreABias) {
  ir::AttentionRule alibi;
  alibi.alibi = true;
  alibi.alignment = ir::Alignment::bottom_right;
  Both slopes{alibi, [](GraphOf& g, auto& in) {
                in[Slot::slopes] = g.input("slopes", DType::f32, {1, kHeads, 1, 1});
              }};
  Both bias{{}, [](GraphOf& g, auto& in) {
              in[Slot::bias] = g.input("bias", DType::f32, {1, kHeads, kRows, kColumns});
            }};
  const std::array<double, kHeads> slope{0.5, -0.01, 0.0625, 0};
  slopes.fill("slopes", kHeads, [&](std::int64_t h) { return slope[static_cast<std::size_t>(h)]; });
  bias.fill("bias", kHeads * kRows * kColumns, [&](std::int64_t at) {
    const std::int64_t h = at / kColumns / kRows;
    const std::int64_t distance = at % kColumns - (at / kColumns % kRows + kColumns - kRows);
    return slope[static_cast<std::size_t>(h)] * static_cast<double>(distance);
  });
  slopes.run();
  bias.run();
  expect_near(slopes, bias, 1e-4);
}

TEST(CpuAttention, APreScaleBiasIsScaled) {
  constexpr double kScale = 0.25;
  const auto with_bias = [](bool pre_scale) {
    ir::AttentionRule rule;
    rule.pre_scale_bias = pre_scale;
    auto both = std::make_unique<Both>(
        rule,
        [](GraphOf& g, auto& in) {
          in[Slot::bias] = g.input("bias", DType::f32, kScores);
          in[Slot::scale] = g.scalar("scale", kScale);
        },
        true);
    both->fill("bias", kBatch * kHeads * kRows * kColumns, [&](std::int64_t at) {
      return std::sin(static_cast<double>(at)) * (pre_scale ? 1 : kScale);
    });
    both->run();
    return both;
  };
  const auto pre = with_bias(true);
  const auto post = with_bias(false);
  for (std::int64_t i = 0; i < kBatch * kHeads * kRows * kColumns; ++i) {
    const ir::TensorId dbias = pre->backward.output(3);
    ASSERT_NEAR(pre->backward.at(dbias, i), kScale * post->backward.at(dbias, i), 1e-5);
    ASSERT_NEAR(pre->forward.at(pre->forward.output(), i),
                post->forward.at(post->forward.output(), i), 1e-5);
  }
}

// A bias that broadcasts gets the sum of the gradients of its copies.
TEST(CpuAttention, BiasGradientsAreReducedToTheBias) {
  const auto gradient = [](const Dims& shape) {
    ir::AttentionRule rule;
    rule.right = 30;
    rule.padding = true;
    Both both{rule,
              [&](GraphOf& g, auto& in) {
                in[Slot::bias] = g.input("bias", DType::f32, shape);
                in[Slot::mask] = g.input("mask", DType::boolean, {kBatch, 1, 1, kColumns});
                in[Slot::seqlen_q] = g.input("rows", DType::i32, {kBatch, 1, 1, 1});
                in[Slot::seqlen_kv] = g.input("columns", DType::i32, {kBatch, 1, 1, 1});
              },
              true};
    both.fill("bias", element_count(shape).value(), [](std::int64_t) { return 0.5; });
    both.fill("mask", kBatch * kColumns, [](std::int64_t at) { return at % 5 == 0 ? 0 : 1; });
    both.fill("rows", kBatch, [](std::int64_t b) { return kRows - 40 * b; });
    both.fill("columns", kBatch, [](std::int64_t b) { return kColumns - 21 * b; });
    both.run();
    return both.results().back();
  };
  const std::vector<double> full = gradient(kScores);
  for (int axes = 1; axes < 16; ++axes) {
    Dims shape = kScores;
    for (std::size_t axis = 0; axis < 4; ++axis) {
      if ((axes >> axis & 1) != 0) shape[axis] = 1;
    }
    std::vector<double> expected(static_cast<std::size_t>(element_count(shape).value()), 0);
    std::vector<double> sizes(expected.size(), 0);
    Dims index(4, 0);
    const Dims strides = contiguous_strides(shape);
    for (std::size_t at = 0; at < full.size(); ++at) {
      std::size_t to = 0;
      for (std::size_t axis = 0; axis < 4; ++axis) {
        if (shape[axis] != 1) to += static_cast<std::size_t>(index[axis] * strides[axis]);
      }
      expected[to] += full[at];
      sizes[to] += std::fabs(full[at]);
      next_index(index, kScores);
    }
    const std::vector<double> reduced = gradient(shape);
    ASSERT_EQ(reduced.size(), expected.size());
    for (std::size_t i = 0; i < reduced.size(); ++i) {
      ASSERT_NEAR(reduced[i], expected[i], 1e-5 * sizes[i] + 1e-12) << to_string(shape) << ' ' << i;
    }
  }
}

// ---- dropout -----------------------------------------------------------------------------------

constexpr double kDropout = 0.3;

ir::AttentionRule dropping() {
  ir::AttentionRule rule;
  rule.dropout = kDropout;
  return rule;
}

void stream(GraphOf& g, std::vector<ir::TensorId>& in) {
  in[Slot::seed] = g.input("seed", DType::i64, {1, 1, 1, 1});
  in[Slot::offset] = g.input("offset", DType::i64, {1, 1, 1, 1});
}

constexpr std::int64_t kSeed = 0x7edcba9876543211;
constexpr std::int64_t kOffset = 0x100000003;

void set_stream(Both& both) {
  for (Execution* e : {&both.forward, &both.backward}) {
    std::memcpy(e->data(Both::find(*e, "seed")), &kSeed, sizeof kSeed);
    std::memcpy(e->data(Both::find(*e, "offset")), &kOffset, sizeof kOffset);
  }
}

// With the identity for V, O is the dropped weights themselves; with the identity for dO, dV is
// their transpose.
void set_identities(Both& both) {
  for (std::int64_t i = 0; i < kBatch * kKvHeads * kColumns * kColumns; ++i) {
    both.forward.set(2, i, i / kColumns % kColumns == i % kColumns ? 1 : 0);
  }
  for (std::int64_t i = 0; i < kBatch * kHeads * kRows * kColumns; ++i) {
    both.backward.set(Both::find(both.backward, "dout"), i,
                      i / kColumns % kRows == i % kColumns ? 1 : 0);
  }
}

TEST(CpuAttention, DropoutFollowsTheStreamForwardAndBackward) {
  Both both{dropping(), stream, false, true};
  set_stream(both);
  set_identities(both);
  both.run();
  Both all{{}, none};
  set_identities(all);
  all.run();
  const std::int64_t count = kBatch * kHeads * kRows * kColumns;
  std::vector<std::uint8_t> kept(static_cast<std::size_t>(count));
  DropoutStream{static_cast<std::uint64_t>(kSeed), static_cast<std::uint64_t>(kOffset), kDropout}
      .fill(0, kept);
  std::int64_t dropped = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const bool keeps = kept[static_cast<std::size_t>(i)] != 0;
    dropped += keeps ? 0 : 1;
    ASSERT_EQ(both.forward.at(both.forward.output(3), i), keeps ? 1 : 0) << i;
    const double weight = all.forward.at(all.forward.output(), i);
    ASSERT_GT(weight, 0);
    ASSERT_NEAR(both.forward.at(both.forward.output(), i), keeps ? weight / (1 - kDropout) : 0,
                1e-6 * weight + 1e-12)
        << i;
  }
  const auto size = static_cast<double>(count);
  EXPECT_NEAR(static_cast<double>(dropped), kDropout * size,
              5 * std::sqrt(kDropout * (1 - kDropout) * size));
  // dV sums over the heads of a group.
  for (std::int64_t b = 0; b < kBatch; ++b) {
    for (std::int64_t h = 0; h < kKvHeads; ++h) {
      for (std::int64_t j = 0; j < kColumns; ++j) {
        for (std::int64_t i = 0; i < kRows; ++i) {
          double sum = 0;
          for (std::int64_t g = 0; g < kHeads / kKvHeads; ++g) {
            const std::int64_t head = b * kHeads + h * (kHeads / kKvHeads) + g;
            sum += both.forward.at(both.forward.output(), (head * kRows + i) * kColumns + j);
          }
          ASSERT_NEAR(both.backward.at(both.backward.output(2),
                                       ((b * kKvHeads + h) * kColumns + j) * kColumns + i),
                      sum, 1e-5 * sum + 1e-12);
        }
      }
    }
  }
  // Normalisation is before dropout.
  EXPECT_EQ(both.forward.bytes(both.forward.output(1)), all.forward.bytes(all.forward.output(1)));
  EXPECT_EQ(both.forward.bytes(both.forward.output(2)), all.forward.bytes(all.forward.output(2)));
}

TEST(CpuAttention, AGivenDropoutMaskIsTheStreams) {
  Both streamed{dropping(), stream, false, true};
  set_stream(streamed);
  streamed.run();
  Both given{
      dropping(),
      [](GraphOf& g, auto& in) { in[Slot::dropout_mask] = g.input("kept", DType::u8, kScores); },
      false, true};
  given.fill("kept", kBatch * kHeads * kRows * kColumns, [&](std::int64_t at) {
    return 7 * streamed.forward.at(streamed.forward.output(3), at);
  });
  given.run();
  EXPECT_EQ(given.results(), streamed.results());
}

}  // namespace
}  // namespace lawson::cpu
