#include "torch/prepared.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>

#include "torch/workspace.h"

namespace lawson::torch {
namespace {

constexpr std::size_t kMaxAddresses = 2 * kMaxOperands;

// With what it is in the graph.
std::string operand_text(std::size_t index, const TensorInfo& tensor) {
  return "operand " + std::to_string(index) + " ('" + tensor.name + "')";
}

std::string wanted_text(const TensorInfo& tensor) {
  return describe(Layout{&dtype_named(tensor.dtype, "tensor '" + tensor.name + "'"), tensor.shape,
                         tensor.strides});
}

void check_alignment(const TensorInfo& tensor) {
  if (tensor.alignment >= 1 && tensor.alignment <= static_cast<int>(kMostAlignment)) return;
  refuse("tensor '" + tensor.name + "' of the plan has an alignment of " +
         std::to_string(tensor.alignment) + " bytes; expected at most " +
         std::to_string(kMostAlignment));
}

Layout contiguous(Layout layout) {
  std::int64_t next = 1;
  for (std::size_t i = layout.shape.size(); i-- > 0;) {
    layout.strides[i] = next;
    next *= std::max<std::int64_t>(layout.shape[i], 1);
  }
  return layout;
}

nb::object tuple_of(const std::vector<std::int64_t>& values) {
  return nb::steal(PyList_AsTuple(nb::cast(values).ptr()));
}

}  // namespace

Output read_output(nb::handle given, TensorInfo tensor, std::size_t index) {
  Output output;
  output.tensor = std::move(tensor);
  const std::string what = "results[" + std::to_string(index) + "]";
  if (PyLong_Check(given.ptr())) {
    output.operand = nb::cast<std::size_t>(given);
    return output;
  }
  std::string dtype;
  try {
    const auto parts = nb::cast<nb::tuple>(given);
    if (parts.size() != 3) throw nb::cast_error{};
    output.layout.shape = nb::cast<std::vector<std::int64_t>>(parts[0]);
    output.layout.strides = nb::cast<std::vector<std::int64_t>>(parts[1]);
    dtype = nb::cast<std::string>(parts[2]);
  } catch (const nb::cast_error&) {
    refuse(what + " is " + nb::cast<std::string>(nb::repr(given)) +
           "; expected (shape, strides, dtype), or an operand's index");
  }
  output.layout.dtype = &dtype_named(dtype, what);
  if (output.layout.shape.size() != output.layout.strides.size()) {
    refuse(what + ": " + describe(output.layout) + "; expected one stride for each dim");
  }
  output.arguments = nb::make_tuple(tuple_of(output.layout.shape), tuple_of(output.layout.strides),
                                    Torch::connect().dtype(output.layout.dtype->torch_name));
  return output;
}

Prepared::Prepared(nb::object fusion, std::vector<Input> inputs, std::vector<Output> outputs,
                   std::vector<std::size_t> copies)
    : fusion_{std::move(fusion)},
      loaded_{nb::cast<const Fusion*>(fusion_)},
      workspace_size_{loaded_->plan().workspace_size()},
      inputs_{std::move(inputs)},
      outputs_{std::move(outputs)},
      copies_{std::move(copies)} {
  if (inputs_.size() > kMaxOperands || outputs_.size() > kMaxOperands) {
    refuse("a call has at most " + std::to_string(kMaxOperands) +
           " operands and outputs; this has " + std::to_string(inputs_.size()) + " and " +
           std::to_string(outputs_.size()));
  }
  // Calls with operands of one form have this alignment in common, and no more.
  for (const Input& input : inputs_) check_alignment(input.tensor);
  for (const Output& output : outputs_) {
    check_alignment(output.tensor);
    if (!output.operand) continue;
    writes_in_place_ = true;
    if (is_copied(*output.operand)) {
      refuse(operand_text(*output.operand, output.tensor) +
             " is written in place, and 'copies' has it");
    }
  }
}

bool Prepared::is_copied(std::size_t operand) const {
  return std::find(copies_.begin(), copies_.end(), operand) != copies_.end();
}

Place Prepared::common_place(const Operands& operands) const {
  std::optional<std::size_t> first;
  for (std::size_t i = 0; i < operands.views.size(); ++i) {
    if (operands.is_none(i)) continue;
    if (!first) first = i;
    if (place_of(operands.views[i]) == place_of(operands.views[*first])) continue;
    refuse("operand " + std::to_string(i) + " is on " + place_of(operands.views[i]).name() +
           ", and operand " + std::to_string(*first) + " on " +
           place_of(operands.views[*first]).name() + "; expected one device");
  }
  if (!first) refuse("every operand is None; expected a tensor");
  return place_of(operands.views[*first]);
}

void Prepared::check_operand(const Operands& operands, std::size_t index,
                             const TensorInfo& wanted) {
  if (index >= operands.views.size()) {
    refuse(operand_text(index, wanted) + " is missing: there are " +
           std::to_string(operands.views.size()) + " operands");
  }
  if (operands.is_none(index)) refuse(operand_text(index, wanted) + " is None; expected a tensor");
  const DLTensor& view = operands.views[index];
  Layout given = layout_of(view);
  if (is_copied(index)) given = contiguous(std::move(given));
  if (!accepts(given, wanted)) {
    refuse(operand_text(index, wanted) + " is " + describe(given) + "; the plan is for " +
           wanted_text(wanted));
  }
  const auto address = reinterpret_cast<std::uintptr_t>(data_of(view));
  if (address % static_cast<std::uintptr_t>(wanted.alignment) != 0 && !is_copied(index)) {
    refuse(operand_text(index, wanted) + " is at an address that is no multiple of " +
           std::to_string(wanted.alignment) + " bytes, as the plan needs it; copy it");
  }
}

void Prepared::bind(const Operands& operands) {
  const Place place = common_place(operands);
  const bool plan_is_for_cpu = loaded_->device().name() == "cpu";
  if (place.is_cpu() != plan_is_for_cpu || (!place.is_cpu() && place.type != kDLCUDA) ||
      (place_ && place_ != place)) {
    refuse("the operands are on " + place.name() + "; the plan is for " +
           (place_ ? place_->name() : std::string{loaded_->device().name()}));
  }
  check_place(place);
  for (const Input& input : inputs_) check_operand(operands, input.operand, input.tensor);
  for (const Output& output : outputs_) {
    if (output.operand) {
      check_operand(operands, *output.operand, output.tensor);
    } else if (!accepts(output.layout, output.tensor)) {
      refuse("result '" + output.tensor.name + "' is " + describe(output.layout) +
             "; the plan writes " + wanted_text(output.tensor));
    }
  }
  place_ = place;
}

nb::object Prepared::run(const Operands& operands) const {
  const Torch& torch = Torch::get();
  std::array<void*, kMaxAddresses> addresses;
  std::vector<nb::object> held;
  std::size_t count = 0;
  for (const Input& input : inputs_) {
    if (!copies_.empty() && is_copied(input.operand)) {
      held.push_back(torch.contiguous(operands.objects[input.operand]));
      addresses[count++] = torch.address(held.back());
    } else {
      addresses[count++] = data_of(operands.views[input.operand]);
    }
  }
  nb::object results = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(outputs_.size())));
  if (!results.is_valid()) nb::raise_python_error();
  for (std::size_t i = 0; i < outputs_.size(); ++i) {
    const Output& output = outputs_[i];
    nb::object made;
    if (output.operand) {
      made = nb::borrow(operands.objects[*output.operand]);
      addresses[count++] = data_of(operands.views[*output.operand]);
    } else {
      made = torch.make(*place_, output.arguments);
      addresses[count++] = torch.address(made);
    }
    PyTuple_SET_ITEM(results.ptr(), static_cast<Py_ssize_t>(i), made.release().ptr());
  }
  void* const stream = torch.current_stream(*place_);
  const Workspace workspace{loaded_->device(), *place_, stream, workspace_size_};
  {
    // A launch waits where the stream's queue is full, perhaps for a callback that needs the lock.
    const nb::gil_scoped_release unlocked;
    launch({addresses.data(), count}, workspace.data(), workspace_size_, stream);
  }
  if (writes_in_place_) {
    for (const Output& output : outputs_) {
      if (output.operand) torch.increment_version(operands.objects[*output.operand]);
    }
  }
  return results;
}

}  // namespace lawson::torch
