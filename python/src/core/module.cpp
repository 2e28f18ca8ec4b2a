#include "core/bind.h"

NB_MODULE(_core, module) {
  module.doc() = "Lawson's C++ API. Use the package `lawson`, which is over it.";
  lawson::python::bind_errors(module);
  lawson::python::bind_process(module);
  lawson::python::bind_graphs(module);
  lawson::python::bind_verdicts(module);
  lawson::python::bind_plans(module);
  lawson::python::bind_attention(module);
}
