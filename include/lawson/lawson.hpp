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
  template <typename T>
  void operator()(T* handle) const noexcept {
    Destroy(handle);
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

class Device {
 public:
  // "cpu", "h200", "cuda:0", ...
  static Device find(const std::string& name) {
    return Device{detail::make<lawson_device>(lawson_device_find, name.c_str())};
  }

  std::string_view name() const { return lawson_device_name(handle()); }
  bool is_present() const { return lawson_device_is_present(handle()) != 0; }
  const lawson_device* handle() const { return handle_.get(); }

 private:
  explicit Device(lawson_device* handle) : handle_{handle} {}
  detail::Handle<lawson_device, lawson_device_destroy> handle_;
};

struct Tensor {
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
  std::string json() const { return detail::text_of(lawson_graph_json, handle()); }
  std::string print() const { return detail::text_of(lawson_graph_print, handle()); }
  std::string dot() const { return detail::text_of(lawson_graph_dot, handle()); }

  // Inputs first, then outputs.
  std::vector<Tensor> tensors() const {
    std::vector<Tensor> list;
    for (std::size_t i = 0; i < lawson_graph_tensor_count(handle()); ++i) {
      lawson_tensor_info info{};
      info.struct_size = sizeof(info);
      detail::check(lawson_graph_tensor(handle(), i, &info));
      Tensor tensor;
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
  explicit Graph(lawson_graph* handle) : handle_{handle} {}
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

  // Lives no longer than this object.
  lawson_options c() const {
    return {sizeof(lawson_options), detail::optional(engine), strength, workspace_limit,
            deterministic ? 1 : 0};
  }
};

struct Reason {
  std::string code;
  std::string message;
};

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
  explicit Verdict(lawson_verdict* handle) : handle_{handle} {}
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

  // Asynchronous on `stream` (a CUstream) on a GPU.
  void execute(std::span<const Binding> bindings, void* workspace = nullptr,
               std::size_t workspace_size = 0, void* stream = nullptr) const {
    detail::check(lawson_plan_execute(handle(), bindings.data(), bindings.size(), workspace,
                                      workspace_size, stream));
  }

  // Executes on generated data, `repetitions` times after a warm-up.
  RunResult run(Data& data, std::int32_t repetitions = 1) const {
    lawson_run_result result{};
    result.struct_size = sizeof(result);
    detail::check(lawson_plan_run(handle(), data.handle(), repetitions, &result));
    return {result.milliseconds_min, result.milliseconds_median, result.milliseconds_max};
  }

  lawson_plan* handle() { return handle_.get(); }
  const lawson_plan* handle() const { return handle_.get(); }

 private:
  friend class Bundle;
  friend Plan compile(const Graph&, const Device&, const Options&);
  explicit Plan(lawson_plan* handle) : handle_{handle} {}
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

// Several plans in one file.
class Bundle {
 public:
  // Replaces the file in one step.
  static void write(const std::string& path, std::span<const Plan* const> plans) {
    std::vector<const lawson_plan*> handles;
    handles.reserve(plans.size());
    for (const Plan* plan : plans) handles.push_back(plan->handle());
    detail::check(lawson_bundle_write(path.c_str(), handles.data(), handles.size()));
  }
  static Bundle open(const std::string& path) {
    return Bundle{detail::make<lawson_bundle>(lawson_bundle_open, path.c_str())};
  }

  std::size_t size() const { return lawson_bundle_size(handle()); }
  Plan plan(std::size_t index) const {
    return Plan{detail::make<lawson_plan>(lawson_bundle_plan, handle(), index)};
  }
  const lawson_bundle* handle() const { return handle_.get(); }

 private:
  explicit Bundle(lawson_bundle* handle) : handle_{handle} {}
  detail::Handle<lawson_bundle, lawson_bundle_destroy> handle_;
};

}  // namespace lawson

#endif  // LAWSON_LAWSON_HPP_
