// Where the tensors of an attention lie: layout words to strides.
#pragma once

#include <string>
#include <vector>

#include "front/attention.h"

namespace lawson::front {

// Every layout word for messages: "bshd", ..., "thd_th2d".
const std::vector<std::string>& layout_names();

// Strides in [b,h,s,d] order of tensor 'q', 'k', 'v' or 'o' with `shape` [b,h,s,d] (ragged: b = 1
// and all tokens along s; paged: pages and their tokens). q, k and v of a packed layout have the
// strides of the memory that they share; o lies like q would alone.
Dims layout_strides(const Layout& layout, char tensor, const Dims& shape);

}  // namespace lawson::front
