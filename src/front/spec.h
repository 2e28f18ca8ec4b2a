// A spec document of either kind, as the graphs it stands for.
#pragma once

#include <string>
#include <vector>

#include "base/json.h"
#include "front/attention.h"
#include "ir/graph.h"

namespace lawson::front {

struct SpecPart {
  std::string name;  // "forward", "backward", or "graph"
  ir::Graph graph;
};

struct Spec {
  std::string kind;  // "attention" | "graph"
  std::string name;
  Json document;                // as read, with defaults filled in
  std::vector<SpecPart> parts;  // `training` has two; both must hold
  // Why there are no parts: the document is valid, and asks for what this version cannot express.
  std::vector<Reason> unsupported;
};

Result<Spec> spec_from_json(const Json& document, const std::string& source);

}  // namespace lawson::front
