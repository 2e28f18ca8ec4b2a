// The embedded engine "cpu": f32 arithmetic (f64 for f64 graphs, exact i32 for integer matmuls) on
// storage of any dtype, on the host's cores. Takes every graph.
#pragma once

#include <memory>

#include "engine/engine.h"

namespace lawson {

std::shared_ptr<Engine> make_cpu_engine();

}  // namespace lawson
