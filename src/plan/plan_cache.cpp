#include "plan/plan_cache.h"

namespace lawson::plan {

diag::Subject subject_of(const Loaded& loaded) {
  const Plan& plan = loaded.plan();
  return {plan.engine, loaded.label.pass, plan.key, loaded.label.ordinal};
}

PlanCache::PlanCache(CacheBudget budget)
    : SharedCache{budget,
                  {.bytes = [](const Loaded& loaded) { return std::uint64_t{loaded.host_bytes()}; },
                   .inserted =
                       [](const Loaded& loaded) {
                         diag::record(diag::Event::cache_graph, subject_of(loaded));
                       },
                   .evicted =
                       [](const Loaded& loaded) {
                         diag::record(diag::Event::evict, subject_of(loaded));
                       }}} {}

}  // namespace lawson::plan
