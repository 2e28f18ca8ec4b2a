// What the opaque handles of lawson.h are: plain structs, immutable once handed out (a plan's
// loaded state aside, which has its own lock).
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "base/json.h"
#include "engine/engine.h"
#include "front/spec.h"
#include "ir/graph.h"
#include "lawson/lawson.h"

struct lawson_text {
  std::string text;
};

struct lawson_device {
  lawson::Device device;
};

struct lawson_spec {
  lawson::front::Spec spec;
};

struct lawson_graph {
  lawson::ir::Graph graph;
};

struct lawson_verdict {
  lawson::Verdict verdict;
  lawson::Json json;
};

struct lawson_plan {
  struct Executable {
    std::shared_ptr<lawson::Loaded> loaded;
    lawson::Device device;
  };

  lawson::Plan plan;
  lawson::ir::Graph graph;
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

// Fills what a caller knows of a tensor's description.
Status write_tensor_info(const ir::Tensor& tensor, std::int64_t uid, bool is_input,
                         lawson_tensor_info* info);

// The plan with its graph read back from it.
Result<std::unique_ptr<lawson_plan>> make_plan_handle(Plan plan);

}  // namespace lawson::capi
