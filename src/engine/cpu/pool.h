// The engine's own threads: started at the first use, waiting without spinning, joined at exit. A
// forked child starts threads of its own. LAWSON_NUM_THREADS limits them (1: none are started).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "base/status.h"
#include "engine/cpu/sizes.h"

namespace lawson::cpu {

// A task's index and its thread's scratch memory, aligned to 64 bytes; contents are arbitrary.
using Task = std::function<void(std::int64_t index, std::byte* scratch)>;

// Runs task(0) ... task(count - 1) in any order, on the calling thread and on the pool's, and
// returns when all have ended. Tasks throw nothing but bad_alloc and must not call parallel_for.
// Results may not depend on which thread runs a task. The error is out_of_memory, of the scratch
// memory or of a task; tasks that have not begun are left out then.
Status parallel_for(std::int64_t count, std::size_t scratch_bytes, const Task& task);

// Threads that may work at once, the calling one included.
int thread_count();

}  // namespace lawson::cpu
