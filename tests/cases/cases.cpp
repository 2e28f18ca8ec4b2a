#include "cases/cases.h"

#include "front/attention.h"
#include "ir/json.h"

namespace lawson::cases {
namespace {

std::string summary(const Json& spec) {
  std::string text;
  if (spec["kind"] == "graph") {
    for (const Json& input : spec["inputs"]) {
      text += fmt::format("{}{} ", input["dtype"].get<std::string>(), input["shape"].dump());
    }
    text += "->";
    for (const Json& op : spec["ops"]) text += fmt::format(" {}", op["op"].get<std::string>());
    return spec.value("strict", false) ? text + " (strict)" : text;
  }
  for (const auto& [field, value] : spec.items()) {
    if (field == "lawson" || field == "kind" || field == "name" || field == "strides") continue;
    if (!text.empty()) text += ' ';
    text +=
        fmt::format("{}={}", field, value.is_string() ? value.get<std::string>() : value.dump());
  }
  return spec.contains("strides") ? text + " strided" : text;
}

}  // namespace

std::vector<Case> attention_edge_cases();

std::string Case::text() const {
  return fmt::format("{} ({}, seed {}): {}", name, plan::to_string(style), seed, summary(spec));
}

std::vector<Case> edge_cases() {
  return attention_edge_cases();
}

Result<ir::Graph> graph_of(const Case& item) {
  if (item.spec["kind"] == "graph") return ir::graph_from_json(item.spec, item.name);
  LAWSON_TRY(auto spec, front::attention_from_json(item.spec, item.name));
  return front::attention_graph(spec, spec.pass);
}

}  // namespace lawson::cases
