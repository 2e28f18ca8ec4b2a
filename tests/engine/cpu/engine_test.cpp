// The engine through its contract; numbers of every op are the parity suite's business.
#include "helpers.h"

#include <thread>

namespace lawson::cpu {
namespace {

using ir::BinaryKind;
using ir::UnaryKind;
constexpr ir::TensorId kNone = ir::kNone;

ir::Graph matmul_graph(DType dtype, std::int64_t m, std::int64_t n, std::int64_t k,
                       bool transposed = false) {
  GraphOf g;
  const auto a = g.input("a", dtype, {2, m, k});
  const auto b = transposed ? g.input("b", dtype, {k, n}, {1, k}) : g.input("b", dtype, {k, n});
  const auto bias = g.input("bias", DType::f32, {n});
  const auto c = g.op(ir::Matmul{}, {a, b}, is_integer(dtype) ? DType::i32 : DType::f32);
  return g.finish(
      {g.op(ir::Binary{BinaryKind::add}, {g.op(ir::Convert{}, {c}, DType::f32), bias})});
}

TEST(CpuEngine, MatmulsOfEdgeSizesOnEveryInstructionSet) {
  for (const Kernels* kernels : available_kernels()) {
    for (const DType dtype : {DType::f32, DType::f16, DType::i8}) {
      for (const auto& [m, n, k] : std::vector<std::array<std::int64_t, 3>>{
               {1, 1, 1}, {1, 33, 7}, {97, 31, 257}, {129, 65, 40}, {3, 1030, 5}, {5, 4, 0}}) {
        for (const bool transposed : {false, true}) {
          Execution e{matmul_graph(dtype, m, n, k, transposed), kernels->name};
          ASSERT_TRUE(e.plan().plan_name.ends_with(kernels->name));
          e.fill(9);
          e.run();
          for (std::int64_t row = 0; row < 2 * m; ++row) {
            for (std::int64_t j = 0; j < n; ++j) {
              double sum = e.at(2, j);
              double size = std::fabs(sum);
              for (std::int64_t l = 0; l < k; ++l) {
                const double product =
                    e.at(0, row * k + l) * e.at(1, transposed ? j * k + l : l * n + j);
                sum += product;
                size += std::fabs(product);
              }
              const double units = is_integer(dtype) ? 2 : static_cast<double>(k + 4);
              ASSERT_NEAR(e.at(e.output(), row * n + j), sum, units * 0x1p-24 * size)
                  << kernels->name << ' ' << to_string(dtype) << ' ' << m << 'x' << n << 'x' << k;
            }
          }
        }
      }
    }
  }
}

TEST(CpuEngine, InstructionSetsAgreeOnAttention) {
  GraphOf g;
  const auto q = g.input("q", DType::f16, {1, 2, 150, 40});
  const auto k = g.input("k", DType::f16, {1, 1, 131, 40});
  ir::AttentionRule rule;
  rule.right = 0;
  rule.alignment = ir::Alignment::bottom_right;
  rule.softcap = 20;
  const ir::Graph graph =
      g.finish(g.ops(ir::Attention{rule}, {q, k, k, g.scalar("scale", 0.3)}, 2));
  Execution first{graph, "generic"};
  first.fill(4);
  first.run();
  for (const Kernels* kernels : available_kernels()) {
    Execution other{graph, kernels->name};
    other.fill(4);
    other.run();
    for (std::int64_t i = 0; i < 2 * 150 * 40; ++i) {
      ASSERT_NEAR(other.at(other.output(), i), first.at(first.output(), i), 4e-3);
    }
    for (std::int64_t i = 0; i < 2 * 150; ++i) {
      const double expected = first.at(first.output(1), i);
      if (std::isinf(expected)) {
        ASSERT_EQ(other.at(other.output(1), i), expected);
      } else {
        ASSERT_NEAR(other.at(other.output(1), i), expected, 1e-4);
      }
    }
  }
}

// q, k, v, lengths; padded rows and columns hold what must not be seen.
class Padded : public testing::TestWithParam<double> {};

TEST_P(Padded, PoisonInPaddingStaysThere) {
  constexpr std::int64_t kRows = 140;
  constexpr std::int64_t kColumns = 133;
  constexpr std::int64_t kDepth = 24;
  const std::vector<std::int64_t> q_lengths{70, 140, 0};
  const std::vector<std::int64_t> kv_lengths{133, 65, 20};
  const auto batch = static_cast<std::int64_t>(q_lengths.size());
  const auto build = [&](bool backward) {
    GraphOf g;
    const auto q = g.input("q", DType::f32, {batch, 1, kRows, kDepth});
    const auto k = g.input("k", DType::f32, {batch, 1, kColumns, kDepth});
    const auto v = g.input("v", DType::f32, {batch, 1, kColumns, kDepth});
    const auto sq = g.input("sq", DType::i32, {batch, 1, 1, 1});
    const auto skv = g.input("skv", DType::i32, {batch, 1, 1, 1});
    ir::AttentionRule rule;
    rule.padding = true;
    rule.right = 0;
    rule.alignment = ir::Alignment::bottom_right;
    if (!backward) {
      return g.finish(g.ops(ir::Attention{rule}, {q, k, v, kNone, kNone, sq, skv}, 2));
    }
    const auto o = g.input("o", DType::f32, {batch, 1, kRows, kDepth});
    const auto dout = g.input("dout", DType::f32, {batch, 1, kRows, kDepth});
    const auto stats = g.input("stats", DType::f32, {batch, 1, kRows, 1});
    return g.finish(g.ops(ir::AttentionBackward{rule},
                          backward_operands({q, k, v, kNone, kNone, sq, skv}, o, dout, stats), 3));
  };
  for (const bool backward : {false, true}) {
    const auto run = [&](bool poisoned) {
      Execution e{build(backward)};
      e.fill(6);
      for (std::int64_t b = 0; b < batch; ++b) {
        e.set(3, b, static_cast<double>(q_lengths[static_cast<std::size_t>(b)]));
        e.set(4, b, static_cast<double>(kv_lengths[static_cast<std::size_t>(b)]));
        if (backward) {
          for (std::int64_t i = 0; i < kRows; ++i) e.set(7, b * kRows + i, 30);
        }
        if (!poisoned) continue;
        const auto poison = [&](ir::TensorId id, std::int64_t rows, std::int64_t from,
                                std::int64_t width) {
          for (std::int64_t i = (b * rows + from) * width; i < (b + 1) * rows * width; ++i) {
            e.set(id, i, GetParam());
          }
        };
        const std::int64_t q_length = q_lengths[static_cast<std::size_t>(b)];
        const std::int64_t kv_length = kv_lengths[static_cast<std::size_t>(b)];
        poison(0, kRows, q_length, kDepth);
        poison(1, kColumns, kv_length, kDepth);
        poison(2, kColumns, kv_length, kDepth);
        if (backward) {
          poison(5, kRows, q_length, kDepth);
          poison(6, kRows, q_length, kDepth);
          poison(7, kRows, q_length, 1);
        }
      }
      e.run();
      std::vector<std::byte> all;
      for (int i = 0; i < e.graph().output_count; ++i) {
        all.insert(all.end(), e.bytes(e.output(i)).begin(), e.bytes(e.output(i)).end());
      }
      return all;
    };
    EXPECT_EQ(run(true), run(false)) << (backward ? "backward" : "forward");
  }
}

INSTANTIATE_TEST_SUITE_P(CpuEngine, Padded, testing::Values(NAN, INFINITY, 3e38));

// A NaN in one value row reaches exactly the rows that see it, also within a tile.
TEST(CpuEngine, ANanIsSeenOnlyByTheRowsThatSeeIt) {
  GraphOf g;
  const auto q = g.input("q", DType::f32, {1, 1, 200, 16});
  const auto k = g.input("k", DType::f32, {1, 1, 200, 16});
  const auto v = g.input("v", DType::f32, {1, 1, 200, 16});
  ir::AttentionRule rule;
  rule.left = 20;
  rule.right = 3;
  Execution e{g.finish(g.ops(ir::Attention{rule}, {q, k, v}, 1))};
  e.fill(8);
  constexpr std::int64_t kBad = 61;
  e.set(2, kBad * 16 + 5, NAN);
  e.run();
  for (std::int64_t i = 0; i < 200; ++i) {
    const bool sees = kBad >= i - 20 && kBad <= i + 3;
    for (std::int64_t c = 0; c < 16; ++c) {
      EXPECT_EQ(std::isnan(e.at(e.output(), i * 16 + c)), sees && c == 5) << i << ", " << c;
    }
  }
}

TEST(CpuEngine, ConcurrentExecutionsOfOnePlan) {
  const ir::Graph graph = matmul_graph(DType::f32, 150, 130, 90);
  Execution shared{graph};
  shared.fill(1);
  shared.run();
  std::vector<std::thread> threads;
  std::vector<std::vector<std::byte>> results(6);
  for (auto& result : results) {
    threads.emplace_back([&] {
      std::vector<std::byte> workspace(static_cast<std::size_t>(shared.plan().workspace_bytes));
      for (int repetition = 0; repetition < 10; ++repetition) {
        result.assign(shared.bytes(shared.output()).size(), std::byte{0});
        std::vector<Binding> bindings = shared.bindings();
        bindings.back().data = result.data();
        const Status status =
            shared.engine().execute(shared.loaded(), bindings, workspace.data(), nullptr);
        EXPECT_TRUE(status.ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& result : results) EXPECT_EQ(result, shared.bytes(shared.output()));
}

TEST(CpuEngine, ErrorsNameWhatIsWrong) {
  Execution e{matmul_graph(DType::f32, 8, 8, 8)};
  std::vector<std::byte> workspace(static_cast<std::size_t>(e.plan().workspace_bytes));
  std::vector<Binding> bindings = e.bindings();

  Status status = e.engine().execute(e.loaded(), bindings, nullptr, nullptr);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().kind, ErrorKind::invalid_argument);
  EXPECT_NE(status.error().message.find("workspace"), std::string::npos);

  bindings[1].data = nullptr;
  status = e.engine().execute(e.loaded(), bindings, workspace.data(), nullptr);
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.error().message.find("'b'"), std::string::npos);

  bindings[1].uid = 77;
  status = e.engine().execute(e.loaded(), bindings, workspace.data(), nullptr);
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.error().message.find("77"), std::string::npos);
}

TEST(CpuEngine, ByValueScalarsHaveDefaults) {
  GraphOf g;
  const auto q = g.input("q", DType::f32, {1, 1, 3, 4});
  const auto k = g.input("k", DType::f32, {1, 1, 5, 4});
  const auto scale = g.scalar("scale", 0.125);
  Execution e{g.finish(g.ops(ir::Attention{}, {q, k, k, scale}, 1))};
  e.fill(2);
  e.run();
  const std::vector<std::byte> bound = e.bytes(e.output());
  std::vector<Binding> bindings = e.bindings();
  std::erase_if(bindings, [&](const Binding& b) { return b.uid == ir::Graph::uid(scale); });
  std::vector<std::byte> workspace(static_cast<std::size_t>(e.plan().workspace_bytes));
  e.set(e.output(), 0, 99);
  ASSERT_TRUE(e.engine().execute(e.loaded(), bindings, workspace.data(), nullptr).ok());
  EXPECT_EQ(e.bytes(e.output()), bound);
}

TEST(CpuEngine, TheVerdictIsAboutThePlanThatRuns) {
  const auto engine = make_cpu_engine();
  const ir::Graph graph = matmul_graph(DType::f32, 64, 64, 64);
  const Verdict verdict = expect_value(engine->probe(graph, cpu_device(), {}));
  EXPECT_EQ(verdict.decision, Decision::supported);
  const Plan plan =
      expect_value(engine->compile(graph, cpu_device(), {}, std::nullopt, std::stop_token{}));
  EXPECT_EQ(plan.plan_id, verdict.plan_id);
  EXPECT_EQ(plan.key, verdict.key);
  EXPECT_EQ(plan.workspace_bytes, verdict.workspace_bytes);
  EXPECT_EQ(plan.plan_name, verdict.plan_name);
}

TEST(CpuEngine, AWorkspaceLimitIsAnAnswer) {
  const auto engine = make_cpu_engine();
  const ir::Graph graph = matmul_graph(DType::f32, 64, 64, 64);
  Options options;
  options.workspace_limit = 100;
  const Verdict verdict = expect_value(engine->probe(graph, cpu_device(), options));
  EXPECT_EQ(verdict.decision, Decision::unsupported);
  ASSERT_EQ(verdict.reasons.size(), 1U);
  EXPECT_EQ(verdict.reasons[0].code, "workspace_limit");
  const auto plan = engine->compile(graph, cpu_device(), options, std::nullopt, std::stop_token{});
  ASSERT_FALSE(plan.ok());
  EXPECT_EQ(plan.error().kind, ErrorKind::unsupported);
}

TEST(CpuEngine, PlansForOtherKernelsAreUnavailable) {
  const auto engine = make_cpu_engine();
  Plan plan = expect_value(engine->compile(matmul_graph(DType::f32, 4, 4, 4), cpu_device(), {},
                                           std::nullopt, std::stop_token{}));
  plan.plan_name = "cpu-matmul-f32-v9";
  const auto loaded = engine->load(plan, cpu_device());
  ASSERT_FALSE(loaded.ok());
  EXPECT_EQ(loaded.error().kind, ErrorKind::unavailable);
}

}  // namespace
}  // namespace lawson::cpu
