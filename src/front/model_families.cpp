// Row values are the defaults and conventions of the transformers library.
#include "front/model_families.h"

#include <algorithm>
#include <iterator>

#include "front/model_layers.h"

namespace lawson::front {
namespace {

constexpr BiasRule kAlways{nullptr, true, false};
constexpr BiasRule kAttentionBias{"attention_bias", false, false};

const DecoderRow kRows[] = {
    {.type = "bloom",
     .widening = 4,
     .qkv_bias = kAlways,
     .out_bias = kAlways,
     .mlp_bias = kAlways,
     .gated = false,
     .activation = "gelu_pytorch_tanh",
     .activation_fields = {},
     .alibi = true},
    {.type = "cohere",
     .qkv_bias = kAttentionBias,
     .out_bias = kAttentionBias,
     .logit_scale = 0.0625},
    {.type = "cohere2",
     .qkv_bias = kAttentionBias,
     .out_bias = kAttentionBias,
     .windows = Windows::every,
     .window = 4096,
     .period = 4,
     .logit_scale = 0.0625},
    {.type = "deepseek_v2",
     .out_bias = kAttentionBias,
     .mlp_bias = {"mlp_bias", false, false},
     .mla = true,
     .moe = true,
     .router_f32 = true},
    {.type = "deepseek_v3",
     .out_bias = kAttentionBias,
     .mla = true,
     .moe = true,
     .dense_first = 3,
     .router_activation = "sigmoid",
     .router_f32 = true},
    {.type = "falcon",
     .widening = 4,
     .qkv_bias = {"bias", false, false},
     .out_bias = {"bias", false, false},
     .mlp_bias = {"bias", false, false},
     .gated = false,
     .activation = "gelu"},
    // Gemma's hidden_act is a legacy field that its first configs got wrong ("gelu"):
    // huggingface/transformers#29402. hidden_activation counts.
    {.type = "gemma",
     .kv_heads = 16,
     .head_dim = 256,
     .qkv_bias = kAttentionBias,
     .out_bias = kAttentionBias,
     .activation = "gelu_pytorch_tanh",
     .activation_fields = {"hidden_activation"}},
    {.type = "gemma2",
     .kv_heads = 4,
     .head_dim = 256,
     .qkv_bias = kAttentionBias,
     .out_bias = kAttentionBias,
     .activation = "gelu_pytorch_tanh",
     .activation_fields = {"hidden_activation"},
     .windows = Windows::every,
     .window = 4096,
     .period = 2,
     .softcap = 50.0,
     .final_softcap = 30.0,
     .query_scalar = 256.0},
    {.type = "gemma3_text",
     .nested = {2304, 26, 8, 9216, 262'208},
     .kv_heads = 4,
     .head_dim = 256,
     .qkv_bias = kAttentionBias,
     .out_bias = kAttentionBias,
     .activation = "gelu_pytorch_tanh",
     .activation_fields = {"hidden_activation"},
     .windows = Windows::every,
     .window = 4096,
     .period = 6,
     .query_scalar = 256.0},
    {.type = "gpt2",
     .widening = 4,
     .qkv_bias = kAlways,
     .out_bias = kAlways,
     .mlp_bias = kAlways,
     .gated = false,
     .activation = "gelu_new",
     .weight_in_out = true,
     .positions = 1024},
    {.type = "gpt_neox",
     .qkv_bias = {"attention_bias", true, false},
     .out_bias = {"attention_bias", true, false},
     .mlp_bias = kAlways,
     .gated = false,
     .activation = "gelu"},
    {.type = "gpt_oss",
     .kv_heads = 8,
     .head_dim = 64,
     .qkv_bias = kAlways,
     .out_bias = kAlways,
     .mlp_bias = kAlways,
     .windows = Windows::every,
     .window = 128,
     .period = 2,
     .sinks = true,
     .moe = true,
     .router_bias = true,
     .clamped_swiglu = true},
    {.type = "llama",
     .nested = {4096, 32, 32, 11008, 32000},
     .qkv_bias = kAttentionBias,
     .out_bias = kAttentionBias,
     .mlp_bias = {"mlp_bias", false, false}},
    {.type = "mistral",
     .nested = {4096, 32, 32, 14336, 32000},
     .kv_heads = 8,
     .windows = Windows::all,
     .window = 4096},
    {.type = "mixtral", .kv_heads = 8, .windows = Windows::all, .moe = true},
    {.type = "mpt",
     .widening = 4,
     .qkv_bias = {"no_bias", true, true},
     .out_bias = {"no_bias", true, true},
     .mlp_bias = {"no_bias", true, true},
     .gated = false,
     .activation = "gelu",
     .activation_fields = {}},
    {.type = "olmo", .qkv_bias = kAttentionBias, .out_bias = kAttentionBias},
    {.type = "olmo2", .qkv_bias = kAttentionBias, .out_bias = kAttentionBias},
    {.type = "phi3", .windows = Windows::all},
    {.type = "qwen2",
     .kv_heads = 32,
     .qkv_bias = kAlways,
     .windows = Windows::after,
     .window = 4096,
     .window_switch = true},
    {.type = "qwen2_moe",
     .kv_heads = 16,
     .qkv_bias = {"qkv_bias", true, false},
     .windows = Windows::after,
     .window = 4096,
     .window_switch = true,
     .moe = true,
     .shared_gate = true},
    {.type = "qwen3",
     .kv_heads = 32,
     .head_dim = 128,
     .qkv_bias = kAttentionBias,
     .out_bias = kAttentionBias,
     .windows = Windows::after,
     .window = 4096,
     .window_switch = true},
    {.type = "qwen3_moe",
     .kv_heads = 4,
     .qkv_bias = kAttentionBias,
     .out_bias = kAttentionBias,
     .windows = Windows::all,
     .window = 4096,
     .window_switch = true,
     .moe = true},
};

const DecoderRow kCommonRow = {.type = "",
                               .qkv_bias = kAttentionBias,
                               .out_bias = kAttentionBias,
                               .mlp_bias = {"mlp_bias", false, false},
                               .windows = Windows::all};

}  // namespace

const DecoderRow* find_decoder_row(const std::string& type) {
  const auto* it = std::find_if(std::begin(kRows), std::end(kRows),
                                [&](const DecoderRow& row) { return row.type == type; });
  return it == std::end(kRows) ? nullptr : it;
}

const DecoderRow& common_decoder_row() {
  return kCommonRow;
}

bool is_decoder_type(const std::string& model_type) {
  return find_decoder_row(model_type) != nullptr;
}

std::vector<std::string> decoder_types() {
  std::vector<std::string> types;
  for (const DecoderRow& row : kRows) types.emplace_back(row.type);
  return types;
}

}  // namespace lawson::front
