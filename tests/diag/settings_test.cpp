#include "diag/settings.h"

#include <gtest/gtest.h>

#include <map>

namespace lawson::diag {
namespace {

struct Reading {
  Settings settings;
  std::vector<std::string> warnings;
};

Reading read(const std::map<std::string, std::string>& variables) {
  Reading reading;
  reading.settings = read_settings(
      [&](const char* name) -> const char* {
        const auto found = variables.find(name);
        return found == variables.end() ? nullptr : found->second.c_str();
      },
      reading.warnings);
  return reading;
}

int cache_level(const std::map<std::string, std::string>& variables) {
  const Reading reading = read(variables);
  EXPECT_TRUE(reading.warnings.empty()) << reading.warnings.front();
  return reading.settings.cache_level;
}

TEST(Settings, NothingIsAskedFor) {
  const Reading reading = read({});
  EXPECT_EQ(reading.settings.rank, 0);
  EXPECT_EQ(reading.settings.cache_level, 0);
  EXPECT_EQ(reading.settings.choice_level, 0);
  EXPECT_TRUE(reading.warnings.empty());
}

TEST(Settings, LevelsAndRanks) {
  EXPECT_EQ(cache_level({{"LAWSON_CACHE_DEBUG", "0"}}), 0);
  EXPECT_EQ(cache_level({{"LAWSON_CACHE_DEBUG", "1"}}), 1);
  EXPECT_EQ(cache_level({{"LAWSON_CACHE_DEBUG", "2"}}), 2);
  EXPECT_EQ(cache_level({{"LAWSON_CACHE_DEBUG", ""}}), 0);
  EXPECT_EQ(cache_level({{"LAWSON_CACHE_DEBUG", "2"}, {"RANK", "1"}}), 0);
  EXPECT_EQ(cache_level({{"LAWSON_CACHE_DEBUG", "2:1"}, {"RANK", "1"}}), 2);
  EXPECT_EQ(cache_level({{"LAWSON_CACHE_DEBUG", "2:all"}, {"RANK", "7"}}), 2);
  for (const int rank : {0, 3, 7}) {
    EXPECT_EQ(cache_level({{"LAWSON_CACHE_DEBUG", "1:0,3,7"}, {"RANK", std::to_string(rank)}}), 1);
  }
  EXPECT_EQ(cache_level({{"LAWSON_CACHE_DEBUG", "1:0,3,7"}, {"RANK", "30"}}), 0);
}

TEST(Settings, TheRankIsTheLaunchers) {
  const std::vector<std::string> names{"RANK", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK",
                                       "SLURM_PROCID"};
  std::map<std::string, std::string> variables;
  for (std::size_t i = names.size(); i-- > 0;) {  // the later ones win
    variables[names[i]] = std::to_string(i + 1);
    EXPECT_EQ(read(variables).settings.rank, static_cast<int>(i + 1));
  }
  variables["RANK"] = "first";  // is nobody's rank
  EXPECT_EQ(read(variables).settings.rank, 2);
}

TEST(Settings, OtherNames) {
  EXPECT_EQ(cache_level({{"NVTE_FUSED_ATTN_CACHE_DEBUG", "2"}}), 2);
  EXPECT_EQ(cache_level({{"NVTE_FUSED_ATTN_CACHE_DEBUG", "2"}, {"LAWSON_CACHE_DEBUG", "1"}}), 1);
  EXPECT_EQ(read({{"NVTE_DEBUG", "1"}, {"NVTE_DEBUG_LEVEL", "2"}}).settings.choice_level, 2);
  EXPECT_EQ(read({{"NVTE_DEBUG", "1"}, {"LAWSON_DEBUG_LEVEL", "2"}}).settings.choice_level, 2);
}

TEST(Settings, TheLevelCountsWhenDebugIsOn) {
  EXPECT_EQ(read({{"LAWSON_DEBUG", "1"}}).settings.choice_level, 1);
  EXPECT_EQ(read({{"LAWSON_DEBUG", "1"}, {"LAWSON_DEBUG_LEVEL", "0"}}).settings.choice_level, 0);
  EXPECT_EQ(read({{"LAWSON_DEBUG", "1"}, {"LAWSON_DEBUG_LEVEL", "2"}}).settings.choice_level, 2);
  EXPECT_EQ(read({{"LAWSON_DEBUG", "0"}, {"LAWSON_DEBUG_LEVEL", "2"}}).settings.choice_level, 0);
  EXPECT_EQ(read({{"LAWSON_DEBUG_LEVEL", "2"}}).settings.choice_level, 0);
}

TEST(Settings, WhatIsNotAllowedIsSaidOnceAndIgnored) {
  for (const char* value : {"3", "-1", "yes", "1:", "1:a", "1:0,", "1:,0", "1:0;3", ":0", " 1",
                            "2x", "1:all,0", "99999999999999999999", "1:-1", "\x1b[31m"}) {
    const Reading reading = read({{"LAWSON_CACHE_DEBUG", value}});
    EXPECT_EQ(reading.settings.cache_level, 0) << value;
    ASSERT_EQ(reading.warnings.size(), 1U) << value;
    EXPECT_NE(reading.warnings[0].find("LAWSON_CACHE_DEBUG='"), std::string::npos);
    EXPECT_NE(reading.warnings[0].find("expected LEVEL"), std::string::npos);
    EXPECT_EQ(reading.warnings[0].find('\x1b'), std::string::npos);
  }
  const Reading reading = read({{"NVTE_DEBUG", "2"}, {"LAWSON_DEBUG_LEVEL", "3"}});
  ASSERT_EQ(reading.warnings.size(), 2U);
  EXPECT_EQ(reading.warnings[0], "NVTE_DEBUG='2' is ignored; expected 0 or 1");
  EXPECT_NE(reading.warnings[1].find("LAWSON_DEBUG_LEVEL='3'"), std::string::npos);
}

}  // namespace
}  // namespace lawson::diag
