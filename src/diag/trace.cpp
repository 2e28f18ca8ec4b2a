#include "diag/trace.h"

#include <errno.h>  // program_invocation_short_name
#include <fmt/format.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "base/json.h"
#include "base/lazy.h"
#include "base/process.h"
#include "diag/listeners.h"

namespace lawson::diag {
namespace {

// Some 200 MB; what comes after is counted only.
constexpr std::size_t kMostHappenings = std::size_t{1} << 20;

// Used while somebody traces only: one list and one lock for all threads.
struct Trace {
  std::mutex mutex;
  bool runs = false;
  std::int64_t started_ns = 0;
  std::vector<Happening> happenings;
  std::size_t dropped = 0;
};

Trace& trace() {
  static Lazy<Trace> only;
  return only.get();
}

[[maybe_unused]] const bool kForks =
    at_fork({[] { trace().mutex.lock(); }, [] { trace().mutex.unlock(); },
             [] {
               // The parent's trace is the parent's to write.
               Trace& copied = trace();
               copied.runs = false;
               copied.happenings.clear();
               detail::unlisten(detail::kTrace);
               copied.mutex.unlock();
             }});

double microseconds(std::int64_t ns) {
  return static_cast<double>(ns) / 1e3;
}

Json to_json(const Happening& happening, std::int64_t started_ns) {
  const bool is_span = happening.duration_ns >= 0;
  Json event{{"name", happening.name},
             {"cat", is_span ? "span" : "event"},
             {"ph", is_span ? "X" : "i"},
             {"ts", microseconds(happening.begun_ns - started_ns)},
             {"pid", happening.process},
             {"tid", happening.thread},
             {"args",
              {{"engine", happening.engine},
               {"pass", happening.pass},
               {"key", happening.key},
               {"device", happening.device < 0 ? Json{} : Json(happening.device)}}}};
  if (is_span) {
    event["dur"] = microseconds(happening.duration_ns);
  } else {
    event["s"] = "t";  // of its thread
  }
  return event;
}

Json name_of(const char* kind, std::int64_t process, std::int64_t thread, std::string name) {
  return {{"name", kind},
          {"ph", "M"},
          {"pid", process},
          {"tid", thread},
          {"args", {{"name", std::move(name)}}}};
}

}  // namespace

bool start_trace() {
  Trace& shared = trace();
  const std::lock_guard lock{shared.mutex};
  if (shared.runs) return false;
  shared.runs = true;
  shared.dropped = 0;
  shared.started_ns = detail::now_ns();
  detail::listen(detail::kTrace);
  return true;
}

bool tracing() noexcept {
  return (detail::listeners.load(std::memory_order_relaxed) & detail::kTrace) != 0;
}

std::string stop_trace() {
  Trace& shared = trace();
  std::vector<Happening> happenings;
  std::int64_t started_ns = 0;
  std::size_t dropped = 0;
  {
    const std::lock_guard lock{shared.mutex};
    shared.runs = false;
    detail::unlisten(detail::kTrace);
    happenings = std::exchange(shared.happenings, {});
    started_ns = shared.started_ns;
    dropped = shared.dropped;
  }
  std::string text = "{\"traceEvents\":[\n";
  const auto append = [&](const Json& event) {
    text += event.dump(-1, ' ', false, Json::error_handler_t::replace) + ",\n";
  };
  const std::int64_t self = ::getpid();
  std::map<std::int64_t, std::set<std::int64_t>> threads_of{{self, {}}};
  for (const Happening& happening : happenings) {
    threads_of[happening.process].insert(happening.thread);
    append(to_json(happening, started_ns));
  }
  for (const auto& [process, threads] : threads_of) {
    append(name_of("process_name", process, process,
                   process == self ? program_invocation_short_name : "lawson-worker"));
    for (const std::int64_t thread : threads) {
      append(name_of("thread_name", process, thread,
                     thread == process ? "main" : fmt::format("thread {}", thread)));
    }
  }
  text.resize(text.size() - 2);
  const Json other{{"dropped", dropped}};
  return text + fmt::format("\n],\"displayTimeUnit\":\"ms\",\"otherData\":{}}}\n", other.dump());
}

namespace detail {

void keep(Happening happening) {
  Trace& shared = trace();
  const std::lock_guard lock{shared.mutex};
  if (!shared.runs || happening.begun_ns < shared.started_ns) return;
  if (shared.happenings.size() >= kMostHappenings) {
    ++shared.dropped;
    return;
  }
  shared.happenings.push_back(std::move(happening));
}

}  // namespace detail
}  // namespace lawson::diag
