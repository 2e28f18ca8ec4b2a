// The process's loaded plans: one build for each key and live device however many threads ask at
// once, bounded in number and in the host's bytes, and not poisoned by what failed.
#pragma once

#include "diag/diag.h"
#include "engine/engine.h"
#include "plan/shared_cache.h"

namespace lawson::plan {

class PlanCache : public SharedCache<Loaded> {
 public:
  using Executable = Value;

  // Inserts and evictions are told to diag.
  explicit PlanCache(CacheBudget budget);
};

// What events about a loaded plan are about.
diag::Subject subject_of(const Loaded& loaded);

}  // namespace lawson::plan
