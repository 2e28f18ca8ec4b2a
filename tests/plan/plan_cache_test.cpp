// One build for each key and device, bounded, never poisoned; through the cache itself and through
// the planner with an engine double.
#include "plan/plan_cache.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <functional>
#include <new>
#include <stdexcept>
#include <thread>

#include "diag/counters.h"
#include "engine/reference/reference.h"
#include "fake_engine.h"
#include "plan/planner.h"

namespace lawson::plan {
namespace {

struct CountedPlan : Loaded {
  explicit CountedPlan(std::atomic<int>* alive, std::size_t bytes = 0) : alive_{alive} {
    ++*alive_;
    plan_.engine = "counted";
    plan_.bytes.resize(bytes);
  }
  ~CountedPlan() override { --*alive_; }
  const Plan& plan() const override { return plan_; }

 private:
  Plan plan_;
  std::atomic<int>* alive_;
};

void in_threads(int count, const std::function<void(int)>& body) {
  std::barrier start(count);
  std::vector<std::jthread> threads;
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      start.arrive_and_wait();
      body(i);
    });
  }
}

PlanCache::Id id_of(int number, int ordinal = 0) {
  return {digest("key" + std::to_string(number)), ordinal};
}

CacheBudget budget_of(std::size_t count) {
  return {count, std::uint64_t{1} << 40};
}

class PlanCacheTest : public testing::Test {
 protected:
  PlanCache::Build build(std::size_t bytes = 0) {
    return [this, bytes]() -> Result<PlanCache::Executable> {
      return PlanCache::Executable{std::make_shared<CountedPlan>(&alive_, bytes)};
    };
  }
  static std::uint64_t events(diag::Event event) {
    diag::Counts all;
    for (const diag::ThreadCounts& thread : diag::counts(diag::Since::reset)) {
      for (const diag::Row& row : thread.rows) all.add(row.counts);
    }
    return all.of(event);
  }
  std::atomic<int> alive_{0};
};

TEST_F(PlanCacheTest, ThreadsThatAskAtOnceGetOneBuild) {
  constexpr int kThreads = 64;
  constexpr int kConfigs = 200;
  PlanCache cache{budget_of(kConfigs)};
  std::vector<std::atomic<int>> builds(kConfigs);
  std::vector<std::atomic<const Loaded*>> seen(kConfigs);
  std::atomic<int> others{0};
  in_threads(kThreads, [&](int thread) {
    for (int i = 0; i < kConfigs; ++i) {
      const int config = (i + thread * 3) % kConfigs;
      const auto index = static_cast<std::size_t>(config);
      const auto plan = cache.get(id_of(config), [&]() -> Result<PlanCache::Executable> {
        ++builds[index];
        std::this_thread::yield();
        return build()();
      });
      ASSERT_TRUE(plan.ok());
      const Loaded* expected = nullptr;
      if (!seen[index].compare_exchange_strong(expected, plan->get())) {
        others += expected == plan->get() ? 0 : 1;
      }
    }
  });
  for (const auto& count : builds) EXPECT_EQ(count, 1);
  EXPECT_EQ(others, 0);
  EXPECT_EQ(alive_, kConfigs);
  const CacheCounters counters = cache.counters();
  EXPECT_EQ(counters.builds, static_cast<std::uint64_t>(kConfigs));
  EXPECT_EQ(counters.hits, static_cast<std::uint64_t>((kThreads - 1) * kConfigs));
  EXPECT_EQ(counters.evictions, 0U);
}

TEST_F(PlanCacheTest, AFailureReachesAllWhoWaitAndPoisonsNobodyLater) {
  PlanCache cache{budget_of(4)};
  std::atomic<int> builds{0};
  std::atomic<int> told{0};
  std::atomic<bool> go{false};
  const auto failing = [&]() -> Result<PlanCache::Executable> {
    ++builds;
    while (!go) std::this_thread::yield();
    return error(ErrorKind::cuda, "error 700");
  };
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 8; ++i) {
      threads.emplace_back([&] {
        const auto plan = cache.get(id_of(1), failing);
        told += !plan.ok() && plan.error().kind == ErrorKind::cuda ? 1 : 0;
      });
    }
    while (builds == 0) std::this_thread::yield();
    EXPECT_EQ(cache.find(id_of(1)), nullptr);
    go = true;
  }
  EXPECT_EQ(told, 8);
  EXPECT_EQ(cache.size(), 0U);
  EXPECT_EQ(cache.counters().failures, static_cast<std::uint64_t>(builds.load()));
  const auto plan = cache.get(id_of(1), build());
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(cache.find(id_of(1)), *plan);
}

TEST_F(PlanCacheTest, AnExceptionIsTheBuildersOwnAndTheOthersTryThemselves) {
  PlanCache cache{budget_of(4)};
  std::atomic<int> builds{0};
  std::atomic<int> threw{0};
  std::atomic<int> got{0};
  const auto first_throws = [&]() -> Result<PlanCache::Executable> {
    if (builds++ == 0) throw std::bad_alloc();
    return build()();
  };
  in_threads(8, [&](int) {
    try {
      got += cache.get(id_of(1), first_throws).ok() ? 1 : 0;
    } catch (const std::bad_alloc&) {
      ++threw;
    }
  });
  EXPECT_EQ(threw, 1);
  EXPECT_EQ(got, 7);
  EXPECT_EQ(builds, 2);
  EXPECT_THROW(
      static_cast<void>(cache.get(id_of(2), []() -> Result<PlanCache::Executable> { throw 3; })),
      int);
  EXPECT_EQ(cache.size(), 1U);
}

TEST_F(PlanCacheTest, NothingIsNotAPlan) {
  PlanCache cache{budget_of(4)};
  const auto plan = cache.get(
      id_of(1), []() -> Result<PlanCache::Executable> { return PlanCache::Executable{}; });
  ASSERT_FALSE(plan.ok());
  EXPECT_EQ(plan.error().kind, ErrorKind::internal);
  EXPECT_EQ(cache.size(), 0U);
}

TEST_F(PlanCacheTest, TheLeastRecentlyUsedLeavesUnlessItIsHeld) {
  PlanCache cache{budget_of(2)};
  const auto held = cache.get(id_of(1), build()).value();
  ASSERT_TRUE(cache.get(id_of(2), build()).ok());
  ASSERT_TRUE(cache.get(id_of(3), build()).ok());
  EXPECT_EQ(cache.find(id_of(2)), nullptr);  // 1 is older, and in use
  EXPECT_EQ(cache.find(id_of(1)), held);
  EXPECT_EQ(alive_, 2);
  ASSERT_TRUE(cache.get(id_of(4), build()).ok());
  EXPECT_EQ(cache.find(id_of(3)), nullptr);
  EXPECT_EQ(cache.counters().evictions, 2U);
  EXPECT_EQ(cache.size(), 2U);
}

TEST_F(PlanCacheTest, WhereAllAreHeldItGrowsAndShrinksLater) {
  PlanCache cache{budget_of(2)};
  std::vector<PlanCache::Executable> held;
  for (int i = 0; i < 5; ++i) held.push_back(cache.get(id_of(i), build()).value());
  EXPECT_EQ(cache.size(), 5U);
  held.clear();
  ASSERT_TRUE(cache.get(id_of(5), build()).ok());
  EXPECT_EQ(cache.size(), 2U);
  EXPECT_EQ(alive_, 2);
}

TEST_F(PlanCacheTest, ThreadsOverAFullCacheAlwaysHaveALivePlan) {
  PlanCache cache{budget_of(3)};
  std::atomic<int> dead{0};
  in_threads(16, [&](int thread) {
    for (int i = 0; i < 300; ++i) {
      const auto plan = cache.get(id_of((i * 7 + thread) % 11), build());
      dead += plan.ok() && (*plan)->plan().workspace_bytes == 0 ? 0 : 1;
    }
  });
  EXPECT_EQ(dead, 0);
  ASSERT_TRUE(cache.get(id_of(100), build()).ok());
  EXPECT_EQ(cache.size(), 3U);
  EXPECT_EQ(alive_, 3);
}

TEST_F(PlanCacheTest, BytesAreBoundedTooAndEvictionsAreTold) {
  diag::reset_counts();
  PlanCache cache{CacheBudget{1000, 1'000'000}};
  for (int i = 0; i < 50; ++i) {
    ASSERT_TRUE(cache.get(id_of(i), build(100'000)).ok());
    EXPECT_LE(cache.bytes(), 1'000'000U);
  }
  EXPECT_EQ(cache.size(), 9U);  // 100 kB and the rest of a plan each
  EXPECT_GE(cache.bytes(), 900'000U);
  EXPECT_EQ(alive_, 9);
  EXPECT_EQ(cache.counters().evictions, 41U);
  EXPECT_EQ(events(diag::Event::evict), 41U);
  EXPECT_EQ(events(diag::Event::cache_graph), 50U);
  // The newest is in use even where it alone is too large.
  ASSERT_TRUE(cache.get(id_of(100), build(2'000'000)).ok());
  EXPECT_EQ(cache.size(), 1U);
  EXPECT_NE(cache.find(id_of(100)), nullptr);
}

TEST_F(PlanCacheTest, ManyHeldPlansDoNotStopEviction) {
  PlanCache cache{budget_of(300)};
  std::vector<PlanCache::Executable> held;
  for (int i = 0; i < 300; ++i) held.push_back(cache.get(id_of(i), build()).value());
  for (int i = 300; i < 1000; ++i) ASSERT_TRUE(cache.get(id_of(i), build()).ok());
  for (int i = 0; i < 300; ++i) {
    EXPECT_EQ(cache.find(id_of(i)), held[static_cast<std::size_t>(i)]);
  }
  held.clear();
  for (int i = 1000; i < 1010; ++i) ASSERT_TRUE(cache.get(id_of(i), build()).ok());
  EXPECT_EQ(cache.size(), 300U);
}

// The counting rule: every graph that is built is counted as such, only one that stays as cached.
TEST_F(PlanCacheTest, WithoutSingleFlightAllBuildAndOneStays) {
  constexpr int kThreads = 8;
  diag::reset_counts();
  PlanCache cache{budget_of(10)};
  cache.set_single_flight(false);
  std::barrier all_build(kThreads);
  std::array<PlanCache::Executable, kThreads> seen;
  in_threads(kThreads, [&](int thread) {
    seen[static_cast<std::size_t>(thread)] =
        cache
            .get(id_of(1),
                 [&]() -> Result<PlanCache::Executable> {
                   diag::record(diag::Event::create_graph, {"counted", diag::kForward, "", -1});
                   all_build.arrive_and_wait();
                   return build()();
                 })
            .value();
  });
  for (const PlanCache::Executable& plan : seen) EXPECT_EQ(plan, seen.front());
  seen = {};
  EXPECT_EQ(alive_, 1);
  EXPECT_EQ(cache.size(), 1U);
  EXPECT_EQ(events(diag::Event::create_graph), static_cast<std::uint64_t>(kThreads));
  EXPECT_EQ(events(diag::Event::cache_graph), 1U);
}

TEST_F(PlanCacheTest, ADeadlineEndsItsOwnWaitAndNobodyElses) {
  PlanCache cache{budget_of(4)};
  std::atomic<bool> go{false};
  std::atomic<bool> begun{false};
  std::atomic<int> builds{0};
  std::jthread builder([&] {
    const auto plan = cache.get(id_of(1), [&]() -> Result<PlanCache::Executable> {
      ++builds;
      begun = true;
      while (!go) std::this_thread::yield();
      return error(ErrorKind::cancelled, "the builder's own deadline");
    });
    EXPECT_EQ(plan.error().kind, ErrorKind::cancelled);
  });
  while (!begun) std::this_thread::yield();
  const auto hasty = cache.get(id_of(1), build(), 5);
  ASSERT_FALSE(hasty.ok());
  EXPECT_EQ(hasty.error().kind, ErrorKind::cancelled);
  EXPECT_EQ(alive_, 0);
  std::jthread patient([&] { EXPECT_TRUE(cache.get(id_of(1), build()).ok()); });
  go = true;
  builder.join();
  patient.join();
  EXPECT_EQ(builds, 1);
  EXPECT_EQ(alive_, 1);
}

// Two GPUs of one kind, one of which may be in a capture.
class TwoGpus : public FakeEngine {
 public:
  TwoGpus() : FakeEngine("double") { live = {fake_gpu("h200", 0), fake_gpu("h200", 1)}; }

  Result<std::shared_ptr<Loaded>> load(const Plan& plan, const Device& device) override {
    ++loads;
    return FakeEngine::load(plan, device);
  }
  Result<bool> capturing(const Device&, void* stream) override { return stream != nullptr; }

  std::atomic<int> loads{0};
};

class CachingPlannerTest : public testing::Test {
 protected:
  CachingPlannerTest() : engine_{std::make_shared<TwoGpus>()}, planner_{config()} {}

  Result<std::shared_ptr<Loaded>> acquire(const std::string& name, int device,
                                          void* stream = nullptr, const Options& options = {}) {
    ir::Graph graph = relu_graph(name);
    if (const auto found = rows_.find(name); found != rows_.end()) graph = relu_rows(found->second);
    return planner_.acquire(graph, engine_->live[static_cast<std::size_t>(device)], "", options,
                            stream);
  }

  static ir::Graph relu_rows(std::int64_t rows) {
    ir::Builder builder("rows");
    ir::Tensor x;
    x.name = "x";
    x.shape = {rows, 4};
    const ir::TensorId id = builder.input(x).value();
    static_cast<void>(builder.output(
        builder.add1(ir::Unary{ir::UnaryKind::relu, 0}, {id}, std::nullopt, "y").value()));
    return std::move(builder).finish().value();
  }

  std::shared_ptr<TwoGpus> engine_;
  Planner planner_;
  std::map<std::string, std::int64_t> rows_;

 private:
  PlannerConfig config() const {
    PlannerConfig config;
    config.engines = {engine_, make_reference_engine()};
    return config;
  }
};

TEST_F(CachingPlannerTest, TwoDevicesNeverShareAPlan) {
  const auto first = acquire("g", 0);
  const auto second = acquire("g", 1);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_NE(*first, *second);
  EXPECT_EQ((*first)->plan().plan_id, (*second)->plan().plan_id);  // the same answer, loaded twice
  EXPECT_EQ(acquire("g", 0).value(), *first);
  EXPECT_EQ(acquire("g", 1).value(), *second);
  EXPECT_EQ(engine_->loads, 2);
  EXPECT_EQ(planner_.cache().size(), 2U);
}

TEST_F(CachingPlannerTest, NamesAreNotPartOfWhatWasAskedAndOptionsAre) {
  const auto plan = acquire("g", 0);
  EXPECT_EQ(acquire("other name", 0).value(), *plan);
  Options limited;
  limited.workspace_limit = 1 << 20;
  EXPECT_NE(acquire("g", 0, nullptr, limited).value(), *plan);
  Options deterministic;
  deterministic.deterministic = true;
  EXPECT_NE(acquire("g", 0, nullptr, deterministic).value(), *plan);
  EXPECT_EQ(engine_->builds, 3);
}

TEST_F(CachingPlannerTest, FailuresOfBuildAndLoadAreNotKept) {
  EXPECT_EQ(acquire("does not build", 0).error().kind, ErrorKind::unsupported);
  EXPECT_EQ(acquire("build broken", 0).error().kind, ErrorKind::unavailable);
  EXPECT_EQ(planner_.cache().size(), 0U);
  EXPECT_TRUE(acquire("g", 0).ok());  // the same graph under a name that builds
}

TEST_F(CachingPlannerTest, WhatIsRefusedIsRefusedAgainInTheSameWordsAndNotBuiltAgain) {
  const auto first = acquire("does not build", 0);
  ASSERT_FALSE(first.ok());
  for (int i = 0; i < 5; ++i) {
    const auto again = acquire("does not build", 0);
    ASSERT_FALSE(again.ok());
    EXPECT_EQ(again.error().kind, ErrorKind::unsupported);
    EXPECT_EQ(again.error().message, first.error().message);
    EXPECT_EQ(again.error().reasons, first.error().reasons);
  }
  EXPECT_EQ(engine_->builds, 1);
  // What is broken may work the next time.
  EXPECT_EQ(acquire("build broken", 0).error().kind, ErrorKind::unavailable);
  EXPECT_EQ(acquire("build broken", 0).error().kind, ErrorKind::unavailable);
  EXPECT_EQ(engine_->builds, 3);
}

TEST_F(CachingPlannerTest, NothingIsBuiltDuringACapture) {
  int stream = 0;
  const auto refused = acquire("g", 0, &stream);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().kind, ErrorKind::invalid_argument);
  EXPECT_NE(refused.error().message.find("run it once"), std::string::npos);
  EXPECT_EQ(engine_->builds, 0);
  const auto plan = acquire("g", 0);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(acquire("g", 0, &stream).value(), *plan);
}

TEST_F(CachingPlannerTest, WhatIsNotHereIsNotBuilt) {
  const auto plan = planner_.acquire(relu_graph("g"), fake_gpu("h200"), "", {}, nullptr);
  ASSERT_FALSE(plan.ok());
  EXPECT_EQ(plan.error().kind, ErrorKind::unavailable);
  EXPECT_EQ(engine_->builds, 0);
}

TEST_F(CachingPlannerTest, ManyThreadsAndConfigsBuildEachOnce) {
  for (int i = 0; i < 200; ++i) rows_["rows " + std::to_string(i)] = i + 1;
  std::atomic<int> failures{0};
  in_threads(64, [&](int thread) {
    for (int i = 0; i < 200; ++i) {
      const auto plan = acquire("rows " + std::to_string((i + thread) % 200), thread % 2);
      failures += plan.ok() ? 0 : 1;
    }
  });
  EXPECT_EQ(failures, 0);
  EXPECT_EQ(engine_->builds, 400);
  EXPECT_EQ(engine_->loads, 400);
}

}  // namespace
}  // namespace lawson::plan
