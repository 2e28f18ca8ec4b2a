// How messages name an op of a graph.
#pragma once

#include <string>

#include "ir/graph.h"

namespace lawson::ir {

// "op 'matmul' (h, mlp.cpp:12)": its name, its first result, and where it was written, if known.
std::string op_text(const Graph& graph, const Node& node);

}  // namespace lawson::ir
