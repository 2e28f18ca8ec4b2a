#include "plan/tasks.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace lawson::plan {

std::size_t core_count() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    return std::max<std::size_t>(static_cast<std::size_t>(CPU_COUNT(&set)), 1);
  }
  return std::max<std::size_t>(std::thread::hardware_concurrency(), 1);
}

void run_tasks(std::size_t count, std::size_t threads,
               const std::function<void(std::size_t)>& task) {
  std::atomic<std::size_t> next{0};
  std::mutex mutex;
  std::exception_ptr thrown;
  const auto work = [&] {
    for (std::size_t i = next++; i < count; i = next++) {
      try {
        task(i);
      } catch (...) {
        const std::lock_guard lock{mutex};
        if (!thrown) thrown = std::current_exception();
        next = count;
      }
    }
  };
  {
    std::vector<std::jthread> helpers;
    try {
      for (std::size_t i = 1; i < std::min(count, threads); ++i) helpers.emplace_back(work);
    } catch (const std::system_error&) {  // no more threads: fewer do it
    }
    work();
  }
  if (thrown) std::rethrow_exception(thrown);
}

}  // namespace lawson::plan
