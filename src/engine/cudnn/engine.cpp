#include "engine/cudnn/engine.h"

#include "engine/cudnn/building.h"
#include "engine/cudnn/defects.h"
#include "engine/cudnn/devices.h"
#include "engine/cudnn/driver.h"
#include "engine/cudnn/facts.h"
#include "engine/cudnn/handles.h"
#include "engine/cudnn/judging.h"
#include "engine/cudnn/loaded_plan.h"
#include "engine/cudnn/loader.h"
#include "engine/cudnn/lowering.h"
#include "engine/cudnn/measure.h"
#include "engine/cudnn/plan_bytes.h"
#include "engine/cudnn/reasons.h"
#include "engine/cudnn/turned.h"
#include "engine/subject.h"
#include "ir/json.h"

namespace lawson {
namespace cudnn {
class CudnnEngine : public Engine {
 public:
  std::string_view name() const override { return "cudnn"; }
  bool accepts(const Device& device) const override { return device.kind == Device::Kind::cuda; }
  Result<std::string> version() override {
    LAWSON_TRY(const Libraries* found, libraries());
    return found->cudnn.version;
  }
  bool tells_graphs() const override { return true; }

  Result<Verdict> probe(const ir::Graph& graph, const Device& device,
                        const Options& options) override {
    LAWSON_TRY(const Libraries* found, libraries());
    Verdict verdict = blank_verdict(graph, device, options, *found);
    const diag::About about{subject_of(name(), graph, device, verdict.key)};
    if (const auto defect = known_defect(graph, device, found->cudnn_version)) {
      verdict.defect = fmt::format("{}: {} ({})", defect->id, defect->message, defect->source);
      if (defect->barred) {
        verdict.reasons.push_back({"known_defect",
                                   fmt::format("{} ({})", defect->message, defect->source),
                                   defect->field});
        return verdict;
      }
    }
    LAWSON_TRY(Judgement judgement, judge_.judge(graph, device, options, verdict.key, *found));
    verdict.decision = judgement.decision;
    verdict.reasons = std::move(judgement.reasons);
    if (judgement.decision != Decision::supported) return verdict;
    verdict.plan_names = judgement.judged->plan_names;
    verdict.rewrites = judgement.judged->rewrites();
    if (options.strength == Strength::judged && options.workspace_limit < 0) return verdict;
    // A workspace limit can be held against the exact size only once a plan is built.
    auto built = build(*judgement.judged, {graph, device, options, *found}, std::nullopt, {});
    if (!built.ok()) {
      if (built.error().kind != ErrorKind::unsupported) return std::move(built).error();
      verdict.decision = Decision::unsupported;
      verdict.reasons = built.error().reasons;
      return verdict;
    }
    verdict.strength = Strength::built;
    verdict.plan_name = built->name;
    verdict.plan_id = make_plan_id(verdict.key, built->name, verdict.rewrites);
    verdict.workspace_bytes = built->workspace;
    verdict.choice = built->basis;
    if (is_turned(built->name)) verdict.rewrites.emplace_back("turned");
    return verdict;
  }

  Result<std::vector<Candidate>> candidates(const ir::Graph& graph, const Device& device,
                                            const Options& options) override {
    LAWSON_TRY(const Libraries* found, libraries());
    const std::string key = make_key(graph, device, name(), found->cudnn.version, options);
    const diag::About about{subject_of(name(), graph, device, key)};
    LAWSON_TRY(const auto judged, judge_.accepted(graph, device, options, key, *found));
    return cudnn::candidates(*judged, {graph, device, options, *found});
  }

  Result<Plan> compile(const ir::Graph& graph, const Device& device, const Options& options,
                       const std::optional<Candidate>& candidate, std::stop_token stop) override {
    LAWSON_TRY(const Libraries* found, libraries());
    LAWSON_CHECK(refuse_barred(graph, device, *found));
    Plan plan;
    plan.key = make_key(graph, device, name(), found->cudnn.version, options);
    const diag::About about{subject_of(name(), graph, device, plan.key)};
    LAWSON_TRY(const auto judged, judge_.accepted(graph, device, options, plan.key, *found));
    LAWSON_TRY(Built built, build(*judged, {graph, device, options, *found}, candidate, stop));
    plan.plan_id = make_plan_id(plan.key, built.name, judged->rewrites());
    plan.engine = name();
    plan.engine_version = found->cudnn.version;
    plan.target = device.name;
    plan.device_fingerprint = fingerprint(device);
    plan.plan_name = built.name;
    plan.workspace_bytes = built.workspace;
    plan.choice = built.basis;
    plan.graph_json = plan_graph_json(graph);
    PlanHeader header;
    header.cudnn_version = found->cudnn_version;
    header.compute_capability = device.compute_capability;
    header.key = plan.key;
    plan.bytes = pack_plan(header, built.bytes);
    return plan;
  }

  Result<std::shared_ptr<Loaded>> load(const Plan& plan, const Device& device) override {
    LAWSON_TRY(const Libraries* found, libraries());
    LAWSON_TRY(UnpackedPlan unpacked, unpack_plan(plan.bytes));
    LAWSON_CHECK(check_header(unpacked.header, plan, device, *found));
    if (unpacked.bytes.workspace < 0 || whole_workspace(unpacked.bytes) != plan.workspace_bytes) {
      return error(ErrorKind::io,
                   "the cuDNN plan is damaged: its parts need a workspace of {} bytes, and it says "
                   "{}; compile it again",
                   whole_workspace(unpacked.bytes), plan.workspace_bytes);
    }
    LAWSON_TRY(const Json document, parse_json(plan.graph_json, "the plan's graph"));
    LAWSON_TRY(const ir::Graph graph, ir::graph_from_json(document, "the plan's graph"));
    // The plan may be older than what is known of the defect.
    LAWSON_CHECK(refuse_barred(graph, device, *found));
    LAWSON_TRY(Handle handle, handle_for(device));
    std::unique_ptr<Executable> executable;
    if (!unpacked.bytes.data.empty()) {
      if (const Failure failure =
              Executable::load(unpacked.bytes.data, handle.get(), device, executable)) {
        return to_error(*failure, classify(*failure, !device.present()), device);
      }
    }
    const Supplies& supplies = unpacked.bytes.supplies;
    if (device.present() && !(supplies.before.empty() && supplies.after.empty())) {
      LAWSON_TRY(const Driver* driver, driver_on(device));
      LAWSON_CHECK(prepare_steps(device.ordinal, *driver));
    }
    LAWSON_TRY(auto loaded, LoadedPlan::make(plan, graph, unpacked.bytes, std::move(executable),
                                             device.ordinal));
    return std::shared_ptr<Loaded>{std::move(loaded)};
  }

  Status execute(const Loaded& loaded, std::span<const Binding> bindings, void* workspace,
                 void* stream) override {
    LAWSON_TRY(const LoadedPlan* plan, executable(loaded, workspace));
    LAWSON_TRY(const Driver* driver, Driver::open());
    LAWSON_CHECK(driver->make_current(plan->ordinal()));
    auto handle = idle_handle(plan->ordinal());
    if (!handle) {
      LAWSON_TRY(const bool capturing, driver->is_capturing(stream));
      if (capturing) {
        return invalid(
            "the stream is being captured, and every cuDNN handle of the device is in use: a new "
            "one allocates; before, run as many executions at once as are captured at once");
      }
      LAWSON_TRY(handle, borrow_handle(plan->ordinal()));
    }
    Status status;
    if (const Failure failure =
            plan->run(bindings, workspace, stream, *driver, handle->get(), status)) {
      Device device;
      device.name = loaded.plan().target;
      return to_error(*failure, classify(*failure, false), device);
    }
    return status;
  }

  Status prepare_graph(const Loaded& loaded, GraphUse use, std::span<const Binding> bindings,
                       void* workspace, void* graph) override {
    LAWSON_TRY(const LoadedPlan* plan, executable(loaded, workspace));
    LAWSON_TRY(const Driver* driver, Driver::open());
    LAWSON_CHECK(driver->make_current(plan->ordinal()));
    LAWSON_TRY(const Handle handle, borrow_handle(plan->ordinal()));
    Status status;
    if (const Failure failure =
            plan->prepare_graph(use, bindings, workspace, graph, handle.get(), status)) {
      Device device;
      device.name = loaded.plan().target;
      return to_error(*failure, classify(*failure, false), device);
    }
    return status;
  }

  Result<std::vector<double>> measure(const Loaded& loaded,
                                      std::span<const std::vector<Binding>> sets, void* workspace,
                                      int executions, int rounds) override {
    LAWSON_TRY(const LoadedPlan* plan, executable(loaded, workspace));
    LAWSON_TRY(const Driver* driver, Driver::open());
    LAWSON_CHECK(driver->make_current(plan->ordinal()));
    LAWSON_TRY(const Handle handle, borrow_handle(plan->ordinal()));
    return cudnn::measure(*plan, sets, workspace, executions, rounds, *driver, handle.get());
  }

  Result<bool> capturing(const Device& device, void* stream) override {
    LAWSON_TRY(const Driver* driver, driver_on(device));
    return driver->is_capturing(stream);
  }

  Arithmetic arithmetic(const ir::Graph& graph) const override {
    Arithmetic result;
    result.accumulate_roundoff = 0x1p-23;  // f32, and tensor cores truncate instead of rounding
    result.function_roundoff = 0x1p-18;    // ex2.approx, lg2.approx, rcp.approx and friends
    const auto facts = attention_facts(graph);
    if (facts) {
      result.own_dropout = true;
      result.probability_roundoff = unit_roundoff(facts->dtype);
      result.partial_roundoff = unit_roundoff(facts->dtype);
      if (facts->dtype == DType::f32) result.operand_roundoff = 0x1p-11;  // TF32
      if (facts->rule->softcap > 0) result.function_roundoff = 0x1p-10;   // tanh.approx
      return result;
    }
    for (const ir::Node& node : graph.nodes) {
      if (std::holds_alternative<ir::Matmul>(node.op)) {
        for (const ir::TensorId id : node.inputs) {
          // TF32; what is computed inside of a fusion is cut off, not rounded.
          if (graph.tensor(id).dtype == DType::f32) {
            result.operand_roundoff =
                std::max(result.operand_roundoff, graph.is_input(id) ? 0x1p-11 : 0x1p-10);
          }
        }
      }
      if (const auto* unary = std::get_if<ir::Unary>(&node.op); unary && uses_tanh(unary->kind)) {
        result.function_roundoff = 0x1p-10;
      }
      if (const auto* grad = std::get_if<ir::UnaryGrad>(&node.op); grad && uses_tanh(grad->kind)) {
        result.function_roundoff = 0x1p-10;
      }
    }
    return result;
  }

  Result<std::vector<Device>> live_devices() override { return cudnn::live_devices(); }
  std::vector<Device> known_targets() const override { return cudnn::known_targets(); }
  Json info() override { return library_report(); }

  Result<void*> allocate(const Device& device, std::size_t bytes) override {
    LAWSON_TRY(const Driver* driver, driver_on(device));
    return driver->allocate(bytes);
  }
  Status release(const Device& device, void* data) override {
    LAWSON_TRY(const Driver* driver, driver_on(device));
    return driver->release(data);
  }
  Status copy_to_device(const Device& device, void* to, const void* from,
                        std::size_t bytes) override {
    LAWSON_TRY(const Driver* driver, driver_on(device));
    return driver->copy_to_device(to, from, bytes);
  }
  Status copy_to_host(const Device& device, void* to, const void* from,
                      std::size_t bytes) override {
    LAWSON_TRY(const Driver* driver, driver_on(device));
    return driver->copy_to_host(to, from, bytes);
  }
  Status synchronize(const Device& device, void* stream) override {
    LAWSON_TRY(const Driver* driver, driver_on(device));
    return driver->synchronize(stream);
  }

 private:
  static bool uses_tanh(ir::UnaryKind kind) {
    using ir::UnaryKind;
    return kind == UnaryKind::tanh || kind == UnaryKind::gelu_tanh || kind == UnaryKind::sigmoid ||
           kind == UnaryKind::silu || kind == UnaryKind::gelu || kind == UnaryKind::erf ||
           kind == UnaryKind::tan || kind == UnaryKind::softplus;
  }

  Verdict blank_verdict(const ir::Graph& graph, const Device& device, const Options& options,
                        const Libraries& found) const {
    Verdict verdict;
    verdict.evidence = device.present() ? Evidence::live : device.evidence;
    verdict.engine = name();
    verdict.key = make_key(graph, device, name(), found.cudnn.version, options);
    verdict.target = device.name;
    verdict.engine_version = found.cudnn.version;
    return verdict;
  }

  // A plan of this engine's that can be executed.
  static Result<const LoadedPlan*> executable(const Loaded& loaded, const void* workspace) {
    const auto* plan = dynamic_cast<const LoadedPlan*>(&loaded);
    if (plan == nullptr) return invalid("the plan was loaded by engine '{}'", loaded.plan().engine);
    if (plan->ordinal() < 0) {
      return error(ErrorKind::unavailable,
                   "the plan for '{}' was loaded without a device: it can be checked, not executed",
                   loaded.plan().target);
    }
    if (workspace == nullptr && loaded.plan().workspace_bytes > 0) {
      return invalid("workspace is null; the plan needs {} bytes", loaded.plan().workspace_bytes);
    }
    return plan;
  }

  static Status refuse_barred(const ir::Graph& graph, const Device& device,
                              const Libraries& found) {
    const auto defect = known_defect(graph, device, found.cudnn_version);
    if (!defect || !defect->barred) return {};
    return unsupported("known_defect", fmt::format("{} ({})", defect->message, defect->source),
                       defect->field);
  }

  static Status check_header(const PlanHeader& header, const Plan& plan, const Device& device,
                             const Libraries& found) {
    if (header.key != plan.key) {
      return error(ErrorKind::io, "the plan's bytes belong to another plan (key {}, not {})",
                   header.key, plan.key);
    }
    if (header.cudnn_version != found.cudnn_version) {
      return error(ErrorKind::unavailable,
                   "the plan was compiled with cuDNN {}; loaded is {} ({}): compile it again",
                   version_text(header.cudnn_version), found.cudnn.version, found.cudnn.path);
    }
    if (header.compute_capability != device.compute_capability) {
      return error(ErrorKind::invalid_argument,
                   "the plan is for '{}' (compute capability {}); device '{}' has {}", plan.target,
                   compute_capability_text(header.compute_capability), device.name,
                   compute_capability_text(device.compute_capability));
    }
    return {};
  }

  Judge judge_;
};

}  // namespace cudnn

// Never destroyed: judged graphs would outlive the CUDA context at the end of the process, and
// cuDNN must not be asked to free them then.
std::shared_ptr<Engine> make_cudnn_engine() {
  return {new cudnn::CudnnEngine, [](Engine*) {}};
}

}  // namespace lawson
