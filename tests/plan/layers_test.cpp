#include "plan/layers.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <thread>

#include "base/hash.h"
#include "plan/bundle.h"

namespace lawson::plan {
namespace {

namespace fs = std::filesystem;

class LayersTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("lawson-layers-" + std::to_string(::getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  static Plan plan(const std::string& key, const std::string& id,
                   const std::string& version = "9.19.0", const std::string& target = "h200") {
    Plan plan;
    plan.key = hash_hex(key);
    plan.plan_id = hash_hex(id);
    plan.engine = "cudnn";
    plan.engine_version = version;
    plan.target = target;
    plan.device_fingerprint = hash_hex(target);
    plan.graph_json = "{}";
    plan.bytes.assign(100, std::byte{1});
    return plan;
  }
  std::string write(const std::string& name, const std::vector<Plan>& plans) const {
    std::vector<const Plan*> pointers;
    for (const Plan& plan : plans) pointers.push_back(&plan);
    const std::string path = (folder_ / name).string();
    fs::create_directories(fs::path{path}.parent_path());
    EXPECT_TRUE(write_bundle(path, pointers).ok());
    return path;
  }
  Layers::Warn warn() {
    return [this](std::string_view text) {
      const std::lock_guard lock{mutex_};
      warnings_.emplace_back(text);
    };
  }
  // The id of the plan found for the key of that name, or "".
  static std::string found(Layers& layers, const std::string& key,
                           const Layers::Asker& asker = {}) {
    const auto plan = layers.plan(hash_hex(key), asker);
    return plan ? plan->plan_id : "";
  }

  fs::path folder_;
  std::mutex mutex_;
  std::vector<std::string> warnings_;
};

TEST_F(LayersTest, TheFirstBundleWins) {
  const std::string first = write("1", {plan("a", "a1"), plan("b", "b1")});
  const std::string second = write("2", {plan("b", "b2"), plan("c", "c2")});
  Layers layers{first + ":" + second, warn()};
  EXPECT_EQ(found(layers, "a"), hash_hex("a1"));
  EXPECT_EQ(found(layers, "b"), hash_hex("b1"));
  EXPECT_EQ(found(layers, "c"), hash_hex("c2"));
  EXPECT_EQ(found(layers, "d"), "");
  EXPECT_TRUE(warnings_.empty());
}

TEST_F(LayersTest, AFolderStandsForItsBundlesByName) {
  write("many/2.lawson", {plan("a", "a2"), plan("b", "b2")});
  write("many/1.lawson", {plan("a", "a1")});
  write("many/other.bundle", {plan("c", "c")});
  Layers layers{"::" + (folder_ / "many").string() + ":", warn()};
  EXPECT_EQ(found(layers, "a"), hash_hex("a1"));
  EXPECT_EQ(found(layers, "b"), hash_hex("b2"));
  EXPECT_EQ(found(layers, "c"), "");
  EXPECT_TRUE(warnings_.empty());
}

TEST_F(LayersTest, NothingIsOpenedBeforeItIsAskedFor) {
  const std::string path = (folder_ / "late").string();
  Layers layers{path, warn()};
  write("late", {plan("a", "a")});
  EXPECT_EQ(found(layers, "a"), hash_hex("a"));
  Layers none{"", warn()};
  EXPECT_EQ(found(none, "a"), "");
  EXPECT_TRUE(warnings_.empty());
}

TEST_F(LayersTest, WhatIsNoBundleIsToldOnceAndSkipped) {
  const std::string good = write("good", {plan("a", "a")});
  const std::string bad = (folder_ / "bad").string();
  std::ofstream{bad} << "LAWSONB1 of another time, long enough to be a header of today's format.";
  Layers layers{(folder_ / "none").string() + ":" + bad + ":" + good, warn()};
  for (int i = 0; i < 3; ++i) EXPECT_EQ(found(layers, "a"), hash_hex("a"));
  ASSERT_EQ(warnings_.size(), 2U);
  EXPECT_NE(warnings_[0].find("/none: cannot be opened"), std::string::npos) << warnings_[0];
  EXPECT_NE(warnings_[1].find("format 1"), std::string::npos) << warnings_[1];
}

TEST_F(LayersTest, ADamagedPlanIsToldOnceAndTheNextLayerAsked) {
  const std::string first = write("1", {plan("a", "a1"), plan("b", "b1")});
  const std::string second = write("2", {plan("a", "a2"), plan("b", "b2")});
  std::fstream file{first, std::ios::in | std::ios::out | std::ios::binary};
  const auto end = static_cast<std::streamoff>(fs::file_size(first));
  file.seekp(end - 1);  // of the plan that is last by key
  file.put('\0');
  file.close();
  Layers layers{first + ":" + second, warn()};
  const bool a_is_last = hash_hex("a") > hash_hex("b");
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(found(layers, "a"), hash_hex(a_is_last ? "a2" : "a1"));
    EXPECT_EQ(found(layers, "b"), hash_hex(a_is_last ? "b1" : "b2"));
  }
  ASSERT_EQ(warnings_.size(), 1U);
  EXPECT_NE(warnings_[0].find("checksum"), std::string::npos) << warnings_[0];
}

TEST_F(LayersTest, ABundleForAnotherBuildOrDeviceIsToldOnce) {
  const std::string fingerprint = hash_hex("h200");
  const Layers::Asker asker{"cudnn", "9.19.0", "h200", fingerprint};
  const std::string older = write("older", {plan("a", "a", "9.18.1")});
  const std::string elsewhere = write("elsewhere", {plan("a", "a", "9.19.0", "b200")});
  const std::string both = write("both", {plan("a", "a", "9.19.0", "b200"), plan("b", "b")});
  Layers layers{older + ":" + elsewhere + ":" + both, warn()};
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(found(layers, "c", asker), "");
    EXPECT_EQ(found(layers, "b", asker), hash_hex("b"));
  }
  ASSERT_EQ(warnings_.size(), 2U);
  EXPECT_NE(
      warnings_[0].find("older: its plans are for cudnn 9.18.1 on h200; here is cudnn 9.19.0"),
      std::string::npos)
      << warnings_[0];
  EXPECT_NE(warnings_[1].find("elsewhere: its plans are for cudnn 9.19.0 on b200"),
            std::string::npos)
      << warnings_[1];

  // Plans of the CPU engine are not looked for in bundles of cuDNN's.
  Layers again{older, warn()};
  EXPECT_EQ(found(again, "c", {"cpu", "0.1.0", "cpu", fingerprint}), "");
  EXPECT_EQ(found(again, "c"), "");
  EXPECT_EQ(warnings_.size(), 2U);
}

TEST_F(LayersTest, ManyThreadsComeFirst) {
  const std::string path = write("1", {plan("a", "a")});
  Layers layers{(folder_ / "none").string() + ":" + path, warn()};
  std::atomic<int> found_count{0};
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 16; ++i) {
      threads.emplace_back([&] { found_count += layers.plan(hash_hex("a")).has_value() ? 1 : 0; });
    }
  }
  EXPECT_EQ(found_count, 16);
  EXPECT_EQ(warnings_.size(), 1U);
}

}  // namespace
}  // namespace lawson::plan
