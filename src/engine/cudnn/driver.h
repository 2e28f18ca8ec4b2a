// The few calls of the CUDA driver that Lawson makes itself, looked up at run time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "base/status.h"

namespace lawson::cudnn {

struct LaunchShape {
  unsigned blocks = 1;
  unsigned threads_x = 1;
  unsigned threads_y = 1;
};

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
  // Done when it returns, for every stream.
  Status copy_to_device(void* to, const void* from, std::size_t bytes) const;
  Status copy_to_host(void* to, const void* from, std::size_t bytes) const;
  Status fill(void* data, std::uint8_t value, std::size_t bytes, void* stream) const;
  Status synchronize(void* stream) const;  // nullptr: the whole context

  // Kernels of an image that stays in memory: in every context from load_kernels() on, but moved to
  // the current context's device by prepare_kernel(), which a capture does not allow.
  Result<void*> load_kernels(const void* image) const;
  Result<void*> kernel(void* library, const char* name) const;
  Status prepare_kernel(void* kernel) const;
  Status launch(void* kernel, const LaunchShape& shape, void* arguments, void* stream) const;

  // Streams, captured graphs and events; whoever makes one destroys it.
  Result<void*> create_stream() const;
  Status destroy_stream(void* stream) const;
  Result<bool> is_capturing(void* stream) const;
  Status begin_capture(void* stream) const;       // of this thread's work on that stream
  Result<void*> end_capture(void* stream) const;  // the graph, ready to launch
  Status launch_graph(void* graph, void* stream) const;
  Status destroy_graph(void* graph) const;
  Result<void*> create_event() const;
  Status destroy_event(void* event) const;
  Status record(void* event, void* stream) const;
  Result<float> milliseconds(void* begin, void* end) const;  // waits for `end`

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
    // Null where the driver lacks them.
    Code (*load_library)(void**, const void*, void*, void*, unsigned, void*, void*, unsigned);
    Code (*library_kernel)(void**, void*, const char*);
    Code (*kernel_function)(void**, void*);
    Code (*load_function)(void*);
    Code (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                   void*, void**, void**);
    Code (*create_stream)(void**, unsigned);
    Code (*destroy_stream)(void*);
    Code (*is_capturing)(void*, int*);
    Code (*exchange_capture_mode)(int*);
    Code (*begin_capture)(void*, int);
    Code (*end_capture)(void*, void**);
    Code (*instantiate_graph)(void**, void*, unsigned long long);
    Code (*destroy_captured)(void*);
    Code (*launch_graph)(void*, void*);
    Code (*destroy_graph)(void*);
    Code (*create_event)(void**, unsigned);
    Code (*destroy_event)(void*);
    Code (*record)(void*, void*);
    Code (*wait_event)(void*);
    Code (*elapsed)(float*, void*, void*);
  };

  static Result<Driver> load();
  Status check(Code code, const char* call) const;
  // Of a function that may be missing.
  template <typename... Parameters>
  Status call(Code (*function)(Parameters...), const char* name,
              std::type_identity_t<Parameters>... arguments) const;

  Calls calls_{};
  int device_count_ = 0;
};

}  // namespace lawson::cudnn
