// A few objects that threads take and give back without a lock. Each thread begins at a place of
// its own, so that it finds again what it gave back.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>

namespace lawson::cudnn {

// Counts the threads that asked.
inline std::size_t thread_number() {
  static std::atomic<std::size_t> threads{0};
  thread_local const std::size_t number = threads.fetch_add(1, std::memory_order_relaxed);
  return number;
}

template <typename T, std::size_t N>
class Slots {
 public:
  // nullptr: they are empty.
  T* take() {
    const std::size_t first = thread_number();
    for (std::size_t i = 0; i < N; ++i) {
      std::atomic<T*>& slot = slots_[(first + i) % N];
      if (slot.load(std::memory_order_relaxed) == nullptr) continue;
      if (T* object = slot.exchange(nullptr, std::memory_order_acquire)) return object;
    }
    return nullptr;
  }
  // False: they are full, and the object is still the caller's.
  bool give_back(T* object) {
    const std::size_t first = thread_number();
    for (std::size_t i = 0; i < N; ++i) {
      std::atomic<T*>& slot = slots_[(first + i) % N];
      T* nothing = nullptr;
      if (slot.compare_exchange_strong(nothing, object, std::memory_order_release,
                                       std::memory_order_relaxed)) {
        return true;
      }
    }
    return false;
  }

 private:
  std::array<std::atomic<T*>, N> slots_{};
};

}  // namespace lawson::cudnn
