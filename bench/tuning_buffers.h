// Random data for a graph on the device: several sets, in turn larger than the cache.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "engine/engine.h"

namespace lawson::bench {

class Buffers {
 public:
  Buffers(Engine& engine, const Device& device) : engine_{engine}, device_{device} {}
  ~Buffers();
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;

  // All sets together have at least `bytes`, and there are two or more.
  Status fill(const ir::Graph& graph, std::size_t bytes);
  std::span<const std::vector<Binding>> sets() const { return sets_; }

  // Device memory of at least so many bytes; null for 0.
  Result<void*> workspace(std::int64_t bytes);

  // Samples of the outputs of the first set: overwritten with NaN, and as they are now.
  Status poison(const ir::Graph& graph) const;
  Result<std::vector<double>> outputs(const ir::Graph& graph) const;

 private:
  Result<void*> allocate(std::size_t bytes);

  Engine& engine_;
  const Device& device_;
  std::vector<void*> all_;
  std::vector<std::vector<Binding>> sets_;
  void* workspace_ = nullptr;
  std::int64_t workspace_bytes_ = 0;
};

}  // namespace lawson::bench
