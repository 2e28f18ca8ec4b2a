#include "cpu_peak.h"

#include <time.h>

#include <algorithm>
#include <string_view>

namespace lawson::bench {
namespace {

// Enough independent chains to hide the latency of a multiply-add on two pipes.
constexpr int kChains = 12;
constexpr long kSteps = 20'000'000;

#if defined(__clang__)
#define LAWSON_UNROLL _Pragma("unroll")
#else
#define LAWSON_UNROLL _Pragma("GCC unroll 12")
#endif

volatile float sink;

// Of this thread on a core: other processes do not count.
double seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

#define LAWSON_CHAINS(bytes)                                                 \
  using Vec = float __attribute__((vector_size(bytes)));                     \
  Vec sums[kChains];                                                         \
  LAWSON_UNROLL                                                              \
  for (int i = 0; i < kChains; ++i) sums[i] = Vec{} + static_cast<float>(i); \
  const Vec factor = Vec{} + 0.999F;                                         \
  const Vec term = Vec{} + 1e-4F;                                            \
  const double start = seconds();                                            \
  for (long step = 0; step < kSteps; ++step) {                               \
    LAWSON_UNROLL                                                            \
    for (int i = 0; i < kChains; ++i) sums[i] = sums[i] * factor + term;     \
  }                                                                          \
  const double taken = seconds() - start;                                    \
  Vec total{};                                                               \
  for (int i = 0; i < kChains; ++i) total += sums[i];                        \
  sink = total[0];                                                           \
  return 2.0 * kChains * (bytes / 4) * static_cast<double>(kSteps) / taken * 1e-9

double run_128() {
  LAWSON_CHAINS(16);
}
#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) double run_256() {
  LAWSON_CHAINS(32);
}
__attribute__((target("avx512f"))) double run_512() {
  LAWSON_CHAINS(64);
}
#endif

double best_of(double (*run)()) {
  double best = 0;
  for (int i = 0; i < 5; ++i) best = std::max(best, run());
  return best;
}

}  // namespace

double peak_gflops(const char* kernels) {
#if defined(__x86_64__)
  if (std::string_view{kernels} == "v4") {
    static const double peak = best_of(run_512);
    return peak;
  }
  if (std::string_view{kernels} == "v3") {
    static const double peak = best_of(run_256);
    return peak;
  }
#endif
  static const double peak = best_of(run_128);
  return peak;
}

}  // namespace lawson::bench
