// Independent tasks on several threads.
#pragma once

#include <cstddef>
#include <functional>

namespace lawson::plan {

// The cores that this process may use, at least 1.
std::size_t core_count();

// Calls task(i) for each i in [0, count) in order of i, on at most `threads` threads, this one
// among them, and returns when all are done. What a task throws ends the others' beginning and is
// thrown here.
void run_tasks(std::size_t count, std::size_t threads,
               const std::function<void(std::size_t)>& task);

}  // namespace lawson::plan
