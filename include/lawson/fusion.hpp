// Fusions in C++: a function of tensors becomes one plan, or an error that says why not. Part of
// lawson.hpp; docs/fusion.md is the guide.
//
//   using namespace lawson::dtypes;
//   auto fused = lawson::fuse([](lawson::Tensor x, lawson::Tensor y, lawson::Tensor z) {
//     return lawson::convert(lawson::matmul(lawson::convert(x, bf16), y), f32) + z;
//   });
//   fused({{x, {2, 16, 16}}, {y, bf16, {2, 16, 16}}, {z, {2, 16, 16}}}, {{out, {2, 16, 16}}});
//
// A fused function may be called by several threads at once, and so may its function. What it does
// must depend on nothing but dtypes and shapes, or on values that rarely change: each distinct
// trace is a plan of its own.
#ifndef LAWSON_FUSION_HPP_
#define LAWSON_FUSION_HPP_

#include <lawson/ops.hpp>

#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <tuple>
#include <unordered_map>

namespace lawson {

// Memory of a device of this machine, for programs without a framework of their own.
class Memory {
 public:
  Memory(const Device& device, std::size_t size)
      : handle_{detail::make<lawson_memory>(lawson_memory_create, device.handle(), size)} {}

  void* data() const { return lawson_memory_data(handle_.get()); }  // the device's address
  std::size_t size() const { return lawson_memory_size(handle_.get()); }
  template <typename T, std::size_t N>
  void write(std::span<T, N> values) {
    detail::check(lawson_memory_write(handle_.get(), 0, values.data(), values.size_bytes()));
  }
  // Waits for the device first.
  template <typename T, std::size_t N>
  void read(std::span<T, N> values) const {
    detail::check(lawson_memory_read(handle_.get(), 0, values.data(), values.size_bytes()));
  }

 private:
  detail::Handle<lawson_memory, lawson_memory_destroy> handle_;
};

namespace detail {
template <typename T>
inline constexpr lawson_dtype dtype_of = LAWSON_DTYPE_UNSET;
template <>
inline constexpr lawson_dtype dtype_of<double> = LAWSON_DTYPE_F64;
template <>
inline constexpr lawson_dtype dtype_of<float> = LAWSON_DTYPE_F32;
template <>
inline constexpr lawson_dtype dtype_of<std::int64_t> = LAWSON_DTYPE_I64;
template <>
inline constexpr lawson_dtype dtype_of<std::int32_t> = LAWSON_DTYPE_I32;
template <>
inline constexpr lawson_dtype dtype_of<std::int8_t> = LAWSON_DTYPE_I8;
template <>
inline constexpr lawson_dtype dtype_of<std::uint8_t> = LAWSON_DTYPE_U8;
template <>
inline constexpr lawson_dtype dtype_of<bool> = LAWSON_DTYPE_BOOL;
}  // namespace detail

// What lies at an address: device memory, or host memory for the engines on the CPU. The address
// may be missing where nothing is run.
class Array {
 public:
  // Contiguous without strides, which are in elements.
  Array(const void* data, lawson_dtype dtype, const Dims& shape, const Dims& strides = {})
      : data_{const_cast<void*>(data)}, dtype_{dtype}, shape_{shape}, strides_{strides} {
    if (strides_.size() == shape_.size()) return;
    if (!strides_.empty()) {
      throw Error(LAWSON_INVALID_ARGUMENT, "an array of rank " + std::to_string(shape_.size()) +
                                               " with " + std::to_string(strides_.size()) +
                                               " strides");
    }
    strides_ = shape_;
    std::int64_t next = 1;
    for (std::size_t i = shape_.size(); i-- > 0;) {
      strides_.begin()[i] = next;
      // Shapes are checked by the library, which needs them unharmed.
      if (shape_[i] > 0 && next < (std::int64_t{1} << 40)) next *= shape_[i];
    }
  }
  template <typename T>
  requires(detail::dtype_of<std::remove_const_t<T>> != LAWSON_DTYPE_UNSET)
      Array(T* data, const Dims& shape, const Dims& strides = {})
      : Array{data, detail::dtype_of<std::remove_const_t<T>>, shape, strides} {}
  // Described only, for graph() and plan().
  Array(lawson_dtype dtype, const Dims& shape, const Dims& strides = {})
      : Array{static_cast<const void*>(nullptr), dtype, shape, strides} {}

  // One value on the host, read when it runs, on every device.
  template <typename T>
  static Array scalar(const T& value) {
    Array array{&value, Dims{}};
    array.is_by_value_ = true;
    return array;
  }

  // Its address is a multiple of so many bytes, instead of 16.
  Array& aligned(int bytes) {
    alignment_ = bytes == 0 ? 16 : bytes;
    return *this;
  }

  void* data() const { return data_; }
  lawson_dtype dtype() const { return dtype_; }
  const Dims& shape() const { return shape_; }
  const Dims& strides() const { return strides_; }
  int alignment() const { return alignment_; }
  bool is_by_value() const { return is_by_value_; }

 private:
  void* data_;
  lawson_dtype dtype_;
  Dims shape_;
  Dims strides_;
  int alignment_ = 16;
  bool is_by_value_ = false;
};

struct FuseOptions {
  std::string name = "fusion";
  // "cpu", "cuda:1", ...; empty: where the engine runs (cudnn: this machine's first GPU).
  std::string device = {};
  lawson_policy policy = LAWSON_POLICY_UNSET;  // LAWSON_POLICY of the environment, else require
  std::vector<std::string> engines = {};       // LAWSON_ENGINE of the environment, else cudnn
  bool strict = false;                         // intermediates are rounded exactly as written
  std::vector<std::string> inputs = {};        // names, for messages and gradients
  std::vector<std::string> outputs = {};
  Options options = {};  // limits and tuning; its engine and strength stay as they are
};

// A loaded plan, and how it was chosen (lawson_fusion).
class Fusion {
 public:
  // `stream`: where it will run; while that captures, a plan that is not ready is an error.
  Fusion(const Graph& graph, const FuseOptions& options = {}, void* stream = nullptr)
      : Fusion{graph.handle(), options, stream} {}
  Fusion(const lawson_graph* graph, const FuseOptions& options, void* stream)
      : handle_{make(graph, options, stream)},
        plan_{lawson_fusion_plan(handle_.get())},
        verdict_{lawson_fusion_verdict(handle_.get())},
        device_{lawson_fusion_device(handle_.get())},
        graph_{lawson_fusion_graph(handle_.get())} {}

  // They live as long as this object.
  const Plan& plan() const { return plan_; }
  const Verdict& verdict() const { return verdict_; }
  const Device& device() const { return device_; }
  const Graph& graph() const { return graph_; }
  std::string_view engine() const { return plan_.engine(); }
  // Policy, engines, what was tried before, verdict and graph (lawson_fusion_json).
  std::string json() const { return detail::text_of(lawson_fusion_json, handle()); }

  // Inputs by uid from 1 on, then outputs.
  void execute(std::span<const Binding> bindings, void* workspace = nullptr,
               std::size_t workspace_size = 0, void* stream = nullptr) const {
    detail::check(lawson_fusion_execute(handle(), bindings.data(), bindings.size(), workspace,
                                        workspace_size, stream));
  }
  const lawson_fusion* handle() const { return handle_.get(); }

 private:
  static lawson_fusion* make(const lawson_graph* graph, const FuseOptions& options, void* stream) {
    std::optional<Device> device;
    if (!options.device.empty()) device.emplace(Device::find(options.device));
    std::vector<const char*> engines;
    for (const std::string& engine : options.engines) engines.push_back(engine.c_str());
    const lawson_options given = options.options.c();
    const lawson_fuse_options fuse{sizeof(lawson_fuse_options),
                                   options.policy,
                                   engines.empty() ? nullptr : engines.data(),
                                   engines.size(),
                                   &given,
                                   stream};
    return detail::make<lawson_fusion>(lawson_fuse, graph, device ? device->handle() : nullptr,
                                       &fuse);
  }

  detail::Handle<lawson_fusion, lawson_fusion_destroy> handle_;
  Plan plan_;
  Verdict verdict_;
  Device device_;
  Graph graph_;
};

// The backward graph: gradients of the inputs `wrt` from cotangents of the outputs
// (lawson_graph_gradient).
inline Graph gradient(const Graph& graph, const std::vector<std::string>& wrt) {
  std::vector<const char*> names;
  for (const std::string& name : wrt) names.push_back(name.c_str());
  return Graph{detail::make<lawson_graph>(lawson_graph_gradient, graph.handle(), names.data(),
                                          names.size())};
}

struct RunOptions {
  void* stream = nullptr;          // a CUstream
  void* workspace = nullptr;       // null: of this library, one for each stream
  std::size_t workspace_size = 0;  // bytes; at least plan().workspace_size()
};

namespace detail {

inline constexpr std::size_t kMaxArrays = 32;  // inputs, and outputs

// What a trace depends on: dtypes, shapes, strides and alignments, as one run of words. Outputs are
// in it only where they are not contiguous or not aligned to 16 bytes.
class Signature {
 public:
  Signature(std::span<const Array> inputs, std::span<const Array> outputs) {
    if (inputs.size() > kMaxArrays || outputs.size() > kMaxArrays) {
      throw Error(LAWSON_INVALID_ARGUMENT,
                  "a fusion has at most " + std::to_string(kMaxArrays) + " inputs and outputs");
    }
    add(inputs.size());
    for (const Array& array : inputs) add(array);
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (is_plain(outputs[i])) continue;
      add(i);
      add(outputs[i]);
    }
  }

  std::span<const std::uint64_t> words() const { return {words_.data(), size_}; }
  std::uint64_t hash() const { return hash_; }

  // As the library would lay it out by itself.
  static bool is_plain(const Array& array) {
    std::int64_t next = 1;
    for (std::size_t i = array.shape().size(); i-- > 0;) {
      if (array.shape()[i] > 1 && array.strides()[i] != next) return false;
      next *= array.shape()[i];
    }
    return array.alignment() == 16;
  }

 private:
  void add(std::uint64_t word) {
    words_[size_++] = word;
    hash_ = (hash_ ^ word) * 0x9E3779B97F4A7C15U;
    hash_ ^= hash_ >> 29;
  }
  void add(const Array& array) {
    add(static_cast<std::uint64_t>(array.dtype()) | array.shape().size() << 8 |
        static_cast<std::uint64_t>(array.is_by_value()) << 16 |
        static_cast<std::uint64_t>(array.alignment()) << 24);
    for (const std::int64_t dim : array.shape()) add(static_cast<std::uint64_t>(dim));
    for (const std::int64_t stride : array.strides()) add(static_cast<std::uint64_t>(stride));
  }

  std::array<std::uint64_t, 2 * kMaxArrays*(2 + 2 * LAWSON_MAX_RANK) + 1> words_;
  std::size_t size_ = 0;
  std::uint64_t hash_ = 0;
};

// Host memory for CPU engines: one for each thread, kept and grown.
inline constinit thread_local bool host_workspace_is_gone = false;
inline void* host_workspace(std::size_t size) {
  constexpr std::size_t kAlignment = 64;
  struct Memory : std::vector<std::byte> {
    ~Memory() { host_workspace_is_gone = true; }
  };
  if (host_workspace_is_gone) {  // destructors of the thread's other objects may come later
    throw Error(LAWSON_INVALID_ARGUMENT,
                "this thread is ending, and its workspace is gone: give one (RunOptions)");
  }
  thread_local Memory memory;
  if (memory.size() < size + kAlignment) memory.resize(size + kAlignment);
  void* start = memory.data();
  std::size_t space = memory.size();
  return std::align(kAlignment, size, start, space);
}

// A recorded function, its graph, and its plan once one was asked for.
class Traced {
 public:
  Traced(Record record, Handle<lawson_graph, lawson_graph_destroy> graph)
      : record_{std::move(record)}, graph_{std::move(graph)} {}

  const Record& record() const { return record_; }
  const lawson_graph* graph() const { return graph_.get(); }

  const Fusion& fusion(const FuseOptions& options, void* stream) const {
    if (const Fusion* ready = ready_.load(std::memory_order_acquire)) return *ready;
    // No lock while it is built: the library builds once however many threads ask.
    auto made = std::make_unique<Fusion>(graph_.get(), options, stream);
    const std::lock_guard lock{mutex_};
    if (fusion_ == nullptr) {
      fusion_ = std::move(made);
      ready_.store(fusion_.get(), std::memory_order_release);
    }
    return *fusion_;
  }

  // What is submitted to one stream runs in order, so that one workspace does.
  void* workspace(const Fusion& fusion, void* stream) const {
    const std::size_t size = fusion.plan().workspace_size();
    if (size == 0) return nullptr;
    if (fusion.device().name() == "cpu") return host_workspace(size);
    const std::lock_guard lock{mutex_};
    auto found = workspaces_.find(stream);
    if (found == workspaces_.end()) {
      int capturing = 0;
      check(lawson_device_capturing(fusion.device().handle(), stream, &capturing));
      if (capturing != 0) {
        throw Error(LAWSON_INVALID_ARGUMENT,
                    "the stream is being captured, and nothing is allocated meanwhile: run it once "
                    "on this stream before, or give a workspace (RunOptions)");
      }
      found = workspaces_.emplace(stream, Memory{fusion.device(), size}).first;
    }
    return found->second.data();
  }

 private:
  const Record record_;
  const Handle<lawson_graph, lawson_graph_destroy> graph_;
  mutable std::mutex mutex_;
  mutable std::unique_ptr<Fusion> fusion_;
  mutable std::atomic<const Fusion*> ready_{nullptr};
  mutable std::map<void*, Memory> workspaces_;
};

// The traces of one function, by signature; bounded, the oldest leaves first.
class Traces {
 public:
  using Variants = std::vector<std::shared_ptr<const Traced>>;  // the last one added first

  std::shared_ptr<const Traced> find(const Signature& signature) const {
    const std::shared_lock lock{mutex_};
    const Entry* entry = entry_of(signature);
    return entry == nullptr ? nullptr : entry->variants.front();
  }

  Variants variants(const Signature& signature) const {
    const std::shared_lock lock{mutex_};
    const Entry* entry = entry_of(signature);
    return entry == nullptr ? Variants{} : entry->variants;
  }

  // What is kept: another thread may have traced the same meanwhile.
  std::shared_ptr<const Traced> add(const Signature& signature,
                                    std::shared_ptr<const Traced> traced) {
    std::shared_ptr<const Traced> dropped;  // ends after the lock, as does what is gone
    std::list<Entry> gone;
    const std::lock_guard lock{mutex_};
    if (Entry* entry = entry_of(signature)) {
      for (const auto& known : entry->variants) {
        if (known->record().is_equal(traced->record())) return known;
      }
      entry->variants.insert(entry->variants.begin(), traced);
      if (entry->variants.size() > kMaxVariants) {
        dropped = std::move(entry->variants.back());
        entry->variants.pop_back();
      }
      return traced;
    }
    if (entries_.size() == kMaxSignatures) {
      index_.erase(entries_.front().position);
      gone.splice(gone.end(), entries_, entries_.begin());
    }
    const auto words = signature.words();
    entries_.push_back({{words.begin(), words.end()}, {traced}, {}});
    entries_.back().position = index_.emplace(signature.hash(), &entries_.back());
    return traced;
  }

 private:
  static constexpr std::size_t kMaxSignatures = 256;
  static constexpr std::size_t kMaxVariants = 8;

  struct Entry;
  using Index = std::unordered_multimap<std::uint64_t, Entry*>;
  struct Entry {
    std::vector<std::uint64_t> words;
    Variants variants;
    Index::iterator position;
  };

  Entry* entry_of(const Signature& signature) const {
    const auto [begin, end] = index_.equal_range(signature.hash());
    for (auto it = begin; it != end; ++it) {
      const auto words = signature.words();
      if (std::equal(words.begin(), words.end(), it->second->words.begin(),
                     it->second->words.end())) {
        return it->second;
      }
    }
    return nullptr;
  }

  mutable std::shared_mutex mutex_;
  std::list<Entry> entries_;  // the oldest first
  Index index_;
};

// Outputs of a traced function, as it returns them: a tensor, a tuple, pair or array, a range.
class Outputs {
 public:
  template <typename R>
  void collect(const Tracer& tracer, const R& returned) {
    if constexpr (std::is_same_v<R, Tensor>) {
      if (size_ == indices_.size()) {
        throw Error(LAWSON_INVALID_ARGUMENT, "a fusion has at most 32 outputs");
      }
      indices_[size_] = tracer.index_of(returned, "output");
      if (indices_[size_] < 0) {
        throw Error(LAWSON_INVALID_ARGUMENT,
                    "output " + std::to_string(size_) + " is an absent tensor");
      }
      ++size_;
    } else if constexpr (requires { std::tuple_size<R>::value; }) {
      std::apply([&](const auto&... each) { (collect(tracer, each), ...); }, returned);
    } else {
      for (const auto& each : returned) collect(tracer, each);
    }
  }
  std::span<const std::int32_t> indices() const { return {indices_.data(), size_}; }

 private:
  std::array<std::int32_t, kMaxArrays> indices_;
  std::size_t size_ = 0;
};

}  // namespace detail

// A function of tensors as plans, one for each signature of its inputs. Copies share their plans.
template <typename F>
class Fused {
 public:
  explicit Fused(F function, FuseOptions options = {})
      : state_{std::make_shared<State>(std::move(function), std::move(options))} {}

  // Runs: asynchronous on options.stream on a GPU, done when it returns on the CPU. Outputs are the
  // caller's memory, of the shape and dtype that the function gives.
  void operator()(std::span<const Array> inputs, std::span<const Array> outputs,
                  const RunOptions& options = {}) const {
    const std::shared_ptr<const detail::Traced> traced = trace(inputs, outputs);
    check_outputs(*traced, outputs);
    const Fusion& fusion = traced->fusion(state_->options, options.stream);
    std::array<Binding, 2 * detail::kMaxArrays> bindings;
    std::size_t count = 0;
    const auto bind = [&](std::span<const Array> list, const char* what) {
      for (std::size_t i = 0; i < list.size(); ++i) {
        check_address(list[i], what, i);
        bindings[count] = {static_cast<std::int64_t>(count) + 1, list[i].data()};
        ++count;
      }
    };
    bind(inputs, "input ");
    bind(outputs, "output ");
    void* workspace = options.workspace;
    std::size_t size = options.workspace_size;
    if (workspace == nullptr) {
      workspace = traced->workspace(fusion, options.stream);
      size = fusion.plan().workspace_size();
    }
    fusion.execute({bindings.data(), count}, workspace, size, options.stream);
  }
  void operator()(std::initializer_list<Array> inputs, std::initializer_list<Array> outputs,
                  const RunOptions& options = {}) const {
    (*this)(span_of(inputs), span_of(outputs), options);
  }

  // The plan that a call with such arrays runs, and all about it; built if it is not there.
  std::shared_ptr<const Fusion> plan(std::span<const Array> inputs,
                                     std::span<const Array> outputs = {},
                                     void* stream = nullptr) const {
    auto traced = trace(inputs, outputs);
    if (!outputs.empty()) check_outputs(*traced, outputs);
    const Fusion& fusion = traced->fusion(state_->options, stream);
    return {std::move(traced), &fusion};
  }
  std::shared_ptr<const Fusion> plan(std::initializer_list<Array> inputs,
                                     std::initializer_list<Array> outputs = {},
                                     void* stream = nullptr) const {
    return plan(span_of(inputs), span_of(outputs), stream);
  }

  // The graph that it is, for probe, compile, explain or gradient: needs no device.
  Graph graph(std::span<const Array> inputs, std::span<const Array> outputs = {}) const {
    detail::Signature signature{inputs, outputs};
    const Source source{*state_, signature, inputs};
    detail::Tracer tracer{source, nullptr};
    const detail::Outputs made = run(tracer, inputs.size());
    return Graph{finish(tracer, made, outputs).release()};
  }
  Graph graph(std::initializer_list<Array> inputs,
              std::initializer_list<Array> outputs = {}) const {
    return graph(span_of(inputs), span_of(outputs));
  }

  const FuseOptions& options() const { return state_->options; }

 private:
  struct State {
    State(F f, FuseOptions o) : function{std::move(f)}, options{std::move(o)} {}
    const F function;
    const FuseOptions options;
    detail::Traces traces;
  };

  // Traces of this function for one signature.
  class Source : public detail::TraceSource {
   public:
    Source(const State& state, const detail::Signature& signature, std::span<const Array> inputs)
        : state_{state}, signature_{signature}, inputs_{inputs} {}

    std::unique_ptr<detail::Recording> record() const override {
      const auto& names = state_.options.inputs;
      std::vector<lawson_graph_input> list;
      for (std::size_t i = 0; i < inputs_.size(); ++i) {
        const Array& array = inputs_[i];
        lawson_graph_input input{};
        input.struct_size = sizeof(input);
        input.name = i < names.size() ? names[i].c_str() : nullptr;
        input.dtype = array.dtype();
        input.rank = static_cast<std::int32_t>(array.shape().size());
        std::copy(array.shape().begin(), array.shape().end(), input.shape);
        input.strides = array.strides().data();
        input.alignment = array.alignment();
        input.by_value = array.is_by_value() ? 1 : 0;
        list.push_back(input);
      }
      return std::make_unique<detail::Recording>(state_.options.name, state_.options.strict, list);
    }

    const detail::Record* other(const detail::Record& known, std::size_t count,
                                const detail::Call& call) const override {
      if (variants_.empty()) variants_ = state_.traces.variants(signature_);
      for (const auto& variant : variants_) {
        const detail::Record& record = variant->record();
        if (&record != &known && record.op_count() > count && record.is_same(count, call) &&
            record.begins_as(known, count)) {
          return &record;
        }
      }
      return nullptr;
    }

    // Of a record that other() gave.
    std::shared_ptr<const detail::Traced> owner(const detail::Record* record) const {
      for (const auto& variant : variants_) {
        if (&variant->record() == record) return variant;
      }
      return nullptr;
    }

   private:
    const State& state_;
    const detail::Signature& signature_;
    std::span<const Array> inputs_;
    mutable detail::Traces::Variants variants_;  // held while this trace may use them
  };

  static std::span<const Array> span_of(std::initializer_list<Array> list) {
    return {list.begin(), list.size()};
  }

  std::shared_ptr<const detail::Traced> trace(std::span<const Array> inputs,
                                              std::span<const Array> outputs) const {
    const detail::Signature signature{inputs, outputs};
    std::shared_ptr<const detail::Traced> known = state_->traces.find(signature);
    const Source source{*state_, signature, inputs};
    detail::Tracer tracer{source, known == nullptr ? nullptr : &known->record()};
    const detail::Outputs made = run(tracer, inputs.size());
    if (const detail::Record* same = tracer.finish(made.indices())) {
      return same == &known->record() ? known : source.owner(same);
    }
    auto graph = finish(tracer, made, outputs);
    return state_->traces.add(
        signature, std::make_shared<const detail::Traced>(std::move(tracer.recording().record),
                                                          std::move(graph)));
  }

  detail::Handle<lawson_graph, lawson_graph_destroy> finish(detail::Tracer& tracer,
                                                            const detail::Outputs& made,
                                                            std::span<const Array> outputs) const {
    const auto& names = state_->options.outputs;
    std::vector<lawson_graph_output> layouts;
    for (std::size_t i = 0; i < made.indices().size(); ++i) {
      lawson_graph_output layout{};
      layout.struct_size = sizeof(layout);
      layout.name = i < names.size() ? names[i].c_str() : nullptr;
      if (i < outputs.size()) {
        check_output(tracer.traced(made.indices()[i]), outputs[i], i);
        layout.strides = outputs[i].strides().data();
        layout.alignment = outputs[i].alignment();
      }
      layouts.push_back(layout);
    }
    return tracer.recording().finish(made.indices(), layouts);
  }

  detail::Outputs run(detail::Tracer& tracer, std::size_t count) const {
    std::array<Tensor, detail::kMaxArrays> tensors;
    for (std::size_t i = 0; i < count; ++i) tensors[i] = tracer.input(i);
    detail::Outputs outputs;
    const std::span<const Tensor> given{tensors.data(), count};
    // A generic function takes tensors, not their list.
    if constexpr (takes<1>()) {
      invoke<1>(tracer, given, outputs);
    } else if constexpr (std::is_invocable_v<const F&, std::span<const Tensor>>) {
      outputs.collect(tracer, state_->function(given));
    } else {
      invoke<0>(tracer, given, outputs);
    }
    return outputs;
  }

  static constexpr std::size_t kMaxArity = 16;

  template <std::size_t N>
  static constexpr bool takes() {
    return []<std::size_t... I>(std::index_sequence<I...>) {
      return std::is_invocable_v<const F&, decltype((static_cast<void>(I), Tensor{}))...>;
    }
    (std::make_index_sequence<N>{});
  }

  // "2", "1 or 3"
  static std::string arities() {
    std::string text;
    [&]<std::size_t... N>(std::index_sequence<N...>) {
      const auto add = [&](std::size_t n) {
        text += (text.empty() ? "" : " or ") + std::to_string(n);
      };
      ((takes<N>() ? add(N) : void()), ...);
    }
    (std::make_index_sequence<kMaxArity + 1>{});
    return text.empty() ? "something else" : text;
  }

  template <std::size_t N>
  void invoke(detail::Tracer& tracer, std::span<const Tensor> given,
              detail::Outputs& outputs) const {
    if constexpr (N > kMaxArity) {
      throw Error(LAWSON_INVALID_ARGUMENT,
                  "fusion '" + state_->options.name + "': its function does not take " +
                      std::to_string(given.size()) + " tensors; it takes " + arities());
    } else {
      if constexpr (takes<N>()) {
        if (given.size() == N) {
          [&]<std::size_t... I>(std::index_sequence<I...>) {
            outputs.collect(tracer, state_->function(given[I]...));
          }
          (std::make_index_sequence<N>{});
          return;
        }
      }
      invoke<N + 1>(tracer, given, outputs);
    }
  }

  void check_outputs(const detail::Traced& traced, std::span<const Array> outputs) const {
    const detail::Record& record = traced.record();
    if (outputs.size() != record.outputs.size()) {
      throw Error(LAWSON_INVALID_ARGUMENT, "fusion '" + state_->options.name + "' gives " +
                                               std::to_string(record.outputs.size()) +
                                               " outputs; memory for " +
                                               std::to_string(outputs.size()) + " is given");
    }
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      check_output(record.tensors[static_cast<std::size_t>(record.outputs[i])], outputs[i], i);
    }
  }

  void check_output(const detail::TracedTensor& made, const Array& memory, std::size_t i) const {
    if (made.dtype == memory.dtype() && made.shape == memory.shape()) return;
    throw Error(LAWSON_INVALID_ARGUMENT,
                "fusion '" + state_->options.name + "': output " + std::to_string(i) + " is " +
                    detail::text_of_tensor(made.dtype, made.shape) + "; the memory is for " +
                    detail::text_of_tensor(memory.dtype(), memory.shape()));
  }

  void check_address(const Array& array, const char* what, std::size_t index) const {
    const auto address = std::bit_cast<std::uintptr_t>(array.data());
    const auto alignment = static_cast<std::uintptr_t>(array.is_by_value() ? 1 : array.alignment());
    if (address != 0 && address % alignment == 0) return;
    const Dims& shape = array.shape();
    if (address == 0 && std::find(shape.begin(), shape.end(), 0) != shape.end()) return;
    throw Error(LAWSON_INVALID_ARGUMENT,
                "fusion '" + state_->options.name + "': " + what + std::to_string(index) +
                    (address == 0 ? " has no address"
                                  : ": its address is no multiple of " + std::to_string(alignment) +
                                        " bytes; say which it is: Array::aligned"));
  }

  std::shared_ptr<State> state_;
};

// The function as a fusion. `F`: Tensor... (or std::span<const Tensor>) -> a Tensor, or a tuple,
// pair, array or vector of them. It is traced when it is called.
template <typename F>
Fused<F> fuse(F function, FuseOptions options = {}) {
  return Fused<F>{std::move(function), std::move(options)};
}

// A graph as a fusion: the loaded plan.
inline Fusion fuse(const Graph& graph, const FuseOptions& options = {}) {
  return Fusion{graph, options};
}

}  // namespace lawson

#endif  // LAWSON_FUSION_HPP_
