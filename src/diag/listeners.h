// Inside diag: who listens, and the clock.
#pragma once

#include <chrono>
#include <cstdint>

#include "diag/diag.h"

namespace lawson::diag::detail {

inline std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

inline void listen(unsigned who) {
  listeners.fetch_or(who, std::memory_order_relaxed);
}
inline void unlisten(unsigned who) {
  listeners.fetch_and(~who, std::memory_order_relaxed);
}

// Without memory something goes untold: nobody's call fails for it.
template <typename Body>
void quietly(const Body& body) noexcept {
  try {
    body();
  } catch (...) {  // NOLINT(bugprone-empty-catch)
  }
}

}  // namespace lawson::diag::detail
