// Work over rows, on all cores where it is worth it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <system_error>
#include <thread>
#include <vector>

namespace lawson::reference {

// Calls work(begin, end) for runs of [0, rows) that make up the whole. What a row's result is must
// not depend on the run that it is in; work must not throw.
template <typename Work>
void for_row_runs(std::size_t rows, double operations, const Work& work) {
  constexpr double kWorthAThread = 4e6;
  const double cores = std::max(std::thread::hardware_concurrency(), 1U);
  const double wanted = std::min({cores, operations / kWorthAThread, static_cast<double>(rows)});
  const std::size_t runs = std::max<std::size_t>(static_cast<std::size_t>(wanted), 1);
  const auto start = [&](std::size_t run) { return rows * run / runs; };
  std::vector<std::jthread> threads;
  threads.reserve(runs);
  std::size_t started = 1;
  try {
    for (; started < runs; ++started) {
      threads.emplace_back(
          [&work, begin = start(started), end = start(started + 1)] { work(begin, end); });
    }
  } catch (const std::system_error&) {  // no more threads: the rest is done here
  }
  work(start(0), start(1));
  if (started < runs) work(start(started), rows);
}

}  // namespace lawson::reference
