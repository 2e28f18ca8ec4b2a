#include "plan/worker_client.h"

namespace lawson::plan {
namespace {

using std::chrono::milliseconds;

// Far above the slowest seen (heuristics 0.5 s; a fusion of 20 ops on a busy machine some 10 s):
// they only end what hangs.
constexpr milliseconds kProbeTimeout{120'000};
constexpr milliseconds kCompileTimeout{600'000};

Result<Json> field(const Json& reply, const char* name) {
  if (reply.contains(name)) return reply.at(name);
  return error(ErrorKind::internal, "the worker's reply has no '{}'", name);
}

// One function derives keys; both sides of the pipe must come to the same.
Status check_key(std::string_view key, std::string_view engine, std::string_view engine_version,
                 const ir::Graph& graph, const Device& device, const Options& options) {
  const std::string expected = make_key(graph, device, engine, engine_version, options);
  if (key == expected) return {};
  return error(ErrorKind::internal,
               "the worker's key of '{}' is '{}', ours '{}': probe and execution would diverge",
               graph.name, key, expected);
}

}  // namespace

Result<Verdict> WorkerClient::probe(const ir::Graph& graph, const Device& device,
                                    const Options& options) {
  LAWSON_TRY(const Json reply,
             pool_.request(request_to_json(Verb::probe, graph, device, options, std::nullopt),
                           kProbeTimeout));
  LAWSON_TRY(const Json document, field(reply, "verdict"));
  LAWSON_TRY(Verdict verdict, verdict_from_json(document));
  LAWSON_CHECK(
      check_key(verdict.key, verdict.engine, verdict.engine_version, graph, device, options));
  return verdict;
}

Result<std::vector<Candidate>> WorkerClient::candidates(const ir::Graph& graph,
                                                        const Device& device,
                                                        const Options& options) {
  LAWSON_TRY(const Json reply,
             pool_.request(request_to_json(Verb::candidates, graph, device, options, std::nullopt),
                           kProbeTimeout));
  LAWSON_TRY(const Json document, field(reply, "candidates"));
  return candidates_from_json(document);
}

Result<Plan> WorkerClient::compile(const ir::Graph& graph, const Device& device,
                                   const Options& options,
                                   const std::optional<Candidate>& candidate) {
  LAWSON_TRY(const Json reply,
             pool_.request(request_to_json(Verb::compile, graph, device, options, candidate),
                           kCompileTimeout));
  LAWSON_TRY(const Json document, field(reply, "plan"));
  LAWSON_TRY(Plan plan, plan_from_json(document));
  LAWSON_CHECK(check_key(plan.key, plan.engine, plan.engine_version, graph, device, options));
  return plan;
}

}  // namespace lawson::plan
