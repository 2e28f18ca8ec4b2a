// A device is a value: the properties of a GPU or of the host CPU. A *target* is a device that
// need not be present.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/json.h"

namespace lawson {

enum class Evidence { live, deviceless_measured_target, deviceless_published_target };
std::string_view to_string(Evidence evidence);  // "live", "deviceless-measured-target", ...

struct Device {
  enum class Kind { cpu, cuda };

  Kind kind = Kind::cpu;
  std::string name;   // "cpu", "h200"; what --target takes
  std::string title;  // "NVIDIA H200"
  std::vector<std::string> aliases;
  int ordinal = -1;            // CUDA ordinal when present on this machine, else -1
  int compute_capability = 0;  // major * 100 + minor * 10 (900 = sm_90); 0 for cpu
  Evidence evidence = Evidence::deviceless_published_target;
  Json properties = Json::object();  // cuDNN's DeviceProperties, as its serialisation spells them
  Json peaks = Json::object();       // published or measured limits (TFLOP/s, GB/s)
  // What the device holds at once, where it was measured (engine/cudnn/occupancy.h). A live device
  // is asked instead. No part of a fingerprint: cards of one kind differ in it, and share plans.
  Json occupancy = Json::object();

  bool present() const { return kind == Kind::cpu || ordinal >= 0; }
};

Device cpu_device();

// "9.0" of 900.
std::string compute_capability_text(int compute_capability);

// Hash of what binds a plan: leaves out PCI id, ordinal, clocks, driver version, total memory and
// name (DESIGN: keys).
std::string fingerprint(const Device& device);

Json device_to_json(const Device& device);
// The form of the target library's files and of device_to_json.
Result<Device> device_from_json(const Json& document, const std::string& source);

}  // namespace lawson
