// Bundles: several plans in one file.
#include "plan/bundle.h"

#include "capi/guard.h"
#include "capi/handles.h"

struct lawson_bundle {
  lawson::plan::Bundle bundle;
};

using namespace lawson;
using namespace lawson::capi;

extern "C" {

lawson_status lawson_bundle_write(const char* path, const lawson_plan* const* plans, size_t count) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(path, "path"));
    if (count > 0) LAWSON_CHECK(require(plans, "plans"));
    std::vector<const Plan*> list;
    for (std::size_t i = 0; i < count; ++i) {
      LAWSON_CHECK(require(plans[i], fmt::format("plans[{}]", i)));
      list.push_back(&plans[i]->plan);
    }
    return plan::write_bundle(path, list);
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

}  // extern "C"
