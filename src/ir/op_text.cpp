#include "ir/op_text.h"

#include <algorithm>

namespace lawson::ir {

std::string op_text(const Graph& graph, const Node& node) {
  const auto result = std::find_if(node.outputs.begin(), node.outputs.end(),
                                   [](TensorId id) { return id != kNone; });
  std::string place;
  if (result != node.outputs.end()) place = graph.tensor(*result).name;
  if (!node.source.empty()) place += (place.empty() ? "" : ", ") + node.source;
  return fmt::format("op '{}' ({})", op_name(node.op), place);
}

}  // namespace lawson::ir
