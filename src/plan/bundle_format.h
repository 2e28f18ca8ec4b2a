// The layout of a bundle's header and records (bundle.h), for those who read and write them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace lawson::plan::bundle_format {

// The digit is the format's version.
inline constexpr std::string_view kMagic = "LAWSONB2";
inline constexpr std::size_t kHashBytes = 32;
inline constexpr std::size_t kHeaderBytes = 64;
inline constexpr std::size_t kHashedBytes = kHeaderBytes - kHashBytes;  // of the header

inline constexpr std::size_t kRecordBytes = 128;
inline constexpr std::size_t kKeyAt = 0;
inline constexpr std::size_t kPlanIdAt = 32;
inline constexpr std::size_t kChecksumAt = 64;
inline constexpr std::size_t kOffsetAt = 96;
inline constexpr std::size_t kStoredAt = 104;
inline constexpr std::size_t kSizeAt = 112;
inline constexpr std::size_t kOriginAt = 120;
inline constexpr std::size_t kZeroAt = 124;

inline constexpr std::uint64_t kMaxPlans = std::uint64_t{1} << 19;
inline constexpr std::uint64_t kMaxOriginBytes = std::uint64_t{1} << 20;
inline constexpr std::uint64_t kMaxPlanBytes = std::uint64_t{256} << 20;

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

}  // namespace lawson::plan::bundle_format
