// Where cuDNN is known to be wrong: graphs that some versions compute wrongly, and versions that
// must not be used for some graphs.
#pragma once

#include <optional>
#include <string>

#include "engine/device.h"
#include "ir/graph.h"

namespace lawson::cudnn {

struct Defect {
  std::string id;       // "hopper-backward-kv-tail"
  std::string message;  // what goes wrong and when
  std::string source;   // public report: "pytorch#196678"
  std::string field;    // the attribute to change
  bool barred = false;  // wrong for ordinary data: the graph is refused, not only marked
};

// The first row that applies.
std::optional<Defect> known_defect(const ir::Graph& graph, const Device& device, int cudnn_version);

}  // namespace lawson::cudnn
