// Values of one node in float64. Results are not rounded to their dtype here.
#pragma once

#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/reference/array.h"
#include "ir/graph.h"

namespace lawson::reference {

// One per slot; nullptr where the operand is absent.
using Operands = std::vector<const Array*>;

// Lengths, offsets and page numbers are data: whether those of this node can be what they are for.
Status check_operands(const ir::Graph& graph, const ir::Node& node, const Operands& operands);

// The operands are checked. One array per result slot; absent results stay empty.
std::vector<Array> evaluate(const ir::Graph& graph, const ir::Node& node, const Operands& operands);

// The scalar functions, for the error analysis too.
double apply(const ir::Unary& unary, double x);
// `integer`: the result is an integer; division truncates toward zero.
double apply(ir::BinaryKind kind, double a, double b, bool integer);
bool apply(ir::CompareKind kind, double a, double b);

// Position in the reduced result for every element of an operand of `shape`.
Dims reduced_strides(const Dims& shape, const Dims& axes);
// Where the elements of a reshape, broadcast, transpose or slice of `x` come from: start, strides.
std::pair<std::size_t, Dims> view_of(const ir::Op& op, const Array& x, const Dims& shape);

}  // namespace lawson::reference
