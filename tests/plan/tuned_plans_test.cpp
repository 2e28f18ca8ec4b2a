// Choices on the disk, and who makes them: one tuning for a question however many ask, and none
// where the choice is stored.
#include "plan/tuned_plans.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <barrier>
#include <filesystem>
#include <fstream>
#include <thread>

#include "engine/reference/reference.h"
#include "plan/planner.h"
#include "scripted_engine.h"

namespace lawson::plan {
namespace {

namespace fs = std::filesystem;

class TunedPlansTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = testing::TempDir() + "lawson-tuned-XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    root_ = name;
    options_.tuning = Tuning::quick;
  }
  void TearDown() override { fs::remove_all(root_); }

  // A process of its own, as far as choices go.
  std::unique_ptr<Planner> planner(Store::Mode mode = Store::Mode::rw) {
    PlannerConfig config;
    config.engines = {engine_, make_reference_engine()};
    Store::Config store;
    store.mode = mode;
    store.folder = (root_ / "cache" / "store").string();
    store.warn = [this](std::string_view text) { warnings_.emplace_back(text); };
    config.store = store;
    return std::make_unique<Planner>(std::move(config));
  }

  Tuned tune(Planner& planner, bool retune = false) {
    auto tuned = planner.tune(relu_graph("g"), engine_->live[0], "", options_, retune);
    EXPECT_TRUE(tuned.ok()) << tuned.error().message;
    return tuned.ok() ? std::move(tuned).value() : Tuned{};
  }

  std::vector<fs::path> files() const {
    std::vector<fs::path> list;
    for (const auto& entry : fs::recursive_directory_iterator(root_)) {
      if (entry.is_regular_file()) list.push_back(entry.path());
    }
    return list;
  }

  static std::string read(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  static void write(const fs::path& path, const std::string& text) {
    std::ofstream(path, std::ios::binary) << text;
  }

  fs::path root_;
  Options options_;
  std::vector<std::string> warnings_;
  std::shared_ptr<ScriptedEngine> engine_ = std::make_shared<ScriptedEngine>(std::vector<Script>{
      {"a", 1.0}, {"b", 0.5, 64}, {.name = "c", .build = unsupported("no", "no")}});
};

TEST_F(TunedPlansTest, AnotherProcessTakesTheChoiceWithoutTiming) {
  const Tuned first = tune(*planner());
  EXPECT_EQ(first.plan.plan_name, "b");
  EXPECT_FALSE(first.report.stored);
  ASSERT_EQ(files().size(), 1U);
  struct stat info {};
  ASSERT_EQ(::stat(files()[0].parent_path().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777U, 0700U);
  ASSERT_EQ(::stat(files()[0].c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777U, 0600U);

  const int builds = engine_->builds;
  const int measures = engine_->measures;
  const Tuned second = tune(*planner());
  EXPECT_TRUE(second.report.stored);
  EXPECT_EQ(second.plan.plan_id, first.plan.plan_id);
  EXPECT_EQ(plan_to_bytes(second.plan), plan_to_bytes(first.plan));
  EXPECT_EQ(second.report.candidates.size(), 3U);
  EXPECT_EQ(engine_->builds, builds);
  EXPECT_EQ(engine_->measures, measures);
  EXPECT_TRUE(warnings_.empty());
}

TEST_F(TunedPlansTest, RetuneTimesWhatIsStoredAndBuildsNothing) {
  tune(*planner());
  const int builds = engine_->builds;
  engine_->change("a", [](Script& script) { script.ms = 0.1; });
  const Tuned again = tune(*planner(), true);
  EXPECT_EQ(again.plan.plan_name, "a");
  EXPECT_FALSE(again.report.stored);
  EXPECT_EQ(again.report.candidates.size(), 3U);  // what did not build is still told
  EXPECT_EQ(engine_->builds, builds);
  EXPECT_EQ(tune(*planner()).plan.plan_name, "a");
}

TEST_F(TunedPlansTest, OtherQuestionsHaveFilesOfTheirOwn) {
  tune(*planner());
  options_.tuning = Tuning::exhaustive;
  tune(*planner());
  options_.workspace_limit = 1024;
  tune(*planner());
  EXPECT_EQ(files().size(), 3U);
  const auto other =
      planner()->tune(relu_graph("another name"), engine_->live[1], "", options_, false);
  ASSERT_TRUE(other.ok());
  EXPECT_TRUE(other->report.stored);
  EXPECT_EQ(files().size(), 3U);
}

TEST_F(TunedPlansTest, DamageIsOneWarningAndTuningAgain) {
  const Tuned good = tune(*planner());
  const fs::path path = files().at(0);
  const std::string whole = read(path);
  std::vector<std::string> damaged{"", "LAWSONT1", whole.substr(0, whole.size() - 1), whole + "x",
                                   "LAWSONT0" + whole.substr(8)};
  for (std::size_t at = 8; at < whole.size(); at += whole.size() / 7) {
    damaged.push_back(whole);
    damaged.back()[at] = static_cast<char>(damaged.back()[at] ^ 0x10);
  }
  for (const std::string& text : damaged) {
    write(path, text);
    warnings_.clear();
    const int measures = engine_->measures;
    const auto fresh = planner();
    const Tuned again = tune(*fresh);
    EXPECT_EQ(again.plan.plan_id, good.plan.plan_id);
    EXPECT_FALSE(again.report.stored);
    EXPECT_GT(engine_->measures, measures);
    ASSERT_EQ(warnings_.size(), 1U);
    EXPECT_NE(warnings_[0].find(path.string()), std::string::npos);
    EXPECT_TRUE(tune(*planner()).report.stored);  // repaired
  }
}

TEST_F(TunedPlansTest, AFileOfAnotherQuestionIsNoAnswer) {
  tune(*planner());
  const fs::path quick = files().at(0);
  const std::string text = read(quick);
  options_.tuning = Tuning::exhaustive;
  tune(*planner());
  for (const fs::path& path : files()) write(path, text);
  const Tuned again = tune(*planner());
  EXPECT_FALSE(again.report.stored);
  EXPECT_EQ(again.report.tuning, Tuning::exhaustive);
  ASSERT_EQ(warnings_.size(), 1U);
  EXPECT_NE(warnings_[0].find("another question"), std::string::npos);
}

TEST_F(TunedPlansTest, APlanThatTheEngineDoesNotTakeIsTunedAgain) {
  tune(*planner());
  engine_->change("b", [](Script& script) {
    script.load = error(ErrorKind::unavailable, "the plan was compiled with cuDNN 9.18");
  });
  const Tuned again = tune(*planner());
  EXPECT_EQ(again.plan.plan_name, "a");
  ASSERT_EQ(warnings_.size(), 1U);
  EXPECT_NE(warnings_[0].find("9.18"), std::string::npos);
}

// As if another cuDNN were installed.
class OtherBuild : public ScriptedEngine {
 public:
  using ScriptedEngine::ScriptedEngine;
  Result<std::string> version() override { return std::string{"9.20.0"}; }
  Result<Plan> compile(const ir::Graph& graph, const Device& device, const Options& options,
                       const std::optional<Candidate>& candidate, std::stop_token stop) override {
    LAWSON_TRY(Plan plan,
               ScriptedEngine::compile(graph, device, options, candidate, std::move(stop)));
    plan.engine_version = "9.20.0";
    plan.key = make_key(graph, device, name(), plan.engine_version, options);
    return plan;
  }
};

TEST_F(TunedPlansTest, TwoBuildsOfAnEngineShareAFolder) {
  const std::shared_ptr<ScriptedEngine> first = engine_;
  const auto second = std::make_shared<OtherBuild>(std::vector<Script>{{"a", 0.5}, {"b", 1.0}});
  for (const bool stored : {false, true}) {
    engine_ = first;
    const Tuned old_one = tune(*planner());
    EXPECT_EQ(old_one.report.stored, stored);
    EXPECT_EQ(old_one.plan.plan_name, "b");
    engine_ = second;
    const Tuned new_one = tune(*planner());
    EXPECT_EQ(new_one.report.stored, stored);
    EXPECT_EQ(new_one.plan.plan_name, "a");
    EXPECT_EQ(new_one.plan.engine_version, "9.20.0");
  }
  EXPECT_EQ(files().size(), 2U);
  EXPECT_TRUE(warnings_.empty());
}

TEST_F(TunedPlansTest, WhatOthersMayWriteAndWhatIsNoFileIsNotRead) {
  tune(*planner());
  const fs::path path = files().at(0);
  fs::permissions(path, fs::perms::group_write, fs::perm_options::add);
  EXPECT_FALSE(tune(*planner()).report.stored);
  EXPECT_EQ(warnings_.size(), 1U);
  fs::remove(path);
  fs::create_directory(path);
  EXPECT_FALSE(tune(*planner()).report.stored);
  fs::remove(path);
  write(root_ / "elsewhere", "");
  fs::create_symlink(root_ / "elsewhere", path);
  EXPECT_FALSE(tune(*planner()).report.stored);
  EXPECT_EQ(read(root_ / "elsewhere"), "");
}

TEST_F(TunedPlansTest, ModesAndAFolderThatCannotBe) {
  tune(*planner(Store::Mode::off));
  tune(*planner(Store::Mode::ro));
  EXPECT_TRUE(files().empty());
  tune(*planner());
  engine_->change("a", [](Script& script) { script.ms = 0.1; });
  EXPECT_EQ(tune(*planner(Store::Mode::ro)).plan.plan_name, "b");
  EXPECT_EQ(tune(*planner(Store::Mode::off)).plan.plan_name, "a");
  EXPECT_TRUE(warnings_.empty());

  fs::remove_all(root_ / "cache");
  write(root_ / "cache", "a file where a folder should be");
  EXPECT_EQ(tune(*planner()).plan.plan_name, "a");
  EXPECT_EQ(warnings_.size(), 1U);
}

TEST_F(TunedPlansTest, WhatADeadlineLeftIsNotStored) {
  options_.deadline_ms = 0;
  const auto hurried = planner();
  EXPECT_EQ(tune(*hurried).plan.plan_name, "a");
  EXPECT_TRUE(files().empty());
  EXPECT_EQ(tune(*hurried).plan.plan_name, "a");  // in this process the plan stays what it was
  options_.deadline_ms = -1;
  EXPECT_EQ(tune(*planner()).plan.plan_name, "b");
}

TEST_F(TunedPlansTest, ThreadsThatAskAtOnceGetOneTuning) {
  const auto shared = planner(Store::Mode::off);
  constexpr int kThreads = 16;
  std::barrier start(kThreads);
  std::atomic<int> wrong{0};
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] {
        start.arrive_and_wait();
        if (i % 2 == 0) {
          const auto plan =
              shared->acquire(relu_graph("g"), engine_->live[0], "", options_, nullptr);
          wrong += plan.ok() && (*plan)->plan().plan_name == "b" ? 0 : 1;
        } else {
          const auto plan = shared->compile(relu_graph("g"), engine_->live[0], "", options_);
          wrong += plan.ok() && plan->plan_name == "b" ? 0 : 1;
        }
      });
    }
  }
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(engine_->builds, 3);  // each candidate once
  EXPECT_FALSE(engine_->measured_together);
  EXPECT_EQ(shared->cache().counters().builds, 1U);
}

TEST_F(TunedPlansTest, TheVerdictIsOfThePlanThatRuns) {
  const auto shared = planner(Store::Mode::off);
  options_.strength = Strength::built;
  const auto verdict = shared->probe(relu_graph("g"), engine_->live[0], "", options_);
  ASSERT_TRUE(verdict.ok()) << verdict.error().message;
  EXPECT_EQ(verdict->strength, Strength::built);
  EXPECT_EQ(verdict->plan_name, "b");
  EXPECT_NE(verdict->choice.find("tuned (quick)"), std::string::npos);
  const auto plan = shared->compile(relu_graph("g"), engine_->live[0], "", options_);
  EXPECT_EQ(plan->plan_id, verdict->plan_id);
  EXPECT_EQ(plan->key, verdict->key);
  const auto report = shared->report_of(plan->plan_id);
  ASSERT_TRUE(report.has_value());
  EXPECT_EQ(report->candidates.size(), 3U);
  EXPECT_FALSE(shared->report_of("another").has_value());

  options_.strength = Strength::judged;
  const auto judged = shared->probe(relu_graph("g"), engine_->live[0], "", options_);
  EXPECT_EQ(judged->key, verdict->key);
  EXPECT_EQ(judged->plan_id, verdict->plan_id);  // known, once it is tuned
  options_.workspace_limit = 1 << 20;            // another question
  const auto other = shared->probe(relu_graph("g"), engine_->live[0], "", options_);
  EXPECT_NE(other->key, verdict->key);
  EXPECT_TRUE(other->plan_name.empty());  // not known before it is tuned
}

TEST_F(TunedPlansTest, OffIsTheEnginesFirstChoice) {
  options_.tuning = Tuning::off;
  const auto shared = planner();
  for (int i = 0; i < 3; ++i) {
    const Tuned tuned = tune(*shared);
    EXPECT_EQ(tuned.plan.plan_name, "a");
    EXPECT_TRUE(tuned.plan.choice.empty());
  }
  EXPECT_EQ(engine_->measures, 0);
  for (const fs::path& file : files()) EXPECT_NE(file.extension(), ".tuned");
}

TEST_F(TunedPlansTest, ADeviceThatIsNotHereIsNotTuned) {
  PlannerConfig config;
  config.engines = {engine_, make_reference_engine()};
  config.worker_path = FAKE_WORKER;
  config.nodriver_path = "engine";
  Planner planner{std::move(config)};
  const auto tuned = planner.tune(relu_graph("g"), fake_gpu("h200"), "", options_, false);
  ASSERT_TRUE(tuned.ok()) << tuned.error().message;
  EXPECT_EQ(tuned->plan.plan_name, "worker");
  EXPECT_NE(tuned->plan.choice.find("'h200' is not on this machine"), std::string::npos);
  options_.strength = Strength::built;
  const auto verdict = planner.probe(relu_graph("g"), fake_gpu("h200"), "", options_);
  ASSERT_TRUE(verdict.ok());
  EXPECT_EQ(verdict->plan_id, tuned->plan.plan_id);
  EXPECT_EQ(verdict->choice, tuned->plan.choice);
  const auto read = plan_from_bytes(plan_to_bytes(tuned->plan));
  EXPECT_EQ(read->choice, tuned->plan.choice);
}

}  // namespace
}  // namespace lawson::plan
