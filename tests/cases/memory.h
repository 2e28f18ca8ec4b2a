// The tensors of one execution where an engine wants them, between zones that nobody may write.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "plan/inputs.h"

namespace lawson::cases {

// On the host the buffers themselves; on a GPU one block of device memory with a copy of each, the
// workspace in it too, full of NaN. Every tensor is aligned as the graph promises, and not more.
// Graph and buffers have to stay.
class Memory {
 public:
  // `in_place`: outputs that may share an input's memory do so. On a GPU they always do.
  Memory(Engine& engine, const Device& device, bool in_place)
      : engine_{engine}, device_{device}, in_place_{in_place || on_gpu()} {}
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  Status place(const ir::Graph& graph, std::vector<plan::Buffer>& inputs,
               std::vector<plan::Buffer>& outputs, std::int64_t workspace_bytes);
  // Once more from the start, at the same addresses: inputs as the buffers have them now, outputs
  // poisoned.
  Status upload();
  // Waits, and puts the results into the outputs' buffers.
  Status fetch();

  std::span<const Binding> bindings() const { return bindings_; }
  void* workspace() const { return workspace_; }
  // After fetch(): what was written that is not an output ("input 'k'", "memory beside 'o'"), or
  // "".
  std::string damage() const;

 private:
  struct Slot {
    plan::Buffer* buffer = nullptr;
    std::string name;
    std::size_t offset = 0;  // in the block
    bool output = false;
    bool written = false;  // may be: an output, or an input that an output shares
  };

  bool on_gpu() const { return device_.kind == Device::Kind::cuda; }
  Status place_on_gpu(const ir::Graph& graph, std::size_t workspace_bytes);
  Status place_on_host(const ir::Graph& graph, std::size_t workspace_bytes);
  Slot* slot_of(std::int64_t uid);

  Engine& engine_;
  const Device& device_;
  bool in_place_;
  std::vector<Slot> slots_;
  std::vector<std::pair<plan::Buffer*, const plan::Buffer*>> shared_;  // output, input
  std::vector<Binding> bindings_;
  std::byte* block_ = nullptr;
  std::size_t block_bytes_ = 0;
  std::size_t workspace_begin_ = 0;  // in the block
  std::size_t workspace_end_ = 0;
  void* large_workspace_ = nullptr;
  void* workspace_ = nullptr;
  std::vector<std::byte> uploaded_;
  std::vector<std::byte> fetched_;
  std::vector<std::byte> host_workspace_;
};

}  // namespace lawson::cases
