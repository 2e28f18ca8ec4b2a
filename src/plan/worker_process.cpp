#include "plan/worker_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <thread>

extern "C" char** environ;

namespace lawson::plan {
namespace {

using std::chrono::milliseconds;

constexpr std::size_t kStderrTailBytes = 4096;
constexpr std::size_t kReadBytes = std::size_t{64} << 10;
// A worker that closed its stream normally ends at once; one that lingers is killed.
constexpr milliseconds kEndGrace{500};
// A worker may die while a copy of its end of the socket lives on in a forked child of the host:
// then no end of file arrives, so waiting is cut into slices that look at the process.
constexpr milliseconds kWaitSlice{1000};

std::string errno_text(int code) {
  return std::system_category().message(code);
}

class Fd {
 public:
  explicit Fd(int fd = -1) : fd_{fd} {}
  ~Fd() { reset(); }
  Fd(Fd&& other) noexcept : fd_{other.release()} {}
  Fd& operator=(Fd&& other) noexcept {
    reset(other.release());
    return *this;
  }
  int value() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }
  void reset(int fd = -1) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = fd;
  }

 private:
  int fd_;
};

// In a host without stdin, stdout or stderr a new descriptor may be 0, 1 or 2, and the child's
// dup2 calls would overwrite one another.
Result<Fd> above_standard(Fd fd) {
  if (fd.value() > STDERR_FILENO) return fd;
  Fd moved{::fcntl(fd.value(), F_DUPFD_CLOEXEC, STDERR_FILENO + 1)};
  if (moved.value() < 0) {
    return error(ErrorKind::unavailable, "no file descriptor for a worker: {}", errno_text(errno));
  }
  return moved;
}

struct Channels {
  Fd host, worker;               // the socket's two ends
  Fd errors_read, errors_write;  // stderr's pipe
};

Result<Channels> make_channels() {
  std::array<int, 2> ends{-1, -1};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) {
    return error(ErrorKind::unavailable, "no socket for a worker: {}", errno_text(errno));
  }
  Fd host{ends[0]};
  Fd worker{ends[1]};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
    return error(ErrorKind::unavailable, "no pipe for a worker: {}", errno_text(errno));
  }
  Fd read{ends[0]};
  Fd write{ends[1]};
  Channels channels;
  LAWSON_TRY(channels.host, above_standard(std::move(host)));
  LAWSON_TRY(channels.worker, above_standard(std::move(worker)));
  LAWSON_TRY(channels.errors_read, above_standard(std::move(read)));
  LAWSON_TRY(channels.errors_write, above_standard(std::move(write)));
  ::fcntl(channels.errors_read.value(), F_SETFL, O_NONBLOCK);
  return channels;
}

// The worker gets default signals, an empty mask and a process group of its own: an interrupt typed
// at the terminal is the host's to handle, and the worker ends with the host.
class SpawnSetup {
 public:
  SpawnSetup(int channel, int errors) {
    ::posix_spawn_file_actions_init(&actions_);
    ::posix_spawn_file_actions_adddup2(&actions_, channel, STDIN_FILENO);
    ::posix_spawn_file_actions_adddup2(&actions_, channel, STDOUT_FILENO);
    ::posix_spawn_file_actions_adddup2(&actions_, errors, STDERR_FILENO);
    ::posix_spawnattr_init(&attributes_);
    sigset_t signals;
    sigemptyset(&signals);
    ::posix_spawnattr_setsigmask(&attributes_, &signals);
    for (const int signal : {SIGPIPE, SIGCHLD, SIGINT, SIGTERM, SIGHUP, SIGSEGV, SIGABRT}) {
      sigaddset(&signals, signal);
    }
    ::posix_spawnattr_setsigdefault(&attributes_, &signals);
    ::posix_spawnattr_setpgroup(&attributes_, 0);
    ::posix_spawnattr_setflags(
        &attributes_,
        static_cast<short>(POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP));
  }
  ~SpawnSetup() {
    ::posix_spawn_file_actions_destroy(&actions_);
    ::posix_spawnattr_destroy(&attributes_);
  }
  SpawnSetup(const SpawnSetup&) = delete;
  SpawnSetup& operator=(const SpawnSetup&) = delete;

  const posix_spawn_file_actions_t* actions() const { return &actions_; }
  const posix_spawnattr_t* attributes() const { return &attributes_; }

 private:
  posix_spawn_file_actions_t actions_;
  posix_spawnattr_t attributes_;
};

// Without reaping: true also when somebody else in the host reaped it.
bool has_ended(pid_t pid) {
  siginfo_t info{};
  const int rc = ::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT);
  return rc != 0 ? errno == ECHILD : info.si_pid == pid;
}

milliseconds remaining(Clock::time_point deadline) {
  return std::max(milliseconds{0}, std::chrono::ceil<milliseconds>(deadline - Clock::now()));
}

}  // namespace

Result<std::unique_ptr<WorkerProcess>> WorkerProcess::start(
    const std::string& path, const std::vector<std::string>& arguments) {
  LAWSON_TRY(Channels channels, make_channels());
  std::vector<std::string> words{path};
  words.insert(words.end(), arguments.begin(), arguments.end());
  words.insert(words.end(), {"--parent", std::to_string(::getpid())});
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);

  const SpawnSetup setup{channels.worker.value(), channels.errors_write.value()};
  pid_t pid = -1;
  const int rc =
      ::posix_spawn(&pid, path.c_str(), setup.actions(), setup.attributes(), argv.data(), environ);
  if (rc != 0) {
    return error(ErrorKind::unavailable, "the worker '{}' cannot be started: {}", path,
                 errno_text(rc));
  }
  std::unique_ptr<WorkerProcess> process{
      new WorkerProcess(pid, channels.host.release(), channels.errors_read.release(), path)};
  process->owner_ = ::getpid();
  return process;
}

WorkerProcess::~WorkerProcess() {
  if (channel_ >= 0) ::close(channel_);
  if (errors_ >= 0) ::close(errors_);
  if (owner_ != ::getpid() || reaped_) return;
  if (!has_ended(pid_)) ::kill(pid_, SIGKILL);
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

bool WorkerProcess::usable() const {
  if (broken_ || reaped_) return false;
  // An idle worker has nothing to say: any event is an end of file or noise.
  pollfd channel{channel_, POLLIN, 0};
  return ::poll(&channel, 1, 0) == 0 && !has_ended(pid_);
}

Result<Json> WorkerProcess::hello(milliseconds timeout) {
  LAWSON_TRY(Json greeting, converse({}, "starting", Clock::now() + timeout, timeout));
  if (!greeting.is_object() || !greeting.contains("protocol")) {
    broken_ = true;
    return error(ErrorKind::unavailable, "'{}' is not a worker: it did not say hello", path_);
  }
  if (greeting.at("protocol") != kProtocolVersion) {
    broken_ = true;
    return error(ErrorKind::unavailable,
                 "the worker '{}' speaks protocol {} and this library {}: they come from different "
                 "installs",
                 path_, greeting.at("protocol").dump(), kProtocolVersion);
  }
  started_ = true;
  return greeting;
}

Result<Json> WorkerProcess::exchange(Json request, milliseconds timeout) {
  const std::uint64_t id = ++last_id_;
  request["id"] = id;
  LAWSON_TRY(const std::string frame, encode_frame(request));
  const std::string doing = fmt::format("answering '{}'", request.value("request", "?"));
  LAWSON_TRY(Json reply, converse(frame, doing, Clock::now() + timeout, timeout));
  if (!reply.is_object() || !reply.contains("id") || reply.at("id") != id) {
    broken_ = true;
    return error(ErrorKind::internal, "the worker's reply while {} does not belong to the request",
                 doing);
  }
  return reply;
}

// Sends all of `unsent` and receives one document; reads stderr meanwhile, so that a chatty worker
// never blocks on a full pipe.
Result<Json> WorkerProcess::converse(std::string_view unsent, std::string_view doing,
                                     Clock::time_point deadline, milliseconds timeout) {
  if (broken_ || reaped_) {
    return error(ErrorKind::internal, "the worker can no longer be used");
  }
  const auto broken = [&](Error why) {
    broken_ = true;
    return why;
  };
  for (;;) {
    if (auto document = frames_.next(); !document.ok()) {
      return broken(error(ErrorKind::internal, "the worker's answer while {}: {}{}", doing,
                          document.error().message, last_words()));
    } else if (document->has_value()) {
      drain_errors();
      if (!frames_.empty() || !unsent.empty()) broken_ = true;  // it talks out of turn
      return std::move(**document);
    }

    const milliseconds left = remaining(deadline);
    if (left.count() == 0) {
      drain_errors();
      broken_ = true;
      return error(ErrorKind::internal,
                   "the worker (pid {}) did not finish {} within {} ms and was stopped{}", pid_,
                   doing, timeout.count(), last_words());
    }
    const auto events = static_cast<short>(unsent.empty() ? POLLIN : POLLIN | POLLOUT);
    std::array<pollfd, 2> fds{pollfd{channel_, events, 0}, pollfd{errors_, POLLIN, 0}};
    const int ready =
        ::poll(fds.data(), fds.size(), static_cast<int>(std::min(left, kWaitSlice).count()));
    if (ready < 0 && errno != EINTR) {
      return broken(
          error(ErrorKind::internal, "waiting for a worker failed: {}", errno_text(errno)));
    }
    if (ready < 0) continue;
    if (fds[1].revents != 0) drain_errors();
    if (ready == 0 && has_ended(pid_)) {
      const auto received = receive();  // its last bytes, if any, are already here
      if (!received.ok() || *received == 0) return broken(death(doing));
      continue;
    }
    if ((fds[0].revents & POLLOUT) != 0 && !unsent.empty()) {
      const ssize_t sent =
          ::send(channel_, unsent.data(), unsent.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent > 0) unsent.remove_prefix(static_cast<std::size_t>(sent));
      if (sent < 0 && errno != EAGAIN && errno != EINTR) return broken(death(doing));
    }
    if ((fds[0].revents & (POLLIN | POLLHUP | POLLERR)) != 0) {
      if (const auto received = receive(); !received.ok()) {
        if (received.error().kind == ErrorKind::io) return broken(death(doing));
        return broken(error(ErrorKind::internal, "the worker's answer while {}: {}{}", doing,
                            received.error().message, last_words()));
      }
    }
  }
}

// io: the stream ended. internal: what came is not frames.
Result<std::size_t> WorkerProcess::receive() {
  std::array<char, kReadBytes> chunk;
  const ssize_t got = ::recv(channel_, chunk.data(), chunk.size(), MSG_DONTWAIT);
  if (got > 0) {
    const auto count = static_cast<std::size_t>(got);
    LAWSON_CHECK(frames_.feed({chunk.data(), count}));
    return count;
  }
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return std::size_t{0};
  return error(ErrorKind::io, "end of stream");
}

void WorkerProcess::drain_errors() {
  while (errors_ >= 0) {
    std::array<char, 4096> chunk;
    const ssize_t got = ::read(errors_, chunk.data(), chunk.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) {  // closed: poll() would report it for ever
      ::close(std::exchange(errors_, -1));
      return;
    }
    stderr_tail_.append(chunk.data(), static_cast<std::size_t>(got));
    if (stderr_tail_.size() > kStderrTailBytes) {
      stderr_tail_.erase(0, stderr_tail_.size() - kStderrTailBytes);
    }
  }
}

std::string WorkerProcess::last_words() const {
  std::string_view text{stderr_tail_};
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.remove_suffix(1);
  return text.empty() ? std::string{} : fmt::format("; its stderr ended with: {}", text);
}

Error WorkerProcess::death(std::string_view doing) {
  const std::string how = reap();
  drain_errors();
  // Ending before the hello by itself (exit 127: a library of its own is missing) is the
  // environment's fault; a crash is ours, whenever it happens.
  const bool environment = !started_ && how.starts_with("exited");
  return error(environment ? ErrorKind::unavailable : ErrorKind::internal,
               "the worker '{}' (pid {}) {} while {}{}", path_, pid_, how, doing, last_words());
}

std::string WorkerProcess::reap() {
  int status = 0;
  bool killed_here = false;
  const auto grace_end = Clock::now() + kEndGrace;
  for (;;) {
    const pid_t ended = ::waitpid(pid_, &status, WNOHANG);
    if (ended == pid_) break;
    if (ended < 0 && errno != EINTR) {
      reaped_ = true;
      return "ended (the host's own child handling took its exit status)";
    }
    if (!killed_here && Clock::now() > grace_end) {
      ::kill(pid_, SIGKILL);
      killed_here = true;
    }
    std::this_thread::sleep_for(milliseconds{2});
  }
  reaped_ = true;
  if (killed_here) return "closed its stream without ending";
  if (WIFSIGNALED(status)) {
    const int signal = WTERMSIG(status);
    const char* name = ::sigdescr_np(signal);
    return fmt::format("was killed by signal {} ({}{})", signal, name ? name : "unknown",
                       signal == SIGKILL ? "; by somebody, or for want of memory" : "");
  }
  return fmt::format("exited with status {}", WEXITSTATUS(status));
}

}  // namespace lawson::plan
