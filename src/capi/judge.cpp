#include "capi/judge.h"

#include <algorithm>
#include <future>
#include <optional>

#include "base/hash.h"

namespace lawson::capi {
namespace {

// The document is valid and has no graph form in this version: an answer, given without asking.
Verdict no_graph_form(const front::Spec& spec, const Device& device, const std::string& engine) {
  Verdict verdict;
  verdict.decision = Decision::unsupported;
  verdict.evidence = device.evidence;
  verdict.engine = engine;
  verdict.target = device.name;
  verdict.reasons = spec.unsupported;
  Json asked = spec.document;
  for (const char* unbound : {"name", "scale", "seqlens_q", "seqlens_kv"}) asked.erase(unbound);
  verdict.key = hash_hex(fmt::format("spec 1\n{}\ndevice {}\nengine {}\n",
                                     asked.dump(-1, ' ', true, Json::error_handler_t::replace),
                                     fingerprint(device), engine));
  return verdict;
}

Decision weaker(Decision a, Decision b) {
  for (const Decision decision : {Decision::unsupported, Decision::undecided}) {
    if (a == decision || b == decision) return decision;
  }
  return Decision::supported;
}

// One hash over all parts' ids; empty when a part has none.
std::string joint_hash(const std::vector<Verdict>& parts, std::string Verdict::*id) {
  std::string text = "parts 1\n";
  for (const Verdict& part : parts) {
    if ((part.*id).empty()) return {};
    text += part.*id + "\n";
  }
  return hash_hex(text);
}

}  // namespace

Verdict combine(const std::vector<std::string>& names, const std::vector<Verdict>& parts) {
  Verdict all = parts.front();
  all.plan_name.clear();
  all.plan_names.clear();
  all.rewrites.clear();
  all.reasons.clear();
  all.key = joint_hash(parts, &Verdict::key);
  all.plan_id = joint_hash(parts, &Verdict::plan_id);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const Verdict& part = parts[i];
    all.decision = weaker(all.decision, part.decision);
    all.strength = std::min(all.strength, part.strength);
    all.evidence = std::max(all.evidence, part.evidence);  // ordered from strong to weak
    if (part.workspace_bytes) {
      all.workspace_bytes = std::max(all.workspace_bytes.value_or(0), *part.workspace_bytes);
    }
    if (all.defect.empty()) all.defect = part.defect;
    for (const Reason& reason : part.reasons) {
      all.reasons.push_back({reason.code, names[i] + ": " + reason.message, reason.field});
    }
    for (const std::string& rewrite : part.rewrites) {
      const std::string named = names[i] + ": " + rewrite;
      all.rewrites.push_back(named);
    }
  }
  return all;
}

Result<SpecVerdict> judge(const front::Spec& spec, const Device& device, const std::string& engine,
                          const ProbeGraph& probe) {
  if (spec.parts.empty()) {
    Verdict verdict = no_graph_form(spec, device, engine);
    Json json = verdict_to_json(verdict);
    return SpecVerdict{std::move(verdict), std::move(json)};
  }
  if (spec.parts.size() == 1) {
    LAWSON_TRY(Verdict verdict, probe(spec.parts[0].graph));
    Json json = verdict_to_json(verdict);
    return SpecVerdict{std::move(verdict), std::move(json)};
  }
  std::vector<std::future<Result<Verdict>>> running;
  for (const front::SpecPart& part : spec.parts) {
    running.push_back(
        std::async(std::launch::async, [&probe, &part] { return probe(part.graph); }));
  }
  std::vector<std::string> names;
  std::vector<Verdict> parts;
  Json part_list = Json::array();
  for (std::size_t i = 0; i < running.size(); ++i) {
    LAWSON_TRY(Verdict verdict, running[i].get());
    Json item = verdict_to_json(verdict);
    item["name"] = spec.parts[i].name;
    part_list.push_back(std::move(item));
    names.push_back(spec.parts[i].name);
    parts.push_back(std::move(verdict));
  }
  Verdict verdict = combine(names, parts);
  Json json = verdict_to_json(verdict);
  json["parts"] = std::move(part_list);
  return SpecVerdict{std::move(verdict), std::move(json)};
}

Result<SpecVerdict> judge_spec(const front::Spec& spec, const Device& device, const Asked& asked) {
  LAWSON_TRY(plan::Planner * planner, capi::planner());
  const std::string engine = engine_for(device, asked.engine);
  if (planner->engine(engine) == nullptr) {
    // The planner words this error, for specs without graphs too.
    LAWSON_CHECK(planner->probe({}, device, engine, asked.options));
  }
  return judge(spec, device, engine, [&](const ir::Graph& graph) {
    return planner->probe(graph, device, asked.engine, asked.options);
  });
}

}  // namespace lawson::capi
