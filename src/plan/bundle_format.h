// The layout of a bundle's header and records (bundle.h), for those who read and write them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "plan/file_parts.h"

namespace lawson::plan::bundle_format {

// The digit is the format's version.
inline constexpr std::string_view kMagic = "LAWSONB2";
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

}  // namespace lawson::plan::bundle_format
