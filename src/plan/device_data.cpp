#include "plan/device_data.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "ir/attention.h"

namespace lawson::plan {

DeviceData::~DeviceData() {
  for (void* block : blocks_) static_cast<void>(engine_.release(device_, block));
}

Result<void*> DeviceData::allocate(std::size_t bytes) {
  blocks_.reserve(blocks_.size() + 1);
  LAWSON_TRY(void* block, engine_.allocate(device_, std::max<std::size_t>(bytes, 1)));
  blocks_.push_back(block);
  return block;
}

void* DeviceData::bound(std::int64_t uid) const {
  const auto found = std::find_if(bindings_.begin(), bindings_.end(),
                                  [uid](const Binding& binding) { return binding.uid == uid; });
  return found == bindings_.end() ? nullptr : found->data;
}

Status DeviceData::place(const ir::Graph& graph, std::span<const Buffer> inputs,
                         std::span<const Buffer> outputs, std::int64_t workspace_bytes) {
  for (const auto& list : {inputs, outputs}) {
    for (const Buffer& buffer : list) {
      Binding binding = buffer.binding();
      const ir::TensorId shared = ir::shared_memory_input(graph, buffer.id());
      if (shared != ir::kNone) {
        binding.data = bound(ir::Graph::uid(shared));
      } else if (on_gpu() && !graph.tensor(buffer.id()).by_value) {
        LAWSON_TRY(binding.data, allocate(buffer.bytes()));
        LAWSON_CHECK(engine_.copy_to_device(device_, binding.data, buffer.data(), buffer.bytes()));
      }
      if (graph.is_output(buffer.id()) && binding.data != buffer.data()) {
        outputs_.push_back({&buffer, binding.data});
      }
      bindings_.push_back(binding);
    }
  }
  if (workspace_bytes == 0) return {};
  const auto bytes = static_cast<std::size_t>(workspace_bytes);
  if (on_gpu()) {
    LAWSON_TRY(workspace_, allocate(bytes));
    return {};
  }
  constexpr std::size_t kAlignment = 64;  // a cache line, and any vector register
  host_workspace_.resize(bytes + kAlignment);
  void* start = host_workspace_.data();
  std::size_t space = host_workspace_.size();
  workspace_ = std::align(kAlignment, bytes, start, space);
  return {};
}

Status DeviceData::fetch() {
  LAWSON_CHECK(engine_.synchronize(device_, nullptr));
  for (const Output& output : outputs_) {
    if (on_gpu()) {
      LAWSON_CHECK(engine_.copy_to_host(device_, output.buffer->data(), output.data,
                                        output.buffer->bytes()));
    } else {
      std::memcpy(output.buffer->data(), output.data, output.buffer->bytes());
    }
  }
  return {};
}

}  // namespace lawson::plan
