// The one translation unit that includes cudnn_frontend.h (about a minute and 2 GB to compile).
#include "engine/cudnn/lowering.h"

#include <dlfcn.h>
#include <malloc.h>

#include "base/lazy.h"
#include "diag/diag.h"
#include "engine/cudnn/loader.h"
#include "engine/cudnn/occupancy.h"

// The frontend opens libcuda and libcudart by name; the CUDA runtime must come from cuDNN's places.
#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define dlopen(name, flags) ::lawson::cudnn::open_for_frontend(name, flags)
#include <cudnn_frontend.h>
#undef dlopen

#include <map>
#include <mutex>
#include <regex>

#include "engine/cudnn/lowering_attention.h"
#include "engine/cudnn/lowering_fusion.h"

namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;
}

namespace lawson::cudnn {
namespace {

std::string name_of(fe::error_code_t code) {
  switch (code) {
    case fe::error_code_t::OK:
      return "OK";
    case fe::error_code_t::ATTRIBUTE_NOT_SET:
      return "ATTRIBUTE_NOT_SET";
    case fe::error_code_t::SHAPE_DEDUCTION_FAILED:
      return "SHAPE_DEDUCTION_FAILED";
    case fe::error_code_t::INVALID_TENSOR_NAME:
      return "INVALID_TENSOR_NAME";
    case fe::error_code_t::INVALID_VARIANT_PACK:
      return "INVALID_VARIANT_PACK";
    case fe::error_code_t::GRAPH_NOT_SUPPORTED:
      return "GRAPH_NOT_SUPPORTED";
    case fe::error_code_t::GRAPH_EXECUTION_PLAN_CREATION_FAILED:
      return "GRAPH_EXECUTION_PLAN_CREATION_FAILED";
    case fe::error_code_t::GRAPH_EXECUTION_FAILED:
      return "GRAPH_EXECUTION_FAILED";
    case fe::error_code_t::HEURISTIC_QUERY_FAILED:
      return "HEURISTIC_QUERY_FAILED";
    case fe::error_code_t::UNSUPPORTED_GRAPH_FORMAT:
      return "UNSUPPORTED_GRAPH_FORMAT";
    case fe::error_code_t::CUDA_API_FAILED:
      return "CUDA_API_FAILED";
    case fe::error_code_t::CUDNN_BACKEND_API_FAILED:
      return "CUDNN_BACKEND_API_FAILED";
    case fe::error_code_t::INVALID_CUDA_DEVICE:
      return "INVALID_CUDA_DEVICE";
    case fe::error_code_t::HANDLE_ERROR:
      return "HANDLE_ERROR";
    case fe::error_code_t::INVALID_VALUE:
      return "INVALID_VALUE";
    case fe::error_code_t::NVRTC_COMPILATION_FAILED:
      return "NVRTC_COMPILATION_FAILED";
  }
  return "UNKNOWN";
}

// The frontend both returns and throws: every call goes through here.
template <typename Call>
Failure guarded(const char* stage, const Call& call) {
  try {
    fe::error_t status = call();
    if (status.is_good()) return std::nullopt;
    return StageError{stage, name_of(status.get_code()), status.get_message()};
  } catch (fe::cudnnException& exception) {
    const char* status = fe::detail::get_error_string(exception.getCudnnStatus());
    return StageError{stage, "CUDNN_BACKEND_API_FAILED",
                      fmt::format("{} code: {}", exception.what(), status)};
  } catch (const std::bad_alloc&) {
    return StageError{stage, "BAD_ALLOC", "out of host memory"};
  } catch (const std::exception& exception) {
    return StageError{stage, "EXCEPTION", exception.what()};
  } catch (...) {
    return StageError{stage, "EXCEPTION", "an exception of an unknown type"};
  }
}

// The same for what diagnostics call a stage.
template <typename Call>
Failure timed(diag::Stage stage, const char* name, const Call& call) {
  const diag::Span span{stage};
  return guarded(name, call);
}

fe::error_t no_error() {
  return {fe::error_code_t::OK, ""};
}

fe::error_t from_status(cudnnStatus_t status, const char* call) {
  if (status == CUDNN_STATUS_SUCCESS) return no_error();
  return {fe::error_code_t::CUDNN_BACKEND_API_FAILED,
          fmt::format("{} failed with code: {}", call, fe::detail::get_error_string(status))};
}

// Hands the frontend the cuDNN that the loader found.
Status prepare_frontend() {
  LAWSON_TRY(const Libraries* found, libraries());
  static Lazy<bool> once;
  once.get([&] {
    cudnn_frontend::cudnn_dlhandle = found->cudnn.handle;
    return true;
  });
  return {};
}

using Properties = std::shared_ptr<const fe::DeviceProperties>;

// Of a device that is not here.
struct Target {
  Properties properties;
  bool has_occupancy = false;
};

Failure target_of(const Device& device, Target& target) {
  static std::mutex mutex;
  static Lazy<std::map<std::string, Target>> targets;  // by JSON text; as many as there are
  std::map<std::string, Target>& known = targets.get();
  const std::string text = device.properties.dump();
  const std::string id = text + device.occupancy.dump();
  const std::lock_guard lock{mutex};
  if (const auto found = known.find(id); found != known.end()) {
    target = found->second;
    return std::nullopt;
  }
  auto occupancy = occupancy_of(device);
  if (!occupancy.ok()) {
    return StageError{"device_properties", "EXCEPTION", occupancy.error().message};
  }
  auto fresh = std::make_shared<fe::DeviceProperties>();
  const std::vector<std::uint8_t> bytes(text.begin(), text.end());
  if (Failure failure = guarded("device_properties", [&] { return fresh->deserialize(bytes); })) {
    return failure;
  }
  target.has_occupancy = false;
  if (*occupancy) {
    // cuDNN's descriptors are objects of malloc's, which knows their size.
    auto* const object = static_cast<std::byte*>(fresh->get_ptr());
    target.has_occupancy =
        write_occupancy({object, malloc_usable_size(object)}, device.properties, **occupancy);
  }
  target.properties = std::move(fresh);
  known.emplace(id, target);
  return std::nullopt;
}

cudnnHandle_t as_handle(void* handle) {
  return static_cast<cudnnHandle_t>(handle);
}

}  // namespace

struct KernelFamily {
  std::mutex mutex;  // cuDNN's cache has none of its own
  std::shared_ptr<fe::KernelCache> cache = std::make_shared<fe::KernelCache>();
};

std::shared_ptr<KernelFamily> make_kernel_family() {
  return std::make_shared<KernelFamily>();
}

struct Lowered::Impl {
  explicit Impl(const ir::Graph& source) : graph{source} {}

  const ir::Graph graph;  // lowered parts refer to it
  std::optional<NativeAttention> native;
  Properties properties;
  bool has_occupancy = true;
  std::shared_ptr<FrontendGraph> frontend = std::make_shared<FrontendGraph>();
  std::shared_ptr<KernelFamily> family;          // null: plans for the graph's own shapes
  std::unique_ptr<AttentionLowering> attention;  // its score modifiers are called while building
  Supplies supplies;
  std::vector<std::string> rewrites;
  std::optional<std::int64_t> workspace_limit;
  std::vector<std::string> plan_names;  // by index
  std::optional<std::int64_t> built;

  void configure(const Device& device) {
    // Both must be known before nodes are added.
    if (properties) frontend->set_device_properties(properties);
    frontend->set_sm_version(device.compute_capability / 10);
    if (family) {
      frontend->set_dynamic_shape_enabled(true);
      frontend->set_kernel_cache(family->cache);
    }
  }

  std::unique_lock<std::mutex> lock_family() const {
    return family ? std::unique_lock{family->mutex} : std::unique_lock<std::mutex>{};
  }

  // A refusal because rows are no one dim in memory may be helped by more batches of fewer rows.
  Status lower_fusion(const Device& device) {
    Status status;
    for (const std::int64_t parts : row_splits(graph)) {
      frontend = std::make_shared<FrontendGraph>();
      supplies = {};
      configure(device);
      FusionLowering lowering{graph, *frontend, supplies, device, parts};
      Status attempt = lowering.run();
      if (attempt.ok()) {
        rewrites = lowering.rewrites();
        if (family) rewrites.emplace_back(kDynamicShapes);
        return attempt;
      }
      if (parts == 1) status = std::move(attempt);  // the graph as it was written
      const std::string& code = status.error().reasons.front().code;
      if (code != "view" && code != "view_of_intermediate") break;
    }
    return status;
  }

  // Names of the plans that there are more than when it was last called.
  void name_plans() {
    const std::int64_t count = frontend->get_execution_plan_count();
    for (auto i = static_cast<std::int64_t>(plan_names.size()); i < count; ++i) {
      std::string name;
      const Failure failure =
          guarded("plan_name", [&] { return frontend->get_plan_name_at_index(i, name); });
      plan_names.push_back(failure ? "?" : name);
    }
  }
};

Lowered::Lowered(std::unique_ptr<Impl> impl) : impl_{std::move(impl)} {}
Lowered::~Lowered() = default;

Result<std::unique_ptr<Lowered>> Lowered::lower(const ir::Graph& graph, const Device& device,
                                                std::shared_ptr<KernelFamily> family) {
  auto impl = std::make_unique<Impl>(graph);
  impl->family = std::move(family);
  return finish(std::move(impl), device);
}

Result<std::unique_ptr<Lowered>> Lowered::lower(const ir::Graph& graph, NativeAttention native,
                                                const Device& device) {
  auto impl = std::make_unique<Impl>(graph);
  impl->supplies = native.supplies;
  impl->rewrites = native.rewrites;
  impl->native = std::move(native);
  return finish(std::move(impl), device);
}

Result<std::unique_ptr<Lowered>> Lowered::finish(std::unique_ptr<Impl> impl, const Device& device) {
  LAWSON_CHECK(prepare_frontend());
  if (!device.present()) {
    Target target;
    if (const Failure failure = target_of(device, target)) {
      return to_error(*failure, classify(*failure, true), device);
    }
    impl->properties = std::move(target.properties);
    impl->has_occupancy = target.has_occupancy;
  }
  Status status;
  const Failure failure = guarded("lower", [&] {
    if (impl->native) {
      impl->configure(device);
      impl->attention = std::make_unique<AttentionLowering>(*impl->native, *impl->frontend);
      impl->attention->run();
    } else {
      status = impl->lower_fusion(device);
    }
    return no_error();
  });
  if (failure) {
    const Fault fault = classify(*failure, !device.present());
    if (fault != Fault::unsupported) return to_error(*failure, fault, device);
    Error refusal = error(ErrorKind::unsupported, "{}", failure->text);
    LAWSON_TRY(const Libraries* found, libraries());
    refusal.reasons = explain(*failure, impl->graph, device, found->cudnn_version);
    return refusal;
  }
  if (!status.ok()) return std::move(status).error();
  return std::unique_ptr<Lowered>{new Lowered{std::move(impl)}};
}

Failure Lowered::judge(void* handle) {
  const auto lock = impl_->lock_family();
  FrontendGraph& graph = *impl_->frontend;
  using diag::Stage;
  if (Failure failure = timed(Stage::validate, "validate", [&] { return graph.validate(); })) {
    return failure;
  }
  if (Failure failure = timed(Stage::build_operation_graph, "build_operation_graph", [&] {
        return handle == nullptr ? graph.build_operation_graph()
                                 : graph.build_operation_graph(as_handle(handle));
      })) {
    return failure;
  }
  std::vector<fe::HeurMode_t> modes{fe::HeurMode_t::A};
  if (!impl_->native) modes.push_back(fe::HeurMode_t::FALLBACK);
  if (Failure failure = timed(Stage::create_execution_plans, "heuristics",
                              [&] { return graph.create_execution_plans(modes); })) {
    return failure;
  }
  impl_->name_plans();
  if (impl_->workspace_limit) graph.deselect_workspace_greater_than(*impl_->workspace_limit);
  return timed(Stage::check_support, "check_support", [&] { return graph.check_support(); });
}

void Lowered::limit_workspace(std::int64_t bytes) {
  impl_->workspace_limit = bytes;
}

bool Lowered::knows_occupancy() const {
  return impl_->has_occupancy;
}

const std::vector<std::string>& Lowered::plan_names() const {
  return impl_->plan_names;
}

Failure Lowered::add_other_heuristics() {
  const Failure failure = guarded(
      "heuristics", [&] { return impl_->frontend->create_execution_plans({fe::HeurMode_t::B}); });
  impl_->name_plans();
  return failure;
}

std::vector<EngineKnobs> Lowered::engines() const {
  std::int64_t count = 0;
  if (guarded("engines", [&] { return impl_->frontend->get_engine_count(count); })) return {};
  std::vector<EngineKnobs> engines;
  for (std::int64_t engine = 0; engine < count; ++engine) {
    std::vector<fe::Knob> knobs;
    if (guarded("engines", [&] { return impl_->frontend->get_knobs_for_engine(engine, knobs); })) {
      continue;  // it does not take the graph
    }
    EngineKnobs found{engine, {}};
    for (const fe::Knob& knob : knobs) {
      cudnnBackendKnobType_t type{};
      if (fe::convert_to_backend_knob_type(knob.type, type) != CUDNN_STATUS_SUCCESS) continue;
      found.knobs.push_back({static_cast<int>(type), knob.minValue, knob.maxValue,
                             std::max<std::int64_t>(knob.stride, 1)});
    }
    engines.push_back(std::move(found));
  }
  return engines;
}

Failure Lowered::find_plan(const std::string& name, std::size_t& index) {
  const std::vector<std::string>& names = impl_->plan_names;
  for (index = 0; index < names.size(); ++index) {
    if (names[index] == name) return std::nullopt;
  }
  static Lazy<const std::regex> whole_names;
  const std::regex& whole =
      whole_names.get([] { return std::regex{R"(eng(\d{1,4})((?:_k\d{1,4}=-?\d{1,9})*))"}; });
  static Lazy<const std::regex> knobs_of_names;
  const std::regex& knob =
      knobs_of_names.get([] { return std::regex{R"(_k(\d{1,4})=(-?\d{1,9}))"}; });
  std::smatch match;
  if (!std::regex_match(name, match, whole)) {
    return StageError{"create_plan", "INVALID_VALUE",
                      fmt::format("'{}' is no name of an engine config (eng7_k24=3)", name)};
  }
  const std::string choices = match[2];
  std::unordered_map<fe::KnobType_t, std::int64_t> knobs;
  for (std::sregex_iterator it{choices.begin(), choices.end(), knob}, last; it != last; ++it) {
    const auto type = static_cast<cudnnBackendKnobType_t>(std::stoi((*it)[1]));
    knobs[fe::convert_from_backend_knob_type(type)] = std::stoll((*it)[2]);
  }
  const std::int64_t engine = std::stoll(match[1]);
  if (Failure failure = guarded(
          "create_plan", [&] { return impl_->frontend->create_execution_plan(engine, knobs); })) {
    return failure;
  }
  impl_->name_plans();
  return std::nullopt;
}

Failure Lowered::build(std::size_t index) {
  const auto lock = impl_->lock_family();
  const auto plan = static_cast<std::int64_t>(index);
  if (Failure failure = timed(diag::Stage::build_plans, "build_plan",
                              [&] { return impl_->frontend->build_plan_at_index(plan); })) {
    return failure;
  }
  impl_->built = plan;
  return std::nullopt;
}

std::string Lowered::built_name() const {
  std::string name;
  if (impl_->built) {
    const auto ignored = guarded(
        "plan_name", [&] { return impl_->frontend->get_plan_name_at_index(*impl_->built, name); });
    if (ignored) name.clear();
  }
  return name;
}

Failure Lowered::serialize(PlanBytes& plan) {
  plan.supplies = impl_->supplies;
  return guarded("serialize", [&]() -> fe::error_t {
    if (!impl_->built) {
      return {fe::error_code_t::GRAPH_EXECUTION_FAILED, "no plan has been built"};
    }
    fe::error_t status =
        impl_->frontend->get_workspace_size_plan_at_index(*impl_->built, plan.workspace);
    if (status.is_bad()) return status;
    return impl_->frontend->serialize(plan.data, /*serialize_structure=*/false);
  });
}

const std::vector<std::string>& Lowered::rewrites() const {
  return impl_->rewrites;
}

// The frontend keeps cuDNN's plans for itself and what is derived from it.
class LoadedGraph : public FrontendGraph {
 public:
  BackendPlan backend_plan() {
    BackendPlan backend;
    const auto candidate = static_cast<std::size_t>(plans.candidate);
    std::int64_t whole = 0;
    if (candidate >= plans.execution_plans.size() || !plans.execution_plans[candidate] ||
        get_workspace_size(whole).is_bad()) {
      return backend;
    }
    const auto& plan = plans.execution_plans[candidate];
    // The frontend's own kernels, and memory of its own in the workspace.
    if (!cuda_graph_direct_population_eligible() || whole != plan->getWorkspaceSize() ||
        !varpack_template.workspace_slots.empty() || !varpack_template.replacement_slots.empty() ||
        !varpack_template.backend_slots.empty()) {
      return backend;
    }
    backend.descriptor = plan->get_raw_desc();
    backend.uids = varpack_template.all_uids;
    backend.pointers = varpack_template.template_ptrs;
    backend.slots = varpack_template.user_slots;
    for (const auto& [slot, bytes] : varpack_template.aligned_slots) {
      backend.aligned.push_back({slot, bytes});
    }
    return backend;
  }
};

struct Executable::Impl {
  Properties properties;
  LoadedGraph frontend;
  std::vector<std::int64_t> uids;
  BackendPlan backend;
};

Executable::Executable(std::unique_ptr<Impl> impl) : impl_{std::move(impl)} {}
Executable::~Executable() = default;

Failure Executable::load(std::span<const std::uint8_t> data, void* handle, const Device& device,
                         std::unique_ptr<Executable>& executable) {
  const Status prepared = prepare_frontend();
  if (!prepared.ok()) return StageError{"load", "EXCEPTION", prepared.error().message};
  auto impl = std::make_unique<Impl>();
  if (handle == nullptr) {
    Target target;
    if (Failure failure = target_of(device, target)) return failure;
    impl->properties = std::move(target.properties);
  }
  const std::vector<std::uint8_t> bytes(data.begin(), data.end());
  if (Failure failure = guarded("deserialize", [&]() -> fe::error_t {
        impl->frontend.set_sm_version(device.compute_capability / 10);
        if (handle != nullptr) {
          return impl->frontend.deserialize(as_handle(handle), bytes,
                                            /*enforce_precompiled=*/true, /*run_warmup=*/false);
        }
        impl->frontend.set_device_properties(impl->properties);
        return impl->frontend.deserialize(bytes, /*enforce_precompiled=*/true);
      })) {
    return failure;
  }
  const auto& pack = impl->frontend.varpack_template;
  for (const int slot : pack.user_slots) {
    impl->uids.push_back(pack.all_uids[static_cast<std::size_t>(slot)]);
  }
  impl->backend = impl->frontend.backend_plan();
  executable.reset(new Executable{std::move(impl)});
  return std::nullopt;
}

const BackendPlan& Executable::backend() const {
  return impl_->backend;
}

const std::vector<std::int64_t>& Executable::uids() const {
  return impl_->uids;
}

Failure Executable::execute(void* handle, std::span<void*> pointers, void* workspace,
                            void* stream) {
  return guarded("execute", [&]() -> fe::error_t {
    fe::error_t status =
        from_status(fe::detail::set_stream(as_handle(handle), static_cast<cudaStream_t>(stream)),
                    "cudnnSetStream");
    if (status.is_bad()) return status;
    return impl_->frontend.execute(as_handle(handle), pointers.data(),
                                   static_cast<int>(pointers.size()), workspace);
  });
}

Failure create_handle(void*& handle) {
  const Status prepared = prepare_frontend();
  if (!prepared.ok()) return StageError{"create_handle", "EXCEPTION", prepared.error().message};
  return guarded("create_handle", [&] {
    cudnnHandle_t created = nullptr;
    fe::error_t status = from_status(fe::detail::create_handle(&created), "cudnnCreate");
    handle = created;
    return status;
  });
}

Failure live_properties(int ordinal, std::string& json) {
  const Status prepared = prepare_frontend();
  if (!prepared.ok()) return StageError{"device_properties", "EXCEPTION", prepared.error().message};
  return guarded("device_properties", [&]() -> fe::error_t {
    fe::DeviceProperties properties;
    fe::error_t status = properties.set_device_id(ordinal).build();
    if (status.is_bad()) return status;
    std::vector<std::uint8_t> bytes;
    status = properties.serialize(bytes);
    while (!bytes.empty() && bytes.back() == 0) bytes.pop_back();
    json.assign(bytes.begin(), bytes.end());
    return status;
  });
}

}  // namespace lawson::cudnn
