// How graphs and devices are called in diagnostics.
#pragma once

#include <string_view>

#include "diag/diag.h"
#include "engine/device.h"
#include "ir/graph.h"

namespace lawson {

// diag::kForward, kBackward or kFusion.
std::string_view pass_of(const ir::Graph& graph);

// Refers to `engine` and `key`.
diag::Subject subject_of(std::string_view engine, const ir::Graph& graph, const Device& device,
                         std::string_view key);

}  // namespace lawson
