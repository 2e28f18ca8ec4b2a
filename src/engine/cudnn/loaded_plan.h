// A plan that can run: cuDNN's part, Lawson's steps around it, and where every pointer comes from.
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "engine/cudnn/driver.h"
#include "engine/cudnn/handles.h"
#include "engine/cudnn/lowering.h"
#include "engine/cudnn/variant_packs.h"
#include "engine/engine.h"

namespace lawson::cudnn {

// Bytes of the workspace: cuDNN's part, then Lawson's tensors, each aligned.
std::int64_t whole_workspace(const PlanBytes& plan);

class LoadedPlan : public Loaded {
 public:
  // `graph`: the plan's own. `executable` null: the plan has steps only, or nothing to do.
  // `ordinal` -1: without a device, to be checked only.
  static Result<std::shared_ptr<LoadedPlan>> make(Plan plan, const ir::Graph& graph,
                                                  const PlanBytes& bytes,
                                                  std::unique_ptr<Executable> executable,
                                                  int ordinal);

  const Plan& plan() const override { return plan_; }
  int ordinal() const { return ordinal_; }

  // The device's context is current; `handle` is one of its. Of a plan without steps and fills
  // whose pointers are those of the call before, nothing is allocated and no lock is taken.
  Failure run(std::span<const Binding> bindings, void* workspace, void* stream,
              const Driver& driver, void* handle, Status& status) const;

  // Adds one execution to an empty CUDA graph, or gives a graph that it was added to new pointers.
  // UNSUPPORTED for a plan with more in it than cuDNN's own kernels.
  Failure prepare_graph(GraphUse use, std::span<const Binding> bindings, void* workspace,
                        void* graph, void* handle, Status& status) const;

 private:
  // Where the data of one tensor is.
  struct Source {
    enum class Kind { absent, caller, workspace, value } kind = Kind::absent;
    std::int64_t uid = 0;     // caller: what has to be bound
    std::int64_t offset = 0;  // bytes
    std::size_t value = 0;    // value: where in values_, for a scalar that is not bound
  };
  struct PlannedStep {
    Step step;
    std::vector<Source> sources;
  };

  LoadedPlan(Plan plan, int ordinal) : plan_{std::move(plan)}, ordinal_{ordinal} {}
  Source source_of(std::int64_t uid, const Supplies& supplies) const;
  std::vector<PlannedStep> planned(const std::vector<Step>& steps, const Supplies& supplies) const;
  Result<void*> pointer(const Source& source, std::span<const Binding> bindings,
                        void* workspace) const;
  Status find_pointers(std::span<const Binding> bindings, void* workspace,
                       std::vector<void*>& pointers) const;
  Status check_shared(std::span<const Binding> bindings) const;
  Status run_steps(const std::vector<PlannedStep>& steps, std::span<const Binding> bindings,
                   void* workspace, void* stream, const Driver& driver) const;

  Plan plan_;
  int ordinal_;
  std::unique_ptr<Executable> executable_;
  std::unique_ptr<VariantPacks> packs_;  // of executable_; null where the frontend has to run it
  std::vector<Source> sources_;          // in the order of executable_->uids()
  std::vector<PlannedStep> before_;
  std::vector<PlannedStep> after_;
  struct Fill {
    std::int64_t offset;
    std::int64_t bytes;
    std::uint8_t value;
  };
  std::vector<Fill> fills_;  // of the workspace, before the plan
  struct Value {
    std::int64_t uid;
    std::array<std::byte, 8> bytes;
  };
  std::vector<Value> values_;  // by-value scalars: defaults of the graph, constants of Lawson's
  std::vector<std::pair<std::int64_t, std::int64_t>> offsets_;  // own uid -> workspace offset
  std::vector<std::pair<std::int64_t, std::int64_t>> shared_;   // output uid, input uid: one memory
  mutable std::mutex mutex_;  // for the frontend, which changes a plan's graph while executing it
};

}  // namespace lawson::cudnn
