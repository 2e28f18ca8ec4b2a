// Random graphs for property tests: every op but attention, shapes up to rank 3, some strides.
#pragma once

#include <cstdint>

#include "base/json.h"
#include "ir/graph.h"

namespace lawson::ir::test {

Graph random_graph(std::uint64_t seed);

// The graph's document with other tensor names, its ops in another dependency order, an op that
// nothing reads, and other run-time data: another way to write the same computation.
Json rewritten(const Graph& graph, std::uint64_t seed);

}  // namespace lawson::ir::test
