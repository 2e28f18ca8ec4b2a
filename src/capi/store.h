// The store as lawson_info shows it.
#pragma once

#include "base/json.h"

namespace lawson::capi {

// {"mode"} and, unless it is off, {"folder", "budget_bytes", "entries", "bytes" | "error"}.
Json describe_store();

}  // namespace lawson::capi
