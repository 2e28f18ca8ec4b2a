// Fusing: exactly this graph as one loaded plan of an engine that the policy allows, or an error
// that says why not, where it was written, and what would be taken.
#include <fmt/ranges.h>

#include <array>
#include <cstddef>
#include <cstdlib>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "capi/context.h"
#include "capi/explain.h"
#include "capi/guard.h"
#include "capi/handles.h"
#include "capi/judge.h"
#include "front/spec.h"
#include "ir/gradient.h"
#include "ir/json.h"
#include "ir/simplify.h"

struct lawson_fusion {
  lawson_graph graph;
  lawson_device device;
  lawson_verdict verdict;
  std::unique_ptr<lawson_plan> plan;
  lawson::Json report;
};

namespace lawson::capi {
namespace {

constexpr std::array kFuseOptionsPrefixes{offsetof(lawson_fuse_options, engines),
                                          offsetof(lawson_fuse_options, options),
                                          offsetof(lawson_fuse_options, stream)};
constexpr std::string_view kCudnn = "cudnn";
constexpr std::size_t kMaxEngines = 16;
constexpr std::size_t kMaxNeighbours = 12;  // probed for a refusal's message
constexpr std::size_t kMaxPlaces = 8;       // named in a refusal's message

constexpr std::string_view kHowToName =
    "to run it elsewhere, name another engine: engines {\"cpu\"}, LAWSON_ENGINE=cpu in the "
    "environment, or policy 'allow' with engines in order";

enum class Policy { require, allow };

std::string_view to_string(Policy policy) {
  return policy == Policy::allow ? "allow" : "require";
}

struct Request {
  Policy policy = Policy::require;
  std::string_view policy_from = "default";
  std::vector<std::string> engines;
  std::string_view engines_from = "default";
  Options options;
  void* stream = nullptr;
};

std::optional<std::string> variable(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> names;
  for (std::size_t begin = 0; begin <= list.size();) {
    const std::size_t end = std::min(list.find(',', begin), list.size());
    names.push_back(list.substr(begin, end - begin));
    begin = end + 1;
  }
  return names;
}

Status read_policy(std::int32_t given, Request& request) {
  switch (given) {
    case LAWSON_POLICY_UNSET:
      break;
    case LAWSON_POLICY_REQUIRE:
    case LAWSON_POLICY_ALLOW:
      request.policy = given == LAWSON_POLICY_ALLOW ? Policy::allow : Policy::require;
      request.policy_from = "argument";
      return {};
    default:
      return invalid(
          "lawson_fuse_options.policy: {} is not allowed; expected LAWSON_POLICY_UNSET (0), "
          "LAWSON_POLICY_REQUIRE (1) or LAWSON_POLICY_ALLOW (2)",
          given);
  }
  const auto word = variable("LAWSON_POLICY");
  if (!word) return {};
  if (*word != "require" && *word != "allow") {
    return invalid("LAWSON_POLICY='{}' is not allowed; expected require or allow", *word);
  }
  request.policy = *word == "allow" ? Policy::allow : Policy::require;
  request.policy_from = "environment";
  return {};
}

Status read_engines(const lawson_fuse_options& given, Request& request) {
  if (given.engines != nullptr) {
    if (given.engine_count == 0 || given.engine_count > kMaxEngines) {
      return invalid("lawson_fuse_options.engine_count: {} is not allowed; expected 1 to {}",
                     given.engine_count, kMaxEngines);
    }
    for (std::size_t i = 0; i < given.engine_count; ++i) {
      LAWSON_CHECK(require(given.engines[i], fmt::format("engines[{}]", i)));
      request.engines.emplace_back(given.engines[i]);
    }
    request.engines_from = "argument";
  } else if (const auto list = variable("LAWSON_ENGINE")) {
    request.engines = split(*list);
    request.engines_from = "environment";
  } else {
    request.engines.emplace_back(kCudnn);
    if (request.policy == Policy::allow) request.engines.emplace_back("cpu");
  }
  if (request.policy == Policy::require && request.engines.size() > 1) {
    return invalid(
        "policy 'require' takes one engine, and {} are named ({}); with policy 'allow' they are "
        "taken in order",
        request.engines.size(), fmt::join(request.engines, ", "));
  }
  const auto nameless = std::find(request.engines.begin(), request.engines.end(), "");
  if (nameless != request.engines.end()) {
    return invalid("{}: engine {} has no name; expected cudnn, cpu or reference",
                   given.engines != nullptr ? "lawson_fuse_options.engines" : "LAWSON_ENGINE",
                   nameless - request.engines.begin());
  }
  return {};
}

Result<Request> read_request(const lawson_fuse_options* options) {
  lawson_fuse_options given{};
  LAWSON_CHECK(read_struct(options, given, "lawson_fuse_options", kFuseOptionsPrefixes));
  Request request;
  LAWSON_CHECK(read_policy(given.policy, request));
  LAWSON_CHECK(read_engines(given, request));
  LAWSON_TRY(Asked asked, read_options(given.options));
  if (!asked.engine.empty()) {
    return invalid(
        "lawson_fuse_options.options.engine: '{}' is not allowed here; name it in "
        "lawson_fuse_options.engines",
        asked.engine);
  }
  if (asked.options.strength == Strength::verified) {
    return invalid(
        "lawson_fuse_options.options.strength: a fusion is built; for a verified verdict ask "
        "lawson_probe");
  }
  asked.options.strength = Strength::built;
  request.options = asked.options;
  request.stream = given.stream;
  return request;
}

// Where the engine runs when the caller names no device.
Result<Device> device_of(plan::Planner& planner, const std::string& engine) {
  if (engine == kCudnn) return planner.find_device("cuda");
  return cpu_device();
}

struct Attempt {
  std::string engine;
  std::string target;
  Error why;
};

std::vector<Reason> reasons_of(const Error& error) {
  if (!error.reasons.empty()) return error.reasons;
  return {{lawson::to_string(error.kind), error.message, ""}};
}

// Which ops there are and where, for reasons that are about all of them.
std::string places(const ir::Graph& graph) {
  std::vector<std::string> list;
  for (const ir::Node& node : graph.nodes) {
    if (node.source.empty()) continue;
    list.push_back(fmt::format("{} at {}", ir::op_name(node.op), node.source));
  }
  if (list.size() > kMaxPlaces) {
    const std::size_t more = list.size() - kMaxPlaces;
    list.resize(kMaxPlaces);
    list.push_back(fmt::format("{} more", more));
  }
  return fmt::format("{}", fmt::join(list, ", "));
}

// What would be taken, as explain finds it: the nearest change, and a cut into several kernels; ""
// when nothing near is. Never an error of its own: the refusal is the answer.
std::string nearest_form(const ir::Graph& graph, const Device& device, const std::string& engine,
                         const Options& options, plan::Planner& planner) {
  const auto spec = front::spec_from_json(ir::graph_to_json(graph), "fusion");
  if (!spec.ok()) return {};
  Asked asked{engine, options};
  asked.options.tuning = Tuning::off;
  const unsigned threads = std::clamp(std::thread::hardware_concurrency(), 1U, 8U);
  const auto explained = explain(*spec, device, {}, kMaxNeighbours, threads,
                                 [&](const front::Spec& changed, const Device& where) {
                                   return judge_spec(changed, where, asked, planner);
                                 });
  if (!explained.ok()) return {};
  std::string text;
  const Json& neighbours = (*explained)["neighbours"];
  for (const Json& neighbour : neighbours) {
    if (!text.empty() && neighbour.value("kind", "") != "split") continue;
    text += (text.empty() ? "" : "; or ") + neighbour["change"].get<std::string>();
  }
  return text;
}

Error refusal(const ir::Graph& asked, const Request& request, const Attempt& attempt,
              const Device& device, plan::Planner& planner) {
  const ir::Graph graph = ir::simplify(asked);  // what the engine was asked, so what reasons number
  std::string message =
      fmt::format("fusion '{}' does not fuse on '{}' with engine '{}':", asked.name, device.name,
                  attempt.engine);
  for (const Reason& reason : reasons_of(attempt.why)) {
    message += fmt::format("\n  {}", reason.message);
  }
  if (const std::string where = places(graph); !where.empty()) message += "\n  ops: " + where;
  const std::string nearest = nearest_form(asked, device, attempt.engine, request.options, planner);
  if (!nearest.empty()) message += "\n  nearest supported form: " + nearest;
  return {ErrorKind::unsupported, std::move(message), attempt.why.reasons};
}

Error not_available(const ir::Graph& graph, const Attempt& attempt) {
  const bool on_host = attempt.engine != kCudnn;  // and so on every machine, with no device named
  return error(ErrorKind::unavailable, "fusion '{}' needs engine '{}': {}; {}", graph.name,
               attempt.engine, attempt.why.message,
               on_host ? "name device 'cpu', or none" : kHowToName);
}

Error none_runs(const ir::Graph& graph, const std::vector<Attempt>& attempts) {
  Error all{ErrorKind::unavailable,
            fmt::format("fusion '{}': none of the allowed engines runs it:", graph.name),
            {}};
  for (const Attempt& attempt : attempts) {
    all.message += fmt::format("\n  {}: {}", attempt.engine, attempt.why.message);
    if (attempt.why.kind != ErrorKind::unsupported) continue;
    all.kind = ErrorKind::unsupported;
    all.reasons.insert(all.reasons.end(), attempt.why.reasons.begin(), attempt.why.reasons.end());
  }
  return all;
}

struct Acquired {
  std::shared_ptr<Loaded> loaded;
  Device device;
};

// By one engine; UNAVAILABLE where it, or a device that it runs on, is not there.
Result<Acquired> acquire(const ir::Graph& graph, const lawson_device* given,
                         const std::string& engine, const Request& request,
                         plan::Planner& planner) {
  Result<Device> where =
      given != nullptr ? Result<Device>{given->device} : device_of(planner, engine);
  if (!where.ok()) return std::move(where).error();
  Engine* found = planner.engine(engine);
  if (found != nullptr && !found->accepts(*where)) {
    return error(ErrorKind::unavailable, "engine '{}' runs on {}, and '{}' is {}", engine,
                 where->kind == Device::Kind::cuda ? "the host CPU" : "GPUs", where->name,
                 where->kind == Device::Kind::cuda ? "a GPU" : "the host CPU");
  }
  auto loaded = planner.acquire(graph, *where, engine, request.options, request.stream);
  if (!loaded.ok()) return std::move(loaded).error();
  return Acquired{std::move(loaded).value(), std::move(where).value()};
}

Verdict verdict_of(const Plan& plan, const Device& device) {
  Verdict verdict;
  verdict.decision = Decision::supported;
  verdict.strength = Strength::built;
  verdict.evidence = device.evidence;
  verdict.engine = plan.engine;
  verdict.engine_version = plan.engine_version;
  verdict.key = plan.key;
  verdict.plan_id = plan.plan_id;
  verdict.plan_name = plan.plan_name;
  verdict.target = plan.target;
  verdict.workspace_bytes = plan.workspace_bytes;
  return verdict;
}

Json attempt_to_json(const Attempt& attempt) {
  Json reasons = Json::array();
  for (const Reason& reason : reasons_of(attempt.why)) {
    Json item{{"code", reason.code}, {"message", reason.message}};
    if (!reason.field.empty()) item["field"] = reason.field;
    reasons.push_back(std::move(item));
  }
  return {{"engine", attempt.engine},
          {"status", lawson::to_string(attempt.why.kind)},
          {"reasons", std::move(reasons)}};
}

Result<std::unique_ptr<lawson_fusion>> make_fusion(const ir::Graph& graph, Acquired acquired,
                                                   const Request& request,
                                                   const std::vector<Attempt>& attempts) {
  const Plan& plan = acquired.loaded->plan();
  LAWSON_TRY(auto handle, make_plan_handle(plan));
  Verdict verdict = verdict_of(plan, acquired.device);
  Json json = verdict_to_json(verdict);
  Json tried = Json::array();
  for (const Attempt& attempt : attempts) tried.push_back(attempt_to_json(attempt));
  Json report{{"policy", to_string(request.policy)},
              {"policy_from", request.policy_from},
              {"engines", request.engines},
              {"engines_from", request.engines_from},
              {"engine", plan.engine},
              {"target", plan.target},
              {"plan_id", plan.plan_id},
              {"tried", std::move(tried)},
              {"verdict", json},
              {"graph", ir::print(graph)}};
  handle->executable = std::make_shared<const lawson_plan::Executable>(
      lawson_plan::Executable{std::move(acquired.loaded), acquired.device});
  return std::make_unique<lawson_fusion>(
      lawson_fusion{{graph},
                    {std::move(acquired.device)},
                    {std::make_shared<const Verdict>(std::move(verdict)), nullptr},
                    std::move(handle),
                    std::move(report)});
}

bool leads_on(const Error& error) {
  return error.kind == ErrorKind::unsupported || error.kind == ErrorKind::unavailable;
}

Result<std::unique_ptr<lawson_fusion>> fuse(const ir::Graph& graph, const lawson_device* device,
                                            const Request& request, plan::Planner& planner) {
  std::vector<Attempt> attempts;
  for (const std::string& engine : request.engines) {
    auto acquired = acquire(graph, device, engine, request, planner);
    if (acquired.ok()) {
      return make_fusion(graph, std::move(acquired).value(), request, attempts);
    }
    Error why = std::move(acquired).error();
    if (!leads_on(why)) return why;
    attempts.push_back({engine, device == nullptr ? "" : device->device.name, std::move(why)});
  }
  if (attempts.size() > 1) return none_runs(graph, attempts);
  const Attempt& only = attempts.front();
  if (only.why.kind != ErrorKind::unsupported) return not_available(graph, only);
  LAWSON_TRY(const Device where,
             device != nullptr ? Result<Device>{device->device} : device_of(planner, only.engine));
  return refusal(graph, request, only, where, planner);
}

Result<std::vector<std::string>> read_names(const char* const* names, std::size_t count) {
  LAWSON_CHECK(require(names, "wrt"));
  std::vector<std::string> list;
  for (std::size_t i = 0; i < count; ++i) {
    LAWSON_CHECK(require(names[i], fmt::format("wrt[{}]", i)));
    list.emplace_back(names[i]);
  }
  return list;
}

}  // namespace
}  // namespace lawson::capi

using namespace lawson;
using namespace lawson::capi;

extern "C" {

lawson_status lawson_fuse(const lawson_graph* graph, const lawson_device* device,
                          const lawson_fuse_options* options, lawson_fusion** fusion) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(graph, "graph"));
    LAWSON_CHECK(require(fusion, "fusion"));
    LAWSON_TRY(const Request request, read_request(options));
    LAWSON_TRY(plan::Planner * planner, capi::planner());
    LAWSON_TRY(auto made, fuse(graph->graph, device, request, *planner));
    *fusion = made.release();
    return {};
  });
}

void lawson_fusion_destroy(lawson_fusion* fusion) {
  delete fusion;
}

const lawson_plan* lawson_fusion_plan(const lawson_fusion* fusion) {
  return fusion == nullptr ? nullptr : fusion->plan.get();
}

const lawson_verdict* lawson_fusion_verdict(const lawson_fusion* fusion) {
  return fusion == nullptr ? nullptr : &fusion->verdict;
}

const lawson_device* lawson_fusion_device(const lawson_fusion* fusion) {
  return fusion == nullptr ? nullptr : &fusion->device;
}

const lawson_graph* lawson_fusion_graph(const lawson_fusion* fusion) {
  return fusion == nullptr ? nullptr : &fusion->graph;
}

lawson_status lawson_fusion_json(const lawson_fusion* fusion, lawson_text** json) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(fusion, "fusion"));
    LAWSON_CHECK(require(json, "json"));
    return give_text(dump(fusion->report), json);
  });
}

lawson_status lawson_fusion_execute(const lawson_fusion* fusion, const lawson_binding* bindings,
                                    size_t count, void* workspace, size_t workspace_size,
                                    void* stream) {
  if (fusion == nullptr) {
    return guard([&]() -> Status { return require(fusion, "fusion"); });
  }
  return lawson_plan_execute(fusion->plan.get(), bindings, count, workspace, workspace_size,
                             stream);
}

lawson_status lawson_graph_gradient(const lawson_graph* graph, const char* const* wrt, size_t count,
                                    lawson_graph** gradient) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(graph, "graph"));
    LAWSON_CHECK(require(gradient, "gradient"));
    LAWSON_TRY(const std::vector<std::string> names, read_names(wrt, count));
    LAWSON_TRY(ir::Graph backward, ir::gradient(graph->graph, names));
    *gradient = new lawson_graph{std::move(backward)};
    return {};
  });
}

}  // extern "C"
