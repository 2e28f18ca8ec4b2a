// New keys or values into a cache, as written in ops.h.
#pragma once

#include <vector>

#include "base/status.h"
#include "engine/reference/evaluate.h"

namespace lawson::reference {

// Are lengths and pages inside of the cache? Nothing else may be called otherwise.
Status check_cache_append(const Operands& operands);
void cache_append(const Operands& operands, Array& result);
void add_cache_append_errors(const Operands& operands, Array& result);

}  // namespace lawson::reference
