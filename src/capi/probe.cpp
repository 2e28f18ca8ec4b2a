// Verdicts.
#include "capi/context.h"
#include "capi/guard.h"
#include "capi/handles.h"
#include "capi/judge.h"

namespace lawson::capi {

std::unique_ptr<lawson_verdict> make_verdict_handle(SpecVerdict judged) {
  const auto shared = std::make_shared<const SpecVerdict>(std::move(judged));
  return make_verdict_handle(shared);
}

std::unique_ptr<lawson_verdict> make_verdict_handle(
    const std::shared_ptr<const SpecVerdict>& judged) {
  return std::make_unique<lawson_verdict>(
      lawson_verdict{std::shared_ptr<const Verdict>{judged, &judged->verdict},
                     std::shared_ptr<const Json>{judged, &judged->json}});
}

namespace {

const Reason* reason_at(const lawson_verdict* verdict, std::size_t index) {
  if (verdict == nullptr || index >= verdict->verdict->reasons.size()) return nullptr;
  return &verdict->verdict->reasons[index];
}

}  // namespace
}  // namespace lawson::capi

using namespace lawson;
using namespace lawson::capi;

extern "C" {

lawson_status lawson_probe(const lawson_graph* graph, const lawson_device* device,
                           const lawson_options* options, lawson_verdict** verdict) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(graph, "graph"));
    LAWSON_CHECK(require(device, "device"));
    LAWSON_CHECK(require(verdict, "verdict"));
    LAWSON_TRY(Asked asked, read_options(options));
    LAWSON_TRY(plan::Planner * planner, capi::planner());
    const auto known_graph = graph->known();
    const auto known_device = device->known();
    LAWSON_TRY(auto judged,
               planner->verdict(*known_graph, *known_device, asked.engine, asked.options));
    *verdict = new lawson_verdict{std::move(judged), nullptr};
    return {};
  });
}

lawson_status lawson_probe_spec(const lawson_spec* spec, const lawson_device* device,
                                const lawson_options* options, lawson_verdict** verdict) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(spec, "spec"));
    LAWSON_CHECK(require(device, "device"));
    LAWSON_CHECK(require(verdict, "verdict"));
    LAWSON_TRY(Asked asked, read_options(options));
    LAWSON_TRY(SpecVerdict judged, judge_spec(spec->spec, device->device, asked));
    *verdict = make_verdict_handle(std::move(judged)).release();
    return {};
  });
}

void lawson_verdict_destroy(lawson_verdict* verdict) {
  delete verdict;
}

lawson_decision lawson_verdict_decision(const lawson_verdict* verdict) {
  if (verdict == nullptr) return LAWSON_UNDECIDED;
  switch (verdict->verdict->decision) {
    case Decision::supported:
      return LAWSON_SUPPORTED;
    case Decision::unsupported:
      return LAWSON_NOT_SUPPORTED;
    case Decision::undecided:
      return LAWSON_UNDECIDED;
  }
  return LAWSON_UNDECIDED;
}

lawson_strength lawson_verdict_strength(const lawson_verdict* verdict) {
  if (verdict == nullptr) return LAWSON_JUDGED;
  switch (verdict->verdict->strength) {
    case Strength::judged:
      return LAWSON_JUDGED;
    case Strength::built:
      return LAWSON_BUILT;
    case Strength::verified:
      return LAWSON_VERIFIED;
  }
  return LAWSON_JUDGED;
}

const char* lawson_verdict_engine(const lawson_verdict* verdict) {
  return verdict == nullptr ? "" : verdict->verdict->engine.c_str();
}

const char* lawson_verdict_key(const lawson_verdict* verdict) {
  return verdict == nullptr ? "" : verdict->verdict->key.c_str();
}

const char* lawson_verdict_plan_id(const lawson_verdict* verdict) {
  return verdict == nullptr ? "" : verdict->verdict->plan_id.c_str();
}

size_t lawson_verdict_reason_count(const lawson_verdict* verdict) {
  return verdict == nullptr ? 0 : verdict->verdict->reasons.size();
}

const char* lawson_verdict_reason_code(const lawson_verdict* verdict, size_t index) {
  const Reason* reason = reason_at(verdict, index);
  return reason == nullptr ? "" : reason->code.c_str();
}

const char* lawson_verdict_reason_message(const lawson_verdict* verdict, size_t index) {
  const Reason* reason = reason_at(verdict, index);
  return reason == nullptr ? "" : reason->message.c_str();
}

lawson_status lawson_verdict_json(const lawson_verdict* verdict, lawson_text** json) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(verdict, "verdict"));
    LAWSON_CHECK(require(json, "json"));
    return give_text(dump(verdict->json ? *verdict->json : verdict_to_json(*verdict->verdict)),
                     json);
  });
}

}  // extern "C"
