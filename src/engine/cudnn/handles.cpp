#include "engine/cudnn/handles.h"

#include <map>
#include <mutex>
#include <vector>

#include "engine/cudnn/lowering.h"

namespace lawson::cudnn {
namespace {

struct Pool {
  std::mutex mutex;
  std::map<int, std::vector<void*>> idle;  // by ordinal
};

// Never destroyed: handles outlive the CUDA context at the end of a process, and destroying them
// then crashes.
Pool& pool() {
  static Pool* const handles = new Pool;
  return *handles;
}

}  // namespace

Handle::~Handle() {
  if (handle_ == nullptr) return;
  const std::lock_guard lock{pool().mutex};
  pool().idle[ordinal_].push_back(handle_);
}

std::optional<Handle> idle_handle(int ordinal) {
  const std::lock_guard lock{pool().mutex};
  std::vector<void*>& idle = pool().idle[ordinal];
  if (idle.empty()) return std::nullopt;
  void* handle = idle.back();
  idle.pop_back();
  return Handle{handle, ordinal};
}

Result<Handle> borrow_handle(int ordinal) {
  if (auto idle = idle_handle(ordinal)) return std::move(*idle);
  void* handle = nullptr;
  if (const Failure failure = create_handle(handle)) {
    Device device;
    device.name = fmt::format("GPU {}", ordinal);
    return to_error(*failure, classify(*failure, false), device);
  }
  return Handle{handle, ordinal};
}

Result<const Driver*> driver_on(const Device& device) {
  if (!device.present() || device.kind != Device::Kind::cuda) {
    return error(ErrorKind::unavailable, "device '{}' is not on this machine", device.name);
  }
  LAWSON_TRY(const Driver* driver, Driver::open());
  LAWSON_CHECK(driver->make_current(device.ordinal));
  return driver;
}

Result<Handle> handle_for(const Device& device) {
  if (!device.present()) return Handle{};
  LAWSON_CHECK(driver_on(device));
  return borrow_handle(device.ordinal);
}

}  // namespace lawson::cudnn
