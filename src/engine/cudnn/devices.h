// The GPUs that Lawson knows: the target library's, and those of this machine.
#pragma once

#include <vector>

#include "base/status.h"
#include "engine/device.h"

namespace lawson::cudnn {

// The files of targets/, embedded in the library; in the order of their compute capability.
const std::vector<Device>& known_targets();

// Properties as cuDNN serialises them. A GPU that the target library knows has that target's name
// and peaks. Empty on a machine without a driver or a device.
Result<std::vector<Device>> live_devices();

}  // namespace lawson::cudnn
