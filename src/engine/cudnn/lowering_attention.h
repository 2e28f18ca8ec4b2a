// A native attention in the frontend's terms. Included by lowering.cpp alone.
#pragma once

#include <optional>
#include <utility>

#include "engine/cudnn/lowering_types.h"
#include "engine/cudnn/native.h"

namespace lawson::cudnn {

class AttentionLowering {
 public:
  AttentionLowering(const NativeAttention& native, FrontendGraph& target)
      : n_{native}, target_{target} {}

  void run() {
    target_.set_io_data_type(type_of(n_.io))
        .set_intermediate_data_type(Type::FLOAT)
        .set_compute_data_type(Type::FLOAT);
    if (n_.backward) {
      backward();
    } else {
      forward();
    }
  }

 private:
  using N = NativeAttention;

  bool has(N::Role role) const { return n_.tensors[role].has_value(); }

  void describe(fe::graph::Tensor_attributes& attributes, const NativeTensor& tensor) {
    attributes.set_uid(tensor.uid)
        .set_name(tensor.name)
        .set_dim(tensor.shape)
        .set_stride(tensor.strides)
        .set_data_type(type_of(tensor.dtype));
    if (tensor.offsets_uid != 0) attributes.set_ragged_offset(offsets(tensor));
  }

  // One frontend tensor for each offsets tensor, however many tensors lie by it.
  TensorPtr offsets(const NativeTensor& tensor) {
    TensorPtr& known = offsets_[tensor.offsets_uid];
    if (!known) {
      known = target_.tensor(fe::graph::Tensor_attributes()
                                 .set_uid(tensor.offsets_uid)
                                 .set_name(fmt::format("offsets_{}", tensor.offsets_uid))
                                 .set_dim({n_.batch + 1, 1, 1, 1})
                                 .set_stride({1, 1, 1, 1})
                                 .set_data_type(type_of(tensor.offsets_dtype)));
    }
    return known;
  }

  TensorPtr input(N::Role role) {
    if (!has(role)) return nullptr;
    fe::graph::Tensor_attributes attributes;
    describe(attributes, *n_.tensors[role]);
    attributes.set_is_pass_by_value(n_.tensors[role]->by_value);
    return target_.tensor(attributes);
  }

  void output(const TensorPtr& frontend, N::Role role) {
    frontend->set_output(true);
    describe(*frontend, *n_.tensors[role]);
  }

  TensorPtr new_output(N::Role role) {
    auto frontend = std::make_shared<fe::graph::Tensor_attributes>();
    output(frontend, role);
    return frontend;
  }

  // The frontend's left bound excludes: it keeps j > i - bound.
  std::optional<std::int64_t> left_bound() const {
    return n_.left ? std::optional{*n_.left + 1} : std::nullopt;
  }
  fe::DiagonalAlignment_t alignment() const {
    return n_.alignment == ir::Alignment::bottom_right ? fe::DiagonalAlignment_t::BOTTOM_RIGHT
                                                       : fe::DiagonalAlignment_t::TOP_LEFT;
  }

  // What both passes are told alike. Soft-capping goes through a score modifier, beside which the
  // frontend takes no masks of its own: they follow inside it.
  template <typename Attributes>
  void describe_rule(Attributes& attributes) {
    const TensorPtr seqlen_q = input(N::seqlen_q);
    const TensorPtr seqlen_kv = input(N::seqlen_kv);
    if (n_.padding) attributes.set_seq_len_q(seqlen_q).set_seq_len_kv(seqlen_kv);
    if (has(N::scale)) attributes.set_attn_scale(input(N::scale));
    if (has(N::bias)) attributes.set_bias(input(N::bias));
    if (has(N::sink)) attributes.set_sink_token(input(N::sink));
    if (n_.tokens_q) attributes.set_max_total_seq_len_q(*n_.tokens_q);
    if (n_.tokens_kv) attributes.set_max_total_seq_len_kv(*n_.tokens_kv);
    attributes.set_alibi_mask(n_.alibi);
    if (has(N::seed)) {
      attributes.set_dropout(static_cast<float>(n_.dropout), input(N::seed), input(N::offset));
    }
    if (n_.softcap > 0) {
      attributes.set_score_mod(
          [this, seqlen_q, seqlen_kv](std::shared_ptr<FrontendGraph> graph, TensorPtr score) {
            return cap_and_mask(graph, std::move(score), seqlen_q, seqlen_kv);
          });
      return;
    }
    attributes.set_padding_mask(n_.padding);
    attributes.set_diagonal_alignment(alignment());
    if (const auto left = left_bound()) {
      attributes.set_diagonal_band_left_bound(static_cast<int>(*left));
    }
    if (n_.right) attributes.set_diagonal_band_right_bound(static_cast<int>(*n_.right));
  }

  static TensorPtr scalar(double value) {
    return std::make_shared<fe::graph::Tensor_attributes>(static_cast<float>(value));
  }

  TensorPtr cap_and_mask(const std::shared_ptr<FrontendGraph>& graph, TensorPtr score,
                         const TensorPtr& seqlen_q, const TensorPtr& seqlen_kv) {
    namespace modifiers = fe::graph::attn::score_modifiers;
    const double cap = n_.softcap;
    capped_argument_ = graph->pointwise(score, scalar(1 / cap),
                                        Pointwise().set_name("cap_divide").set_mode(Mode::MUL));
    const TensorPtr tanh = graph->pointwise(
        capped_argument_, Pointwise().set_name("cap_tanh").set_mode(Mode::TANH_FWD));
    TensorPtr masked = graph->pointwise(tanh, scalar(cap),
                                        Pointwise().set_name("cap_multiply").set_mode(Mode::MUL));
    if (n_.padding) masked = modifiers::padding_mask(graph, masked, seqlen_kv, seqlen_q);
    if (n_.left || n_.right) {
      masked = modifiers::sliding_window_mask(graph, masked, alignment(), left_bound(), n_.right,
                                              n_.rows, n_.columns, seqlen_q, seqlen_kv);
    }
    return masked;
  }

  void forward() {
    const TensorPtr q = input(N::q);
    const TensorPtr k = input(N::k);
    const TensorPtr v = input(N::v);
    auto attributes = fe::graph::SDPA_attributes().set_name("attention");
    attributes.set_generate_stats(has(N::stats));
    describe_rule(attributes);
    if (n_.longest_paged) {
      attributes.set_paged_attention_k_table(input(N::page_table_k))
          .set_paged_attention_v_table(input(N::page_table_v))
          .set_paged_attention_max_seq_len_kv(static_cast<int>(*n_.longest_paged));
    }
    if (has(N::dropout_mask)) {
      attributes.set_dropout(input(N::dropout_mask), input(N::dropout_scale));
    }
    if (has(N::dropped)) attributes.set_rng_dump(new_output(N::dropped));
    if (has(N::max_logit)) {
      attributes.set_logit_max(new_output(N::max_logit)).set_score_sum_exp(new_output(N::sum_exp));
    }
    const auto [o, stats] = target_.sdpa(q, k, v, attributes);
    output(o, N::o);
    if (has(N::stats)) output(stats, N::stats);
  }

  void backward() {
    const TensorPtr q = input(N::q);
    const TensorPtr k = input(N::k);
    const TensorPtr v = input(N::v);
    const TensorPtr o = input(N::o);
    const TensorPtr dout = input(N::dout);
    const TensorPtr stats = input(N::stats);
    auto attributes = fe::graph::SDPA_backward_attributes().set_name("attention_backward");
    attributes.set_deterministic_algorithm(n_.deterministic);
    describe_rule(attributes);
    if (n_.softcap > 0) {
      attributes.set_score_mod_bprop(
          [this](std::shared_ptr<FrontendGraph> graph, TensorPtr gradient) {
            // d cap * tanh(x / cap) / dx = 1 - tanh^2
            return graph->pointwise(gradient, capped_argument_,
                                    Pointwise().set_name("cap_gradient").set_mode(Mode::TANH_BWD));
          });
    }
    if (has(N::dropout_mask)) {
      attributes.set_dropout(input(N::dropout_mask), input(N::dropout_scale),
                             input(N::dropout_scale_inverse));
    }
    if (has(N::dbias)) attributes.set_dbias(new_output(N::dbias));
    if (has(N::dsink)) attributes.set_dsink_token(new_output(N::dsink));
    const auto [dq, dk, dv] = target_.sdpa_backward(q, k, v, o, dout, stats, attributes);
    output(dq, N::dq);
    output(dk, N::dk);
    output(dv, N::dv);
  }

  const NativeAttention& n_;
  FrontendGraph& target_;
  std::map<std::int64_t, TensorPtr> offsets_;
  TensorPtr capped_argument_;
};

}  // namespace lawson::cudnn
