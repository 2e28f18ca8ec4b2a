// Which engine configs could run a judged graph, in which order, and building one of them.
#pragma once

#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "engine/cudnn/judging.h"

namespace lawson::cudnn {

struct Built {
  std::string name;
  PlanBytes bytes;
  std::int64_t workspace = 0;  // everything
  std::string basis;           // what the choice rests on, if not on the heuristics or the caller
};

// What is asked: a graph for a device.
struct Question {
  const ir::Graph& graph;
  const Device& device;
  const Options& options;
  const Libraries& found;
};

// All that there are: what the tuning table prefers, the heuristics' lists, then every config of
// every engine that takes the graph. Those beyond the heuristics are for graphs with a product.
Result<std::vector<Candidate>> candidates(Judged& judged, const Question& question);

// The named plan; or the first that compiles within the options of the tuning table's and the
// heuristics'. Named plans of one graph are built side by side, each in an object of its own.
Result<Built> build(Judged& judged, const Question& question,
                    const std::optional<Candidate>& candidate, const std::stop_token& stop);

}  // namespace lawson::cudnn
