// layer_norm and rms_norm, forward and backward. Formulas: ir/ops.h.
#pragma once

#include "engine/reference/bounds.h"

namespace lawson::reference {

// Results in the order of the op's slots; those that nobody asked for are empty.
void norm(const ir::Norm& op, const Operands& operands, std::vector<Array>& results);
void norm_backward(const ir::NormBackward& op, const Operands& operands,
                   std::vector<Array>& results);

void add_norm_errors(const ir::Norm& op, const Operands& operands, std::vector<Array>& results,
                     const Arithmetic& arithmetic);
void add_norm_backward_errors(const ir::NormBackward& op, const Operands& operands,
                              std::vector<Array>& results, const Arithmetic& arithmetic);

// Per slice of x along the axes, in the order of the statistics' elements.
struct NormStats {
  std::vector<double> mean;      // rms: 0
  std::vector<double> variance;  // rms: the mean of the squares
  std::vector<double> inv_std;
};
NormStats norm_stats(const ir::Norm& op, const Array& x);

// Calls visit(element of x, its slice, its scale).
template <typename Visit>
void for_each_in_slices(const Array& x, const Dims& axes, const Array& scale, Visit visit) {
  for_each_index(x.shape, {reduced_strides(x.shape, axes), broadcast_strides(scale.shape, x.shape)},
                 [&](std::size_t i, const auto& at) { visit(i, at[0], at[1]); });
}

// Elements of one slice.
std::size_t slice_size(const Dims& shape, const Dims& axes);

}  // namespace lawson::reference
