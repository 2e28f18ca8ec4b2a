// What the formats of bundles and of store entries are made of.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace lawson::plan {

inline constexpr std::size_t kHashBytes = 32;  // of what hash_hex gives

// Little-endian.
inline void append_number(std::string& out, std::uint64_t value, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i) out += static_cast<char>((value >> (8 * i)) & 0xFF);
}

inline std::uint64_t number_at(std::string_view text, std::size_t at, std::size_t bytes) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < bytes; ++i) {
    value |= std::uint64_t{static_cast<unsigned char>(text[at + i])} << (8 * i);
  }
  return value;
}

// What hash_hex gives.
inline bool is_hash(std::string_view text) {
  return text.size() == kHashBytes && text.find_first_not_of("0123456789abcdef") == text.npos;
}

}  // namespace lawson::plan
