#include "base/hash.h"

#include <fmt/format.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace lawson {

Digest digest(std::string_view bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return {hash.high64, hash.low64};
}

std::string hash_hex(std::string_view bytes) {
  const Digest hash = digest(bytes);
  return fmt::format("{:016x}{:016x}", hash.high, hash.low);
}

}  // namespace lawson
