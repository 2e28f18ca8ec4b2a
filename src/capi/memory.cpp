// Memory on a device, for callers without a framework of their own.
#include <cstdlib>
#include <cstring>
#include <limits>

#include "capi/context.h"
#include "capi/guard.h"
#include "capi/handles.h"

struct lawson_memory {
  lawson_memory(lawson::Engine* owner, lawson::Device where, std::size_t bytes)
      : engine{owner}, device{std::move(where)}, size{bytes} {}
  lawson_memory(const lawson_memory&) = delete;
  lawson_memory& operator=(const lawson_memory&) = delete;
  ~lawson_memory() {
    if (engine == nullptr) {
      std::free(data);
    } else if (data != nullptr) {
      // Nothing that was submitted may still use it.
      static_cast<void>(engine->synchronize(device, nullptr));
      static_cast<void>(engine->release(device, data));
    }
  }

  lawson::Engine* engine;  // null: host memory
  lawson::Device device;
  void* data = nullptr;
  std::size_t size;
};

namespace lawson::capi {
namespace {

constexpr std::size_t kHostAlignment = 64;  // a cache line, and any vector register

// The engine that has the device's memory; null for the host's.
Result<Engine*> engine_on(const Device& device) {
  if (device.kind == Device::Kind::cpu) return nullptr;
  LAWSON_TRY(plan::Planner * planner, capi::planner());
  Engine* engine = planner->engine(engine_for(device, ""));
  if (engine != nullptr && device.present()) return engine;
  return error(ErrorKind::unavailable, "memory and streams of '{}': it is not on this machine",
               device.name);
}

Status allocate(lawson_memory& memory) {
  const std::size_t bytes = std::max<std::size_t>(memory.size, 1);
  if (memory.engine != nullptr) {
    LAWSON_TRY(memory.data, memory.engine->allocate(memory.device, bytes));
    return {};
  }
  if (bytes <= std::numeric_limits<std::size_t>::max() - kHostAlignment) {
    const std::size_t rounded = (bytes + kHostAlignment - 1) / kHostAlignment * kHostAlignment;
    memory.data = std::aligned_alloc(kHostAlignment, rounded);
  }
  if (memory.data != nullptr) return {};
  return error(ErrorKind::out_of_memory, "{} bytes of host memory cannot be had", bytes);
}

Status check_range(const lawson_memory& memory, std::size_t offset, std::size_t size) {
  if (offset <= memory.size && size <= memory.size - offset) return {};
  return invalid("{} bytes at offset {} are not inside memory of {} bytes", size, offset,
                 memory.size);
}

}  // namespace
}  // namespace lawson::capi

using namespace lawson;
using namespace lawson::capi;

extern "C" {

lawson_status lawson_device_capturing(const lawson_device* device, void* stream, int* capturing) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(device, "device"));
    LAWSON_CHECK(require(capturing, "capturing"));
    LAWSON_TRY(Engine * engine, engine_on(device->device));
    bool found = false;
    if (engine != nullptr) {
      LAWSON_TRY(found, engine->capturing(device->device, stream));
    }
    *capturing = found ? 1 : 0;
    return {};
  });
}

lawson_status lawson_memory_create(const lawson_device* device, size_t size,
                                   lawson_memory** memory) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(device, "device"));
    LAWSON_CHECK(require(memory, "memory"));
    LAWSON_TRY(Engine * engine, engine_on(device->device));
    auto made = std::make_unique<lawson_memory>(engine, device->device, size);
    LAWSON_CHECK(allocate(*made));
    *memory = made.release();
    return {};
  });
}

void lawson_memory_destroy(lawson_memory* memory) {
  delete memory;
}

void* lawson_memory_data(const lawson_memory* memory) {
  return memory == nullptr ? nullptr : memory->data;
}

size_t lawson_memory_size(const lawson_memory* memory) {
  return memory == nullptr ? 0 : memory->size;
}

lawson_status lawson_memory_write(lawson_memory* memory, size_t offset, const void* data,
                                  size_t size) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(memory, "memory"));
    LAWSON_CHECK(check_range(*memory, offset, size));
    if (size == 0) return {};
    LAWSON_CHECK(require(data, "data"));
    void* target = static_cast<std::byte*>(memory->data) + offset;
    if (memory->engine != nullptr) {
      return memory->engine->copy_to_device(memory->device, target, data, size);
    }
    std::memcpy(target, data, size);
    return {};
  });
}

lawson_status lawson_memory_read(const lawson_memory* memory, size_t offset, void* data,
                                 size_t size) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(memory, "memory"));
    LAWSON_CHECK(check_range(*memory, offset, size));
    if (size == 0) return {};
    LAWSON_CHECK(require(data, "data"));
    const void* from = static_cast<const std::byte*>(memory->data) + offset;
    if (memory->engine != nullptr) {
      LAWSON_CHECK(memory->engine->synchronize(memory->device, nullptr));
      return memory->engine->copy_to_host(memory->device, data, from, size);
    }
    std::memcpy(data, from, size);
    return {};
  });
}

}  // extern "C"
