#include "engine/cudnn/handles.h"

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "base/lazy.h"
#include "engine/cudnn/lowering.h"
#include "engine/cudnn/slots.h"

namespace lawson::cudnn {
namespace {

// More devices or more threads at once than have a place go through the lock.
constexpr std::size_t kDevices = 32;
constexpr std::size_t kThreads = 64;

// Never destroyed: handles outlive the CUDA context at the end of a process, and destroying them
// then crashes.
struct Pool {
  std::array<Slots<void, kThreads>, kDevices> idle;  // by ordinal
  std::mutex mutex;
  std::map<int, std::vector<void*>> more;
  std::atomic<std::size_t> more_count{0};

  Slots<void, kThreads>* of(int ordinal) {
    const auto index = static_cast<std::size_t>(ordinal);
    return index < idle.size() ? &idle[index] : nullptr;
  }
};

Pool& pool() {
  static Lazy<Pool> handles;
  return handles.get();
}

}  // namespace

Handle::~Handle() {
  if (handle_ == nullptr) return;
  auto* const idle = pool().of(ordinal_);
  if (idle != nullptr && idle->give_back(handle_)) return;
  const std::lock_guard lock{pool().mutex};
  pool().more[ordinal_].push_back(handle_);
  ++pool().more_count;
}

std::optional<Handle> idle_handle(int ordinal) {
  if (auto* const idle = pool().of(ordinal)) {
    if (void* handle = idle->take()) return Handle{handle, ordinal};
  }
  if (pool().more_count.load(std::memory_order_relaxed) == 0) return std::nullopt;
  const std::lock_guard lock{pool().mutex};
  std::vector<void*>& more = pool().more[ordinal];
  if (more.empty()) return std::nullopt;
  void* handle = more.back();
  more.pop_back();
  --pool().more_count;
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
