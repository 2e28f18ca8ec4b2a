#include "plan/race.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iterator>
#include <random>

namespace lawson::plan {
namespace {

constexpr int kMaxExecutions = 1000;
// After one execution only what is far behind leaves.
constexpr double kFarBehind = 4;
constexpr double kFarBehindMs = 0.05;
// Rounds after which runners that are within a tie of each other are held to be equal.
constexpr std::size_t kEnoughRounds = 20;

double quantile(const std::vector<double>& sorted, double q) {
  const double at = q * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(at);
  const std::size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (at - static_cast<double>(below)) * (sorted[above] - sorted[below]);
}

// A 95% interval of the median: McGill, Tukey and Larsen 1978 ("notches").
struct Interval {
  double low = 0;
  double high = 0;
};

Interval interval_of(const Runner& runner) {
  std::vector<double> sorted = runner.times;
  std::sort(sorted.begin(), sorted.end());
  const double middle = quantile(sorted, 0.5);
  const double half = 1.57 * (quantile(sorted, 0.75) - quantile(sorted, 0.25)) /
                      std::sqrt(static_cast<double>(sorted.size()));
  return {middle - half, middle + half};
}

class Race {
 public:
  Race(std::size_t count, const RaceRules& rules,
       const std::function<Result<std::vector<double>>(std::size_t, int, int)>& measure,
       const std::function<bool()>& passed)
      : rules_{rules}, measure_{measure}, passed_{passed} {
    result_.runners.resize(count);
    for (std::size_t i = 0; i < count; ++i) running_.push_back(i);
  }

  RaceResult run() {
    first_look();
    for (int turn = 0; turn < rules_.turns && running_.size() > 1 && !is_over(); ++turn) {
      for (const std::size_t i : order_of(turn)) {
        if (is_over()) break;
        take_turn(i);
      }
      leave_failed();
      first_ = false;
      if (turn > 0 && decide()) break;
    }
    // A lone runner has its times, too: they are what people look at.
    if (running_.size() == 1 && !is_over() && runner(running_[0]).times.size() < 2) {
      take_turn(running_[0]);
      leave_failed();
    }
    rank();
    return std::move(result_);
  }

 private:
  Runner& runner(std::size_t i) { return result_.runners[i]; }

  bool is_over() {
    if (passed_()) result_.stopped = true;
    const std::chrono::duration<double, std::milli> spent =
        std::chrono::steady_clock::now() - start_;
    return result_.stopped || spent.count() > rules_.limit_ms;
  }

  void measure(std::size_t i, int executions, int rounds) {
    auto times = measure_(i, executions, rounds);
    if (!times.ok()) {
      runner(i).failure = std::move(times).error();
      return;
    }
    runner(i).times.insert(runner(i).times.end(), times->begin(), times->end());
  }

  // One execution each, which says how many make a round.
  void first_look() {
    for (const std::size_t i : std::vector<std::size_t>{running_}) {
      if (is_over()) break;
      measure(i, 1, 1);
    }
    leave_failed();
    std::erase_if(running_, [&](std::size_t i) { return runner(i).times.empty(); });
    if (running_.empty()) return;
    double fastest = runner(running_[0]).median();
    for (const std::size_t i : running_) fastest = std::min(fastest, runner(i).median());
    const double wanted =
        std::max(rules_.round_ms / std::max(fastest, 1e-4), static_cast<double>(rules_.executions));
    executions_ = static_cast<int>(std::clamp<double>(
        std::min(wanted, std::max(20 * rules_.round_ms / std::max(fastest, 1e-4), 1.0)), 1,
        kMaxExecutions));
    std::erase_if(running_, [&](std::size_t i) {
      const double time = runner(i).median();
      return time > kFarBehind * fastest && time - fastest > kFarBehindMs;
    });
  }

  // Another one at every turn: after whom a runner comes (what clocks and power are then) costs it
  // up to 5% on an H200.
  std::vector<std::size_t> order_of(int turn) const {
    std::vector<std::size_t> order{running_};
    std::mt19937 dice(static_cast<std::mt19937::result_type>(turn));
    std::shuffle(order.begin(), order.end(), dice);
    return order;
  }

  // The times of the first look are of one execution, not of a round: they make way.
  void take_turn(std::size_t i) {
    if (first_) runner(i).times.clear();
    measure(i, executions_, rules_.rounds);
  }

  void leave_failed() {
    std::erase_if(running_, [&](std::size_t i) { return runner(i).failure.has_value(); });
  }

  // Drops who is clearly slower; true when there is nothing more to find out.
  bool decide() {
    const std::size_t best = *std::min_element(
        running_.begin(), running_.end(),
        [&](std::size_t a, std::size_t b) { return runner(a).median() < runner(b).median(); });
    const Interval leader = interval_of(runner(best));
    std::erase_if(running_, [&](std::size_t i) {
      return i != best && interval_of(runner(i)).low > leader.high;
    });
    result_.separated = running_.size() == 1;
    const double median = runner(best).median();
    return result_.separated || std::all_of(running_.begin(), running_.end(), [&](std::size_t i) {
             return runner(i).times.size() >= kEnoughRounds &&
                    runner(i).median() <= median * rules_.tie;
           });
  }

  void rank() {
    auto& order = result_.order;
    for (std::size_t i = 0; i < result_.runners.size(); ++i) {
      if (!runner(i).times.empty() && !runner(i).failure) order.push_back(i);
    }
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return runner(a).median() < runner(b).median();
    });
    if (order.empty()) return;
    const double limit = runner(order[0]).median() * rules_.tie;
    auto winner = order.begin();
    for (auto it = order.begin(); it != order.end() && runner(*it).median() <= limit; ++it) {
      if (*it < *winner) winner = it;
    }
    std::rotate(order.begin(), winner, std::next(winner));
  }

  const RaceRules& rules_;
  const std::function<Result<std::vector<double>>(std::size_t, int, int)>& measure_;
  const std::function<bool()>& passed_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::vector<std::size_t> running_;
  int executions_ = 1;
  bool first_ = true;  // no turn is over yet
  RaceResult result_;
};

}  // namespace

double Runner::median() const {
  std::vector<double> sorted = times;
  std::sort(sorted.begin(), sorted.end());
  return quantile(sorted, 0.5);
}
double Runner::min() const {
  return *std::min_element(times.begin(), times.end());
}
double Runner::max() const {
  return *std::max_element(times.begin(), times.end());
}

RaceResult race(std::size_t count, const RaceRules& rules,
                const std::function<Result<std::vector<double>>(std::size_t, int, int)>& measure,
                const std::function<bool()>& passed) {
  return Race(count, rules, measure, passed).run();
}

}  // namespace lawson::plan
