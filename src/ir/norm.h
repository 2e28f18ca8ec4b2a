// Inference of layer_norm and rms_norm, forward and backward.
#pragma once

#include <optional>
#include <vector>

#include "ir/infer.h"

namespace lawson::ir {

// x's shape with 1 on `axes`: what mean and inv_std have.
Dims norm_stats_shape(const Dims& x, const Dims& axes);
// x's shape with 1 elsewhere than on `axes`: what scale and bias have, leading 1s aside.
Dims norm_scale_shape(const Dims& x, const Dims& axes);

Result<std::vector<Inferred>> infer_norm(const Norm& op, const std::vector<const Tensor*>& operands,
                                         std::optional<DType> dtype);
Result<std::vector<Inferred>> infer_norm_backward(const NormBackward& op,
                                                  const std::vector<const Tensor*>& operands,
                                                  std::optional<DType> dtype);

}  // namespace lawson::ir
