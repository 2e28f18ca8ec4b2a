// Whether two plans of one graph give the same numbers, where the oracle would take too long: the
// outputs of one under a bound, derived from the graph and the engine's arithmetic, on how far two
// right plans may be apart.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "plan/inputs.h"
#include "plan/verify.h"

namespace lawson::plan {

// Empty when they agree, else what does not, and where. `first` and `other` as make_outputs gave
// them, after an execution each with equal inputs.
//
// |a - b| <= 2 (u |a| + e S) elementwise: u is the roundoff of the output's type, S the output's
// root mean square, and e the sum over the nodes of what each may add to values of the size of S:
// an accumulation over K terms K times its roundoff, a stored or converted intermediate its type's,
// a function the engine's. Graphs of integers have to agree exactly. Where an op jumps (rounding,
// comparing), one element in a thousand may be on the other side.
std::string disagreement(const ir::Graph& graph, const Arithmetic& arithmetic,
                         std::span<const Buffer> first, std::span<const Buffer> other);

}  // namespace lawson::plan
