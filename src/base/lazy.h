// What is made when it is first used.
#pragma once

#include <atomic>
#include <mutex>

#include "base/process.h"

namespace lawson {

// A value that the first `get` makes and nothing destroys (threads, and destructors of static
// objects, may use it late). A static of this type, in place of a static that is initialised at
// run time: a fork waits until no other thread is making one, where a child would wait for ever
// for the compiler's guard. One that throws leaves it to the next.
template <typename T>
class Lazy {
 public:
  constexpr Lazy() noexcept = default;
  Lazy(const Lazy&) = delete;
  Lazy& operator=(const Lazy&) = delete;

  template <typename Make>
  T& get(const Make& make) {
    if (T* known = value_.load(std::memory_order_acquire)) return *known;
    const NoFork whole;
    const std::lock_guard lock{mutex_};
    T* known = value_.load(std::memory_order_relaxed);
    if (known == nullptr) {
      known = new T(make());
      value_.store(known, std::memory_order_release);
    }
    return *known;
  }

  T& get() {
    return get([] { return T{}; });
  }

 private:
  std::atomic<T*> value_{nullptr};
  std::mutex mutex_;
};

}  // namespace lawson
