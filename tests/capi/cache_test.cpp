// What the process keeps of verdicts and plans, seen from outside: what was counted, on the CPU
// engine.
#include <gtest/gtest.h>

#include <barrier>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "small_attention.h"

namespace {

constexpr std::size_t kRoom = std::size_t{64} << 20;  // for each of these plans, on any CPU

using Counted = std::map<std::string, std::uint64_t>;

// Events since the last reset, by name; only those that happened.
Counted counted() {
  lawson_text* text = nullptr;
  EXPECT_EQ(lawson_stats_json(&text), LAWSON_OK);
  const auto stats =
      nlohmann::json::parse(std::string{lawson_text_data(text), lawson_text_size(text)});
  lawson_text_destroy(text);
  Counted result;
  for (const auto& [name, count] : stats.at("totals").items()) {
    if (count.get<std::uint64_t>() != 0) result[name] = count.get<std::uint64_t>();
  }
  return result;
}

// Every test has lengths of its own: the process's cache is one.
TEST(Cache, AScriptedHistoryIsCountedExactly) {
  const auto cpu = lawson::Device::find("cpu");
  small::Attention attention(1001);
  ASSERT_EQ(lawson_stats_reset(), LAWSON_OK);
  const auto verdict = lawson::select(attention.config(), cpu);
  EXPECT_TRUE(verdict.supported());
  EXPECT_EQ(counted(), (Counted{{"miss", 1}, {"create_graph", 1}, {"verdict", 1}}));
  EXPECT_TRUE(lawson::select(small::config_of(1001), cpu).supported());
  EXPECT_EQ(counted(), (Counted{{"miss", 1}, {"hit", 1}, {"create_graph", 1}, {"verdict", 1}}));

  attention.run_in(kRoom);
  const Counted first{{"miss", 1},        {"hit", 2},  {"create_graph", 1}, {"verdict", 1},
                      {"build_plans", 1}, {"load", 1}, {"cache_graph", 1},  {"execute", 1}};
  EXPECT_EQ(counted(), first);

  Counted second = first;  // the scale is bound at run time
  attention.params().scale(0.25);
  attention.run_in(kRoom);
  ++second["hit"];
  ++second["execute"];
  EXPECT_EQ(counted(), second);
  small::Attention same(1001);  // so do other params of the same config
  same.run_in(kRoom);
  ++second["hit"];
  ++second["execute"];
  EXPECT_EQ(counted(), second);

  small::Attention longer(1002);  // the longest length is a part of the plan
  longer.run_in(kRoom);
  for (const char* event :
       {"miss", "create_graph", "build_plans", "load", "cache_graph", "execute"}) {
    ++second[event];
  }
  EXPECT_EQ(counted(), second);
  EXPECT_EQ(longer.params().plan().key(), lawson::select(longer.config(), cpu).key());
}

TEST(Cache, ThreadsOverAColdCacheBuildEachKeyOnce) {
  constexpr int kThreads = 64;
  constexpr int kKeys = 50;
  ASSERT_EQ(lawson_stats_reset(), LAWSON_OK);
  {
    std::barrier start(kThreads);
    std::vector<std::jthread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        start.arrive_and_wait();
        for (int i = 0; i < kKeys; ++i) {
          EXPECT_FALSE(small::Attention(3001 + (i + t) % kKeys).params().plan().id().empty());
        }
      });
    }
  }
  EXPECT_EQ(counted(), (Counted{{"miss", kKeys},
                                {"hit", (kThreads - 1) * kKeys},
                                {"create_graph", kKeys},
                                {"build_plans", kKeys},
                                {"load", kKeys},
                                {"cache_graph", kKeys}}));
}

TEST(Cache, AVerdictOverSeveralPassesIsKeptToo) {
  const auto cpu = lawson::Device::find("cpu");
  lawson::AttentionConfig config = small::config_of(1003);
  config.pass(LAWSON_PASS_TRAINING);
  const auto first = lawson::select(config, cpu);
  ASSERT_EQ(lawson_stats_reset(), LAWSON_OK);
  const auto again = lawson::select(config, cpu);
  EXPECT_EQ(again.json(), first.json());
  EXPECT_EQ(counted(), (Counted{{"hit", 2}}));  // forward and backward
  config.head_dim_qk(16);                       // another question
  EXPECT_NE(lawson::select(config, cpu).key(), first.key());
}

}  // namespace
