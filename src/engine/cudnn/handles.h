// cuDNN handles: one per use at a time, kept for the next use on the same device.
#pragma once

#include <optional>
#include <utility>

#include "base/status.h"
#include "engine/cudnn/driver.h"
#include "engine/device.h"

namespace lawson::cudnn {

class Handle {
 public:
  Handle() = default;
  Handle(void* handle, int ordinal) : handle_{handle}, ordinal_{ordinal} {}
  Handle(Handle&& other) noexcept { swap(other); }
  Handle& operator=(Handle&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Handle();

  void* get() const { return handle_; }  // nullptr: no device

 private:
  void swap(Handle& other) noexcept {
    std::swap(handle_, other.handle_);
    std::swap(ordinal_, other.ordinal_);
  }
  void* handle_ = nullptr;
  int ordinal_ = -1;
};

// The device's context must be current in this thread.
Result<Handle> borrow_handle(int ordinal);
// One that need not be created; nullopt when all are in use.
std::optional<Handle> idle_handle(int ordinal);

// The driver, with the live device's context current in this thread.
Result<const Driver*> driver_on(const Device& device);
// A handle on a live device, or none for a target.
Result<Handle> handle_for(const Device& device);

}  // namespace lawson::cudnn
