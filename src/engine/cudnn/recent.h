// What was used last, by key: bounded, for several threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

namespace lawson::cudnn {

template <typename T>
class Recent {
 public:
  using Value = std::shared_ptr<T>;

  explicit Recent(std::size_t capacity) : capacity_{capacity} {}

  // nullptr: it is not there (any more).
  Value find(const std::string& key) {
    const std::lock_guard lock{mutex_};
    return use(key);
  }

  // In front of what there may be of the same key.
  void keep(const std::string& key, Value value) {
    const std::lock_guard lock{mutex_};
    add(key, std::move(value));
  }

  // What is there, or what `make` gives, with the lock held.
  template <typename Make>
  Value find_or(const std::string& key, const Make& make) {
    const std::lock_guard lock{mutex_};
    Value value = use(key);
    if (value == nullptr) {
      value = make();
      add(key, value);
    }
    return value;
  }

 private:
  Value use(const std::string& key) {
    const auto found = std::find_if(entries_.begin(), entries_.end(),
                                    [&](const auto& entry) { return entry.first == key; });
    if (found == entries_.end()) return nullptr;
    entries_.splice(entries_.begin(), entries_, found);
    return found->second;
  }

  void add(const std::string& key, Value value) {
    entries_.emplace_front(key, std::move(value));
    if (entries_.size() > capacity_) entries_.pop_back();
  }

  const std::size_t capacity_;
  std::mutex mutex_;
  std::list<std::pair<std::string, Value>> entries_;  // used last in front
};

}  // namespace lawson::cudnn
