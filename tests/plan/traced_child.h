// A child process whose system calls are stopped one by one: to end it in the middle of its work,
// or to have one call fail.
#pragma once

#include <functional>
#include <optional>

namespace lawson::plan {

struct Intervention {
  int stop = -1;  // kill it at this stop, counted from 0: before a call, after it, before the next
  int call = -1;  // have this call (of those that concern files), counted from 0, fail ...
  int error = 0;  // ... with this error
};

struct TracedEnd {
  bool killed = false;  // by us
  int exit_code = -1;   // -1: ended by a signal that was not ours
  int stops = 0;        // that it came to
  int file_calls = 0;
};

// nullopt: this system does not let us trace.
std::optional<TracedEnd> run_traced(const std::function<int()>& work,
                                    const Intervention& intervention);

// Whether run_traced can have calls fail on this processor.
bool can_fail_calls();

}  // namespace lawson::plan
