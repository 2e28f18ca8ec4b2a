#include "engine/cudnn/driver.h"

#include <dlfcn.h>

#include <array>
#include <atomic>
#include <bit>
#include <mutex>

#include "engine/cudnn/loader.h"

namespace lawson::cudnn {
namespace {

constexpr int kNoDevice = 100;
constexpr int kOutOfMemory = 2;
constexpr int kImplicitCapture = 906;  // the null stream, while another one captures
constexpr unsigned kNonBlocking = 1;
constexpr int kThreadLocalCapture = 1;
constexpr int kRelaxedCapture = 2;

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
  const auto find_if_there = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
  };
  find_if_there(calls.load_library, "cuLibraryLoadData");
  find_if_there(calls.library_kernel, "cuLibraryGetKernel");
  find_if_there(calls.kernel_function, "cuKernelGetFunction");
  find_if_there(calls.load_function, "cuFuncLoad");
  find_if_there(calls.launch, "cuLaunchKernel");
  find_if_there(calls.create_stream, "cuStreamCreate");
  find_if_there(calls.destroy_stream, "cuStreamDestroy_v2");
  find_if_there(calls.is_capturing, "cuStreamIsCapturing");
  find_if_there(calls.exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
  find_if_there(calls.begin_capture, "cuStreamBeginCapture_v2");
  find_if_there(calls.end_capture, "cuStreamEndCapture");
  find_if_there(calls.instantiate_graph, "cuGraphInstantiateWithFlags");
  find_if_there(calls.destroy_captured, "cuGraphDestroy");
  find_if_there(calls.launch_graph, "cuGraphLaunch");
  find_if_there(calls.destroy_graph, "cuGraphExecDestroy");
  find_if_there(calls.create_event, "cuEventCreate");
  find_if_there(calls.destroy_event, "cuEventDestroy_v2");
  find_if_there(calls.record, "cuEventRecord");
  find_if_there(calls.wait_event, "cuEventSynchronize");
  find_if_there(calls.elapsed, "cuEventElapsedTime");
  const Code code = calls.init(0);
  if (code == kNoDevice) return loaded;
  LAWSON_CHECK(loaded.check(code, "cuInit"));
  LAWSON_CHECK(loaded.check(calls.device_count(&loaded.device_count_), "cuDeviceGetCount"));
  return loaded;
}

Result<const Driver*> Driver::open() {
  static std::atomic<const Driver*> opened{nullptr};  // never destroyed, for the end of a process
  if (const Driver* driver = opened.load(std::memory_order_acquire)) return driver;
  static std::mutex mutex;
  const std::lock_guard lock{mutex};
  if (opened.load(std::memory_order_acquire) == nullptr) {
    LAWSON_TRY(Driver loaded, load());
    opened.store(new Driver{loaded}, std::memory_order_release);
  }
  return opened.load(std::memory_order_acquire);
}

Status Driver::check(Code code, const char* call) const {
  if (code == 0) return {};
  const char* text = nullptr;
  calls_.error_text(code, &text);
  return error(code == kOutOfMemory ? ErrorKind::out_of_memory : ErrorKind::cuda,
               "{} failed: {} (CUDA driver error {})", call, text == nullptr ? "no text" : text,
               code);
}

template <typename... Parameters>
Status Driver::call(Code (*function)(Parameters...), const char* name,
                    std::type_identity_t<Parameters>... arguments) const {
  if (function == nullptr) {
    return error(ErrorKind::unavailable, "the NVIDIA driver (libcuda.so.1) has no {}", name);
  }
  return check(function(arguments...), name);
}

Status Driver::make_current(int ordinal) const {
  void* context = nullptr;
  LAWSON_CHECK(check(calls_.current_context(&context), "cuCtxGetCurrent"));
  int device = -1;
  if (context != nullptr && calls_.context_device(&device) == 0 && device == ordinal) return {};
  // Retained once per device and kept until the process ends, as the CUDA runtime does. Retaining
  // the first time takes long, and nobody waits for another device's.
  static std::array<std::atomic<void*>, 64> primary{};
  std::atomic<void*>* const kept =
      ordinal >= 0 && static_cast<std::size_t>(ordinal) < primary.size()
          ? &primary[static_cast<std::size_t>(ordinal)]
          : nullptr;
  void* retained = kept == nullptr ? nullptr : kept->load(std::memory_order_acquire);
  if (retained == nullptr) {
    // Two threads that do so at once get the same context; that it is counted twice costs nothing.
    LAWSON_CHECK(check(calls_.retain_primary(&retained, ordinal), "cuDevicePrimaryCtxRetain"));
    if (kept != nullptr) kept->store(retained, std::memory_order_release);
  }
  return check(calls_.set_context(retained), "cuCtxSetCurrent");
}

// In a thread's usual mode an allocation breaks what another thread captures in global mode, though
// it has nothing to do with it.
Result<void*> Driver::allocate(std::size_t bytes) const {
  int mode = kRelaxedCapture;
  const bool is_exchanged =
      calls_.exchange_capture_mode != nullptr && calls_.exchange_capture_mode(&mode) == 0;
  Address address = 0;
  const Code code = calls_.allocate(&address, bytes == 0 ? 1 : bytes);
  if (is_exchanged) calls_.exchange_capture_mode(&mode);
  LAWSON_CHECK(check(code, "cuMemAlloc"));
  return std::bit_cast<void*>(address);
}

Status Driver::release(void* data) const {
  if (data == nullptr) return {};
  return check(calls_.release(std::bit_cast<Address>(data)), "cuMemFree");
}

Status Driver::copy_to_device(void* to, const void* from, std::size_t bytes) const {
  if (bytes == 0) return {};
  LAWSON_CHECK(check(calls_.to_device(std::bit_cast<Address>(to), from, bytes), "cuMemcpyHtoD"));
  // From pageable memory cuMemcpyHtoD returns when the data is staged; the rest happens on the
  // default stream, for which streams of CU_STREAM_NON_BLOCKING do not wait.
  return synchronize(nullptr);
}

Status Driver::copy_to_host(void* to, const void* from, std::size_t bytes) const {
  if (bytes == 0) return {};
  return check(calls_.to_host(to, std::bit_cast<Address>(from), bytes), "cuMemcpyDtoH");
}

Status Driver::fill(void* data, std::uint8_t value, std::size_t bytes, void* stream) const {
  if (bytes == 0) return {};
  return check(calls_.fill(std::bit_cast<Address>(data), value, bytes, stream), "cuMemsetD8Async");
}

Status Driver::synchronize(void* stream) const {
  if (stream != nullptr) return check(calls_.synchronize_stream(stream), "cuStreamSynchronize");
  return check(calls_.synchronize_context(), "cuCtxSynchronize");
}

Result<void*> Driver::load_kernels(const void* image) const {
  void* library = nullptr;
  LAWSON_CHECK(call(calls_.load_library, "cuLibraryLoadData", &library, image, nullptr, nullptr, 0,
                    nullptr, nullptr, 0));
  return library;
}

Result<void*> Driver::kernel(void* library, const char* name) const {
  void* found = nullptr;
  LAWSON_CHECK(call(calls_.library_kernel, "cuLibraryGetKernel", &found, library, name));
  return found;
}

Status Driver::prepare_kernel(void* kernel) const {
  void* function = nullptr;
  LAWSON_CHECK(call(calls_.kernel_function, "cuKernelGetFunction", &function, kernel));
  if (calls_.load_function == nullptr) return {};  // drivers before 12.4
  return check(calls_.load_function(function), "cuFuncLoad");
}

Status Driver::launch(void* kernel, const LaunchShape& shape, void* arguments, void* stream) const {
  void* parameters[] = {arguments};
  return call(calls_.launch, "cuLaunchKernel", kernel, shape.blocks, 1, 1, shape.threads_x,
              shape.threads_y, 1, 0, stream, parameters, nullptr);
}

Result<void*> Driver::create_stream() const {
  void* stream = nullptr;
  LAWSON_CHECK(call(calls_.create_stream, "cuStreamCreate", &stream, kNonBlocking));
  return stream;
}

Status Driver::destroy_stream(void* stream) const {
  return call(calls_.destroy_stream, "cuStreamDestroy", stream);
}

Result<bool> Driver::is_capturing(void* stream) const {
  int state = 0;  // 0 none, 1 active, 2 invalidated
  if (calls_.is_capturing == nullptr) return false;
  const Code code = calls_.is_capturing(stream, &state);
  if (code == kImplicitCapture) return true;
  LAWSON_CHECK(check(code, "cuStreamIsCapturing"));
  return state != 0;
}

Status Driver::begin_capture(void* stream) const {
  return call(calls_.begin_capture, "cuStreamBeginCapture", stream, kThreadLocalCapture);
}

Result<void*> Driver::end_capture(void* stream) const {
  void* captured = nullptr;
  LAWSON_CHECK(call(calls_.end_capture, "cuStreamEndCapture", stream, &captured));
  void* graph = nullptr;
  const Status made =
      call(calls_.instantiate_graph, "cuGraphInstantiateWithFlags", &graph, captured, 0);
  LAWSON_CHECK(call(calls_.destroy_captured, "cuGraphDestroy", captured));
  LAWSON_CHECK(made);
  return graph;
}

Status Driver::launch_graph(void* graph, void* stream) const {
  return call(calls_.launch_graph, "cuGraphLaunch", graph, stream);
}

Status Driver::destroy_graph(void* graph) const {
  return call(calls_.destroy_graph, "cuGraphExecDestroy", graph);
}

Result<void*> Driver::create_event() const {
  void* event = nullptr;
  LAWSON_CHECK(call(calls_.create_event, "cuEventCreate", &event, 0));
  return event;
}

Status Driver::destroy_event(void* event) const {
  return call(calls_.destroy_event, "cuEventDestroy", event);
}

Status Driver::record(void* event, void* stream) const {
  return call(calls_.record, "cuEventRecord", event, stream);
}

Result<float> Driver::milliseconds(void* begin, void* end) const {
  float value = 0;
  LAWSON_CHECK(call(calls_.wait_event, "cuEventSynchronize", end));
  LAWSON_CHECK(call(calls_.elapsed, "cuEventElapsedTime", &value, begin, end));
  return value;
}

}  // namespace lawson::cudnn
