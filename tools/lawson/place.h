// Where something is executed: an engine and a device that is here.
#pragma once

#include <string>

#include "api.h"

namespace lawson::cli {

struct Place {
  std::string engine;
  Device device;
};

// `engine` empty: LAWSON_ENGINE, else cudnn (cpu where the target is the CPU). `target` empty: this
// machine's first GPU, or the CPU for the engines that run there. Without the device it is an
// environment error that names the way out.
Place choose_place(std::string engine, const std::string& target);

}  // namespace lawson::cli
