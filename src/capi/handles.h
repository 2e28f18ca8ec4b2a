// What the opaque handles of lawson.h are: plain structs, immutable once handed out (a plan's
// loaded state and what is remembered of graphs and devices aside, which have their own locks).
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "base/json.h"
#include "engine/engine.h"
#include "front/spec.h"
#include "ir/graph.h"
#include "lawson/lawson.h"
#include "plan/question.h"

namespace lawson::capi {

// What is found once of a handle's content, by whoever needs it first. A copy of the handle finds
// it again.
template <typename T>
class Memo {
 public:
  Memo() = default;
  Memo(const Memo&) {}
  Memo& operator=(const Memo&) {
    reset();
    return *this;
  }

  // No lock is held while `make` runs.
  template <typename Make>
  std::shared_ptr<const T> get(Make&& make) const {
    if (auto known = current()) return known;
    std::shared_ptr<const T> made = std::forward<Make>(make)();
    const std::lock_guard lock{mutex_};
    if (value_ == nullptr) value_ = std::move(made);
    return value_;
  }
  std::shared_ptr<const T> current() const {
    const std::lock_guard lock{mutex_};
    return value_;
  }
  void reset() {
    const std::lock_guard lock{mutex_};
    value_ = nullptr;
  }

 private:
  mutable std::mutex mutex_;
  mutable std::shared_ptr<const T> value_;
};

}  // namespace lawson::capi

struct lawson_text {
  std::string text;
};

struct lawson_device {
  lawson::Device device;
  lawson::capi::Memo<lawson::plan::KnownDevice> memo{};

  std::shared_ptr<const lawson::plan::KnownDevice> known() const {
    return memo.get([&] { return std::make_shared<const lawson::plan::KnownDevice>(device); });
  }
  void set(const lawson::Device& other) {
    device = other;
    memo.reset();
  }
};

struct lawson_spec {
  lawson::front::Spec spec;
};

struct lawson_graph {
  lawson::ir::Graph graph;
  lawson::capi::Memo<lawson::plan::KnownGraph> memo{};

  std::shared_ptr<const lawson::plan::KnownGraph> known() const {
    return memo.get([&] { return std::make_shared<const lawson::plan::KnownGraph>(graph); });
  }
};

struct lawson_verdict {
  std::shared_ptr<const lawson::Verdict> verdict;
  std::shared_ptr<const lawson::Json> json;  // null: the verdict's own
};

struct lawson_plan {
  struct Executable {
    std::shared_ptr<lawson::Loaded> loaded;
    lawson::Device device;
  };

  lawson::Plan plan;
  lawson::ir::Graph graph;
  std::size_t operands = 0;  // tensors that an execution reads or writes, each bound once
  mutable std::mutex mutex;
  std::shared_ptr<const Executable> executable;  // null until loaded

  std::shared_ptr<const Executable> current() const {
    const std::lock_guard lock{mutex};
    return executable;
  }
};

namespace lawson::capi {

// Hands out text; cannot fail after the allocation.
inline Status give_text(std::string text, lawson_text** out) {
  *out = new lawson_text{std::move(text)};
  return {};
}

// JSON as text; names from users may be anything, so bytes that are not UTF-8 are replaced.
inline std::string dump(const Json& document) {
  return document.dump(2, ' ', false, Json::error_handler_t::replace);
}

// Whether JSON holds the text as it is, so that names read back are those that were given.
inline bool is_utf8(const std::string& text) {
  try {
    static_cast<void>(Json(text).dump());
    return true;
  } catch (const Json::exception&) {
    return false;
  }
}

// Fills what a caller knows of a tensor's description.
Status write_tensor_info(const ir::Tensor& tensor, std::int64_t uid, bool is_input,
                         lawson_tensor_info* info);

// The plan with its graph read back from it.
Result<std::unique_ptr<lawson_plan>> make_plan_handle(Plan plan);

}  // namespace lawson::capi
