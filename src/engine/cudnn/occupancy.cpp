#include "engine/cudnn/occupancy.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string_view>

namespace lawson::cudnn {
namespace {

// cuDNN 9.19.0: where it keeps what its JSON has, in bytes from the first property.
struct Place {
  std::string_view name;
  std::size_t offset;
  std::size_t size = sizeof(std::int32_t);
};
constexpr std::array kPlaces{Place{"regsPerBlock", 0x18},
                             Place{"multiProcessorCount", 0x1c},
                             Place{"warpSize", 0x20},
                             Place{"maxSharedMemoryPerBlock", 0x24},
                             Place{"maxSharedMemoryPerBlockOptin", 0x28},
                             Place{"reservedSharedMemoryPerBlock", 0x2c},
                             Place{"maxRegistersPerSM", 0x30},
                             Place{"maxCtasPerSM", 0x34},
                             Place{"maxThreadsPerBlock", 0x38},
                             Place{"maxThreadsPerSM", 0x3c},
                             Place{"pciDeviceId", 0x40},
                             Place{"isTccDriver", 0x44},
                             Place{"supportCoopLaunch", 0x48},
                             Place{"totalGlobalMem", 0x50, sizeof(std::int64_t)},
                             Place{"smClockRateKHz", 0x58},
                             Place{"memClockRateKHz", 0x5c},
                             Place{"l2CacheSize", 0x60},
                             Place{"cudaDeviceId", 0x64},
                             Place{"deviceVer", 0x68},
                             Place{"driverVer", 0x6c}};
constexpr std::size_t kGridSize = 0x00;  // three numbers each
constexpr std::size_t kBlockSize = 0x0c;
constexpr std::size_t kGroupSms = 0x70;
constexpr std::size_t kMaxClusters = kGroupSms + sizeof(Occupancy::group_sms);
constexpr std::size_t kEnd = kMaxClusters + sizeof(Occupancy::max_clusters);

template <typename T>
T read(std::span<const std::byte> bytes, std::size_t offset) {
  T value{};
  std::memcpy(&value, bytes.data() + offset, sizeof(value));
  return value;
}

std::int64_t number(std::span<const std::byte> bytes, const Place& place) {
  if (place.size == sizeof(std::int64_t)) return read<std::int64_t>(bytes, place.offset);
  return read<std::int32_t>(bytes, place.offset);
}

bool has_list(std::span<const std::byte> bytes, std::size_t offset, const Json& list) {
  if (!list.is_array() || list.size() != 3) return false;
  for (std::size_t i = 0; i < list.size(); ++i) {
    if (list[i] != read<std::int32_t>(bytes, offset + i * sizeof(std::int32_t))) return false;
  }
  return true;
}

// Whether the properties begin here, with the occupancy of a target that says nothing about it:
// one group, and no cluster.
bool begins_here(std::span<const std::byte> bytes, const Json& properties) {
  if (!has_list(bytes, kGridSize, properties.value("maxGridSize", Json{})) ||
      !has_list(bytes, kBlockSize, properties.value("maxBlockSize", Json{}))) {
    return false;
  }
  for (const Place& place : kPlaces) {
    const auto found = properties.find(place.name);
    if (found == properties.end() || !found->is_number_integer()) return false;
    if (*found != number(bytes, place)) return false;
  }
  Occupancy left = {};
  std::memcpy(&left.group_sms, bytes.data() + kGroupSms, sizeof(left.group_sms));
  std::memcpy(&left.max_clusters, bytes.data() + kMaxClusters, sizeof(left.max_clusters));
  const auto is_zero = [](std::int32_t value) { return value == 0; };
  return std::all_of(left.group_sms.begin() + 1, left.group_sms.end(), is_zero) &&
         std::all_of(left.max_clusters.begin(), left.max_clusters.end(), is_zero);
}

template <std::size_t N>
Status read_list(ObjectReader& reader, const char* field, std::array<std::int32_t, N>& values) {
  constexpr std::int64_t kMost = 1 << 16;
  LAWSON_TRY(const Dims list, reader.integers(field, 0, kMost));
  if (list.empty() || list.size() > N) {
    return reader.fail(field, fmt::format("{} counts; expected 1 to {}", list.size(), N));
  }
  std::transform(list.begin(), list.end(), values.begin(),
                 [](std::int64_t value) { return static_cast<std::int32_t>(value); });
  return {};
}

}  // namespace

Result<std::optional<Occupancy>> occupancy_of(const Device& device) {
  if (device.occupancy.empty()) return std::optional<Occupancy>{};
  ObjectReader reader(device.occupancy, device.name, "occupancy");
  Occupancy occupancy;
  LAWSON_CHECK(read_list(reader, "group_sms", occupancy.group_sms));
  LAWSON_CHECK(read_list(reader, "max_clusters", occupancy.max_clusters));
  LAWSON_CHECK(reader.finish());
  const auto sms = std::accumulate(occupancy.group_sms.begin(), occupancy.group_sms.end(), 0);
  if (sms != device.properties.value("multiProcessorCount", 0)) {
    return invalid("{}: occupancy.group_sms: {} SMs in all; expected multiProcessorCount",
                   device.name, sms);
  }
  return std::optional<Occupancy>{occupancy};
}

bool write_occupancy(std::span<std::byte> object, const Json& properties,
                     const Occupancy& occupancy) {
  for (std::size_t at = 0; at + kEnd <= object.size(); at += alignof(std::int64_t)) {
    const std::span<std::byte> bytes = object.subspan(at);
    if (!begins_here(bytes, properties)) continue;
    std::memcpy(bytes.data() + kGroupSms, &occupancy.group_sms, sizeof(occupancy.group_sms));
    std::memcpy(bytes.data() + kMaxClusters, &occupancy.max_clusters,
                sizeof(occupancy.max_clusters));
    return true;
  }
  return false;
}

}  // namespace lawson::cudnn
