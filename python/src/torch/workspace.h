// What a plan needs for its work beside operands and results, for the time of one launch.
#ifndef LAWSON_PYTHON_TORCH_WORKSPACE_H_
#define LAWSON_PYTHON_TORCH_WORKSPACE_H_

#include <cstddef>

#include "torch/torch.h"

namespace lawson::torch {

class Workspace {
 public:
  // `stream`: where the plan will be launched, the current one.
  Workspace(const Device& device, const Place& place, void* stream, std::size_t size);
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  // As soon as the work was launched the next one of the stream may have it.
  ~Workspace() {
    if (taken_ != nullptr) *taken_ = false;
    if (memory_ != nullptr && memory_->deleter != nullptr) memory_->deleter(memory_);
  }

  void* data() const { return data_; }

 private:
  void allocate(const Place& place, std::size_t size);

  void* data_ = nullptr;
  bool* taken_ = nullptr;
  DLManagedTensorVersioned* memory_ = nullptr;
};

}  // namespace lawson::torch

#endif  // LAWSON_PYTHON_TORCH_WORKSPACE_H_
