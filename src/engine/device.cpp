#include "engine/device.h"

#include <array>

#include "base/hash.h"

namespace lawson {
namespace {

// Properties that do not bind a compiled plan (DESIGN: keys).
constexpr std::array<std::string_view, 9> kUnbinding{
    "pciDeviceId", "cudaDeviceId",   "smClockRateKHz", "memClockRateKHz", "driverVer",
    "deviceName",  "totalGlobalMem", "isTccDriver",    "memoryBusWidth"};

}  // namespace

std::string_view to_string(Evidence evidence) {
  switch (evidence) {
    case Evidence::live:
      return "live";
    case Evidence::deviceless_measured_target:
      return "deviceless-measured-target";
    case Evidence::deviceless_published_target:
      return "deviceless-published-target";
  }
  return "live";
}

Device cpu_device() {
  Device device;
  device.kind = Device::Kind::cpu;
  device.name = "cpu";
  device.title = "host CPU";
  device.evidence = Evidence::live;
  return device;
}

std::string compute_capability_text(int compute_capability) {
  return fmt::format("{}.{}", compute_capability / 100, compute_capability / 10 % 10);
}

std::string fingerprint(const Device& device) {
  Json binding = device.properties;
  for (const std::string_view field : kUnbinding) binding.erase(std::string{field});
  return hash_hex((device.kind == Device::Kind::cpu ? "cpu " : "cuda ") + binding.dump());
}

Json device_to_json(const Device& device) {
  Json document{{"lawson", 1},
                {"kind", "target"},
                {"name", device.name},
                {"title", device.title},
                {"evidence", to_string(device.evidence)}};
  if (!device.aliases.empty()) document["aliases"] = device.aliases;
  if (device.kind == Device::Kind::cuda) {
    document["compute_capability"] = compute_capability_text(device.compute_capability);
    document["properties"] = device.properties;
    if (!device.peaks.empty()) document["peaks"] = device.peaks;
    if (!device.occupancy.empty()) document["occupancy"] = device.occupancy;
    if (device.ordinal >= 0) document["ordinal"] = device.ordinal;
  }
  return document;
}

Result<Device> device_from_json(const Json& document, const std::string& source) {
  ObjectReader reader(document, source);
  Device device;
  device.kind = Device::Kind::cuda;
  LAWSON_CHECK(reader.integer("lawson", 1, 1));
  LAWSON_CHECK(reader.choice_or("kind", "target", {"target"}));
  LAWSON_TRY(device.name, reader.string("name"));
  LAWSON_TRY(device.title, reader.string_or("title", device.name));
  LAWSON_TRY(std::string evidence,
             reader.choice_or("evidence", "published",
                              {"published", "measured", "live", "deviceless-measured-target",
                               "deviceless-published-target"}));
  device.evidence = std::string_view{evidence} == "live" ? Evidence::live
                    : evidence.find("measured") != std::string::npos
                        ? Evidence::deviceless_measured_target
                        : Evidence::deviceless_published_target;
  if (const Json* aliases = reader.find("aliases")) {
    if (!aliases->is_array()) return reader.fail_value("aliases", *aliases, "a list of names");
    for (const Json& alias : *aliases) {
      if (!alias.is_string()) return reader.fail_value("aliases", alias, "a name");
      device.aliases.push_back(alias.get<std::string>());
    }
  }
  const Json* properties = reader.find("properties");
  if (properties == nullptr || !properties->is_object()) {
    return reader.fail("properties", "missing; expected the device's properties");
  }
  device.properties = *properties;
  ObjectReader property_reader(*properties, source, "properties");
  LAWSON_TRY(auto version, property_reader.integer("deviceVer", 100, 9990));
  device.compute_capability = static_cast<int>(version);
  if (const Json* peaks = reader.find("peaks")) device.peaks = *peaks;
  if (const Json* occupancy = reader.find("occupancy")) {
    if (!occupancy->is_object()) return reader.fail_value("occupancy", *occupancy, "an object");
    device.occupancy = *occupancy;
  }
  LAWSON_TRY(auto ordinal, reader.integer_or("ordinal", -1, -1, 1 << 16));
  device.ordinal = static_cast<int>(ordinal);
  reader.find("compute_capability");  // derived from the properties
  reader.find("sources");             // for readers of the file
  reader.find("notes");
  LAWSON_CHECK(reader.finish());
  return device;
}

}  // namespace lawson
