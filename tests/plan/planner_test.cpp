// Routing, strengths and messages, with the fake engine here and in the fake worker.
#include "plan/planner.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <thread>

#include "engine/reference/reference.h"
#include "fake_engine.h"

namespace lawson::plan {
namespace {

class PlannerTest : public testing::Test {
 protected:
  void SetUp() override {
    fake_ = std::make_shared<FakeEngine>("in process");
    fake_->targets = {fake_gpu("h200"), fake_gpu("b200")};
  }

  // The planner's own command line for the worker has no mode: it goes in the place of the
  // no-driver library.
  Planner planner(const std::string& mode = "engine") const {
    PlannerConfig config;
    config.engines = {fake_, make_reference_engine()};
    config.worker_path = FAKE_WORKER;
    config.nodriver_path = mode;
    config.max_workers = 2;
    return Planner{std::move(config)};
  }

  static Planner without_cudnn() {
    PlannerConfig config;
    config.engines = {make_reference_engine()};
    return Planner{std::move(config)};
  }

  std::shared_ptr<FakeEngine> fake_;
};

Options strength(Strength wanted) {
  Options options;
  options.strength = wanted;
  return options;
}

TEST_F(PlannerTest, ATargetIsJudgedInAWorkerAndAPresentGpuHere) {
  Planner p = planner();
  const auto remote = p.probe(relu_graph("g"), fake_gpu("h200"), "", {});
  ASSERT_TRUE(remote.ok()) << remote.error().message;
  EXPECT_EQ(remote->plan_name, "worker");
  EXPECT_EQ(remote->decision, Decision::supported);
  EXPECT_EQ(remote->strength, Strength::judged);
  EXPECT_EQ(fake_->probes, 0);

  const auto here = p.probe(relu_graph("g"), fake_gpu("h200", 0), "", {});
  ASSERT_TRUE(here.ok());
  EXPECT_EQ(here->plan_name, "in process");
  EXPECT_EQ(fake_->probes, 1);
  EXPECT_EQ(here->key, remote->key);
}

TEST_F(PlannerTest, BuiltCompiles) {
  Planner p = planner();
  for (const int ordinal : {-1, 0}) {
    const auto verdict =
        p.probe(relu_graph("g"), fake_gpu("h200", ordinal), "cudnn", strength(Strength::built));
    ASSERT_TRUE(verdict.ok()) << verdict.error().message;
    EXPECT_EQ(verdict->strength, Strength::built);
    EXPECT_EQ(verdict->workspace_bytes, 32);
    const auto plan = p.compile(relu_graph("g"), fake_gpu("h200", ordinal), "", {});
    ASSERT_TRUE(plan.ok()) << plan.error().message;
    EXPECT_EQ(plan->plan_id, verdict->plan_id);
    EXPECT_EQ(plan->key, verdict->key);
    EXPECT_EQ(plan->bytes.size(), 100'000U);
  }
}

// Where the device is here, the plan behind a verdict stays; a worker builds while it judges.
TEST_F(PlannerTest, WhatAVerdictBuiltIsNotBuiltAgain) {
  Planner p = planner();
  const Device here = fake_gpu("h200", 0);
  const auto verdict = p.probe(relu_graph("g"), here, "", strength(Strength::built));
  ASSERT_TRUE(verdict.ok());
  EXPECT_EQ(fake_->builds, 1);
  const auto plan = p.compile(relu_graph("g"), here, "", {});
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->plan_id, verdict->plan_id);
  const auto loaded = p.acquire(relu_graph("g"), here, "", {}, nullptr);
  ASSERT_TRUE(loaded.ok());
  EXPECT_EQ((*loaded)->plan().plan_id, verdict->plan_id);
  EXPECT_EQ(fake_->builds, 1);

  const auto remote =
      p.probe(relu_graph("built at once"), fake_gpu("h200"), "", strength(Strength::built));
  ASSERT_TRUE(remote.ok());
  EXPECT_EQ(remote->strength, Strength::built);
  EXPECT_EQ(fake_->builds, 1);
}

TEST_F(PlannerTest, WhatWasAnsweredIsAnsweredFromMemory) {
  Planner p = planner();
  const Device here = fake_gpu("h200", 0);
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(p.probe(relu_graph("g"), here, "", {}).ok());
    const auto refused = p.probe(relu_graph("refused"), here, "", {});
    ASSERT_TRUE(refused.ok());
    EXPECT_EQ(refused->decision, Decision::unsupported);
    ASSERT_EQ(refused->reasons.size(), 1U);
    EXPECT_EQ(p.probe(relu_graph("undecided"), here, "", {})->decision, Decision::undecided);
  }
  EXPECT_EQ(fake_->probes, 3);  // of equal graphs with other words
  // A refusal settles every strength; a weaker yes does not.
  EXPECT_EQ(p.probe(relu_graph("refused"), here, "", strength(Strength::built))->decision,
            Decision::unsupported);
  EXPECT_EQ(fake_->probes, 3);
  EXPECT_EQ(p.probe(relu_graph("g"), here, "", strength(Strength::built))->strength,
            Strength::built);
  EXPECT_EQ(fake_->probes, 4);
  // What breaks is no answer, and another device is another question.
  for (int i = 0; i < 2; ++i) EXPECT_FALSE(p.probe(relu_graph("broken"), here, "", {}).ok());
  EXPECT_EQ(fake_->probes, 6);
  ASSERT_TRUE(p.probe(relu_graph("g"), fake_gpu("h200", 1), "", {}).ok());
  EXPECT_EQ(fake_->probes, 7);
}

TEST_F(PlannerTest, VerdictsAreBounded) {
  PlannerConfig config;
  config.engines = {fake_, make_reference_engine()};
  config.verdicts = {16, std::uint64_t{1} << 20};
  config.refusals = {16, std::uint64_t{1} << 20};
  Planner p{std::move(config)};
  for (int i = 0; i < 100; ++i) {
    ASSERT_TRUE(p.probe(relu_graph("g" + std::to_string(i)), fake_gpu("h200", 0), "", {}).ok());
    EXPECT_LE(p.verdicts().size(), 16U);
  }
  EXPECT_EQ(p.verdicts().counters().evictions, 84U);
}

TEST_F(PlannerTest, WhatDoesNotBuildIsAnAnswerAndWhatBreaksIsNot) {
  Planner p = planner();
  for (const int ordinal : {-1, 0}) {
    const Device device = fake_gpu("h200", ordinal);
    const auto refused = p.probe(relu_graph("refused"), device, "", strength(Strength::built));
    ASSERT_TRUE(refused.ok());
    EXPECT_EQ(refused->decision, Decision::unsupported);
    EXPECT_EQ(refused->strength, Strength::judged);

    const auto undecided = p.probe(relu_graph("undecided"), device, "", strength(Strength::built));
    ASSERT_TRUE(undecided.ok());
    EXPECT_EQ(undecided->decision, Decision::undecided);

    const auto not_built =
        p.probe(relu_graph("does not build"), device, "", strength(Strength::built));
    ASSERT_TRUE(not_built.ok()) << not_built.error().message;
    EXPECT_EQ(not_built->decision, Decision::unsupported);
    EXPECT_EQ(not_built->strength, Strength::built);
    ASSERT_EQ(not_built->reasons.size(), 1U);
    EXPECT_EQ(not_built->reasons[0].code, "kernel_does_not_compile");
    EXPECT_TRUE(not_built->plan_id.empty());

    const auto broken_probe = p.probe(relu_graph("broken"), device, "", {});
    ASSERT_FALSE(broken_probe.ok());
    EXPECT_EQ(broken_probe.error().kind, ErrorKind::cudnn);

    const auto broken_build =
        p.probe(relu_graph("build broken"), device, "", strength(Strength::built));
    ASSERT_FALSE(broken_build.ok());
    EXPECT_EQ(broken_build.error().kind, ErrorKind::unavailable);

    const auto compiled = p.compile(relu_graph("does not build"), device, "", {});
    ASSERT_FALSE(compiled.ok());
    EXPECT_EQ(compiled.error().kind, ErrorKind::unsupported);
    ASSERT_EQ(compiled.error().reasons.size(), 1U);
  }
}

TEST_F(PlannerTest, AKeyThatTheHostWouldNotDeriveIsABug) {
  const auto verdict = planner().probe(relu_graph("wrong key"), fake_gpu("h200"), "", {});
  ASSERT_FALSE(verdict.ok());
  EXPECT_EQ(verdict.error().kind, ErrorKind::internal);
  EXPECT_NE(verdict.error().message.find("diverge"), std::string::npos);
}

TEST_F(PlannerTest, VerifiedNeedsTheDevice) {
  const auto verdict =
      planner().probe(relu_graph("g"), fake_gpu("h200"), "", strength(Strength::verified));
  ASSERT_FALSE(verdict.ok());
  EXPECT_EQ(verdict.error().kind, ErrorKind::unavailable);
  EXPECT_NE(verdict.error().message.find("h200"), std::string::npos);
}

TEST_F(PlannerTest, VerifiedExecutesAndCompares) {
  Planner p = planner();
  const auto verdict =
      p.probe(relu_graph("g"), cpu_device(), "reference", strength(Strength::verified));
  ASSERT_TRUE(verdict.ok()) << verdict.error().message;
  EXPECT_EQ(verdict->decision, Decision::supported);
  EXPECT_EQ(verdict->strength, Strength::verified);
}

TEST_F(PlannerTest, VerifiedNoticesAnEngineThatComputesNothing) {
  class Idle : public FakeEngine {
   public:
    Idle() : FakeEngine("idle") {}
    std::string_view name() const override { return "idle"; }
    bool accepts(const Device& device) const override { return device.kind == Device::Kind::cpu; }
  };
  PlannerConfig config;
  config.engines = {std::make_shared<Idle>(), make_reference_engine()};
  Planner p{std::move(config)};
  const auto verdict = p.probe(relu_graph("g"), cpu_device(), "idle", strength(Strength::verified));
  ASSERT_TRUE(verdict.ok()) << verdict.error().message;
  EXPECT_EQ(verdict->decision, Decision::unsupported);
  EXPECT_EQ(verdict->strength, Strength::verified);
  ASSERT_EQ(verdict->reasons.size(), 1U);
  EXPECT_EQ(verdict->reasons[0].code, "wrong_result");
}

TEST_F(PlannerTest, EnginesAreChosenByName) {
  Planner p = planner();
  const auto unknown = p.probe(relu_graph("g"), cpu_device(), "refernce", {});
  ASSERT_FALSE(unknown.ok());
  EXPECT_EQ(unknown.error().kind, ErrorKind::invalid_argument);
  EXPECT_NE(unknown.error().message.find("did you mean 'reference'"), std::string::npos)
      << unknown.error().message;

  const auto other_kind = p.probe(relu_graph("g"), fake_gpu("h200"), "reference", {});
  ASSERT_TRUE(other_kind.ok());
  EXPECT_EQ(other_kind->decision, Decision::unsupported);
  ASSERT_EQ(other_kind->reasons.size(), 1U);
  EXPECT_EQ(other_kind->reasons[0].field, "engine");
  EXPECT_FALSE(other_kind->key.empty());
  EXPECT_EQ(p.compile(relu_graph("g"), fake_gpu("h200"), "reference", {}).error().kind,
            ErrorKind::unsupported);
}

TEST_F(PlannerTest, ABuildWithoutCudnnSaysSo) {
  Planner p = without_cudnn();
  for (const char* engine : {"", "cudnn"}) {
    const auto verdict = p.probe(relu_graph("g"), fake_gpu("h200"), engine, {});
    ASSERT_FALSE(verdict.ok());
    EXPECT_EQ(verdict.error().kind, ErrorKind::unavailable);
    EXPECT_NE(verdict.error().message.find("no cuDNN engine"), std::string::npos);
  }
  for (const char* device : {"h200", "cuda", "cuda:0"}) {
    const auto found = p.find_device(device);
    ASSERT_FALSE(found.ok());
    EXPECT_EQ(found.error().kind, ErrorKind::unavailable);
  }
  EXPECT_TRUE(p.find_device("cpu").ok());
  EXPECT_FALSE(p.info().contains("worker"));
}

TEST_F(PlannerTest, DevicesAreFound) {
  fake_->live = {fake_gpu("h200", 0), fake_gpu("h200", 1)};
  Planner p = planner();
  EXPECT_EQ(p.devices()->size(), 5U);
  EXPECT_EQ(p.find_device("h200")->ordinal, 0);  // a live GPU wins over a target of its name
  EXPECT_EQ(p.find_device("H200-Alias")->ordinal, 0);
  EXPECT_EQ(p.find_device("b200")->ordinal, -1);
  EXPECT_EQ(p.find_device("cuda")->ordinal, 0);
  EXPECT_EQ(p.find_device("cuda:1")->ordinal, 1);
  EXPECT_EQ(p.find_device("CPU")->kind, Device::Kind::cpu);

  const auto beyond = p.find_device("cuda:2");
  ASSERT_FALSE(beyond.ok());
  EXPECT_EQ(beyond.error().kind, ErrorKind::unavailable);
  for (const char* name : {"cuda:", "cuda:x", "cuda:-1", "cuda:99999999999999999999", "b20", ""}) {
    const auto found = p.find_device(name);
    ASSERT_FALSE(found.ok()) << name;
    EXPECT_EQ(found.error().kind, ErrorKind::invalid_argument) << name;
  }
  EXPECT_NE(p.find_device("b20").error().message.find("did you mean 'b200'"), std::string::npos);
}

TEST_F(PlannerTest, PlansAreLoadedOnlyWhereTheyRun) {
  fake_->live = {fake_gpu("h200", 0)};
  Planner p = planner();
  const auto plan = p.compile(relu_graph("g"), fake_gpu("h200"), "", {});
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(p.load(*plan, fake_gpu("h200")).error().kind, ErrorKind::unavailable);
  EXPECT_EQ(p.load(*plan, cpu_device()).error().kind, ErrorKind::invalid_argument);
  Plan foreign = *plan;
  foreign.engine = "iree";
  EXPECT_EQ(p.load(foreign, fake_gpu("h200", 0)).error().kind, ErrorKind::unavailable);

  const auto loaded = p.load(*plan, fake_gpu("h200", 0));
  ASSERT_TRUE(loaded.ok());
  alignas(64) std::array<std::byte, 64> workspace{};
  EXPECT_TRUE(p.execute(*plan, **loaded, {}, workspace.data(), 32, nullptr).ok());
  EXPECT_FALSE(p.execute(*plan, **loaded, {}, workspace.data(), 31, nullptr).ok());
  EXPECT_FALSE(p.execute(*plan, **loaded, {}, workspace.data() + 1, 32, nullptr).ok());
  EXPECT_FALSE(p.execute(*plan, **loaded, {}, nullptr, 32, nullptr).ok());
}

TEST_F(PlannerTest, InfoTellsOfTheWorker) {
  Planner p = planner();
  const Json info = p.info();
  EXPECT_EQ(info.at("worker").at("libraries").at("where"), "worker");
  EXPECT_EQ(info.at("worker").at("pool").at("running"), 1);
  EXPECT_EQ(info.at("engines").at("cudnn").at("where"), "in process");

  Planner broken = planner("no cudnn");
  EXPECT_EQ(broken.info().at("worker").at("error").at("kind"), "unavailable");
  const auto verdict = broken.probe(relu_graph("g"), fake_gpu("h200"), "", {});
  ASSERT_FALSE(verdict.ok());
  EXPECT_EQ(verdict.error().kind, ErrorKind::unavailable);
}

// CUDA does not survive a fork; targets are judged by workers of the child's own.
TEST_F(PlannerTest, AForkedChildHasNoGpusAndSaysSo) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the thread sanitizer follows no threads that begin after a fork";
#endif
  fake_->live = {fake_gpu("h200", 0)};
  Planner p = planner();
  const Device gpu = p.find_device("cuda").value();
  const auto loaded = p.acquire(relu_graph("g"), gpu, "", {}, nullptr);
  ASSERT_TRUE(loaded.ok());
  ASSERT_TRUE(p.probe(relu_graph("g"), fake_gpu("h200"), "", {}).ok());
  alignas(64) std::array<std::byte, 64> workspace{};
  const auto execute = [&] {
    return p.execute((*loaded)->plan(), **loaded, {}, workspace.data(), 32, nullptr);
  };
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);
    const auto refused = [](const auto& outcome) {
      return !outcome.ok() && outcome.error().kind == ErrorKind::unavailable &&
             outcome.error().message.find("fork") != std::string::npos;
    };
    int step = 1;
    for (const bool right :
         {refused(execute()), refused(p.acquire(relu_graph("g"), gpu, "", {}, nullptr)),
          refused(p.probe(relu_graph("g"), gpu, "", {})), refused(p.load((*loaded)->plan(), gpu)),
          refused(p.find_device("cuda")), p.find_device("h200").value().ordinal == -1,
          p.probe(relu_graph("refused"), fake_gpu("h200"), "", {}).ok(),
          p.probe(relu_graph("g"), cpu_device(), "reference", {}).ok()}) {
      if (!right) ::_exit(step);
      ++step;
    }
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0) << "step " << (WIFEXITED(status) ? WEXITSTATUS(status) : -1);
  EXPECT_TRUE(execute().ok());
  EXPECT_TRUE(p.probe(relu_graph("undecided"), fake_gpu("h200"), "", {}).ok());
}

TEST_F(PlannerTest, ManyThreads) {
  Planner p = planner();
  std::vector<std::thread> threads;
  for (int t = 0; t < 16; ++t) {
    threads.emplace_back([&p, t] {
      for (int i = 0; i < 10; ++i) {
        const bool refuse = (t + i) % 3 == 0;
        const auto verdict =
            p.probe(relu_graph(refuse ? "refused" : "g"), fake_gpu("h200"), "", {});
        ASSERT_TRUE(verdict.ok()) << verdict.error().message;
        EXPECT_EQ(verdict->decision, refuse ? Decision::unsupported : Decision::supported);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace lawson::plan
