// Tests that fork.
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

// ThreadSanitizer ends a process that starts threads after a fork.
#if defined(__SANITIZE_THREAD__)
#define LAWSON_NEEDS_FORK() GTEST_SKIP()
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define LAWSON_NEEDS_FORK() GTEST_SKIP()
#endif
#endif
#ifndef LAWSON_NEEDS_FORK
#define LAWSON_NEEDS_FORK() (void)0
#endif

namespace lawson::cpu {

// Runs `body` in a forked child; its result is the exit code.
inline int in_child(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace lawson::cpu
