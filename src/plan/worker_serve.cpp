#include "plan/worker_serve.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <fstream>
#include <new>
#include <thread>

#include "diag/passing.h"
#include "plan/worker_protocol.h"

namespace lawson::plan {
namespace {

constexpr int kParentCheckMs = 1000;
// cuDNN and NVRTC map about 3 GiB of libraries and use up to 1.5 GiB.
constexpr rlim_t kAddressSpaceBytes = rlim_t{16} << 30;

// The host is gone when its end of the pipe is closed. A forked child of the host may keep that end
// open, hence the look at the parent as well. (PR_SET_PDEATHSIG would fire when the *thread* that
// started the worker ends.)
void end_with_host(int channel, int parent) {
  std::thread([channel, parent] {
    for (;;) {
      pollfd host{channel, 0, 0};
      const int ready = ::poll(&host, 1, kParentCheckMs);
      if (ready > 0 && (host.revents & (POLLHUP | POLLERR | POLLNVAL)) != 0) ::_exit(0);
      if (::getppid() != parent) ::_exit(0);
    }
  }).detach();
}

void lower_limit(__rlimit_resource resource, rlim_t most) {
  rlimit limit{};
  if (::getrlimit(resource, &limit) != 0 || limit.rlim_cur <= most) return;
  limit.rlim_cur = most;
  ::setrlimit(resource, &limit);
}

bool write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    bytes.remove_prefix(static_cast<std::size_t>(written));
  }
  return true;
}

bool send(int channel, const Json& document) {
  auto frame = encode_frame(document);
  if (!frame.ok()) {
    frame = encode_frame(
        {{"id", document.value("id", std::uint64_t{0})}, {"error", error_to_json(frame.error())}});
  }
  return frame.ok() && write_all(channel, *frame);
}

std::uint64_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  std::uint64_t total = 0;
  std::uint64_t resident = 0;
  statm >> total >> resident;
  return resident * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

Result<Json> perform(const Json& document, Engine& engine) {
  LAWSON_TRY(const WorkerRequest request, request_from_json(document));
  switch (request.verb) {
    case Verb::probe: {
      LAWSON_TRY(const Verdict verdict,
                 engine.probe(request.graph, request.device, request.options));
      return Json{{"verdict", verdict_to_json(verdict)}};
    }
    case Verb::candidates: {
      LAWSON_TRY(const auto candidates,
                 engine.candidates(request.graph, request.device, request.options));
      return Json{{"candidates", candidates_to_json(candidates)}};
    }
    case Verb::compile: {
      LAWSON_TRY(const Plan plan, engine.compile(request.graph, request.device, request.options,
                                                 request.candidate, {}));
      return Json{{"plan", plan_to_json(plan)}};
    }
  }
  return error(ErrorKind::internal, "unreachable");
}

// The process boundary is an edge: nothing that is thrown passes it.
Result<Json> perform_guarded(const Json& document, Engine& engine) {
  try {
    return perform(document, engine);
  } catch (const std::bad_alloc&) {
    return error(ErrorKind::out_of_memory, "the worker ran out of memory");
  } catch (const std::exception& e) {
    return error(ErrorKind::internal, "the worker caught: {}", e.what());
  } catch (...) {
    return error(ErrorKind::internal, "the worker caught an unknown exception");
  }
}

Json answer(const Json& document, Engine* engine, const Error& failure) {
  Result<Json> result =
      engine == nullptr ? Result<Json>{failure} : perform_guarded(document, *engine);
  Json reply = result.ok() ? std::move(*result) : Json{{"error", error_to_json(result.error())}};
  reply["id"] = document.is_object() ? document.value("id", Json(0)) : Json(0);
  reply["rss"] = resident_bytes();
  reply["happened"] = diag::take_collected();
  return reply;
}

}  // namespace

Result<int> enter_worker(int parent) {
  ::signal(SIGPIPE, SIG_IGN);
  diag::collect_for_host();
  constexpr int kChannel = STDERR_FILENO + 1;
  // The channel's number is taken first: a file opened before would get just that one.
  const int moved = ::dup3(STDIN_FILENO, kChannel, O_CLOEXEC);
  const int none = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  if (moved < 0 || none < 0 || ::dup2(STDERR_FILENO, STDOUT_FILENO) < 0 ||
      ::dup2(none, STDIN_FILENO) < 0) {
    return error(ErrorKind::internal, "the worker's descriptors cannot be arranged");
  }
  // Whatever else the host had open without close-on-exec is not for us to keep open.
#ifdef SYS_close_range
  ::syscall(SYS_close_range, static_cast<unsigned>(kChannel) + 1, ~0U, 0);
#endif
  end_with_host(kChannel, parent);
  return kChannel;
}

void limit_resources() {
  lower_limit(RLIMIT_CORE, 0);
  lower_limit(RLIMIT_AS, kAddressSpaceBytes);
}

int serve(int channel, Engine* engine, const Error& failure) {
  Json hello{{"protocol", kProtocolVersion}};
  if (engine != nullptr) {
    hello["info"] = engine->info();
    if (auto version = engine->version(); version.ok()) hello["engine_version"] = *version;
  } else {
    hello["error"] = error_to_json(failure);
  }
  if (!send(channel, hello)) return 1;

  FrameReader frames;
  std::array<char, std::size_t{64} << 10> chunk;
  for (;;) {
    auto document = frames.next();
    if (!document.ok()) {
      if (!send(channel, {{"id", 0}, {"error", error_to_json(document.error())}})) return 1;
      continue;
    }
    if (document->has_value()) {
      if (!send(channel, answer(**document, engine, failure))) return 1;
      continue;
    }
    const ssize_t got = ::read(channel, chunk.data(), chunk.size());
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return 0;
    if (const Status fed = frames.feed({chunk.data(), static_cast<std::size_t>(got)}); !fed.ok()) {
      send(channel, {{"id", 0}, {"error", error_to_json(fed.error())}});
      return 1;
    }
  }
}

}  // namespace lawson::plan
