// Bundles: several plans in one file.
#include "plan/bundle.h"

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "capi/context.h"
#include "capi/guard.h"
#include "capi/handles.h"
#include "plan/atomic_file.h"

struct lawson_bundle {
  lawson::plan::Bundle bundle;
};

namespace lawson::capi {
namespace {

constexpr std::array<std::size_t, 0> kEntryPrefixes{};

Result<std::vector<const Plan*>> read_plans(const char* path, const lawson_plan* const* plans,
                                            std::size_t count) {
  LAWSON_CHECK(require(path, "path"));
  if (count > 0) LAWSON_CHECK(require(plans, "plans"));
  std::vector<const Plan*> list;
  for (std::size_t i = 0; i < count; ++i) {
    LAWSON_CHECK(require(plans[i], fmt::format("plans[{}]", i)));
    list.push_back(&plans[i]->plan);
  }
  return list;
}

// A symbolic link stays: the file that it points to is replaced, or made.
Result<std::string> destination(const std::string& path) {
  constexpr int kMostLinks = 40;  // as Linux
  std::filesystem::path found = path;
  std::error_code code;
  for (int links = 0; std::filesystem::is_symlink(found, code); ++links) {
    if (links == kMostLinks) return plan::io_error(path, "cannot be written", ELOOP);
    const std::filesystem::path next = std::filesystem::read_symlink(found, code);
    if (code) return plan::io_error(path, "cannot be written", code.value());
    found = found.parent_path() / next;
  }
  return found.string();
}

// 32 hex digits and a NUL.
template <std::size_t N>
void write_hash(std::string_view hash, char (&target)[N]) {
  const std::size_t size = std::min(hash.size(), N - 1);
  std::memcpy(target, hash.data(), size);
  target[size] = '\0';
}

}  // namespace
}  // namespace lawson::capi

using namespace lawson;
using namespace lawson::capi;

extern "C" {

lawson_status lawson_bundle_write(const char* path, const lawson_plan* const* plans, size_t count) {
  return guard([&]() -> Status {
    LAWSON_TRY(const std::vector<const Plan*> list, read_plans(path, plans, count));
    LAWSON_TRY(const std::string file, destination(path));
    return plan::write_bundle(file, list);
  });
}

lawson_status lawson_bundle_append(const char* path, const lawson_plan* const* plans,
                                   size_t count) {
  return guard([&]() -> Status {
    LAWSON_TRY(const std::vector<const Plan*> list, read_plans(path, plans, count));
    LAWSON_TRY(const std::string file, destination(path));
    return plan::append_to_bundle(file, list);
  });
}

lawson_status lawson_bundle_open(const char* path, lawson_bundle** bundle) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(path, "path"));
    LAWSON_CHECK(require(bundle, "bundle"));
    LAWSON_TRY(plan::Bundle opened, plan::Bundle::open(path));
    *bundle = new lawson_bundle{std::move(opened)};
    return {};
  });
}

void lawson_bundle_destroy(lawson_bundle* bundle) {
  delete bundle;
}

size_t lawson_bundle_size(const lawson_bundle* bundle) {
  return bundle == nullptr ? 0 : bundle->bundle.size();
}

lawson_status lawson_bundle_plan(const lawson_bundle* bundle, size_t index, lawson_plan** plan) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(bundle, "bundle"));
    LAWSON_CHECK(require(plan, "plan"));
    LAWSON_TRY(Plan read, bundle->bundle.plan(index));
    LAWSON_TRY(auto handle, make_plan_handle(std::move(read)));
    *plan = handle.release();
    return {};
  });
}

lawson_status lawson_bundle_find(const lawson_bundle* bundle, const char* key, lawson_plan** plan) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(bundle, "bundle"));
    LAWSON_CHECK(require(key, "key"));
    LAWSON_CHECK(require(plan, "plan"));
    const auto index = bundle->bundle.find(key);
    if (!index) {
      *plan = nullptr;
      return {};
    }
    LAWSON_TRY(Plan read, bundle->bundle.plan(*index));
    LAWSON_TRY(auto handle, make_plan_handle(std::move(read)));
    *plan = handle.release();
    return {};
  });
}

lawson_status lawson_bundle_entry_info(const lawson_bundle* bundle, size_t index,
                                       lawson_bundle_entry* entry) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(bundle, "bundle"));
    LAWSON_CHECK(require(entry, "entry"));
    const std::size_t count = bundle->bundle.size();
    if (index >= count) return invalid("index: plan {} of {} does not exist", index, count);
    const plan::BundleEntry read = bundle->bundle.entry(index);
    lawson_bundle_entry filled{};
    filled.struct_size = sizeof(filled);
    write_hash(read.key, filled.key);
    write_hash(read.plan_id, filled.plan_id);
    filled.target = read.origin->target.c_str();
    filled.engine = read.origin->engine.c_str();
    filled.engine_version = read.origin->engine_version.c_str();
    filled.device_fingerprint = read.origin->device_fingerprint.c_str();
    filled.size = static_cast<std::size_t>(read.bytes);
    filled.stored_size = static_cast<std::size_t>(read.stored_bytes);
    return write_struct(filled, entry, "lawson_bundle_entry", kEntryPrefixes);
  });
}

lawson_status lawson_compile_key(const lawson_graph* graph, const lawson_device* device,
                                 const lawson_options* options, lawson_text** key) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(graph, "graph"));
    LAWSON_CHECK(require(device, "device"));
    LAWSON_CHECK(require(key, "key"));
    LAWSON_TRY(const Asked asked, read_options(options));
    LAWSON_TRY(plan::Planner * planner, capi::planner());
    LAWSON_TRY(std::string found,
               planner->key(graph->graph, device->device, asked.engine, asked.options));
    return give_text(std::move(found), key);
  });
}

}  // extern "C"
