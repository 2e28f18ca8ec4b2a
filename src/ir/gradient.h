// The backward graph of a graph: from cotangents of the outputs to gradients of inputs.
#pragma once

#include <string>
#include <vector>

#include "ir/graph.h"

namespace lawson::ir {

// Inputs: those of the forward graph that are read (names and layouts as they were), then one
// cotangent `d_NAME` for each float output NAME. Outputs: one gradient `d_NAME` for each name of
// `wrt`, in that order, with that input's shape and dtype; zeros where no output depends on it.
// Cotangents and gradients are contiguous. The forward's values are computed again; the graph is
// simplified.
//
// Cotangents of f64 tensors are f64, of all narrower ones f32; each is rounded to its input's dtype
// at the end. A matmul multiplies its cotangent in the other operand's dtype where that is f16 or
// bf16 (in bf16 where it is a float of 8 bits), and accumulates in f32, as mixed-precision training
// does. layer_norm, rms_norm and attention take and give the dtypes of their own backward ops.
//
// Where a function has no derivative: min, max of equal operands: half to each; reduce_max, _min,
// _amax: equal parts to all that reach the extremum; abs, norm1, amax: 0 at 0; norm2: 0 at 0;
// clamp: 1 at both ends; ceil, floor, round, sign, conversions to integers: 0; mod(a, b): 1 and
// -trunc(a / b); pow: 0 to the exponent of a base 0, to the base of an exponent 0; activations: as
// UnaryGrad says. Integer and bool tensors have no gradient.
//
// Errors: invalid_argument for a name that is no float input, that is given twice or that would
// clash with `d_NAME`, and for a graph without a float output; unsupported, naming the op and where
// it was written, for scaled_matmul (its operands are quantised), cache_append, the backward ops of
// norms and of attention (second order), and what attention has no gradient of (scale, mask,
// slopes; stats and max_logit; paged caches).
Result<Graph> gradient(const Graph& forward, const std::vector<std::string>& wrt);

}  // namespace lawson::ir
