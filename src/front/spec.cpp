#include "front/spec.h"

#include "ir/json.h"

namespace lawson::front {
namespace {

Status add_part(Spec& spec, const char* name, Result<ir::Graph> graph) {
  if (graph.ok()) {
    spec.parts.push_back({name, std::move(graph).value()});
    return {};
  }
  if (graph.error().kind != ErrorKind::unsupported) return graph.error();
  spec.unsupported = graph.error().reasons;
  spec.parts.clear();
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
  const auto graph_of = [&](Pass pass) -> Result<ir::Graph> {
    auto graph = attention_graph(attention, pass);
    if (!graph.ok() && graph.error().kind == ErrorKind::invalid_argument) {
      return invalid("{}: {}", source, graph.error().message);
    }
    return graph;
  };
  if (attention.pass != Pass::backward) {
    LAWSON_CHECK(add_part(spec, "forward", graph_of(Pass::forward)));
  }
  if (attention.pass != Pass::forward && spec.unsupported.empty()) {
    LAWSON_CHECK(add_part(spec, "backward", graph_of(Pass::backward)));
  }
  return spec;
}

}  // namespace lawson::front
