#include "plan/worker_pool.h"

#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "diag/diag.h"
#include "diag/passing.h"
#include "plan/worker_process.h"

namespace lawson::plan {
namespace {

constexpr int kMostDefaultWorkers = 8;

struct Failure {
  Error error;
  Clock::time_point until;
};

}  // namespace

struct WorkerPool::State {
  explicit State(pid_t process, State* parents) : owner{process}, abandoned{parents} {}

  const pid_t owner;
  State* const abandoned;  // of the process that we were forked from; never touched
  std::mutex mutex;
  std::condition_variable changed;
  // Guarded by mutex:
  std::vector<std::unique_ptr<WorkerProcess>> idle;  // most recently used last
  int running = 0;                                   // idle, busy or starting
  std::shared_ptr<const Failure> failure;            // of the last start, if it failed
  std::optional<Json> info;                          // of the worker started last
  std::optional<std::string> engine_version;         // of the same
  std::int64_t started = 0;
  std::int64_t lost = 0;
};

// One caller's right to one worker.
class WorkerPool::Lease {
 public:
  explicit Lease(State& state) : state_{&state} {}
  Lease(Lease&& other) noexcept
      : worker{std::move(other.worker)},
        failure{std::move(other.failure)},
        keep{other.keep},
        state_{std::exchange(other.state_, nullptr)} {}
  Lease& operator=(Lease&&) = delete;
  ~Lease() {
    if (state_ == nullptr) return;
    const bool lost = worker != nullptr && !keep;
    if (!keep) worker.reset();  // kills and reaps: outside the lock
    const std::lock_guard lock{state_->mutex};
    if (worker != nullptr) {
      state_->idle.push_back(std::move(worker));
    } else {
      --state_->running;
      if (lost) ++state_->lost;
    }
    if (failure) state_->failure = std::move(failure);
    state_->changed.notify_all();
  }

  std::unique_ptr<WorkerProcess> worker;
  std::shared_ptr<const Failure> failure;  // why it could not start, to be remembered
  bool keep = false;

 private:
  State* state_;
};

WorkerPool::WorkerPool(WorkerPoolConfig config) : config_{std::move(config)} {
  max_workers_ = config_.max_workers;
  if (max_workers_ <= 0) {
    max_workers_ =
        std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, kMostDefaultWorkers);
  }
  state_ = new State{::getpid(), nullptr};
}

WorkerPool::~WorkerPool() {
  State* state = state_.load();
  if (state->owner == ::getpid()) delete state;
}

// The mutex of a forked copy may have been locked by a thread that does not exist here, and the
// workers answer to the parent: leave all that alone.
WorkerPool::State& WorkerPool::state_of_this_process() {
  State* state = state_.load(std::memory_order_acquire);
  const pid_t process = ::getpid();
  if (state->owner == process) return *state;
  auto fresh = std::make_unique<State>(process, state);
  if (state_.compare_exchange_strong(state, fresh.get())) return *fresh.release();
  return *state;
}

Result<WorkerPool::Lease> WorkerPool::acquire() {
  State& state = state_of_this_process();
  std::vector<std::unique_ptr<WorkerProcess>> dead;  // reaped after the lock is gone
  std::unique_lock lock{state.mutex};
  for (;;) {
    if (!state.idle.empty()) {
      std::unique_ptr<WorkerProcess> worker = std::move(state.idle.back());
      state.idle.pop_back();
      if (worker->usable()) {
        Lease lease{state};
        lease.worker = std::move(worker);
        return lease;
      }
      dead.push_back(std::move(worker));
      --state.running;
      ++state.lost;
      continue;
    }
    if (state.failure && Clock::now() < state.failure->until) return state.failure->error;
    if (state.running < max_workers_) break;
    state.changed.wait(lock);
  }
  ++state.running;
  ++state.started;
  lock.unlock();

  Lease lease{state};
  const auto failed = [&](Error why) {
    lease.failure =
        std::make_shared<const Failure>(Failure{why, Clock::now() + config_.failure_memory});
    return why;
  };
  const diag::Span span{"start_worker"};
  auto process = WorkerProcess::start(config_.worker_path, config_.arguments);
  if (!process.ok()) return failed(std::move(process).error());
  lease.worker = std::move(process).value();
  auto hello = lease.worker->hello(config_.hello_timeout);
  if (!hello.ok()) return failed(std::move(hello).error());
  if (hello->contains("error")) return failed(error_from_json(hello->at("error")));
  lock.lock();
  state.info = hello->value("info", Json::object());
  state.engine_version = hello->value("engine_version", "");
  lock.unlock();
  return lease;
}

Result<Json> WorkerPool::request(Json request, std::chrono::milliseconds timeout) {
  LAWSON_TRY(Lease lease, acquire());
  LAWSON_TRY(Json reply, lease.worker->exchange(std::move(request), timeout));
  if (const auto happened = reply.find("happened"); happened != reply.end()) {
    diag::accept_collected(*happened);
  }
  lease.keep =
      lease.worker->usable() && reply.value("rss", std::uint64_t{0}) <= config_.max_resident_bytes;
  if (reply.contains("error")) return error_from_json(reply.at("error"));
  return reply;
}

// A part of what a worker said when it started; one is started when none has been yet.
template <typename T>
Result<T> WorkerPool::greeting(std::optional<T> State::*part) {
  State& state = state_of_this_process();
  {
    const std::lock_guard lock{state.mutex};
    if (state.*part) return *(state.*part);
  }
  LAWSON_TRY(Lease lease, acquire());
  lease.keep = lease.worker->usable();
  const std::lock_guard lock{state.mutex};
  return (state.*part).value_or(T{});
}

Result<Json> WorkerPool::worker_info() {
  return greeting(&State::info);
}

Result<std::string> WorkerPool::engine_version() {
  return greeting(&State::engine_version);
}

Json WorkerPool::state() {
  State& state = state_of_this_process();
  const std::lock_guard lock{state.mutex};
  return {{"max_workers", max_workers_},
          {"running", state.running},
          {"idle", state.idle.size()},
          {"started", state.started},
          {"lost", state.lost}};
}

}  // namespace lawson::plan
