// Up to `max_workers` worker processes, started when first needed and reused. Thread-safe; callers
// wait when all are busy. A worker that dies, hangs or talks nonsense costs the one request it was
// answering; the next one gets a new worker. In a forked child of the host the pool starts over:
// the parent's workers stay the parent's.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/status.h"

namespace lawson::plan {

struct WorkerPoolConfig {
  std::string worker_path;
  std::vector<std::string> arguments;
  int max_workers = 0;  // 0: one per core, at most 8
  std::chrono::milliseconds hello_timeout{120'000};
  // A worker that could not start (no cuDNN, no program) fails every request for this long, rather
  // than being started again for each of thousands.
  std::chrono::milliseconds failure_memory{5'000};
  // A worker above this is replaced before its next request.
  std::size_t max_resident_bytes = std::size_t{1400} << 20;
};

class WorkerPool {
 public:
  explicit WorkerPool(WorkerPoolConfig config);
  ~WorkerPool();  // no request may be running; ends all workers
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  // The reply's document, or the error that the worker replied, or why there is no reply.
  // `timeout` counts from when a worker takes the request.
  Result<Json> request(Json request, std::chrono::milliseconds timeout);

  // What a worker said about itself when it started: the libraries that it loaded. Starts one when
  // none has been started yet.
  Result<Json> worker_info();
  // The build of its engine, likewise.
  Result<std::string> engine_version();

  Json state();  // {"max_workers", "running", "idle", "started", "lost"}
  int max_workers() const { return max_workers_; }

 private:
  struct State;
  class Lease;
  State& state_of_this_process();
  Result<Lease> acquire();
  template <typename T>
  Result<T> greeting(std::optional<T> State::*part);

  WorkerPoolConfig config_;
  int max_workers_;
  std::atomic<State*> state_;
};

}  // namespace lawson::plan
