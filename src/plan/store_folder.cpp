#include "plan/store_folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <utility>

#include "plan/atomic_file.h"

namespace lawson::plan {
namespace {

// A hit within this time of the last one writes nothing to the disk.
constexpr std::int64_t kUseResolutionNs = std::int64_t{10} * 1'000'000'000;

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_{fd} {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int fd() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

std::int64_t modified_ns(const struct stat& info) {
  return std::int64_t{info.st_mtim.tv_sec} * 1'000'000'000 + info.st_mtim.tv_nsec;
}

// Could somebody else than this user and root have written it?
Status check_owner(const struct stat& info, const std::string& path) {
  if (info.st_uid != ::geteuid() && info.st_uid != 0) {
    return error(ErrorKind::unavailable, "{}: it belongs to another user (id {})", path,
                 info.st_uid);
  }
  if ((info.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    return error(ErrorKind::unavailable, "{}: others may write to it (mode {:o})", path,
                 info.st_mode & 07777U);
  }
  return {};
}

// As `mkdir -p`, for this user only.
Status make_folder(const std::string& folder) {
  const std::filesystem::path path{folder};
  std::filesystem::path so_far;
  for (const auto& part : path) {
    so_far /= part;
    if (so_far.empty() || ::mkdir(so_far.c_str(), 0700) == 0 || errno == EEXIST) continue;
    const int failure = errno;
    std::error_code ignored;
    if (std::filesystem::is_directory(so_far, ignored)) continue;  // and not ours to write to
    return io_error(folder, "cannot be created", failure);
  }
  return {};
}

Error not_opened(const std::string& path, int code, std::string_view what) {
  if (code == ELOOP || (code == ENOTDIR && what == "folder")) {
    return error(ErrorKind::unavailable, "{}: it is a symbolic link or no {}", path, what);
  }
  return io_error(path, "cannot be opened", code);
}

}  // namespace

std::int64_t unix_time_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

Result<std::optional<StoreFolder>> StoreFolder::open(const std::string& path) {
  Descriptor folder{::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)};
  if (folder.fd() < 0) {
    if (errno == ENOENT) return std::optional<StoreFolder>{};
    return not_opened(path, errno, "folder");
  }
  struct stat info {};
  if (::fstat(folder.fd(), &info) != 0) return io_error(path, "cannot be read", errno);
  LAWSON_CHECK(check_owner(info, path));
  return std::optional{StoreFolder{path, folder.release()}};
}

Result<StoreFolder> StoreFolder::create(const std::string& path) {
  LAWSON_TRY(std::optional<StoreFolder> there, open(path));
  if (there) return std::move(*there);
  LAWSON_CHECK(make_folder(path));
  LAWSON_TRY(std::optional<StoreFolder> made, open(path));
  if (made) return std::move(*made);
  return io_error(path, "cannot be opened", ENOENT);
}

StoreFolder::StoreFolder(StoreFolder&& other) noexcept
    : path_{std::move(other.path_)}, fd_{std::exchange(other.fd_, -1)} {}

StoreFolder::~StoreFolder() {
  if (fd_ >= 0) ::close(fd_);
}

Result<std::optional<StoreFolder::Content>> StoreFolder::read(const std::string& name,
                                                              std::uint64_t limit, bool use) const {
  // O_NONBLOCK: a pipe by that name must not make us wait for a writer.
  const Descriptor file{
      ::openat(fd_, name.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY)};
  if (file.fd() < 0) {
    if (errno == ENOENT) return std::optional<Content>{};
    return not_opened(path_of(name), errno, "file");
  }
  struct stat info {};
  if (::fstat(file.fd(), &info) != 0) return io_error(path_of(name), "cannot be read", errno);
  if (!S_ISREG(info.st_mode)) return invalid("{}: it is not a regular file", path_of(name));
  LAWSON_CHECK(check_owner(info, path_of(name)));
  Content content;
  content.file_bytes = static_cast<std::uint64_t>(info.st_size);
  content.text.resize(static_cast<std::size_t>(std::min(content.file_bytes, limit)));
  std::size_t have = 0;
  while (have < content.text.size()) {
    const ssize_t got = ::read(file.fd(), content.text.data() + have, content.text.size() - have);
    if (got < 0 && errno == EINTR) continue;
    // On a network file system a file that was removed meanwhile ends like this.
    if (got < 0 && errno == ESTALE) return std::optional<Content>{};
    if (got < 0) return io_error(path_of(name), "cannot be read", errno);
    if (got == 0) break;
    have += static_cast<std::size_t>(got);
  }
  content.text.resize(have);
  // A time in the future (a clock set back, another machine's) is mended too.
  if (use && std::abs(unix_time_ns() - modified_ns(info)) > kUseResolutionNs) {
    const std::array<timespec, 2> now{{{0, UTIME_OMIT}, {0, UTIME_NOW}}};
    ::futimens(file.fd(), now.data());  // another user's (root's) file stays as it is
  }
  return std::optional{std::move(content)};
}

Status StoreFolder::write(const std::string& name, std::string_view bytes) const {
  AtomicFile file(name, 0600, fd_);
  Status written = file.write(bytes);
  if (written.ok()) written = file.publish();
  if (written.ok()) return written;
  return error(written.error().kind, "{}/{}", path_, written.error().message);
}

Result<std::vector<StoreFolder::File>> StoreFolder::list() const {
  Descriptor again{::openat(fd_, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC)};
  if (again.fd() < 0) return io_error(path_, "cannot be listed", errno);
  const auto close = [](DIR* folder) { ::closedir(folder); };
  const std::unique_ptr<DIR, decltype(close)> folder{::fdopendir(again.fd()), close};
  if (folder == nullptr) return io_error(path_, "cannot be listed", errno);
  static_cast<void>(again.release());  // closedir's
  std::vector<File> files;
  while (true) {
    errno = 0;
    const dirent* const item = ::readdir(folder.get());
    if (item == nullptr) break;
    const std::string_view name{item->d_name};
    struct stat info {};
    if (name == "." || name == "..") continue;
    if (::fstatat(fd_, item->d_name, &info, AT_SYMLINK_NOFOLLOW) != 0) continue;  // gone
    files.push_back({item->d_name, static_cast<std::uint64_t>(info.st_size), modified_ns(info),
                     static_cast<std::uint64_t>(info.st_ino)});
  }
  if (errno != 0) return io_error(path_, "cannot be listed", errno);
  return files;
}

Result<bool> StoreFolder::remove(const File& file) const {
  struct stat info {};
  if (::fstatat(fd_, file.name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) {
    if (errno == ENOENT) return false;
    return io_error(path_of(file.name), "cannot be removed", errno);
  }
  if (modified_ns(info) != file.used_ns || info.st_ino != file.inode) return false;
  if (::unlinkat(fd_, file.name.c_str(), 0) == 0) return true;
  if (errno == ENOENT) return false;
  return io_error(path_of(file.name), "cannot be removed", errno);
}

}  // namespace lawson::plan
