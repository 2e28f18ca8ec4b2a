// Specs near a given one, for `explain`: each changes one thing and says what. They are proposals;
// whoever shows them probes them first.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/json.h"
#include "front/spec.h"

namespace lawson::front {

struct Neighbour {
  std::string change;  // "head_dim_qk 100 -> 104 (zero padding keeps the result)"
  std::string field;   // the spec's field, "ops[3]", "inputs[0].dtype"
  // The caller can transform the computation into this one without changing its result.
  bool exact = false;
  // Makes the change in a document; two of different fields can be made one after the other
  // unless the change is `structural` (it renumbers ops).
  std::function<void(Json&)> apply;
  bool structural = false;
};

// Nearest first: exact rewrites, then what only costs speed or memory, then features left out, then
// other sizes. Only changes whose document is a valid spec with another graph.
std::vector<Neighbour> neighbours(const Spec& spec);

// The spec after the changes, in order; an error when that is no valid spec.
Result<Spec> apply(const Spec& spec, const std::vector<const Neighbour*>& changes);

}  // namespace lawson::front
