// The fields of each step, named once: what its JSON has, and in what order its operands are bound.
// `visit(name, field)` is called for each, operands and structs of operands included.
#pragma once

#include <type_traits>

#include "engine/cudnn/steps.h"

namespace lawson::cudnn::steps {

// S is T or const T.
template <typename S, typename T>
concept Is = std::is_same_v<std::remove_const_t<S>, T>;

template <Is<Operand> S, typename Visit>
void visit_fields(S& s, Visit&& visit) {
  visit("uid", s.uid);
  visit("dtype", s.dtype);
  visit("strides", s.strides);
}

template <Is<Packing> S, typename Visit>
void visit_fields(S& s, Visit&& visit) {
  visit("offsets", s.offsets);
  visit("tokens", s.tokens);
}

template <Is<Scores> S, typename Visit>
void visit_fields(S& s, Visit&& visit) {
  visit("batch", s.batch);
  visit("heads", s.heads);
  visit("rows", s.rows);
  visit("columns", s.columns);
  visit("seqlen_q", s.seqlen_q);
  visit("seqlen_kv", s.seqlen_kv);
  visit("sequences", s.sequences);
  visit("alignment", s.alignment);
  visit("left", s.left);
  visit("right", s.right);
}

template <Is<Terms> S, typename Visit>
void visit_fields(S& s, Visit&& visit) {
  visit("bias", s.bias);
  visit("factor", s.factor);
  visit("mask", s.mask);
}

template <Is<ClearedTensor> S, typename Visit>
void visit_fields(S& s, Visit&& visit) {
  visit("tensor", s.tensor);
  visit("depth", s.depth);
}

template <Is<RowOffsets> S, typename Visit>
void visit_fields(S& s, Visit&& visit) {
  visit("offsets", s.offsets);
  visit("stride", s.stride);
}

template <Is<Ragged> S, typename Visit>
void visit_fields(S& s, Visit&& visit) {
  visit("bucket", s.bucket);
  visit("max_length", s.max_length);
  visit("cu_seqlens", s.cu_seqlens);
  visit("cu_seqlens_padded", s.cu_seqlens_padded);
  visit("lengths", s.lengths);
  visit("sequences", s.sequences);
  visit("seqlen", s.seqlen);
  visit("outputs", s.outputs);
}

template <Is<ScoreBias> S, typename Visit>
void visit_fields(S& s, Visit&& visit) {
  visit("scores", s.scores);
  visit("terms", s.terms);
  visit("alibi", s.alibi);
  visit("slopes", s.slopes);
  visit("hide_unseen", s.hide_unseen);
  visit("out", s.out);
}

template <Is<MaskedRows> S, typename Visit>
void visit_fields(S& s, Visit&& visit) {
  visit("scores", s.scores);
  visit("terms", s.terms);
  visit("flags", s.flags);
}

template <Is<ClearRows> S, typename Visit>
void visit_fields(S& s, Visit&& visit) {
  visit("batch", s.batch);
  visit("heads", s.heads);
  visit("rows", s.rows);
  visit("flags", s.flags);
  visit("sequences", s.sequences);
  visit("packing", s.packing);
  visit("tensors", s.tensors);
  visit("stats", s.stats);
  visit("max_logit", s.max_logit);
  visit("softmax", s.softmax);
  visit("sink", s.sink);
}

template <Is<StatsOfRows> S, typename Visit>
void visit_fields(S& s, Visit&& visit) {
  visit("batch", s.batch);
  visit("heads", s.heads);
  visit("rows", s.rows);
  visit("flags", s.flags);
  visit("sequences", s.sequences);
  visit("packing", s.packing);
  visit("stats", s.stats);
  visit("sum_exp", s.sum_exp);
  visit("out", s.out);
  visit("dense_out", s.dense_out);
}

template <Is<ReduceBiasGradient> S, typename Visit>
void visit_fields(S& s, Visit&& visit) {
  visit("full", s.full);
  visit("shape", s.shape);
  visit("gradient", s.gradient);
  visit("factor", s.factor);
  visit("sequences", s.sequences);
  visit("bias_gradient", s.bias_gradient);
}

template <Is<ZeroGaps> S, typename Visit>
void visit_fields(S& s, Visit&& visit) {
  visit("batch", s.batch);
  visit("heads", s.heads);
  visit("rows", s.rows);
  visit("lengths", s.lengths);
  visit("sequences", s.sequences);
  visit("packing", s.packing);
  visit("tensors", s.tensors);
}

template <Is<CacheAppend> S, typename Visit>
void visit_fields(S& s, Visit&& visit) {
  visit("batch", s.batch);
  visit("heads", s.heads);
  visit("fresh_rows", s.fresh_rows);
  visit("depth", s.depth);
  visit("capacity", s.capacity);
  visit("page_size", s.page_size);
  visit("pages", s.pages);
  visit("cache", s.cache);
  visit("fresh", s.fresh);
  visit("seqlen_kv", s.seqlen_kv);
  visit("page_table", s.page_table);
}

template <Is<ConvertMask> S, typename Visit>
void visit_fields(S& s, Visit&& visit) {
  visit("shape", s.shape);
  visit("in", s.in);
  visit("out", s.out);
}

// A field that is a struct of fields itself.
template <typename T>
concept HasFields = requires(T& value) {
  visit_fields(value, [](auto&&...) {});
};

// Calls `visit(operand)` for every operand below, in the order in which launch() wants pointers.
template <typename S, typename Visit>
void visit_operands(S& s, Visit&& visit) {
  using Type = std::remove_const_t<S>;
  if constexpr (std::is_same_v<Type, Operand>) {
    visit(s);
  } else if constexpr (HasFields<S>) {
    visit_fields(s, [&](const char*, auto& field) { visit_operands(field, visit); });
  } else if constexpr (std::is_same_v<Type, std::vector<ClearedTensor>> ||
                       std::is_same_v<Type, std::vector<RowOffsets>>) {
    for (auto& item : s) visit_operands(item, visit);
  }
}

}  // namespace lawson::cudnn::steps
