#include "place.h"

#include <fmt/format.h>

#include <cstdlib>
#include <utility>

namespace lawson::cli {
namespace {

// The person asked for a run where there is no device for it.
Failure no_device(const std::string& why) {
  return {"unavailable", kExitEnvironment,
          why + "; `--engine cpu` runs the same graph on this machine's CPU"};
}

}  // namespace

Place choose_place(std::string engine, const std::string& target) {
  std::string named_by = "--engine ";
  if (const char* given = std::getenv("LAWSON_ENGINE"); engine.empty() && given != nullptr) {
    engine = given;
    named_by = "LAWSON_ENGINE=";
  }
  if (engine.empty() && target == "cpu") engine = "cpu";
  if (engine.empty()) engine = "cudnn";
  if (engine == "cpu" || engine == "reference") {
    if (!target.empty() && target != "cpu") {
      throw bad_usage(fmt::format("--target {}: engine {} runs on the CPU; leave --target out",
                                  target, engine));
    }
    return {std::move(engine), find_device("cpu")};
  }
  if (engine != "cudnn") {
    throw bad_usage(fmt::format("{}{}: expected cudnn, cpu or reference", named_by, engine));
  }
  if (target.empty()) {
    lawson_device* device = nullptr;
    if (lawson_device_find("cuda", &device) != LAWSON_OK) {
      throw no_device(fmt::format("engine cudnn needs a GPU ({})", lawson_last_error_message()));
    }
    return {std::move(engine), Device{device}};
  }
  Device device = find_device(target);
  if (lawson_device_is_present(device.get()) == 0) {
    throw no_device(fmt::format("target {} is not in this machine", target));
  }
  return {std::move(engine), std::move(device)};
}

}  // namespace lawson::cli
