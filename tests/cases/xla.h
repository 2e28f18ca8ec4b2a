// The fusions that XLA's own tests prove (xla/backends/gpu/codegen/cudnn_test.cc), as cases, under
// the names that FUSION.md gives them, and those that its tests leave out.
#pragma once

#include <string>
#include <vector>

#include "cases/cases.h"
#include "engine/engine.h"

namespace lawson::cases {

struct XlaCase {
  Case item;                                // "xla-f32-dot", "own-bias-gelu"
  std::string target = "h200";              // whose verdict is expected
  Decision expected = Decision::supported;  // without the device, its kernel built
  std::string code;                         // of a reason, where it is refused
  bool executable = true;                   // on an H200
};

std::vector<XlaCase> xla_list();

}  // namespace lawson::cases
