// The counts themselves. Each thread adds to a block of its own, which anybody may read; a block's
// counts stay when its thread ends.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "diag/diag.h"

namespace lawson::diag {

struct StageTime {
  std::uint64_t count = 0;
  std::uint64_t total_ns = 0;
  std::uint64_t max_ns = 0;
};

struct Counts {
  std::array<std::uint64_t, kEvents> events{};
  std::array<StageTime, kStages> stages{};

  std::uint64_t of(Event event) const { return events[static_cast<std::size_t>(event)]; }
  const StageTime& of(Stage stage) const { return stages[static_cast<std::size_t>(stage)]; }
  bool empty() const;
  void add(const Counts& other);
};

struct Row {
  std::string engine;
  std::string pass;
  int device = -1;
  Counts counts;
};

struct ThreadCounts {
  // From 1 in the order of first events; 0: several that ended, together.
  std::uint64_t thread = 0;
  std::int64_t tid = 0;  // the system's; 0 as above
  bool ended = false;
  std::vector<Row> rows;  // in the order of first events

  // "-": no live device; "0"; "mixed": events of several live devices.
  std::string device() const;
};

// Of threads that had events. A count is exact once what is counted has returned.
enum class Since { start, reset };
std::vector<ThreadCounts> counts(Since since);
void reset_counts();

// {"totals": {EVENT: n}, "stages": {STAGE: {"count", "total_ms", "max_ms"}}, "threads": [{"thread",
// "tid", "ended", "device", "rows": [{"engine", "pass", "device", "events", "stages"}]}]}
Json counts_to_json(const std::vector<ThreadCounts>& threads);

// "-" for -1.
std::string device_text(int device);

// This thread's number, as in ThreadCounts; 0 after its end or without memory.
std::uint64_t this_thread() noexcept;

namespace detail {
void count_stage(Stage stage, const Subject& subject, std::uint64_t ns) noexcept;
// Adds what was counted elsewhere to this thread's.
void count(const Subject& subject, const Counts& counts) noexcept;
}  // namespace detail

}  // namespace lawson::diag
