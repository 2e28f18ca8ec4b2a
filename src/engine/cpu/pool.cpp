#include "engine/cpu/pool.h"

#include <sched.h>
#ifdef __SSE2__
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include <fmt/format.h>

#include "base/lazy.h"
#include "base/process.h"
#include "diag/lines.h"

namespace lawson::cpu {
namespace {

constexpr int kMaxThreads = 1024;

// Memory of one thread, kept between tasks.
class Scratch {
 public:
  std::byte* reserve(std::size_t bytes) {
    if (bytes <= size_) return memory_.get();
    memory_.reset();
    size_ = 0;
    memory_.reset(static_cast<std::byte*>(std::aligned_alloc(64, align_up(bytes))));
    if (memory_ != nullptr) size_ = align_up(bytes);
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  std::size_t size_ = 0;
};

// The thread's, which ends with the thread; `late` for who computes after that (a destructor of a
// static object, or of a thread's).
Scratch& own_scratch(Scratch& late) {
  thread_local bool has_ended = false;
  thread_local struct Own {
    Scratch scratch;
    ~Own() { has_ended = true; }
  } own;
  return has_ended ? late : own.scratch;
}

// Rounding and subnormals as the language says, whatever the host's thread has set: XLA runs its
// custom calls with subnormals flushed, and then f16's smallest values would read as 0.
class DefaultFloats {
 public:
#ifdef __SSE2__
  DefaultFloats() : before_{_mm_getcsr()} {
    _mm_setcsr(0x1f80);
  }
  ~DefaultFloats() {
    _mm_setcsr(before_);
  }
#else
  DefaultFloats() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloats() {
    std::fesetenv(&before_);
  }
#endif
  DefaultFloats(const DefaultFloats&) = delete;
  DefaultFloats& operator=(const DefaultFloats&) = delete;

 private:
#ifdef __SSE2__
  unsigned before_;
#else
  std::fenv_t before_;
#endif
};

struct Job {
  const Task& task;
  std::int64_t count;
  std::size_t scratch_bytes;
  std::atomic<std::int64_t> next{0};
  std::atomic<bool> out_of_memory{false};
  int helpers = 0;  // pool threads inside work(); guarded by the pool's mutex

  bool open() const { return next.load(std::memory_order_relaxed) < count; }

  // What a thread of the pool threw would end the process, and what the caller threw would leave
  // the others with a job that is gone.
  void work(std::byte* scratch) noexcept {
    const DefaultFloats floats;
    try {
      for (std::int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) task(i, scratch);
    } catch (const std::bad_alloc&) {
      out_of_memory = true;
      next = count;
    }
  }
};

int configured_threads() {
  cpu_set_t allowed;
  int available = 1;
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) available = CPU_COUNT(&allowed);
  available = std::clamp(available, 1, kMaxThreads);
  const char* text = std::getenv("LAWSON_NUM_THREADS");
  if (text == nullptr || *text == '\0') return available;
  char* end = nullptr;
  const long wanted = std::strtol(text, &end, 10);
  if (*end != '\0' || wanted < 1 || wanted > kMaxThreads) {
    diag::print_line(
        fmt::format("LAWSON_NUM_THREADS='{}' is ignored; expected a number from 1 to {}",
                    diag::printable(text), kMaxThreads));
    return available;
  }
  return static_cast<int>(wanted);
}

class Pool {
 public:
  explicit Pool(const Pool* previous) : previous_{previous} {}
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Ends the threads. Who is running a job, or begins one later, does it alone.
  void stop() {
    std::vector<std::thread> threads;
    {
      const std::lock_guard lock{mutex_};
      stop_ = true;
      threads.swap(threads_);
    }
    wake_.notify_all();
    for (std::thread& thread : threads) thread.join();
  }

  bool is_ours() const { return fork_count_ == fork_count(); }
  int thread_count() const { return thread_count_; }

  void run(Job& job, std::byte* scratch) {
    {
      const std::lock_guard lock{mutex_};
      start_threads();
      jobs_.push_back(&job);
    }
    wake_.notify_all();
    job.work(scratch);
    std::unique_lock lock{mutex_};
    std::erase(jobs_, &job);
    done_.wait(lock, [&job] { return job.helpers == 0; });
  }

 private:
  void start_threads() {
    if (started_ || stop_) return;
    started_ = true;
    // Signals are for the host's threads.
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int i = 1; i < thread_count_; ++i) {
      try {
        threads_.emplace_back([this] { serve(); });
      } catch (const std::system_error&) {  // the system's limit: work with those that are there
        break;
      }
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  Job* open_job() {
    for (Job* job : jobs_) {
      if (job->open()) return job;
    }
    return nullptr;
  }

  void serve() {
    Scratch own;
    std::unique_lock lock{mutex_};
    while (true) {
      Job* job = nullptr;
      wake_.wait(lock, [&] { return stop_ || (job = open_job()) != nullptr; });
      if (stop_) return;
      ++job->helpers;
      lock.unlock();
      std::byte* scratch = own.reserve(job->scratch_bytes);
      const bool able = scratch != nullptr || job->scratch_bytes == 0;
      if (able) job->work(scratch);
      lock.lock();
      if (--job->helpers == 0) done_.notify_all();
      if (!able) wake_.wait(lock, [&] { return stop_ || open_job() != job; });
    }
  }

  const int fork_count_ = fork_count();
  const int thread_count_ = configured_threads();
  // In a forked child the parent's pool, whose threads do not exist here: kept, never touched.
  [[maybe_unused]] const Pool* previous_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  std::deque<Job*> jobs_;
  std::vector<std::thread> threads_;
  bool started_ = false;
  bool stop_ = false;
};

std::atomic<Pool*> current{nullptr};

// Ends the threads when the process exits. The pool itself stays: other threads of the host may be
// computing, and destructors of static objects may compute later.
void stop_at_exit() {
  Pool* pool = current.load();
  if (pool != nullptr && pool->is_ours()) pool->stop();
}

Pool& pool() {
  static Lazy<bool> ends;
  ends.get([] { return std::atexit(stop_at_exit) == 0; });
  Pool* known = current.load(std::memory_order_acquire);
  while (known == nullptr || !known->is_ours()) {
    auto fresh = std::make_unique<Pool>(known);
    if (current.compare_exchange_strong(known, fresh.get())) return *fresh.release();
  }
  return *known;
}

}  // namespace

Status parallel_for(std::int64_t count, std::size_t scratch_bytes, const Task& task) {
  if (count <= 0) return {};
  Scratch late;
  std::byte* scratch = own_scratch(late).reserve(scratch_bytes);
  if (scratch == nullptr && scratch_bytes > 0) {
    return error(ErrorKind::out_of_memory, "cpu engine: no memory for {} bytes of scratch",
                 scratch_bytes);
  }
  Job job{task, count, scratch_bytes};
  if (count == 1 || pool().thread_count() == 1) {
    job.work(scratch);
  } else {
    pool().run(job, scratch);
  }
  if (job.out_of_memory) {
    return error(ErrorKind::out_of_memory, "cpu engine: no memory in one of {} tasks", count);
  }
  return {};
}

int thread_count() {
  return pool().thread_count();
}

}  // namespace lawson::cpu
