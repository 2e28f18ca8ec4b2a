// Ranges for a profiler (NVTX, domain "lawson"). Nothing where none is attached, or where the build
// found no NVTX headers.
#pragma once

#include <string_view>

namespace lawson::diag {

// Whether a profiler is attached; asked once, it loads its library then.
bool has_profiler() noexcept;
void begin_range(std::string_view name) noexcept;  // of this thread; they nest
void end_range() noexcept;

}  // namespace lawson::diag
