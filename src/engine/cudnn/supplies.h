// What executing a plan needs besides cuDNN's own bytes.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/cudnn/steps.h"

namespace lawson::cudnn {

// Tensors of Lawson's own, beyond the caller's uids: views of an input, zeros, scratch.
inline constexpr std::int64_t kFirstOwnUid = std::int64_t{1} << 20;

// A tensor of cuDNN's that is a part of one of the caller's.
struct DerivedBinding {
  std::int64_t uid = 0;
  std::int64_t source_uid = 0;
  std::int64_t byte_offset = 0;
};

// A tensor that Lawson supplies in the workspace, behind cuDNN's part.
struct OwnTensor {
  std::int64_t uid = 0;
  std::int64_t bytes = 0;
  bool zero = false;  // set to 0 before the plan runs
  bool ones = false;  // all bits set, for floats NaN: what the plan leaves out shows
};

// A by-value scalar of Lawson's own: a constant of the plan.
struct OwnScalar {
  std::int64_t uid = 0;
  double value = 0;
  DType dtype = DType::f32;
};

struct Supplies {
  std::vector<DerivedBinding> derived;
  std::vector<OwnTensor> own;
  std::vector<OwnScalar> scalars;
  std::vector<Step> before;
  std::vector<Step> after;
};

}  // namespace lawson::cudnn
