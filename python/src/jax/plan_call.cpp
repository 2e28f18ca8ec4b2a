// "lawson_plan": one plan of a graph. Operands are the graph's inputs, results its outputs, both in
// the graph's order; by-value inputs come as the attribute `values`.
#include <array>
#include <atomic>

#include "jax/call.h"
#include "shared/scalars.h"

namespace lawson::jax {
namespace {

using python::Scalar;

Scalar scalar_of(const TensorInfo& tensor, const Attributes& attributes) {
  const auto it = attributes.values.find(tensor.name);
  if (it == attributes.values.end()) {
    refuse("input '" + tensor.name + "' is by value, and the attribute 'values' has none for it");
  }
  return python::scalar_of(tensor, it->second);
}

class PlanCall : public Call {
 public:
  explicit PlanCall(const ffi::Dictionary& all)
      : attributes_{all}, graph_{Graph::from_json(required_text(all, "graph"), "lawson_plan")} {
    for (const TensorInfo& tensor : graph_.tensors()) {
      if (tensor.is_by_value) {
        scalars_.push_back(scalar_of(tensor, attributes_));
      } else {
        (tensor.is_input ? inputs_ : outputs_).push_back(tensor);
      }
    }
  }

  void initialize(const Place& place) override { loaded(place); }

  void execute(const Place& place, const Buffers& buffers, void* stream) override {
    Loaded* found = places_.find(place);
    if (found == nullptr) {
      // XLA's CPU runtime need not have the stage, and nothing is captured there.
      if (place.is_cuda)
        refuse("plan " + attributes_.plan_id + " is not loaded on " + place.name());
      found = &loaded(place);
    }
    if (!found->is_checked.load(std::memory_order_acquire)) {
      check(buffers);
      found->is_checked.store(true, std::memory_order_release);
    }
    const std::size_t count = inputs_.size() + outputs_.size() + scalars_.size();
    if (count <= kUsual) {
      std::array<Binding, kUsual> bindings;
      run(*found, buffers, {bindings.data(), count}, stream);
    } else {
      std::vector<Binding> bindings(count);
      run(*found, buffers, bindings, stream);
    }
  }

 private:
  static constexpr std::size_t kUsual = 64;

  struct Loaded {
    std::unique_ptr<Fusion> shared;  // the process's plan; or, in its place,
    std::optional<Plan> own;         // the one that the program carries
    // A program's shapes are the same at every execution.
    std::atomic<bool> is_checked{false};

    const Plan& plan() const { return own ? *own : shared->plan(); }
  };

  // What the program carries is kept for the process; where that had another plan for the graph (of
  // a tuning, say), the program runs its own all the same.
  Loaded& loaded(const Place& place) {
    return places_.get(place, [&] {
      const Device device = Device::find(place.name());
      attributes_.keep_plan(device);
      FuseOptions fuse;
      fuse.device = place.name();
      fuse.policy = LAWSON_POLICY_REQUIRE;
      fuse.engines = {attributes_.options.engine};
      fuse.options = attributes_.options;
      fuse.options.engine.clear();
      auto made = std::make_unique<Loaded>();
      made->shared = std::make_unique<Fusion>(graph_, fuse);
      if (made->shared->plan().id() != attributes_.plan_id && attributes_.plan) {
        made->own = Plan::deserialize(attributes_.plan->serialize());
        made->own->load(device);
      }
      attributes_.check_id(made->plan().id());
      return made;
    });
  }

  void check(const Buffers& buffers) const {
    if (buffers.operand_count() != inputs_.size() || buffers.result_count() != outputs_.size()) {
      refuse("there are " + std::to_string(buffers.operand_count()) + " operands and " +
             std::to_string(buffers.result_count()) +
             " results beside the workspace; the graph has " + std::to_string(inputs_.size()) +
             " inputs and " + std::to_string(outputs_.size()) + " outputs");
    }
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      check(buffers.operand(i), inputs_[i], "input");
    }
    for (std::size_t i = 0; i < outputs_.size(); ++i) {
      check(buffers.result(i), outputs_[i], "output");
    }
  }

  static void check(const ffi::AnyBuffer& given, const TensorInfo& wanted, const char* kind) {
    const auto dims = given.dimensions();
    const bool same_dims =
        std::equal(dims.begin(), dims.end(), wanted.shape.begin(), wanted.shape.end());
    if (!same_dims || !same_dtype(given.element_type(), wanted.dtype)) {
      refuse(std::string{kind} + " '" + wanted.name + "' is " + describe(given) +
             "; the graph says " + describe(wanted.dtype, wanted.shape));
    }
    if (wanted.size > given.size_bytes()) {
      refuse(std::string{kind} + " '" + wanted.name + "' has " +
             std::to_string(given.size_bytes()) + " bytes; its strides in the graph reach over " +
             std::to_string(wanted.size));
    }
  }

  void run(const Loaded& loaded, const Buffers& buffers, std::span<Binding> bindings,
           void* stream) {
    std::size_t next = 0;
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      bindings[next++] = {inputs_[i].uid, buffers.operand(i).untyped_data()};
    }
    for (std::size_t i = 0; i < outputs_.size(); ++i) {
      bindings[next++] = {outputs_[i].uid, buffers.result(i).untyped_data()};
    }
    for (Scalar& scalar : scalars_) bindings[next++] = {scalar.uid, scalar.bytes.data()};
    loaded.plan().execute(bindings, buffers.workspace(), buffers.workspace_size(), stream);
  }

  Attributes attributes_;
  Graph graph_;
  std::vector<TensorInfo> inputs_;  // bound to buffers
  std::vector<TensorInfo> outputs_;
  std::vector<Scalar> scalars_;
  PerPlace<Loaded> places_;
};

}  // namespace

std::unique_ptr<Call> make_plan_call(const ffi::Dictionary& attributes) {
  return std::make_unique<PlanCall>(attributes);
}

}  // namespace lawson::jax
