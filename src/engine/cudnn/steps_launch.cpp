// The kernels of the steps: the embedded image in the driver's hands, and their launches.
#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>

#include "engine/cudnn/driver.h"
#include "engine/cudnn/steps.h"
#include "engine/cudnn/steps_arguments.h"
#include "engine/cudnn/steps_image.h"

namespace lawson::cudnn {
namespace {

using namespace steps;

// In the order of StepArguments.
constexpr std::array kKernelNames{
    "lawson_ragged",     "lawson_score_bias",    "lawson_masked_rows",
    "lawson_clear_rows", "lawson_stats_of_rows", "lawson_reduce_bias_gradient",
    "lawson_zero_gaps",  "lawson_cache_append",  "lawson_convert_mask",
};
static_assert(kKernelNames.size() == std::variant_size_v<StepArguments>);

constexpr unsigned kWarp = 32;
constexpr unsigned kThreads = 256;
// More blocks gain nothing: the kernels walk on over the rest.
constexpr Index kMaxBlocks = 1 << 16;

using Kernels = std::array<void*, kKernelNames.size()>;

// What the driver made of the image, for the whole process; never unloaded.
std::atomic<const Kernels*> loaded_kernels{nullptr};

Error not_built() {
  return error(ErrorKind::unavailable,
               "this build has none of Lawson's CUDA kernels (LAWSON_CUDA_KERNELS=OFF, or no nvcc "
               "when it was built)");
}

Result<const Kernels*> load(const Driver& driver) {
  static std::mutex mutex;
  static Kernels kernels;
  const std::lock_guard lock{mutex};
  if (const Kernels* loaded = loaded_kernels.load()) return loaded;
  LAWSON_TRY(void* library, driver.load_kernels(steps_image().data()));
  for (std::size_t i = 0; i < kernels.size(); ++i) {
    LAWSON_TRY(kernels[i], driver.kernel(library, kKernelNames[i]));
  }
  loaded_kernels.store(&kernels);
  return &kernels;
}

Result<const Kernels*> kernels_for(void* stream, const Driver& driver) {
  if (const Kernels* loaded = loaded_kernels.load()) return loaded;
  if (!steps_are_built()) return not_built();
  LAWSON_TRY(const bool capturing, driver.is_capturing(stream));
  if (capturing) {
    return invalid(
        "the stream is being captured, and Lawson's kernels are not loaded yet: load "
        "the plan before the capture begins");
  }
  return load(driver);
}

unsigned blocks_for(Index count) {
  return static_cast<unsigned>(std::min(count, kMaxBlocks));
}

template <typename Arguments>
LaunchShape shape_of(const Arguments& arguments) {
  return {blocks_for(blocks_of(items(arguments), kThreads / kWarp)), kThreads, 1};
}

LaunchShape shape_of(const ReduceArguments& arguments) {
  return {blocks_for(items(arguments)), static_cast<unsigned>(arguments.lanes),
          static_cast<unsigned>(arguments.parts)};
}

}  // namespace

bool steps_are_built() {
  return !steps_image().empty();
}

Status prepare_steps(int ordinal, const Driver& driver) {
  if (!steps_are_built()) return not_built();
  LAWSON_CHECK(driver.make_current(ordinal));
  LAWSON_TRY(const Kernels* kernels, load(driver));
  for (void* kernel : *kernels) LAWSON_CHECK(driver.prepare_kernel(kernel));
  return {};
}

Status launch(const Step& step, std::span<void* const> pointers, void* stream,
              const Driver& driver) {
  LAWSON_TRY(const Kernels* kernels, kernels_for(stream, driver));
  LAWSON_TRY(StepArguments arguments, step_arguments(step, pointers));
  void* kernel = (*kernels)[arguments.index()];
  return std::visit(
      [&](auto& a) -> Status {
        if (items(a) == 0) return {};
        return driver.launch(kernel, shape_of(a), &a, stream);
      },
      arguments);
}

}  // namespace lawson::cudnn
