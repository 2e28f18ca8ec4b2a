// The store: what is in it, whether it is sound, what may leave; plans out of it and into it.
#include "plan/store.h"

#include <cmath>

#include "capi/guard.h"
#include "capi/handles.h"
#include "capi/store.h"
#include "plan/store_build.h"

struct lawson_store {
  explicit lawson_store(lawson::plan::Store::Config config) : store{std::move(config)} {}

  lawson::plan::Store store;
};

namespace lawson::capi {
namespace {

constexpr std::int64_t kNsPerSecond = 1'000'000'000;

// A header may say anything in any bytes.
Json entry_to_json(const plan::StoredEntry& entry) {
  Json document{{"file", entry.file},
                {"kind", plan::to_string(entry.kind)},
                {"bytes", entry.bytes},
                {"last_use", entry.used_ns / kNsPerSecond}};
  if (!entry.header.key.empty()) {
    document["key"] = entry.header.key;
    document["target"] = entry.header.target;
    document["deviceless"] = entry.header.deviceless;
    document["engine"] = entry.header.engine;
    document["engine_version"] = entry.header.engine_version;
    document["lawson"] = entry.header.lawson;
    document["current"] = entry.header.lawson == plan::library_build();
  }
  if (!entry.defect.empty()) document["defect"] = entry.defect;
  if (entry.removed) document["removed"] = true;
  return document;
}

Json entries_to_json(const std::vector<plan::StoredEntry>& entries) {
  Json list = Json::array();
  for (const plan::StoredEntry& entry : entries) list.push_back(entry_to_json(entry));
  return list;
}

}  // namespace

Json describe_store() {
  const auto config = plan::Store::environment();
  if (!config.ok()) return {{"error", config.error().message}};
  Json document{{"mode", plan::to_string(config->mode)}};
  if (config->mode == plan::Store::Mode::off) return document;
  document["folder"] = config->folder;
  document["budget_bytes"] = config->budget_bytes;
  const auto usage = plan::Store{*config}.usage();
  if (usage.ok()) {
    document["entries"] = usage->entries;
    document["bytes"] = usage->bytes;
  } else {
    document["error"] = usage.error().message;
  }
  return document;
}

}  // namespace lawson::capi

using namespace lawson;
using namespace lawson::capi;

extern "C" {

lawson_status lawson_store_open(lawson_store** store) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(store, "store"));
    LAWSON_TRY(plan::Store::Config config, plan::Store::environment());
    if (config.mode == plan::Store::Mode::off) {
      return error(ErrorKind::unavailable,
                   "the store is off: LAWSON_CACHE is 'off', or neither LAWSON_CACHE_DIR nor "
                   "XDG_CACHE_HOME nor HOME says where it is");
    }
    *store = new lawson_store{std::move(config)};
    return {};
  });
}

void lawson_store_destroy(lawson_store* store) {
  delete store;
}

const char* lawson_store_folder(const lawson_store* store) {
  return store == nullptr ? "" : store->store.config().folder.c_str();
}

lawson_status lawson_store_list(const lawson_store* store, lawson_text** json) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(store, "store"));
    LAWSON_CHECK(require(json, "json"));
    LAWSON_TRY(const auto entries, store->store.list());
    return give_text(dump(entries_to_json(entries)), json);
  });
}

lawson_status lawson_store_verify(const lawson_store* store, int32_t remove, lawson_text** json) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(store, "store"));
    LAWSON_CHECK(require(json, "json"));
    LAWSON_TRY(const auto entries, store->store.check(remove != 0));
    return give_text(dump(entries_to_json(entries)), json);
  });
}

lawson_status lawson_store_prune(const lawson_store* store, int64_t max_bytes,
                                 double max_age_seconds, lawson_text** json) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(store, "store"));
    LAWSON_CHECK(require(json, "json"));
    if (std::isnan(max_age_seconds)) {
      return invalid("max_age_seconds: NaN is not allowed; expected seconds, negative for none");
    }
    plan::PruneRules rules;
    if (max_bytes >= 0) rules.max_bytes = static_cast<std::uint64_t>(max_bytes);
    if (max_age_seconds >= 0) {
      constexpr double kMost = 9e9;  // seconds; longer than any file's age
      rules.max_age_ns = static_cast<std::int64_t>(std::min(max_age_seconds, kMost) *
                                                   static_cast<double>(kNsPerSecond));
    }
    LAWSON_TRY(const plan::Pruned pruned, store->store.prune(rules));
    Json document{{"removed", pruned.removed},
                  {"removed_bytes", pruned.removed_bytes},
                  {"kept", pruned.kept},
                  {"kept_bytes", pruned.kept_bytes}};
    if (pruned.failure) document["failure"] = pruned.failure->message;
    return give_text(dump(document), json);
  });
}

lawson_status lawson_store_plan(const lawson_store* store, const char* key, lawson_plan** plan) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(store, "store"));
    LAWSON_CHECK(require(key, "key"));
    LAWSON_CHECK(require(plan, "plan"));
    LAWSON_TRY(Plan found, store->store.find_plan(key));
    LAWSON_TRY(auto handle, make_plan_handle(std::move(found)));
    *plan = handle.release();
    return {};
  });
}

lawson_status lawson_store_keep(lawson_store* store, const lawson_plan* plan) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(store, "store"));
    LAWSON_CHECK(require(plan, "plan"));
    return store->store.add(plan->plan);
  });
}

}  // extern "C"
