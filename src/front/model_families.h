// The table of decoder-only families: what differs between them, one row per model_type. Private to
// front.
#pragma once

#include <cstdint>
#include <string>

#include "front/model_config.h"

namespace lawson::front {

// Whether a projection has a bias: a field of the config, or fixed where there is no field.
struct BiasRule {
  const char* field = nullptr;
  bool fallback = false;
  bool inverted = false;  // the field says "no bias"
};

enum class Windows {
  none,
  all,    // every layer, when sliding_window is set
  every,  // all but each `period`-th layer
  after,  // layers from max_window_layers on
};

// A wrapper's text_config is saved as its difference from the family's defaults, so there these
// fields may be absent; in a config of its own their absence is an error. 0: no default.
struct NestedDefaults {
  std::int64_t hidden = 0;
  std::int64_t layers = 0;
  std::int64_t heads = 0;
  std::int64_t intermediate = 0;
  std::int64_t vocab = 0;
};

struct DecoderRow {
  const char* type = "";
  NestedDefaults nested = {};
  // Sizes for an absent field. 0: kv_heads = heads, head_dim = hidden / heads, and
  // intermediate_size is required.
  std::int64_t kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t widening = 0;  // intermediate_size = widening * hidden
  BiasRule qkv_bias = {};
  BiasRule out_bias = {};
  BiasRule mlp_bias = {};
  bool gated = true;
  const char* activation = "silu";
  Names activation_fields = {"hidden_act", "activation_function", "activation"};
  Windows windows = Windows::none;
  std::int64_t window = 0;  // for an absent sliding_window
  std::int64_t period = 0;
  bool window_switch = false;  // no window unless use_sliding_window is true
  double softcap = 0.0;        // for an absent attn_logit_softcapping
  double final_softcap = 0.0;
  double query_scalar = 0.0;  // scale = query_pre_attn_scalar^-1/2
  double logit_scale = 0.0;
  bool alibi = false;
  bool sinks = false;
  bool mla = false;
  bool moe = false;
  std::int64_t dense_first = 0;  // for an absent first_k_dense_replace
  const char* router_activation = "";
  bool router_f32 = false;
  bool router_bias = false;
  bool shared_gate = false;
  bool clamped_swiglu = false;
  bool weight_in_out = false;
  std::int64_t positions = 0;  // learned positions: for an absent n_positions; 0 is no limit
};

// Null when `type` has no row of its own.
const DecoderRow* find_decoder_row(const std::string& type);

// For a model_type without a row: what most decoders since Llama have in common.
const DecoderRow& common_decoder_row();

}  // namespace lawson::front
