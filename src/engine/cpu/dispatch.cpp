#include <fmt/format.h>

#include <array>
#include <cstdlib>
#include <mutex>
#include <string>
#include <string_view>

#include "base/lazy.h"
#include "diag/lines.h"
#include "engine/cpu/kernels.h"

namespace lawson::cpu {

extern const Kernels kernels_generic;
#if defined(__x86_64__)
extern const Kernels kernels_v2;
extern const Kernels kernels_v3;
extern const Kernels kernels_v4;
#endif

const Kernels* kernels_for(Isa isa) {
  switch (isa) {
    case Isa::generic:
      return &kernels_generic;
#if defined(__x86_64__)
    // The levels' features that the kernels use; the builtin also asks whether the operating
    // system saves the wide registers.
    case Isa::v2:
      return __builtin_cpu_supports("sse4.2") != 0 ? &kernels_v2 : nullptr;
    case Isa::v3:
      return __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0 &&
                     __builtin_cpu_supports("bmi2") != 0
                 ? &kernels_v3
                 : nullptr;
    case Isa::v4:
      return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
                     __builtin_cpu_supports("avx512dq") != 0 &&
                     __builtin_cpu_supports("avx512vl") != 0 &&
                     __builtin_cpu_supports("avx512cd") != 0
                 ? &kernels_v4
                 : nullptr;
#endif
    default:
      return nullptr;
  }
}

const Kernels& best_kernels() {
  static Lazy<bool> told;
  const char* forced = std::getenv("LAWSON_CPU_ISA");
  if (forced != nullptr && *forced == '\0') forced = nullptr;
  const Kernels* best = &kernels_generic;
  std::string there;
  for (int i = 0; i < kIsaCount; ++i) {
    const Kernels* kernels = kernels_for(static_cast<Isa>(i));
    if (kernels == nullptr) continue;
    best = kernels;
    if (forced != nullptr && std::string_view{forced} == kernels->name) return *best;
    there += fmt::format("{}{}", there.empty() ? "" : ", ", kernels->name);
  }
  if (forced != nullptr) {
    told.get([&] {
      diag::print_line(fmt::format("LAWSON_CPU_ISA='{}' is ignored; this CPU and build have {}",
                                   diag::printable(forced), there));
      return true;
    });
  }
  return *best;
}

}  // namespace lawson::cpu
