// What the oracle expects of a case on an engine whose dropout stream is its own: the mask that the
// engine dumps becomes an operand of the oracle's graph.
#pragma once

#include <string>
#include <vector>

#include "cases/cases.h"
#include "engine/engine.h"
#include "plan/inputs.h"

namespace lawson::cases {

// What a run is held against: inputs, and what the oracle says of them.
struct Expected {
  std::vector<plan::Buffer> inputs;
  std::vector<OracleOutput> outputs;
};

Result<Expected> expected_of(Engine& engine, Engine& reference, const Case& item,
                             const ir::Graph& graph);

// Which softmax weights the engine's forward keeps for the case's seed and offset, in the logical
// order of [b,h,sq,skv]: 0 or 1, and 2 for what no row sees. `dumped`: the mask that the engine
// dumps; `read`: off its output, for values that are unit vectors. `unsupported` where that is not
// possible.
Result<std::vector<double>> dumped_mask(Engine& engine, const Device& device, Engine& reference,
                                        const Case& item);
Result<std::vector<double>> read_mask(Engine& engine, const Device& device, Engine& reference,
                                      const Case& item);

// With that mask; `graph` is the case's own, with seed and offset.
Result<Expected> expected_with_mask(Engine& engine, Engine& reference, const Case& item,
                                    const ir::Graph& graph, std::vector<double> mask);

// "" when the share of kept weights is within six standard deviations; `kept` is that share.
std::string wrong_rate(const std::vector<double>& mask, double probability, double& kept);

}  // namespace lawson::cases
