// A file beside the target that becomes the target or disappears: a reader sees the old file or the
// whole new one.
#pragma once

#include <fcntl.h>
#include <sys/types.h>

#include <cstddef>
#include <string>
#include <string_view>

#include "base/status.h"

namespace lawson::plan {

// "PATH: what: the system's words"
Error io_error(const std::string& path, std::string_view what, int code);

class AtomicFile {
 public:
  // `mode` as open(2)'s; errors are the next call's. With `folder`, an open one that outlives this,
  // `target` is a name in it.
  AtomicFile(std::string target, mode_t mode, int folder = AT_FDCWD);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  Status write(std::string_view bytes);
  Status publish();  // on the disk, under the target's name

  // Is this the name of such a file? A process that was killed leaves it.
  static bool is_temporary(std::string_view name);

 private:
  void sync_folder() const;

  std::string target_;
  std::string path_;
  int folder_;
  int file_ = -1;
  int failure_ = 0;
  std::size_t size_ = 0;  // bytes
  bool renamed_ = false;
};

}  // namespace lawson::plan
