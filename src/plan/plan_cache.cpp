#include "plan/plan_cache.h"

#include <utility>

namespace lawson::plan {

// This thread's duty to end a published flight: with a plan, an error, or (when an exception
// passes) with nothing, which tells the waiting threads to try again.
class PlanCache::Flight {
 public:
  Flight(PlanCache& cache, const Id& id) : cache_{cache}, id_{id} {}
  Flight(const Flight&) = delete;
  Flight& operator=(const Flight&) = delete;
  ~Flight() {
    if (!is_flying_) return;
    withdraw();
    promise_.set_value(std::nullopt);
  }

  // With the cache's lock held, which makes this thread the only one that found nothing.
  void publish() {
    Entry& entry = cache_.entries_[id_];
    entry.flight = promise_.get_future().share();
    entry.used = ++cache_.clock_;
    is_flying_ = true;
    ++cache_.counters_.builds;
  }

  void end(const Result<Executable>& outcome) {
    if (!outcome.ok()) {
      withdraw();
    } else {
      const std::lock_guard lock{cache_.mutex_};
      Entry& entry = cache_.entries_.at(id_);
      entry.loaded = *outcome;
      entry.flight = {};
    }
    promise_.set_value(outcome);
    is_flying_ = false;
  }

 private:
  void withdraw() {
    const std::lock_guard lock{cache_.mutex_};
    ++cache_.counters_.failures;
    cache_.entries_.erase(id_);
  }

  PlanCache& cache_;
  const Id& id_;
  std::promise<std::optional<Result<Executable>>> promise_;
  bool is_flying_ = false;
};

PlanCache::Executable PlanCache::find(const Id& id) {
  const std::lock_guard lock{mutex_};
  const auto it = entries_.find(id);
  if (it == entries_.end() || it->second.loaded == nullptr) return nullptr;
  ++counters_.hits;
  it->second.used = ++clock_;
  return it->second.loaded;
}

Result<PlanCache::Executable> PlanCache::get(const Id& id, const Build& build) {
  while (true) {
    Flight mine(*this, id);
    std::shared_future<std::optional<Result<Executable>>> others;
    {
      const std::lock_guard lock{mutex_};
      const auto it = entries_.find(id);
      if (it == entries_.end()) {
        mine.publish();
      } else if (it->second.loaded == nullptr) {
        others = it->second.flight;
      } else {
        ++counters_.hits;
        it->second.used = ++clock_;
        return it->second.loaded;
      }
    }
    if (!others.valid()) return land(mine, build);
    if (const auto& outcome = others.get()) {
      if (!outcome->ok()) return *outcome;
      const std::lock_guard lock{mutex_};
      ++counters_.hits;
      return *outcome;
    }
  }
}

Result<PlanCache::Executable> PlanCache::land(Flight& flight, const Build& build) {
  Result<Executable> outcome = build();
  if (outcome.ok() && *outcome == nullptr) {
    outcome = error(ErrorKind::internal, "an engine loaded a plan and handed out nothing");
  }
  flight.end(outcome);
  std::vector<Executable> evicted;  // ends after the lock
  const std::lock_guard lock{mutex_};
  evicted = evict();
  return outcome;
}

std::vector<PlanCache::Executable> PlanCache::evict() {
  std::vector<Executable> evicted;
  while (entries_.size() > capacity_) {
    auto oldest = entries_.end();
    for (auto it = entries_.begin(); it != entries_.end(); ++it) {
      const bool is_free = it->second.loaded != nullptr && it->second.loaded.use_count() == 1;
      if (is_free && (oldest == entries_.end() || it->second.used < oldest->second.used)) {
        oldest = it;
      }
    }
    if (oldest == entries_.end()) break;
    evicted.push_back(std::move(oldest->second.loaded));
    entries_.erase(oldest);
    ++counters_.evictions;
  }
  return evicted;
}

std::size_t PlanCache::size() const {
  const std::lock_guard lock{mutex_};
  return entries_.size();
}

PlanCache::Counters PlanCache::counters() const {
  const std::lock_guard lock{mutex_};
  return counters_;
}

}  // namespace lawson::plan
