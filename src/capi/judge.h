// One verdict for a whole spec: every graph it stands for is judged, and all must hold.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/json.h"
#include "capi/context.h"
#include "engine/engine.h"
#include "front/spec.h"

namespace lawson::capi {

struct SpecVerdict {
  Verdict verdict;
  // verdict_to_json; with "parts" when the spec stands for the graphs of several passes, with
  // "steps" (name, rank, step) when it stands for those of context parallelism.
  Json json;
};

using ProbeGraph = std::function<Result<Verdict>(const ir::Graph&)>;

// Several graphs are probed at the same time. `engine` is the one that would have to answer.
Result<SpecVerdict> judge(const front::Spec& spec, const Device& device, const std::string& engine,
                          const ProbeGraph& probe);

// All parts must be supported; strength and evidence are the weakest part's, the key covers all.
Verdict combine(const std::vector<std::string>& names, const std::vector<Verdict>& parts);

// The same through the process-wide planner.
Result<SpecVerdict> judge_spec(const front::Spec& spec, const Device& device, const Asked& asked);
Result<SpecVerdict> judge_spec(const front::Spec& spec, const Device& device, const Asked& asked,
                               plan::Planner& planner);

}  // namespace lawson::capi
