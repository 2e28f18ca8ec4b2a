// Runs independent tasks on a few threads.
#pragma once

#include <cstddef>
#include <functional>

namespace lawson::cli {

// Cores of this machine, as far as this process may use them.
std::size_t core_count();

// task(0) ... task(count - 1), in about this order, on at most `threads` threads. The first
// exception ends what has not begun and is thrown again.
void run_tasks(std::size_t count, const std::function<void(std::size_t)>& task,
               std::size_t threads = core_count());

}  // namespace lawson::cli
