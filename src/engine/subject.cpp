#include "engine/subject.h"

#include <variant>

namespace lawson {

std::string_view pass_of(const ir::Graph& graph) {
  std::string_view pass = diag::kFusion;
  for (const ir::Node& node : graph.nodes) {
    if (std::holds_alternative<ir::AttentionBackward>(node.op)) return diag::kBackward;
    if (std::holds_alternative<ir::Attention>(node.op)) pass = diag::kForward;
  }
  return pass;
}

diag::Subject subject_of(std::string_view engine, const ir::Graph& graph, const Device& device,
                         std::string_view key) {
  return {engine, pass_of(graph), key, device.ordinal};
}

}  // namespace lawson
