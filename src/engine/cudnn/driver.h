// The few calls of the CUDA driver that Lawson makes itself, looked up at run time.
#pragma once

#include <cstddef>
#include <string>

#include "base/status.h"

namespace lawson::cudnn {

class Driver {
 public:
  // Opened and initialised once per process; a failure is not remembered. `unavailable` when there
  // is no driver, `cuda` when it does not work.
  static Result<const Driver*> open();

  int device_count() const { return device_count_; }

  // Makes a context on that device current in this thread: the one that is, when it is on that
  // device, else the device's primary one (the one that the CUDA runtime uses).
  Status make_current(int ordinal) const;

  Result<void*> allocate(std::size_t bytes) const;
  Status release(void* data) const;
  Status copy_to_device(void* to, const void* from, std::size_t bytes) const;
  Status copy_to_host(void* to, const void* from, std::size_t bytes) const;
  Status fill_zero(void* data, std::size_t bytes, void* stream) const;
  Status synchronize(void* stream) const;  // nullptr: the whole context

 private:
  using Address = unsigned long long;  // CUdeviceptr
  using Code = int;                    // CUresult

  struct Calls {
    Code (*init)(unsigned);
    Code (*device_count)(int*);
    Code (*error_text)(Code, const char**);
    Code (*current_context)(void**);
    Code (*set_context)(void*);
    Code (*context_device)(int*);
    Code (*retain_primary)(void**, int);
    Code (*allocate)(Address*, std::size_t);
    Code (*release)(Address);
    Code (*to_device)(Address, const void*, std::size_t);
    Code (*to_host)(void*, Address, std::size_t);
    Code (*fill)(Address, unsigned char, std::size_t, void*);
    Code (*synchronize_stream)(void*);
    Code (*synchronize_context)();
  };

  static Result<Driver> load();
  Status check(Code code, const char* call) const;

  Calls calls_{};
  int device_count_ = 0;
};

}  // namespace lawson::cudnn
