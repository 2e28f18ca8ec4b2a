// What tells a graph that cuDNN cannot build from a cuDNN that builds nothing here.
#pragma once

#include "engine/device.h"

namespace lawson::cudnn {

// Asked about f32 products for a GPU without TF32 first, cuDNN 9.19 would say for the rest of the
// process that no target takes them. So the first question is about a GPU that has it: this one,
// once per process, before anything is judged for a target.
void prime();

// Does anything compile for this device? Tells a graph whose kernel does not compile from an NVRTC
// that does not work. Tried once per compute capability.
bool control_plan_builds(const Device& device);

}  // namespace lawson::cudnn
