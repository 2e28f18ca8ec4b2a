// What a planner takes from bundles and the store, what it keeps, and what it does with what is of
// no use; with an engine double.
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <string>
#include <vector>

#include "engine/reference/reference.h"
#include "fake_engine.h"
#include "plan/bundle.h"
#include "plan/planner.h"

namespace lawson::plan {
namespace {

// Plans of a version that it does not load any more.
class Forgetful : public FakeEngine {
 public:
  Forgetful() : FakeEngine("double") {
    live = {fake_gpu("h200", 0)};
    targets = {fake_gpu("h200")};
  }
  Result<std::shared_ptr<Loaded>> load(const Plan& plan, const Device& device) override {
    ++loads;
    if (forgets && plan.choice == "old") return error(ErrorKind::unavailable, "it is too old");
    return FakeEngine::load(plan, device);
  }
  Result<Plan> compile(const ir::Graph& graph, const Device& device, const Options& options,
                       const std::optional<Candidate>& candidate, std::stop_token stop) override {
    LAWSON_TRY(Plan plan, FakeEngine::compile(graph, device, options, candidate, stop));
    plan.choice = choice;
    return plan;
  }
  std::atomic<int> loads{0};
  std::string choice;
  bool forgets = false;
};

class PlannerStoreTest : public testing::Test {
 protected:
  void SetUp() override {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    root_ = std::filesystem::temp_directory_path() /
            ("lawson-planner-store-" + std::to_string(::getpid()) + "-" + test->name());
    std::filesystem::create_directories(root_);
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  // As another process would have it.
  std::unique_ptr<Planner> planner(Store::Mode mode = Store::Mode::rw, std::string bundles = "") {
    PlannerConfig config;
    config.engines = {engine_, make_reference_engine()};
    config.worker_path = FAKE_WORKER;
    config.nodriver_path = "engine";
    config.max_workers = 1;
    Store::Config store;
    store.mode = mode;
    store.folder = (root_ / "cache").string();
    config.store = store;
    config.bundle_path = std::move(bundles);
    config.warn = [this](std::string_view text) { warnings_.emplace_back(text); };
    return std::make_unique<Planner>(std::move(config));
  }

  const Device& here() const { return engine_->live.front(); }

  std::shared_ptr<Forgetful> engine_ = std::make_shared<Forgetful>();
  std::filesystem::path root_;
  std::vector<std::string> warnings_;
};

TEST_F(PlannerStoreTest, AnotherProcessBuildsNothing) {
  const auto first = planner()->acquire(relu_graph("g"), here(), "", {}, nullptr);
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(engine_->builds, 1);
  const auto other = planner();
  const auto second = other->acquire(relu_graph("other name"), here(), "", {}, nullptr);
  ASSERT_TRUE(second.ok());
  EXPECT_EQ((*second)->plan().plan_id, (*first)->plan().plan_id);
  EXPECT_EQ(engine_->builds, 1);
  EXPECT_EQ(engine_->loads, 2);  // tried and used in one
  const auto compiled = planner()->compile(relu_graph("third name"), here(), "", {});
  ASSERT_TRUE(compiled.ok());
  EXPECT_NE(compiled->graph_json.find("third name"), std::string::npos);
  EXPECT_EQ(engine_->builds, 1);
  EXPECT_TRUE(planner(Store::Mode::off)->acquire(relu_graph("g"), here(), "", {}, nullptr).ok());
  EXPECT_EQ(engine_->builds, 2);
  EXPECT_TRUE(warnings_.empty());
}

TEST_F(PlannerStoreTest, VerdictsAreKeptAndSayWhichPlanWillRun) {
  const auto judged = planner()->probe(relu_graph("g"), here(), "", {});
  ASSERT_TRUE(judged.ok());
  EXPECT_EQ(judged->strength, Strength::judged);
  EXPECT_EQ(engine_->probes, 1);
  const auto again = planner()->probe(relu_graph("g"), here(), "", {});
  EXPECT_EQ(again->strength, Strength::judged);
  EXPECT_EQ(engine_->probes, 1);

  const auto loaded = planner()->acquire(relu_graph("g"), here(), "", {}, nullptr);
  const auto built = planner()->probe(relu_graph("g"), here(), "", {});
  EXPECT_EQ(built->strength, Strength::built);  // its plan is there
  EXPECT_EQ(built->plan_id, (*loaded)->plan().plan_id);
  EXPECT_EQ(built->key, judged->key);
  EXPECT_EQ(engine_->probes, 1);
  EXPECT_EQ(engine_->builds, 1);
}

TEST_F(PlannerStoreTest, RefusalsAreForThoseWhoUsedTheSameWords) {
  ASSERT_EQ(planner()->probe(relu_graph("refused"), here(), "", {})->decision,
            Decision::unsupported);
  const auto again = planner()->probe(relu_graph("refused"), here(), "", {});
  EXPECT_EQ(again->decision, Decision::unsupported);
  ASSERT_EQ(again->reasons.size(), 1U);
  EXPECT_EQ(again->reasons[0].field, "head_dim_qk");
  EXPECT_EQ(engine_->probes, 1);
  const auto other = planner()->probe(relu_graph("g"), here(), "", {});
  EXPECT_EQ(other->decision, Decision::supported);
  EXPECT_EQ(other->key, again->key);
  EXPECT_EQ(engine_->probes, 2);
}

TEST_F(PlannerStoreTest, ErrorsAndUndecidedVerdictsAreNotKept) {
  for (int i = 0; i < 2; ++i) {
    EXPECT_FALSE(planner()->probe(relu_graph("broken"), here(), "", {}).ok());
    EXPECT_EQ(planner()->probe(relu_graph("undecided"), here(), "", {})->decision,
              Decision::undecided);
  }
  EXPECT_EQ(engine_->probes, 4);
}

TEST_F(PlannerStoreTest, APlanThatDoesNotLoadIsBuiltAnewWithOneWarning) {
  engine_->choice = "old";
  ASSERT_TRUE(planner()->acquire(relu_graph("g"), here(), "", {}, nullptr).ok());
  engine_->forgets = true;
  engine_->choice = "new";
  const auto next = planner();
  const auto loaded = next->acquire(relu_graph("g"), here(), "", {}, nullptr);
  ASSERT_TRUE(loaded.ok()) << loaded.error().message;
  EXPECT_EQ((*loaded)->plan().choice, "new");
  EXPECT_EQ(engine_->builds, 2);
  ASSERT_EQ(warnings_.size(), 1U);
  EXPECT_NE(warnings_[0].find("too old"), std::string::npos) << warnings_[0];
  ASSERT_TRUE(planner()->acquire(relu_graph("g"), here(), "", {}, nullptr).ok());
  EXPECT_EQ(engine_->builds, 2);  // the new one took its place
  EXPECT_EQ(warnings_.size(), 1U);
}

// A plan of the engine configs that can be built without the device is not for who has it.
TEST_F(PlannerStoreTest, WhatWasBuiltWithoutTheDeviceIsForThoseWithoutIt) {
  const auto remote = planner()->compile(relu_graph("g"), fake_gpu("h200"), "", {});
  ASSERT_TRUE(remote.ok()) << remote.error().message;
  EXPECT_TRUE(remote->deviceless);
  ASSERT_TRUE(planner()->probe(relu_graph("g"), fake_gpu("h200"), "", {}).ok());
  const auto verdict = planner()->probe(relu_graph("g"), here(), "", {});
  EXPECT_EQ(verdict->evidence, Evidence::live);
  EXPECT_EQ(verdict->strength, Strength::judged);
  EXPECT_EQ(engine_->probes, 1);
  const auto loaded = planner()->acquire(relu_graph("g"), here(), "", {}, nullptr);
  ASSERT_TRUE(loaded.ok());
  EXPECT_FALSE((*loaded)->plan().deviceless);
  EXPECT_EQ((*loaded)->plan().plan_name, "double");
  EXPECT_EQ(engine_->builds, 1);
}

TEST_F(PlannerStoreTest, ABundlesPlanComesFirstWhoeverBuiltIt) {
  const auto remote = planner(Store::Mode::off)->compile(relu_graph("g"), fake_gpu("h200"), "", {});
  ASSERT_TRUE(remote.ok());
  const std::string path = (root_ / "plans.lawson").string();
  const std::array<const Plan*, 1> plans{&*remote};
  ASSERT_TRUE(write_bundle(path, plans).ok());
  ASSERT_TRUE(planner()->acquire(relu_graph("g"), here(), "", {}, nullptr).ok());  // stored
  const auto next = planner(Store::Mode::rw, path);
  const auto verdict = next->probe(relu_graph("g"), here(), "", {});
  ASSERT_TRUE(verdict.ok());
  EXPECT_EQ(verdict->plan_id, remote->plan_id);
  const auto loaded = next->acquire(relu_graph("g"), here(), "", {}, nullptr);
  ASSERT_TRUE(loaded.ok());
  EXPECT_EQ((*loaded)->plan().plan_id, remote->plan_id);
  EXPECT_EQ(engine_->builds, 1);
}

}  // namespace
}  // namespace lawson::plan
