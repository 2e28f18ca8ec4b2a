#include "diag/counters.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <latch>
#include <optional>
#include <thread>
#include <vector>

namespace lawson::diag {
namespace {

constexpr Subject kOnCpu{"cpu", kForward, "key", -1};

// Of all threads, what was counted for this engine.
Counts sum(std::string_view engine, Since since = Since::start) {
  Counts total;
  for (const ThreadCounts& thread : counts(since)) {
    for (const Row& row : thread.rows) {
      if (row.engine == engine) total.add(row.counts);
    }
  }
  return total;
}

std::optional<ThreadCounts> find_thread(std::uint64_t number, Since since = Since::start) {
  for (ThreadCounts& thread : counts(since)) {
    if (thread.thread == number) return std::move(thread);
  }
  return std::nullopt;
}

// What one more thread counts, read before it ends; its number.
template <typename Body>
ThreadCounts on_a_thread(const Body& body) {
  ThreadCounts found;
  std::thread([&] {
    body();
    found = find_thread(this_thread()).value_or(ThreadCounts{});
  }).join();
  return found;
}

TEST(Counters, EveryEventIsCountedOnce) {
  const ThreadCounts thread = on_a_thread([] {
    for (std::size_t i = 0; i < kEvents; ++i) {
      for (std::size_t times = 0; times <= i; ++times) record(static_cast<Event>(i), kOnCpu);
    }
  });
  ASSERT_EQ(thread.rows.size(), 1U);
  EXPECT_EQ(thread.rows[0].engine, "cpu");
  EXPECT_EQ(thread.rows[0].pass, "forward");
  EXPECT_EQ(thread.rows[0].device, -1);
  for (std::size_t i = 0; i < kEvents; ++i) {
    EXPECT_EQ(thread.rows[0].counts.events[i], i + 1) << to_string(static_cast<Event>(i));
  }
}

TEST(Counters, EnginesPassesAndDevicesAreApart) {
  const ThreadCounts thread = on_a_thread([] {
    for (int round = 0; round < 3; ++round) {
      record(Event::execute, {"cudnn", kForward, "a", 0});
      record(Event::execute, {"cudnn", kBackward, "a", 0});
      record(Event::execute, {"cpu", kForward, "a", 0});
    }
    record(Event::execute, {"cudnn", kForward, "b", 0});  // of another key: the same row
  });
  ASSERT_EQ(thread.rows.size(), 3U);
  EXPECT_EQ(thread.rows[0].counts.of(Event::execute), 4U);
  EXPECT_EQ(thread.rows[1].counts.of(Event::execute), 3U);
  EXPECT_EQ(thread.rows[2].counts.of(Event::execute), 3U);
  EXPECT_EQ(thread.device(), "0");
}

TEST(Counters, AThreadOfTwoDevicesIsMixed) {
  const ThreadCounts one = on_a_thread([] {
    record(Event::execute, {"cudnn", kForward, "a", 1});
    record(Event::execute, {"cudnn", kBackward, "a", 1});
    record(Event::verdict, {"cudnn", kForward, "a", -1});
  });
  EXPECT_EQ(one.device(), "1");
  const ThreadCounts two = on_a_thread([] {
    record(Event::execute, {"cudnn", kForward, "a", 0});
    record(Event::execute, {"cudnn", kForward, "a", 1});
  });
  EXPECT_EQ(two.device(), "mixed");
  EXPECT_EQ(two.rows.size(), 2U);
  EXPECT_EQ(on_a_thread([] { record(Event::execute, kOnCpu); }).device(), "-");
}

// More threads than are kept apart, some of which go on while others have ended.
TEST(Counters, ManyThreadsLoseNothing) {
  constexpr int kThreads = 200;
  constexpr int kRounds = 500;
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  std::atomic<bool> reads{true};
  std::thread reader([&] {
    std::uint64_t before = 0;
    while (reads) {
      const std::uint64_t now = sum("many").of(Event::execute);
      EXPECT_GE(now, before);
      before = now;
    }
  });
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([i] {
      for (int round = 0; round < kRounds; ++round) {
        record(Event::execute, {"many", round % 2 == 0 ? kForward : kBackward, "key", i % 3});
        if (round % 100 == 0) record(Event::hit, {"many", kFusion, "key", i % 3});
      }
      const Span span{Stage::load, {"many", kForward, "key", 0}};
    });
    if (i >= 8) threads[static_cast<std::size_t>(i) - 8].join();
  }
  for (std::size_t i = kThreads - 8; i < kThreads; ++i) threads[i].join();
  reads = false;
  reader.join();
  const Counts total = sum("many");
  EXPECT_EQ(total.of(Event::execute), std::uint64_t{kThreads} * kRounds);
  EXPECT_EQ(total.of(Event::hit), std::uint64_t{kThreads} * 5);
  EXPECT_EQ(total.of(Stage::load).count, std::uint64_t{kThreads});
  const auto all = counts(Since::start);
  EXPECT_LE(all.size(), 70U);
  EXPECT_EQ(std::count_if(all.begin(), all.end(),
                          [](const ThreadCounts& thread) { return thread.thread == 0; }),
            1);
}

TEST(Counters, AResetIsAStart) {
  const Subject subject{"reset", kForward, "key", 0};
  std::latch counted{1};
  std::latch again{1};
  std::thread thread([&] {
    record(Event::hit, subject);
    { const Span span{Stage::validate, subject}; }
    counted.count_down();
    again.wait();
    record(Event::hit, subject);
    record(Event::miss, subject);
  });
  counted.wait();
  reset_counts();
  EXPECT_TRUE(sum("reset", Since::reset).empty());
  EXPECT_EQ(sum("reset").of(Event::hit), 1U);
  again.count_down();
  thread.join();
  const Counts since = sum("reset", Since::reset);
  EXPECT_EQ(since.of(Event::hit), 1U);
  EXPECT_EQ(since.of(Event::miss), 1U);
  EXPECT_EQ(since.of(Stage::validate).count, 0U);
  EXPECT_EQ(since.of(Stage::validate).max_ns, 0U);
  const Counts all = sum("reset");
  EXPECT_EQ(all.of(Event::hit), 2U);
  EXPECT_EQ(all.of(Stage::validate).count, 1U);
  EXPECT_EQ(all.of(Stage::validate).max_ns, all.of(Stage::validate).total_ns);

  // Still so when the thread is one of those that are counted together.
  for (int i = 0; i < 100; ++i) {
    std::thread([] { record(Event::hit, {"filler", kForward, "key", 0}); }).join();
  }
  const Counts later = sum("reset", Since::reset);
  EXPECT_EQ(later.of(Event::hit), 1U);
  EXPECT_EQ(later.of(Event::miss), 1U);
  EXPECT_EQ(later.of(Stage::validate).count, 0U);
  EXPECT_EQ(sum("reset").of(Event::hit), 2U);
  EXPECT_EQ(sum("reset").of(Stage::validate).max_ns, all.of(Stage::validate).max_ns);
}

TEST(Counters, StagesAreTimed) {
  const ThreadCounts thread = on_a_thread([] {
    for (const int ms : {2, 6}) {
      const Span span{Stage::check_support, kOnCpu};
      std::this_thread::sleep_for(std::chrono::milliseconds{ms});
    }
  });
  ASSERT_EQ(thread.rows.size(), 1U);
  const StageTime& time = thread.rows[0].counts.of(Stage::check_support);
  EXPECT_EQ(time.count, 2U);
  EXPECT_GE(time.max_ns, 6'000'000U);
  EXPECT_GE(time.total_ns, time.max_ns + 2'000'000U);
  EXPECT_EQ(thread.rows[0].counts.of(Stage::load).count, 0U);
}

TEST(Counters, WhoHasNoKeySpeaksOfWhatTheThreadIsAbout) {
  const ThreadCounts thread = on_a_thread([] {
    const About outer{{"outer", kForward, "a", 0}};
    {
      const About inner{{"inner", kBackward, "b", 1}};
      record(Event::create_graph);
      const Span span{Stage::validate};
    }
    record(Event::build_plans);
    std::thread([] { EXPECT_EQ(About::current().engine, ""); }).join();
  });
  ASSERT_EQ(thread.rows.size(), 2U);
  EXPECT_EQ(thread.rows[0].engine, "inner");
  EXPECT_EQ(thread.rows[0].counts.of(Event::create_graph), 1U);
  EXPECT_EQ(thread.rows[0].counts.of(Stage::validate).count, 1U);
  EXPECT_EQ(thread.rows[1].engine, "outer");
  EXPECT_EQ(thread.rows[1].counts.of(Event::build_plans), 1U);
}

TEST(Counters, TheDocumentHasAllOfIt) {
  const ThreadCounts thread = on_a_thread([] {
    record(Event::miss, {"cudnn", kForward, "a", 0});
    record(Event::hit, {"cudnn", kForward, "a", 1});
    { const Span span{Stage::build_plans, {"cudnn", kForward, "a", 1}}; }
  });
  const Json document = counts_to_json({thread});
  EXPECT_EQ(document["totals"]["miss"], 1);
  EXPECT_EQ(document["totals"]["hit"], 1);
  EXPECT_EQ(document["totals"].size(), kEvents);
  EXPECT_EQ(document["stages"].size(), kStages);
  EXPECT_EQ(document["stages"]["build_plans"]["count"], 1);
  const Json& only = document["threads"][0];
  EXPECT_EQ(only["device"], "mixed");
  EXPECT_EQ(only["rows"][1]["device"], 1);
  EXPECT_EQ(only["rows"][1]["events"]["hit"], 1);
  EXPECT_EQ(only["rows"][1]["stages"]["build_plans"]["count"], 1);
  EXPECT_TRUE(counts_to_json({})["threads"].empty());
}

}  // namespace
}  // namespace lawson::diag
