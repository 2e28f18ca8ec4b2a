// The thread pool: every task once, from several callers, after a fork, and gone at exit.
#include "engine/cpu/pool.h"

#include <gtest/gtest.h>
#ifdef __SSE2__
#include <xmmintrin.h>
#endif

#include <atomic>
#include <filesystem>
#include <functional>
#include <new>
#include <thread>
#include <vector>

#include "helpers.h"
#include "in_child.h"

namespace lawson::cpu {
namespace {

// Each index is visited exactly once.
bool covers(std::int64_t count, std::size_t scratch_bytes) {
  std::vector<std::atomic<int>> visits(static_cast<std::size_t>(count));
  const Status status = parallel_for(count, scratch_bytes, [&](std::int64_t i, std::byte* scratch) {
    for (std::size_t b = 0; b < scratch_bytes; b += 64) scratch[b] = std::byte{1};
    ++visits[static_cast<std::size_t>(i)];
  });
  if (!status.ok()) return false;
  for (const auto& v : visits) {
    if (v != 1) return false;
  }
  return true;
}

TEST(Pool, ATaskWithoutMemoryIsAnError) {
  for (const std::int64_t count : {1, 1000}) {
    const Status status = parallel_for(count, 0, [&](std::int64_t i, std::byte*) {
      if (i == count / 2) throw std::bad_alloc{};
    });
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().kind, ErrorKind::out_of_memory);
  }
  EXPECT_TRUE(covers(1000, 0));
}

#ifdef __SSE2__
// XLA's threads flush subnormals; what a plan computes does not depend on who calls it.
TEST(Pool, TasksKeepSubnormalsWhateverTheHostsThreadHasSet) {
  const unsigned before = _mm_getcsr();
  const unsigned flushed = before | 0x8040U;
  for (const std::int64_t count : {1, 1000}) {
    std::atomic<int> kept{0};
    _mm_setcsr(flushed);
    const Status status = parallel_for(count, 0, [&](std::int64_t, std::byte*) {
      const volatile float tiny = 0x1p-130F;
      if (tiny * 0x1p112F == 0x1p-18F) ++kept;
    });
    const unsigned after = _mm_getcsr();
    _mm_setcsr(before);
    ASSERT_TRUE(status.ok());
    EXPECT_EQ(kept, count);
    EXPECT_EQ(after & 0xffc0U, flushed & 0xffc0U);
  }
}
#endif

std::size_t threads_of_this_process() {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry :
       std::filesystem::directory_iterator("/proc/self/task")) {
    ++count;
  }
  return count;
}

TEST(Pool, EveryTaskRunsOnce) {
  for (const std::int64_t count : {0, 1, 2, 3, 100, 10'000}) EXPECT_TRUE(covers(count, 0));
  EXPECT_TRUE(covers(100, 1 << 20));
  EXPECT_TRUE(covers(100, 100));
}

TEST(Pool, ManyCallersAtOnce) {
  std::vector<std::thread> callers;
  std::atomic<int> good{0};
  for (int i = 0; i < 8; ++i) {
    callers.emplace_back([&good] {
      for (int j = 0; j < 50; ++j) good += covers(37, 4096) ? 1 : 0;
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(good, 400);
}

TEST(Pool, WorksInAForkedChildAndItsChild) {
  LAWSON_NEEDS_FORK();
  ASSERT_TRUE(covers(100, 64));
  EXPECT_EQ(in_child([] {
              if (!covers(100, 64)) return 1;
              return in_child([] { return covers(100, 64) ? 0 : 2; });
            }),
            0);
  EXPECT_TRUE(covers(100, 64));
}

TEST(Pool, TheVariableLimitsThreads) {
  LAWSON_NEEDS_FORK();
  for (const auto& [text, expected] : {std::pair{"1", 1}, {"3", 3}}) {
    EXPECT_EQ(in_child([text = text] {
                setenv("LAWSON_NUM_THREADS", text, 1);
                const bool covered = covers(1000, 64);
                return covered ? thread_count() : -1;
              }),
              expected);
  }
  // One thread is the caller's own: none is started.
  EXPECT_EQ(in_child([] {
              setenv("LAWSON_NUM_THREADS", "1", 1);
              covers(1000, 64);
              return static_cast<int>(threads_of_this_process());
            }),
            1);
}

TEST(Pool, NonsenseInTheVariableIsToldAndIgnored) {
  LAWSON_NEEDS_FORK();
  for (const std::string text : {"", "0", "-3", "many", "4x", "99999999999999999999"}) {
    testing::internal::CaptureStderr();
    EXPECT_GE(in_child([&] {
                setenv("LAWSON_NUM_THREADS", text.c_str(), 1);
                return thread_count();
              }),
              1)
        << text;
    const std::string said = testing::internal::GetCapturedStderr();
    const std::string wanted =
        text.empty() ? "" : "lawson: LAWSON_NUM_THREADS='" + text + "' is ignored; ";
    EXPECT_EQ(said.substr(0, wanted.size()), wanted);
    EXPECT_EQ(said.empty(), text.empty()) << said;
  }
}

TEST(Pool, WaitingThreadsDoNotSpin) {
  LAWSON_NEEDS_FORK();
  EXPECT_EQ(in_child([] {
              setenv("LAWSON_NUM_THREADS", "4", 1);
              if (!covers(1000, 64)) return 1;
              timespec before{};
              timespec after{};
              clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
              std::this_thread::sleep_for(std::chrono::milliseconds{200});
              clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
              const double used = static_cast<double>(after.tv_sec - before.tv_sec) +
                                  1e-9 * static_cast<double>(after.tv_nsec - before.tv_nsec);
              return used < 0.02 ? 0 : 2;
            }),
            0);
}

// A graph with every kind of step.
ir::Graph mixed_graph() {
  GraphOf g;
  const auto a = g.input("a", DType::f32, {3, 150, 70});
  const auto b = g.input("b", DType::bf16, {70, 300});
  const auto c = g.op(ir::Unary{ir::UnaryKind::gelu}, {g.op(ir::Matmul{}, {a, b})});
  const auto r = g.op(ir::Reduce{ir::ReduceKind::sum, {1}, false}, {c});
  const auto e = g.op(ir::Unary{ir::UnaryKind::exp}, {a});
  const auto q = g.input("q", DType::f32, {2, 4, 200, 24});
  const auto k = g.input("k", DType::f32, {2, 2, 170, 24});
  const auto o = g.ops(ir::Attention{}, {q, k, k}, 2);
  const auto d = g.ops(ir::AttentionBackward{}, backward_operands({q, k, k}, q, q, o[1]), 3);
  ir::AttentionRule rule;
  rule.dropout = 0.25;
  auto in = operands(
      {{ir::AttentionSlots::q, q}, {ir::AttentionSlots::k, k}, {ir::AttentionSlots::v, k}});
  in[ir::AttentionSlots::bias] = g.input("bias", DType::f32, {1, 4, 1, 170});
  in[ir::AttentionSlots::mask] =
      g.op(ir::Compare{ir::CompareKind::gt}, {g.input("left", DType::f32, {1, 1, 200, 170}),
                                              g.input("right", DType::f32, {1, 1, 200, 170})});
  in[ir::AttentionSlots::seed] = g.input("seed", DType::i64, {1, 1, 1, 1});
  in[ir::AttentionSlots::offset] = g.input("offset", DType::i64, {1, 1, 1, 1});
  const auto masked = g.results(ir::Attention{rule}, in, {true, true, true, true});
  const auto gradients =
      g.ops(ir::AttentionBackward{rule}, backward_operands(in, masked[0], q, masked[1]), 4);
  return g.finish({c, r, e, o[0], d[0], d[1], d[2], masked[0], masked[2], masked[3], gradients[0],
                   gradients[1], gradients[2], gradients[3]});
}

TEST(Pool, ResultsDoNotDependOnTheNumberOfThreads) {
  LAWSON_NEEDS_FORK();
  const auto results = [](const char* threads) {
    std::array<int, 2> ends{};
    EXPECT_EQ(pipe(ends.data()), 0);
    const pid_t child = fork();
    if (child == 0) {
      setenv("LAWSON_NUM_THREADS", threads, 1);
      Execution execution{mixed_graph()};
      execution.fill(5);
      execution.run();
      std::string all;
      for (int i = 0; i < execution.graph().output_count; ++i) {
        for (const std::byte b : execution.bytes(execution.output(i))) {
          all.push_back(static_cast<char>(b));
        }
      }
      const std::size_t hash = std::hash<std::string>{}(all);
      _exit(write(ends[1], &hash, sizeof hash) == sizeof hash ? 0 : 1);
    }
    std::size_t hash = 0;
    EXPECT_EQ(read(ends[0], &hash, sizeof hash), static_cast<ssize_t>(sizeof hash));
    int status = 0;
    waitpid(child, &status, 0);
    close(ends[0]);
    close(ends[1]);
    return hash;
  };
  const std::size_t one = results("1");
  EXPECT_NE(one, 0U);
  EXPECT_EQ(results("2"), one);
  EXPECT_EQ(results("5"), one);
}

}  // namespace
}  // namespace lawson::cpu
