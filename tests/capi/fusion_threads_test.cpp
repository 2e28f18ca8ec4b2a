// One fused object called by many threads: right numbers, and each plan built once.
#include <gtest/gtest.h>
#include <lawson/lawson.hpp>

#include <atomic>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>
#include <vector>

namespace {

using lawson::Tensor;

std::uint64_t builds() {
  return nlohmann::json::parse(lawson::info())["plan_cache"]["builds"].get<std::uint64_t>();
}

TEST(FusionThreads, ManyThreadsOverManySignaturesBuildEachOnce) {
  constexpr int kThreads = 64;
  constexpr int kSignatures = 20;
  constexpr int kRounds = 3;
  const auto fused =
      lawson::fuse([](Tensor x, Tensor w) { return lawson::relu(lawson::matmul(x, w)) + x.dim(0); },
                   {.name = "threads", .engines = {"cpu"}});
  const std::uint64_t before = builds();
  std::atomic<int> right{0};
  std::atomic<int> waiting{kThreads};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&, thread] {
      struct Numbers {
        alignas(64) float x[kSignatures * 4], w[16], y[kSignatures * 4];
      };
      const auto mine = std::make_unique<Numbers>();
      for (int i = 0; i < kSignatures * 4; ++i) mine->x[i] = static_cast<float>((i + thread) % 5);
      for (int i = 0; i < 16; ++i) mine->w[i] = i % 5 == 0 ? 1.0F : 0.0F;  // the identity
      --waiting;
      while (waiting > 0) std::this_thread::yield();
      for (int i = 0; i < kSignatures * kRounds; ++i) {
        const std::int64_t rows = 1 + (i * 7 + thread) % kSignatures;
        fused({{mine->x, {rows, 4}}, {mine->w, {4, 4}}}, {{mine->y, {rows, 4}}});
        bool same = true;
        for (std::int64_t n = 0; n < rows * 4; ++n) {
          same = same && mine->y[n] == mine->x[n] + static_cast<float>(rows);
        }
        right += same ? 1 : 0;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, kThreads * kSignatures * kRounds);
  EXPECT_EQ(builds() - before, kSignatures);
}

// Threads whose function does different things meet in one object.
TEST(FusionThreads, VariantsDoNotMix) {
  thread_local double factor = 0;
  const auto fused = lawson::fuse([](Tensor x) { return x * factor; }, {.engines = {"cpu"}});
  std::atomic<int> right{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 8; ++thread) {
    threads.emplace_back([&, thread] {
      factor = thread % 4 + 1;
      alignas(64) float x[4] = {1, 2, 3, 4};
      alignas(64) float y[4] = {};
      for (int round = 0; round < 50; ++round) {
        fused({{x, {4}}}, {{y, {4}}});
        right += y[3] == 4 * static_cast<float>(factor) ? 1 : 0;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(right, 400);
}

}  // namespace
