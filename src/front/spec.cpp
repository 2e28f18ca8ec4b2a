#include "front/spec.h"

#include <utility>

#include "front/context_parallel.h"
#include "ir/json.h"

namespace lawson::front {
namespace {

// What is unsupported is an answer, kept in the spec; other errors end the reading.
Status refuse(Spec& spec, Error error, const std::string& place) {
  if (error.kind != ErrorKind::unsupported) return error;
  spec.unsupported = std::move(error.reasons);
  for (Reason& reason : spec.unsupported) reason.message = place + reason.message;
  spec.parts.clear();
  spec.steps.clear();
  return {};
}

// The graphs of a spec without context_parallel, for step `step` where there are steps.
Status add_parts(Spec& spec, const AttentionSpec& attention, std::size_t step) {
  const std::string place = spec.steps.empty() ? "" : spec.steps[step].name + ": ";
  for (const auto& [name, pass] :
       {std::pair{"forward", Pass::forward}, std::pair{"backward", Pass::backward}}) {
    if (attention.pass != pass && attention.pass != Pass::training) continue;
    auto graph = attention_graph(attention, pass);
    if (!graph.ok()) return refuse(spec, std::move(graph).error(), place);
    spec.parts.push_back({name, std::move(graph).value(), step});
  }
  return {};
}

Status add_steps(Spec& spec, const AttentionSpec& attention) {
  auto steps = cp_distinct_steps(attention);
  if (!steps.ok()) return refuse(spec, std::move(steps).error(), "");
  for (const CpStep& step : *steps) {
    spec.steps.push_back({step.name, step.rank, step.step});
    LAWSON_CHECK(add_parts(spec, step.spec, spec.steps.size() - 1));
    if (!spec.unsupported.empty()) return {};
  }
  return {};
}

}  // namespace

Result<Spec> spec_from_json(const Json& document, const std::string& source) {
  ObjectReader reader(document, source);
  if (!document.is_object()) return reader.finish().error();
  LAWSON_CHECK(reader.integer("lawson", 1, 1));
  LAWSON_TRY(std::string kind, reader.choice_or("kind", "", {"attention", "graph"}));
  if (kind.empty()) return reader.fail("kind", "missing; expected attention or graph");
  Spec spec;
  spec.kind = kind;
  if (kind == "graph") {
    LAWSON_TRY(ir::Graph graph, ir::graph_from_json(document, source));
    spec.name = graph.name;
    spec.document = ir::graph_to_json(graph);
    spec.parts.push_back({"graph", std::move(graph)});
    return spec;
  }
  LAWSON_TRY(AttentionSpec attention, attention_from_json(document, source));
  spec.name = attention.name;
  spec.document = attention_to_json(attention);
  for (const auto& [field, value] : document.items()) {
    if (!value.is_null()) spec.document[field] = value;  // also what is read and not lowered
  }
  const Status added =
      attention.context_parallel ? add_steps(spec, attention) : add_parts(spec, attention, 0);
  if (added.ok()) return spec;
  if (added.error().kind != ErrorKind::invalid_argument) return added.error();
  return invalid("{}: {}", source, added.error().message);
}

}  // namespace lawson::front
