// Context parallelism: the steps of one rank as attention specs of their own, to be judged.
//
// The sequence is cut over `size` ranks. Causal work is balanced by dual chunks: rank r holds
// chunks r and 2*size-1-r of 2*size equal chunks (of each sequence, where it is ragged).
// Strategies:
//   ring        rank r keeps its Q; in step i it has K and V of rank r-i (mod size). The results
//   are
//               merged by their log-sum-exp.
//   all_gather  each rank gathers all K and V; its two chunks of Q are two steps.
//   all_to_all  the exchange gives each rank the whole sequence of heads/size heads: one step.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "front/attention.h"

namespace lawson::front {

inline constexpr std::int64_t kMaxRanks = 4096;

struct CpStep {
  std::int64_t rank = 0;
  std::int64_t step = 0;
  std::string name;    // "ring step 2 of rank 1"
  AttentionSpec spec;  // what this rank computes in this step; without context_parallel
};

// The steps of one rank, in order. A group of one rank has one step: the spec itself. Lengths that
// the spec gives for generated data are not those of the steps, and are left out.
//
// ErrorKind::unsupported, with a reason for each field that stands in the way: sizes that the ranks
// do not divide, and what no choice of steps computes exactly. Causal masks and windows are those
// of self attention: for each sequence, q and kv have the same length.
Result<std::vector<CpStep>> cp_step_configs(const AttentionSpec& spec, CpStrategy strategy,
                                            std::int64_t size, std::int64_t rank);

// The distinct steps over all ranks of spec.context_parallel, each under the name of the first that
// has it.
Result<std::vector<CpStep>> cp_distinct_steps(const AttentionSpec& spec);

}  // namespace lawson::front
