// Which candidate is chosen and what is said of the others, with a scripted engine; and once with
// the cpu engine.
#include "plan/tuner.h"

#include <gtest/gtest.h>

#include <set>

#include "engine/cpu/cpu.h"
#include "engine/reference/reference.h"
#include "plan/race.h"
#include "scripted_engine.h"

namespace lawson::plan {
namespace {

Options tuned(Tuning tuning, double deadline_ms = -1) {
  Options options;
  options.tuning = tuning;
  options.deadline_ms = deadline_ms;
  return options;
}

std::vector<Script> numbered(std::size_t count) {
  std::vector<Script> scripts;
  for (std::size_t i = 0; i < count; ++i) {
    // The later the faster, clearly.
    scripts.push_back({"eng" + std::to_string(i), 2.0 - 0.1 * static_cast<double>(i)});
  }
  return scripts;
}

class TunerTest : public testing::Test {
 protected:
  Result<Tuned> tune(ScriptedEngine& engine, const Options& options) {
    Tuner tuner(engine, *reference_, *reference_, config);
    return tuner.tune(relu_graph("g"), engine.live[0], options);
  }

  static const CandidateReport& of(const Tuned& result, const std::string& name) {
    for (const CandidateReport& candidate : result.report.candidates) {
      if (candidate.name == name) return candidate;
    }
    ADD_FAILURE() << name << " is not in the report";
    return result.report.candidates.front();
  }

  TunerConfig config;
  std::shared_ptr<Engine> reference_ = make_reference_engine();
};

TEST_F(TunerTest, TheFastestIsChosenAndAllAreReportedInOrder) {
  ScriptedEngine engine({{"a", 1.0}, {"b", 0.5, 64}, {"c", 0.7}});
  const auto result = tune(engine, tuned(Tuning::exhaustive));
  ASSERT_TRUE(result.ok()) << result.error().message;
  EXPECT_EQ(result->plan.plan_name, "b");
  EXPECT_EQ(result->plan.choice, result->report.choice);
  EXPECT_NE(result->plan.choice.find("the fastest of 3 timed on 'h200', 0.50"), std::string::npos)
      << result->plan.choice;
  ASSERT_EQ(result->report.candidates.size(), 3U);
  EXPECT_EQ(result->report.candidates[0].name, "a");
  EXPECT_EQ(of(*result, "a").standing, Standing::slower);
  EXPECT_EQ(of(*result, "b").standing, Standing::chosen);
  EXPECT_EQ(of(*result, "b").workspace_bytes, 64);
  EXPECT_GT(of(*result, "b").rounds, 1);
  EXPECT_GE(of(*result, "b").median_ms, 0.5);
  EXPECT_LE(of(*result, "b").min_ms, of(*result, "b").median_ms);
  EXPECT_GE(of(*result, "b").max_ms, of(*result, "b").median_ms);
  EXPECT_EQ(result->report.compared_with, "oracle");
  EXPECT_EQ(result->built.size(), 3U);
  EXPECT_GE(engine.sets, 2U);
  EXPECT_EQ(result->report.buffer_sets, engine.sets);
  EXPECT_EQ(engine.blocks, 0);

  const auto read = report_from_json(report_to_json(result->report));
  ASSERT_TRUE(read.ok()) << read.error().message;
  EXPECT_EQ(report_to_json(*read), report_to_json(result->report));
}

TEST_F(TunerTest, QuickLooksAtEightAndExhaustiveAtAll) {
  ScriptedEngine engine(numbered(12));
  const auto quick = tune(engine, tuned(Tuning::quick));
  ASSERT_TRUE(quick.ok());
  EXPECT_EQ(quick->plan.plan_name, "eng7");
  EXPECT_EQ(quick->report.candidates.size(), 8U);
  EXPECT_EQ(engine.builds, 8);
  const auto all = tune(engine, tuned(Tuning::exhaustive));
  ASSERT_TRUE(all.ok());
  EXPECT_EQ(all->plan.plan_name, "eng11");
  EXPECT_NE(all->plan.key, quick->plan.key);
}

TEST_F(TunerTest, FailuresAreKeptAndAreNotTheEnd) {
  ScriptedEngine engine(
      {{.name = "no", .build = unsupported("kernel", "engine 3: the kernel does not compile")},
       {.name = "broken", .build = error(ErrorKind::cudnn, "status 4000")},
       {.name = "unloadable", .load = error(ErrorKind::cuda, "error 700")},
       {.name = "stuck", .ms = 0.1, .measure = error(ErrorKind::cuda, "error 719")},
       {.name = "good", .ms = 2},
       {.name = "better", .ms = 1}});
  const auto result = tune(engine, tuned(Tuning::quick));
  ASSERT_TRUE(result.ok()) << result.error().message;
  EXPECT_EQ(result->plan.plan_name, "better");
  EXPECT_EQ(of(*result, "no").standing, Standing::not_built);
  EXPECT_EQ(of(*result, "no").failure, "engine 3: the kernel does not compile");
  EXPECT_EQ(of(*result, "broken").standing, Standing::failed);
  EXPECT_EQ(of(*result, "broken").failure, "status 4000");
  EXPECT_EQ(of(*result, "unloadable").standing, Standing::failed);
  EXPECT_EQ(of(*result, "stuck").standing, Standing::failed);
  EXPECT_EQ(of(*result, "stuck").failure, "error 719");
  EXPECT_EQ(result->built.size(), 2U);
}

TEST_F(TunerTest, WhereNothingCanBeUsedTheReasonsAreAll) {
  ScriptedEngine refused({{.name = "a", .build = unsupported("one", "reason one")},
                          {.name = "b", .build = unsupported("two", "reason two")}});
  const auto no = tune(refused, tuned(Tuning::quick));
  ASSERT_FALSE(no.ok());
  EXPECT_EQ(no.error().kind, ErrorKind::unsupported);
  ASSERT_EQ(no.error().reasons.size(), 2U);
  EXPECT_EQ(no.error().reasons[1].message, "reason two");

  ScriptedEngine broken({{.name = "a", .build = unsupported("one", "reason one")},
                         {.name = "b", .build = error(ErrorKind::unavailable, "no NVRTC")}});
  EXPECT_EQ(tune(broken, tuned(Tuning::quick)).error().kind, ErrorKind::unavailable);

  ScriptedEngine untimable({{.name = "a", .measure = error(ErrorKind::cuda, "error 700")},
                            {.name = "b", .measure = error(ErrorKind::cuda, "error 700")}});
  EXPECT_EQ(tune(untimable, tuned(Tuning::quick)).error().kind, ErrorKind::cuda);
}

TEST_F(TunerTest, QuickGoesOnUntilSomethingCanBeUsed) {
  std::vector<Script> scripts = numbered(12);
  for (std::size_t i = 0; i < 9; ++i) scripts[i].build = unsupported("no", "does not build");
  ScriptedEngine engine(scripts);
  config.threads = 2;
  const auto result = tune(engine, tuned(Tuning::quick));
  ASSERT_TRUE(result.ok()) << result.error().message;
  EXPECT_EQ(result->plan.plan_name, "eng9");
}

TEST_F(TunerTest, WorkspaceIsCapped) {
  ScriptedEngine engine({{"small", 2, 16}, {"large", 1, 4096}});
  Options options = tuned(Tuning::quick);
  options.workspace_limit = 1024;
  const auto result = tune(engine, options);
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->plan.plan_name, "small");
  EXPECT_EQ(of(*result, "large").standing, Standing::workspace_limit);
  EXPECT_EQ(of(*result, "large").workspace_bytes, 4096);
  EXPECT_NE(of(*result, "large").failure.find("4096 bytes; 1024 are allowed"), std::string::npos);

  options.workspace_limit = 8;
  const auto none = tune(engine, options);
  ASSERT_FALSE(none.ok());
  EXPECT_EQ(none.error().kind, ErrorKind::unsupported);
  EXPECT_EQ(none.error().reasons.size(), 2U);

  // One that asks for more than the device has is out, and the others are not.
  engine.most_bytes = 2048;
  const auto fits = tune(engine, tuned(Tuning::quick));
  ASSERT_TRUE(fits.ok()) << fits.error().message;
  EXPECT_EQ(fits->plan.plan_name, "small");
  EXPECT_EQ(of(*fits, "large").standing, Standing::failed);
}

TEST_F(TunerTest, AWrongWinnerIsDropped) {
  for (const double oracle_work : {1e6, 0.0}) {  // against the oracle, against the first plan
    config.oracle_work = oracle_work;
    ScriptedEngine engine(
        {{"first", 2}, {.name = "wrong", .ms = 1, .error = 0.5F}, {"right", 1.5}});
    const auto result = tune(engine, tuned(Tuning::quick));
    ASSERT_TRUE(result.ok()) << result.error().message;
    EXPECT_EQ(result->plan.plan_name, "right");
    EXPECT_EQ(result->report.compared_with, oracle_work > 0 ? "oracle" : "first plan");
    EXPECT_EQ(of(*result, "wrong").standing, Standing::wrong_result);
    EXPECT_NE(of(*result, "wrong").failure.find("y: max error 0.5"), std::string::npos)
        << of(*result, "wrong").failure;
    EXPECT_EQ(result->built.size(), 2U);
  }
  // The first is not right because it is the first.
  config.oracle_work = 1e6;
  ScriptedEngine engine({{.name = "first", .ms = 1, .error = 0.5F}, {"second", 2}});
  EXPECT_EQ(tune(engine, tuned(Tuning::quick))->plan.plan_name, "second");

  ScriptedEngine wrong({{.name = "a", .ms = 1, .error = 0.5F}, {.name = "b", .ms = 2, .error = 1}});
  const auto none = tune(wrong, tuned(Tuning::quick));
  ASSERT_FALSE(none.ok());
  EXPECT_EQ(none.error().kind, ErrorKind::unsupported);
  EXPECT_EQ(none.error().reasons.at(0).code, "wrong_result");
}

TEST_F(TunerTest, AmongEqualsTheEnginesOrderDecides) {
  ScriptedEngine engine({{"slow", 2}, {"a", 1.003}, {"b", 1.0}, {"c", 1.001}});
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(tune(engine, tuned(Tuning::quick))->plan.plan_name, "a");
  }
}

TEST_F(TunerTest, AtTheDeadlineTheBestSoFarIsTaken) {
  ScriptedEngine slow_builds({{.name = "a", .ms = 2, .build_ms = 30},
                              {.name = "b", .ms = 1, .build_ms = 30},
                              {.name = "c", .ms = 0.5, .build_ms = 30}});
  config.threads = 1;
  const auto built = tune(slow_builds, tuned(Tuning::quick, 45));
  ASSERT_TRUE(built.ok()) << built.error().message;
  EXPECT_TRUE(built->report.deadline_passed);
  EXPECT_EQ(built->plan.plan_name, "a");
  EXPECT_EQ(of(*built, "c").standing, Standing::not_built);
  EXPECT_EQ(of(*built, "c").failure, "the deadline of 45 ms had passed");
  EXPECT_NE(built->plan.choice.find("deadline"), std::string::npos);

  // However short: a plan is built.
  const auto one = tune(slow_builds, tuned(Tuning::quick, 0));
  ASSERT_TRUE(one.ok());
  EXPECT_EQ(one->plan.plan_name, "a");
  const auto no_hurry = tune(slow_builds, tuned(Tuning::quick, 1e6));
  EXPECT_EQ(no_hurry->plan.plan_name, "c");
  EXPECT_FALSE(no_hurry->report.deadline_passed);
}

TEST_F(TunerTest, CandidatesAreBuiltAtOnce) {
  std::vector<Script> scripts = numbered(6);
  for (Script& script : scripts) script.build_ms = 50;
  ScriptedEngine engine(scripts);
  config.threads = 3;
  ASSERT_TRUE(tune(engine, tuned(Tuning::exhaustive)).ok());
  EXPECT_EQ(engine.most_building, 3);
}

TEST_F(TunerTest, WhatCannotBeTimedGoesByTheEnginesOrder) {
  ScriptedEngine engine({{.name = "a", .measure = error(ErrorKind::unavailable, "no clock")},
                         {.name = "b", .measure = error(ErrorKind::unavailable, "no clock")}});
  const auto result = tune(engine, tuned(Tuning::quick));
  ASSERT_TRUE(result.ok()) << result.error().message;
  EXPECT_EQ(result->plan.plan_name, "a");
  EXPECT_NE(result->plan.choice.find("no clock"), std::string::npos);

  ScriptedEngine full({{"a", 2}, {"b", 1}});
  full.most_bytes = 0;
  const auto untimed = tune(full, tuned(Tuning::quick));
  ASSERT_TRUE(untimed.ok()) << untimed.error().message;
  EXPECT_EQ(untimed->plan.plan_name, "a");
  EXPECT_NE(untimed->plan.choice.find("too many"), std::string::npos);
}

TEST_F(TunerTest, SetsOfBuffersExceedTheCacheWithinTheirBounds) {
  ScriptedEngine engine({{"a", 1}, {"b", 2}});
  const auto sets = [&] { return tune(engine, tuned(Tuning::quick))->report.buffer_sets; };
  engine.live[0].properties["l2CacheSize"] = 256;
  EXPECT_EQ(sets(), 9U);  // of 64 bytes each: twice the cache, and one more
  engine.live[0].properties["l2CacheSize"] = 16;
  EXPECT_EQ(sets(), 2U);
  engine.live[0].properties["l2CacheSize"] = std::int64_t{1} << 30;
  EXPECT_EQ(sets(), config.scratch.sets);
  config.scratch.bytes = 300;
  EXPECT_EQ(sets(), 4U);
  config.scratch.bytes = 1;
  EXPECT_EQ(sets(), 1U);
}

TEST_F(TunerTest, StoredPlansAreTimedWithoutBuilding) {
  ScriptedEngine engine({{"a", 1.0}, {"b", 0.5}});
  const auto result = tune(engine, tuned(Tuning::quick));
  ASSERT_TRUE(result.ok());
  const int builds = engine.builds;
  engine.change("a", [](Script& script) { script.ms = 0.25; });
  Tuner tuner(engine, *reference_, *reference_, config);
  const auto again =
      tuner.tune_again(relu_graph("g"), engine.live[0], tuned(Tuning::quick), result->built);
  ASSERT_TRUE(again.ok()) << again.error().message;
  EXPECT_EQ(again->plan.plan_name, "a");
  EXPECT_EQ(engine.builds, builds);
}

TEST_F(TunerTest, TheCpuEnginesKernels) {
  ir::Builder builder("product");
  ir::Tensor x;
  x.name = "x";
  x.shape = {96, 160};
  ir::Tensor y = x;
  y.name = "y";
  y.shape = {160, 64};
  const ir::TensorId a = builder.input(x).value();
  const ir::TensorId b = builder.input(y).value();
  ASSERT_TRUE(builder.output(builder.add1(ir::Matmul{}, {a, b}, std::nullopt, "z").value()).ok());
  const ir::Graph graph = std::move(builder).finish().value();
  const auto engine = make_cpu_engine();
  Tuner tuner(*engine, *reference_, *engine, config);
  const auto result = tuner.tune(graph, cpu_device(), tuned(Tuning::exhaustive));
  ASSERT_TRUE(result.ok()) << result.error().message;
  const auto candidates = engine->candidates(graph, cpu_device(), {});
  ASSERT_EQ(result->report.candidates.size(), candidates->size());
  for (std::size_t i = 0; i < candidates->size(); ++i) {
    const CandidateReport& candidate = result->report.candidates[i];
    EXPECT_EQ(candidate.name, (*candidates)[i].name);
    EXPECT_EQ(candidate.median_ms > 0, candidates->size() > 1);
    EXPECT_NE(candidate.standing, Standing::failed) << candidate.failure;
    EXPECT_NE(candidate.standing, Standing::wrong_result) << candidate.failure;
  }
  EXPECT_TRUE(engine->load(result->plan, cpu_device()).ok());
}

// The race alone, on times that are told.
RaceResult race_of(const std::vector<std::vector<double>>& times, const RaceRules& rules = {},
                   int stop_after = 1 << 30) {
  std::vector<std::size_t> next(times.size(), 0);
  int calls = 0;
  return race(
      times.size(), rules,
      [&](std::size_t i, int, int rounds) -> Result<std::vector<double>> {
        ++calls;
        std::vector<double> out;
        for (int r = 0; r < rounds; ++r) out.push_back(times[i][next[i]++ % times[i].size()]);
        return out;
      },
      [&] { return calls >= stop_after; });
}

TEST(Race, EndsWhenTheLeaderIsApart) {
  const RaceResult result = race_of({{1.00, 1.01, 1.02}, {1.20, 1.21, 1.22}, {40, 41, 42}});
  EXPECT_EQ(result.order, (std::vector<std::size_t>{0, 1, 2}));
  EXPECT_TRUE(result.separated);
  EXPECT_EQ(result.runners[2].times.size(), 1U);  // far behind after the first look
  EXPECT_EQ(result.runners[0].times.size(), 10U);
}

TEST(Race, GoesOnWhileTheLeadersOverlap) {
  const RaceResult result =
      race_of({{1.0, 1.3, 0.9, 1.2, 1.1, 0.8, 1.4}, {1.05, 1.25, 0.95, 1.15, 1.12, 0.85, 1.38}});
  EXPECT_FALSE(result.separated);
  EXPECT_EQ(result.runners[0].times.size(), 50U);
  EXPECT_EQ(result.runners[1].times.size(), 50U);
}

TEST(Race, NobodyKeepsAPlace) {
  std::vector<std::size_t> starts;
  std::size_t calls = 0;
  constexpr std::size_t kRunners = 3;
  // Times that never separate, so that all three run in every turn.
  const RaceResult result = race(
      kRunners, {},
      [&](std::size_t i, int, int rounds) -> Result<std::vector<double>> {
        if (calls >= kRunners && calls % kRunners == 0) starts.push_back(i);
        ++calls;
        std::vector<double> times;
        for (int r = 0; r < rounds; ++r) times.push_back(r % 2 == 0 ? 1 : 2);
        return times;
      },
      [] { return false; });
  ASSERT_GE(starts.size(), 3U);
  EXPECT_GT(std::set<std::size_t>(starts.begin(), starts.end()).size(), 1U);
  EXPECT_EQ(result.order.front(), 0U);
}

TEST(Race, EqualsEndEarly) {
  const RaceResult result = race_of({{1.001, 1.002}, {1.000, 1.001}});
  EXPECT_EQ(result.order.front(), 0U);
  EXPECT_LE(result.runners[0].times.size(), 20U);
}

TEST(Race, StopsWhenTimeIsUp) {
  const RaceResult result = race_of({{2}, {1}, {3}}, {}, 3);
  EXPECT_TRUE(result.stopped);
  EXPECT_EQ(result.order, (std::vector<std::size_t>{1, 0, 2}));
  EXPECT_TRUE(race_of({{2}, {1}}, {}, 0).order.empty());
}

}  // namespace
}  // namespace lawson::plan
