// What decides how fast an engine config is for a graph with a product, as far as configs can be
// carried over from one graph to another: operand types, layouts, what follows, and the sizes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "ir/graph.h"

namespace lawson::cudnn {

// What follows the product, in the order of what it costs.
enum class Epilogue {
  none,       // conversions at most
  pointwise,  // with scalars, rows or columns at most: a bias, an activation
  addend,     // something of the product's size is read, or a second one written
  reduce,
  dual,  // two products
};
std::string_view to_string(Epilogue epilogue);
std::optional<Epilogue> epilogue_from_string(std::string_view text);

struct Workload {
  std::string a;  // the type in memory, then the one that is multiplied: "bf16", "i8>bf16"
  std::string b;
  std::string layouts;  // of a and b: "r" rows are contiguous, "c" columns, "x" neither
  Epilogue epilogue = Epilogue::none;
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  std::int64_t batch = 0;

  bool operator==(const Workload&) const = default;
};
std::string to_string(const Workload& workload);  // "bf16 x bf16 rr pointwise 1 x 4096 x ..."

// nullopt: the graph has no matmul, or something else of weight beside it.
std::optional<Workload> workload_of(const ir::Graph& graph);

}  // namespace lawson::cudnn
