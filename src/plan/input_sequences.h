// The sequences of an attention in generated inputs: their lengths, where they lie, and which rows
// of its tensors belong to one.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "plan/inputs.h"

namespace lawson::plan {

// Cumulative lengths, their padded form and page tables that no values were given for: they have to
// fit the tensors.
void fill_lengths(const ir::Graph& graph, const ir::Node& node, std::uint64_t seed,
                  std::vector<Buffer>& buffers);

// Which rows [b, s] of a tensor [b, h, s, d] an attention reads.
struct TokenRows {
  std::vector<char> read;
  std::int64_t rows = 0;  // along s
  bool bucket = false;    // of a ragged batch: most rows may belong to nobody

  bool holds(std::int64_t b, std::int64_t s) const {
    return read[static_cast<std::size_t>(b * rows + s)] != 0;
  }
};

// Of the inputs that hold rows which no sequence has: ragged, paged, padded, or overwritten by a
// cache append.
std::map<ir::TensorId, TokenRows> token_rows(const ir::Graph& graph,
                                             const std::vector<Buffer>& buffers);

}  // namespace lawson::plan
