// The engine's part of a plan file: cuDNN's serialised plan and what loading it needs. Reading
// never trusts a byte: a checksum covers everything before cuDNN sees any of it.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/cudnn/lowering.h"

namespace lawson::cudnn {

struct PlanHeader {
  int cudnn_version = 0;
  int compute_capability = 0;
  std::string key;
};

struct UnpackedPlan {
  PlanHeader header;
  PlanBytes bytes;
};

std::vector<std::byte> pack_plan(const PlanHeader& header, const PlanBytes& plan);
Result<UnpackedPlan> unpack_plan(std::span<const std::byte> bytes);

}  // namespace lawson::cudnn
