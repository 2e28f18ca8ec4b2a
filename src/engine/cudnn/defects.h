// Where cuDNN is known to be wrong: graphs that some versions compute wrongly, and versions that
// must not be used for some graphs.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "engine/device.h"
#include "ir/graph.h"

namespace lawson::cudnn {

struct Defect {
  std::string id;       // "hopper-backward-kv-tail"
  std::string message;  // what goes wrong and when
  std::string source;   // public report: "pytorch#196678"
  std::string field;    // the attribute to change
  bool barred = false;  // no rewrite avoids it: the graph is refused
};

// The rewrites that keep a graph clear of the defects that apply to it.
struct Repairs {
  bool full_lengths = false;         // a padding mask with every length full
  bool expand_bias = false;          // the bias at its full seqlen_q and seqlen_kv
  bool scale_sink_gradient = false;  // by the factor of dropout
  std::vector<std::string> defects;  // the ids
};

// The first row that applies, one that bars before one that is repaired.
std::optional<Defect> known_defect(const ir::Graph& graph, const Device& device, int cudnn_version);
Repairs repairs_for(const ir::Graph& graph, const Device& device, int cudnn_version);

}  // namespace lawson::cudnn
