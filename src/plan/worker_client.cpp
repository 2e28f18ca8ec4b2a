#include "plan/worker_client.h"

#include <algorithm>
#include <cstdint>

namespace lawson::plan {
namespace {

using std::chrono::milliseconds;

// Far above the slowest seen (heuristics 0.5 s; a fusion of 20 ops on a busy machine some 10 s):
// they only end what hangs.
constexpr milliseconds kProbeTimeout{120'000};
constexpr milliseconds kCompileTimeout{600'000};

// The deadline of the options, where it is nearer.
milliseconds timeout_of(const Options& options, milliseconds most) {
  if (options.deadline_ms < 0) return most;
  const double left = std::min(options.deadline_ms, static_cast<double>(most.count()));
  return milliseconds{std::max(static_cast<std::int64_t>(left), std::int64_t{1})};
}

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
  const milliseconds timeout = timeout_of(options, kCompileTimeout);
  const auto asked = std::chrono::steady_clock::now();
  const auto reply =
      pool_.request(request_to_json(Verb::compile, graph, device, options, candidate), timeout);
  if (!reply.ok()) {
    const bool late = std::chrono::steady_clock::now() - asked >= timeout;
    if (!late || timeout == kCompileTimeout) return reply.error();
    return error(ErrorKind::cancelled, "the deadline of {:g} ms passed before a plan was built",
                 options.deadline_ms);
  }
  LAWSON_TRY(const Json document, field(*reply, "plan"));
  LAWSON_TRY(Plan plan, plan_from_json(document));
  LAWSON_CHECK(check_key(plan.key, plan.engine, plan.engine_version, graph, device, options));
  return plan;
}

}  // namespace lawson::plan
