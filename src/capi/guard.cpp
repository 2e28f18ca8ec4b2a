#include "capi/guard.h"

#include <exception>
#include <new>
#include <string>

namespace lawson::capi {
namespace {

constexpr std::size_t kMaxMessageBytes = std::size_t{64} << 10;

constexpr const char* kNoMemory = "out of memory while an error was being reported";

// What lawson_last_error_message hands out. A message that cannot be stored falls back to a
// literal, so that reporting an error never fails.
struct LastError {
  std::string text;
  const char* shown = "";
};

// nullptr without memory. Ends with its thread; for calls after that (from a destructor of a static
// object) there is one that stays.
LastError* last_error() noexcept {
  thread_local LastError* error = nullptr;
  thread_local struct End {
    ~End() {
      delete error;
      error = nullptr;
    }
  } end;
  static_cast<void>(end);
  if (error == nullptr) error = new (std::nothrow) LastError;
  return error;
}

lawson_status keep(lawson_status status, std::string_view message) noexcept {
  LastError* last = last_error();
  if (last == nullptr) return status;
  try {
    last->text.assign(message.substr(0, kMaxMessageBytes));
    last->shown = last->text.c_str();
  } catch (...) {
    last->shown = kNoMemory;
  }
  return status;
}

}  // namespace

lawson_status status_of(ErrorKind kind) noexcept {
  switch (kind) {
    case ErrorKind::unsupported:
      return LAWSON_UNSUPPORTED;
    case ErrorKind::invalid_argument:
      return LAWSON_INVALID_ARGUMENT;
    case ErrorKind::unavailable:
      return LAWSON_UNAVAILABLE;
    case ErrorKind::out_of_memory:
      return LAWSON_OUT_OF_MEMORY;
    case ErrorKind::cuda:
      return LAWSON_CUDA;
    case ErrorKind::cudnn:
      return LAWSON_CUDNN;
    case ErrorKind::io:
      return LAWSON_IO;
    case ErrorKind::cancelled:
      return LAWSON_CANCELLED;
    case ErrorKind::internal:
      return LAWSON_INTERNAL;
  }
  return LAWSON_INTERNAL;
}

lawson_status fail(const Error& error) noexcept {
  return keep(status_of(error.kind),
              error.message.empty() ? to_string(error.kind) : std::string_view{error.message});
}

lawson_status fail_with_current_exception() noexcept {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return keep(LAWSON_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception& e) {
    return keep(LAWSON_INTERNAL, e.what());
  } catch (...) {
    return keep(LAWSON_INTERNAL, "an exception that is not a std::exception");
  }
}

}  // namespace lawson::capi

extern "C" {

const char* lawson_status_string(lawson_status status) {
  switch (status) {
    case LAWSON_OK:
      return "ok";
    case LAWSON_UNSUPPORTED:
      return "unsupported";
    case LAWSON_INVALID_ARGUMENT:
      return "invalid argument";
    case LAWSON_UNAVAILABLE:
      return "unavailable";
    case LAWSON_OUT_OF_MEMORY:
      return "out of memory";
    case LAWSON_CUDA:
      return "CUDA error";
    case LAWSON_CUDNN:
      return "cuDNN error";
    case LAWSON_IO:
      return "I/O error";
    case LAWSON_CANCELLED:
      return "cancelled";
    case LAWSON_INTERNAL:
      return "internal error";
  }
  return "unknown status";
}

const char* lawson_last_error_message(void) {
  const lawson::capi::LastError* last = lawson::capi::last_error();
  return last == nullptr ? lawson::capi::kNoMemory : last->shown;
}

const char* lawson_version(void) {
  return LAWSON_VERSION_TEXT;
}

}  // extern "C"
