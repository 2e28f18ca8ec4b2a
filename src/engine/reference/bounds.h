// Running error analysis: how far a correct engine may be from the float64 values, per element.
//
// Every op propagates the errors of its operands (exactly for monotone functions: both ends of the
// operand's interval are evaluated, so that kinks, jumps and flipped decisions are covered) and
// adds its own rounding under the given Arithmetic. An infinite error means that anything is
// accepted.
#pragma once

#include <limits>
#include <span>
#include <vector>

#include "engine/engine.h"
#include "engine/reference/evaluate.h"

namespace lawson::reference {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Error of value `v` given that a correct result may also be any of `others`.
double distance(double v, std::span<const double> others);
// The propagated error with the op's own rounding, which a value that is not finite does not have.
double with_own(double value, double propagated, double own);
// Error of a NaN that comes from a NaN among the operands, which have these errors.
double of_nan(double operand_errors);
// How far an engine's operand may be from element `i`: its error, and what happens where a float
// op reads it: an integer is rounded, and the smallest magnitudes may be flushed.
double operand_error(const Array& x, std::size_t i, bool in_float, const Arithmetic& arithmetic);

// Error of a sum of `count` products or terms, in units of accumulate_roundoff * sum|terms|.
// The worst case of any order of summation is `count`; rounding to nearest behaves like the square
// root (4 deviations here); tensor cores truncate, but once per 8 or more products.
double accumulation_growth(std::size_t count);

// Smallest magnitudes may be flushed to zero by engines that compute in f32.
double flush_floor(const Arithmetic& arithmetic);
// The largest finite partial result: what goes beyond may be infinite on the way.
double accumulator_range(const Arithmetic& arithmetic);

// Sets the error of every present result. Does not yet account for the result's storage.
void add_errors(const ir::Graph& graph, const ir::Node& node, const Operands& operands,
                std::vector<Array>& results, const Arithmetic& arithmetic);
void add_attention_errors(const ir::Graph& graph, const ir::Node& node, const Operands& operands,
                          std::vector<Array>& results, const Arithmetic& arithmetic);
void add_attention_backward_errors(const ir::Graph& graph, const ir::Node& node,
                                   const Operands& operands, std::vector<Array>& results,
                                   const Arithmetic& arithmetic);

// Errors that are all 0 are left out: the array is exact.
void drop_zero_errors(Array& array);
// Rounds every element to the array's dtype, with or without error.
void round_exactly(Array& array);
// An intermediate that an engine may keep wider than its dtype, or round to it.
void allow_rounding(Array& array, const Arithmetic& arithmetic);
// A result in memory: values stay unrounded (but saturated), errors include the rounding.
void round_output(Array& array, const Arithmetic& arithmetic);

}  // namespace lawson::reference
