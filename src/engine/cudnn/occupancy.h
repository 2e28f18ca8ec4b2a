// What a device holds at once: SMs by group, and thread block clusters by size. cuDNN's engines 2
// and 4 plan their grids with it. On a live device cuDNN measures it; its serialised device
// properties, from which a target is made, leave it out and stand for one group: engine 4 then
// refuses ("No GPC available"), and engine 2 builds a kernel for a seventh of an H200 (measured:
// 1.39 ms where 0.20 are needed). So a target brings it, and it is written where cuDNN keeps it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/json.h"
#include "engine/device.h"

namespace lawson::cudnn {

struct Occupancy {
  std::array<std::int32_t, 24> group_sms{};     // SMs of each group, 0 beyond the last
  std::array<std::int32_t, 16> max_clusters{};  // of 1, 2, ... 16 thread blocks of one SM each
};

// Of the target's file; nullopt: it says nothing. INVALID_ARGUMENT when it cannot be true.
Result<std::optional<Occupancy>> occupancy_of(const Device& device);

// Writes it into cuDNN's object of the device's properties. That object has no public form: it is
// touched only where every property that the device's JSON has is found in the place that cuDNN
// 9.19 has it, and where the occupancy is the one that its deserialisation leaves. False: it is
// laid out in another way, and nothing was written.
bool write_occupancy(std::span<std::byte> object, const Json& properties,
                     const Occupancy& occupancy);

}  // namespace lawson::cudnn
