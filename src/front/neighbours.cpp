#include "front/neighbours.h"

#include <algorithm>

#include "front/neighbours_list.h"

namespace lawson::front {
namespace {

const char* const kSource = "changed spec";

// What the engines would be asked, as text: two specs with equal texts get equal answers.
std::string question(const Spec& spec) {
  std::string text;
  for (const SpecPart& part : spec.parts) text += ir::canonical_text(part.graph);
  for (const Reason& reason : spec.unsupported) text += reason.message + "\n";
  return text;
}

}  // namespace

Result<Spec> apply(const Spec& spec, const std::vector<const Neighbour*>& changes) {
  Json document = spec.document;
  for (const Neighbour* change : changes) change->apply(document);
  return spec_from_json(document, kSource);
}

std::vector<Neighbour> neighbours(const Spec& spec) {
  NeighbourList proposals;
  if (spec.kind == "attention") {
    auto attention = attention_from_json(spec.document, kSource);
    if (!attention.ok()) return {};
    add_attention_neighbours(*attention, proposals);
  } else if (!spec.parts.empty()) {
    add_graph_neighbours(spec.parts[0].graph, proposals);
  }
  std::vector<std::string> seen{question(spec)};
  std::vector<Neighbour> kept;
  for (Neighbour& neighbour : std::move(proposals).take()) {
    const auto changed = apply(spec, {&neighbour});
    if (!changed.ok()) continue;  // the fields do not go together that way
    std::string asked = question(*changed);
    if (std::find(seen.begin(), seen.end(), asked) != seen.end()) continue;
    seen.push_back(std::move(asked));
    kept.push_back(std::move(neighbour));
  }
  std::stable_partition(kept.begin(), kept.end(), [](const Neighbour& n) { return n.exact; });
  return kept;
}

}  // namespace lawson::front
