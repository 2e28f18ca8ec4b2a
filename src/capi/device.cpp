// Settings, devices, and what `info` reports.
#include <array>
#include <cstddef>
#include <cstdlib>

#include "capi/context.h"
#include "capi/guard.h"
#include "capi/handles.h"
#include "capi/store.h"
#include "diag/settings.h"

namespace lawson::capi {
namespace {

constexpr std::array kSettingsPrefixes{offsetof(lawson_settings, max_workers)};

// What changes the answers: docs/design.md, "Environment variables" and the search for cuDNN.
constexpr std::array kVariables{"LAWSON_CUDNN",   "LAWSON_NVRTC",        "LAWSON_LIBEXEC",
                                "LAWSON_ENGINE",  "LAWSON_POLICY",       "LAWSON_NUM_THREADS",
                                "LAWSON_CACHE",   "LAWSON_CACHE_DIR",    "LAWSON_BUNDLE_PATH",
                                "LAWSON_CPU_ISA", "VIRTUAL_ENV",         "CUDA_HOME",
                                "CUDA_PATH",      "CUDA_VISIBLE_DEVICES"};

Json describe_process() {
  Json variables = Json::object();
  const auto describe = [&](const char* name) {
    if (const char* value = std::getenv(name)) variables[name] = value;
  };
  for (const char* name : kVariables) describe(name);
  for (const std::string& name : diag::setting_names()) describe(name.c_str());
  return {{"version", lawson_version()},          {"library", library_path()},
          {"libexec", libexec_folder()},          {"compiler", LAWSON_COMPILER_TEXT},
          {"build_type", LAWSON_BUILD_TYPE_TEXT}, {"environment", std::move(variables)}};
}

// What the process keeps: how much there is, and how it came.
template <typename T>
Json describe_cache(const char* what, const plan::SharedCache<T>& cache) {
  const plan::CacheCounters counters = cache.counters();
  return {{what, cache.size()},
          {"bytes", cache.bytes()},
          {"most", cache.budget().count},
          {"most_bytes", cache.budget().bytes},
          {"hits", counters.hits},
          {"builds", counters.builds},
          {"failures", counters.failures},
          {"evictions", counters.evictions}};
}

Json describe_device(const Device& device) {
  Json document = device_to_json(device);
  document["present"] = device.present();
  document["device"] = device.kind == Device::Kind::cpu ? "cpu" : "cuda";
  return document;
}

}  // namespace
}  // namespace lawson::capi

using namespace lawson;
using namespace lawson::capi;

extern "C" {

lawson_status lawson_configure(const lawson_settings* settings) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(settings, "settings"));
    lawson_settings given{};
    LAWSON_CHECK(read_struct(settings, given, "lawson_settings", kSettingsPrefixes));
    return configure(given);
  });
}

lawson_status lawson_info(lawson_text** json) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(json, "json"));
    LAWSON_TRY(plan::Planner * planner, capi::planner());
    Json document = describe_process();
    document.update(planner->info());
    document["store"] = describe_store();
    document["plan_cache"] = describe_cache("plans", planner->cache());
    document["verdict_cache"] = describe_cache("verdicts", planner->verdicts());
    return give_text(dump(document), json);
  });
}

lawson_status lawson_device_find(const char* name, lawson_device** device) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(name, "name"));
    LAWSON_CHECK(require(device, "device"));
    LAWSON_TRY(plan::Planner * planner, capi::planner());
    LAWSON_TRY(Device found, planner->find_device(name));
    *device = new lawson_device{std::move(found)};
    return {};
  });
}

void lawson_device_destroy(lawson_device* device) {
  delete device;
}

const char* lawson_device_name(const lawson_device* device) {
  return device == nullptr ? "" : device->device.name.c_str();
}

int lawson_device_is_present(const lawson_device* device) {
  return device != nullptr && device->device.present() ? 1 : 0;
}

lawson_status lawson_devices_json(lawson_text** json) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(json, "json"));
    LAWSON_TRY(plan::Planner * planner, capi::planner());
    LAWSON_TRY(std::vector<Device> devices, planner->devices());
    Json list = Json::array();
    for (const Device& device : devices) list.push_back(describe_device(device));
    return give_text(dump(list), json);
  });
}

}  // extern "C"
