// The least that a graph's execution has to do: multiply-adds of its products, bytes of its inputs
// and outputs. What times are compared with.
#pragma once

#include "engine/engine.h"

namespace lawson::plan {

struct Work {
  double flops = 0;  // of products; causal attention counts the half, backward 2.5 times a forward
  double bytes = 0;  // inputs and outputs, each element once
  double elements = 0;  // of all tensors, intermediates too
};

Work work_of(const ir::Graph& graph);

}  // namespace lawson::plan
