// The short way into an attention: nothing of Python's runs between the call of a function and the
// launch of its plan.
#ifndef LAWSON_PYTHON_TORCH_QUICK_H_
#define LAWSON_PYTHON_TORCH_QUICK_H_

#include <nanobind/nanobind.h>

namespace lawson::torch {

// quick(find) of the module.
void bind_quick(nanobind::module_& module);

}  // namespace lawson::torch

#endif  // LAWSON_PYTHON_TORCH_QUICK_H_
