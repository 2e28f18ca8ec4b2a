// Which of several is the fastest, by as few timings as it takes: successive rounds, in which those
// that are clearly slower leave.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

#include "base/status.h"

namespace lawson::plan {

struct RaceRules {
  double round_ms = 1;         // how long a round of executions is to take
  int rounds = 5;              // of one runner's turn
  int turns = 10;              // at most
  double limit_ms = 4000;      // no turn begins later
  std::size_t executions = 1;  // of a round, at least (the sets of buffers)
  // Within so much of the best, the earlier runner is taken: what is left is noise, and the same
  // question should get the same answer.
  double tie = 1.005;
};

struct Runner {
  std::vector<double> times;     // ms of one execution, one per round
  std::optional<Error> failure;  // left the race by it

  double median() const;
  double min() const;
  double max() const;
};

struct RaceResult {
  std::vector<Runner> runners;
  std::vector<std::size_t> order;  // of those that have times: the winner, then by median
  bool separated = false;  // the winner's interval lies below all others' that were not dropped
  bool stopped = false;    // by `passed`
};

// `measure(runner, executions, rounds)` as Engine::measure. `passed`: asked between turns whether
// time is up.
RaceResult race(std::size_t count, const RaceRules& rules,
                const std::function<Result<std::vector<double>>(std::size_t, int, int)>& measure,
                const std::function<bool()>& passed);

}  // namespace lawson::plan
