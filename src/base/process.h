// This process, and those that it was forked from.
#pragma once

namespace lawson {

// 0 in a process that was started; one more in each forked child than in its parent. Cheap.
int fork_count() noexcept;

// While one exists, no other thread of this process forks: it waits in fork(). For what a child
// could not go on with when the thread that does it is not there. May be nested. No lock that an
// `at_fork` handler takes may be held when the first one of a thread begins.
class NoFork {
 public:
  NoFork() noexcept;
  NoFork(const NoFork&) = delete;
  NoFork& operator=(const NoFork&) = delete;
  ~NoFork();
};

// What fork() calls: `before` in the thread that forks, when no NoFork exists; then `parent`, and
// `child` in the child. Each may be null. In the place of pthread_atfork, whose handlers have the
// order in which libraries came to call it.
struct ForkHandlers {
  void (*before)();
  void (*parent)();
  void (*child)();
};

// Returns whether there was room. For initialisers of static objects.
bool at_fork(const ForkHandlers& handlers) noexcept;

}  // namespace lawson
