#include "torch/workspace.h"

#include <deque>

namespace lawson::torch {
namespace {

constexpr std::size_t kKept = std::size_t{64} << 10;  // bytes for each stream
constexpr std::size_t kMostStreams = 64;

// Most plans need less than a kilobyte, and torch's allocator takes as long for it as for a result.
// So each stream keeps a little memory, which its launches use one after another. It is not
// torch's: pools of CUDA graphs would count it as theirs.
struct StreamMemory {
  Place place;
  void* stream = nullptr;
  Memory memory;
  bool is_taken = false;  // by a thread that launches now
};

// Touched with the interpreter's lock alone. Lives as long as the process: at its end CUDA may be
// gone.
std::deque<StreamMemory>& kept() {
  static auto* const all = new std::deque<StreamMemory>;
  return *all;
}

// Null: there is none, and may be none.
StreamMemory* find(const Device& device, const Place& place, void* stream) {
  for (StreamMemory& one : kept()) {
    if (one.stream == stream && one.place == place) return &one;
  }
  if (kept().size() >= kMostStreams) return nullptr;
  try {
    return &kept().emplace_back(place, stream, Memory{device, kKept});
  } catch (const Error& error) {
    // All may be torch's, whose allocator has some.
    if (error.status() != LAWSON_OUT_OF_MEMORY) throw;
    return nullptr;
  }
}

void ignore_error(void* /*context*/, const char* /*kind*/, const char* /*message*/) {}

}  // namespace

Workspace::Workspace(const Device& device, const Place& place, void* stream, std::size_t size) {
  if (size == 0) return;
  // What is captured runs on any stream, and beside this one's launches: its memory is its own.
  if (!place.is_cpu() && size <= kKept && !is_capturing(device, stream)) {
    StreamMemory* const own = find(device, place, stream);
    if (own != nullptr && !own->is_taken) {
      own->is_taken = true;
      taken_ = &own->is_taken;
      data_ = own->memory.data();
      return;
    }
  }
  allocate(place, size);
}

// Memory of torch's allocator, without a Python object: on a GPU it is that of the current stream,
// and may be given back as soon as the work that uses it was launched there.
void Workspace::allocate(const Place& place, std::size_t size) {
  auto bytes = static_cast<std::int64_t>(size);
  DLTensor wanted{};
  wanted.device = {place.type, place.index};
  wanted.ndim = 1;
  wanted.dtype = {kDLUInt, 8, 1};
  wanted.shape = &bytes;
  if (Torch::get().table().managed_tensor_allocator(&wanted, &memory_, nullptr, &ignore_error) ==
      0) {
    data_ = data_of(memory_->dl_tensor);
    return;
  }
  // The table has only a text; torch's own call raises the exception that its users wait for.
  memory_ = nullptr;
  Torch::get().empty_strided(
      place, nb::make_tuple(nb::make_tuple(bytes), nb::make_tuple(1), Torch::get().dtype("uint8")));
  throw Error(LAWSON_OUT_OF_MEMORY,
              "torch gave no workspace of " + std::to_string(size) + " bytes on " + place.name());
}

}  // namespace lawson::torch
