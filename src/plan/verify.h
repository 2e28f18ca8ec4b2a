// Comparing an engine's outputs with the oracle: |out - value| <= bound elementwise, NaN and
// infinities in the same places, every element that is there written, nothing written beside them.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "plan/inputs.h"

namespace lawson::plan {

struct OutputComparison {
  std::string name;
  ir::TensorId id = ir::kNone;
  std::int64_t elements = 0;
  std::int64_t unjudged = 0;       // elements where the oracle accepts anything
  std::int64_t wrong = 0;          // elements outside of their bound, of any of the next kinds too
  std::int64_t wrong_pattern = 0;  // NaN or infinity on one side only
  std::int64_t unwritten = 0;      // still poison
  double max_error = 0;            // over the finite elements
  double max_ratio = 0;            // error / bound; infinite where the bound is 0 and was missed
  Dims first_wrong;                // index of the first element outside of its bound
  double expected = 0;             // at first_wrong
  double actual = 0;
  double bound = 0;
  bool guards_intact = true;  // memory before and after the tensor
  bool gaps_intact = true;    // memory that the strides leave out, and rows that nothing is in

  bool ok() const { return wrong == 0 && guards_intact && gaps_intact; }
};

struct Comparison {
  std::vector<OutputComparison> outputs;

  bool ok() const;
  double max_ratio() const;
  // "o: max error 1.2e-3, 0.31 of its bound; stats: ..." or what is wrong and where.
  std::string text() const;
};

// `outputs` as make_outputs(graph) gave them, after execution; `expected` from Engine::oracle.
Comparison compare(const ir::Graph& graph, std::span<const Buffer> outputs,
                   std::span<const OracleOutput> expected);

}  // namespace lawson::plan
