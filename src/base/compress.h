// zstd frames. What is unpacked comes from files that anybody may have written.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "base/status.h"

namespace lawson {

Result<std::string> compress(std::string_view bytes);

// Exactly `size` bytes, from one frame that announces that size and has nothing behind it; anything
// else is INVALID_ARGUMENT. Takes no more memory than that, whatever the frame says.
Result<std::string> decompress(std::string_view frame, std::size_t size);

}  // namespace lawson
