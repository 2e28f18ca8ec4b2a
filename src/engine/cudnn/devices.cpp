#include "engine/cudnn/devices.h"

#include <algorithm>
#include <cctype>

#include "base/lazy.h"
#include "engine/cudnn/driver.h"
#include "engine/cudnn/loader.h"
#include "engine/cudnn/lowering.h"
#include "engine/cudnn/targets.h"

namespace lawson::cudnn {
namespace {

std::vector<Device> read_targets() {
  std::vector<Device> targets;
  for (const TargetFile& file : kTargetFiles) {
    auto document = parse_json(file.text, file.name);
    if (!document.ok()) continue;  // a unit test reads every file
    auto device = device_from_json(*document, file.name);
    if (device.ok()) targets.push_back(std::move(device).value());
  }
  std::stable_sort(targets.begin(), targets.end(), [](const Device& a, const Device& b) {
    return a.compute_capability < b.compute_capability;
  });
  return targets;
}

std::string text_of(const Json& properties, const char* field) {
  const auto found = properties.find(field);
  return found != properties.end() && found->is_string() ? found->get<std::string>() : "";
}

// "NVIDIA H100 NVL" -> "nvidia-h100-nvl"
std::string slug(const std::string& title) {
  std::string name;
  for (const char c : title) {
    const auto byte = static_cast<unsigned char>(c);
    if (std::isalnum(byte) != 0) {
      name += static_cast<char>(std::tolower(byte));
    } else if (!name.empty() && name.back() != '-') {
      name += '-';
    }
  }
  while (!name.empty() && name.back() == '-') name.pop_back();
  return name.empty() ? "gpu" : name;
}

Result<Device> live_device(int ordinal) {
  std::string text;
  if (const Failure failure = live_properties(ordinal, text)) {
    Device unnamed;
    unnamed.name = fmt::format("GPU {}", ordinal);
    return to_error(*failure, classify(*failure, false), unnamed);
  }
  Device device;
  device.kind = Device::Kind::cuda;
  device.evidence = Evidence::live;
  device.ordinal = ordinal;
  LAWSON_TRY(device.properties,
             parse_json(text, fmt::format("cuDNN's properties of GPU {}", ordinal)));
  const auto version = device.properties.find("deviceVer");
  if (version == device.properties.end() || !version->is_number_integer()) {
    return error(ErrorKind::cudnn, "cuDNN's properties of GPU {} have no deviceVer: {}", ordinal,
                 text);
  }
  device.compute_capability = version->get<int>();
  device.title = text_of(device.properties, "deviceName");
  device.name = slug(device.title);
  device.aliases.push_back(fmt::format("gpu{}", ordinal));
  for (const Device& target : known_targets()) {
    if (text_of(target.properties, "deviceName") != device.title ||
        target.properties.value("multiProcessorCount", 0) !=
            device.properties.value("multiProcessorCount", -1)) {
      continue;
    }
    device.name = target.name;
    device.title = target.title;
    device.peaks = target.peaks;
    break;
  }
  return device;
}

}  // namespace

const std::vector<Device>& known_targets() {
  static Lazy<const std::vector<Device>> targets;
  return targets.get(read_targets);
}

Result<std::vector<Device>> live_devices() {
  std::vector<Device> devices;
  if (is_deviceless()) return devices;
  if (auto library = driver(); !library.ok()) return devices;
  LAWSON_TRY(const Driver* driver, Driver::open());
  if (driver->device_count() == 0) return devices;
  LAWSON_CHECK(libraries());
  for (int ordinal = 0; ordinal < driver->device_count(); ++ordinal) {
    LAWSON_TRY(Device device, live_device(ordinal));
    devices.push_back(std::move(device));
  }
  return devices;
}

}  // namespace lawson::cudnn
