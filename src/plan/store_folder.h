// A folder of files of one user, each of them replaced whole. Everything goes through the open
// folder, which was checked: a name is never resolved again, and no symbolic link is followed.
// A folder or file that belongs to another user than this one or root, or that others may write to,
// is UNAVAILABLE; what the system refuses is IO; what a file should not be, INVALID_ARGUMENT.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"

namespace lawson::plan {

class StoreFolder {
 public:
  // nullopt: there is none.
  static Result<std::optional<StoreFolder>> open(const std::string& path);
  // As `mkdir -p` for this user only (0700), where there is none.
  static Result<StoreFolder> create(const std::string& path);

  ~StoreFolder();
  StoreFolder(StoreFolder&& other) noexcept;
  StoreFolder& operator=(StoreFolder&&) = delete;

  // The whole file, or its first `limit` bytes; nullopt: there is none. `use` marks it as used now.
  struct Content {
    std::string text;
    std::uint64_t file_bytes = 0;
  };
  Result<std::optional<Content>> read(const std::string& name, std::uint64_t limit, bool use) const;

  // A reader sees the old file or the whole new one (0600).
  Status write(const std::string& name, std::string_view bytes) const;

  struct File {
    std::string name;
    std::uint64_t bytes = 0;
    std::int64_t used_ns = 0;  // since 1970: when it was written or last marked as used
    std::uint64_t inode = 0;
  };
  // Whatever is there; of a link itself, not what it points to.
  Result<std::vector<File>> list() const;

  // Unless it was used or replaced since it was listed. Was it removed?
  Result<bool> remove(const File& file) const;

 private:
  StoreFolder(std::string path, int fd) : path_{std::move(path)}, fd_{fd} {}

  std::string path_of(const std::string& name) const { return path_ + '/' + name; }

  std::string path_;  // for messages
  int fd_ = -1;
};

std::int64_t unix_time_ns();

}  // namespace lawson::plan
