// What stands in the module lawson._torch beside nanobind's own types.
#ifndef LAWSON_PYTHON_TORCH_BIND_H_
#define LAWSON_PYTHON_TORCH_BIND_H_

#include <nanobind/nanobind.h>

namespace lawson::torch {

// Call: a type of its own rather than nanobind's, for CPython's vectorcall.
void bind_call(nanobind::module_& module);

// quick and is_watched: the short way into an attention. Nothing of Python's runs between the call
// of a function and the launch of its plan.
void bind_quick(nanobind::module_& module);

}  // namespace lawson::torch

#endif  // LAWSON_PYTHON_TORCH_BIND_H_
