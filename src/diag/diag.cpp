#include "diag/diag.h"

#include <fmt/format.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>

#include "base/lazy.h"
#include "diag/counters.h"
#include "diag/lines.h"
#include "diag/listeners.h"
#include "diag/passing.h"
#include "diag/ranges.h"
#include "diag/settings.h"
#include "diag/trace.h"

namespace lawson::diag {
namespace {

void print_summary(pid_t registered) noexcept {
  detail::quietly([registered] {
    const auto threads = counts(Since::start);
    if (threads.empty() && ::getpid() != registered) return;  // a forked child, of its parent's
    std::string text = fmt::format("cache summary: rank={} pid={}\n{}", settings().rank, ::getpid(),
                                   summary_text(threads));
    text.pop_back();
    print_line(text);
  });
}

// Asks the environment and the profiler who listens. A worker and a trace do not wait for it.
void find_listeners() noexcept {
  static Lazy<bool> asked;
  asked.get([] {
    detail::quietly([] {
      const int level = settings().cache_level;
      static pid_t process = 0;
      process = ::getpid();
      if (level >= 1) std::atexit([] { print_summary(process); });
      if (level >= 2) detail::listen(detail::kLines);
      if (has_profiler()) detail::listen(detail::kRanges);
    });
    detail::unlisten(detail::kUnknown);
    return true;
  });
}

unsigned who_listens() noexcept {
  if ((detail::listeners.load(std::memory_order_relaxed) & detail::kUnknown) != 0) {
    find_listeners();
  }
  return detail::listeners.load(std::memory_order_relaxed);
}

void hand_on(unsigned listeners, std::string_view name, const Subject& subject,
             std::int64_t begun_ns, std::int64_t duration_ns) {
  Happening happening;
  happening.name = name;
  happening.engine = subject.engine;
  happening.pass = subject.pass;
  happening.key = subject.key;
  happening.device = subject.device;
  happening.begun_ns = begun_ns;
  happening.duration_ns = duration_ns;
  happening.process = ::getpid();
  happening.thread = ::syscall(SYS_gettid);
  if ((listeners & detail::kCollect) != 0) detail::collect(happening);
  if ((listeners & detail::kTrace) != 0) detail::keep(std::move(happening));
}

}  // namespace

void begin() noexcept {
  static_cast<void>(who_listens());
}

std::string_view to_string(Event event) {
  switch (event) {
    case Event::hit:
      return "hit";
    case Event::miss:
      return "miss";
    case Event::verdict:
      return "verdict";
    case Event::create_graph:
      return "create_graph";
    case Event::cache_graph:
      return "cache_graph";
    case Event::build_plans:
      return "build_plans";
    case Event::load:
      return "load";
    case Event::execute:
      return "execute";
    case Event::evict:
      return "evict";
  }
  return "unknown";
}

std::string_view to_string(Stage stage) {
  switch (stage) {
    case Stage::validate:
      return "validate";
    case Stage::build_operation_graph:
      return "build_operation_graph";
    case Stage::create_execution_plans:
      return "create_execution_plans";
    case Stage::check_support:
      return "check_support";
    case Stage::build_plans:
      return "build_plans";
    case Stage::load:
      return "load";
  }
  return "unknown";
}

namespace {

constinit thread_local const About* innermost = nullptr;

}  // namespace

About::About(const Subject& subject) noexcept : subject_{subject}, outer_{innermost} {
  innermost = this;
}

About::~About() {
  innermost = outer_;
}

Subject About::current() noexcept {
  return innermost == nullptr ? Subject{} : innermost->subject_;
}

namespace detail {

constinit std::atomic<unsigned> listeners{kUnknown};

void tell(Event event, const Subject& subject) noexcept {
  const unsigned who = who_listens();
  if (who == 0) return;
  quietly([&] {
    if ((who & kLines) != 0) print_line(event_line(event, subject));
    if ((who & (kTrace | kCollect)) != 0) hand_on(who, to_string(event), subject, now_ns(), -1);
  });
}

}  // namespace detail

Span::Span(Stage stage, const Subject& subject) noexcept
    : name_{to_string(stage)}, subject_{subject}, stage_{static_cast<int>(stage)} {
  begin();
}

void Span::begin() noexcept {
  const unsigned who = who_listens();
  if (who == 0 && stage_ < 0) return;
  if ((who & detail::kRanges) != 0) {
    begin_range(name_);
    in_range_ = true;
  }
  begun_ = detail::now_ns();
}

void Span::end() noexcept {
  const std::int64_t duration = detail::now_ns() - begun_;
  if (in_range_) end_range();
  if (stage_ >= 0) {
    detail::count_stage(static_cast<Stage>(stage_), subject_, static_cast<std::uint64_t>(duration));
  }
  const unsigned who = detail::listeners.load(std::memory_order_relaxed);
  if ((who & (detail::kTrace | detail::kCollect)) == 0) return;
  detail::quietly([&] { hand_on(who, name_, subject_, begun_, duration); });
}

}  // namespace lawson::diag
