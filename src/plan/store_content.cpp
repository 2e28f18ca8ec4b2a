#include "plan/store_content.h"

#include <span>

#include "plan/tuned_plans.h"

namespace lawson::plan {

Result<Plan> plan_of_content(const EntryHeader& header, std::string_view content) {
  LAWSON_TRY(Plan plan, plan_from_bytes(std::as_bytes(std::span{content})));
  if (plan.key != header.key || plan.deviceless != header.deviceless) {
    return invalid("its plan answers another question");
  }
  return plan;
}

Result<Verdict> verdict_of_content(const EntryHeader& header, std::string_view content) {
  LAWSON_TRY(const Json document, parse_cbor(content));
  LAWSON_TRY(Verdict verdict, verdict_from_json(document));
  if (verdict.key != header.key || verdict.decision == Decision::undecided ||
      (verdict.evidence != Evidence::live) != header.deviceless) {
    return invalid("its verdict answers another question");
  }
  return verdict;
}

Status check_content(const EntryHeader& header, std::string_view content) {
  switch (header.kind) {
    case EntryKind::plan:
      LAWSON_CHECK(plan_of_content(header, content));
      return {};
    case EntryKind::verdict:
      LAWSON_CHECK(verdict_of_content(header, content));
      return {};
    case EntryKind::tuned:
      LAWSON_CHECK(tuned_from_bytes(content));
      return {};
  }
  return {};
}

}  // namespace lawson::plan
