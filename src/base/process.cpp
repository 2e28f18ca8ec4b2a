#include "base/process.h"

#include <pthread.h>

#include <atomic>

namespace lawson {
namespace {

std::atomic<int> forks{0};

// Before any thread could fork: when the library is loaded.
[[maybe_unused]] const int kRegistered =
    ::pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

int fork_count() noexcept {
  return forks.load(std::memory_order_relaxed);
}

}  // namespace lawson
