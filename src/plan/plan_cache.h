// The process's loaded plans: one build for each key and live device however many threads ask at
// once, bounded, and not poisoned by what failed. Refusals are not kept.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "engine/engine.h"

namespace lawson::plan {

class PlanCache {
 public:
  struct Id {
    std::string key;  // what was asked, without the device's number
    int ordinal = 0;  // two equal GPUs of one machine have plans of their own
    bool operator==(const Id&) const = default;
    bool operator<(const Id& other) const {
      return std::tie(key, ordinal) < std::tie(other.key, other.ordinal);
    }
  };
  using Executable = std::shared_ptr<Loaded>;
  using Build = std::function<Result<Executable>()>;

  struct Counters {
    std::uint64_t hits = 0;  // found, or built by another thread meanwhile
    std::uint64_t builds = 0;
    std::uint64_t failures = 0;  // builds that gave an error or an exception
    std::uint64_t evictions = 0;
  };

  // Beyond `capacity` plans the least recently used one leaves that nobody else holds; where all
  // are held, the cache grows.
  explicit PlanCache(std::size_t capacity) : capacity_{capacity} {}
  PlanCache(const PlanCache&) = delete;
  PlanCache& operator=(const PlanCache&) = delete;

  // nullptr unless the plan is there and ready.
  Executable find(const Id& id);

  // The plan, built by this thread or awaited from the one that is building it. An error goes to
  // all who waited for it; an exception to the thread that built, and the others try themselves.
  // No lock is held while `build` runs.
  Result<Executable> get(const Id& id, const Build& build);

  std::size_t size() const;
  Counters counters() const;

 private:
  struct Entry {
    Executable loaded;                                             // once ready
    std::shared_future<std::optional<Result<Executable>>> flight;  // until then
    std::uint64_t used = 0;
  };
  class Flight;

  Result<Executable> land(Flight& flight, const Build& build);
  std::vector<Executable> evict();  // with mutex_ held; the caller lets go of them without it

  const std::size_t capacity_;
  mutable std::mutex mutex_;
  std::map<Id, Entry> entries_;
  std::uint64_t clock_ = 0;
  Counters counters_;
};

}  // namespace lawson::plan
