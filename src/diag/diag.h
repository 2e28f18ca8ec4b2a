// What Lawson did, told as it happens: events are counted always, per engine, pass, device and
// thread; what else listens (LAWSON_CACHE_DEBUG's lines, a trace, a profiler) costs one relaxed
// load while nobody does, and then record() takes no lock. Nothing here throws or fails its caller.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace lawson::diag {

enum class Event {
  hit,           // a look-up found the plan (or the verdict) in the process's cache
  miss,          // it did not
  verdict,       // an engine judged
  create_graph,  // a graph was built to be judged or compiled, whatever became of it
  cache_graph,   // a plan was inserted into the process's cache
  build_plans,   // a plan was compiled
  load,          // a plan's bytes were made executable
  execute,
  evict,  // the process's cache let a plan go
};
inline constexpr std::size_t kEvents = 9;
std::string_view to_string(Event event);  // "hit", "create_graph", ...

// What an engine spends its time with before it can execute.
enum class Stage {
  validate,
  build_operation_graph,
  create_execution_plans,
  check_support,
  build_plans,
  load,
};
inline constexpr std::size_t kStages = 6;
std::string_view to_string(Stage stage);

inline constexpr std::string_view kForward = "forward";
inline constexpr std::string_view kBackward = "backward";
inline constexpr std::string_view kFusion = "fusion";

// What an event is about. The texts are read before the call returns; for a Span, until it ends.
struct Subject {
  std::string_view engine;
  std::string_view pass;  // kForward, kBackward, kFusion
  std::string_view key;
  int device = -1;  // the live device's ordinal; -1: the CPU, or a target that is not here
};

namespace detail {
// Who listens; kUnknown until the first event has read the environment.
inline constexpr unsigned kLines = 1;
inline constexpr unsigned kTrace = 2;
inline constexpr unsigned kRanges = 4;   // a profiler's NVTX
inline constexpr unsigned kCollect = 8;  // a worker, for its host
inline constexpr unsigned kUnknown = 16;
extern constinit std::atomic<unsigned> listeners;

void count(Event event, const Subject& subject) noexcept;
void tell(Event event, const Subject& subject) noexcept;
}  // namespace detail

inline void record(Event event, const Subject& subject) noexcept {
  detail::count(event, subject);
  if (detail::listeners.load(std::memory_order_relaxed) != 0) detail::tell(event, subject);
}

// What this thread is about from here on until the object's end: for those below who have no key.
class About {
 public:
  explicit About(const Subject& subject) noexcept;
  ~About();
  About(const About&) = delete;
  About& operator=(const About&) = delete;

  static Subject current() noexcept;  // all empty where there is none

 private:
  Subject subject_;
  const About* outer_;
};

inline void record(Event event) noexcept {
  record(event, About::current());
}

// Something that takes time, from construction to destruction, on one thread. A stage's time is
// counted always; a name's is told to a trace or profiler only.
class Span {
 public:
  explicit Span(Stage stage, const Subject& subject = About::current()) noexcept;
  explicit Span(std::string_view name, const Subject& subject = About::current()) noexcept
      : name_{name}, subject_{subject} {
    if (detail::listeners.load(std::memory_order_relaxed) != 0) begin();
  }
  ~Span() {
    if (begun_ >= 0) end();
  }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;

 private:
  void begin() noexcept;
  void end() noexcept;

  std::string_view name_;
  Subject subject_;
  std::int64_t begun_ = -1;  // nanoseconds of the steady clock
  int stage_ = -1;
  bool in_range_ = false;  // of a profiler
};

}  // namespace lawson::diag
