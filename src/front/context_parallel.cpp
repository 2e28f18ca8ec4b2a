#include "front/context_parallel.h"

#include <algorithm>

#include "front/context_parallel_split.h"

namespace lawson::front {
namespace {

// A dim that is full in the global shape is full in the step's; a broadcast dim stays 1.
void resize(Dims& shape, std::size_t axis, std::int64_t full, std::int64_t part) {
  if (axis < shape.size() && shape[axis] == full) shape[axis] = part;
}

class Steps {
 public:
  explicit Steps(const CpSplit& split) : split_{split}, spec_{split.spec} {}

  std::vector<CpStep> of_rank(std::int64_t rank) const {
    switch (split_.strategy) {
      case CpStrategy::ring:
        return ring(rank);
      case CpStrategy::all_gather:
        return all_gather(rank);
      case CpStrategy::all_to_all:
        return all_to_all(rank);
    }
    return {};
  }

 private:
  // What all steps have of the spec. Source: qkv_layout is made of three tensors of their own.
  AttentionSpec common(std::int64_t rank, std::int64_t step) const {
    AttentionSpec part = spec_;
    part.name = name(rank, step);
    part.context_parallel.reset();
    const auto& words = split_.layout.words;
    part.layout = words[0];
    if (words[1] != words[0] || words[2] != words[0]) {
      part.layout += "_" + words[1] + "_" + words[2];
    }
    for (Dims* lengths :
         {&part.seqlens_q, &part.seqlens_kv, &part.seqlens_q_padded, &part.seqlens_kv_padded}) {
      lengths->clear();
    }
    return part;
  }

  std::string name(std::int64_t rank, std::int64_t step) const {
    return fmt::format("{} step {} of rank {}", strategy_name(split_.strategy), step, rank);
  }

  static CpStep finish(std::int64_t rank, std::int64_t step, AttentionSpec part) {
    std::string name = part.name;
    return {rank, step, std::move(name), std::move(part)};
  }

  void set_rows(AttentionSpec& part, std::int64_t rows) const {
    resize(part.bias_shape, 2, spec_.seqlen_q, rows);
    if (part.attn_mask) resize(part.attn_mask->shape, 2, spec_.seqlen_q, rows);
    part.seqlen_q = rows;
  }

  void set_columns(AttentionSpec& part, std::int64_t columns) const {
    resize(part.bias_shape, 3, spec_.seqlen_kv, columns);
    if (part.attn_mask) resize(part.attn_mask->shape, 3, spec_.seqlen_kv, columns);
    part.seqlen_kv = columns;
  }

  std::vector<CpStep> ring(std::int64_t rank) const {
    std::vector<CpStep> steps;
    for (std::int64_t step = 0; step < split_.size; ++step) {
      // Source: sections "diagonal", "lower-triangle" (kv comes from an earlier rank: of its two
      // chunks the first is before all of q, the second behind all of it), "upper-triangle" (kv
      // from a later rank is before the second chunk of q and behind the first); not causal: "all".
      const bool diagonal = step == 0 || !split_.causal();
      const std::int64_t q_parts = diagonal || step <= rank ? split_.size : 2 * split_.size;
      const std::int64_t kv_parts = diagonal || step > rank ? split_.size : 2 * split_.size;
      AttentionSpec part = common(rank, step);
      set_rows(part, spec_.seqlen_q / q_parts);
      set_columns(part, spec_.seqlen_kv / kv_parts);
      if (split_.layout.ragged_q()) part.total_q = split_.total_q() / q_parts;
      if (split_.layout.ragged_kv()) part.total_kv = split_.total_kv() / kv_parts;
      part.return_stats = true;  // the results of all steps are merged by them
      if (!diagonal) {
        part.mask = split_.padding ? "padding" : "none";
        part.window_left = part.window_right = -1;
      } else if (part.mask.ends_with("bottom_right")) {
        part.mask = "causal";
      }
      steps.push_back(finish(rank, step, std::move(part)));
    }
    return steps;
  }

  // Source: local_seq_chunk_ids.
  std::vector<CpStep> all_gather(std::int64_t rank) const {
    std::vector<CpStep> steps;
    for (const std::int64_t chunk : {rank, 2 * split_.size - 1 - rank}) {
      const auto step = static_cast<std::int64_t>(steps.size());
      AttentionSpec part = common(rank, step);
      set_rows(part, spec_.seqlen_q / (2 * split_.size));
      if (split_.ragged()) {
        set_ragged_chunk(part);
      } else if (split_.positional()) {
        set_window(part, chunk);
      }
      steps.push_back(finish(rank, step, std::move(part)));
    }
    return steps;
  }

  // Source, for THD: the tensors are passed whole; offsets select the chunk of q, and lengths the
  // kv up to its end.
  void set_ragged_chunk(AttentionSpec& part) const {
    if (split_.layout.ragged_q()) {
      // Both chunks of the rank are there; that batch * seqlen is beyond int64 the graph will say.
      const std::int64_t tokens = split_.total_q() > 0
                                      ? split_.total_q()
                                      : element_count({spec_.batch, spec_.seqlen_q}).value_or(0);
      part.total_q = tokens / split_.size;
      part.has_padded_offsets = true;
    }
    if (split_.layout.ragged_kv()) part.total_kv = split_.total_kv();
    if (!split_.positional()) return;
    part.mask = split_.padding ? "padding_causal_bottom_right" : "causal_bottom_right";
    part.window_right = split_.left == -1 ? -1 : 0;
  }

  // Source: get_kv_seq_info_after_all_gather. kv is cut to what the chunk's rows see, [start, end),
  // and its last column belongs to the chunk's last row: bottom-right alignment, the window as much
  // wider to the left as kv goes beyond the chunk. A window to the right that ends with the
  // sequence has no such form here (bottom-right masks are causal), and with padding the end is the
  // sequence's own: there the bounds are shifted instead.
  void set_window(AttentionSpec& part, std::int64_t chunk) const {
    const std::int64_t rows = part.seqlen_q;
    const std::int64_t first = chunk * rows;
    const std::int64_t last = first + rows;
    const std::int64_t end =
        split_.right == -1 ? spec_.seqlen_kv : std::min(spec_.seqlen_kv, last + split_.right);
    const std::int64_t start =
        split_.left == -1 ? 0 : std::max<std::int64_t>(0, first - split_.left);
    set_columns(part, end - start);
    const bool ends_with_window = split_.right != -1 && end == last + split_.right;
    if (split_.right == 0 || (ends_with_window && !split_.padding)) {
      part.mask = split_.padding ? "padding_causal_bottom_right" : "causal_bottom_right";
      part.window_left = split_.left == -1 ? -1 : split_.left + split_.right;
      part.window_right = split_.left == -1 ? -1 : 0;
    } else {
      part.mask = split_.padding ? "padding" : "none";
      part.window_left = split_.left == -1 ? -1 : split_.left - (first - start);
      part.window_right = split_.right == -1 ? -1 : split_.right + (first - start);
    }
  }

  std::vector<CpStep> all_to_all(std::int64_t rank) const {
    AttentionSpec part = common(rank, 0);
    part.heads = spec_.heads / split_.size;
    part.kv_heads = spec_.kv_heads / split_.size;
    resize(part.bias_shape, 1, spec_.heads, part.heads);
    if (part.attn_mask) resize(part.attn_mask->shape, 1, spec_.heads, part.heads);
    // The slopes of some heads of many are not those of so few heads.
    if (spec_.bias == BiasKind::alibi) part.alibi_slopes = true;
    if (!spec_.alibi_slope_values.empty()) {
      const auto from = spec_.alibi_slope_values.begin() + rank * part.heads;
      part.alibi_slope_values.assign(from, from + part.heads);
    }
    return {finish(rank, 0, std::move(part))};
  }

  const CpSplit& split_;
  const AttentionSpec& spec_;
};

// What of a step makes another plan: not its name, not data that is bound at run time.
AttentionSpec anonymous(AttentionSpec spec) {
  spec.name.clear();
  spec.alibi_slope_values.clear();
  return spec;
}

}  // namespace

Result<std::vector<CpStep>> cp_step_configs(const AttentionSpec& spec, CpStrategy strategy,
                                            std::int64_t size, std::int64_t rank) {
  if (size < 1) return invalid("size: {} is not allowed; expected at least 1 rank", size);
  if (rank < 0 || rank >= size) {
    return invalid("rank: {} is not allowed; expected 0 to {}", rank, size - 1);
  }
  if (const auto wrong = check_attention(spec)) {
    return invalid("field '{}': {}", wrong->field, wrong->message);
  }
  if (size == 1) {
    CpStep whole{0, 0, fmt::format("{} step 0 of rank 0", strategy_name(strategy)), spec};
    whole.spec.name = whole.name;
    whole.spec.context_parallel.reset();
    return std::vector{std::move(whole)};
  }
  const CpSplit split(spec, strategy, size);
  LAWSON_CHECK(check_split(split));
  return Steps(split).of_rank(rank);
}

Result<std::vector<CpStep>> cp_distinct_steps(const AttentionSpec& spec) {
  if (!spec.context_parallel) return invalid("context_parallel: the spec has none");
  const auto [strategy, size] = *spec.context_parallel;
  // In a ring, ranks 0 and 1 have all kinds of steps between them.
  const std::int64_t ranks = strategy == CpStrategy::ring ? std::min<std::int64_t>(size, 2) : size;
  std::vector<CpStep> distinct;
  std::vector<AttentionSpec> known;
  for (std::int64_t rank = 0; rank < std::max<std::int64_t>(ranks, 1); ++rank) {
    LAWSON_TRY(std::vector<CpStep> steps, cp_step_configs(spec, strategy, size, rank));
    for (CpStep& step : steps) {
      AttentionSpec content = anonymous(step.spec);
      if (std::find(known.begin(), known.end(), content) != known.end()) continue;
      known.push_back(std::move(content));
      distinct.push_back(std::move(step));
    }
  }
  return distinct;
}

}  // namespace lawson::front
