#include "plan/verified_run.h"

#include <algorithm>
#include <memory>

#include "plan/inputs.h"

namespace lawson::plan {
namespace {

// The tensors of one execution in the device's memory: for the host, where they are.
class DeviceBindings {
 public:
  DeviceBindings(Engine& engine, const Device& device) : engine_{engine}, device_{device} {}
  ~DeviceBindings() {
    for (void* block : blocks_) static_cast<void>(engine_.release(device_, block));
  }
  DeviceBindings(const DeviceBindings&) = delete;
  DeviceBindings& operator=(const DeviceBindings&) = delete;

  Status add(const ir::Graph& graph, std::span<const Buffer> buffers) {
    for (const Buffer& buffer : buffers) {
      Binding binding = buffer.binding();
      if (on_gpu() && !graph.tensor(buffer.id()).by_value) {
        LAWSON_TRY(binding.data, allocate(buffer.bytes()));
        LAWSON_CHECK(engine_.copy_to_device(device_, binding.data, buffer.data(), buffer.bytes()));
      }
      bindings_.push_back(binding);
    }
    return {};
  }

  Result<void*> workspace(std::size_t bytes) {
    if (bytes == 0) return static_cast<void*>(nullptr);
    if (on_gpu()) return allocate(bytes);
    constexpr std::size_t kAlignment = 64;
    host_workspace_.resize(bytes + kAlignment);
    void* start = host_workspace_.data();
    std::size_t space = host_workspace_.size();
    return std::align(kAlignment, bytes, start, space);
  }

  // Outputs were added last.
  Status fetch(std::span<const Buffer> outputs) {
    LAWSON_CHECK(engine_.synchronize(device_, nullptr));
    if (!on_gpu()) return {};
    const std::size_t first = bindings_.size() - outputs.size();
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      LAWSON_CHECK(engine_.copy_to_host(device_, outputs[i].data(), bindings_[first + i].data,
                                        outputs[i].bytes()));
    }
    return {};
  }

  std::span<const Binding> bindings() const { return bindings_; }

 private:
  bool on_gpu() const { return device_.kind == Device::Kind::cuda; }

  Result<void*> allocate(std::size_t bytes) {
    blocks_.reserve(blocks_.size() + 1);
    LAWSON_TRY(void* block, engine_.allocate(device_, std::max<std::size_t>(bytes, 1)));
    blocks_.push_back(block);
    return block;
  }

  Engine& engine_;
  const Device& device_;
  std::vector<void*> blocks_;
  std::vector<Binding> bindings_;
  std::vector<std::byte> host_workspace_;
};

}  // namespace

Result<Comparison> run_and_compare(const ir::Graph& graph, const Plan& plan, Engine& engine,
                                   Engine& reference, const Device& device, std::uint64_t seed) {
  LAWSON_TRY(const auto inputs, make_inputs(graph, seed, reference));
  const auto outputs = make_outputs(graph);
  LAWSON_TRY(const auto expected,
             reference.oracle(graph, bindings_of(inputs, {}), engine.arithmetic(graph)));
  LAWSON_TRY(const std::shared_ptr<Loaded> loaded, engine.load(plan, device));
  DeviceBindings memory(engine, device);
  LAWSON_CHECK(memory.add(graph, inputs));
  LAWSON_CHECK(memory.add(graph, outputs));
  LAWSON_TRY(void* workspace, memory.workspace(static_cast<std::size_t>(plan.workspace_bytes)));
  LAWSON_CHECK(engine.execute(*loaded, memory.bindings(), workspace, nullptr));
  LAWSON_CHECK(memory.fetch(outputs));
  return compare(graph, outputs, expected);
}

}  // namespace lawson::plan
