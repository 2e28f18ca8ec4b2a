// The store under a system that fails: its process killed at every system call, every call on files
// failing, a disk that is full or read-only, a folder that may not be written to.
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>

#include "store_support.h"
#include "traced_child.h"

namespace lawson::plan {
namespace {

namespace fs = std::filesystem;

constexpr int kSkip = 77;
constexpr const char* kNotPermitted = "this system does not let a process trace its child";

class StoreFaultsTest : public StoreTest {
 protected:
  std::vector<fs::path> litter() const {
    std::vector<fs::path> list;
    for (const fs::path& path : files()) {
      if (path.string().find(".tmp.") != std::string::npos) list.push_back(path);
    }
    return list;
  }

  // Whatever happened, there is an answer that is right or none, and the store goes on.
  void expect_usable(const std::string& what) {
    const auto fresh = store();
    if (const auto found = fresh->plan("k")) {
      EXPECT_TRUE(is_plan_of(*found, "k")) << what;
    }
    fresh->keep(plan_of("k", 100));
    const auto found = fresh->plan("k");
    ASSERT_TRUE(found.has_value()) << what;
    EXPECT_EQ(found->plan_id, "k/100") << what;
    EXPECT_TRUE(warnings_.empty()) << what << ": " << warnings_[0];
  }

  // A mount of its own for a child; kSkip where that is not permitted.
  int on_small_disk(const std::function<int()>& work) const {
    return in_child([&] {
      if (::unshare(CLONE_NEWNS) != 0 ||
          ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
          ::mount("tmpfs", root_.c_str(), "tmpfs", 0, "size=128k") != 0) {
        return kSkip;
      }
      return work();
    });
  }
};

// A write into a new folder, a first one and one in place of another.
TEST_F(StoreFaultsTest, KilledAtEverySystemCallOfAWrite) {
  for (const bool is_first : {true, false}) {
    const auto work = [&] {
      store()->keep(plan_of("k", 1));
      return 0;
    };
    int stops = 1;
    for (int stop = 0; stop < stops; ++stop) {
      fs::remove_all(root_ / "cache");
      if (!is_first) store()->keep(plan_of("k", 2));
      const auto end = run_traced(work, {.stop = stop});
      if (!end) GTEST_SKIP() << kNotPermitted;
      if (stop == 0) stops = run_traced(work, {})->stops - 1;  // the last one is before its end
      if (!end->killed) break;
      EXPECT_LE(litter().size(), 1U);
      const auto found = store()->plan("k");
      EXPECT_EQ(found && found->plan_id == "k/1", found && found->plan_id != "k/2");
      EXPECT_TRUE(is_first || found.has_value()) << stop;  // the old one or the new one
      for (const fs::path& path : litter()) age(path, 2 * 3600);
      expect_usable("killed at stop " + std::to_string(stop));
      EXPECT_TRUE(litter().empty());
    }
    EXPECT_GT(stops, 20);
  }
}

TEST_F(StoreFaultsTest, KilledAgainAndAgainLeavesNoLitterThatGrows) {
  const auto work = [&] {
    store()->keep(plan_of("k", 1));
    return 0;
  };
  const auto whole = run_traced(work, {});
  if (!whole) GTEST_SKIP() << kNotPermitted;
  for (int round = 0; round < 2; ++round) {
    for (int stop = 0; stop < whole->stops; ++stop) {
      static_cast<void>(run_traced(work, {.stop = stop}));
    }
    EXPECT_FALSE(litter().empty());
    for (const fs::path& path : litter()) age(path, 2 * 3600);
    store()->keep(plan_of("k", 2));
    EXPECT_EQ(files().size(), 1U);
  }
}

TEST_F(StoreFaultsTest, EveryCallFailsInEveryWay) {
  if (!can_fail_calls()) GTEST_SKIP() << "calls are made to fail on x86-64 only";
  // At most one warning of each kind, whatever is tried; 1 for a wrong answer.
  const auto work = [&] {
    const auto fresh = store();
    for (int i = 0; i < 2; ++i) {
      const auto found = fresh->plan("k");
      if (found && !is_plan_of(*found, "k")) return 1;
      fresh->keep(plan_of("k", 1));
      fresh->keep(verdict_of("v"));
      if (const auto verdict = fresh->verdict("v", Strength::judged)) {
        if (verdict->key != "v") return 1;
      }
    }
    return warnings_.size() <= 1 ? 0 : 2;
  };
  const auto whole = run_traced(work, {});
  if (!whole) GTEST_SKIP() << kNotPermitted;
  ASSERT_EQ(whole->exit_code, 0);
  ASSERT_GT(whole->file_calls, 40);
  for (const int error : {ENOSPC, EROFS, EACCES, EIO, EDQUOT, EINTR, ESTALE}) {
    for (int call = 0; call < whole->file_calls; ++call) {
      fs::remove_all(root_ / "cache");
      if (call % 2 == 0) store()->keep(plan_of("k", 3));
      const auto end = run_traced(work, {.call = call, .error = error});
      ASSERT_TRUE(end.has_value());
      EXPECT_EQ(end->exit_code, 0) << "error " << error << " of call " << call;
    }
    for (const fs::path& path : litter()) age(path, 2 * 3600);
    expect_usable("error " + std::to_string(error));
    EXPECT_TRUE(litter().empty());
  }
}

TEST_F(StoreFaultsTest, AFullDisk) {
  const int code = on_small_disk([&] {
    const auto fresh = store();
    for (int i = 0; i < 20; ++i) fresh->keep(plan_of("k" + std::to_string(i), i, 20000));
    int found = 0;
    for (int i = 0; i < 20; ++i) {
      const std::string key = "k" + std::to_string(i);
      if (const auto plan = fresh->plan(key)) {
        if (!is_plan_of(*plan, key)) return 1;
        ++found;
      }
    }
    if (found == 0 || found == 20) return 2;
    if (warnings_.size() != 1) return 3;
    if (warnings_[0].find("No space left") == std::string::npos) return 4;
    if (!litter().empty()) return 5;
    PruneRules everything;
    everything.max_bytes = 0;
    if (!fresh->prune(everything).ok()) return 6;
    fresh->keep(plan_of("after"));
    return fresh->plan("after").has_value() ? 0 : 7;
  });
  if (code == kSkip) GTEST_SKIP() << "mounting needs root";
  EXPECT_EQ(code, 0);
}

// The signal that comes with it would end the process.
TEST_F(StoreFaultsTest, ALimitOfFileSizes) {
  const int code = in_child([&] {
    const rlimit limit{256, RLIM_INFINITY};
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return 2;
    const auto limited = store();
    limited->keep(plan_of("k", 1000));
    if (limited->plan("k").has_value()) return 3;
    return warnings_.size() == 1 && warnings_[0].find("File too large") != std::string::npos ? 0
                                                                                             : 4;
  });
  EXPECT_EQ(code, 0);
  EXPECT_TRUE(litter().empty());
  expect_usable("after the limit");
}

TEST_F(StoreFaultsTest, AReadOnlyDisk) {
  const int code = on_small_disk([&] {
    store()->keep(plan_of("k", 1));
    if (::mount("none", root_.c_str(), nullptr, MS_REMOUNT | MS_RDONLY, nullptr) != 0) return kSkip;
    const auto fresh = store();
    for (int i = 0; i < 3; ++i) {
      fresh->keep(plan_of("k", 2));
      fresh->keep(verdict_of("v"));
      const auto found = fresh->plan("k");
      if (!found || found->plan_id != "k/1") return 1;
    }
    if (warnings_.size() != 1) return 2;
    return warnings_[0].find("Read-only") == std::string::npos ? 3 : 0;
  });
  if (code == kSkip) GTEST_SKIP() << "mounting needs root";
  EXPECT_EQ(code, 0);
}

TEST_F(StoreFaultsTest, AFolderThatMayNotBeWrittenTo) {
  store()->keep(plan_of("k", 1));
  const bool is_root = ::geteuid() == 0;
  if (is_root) {
    for (const fs::path& path : {root_, folder().parent_path(), folder(), files()[0]}) {
      ASSERT_EQ(::chown(path.c_str(), kNobody, kNobody), 0);
    }
  }
  ASSERT_EQ(::chmod(folder().c_str(), 0500), 0);
  const int code = in_child([&] {
    if (is_root && (::setgid(kNobody) != 0 || ::setuid(kNobody) != 0)) return kSkip;
    const auto fresh = store();
    for (int i = 0; i < 3; ++i) {
      fresh->keep(plan_of("k", 2));
      const auto found = fresh->plan("k");
      if (!found || found->plan_id != "k/1") return 1;
    }
    if (warnings_.size() != 1) return 2;
    return warnings_[0].find("Permission denied") == std::string::npos ? 3 : 0;
  });
  ASSERT_EQ(::chmod(folder().c_str(), 0700), 0);
  EXPECT_EQ(code, 0);
}

// 200 processes, each with finds, writes and now and then a clearing, of the same few keys.
TEST_F(StoreFaultsTest, ManyProcessesOnOneFolder) {
  constexpr int kProcesses = 200;
  constexpr int kSteps = 40;
  constexpr int kKeys = 8;
  const auto work = [&](int process) {
    unsigned state = static_cast<unsigned>(process) * 2654435761U + 1;
    const auto next = [&](unsigned limit) {
      state = state * 1664525U + 1013904223U;
      return (state >> 16) % limit;
    };
    const auto own = store(Store::Mode::rw, 40000);
    for (int step = 0; step < kSteps; ++step) {
      const std::string key = "k" + std::to_string(next(kKeys));
      const unsigned choice = next(20);
      if (choice < 10) {
        const auto found = own->plan(key);
        if (found && !is_plan_of(*found, key)) return 1;
      } else if (choice < 13) {
        const auto found = own->verdict(key, Strength::judged);
        if (found && found->key != key) return 1;
      } else if (choice < 17) {
        own->keep(plan_of(key, static_cast<int>(next(200)), 100 + next(4000)));
      } else if (choice < 19) {
        own->keep(verdict_of(key, Decision::supported,
                             next(2) == 0 ? Strength::judged : Strength::built));
      } else if (next(4) == 0) {
        PruneRules everything;
        everything.max_bytes = 0;
        if (const auto pruned = own->prune(everything); !pruned.ok() || pruned->failure) return 2;
      }
    }
    return warnings_.empty() ? 0 : 3;
  };
  std::vector<pid_t> children;
  for (int i = 0; i < kProcesses; ++i) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) ::_exit(work(i));
    children.push_back(child);
  }
  std::vector<int> codes(4);
  for (const pid_t child : children) {
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status));
    ++codes.at(static_cast<std::size_t>(WEXITSTATUS(status)));
  }
  EXPECT_EQ(codes[0], kProcesses) << codes[1] << " wrong answers, " << codes[2]
                                  << " failed clearings, " << codes[3] << " with warnings";
  EXPECT_TRUE(litter().empty());
  expect_usable("after all");
}

}  // namespace
}  // namespace lawson::plan
