// The cuDNN engine for devices that are not on this machine, as a client sees it: each call is
// answered by a worker process. Thread-safe.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "plan/worker_pool.h"
#include "plan/worker_protocol.h"

namespace lawson::plan {

class WorkerClient {
 public:
  explicit WorkerClient(WorkerPoolConfig config) : pool_{std::move(config)} {}

  // As Engine::version, of the engine in the workers.
  Result<std::string> version() { return pool_.engine_version(); }
  Result<Verdict> probe(const ir::Graph& graph, const Device& device, const Options& options);
  Result<std::vector<Candidate>> candidates(const ir::Graph& graph, const Device& device,
                                            const Options& options);
  Result<Plan> compile(const ir::Graph& graph, const Device& device, const Options& options,
                       const std::optional<Candidate>& candidate);

  WorkerPool& pool() { return pool_; }

 private:
  WorkerPool pool_;
};

}  // namespace lawson::plan
