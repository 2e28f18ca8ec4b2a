// Attention through params handles (lawson/attention.h): what an operand is, its name says.
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <utility>

#include "shared/attention_params.h"
#include "torch/prepared.h"

namespace lawson::torch {
namespace {

// A cache that is appended to is written where it is read.
std::string_view without_out(std::string_view name) {
  return name.ends_with("_out") ? name.substr(0, name.size() - 4) : name;
}

lawson_attention_param param_of(const TensorInfo& tensor) {
  const auto param = python::attention_param(tensor.is_input ? std::string_view{tensor.name}
                                                             : without_out(tensor.name));
  if (param) return *param;
  refuse("'" + tensor.name + "' is no tensor of attention");
}

// The graph's input or output of that name.
TensorInfo tensor_named(const std::vector<TensorInfo>& tensors, const std::string& name,
                        bool is_input) {
  for (const TensorInfo& tensor : tensors) {
    if (tensor.is_by_value || tensor.is_input != is_input) continue;
    if (tensor.name == name || (!is_input && without_out(tensor.name) == name)) return tensor;
  }
  refuse(std::string{is_input ? "names" : "outs"} + ": the plan of this spec " +
         (is_input ? "reads" : "writes") + " no '" + name + "'");
}

// What all handles of one Prepared are given.
struct Description {
  AttentionConfig config;
  Device device;
  std::string device_name;
  Options options;
  std::map<std::string, double> values;
};

// Params are for one thread at a time: each run takes a handle and gives it back.
template <typename Params, auto Run>
class PreparedAttention : public Prepared {
 public:
  PreparedAttention(nb::object fusion, std::vector<Input> inputs, std::vector<Output> outputs,
                    std::vector<std::size_t> copies, Description description)
      : Prepared{std::move(fusion), std::move(inputs), std::move(outputs), std::move(copies)},
        description_{std::move(description)} {
    for (const Input& input : this->inputs()) {
      add(input.tensor);
      is_ragged_ = is_ragged_ || input.tensor.name.starts_with("cu_seqlens");
    }
    for (const Output& output : this->outputs()) add(output.tensor);
    std::unique_ptr<Handle> first = make_handle();
    const Plan found = first->params.plan();
    if (found.id() != plan().id()) {
      refuse("options: attention on tensors runs plan " + std::string{found.id()} +
             ", and with these options the plan is " + std::string{plan().id()} +
             "; expected ones that select no other plan (tuning)");
    }
    idle_.push_back(std::move(first));
  }

 protected:
  void launch(std::span<void* const> addresses, void* workspace, std::size_t workspace_size,
              void* stream) const override {
    std::unique_ptr<Handle> handle = take();
    if (handle == nullptr) handle = make_handle();
    for (std::size_t i = 0; i < addresses.size(); ++i) handle->pointers[i].data = addresses[i];
    try {
      handle->params.pointers(handle->pointers);
      Run(handle->params, workspace, workspace_size, stream);
    } catch (...) {
      give(std::move(handle));
      throw;
    }
    give(std::move(handle));
  }

  // The operand's axes are in the order of its layout, the graph's in the logical one. Of a ragged
  // batch the tensors may have fewer tokens and sequences than the plan has room for; then the
  // handles are told so, and from the first operands on they stay as they are.
  bool accepts(const Layout& given, const TensorInfo& wanted) override {
    std::optional<lawson_tensor> less;
    if (!same_memory(given, wanted)) {
      if (is_ragged_) less = shorter(given, wanted);
      if (!less) return false;
    }
    const auto [known, is_new] = described_.try_emplace(param_of(wanted), less);
    if (!is_new) {
      const auto shape = [](const std::optional<lawson_tensor>& tensor) {
        return tensor ? std::span{tensor->shape, static_cast<std::size_t>(tensor->rank)}
                      : std::span<const std::int64_t>{};
      };
      return std::ranges::equal(shape(less), shape(known->second));
    }
    if (less) {
      const std::lock_guard lock{mutex_};
      idle_.clear();
    }
    return true;
  }

  void check_place(const Place& place) const override {
    if (place.name() == description_.device_name ||
        (description_.device_name == "cuda" && place.name() == "cuda:0")) {
      return;
    }
    refuse("the operands are on " + place.name() + "; this was prepared for " +
           description_.device_name);
  }

 private:
  struct Handle {
    Params params;
    std::vector<lawson_attention_pointer> pointers;
  };

  void add(const TensorInfo& tensor) { params_.push_back(param_of(tensor)); }

  std::unique_ptr<Handle> take() const {
    const std::lock_guard lock{mutex_};
    if (idle_.empty()) return nullptr;
    std::unique_ptr<Handle> handle = std::move(idle_.back());
    idle_.pop_back();
    return handle;
  }
  void give(std::unique_ptr<Handle> handle) const {
    const std::lock_guard lock{mutex_};
    idle_.push_back(std::move(handle));
  }

  std::unique_ptr<Handle> make_handle() const {
    auto handle = std::make_unique<Handle>();
    handle->params.config(description_.config)
        .device(description_.device)
        .engine(description_.options.engine)
        .workspace_limit(description_.options.workspace_limit)
        .deterministic(description_.options.deterministic)
        .tuning(description_.options.tuning);
    for (const auto& [name, value] : description_.values) {
      if (name == "scale") handle->params.scale(value);
      if (name == "sequences") handle->params.sequences(static_cast<std::int64_t>(value));
    }
    for (const lawson_attention_param param : params_) {
      handle->params.tensor(param, nullptr);
      handle->pointers.push_back({param, nullptr});
    }
    for (const auto& [param, tensor] : described_) {
      if (tensor) handle->params.tensor(param, *tensor);
    }
    return handle;
  }

  Description description_;
  std::vector<lawson_attention_param> params_;  // of inputs, then of outputs
  bool is_ragged_ = false;
  // Nothing where a tensor is as the graph says.
  std::map<lawson_attention_param, std::optional<lawson_tensor>> described_;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Handle>> idle_;
};

// As lawson._core.attention_plan finds it.
nb::object load(const Graph& graph, const Description& description) {
  FuseOptions fuse;
  fuse.device = description.device_name;
  fuse.policy = LAWSON_POLICY_REQUIRE;
  fuse.engines = {description.options.engine};
  fuse.options = description.options;
  fuse.options.engine.clear();
  std::unique_ptr<Fusion> loaded;
  {
    const nb::gil_scoped_release unlocked;
    loaded = std::make_unique<Fusion>(graph, fuse);
  }
  return nb::cast(std::move(loaded));
}

}  // namespace

std::unique_ptr<Prepared> prepare_attention(const std::string& spec, const std::string& pass,
                                            const std::vector<std::optional<std::string>>& names,
                                            const std::vector<std::string>& outs,
                                            const nb::sequence& results, const std::string& device,
                                            const Options* options,
                                            const std::map<std::string, double>& values,
                                            std::vector<std::size_t> copies) {
  Torch::connect();
  if (pass != "forward" && pass != "backward") {
    refuse("pass: '" + pass + "' is not allowed; expected forward or backward");
  }
  for (const auto& [name, value] : values) {
    if (name != "scale" && name != "sequences") {
      refuse("values: '" + name + "' is not known; expected scale or sequences");
    }
  }
  if (device != "cpu" && device != "cuda" && !device.starts_with("cuda:")) {
    refuse("device: '" + device + "' is not allowed; expected cpu, cuda or cuda:N");
  }
  if (nb::len(results) != outs.size()) {
    refuse("there are " + std::to_string(nb::len(results)) + " results and " +
           std::to_string(outs.size()) + " outs; expected one for each");
  }
  Options chosen;
  if (options != nullptr) chosen = *options;
  chosen.strength = LAWSON_BUILT;
  if (chosen.engine.empty()) chosen.engine = device == "cpu" ? "cpu" : "cudnn";
  Description description{AttentionConfig::from_spec(spec, "attention"), Device::find(device),
                          device, std::move(chosen), values};
  const bool is_forward = pass == "forward";
  const Graph graph =
      description.config.graph(is_forward ? LAWSON_PASS_FORWARD : LAWSON_PASS_BACKWARD);
  const std::vector<TensorInfo> tensors = graph.tensors();
  std::vector<Input> inputs;
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (names[i]) inputs.push_back({i, tensor_named(tensors, *names[i], true)});
  }
  std::vector<Output> outputs;
  for (std::size_t i = 0; i < outs.size(); ++i) {
    outputs.push_back(read_output(results[i], tensor_named(tensors, outs[i], false), i));
  }
  nb::object fusion = load(graph, description);
  if (is_forward) {
    return std::make_unique<PreparedAttention<ForwardParams, forward>>(
        std::move(fusion), std::move(inputs), std::move(outputs), std::move(copies),
        std::move(description));
  }
  return std::make_unique<PreparedAttention<BackwardParams, backward>>(
      std::move(fusion), std::move(inputs), std::move(outputs), std::move(copies),
      std::move(description));
}

}  // namespace lawson::torch
