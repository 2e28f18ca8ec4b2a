// Shape and dtype inference of one node: check operands -> infer results.
#pragma once

#include <optional>
#include <vector>

#include "ir/graph.h"

namespace lawson::ir {

struct Inferred {
  DType dtype;
  Dims shape;
};

// `operands` has one entry per slot, nullptr where absent. `dtype` is the requested type of the
// first result. Returns one entry per result slot (also for optional results).
Result<std::vector<Inferred>> infer(const Op& op, const std::vector<const Tensor*>& operands,
                                    std::optional<DType> dtype);

// How many operand slots an op has.
std::size_t input_slots(const Op& op);
std::size_t output_slots(const Op& op);

// The type that a pointwise op of mixed operands computes: floats win over integers, wider wins,
// f16 with bf16 gives f32.
DType promote(DType a, DType b);

}  // namespace lawson::ir
