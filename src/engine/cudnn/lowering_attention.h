// Attention nodes in the frontend's terms. Included by lowering.cpp alone.
#pragma once

#include <optional>
#include <utility>

#include "engine/cudnn/facts.h"
#include "engine/cudnn/lowering_types.h"

namespace lawson::cudnn {

class AttentionLowering {
 public:
  AttentionLowering(const ir::Graph& graph, const AttentionFacts& facts, FrontendGraph& target,
                    Supplies& supplies, std::vector<std::string>& rewrites)
      : graph_{graph}, facts_{facts}, target_{target}, supplies_{supplies}, rewrites_{rewrites} {}

  Status run(bool deterministic) {
    if (graph_.nodes.size() != 1) {
      return unsupported("attention_with_other_ops",
                         fmt::format("the graph has {} operations besides attention; cuDNN takes "
                                     "attention alone",
                                     graph_.nodes.size() - 1));
    }
    LAWSON_CHECK(check_alignment());
    const Type io = type_of(facts_.dtype);
    target_.set_io_data_type(io)
        .set_intermediate_data_type(Type::FLOAT)
        .set_compute_data_type(Type::FLOAT);
    if (facts_.backward) {
      backward(deterministic || facts_.deterministic);
    } else {
      forward();
    }
    return {};
  }

 private:
  using F = ir::Attention;
  using B = ir::AttentionBackward;

  // The kernels load 16 bytes at a time, whatever alignment their descriptors declare.
  Status check_alignment() const {
    const auto check = [&](ir::TensorId id) -> Status {
      if (id == ir::kNone) return {};
      const ir::Tensor& tensor = graph_.tensor(id);
      if (tensor.by_value || tensor.shape.size() != 4 || tensor.shape[3] <= 1 ||
          tensor.alignment >= 16) {
        return {};
      }
      return unsupported(
          "alignment",
          fmt::format("{} promises an alignment of {} bytes; cuDNN's attention needs "
                      "16",
                      tensor.name, tensor.alignment),
          tensor.name);
    };
    for (const ir::TensorId id : facts_.node->inputs) LAWSON_CHECK(check(id));
    for (const ir::TensorId id : facts_.node->outputs) LAWSON_CHECK(check(id));
    return {};
  }

  TensorPtr input(int slot) {
    const ir::TensorId id = facts_.node->inputs[static_cast<std::size_t>(slot)];
    if (id == ir::kNone) return nullptr;
    const ir::Tensor& tensor = graph_.tensor(id);
    return target_.tensor(fe::graph::Tensor_attributes()
                              .set_uid(ir::Graph::uid(id))
                              .set_name(tensor.name)
                              .set_dim(tensor.shape)
                              .set_stride(tensor.strides)
                              .set_data_type(type_of(tensor.dtype))
                              .set_is_pass_by_value(tensor.by_value));
  }

  void describe_output(const TensorPtr& frontend, int slot) {
    const ir::TensorId id = facts_.node->outputs[static_cast<std::size_t>(slot)];
    const ir::Tensor& tensor = graph_.tensor(id);
    frontend->set_output(true)
        .set_uid(ir::Graph::uid(id))
        .set_name(tensor.name)
        .set_dim(tensor.shape)
        .set_stride(tensor.strides)
        .set_data_type(type_of(tensor.dtype));
  }

  TensorPtr new_output(int slot) {
    auto frontend = std::make_shared<fe::graph::Tensor_attributes>();
    describe_output(frontend, slot);
    return frontend;
  }

  bool wants(int slot) const {
    return facts_.node->outputs[static_cast<std::size_t>(slot)] != ir::kNone;
  }

  // Off-by-one is a learnable sink whose logit is 0.
  TensorPtr sink(int slot) {
    if (facts_.rule->softmax == ir::SoftmaxKind::learnable) return input(slot);
    if (facts_.rule->softmax == ir::SoftmaxKind::vanilla) return nullptr;
    supplies_.zeros.push_back({kFirstOwnUid, facts_.heads * 4});
    rewrites_.emplace_back("off_by_one_as_zero_sink");
    return target_.tensor(fe::graph::Tensor_attributes()
                              .set_uid(kFirstOwnUid)
                              .set_name("zero_sink")
                              .set_dim({1, facts_.heads, 1, 1})
                              .set_stride({facts_.heads, 1, 1, 1})
                              .set_data_type(Type::FLOAT));
  }

  // A bound that reaches over the whole tensor is none; the frontend's bounds are of type int.
  bool bounds(std::int64_t bound) const { return bound >= 0 && bound < facts_.s_q + facts_.s_kv; }
  // The frontend's left bound excludes: it keeps j > i - bound.
  std::optional<std::int64_t> left_bound() const {
    if (!bounds(facts_.rule->left)) return std::nullopt;
    return facts_.rule->left + 1;
  }
  std::optional<std::int64_t> right_bound() const {
    if (!bounds(facts_.rule->right)) return std::nullopt;
    return facts_.rule->right;
  }
  fe::DiagonalAlignment_t alignment() const {
    return facts_.rule->alignment == ir::Alignment::bottom_right
               ? fe::DiagonalAlignment_t::BOTTOM_RIGHT
               : fe::DiagonalAlignment_t::TOP_LEFT;
  }

  // Soft-capping goes through a score modifier, beside which the frontend takes no masks of its
  // own: they follow inside it.
  template <typename Attributes>
  void describe_rule(Attributes& attributes, const TensorPtr& seqlen_q,
                     const TensorPtr& seqlen_kv) {
    const ir::AttentionRule& rule = *facts_.rule;
    if (rule.padding) attributes.set_seq_len_q(seqlen_q).set_seq_len_kv(seqlen_kv);
    attributes.set_alibi_mask(rule.alibi);
    if (rule.softcap > 0) {
      attributes.set_score_mod(
          [this, seqlen_q, seqlen_kv](std::shared_ptr<FrontendGraph> graph, TensorPtr score) {
            return cap_and_mask(graph, std::move(score), seqlen_q, seqlen_kv);
          });
      return;
    }
    attributes.set_padding_mask(rule.padding);
    attributes.set_diagonal_alignment(alignment());
    if (const auto left = left_bound()) {
      attributes.set_diagonal_band_left_bound(static_cast<int>(*left));
    }
    if (const auto right = right_bound()) {
      attributes.set_diagonal_band_right_bound(static_cast<int>(*right));
    }
  }

  static TensorPtr scalar(double value) {
    return std::make_shared<fe::graph::Tensor_attributes>(static_cast<float>(value));
  }

  TensorPtr cap_and_mask(const std::shared_ptr<FrontendGraph>& graph, TensorPtr score,
                         const TensorPtr& seqlen_q, const TensorPtr& seqlen_kv) {
    namespace modifiers = fe::graph::attn::score_modifiers;
    const double cap = facts_.rule->softcap;
    capped_argument_ = graph->pointwise(score, scalar(1 / cap),
                                        Pointwise().set_name("cap_divide").set_mode(Mode::MUL));
    const TensorPtr tanh = graph->pointwise(
        capped_argument_, Pointwise().set_name("cap_tanh").set_mode(Mode::TANH_FWD));
    TensorPtr masked = graph->pointwise(tanh, scalar(cap),
                                        Pointwise().set_name("cap_multiply").set_mode(Mode::MUL));
    if (facts_.rule->padding) {
      masked = modifiers::padding_mask(graph, masked, seqlen_kv, seqlen_q);
    }
    if (left_bound() || right_bound()) {
      masked =
          modifiers::sliding_window_mask(graph, masked, alignment(), left_bound(), right_bound(),
                                         facts_.s_q, facts_.s_kv, seqlen_q, seqlen_kv);
    }
    return masked;
  }

  void forward() {
    const TensorPtr q = input(F::q);
    const TensorPtr k = input(F::k);
    const TensorPtr v = input(F::v);
    auto attributes = fe::graph::SDPA_attributes().set_name("attention");
    attributes.set_generate_stats(wants(F::stats)).set_attn_scale(input(F::scale));
    describe_rule(attributes, input(F::seqlen_q), input(F::seqlen_kv));
    if (facts_.bias != ir::kNone) attributes.set_bias(input(F::bias));
    if (const TensorPtr tensor = sink(F::sink)) attributes.set_sink_token(tensor);
    const auto [o, stats] = target_.sdpa(q, k, v, attributes);
    describe_output(o, F::o);
    if (wants(F::stats)) describe_output(stats, F::stats);
  }

  void backward(bool deterministic) {
    const TensorPtr q = input(B::q);
    const TensorPtr k = input(B::k);
    const TensorPtr v = input(B::v);
    const TensorPtr o = input(B::o);
    const TensorPtr dout = input(B::dout);
    const TensorPtr stats = input(B::stats);
    auto attributes = fe::graph::SDPA_backward_attributes().set_name("attention_backward");
    attributes.set_attn_scale(input(B::scale)).set_deterministic_algorithm(deterministic);
    describe_rule(attributes, input(B::seqlen_q), input(B::seqlen_kv));
    if (facts_.rule->softcap > 0) {
      attributes.set_score_mod_bprop(
          [this](std::shared_ptr<FrontendGraph> graph, TensorPtr gradient) {
            // d cap * tanh(x / cap) / dx = 1 - tanh^2
            return graph->pointwise(gradient, capped_argument_,
                                    Pointwise().set_name("cap_gradient").set_mode(Mode::TANH_BWD));
          });
    }
    if (facts_.bias != ir::kNone) attributes.set_bias(input(B::bias));
    if (wants(B::dbias)) attributes.set_dbias(new_output(B::dbias));
    if (const TensorPtr tensor = sink(B::sink)) attributes.set_sink_token(tensor);
    if (wants(B::dsink)) attributes.set_dsink_token(new_output(B::dsink));
    const auto [dq, dk, dv] = target_.sdpa_backward(q, k, v, o, dout, stats, attributes);
    describe_output(dq, B::dq);
    describe_output(dk, B::dk);
    describe_output(dv, B::dv);
  }

  const ir::Graph& graph_;
  const AttentionFacts& facts_;
  FrontendGraph& target_;
  Supplies& supplies_;
  std::vector<std::string>& rewrites_;
  TensorPtr capped_argument_;
};

}  // namespace lawson::cudnn
