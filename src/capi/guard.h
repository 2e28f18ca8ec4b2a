// The edge: every C function runs inside guard(), which turns errors and exceptions of any kind
// into a status and this thread's message.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <string_view>
#include <utility>

#include "base/status.h"
#include "lawson/lawson.h"

namespace lawson::capi {

lawson_status status_of(ErrorKind kind) noexcept;

// Keeps the message for lawson_last_error_message; returns the error's status.
lawson_status fail(const Error& error) noexcept;
// For use inside a catch block: names the exception being handled.
lawson_status fail_with_current_exception() noexcept;

// `body` returns Status. It must touch the caller's outputs only as its last, non-throwing step.
template <typename Body>
lawson_status guard(Body&& body) noexcept {
  try {
    const Status status = std::forward<Body>(body)();
    return status.ok() ? LAWSON_OK : fail(status.error());
  } catch (...) {
    return fail_with_current_exception();
  }
}

// An argument that must not be NULL.
inline Status require(const void* argument, std::string_view name) {
  if (argument != nullptr) return {};
  return invalid("argument '{}' is NULL", name);
}

// The sizes that a caller's versioned struct may have: this version's, one that ends before a known
// field (an older caller), and a larger one (a newer caller). `prefixes`: offsets of those fields.
template <typename Struct, std::size_t N>
Status check_struct_size(const Struct& given, std::string_view name,
                         const std::array<std::size_t, N>& prefixes) {
  constexpr std::size_t kLargest = 4096;
  const std::size_t size = given.struct_size;
  if (size >= sizeof(Struct) && size <= kLargest) return {};
  for (const std::size_t prefix : prefixes) {
    if (size == prefix) return {};
  }
  return invalid("{}.struct_size: {} is not a size of this struct; set it to sizeof({}) = {}", name,
                 size, name, sizeof(Struct));
}

// Copies a caller's struct over `target`, which holds the defaults. Of a newer caller's struct the
// bytes that this version does not know must be zero: they ask for nothing.
template <typename Struct, std::size_t N>
Status read_struct(const Struct* given, Struct& target, std::string_view name,
                   const std::array<std::size_t, N>& prefixes) {
  if (given == nullptr) return {};
  LAWSON_CHECK(check_struct_size(*given, name, prefixes));
  const std::size_t size = given->struct_size;
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (std::size_t i = sizeof(Struct); i < size; ++i) {
    if (bytes[i] != 0) {
      return invalid(
          "{}.struct_size: {} is larger than this library's {}, and a field that it does "
          "not know is set",
          name, size, sizeof(Struct));
    }
  }
  std::memcpy(&target, given, std::min(size, sizeof(Struct)));
  target.struct_size = sizeof(Struct);
  return {};
}

// Fills as much of a caller's struct as the caller knows.
template <typename Struct, std::size_t N>
Status write_struct(const Struct& source, Struct* target, std::string_view name,
                    const std::array<std::size_t, N>& prefixes) {
  LAWSON_CHECK(check_struct_size(*target, name, prefixes));
  const std::size_t size = target->struct_size;
  std::memcpy(target, &source, std::min(size, sizeof(Struct)));
  target->struct_size = size;
  return {};
}

}  // namespace lawson::capi
