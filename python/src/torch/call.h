// lawson._torch.Call: a type of its own rather than nanobind's, for CPython's vectorcall.
#ifndef LAWSON_PYTHON_TORCH_CALL_H_
#define LAWSON_PYTHON_TORCH_CALL_H_

#include "torch/prepared.h"

namespace lawson::torch {

void bind_call(nb::module_& module);

}  // namespace lawson::torch

#endif  // LAWSON_PYTHON_TORCH_CALL_H_
