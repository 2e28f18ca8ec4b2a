// Inside src/front: a spec that is to be split over ranks, and whether it can be.
//
// The sources that are named here and in the two files are Transformer Engine's (main of 2026-08):
// pytorch/attention/dot_product_attention/context_parallel.py, which runs such steps through cuDNN,
// and its filter get_attention_backend in utils.py beside it.
#pragma once

#include <cstdint>
#include <numeric>

#include "front/context_parallel.h"

namespace lawson::front {

// A spec that check_attention() takes.
struct CpSplit {
  CpSplit(const AttentionSpec& whole, CpStrategy how, std::int64_t ranks)
      : spec{whole},
        strategy{how},
        size{ranks},
        layout{*parse_layout(whole.layout)},
        padding{whole.mask.starts_with("padding")},
        left{whole.window_left},
        right{whole.mask.find("causal") != std::string::npos ? 0 : whole.window_right} {}

  bool ragged() const { return layout.ragged_q() || layout.ragged_kv(); }
  bool positional() const { return left != -1 || right != -1; }
  bool causal() const { return left == -1 && right == 0; }

  // Tokens of a ragged tensor as far as the spec says; 0: batch * seqlen.
  std::int64_t total_q() const { return spec.total_q > 0 ? spec.total_q : sum(room_q()); }
  std::int64_t total_kv() const { return spec.total_kv > 0 ? spec.total_kv : sum(room_kv()); }

  // Given lengths in memory.
  const Dims& room_q() const {
    return spec.seqlens_q_padded.empty() ? spec.seqlens_q : spec.seqlens_q_padded;
  }
  const Dims& room_kv() const {
    return spec.seqlens_kv_padded.empty() ? spec.seqlens_kv : spec.seqlens_kv_padded;
  }

  const AttentionSpec& spec;
  CpStrategy strategy;
  std::int64_t size;
  Layout layout;
  bool padding;
  std::int64_t left;
  std::int64_t right;

 private:
  static std::int64_t sum(const Dims& lengths) {
    return std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
  }
};

const char* strategy_name(CpStrategy strategy);  // "all-gather"

// ErrorKind::unsupported with every reason, so that one answer names all that has to change.
Status check_split(const CpSplit& split);

}  // namespace lawson::front
