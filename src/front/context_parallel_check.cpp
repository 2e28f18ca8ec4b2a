// What cannot be split over ranks, and why.
#include <algorithm>

#include "front/context_parallel_split.h"

namespace lawson::front {
namespace {

class Check {
 public:
  explicit Check(const CpSplit& split) : split_{split}, spec_{split.spec} {}

  Status run() {
    if (split_.size > kMaxRanks) {
      refuse("context_parallel_size", "context_parallel", fmt::format("{} ranks", split_.size),
             fmt::format("is judged for at most {} ranks", kMaxRanks));
      return refusal();
    }
    tensors();
    if (split_.strategy == CpStrategy::all_to_all) {
      // Source: num_heads % cp_size == 0 for q, k, v.
      divisible("heads", spec_.heads, split_.size);
      divisible("kv_heads", spec_.kv_heads, split_.size);
    } else {
      lengths();
      if (split_.positional()) positions();
      scores();
    }
    return refusal();
  }

 private:
  // "window = [4, 0]: ring context parallelism takes ..."
  void refuse(std::string code, std::string field, const std::string& value,
              const std::string& rest) {
    std::string message = fmt::format("{} = {}: {} context parallelism {}", field, value,
                                      strategy_name(split_.strategy), rest);
    reasons_.push_back({std::move(code), std::move(message), std::move(field)});
  }

  Status refusal() {
    if (reasons_.empty()) return {};
    Error error{ErrorKind::unsupported, reasons_.front().message, {}};
    error.reasons = std::move(reasons_);
    return error;
  }

  void divisible(const char* field, std::int64_t value, std::int64_t by) {
    if (value % by == 0) return;
    refuse("not_divisible", field, fmt::format("{}", value),
           fmt::format("over {} ranks needs a multiple of {}", split_.size, by));
  }

  void tensors() {
    if (spec_.paged || spec_.append > 0) {
      refuse("context_parallel_cache", spec_.paged ? "paged" : "append",
             spec_.paged ? fmt::format("pages of {}", spec_.paged->page_size_k)
                         : fmt::format("{}", spec_.append),
             "splits whole sequences, not a cache of them; leave it out");
    }
    // Each step's tensors are copies or results of an exchange (source: .contiguous()).
    if (!spec_.strides.empty()) {
      refuse("context_parallel_strides", "strides",
             fmt::format("those of {}", spec_.strides.begin()->first),
             "gives each step tensors of its own, which are contiguous; leave them out");
    }
  }

  // Source: "context parallelism requires seq_len % (cp_size * 2) == 0 for each sequence in q, k,
  // v". Without a causal mask the two chunks of a rank are alike in a ring, and size parts will do.
  void lengths() {
    const bool halves = split_.strategy == CpStrategy::all_gather || split_.causal();
    const std::int64_t by = halves ? 2 * split_.size : split_.size;
    divisible("seqlen_q", spec_.seqlen_q, by);
    divisible("seqlen_kv", spec_.seqlen_kv, by);
    if (split_.layout.ragged_q()) {
      divisible("total_q", split_.total_q(), by);
      rooms(spec_.seqlens_q_padded.empty() ? "seqlens_q" : "seqlens_q_padded", split_.room_q(),
            spec_.seqlen_q, by);
    }
    if (split_.layout.ragged_kv()) {
      divisible("total_kv", split_.total_kv(), by);
      rooms(spec_.seqlens_kv_padded.empty() ? "seqlens_kv" : "seqlens_kv_padded", split_.room_kv(),
            spec_.seqlen_kv, by);
    }
  }

  // It is the room of a sequence in memory that is cut, and a step's longest sequence is a part of
  // the longest room.
  void rooms(const char* field, const Dims& room, std::int64_t longest, std::int64_t by) {
    for (const std::int64_t length : room) {
      if (length <= longest) continue;
      refuse("context_parallel_room", field, fmt::format("{}", length),
             fmt::format("needs room of at most the longest sequence, {}", longest));
      break;
    }
    for (const std::int64_t length : room) {
      if (length % by != 0) return divisible(field, length, by);
    }
  }

  void positions() {
    // Source: "does not support context parallelism with causal masking for cross-attention".
    if (spec_.seqlen_q != spec_.seqlen_kv ||
        split_.layout.ragged_q() != split_.layout.ragged_kv()) {
      refuse("context_parallel_cross_attention", "seqlen_kv", fmt::format("{}", spec_.seqlen_kv),
             fmt::format("with a causal mask or window needs q and kv that are cut at the same "
                         "positions; here seqlen_q = {} and layout = {}",
                         spec_.seqlen_q, spec_.layout));
    }
    // Where all sequences are full, bottom_right is top_left; where each has lengths of its own, a
    // step's tiles are seen in part.
    if (spec_.mask.ends_with("bottom_right") && (split_.padding || split_.ragged())) {
      refuse("context_parallel_bottom_right", "mask", spec_.mask,
             "takes bottom_right only where all sequences are full; all_to_all takes it");
    }
    const bool all_gather = split_.strategy == CpStrategy::all_gather;
    const bool room_differs = split_.ragged() && split_.room_q() != split_.room_kv();
    // Bottom-right alignment of a step goes by the lengths of q and kv.
    const bool lengths_differ =
        all_gather && (split_.ragged() || split_.padding) && spec_.seqlens_q != spec_.seqlens_kv;
    if (room_differs || lengths_differ) {
      refuse("context_parallel_cross_attention", "seqlens_kv", "other than seqlens_q",
             "with a causal mask or window needs the same lengths for both");
    }
    const std::string window = fmt::format("[{}, {}]", split_.left, split_.right);
    // Source: "does not support sliding window attention with cp_comm_type" p2p. The two chunks of
    // a rank lie side by side in its tensors and apart in the sequence.
    if (split_.strategy == CpStrategy::ring && !split_.causal()) {
      refuse("context_parallel_window", "window", window,
             "takes no window but causal, since the chunks of a rank are apart in the sequence; "
             "all_gather and all_to_all do");
    }
    // The kv that a chunk of q needs ends `right` behind the chunk, or with the sequence: no one
    // alignment and window of a step says so for all sequences.
    if (all_gather && split_.ragged() && split_.right != 0) {
      refuse("context_parallel_window", "window", window,
             "of ragged sequences needs right = 0 (causal), since each sequence ends elsewhere");
    }
  }

  void scores() {
    // Source: softmax_type other than vanilla only with a2a. A ring step would add the extra logit
    // once more; a step of all_gather has all columns of its rows.
    if (split_.strategy == CpStrategy::ring && spec_.softmax != ir::SoftmaxKind::vanilla) {
      refuse("context_parallel_softmax", "softmax", std::string{ir::to_string(spec_.softmax)},
             "would count the extra logit in each step; all_gather and all_to_all count it once");
    }
    // ALiBi goes by distance. Aligned bottom-right, a chunk of q is where it is in the sequence.
    const bool keeps_distance = split_.strategy == CpStrategy::all_gather && split_.right == 0;
    if (spec_.bias == BiasKind::alibi && !keeps_distance) {
      refuse("context_parallel_bias", "bias", "alibi",
             "has steps whose rows and columns are apart in the sequence; all_to_all takes ALiBi, "
             "and so does all_gather with a causal mask");
    }
    // Source: "attention bias for THD format".
    if (!split_.ragged()) return;
    const char* const elsewhere =
        "cuts each ragged sequence elsewhere, so that no block of it is a step's";
    if (spec_.bias == BiasKind::pre_scale || spec_.bias == BiasKind::post_scale) {
      refuse("context_parallel_bias", "bias",
             spec_.bias == BiasKind::pre_scale ? "pre_scale" : "post_scale", elsewhere);
    }
    if (spec_.attn_mask) {
      refuse("context_parallel_mask", "attn_mask", to_string(spec_.attn_mask->shape), elsewhere);
    }
  }

  const CpSplit& split_;
  const AttentionSpec& spec_;
  std::vector<Reason> reasons_;
};

}  // namespace

const char* strategy_name(CpStrategy strategy) {
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

Status check_split(const CpSplit& split) {
  return Check(split).run();
}

}  // namespace lawson::front
