// What a device holds at once: read from a target, written where cuDNN 9.19 keeps it and nowhere
// else.
#include "engine/cudnn/occupancy.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "engine/cudnn/devices.h"

namespace lawson::cudnn {
namespace {

constexpr std::size_t kBefore = 24;  // of the object, before the properties
constexpr std::size_t kGroups = 0x70;
constexpr std::size_t kClusters = 0xd0;
constexpr std::size_t kSize = 0x160;

Device h200() {
  for (const Device& device : known_targets()) {
    if (device.name == "h200") return device;
  }
  return {};
}

// As cuDNN lays out the properties that its JSON has, 4 bytes each but for the memory's size.
std::vector<std::byte> object_of(const Json& properties) {
  std::vector<std::byte> bytes(kSize, std::byte{0});
  std::size_t at = kBefore;
  const auto put = [&](const auto value) {
    std::memcpy(bytes.data() + at, &value, sizeof(value));
    at += sizeof(value);
  };
  for (const char* list : {"maxGridSize", "maxBlockSize"}) {
    for (const Json& item : properties.at(list)) put(item.get<std::int32_t>());
  }
  for (const char* name :
       {"regsPerBlock", "multiProcessorCount", "warpSize", "maxSharedMemoryPerBlock",
        "maxSharedMemoryPerBlockOptin", "reservedSharedMemoryPerBlock", "maxRegistersPerSM",
        "maxCtasPerSM", "maxThreadsPerBlock", "maxThreadsPerSM", "pciDeviceId", "isTccDriver",
        "supportCoopLaunch"}) {
    put(properties.at(name).get<std::int32_t>());
  }
  at += sizeof(std::int32_t);
  put(properties.at("totalGlobalMem").get<std::int64_t>());
  for (const char* name : {"smClockRateKHz", "memClockRateKHz", "l2CacheSize", "cudaDeviceId",
                           "deviceVer", "driverVer"}) {
    put(properties.at(name).get<std::int32_t>());
  }
  const std::int32_t one_group = 18;
  EXPECT_EQ(at, kBefore + kGroups);
  std::memcpy(bytes.data() + at, &one_group, sizeof(one_group));
  return bytes;
}

std::int32_t number_at(const std::vector<std::byte>& bytes, std::size_t offset) {
  std::int32_t value = 0;
  std::memcpy(&value, bytes.data() + kBefore + offset, sizeof(value));
  return value;
}

TEST(Occupancy, EveryTargetThatSaysItAddsUp) {
  std::size_t said = 0;
  for (const Device& device : known_targets()) {
    const auto occupancy = occupancy_of(device);
    ASSERT_TRUE(occupancy.ok()) << occupancy.error().message;
    if (occupancy->has_value()) ++said;
  }
  EXPECT_GE(said, 1U);
}

TEST(Occupancy, IsWrittenBesideThePropertiesAlone) {
  const Device device = h200();
  const auto occupancy = occupancy_of(device);
  ASSERT_TRUE(occupancy.ok() && occupancy->has_value());
  std::vector<std::byte> bytes = object_of(device.properties);
  const std::vector<std::byte> before = bytes;
  ASSERT_TRUE(write_occupancy(bytes, device.properties, **occupancy));
  EXPECT_EQ(number_at(bytes, kGroups), 18);
  EXPECT_EQ(number_at(bytes, kGroups + 4), 18);
  EXPECT_EQ(number_at(bytes, kGroups + 8), 16);
  EXPECT_EQ(number_at(bytes, kClusters), 132);
  EXPECT_EQ(number_at(bytes, kClusters + 4), 66);
  constexpr std::size_t kEnd = kClusters + 16 * 4;
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    if (i < kBefore + kGroups || i >= kBefore + kEnd) {
      EXPECT_EQ(bytes[i], before[i]) << i;
    }
  }
  // What is there already is not cuDNN's stand-in for it.
  EXPECT_FALSE(write_occupancy(bytes, device.properties, **occupancy));
}

TEST(Occupancy, AnyOtherLayoutIsLeftAlone) {
  const Device device = h200();
  const auto occupancy = occupancy_of(device);
  ASSERT_TRUE(occupancy.ok() && occupancy->has_value());
  const std::vector<std::byte> whole = object_of(device.properties);
  for (std::size_t i = kBefore; i < kBefore + kGroups; ++i) {
    if (i >= kBefore + 0x4c && i < kBefore + 0x50) continue;  // between two properties
    std::vector<std::byte> bytes = whole;
    bytes[i] ^= std::byte{1};
    const std::vector<std::byte> before = bytes;
    EXPECT_FALSE(write_occupancy(bytes, device.properties, **occupancy)) << i;
    EXPECT_EQ(bytes, before) << i;
  }
  for (std::size_t size = 0; size < kBefore + kClusters + 16 * 4; ++size) {
    std::vector<std::byte> bytes{whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size)};
    EXPECT_FALSE(write_occupancy(bytes, device.properties, **occupancy)) << size;
  }
}

TEST(Occupancy, WhatCannotBeTrueIsNamed) {
  const auto message_for = [](const Json& occupancy) {
    Device device = h200();
    device.occupancy = occupancy;
    const auto read = occupancy_of(device);
    return read.ok() ? std::string{"taken"} : read.error().message;
  };
  const Json clusters = Json::array({132, 66});
  EXPECT_NE(message_for({{"group_sms", {100}}, {"max_clusters", clusters}}).find("group_sms"),
            std::string::npos);
  EXPECT_NE(message_for({{"group_sms", {132}}, {"max_clusters", {-1}}}).find("max_clusters"),
            std::string::npos);
  EXPECT_NE(message_for({{"group_sms", {132}}}).find("max_clusters"), std::string::npos);
  EXPECT_NE(
      message_for({{"group_sms", {132}}, {"max_clusters", clusters}, {"gpcs", 1}}).find("gpcs"),
      std::string::npos);
  EXPECT_EQ(message_for({{"group_sms", {132}}, {"max_clusters", clusters}}), "taken");
}

}  // namespace
}  // namespace lawson::cudnn
