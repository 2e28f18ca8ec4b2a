// A spec document of either kind, as the graphs it stands for.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/json.h"
#include "front/attention.h"
#include "ir/graph.h"

namespace lawson::front {

struct SpecPart {
  std::string name;  // "forward", "backward", or "graph"
  ir::Graph graph;
  std::size_t step = 0;  // of Spec::steps, where there are any
};

// A distinct step under context parallelism, named by the first that has it.
struct SpecStep {
  std::string name;  // "ring step 2 of rank 1"
  std::int64_t rank = 0;
  std::int64_t step = 0;
};

struct Spec {
  std::string kind;  // "attention" | "graph"
  std::string name;
  Json document;                // as read, with defaults filled in
  std::vector<SpecPart> parts;  // `training` has two, for each step; all must hold
  std::vector<SpecStep> steps;  // only with context_parallel; parts are in their order
  // Why there are no parts: the document is valid, and asks for what this version cannot express.
  std::vector<Reason> unsupported;
};

Result<Spec> spec_from_json(const Json& document, const std::string& source);

}  // namespace lawson::front
