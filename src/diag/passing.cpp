#include "diag/passing.h"

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "base/lazy.h"
#include "diag/counters.h"
#include "diag/lines.h"
#include "diag/listeners.h"

namespace lawson::diag {
namespace {

// Some hundreds belong to a request; more are dropped.
constexpr std::size_t kMostCollected = std::size_t{1} << 16;

struct Collected {
  std::mutex mutex;
  std::vector<Happening> happenings;
};

Collected& collected() {
  static Lazy<Collected> only;
  return only.get();
}

Json to_json(const Happening& happening) {
  return {{"name", happening.name},       {"engine", happening.engine},
          {"pass", happening.pass},       {"key", happening.key},
          {"begun", happening.begun_ns},  {"duration", happening.duration_ns},
          {"process", happening.process}, {"thread", happening.thread}};
}

// Throws what the JSON library throws where a field is missing or of another type. A worker has no
// live devices.
Happening from_json(const Json& document) {
  Happening happening;
  document.at("name").get_to(happening.name);
  document.at("engine").get_to(happening.engine);
  document.at("pass").get_to(happening.pass);
  document.at("key").get_to(happening.key);
  document.at("begun").get_to(happening.begun_ns);
  document.at("duration").get_to(happening.duration_ns);
  document.at("process").get_to(happening.process);
  document.at("thread").get_to(happening.thread);
  return happening;
}

void accept(Happening happening) {
  const Subject subject{happening.engine, happening.pass, happening.key, happening.device};
  const unsigned who = detail::listeners.load(std::memory_order_relaxed);
  if (happening.duration_ns < 0) {
    for (std::size_t i = 0; i < kEvents; ++i) {
      const auto event = static_cast<Event>(i);
      if (to_string(event) != happening.name) continue;
      detail::count(event, subject);
      if ((who & detail::kLines) != 0) print_line(event_line(event, subject));
    }
  } else {
    for (std::size_t i = 0; i < kStages; ++i) {
      const auto stage = static_cast<Stage>(i);
      if (to_string(stage) != happening.name) continue;
      detail::count_stage(stage, subject, static_cast<std::uint64_t>(happening.duration_ns));
    }
  }
  if ((who & detail::kTrace) != 0) detail::keep(std::move(happening));
}

}  // namespace

void collect_for_host() noexcept {
  detail::listeners.store(detail::kCollect, std::memory_order_relaxed);
}

Json take_collected() {
  std::vector<Happening> happenings;
  {
    const std::lock_guard lock{collected().mutex};
    happenings = std::exchange(collected().happenings, {});
  }
  Json list = Json::array();
  for (const Happening& happening : happenings) list.push_back(to_json(happening));
  return list;
}

void accept_collected(const Json& document) noexcept {
  if (!document.is_array()) return;
  for (const Json& item : document) {
    detail::quietly([&] { accept(from_json(item)); });
  }
}

namespace detail {

void collect(const Happening& happening) {
  const std::lock_guard lock{collected().mutex};
  if (collected().happenings.size() < kMostCollected) collected().happenings.push_back(happening);
}

}  // namespace detail
}  // namespace lawson::diag
