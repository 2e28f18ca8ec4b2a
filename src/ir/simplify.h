// Algebraically safe clean-ups: what is left computes the same bits by fewer ops, so that how a
// computation was written does not change its key.
#pragma once

#include "ir/graph.h"

namespace lawson::ir {

// Removes conversions, views, clamps, selects and arithmetic that change no bit; joins chains of
// views and of exact conversions; computes each thing once; folds ops on scalar constants where the
// result is exact. Inputs stay, also those that nothing reads; outputs keep number, name and
// layout, and no output becomes another name of an input or of another output: what is the same
// value there is copied by a convert to its own type. Deterministic and idempotent.
Graph simplify(const Graph& graph);

}  // namespace lawson::ir
