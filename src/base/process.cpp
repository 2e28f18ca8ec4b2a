#include "base/process.h"

#include <pthread.h>

#include <array>
#include <atomic>
#include <cstddef>

namespace lawson {
namespace {

std::atomic<int> forks{0};

// Read by every NoFork, written by a fork. glibc's lets readers pass a writer that waits, so that
// who holds it may wait for another thread's.
pthread_rwlock_t gate = PTHREAD_RWLOCK_INITIALIZER;
thread_local int held = 0;  // NoFork of this thread, and its fork: neither waits for these

constexpr std::size_t kMost = 8;
std::array<ForkHandlers, kMost> handlers{};
std::atomic<std::size_t> reserved{0};

void call_all(void (*ForkHandlers::*which)()) {
  for (const ForkHandlers& each : handlers) {
    if (each.*which != nullptr) (each.*which)();
  }
}

// Before any thread could fork: when the library is loaded.
[[maybe_unused]] const int kRegistered = ::pthread_atfork(
    [] {
      if (held++ == 0) ::pthread_rwlock_wrlock(&gate);
      call_all(&ForkHandlers::before);
    },
    [] {
      call_all(&ForkHandlers::parent);
      if (--held == 0) ::pthread_rwlock_unlock(&gate);
    },
    [] {
      forks.fetch_add(1, std::memory_order_relaxed);
      call_all(&ForkHandlers::child);
      gate = PTHREAD_RWLOCK_INITIALIZER;  // other threads that hold it are not here
      if (--held > 0) ::pthread_rwlock_rdlock(&gate);
    });

}  // namespace

int fork_count() noexcept {
  return forks.load(std::memory_order_relaxed);
}

NoFork::NoFork() noexcept {
  if (held++ == 0) ::pthread_rwlock_rdlock(&gate);
}

NoFork::~NoFork() {
  if (--held == 0) ::pthread_rwlock_unlock(&gate);
}

bool at_fork(const ForkHandlers& added) noexcept {
  const NoFork whole;
  const std::size_t index = reserved.fetch_add(1, std::memory_order_relaxed);
  if (index >= kMost) return false;
  handlers[index] = added;
  return true;
}

}  // namespace lawson
