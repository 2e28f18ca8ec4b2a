// What happened in a worker, on its way to the host that counts and shows it.
#pragma once

#include "base/json.h"
#include "diag/trace.h"

namespace lawson::diag {

// From here on this process keeps what happens for its host, and tells nobody else of it.
void collect_for_host() noexcept;
// What was kept since the last call; clears it.
Json take_collected();
// In the host: counts and tells it as if it had happened on this thread. Whatever arrives, nothing
// fails: what cannot be read is left out.
void accept_collected(const Json& document) noexcept;

namespace detail {
void collect(const Happening& happening);
}

}  // namespace lawson::diag
