// The same computation with rows and columns exchanged: C^T = B^T A^T. Every tensor keeps its
// memory and its number, and has its last two dims, and their strides, exchanged. cuDNN's engines
// are not symmetric: cuBLASLt's (0) adds a vector only along the rows of what cuDNN calls the
// result.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "ir/graph.h"

namespace lawson::cudnn {

// Only for lowering: a result may have dims of 1 that the graph's own lacks. nullopt: the graph has
// no product, or an op that is not the same when turned.
std::optional<ir::Graph> turned(const ir::Graph& graph);

// Plans of the turned graph have names of their own: "turned:eng0_k24=0".
inline constexpr std::string_view kTurned = "turned:";
std::string turned_name(std::string_view plan);
bool is_turned(std::string_view plan);
std::string_view plain_name(std::string_view plan);  // without it

}  // namespace lawson::cudnn
