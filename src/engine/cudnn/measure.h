// How long a loaded plan takes on the device, without the host's part.
#pragma once

#include <span>
#include <vector>

#include "engine/cudnn/driver.h"
#include "engine/cudnn/loaded_plan.h"

namespace lawson::cudnn {

// As Engine::measure. The plan's device's context is current; `handle` is one of its.
Result<std::vector<double>> measure(const LoadedPlan& plan,
                                    std::span<const std::vector<Binding>> sets, void* workspace,
                                    int executions, int rounds, const Driver& driver, void* handle);

}  // namespace lawson::cudnn
