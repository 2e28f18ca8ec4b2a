// The sources below are Transformer Engine's (main of 2026-08): pytorch/attention/
// dot_product_attention/context_parallel.py, which runs such steps through cuDNN, and its filter
// get_attention_backend in utils.py beside it.
#include "front/context_parallel.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <string_view>

namespace lawson::front {
namespace {

std::string_view word(CpStrategy strategy) {
  switch (strategy) {
    case CpStrategy::ring:
      return "ring";
    case CpStrategy::all_gather:
      return "all-gather";
    case CpStrategy::all_to_all:
      return "all-to-all";
  }
  return "";
}

// A dim that is full in the global shape is full in the step's; a broadcast dim stays 1.
void resize(Dims& shape, std::size_t axis, std::int64_t full, std::int64_t part) {
  if (axis < shape.size() && shape[axis] == full) shape[axis] = part;
}

class Steps {
 public:
  Steps(const AttentionSpec& spec, CpStrategy strategy, std::int64_t size)
      : spec_{spec},
        strategy_{strategy},
        size_{size},
        layout_{*parse_layout(spec.layout)},
        padding_{spec.mask.starts_with("padding")},
        left_{spec.window_left},
        right_{spec.mask.find("causal") != std::string::npos ? 0 : spec.window_right} {}

  // Every reason, so that one answer names all that has to change.
  Status check() {
    if (size_ > kMaxRanks) {
      refuse("context_parallel_size", "context_parallel",
             fmt::format("size = {}: steps are judged for at most {} ranks", size_, kMaxRanks));
      return refusal();
    }
    check_tensors();
    if (strategy_ == CpStrategy::all_to_all) {
      divisible("heads", spec_.heads, size_);
      divisible("kv_heads", spec_.kv_heads, size_);
    } else {
      check_lengths();
      check_positions();
      check_scores();
    }
    return refusal();
  }

  std::vector<CpStep> of_rank(std::int64_t rank) const {
    switch (strategy_) {
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
  bool ragged() const { return layout_.ragged_q() || layout_.ragged_kv(); }
  bool positional() const { return left_ != -1 || right_ != -1; }
  bool causal() const { return left_ == -1 && right_ == 0; }
  // Equal parts that a sequence is cut into.
  std::int64_t chunks() const {
    return strategy_ == CpStrategy::ring && !causal() ? size_ : 2 * size_;
  }

  // Tokens of a ragged tensor as far as the spec says; 0: batch * seqlen.
  std::int64_t total_q() const {
    if (spec_.total_q > 0) return spec_.total_q;
    return std::accumulate(room_q().begin(), room_q().end(), std::int64_t{0});
  }
  std::int64_t total_kv() const {
    if (spec_.total_kv > 0) return spec_.total_kv;
    return std::accumulate(room_kv().begin(), room_kv().end(), std::int64_t{0});
  }

  void refuse(std::string code, std::string field, const std::string& what) {
    refused_.reasons.push_back(
        {std::move(code), fmt::format("{} under {} context parallelism", what, word(strategy_)),
         std::move(field)});
  }

  Status refusal() const {
    if (refused_.reasons.empty()) return {};
    Error error = refused_;
    error.kind = ErrorKind::unsupported;
    error.message = error.reasons.front().message;
    return error;
  }

  void divisible(const char* field, std::int64_t value, std::int64_t by) {
    if (value % by == 0) return;
    refuse(
        "not_divisible", field,
        fmt::format("{} = {}: has to be a multiple of {} for {} ranks", field, value, by, size_));
  }

  void check_tensors() {
    if (spec_.paged || spec_.append > 0) {
      refuse("context_parallel_cache", spec_.paged ? "paged" : "append",
             "a cache of keys and values has no steps");
    }
    // Each step's tensors are copies or results of an exchange (.contiguous() in the source).
    if (!spec_.strides.empty()) {
      refuse("context_parallel_strides", "strides",
             "strides are those of the whole tensors, and each step has tensors of its own; they "
             "have to be left out");
    }
  }

  // Source: "context parallelism requires seq_len % (cp_size * 2) == 0 for each sequence in q, k,
  // v"; without a causal mask the two chunks of a rank are alike, and size parts are enough.
  void check_lengths() {
    const std::int64_t by = chunks();
    divisible("seqlen_q", spec_.seqlen_q, by);
    divisible("seqlen_kv", spec_.seqlen_kv, by);
    if (layout_.ragged_q()) {
      divisible("total_q", total_q(), by);
      each_divisible("seqlens_q", spec_.seqlens_q, "seqlens_q_padded", spec_.seqlens_q_padded,
                     spec_.seqlen_q, by);
    }
    if (layout_.ragged_kv()) {
      divisible("total_kv", total_kv(), by);
      each_divisible("seqlens_kv", spec_.seqlens_kv, "seqlens_kv_padded", spec_.seqlens_kv_padded,
                     spec_.seqlen_kv, by);
    }
  }

  // It is the room of a sequence in memory that is cut, and a step's longest sequence is a part of
  // the longest room.
  void each_divisible(const char* field, const Dims& lengths, const char* padded_field,
                      const Dims& padded, std::int64_t longest, std::int64_t by) {
    const Dims& room = padded.empty() ? lengths : padded;
    const auto odd =
        std::find_if(room.begin(), room.end(), [&](std::int64_t n) { return n % by != 0; });
    if (odd != room.end()) divisible(padded.empty() ? field : padded_field, *odd, by);
    const auto large =
        std::find_if(room.begin(), room.end(), [&](std::int64_t n) { return n > longest; });
    if (large != room.end()) {
      refuse(
          "context_parallel_room", padded_field,
          fmt::format("{} = {}: at most the longest sequence, {}", padded_field, *large, longest));
    }
  }

  void check_positions() {
    if (!positional()) return;
    // Source: "does not support context parallelism with causal masking for cross-attention".
    if (spec_.seqlen_q != spec_.seqlen_kv || layout_.ragged_q() != layout_.ragged_kv()) {
      refuse(
          "context_parallel_cross_attention", "seqlen_kv",
          fmt::format("a causal mask or window with seqlen_q = {}, seqlen_kv = {} and layout {}: "
                      "both have to be alike, so that q and kv are cut at the same positions",
                      spec_.seqlen_q, spec_.seqlen_kv, spec_.layout));
    }
    // Where all lengths are equal, bottom_right is top_left; where each sequence has its own, the
    // tiles of a step see parts of each other.
    if (spec_.mask.ends_with("bottom_right") && (padding_ || ragged())) {
      refuse("context_parallel_bottom_right", "mask",
             fmt::format("mask = {}: not with lengths of their own for the sequences", spec_.mask));
    }
    const bool room_differs = ragged() && room_q() != room_kv();
    // Bottom-right alignment of a step goes by the lengths of q and kv.
    const bool lengths_differ = strategy_ == CpStrategy::all_gather && (ragged() || padding_) &&
                                spec_.seqlens_q != spec_.seqlens_kv;
    if (room_differs || lengths_differ) {
      refuse("context_parallel_cross_attention", "seqlens_kv",
             "a causal mask or window with seqlens_kv other than seqlens_q");
    }
    check_window();
  }

  const Dims& room_q() const {
    return spec_.seqlens_q_padded.empty() ? spec_.seqlens_q : spec_.seqlens_q_padded;
  }
  const Dims& room_kv() const {
    return spec_.seqlens_kv_padded.empty() ? spec_.seqlens_kv : spec_.seqlens_kv_padded;
  }

  void check_window() {
    const std::string window = fmt::format("window = [{}, {}]", left_, right_);
    // Source: "does not support sliding window attention with cp_comm_type" p2p. The two chunks of
    // a rank lie side by side in its tensors and apart in the sequence.
    if (strategy_ == CpStrategy::ring && !causal()) {
      refuse("context_parallel_window", "window", window + ": not on the chunks of a ring step");
    }
    // The kv of a sequence that a chunk of q needs ends `right` behind the chunk, or with the
    // sequence: no one alignment and window of the step says so for all sequences.
    if (strategy_ == CpStrategy::all_gather && ragged() && right_ != 0) {
      refuse("context_parallel_window", "window",
             window + ": ragged sequences need right = 0 (causal)");
    }
  }

  void check_scores() {
    // Source: softmax_type other than vanilla only with a2a. A ring step would add the implicit
    // logit once more; a step of all_gather has all columns of its rows.
    if (strategy_ == CpStrategy::ring && spec_.softmax != ir::SoftmaxKind::vanilla) {
      refuse("context_parallel_softmax", "softmax",
             fmt::format("softmax = {}: each step would count the extra logit",
                         ir::to_string(spec_.softmax)));
    }
    // ALiBi goes by distance. Aligned bottom-right, a chunk of q is where it is in the sequence.
    if (spec_.bias == BiasKind::alibi && !(strategy_ == CpStrategy::all_gather && right_ == 0)) {
      refuse("context_parallel_bias", "bias",
             "bias = alibi: a step's rows and columns have lost their distances");
    }
    // Source: "attention bias for THD format". Chunks of ragged sequences differ in size, so that
    // no block of a tensor over rows and columns belongs to a step.
    if (!ragged()) return;
    if (spec_.bias == BiasKind::pre_scale || spec_.bias == BiasKind::post_scale) {
      refuse("context_parallel_bias", "bias", "a bias tensor: not with ragged sequences");
    }
    if (spec_.attn_mask) {
      refuse("context_parallel_mask", "attn_mask", "attn_mask: not with ragged sequences");
    }
  }

  // What all steps have of the spec. Source: qkv_layout is made of three tensors of their own.
  AttentionSpec common(std::int64_t rank, std::int64_t step) const {
    AttentionSpec part = spec_;
    part.name = name(rank, step);
    part.context_parallel.reset();
    const auto& words = layout_.words;
    part.layout = words[0];
    if (words[1] != words[0] || words[2] != words[0])
      part.layout += "_" + words[1] + "_" + words[2];
    for (Dims* lengths :
         {&part.seqlens_q, &part.seqlens_kv, &part.seqlens_q_padded, &part.seqlens_kv_padded}) {
      lengths->clear();
    }
    return part;
  }

  std::string name(std::int64_t rank, std::int64_t step) const {
    return fmt::format("{} step {} of rank {}", word(strategy_), step, rank);
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
    for (std::int64_t step = 0; step < size_; ++step) {
      // Source: sections "diagonal", "lower-triangle" (kv comes from an earlier rank: of its two
      // chunks the first is before all of q, the second behind all of it), "upper-triangle" (kv
      // from a later rank is before the second chunk of q and behind the first); not causal: "all".
      const bool diagonal = step == 0 || !causal();
      const std::int64_t q_parts = diagonal || step <= rank ? size_ : 2 * size_;
      const std::int64_t kv_parts = diagonal || step > rank ? size_ : 2 * size_;
      AttentionSpec part = common(rank, step);
      set_rows(part, spec_.seqlen_q / q_parts);
      set_columns(part, spec_.seqlen_kv / kv_parts);
      if (layout_.ragged_q()) part.total_q = total_q() / q_parts;
      if (layout_.ragged_kv()) part.total_kv = total_kv() / kv_parts;
      part.return_stats = true;  // the results of all steps are merged by them
      if (!diagonal) {
        part.mask = padding_ ? "padding" : "none";
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
    for (const std::int64_t chunk : {rank, 2 * size_ - 1 - rank}) {
      const auto step = static_cast<std::int64_t>(steps.size());
      AttentionSpec part = common(rank, step);
      set_rows(part, spec_.seqlen_q / (2 * size_));
      if (ragged()) {
        set_ragged_chunk(part);
      } else if (positional()) {
        set_window(part, chunk);
      }
      steps.push_back(finish(rank, step, std::move(part)));
    }
    return steps;
  }

  // Source, for THD: the tensors are passed whole; offsets select the chunk of q, and lengths the
  // kv up to its end.
  void set_ragged_chunk(AttentionSpec& part) const {
    if (layout_.ragged_q()) {
      // Both chunks of the rank are there; that batch * seqlen is beyond int64 the graph will say.
      const std::int64_t tokens =
          total_q() > 0 ? total_q() : element_count({spec_.batch, spec_.seqlen_q}).value_or(0);
      part.total_q = tokens / size_;
      part.has_padded_offsets = true;
    }
    if (layout_.ragged_kv()) part.total_kv = total_kv();
    if (!positional()) return;
    part.mask = padding_ ? "padding_causal_bottom_right" : "causal_bottom_right";
    part.window_right = left_ == -1 ? -1 : 0;
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
        right_ == -1 ? spec_.seqlen_kv : std::min(spec_.seqlen_kv, last + right_);
    const std::int64_t start = left_ == -1 ? 0 : std::max<std::int64_t>(0, first - left_);
    set_columns(part, end - start);
    const bool ends_with_window = right_ != -1 && end == last + right_;
    if (right_ == 0 || (ends_with_window && !padding_)) {
      part.mask = padding_ ? "padding_causal_bottom_right" : "causal_bottom_right";
      part.window_left = left_ == -1 ? -1 : left_ + right_;
      part.window_right = left_ == -1 ? -1 : 0;
    } else {
      part.mask = padding_ ? "padding" : "none";
      part.window_left = left_ == -1 ? -1 : left_ - (first - start);
      part.window_right = right_ == -1 ? -1 : right_ + (first - start);
    }
  }

  // Source: num_heads % cp_size == 0 for q, k, v.
  std::vector<CpStep> all_to_all(std::int64_t rank) const {
    AttentionSpec part = common(rank, 0);
    part.heads = spec_.heads / size_;
    part.kv_heads = spec_.kv_heads / size_;
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

  const AttentionSpec& spec_;
  const CpStrategy strategy_;
  const std::int64_t size_;
  const Layout layout_;
  const bool padding_;
  const std::int64_t left_;
  const std::int64_t right_;
  Error refused_;
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
    CpStep whole{0, 0, fmt::format("{} step 0 of rank 0", word(strategy)), spec};
    whole.spec.name = whole.name;
    whole.spec.context_parallel.reset();
    return std::vector{std::move(whole)};
  }
  Steps steps(spec, strategy, size);
  LAWSON_CHECK(steps.check());
  return steps.of_rank(rank);
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
