// A plan of a graph: the graph's inputs are operands, its outputs results.
#include <nanobind/stl/string.h>

#include <array>

#include "shared/scalars.h"
#include "torch/prepared.h"

namespace lawson::torch {
namespace {

using python::Scalar;

Scalar scalar_of(const TensorInfo& tensor, const std::map<std::string, double>& values) {
  const auto it = values.find(tensor.name);
  if (it == values.end()) {
    refuse("input '" + tensor.name + "' is by value, and 'values' has none for it");
  }
  return python::scalar_of(tensor, it->second);
}

class PreparedFusion : public Prepared {
 public:
  PreparedFusion(nb::object fusion, std::vector<Input> inputs, std::vector<Output> outputs,
                 std::vector<std::size_t> copies, std::vector<Scalar> scalars)
      : Prepared{std::move(fusion), std::move(inputs), std::move(outputs), std::move(copies)},
        scalars_{std::move(scalars)} {}

 protected:
  void launch(std::span<void* const> addresses, void* workspace, std::size_t workspace_size,
              void* stream) const override {
    std::array<Binding, kMaxBindings> bindings;
    std::size_t count = 0;
    for (const Input& input : inputs()) {
      bindings[count] = {input.tensor.uid, addresses[count]};
      ++count;
    }
    for (const Output& output : outputs()) {
      bindings[count] = {output.tensor.uid, addresses[count]};
      ++count;
    }
    for (const Scalar& scalar : scalars_) {
      // Read, and never written.
      bindings[count++] = {scalar.uid, const_cast<std::byte*>(scalar.bytes.data())};
    }
    plan().execute({bindings.data(), count}, workspace, workspace_size, stream);
  }

  // A graph's input may have other axes than the operand; where it has the same, each is compared.
  bool accepts(const Layout& given, const TensorInfo& wanted) override {
    return given.shape == wanted.shape ? same_axes(given, wanted) : same_memory(given, wanted);
  }
  void check_place(const Place& /*place*/) const override {}

 private:
  static constexpr std::size_t kMaxBindings = 3 * kMaxOperands;

  std::vector<Scalar> scalars_;
};

}  // namespace

std::unique_ptr<Prepared> prepare_fusion(nb::object fusion,
                                         const std::vector<std::size_t>& operands,
                                         const nb::sequence& results,
                                         const std::map<std::string, double>& values,
                                         std::vector<std::size_t> copies) {
  Torch::connect();
  std::vector<Input> inputs;
  std::vector<Output> outputs;
  std::vector<Scalar> scalars;
  std::size_t input_count = 0;
  std::size_t output_count = 0;
  const std::size_t result_count = nb::len(results);
  for (TensorInfo& tensor : nb::cast<const Fusion*>(fusion)->graph().tensors()) {
    if (tensor.is_by_value) {
      scalars.push_back(scalar_of(tensor, values));
    } else if (tensor.is_input) {
      if (input_count++ < operands.size()) {
        inputs.push_back({operands[inputs.size()], std::move(tensor)});
      }
    } else if (output_count++ < result_count) {
      const std::size_t index = outputs.size();
      outputs.push_back(read_output(results[index], std::move(tensor), index));
    }
  }
  if (input_count != operands.size() || output_count != result_count) {
    refuse("there are " + std::to_string(operands.size()) + " operands and " +
           std::to_string(result_count) + " results; the graph has " + std::to_string(input_count) +
           " inputs and " + std::to_string(output_count) + " outputs");
  }
  if (scalars.size() > kMaxOperands) {
    refuse("the graph has " + std::to_string(scalars.size()) + " inputs by value; at most " +
           std::to_string(kMaxOperands) + " are possible");
  }
  return std::make_unique<PreparedFusion>(std::move(fusion), std::move(inputs), std::move(outputs),
                                          std::move(copies), std::move(scalars));
}

}  // namespace lawson::torch
