// The engines, in order of preference: an ordered plain list.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/engine.h"

namespace lawson {

// cudnn (when built in), cpu, reference. Built once; lives until the process ends.
const std::vector<std::shared_ptr<Engine>>& engines();

// nullptr when there is no such engine in this build.
Engine* find_engine(std::string_view name);

// The cuDNN that this process shall use, before anything asks the cuDNN engine; without effect in a
// build that has none.
void choose_cudnn(const std::string& path);

}  // namespace lawson
