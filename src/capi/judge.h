// One verdict for a whole spec: every graph it stands for is judged, and all must hold.
#pragma once

#include <functional>
#include <memory>
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

std::unique_ptr<lawson_verdict> make_verdict_handle(SpecVerdict judged);
std::unique_ptr<lawson_verdict> make_verdict_handle(
    const std::shared_ptr<const SpecVerdict>& judged);

// All parts must be supported; strength and evidence are the weakest part's, the key covers all.
Verdict combine(const std::vector<std::string>& names, const std::vector<Verdict>& parts);

// The same through the process-wide planner.
Result<SpecVerdict> judge_spec(const front::Spec& spec, const Device& device, const Asked& asked);
Result<SpecVerdict> judge_spec(const front::Spec& spec, const Device& device, const Asked& asked,
                               plan::Planner& planner);
// With a way to the planner of the caller's own.
Result<SpecVerdict> judge_spec(const front::Spec& spec, const Device& device, const Asked& asked,
                               plan::Planner& planner, const ProbeGraph& probe);

}  // namespace lawson::capi
