// One graph in cuDNN's hands: lowered to cudnn-frontend, judged, built, serialised, executed. The
// frontend itself stays behind this header: lowering.cpp alone includes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/cudnn/kernel_families.h"
#include "engine/cudnn/native.h"
#include "engine/cudnn/reasons.h"
#include "engine/device.h"
#include "ir/graph.h"

namespace lawson::cudnn {

using Failure = std::optional<StageError>;  // nullopt: the stage went well

struct PlanBytes {
  std::vector<std::uint8_t> data;
  std::int64_t workspace = 0;  // cuDNN's part
  Supplies supplies;
};

// An engine of cuDNN's that may take a graph, and the values of its knobs.
struct EngineKnobs {
  struct Knob {
    int type = 0;  // cudnnBackendKnobType_t, as in plans' names: k24 is the kernel
    std::int64_t least = 0;
    std::int64_t most = 0;
    std::int64_t step = 1;
  };
  std::int64_t engine = 0;
  std::vector<Knob> knobs;
};

class Lowered {
 public:
  Lowered(const Lowered&) = delete;
  Lowered& operator=(const Lowered&) = delete;
  ~Lowered();

  // The frontend graph of a fusion; unsupported with named reasons when cuDNN has no words for it.
  // `family`: plans have dynamic shapes, and their kernels are that family's; nullptr: they are for
  // the graph's own shapes.
  static Result<std::unique_ptr<Lowered>> lower(const ir::Graph& graph, const Device& device,
                                                std::shared_ptr<KernelFamily> family);
  // The frontend graph of an attention; `graph` is what it was made from, for reasons.
  static Result<std::unique_ptr<Lowered>> lower(const ir::Graph& graph, NativeAttention native,
                                                const Device& device);

  // Operation graph, heuristics, support check. `handle`: a cuDNN handle on the live device, or
  // nullptr to judge by the device's properties.
  Failure judge(void* handle);
  // Plans whose workspace (as far as known before building) is above the limit are passed over.
  void limit_workspace(std::int64_t bytes);

  // Of the heuristics, preferred first; then those that were added.
  const std::vector<std::string>& plan_names() const;
  // The index of an engine config by name ("eng7_k17=2_k24=3"), added when heuristics did not list
  // it. A failure: no engine has it, or it does not take the graph.
  Failure find_plan(const std::string& name, std::size_t& index);
  // Adds what cuDNN's other heuristics (mode B) list.
  Failure add_other_heuristics();
  std::vector<EngineKnobs> engines() const;
  Failure build(std::size_t index);
  std::string built_name() const;
  Failure serialize(PlanBytes& plan);

  const std::vector<std::string>& rewrites() const;

  // Whether cuDNN knows what the device holds at once: of a live device, and of a target that says
  // it (occupancy.h).
  bool knows_occupancy() const;

 private:
  struct Impl;
  static Result<std::unique_ptr<Lowered>> finish(std::unique_ptr<Impl> impl, const Device& device);
  explicit Lowered(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// How cuDNN runs a loaded plan, for those who keep its variant packs (variant_packs.h).
struct BackendPlan {
  void* descriptor = nullptr;  // null: the frontend does more than hand pointers to cuDNN
  std::vector<std::int64_t> uids;
  std::vector<void*> pointers;  // by uid: constants of the plan, null where a bound tensor goes
  std::vector<int> slots;       // of the bound tensors, in the order of Executable::uids()
  struct Aligned {
    int slot;
    std::int64_t bytes;
  };
  std::vector<Aligned> aligned;  // what cuDNN relies on
};

// A loaded plan. Executing one object from several threads needs a lock around it.
class Executable {
 public:
  Executable(const Executable&) = delete;
  Executable& operator=(const Executable&) = delete;
  ~Executable();

  // `handle` as above; without one the plan is only checked against the device's properties.
  static Failure load(std::span<const std::uint8_t> data, void* handle, const Device& device,
                      std::unique_ptr<Executable>& executable);

  // The tensors to bind, in the order of `pointers` below.
  const std::vector<std::int64_t>& uids() const;
  const BackendPlan& backend() const;
  Failure execute(void* handle, std::span<void*> pointers, void* workspace, void* stream);

 private:
  struct Impl;
  explicit Executable(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

Failure create_handle(void*& handle);  // on the current CUDA context's device
// cuDNN's serialisation of the properties of a live device, as JSON text.
Failure live_properties(int ordinal, std::string& json);

}  // namespace lawson::cudnn
