// cuDNN's attention as a NativeAttention describes it, in plain float64 loops over host memory,
// with what cuDNN is known to leave undone: what Lawson's steps have to make good.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "engine/cudnn/native.h"

namespace lawson::cases {

using Places = std::map<std::int64_t, void*>;  // host memory by uid

// Why cudnn-frontend does not take it, as far as a variant relies on that; "": it may.
std::string refused_by_frontend(const cudnn::NativeAttention& native);

// Rows that see nothing become NaN, rows between ragged sequences and the gradients of what is not
// there are left as they are. An error where something would be read or written outside of a
// tensor.
Status run_native(const cudnn::NativeAttention& native, const Places& places);

}  // namespace lawson::cases
