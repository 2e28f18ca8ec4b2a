// Content hashes: XXH3-128, printed as 32 hex digits. For keys, not for security.
#pragma once

#include <string>
#include <string_view>

namespace lawson {

std::string hash_hex(std::string_view bytes);

}  // namespace lawson
