// Random steps of the cuDNN engine (src/engine/cudnn/steps.h) with memory for their operands, for
// the tests of the rules on the host and of the kernels on a GPU.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/cudnn/steps.h"

namespace lawson::cases {

// The memory of one operand: guard, elements from byte `begin` on, guard. All of it is random at
// first, results included, so that whatever is written where nothing should be shows.
struct StepBuffer {
  std::vector<std::byte> bytes;  // empty: the operand is absent
  std::size_t begin = 0;
  DType dtype = DType::f32;
  bool by_value = false;
  bool written = false;

  void* data() { return bytes.data() + begin; }
  const void* data() const { return bytes.data() + begin; }
};

struct StepCase {
  std::uint64_t seed = 0;
  cudnn::Step step;
  std::vector<StepBuffer> buffers;  // one for each of step_uids()

  std::string text() const;
  std::vector<void*> pointers();  // to the buffers on the host
  StepBuffer& buffer(const cudnn::steps::Operand& operand);
  const StepBuffer& buffer(const cudnn::steps::Operand& operand) const;
};

// `kind` is an index of the variant.
StepCase random_step(std::size_t kind, std::uint64_t seed);

// The step's rules in loops, as steps.cu runs them over a grid.
Status run_on_host(const cudnn::Step& step, std::span<void* const> pointers);

}  // namespace lawson::cases
