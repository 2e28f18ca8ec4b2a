#include "cases/judge.h"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace lawson::cases {
namespace {

// Copies of host buffers on the engine's device, or the buffers themselves on the host CPU.
class DeviceMemory {
 public:
  DeviceMemory(Engine& engine, const Device& device) : engine_{engine}, device_{device} {}
  ~DeviceMemory() {
    for (void* block : blocks_) (void)engine_.release(device_, block);
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  Result<void*> allocate(std::size_t bytes) {
    LAWSON_TRY(void* block, engine_.allocate(device_, std::max<std::size_t>(bytes, 256)));
    blocks_.push_back(block);
    return block;
  }

  Status bind(const ir::Graph& graph, const std::vector<plan::Buffer>& buffers) {
    for (const plan::Buffer& buffer : buffers) {
      Binding binding = buffer.binding();
      if (device_.kind == Device::Kind::cuda && !graph.tensor(buffer.id()).by_value) {
        LAWSON_TRY(binding.data, allocate(buffer.bytes()));
        LAWSON_CHECK(engine_.copy_to_device(device_, binding.data, buffer.data(), buffer.bytes()));
      }
      bindings_.push_back(binding);
    }
    return {};
  }

  Status read_back(const std::vector<plan::Buffer>& buffers) {
    if (device_.kind != Device::Kind::cuda) return {};
    for (const plan::Buffer& buffer : buffers) {
      const auto binding = std::find_if(bindings_.begin(), bindings_.end(), [&](const Binding& b) {
        return b.uid == ir::Graph::uid(buffer.id());
      });
      LAWSON_CHECK(engine_.copy_to_host(device_, buffer.data(), binding->data, buffer.bytes()));
    }
    return {};
  }

  std::span<const Binding> bindings() const { return bindings_; }

 private:
  Engine& engine_;
  const Device& device_;
  std::vector<void*> blocks_;
  std::vector<Binding> bindings_;
};

}  // namespace

Result<Device> device_of(Engine& engine) {
  const Device cpu = cpu_device();
  if (engine.accepts(cpu)) return cpu;
  LAWSON_TRY(auto live, engine.live_devices());
  for (const Device& device : live) {
    if (engine.accepts(device)) return device;
  }
  return error(ErrorKind::unavailable, "engine '{}' has no device on this machine", engine.name());
}

namespace {

Result<Plan> compiled(Engine& engine, const Device& device, const ir::Graph& graph,
                      const JudgeOptions& options) {
  LAWSON_TRY(Verdict verdict, engine.probe(graph, device, options.options));
  if (verdict.decision != Decision::supported) {
    Error refusal =
        unsupported("engine", fmt::format("engine '{}' does not take the graph", engine.name()));
    if (!verdict.reasons.empty())
      refusal = Error{ErrorKind::unsupported, verdict.reasons[0].message, verdict.reasons};
    return refusal;
  }
  return engine.compile(graph, device, options.options, std::nullopt, {});
}

}  // namespace

Result<Judgement> judge(Engine& engine, const Device& device, const ir::Graph& graph,
                        Engine& reference, const JudgeOptions& options) {
  Judgement result;
  if (options.plan != nullptr) {
    result.plan = *options.plan;
  } else {
    LAWSON_TRY(result.plan, compiled(engine, device, graph, options));
  }
  LAWSON_TRY(auto loaded, engine.load(result.plan, device));
  LAWSON_TRY(auto inputs, plan::make_inputs(graph, options.seed, reference, options.style));
  auto outputs = plan::make_outputs(graph);

  DeviceMemory memory(engine, device);
  LAWSON_CHECK(memory.bind(graph, inputs));
  LAWSON_CHECK(memory.bind(graph, outputs));
  std::vector<std::byte> host_workspace;
  void* workspace = nullptr;
  if (result.plan.workspace_bytes > 0) {
    const auto bytes = static_cast<std::size_t>(result.plan.workspace_bytes);
    if (device.kind == Device::Kind::cuda) {
      LAWSON_TRY(workspace, memory.allocate(bytes));
    } else {
      host_workspace.resize(bytes + 64);
      const auto address = reinterpret_cast<std::uintptr_t>(host_workspace.data());
      workspace = host_workspace.data() + (64 - address % 64) % 64;
    }
  }

  for (int i = 0; i < options.repetitions; ++i) {
    const auto start = std::chrono::steady_clock::now();
    LAWSON_CHECK(engine.execute(*loaded, memory.bindings(), workspace, nullptr));
    if (device.kind == Device::Kind::cuda) LAWSON_CHECK(engine.synchronize(device, nullptr));
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    result.seconds = i == 0 ? taken.count() : std::min(result.seconds, taken.count());
  }
  LAWSON_CHECK(memory.read_back(outputs));
  result.outputs = std::move(outputs);
  if (!options.compare) return result;
  const auto host_inputs = plan::bindings_of(inputs, {});
  LAWSON_TRY(auto expected, reference.oracle(graph, host_inputs, engine.arithmetic(graph)));
  result.comparison = plan::compare(graph, result.outputs, expected);
  return result;
}

}  // namespace lawson::cases
