// What a call was made with, as one run of words, and what was prepared for it: the least recently
// used goes when there are too many.
#ifndef LAWSON_PYTHON_TORCH_CACHE_H_
#define LAWSON_PYTHON_TORCH_CACHE_H_

#include <dlpack/dlpack.h>
#include <lawson/lawson.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <list>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

namespace lawson::torch {

inline constexpr std::size_t kMaxOperands = 64;
inline constexpr std::uintptr_t kMostAlignment = 16;  // bytes

// Place, dtype, shape, strides and alignment (up to 16 bytes) of each operand; None is one of its
// own.
class Key {
 public:
  void add_none() { add(0); }
  // Of at most LAWSON_MAX_RANK dims.
  void add(const DLTensor& tensor) {
    const auto address = reinterpret_cast<std::uintptr_t>(tensor.data) + tensor.byte_offset;
    const auto rank = static_cast<std::size_t>(tensor.ndim);
    add(1 | static_cast<std::uint64_t>(std::countr_zero(address | kMostAlignment)) << 1 |
        static_cast<std::uint64_t>(rank) << 4 |
        static_cast<std::uint64_t>(static_cast<std::uint8_t>(tensor.device.device_type)) << 8 |
        static_cast<std::uint64_t>(static_cast<std::uint16_t>(tensor.device.device_id)) << 16 |
        static_cast<std::uint64_t>(tensor.dtype.code) << 32 |
        static_cast<std::uint64_t>(tensor.dtype.bits) << 40 |
        static_cast<std::uint64_t>(tensor.dtype.lanes) << 48);
    for (std::size_t i = 0; i < rank; ++i) {
      add(static_cast<std::uint64_t>(tensor.shape[i]));
      add(static_cast<std::uint64_t>(tensor.strides[i]));
    }
  }

  std::span<const std::uint64_t> words() const { return {words_.data(), size_}; }
  std::uint64_t hash() const { return hash_; }

 private:
  void add(std::uint64_t word) {
    words_[size_++] = word;
    hash_ = (hash_ ^ word) * 0x9E3779B97F4A7C15U;
    hash_ ^= hash_ >> 29;
  }

  std::array<std::uint64_t, kMaxOperands*(1 + 2 * LAWSON_MAX_RANK)> words_;
  std::size_t size_ = 0;
  std::uint64_t hash_ = 0x243F6A8885A308D3U;
};

template <typename T>
class Cache {
 public:
  explicit Cache(std::size_t capacity) : capacity_{capacity} {}

  // Null: not there. What is found is the most recently used.
  T* find(const Key& key) {
    if (!entries_.empty() && entries_.front().is(key)) return &entries_.front().value;
    const auto it = places_.find({key.words(), key.hash()});
    if (it == places_.end()) return nullptr;
    entries_.splice(entries_.begin(), entries_, it->second);
    return &it->second->value;
  }

  // What has to go for it, for the caller to destroy.
  std::optional<T> put(const Key& key, T value) {
    std::optional<T> gone;
    if (entries_.size() >= capacity_) {
      places_.erase(entries_.back().view());
      gone = std::move(entries_.back().value);
      entries_.pop_back();
    }
    const auto words = key.words();
    entries_.push_front({{words.begin(), words.end()}, key.hash(), std::move(value)});
    places_.emplace(entries_.front().view(), entries_.begin());
    return gone;
  }

  std::vector<T> take_all() {
    std::vector<T> all;
    places_.clear();
    for (Entry& entry : entries_) all.push_back(std::move(entry.value));
    entries_.clear();
    return all;
  }

  // The most recently used first.
  template <typename F>
  void for_each(const F& function) const {
    for (const Entry& entry : entries_) function(entry.value);
  }
  std::size_t size() const { return entries_.size(); }
  std::size_t capacity() const { return capacity_; }

 private:
  struct View {
    std::span<const std::uint64_t> words;
    std::uint64_t hash = 0;
    bool operator==(const View& other) const {
      return hash == other.hash &&
             std::equal(words.begin(), words.end(), other.words.begin(), other.words.end());
    }
  };
  struct Hash {
    std::size_t operator()(const View& view) const { return view.hash; }
  };
  struct Entry {
    std::vector<std::uint64_t> words;
    std::uint64_t hash = 0;
    T value;

    View view() const { return {words, hash}; }
    bool is(const Key& key) const { return view() == View{key.words(), key.hash()}; }
  };

  std::size_t capacity_;
  std::list<Entry> entries_;
  std::unordered_map<View, typename std::list<Entry>::iterator, Hash> places_;
};

}  // namespace lawson::torch

#endif  // LAWSON_PYTHON_TORCH_CACHE_H_
