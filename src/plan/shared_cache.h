// What a process keeps of answers that cost something: one build for each question however many
// threads ask at once, bounded in number and bytes, and not poisoned by what failed.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/status.h"
#include "plan/question.h"

namespace lawson::plan {

struct CacheBudget {
  std::size_t count = 1024;
  std::uint64_t bytes = std::uint64_t{256} << 20;
};

struct CacheCounters {
  std::uint64_t hits = 0;  // found, or built by another thread meanwhile
  std::uint64_t builds = 0;
  std::uint64_t failures = 0;  // builds that gave an error or an exception
  std::uint64_t evictions = 0;
};

template <typename T>
class SharedCache {
 public:
  using Id = QuestionId;
  using Value = std::shared_ptr<T>;
  using Build = std::function<Result<Value>()>;

  struct Hooks {
    std::function<std::uint64_t(const T&)> bytes;  // of one value, in the host's memory
    // Called without the cache's lock.
    std::function<void(const T&)> inserted;
    std::function<void(const T&)> evicted;
  };

  // Beyond the budget the least recently used values leave that nobody else holds; where all are
  // held, the cache grows.
  SharedCache(CacheBudget budget, Hooks hooks) : budget_{budget}, hooks_{std::move(hooks)} {}
  SharedCache(const SharedCache&) = delete;
  SharedCache& operator=(const SharedCache&) = delete;

  // nullptr unless the value is there and ready.
  Value find(const Id& id) {
    const std::lock_guard lock{mutex_};
    const auto it = entries_.find(id);
    if (it == entries_.end() || it->second->value == nullptr) return nullptr;
    return use(it->second);
  }

  // The value, built by this thread or awaited from the one that is building it. An error goes to
  // all who waited for it; after an exception, which is the builder's own, or a deadline's
  // `cancelled` the others try themselves. No lock is held while `build` runs.
  // `deadline_ms`: of waiting for another thread; negative: none.
  Result<Value> get(const Id& id, const Build& build, double deadline_ms = -1) {
    if (!single_flight_) return get_alone(id, build);
    const auto until = until_of(deadline_ms);
    while (true) {
      Flight mine(*this, id);
      Outcome others;
      {
        const std::lock_guard lock{mutex_};
        const auto it = entries_.find(id);
        if (it == entries_.end()) {
          mine.publish();
        } else if (it->second->value == nullptr) {
          others = it->second->flight;
        } else {
          return use(it->second);
        }
      }
      if (!others.valid()) return land(mine, build);
      if (until && others.wait_until(*until) == std::future_status::timeout) {
        return error(ErrorKind::cancelled,
                     "the deadline of {:g} ms passed while another thread was building",
                     deadline_ms);
      }
      const auto& outcome = others.get();
      if (!outcome || is_cancelled(*outcome)) continue;
      if (outcome->ok()) {
        const std::lock_guard lock{mutex_};
        ++counters_.hits;
      }
      return *outcome;
    }
  }

  // What was answered without being asked for; what is there already stays.
  void put(const Id& id, const Value& value) { insert(id, value); }

  std::size_t size() const {
    const std::lock_guard lock{mutex_};
    return entries_.size();
  }
  std::uint64_t bytes() const {
    const std::lock_guard lock{mutex_};
    return bytes_;
  }
  CacheCounters counters() const {
    const std::lock_guard lock{mutex_};
    return counters_;
  }
  const CacheBudget& budget() const { return budget_; }

  // For tests of what several inserts of one value do: each thread builds for itself, and the
  // first value stays. Before other threads use the cache.
  void set_single_flight(bool value) { single_flight_ = value; }

 private:
  using Outcome = std::shared_future<std::optional<Result<Value>>>;
  using Time = std::chrono::system_clock::time_point;

  struct Entry {
    Id id;
    Value value;     // once ready
    Outcome flight;  // until then
    std::uint64_t bytes = 0;
  };
  using Position = typename std::list<Entry>::iterator;

  // Held values that a look for one to be evicted passes over at most.
  static constexpr int kMostPassedOver = 64;

  // This thread's duty to end a published flight: with a value, an error, or (when an exception
  // passes) with nothing, which tells the waiting threads to try again.
  class Flight {
   public:
    Flight(SharedCache& cache, const Id& id) : cache_{cache}, id_{id} {}
    Flight(const Flight&) = delete;
    Flight& operator=(const Flight&) = delete;
    ~Flight() {
      if (!is_flying_) return;
      withdraw();
      promise_->set_value(std::nullopt);
    }

    // With the cache's lock held, which makes this thread the only one that found nothing.
    void publish() {
      promise_.emplace();
      cache_.add({id_, nullptr, promise_->get_future().share(), 0});
      is_flying_ = true;
      ++cache_.counters_.builds;
    }

    void end(const Result<Value>& outcome) {
      std::optional<Result<Value>> told{outcome};  // copied while the flight can still be withdrawn
      if (!outcome.ok()) {
        withdraw();
      } else {
        const std::uint64_t bytes = cache_.size_of(**outcome);
        const std::lock_guard lock{cache_.mutex_};
        Entry& entry = *cache_.entries_.at(id_);
        entry.value = *outcome;
        entry.flight = {};
        entry.bytes = bytes;
        cache_.bytes_ += bytes;
      }
      is_flying_ = false;
      promise_->set_value(std::move(told));
    }

   private:
    void withdraw() {
      const std::lock_guard lock{cache_.mutex_};
      ++cache_.counters_.failures;
      const auto it = cache_.entries_.find(id_);
      cache_.order_.erase(it->second);
      cache_.entries_.erase(it);
    }

    SharedCache& cache_;
    const Id& id_;
    std::optional<std::promise<std::optional<Result<Value>>>> promise_;
    bool is_flying_ = false;
  };

  static bool is_cancelled(const Result<Value>& outcome) {
    return !outcome.ok() && outcome.error().kind == ErrorKind::cancelled;
  }

  // By the system's clock: the thread sanitizer of GCC 12 does not know waits by the steady one.
  static std::optional<Time> until_of(double deadline_ms) {
    if (deadline_ms < 0) return std::nullopt;
    const auto us = static_cast<std::int64_t>(1e3 * std::min(deadline_ms, 1e9));
    return std::chrono::system_clock::now() + std::chrono::microseconds{us};
  }

  std::uint64_t size_of(const T& value) const { return hooks_.bytes ? hooks_.bytes(value) : 0; }

  // With mutex_ held. One of an id that is not there; all or nothing.
  void add(Entry entry) {
    order_.push_front(std::move(entry));
    try {
      entries_.emplace(order_.front().id, order_.begin());
    } catch (...) {
      order_.pop_front();
      throw;
    }
  }

  // With mutex_ held.
  Value use(Position position) {
    ++counters_.hits;
    order_.splice(order_.begin(), order_, position);
    return position->value;
  }

  static Result<Value> checked(Result<Value> outcome) {
    if (outcome.ok() && *outcome == nullptr) {
      return error(ErrorKind::internal, "an engine answered with nothing");
    }
    return outcome;
  }

  Result<Value> land(Flight& flight, const Build& build) {
    Result<Value> outcome = checked(build());
    flight.end(outcome);
    if (outcome.ok()) {
      if (hooks_.inserted) hooks_.inserted(**outcome);
      shrink();
    }
    return outcome;
  }

  Result<Value> get_alone(const Id& id, const Build& build) {
    if (Value known = find(id)) return known;
    {
      const std::lock_guard lock{mutex_};
      ++counters_.builds;
    }
    Result<Value> outcome = checked(build());
    if (!outcome.ok()) {
      const std::lock_guard lock{mutex_};
      ++counters_.failures;
      return outcome;
    }
    return insert(id, *outcome);
  }

  Value insert(const Id& id, const Value& value) {
    const std::uint64_t bytes = size_of(*value);
    {
      const std::lock_guard lock{mutex_};
      const auto it = entries_.find(id);
      if (it != entries_.end()) return it->second->value != nullptr ? it->second->value : value;
      add({id, value, {}, bytes});
      bytes_ += bytes;
    }
    if (hooks_.inserted) hooks_.inserted(*value);
    shrink();
    return value;
  }

  bool is_over() const {
    return entries_.size() > budget_.count || (bytes_ > budget_.bytes && entries_.size() > 1);
  }

  // A value that somebody holds is in use: it counts as used now, so that the next look does not
  // begin with it again.
  void shrink() {
    std::vector<Value> evicted;  // they end without the lock
    {
      const std::lock_guard lock{mutex_};
      int passed_over = 0;
      while (is_over() && passed_over < kMostPassedOver && !order_.empty()) {
        const Position oldest = std::prev(order_.end());
        if (oldest->value == nullptr || oldest->value.use_count() > 1) {
          order_.splice(order_.begin(), order_, oldest);
          ++passed_over;
          continue;
        }
        bytes_ -= oldest->bytes;
        ++counters_.evictions;
        evicted.push_back(std::move(oldest->value));
        entries_.erase(oldest->id);
        order_.erase(oldest);
      }
    }
    if (!hooks_.evicted) return;
    for (const Value& value : evicted) hooks_.evicted(*value);
  }

  const CacheBudget budget_;
  const Hooks hooks_;
  bool single_flight_ = true;
  mutable std::mutex mutex_;  // of all that follows
  std::list<Entry> order_;    // most recently used first
  std::unordered_map<Id, Position> entries_;
  std::uint64_t bytes_ = 0;
  CacheCounters counters_;
};

}  // namespace lawson::plan
