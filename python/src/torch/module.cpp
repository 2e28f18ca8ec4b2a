#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "torch/bind.h"
#include "torch/prepared.h"

namespace nb = nanobind;
using namespace nb::literals;

NB_MODULE(_torch, module) {
  using lawson::torch::Prepared;
  // What a torch program keeps until the interpreter ends, nanobind takes for leaks.
  nb::set_leak_warnings(false);
  module.doc() = "Lawson's operations on torch's tensors. Use the package `lawson.torch`.";
  // Its types and its translation of errors serve here too.
  nb::module_::import_("lawson._core");
  lawson::torch::find_error_classes();

  module.def(
      "connect", [] { lawson::torch::Torch::connect(); },
      "Finds torch's DLPack exchange table. Raises UnavailableError, with torch's version\n"
      "and the least needed, where it has none.");

  nb::class_<Prepared>(module, "Prepared", nb::is_weak_referenceable(),
                       "A loaded plan bound to descriptions of tensors, for Call's `describe`.")
      .def_static(
          "attention", &lawson::torch::prepare_attention, "spec"_a, "pass_"_a, "names"_a, "outs"_a,
          "results"_a, "device"_a, "options"_a = nb::none(),
          "values"_a = std::map<std::string, double>{}, "copies"_a = std::vector<std::size_t>{},
          "Of an attention spec. `names`: which tensor each operand is, as q, k, stats, ...;\n"
          "None: none of the plan's. `outs`: which the outputs are. `results`, for each of\n"
          "`outs`: (shape, strides, dtype) of a tensor to make, or the index of the operand\n"
          "that is written in place. `device`: \"cpu\", \"cuda:N\". `values`: \"scale\" and\n"
          "\"sequences\". `copies`: operands whose contiguous copies are read.")
      .def_static(
          "fusion", &lawson::torch::prepare_fusion, "fusion"_a, "operands"_a, "results"_a,
          "values"_a = std::map<std::string, double>{}, "copies"_a = std::vector<std::size_t>{},
          "Of a fusion. `operands`: which operand each input of the graph is, those by value\n"
          "left out. `results`: as above, for each of the graph's outputs. `values`: of the\n"
          "inputs by value, by name.")
      .def_prop_ro("plan_id", [](const Prepared& self) { return self.plan().id(); })
      .def_prop_ro("engine", [](const Prepared& self) { return self.plan().engine(); })
      .def_prop_ro(
          "workspace_size", [](const Prepared& self) { return self.plan().workspace_size(); },
          "Bytes.")
      .def_prop_ro("device", &Prepared::device, "Empty before the first call.")
      .def_prop_ro("loaded", &Prepared::loaded, "The loaded plan, and how it was chosen.");
  lawson::torch::bind_call(module);
  lawson::torch::bind_quick(module);
}
