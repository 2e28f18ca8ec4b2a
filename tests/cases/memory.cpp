#include "cases/memory.h"

#include <algorithm>

#include "ir/attention.h"

namespace lawson::cases {
namespace {

constexpr std::size_t kZone = 256;
constexpr std::byte kZoneByte{0xC3};
constexpr std::byte kNan{0xFF};
// Above this a workspace is not cleared and not looked at.
constexpr std::size_t kMostWorkspace = std::size_t{32} << 20;

// The next odd multiple of `alignment` with a zone before it.
std::size_t aligned(std::size_t offset, std::size_t alignment) {
  std::size_t multiple = (offset + kZone + alignment - 1) / alignment;
  if (multiple % 2 == 0) ++multiple;
  return multiple * alignment;
}

}  // namespace

Memory::~Memory() {
  for (void* block : {static_cast<void*>(block_), large_workspace_}) {
    if (block != nullptr) static_cast<void>(engine_.release(device_, block));
  }
}

Memory::Slot* Memory::slot_of(std::int64_t uid) {
  const auto slot = std::find_if(slots_.begin(), slots_.end(), [&](const Slot& s) {
    return ir::Graph::uid(s.buffer->id()) == uid;
  });
  return slot == slots_.end() ? nullptr : &*slot;
}

Status Memory::place(const ir::Graph& graph, std::vector<plan::Buffer>& inputs,
                     std::vector<plan::Buffer>& outputs, std::int64_t workspace_bytes) {
  for (auto* list : {&inputs, &outputs}) {
    for (plan::Buffer& buffer : *list) {
      const bool output = list == &outputs;
      slots_.push_back({&buffer, graph.tensor(buffer.id()).name, 0, output, output});
    }
  }
  for (plan::Buffer& output : outputs) {
    const ir::TensorId input = ir::shared_memory_input(graph, output.id());
    if (!in_place_ || input == ir::kNone) continue;
    Slot* slot = slot_of(ir::Graph::uid(input));
    if (slot->buffer->bytes() != output.bytes()) {
      return error(ErrorKind::internal, "output '{}' and its input differ in size",
                   graph.tensor(output.id()).name);
    }
    slot->written = true;
    shared_.emplace_back(&output, slot->buffer);
  }
  const auto bytes = static_cast<std::size_t>(workspace_bytes);
  if (on_gpu()) return place_on_gpu(graph, bytes);
  return place_on_host(graph, bytes);
}

Status Memory::place_on_host(const ir::Graph&, std::size_t workspace_bytes) {
  for (const Slot& slot : slots_) bindings_.push_back(slot.buffer->binding());
  for (const auto& [output, input] : shared_) {
    for (Binding& binding : bindings_) {
      if (binding.uid == ir::Graph::uid(output->id())) binding.data = input->data();
    }
  }
  if (workspace_bytes == 0) return {};
  host_workspace_.assign(workspace_bytes + 64, kNan);
  const auto address = reinterpret_cast<std::uintptr_t>(host_workspace_.data());
  workspace_ = host_workspace_.data() + (64 - address % 64) % 64;
  return {};
}

Status Memory::place_on_gpu(const ir::Graph& graph, std::size_t workspace_bytes) {
  std::size_t end = 0;
  for (Slot& slot : slots_) {
    const ir::Tensor& tensor = graph.tensor(slot.buffer->id());
    if (tensor.by_value) continue;
    slot.offset = aligned(end, static_cast<std::size_t>(tensor.alignment));
    end = slot.offset + slot.buffer->bytes();
  }
  workspace_begin_ = workspace_end_ = (end + kZone + 255) / 256 * 256;
  if (workspace_bytes <= kMostWorkspace) workspace_end_ += workspace_bytes;
  block_bytes_ = workspace_end_ + kZone;
  LAWSON_TRY(void* block, engine_.allocate(device_, block_bytes_));
  block_ = static_cast<std::byte*>(block);
  workspace_ = workspace_bytes > 0 ? block_ + workspace_begin_ : nullptr;
  if (workspace_bytes > kMostWorkspace) {
    LAWSON_TRY(large_workspace_, engine_.allocate(device_, workspace_bytes));
    workspace_ = large_workspace_;
  }
  for (const Slot& slot : slots_) {
    Binding binding = slot.buffer->binding();
    if (!graph.tensor(slot.buffer->id()).by_value) binding.data = block_ + slot.offset;
    bindings_.push_back(binding);
  }
  for (const auto& [output, input] : shared_) {
    const Slot* from = slot_of(ir::Graph::uid(input->id()));
    for (Binding& binding : bindings_) {
      if (binding.uid == ir::Graph::uid(output->id())) binding.data = block_ + from->offset;
    }
  }
  return upload();
}

Status Memory::upload() {
  for (const Slot& slot : slots_) {
    if (slot.output) std::fill_n(slot.buffer->data(), slot.buffer->bytes(), slot.buffer->poison());
  }
  if (!on_gpu()) return {};
  uploaded_.assign(block_bytes_, kZoneByte);
  for (const Slot& slot : slots_) {
    if (slot.offset == 0) continue;  // by value
    std::copy_n(slot.buffer->data(), slot.buffer->bytes(),
                uploaded_.begin() + static_cast<std::ptrdiff_t>(slot.offset));
  }
  std::fill(uploaded_.begin() + static_cast<std::ptrdiff_t>(workspace_begin_),
            uploaded_.begin() + static_cast<std::ptrdiff_t>(workspace_end_), kNan);
  return engine_.copy_to_device(device_, block_, uploaded_.data(), block_bytes_);
}

Status Memory::fetch() {
  if (on_gpu()) {
    LAWSON_CHECK(engine_.synchronize(device_, nullptr));
    fetched_.resize(block_bytes_);
    LAWSON_CHECK(engine_.copy_to_host(device_, fetched_.data(), block_, block_bytes_));
  }
  for (const Slot& slot : slots_) {
    if (!slot.output || slot.offset == 0) continue;
    std::copy_n(fetched_.begin() + static_cast<std::ptrdiff_t>(slot.offset), slot.buffer->bytes(),
                slot.buffer->data());
  }
  for (const auto& [output, input] : shared_) {
    const std::byte* from = input->data();
    if (on_gpu()) from = fetched_.data() + slot_of(ir::Graph::uid(input->id()))->offset;
    std::copy_n(from, output->bytes(), output->data());
  }
  return {};
}

std::string Memory::damage() const {
  if (!on_gpu()) {
    for (const Slot& slot : slots_) {
      if (!slot.buffer->guards_intact()) return fmt::format("memory beside '{}'", slot.name);
    }
    return "";
  }
  const auto changed = [this](std::size_t begin, std::size_t end) {
    const auto at = [](const std::vector<std::byte>& bytes, std::size_t n) {
      return bytes.begin() + static_cast<std::ptrdiff_t>(n);
    };
    return !std::equal(at(uploaded_, begin), at(uploaded_, end), at(fetched_, begin));
  };
  std::size_t end = 0;
  std::string last = "the first tensor";
  for (const Slot& slot : slots_) {
    if (slot.offset == 0) continue;
    if (changed(end, slot.offset)) {
      return fmt::format("memory between '{}' and '{}'", last, slot.name);
    }
    end = slot.offset + slot.buffer->bytes();
    if (!slot.written && changed(slot.offset, end)) return fmt::format("input '{}'", slot.name);
    last = slot.name;
  }
  if (changed(end, workspace_begin_)) return fmt::format("memory behind '{}'", last);
  if (changed(workspace_end_, block_bytes_)) return "memory behind the workspace";
  return "";
}

}  // namespace lawson::cases
