// A forked child: plans of the CPU engine work there, whatever the parent's threads were doing.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "small_attention.h"

#if defined(__SANITIZE_THREAD__)
#define LAWSON_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define LAWSON_TSAN 1
#endif
#endif

namespace {

pid_t begin_child(const std::function<bool()>& body) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  ::alarm(60);
  bool right = false;
  try {
    right = body();
  } catch (...) {
    ::_exit(98);
  }
  ::_exit(right ? 0 : 1);
}

// Its exit status; 99 for one that did not end within a minute.
int status_of(pid_t child) {
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 99;
}

int in_child(const std::function<bool()>& body) {
  return status_of(begin_child(body));
}

class Fork : public testing::Test {
 protected:
  void SetUp() override {
#ifdef LAWSON_TSAN
    GTEST_SKIP() << "the thread sanitizer follows no threads that begin after a fork";
#endif
  }
};

TEST_F(Fork, AChildComputesWithTheParentsPlansAndWithNewOnes) {
  small::Attention attention(2001);
  attention.run();
  const std::vector<float> expected = attention.output();
  EXPECT_EQ(in_child([&] {
              attention.run();
              if (attention.output() != expected) return false;
              small::Attention fresh(2001);
              fresh.run();
              small::Attention longer(2002);
              longer.run();
              return fresh.output() == expected &&
                     lawson::select(longer.config(), lawson::Device::find("cpu")).supported();
            }),
            0);
  attention.run();
  EXPECT_EQ(attention.output(), expected);
}

TEST_F(Fork, NoLockStaysWithAThreadThatIsNotThere) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP()
      << "the address sanitizer's own allocator keeps a lock of a thread that is not there";
#endif
  std::atomic<bool> over{false};
  std::vector<std::jthread> busy;
  for (int t = 0; t < 4; ++t) {
    busy.emplace_back([&, t] {
      for (int i = 0; !over; ++i) {
        small::Attention attention(1 + (i + t) % 97);
        attention.run();
        static_cast<void>(
            lawson::select(attention.config(), lawson::Device::find("cpu")).supported());
      }
    });
  }
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(in_child([&] {
                small::Attention attention(3 + i);
                attention.run();
                try {
                  lawson::Device::find("no such device");
                  return false;
                } catch (const lawson::Error&) {
                  return true;
                }
              }),
              0);
  }
  over = true;
}

// What is made at its first use is whole in the child, or not begun. In a process of its own, as
// ctest runs it: in one with other tests all of it has been used.
TEST_F(Fork, WhileOtherThreadsUseItForTheFirstTime) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP()
      << "the address sanitizer's own allocator keeps a lock of a thread that is not there";
#endif
  constexpr int kThreads = 4;
  std::atomic<int> ready{0};
  const auto use = [] {
    small::Attention attention(5);
    attention.run();
    return true;
  };
  std::vector<std::jthread> busy;
  for (int t = 0; t < kThreads; ++t) {
    busy.emplace_back([&] {
      ++ready;
      while (ready < kThreads) {
      }
      use();
    });
  }
  while (ready < kThreads) {
  }
  std::vector<pid_t> children;
  for (int i = 0; i < 16; ++i) children.push_back(begin_child(use));
  for (const pid_t child : children) EXPECT_EQ(status_of(child), 0);
}

TEST_F(Fork, AChildOfAChildToo) {
  EXPECT_EQ(in_child([] {
              small::Attention attention(2003);
              attention.run();
              return in_child([&] {
                       attention.run();
                       return true;
                     }) == 0;
            }),
            0);
}

}  // namespace
