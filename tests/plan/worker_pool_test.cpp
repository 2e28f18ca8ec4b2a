// The pool against a worker that crashes, hangs and lies.
#include "plan/worker_pool.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <set>
#include <thread>

#include "diag/counters.h"
#include "plan/worker_process.h"

namespace lawson::plan {
namespace {

using namespace std::chrono_literals;

constexpr auto kPatience = 30s;  // for requests that are expected to be answered

WorkerPoolConfig config(const std::string& mode, int max_workers = 2) {
  WorkerPoolConfig result;
  result.worker_path = FAKE_WORKER;
  result.arguments = {mode};
  result.max_workers = max_workers;
  result.hello_timeout = 30s;
  return result;
}

Result<Json> order(WorkerPool& pool, const std::string& what,
                   std::chrono::milliseconds timeout = kPatience) {
  return pool.request({{"request", what}}, timeout);
}

int worker_pid(WorkerPool& pool) {
  return order(pool, "pid")->at("pid").get<int>();
}

void expect_works(WorkerPool& pool) {
  const auto reply = pool.request({{"request", "echo"}, {"value", 42}}, kPatience);
  ASSERT_TRUE(reply.ok()) << reply.error().message;
  EXPECT_EQ(reply->at("value"), 42);
}

// Gone, or a zombie that nobody has collected yet. Its files close with its last thread, and a
// sanitizer's own thread may outlive the first one.
bool is_gone(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string stat;
  if (!std::getline(file, stat)) return true;
  const auto name_end = stat.rfind(')');
  if (name_end == std::string::npos) return true;
  if (stat.at(name_end + 2) != 'Z') return false;
  std::error_code ended;
  const std::filesystem::directory_iterator threads("/proc/" + std::to_string(pid) + "/task",
                                                    ended);
  return ended || std::distance(begin(threads), end(threads)) <= 1;
}

bool ends_soon(pid_t pid) {
  for (int i = 0; i < 500; ++i) {
    if (is_gone(pid)) return true;
    std::this_thread::sleep_for(10ms);
  }
  return false;
}

std::size_t open_files() {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    ++count;
  }
  return count;
}

struct Misdeed {
  const char* order;
  const char* message;  // part of the error
};

class Misdeeds : public testing::TestWithParam<Misdeed> {};

TEST_P(Misdeeds, CostOneRequest) {
  WorkerPool pool(config("obey"));
  expect_works(pool);
  const auto reply = order(pool, GetParam().order);
  ASSERT_FALSE(reply.ok());
  EXPECT_EQ(reply.error().kind, ErrorKind::internal);
  EXPECT_NE(reply.error().message.find(GetParam().message), std::string::npos)
      << reply.error().message;
  expect_works(pool);
  EXPECT_EQ(pool.state().at("lost"), 1);
  EXPECT_EQ(pool.state().at("started"), 2);
  EXPECT_EQ(pool.state().at("running"), 1);
}

INSTANTIATE_TEST_SUITE_P(All, Misdeeds,
                         testing::Values(Misdeed{"segfault", "killed by signal 11"},
                                         Misdeed{"segfault", "about to touch what is not mine"},
                                         Misdeed{"abort", "killed by signal 6"},
                                         Misdeed{"exit", "exited with status 3"},
                                         Misdeed{"half", "exited with status 0"},
                                         Misdeed{"close", "closed its stream without ending"},
                                         Misdeed{"garbage", "these are not frames"},
                                         Misdeed{"not cbor", "not CBOR"},
                                         Misdeed{"deep", "nested deeper"},
                                         Misdeed{"not an object", "does not belong to the request"},
                                         Misdeed{"wrong id", "does not belong to the request"}),
                         [](const auto& instance) {
                           std::string name = instance.param.order + std::to_string(instance.index);
                           for (char& c : name) c = c == ' ' ? '_' : c;
                           return name;
                         });

TEST(Pool, AnAnswerOfTheWorkerIsNoMisdeed) {
  WorkerPool pool(config("obey"));
  const int pid = worker_pid(pool);
  const auto reply = order(pool, "error");
  ASSERT_FALSE(reply.ok());
  EXPECT_EQ(reply.error().kind, ErrorKind::unsupported);
  ASSERT_EQ(reply.error().reasons.size(), 1U);
  EXPECT_EQ(reply.error().reasons[0].field, "head_dim");
  EXPECT_EQ(worker_pid(pool), pid);
}

TEST(Pool, AHangingWorkerIsStopped) {
  WorkerPool pool(config("obey"));
  const int pid = worker_pid(pool);
  const auto begin = Clock::now();
  const auto reply = order(pool, "hang", 200ms);
  ASSERT_FALSE(reply.ok());
  EXPECT_LT(Clock::now() - begin, 10s);
  EXPECT_EQ(reply.error().kind, ErrorKind::internal);
  EXPECT_NE(reply.error().message.find("within 200 ms"), std::string::npos)
      << reply.error().message;
  EXPECT_TRUE(is_gone(pid));
  expect_works(pool);
}

TEST(Pool, NoiseBeyondTheReplyDoesNotReachTheNextRequest) {
  WorkerPool pool(config("obey"));
  static_cast<void>(order(pool, "two replies"));
  for (int i = 0; i < 3; ++i) expect_works(pool);
}

TEST(Pool, PrintsOfLibrariesHarmNobody) {
  WorkerPool pool(config("obey"));
  const int pid = worker_pid(pool);
  ASSERT_TRUE(order(pool, "print").ok());
  ASSERT_TRUE(order(pool, "chatter").ok());  // a megabyte, more than a pipe holds
  EXPECT_EQ(worker_pid(pool), pid);
  const auto reply = order(pool, "exit");
  ASSERT_FALSE(reply.ok());
  EXPECT_NE(reply.error().message.find("the last line"), std::string::npos);
  EXPECT_LT(reply.error().message.size(), 6000U);
}

TEST(Pool, LargeRequestsAndReplies) {
  WorkerPool pool(config("obey"));
  std::string text;
  text.resize(20 << 20, 'x');
  const auto reply = pool.request({{"request", "echo"}, {"value", text}}, kPatience);
  ASSERT_TRUE(reply.ok()) << reply.error().message;
  EXPECT_EQ(reply->at("value"), text);
}

TEST(Pool, AWorkerThatGrewIsReplaced) {
  WorkerPool pool(config("obey"));
  const int pid = worker_pid(pool);
  ASSERT_TRUE(order(pool, "fat").ok());
  EXPECT_NE(worker_pid(pool), pid);
  EXPECT_TRUE(is_gone(pid));
}

TEST(Pool, AWorkerKilledWhileIdleIsReplacedUnnoticed) {
  WorkerPool pool(config("obey"));
  const int pid = worker_pid(pool);
  ::kill(pid, SIGKILL);
  ASSERT_TRUE(ends_soon(pid));
  expect_works(pool);
}

TEST(Pool, AWorkerKilledAtWorkIsAnError) {
  WorkerPool pool(config("obey"));
  const int pid = worker_pid(pool);
  std::thread killer([pid] {
    std::this_thread::sleep_for(100ms);
    ::kill(pid, SIGKILL);
  });
  const auto reply = order(pool, "hang");
  killer.join();
  ASSERT_FALSE(reply.ok());
  EXPECT_NE(reply.error().message.find("killed by signal 9"), std::string::npos)
      << reply.error().message;
  expect_works(pool);
}

TEST(Pool, WorksInParallelUpToItsSize) {
  WorkerPool pool(config("obey", 4));
  std::mutex mutex;
  std::set<int> pids;
  const auto begin = Clock::now();
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      const auto reply = pool.request({{"request", "sleep"}, {"ms", 300}}, kPatience);
      ASSERT_TRUE(reply.ok()) << reply.error().message;
      const std::lock_guard lock{mutex};
      pids.insert(reply->at("pid").get<int>());
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(pids.size(), 4U);
  EXPECT_EQ(pool.state().at("idle"), 4);
  EXPECT_GE(Clock::now() - begin, 600ms);
}

TEST(Pool, ManyThreadsAndManyMisdeeds) {
  {
    WorkerPool pool(config("obey", 4));
    std::atomic<int> answered{0};
    std::atomic<int> failed{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < 64; ++t) {
      threads.emplace_back([&pool, &answered, &failed, t] {
        for (int i = 0; i < 8; ++i) {
          const int value = t * 100 + i;
          // One of 32 requests kills its worker.
          const bool misdeed = (t + i * 64) % 32 == 5;
          const auto reply = pool.request(
              {{"request", misdeed ? "segfault" : "echo"}, {"value", value}}, kPatience);
          EXPECT_EQ(reply.ok(), !misdeed) << (reply.ok() ? "" : reply.error().message);
          if (reply.ok()) {
            EXPECT_EQ(reply->at("value"), value);
            ++answered;
          } else {
            ++failed;
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(answered + failed, 64 * 8);
    EXPECT_EQ(failed, 16);
    EXPECT_EQ(pool.state().at("lost"), 16);
  }
  // No zombies and nothing left running.
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1);
  EXPECT_EQ(errno, ECHILD);
}

TEST(Pool, LeavesNoFilesOpen) {
  const std::size_t before = open_files();
  {
    WorkerPool pool(config("obey"));
    for (int i = 0; i < 3; ++i) {
      expect_works(pool);
      EXPECT_FALSE(order(pool, "exit").ok());
    }
  }
  EXPECT_EQ(open_files(), before);
}

struct BadStart {
  const char* mode;
  ErrorKind kind;
  const char* message;
};

class BadStarts : public testing::TestWithParam<BadStart> {};

TEST_P(BadStarts, AreErrorsAndNoStorm) {
  WorkerPoolConfig bad = config(GetParam().mode);
  bad.hello_timeout = 3s;
  bad.failure_memory = 60s;
  WorkerPool pool(bad);
  for (int i = 0; i < 5; ++i) {
    const auto reply = order(pool, "echo");
    ASSERT_FALSE(reply.ok());
    EXPECT_EQ(reply.error().kind, GetParam().kind) << reply.error().message;
    EXPECT_NE(reply.error().message.find(GetParam().message), std::string::npos)
        << reply.error().message;
  }
  EXPECT_EQ(pool.state().at("started"), 1);
  EXPECT_EQ(pool.state().at("running"), 0);
}

INSTANTIATE_TEST_SUITE_P(
    All, BadStarts,
    testing::Values(BadStart{"no cudnn", ErrorKind::unavailable, "libcudnn.so.9 is not here"},
                    BadStart{"exit", ErrorKind::unavailable, "libfoo.so"},
                    BadStart{"crash", ErrorKind::internal, "killed by signal 6"},
                    BadStart{"silent", ErrorKind::internal, "did not finish starting"},
                    BadStart{"garbage", ErrorKind::internal, "these are not frames"},
                    BadStart{"stranger", ErrorKind::unavailable, "did not say hello"},
                    BadStart{"other protocol", ErrorKind::unavailable, "different installs"}),
    [](const auto& instance) {
      std::string name = instance.param.mode;
      for (char& c : name) c = c == ' ' ? '_' : c;
      return name;
    });

TEST(Pool, AFailureToStartIsForgottenAfterAWhile) {
  WorkerPoolConfig bad = config("no cudnn");
  bad.failure_memory = 0ms;
  WorkerPool pool(bad);
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(order(pool, "echo").ok());
  EXPECT_EQ(pool.state().at("started"), 3);
}

TEST(Pool, AllWaitingCallersLearnOfAFailure) {
  WorkerPool pool(config("no cudnn", 1));
  std::vector<std::thread> threads;
  std::atomic<int> unavailable{0};
  for (int i = 0; i < 16; ++i) {
    threads.emplace_back([&] {
      const auto reply = order(pool, "echo");
      if (!reply.ok() && reply.error().kind == ErrorKind::unavailable) ++unavailable;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(unavailable, 16);
  EXPECT_EQ(pool.state().at("started"), 1);
}

TEST(Pool, AMissingProgramIsUnavailable) {
  WorkerPoolConfig bad = config("obey");
  bad.worker_path = "/nonexistent/lawson-worker";
  WorkerPool pool(bad);
  const auto reply = order(pool, "echo");
  ASSERT_FALSE(reply.ok());
  EXPECT_EQ(reply.error().kind, ErrorKind::unavailable);
  EXPECT_NE(reply.error().message.find("/nonexistent/lawson-worker"), std::string::npos);
}

TEST(Pool, TellsWhatAWorkerLoaded) {
  WorkerPool pool(config("obey"));
  const auto info = pool.worker_info();
  ASSERT_TRUE(info.ok());
  EXPECT_EQ(info->at("pid"), worker_pid(pool));
  EXPECT_EQ(pool.worker_info()->at("pid"), info->at("pid"));
}

TEST(Pool, WorkersOutliveTheThreadThatStartedThem) {
  WorkerPool pool(config("obey"));
  int pid = 0;
  std::thread([&] { pid = worker_pid(pool); }).join();
  std::this_thread::sleep_for(50ms);
  EXPECT_EQ(worker_pid(pool), pid);
}

// Forks, so that it runs what it is given in a process that then ends without clean-up.
template <typename F>
std::vector<int> in_child(F&& body) {
  int ends[2];
  EXPECT_EQ(::pipe(ends), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(ends[0]);
    const std::vector<int> result = body();
    const auto size = result.size() * sizeof(int);
    const bool written = ::write(ends[1], result.data(), size) == static_cast<ssize_t>(size);
    ::kill(::getpid(), written ? SIGKILL : SIGABRT);
  }
  ::close(ends[1]);
  std::vector<int> result(16);
  const ssize_t got = ::read(ends[0], result.data(), result.size() * sizeof(int));
  ::close(ends[0]);
  result.resize(got > 0 ? static_cast<std::size_t>(got) / sizeof(int) : 0);
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  return result;
}

TEST(Pool, WorkersEndWhenTheHostIsKilled) {
  const std::vector<int> pids = in_child([] {
    WorkerPool pool(config("obey"));
    const int idle = worker_pid(pool);
    return std::vector<int>{idle};
  });
  ASSERT_EQ(pids.size(), 1U);
  EXPECT_TRUE(ends_soon(pids[0]));
}

TEST(Pool, ABusyWorkerEndsWhenTheHostIsKilled) {
  const std::vector<int> pids = in_child([] {
    static WorkerPool pool(config("obey"));
    const int busy = worker_pid(pool);
    std::thread([] { static_cast<void>(order(pool, "hang")); }).detach();
    std::this_thread::sleep_for(200ms);
    return std::vector<int>{busy};
  });
  ASSERT_EQ(pids.size(), 1U);
  EXPECT_TRUE(ends_soon(pids[0]));
}

TEST(Pool, AForkedChildHasWorkersOfItsOwn) {
  WorkerPool pool(config("obey"));
  const int ours = worker_pid(pool);
  const std::vector<int> pids = in_child([&] { return std::vector<int>{worker_pid(pool)}; });
  ASSERT_EQ(pids.size(), 1U);
  EXPECT_NE(pids[0], ours);
  EXPECT_EQ(worker_pid(pool), ours);
}

TEST(WorkerPool, WhatAWorkerDidIsCountedHere) {
  WorkerPool pool{config("obey")};
  const auto away = [] {
    diag::Counts sum;
    for (const diag::ThreadCounts& thread : diag::counts(diag::Since::start)) {
      for (const diag::Row& row : thread.rows) {
        if (row.engine != "away") continue;
        EXPECT_EQ(thread.thread, diag::this_thread());
        sum.add(row.counts);
      }
    }
    return sum;
  };
  const std::uint64_t before = away().of(diag::Event::create_graph);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(order(pool, "happen").ok());
  EXPECT_EQ(away().of(diag::Event::create_graph), before + 3);
  EXPECT_EQ(away().of(diag::Stage::validate).count, before + 3);
  ASSERT_TRUE(order(pool, "happen oddly").ok());
  EXPECT_EQ(away().of(diag::Event::create_graph), before + 3);
  expect_works(pool);
}

}  // namespace
}  // namespace lawson::plan
