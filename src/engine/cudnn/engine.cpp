#include "engine/cudnn/engine.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <list>
#include <map>
#include <mutex>

#include "engine/cudnn/defects.h"
#include "engine/cudnn/devices.h"
#include "engine/cudnn/driver.h"
#include "engine/cudnn/facts.h"
#include "engine/cudnn/handles.h"
#include "engine/cudnn/loaded_plan.h"
#include "engine/cudnn/loader.h"
#include "engine/cudnn/lowering.h"
#include "engine/cudnn/measure.h"
#include "engine/cudnn/native.h"
#include "engine/cudnn/plan_bytes.h"
#include "engine/cudnn/reasons.h"
#include "ir/json.h"

namespace lawson {
namespace cudnn {
namespace {

constexpr std::size_t kJudgedCapacity = 64;
// The name of the only plan of a graph whose results have no elements.
constexpr const char* kNothing = "nothing_to_do";

// A graph that cuDNN accepted: what is compiled is the very object that was judged.
struct Judged {
  std::mutex mutex;
  std::unique_ptr<Lowered> lowered;     // null: there is nothing to do
  std::vector<std::string> plan_names;  // as the heuristics listed them

  std::vector<std::string> rewrites() const {
    return lowered ? lowered->rewrites() : std::vector<std::string>{};
  }
};

// What judging came to: the graph, or a verdict against it.
struct Judgement {
  std::shared_ptr<Judged> judged;
  Decision decision = Decision::supported;
  std::vector<Reason> reasons;
};

// The graphs judged last, by key.
class JudgedGraphs {
 public:
  std::shared_ptr<Judged> find(const std::string& key) {
    const std::lock_guard lock{mutex_};
    for (auto it = entries_.begin(); it != entries_.end(); ++it) {
      if (it->first != key) continue;
      entries_.splice(entries_.begin(), entries_, it);
      return it->second;
    }
    return nullptr;
  }

  void remember(const std::string& key, std::shared_ptr<Judged> judged) {
    const std::lock_guard lock{mutex_};
    entries_.emplace_front(key, std::move(judged));
    if (entries_.size() > kJudgedCapacity) entries_.pop_back();
  }

 private:
  std::mutex mutex_;
  std::list<std::pair<std::string, std::shared_ptr<Judged>>> entries_;
};

struct Built {
  std::string name;
  PlanBytes bytes;
  std::int64_t workspace = 0;  // everything
};

// A matmul of 16 x 16 x 16, for control plans and for priming.
Result<ir::Graph> small_matmul(DType dtype) {
  ir::Builder builder{"small_matmul"};
  ir::Tensor a;
  a.name = "a";
  a.dtype = dtype;
  a.shape = {1, 16, 16};
  ir::Tensor b = a;
  b.name = "b";
  LAWSON_TRY(const ir::TensorId left, builder.input(a));
  LAWSON_TRY(const ir::TensorId right, builder.input(b));
  LAWSON_TRY(const ir::TensorId product, builder.add1(ir::Matmul{}, {left, right}));
  LAWSON_TRY(const ir::TensorId result,
             builder.add1(ir::Unary{ir::UnaryKind::relu, 0}, {product}, std::nullopt, "c"));
  LAWSON_CHECK(builder.output(result));
  return std::move(builder).finish();
}

}  // namespace

class CudnnEngine : public Engine {
 public:
  std::string_view name() const override { return "cudnn"; }
  bool accepts(const Device& device) const override { return device.kind == Device::Kind::cuda; }

  Result<Verdict> probe(const ir::Graph& graph, const Device& device,
                        const Options& options) override {
    LAWSON_TRY(const Libraries* found, libraries());
    Verdict verdict = blank_verdict(graph, device, options, *found);
    if (const auto defect = known_defect(graph, device, found->cudnn_version)) {
      verdict.defect = fmt::format("{}: {} ({})", defect->id, defect->message, defect->source);
      if (defect->barred) {
        verdict.reasons.push_back({"known_defect",
                                   fmt::format("{} ({})", defect->message, defect->source),
                                   defect->field});
        return verdict;
      }
    }
    LAWSON_TRY(Judgement judgement, judge(graph, device, options, verdict.key, *found));
    verdict.decision = judgement.decision;
    verdict.reasons = std::move(judgement.reasons);
    if (judgement.decision != Decision::supported) return verdict;
    verdict.plan_names = judgement.judged->plan_names;
    verdict.rewrites = judgement.judged->rewrites();
    if (options.strength == Strength::judged && options.workspace_limit < 0) return verdict;
    // A workspace limit can be held against the exact size only once a plan is built.
    auto built = build(*judgement.judged, graph, device, options, std::nullopt, {}, *found);
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
    return verdict;
  }

  Result<std::vector<Candidate>> candidates(const ir::Graph& graph, const Device& device,
                                            const Options& options) override {
    LAWSON_TRY(const Libraries* found, libraries());
    LAWSON_TRY(const auto judged, accepted(graph, device, options, *found));
    std::vector<Candidate> list;
    for (const std::string& plan : judged->plan_names) list.push_back({plan});
    return list;
  }

  Result<Plan> compile(const ir::Graph& graph, const Device& device, const Options& options,
                       const std::optional<Candidate>& candidate, std::stop_token stop) override {
    LAWSON_TRY(const Libraries* found, libraries());
    LAWSON_CHECK(refuse_barred(graph, device, *found));
    LAWSON_TRY(const auto judged, accepted(graph, device, options, *found));
    LAWSON_TRY(Built built, build(*judged, graph, device, options, candidate, stop, *found));
    Plan plan;
    plan.key = make_key(graph, device, name(), found->cudnn.version, options);
    plan.plan_id = make_plan_id(plan.key, built.name, judged->rewrites());
    plan.engine = name();
    plan.engine_version = found->cudnn.version;
    plan.target = device.name;
    plan.device_fingerprint = fingerprint(device);
    plan.plan_name = built.name;
    plan.workspace_bytes = built.workspace;
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
          if (graph.tensor(id).dtype == DType::f32) result.operand_roundoff = 0x1p-11;
        }
      }
      if (const auto* unary = std::get_if<ir::Unary>(&node.op); unary && uses_tanh(unary->kind)) {
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

  static Result<const Driver*> driver_on(const Device& device) {
    if (!device.present() || device.kind != Device::Kind::cuda) {
      return error(ErrorKind::unavailable, "device '{}' is not on this machine", device.name);
    }
    LAWSON_TRY(const Driver* driver, Driver::open());
    LAWSON_CHECK(driver->make_current(device.ordinal));
    return driver;
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

  // A handle on a live device, or none for a target.
  static Result<Handle> handle_for(const Device& device) {
    if (!device.present()) return Handle{};
    LAWSON_CHECK(driver_on(device));
    return borrow_handle(device.ordinal);
  }

  // What the graph can be judged with: the right kind of process, and cuBLASLt for products (cuDNN
  // aborts the process when its engine 0 cannot load it).
  Status prepare(const ir::Graph& graph, const Device& device) {
    if (device.present() == is_deviceless()) {
      return error(ErrorKind::unavailable, "device '{}' {}", device.name,
                   device.present() ? "is a live one, and this process is a worker without devices"
                                    : "is not on this machine: a worker process judges for it");
    }
    if (has_matmul(graph)) LAWSON_CHECK(need_cublaslt());
    if (!device.present()) prime();
    return {};
  }

  // Asked about f32 products for a GPU without TF32 first, cuDNN 9.19 would say for the rest of the
  // process that no target takes them. So the first question is about a GPU that has it.
  void prime() {
    std::call_once(primed_, [] {
      for (const Device& target : cudnn::known_targets()) {
        if (target.compute_capability != 900) continue;
        const auto graph = small_matmul(DType::f32);
        if (!graph.ok() || !need_cublaslt().ok()) return;
        auto lowered = Lowered::lower(*graph, target);
        if (lowered.ok()) static_cast<void>((*lowered)->judge(nullptr));
        return;
      }
    });
  }

  Result<Judgement> judge(const ir::Graph& graph, const Device& device, const Options& options,
                          const std::string& key, const Libraries& found) {
    LAWSON_CHECK(prepare(graph, device));
    if (auto judged = judged_.find(key)) return Judgement{std::move(judged), {}, {}};
    Judgement judgement;
    auto refuse = [&](std::vector<Reason> reasons) {
      judgement.decision = Decision::unsupported;
      judgement.reasons = std::move(reasons);
      if (const auto reason = unknown_to_nvrtc(device, found)) {
        judgement.reasons.push_back(*reason);
      }
      return judgement;
    };
    if (computes_nothing(graph)) {
      judgement.judged = std::make_shared<Judged>();
      judgement.judged->plan_names = {kNothing};
      judged_.remember(key, judgement.judged);
      return judgement;
    }
    for (ir::TensorId id = 0; id < graph.input_count + graph.output_count; ++id) {
      const ir::Tensor& tensor = graph.tensor(id);
      if (element_count(tensor.shape).value_or(0) == 0) {
        return refuse({{"empty_tensor",
                        fmt::format("{} has shape {}: there is nothing to compute", tensor.name,
                                    to_string(tensor.shape)),
                        tensor.name}});
      }
    }
    const auto facts = attention_facts(graph);
    std::unique_ptr<Lowered> lowered;
    if (!facts) {
      LAWSON_TRY(auto attempt, attempt_fusion(graph, device, options, found));
      if (attempt.judgement) return refuse_or_return(std::move(*attempt.judgement), refuse);
      lowered = std::move(attempt.lowered);
    } else {
      // The first variant's reasons are those of the graph as it was written.
      std::optional<Judgement> refusal;
      const Repairs repairs = repairs_for(graph, device, found.cudnn_version);
      for (const Variant variant : kVariants) {
        const RewriteOptions rewrite{variant, repairs, options.deterministic,
                                     needs_dense_stats(device)};
        LAWSON_TRY(auto attempt, attempt_attention(graph, *facts, rewrite, device, options, found));
        if (attempt.judgement && !refusal) refusal = std::move(*attempt.judgement);
        lowered = std::move(attempt.lowered);
        if (lowered) break;
      }
      if (!lowered) return refuse_or_return(std::move(*refusal), refuse);
    }
    LAWSON_CHECK(check_one_cudnn());  // sublibraries are loaded by now
    if (!nvrtc_knows(device, found)) return refuse({});
    judgement.judged = std::make_shared<Judged>();
    judgement.judged->lowered = std::move(lowered);
    judgement.judged->plan_names = judgement.judged->lowered->plan_names();
    judged_.remember(key, judgement.judged);
    return judgement;
  }

  // A graph that cuDNN took, or what it said against it; neither: nothing to try.
  struct Attempt {
    std::unique_ptr<Lowered> lowered;
    std::optional<Judgement> judgement;
  };

  static Attempt against(std::vector<Reason> reasons, Decision decision = Decision::unsupported) {
    return {nullptr, Judgement{nullptr, decision, std::move(reasons)}};
  }

  template <typename Refuse>
  static Judgement refuse_or_return(Judgement judgement, const Refuse& refuse) {
    if (judgement.decision == Decision::undecided) return judgement;
    return refuse(std::move(judgement.reasons));
  }

  Result<Attempt> attempt_fusion(const ir::Graph& graph, const Device& device,
                                 const Options& options, const Libraries& found) {
    auto lowered = Lowered::lower(graph, device);
    if (!lowered.ok()) {
      if (lowered.error().kind != ErrorKind::unsupported) return std::move(lowered).error();
      return against(lowered.error().reasons);
    }
    return ask(std::move(lowered).value(), graph, device, options, found);
  }

  Result<Attempt> attempt_attention(const ir::Graph& graph, const AttentionFacts& facts,
                                    const RewriteOptions& rewrite, const Device& device,
                                    const Options& options, const Libraries& found) {
    auto native = rewrite_attention(graph, facts, rewrite);
    if (!native.ok()) {
      if (native.error().kind != ErrorKind::unsupported) return std::move(native).error();
      return against(native.error().reasons);
    }
    if (!*native) return Attempt{};
    const Supplies& supplies = (*native)->supplies;
    if (!steps_are_built() && !(supplies.before.empty() && supplies.after.empty())) {
      return against({{"no_kernels",
                       fmt::format("it needs Lawson's own kernels ({}), and this build has none "
                                   "(LAWSON_CUDA_KERNELS)",
                                   fmt::join((*native)->rewrites, ", ")),
                       ""}});
    }
    auto lowered = Lowered::lower(graph, std::move(**native), device);
    if (!lowered.ok()) {
      if (lowered.error().kind != ErrorKind::unsupported) return std::move(lowered).error();
      return against(lowered.error().reasons);
    }
    return ask(std::move(lowered).value(), graph, device, options, found);
  }

  Result<Attempt> ask(std::unique_ptr<Lowered> lowered, const ir::Graph& graph,
                      const Device& device, const Options& options, const Libraries& found) {
    if (options.workspace_limit >= 0) lowered->limit_workspace(options.workspace_limit);
    LAWSON_TRY(Handle handle, handle_for(device));
    const Failure failure = lowered->judge(handle.get());
    if (!failure) return Attempt{std::move(lowered), std::nullopt};
    const Fault fault = classify(*failure, !device.present());
    if (fault == Fault::unsupported ||
        (fault == Fault::undecided && (!nvrtc_knows(device, found) || attention_facts(graph)))) {
      return against(explain(*failure, graph, device, found.cudnn_version));
    }
    if (fault != Fault::undecided) return to_error(*failure, fault, device);
    return against(explain_undecided(*failure, graph, device), Decision::undecided);
  }

  // cudnn-frontend 1.32 on 8.x and 12.x: "Packed/ragged LSE is not supported for bprop thd".
  static bool needs_dense_stats(const Device& device) {
    return device.compute_capability / 100 == 8 || device.compute_capability / 100 == 12;
  }

  // Every result is empty: a batch of 0, no queries.
  static bool computes_nothing(const ir::Graph& graph) {
    for (std::int32_t i = 0; i < graph.output_count; ++i) {
      const ir::Tensor& tensor = graph.tensor(graph.input_count + i);
      if (element_count(tensor.shape).value_or(1) != 0) return false;
    }
    return true;
  }

  static bool nvrtc_knows(const Device& device, const Libraries& found) {
    return device.compute_capability / 10 >= found.nvrtc_archs.front();
  }

  static std::optional<Reason> unknown_to_nvrtc(const Device& device, const Libraries& found) {
    if (nvrtc_knows(device, found)) return std::nullopt;
    return Reason{
        "cuda_version",
        fmt::format("CUDA {} compiles for compute capability {} and newer; {} has {}",
                    found.nvrtc.version, compute_capability_text(found.nvrtc_archs.front() * 10),
                    device.name, compute_capability_text(device.compute_capability)),
        "target"};
  }

  // The judged graph, or "unsupported" with the reasons.
  Result<std::shared_ptr<Judged>> accepted(const ir::Graph& graph, const Device& device,
                                           const Options& options, const Libraries& found) {
    const std::string key = make_key(graph, device, name(), found.cudnn.version, options);
    LAWSON_TRY(Judgement judgement, judge(graph, device, options, key, found));
    if (judgement.decision == Decision::supported) return judgement.judged;
    if (judgement.decision == Decision::undecided) {
      return error(ErrorKind::unavailable, "{}", judgement.reasons.front().message);
    }
    Error refusal = error(ErrorKind::unsupported, "{}", judgement.reasons.front().message);
    refusal.reasons = std::move(judgement.reasons);
    return refusal;
  }

  // The named plan, or the first of the heuristics that compiles within the limit.
  Result<Built> build(Judged& judged, const ir::Graph& graph, const Device& device,
                      const Options& options, const std::optional<Candidate>& candidate,
                      const std::stop_token& stop, const Libraries& found) {
    if (!judged.lowered) return Built{kNothing, {}, 0};
    const std::lock_guard lock{judged.mutex};
    if (device.present()) LAWSON_CHECK(driver_on(device));
    std::vector<std::size_t> order;
    if (candidate) {
      std::size_t index = 0;
      if (const Failure failure = judged.lowered->find_plan(candidate->name, index)) {
        return refusal_or_error(*failure, graph, device, found);
      }
      order.push_back(index);
    } else {
      for (std::size_t i = 0; i < judged.plan_names.size(); ++i) order.push_back(i);
    }
    std::vector<Reason> reasons;
    std::optional<StageError> not_compiled;
    for (const std::size_t index : order) {
      if (stop.stop_requested()) return error(ErrorKind::cancelled, "compiling was cancelled");
      if (const Failure failure = judged.lowered->build(index)) {
        const Fault fault = classify(*failure, !device.present());
        if (fault == Fault::compile_failed) {
          not_compiled = *failure;
        } else if (fault != Fault::unsupported) {
          return to_error(*failure, fault, device);
        }
        // Passed over for its workspace before it was built: said by check_support already.
        if (failure->text.find("Deselecting") != std::string::npos) continue;
        for (Reason& reason : explain(*failure, graph, device, found.cudnn_version)) {
          if (std::find(reasons.begin(), reasons.end(), reason) == reasons.end()) {
            reasons.push_back(std::move(reason));
          }
        }
        continue;
      }
      Built built;
      built.name = judged.lowered->built_name();
      if (const Failure failure = judged.lowered->serialize(built.bytes)) {
        return to_error(*failure, classify(*failure, !device.present()), device);
      }
      built.workspace = whole_workspace(built.bytes);
      if (options.workspace_limit >= 0 && built.workspace > options.workspace_limit) {
        reasons.push_back({"workspace",
                           fmt::format("plan {} needs a workspace of {} bytes; {} are allowed",
                                       built.name, built.workspace, options.workspace_limit),
                           "workspace_limit"});
        continue;
      }
      return built;
    }
    if (not_compiled && !control_plan_builds(device)) {
      return to_error(*not_compiled, Fault::compile_failed, device);
    }
    Error refusal = error(ErrorKind::unsupported, "{}",
                          reasons.empty() ? "no plan was built" : reasons.front().message);
    refusal.reasons = std::move(reasons);
    return refusal;
  }

  static Error refusal_or_error(const StageError& failure, const ir::Graph& graph,
                                const Device& device, const Libraries& found) {
    const Fault fault = classify(failure, !device.present());
    if (fault != Fault::unsupported && fault != Fault::undecided) {
      return to_error(failure, fault, device);
    }
    Error refusal = error(ErrorKind::unsupported, "{}", failure.text);
    refusal.reasons = explain(failure, graph, device, found.cudnn_version);
    return refusal;
  }

  // Does anything compile for this device? Tells a graph whose kernel does not compile from an
  // NVRTC that does not work.
  bool control_plan_builds(const Device& device) {
    const std::lock_guard lock{control_mutex_};
    const auto known = controls_.find(device.compute_capability);
    if (known != controls_.end()) return known->second;
    const auto graph = small_matmul(DType::f16);
    bool builds = false;
    if (graph.ok()) {
      auto lowered = Lowered::lower(*graph, device);
      auto handle = handle_for(device);
      if (lowered.ok() && handle.ok() && !(*lowered)->judge(handle->get())) {
        const std::size_t count = (*lowered)->plan_names().size();
        for (std::size_t i = 0; i < count && !builds; ++i) builds = !(*lowered)->build(i);
      }
    }
    controls_[device.compute_capability] = builds;
    return builds;
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

  JudgedGraphs judged_;
  std::once_flag primed_;
  std::mutex control_mutex_;
  std::map<int, bool> controls_;  // by compute capability
};

}  // namespace cudnn

// Never destroyed: judged graphs would outlive the CUDA context at the end of the process, and
// cuDNN must not be asked to free them then.
std::shared_ptr<Engine> make_cudnn_engine() {
  return {new cudnn::CudnnEngine, [](Engine*) {}};
}

}  // namespace lawson
