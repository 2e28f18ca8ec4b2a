// What was counted, and traces.
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <string>
#include <utility>

#include "base/lazy.h"
#include "capi/guard.h"
#include "capi/handles.h"
#include "diag/counters.h"
#include "diag/lines.h"
#include "diag/settings.h"
#include "diag/trace.h"
#include "plan/atomic_file.h"

namespace lawson::capi {
namespace {

namespace fs = std::filesystem;

constexpr mode_t kTraceMode = 0644;

// The trace that runs. A forked child has none: the file is its parent's.
struct Running {
  std::mutex mutex;
  std::string path;
  std::atomic<pid_t> process{0};

  bool is_here() const { return process.load() == ::getpid(); }
};

Running& running() {
  static Lazy<Running> only;
  return only.get();
}

// So that what is wrong with the path is known before there is something to lose.
Result<std::string> checked_path(const char* path) {
  LAWSON_CHECK(require(path, "path"));
  if (*path == '\0') return invalid("path: '' is not allowed; expected the file to write");
  std::error_code fault;
  const fs::path absolute = fs::absolute(path, fault);
  if (fault) return invalid("path: '{}': {}", path, fault.message());
  const fs::file_status status = fs::status(absolute, fault);
  if (fs::exists(status) && !fs::is_regular_file(status)) {
    return invalid("path: '{}' is not allowed; expected a file to write, and this is {}", path,
                   fs::is_directory(status) ? "a folder" : "none");
  }
  plan::AtomicFile trial{absolute.string(), kTraceMode};
  if (const Status written = trial.write(""); !written.ok()) {
    return invalid("path: the trace cannot be written: {}", written.error().message);
  }
  return absolute.string();
}

Status stop_trace() {
  Running& shared = running();
  const Error none = invalid("no trace runs; lawson_trace_start begins one");
  if (!shared.is_here()) return none;
  const std::lock_guard lock{shared.mutex};
  if (!shared.is_here()) return none;
  shared.process = 0;
  const std::string text = diag::stop_trace();
  plan::AtomicFile file{std::exchange(shared.path, {}), kTraceMode};
  LAWSON_CHECK(file.write(text));
  return file.publish();
}

void stop_at_exit() noexcept {
  if (!running().is_here()) return;
  try {
    if (const Status stopped = stop_trace(); !stopped.ok()) {
      diag::print_line("the trace is lost: " + stopped.error().message);
    }
  } catch (...) {
    diag::print_line("the trace is lost");
  }
}

Status start_trace(const char* path) {
  LAWSON_TRY(std::string checked, checked_path(path));
  Running& shared = running();
  const std::lock_guard lock{shared.mutex};
  if (!diag::start_trace()) return invalid("a trace runs already; lawson_trace_stop ends it");
  static Lazy<bool> at_exit;
  at_exit.get([] { return std::atexit(stop_at_exit) == 0; });
  shared.path = std::move(checked);
  shared.process = ::getpid();
  return {};
}

}  // namespace
}  // namespace lawson::capi

using namespace lawson;
using namespace lawson::capi;

extern "C" {

lawson_status lawson_stats_json(lawson_text** json) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(json, "json"));
    Json document = diag::counts_to_json(diag::counts(diag::Since::reset));
    document["rank"] = diag::settings().rank;
    document["pid"] = ::getpid();
    *json = new lawson_text{document.dump(-1, ' ', false, Json::error_handler_t::replace)};
    return {};
  });
}

lawson_status lawson_stats_reset(void) {
  return guard([]() -> Status {
    diag::reset_counts();
    return {};
  });
}

lawson_status lawson_trace_start(const char* path) {
  return guard([&] { return start_trace(path); });
}

lawson_status lawson_trace_stop(void) {
  return guard([] { return stop_trace(); });
}

}  // extern "C"
