// The real worker and the real cuDNN, for GPUs that are not here.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <future>
#include <sstream>
#include <string>
#include <thread>

#include "engine/registry.h"
#include "ir/json.h"
#include "plan/bundle.h"
#include "plan/planner.h"

namespace lawson::plan {
namespace {

using namespace std::chrono_literals;

constexpr const char* kSeed = R"({
  "lawson": 1, "kind": "graph", "name": "seed",
  "inputs": [{"name": "x", "dtype": "i8", "shape": [2, 16, 16]},
             {"name": "y", "dtype": "bf16", "shape": [2, 16, 16]},
             {"name": "z", "dtype": "f32", "shape": [2, 16, 16]}],
  "ops": [{"op": "convert", "in": ["x"], "out": "x16", "dtype": "bf16"},
          {"op": "matmul", "in": ["x16", "y"], "out": "xy", "dtype": "bf16"},
          {"op": "convert", "in": ["xy"], "out": "xy32", "dtype": "f32"},
          {"op": "add", "in": ["xy32", "z"], "out": "sum"}],
  "outputs": ["sum"]})";

ir::Graph seed_graph() {
  return ir::graph_from_json(Json::parse(kSeed), "seed").value();
}

PlannerConfig config() {
  PlannerConfig result;
  result.engines = engines();
  result.worker_path = LAWSON_LIBEXEC "/lawson-worker";
  result.nodriver_path = LAWSON_LIBEXEC "/liblawson-nodriver.so";
  result.max_workers = 2;
  return result;
}

// One planner for all tests: its workers stay warm.
Planner& planner() {
  static Planner instance{config()};
  return instance;
}

// A target even on a machine that has such a GPU.
Device target(const std::string& name) {
  const auto devices = planner().devices();
  for (const Device& device : *devices) {
    if (device.name == name && !device.present()) return device;
  }
  ADD_FAILURE() << "no target " << name;
  return {};
}

std::string mapped_files() {
  std::ifstream maps("/proc/self/maps");
  return {std::istreambuf_iterator<char>(maps), {}};
}

std::vector<pid_t> children() {
  std::vector<pid_t> found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    std::ifstream file(entry.path() / "stat");
    std::string stat;
    if (!std::getline(file, stat)) continue;
    char state = 0;
    int parent = 0;
    std::istringstream(stat.substr(stat.rfind(')') + 1)) >> state >> parent;
    if (parent == ::getpid() && state != 'Z') found.push_back(std::stoi(name));
  }
  return found;
}

TEST(Worker, TheSeedGraphFusesOnH200) {
  const auto verdict = planner().probe(seed_graph(), target("h200"), "", {});
  ASSERT_TRUE(verdict.ok()) << verdict.error().message;
  EXPECT_EQ(verdict->decision, Decision::supported)
      << (verdict->reasons.empty() ? "" : verdict->reasons[0].message);
  EXPECT_NE(verdict->evidence, Evidence::live);
  EXPECT_EQ(verdict->engine, "cudnn");
  EXPECT_FALSE(verdict->engine_version.empty());
}

TEST(Worker, AndNotOnV100) {
  const auto verdict = planner().probe(seed_graph(), target("v100"), "", {});
  ASSERT_TRUE(verdict.ok()) << verdict.error().message;
  EXPECT_EQ(verdict->decision, Decision::unsupported);
  ASSERT_FALSE(verdict->reasons.empty());
  EXPECT_FALSE(verdict->reasons[0].message.empty());
}

TEST(Worker, ManyTargetsInParallelWithOneAnswerEach) {
  std::vector<std::future<Result<Verdict>>> requests;
  const std::array<const char*, 4> names{"a100", "l40s", "h200", "b200"};
  for (int round = 0; round < 4; ++round) {
    for (const char* name : names) {
      requests.push_back(std::async(std::launch::async, [device = target(name)] {
        return planner().probe(seed_graph(), device, "", {});
      }));
    }
  }
  std::vector<Verdict> verdicts;
  for (auto& request : requests) {
    auto verdict = request.get();
    ASSERT_TRUE(verdict.ok()) << verdict.error().message;
    verdicts.push_back(std::move(*verdict));
  }
  for (std::size_t i = 0; i < verdicts.size(); ++i) {
    EXPECT_EQ(verdicts[i].target, names[i % names.size()]);
    EXPECT_EQ(verdicts[i].decision, Decision::supported);
    EXPECT_EQ(verdicts[i].key, verdicts[i % names.size()].key);
    EXPECT_EQ(verdicts[i].plan_names, verdicts[i % names.size()].plan_names);
  }
}

TEST(Worker, CompilesAPlanThatABundleBringsBack) {
  const auto plan = planner().compile(seed_graph(), target("h200"), "", {});
  ASSERT_TRUE(plan.ok()) << plan.error().message;
  EXPECT_FALSE(plan->bytes.empty());
  Options built;
  built.strength = Strength::built;
  const auto verdict = planner().probe(seed_graph(), target("h200"), "", built);
  ASSERT_TRUE(verdict.ok()) << verdict.error().message;
  EXPECT_EQ(verdict->strength, Strength::built);
  EXPECT_EQ(verdict->plan_id, plan->plan_id);
  EXPECT_EQ(verdict->key, plan->key);

  const std::string path = testing::TempDir() + "worker_test.bundle";
  const std::array<const Plan*, 1> plans{&*plan};
  ASSERT_TRUE(write_bundle(path, plans).ok());
  const auto bundle = Bundle::open(path);
  ASSERT_TRUE(bundle.ok()) << bundle.error().message;
  EXPECT_EQ(bundle->plan(0)->bytes, plan->bytes);
  ::unlink(path.c_str());
}

TEST(Worker, TheHostNeverMapsTheNoDriverLibrary) {
  ASSERT_TRUE(planner().probe(seed_graph(), target("a100"), "", {}).ok());
  const std::string maps = mapped_files();
  EXPECT_EQ(maps.find("nodriver"), std::string::npos);
  EXPECT_EQ(maps.find("lawson-no"), std::string::npos);
}

TEST(Worker, AWorkerKilledAtWorkCostsThatRequest) {
  const std::vector<pid_t> others = children();
  PlannerConfig alone = config();
  alone.max_workers = 1;
  Planner victim{alone};
  const Device h200 = target("h200");
  bool killed_at_work = false;
  for (int attempt = 0; attempt < 10 && !killed_at_work; ++attempt) {
    ASSERT_TRUE(victim.probe(seed_graph(), h200, "", {}).ok());
    pid_t pid = 0;
    for (const pid_t child : children()) {
      if (std::find(others.begin(), others.end(), child) == others.end()) pid = child;
    }
    ASSERT_GT(pid, 0);
    auto request =
        std::async(std::launch::async, [&] { return victim.compile(seed_graph(), h200, "", {}); });
    std::this_thread::sleep_for(10ms);
    ::kill(pid, SIGKILL);
    const auto plan = request.get();
    if (plan.ok()) continue;  // it was quicker than we
    killed_at_work = true;
    EXPECT_EQ(plan.error().kind, ErrorKind::internal);
    EXPECT_NE(plan.error().message.find("killed by signal 9"), std::string::npos)
        << plan.error().message;
  }
  EXPECT_TRUE(killed_at_work);
  const auto next = victim.probe(seed_graph(), h200, "", {});
  ASSERT_TRUE(next.ok()) << next.error().message;
  EXPECT_EQ(next->decision, Decision::supported);
}

TEST(Worker, StaysSmall) {
  PlannerConfig alone = config();
  alone.max_workers = 1;
  const std::vector<pid_t> others = children();
  Planner single{alone};
  ASSERT_TRUE(single.probe(seed_graph(), target("h200"), "", {}).ok());
  for (const pid_t child : children()) {
    if (std::find(others.begin(), others.end(), child) != others.end()) continue;
    std::ifstream statm("/proc/" + std::to_string(child) + "/statm");
    std::size_t total = 0;
    std::size_t resident = 0;
    statm >> total >> resident;
    const std::size_t megabytes =
        resident * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)) >> 20;
    RecordProperty("worker_resident_mb", static_cast<int>(megabytes));
    EXPECT_LE(megabytes, 1536U);
  }
}

TEST(Worker, MissingPartsAreTheEnvironments) {
  PlannerConfig without = config();
  without.nodriver_path = "/nonexistent/liblawson-nodriver.so";
  const auto no_driver = Planner{without}.probe(seed_graph(), target("h200"), "", {});
  ASSERT_FALSE(no_driver.ok());
  EXPECT_EQ(no_driver.error().kind, ErrorKind::unavailable) << no_driver.error().message;

  PlannerConfig elsewhere = config();
  elsewhere.cudnn_path = "/nonexistent/libcudnn.so.9";
  const auto no_cudnn = Planner{elsewhere}.probe(seed_graph(), target("h200"), "", {});
  ASSERT_FALSE(no_cudnn.ok());
  EXPECT_EQ(no_cudnn.error().kind, ErrorKind::unavailable) << no_cudnn.error().message;
  EXPECT_NE(no_cudnn.error().message.find("/nonexistent"), std::string::npos);
}

TEST(Worker, InfoNamesTheLibraries) {
  const Json info = planner().info();
  ASSERT_FALSE(info.at("worker").contains("error")) << info.at("worker");
  EXPECT_NE(info.at("worker").at("libraries").dump().find("libcudnn"), std::string::npos);
}

}  // namespace
}  // namespace lawson::plan
