// Content hashes: XXH3-128, printed as 32 hex digits. For keys, not for security.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace lawson {

struct Digest {
  std::uint64_t high = 0;
  std::uint64_t low = 0;
  bool operator==(const Digest&) const = default;
};

Digest digest(std::string_view bytes);
std::string hash_hex(std::string_view bytes);

}  // namespace lawson

template <>
struct std::hash<lawson::Digest> {
  std::size_t operator()(const lawson::Digest& value) const noexcept {
    return static_cast<std::size_t>(value.low);
  }
};
