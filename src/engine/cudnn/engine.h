// The cuDNN engine. In a process with the driver it judges, compiles and runs for the live GPUs; in
// one that entered deviceless mode (loader.h) it judges and compiles for targets.
#pragma once

#include <memory>

#include "engine/engine.h"

namespace lawson {

std::shared_ptr<Engine> make_cudnn_engine();

}  // namespace lawson
