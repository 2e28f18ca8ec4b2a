// Data to time plans with: generated inputs, in several sets of buffers that are used in turn, so
// that an execution does not find its operands in the cache where the one before left them. Never a
// caller's data.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/engine.h"
#include "plan/device_data.h"
#include "plan/inputs.h"

namespace lawson::plan {

struct ScratchLimits {
  std::size_t cache_bytes = 0;  // what the sets together should exceed; 0: the device's cache
  std::size_t bytes = std::size_t{4} << 30;  // of all sets; one set may be larger
  std::size_t sets = 64;
};

// The last-level cache of a device, as far as it is known.
std::size_t cache_bytes_of(const Device& device);

class Scratch {
 public:
  // `forward` computes what an attention backward is given of its forward (plan/inputs.h).
  static Result<Scratch> make(Engine& engine, const Device& device, const ir::Graph& graph,
                              std::uint64_t seed, Engine& forward, const ScratchLimits& limits);

  const std::vector<Buffer>& inputs() const { return inputs_; }
  std::span<const std::vector<Binding>> sets() const { return bindings_; }
  std::size_t bytes() const { return set_bytes_ * bindings_.size(); }

  // Device memory of at least so many bytes; null for 0. The one before becomes invalid.
  Result<void*> workspace(std::int64_t bytes);

  // One execution on data of its own; the outputs, back on the host.
  Result<std::vector<Buffer>> execute(const Loaded& loaded);

 private:
  struct Set {
    std::vector<Buffer> inputs;  // on the host CPU, where a plan works on them
    std::vector<Buffer> outputs;
    std::unique_ptr<DeviceData> data;
  };

  Scratch(Engine& engine, const Device& device, const ir::Graph& graph)
      : engine_{&engine}, device_{&device}, graph_{&graph} {}
  Result<Set> make_set(std::int64_t workspace_bytes) const;

  Engine* engine_;
  const Device* device_;
  const ir::Graph* graph_;
  std::vector<Buffer> inputs_;
  std::vector<Set> sets_;
  std::vector<std::vector<Binding>> bindings_;
  std::size_t set_bytes_ = 0;
  std::unique_ptr<DeviceData> workspace_;
  std::int64_t workspace_bytes_ = 0;
};

}  // namespace lawson::plan
