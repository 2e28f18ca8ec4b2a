#include "engine/cudnn/driver.h"

#include <dlfcn.h>

#include <bit>
#include <map>
#include <mutex>
#include <optional>

#include "engine/cudnn/loader.h"

namespace lawson::cudnn {
namespace {

constexpr int kNoDevice = 100;
constexpr int kOutOfMemory = 2;

}  // namespace

Result<Driver> Driver::load() {
  LAWSON_TRY(void* handle, driver());
  Driver loaded;
  Calls& calls = loaded.calls_;
  Status missing;
  const auto find = [&](auto& function, const char* name) {
    void* address = dlsym(handle, name);
    if (address == nullptr && missing.ok()) {
      missing = error(ErrorKind::unavailable, "the NVIDIA driver (libcuda.so.1) has no {}", name);
    }
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
  };
  find(calls.init, "cuInit");
  find(calls.device_count, "cuDeviceGetCount");
  find(calls.error_text, "cuGetErrorString");
  find(calls.current_context, "cuCtxGetCurrent");
  find(calls.set_context, "cuCtxSetCurrent");
  find(calls.context_device, "cuCtxGetDevice");
  find(calls.retain_primary, "cuDevicePrimaryCtxRetain");
  find(calls.allocate, "cuMemAlloc_v2");
  find(calls.release, "cuMemFree_v2");
  find(calls.to_device, "cuMemcpyHtoD_v2");
  find(calls.to_host, "cuMemcpyDtoH_v2");
  find(calls.fill, "cuMemsetD8Async");
  find(calls.synchronize_stream, "cuStreamSynchronize");
  find(calls.synchronize_context, "cuCtxSynchronize");
  LAWSON_CHECK(missing);
  const Code code = calls.init(0);
  if (code == kNoDevice) return loaded;
  LAWSON_CHECK(loaded.check(code, "cuInit"));
  LAWSON_CHECK(loaded.check(calls.device_count(&loaded.device_count_), "cuDeviceGetCount"));
  return loaded;
}

Result<const Driver*> Driver::open() {
  static std::mutex mutex;
  static std::optional<Driver> driver;
  const std::lock_guard lock{mutex};
  if (!driver) {
    LAWSON_TRY(Driver loaded, load());
    driver = loaded;
  }
  return &*driver;
}

Status Driver::check(Code code, const char* call) const {
  if (code == 0) return {};
  const char* text = nullptr;
  calls_.error_text(code, &text);
  return error(code == kOutOfMemory ? ErrorKind::out_of_memory : ErrorKind::cuda,
               "{} failed: {} (CUDA driver error {})", call, text == nullptr ? "no text" : text,
               code);
}

Status Driver::make_current(int ordinal) const {
  void* context = nullptr;
  LAWSON_CHECK(check(calls_.current_context(&context), "cuCtxGetCurrent"));
  int device = -1;
  if (context != nullptr && calls_.context_device(&device) == 0 && device == ordinal) return {};
  // Retained once per device and kept until the process ends, as the CUDA runtime does.
  static std::mutex mutex;
  static std::map<int, void*> primary;
  const std::lock_guard lock{mutex};
  auto found = primary.find(ordinal);
  if (found == primary.end()) {
    void* retained = nullptr;
    LAWSON_CHECK(check(calls_.retain_primary(&retained, ordinal), "cuDevicePrimaryCtxRetain"));
    found = primary.emplace(ordinal, retained).first;
  }
  return check(calls_.set_context(found->second), "cuCtxSetCurrent");
}

Result<void*> Driver::allocate(std::size_t bytes) const {
  Address address = 0;
  LAWSON_CHECK(check(calls_.allocate(&address, bytes == 0 ? 1 : bytes), "cuMemAlloc"));
  return std::bit_cast<void*>(address);
}

Status Driver::release(void* data) const {
  if (data == nullptr) return {};
  return check(calls_.release(std::bit_cast<Address>(data)), "cuMemFree");
}

Status Driver::copy_to_device(void* to, const void* from, std::size_t bytes) const {
  if (bytes == 0) return {};
  return check(calls_.to_device(std::bit_cast<Address>(to), from, bytes), "cuMemcpyHtoD");
}

Status Driver::copy_to_host(void* to, const void* from, std::size_t bytes) const {
  if (bytes == 0) return {};
  return check(calls_.to_host(to, std::bit_cast<Address>(from), bytes), "cuMemcpyDtoH");
}

Status Driver::fill_zero(void* data, std::size_t bytes, void* stream) const {
  return check(calls_.fill(std::bit_cast<Address>(data), 0, bytes, stream), "cuMemsetD8Async");
}

Status Driver::synchronize(void* stream) const {
  if (stream != nullptr) return check(calls_.synchronize_stream(stream), "cuStreamSynchronize");
  return check(calls_.synchronize_context(), "cuCtxSynchronize");
}

}  // namespace lawson::cudnn
