// The computations that the tuning table has rows for.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "engine/cudnn/tuning_table.h"
#include "ir/graph.h"

namespace lawson::bench {

struct Computation {
  std::string name;
  ir::Graph graph;  // simplified, as the planner asks engines about it
  cudnn::Workload workload;
  // Every config is tried; elsewhere only those that were fast for a near workload.
  bool thorough = false;
};

// The specs of a folder (bench/fusions), most important first.
Result<std::vector<Computation>> computations_of(const std::string& folder);

// Operand types, layouts and epilogues by sizes.
Result<std::vector<Computation>> grid();

}  // namespace lawson::bench
