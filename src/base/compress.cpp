#include "base/compress.h"

#include <zstd.h>

namespace lawson {
namespace {

// Of 80 kB of kernel code: 1 ms and a quarter of the size; level 19 takes 20 ms for a tenth less.
constexpr int kLevel = 9;

// The library may also read frames of zstd before 1.0, which nobody here writes.
constexpr std::string_view kMagic = "\x28\xB5\x2F\xFD";

}  // namespace

Result<std::string> compress(std::string_view bytes) {
  std::string frame(ZSTD_compressBound(bytes.size()), '\0');
  const std::size_t size =
      ZSTD_compress(frame.data(), frame.size(), bytes.data(), bytes.size(), kLevel);
  if (ZSTD_isError(size) != 0) {
    return error(ErrorKind::internal, "zstd: {}", ZSTD_getErrorName(size));
  }
  frame.resize(size);
  return frame;
}

Result<std::string> decompress(std::string_view frame, std::size_t size) {
  const unsigned long long announced = ZSTD_getFrameContentSize(frame.data(), frame.size());
  if (!frame.starts_with(kMagic) || announced == ZSTD_CONTENTSIZE_ERROR) {
    return invalid("not a zstd frame");
  }
  if (announced != size) return invalid("a zstd frame of another size than {} bytes", size);
  if (ZSTD_findFrameCompressedSize(frame.data(), frame.size()) != frame.size()) {
    return invalid("a zstd frame that is cut off, or with bytes behind it");
  }
  std::string bytes(size, '\0');
  const std::size_t got = ZSTD_decompress(bytes.data(), size, frame.data(), frame.size());
  if (ZSTD_isError(got) != 0) return invalid("zstd: {}", ZSTD_getErrorName(got));
  if (got != size) return invalid("a zstd frame of {} bytes instead of {}", got, size);
  return bytes;
}

}  // namespace lawson
