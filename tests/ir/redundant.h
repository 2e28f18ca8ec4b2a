// The same computation, written with ops that change nothing.
#pragma once

#include <cstdint>

#include "ir/graph.h"

namespace lawson::ir::test {

// Conversions there and back, views that undo each other, arithmetic with neutral constants,
// selects of equals, things computed twice and things that nothing reads. Bit for bit the same
// results.
Graph redundant(const Graph& graph, std::uint64_t seed);

}  // namespace lawson::ir::test
