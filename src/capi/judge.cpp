#include "capi/judge.h"

#include <algorithm>
#include <atomic>
#include <future>
#include <optional>
#include <span>
#include <thread>

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
  for (const char* unbound :
       {"name", "scale", "seqlens_q", "seqlens_kv", "seqlens_q_padded", "seqlens_kv_padded"}) {
    asked.erase(unbound);
  }
  if (asked.contains("alibi_slopes")) asked["alibi_slopes"] = true;
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

SpecVerdict alone(Verdict verdict) {
  Json json = verdict_to_json(verdict);
  return {std::move(verdict), std::move(json)};
}

// The parts of a spec without steps, or of one step.
SpecVerdict joint_of_parts(std::span<const front::SpecPart> parts,
                           std::span<const Verdict> verdicts) {
  if (parts.size() == 1) return alone(verdicts[0]);
  std::vector<std::string> names;
  Json list = Json::array();
  for (std::size_t i = 0; i < parts.size(); ++i) {
    Json item = verdict_to_json(verdicts[i]);
    item["name"] = parts[i].name;
    list.push_back(std::move(item));
    names.push_back(parts[i].name);
  }
  SpecVerdict all = alone(combine(names, {verdicts.begin(), verdicts.end()}));
  all.json["parts"] = std::move(list);
  return all;
}

// In order; at most as many at a time as there are workers to answer.
Result<std::vector<Verdict>> probe_all(std::span<const front::SpecPart> parts,
                                       const ProbeGraph& probe) {
  std::vector<std::optional<Result<Verdict>>> results(parts.size());
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t i = next++; i < parts.size(); i = next++) results[i] = probe(parts[i].graph);
  };
  {
    const std::size_t most = std::clamp(std::thread::hardware_concurrency(), 2U, 8U);
    std::vector<std::future<void>> helpers;
    for (std::size_t i = 1; i < std::min(most, parts.size()); ++i) {
      helpers.push_back(std::async(std::launch::async, work));
    }
    work();
    for (std::future<void>& helper : helpers) helper.get();
  }
  std::vector<Verdict> verdicts;
  for (auto& result : results) {
    LAWSON_TRY(Verdict verdict, *std::move(result));
    verdicts.push_back(std::move(verdict));
  }
  return verdicts;
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
  if (spec.parts.empty()) return alone(no_graph_form(spec, device, engine));
  LAWSON_TRY(std::vector<Verdict> verdicts, probe_all(spec.parts, probe));
  if (spec.steps.empty()) return joint_of_parts(spec.parts, verdicts);

  std::vector<std::string> names;
  std::vector<Verdict> steps;
  Json list = Json::array();
  for (std::size_t begin = 0; begin < spec.parts.size();) {
    const std::size_t index = spec.parts[begin].step;
    std::size_t end = begin;
    while (end < spec.parts.size() && spec.parts[end].step == index) ++end;
    const front::SpecStep& step = spec.steps[index];
    SpecVerdict judged = joint_of_parts({spec.parts.data() + begin, end - begin},
                                        {verdicts.data() + begin, end - begin});
    judged.json["name"] = step.name;
    judged.json["rank"] = step.rank;
    judged.json["step"] = step.step;
    list.push_back(std::move(judged.json));
    names.push_back(step.name);
    steps.push_back(std::move(judged.verdict));
    begin = end;
  }
  SpecVerdict all = alone(combine(names, steps));
  all.json["steps"] = std::move(list);
  return all;
}

Result<SpecVerdict> judge_spec(const front::Spec& spec, const Device& device, const Asked& asked) {
  LAWSON_TRY(plan::Planner * planner, capi::planner());
  return judge_spec(spec, device, asked, *planner);
}

Result<SpecVerdict> judge_spec(const front::Spec& spec, const Device& device, const Asked& asked,
                               plan::Planner& planner) {
  const plan::KnownDevice known{device};
  return judge_spec(spec, device, asked, planner, [&](const ir::Graph& graph) -> Result<Verdict> {
    LAWSON_TRY(const auto verdict,
               planner.verdict(plan::KnownGraph{graph}, known, asked.engine, asked.options));
    return *verdict;
  });
}

Result<SpecVerdict> judge_spec(const front::Spec& spec, const Device& device, const Asked& asked,
                               plan::Planner& planner, const ProbeGraph& probe) {
  const std::string engine = engine_for(device, asked.engine);
  if (planner.engine(engine) == nullptr) {
    // The planner words this error, for specs without graphs too.
    LAWSON_CHECK(planner.probe({}, device, engine, asked.options));
  }
  return judge(spec, device, engine, probe);
}

}  // namespace lawson::capi
