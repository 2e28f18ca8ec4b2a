// Products of matrices, in float64, with their error bounds.
#pragma once

#include "engine/engine.h"
#include "engine/reference/array.h"

namespace lawson::reference {

// c = a x b. Integers are summed exactly; the caller saturates the sum to c's dtype (where an
// engine with i32 accumulators would wrap, the error analysis marks the element as unjudged).
void matmul(const Array& a, const Array& b, Array& c);
void add_matmul_errors(const Array& a, const Array& b, Array& c, const Arithmetic& arithmetic);

// How an engine rounds one product of matrices.
struct ProductRounding {
  double relative = 0;  // of sum |a b|
  double floor = 0;     // absolute
  double range = 0;     // of the accumulator: beyond it an element is unjudged
};
// With the errors that the operands have.
void add_product_errors(const Array& a, const Array& b, Array& c, const ProductRounding& rounding);

}  // namespace lawson::reference
