// What a fusion looks like that cuDNN is known to compute wrongly: each gives the node that does
// it, or nullptr. Rows of the table in defects.cpp.
#pragma once

#include "ir/graph.h"

namespace lawson::cudnn {

// A pointwise operation that repeats an operand with at most one dim above 1.
const ir::Node* repeats_a_vector(const ir::Graph& graph);
// A matmul with an operand that is computed inside the fusion from an 8-bit input with unaligned
// rows.
const ir::Node* mixes_unaligned_operand(const ir::Graph& graph);
// A matmul of what is made from another one's result.
const ir::Node* chained_product(const ir::Graph& graph);
// A matmul beside another one, neither made from the other, with a K of its own.
const ir::Node* has_products_of_two_depths(const ir::Graph& graph);
// An operation whose result has more batches than every product that it is made from.
const ir::Node* repeats_a_product(const ir::Graph& graph);
// A conversion to int4 of which something else is made.
const ir::Node* makes_int4(const ir::Graph& graph);
// A reduction of an output that is one column.
const ir::Node* reduces_a_stored_column(const ir::Graph& graph);
// A matmul with an f32 operand that is computed inside the fusion from an 8-bit float.
const ir::Node* widens_bytes_to_f32(const ir::Graph& graph);
// An operation before a matmul that repeats an 8-bit or bool input.
const ir::Node* repeats_bytes_before_product(const ir::Graph& graph);

}  // namespace lawson::cudnn
