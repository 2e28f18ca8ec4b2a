// Decoder-only language models: one derivation for every row of model_families.
#include <algorithm>
#include <cmath>

#include "front/model_families.h"
#include "front/model_layers.h"

namespace lawson::front {
namespace {

const Names kHidden = {"hidden_size", "n_embed", "n_embd", "d_model"};
const Names kLayerCount = {"num_hidden_layers", "n_layer", "n_layers", "num_layers"};
const Names kHeads = {"num_attention_heads", "n_head", "n_heads", "num_heads"};
const Names kKvHeads = {"num_key_value_heads", "num_kv_heads", "kv_n_heads"};
const Names kIntermediate = {"intermediate_size", "n_inner", "ffn_hidden_size"};
const Names kExperts = {"num_local_experts", "num_experts", "n_routed_experts"};

// The derivation of one config; each step appends to the architecture.
class Decoder {
 public:
  Decoder(ModelConfig& config, const DecoderRow& row, const Extent& extent)
      : config_{config}, row_{row}, extent_{extent}, common_{row.type[0] == '\0'} {}

  Architecture derive() {
    result_.family = common_ ? "common" : row_.type;
    hidden_ = required(kHidden, row_.nested.hidden);
    layers_ = result_.layers = config_.nested_default(kLayerCount, row_.nested.layers)
                                   ? row_.nested.layers
                                   : config_.layer_count(kLayerCount);
    limit_positions();
    if (row_.mla || (common_ && config_.has({"kv_lora_rank"}))) {
      latent_attention();
    } else {
      standard_attention();
    }
    mlp();
    lm_head();
    return std::move(result_);
  }

 private:
  struct LayerKind {
    std::string kind;
    std::int64_t layers;
  };

  bool bias(const BiasRule& rule) {
    if (rule.field == nullptr) return rule.fallback;
    return config_.flag_or({rule.field}, rule.fallback) != rule.inverted;
  }

  void add(GemmLayers gemm) {
    gemm.weight_in_out = row_.weight_in_out;
    result_.gemms.push_back(std::move(gemm));
  }

  GemmLayers gemm(std::string name, std::int64_t layers, std::int64_t k, std::int64_t n,
                  bool with_bias) {
    return token_gemm(std::move(name), layers, extent_, k, n, with_bias);
  }

  void limit_positions() {
    if (row_.positions > 0) {
      const Names names = {"n_positions", "max_position_embeddings"};
      extent_ = limited(config_, extent_, config_.size_or(names, row_.positions), names.front());
      return;
    }
    const Names names = {"max_position_embeddings"};
    if (!config_.has(names)) return;
    const std::int64_t trained = config_.size(names);
    const std::int64_t asked = std::max(extent_.seqlen, extent_.context);
    if (asked > trained) {
      config_.warn(
          fmt::format("{} tokens are more than max_position_embeddings, {}: derived all"
                      " the same",
                      asked, trained));
    }
  }

  std::int64_t required(const Names& names, std::int64_t nested_default) {
    return config_.nested_default(names, nested_default) ? nested_default : config_.size(names);
  }

  std::int64_t read_heads() { return required(kHeads, row_.nested.heads); }

  std::int64_t read_kv_heads(std::int64_t heads) {
    // Falcon before its "new decoder architecture": one KV head unless multi_query is off.
    if (result_.family == "falcon" && !config_.flag_or({"new_decoder_architecture"}, false) &&
        config_.flag_or({"multi_query"}, true)) {
      return 1;
    }
    std::int64_t kv_heads = heads;
    if (config_.has(kKvHeads)) {
      kv_heads = config_.size(kKvHeads);
    } else if (row_.kv_heads > 0 && !config_.is_null(kKvHeads)) {
      kv_heads = config_.family_size(kKvHeads, row_.kv_heads);
    }
    config_.require(heads % kv_heads == 0, kKvHeads, kv_heads,
                    fmt::format("a divisor of the {} attention heads", heads));
    return kv_heads;
  }

  std::int64_t read_head_dim(std::int64_t heads) {
    if (config_.has({"head_dim"})) return config_.size({"head_dim"});
    if (row_.head_dim > 0 && !config_.is_null({"head_dim"})) {
      return config_.family_size({"head_dim"}, row_.head_dim);
    }
    config_.require(hidden_ % heads == 0, kHeads, heads,
                    fmt::format("a divisor of the hidden size {} (or a head_dim)", hidden_));
    return std::max<std::int64_t>(hidden_ / heads, 1);
  }

  // Sliding and full layers with their counts, in order of first appearance.
  std::vector<LayerKind> layer_kinds() {
    std::vector<std::string> types;
    if (config_.has({"layer_types"})) {
      types = config_.words({"layer_types"});
      if (types.size() != static_cast<std::size_t>(layers_)) {
        config_.fail({"layer_types"}, Json(fmt::format("{} entries", types.size())),
                     fmt::format("one for each of the {} layers", layers_));
        return {};
      }
    } else {
      types = default_layer_types();
    }
    std::vector<LayerKind> kinds;
    for (std::size_t i = 0; i < types.size(); ++i) {
      std::string kind;
      if (types[i] == "full_attention") kind = "full";
      if (types[i] == "sliding_attention") kind = "sliding";
      if (kind.empty() && !common_) {
        config_.fail({fmt::format("layer_types[{}]", i)}, Json(types[i]),
                     "full_attention or sliding_attention");
        return {};
      }
      if (kind.empty()) kind = types[i];
      const auto same = std::find_if(kinds.begin(), kinds.end(),
                                     [&](const LayerKind& k) { return k.kind == kind; });
      if (same == kinds.end()) {
        kinds.push_back({kind, 1});
      } else {
        ++same->layers;
      }
    }
    return kinds;
  }

  std::vector<std::string> default_layer_types() {
    const Names window = {"sliding_window"};
    const bool switched_off = !config_.flag_or({"use_sliding_window"}, !row_.window_switch);
    const bool windowed = !switched_off && row_.windows != Windows::none &&
                          (config_.has(window) || (row_.window > 0 && !config_.is_null(window)));
    const std::int64_t period = row_.windows == Windows::every
                                    ? config_.size_or({"sliding_window_pattern"}, row_.period)
                                    : 0;
    const std::int64_t first =
        row_.windows == Windows::after ? config_.count_or({"max_window_layers"}, 28) : 0;
    std::vector<std::string> types;
    for (std::int64_t i = 0; i < layers_; ++i) {
      const bool sliding = windowed && i >= first && (period == 0 || (i + 1) % period != 0);
      types.emplace_back(sliding ? "sliding_attention" : "full_attention");
    }
    return types;
  }

  void standard_attention() {
    AttentionLayers base;
    base.heads = read_heads();
    base.kv_heads = read_kv_heads(base.heads);
    base.head_dim_qk = base.head_dim_v = read_head_dim(base.heads);
    base.seqlen_q = base.seqlen_kv = extent_.seqlen;
    base.context = extent_.context;
    base.causal = true;
    base.sinks = row_.sinks;
    base.softcap = config_.positive({"attn_logit_softcapping"},
                                    row_.softcap > 0 ? std::optional{row_.softcap} : std::nullopt);
    std::optional<double> clip = config_.positive({"clip_qkv"});
    scale_and_alibi(base, clip);
    for (const LayerKind& kind : layer_kinds()) attention_kind(base, kind);

    const std::int64_t q = config_.product(kHeads, base.heads, base.head_dim_qk);
    const std::int64_t kv = config_.product(kKvHeads, base.kv_heads, base.head_dim_qk);
    GemmLayers qkv = gemm("qkv", layers_, hidden_, q + 2 * kv, bias(row_.qkv_bias));
    qkv.clip = clip;
    qkv.note = "query, key and value weights concatenated";
    add(std::move(qkv));
    add(gemm("o", layers_, q, hidden_, bias(row_.out_bias)));
  }

  void attention_kind(const AttentionLayers& base, const LayerKind& kind) {
    AttentionLayers attention = base;
    attention.kind = kind.kind;
    attention.layers = kind.layers;
    if (kind.kind == "sliding") {
      const Names names = {"sliding_window"};
      const bool fallback = row_.window > 0 && !config_.is_null(names);
      const std::int64_t window =
          fallback ? config_.size_or(names, row_.window) : config_.size(names);
      // sliding_window counts the token itself; the spec's window does not.
      attention.window_left = window - 1;
      attention.window_right = 0;
      attention.context = std::min(attention.context, window);
      attention.decode_note =
          fmt::format("the cache of a sliding layer holds the last {} tokens", window);
    } else if (kind.kind != "full") {
      config_.warn(
          fmt::format("{} layers of type '{}' are left out: this kind of layer is not"
                      " known",
                      kind.layers, kind.kind));
      return;
    }
    result_.attention.push_back(std::move(attention));
  }

  void scale_and_alibi(AttentionLayers& base, std::optional<double>& clip) {
    const double root = std::sqrt(static_cast<double>(base.head_dim_qk));
    if (row_.query_scalar > 0) {
      base.scale = 1.0 / std::sqrt(config_.positive({"query_pre_attn_scalar"}, row_.query_scalar)
                                       .value_or(row_.query_scalar));
    }
    if (row_.alibi) base.bias = ScoreBias::alibi;
    if (result_.family == "falcon" && config_.flag_or({"alibi"}, false)) {
      base.bias = ScoreBias::alibi;
      base.note = fmt::format("slopes are the usual ones times 1/sqrt({})", base.head_dim_qk);
    }
    if (result_.family == "mpt") mpt_attention(base, clip);
    if (result_.family == "gpt2") {
      if (!config_.flag_or({"scale_attn_weights"}, true)) base.scale = 1.0;
      if (config_.flag_or({"scale_attn_by_inverse_layer_idx"}, false)) {
        base.note = "layer i scales by another 1/(i+1): the scale is bound at run time";
      }
    }
    if (base.scale && std::abs(*base.scale * root - 1.0) < 1e-12) base.scale.reset();
  }

  void mpt_attention(AttentionLayers& base, std::optional<double>& clip) {
    ModelConfig attn = config_.nested("attn_config");
    base.scale = attn.positive({"softmax_scale"});
    clip = attn.positive({"clip_qkv"});
    if (attn.flag_or({"alibi"}, true)) base.bias = ScoreBias::alibi;
    const double bias_max = attn.number_or({"alibi_bias_max"}, 8.0);
    const bool power_of_two = (base.heads & (base.heads - 1)) == 0;
    if (base.bias == ScoreBias::alibi && (bias_max != 8.0 || !power_of_two)) {
      base.note = fmt::format("slopes are MPT's (alibi_bias_max {})", bias_max);
    }
    config_.absorb(attn);
  }

  // DeepSeek's multi-head latent attention. Prefill and training expand the latent to full heads;
  // decode folds kv_b into the query and the output and attends to the latent cache itself.
  void latent_attention() {
    const std::int64_t heads = read_heads();
    const std::int64_t nope = config_.family_size({"qk_nope_head_dim"}, 128);
    const std::int64_t rope = config_.family_size({"qk_rope_head_dim"}, 64);
    const std::int64_t v = config_.family_size({"v_head_dim"}, 128);
    const std::int64_t latent = config_.family_size({"kv_lora_rank"}, 512);
    const std::int64_t head_dim = nope + rope;
    const double scale = latent_scale(head_dim);
    const bool with_bias = config_.flag_or({"attention_bias"}, false);

    AttentionLayers expanded;
    expanded.kind = "mla";
    expanded.layers = layers_;
    expanded.heads = expanded.kv_heads = heads;
    expanded.head_dim_qk = head_dim;
    expanded.head_dim_v = v;
    expanded.seqlen_q = expanded.seqlen_kv = extent_.seqlen;
    expanded.causal = true;
    if (std::abs(scale * std::sqrt(static_cast<double>(head_dim)) - 1.0) > 1e-12) {
      expanded.scale = scale;
    }
    expanded.note = "not absorbed: keys and values expanded from the latent";
    result_.attention.push_back(expanded);

    AttentionLayers absorbed;
    absorbed.kind = "mla_absorbed";
    absorbed.layers = layers_;
    absorbed.heads = heads;
    absorbed.kv_heads = 1;
    absorbed.head_dim_qk = latent + rope;
    absorbed.head_dim_v = latent;
    absorbed.context = extent_.context;
    absorbed.scale = scale;
    absorbed.padded = true;
    absorbed.v_strides = {extent_.context * (latent + rope), latent + rope, latent + rope, 1};
    absorbed.decode_note =
        fmt::format("values are the first {} elements of the keys in the cache", latent);
    result_.attention.push_back(absorbed);

    const std::int64_t q = config_.product(kHeads, heads, head_dim);
    const Names q_rank = {"q_lora_rank"};
    if (config_.is_null(q_rank)) {
      add(gemm("q", layers_, hidden_, q, false));
    } else {
      const std::int64_t rank = config_.family_size(q_rank, 1536);
      add(gemm("q_a", layers_, hidden_, rank, with_bias));
      add(gemm("q_b", layers_, rank, q, false));
    }
    add(gemm("kv_a", layers_, hidden_, latent + rope, with_bias));
    GemmLayers kv_b =
        gemm("kv_b", layers_, latent, config_.product(kHeads, heads, nope + v), false);
    kv_b.rows_decode = 0;
    add(std::move(kv_b));
    // kv_b's weight is [heads * (nope + v), latent]: each head's first `nope` rows take the query
    // into the latent space, the other `v` rows take the attention's output out of it.
    GemmLayers absorb_q = gemm("absorb_q", layers_, nope, latent, false);
    absorb_q.rows_prefill = absorb_q.rows_training = 0;
    absorb_q.heads = heads;
    absorb_q.x_strides = {head_dim, q, 1};
    absorb_q.w_strides = {(nope + v) * latent, latent, 1};
    absorb_q.out_strides = {latent + rope, heads * (latent + rope), 1};
    absorb_q.note = "per head, into the query of the absorbed attention";
    add(std::move(absorb_q));
    GemmLayers absorb_v = gemm("absorb_v", layers_, latent, v, false);
    absorb_v.rows_prefill = absorb_v.rows_training = 0;
    absorb_v.heads = heads;
    absorb_v.x_strides = {latent, heads * latent, 1};
    absorb_v.w_strides = {(nope + v) * latent, 1, latent};
    absorb_v.out_strides = {v, heads * v, 1};
    absorb_v.note = "per head, from the output of the absorbed attention";
    add(std::move(absorb_v));
    add(gemm("o", layers_, config_.product(kHeads, heads, v), hidden_, bias(row_.out_bias)));
  }

  // YaRN's temperature, as DeepSeek's own code applies it to the softmax scale.
  double latent_scale(std::int64_t head_dim) {
    ModelConfig rope = config_.nested("rope_scaling");
    const double factor = rope.number_or({"factor"}, 1.0);
    const double all_dim = rope.number_or({"mscale_all_dim"}, 0.0);
    config_.absorb(rope);
    const double mscale = factor > 1.0 ? 0.1 * all_dim * std::log(factor) + 1.0 : 1.0;
    return mscale * mscale / std::sqrt(static_cast<double>(head_dim));
  }

  void mlp() {
    const std::int64_t experts =
        row_.moe || (common_ && config_.has(kExperts)) ? config_.count_or(kExperts, 0) : 0;
    if (row_.moe && !config_.has(kExperts)) config_.size(kExperts);  // reports it as missing
    const std::int64_t sparse = experts > 0 ? sparse_layers() : 0;
    const std::string activation = read_activation();
    if (sparse < layers_) {
      feed_forward("", layers_ - sparse, intermediate(), activation, extent_.batch, "");
    }
    if (sparse > 0) mixture(experts, sparse, activation);
  }

  std::string read_activation() {
    for (const std::string& name : row_.activation_fields) {
      if (config_.has({name})) return activation_op(config_, name, config_.word_or({name}, ""));
    }
    return activation_op(config_, "hidden_act", row_.activation);
  }

  std::int64_t intermediate() {
    if (result_.family == "mpt") {
      return config_.product({"expansion_ratio"}, hidden_,
                             config_.size_or({"expansion_ratio"}, row_.widening));
    }
    if (row_.widening == 0 || config_.has(kIntermediate)) {
      return required(kIntermediate, row_.nested.intermediate);
    }
    return config_.product(kHidden, hidden_, row_.widening);
  }

  std::int64_t sparse_layers() {
    const std::int64_t step = config_.size_or({"decoder_sparse_step"}, 1);
    const std::vector<std::int64_t> each = moe_layer_flags();
    const std::int64_t frequency = each.empty() ? config_.size_or({"moe_layer_freq"}, 1) : 1;
    const std::int64_t first = config_.count_or({"first_k_dense_replace"}, row_.dense_first);
    std::vector<std::int64_t> dense = config_.counts({"mlp_only_layers"});
    std::sort(dense.begin(), dense.end());
    std::int64_t sparse = 0;
    for (std::int64_t i = 0; i < layers_; ++i) {
      const bool listed = std::binary_search(dense.begin(), dense.end(), i);
      const bool flagged = each.empty() || each[static_cast<std::size_t>(i)] != 0;
      if (i >= first && i % frequency == 0 && (i + 1) % step == 0 && !listed && flagged) ++sparse;
    }
    return sparse;
  }

  // moe_layer_freq is a period, or in some configs a list with a flag for each layer.
  std::vector<std::int64_t> moe_layer_flags() {
    const Names names = {"moe_layer_freq"};
    if (!config_.is_list(names)) return {};
    std::vector<std::int64_t> flags = config_.counts(names);
    if (config_.require(static_cast<std::int64_t>(flags.size()) == layers_, names,
                        static_cast<std::int64_t>(flags.size()),
                        fmt::format("one entry for each of the {} layers", layers_))) {
      return flags;
    }
    return {};
  }

  // `decode_rows` and the extent's tokens are what one matrix sees; prefix "expert." and so on.
  void feed_forward(const std::string& prefix, std::int64_t layers, std::int64_t width,
                    const std::string& activation, std::int64_t decode_rows,
                    const std::string& note, std::int64_t token_rows = 0) {
    const bool with_bias = bias(row_.mlp_bias);
    const bool gated = row_.gated;
    GemmLayers up = gemm(prefix + (gated ? "gate_up" : "fc1"), layers, hidden_, width, with_bias);
    up.gated = gated;
    up.activation = activation;
    up.note = note;
    if (row_.clamped_swiglu) {
      up.activation = "gpt_oss_swiglu";
      up.note += "; gate and up weights de-interleaved";
      up.limit = config_.positive({"swiglu_limit"}, 7.0).value_or(7.0);
    }
    GemmLayers down = gemm(prefix + (gated ? "down" : "fc2"), layers, width, hidden_, with_bias);
    down.note = note;
    for (GemmLayers* each : {&up, &down}) {
      each->rows_decode = decode_rows;
      if (token_rows > 0) each->rows_prefill = each->rows_training = token_rows;
      each->weight_in_out = row_.weight_in_out || row_.clamped_swiglu;
      result_.gemms.push_back(std::move(*each));
    }
  }

  void mixture(std::int64_t experts, std::int64_t sparse, const std::string& activation) {
    const Names top_names = {"num_experts_per_tok", "experts_per_token"};
    const std::int64_t top = config_.size(top_names);
    config_.require(top <= experts, top_names, top, fmt::format("at most the {} experts", experts));
    const std::int64_t width = config_.has({"moe_intermediate_size"})
                                   ? config_.size({"moe_intermediate_size"})
                                   : config_.size(kIntermediate);

    GemmLayers router = gemm("router", sparse, hidden_, experts, row_.router_bias);
    router.activation = row_.router_activation;
    router.f32_output = row_.router_f32;
    add(std::move(router));

    const auto rows = [&](std::int64_t tokens) { return (tokens * top + experts - 1) / experts; };
    const std::string note =
        fmt::format("one of {} experts, top {}, with the load even", experts, top);
    feed_forward("expert.", sparse, width, activation, rows(extent_.batch), note,
                 rows(extent_.batch * extent_.seqlen));

    std::int64_t shared = config_.count_or({"shared_expert_intermediate_size"}, 0);
    if (config_.has({"n_shared_experts"})) {
      const std::int64_t count = config_.count_or({"n_shared_experts"}, 0);
      shared = count == 0 ? 0 : config_.product({"n_shared_experts"}, count, width);
    }
    if (shared == 0) return;
    feed_forward("shared_expert.", sparse, shared, activation, extent_.batch, "");
    if (!row_.shared_gate) return;
    GemmLayers gate = gemm("shared_expert.gate", sparse, hidden_, 1, false);
    gate.activation = "sigmoid";
    add(std::move(gate));
  }

  void lm_head() {
    const Names names = {"vocab_size"};
    std::int64_t vocab = row_.nested.vocab;
    if (!config_.nested_default(names, vocab)) {
      if (!config_.has(names)) {
        config_.warn("vocab_size is missing: lm_head is left out");
        return;
      }
      vocab = config_.size(names);
    }
    GemmLayers head = token_gemm("lm_head", 1, extent_, hidden_, vocab, false);
    head.rows_prefill = extent_.batch;
    head.prefill_note = kLastToken;
    if (row_.logit_scale > 0) head.multiply = config_.positive({"logit_scale"}, row_.logit_scale);
    head.softcap =
        config_.positive({"final_logit_softcapping"},
                         row_.final_softcap > 0 ? std::optional{row_.final_softcap} : std::nullopt);
    result_.gemms.push_back(std::move(head));
  }

  ModelConfig& config_;
  const DecoderRow& row_;
  Extent extent_;
  bool common_;
  std::int64_t hidden_ = 1;
  std::int64_t layers_ = 1;
  Architecture result_;
};

}  // namespace

Architecture derive_decoder(ModelConfig& config, const std::string& model_type,
                            const Extent& extent) {
  const DecoderRow* row = find_decoder_row(model_type);
  return Decoder{config, row == nullptr ? common_decoder_row() : *row, extent}.derive();
}

}  // namespace lawson::front
