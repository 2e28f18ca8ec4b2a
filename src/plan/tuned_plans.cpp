#include "plan/tuned_plans.h"

#include <algorithm>
#include <utility>

#include "plan/worker_protocol.h"

namespace lawson::plan {
namespace {

// Is every plan one that answers the question?
Status check_plans(const TunedPlans::Question& question, const Tuned& tuned) {
  for (const Plan& plan : tuned.built) {
    const std::string key = make_key(question.graph, question.device, question.engine.name(),
                                     plan.engine_version, question.options);
    if (plan.key != key || plan.engine != question.engine.name() ||
        plan.device_fingerprint != fingerprint(question.device)) {
      return invalid("its plan {} is for something else", plan.plan_id);
    }
  }
  return {};
}

}  // namespace

std::string tuned_to_bytes(const Tuned& tuned) {
  Json plans = Json::array();
  for (const Plan& plan : tuned.built) plans.push_back(plan_to_json(plan));
  const Json document{{"report", report_to_json(tuned.report)},
                      {"chosen", tuned.plan.plan_id},
                      {"plans", std::move(plans)}};
  std::string bytes;
  Json::to_cbor(document, bytes);
  return bytes;
}

Result<Tuned> tuned_from_bytes(std::string_view bytes) {
  LAWSON_TRY(const Json document, parse_cbor(bytes));
  Tuned tuned;
  std::string chosen;
  try {
    LAWSON_TRY(tuned.report, report_from_json(document.at("report")));
    chosen = document.at("chosen").get<std::string>();
    for (const Json& item : document.at("plans")) {
      LAWSON_TRY(Plan plan, plan_from_json(item));
      tuned.built.push_back(std::move(plan));
    }
  } catch (const Json::exception& e) {
    return invalid("it is no tuned choice: {}", e.what());
  }
  const auto found = std::find_if(tuned.built.begin(), tuned.built.end(),
                                  [&](const Plan& plan) { return plan.plan_id == chosen; });
  if (found == tuned.built.end()) return invalid("the plan that it chose is missing");
  tuned.plan = *found;
  tuned.plan.choice = tuned.report.choice;
  tuned.report.stored = true;
  return tuned;
}

std::string TunedPlans::Question::id() const {
  const auto version = engine.version();
  return make_key(graph, device, engine.name(), version.ok() ? *version : "", options);
}

std::optional<Tuned> TunedPlans::find(const Question& question) {
  const auto content = store_->content(EntryKind::tuned, question.id());
  if (!content) return std::nullopt;
  auto tuned = tuned_from_bytes(*content);
  const Status fits = tuned.ok() ? check_plans(question, *tuned) : Status{tuned.error()};
  if (fits.ok()) return std::move(tuned).value();
  reject(question, fits.error().message);
  return std::nullopt;
}

void TunedPlans::keep(const Question& question, const Tuned& tuned) {
  EntryHeader header;
  header.kind = EntryKind::tuned;
  header.key = question.id();
  header.engine = tuned.plan.engine;
  header.engine_version = tuned.plan.engine_version;
  header.target = tuned.plan.target;
  store_->keep(std::move(header), tuned_to_bytes(tuned));
}

void TunedPlans::reject(const Question& question, std::string_view why) {
  store_->reject(EntryKind::tuned, question.id(), why);
}

}  // namespace lawson::plan
