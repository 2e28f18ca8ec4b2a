#include "front/neighbours.h"

#include <algorithm>

#include "front/neighbours_list.h"

namespace lawson::front {
namespace {

const char* const kSource = "changed spec";

// Each proposal is a graph to be made and compared. Of large graphs the first ones do: nobody reads
// thousands, and nobody waits for them.
constexpr std::size_t kMostOps = std::size_t{256} * 256;  // of all proposals together
constexpr std::size_t kLeast = 16;

std::size_t most_proposals(const Spec& spec) {
  const std::size_t ops = spec.parts.empty() ? 1 : spec.parts[0].graph.nodes.size();
  return std::max(kLeast, kMostOps / std::max<std::size_t>(ops, 1));
}

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
  std::vector<Neighbour> list = std::move(proposals).take();
  std::stable_partition(list.begin(), list.end(), [](const Neighbour& n) { return n.exact; });
  list.erase(
      list.begin() + static_cast<std::ptrdiff_t>(std::min(list.size(), most_proposals(spec))),
      list.end());
  for (Neighbour& neighbour : list) {
    const auto changed = apply(spec, {&neighbour});
    if (!changed.ok()) continue;  // the fields do not go together that way
    std::string asked = question(*changed);
    if (std::find(seen.begin(), seen.end(), asked) != seen.end()) continue;
    seen.push_back(std::move(asked));
    kept.push_back(std::move(neighbour));
  }
  return kept;
}

}  // namespace lawson::front
