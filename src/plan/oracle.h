// What an engine's outputs are compared with.
#pragma once

#include <span>
#include <vector>

#include "engine/engine.h"
#include "plan/inputs.h"

namespace lawson::plan {

// The reference engine's outputs under the bounds of `engine`. An engine whose dropout has a random
// stream of its own is compared under the mask that it gave out with `outputs` (the result
// `dropped` of the graph); without that result: unsupported.
Result<std::vector<OracleOutput>> expected_outputs(Engine& engine, Engine& reference,
                                                   const ir::Graph& graph,
                                                   std::span<const Buffer> inputs,
                                                   std::span<const Buffer> outputs);

}  // namespace lawson::plan
