// The reference engine: float64, straightforward, independent of every other engine. Its results
// and its error bounds (Engine::oracle) are what the other engines are judged by.
#pragma once

#include <memory>

#include "engine/engine.h"

namespace lawson {

std::shared_ptr<Engine> make_reference_engine();

}  // namespace lawson
