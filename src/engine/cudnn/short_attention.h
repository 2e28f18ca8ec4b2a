// Which plan is the fastest for attention over a few keys. cuDNN names the kernel first that fills
// a device best; Hopper's fetches its tiles by a counter, which a memset before each launch clears.
// For little work that costs more than a slower kernel without one.
#pragma once

#include <string>
#include <vector>

#include "engine/device.h"
#include "ir/graph.h"

namespace lawson::cudnn {

// One of `names`, cuDNN's plans of the graph in its order; "": its first, or nothing is known.
std::string plan_for_few_keys(const ir::Graph& graph, const Device& device, int cudnn_version,
                              const std::vector<std::string>& names);

// What such a choice rests on, as a sentence.
inline constexpr const char* kFewKeysBasis =
    "short attention: measured on h200, cuDNN 9.19.0, 2026-12-01";

}  // namespace lawson::cudnn
