// The process-wide planner and what the C functions derive from it.
#pragma once

#include <string>

#include "engine/engine.h"
#include "lawson/lawson.h"
#include "plan/planner.h"

namespace lawson::capi {

// Built on first use with the registry's engines, and never destroyed: worker processes end by
// themselves when the process does, and no thread can find it gone during shutdown.
Result<plan::Planner*> planner();

// Settings for the planner; an error once it exists.
Status configure(const lawson_settings& settings);

// Where Lawson's helper files are: LAWSON_LIBEXEC, else libexec/lawson beside or above the folder
// of this library.
std::string libexec_folder();
std::string library_path();

struct Asked {
  std::string engine;  // empty: the planner's choice for the device
  Options options;
  bool retune = false;
};
// Defaults for NULL.
Result<Asked> read_options(const lawson_options* options);

// OUT_OF_MEMORY where the graph's tensors do not fit into this machine.
Status fits_in_memory(const ir::Graph& graph);

// The engine that answers for this device when none is named.
std::string engine_for(const Device& device, const std::string& asked);

}  // namespace lawson::capi
