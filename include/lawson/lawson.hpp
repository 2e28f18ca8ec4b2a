// C++20 over lawson.h: handles that destroy themselves, std::span, exceptions. Header-only.
//
// Every call may throw lawson::Error; "unsupported" is a Verdict, and an Error only where a plan
// was demanded. Texts returned as std::string_view live as long as the object that returned them.
// Objects may be moved between threads, and read from several at once (lawson.h).
#ifndef LAWSON_LAWSON_HPP_
#define LAWSON_LAWSON_HPP_

#include <lawson/lawson.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lawson {

class Error : public std::runtime_error {
 public:
  Error(lawson_status status, const std::string& message)
      : std::runtime_error(message), status_{status} {}

  lawson_status status() const noexcept { return status_; }
  // "invalid argument", "unavailable", ...
  const char* kind() const noexcept { return lawson_status_string(status_); }

 private:
  lawson_status status_;
};

namespace detail {

inline void check(lawson_status status) {
  if (status != LAWSON_OK) throw Error(status, lawson_last_error_message());
}

template <auto Destroy>
struct Destroyer {
  bool is_borrowed = false;  // another handle's, which lives longer

  template <typename T>
  void operator()(T* handle) const noexcept {
    if (!is_borrowed) Destroy(handle);
  }
};

template <typename T, auto Destroy>
using Handle = std::unique_ptr<T, Destroyer<Destroy>>;

using Text = Handle<lawson_text, lawson_text_destroy>;

// Calls `function(arguments..., &handle)` and returns the handle.
template <typename T, typename F, typename... Args>
T* make(F function, Args... arguments) {
  T* handle = nullptr;
  check(function(arguments..., &handle));
  return handle;
}

// The same where the handle is a text.
template <typename F, typename... Args>
std::string text_of(F function, Args... arguments) {
  const Text text{make<lawson_text>(function, arguments...)};
  return {lawson_text_data(text.get()), lawson_text_size(text.get())};
}

// The C functions read NUL-terminated names.
inline const char* optional(const std::string& text) {
  return text.empty() ? nullptr : text.c_str();
}

}  // namespace detail

inline std::string_view version() {
  return lawson_version();
}

struct Settings {
  std::string cudnn_path;        // a libcudnn.so.9 or a folder with one; empty: search
  std::int32_t max_workers = 0;  // 0: one per core, at most 8
};

// Before the first call that needs an engine.
inline void configure(const Settings& settings) {
  const lawson_settings given{sizeof(lawson_settings), detail::optional(settings.cudnn_path),
                              settings.max_workers};
  detail::check(lawson_configure(&given));
}

// JSON documents: versions and libraries found; all known devices.
inline std::string info() {
  return detail::text_of(lawson_info);
}
inline std::string devices() {
  return detail::text_of(lawson_devices_json);
}

// What was counted since the process began, or since reset_stats(), as JSON (lawson_stats_json).
inline std::string stats() {
  return detail::text_of(lawson_stats_json);
}
inline void reset_stats() {
  detail::check(lawson_stats_reset());
}

// A trace of what is done while the object lives, written to a file at its end.
class Trace {
 public:
  explicit Trace(const std::string& path) { detail::check(lawson_trace_start(path.c_str())); }
  Trace(const Trace&) = delete;
  Trace& operator=(const Trace&) = delete;
  ~Trace() {
    if (runs_) lawson_trace_stop();
  }

  // Writes it now; an Error says why it could not be written.
  void stop() {
    runs_ = false;
    detail::check(lawson_trace_stop());
  }

 private:
  bool runs_ = true;
};

class Device {
 public:
  // "cpu", "h200", "cuda:0", ...
  static Device find(const std::string& name) {
    return Device{detail::make<lawson_device>(lawson_device_find, name.c_str())};
  }

  std::string_view name() const { return lawson_device_name(handle()); }
  bool is_present() const { return lawson_device_is_present(handle()) != 0; }
  // What was measured as the most that it does, through this engine (empty: its own), as JSON.
  std::string limits(const std::string& engine = {}) const {
    return detail::text_of(lawson_device_limits, handle(), detail::optional(engine));
  }
  const lawson_device* handle() const { return handle_.get(); }

 private:
  friend class Fusion;
  explicit Device(lawson_device* handle) : handle_{handle} {}
  // Of an object that lives longer.
  explicit Device(const lawson_device* borrowed)
      : handle_{const_cast<lawson_device*>(borrowed), {true}} {}
  detail::Handle<lawson_device, lawson_device_destroy> handle_;
};

struct TensorInfo {
  std::int64_t uid = 0;
  std::string name;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;  // elements
  bool is_input = false;
  bool is_by_value = false;
  std::int32_t alignment = 0;  // bytes
  std::size_t size = 0;        // bytes from the first to the last element
};

class Graph {
 public:
  // A document of kind "graph"; `source` names it in messages.
  static Graph from_json(std::string_view text, const std::string& source = "graph") {
    return Graph{detail::make<lawson_graph>(lawson_graph_from_json, text.data(), text.size(),
                                            source.c_str())};
  }

  std::string_view name() const { return lawson_graph_name(handle()); }
  // After the clean-ups that change no bit: what a plan of it is of.
  Graph simplified() const {
    return Graph{detail::make<lawson_graph>(lawson_graph_simplified, handle())};
  }
  std::string json() const { return detail::text_of(lawson_graph_json, handle()); }
  std::string print() const { return detail::text_of(lawson_graph_print, handle()); }
  std::string dot() const { return detail::text_of(lawson_graph_dot, handle()); }

  // Inputs first, then outputs.
  std::vector<TensorInfo> tensors() const {
    std::vector<TensorInfo> list;
    for (std::size_t i = 0; i < lawson_graph_tensor_count(handle()); ++i) {
      lawson_tensor_info info{};
      info.struct_size = sizeof(info);
      detail::check(lawson_graph_tensor(handle(), i, &info));
      TensorInfo tensor;
      tensor.uid = info.uid;
      tensor.name = info.name;
      tensor.dtype = info.dtype;
      tensor.shape.assign(info.shape, info.shape + info.rank);
      tensor.strides.assign(info.strides, info.strides + info.rank);
      tensor.is_input = info.is_input != 0;
      tensor.is_by_value = info.is_by_value != 0;
      tensor.alignment = info.alignment;
      tensor.size = info.size;
      list.push_back(std::move(tensor));
    }
    return list;
  }

  const lawson_graph* handle() const { return handle_.get(); }

 private:
  friend class Spec;
  friend class Plan;
  friend class AttentionConfig;
  friend class Fusion;
  friend Graph gradient(const Graph&, const std::vector<std::string>&);
  template <typename F>
  friend class Fused;
  explicit Graph(lawson_graph* handle) : handle_{handle} {}
  // Of an object that lives longer.
  explicit Graph(const lawson_graph* borrowed)
      : handle_{const_cast<lawson_graph*>(borrowed), {true}} {}
  detail::Handle<lawson_graph, lawson_graph_destroy> handle_;
};

// A spec document of either kind and the graphs that it stands for (`training`: two).
class Spec {
 public:
  static Spec from_json(std::string_view text, const std::string& source = "spec") {
    return Spec{
        detail::make<lawson_spec>(lawson_spec_from_json, text.data(), text.size(), source.c_str())};
  }

  std::string_view name() const { return lawson_spec_name(handle()); }
  std::string json() const { return detail::text_of(lawson_spec_json, handle()); }
  // 0: the spec asks for what this version cannot express; a probe says what.
  std::size_t graph_count() const { return lawson_spec_graph_count(handle()); }
  Graph graph(std::size_t index) const {
    return Graph{detail::make<lawson_graph>(lawson_spec_graph, handle(), index)};
  }
  const lawson_spec* handle() const { return handle_.get(); }

 private:
  explicit Spec(lawson_spec* handle) : handle_{handle} {}
  detail::Handle<lawson_spec, lawson_spec_destroy> handle_;
};

struct ModelOptions {
  std::int64_t batch = 0;    // 0: 1
  std::int64_t seqlen = 0;   // 0: 4096
  std::int64_t context = 0;  // 0: 8192
  std::string passes;        // "prefill,decode,training" or a part of it; empty: all
  std::string dtype;         // empty: the config's
};

// A model's config.json as the JSON document of its workloads.
inline std::string model_workloads(std::string_view config,
                                   const std::string& source = "config.json",
                                   const ModelOptions& options = {}) {
  const lawson_model_options given{sizeof(lawson_model_options),
                                   options.batch,
                                   options.seqlen,
                                   options.context,
                                   detail::optional(options.passes),
                                   detail::optional(options.dtype)};
  return detail::text_of(lawson_model_workloads, config.data(), config.size(), source.c_str(),
                         &given);
}

struct Options {
  std::string engine;  // "cudnn", "cpu", "reference"; empty: cudnn for GPUs, cpu for the CPU
  lawson_strength strength = LAWSON_JUDGED;
  std::int64_t workspace_limit = -1;  // bytes; negative: none
  bool deterministic = false;
  double deadline_ms = 0;  // for building and tuning; 0: none
  lawson_tuning tuning = LAWSON_TUNING_OFF;
  bool retune = false;          // when compiling with tuning: time the stored candidates again
  bool dynamic_shapes = false;  // products with other rows share kernels, where the engine can

  // Lives no longer than this object.
  lawson_options c() const {
    return {sizeof(lawson_options),
            detail::optional(engine),
            strength,
            workspace_limit,
            deterministic ? 1 : 0,
            deadline_ms,
            tuning,
            retune ? 1 : 0,
            dynamic_shapes ? 1 : 0};
  }
};

struct Reason {
  std::string code;
  std::string message;
};

class AttentionConfig;

class Verdict {
 public:
  lawson_decision decision() const { return lawson_verdict_decision(handle()); }
  bool supported() const { return decision() == LAWSON_SUPPORTED; }
  lawson_strength strength() const { return lawson_verdict_strength(handle()); }
  std::string_view engine() const { return lawson_verdict_engine(handle()); }
  std::string_view key() const { return lawson_verdict_key(handle()); }
  std::string_view plan_id() const { return lawson_verdict_plan_id(handle()); }
  std::string json() const { return detail::text_of(lawson_verdict_json, handle()); }
  std::vector<Reason> reasons() const {
    std::vector<Reason> list;
    for (std::size_t i = 0; i < lawson_verdict_reason_count(handle()); ++i) {
      list.push_back(
          {lawson_verdict_reason_code(handle(), i), lawson_verdict_reason_message(handle(), i)});
    }
    return list;
  }
  const lawson_verdict* handle() const { return handle_.get(); }

 private:
  friend Verdict probe(const Graph&, const Device&, const Options&);
  friend Verdict probe(const Spec&, const Device&, const Options&);
  friend Verdict select(const AttentionConfig&, const Device&, const Options&);
  friend class Fusion;
  explicit Verdict(lawson_verdict* handle) : handle_{handle} {}
  // Of an object that lives longer.
  explicit Verdict(const lawson_verdict* borrowed)
      : handle_{const_cast<lawson_verdict*>(borrowed), {true}} {}
  detail::Handle<lawson_verdict, lawson_verdict_destroy> handle_;
};

inline Verdict probe(const Graph& graph, const Device& device, const Options& options = {}) {
  const lawson_options given = options.c();
  return Verdict{
      detail::make<lawson_verdict>(lawson_probe, graph.handle(), device.handle(), &given)};
}

// All graphs of the spec must hold.
inline Verdict probe(const Spec& spec, const Device& device, const Options& options = {}) {
  const lawson_options given = options.c();
  return Verdict{
      detail::make<lawson_verdict>(lawson_probe_spec, spec.handle(), device.handle(), &given)};
}

// The verdict, every failing condition and the nearest neighbours, each probed, as JSON.
// `limit`: the most neighbours to probe; 0: the default.
inline std::string explain(const Spec& spec, const Device& device, const Options& options = {},
                           std::size_t limit = 0) {
  const lawson_options given = options.c();
  return detail::text_of(lawson_explain, spec.handle(), device.handle(), &given, limit);
}

struct RunResult {
  double milliseconds_min = 0;
  double milliseconds_median = 0;
  double milliseconds_max = 0;
};

struct Verification {
  bool ok = false;
  std::string json;
};

class Plan;

// Host buffers for all inputs and outputs of one graph, laid out by its strides.
class Data {
 public:
  // The same values on every platform.
  static Data generate(const Graph& graph, std::uint64_t seed) {
    return Data{detail::make<lawson_data>(lawson_data_generate, graph.handle(), seed)};
  }

  std::span<std::byte> buffer(std::int64_t uid) {
    void* data = nullptr;
    std::size_t size = 0;
    detail::check(lawson_data_buffer(handle(), uid, &data, &size));
    return {static_cast<std::byte*>(data), size};
  }

  // Compares the outputs with the float64 oracle, under the bound of the plan's engine.
  Verification verify(const Plan& plan) const;

  lawson_data* handle() { return handle_.get(); }
  const lawson_data* handle() const { return handle_.get(); }

 private:
  explicit Data(lawson_data* handle) : handle_{handle} {}
  detail::Handle<lawson_data, lawson_data_destroy> handle_;
};

using Binding = lawson_binding;

class Plan {
 public:
  static Plan deserialize(std::span<const std::byte> bytes) {
    return Plan{detail::make<lawson_plan>(lawson_plan_deserialize,
                                          static_cast<const void*>(bytes.data()), bytes.size())};
  }

  std::string_view id() const { return lawson_plan_id(handle()); }
  std::string_view key() const { return lawson_plan_key(handle()); }
  std::string_view engine() const { return lawson_plan_engine(handle()); }
  std::string_view name() const { return lawson_plan_name(handle()); }
  std::string_view target() const { return lawson_plan_target(handle()); }
  std::size_t workspace_size() const { return lawson_plan_workspace_size(handle()); }
  Graph graph() const { return Graph{detail::make<lawson_graph>(lawson_plan_graph, handle())}; }

  std::vector<std::byte> serialize() const {
    const detail::Text text{detail::make<lawson_text>(lawson_plan_serialize, handle())};
    const auto* data = reinterpret_cast<const std::byte*>(lawson_text_data(text.get()));
    return {data, data + lawson_text_size(text.get())};
  }

  // Makes the plan executable on a device of this machine.
  void load(const Device& device) { detail::check(lawson_plan_load(handle(), device.handle())); }

  // For whoever asks for its key on that device in this process. `options`: what it was compiled
  // with.
  void keep(const Device& device, const Options& options = {}) const {
    const lawson_options given = options.c();
    detail::check(lawson_plan_keep(handle(), device.handle(), &given));
  }

  // Asynchronous on `stream` (a CUstream) on a GPU.
  void execute(std::span<const Binding> bindings, void* workspace = nullptr,
               std::size_t workspace_size = 0, void* stream = nullptr) const {
    detail::check(lawson_plan_execute(handle(), bindings.data(), bindings.size(), workspace,
                                      workspace_size, stream));
  }

  // As nodes of a CUDA graph (a CUgraph): lawson.h.
  void prepare_graph(lawson_graph_use use, std::span<const Binding> bindings, void* workspace,
                     std::size_t workspace_size, void* cuda_graph) const {
    detail::check(lawson_plan_prepare_graph(handle(), use, bindings.data(), bindings.size(),
                                            workspace, workspace_size, cuda_graph));
  }

  // Executes on generated data, `repetitions` times after a warm-up.
  RunResult run(Data& data, std::int32_t repetitions = 1) const {
    lawson_run_result result{};
    result.struct_size = sizeof(result);
    detail::check(lawson_plan_run(handle(), data.handle(), repetitions, &result));
    return {result.milliseconds_min, result.milliseconds_median, result.milliseconds_max};
  }

  // JSON documents (lawson.h): how it was chosen; how long it takes on generated data (loaded).
  std::string tuning() const { return detail::text_of(lawson_plan_tuning, handle()); }
  std::string bench(std::uint64_t seed = 0, std::int32_t rounds = 20) const {
    return detail::text_of(lawson_plan_bench, handle(), seed, rounds);
  }

  lawson_plan* handle() { return handle_.get(); }
  const lawson_plan* handle() const { return handle_.get(); }

 private:
  friend class Bundle;
  template <auto Create, auto Destroy, auto Set, auto Pointers, auto Derive, auto PlanOf,
            auto Workspace, typename Handle>
  friend class BasicParams;
  friend class Fusion;
  friend Plan compile(const Graph&, const Device&, const Options&);
  explicit Plan(lawson_plan* handle) : handle_{handle} {}
  // Of an object that lives longer.
  explicit Plan(const lawson_plan* borrowed)
      : handle_{const_cast<lawson_plan*>(borrowed), {true}} {}
  detail::Handle<lawson_plan, lawson_plan_destroy> handle_;
};

// Throws Error with status LAWSON_UNSUPPORTED, and every reason in its message, when it does not
// fuse.
inline Plan compile(const Graph& graph, const Device& device, const Options& options = {}) {
  const lawson_options given = options.c();
  return Plan{detail::make<lawson_plan>(lawson_compile, graph.handle(), device.handle(), &given)};
}

inline Verification Data::verify(const Plan& plan) const {
  int ok = 0;
  lawson_text* json = nullptr;
  detail::check(lawson_data_verify(plan.handle(), handle(), &ok, &json));
  const detail::Text text{json};
  return {ok != 0, {lawson_text_data(json), lawson_text_size(json)}};
}

// The key that a plan of this has, found without judging or building.
inline std::string compile_key(const Graph& graph, const Device& device,
                               const Options& options = {}) {
  const lawson_options given = options.c();
  return detail::text_of(lawson_compile_key, graph.handle(), device.handle(), &given);
}

// What a bundle's index says of a plan.
struct BundleEntry {
  std::string key;
  std::string plan_id;
  std::string target;
  std::string engine;
  std::string engine_version;
  std::string device_fingerprint;
  std::size_t size = 0;
  std::size_t stored_size = 0;
};

// Several plans in one file. Opening reads the index; a plan is read when it is asked for.
class Bundle {
 public:
  // Replaces the file in one step.
  static void write(const std::string& path, std::span<const Plan* const> plans) {
    const auto handles = handles_of(plans);
    detail::check(lawson_bundle_write(path.c_str(), handles.data(), handles.size()));
  }
  // Adds to the bundle, or makes it; in one step as well.
  static void append(const std::string& path, std::span<const Plan* const> plans) {
    const auto handles = handles_of(plans);
    detail::check(lawson_bundle_append(path.c_str(), handles.data(), handles.size()));
  }
  static Bundle open(const std::string& path) {
    return Bundle{detail::make<lawson_bundle>(lawson_bundle_open, path.c_str())};
  }

  std::size_t size() const { return lawson_bundle_size(handle()); }
  BundleEntry entry(std::size_t index) const {
    lawson_bundle_entry read{};
    read.struct_size = sizeof(read);
    detail::check(lawson_bundle_entry_info(handle(), index, &read));
    return {read.key,    read.plan_id,        read.target,
            read.engine, read.engine_version, read.device_fingerprint,
            read.size,   read.stored_size};
  }
  Plan plan(std::size_t index) const {
    return Plan{detail::make<lawson_plan>(lawson_bundle_plan, handle(), index)};
  }
  std::optional<Plan> find(const std::string& key) const {
    lawson_plan* plan = detail::make<lawson_plan>(lawson_bundle_find, handle(), key.c_str());
    if (plan == nullptr) return std::nullopt;
    return Plan{plan};
  }
  // The plan of this graph for this device, compiled with the cuDNN that this process uses.
  std::optional<Plan> find(const Graph& graph, const Device& device,
                           const Options& options = {}) const {
    return find(compile_key(graph, device, options));
  }

  // for (const lawson::BundleEntry& entry : bundle)
  class Iterator {
   public:
    using value_type = BundleEntry;
    using difference_type = std::ptrdiff_t;
    Iterator(const Bundle& bundle, std::size_t index) : bundle_{&bundle}, index_{index} {}
    BundleEntry operator*() const { return bundle_->entry(index_); }
    Iterator& operator++() {
      ++index_;
      return *this;
    }
    Iterator operator++(int) { return {*bundle_, index_++}; }
    bool operator==(const Iterator& other) const { return index_ == other.index_; }

   private:
    const Bundle* bundle_;
    std::size_t index_;
  };
  Iterator begin() const { return {*this, 0}; }
  Iterator end() const { return {*this, size()}; }

  const lawson_bundle* handle() const { return handle_.get(); }

 private:
  static std::vector<const lawson_plan*> handles_of(std::span<const Plan* const> plans) {
    std::vector<const lawson_plan*> handles;
    handles.reserve(plans.size());
    for (const Plan* plan : plans) handles.push_back(plan->handle());
    return handles;
  }
  explicit Bundle(lawson_bundle* handle) : handle_{handle} {}
  detail::Handle<lawson_bundle, lawson_bundle_destroy> handle_;
};

// What an attention is: everything that selects a plan. Setters can be chained; an attribute that
// has none of them here is set with set_bytes.
class AttentionConfig {
 public:
  AttentionConfig()
      : handle_{detail::make<lawson_attention_config>(lawson_attention_config_create)} {}
  // A spec document of kind "attention"; `source` names it in messages.
  static AttentionConfig from_spec(std::string_view text, const std::string& source = "spec") {
    return AttentionConfig{detail::make<lawson_attention_config>(
        lawson_attention_config_from_spec, text.data(), text.size(), source.c_str())};
  }

  AttentionConfig& pass(lawson_attention_pass value) {
    return set_value<std::int32_t>(LAWSON_ATTENTION_PASS, value);
  }
  AttentionConfig& dtype(lawson_dtype value) {
    return set_value<std::int32_t>(LAWSON_ATTENTION_DTYPE, value);
  }
  AttentionConfig& output_dtype(lawson_dtype value) {
    return set_value<std::int32_t>(LAWSON_ATTENTION_OUTPUT_DTYPE, value);
  }
  AttentionConfig& batch(std::int64_t value) { return set_value(LAWSON_ATTENTION_BATCH, value); }
  AttentionConfig& heads(std::int64_t value) { return set_value(LAWSON_ATTENTION_HEADS, value); }
  AttentionConfig& kv_heads(std::int64_t value) {
    return set_value(LAWSON_ATTENTION_KV_HEADS, value);
  }
  AttentionConfig& seqlen_q(std::int64_t value) {
    return set_value(LAWSON_ATTENTION_SEQLEN_Q, value);
  }
  AttentionConfig& seqlen_kv(std::int64_t value) {
    return set_value(LAWSON_ATTENTION_SEQLEN_KV, value);
  }
  AttentionConfig& head_dim_qk(std::int64_t value) {
    return set_value(LAWSON_ATTENTION_HEAD_DIM_QK, value);
  }
  AttentionConfig& head_dim_v(std::int64_t value) {
    return set_value(LAWSON_ATTENTION_HEAD_DIM_V, value);
  }
  AttentionConfig& layout(lawson_attention_layout value) {
    return set_value<std::int32_t>(LAWSON_ATTENTION_LAYOUT, value);
  }
  AttentionConfig& mask(lawson_attention_mask value) {
    return set_value<std::int32_t>(LAWSON_ATTENTION_MASK, value);
  }
  AttentionConfig& window(std::int64_t left, std::int64_t right) {
    const std::int64_t bounds[] = {left, right};
    return set_bytes(LAWSON_ATTENTION_WINDOW, bounds, sizeof(bounds));
  }
  AttentionConfig& bias(lawson_attention_bias value) {
    return set_value<std::int32_t>(LAWSON_ATTENTION_BIAS, value);
  }
  AttentionConfig& bias_shape(std::span<const std::int64_t> values) {
    return set_bytes(LAWSON_ATTENTION_BIAS_SHAPE, values.data(), values.size_bytes());
  }
  AttentionConfig& bias_dtype(lawson_dtype value) {
    return set_value<std::int32_t>(LAWSON_ATTENTION_BIAS_DTYPE, value);
  }
  AttentionConfig& bias_grad(bool value = true) {
    return set_value<std::int32_t>(LAWSON_ATTENTION_BIAS_GRAD, value ? 1 : 0);
  }
  AttentionConfig& attn_mask_dtype(lawson_dtype value) {
    return set_value<std::int32_t>(LAWSON_ATTENTION_ATTN_MASK_DTYPE, value);
  }
  AttentionConfig& attn_mask_shape(std::span<const std::int64_t> values) {
    return set_bytes(LAWSON_ATTENTION_ATTN_MASK_SHAPE, values.data(), values.size_bytes());
  }
  AttentionConfig& alibi_slopes(bool value = true) {
    return set_value<std::int32_t>(LAWSON_ATTENTION_ALIBI_SLOPES, value ? 1 : 0);
  }
  AttentionConfig& alibi_slope_values(std::span<const double> values) {
    return set_bytes(LAWSON_ATTENTION_ALIBI_SLOPE_VALUES, values.data(), values.size_bytes());
  }
  AttentionConfig& softmax(lawson_attention_softmax value) {
    return set_value<std::int32_t>(LAWSON_ATTENTION_SOFTMAX, value);
  }
  AttentionConfig& softcap(double value) { return set_value(LAWSON_ATTENTION_SOFTCAP, value); }
  AttentionConfig& dropout(double value) { return set_value(LAWSON_ATTENTION_DROPOUT, value); }
  AttentionConfig& return_dropout_mask(bool value = true) {
    return set_value<std::int32_t>(LAWSON_ATTENTION_RETURN_DROPOUT_MASK, value ? 1 : 0);
  }
  AttentionConfig& dropout_mask(bool value = true) {
    return set_value<std::int32_t>(LAWSON_ATTENTION_DROPOUT_MASK, value ? 1 : 0);
  }
  AttentionConfig& scale(double value) { return set_value(LAWSON_ATTENTION_SCALE, value); }
  AttentionConfig& deterministic(bool value = true) {
    return set_value<std::int32_t>(LAWSON_ATTENTION_DETERMINISTIC, value ? 1 : 0);
  }
  AttentionConfig& return_stats(bool value = true) {
    return set_value<std::int32_t>(LAWSON_ATTENTION_RETURN_STATS, value ? 1 : 0);
  }
  AttentionConfig& return_max_logit(bool value = true) {
    return set_value<std::int32_t>(LAWSON_ATTENTION_RETURN_MAX_LOGIT, value ? 1 : 0);
  }
  AttentionConfig& cuda_graph(bool value = true) {
    return set_value<std::int32_t>(LAWSON_ATTENTION_CUDA_GRAPH, value ? 1 : 0);
  }
  AttentionConfig& total_q(std::int64_t value) {
    return set_value(LAWSON_ATTENTION_TOTAL_Q, value);
  }
  AttentionConfig& total_kv(std::int64_t value) {
    return set_value(LAWSON_ATTENTION_TOTAL_KV, value);
  }
  AttentionConfig& seqlens_q(std::span<const std::int64_t> values) {
    return set_bytes(LAWSON_ATTENTION_SEQLENS_Q, values.data(), values.size_bytes());
  }
  AttentionConfig& seqlens_kv(std::span<const std::int64_t> values) {
    return set_bytes(LAWSON_ATTENTION_SEQLENS_KV, values.data(), values.size_bytes());
  }
  AttentionConfig& seqlens_q_padded(std::span<const std::int64_t> values) {
    return set_bytes(LAWSON_ATTENTION_SEQLENS_Q_PADDED, values.data(), values.size_bytes());
  }
  AttentionConfig& seqlens_kv_padded(std::span<const std::int64_t> values) {
    return set_bytes(LAWSON_ATTENTION_SEQLENS_KV_PADDED, values.data(), values.size_bytes());
  }
  AttentionConfig& padded_offsets(bool value = true) {
    return set_value<std::int32_t>(LAWSON_ATTENTION_PADDED_OFFSETS, value ? 1 : 0);
  }
  AttentionConfig& page_size_k(std::int64_t value) {
    return set_value(LAWSON_ATTENTION_PAGE_SIZE_K, value);
  }
  AttentionConfig& page_size_v(std::int64_t value) {
    return set_value(LAWSON_ATTENTION_PAGE_SIZE_V, value);
  }
  AttentionConfig& pages(std::int64_t value) { return set_value(LAWSON_ATTENTION_PAGES, value); }
  AttentionConfig& append(std::int64_t value) { return set_value(LAWSON_ATTENTION_APPEND, value); }
  AttentionConfig& fp8_recipe(lawson_fp8_recipe value) {
    return set_value<std::int32_t>(LAWSON_ATTENTION_FP8_RECIPE, value);
  }
  AttentionConfig& context_parallel(lawson_cp_strategy strategy, std::int64_t size) {
    set_value<std::int32_t>(LAWSON_ATTENTION_CONTEXT_PARALLEL_STRATEGY, strategy);
    return set_value(LAWSON_ATTENTION_CONTEXT_PARALLEL_SIZE, size);
  }
  // Of q, k, v, o, do, dq, dk or dv: LAWSON_ATTENTION_STRIDES_Q, ...; in [b,h,s,d] order.
  AttentionConfig& strides(lawson_attention_attribute which, std::span<const std::int64_t> values) {
    return set_bytes(which, values.data(), values.size_bytes());
  }
  AttentionConfig& name(std::string_view text) {
    return set_bytes(LAWSON_ATTENTION_NAME, text.data(), text.size());
  }

  AttentionConfig& set_bytes(std::int32_t attribute, const void* value, std::size_t size) {
    detail::check(lawson_attention_config_set_attribute(handle_.get(), attribute, value, size));
    return *this;
  }
  template <typename T>
  T value(std::int32_t attribute) const {
    T result{};
    detail::check(lawson_attention_config_get_attribute(handle(), attribute, &result,
                                                        sizeof(result), nullptr));
    return result;
  }

  // The spec with every default filled in: the form in which configs are compared.
  std::string spec() const { return detail::text_of(lawson_attention_config_spec, handle()); }
  Graph graph(lawson_attention_pass pass) const {
    return Graph{detail::make<lawson_graph>(lawson_graph_from_attention, handle(),
                                            static_cast<std::int32_t>(pass))};
  }
  const lawson_attention_config* handle() const { return handle_.get(); }

 private:
  template <auto Create, auto Destroy, auto Set, auto Pointers, auto Derive, auto PlanOf,
            auto Workspace, typename Handle>
  friend class BasicParams;
  explicit AttentionConfig(lawson_attention_config* handle) : handle_{handle} {}

  template <typename T>
  AttentionConfig& set_value(std::int32_t attribute, T value) {
    return set_bytes(attribute, &value, sizeof(value));
  }

  detail::Handle<lawson_attention_config, lawson_attention_config_destroy> handle_;
};

// All of a training config, or of every context-parallel step, must hold.
inline Verdict select(const AttentionConfig& config, const Device& device,
                      const Options& options = {}) {
  const lawson_options given = options.c();
  return Verdict{detail::make<lawson_verdict>(lawson_attention_select, config.handle(),
                                              device.handle(), &given)};
}

// Shape and strides in [b,h,s,d] order; without them the config alone says what lies there.
inline lawson_tensor tensor(const void* data, lawson_dtype dtype = LAWSON_DTYPE_UNSET,
                            std::span<const std::int64_t> shape = {},
                            std::span<const std::int64_t> strides = {}) {
  lawson_tensor result{};
  result.struct_size = sizeof(result);
  result.data = const_cast<void*>(data);
  result.dtype = dtype;
  if (shape.size() > LAWSON_MAX_RANK || shape.size() != strides.size()) {
    throw Error(LAWSON_INVALID_ARGUMENT, "tensor: shape and strides have one rank, of at most 8");
  }
  result.rank = static_cast<std::int32_t>(shape.size());
  for (std::size_t i = 0; i < shape.size(); ++i) {
    result.shape[i] = shape[i];
    result.strides[i] = strides[i];
  }
  return result;
}

// Named tensors, run-time scalars and where to run; see ForwardParams and BackwardParams.
template <auto Create, auto Destroy, auto Set, auto Pointers, auto Derive, auto PlanOf,
          auto Workspace, typename Handle>
class BasicParams {
 public:
  BasicParams() : handle_{detail::make<Handle>(Create)} {}

  // Copies the config.
  BasicParams& config(const AttentionConfig& config) {
    const lawson_attention_config* handle = config.handle();
    return set_value(LAWSON_PARAM_CONFIG, handle);
  }
  BasicParams& device(const Device& device) {
    const lawson_device* handle = device.handle();
    return set_value(LAWSON_PARAM_DEVICE, handle);
  }
  BasicParams& engine(std::string_view name) {
    return set_bytes(LAWSON_PARAM_ENGINE, name.data(), name.size());
  }
  BasicParams& workspace_limit(std::int64_t bytes) {
    return set_value(LAWSON_PARAM_WORKSPACE_LIMIT, bytes);
  }
  BasicParams& deterministic(bool value = true) {
    return set_value(LAWSON_PARAM_DETERMINISTIC, std::int32_t{value});
  }
  BasicParams& tuning(lawson_tuning value) {
    return set_value(LAWSON_PARAM_TUNING, static_cast<std::int64_t>(value));
  }
  BasicParams& scale(double value) { return set_value(LAWSON_PARAM_SCALE, value); }
  BasicParams& sequences(std::int64_t count) { return set_value(LAWSON_PARAM_SEQUENCES, count); }
  BasicParams& tensor(lawson_attention_param which, const lawson_tensor& value) {
    return set_value(which, value);
  }
  // As the config says, at this address.
  BasicParams& tensor(lawson_attention_param which, const void* data) {
    return set_value(which, lawson::tensor(data));
  }
  BasicParams& remove(lawson_attention_param which) { return set_bytes(which, nullptr, 0); }
  // The same tensors at new addresses.
  BasicParams& pointers(std::span<const lawson_attention_pointer> list) {
    detail::check(Pointers(handle_.get(), list.data(), list.size()));
    return *this;
  }
  BasicParams& set_bytes(std::int32_t attribute, const void* value, std::size_t size) {
    detail::check(Set(handle_.get(), attribute, value, size));
    return *this;
  }

  AttentionConfig derive() const {
    return AttentionConfig{detail::make<lawson_attention_config>(Derive, handle())};
  }
  // What a call runs, loaded; built unless the process has it.
  Plan plan() const { return Plan{detail::make<lawson_plan>(PlanOf, handle())}; }
  std::size_t workspace_size() const {
    std::size_t size = 0;
    detail::check(Workspace(handle(), &size));
    return size;
  }
  const Handle* handle() const { return handle_.get(); }

 private:
  template <typename T>
  BasicParams& set_value(std::int32_t attribute, const T& value) {
    return set_bytes(attribute, &value, sizeof(value));
  }

  detail::Handle<Handle, Destroy> handle_;
};

using ForwardParams =
    BasicParams<lawson_attention_fwd_params_create, lawson_attention_fwd_params_destroy,
                lawson_attention_fwd_params_set_attribute, lawson_attention_fwd_params_set_pointers,
                lawson_attention_fwd_params_derive, lawson_attention_fwd_params_plan,
                lawson_attention_fwd_params_workspace_size, lawson_attention_fwd_params>;
using BackwardParams =
    BasicParams<lawson_attention_bwd_params_create, lawson_attention_bwd_params_destroy,
                lawson_attention_bwd_params_set_attribute, lawson_attention_bwd_params_set_pointers,
                lawson_attention_bwd_params_derive, lawson_attention_bwd_params_plan,
                lawson_attention_bwd_params_workspace_size, lawson_attention_bwd_params>;

// Asynchronous on `stream` (a CUstream) on a GPU.
inline void forward(const ForwardParams& params, void* workspace = nullptr,
                    std::size_t workspace_size = 0, void* stream = nullptr) {
  detail::check(lawson_attention_forward(params.handle(), workspace, workspace_size, stream));
}
inline void backward(const BackwardParams& params, void* workspace = nullptr,
                     std::size_t workspace_size = 0, void* stream = nullptr) {
  detail::check(lawson_attention_backward(params.handle(), workspace, workspace_size, stream));
}

}  // namespace lawson

#include <lawson/fusion.hpp>

#endif  // LAWSON_LAWSON_HPP_
