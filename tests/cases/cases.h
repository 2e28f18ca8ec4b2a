// The one case list for all engines. A case prints itself, is drawn from a seed, and is a spec
// document as users write them (DESIGN: specs), so that any front door can be given the same cases.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/json.h"
#include "ir/graph.h"
#include "plan/inputs.h"

namespace lawson::cases {

struct Case {
  std::string name;        // "pairs-3", "attention-1017", "fusion-3", "edge-softcap"
  Json spec;               // kind "attention" (pass forward or backward) or "graph"
  std::uint64_t seed = 1;  // of the input data
  plan::InputStyle style = plan::InputStyle::normal;

  // One line: the name and what is special about it.
  std::string text() const;
};

// What may be drawn: everything that the specs can say, or what usual kernels take (f16 and bf16,
// head dims that are multiples of 8), so that most cases are accepted by a GPU.
enum class Profile { any, gpu };

// First the rows of a covering array over all axes of attention (attention_axes.h), named
// "pairs-N", as far as `count` goes; then random ones, named "attention-N".
std::vector<Case> attention_cases(std::uint64_t seed, int count, Profile profile = Profile::any);

struct AttentionCoverage {
  std::size_t pairs = 0;                // of levels of two axes
  std::size_t rows = 0;                 // that have every pair that is possible
  std::vector<std::string> impossible;  // "heads gqa, layout bs3hd"
};
AttentionCoverage attention_coverage(std::uint64_t seed, Profile profile);

// `count` of an attention list: its covering rows, and of the rest a draw by `seed`, in order.
std::vector<Case> sampled(std::vector<Case> cases, std::size_t count, std::uint64_t seed);

// Graphs over the whole op set (fusion_steps.h), named "fusion-N".
std::vector<Case> fusion_cases(std::uint64_t seed, int count, Profile profile = Profile::any);
// What XLA's tests prove of fusions, "xla-..." and "own-..." (fixed; no seed). With what is
// expected of a target: xla.h.
std::vector<Case> xla_cases();
// The inputs and shapes that break kernels, reported defects among them (fixed; no seed): large
// logits, one-hot rows, masked rows, subnormal numbers, tile edges, odd head dims, huge strides,
// empty sequences, gaps between sequences, windows, broadcast biases.
std::vector<Case> edge_cases();

Result<ir::Graph> graph_of(const Case& item);

}  // namespace lawson::cases
