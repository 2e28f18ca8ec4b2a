// What the planner counts, against scripted histories with an engine double.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <barrier>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "diag/counters.h"
#include "engine/reference/reference.h"
#include "fake_engine.h"
#include "plan/planner.h"

namespace lawson::plan {
namespace {

using diag::Event;

// x [rows, 4] f32 -> relu(x), with `rows` as the longest that a caller has.
ir::Graph relu_of(std::int64_t rows) {
  ir::Builder builder("relu");
  ir::Tensor x;
  x.name = "x";
  x.shape = {rows, 4};
  const ir::TensorId id = builder.input(x).value();
  static_cast<void>(builder.output(
      builder.add1(ir::Unary{ir::UnaryKind::relu, 0}, {id}, std::nullopt, "y").value()));
  return std::move(builder).finish().value();
}

class HistoryTest : public testing::Test {
 protected:
  HistoryTest() : engine_{std::make_shared<FakeEngine>("double")} {
    engine_->live = {fake_gpu("h200", 0), fake_gpu("h200", 1)};
    PlannerConfig config;
    config.engines = {engine_, make_reference_engine()};
    planner_.emplace(std::move(config));
    diag::reset_counts();
  }

  void query(std::int64_t rows, int device = 0) {
    const auto verdict = planner_->probe(relu_of(rows), gpu(device), "", {});
    ASSERT_TRUE(verdict.ok()) << verdict.error().message;
    EXPECT_EQ(verdict->decision, Decision::supported);
  }

  void execute(std::int64_t rows, int device = 0) {
    const auto loaded = planner_->acquire(relu_of(rows), gpu(device), "", {}, nullptr);
    ASSERT_TRUE(loaded.ok()) << loaded.error().message;
    alignas(64) std::array<std::byte, 64> workspace{};
    const Status done = planner_->execute((*loaded)->plan(), **loaded, {}, workspace.data(),
                                          workspace.size(), nullptr);
    EXPECT_TRUE(done.ok());
  }

  const Device& gpu(int number) const { return engine_->live[static_cast<std::size_t>(number)]; }

  // Events that were counted, by name; only those that happened.
  static std::map<std::string, std::uint64_t> counted() {
    diag::Counts all;
    for (const diag::ThreadCounts& thread : diag::counts(diag::Since::reset)) {
      for (const diag::Row& row : thread.rows) all.add(row.counts);
    }
    std::map<std::string, std::uint64_t> result;
    for (std::size_t i = 0; i < diag::kEvents; ++i) {
      const auto event = static_cast<Event>(i);
      if (all.of(event) != 0) result[std::string{diag::to_string(event)}] = all.of(event);
    }
    return result;
  }
  using Counted = std::map<std::string, std::uint64_t>;

  std::shared_ptr<FakeEngine> engine_;
  std::optional<Planner> planner_;
};

TEST_F(HistoryTest, QueryThenExecute) {
  query(8);
  EXPECT_EQ(counted(), (Counted{{"miss", 1}, {"create_graph", 1}, {"verdict", 1}}));
  query(8);
  EXPECT_EQ(counted(), (Counted{{"miss", 1}, {"hit", 1}, {"create_graph", 1}, {"verdict", 1}}));
  execute(8);  // the graph that was judged is the one that is built
  EXPECT_EQ(counted(), (Counted{{"miss", 1},
                                {"hit", 2},
                                {"create_graph", 1},
                                {"verdict", 1},
                                {"build_plans", 1},
                                {"load", 1},
                                {"cache_graph", 1},
                                {"execute", 1}}));
  execute(8);
  EXPECT_EQ(counted(), (Counted{{"miss", 1},
                                {"hit", 3},
                                {"create_graph", 1},
                                {"verdict", 1},
                                {"build_plans", 1},
                                {"load", 1},
                                {"cache_graph", 1},
                                {"execute", 2}}));
  execute(16);  // a longer one is another question
  EXPECT_EQ(counted(), (Counted{{"miss", 2},
                                {"hit", 3},
                                {"create_graph", 2},
                                {"verdict", 1},
                                {"build_plans", 2},
                                {"load", 2},
                                {"cache_graph", 2},
                                {"execute", 3}}));
}

TEST_F(HistoryTest, WhatIsRefusedCountsOneGraph) {
  for (int i = 0; i < 3; ++i) {
    EXPECT_FALSE(planner_->acquire(relu_graph("does not build"), gpu(0), "", {}, nullptr).ok());
  }
  EXPECT_EQ(counted(), (Counted{{"miss", 1}, {"hit", 2}, {"create_graph", 1}, {"build_plans", 1}}));
}

TEST_F(HistoryTest, ThreadsOverAColdCacheBuildEachKeyOnce) {
  constexpr int kThreads = 64;
  constexpr int kKeys = 50;
  {
    std::barrier start(kThreads);
    std::vector<std::jthread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        start.arrive_and_wait();
        for (int i = 0; i < kKeys; ++i) execute((i + t) % kKeys + 1);
      });
    }
  }
  EXPECT_EQ(engine_->builds, kKeys);
  EXPECT_EQ(counted(), (Counted{{"miss", kKeys},
                                {"hit", (kThreads - 1) * kKeys},
                                {"create_graph", kKeys},
                                {"build_plans", kKeys},
                                {"load", kKeys},
                                {"cache_graph", kKeys},
                                {"execute", kThreads * kKeys}}));
}

TEST_F(HistoryTest, WithoutSingleFlightTheDifferenceShows) {
  constexpr int kThreads = 8;
  planner_->set_single_flight(false);
  {
    std::barrier start(kThreads);
    engine_->build_gate = &start;
    std::vector<std::jthread> threads;
    for (int t = 0; t < kThreads; ++t) threads.emplace_back([&] { execute(8); });
  }
  engine_->build_gate = nullptr;
  Counted now = counted();
  EXPECT_EQ(now["create_graph"], kThreads);
  EXPECT_EQ(now["build_plans"], kThreads);
  EXPECT_EQ(now["cache_graph"], 1U);
  EXPECT_EQ(now["execute"], kThreads);
  EXPECT_EQ(planner_->cache().size(), 1U);
}

TEST_F(HistoryTest, AThreadOfTwoDevicesIsMixed) {
  std::string device;
  std::jthread([&] {
    execute(8, 0);
    execute(8, 1);
    const std::uint64_t own = diag::this_thread();
    for (const diag::ThreadCounts& thread : diag::counts(diag::Since::reset)) {
      if (thread.thread == own) device = thread.device();
    }
  }).join();
  EXPECT_EQ(device, "mixed");
  std::jthread([&] {
    execute(8, 1);
    const std::uint64_t own = diag::this_thread();
    for (const diag::ThreadCounts& thread : diag::counts(diag::Since::reset)) {
      if (thread.thread == own) device = thread.device();
    }
  }).join();
  EXPECT_EQ(device, "1");
}

}  // namespace
}  // namespace lawson::plan
