// Inside src/front: what the two kinds of spec add their neighbours to.
#pragma once

#include <cmath>

#include "front/attention.h"
#include "front/neighbours.h"

namespace lawson::front {

class NeighbourList {
 public:
  using Change = std::function<void(Json&)>;

  void exact(std::string field, std::string change, Change apply) {
    list_.push_back({std::move(change), std::move(field), true, std::move(apply), false});
  }
  void add(std::string field, std::string change, Change apply) {
    list_.push_back({std::move(change), std::move(field), false, std::move(apply), false});
  }
  void structural(std::string field, std::string change, bool is_exact, Change apply) {
    list_.push_back({std::move(change), std::move(field), is_exact, std::move(apply), true});
  }

  std::vector<Neighbour> take() && { return std::move(list_); }

 private:
  std::vector<Neighbour> list_;
};

void add_attention_neighbours(const AttentionSpec& spec, NeighbourList& list);
void add_graph_neighbours(const ir::Graph& graph, NeighbourList& list);

}  // namespace lawson::front
