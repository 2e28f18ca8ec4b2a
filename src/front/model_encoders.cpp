// Encoders (BERT, vision transformers) and encoder-decoders (Whisper, T5).
#include <algorithm>
#include <cmath>
#include <functional>
#include <map>

#include "base/lazy.h"
#include "front/model_layers.h"

namespace lawson::front {
namespace {

// One stack of identical layers with a plain or gated MLP; everything else is per family.
struct Stack {
  std::string prefix;  // of GEMM names: "encoder.", "decoder." or ""
  std::int64_t layers = 0;
  std::int64_t hidden = 0;
  std::int64_t heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t width = 0;  // of the MLP
  std::string activation;
  bool gated = false;
  bool qkv_bias = true;
  bool bias = true;  // of the other projections
  std::string qkv_note = "query, key and value weights concatenated";
};

// Tokens of a stack that never decodes: prefill and training only.
GemmLayers encode_gemm(std::string name, std::int64_t layers, std::int64_t rows, std::int64_t k,
                       std::int64_t n, bool bias) {
  GemmLayers gemm = token_gemm(std::move(name), layers, {}, k, n, bias);
  gemm.rows_prefill = gemm.rows_training = rows;
  gemm.rows_decode = 0;
  return gemm;
}

AttentionLayers attention(const Stack& stack, std::string kind, std::int64_t q, std::int64_t kv) {
  AttentionLayers result;
  result.kind = std::move(kind);
  result.layers = stack.layers;
  result.heads = result.kv_heads = stack.heads;
  result.head_dim_qk = result.head_dim_v = stack.head_dim;
  result.seqlen_q = q;
  result.seqlen_kv = kv;
  return result;
}

// The projections and the MLP of a stack; `make` builds one GEMM for the stack's tokens.
using MakeGemm = std::function<GemmLayers(std::string, std::int64_t, std::int64_t, bool)>;

void add_projections(ModelConfig& config, const Stack& stack, const MakeGemm& make,
                     Architecture& result) {
  const std::int64_t inner = config.product({"num_attention_heads"}, stack.heads, stack.head_dim);
  GemmLayers qkv = make("qkv", stack.hidden, 3 * inner, stack.qkv_bias);
  qkv.note = stack.qkv_note;
  result.gemms.push_back(std::move(qkv));
  result.gemms.push_back(make("o", inner, stack.hidden, stack.bias));
}

void add_mlp(const Stack& stack, const MakeGemm& make, Architecture& result) {
  GemmLayers up = make(stack.gated ? "gate_up" : "fc1", stack.hidden, stack.width, stack.bias);
  up.gated = stack.gated;
  up.activation = stack.activation;
  result.gemms.push_back(std::move(up));
  result.gemms.push_back(make(stack.gated ? "down" : "fc2", stack.width, stack.hidden, stack.bias));
}

MakeGemm encoder_maker(const Stack& stack, std::int64_t rows) {
  return [&stack, rows](const std::string& name, std::int64_t k, std::int64_t n, bool bias) {
    return encode_gemm(stack.prefix + name, stack.layers, rows, k, n, bias);
  };
}

MakeGemm decoder_maker(const Stack& stack, const Extent& extent) {
  return [&stack, extent](const std::string& name, std::int64_t k, std::int64_t n, bool bias) {
    return token_gemm(stack.prefix + name, stack.layers, extent, k, n, bias);
  };
}

std::int64_t divided_head_dim(ModelConfig& config, const Names& heads_names, std::int64_t hidden,
                              std::int64_t heads) {
  config.require(hidden % heads == 0, heads_names, heads,
                 fmt::format("a divisor of the hidden size {}", hidden));
  return std::max<std::int64_t>(hidden / heads, 1);
}

Stack common_stack(ModelConfig& config, const std::string& activation) {
  Stack stack;
  stack.hidden = config.size({"hidden_size"});
  stack.layers = config.layer_count({"num_hidden_layers"});
  stack.heads = config.size({"num_attention_heads"});
  stack.head_dim = divided_head_dim(config, {"num_attention_heads"}, stack.hidden, stack.heads);
  stack.width = config.size({"intermediate_size"});
  stack.activation =
      activation_op(config, "hidden_act", config.word_or({"hidden_act"}, activation));
  return stack;
}

Architecture bert(ModelConfig& config, const Extent& asked) {
  Architecture result;
  const Stack stack = common_stack(config, "gelu");
  result.layers = stack.layers;
  const Names positions = {"max_position_embeddings"};
  const Extent extent = limited(config, asked, config.size_or(positions, 512), positions.front());
  AttentionLayers self = attention(stack, "encoder", extent.seqlen, extent.seqlen);
  self.padded = true;
  result.attention.push_back(std::move(self));
  const std::int64_t rows = extent.batch * extent.seqlen;
  const MakeGemm make = encoder_maker(stack, rows);
  add_projections(config, stack, make, result);
  add_mlp(stack, make, result);
  const std::vector<std::string> classes = config.words({"architectures"});
  if (std::find(classes.begin(), classes.end(), "BertForMaskedLM") != classes.end()) {
    GemmLayers transform = encode_gemm("lm_transform", 1, rows, stack.hidden, stack.hidden, true);
    transform.activation = stack.activation;
    result.gemms.push_back(std::move(transform));
    result.gemms.push_back(
        encode_gemm("lm_head", 1, rows, stack.hidden, config.size({"vocab_size"}), true));
  }
  return result;
}

struct VisionDefaults {
  std::int64_t patch;
  std::int64_t extra_tokens;  // the class token
  const char* activation;
};

Architecture vision(ModelConfig& config, const Extent& extent, const VisionDefaults& defaults) {
  Architecture result;
  Stack stack = common_stack(config, defaults.activation);
  stack.qkv_bias = config.flag_or({"qkv_bias"}, true);
  result.layers = stack.layers;
  const std::int64_t image = config.size_or({"image_size"}, 224);
  const std::int64_t patch = config.size_or({"patch_size"}, defaults.patch);
  config.require(patch <= image, {"patch_size"}, patch,
                 fmt::format("at most the image size {}", image));
  const std::int64_t side = std::max<std::int64_t>(image / patch, 1);
  const std::int64_t patches = config.product({"image_size"}, side, side);
  const std::int64_t tokens = patches + defaults.extra_tokens;
  AttentionLayers self = attention(stack, "encoder", tokens, tokens);
  self.note = fmt::format("{} patches{} of one image per batch entry", patches,
                          defaults.extra_tokens > 0 ? " and a class token" : "");
  result.attention.push_back(std::move(self));
  const MakeGemm make = encoder_maker(stack, config.product({"image_size"}, tokens, extent.batch));
  add_projections(config, stack, make, result);
  add_mlp(stack, make, result);
  return result;
}

// The parts that Whisper's and T5's decoders share: self attention, cross attention over
// `source` encoder tokens, projections, MLP, logits.
void add_decoder(ModelConfig& config, const Stack& stack, const Extent& extent, std::int64_t source,
                 const AttentionLayers& self, const AttentionLayers& cross,
                 const std::string& cross_kv_note, Architecture& result) {
  result.attention.push_back(self);
  result.attention.push_back(cross);
  const MakeGemm make = decoder_maker(stack, extent);
  add_projections(config, stack, make, result);
  result.gemms.back().note = "of self and of cross attention: two in a layer";
  const std::int64_t inner = stack.heads * stack.head_dim;
  result.gemms.push_back(make("cross_q", stack.hidden, inner, stack.qkv_bias));
  GemmLayers cross_kv = encode_gemm(stack.prefix + "cross_kv", stack.layers, extent.batch * source,
                                    stack.hidden, 2 * inner, stack.qkv_bias);
  cross_kv.note = cross_kv_note;
  result.gemms.push_back(std::move(cross_kv));
  add_mlp(stack, make, result);
}

Architecture whisper(ModelConfig& config, const Extent& asked) {
  Architecture result;
  Stack encoder;
  encoder.prefix = "encoder.";
  encoder.hidden = config.size({"d_model"});
  encoder.layers = config.layer_count({"encoder_layers"});
  encoder.heads = config.size({"encoder_attention_heads"});
  encoder.head_dim =
      divided_head_dim(config, {"encoder_attention_heads"}, encoder.hidden, encoder.heads);
  encoder.width = config.size({"encoder_ffn_dim"});
  encoder.activation =
      activation_op(config, "activation_function", config.word_or({"activation_function"}, "gelu"));
  encoder.qkv_note += "; the key has no bias, so its part of the bias is 0";
  Stack decoder = encoder;
  decoder.prefix = "decoder.";
  decoder.layers = config.layer_count({"decoder_layers"});
  decoder.heads = config.size({"decoder_attention_heads"});
  decoder.head_dim =
      divided_head_dim(config, {"decoder_attention_heads"}, decoder.hidden, decoder.heads);
  decoder.width = config.size({"decoder_ffn_dim"});
  result.layers = encoder.layers + decoder.layers;

  const std::int64_t source = config.size_or({"max_source_positions"}, 1500);
  const Names positions = {"max_target_positions"};
  const Extent extent = limited(config, asked, config.size_or(positions, 448), positions.front());
  AttentionLayers self = attention(encoder, "encoder", source, source);
  self.note = fmt::format("always {} audio positions", source);
  result.attention.push_back(std::move(self));
  const MakeGemm make =
      encoder_maker(encoder, config.product({"max_source_positions"}, source, extent.batch));
  add_projections(config, encoder, make, result);
  add_mlp(encoder, make, result);

  AttentionLayers decoder_self = attention(decoder, "decoder_self", extent.seqlen, extent.seqlen);
  decoder_self.causal = true;
  decoder_self.context = extent.context;
  AttentionLayers cross = attention(decoder, "cross", extent.seqlen, source);
  cross.context = source;
  add_decoder(config, decoder, extent, source, decoder_self, cross,
              "once per audio; the key's part of the bias is 0", result);
  GemmLayers head =
      token_gemm("lm_head", 1, extent, decoder.hidden, config.size({"vocab_size"}), false);
  head.rows_prefill = extent.batch;
  head.prefill_note = kLastToken;
  result.gemms.push_back(std::move(head));
  return result;
}

// feed_forward_proj: "relu", "gated-gelu" (whose gelu is the tanh form), "gated-silu", ...
void t5_feed_forward(ModelConfig& config, Stack& stack) {
  const Names names = {"feed_forward_proj"};
  std::string name = config.word_or(names, "relu");
  stack.gated = name.starts_with("gated-");
  if (stack.gated) name = name.substr(6);
  if (stack.gated && name == "gelu") name = "gelu_new";
  stack.activation = activation_op(config, names.front(), name);
}

Architecture t5(ModelConfig& config, const Extent& extent) {
  Architecture result;
  Stack encoder;
  encoder.prefix = "encoder.";
  encoder.hidden = config.size({"d_model"});
  encoder.layers = config.layer_count({"num_layers"});
  encoder.heads = config.size({"num_heads"});
  encoder.head_dim = config.size({"d_kv"});
  encoder.width = config.size({"d_ff"});
  encoder.qkv_bias = encoder.bias = false;
  t5_feed_forward(config, encoder);
  Stack decoder = encoder;
  decoder.prefix = "decoder.";
  if (config.has({"num_decoder_layers"})) {
    decoder.layers = config.layer_count({"num_decoder_layers"});
  }
  result.layers = encoder.layers + decoder.layers;

  AttentionLayers self = attention(encoder, "encoder", extent.seqlen, extent.seqlen);
  self.padded = true;
  self.scale = 1.0;  // T5 folds it into its initialisation
  self.bias = ScoreBias::relative;
  self.note = "relative position bias, shared by the layers of the stack";
  result.attention.push_back(self);
  const MakeGemm make = encoder_maker(encoder, extent.batch * extent.seqlen);
  add_projections(config, encoder, make, result);
  add_mlp(encoder, make, result);

  AttentionLayers decoder_self = self;
  decoder_self.kind = "decoder_self";
  decoder_self.layers = decoder.layers;
  decoder_self.padded = false;
  decoder_self.causal = true;
  decoder_self.context = extent.context;
  AttentionLayers cross = attention(decoder, "cross", extent.seqlen, extent.seqlen);
  cross.padded = true;
  cross.scale = 1.0;
  cross.context = extent.seqlen;
  add_decoder(config, decoder, extent, extent.seqlen, decoder_self, cross, "once per source text",
              result);
  GemmLayers head =
      token_gemm("lm_head", 1, extent, decoder.hidden, config.size({"vocab_size"}), false);
  head.rows_prefill = extent.batch;
  head.prefill_note = kLastToken;
  if (config.flag_or({"tie_word_embeddings"}, true)) {
    head.multiply = 1.0 / std::sqrt(static_cast<double>(decoder.hidden));
  }
  result.gemms.push_back(std::move(head));
  return result;
}

using Derive = std::function<Architecture(ModelConfig&, const Extent&)>;

Derive vision_with(VisionDefaults defaults) {
  return [defaults](ModelConfig& config, const Extent& extent) {
    return vision(config, extent, defaults);
  };
}

const std::map<std::string, Derive>& families() {
  static Lazy<const std::map<std::string, Derive>> known;
  return known.get([] {
    return std::map<std::string, Derive>{
        {"bert", bert},
        {"clip_vision_model", vision_with({32, 1, "quick_gelu"})},
        {"siglip_vision_model", vision_with({16, 0, "gelu_pytorch_tanh"})},
        {"t5", t5},
        {"vit", vision_with({16, 1, "gelu"})},
        {"whisper", whisper},
    };
  });
}

}  // namespace

bool is_encoder_type(const std::string& model_type) {
  return families().contains(model_type);
}

std::vector<std::string> encoder_types() {
  std::vector<std::string> types;
  for (const auto& [type, derive] : families()) types.push_back(type);
  return types;
}

Architecture derive_encoder(ModelConfig& config, const std::string& model_type,
                            const Extent& extent) {
  Architecture result = families().at(model_type)(config, extent);
  result.family = model_type;
  return result;
}

}  // namespace lawson::front
