// Gradients of the activations: dy * f'(x).
#pragma once

#include "engine/reference/bounds.h"

namespace lawson::reference {

// f'(x). NaN for a NaN.
double slope_at(const ir::UnaryGrad& op, double x);

void add_unary_grad_errors(const ir::UnaryGrad& op, const Array& dy, const Array& x, Array& y,
                           const Arithmetic& arithmetic);

}  // namespace lawson::reference
