// The process's answers to whether something runs, supported and refused, bounded for themselves.
// An error is no answer and is not kept; an undecided verdict is: another engine would have to be
// asked, and this one would say the same again.
#pragma once

#include "engine/engine.h"
#include "plan/shared_cache.h"

namespace lawson::plan {

class VerdictCache : public SharedCache<const Verdict> {
 public:
  explicit VerdictCache(CacheBudget budget);
};

// Why nothing was built, with the words that the first who asked was told.
class RefusalCache : public SharedCache<const Error> {
 public:
  explicit RefusalCache(CacheBudget budget);
};

// The host's memory that a verdict takes.
std::uint64_t host_bytes(const Verdict& verdict);

}  // namespace lawson::plan
