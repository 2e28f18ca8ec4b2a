// Where to cut a graph that no single kernel takes: the same computation as two or three graphs
// that run one after the other, tensors in memory between them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ir/graph.h"

namespace lawson::front {

struct Split {
  // "cut after op 'gelu' (h, mlp.cpp:12): two kernels, 32 MiB between"
  std::string text;
  // In the order they run. A tensor that crosses is an output of one and an input of the others
  // that read it, of the same name. Inputs and outputs of the whole keep their names and layouts.
  std::vector<ir::Graph> parts;
  std::int64_t bytes = 0;  // of the tensors that cross
};

// The cuts of the simplified graph in two, at most `limit`, least bytes between first: what an op
// depends on before all else, or the first ops before the last ones; each also with the views and
// widening conversions next to the cut on its other side, where that is less to store.
std::vector<Split> two_way_splits(const ir::Graph& graph, std::size_t limit);

struct SplitSearch {
  std::optional<Split> split;  // the best whose parts are all supported
  std::size_t probes = 0;
};

// Asks about the parts of cuts, of each different graph once and of at most `limit`. Where no cut
// in two is supported throughout, a refused half beside a supported one is cut again.
SplitSearch find_split(const ir::Graph& graph, std::size_t limit,
                       const std::function<bool(const ir::Graph&)>& supported);

}  // namespace lawson::front
