// The axes of the attention cases: every row of the feature table of docs/spec.md, and how a row of
// levels becomes a spec.
#pragma once

#include <optional>
#include <vector>

#include "cases/cases.h"
#include "cases/covering.h"
#include "front/attention.h"

namespace lawson::cases {

struct AttentionDraw {
  front::AttentionSpec spec;
  plan::InputStyle style = plan::InputStyle::normal;
};

std::vector<Axis> attention_axes(Profile profile);

// The spec of a row, with what the levels leave open (lengths within their class, sizes, which of
// several tensors) drawn from the row and `seed`. nullopt where the front refuses the combination,
// or where a level would be without effect (masked rows without a mask).
std::optional<AttentionDraw> draw_attention(const std::vector<Axis>& axes, const Row& row,
                                            std::uint64_t seed, Profile profile);

}  // namespace lawson::cases
