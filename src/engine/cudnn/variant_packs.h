// Runs a loaded plan through cuDNN's backend. A variant pack (the pointers of one execution) cannot
// be changed once it is finalised, and making one costs more than all else of a call on the host:
// the last ones are kept, and one is used again as long as the pointers stay the same.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "engine/cudnn/lowering.h"
#include "engine/cudnn/slots.h"

namespace lawson::cudnn {

class VariantPacks {
 public:
  // The plan outlives the packs. `unavailable` when cuDNN lacks a function.
  static Result<std::unique_ptr<VariantPacks>> make(const BackendPlan& plan);
  ~VariantPacks();
  VariantPacks(const VariantPacks&) = delete;
  VariantPacks& operator=(const VariantPacks&) = delete;

  // Thread-safe, without a lock. `pointers`: in the order of Executable::uids().
  Failure execute(void* handle, std::span<void* const> pointers, void* workspace, void* stream);

  // Adds the execution to an empty CUDA graph (a CUgraph), or gives one that it was added to the
  // new pointers. The graph keeps no hold on the plan.
  Failure add_to_graph(void* handle, std::span<void* const> pointers, void* workspace, void* graph);
  Failure update_graph(void* handle, std::span<void* const> pointers, void* workspace, void* graph);

 private:
  struct Calls;
  struct Pack;
  // As many threads as are likely to run one plan at once; what more there are make packs anew.
  static constexpr std::size_t kKept = 16;

  VariantPacks(const BackendPlan& plan, const Calls& calls) : plan_{plan}, calls_{calls} {}
  Failure pack_for(std::span<void* const> pointers, void* workspace, std::unique_ptr<Pack>& pack);
  Failure make_pack(std::span<void* const> pointers, void* workspace, std::unique_ptr<Pack>& pack);
  void keep(std::unique_ptr<Pack> pack);

  const BackendPlan& plan_;
  const Calls& calls_;
  Slots<Pack, kKept> packs_;
};

}  // namespace lawson::cudnn
