#include "plan/scratch.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace lawson::plan {
namespace {

std::vector<Buffer> copies_of(const ir::Graph& graph, std::span<const Buffer> buffers) {
  std::vector<Buffer> copies;
  for (const Buffer& buffer : buffers) {
    copies.emplace_back(graph.tensor(buffer.id()), buffer.id());
    std::memcpy(copies.back().data(), buffer.data(), buffer.bytes());
  }
  return copies;
}

}  // namespace

std::size_t cache_bytes_of(const Device& device) {
  constexpr std::size_t kUsual = std::size_t{32} << 20;
  if (device.kind == Device::Kind::cuda) {
    const auto found = device.properties.find("l2CacheSize");
    const bool known = found != device.properties.end() && found->is_number_integer();
    const std::int64_t bytes = known ? found->get<std::int64_t>() : 0;
    return bytes > 0 ? static_cast<std::size_t>(bytes) : kUsual;
  }
  const long bytes = ::sysconf(_SC_LEVEL3_CACHE_SIZE);
  return bytes > 0 ? static_cast<std::size_t>(bytes) : kUsual;
}

Result<Scratch> Scratch::make(Engine& engine, const Device& device, const ir::Graph& graph,
                              std::uint64_t seed, Engine& forward, const ScratchLimits& limits) {
  Scratch scratch(engine, device, graph);
  LAWSON_TRY(scratch.inputs_, make_inputs(graph, seed, forward));
  for (const Buffer& buffer : scratch.inputs_) scratch.set_bytes_ += buffer.bytes();
  for (const Buffer& buffer : make_outputs(graph)) scratch.set_bytes_ += buffer.bytes();
  const std::size_t one = std::max<std::size_t>(scratch.set_bytes_, 1);
  const std::size_t cache = limits.cache_bytes > 0 ? limits.cache_bytes : cache_bytes_of(device);
  // Twice the cache: what is read first was written a whole cache ago.
  const std::size_t wanted = std::clamp<std::size_t>(2 * cache / one + 1, 2, limits.sets);
  const std::size_t count = std::clamp<std::size_t>(limits.bytes / one, 1, wanted);
  for (std::size_t i = 0; i < count; ++i) {
    auto set = scratch.make_set(0);
    if (!set.ok()) {
      // Fewer sets than wanted measure a warmer cache, and more than nothing.
      if (i > 0 && set.error().kind == ErrorKind::out_of_memory) break;
      return std::move(set).error();
    }
    scratch.sets_.push_back(std::move(set).value());
    const auto bound = scratch.sets_.back().data->bindings();
    scratch.bindings_.emplace_back(bound.begin(), bound.end());
  }
  return scratch;
}

Result<Scratch::Set> Scratch::make_set(std::int64_t workspace_bytes) const {
  Set set;
  // In host memory a plan works on the buffers themselves, and may on its inputs (a cache).
  const bool on_host = device_->kind == Device::Kind::cpu;
  if (on_host) set.inputs = copies_of(*graph_, inputs_);
  set.outputs = make_outputs(*graph_);
  set.data = std::make_unique<DeviceData>(*engine_, *device_);
  LAWSON_CHECK(
      set.data->place(*graph_, on_host ? set.inputs : inputs_, set.outputs, workspace_bytes));
  return set;
}

Result<void*> Scratch::workspace(std::int64_t bytes) {
  if (bytes <= 0) return nullptr;
  if (workspace_ == nullptr || workspace_bytes_ < bytes) {
    workspace_.reset();
    workspace_bytes_ = 0;
    auto larger = std::make_unique<DeviceData>(*engine_, *device_);
    LAWSON_CHECK(larger->place(*graph_, {}, {}, bytes));
    workspace_ = std::move(larger);
    workspace_bytes_ = bytes;
  }
  return workspace_->workspace();
}

Result<std::vector<Buffer>> Scratch::execute(const Loaded& loaded) {
  LAWSON_TRY(Set set, make_set(loaded.plan().workspace_bytes));
  LAWSON_CHECK(engine_->execute(loaded, set.data->bindings(), set.data->workspace(), nullptr));
  LAWSON_CHECK(set.data->fetch());
  return std::move(set.outputs);
}

}  // namespace lawson::plan
