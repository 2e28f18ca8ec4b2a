#include "core/bind.h"

NB_MODULE(_core, module) {
  // JAX's caches hold plans until the interpreter ends, and nanobind takes that for leaks.
  nanobind::set_leak_warnings(false);
  module.doc() = "Lawson's C++ API. Use the package `lawson`, which is over it.";
  lawson::python::bind_errors(module);
  lawson::python::bind_process(module);
  lawson::python::bind_graphs(module);
  lawson::python::bind_verdicts(module);
  lawson::python::bind_plans(module);
  lawson::python::bind_attention(module);
}
