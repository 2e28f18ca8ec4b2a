// Reductions over axes.
#pragma once

#include "engine/reference/bounds.h"

namespace lawson::reference {

void reduce(const ir::Reduce& op, const Array& x, Array& y);
void add_reduce_errors(const ir::Reduce& op, const Array& x, Array& y,
                       const Arithmetic& arithmetic);

}  // namespace lawson::reference
