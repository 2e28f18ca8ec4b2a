// The strongest verdict: execute on the device with generated inputs and compare with the oracle.
#pragma once

#include <cstdint>

#include "engine/engine.h"
#include "plan/verify.h"

namespace lawson::plan {

// `reference` gives the oracle. The comparison says what is wrong; an error, that it did not come
// to one.
Result<Comparison> run_and_compare(const ir::Graph& graph, const Plan& plan, Engine& engine,
                                   Engine& reference, const Device& device, std::uint64_t seed);

}  // namespace lawson::plan
