#include "tuning_buffers.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <random>

namespace lawson::bench {
namespace {

// A prime number of elements, so that rows of a tensor do not repeat each other.
constexpr std::size_t kPattern = 1'000'003;
constexpr std::size_t kMostSets = 32;
// Of an output: so many bytes at the beginning, in the middle and at the end are compared.
constexpr std::size_t kWindow = std::size_t{1} << 20;

const std::vector<std::byte>& pattern(DType dtype) {
  static std::map<DType, std::vector<std::byte>> known;
  std::vector<std::byte>& bytes = known[dtype];
  if (!bytes.empty()) return bytes;
  bytes.resize(byte_size(dtype, static_cast<std::int64_t>(kPattern)));
  std::mt19937 random(7);
  std::normal_distribution<double> normal;
  std::uniform_int_distribution<int> integer(-100, 100);
  for (std::size_t i = 0; i < kPattern; ++i) {
    const double value = is_integer(dtype) ? integer(random) : normal(random);
    store_element(bytes.data(), dtype, static_cast<std::int64_t>(i), value);
  }
  return bytes;
}

std::size_t memory_of(const ir::Tensor& tensor) {
  return byte_size(tensor.dtype, storage_extent(tensor.shape, tensor.strides).value_or(0));
}

struct Window {
  std::size_t offset;
  std::size_t bytes;
};
std::vector<Window> windows(std::size_t bytes) {
  if (bytes <= 3 * kWindow) return {{0, bytes}};
  return {{0, kWindow}, {bytes / 2 / kWindow * kWindow, kWindow}, {bytes - kWindow, kWindow}};
}

}  // namespace

Buffers::~Buffers() {
  for (void* data : all_) static_cast<void>(engine_.release(device_, data));
}

Result<void*> Buffers::allocate(std::size_t bytes) {
  LAWSON_TRY(void* data, engine_.allocate(device_, bytes));
  all_.push_back(data);
  return data;
}

Status Buffers::fill(const ir::Graph& graph, std::size_t bytes) {
  std::size_t one = 0;
  for (ir::TensorId id = 0; id < graph.input_count + graph.output_count; ++id) {
    one += memory_of(graph.tensor(id));
  }
  const std::size_t count =
      std::clamp(bytes / std::max<std::size_t>(one, 1) + 1, std::size_t{2}, kMostSets);
  std::vector<std::byte> host;
  for (std::size_t set = 0; set < count; ++set) {
    std::vector<Binding> bindings;
    for (ir::TensorId id = 0; id < graph.input_count + graph.output_count; ++id) {
      const ir::Tensor& tensor = graph.tensor(id);
      if (tensor.by_value) continue;
      const std::size_t size = memory_of(tensor);
      LAWSON_TRY(void* data, allocate(size));
      bindings.push_back({ir::Graph::uid(id), data});
      if (!graph.is_input(id)) continue;
      const std::vector<std::byte>& source = pattern(tensor.dtype);
      host.resize(size);
      // Another start for every tensor, the same for all sets.
      const std::size_t element = byte_size(tensor.dtype, 2) / 2;
      std::size_t from = static_cast<std::size_t>(id) * 77'777 * std::max<std::size_t>(element, 1);
      for (std::size_t to = 0; to < size;) {
        from %= source.size();
        const std::size_t part = std::min(source.size() - from, size - to);
        std::memcpy(host.data() + to, source.data() + from, part);
        to += part;
        from += part;
      }
      LAWSON_CHECK(engine_.copy_to_device(device_, data, host.data(), size));
    }
    sets_.push_back(std::move(bindings));
  }
  return {};
}

Result<void*> Buffers::workspace(std::int64_t bytes) {
  if (bytes == 0) return static_cast<void*>(nullptr);
  if (bytes > workspace_bytes_) {
    LAWSON_TRY(workspace_, allocate(static_cast<std::size_t>(bytes)));
    workspace_bytes_ = bytes;
  }
  return workspace_;
}

Status Buffers::poison(const ir::Graph& graph) const {
  const std::vector<std::byte> ones(3 * kWindow, std::byte{0xFF});
  for (const Binding& binding : sets_.front()) {
    const auto id = static_cast<ir::TensorId>(binding.uid - 1);
    if (graph.is_input(id)) continue;
    for (const Window& window : windows(memory_of(graph.tensor(id)))) {
      LAWSON_CHECK(engine_.copy_to_device(device_,
                                          static_cast<std::byte*>(binding.data) + window.offset,
                                          ones.data(), window.bytes));
    }
  }
  return {};
}

Result<std::vector<double>> Buffers::outputs(const ir::Graph& graph) const {
  std::vector<double> samples;
  std::vector<std::byte> host;
  for (const Binding& binding : sets_.front()) {
    const auto id = static_cast<ir::TensorId>(binding.uid - 1);
    if (graph.is_input(id)) continue;
    const ir::Tensor& tensor = graph.tensor(id);
    for (const Window& window : windows(memory_of(tensor))) {
      host.resize(window.bytes);
      LAWSON_CHECK(engine_.copy_to_host(device_, host.data(),
                                        static_cast<std::byte*>(binding.data) + window.offset,
                                        window.bytes));
      const std::size_t count = window.bytes / std::max<std::size_t>(1, byte_size(tensor.dtype, 1));
      for (std::size_t i = 0; i < count; ++i) {
        samples.push_back(load_element(host.data(), tensor.dtype, static_cast<std::int64_t>(i)));
      }
    }
  }
  return samples;
}

}  // namespace lawson::bench
