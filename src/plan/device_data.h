// The tensors of one execution in a device's memory; on the host CPU, where they are.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "engine/engine.h"
#include "plan/inputs.h"

namespace lawson::plan {

class DeviceData {
 public:
  DeviceData(Engine& engine, const Device& device) : engine_{engine}, device_{device} {}
  ~DeviceData();
  DeviceData(const DeviceData&) = delete;
  DeviceData& operator=(const DeviceData&) = delete;

  // Copies inputs and (poisoned) outputs. An output that is an input worked on in place is bound to
  // that input's memory. The buffers have to outlive this.
  Status place(const ir::Graph& graph, std::span<const Buffer> inputs,
               std::span<const Buffer> outputs, std::int64_t workspace_bytes);

  std::span<const Binding> bindings() const { return bindings_; }
  void* workspace() const { return workspace_; }

  // Waits for the device and copies the outputs back into their buffers.
  Status fetch();

 private:
  bool on_gpu() const { return device_.kind == Device::Kind::cuda; }
  Result<void*> allocate(std::size_t bytes);
  void* bound(std::int64_t uid) const;

  Engine& engine_;
  const Device& device_;
  std::vector<void*> blocks_;
  std::vector<Binding> bindings_;
  struct Output {
    const Buffer* buffer;
    const void* data;
  };
  std::vector<Output> outputs_;  // whose data is not in their buffer
  std::vector<std::byte> host_workspace_;
  void* workspace_ = nullptr;
};

}  // namespace lawson::plan
