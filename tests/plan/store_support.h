// What the tests of the store share: a folder of one's own, plans that can be told apart, and what
// a process of its own saw.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "plan/store.h"

namespace lawson::plan {

// The `version`-th plan of a key: its bytes are all one value, so that a mixture shows.
inline Plan plan_of(const std::string& key, int version = 0, std::size_t bytes = 200) {
  Plan plan;
  plan.key = key;
  plan.plan_id = key + "/" + std::to_string(version);
  plan.engine = "cudnn";
  plan.engine_version = "9.19.0";
  plan.target = "h200";
  plan.device_fingerprint = "f";
  plan.plan_name = "eng9_k1=2";
  plan.graph_json = "{}";
  plan.bytes.assign(bytes, static_cast<std::byte>(version));
  return plan;
}

// Is it one of the key's plans, whole?
inline bool is_plan_of(const Plan& plan, const std::string& key) {
  return plan.key == key && plan.plan_id.starts_with(key + "/") && !plan.bytes.empty() &&
         static_cast<std::byte>(std::stoi(plan.plan_id.substr(key.size() + 1))) == plan.bytes[0] &&
         std::all_of(plan.bytes.begin(), plan.bytes.end(),
                     [&](std::byte value) { return value == plan.bytes[0]; });
}

inline Verdict verdict_of(const std::string& key, Decision decision = Decision::supported,
                          Strength strength = Strength::judged) {
  Verdict verdict;
  verdict.decision = decision;
  verdict.strength = strength;
  verdict.engine = "cudnn";
  verdict.engine_version = "9.19.0";
  verdict.key = key;
  verdict.target = "h200";
  return verdict;
}

class StoreTest : public testing::Test {
 protected:
  void SetUp() override {
    // Where there is memory for it: the tests of faults write thousands of files.
    const bool in_memory = ::access("/dev/shm", W_OK) == 0;
    std::string name = (in_memory ? "/dev/shm/" : testing::TempDir()) + "lawson-store-XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    root_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  std::filesystem::path folder() const { return root_ / "cache" / "store"; }

  // A process of its own, as far as warnings go.
  std::unique_ptr<Store> store(Store::Mode mode = Store::Mode::rw,
                               std::uint64_t budget = std::uint64_t{2} << 30) {
    warnings_.clear();
    return std::make_unique<Store>(
        Store::Config{mode, folder().string(), budget,
                      [this](std::string_view text) { warnings_.emplace_back(text); }});
  }

  std::vector<std::filesystem::path> files() const {
    std::vector<std::filesystem::path> list;
    std::error_code none;
    for (const auto& entry : std::filesystem::directory_iterator(folder(), none)) {
      list.push_back(entry.path());
    }
    std::sort(list.begin(), list.end());
    return list;
  }

  static std::string read(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  static void write(const std::filesystem::path& path, const std::string& text) {
    std::ofstream(path, std::ios::binary) << text;
  }

  // As if it was last used so long ago.
  static void age(const std::filesystem::path& path, std::int64_t seconds) {
    const timespec then{::time(nullptr) - seconds, 0};
    const timespec times[2]{then, then};
    ASSERT_EQ(::utimensat(AT_FDCWD, path.c_str(), times, AT_SYMLINK_NOFOLLOW), 0);
  }

  std::filesystem::path root_;
  std::vector<std::string> warnings_;
};

// The work in a process of its own, which ends with what it returns; -1: it was killed.
template <typename Work>
int in_child(const Work& work) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(work());
  int status = 0;
  if (child < 0 || ::waitpid(child, &status, 0) != child) return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

inline constexpr uid_t kNobody = 65534;

}  // namespace lawson::plan
