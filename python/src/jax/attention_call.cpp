// "lawson_attention_forward" and "lawson_attention_backward": the attributes `names` and `outs` say
// which params the operands and results are, by the names of lawson_attention_param in lower case.
#include <algorithm>
#include <array>
#include <utility>

#include "jax/call.h"
#include "shared/attention_params.h"

namespace lawson::jax {
namespace {

// One operand or result.
struct Slot {
  lawson_attention_param param{};
  TensorInfo tensor;
};

// "q,k,v" with the tensors of the graph.
std::vector<Slot> read_slots(const ffi::Dictionary& all, std::string_view attribute,
                             const Graph& graph) {
  const std::string list = required_text(all, attribute);
  const std::vector<TensorInfo> tensors = graph.tensors();
  std::vector<Slot> slots;
  for (std::size_t begin = 0; begin < list.size();) {
    const std::size_t end = std::min(list.find(',', begin), list.size());
    const std::string name = list.substr(begin, end - begin);
    begin = end + 1;
    const auto param = python::attention_param(name);
    if (!param) {
      refuse("attribute '" + std::string{attribute} + "': '" + name +
             "' is no tensor of attention");
    }
    // A cache that is appended to has its operand's memory.
    const bool is_result = attribute == "outs";
    const auto tensor = std::find_if(tensors.begin(), tensors.end(), [&](const TensorInfo& info) {
      return info.is_input != is_result &&
             (info.name == name || (is_result && info.name == name + "_out"));
    });
    if (tensor == tensors.end()) {
      refuse("attribute '" + std::string{attribute} + "': the plan of this spec " +
             (is_result ? "writes" : "reads") + " no '" + name + "'");
    }
    slots.push_back({*param, *tensor});
  }
  return slots;
}

// As the config says; or, of a ragged tensor with fewer tokens than the plan has room for, with its
// outermost dim in memory as short as it is.
lawson_tensor tensor_of(const ffi::AnyBuffer& given, const TensorInfo& wanted) {
  const std::size_t bytes = given.size_bytes();
  if (!same_dtype(given.element_type(), wanted.dtype) || bytes > wanted.size) {
    refuse("tensor '" + wanted.name + "' is " + describe(given) + "; the spec says " +
           describe(wanted.dtype, wanted.shape));
  }
  if (bytes == wanted.size) return tensor(given.untyped_data());
  std::vector<std::int64_t> shape = wanted.shape;
  std::size_t outermost = 0;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    const bool is_first = shape[outermost] <= 1;
    if (shape[i] > 1 && (is_first || wanted.strides[i] > wanted.strides[outermost])) outermost = i;
  }
  const auto elements = static_cast<std::int64_t>(given.element_count());
  const std::int64_t row = shape.empty() ? 0 : wanted.strides[outermost];
  if (row == 0 || elements % row != 0) {
    refuse("tensor '" + wanted.name + "' is " + describe(given) + "; the spec says " +
           describe(wanted.dtype, wanted.shape));
  }
  shape[outermost] = elements / row;
  lawson_dtype dtype = LAWSON_DTYPE_UNSET;
  for (const auto& [name, known] :
       {std::pair{"f64", LAWSON_DTYPE_F64}, std::pair{"f32", LAWSON_DTYPE_F32},
        std::pair{"f16", LAWSON_DTYPE_F16}, std::pair{"bf16", LAWSON_DTYPE_BF16},
        std::pair{"i32", LAWSON_DTYPE_I32}}) {
    if (wanted.dtype == name) dtype = known;
  }
  return tensor(given.untyped_data(), dtype, shape, wanted.strides);
}

// Params are for one thread at a time: each execution takes a handle of its place and gives it
// back.
template <typename Params, auto Run, lawson_attention_pass Pass>
class AttentionCall : public Call {
 public:
  explicit AttentionCall(const ffi::Dictionary& all)
      : attributes_{all},
        config_{AttentionConfig::from_spec(required_text(all, "spec"), "lawson_attention")} {
    const Graph graph = config_.graph(Pass);
    operands_ = read_slots(all, "names", graph);
    results_ = read_slots(all, "outs", graph);
    for (const auto& [name, value] : attributes_.values) {
      if (name != "scale" && name != "sequences") {
        refuse("attribute 'values': '" + name + "' is not known; expected scale or sequences");
      }
    }
  }

  void initialize(const Place& place) override { at(place); }

  void execute(const Place& place, const Buffers& buffers, void* stream) override {
    Pool* pool = places_.find(place);
    if (pool == nullptr) {
      // XLA's CPU runtime need not have the stage, and nothing is captured there.
      if (place.is_cuda)
        refuse("plan " + attributes_.plan_id + " is not loaded on " + place.name());
      pool = &at(place);
    }
    std::unique_ptr<Handle> handle = pool->take();
    if (handle == nullptr) handle = make_handle(pool->device);
    const auto give_back = [&] { pool->give(std::move(handle)); };
    try {
      bind(*handle, buffers);
      Run(handle->params, buffers.workspace(), buffers.workspace_size(), stream);
    } catch (...) {
      give_back();
      throw;
    }
    give_back();
  }

 private:
  struct Handle {
    Params params;
    bool is_described = false;  // a program's shapes are the same at every execution
    std::vector<lawson_attention_pointer> pointers;
  };

  class Pool {
   public:
    explicit Pool(const Place& place) : device{Device::find(place.name())} {}

    std::unique_ptr<Handle> take() {
      const std::lock_guard lock{mutex_};
      if (idle_.empty()) return nullptr;
      std::unique_ptr<Handle> handle = std::move(idle_.back());
      idle_.pop_back();
      return handle;
    }
    void give(std::unique_ptr<Handle> handle) {
      const std::lock_guard lock{mutex_};
      idle_.push_back(std::move(handle));
    }

    const Device device;

   private:
    std::mutex mutex_;
    std::vector<std::unique_ptr<Handle>> idle_;
  };

  Pool& at(const Place& place) {
    return places_.get(place, [&] {
      auto pool = std::make_unique<Pool>(place);
      attributes_.keep_plan(pool->device);
      std::unique_ptr<Handle> first = make_handle(pool->device);
      const Plan plan = first->params.plan();
      attributes_.check_id(plan.id());
      pool->give(std::move(first));
      return pool;
    });
  }

  std::unique_ptr<Handle> make_handle(const Device& device) const {
    auto handle = std::make_unique<Handle>();
    handle->params.config(config_)
        .device(device)
        .engine(attributes_.options.engine)
        .workspace_limit(attributes_.options.workspace_limit)
        .deterministic(attributes_.options.deterministic)
        .tuning(attributes_.options.tuning);
    for (const auto& [name, value] : attributes_.values) {
      if (name == "scale") handle->params.scale(value);
      if (name == "sequences") handle->params.sequences(static_cast<std::int64_t>(value));
    }
    for (const std::vector<Slot>* slots : {&operands_, &results_}) {
      for (const Slot& slot : *slots) handle->params.tensor(slot.param, nullptr);
    }
    return handle;
  }

  void bind(Handle& handle, const Buffers& buffers) const {
    if (!handle.is_described) {
      describe_tensors(handle, buffers);
      return;
    }
    for (std::size_t i = 0; i < operands_.size(); ++i) {
      handle.pointers[i].data = buffers.operand(i).untyped_data();
    }
    for (std::size_t i = 0; i < results_.size(); ++i) {
      handle.pointers[operands_.size() + i].data = buffers.result(i).untyped_data();
    }
    check_aliases(handle);
    handle.params.pointers(handle.pointers);
  }

  void describe_tensors(Handle& handle, const Buffers& buffers) const {
    if (buffers.operand_count() != operands_.size() || buffers.result_count() != results_.size()) {
      refuse("there are " + std::to_string(buffers.operand_count()) + " operands and " +
             std::to_string(buffers.result_count()) +
             " results beside the workspace; 'names' has " + std::to_string(operands_.size()) +
             " and 'outs' " + std::to_string(results_.size()));
    }
    handle.pointers.clear();
    const auto describe_one = [&](const ffi::AnyBuffer& buffer, const Slot& slot) {
      handle.params.tensor(slot.param, tensor_of(buffer, slot.tensor));
      handle.pointers.push_back({slot.param, buffer.untyped_data()});
    };
    for (std::size_t i = 0; i < operands_.size(); ++i) {
      describe_one(buffers.operand(i), operands_[i]);
    }
    for (std::size_t i = 0; i < results_.size(); ++i) describe_one(buffers.result(i), results_[i]);
    check_aliases(handle);
    handle.is_described = true;
  }

  // What is operand and result (a cache that is appended to) is one memory.
  void check_aliases(const Handle& handle) const {
    for (std::size_t i = 0; i < results_.size(); ++i) {
      for (std::size_t j = 0; j < operands_.size(); ++j) {
        if (results_[i].param != operands_[j].param) continue;
        if (handle.pointers[operands_.size() + i].data == handle.pointers[j].data) continue;
        refuse("operand '" + operands_[j].tensor.name +
               "' is written in place: its result has to have its memory (input_output_aliases)");
      }
    }
  }

  Attributes attributes_;
  AttentionConfig config_;
  std::vector<Slot> operands_;
  std::vector<Slot> results_;
  PerPlace<Pool> places_;
};

}  // namespace

std::unique_ptr<Call> make_forward_call(const ffi::Dictionary& attributes) {
  return std::make_unique<AttentionCall<ForwardParams, forward, LAWSON_PASS_FORWARD>>(attributes);
}
std::unique_ptr<Call> make_backward_call(const ffi::Dictionary& attributes) {
  return std::make_unique<AttentionCall<BackwardParams, backward, LAWSON_PASS_BACKWARD>>(
      attributes);
}

}  // namespace lawson::jax
