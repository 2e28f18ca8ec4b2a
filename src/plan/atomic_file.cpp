#include "plan/atomic_file.h"

#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <system_error>
#include <utility>

namespace lawson::plan {
namespace {

constexpr std::string_view kTemporary = ".tmp.";

}  // namespace

Error io_error(const std::string& path, std::string_view what, int code) {
  return error(ErrorKind::io, "{}: {}: {}", path, what, std::generic_category().message(code));
}

AtomicFile::AtomicFile(std::string target, mode_t mode, int folder)
    : target_{std::move(target)}, folder_{folder} {
  static std::atomic<unsigned> counter{0};
  // O_EXCL passes over the leftovers of a crashed process that had our id, and follows no link.
  for (int attempt = 0; attempt < 100 && file_ < 0; ++attempt) {
    path_ = fmt::format("{}{}{}.{}", target_, kTemporary, ::getpid(), counter.fetch_add(1));
    file_ = ::openat(folder_, path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
    if (file_ < 0 && errno != EEXIST) break;
  }
  failure_ = file_ < 0 ? errno : 0;
}

AtomicFile::~AtomicFile() {
  if (file_ < 0) return;
  ::close(file_);
  if (!renamed_) ::unlinkat(folder_, path_.c_str(), 0);
}

Status AtomicFile::write(std::string_view bytes) {
  if (file_ < 0) return io_error(target_, "no file can be created beside it", failure_);
  // To write beyond the process's limit would end it (SIGXFSZ).
  rlimit limit{};
  size_ += bytes.size();
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
      size_ > limit.rlim_cur) {
    return io_error(target_, "cannot be written", EFBIG);
  }
  while (!bytes.empty()) {
    const ssize_t written = ::write(file_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return io_error(target_, "cannot be written", errno);
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
  return {};
}

Status AtomicFile::publish() {
  if (::fsync(file_) != 0) return io_error(target_, "cannot be written", errno);
  if (::renameat(folder_, path_.c_str(), folder_, target_.c_str()) != 0) {
    return io_error(target_, "cannot be replaced", errno);
  }
  renamed_ = true;
  sync_folder();
  return {};
}

// The rename is lasting once the folder is; a file system without that has done what it can.
void AtomicFile::sync_folder() const {
  const auto slash = target_.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : target_.substr(0, slash + 1);
  const int fd = ::openat(folder_, folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  ::fsync(fd);
  ::close(fd);
}

bool AtomicFile::is_temporary(std::string_view name) {
  return name.find(kTemporary) != std::string_view::npos;
}

}  // namespace lawson::plan
