#include "engine/cudnn/loaded_plan.h"

#include "ir/attention.h"

namespace lawson::cudnn {
namespace {

constexpr std::int64_t kAlignment = 256;

std::int64_t aligned(std::int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

void* bound(std::span<const Binding> bindings, std::int64_t uid) {
  for (const Binding& binding : bindings) {
    if (binding.uid == uid) return binding.data;
  }
  return nullptr;
}

}  // namespace

std::int64_t whole_workspace(const PlanBytes& plan) {
  if (plan.supplies.own.empty()) return plan.workspace;
  std::int64_t total = aligned(plan.workspace);
  for (const OwnTensor& tensor : plan.supplies.own) total += aligned(tensor.bytes);
  return total;
}

Result<std::shared_ptr<LoadedPlan>> LoadedPlan::make(Plan plan, const ir::Graph& graph,
                                                     const PlanBytes& bytes,
                                                     std::unique_ptr<Executable> executable,
                                                     int ordinal) {
  std::shared_ptr<LoadedPlan> loaded{new LoadedPlan(std::move(plan), ordinal)};
  const Supplies& supplies = bytes.supplies;
  std::int64_t offset = aligned(bytes.workspace);
  for (const OwnTensor& tensor : supplies.own) {
    loaded->offsets_.emplace_back(tensor.uid, offset);
    if (tensor.zero) loaded->fills_.push_back({offset, tensor.bytes, 0});
    if (tensor.ones) loaded->fills_.push_back({offset, tensor.bytes, 0xFF});
    offset += aligned(tensor.bytes);
  }
  for (ir::TensorId id = 0; id < graph.input_count; ++id) {
    const ir::Tensor& tensor = graph.tensor(id);
    if (!tensor.by_value || tensor.values.empty()) continue;
    loaded->values_.push_back({ir::Graph::uid(id), {}});
    store_element(loaded->values_.back().bytes.data(), tensor.dtype, 0, tensor.values.front());
  }
  for (const OwnScalar& scalar : supplies.scalars) {
    loaded->values_.push_back({scalar.uid, {}});
    store_element(loaded->values_.back().bytes.data(), scalar.dtype, 0, scalar.value);
  }
  for (std::int32_t i = 0; i < graph.output_count; ++i) {
    const ir::TensorId output = graph.input_count + i;
    const ir::TensorId input = ir::shared_memory_input(graph, output);
    if (input != ir::kNone) {
      loaded->shared_.emplace_back(ir::Graph::uid(output), ir::Graph::uid(input));
    }
  }
  loaded->before_ = loaded->planned(supplies.before, supplies);
  loaded->after_ = loaded->planned(supplies.after, supplies);
  if (executable) {
    for (const std::int64_t uid : executable->uids()) {
      loaded->sources_.push_back(loaded->source_of(uid, supplies));
    }
  }
  loaded->executable_ = std::move(executable);
  if (loaded->executable_ && loaded->executable_->backend().descriptor != nullptr) {
    LAWSON_TRY(loaded->packs_, VariantPacks::make(loaded->executable_->backend()));
  }
  return loaded;
}

LoadedPlan::Source LoadedPlan::source_of(std::int64_t uid, const Supplies& supplies) const {
  using Kind = Source::Kind;
  if (uid == 0) return {};
  for (const auto& [own, offset] : offsets_) {
    if (own == uid) return {Kind::workspace, uid, offset, 0};
  }
  for (const DerivedBinding& derived : supplies.derived) {
    if (derived.uid == uid) {
      return {Kind::caller, derived.source_uid, derived.byte_offset, 0};
    }
  }
  for (std::size_t i = 0; i < values_.size(); ++i) {
    if (values_[i].uid == uid) return {Kind::value, uid, 0, i};
  }
  return {Kind::caller, uid, 0, 0};
}

std::vector<LoadedPlan::PlannedStep> LoadedPlan::planned(const std::vector<Step>& steps,
                                                         const Supplies& supplies) const {
  std::vector<PlannedStep> result;
  for (const Step& step : steps) {
    PlannedStep planned{step, {}};
    for (const std::int64_t uid : step_uids(step)) {
      planned.sources.push_back(source_of(uid, supplies));
    }
    result.push_back(std::move(planned));
  }
  return result;
}

Result<void*> LoadedPlan::pointer(const Source& source, std::span<const Binding> bindings,
                                  void* workspace) const {
  switch (source.kind) {
    case Source::Kind::absent:
      return static_cast<void*>(nullptr);
    case Source::Kind::workspace:
      return static_cast<void*>(static_cast<std::byte*>(workspace) + source.offset);
    case Source::Kind::caller:
      if (void* data = bound(bindings, source.uid)) {
        return static_cast<void*>(static_cast<std::byte*>(data) + source.offset);
      }
      break;
    case Source::Kind::value:
      if (void* data = bound(bindings, source.uid)) return data;
      return static_cast<void*>(const_cast<std::byte*>(values_[source.value].bytes.data()));
  }
  return invalid("no data is bound to tensor {} of the plan", source.uid);
}

Status LoadedPlan::run_steps(const std::vector<PlannedStep>& steps,
                             std::span<const Binding> bindings, void* workspace, void* stream,
                             const Driver& driver) const {
  std::vector<void*> pointers;
  for (const PlannedStep& planned : steps) {
    pointers.clear();
    for (const Source& source : planned.sources) {
      LAWSON_TRY(void* data, pointer(source, bindings, workspace));
      pointers.push_back(data);
    }
    LAWSON_CHECK(launch(planned.step, pointers, stream, driver));
  }
  return {};
}

Status LoadedPlan::find_pointers(std::span<const Binding> bindings, void* workspace,
                                 std::vector<void*>& pointers) const {
  pointers.clear();
  for (const Source& source : sources_) {
    LAWSON_TRY(void* data, pointer(source, bindings, workspace));
    pointers.push_back(data);
  }
  return {};
}

Status LoadedPlan::check_shared(std::span<const Binding> bindings) const {
  for (const auto& [output, input] : shared_) {
    if (bound(bindings, output) != nullptr && bound(bindings, output) != bound(bindings, input)) {
      return invalid(
          "tensor {} of the plan is tensor {} worked on in place: bind both to the same memory",
          output, input);
    }
  }
  return {};
}

Failure LoadedPlan::run(std::span<const Binding> bindings, void* workspace, void* stream,
                        const Driver& driver, void* handle, Status& status) const {
  thread_local std::vector<void*> pointers;  // keeps its memory from call to call
  status = [&]() -> Status {
    LAWSON_CHECK(find_pointers(bindings, workspace, pointers));
    LAWSON_CHECK(check_shared(bindings));
    LAWSON_CHECK(run_steps(before_, bindings, workspace, stream, driver));
    for (const Fill& fill : fills_) {
      LAWSON_CHECK(driver.fill(static_cast<std::byte*>(workspace) + fill.offset, fill.value,
                               static_cast<std::size_t>(fill.bytes), stream));
    }
    return {};
  }();
  if (!status.ok()) return std::nullopt;
  if (packs_) {
    if (Failure failure = packs_->execute(handle, pointers, workspace, stream)) return failure;
  } else if (executable_) {
    const std::lock_guard lock{mutex_};
    if (Failure failure = executable_->execute(handle, pointers, workspace, stream)) {
      return failure;
    }
  }
  status = run_steps(after_, bindings, workspace, stream, driver);
  return std::nullopt;
}

Failure LoadedPlan::prepare_graph(GraphUse use, std::span<const Binding> bindings, void* workspace,
                                  void* graph, void* handle, Status& status) const {
  if (!packs_ || !before_.empty() || !after_.empty() || !fills_.empty()) {
    status = unsupported("graph_native",
                         fmt::format("plan {} ({}) has more in it than cuDNN's own kernels, which "
                                     "alone can be added to a CUDA graph; capture a stream that it "
                                     "is executed on instead",
                                     plan_.plan_id, plan_.plan_name));
    return std::nullopt;
  }
  std::vector<void*> pointers;
  status = [&]() -> Status {
    LAWSON_CHECK(check_shared(bindings));
    return find_pointers(bindings, workspace, pointers);
  }();
  if (!status.ok()) return std::nullopt;
  return use == GraphUse::add ? packs_->add_to_graph(handle, pointers, workspace, graph)
                              : packs_->update_graph(handle, pointers, workspace, graph);
}

}  // namespace lawson::cudnn
