// Products of block-scaled matrices: dequantised, then multiplied.
#pragma once

#include "engine/reference/bounds.h"

namespace lawson::reference {

void scaled_matmul(const ir::Graph& graph, const ir::Node& node, const Operands& operands,
                   Array& c);
void add_scaled_matmul_errors(const ir::Graph& graph, const ir::Node& node,
                              const Operands& operands, Array& c, const Arithmetic& arithmetic);

}  // namespace lawson::reference
