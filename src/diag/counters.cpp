#include "diag/counters.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "base/lazy.h"
#include "base/process.h"
#include "diag/listeners.h"

namespace lawson::diag {
namespace {

// Beyond so many threads that ended, the oldest are counted together.
constexpr std::size_t kEndedThreads = 64;

using Cell = std::atomic<std::uint64_t>;

// Only the owning thread writes: no read-modify-write is needed.
void add(Cell& cell, std::uint64_t count) {
  cell.store(cell.load(std::memory_order_relaxed) + count, std::memory_order_relaxed);
}

void raise(Cell& cell, std::uint64_t value) {
  std::uint64_t seen = cell.load(std::memory_order_relaxed);
  while (seen < value && !cell.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

struct StageCells {
  Cell count{0};
  Cell total_ns{0};
  Cell max_ns{0};  // since the last reset
};

// One engine, pass and device of one thread.
struct Slot {
  std::string_view engine;  // of the registry's names
  std::string_view pass;
  int device = -1;
  std::array<Cell, kEvents> events{};
  std::array<StageCells, kStages> stages{};
  std::atomic<Slot*> next{nullptr};

  // Under the registry's mutex:
  Counts at_reset;

  bool is(const Subject& subject) const {
    return device == subject.device && pass == subject.pass && engine == subject.engine;
  }

  void add(const Counts& counts) {
    for (std::size_t i = 0; i < kEvents; ++i) diag::add(events[i], counts.events[i]);
    for (std::size_t i = 0; i < kStages; ++i) {
      diag::add(stages[i].count, counts.stages[i].count);
      diag::add(stages[i].total_ns, counts.stages[i].total_ns);
      raise(stages[i].max_ns, counts.stages[i].max_ns);
    }
  }

  Counts read(Since since) const {
    Counts counts;
    const bool all = since == Since::start;
    for (std::size_t i = 0; i < kEvents; ++i) {
      counts.events[i] = events[i].load(std::memory_order_relaxed) - (all ? 0 : at_reset.events[i]);
    }
    for (std::size_t i = 0; i < kStages; ++i) {
      const StageTime& before = at_reset.stages[i];
      StageTime& stage = counts.stages[i];
      stage.count = stages[i].count.load(std::memory_order_relaxed) - (all ? 0 : before.count);
      stage.total_ns =
          stages[i].total_ns.load(std::memory_order_relaxed) - (all ? 0 : before.total_ns);
      stage.max_ns = stages[i].max_ns.load(std::memory_order_relaxed);
      if (all) stage.max_ns = std::max(stage.max_ns, before.max_ns);
    }
    return counts;
  }

  void reset() {
    Counts now = read(Since::start);
    for (StageCells& stage : stages) stage.max_ns.store(0, std::memory_order_relaxed);
    at_reset = now;
  }
};

// Slots are added at the end by the owner, and freed with the block.
struct Block {
  std::uint64_t thread = 0;
  std::int64_t tid = 0;
  bool ended = false;  // under the registry's mutex
  std::atomic<Slot*> first{nullptr};

  Block() = default;
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() {
    for (Slot* slot = first.load(std::memory_order_relaxed); slot != nullptr;) {
      const std::unique_ptr<Slot> owned{slot};
      slot = owned->next.load(std::memory_order_relaxed);
    }
  }

  template <typename Visit>
  void each(const Visit& visit) const {
    for (Slot* slot = first.load(std::memory_order_acquire); slot != nullptr;
         slot = slot->next.load(std::memory_order_acquire)) {
      visit(*slot);
    }
  }
};

class Registry {
 public:
  static Registry& instance() {
    static Lazy<Registry> only;
    return only.get([] { return Registry{}; });
  }

  static bool follow_forks() {
    return at_fork({[] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                    [] {
                      instance().begin_child();
                      instance().mutex_.unlock();
                    }});
  }

  Block* enter() {
    auto block = std::make_unique<Block>();
    block->tid = ::syscall(SYS_gettid);
    const std::lock_guard lock{mutex_};
    block->thread = ++threads_;
    blocks_.push_back(std::move(block));
    return blocks_.back().get();
  }

  void leave(Block* block) {
    const std::lock_guard lock{mutex_};
    block->ended = true;
    if (++ended_ <= kEndedThreads) return;
    const auto oldest = std::find_if(blocks_.begin(), blocks_.end(),
                                     [](const auto& candidate) { return candidate->ended; });
    merge(**oldest);
    blocks_.erase(oldest);
    --ended_;
  }

  Slot* add_slot(Block& block, const Subject& subject) {
    auto slot = std::make_unique<Slot>();
    const std::lock_guard lock{mutex_};
    slot->engine = kept(subject.engine);
    slot->pass = kept(subject.pass);
    slot->device = subject.device;
    std::atomic<Slot*>* end = &block.first;
    while (Slot* const next = end->load(std::memory_order_relaxed)) end = &next->next;
    end->store(slot.get(), std::memory_order_release);
    return slot.release();
  }

  // Of threads whose block is gone: they are at their very end.
  void add_late(const Subject& subject, const Counts& counts) {
    const std::lock_guard lock{mutex_};
    merged_slot(subject.engine, subject.pass, subject.device)->add(counts);
  }

  std::vector<ThreadCounts> counts(Since since) {
    const std::lock_guard lock{mutex_};
    std::vector<ThreadCounts> threads;
    const auto keep = [&](const Block& block) {
      ThreadCounts thread{block.thread, block.tid, block.ended, {}};
      block.each([&](const Slot& slot) {
        Row row{std::string{slot.engine}, std::string{slot.pass}, slot.device, slot.read(since)};
        if (!row.counts.empty()) thread.rows.push_back(std::move(row));
      });
      if (!thread.rows.empty()) threads.push_back(std::move(thread));
    };
    for (const auto& block : blocks_) keep(*block);
    keep(merged_);
    return threads;
  }

  void reset() {
    const std::lock_guard lock{mutex_};
    for (const auto& block : blocks_) {
      block->each([](Slot& slot) { slot.reset(); });
    }
    merged_.each([](Slot& slot) { slot.reset(); });
  }

 private:
  Registry() { merged_.ended = true; }

  // A forked child counts what it does itself. The parent's other threads are not here.
  void begin_child();

  std::string_view kept(std::string_view name) { return *names_.emplace(name).first; }

  Slot* merged_slot(std::string_view engine, std::string_view pass, int device) {
    std::atomic<Slot*>* end = &merged_.first;
    while (Slot* const next = end->load(std::memory_order_relaxed)) {
      if (next->is({engine, pass, {}, device})) return next;
      end = &next->next;
    }
    auto slot = std::make_unique<Slot>();
    slot->engine = kept(engine);
    slot->pass = kept(pass);
    slot->device = device;
    end->store(slot.get(), std::memory_order_release);
    return slot.release();
  }

  void merge(const Block& block) {
    block.each([&](const Slot& slot) {
      Slot* const into = merged_slot(slot.engine, slot.pass, slot.device);
      into->add(slot.read(Since::reset));
      Counts before = slot.at_reset;
      // What was before the reset is added on both sides, so that the difference stays.
      std::array<StageTime, kStages> maxima = before.stages;
      for (StageTime& stage : before.stages) stage.max_ns = 0;
      into->add(before);
      into->at_reset.add(before);
      for (std::size_t i = 0; i < kStages; ++i) {
        std::uint64_t& most = into->at_reset.stages[i].max_ns;
        most = std::max(most, maxima[i].max_ns);
      }
    });
  }

  std::mutex mutex_;
  std::set<std::string, std::less<>> names_;
  std::list<std::unique_ptr<Block>> blocks_;   // in the order of entering
  std::list<std::unique_ptr<Block>> orphans_;  // of a parent process; not freed: it is in use there
  Block merged_;
  std::uint64_t threads_ = 0;
  std::size_t ended_ = 0;
};

// Read at every event, hence without a constructor or destructor.
struct Local {
  Block* block;
  Slot* last;
  bool ended;
};
constinit thread_local Local local{nullptr, nullptr, false};

struct Leaving {
  bool entered = false;
  Leaving() = default;
  Leaving(const Leaving&) = delete;
  Leaving& operator=(const Leaving&) = delete;
  ~Leaving() {
    local.ended = true;
    local.last = nullptr;
    if (Block* const block = std::exchange(local.block, nullptr)) {
      Registry::instance().leave(block);
    }
  }
};

void Registry::begin_child() {
  for (auto block = blocks_.begin(); block != blocks_.end();) {
    const auto here = block++;
    if (here->get() != local.block) orphans_.splice(orphans_.end(), blocks_, here);
  }
  ended_ = 0;
  const auto zero = [](Slot& slot) {
    for (Cell& cell : slot.events) cell.store(0, std::memory_order_relaxed);
    for (StageCells& stage : slot.stages) {
      for (Cell* cell : {&stage.count, &stage.total_ns, &stage.max_ns}) {
        cell->store(0, std::memory_order_relaxed);
      }
    }
    slot.at_reset = {};
  };
  for (const auto& block : blocks_) {
    block->tid = ::syscall(SYS_gettid);
    block->each(zero);
  }
  merged_.each(zero);
}

[[maybe_unused]] const bool kForks = Registry::follow_forks();

Block* own_block() {
  if (local.block == nullptr && !local.ended) {
    thread_local Leaving leaving;
    leaving.entered = true;
    local.block = Registry::instance().enter();
  }
  return local.block;
}

Slot* find_slot(const Subject& subject) {
  if (local.last != nullptr && local.last->is(subject)) return local.last;
  Block* const block = own_block();
  if (block == nullptr) return nullptr;
  Slot* found = nullptr;
  block->each([&](Slot& slot) {
    if (found == nullptr && slot.is(subject)) found = &slot;
  });
  if (found == nullptr) found = Registry::instance().add_slot(*block, subject);
  local.last = found;
  return found;
}

Json events_json(const Counts& counts) {
  Json events = Json::object();
  for (std::size_t i = 0; i < kEvents; ++i) {
    events[std::string{to_string(static_cast<Event>(i))}] = counts.events[i];
  }
  return events;
}

Json stages_json(const Counts& counts) {
  Json stages = Json::object();
  for (std::size_t i = 0; i < kStages; ++i) {
    const StageTime& time = counts.stages[i];
    stages[std::string{to_string(static_cast<Stage>(i))}] = {
        {"count", time.count},
        {"total_ms", static_cast<double>(time.total_ns) * 1e-6},
        {"max_ms", static_cast<double>(time.max_ns) * 1e-6}};
  }
  return stages;
}

Json device_json(int device) {
  return device < 0 ? Json{} : Json(device);
}

}  // namespace

bool Counts::empty() const {
  return std::all_of(events.begin(), events.end(), [](auto count) { return count == 0; }) &&
         std::all_of(stages.begin(), stages.end(), [](auto& stage) { return stage.count == 0; });
}

void Counts::add(const Counts& other) {
  for (std::size_t i = 0; i < kEvents; ++i) events[i] += other.events[i];
  for (std::size_t i = 0; i < kStages; ++i) {
    stages[i].count += other.stages[i].count;
    stages[i].total_ns += other.stages[i].total_ns;
    stages[i].max_ns = std::max(stages[i].max_ns, other.stages[i].max_ns);
  }
}

std::string device_text(int device) {
  return device < 0 ? "-" : fmt::format("{}", device);
}

std::string ThreadCounts::device() const {
  int only = -1;
  for (const Row& row : rows) {
    if (row.device < 0 || row.device == only) continue;
    if (only >= 0) return "mixed";
    only = row.device;
  }
  return device_text(only);
}

std::vector<ThreadCounts> counts(Since since) {
  return Registry::instance().counts(since);
}

void reset_counts() {
  Registry::instance().reset();
}

std::uint64_t this_thread() noexcept {
  std::uint64_t number = 0;
  detail::quietly([&] {
    if (const Block* block = own_block()) number = block->thread;
  });
  return number;
}

Json counts_to_json(const std::vector<ThreadCounts>& threads) {
  Counts totals;
  Json list = Json::array();
  for (const ThreadCounts& thread : threads) {
    Json rows = Json::array();
    for (const Row& row : thread.rows) {
      totals.add(row.counts);
      rows.push_back({{"engine", row.engine},
                      {"pass", row.pass},
                      {"device", device_json(row.device)},
                      {"events", events_json(row.counts)},
                      {"stages", stages_json(row.counts)}});
    }
    list.push_back({{"thread", thread.thread},
                    {"tid", thread.tid},
                    {"ended", thread.ended},
                    {"device", thread.device()},
                    {"rows", std::move(rows)}});
  }
  return {{"totals", events_json(totals)},
          {"stages", stages_json(totals)},
          {"threads", std::move(list)}};
}

namespace detail {

void count(Event event, const Subject& subject) noexcept {
  quietly([&] {
    if (Slot* const slot = find_slot(subject)) {
      add(slot->events[static_cast<std::size_t>(event)], 1);
      return;
    }
    Counts one;
    one.events[static_cast<std::size_t>(event)] = 1;
    Registry::instance().add_late(subject, one);
  });
}

void count_stage(Stage stage, const Subject& subject, std::uint64_t ns) noexcept {
  Counts one;
  one.stages[static_cast<std::size_t>(stage)] = {1, ns, ns};
  count(subject, one);
}

void count(const Subject& subject, const Counts& counts) noexcept {
  detail::quietly([&] {
    if (Slot* const slot = find_slot(subject)) {
      slot->add(counts);
    } else {
      Registry::instance().add_late(subject, counts);
    }
  });
}

}  // namespace detail

}  // namespace lawson::diag
