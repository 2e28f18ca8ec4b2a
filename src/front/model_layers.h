// What a model's layers compute, between reading its config and writing specs. Private to front.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "front/model.h"
#include "front/model_config.h"

namespace lawson::front {

enum class ScoreBias { none, alibi, relative };  // relative: a learned [1, heads, q, kv] tensor

// One kind of attention and how many layers have it. A length of 0 means that the pass has none.
struct AttentionLayers {
  std::string kind;  // full, sliding, mla, mla_absorbed, encoder, decoder_self, cross
  std::int64_t layers = 0;
  std::int64_t heads = 0;
  std::int64_t kv_heads = 0;
  std::int64_t head_dim_qk = 0;
  std::int64_t head_dim_v = 0;
  std::int64_t seqlen_q = 0;   // prefill and training
  std::int64_t seqlen_kv = 0;  // prefill and training
  std::int64_t context = 0;    // decode: keys and values that one query row sees
  bool causal = false;
  bool padded = false;            // not causal, and the sequences of a batch differ in length
  std::int64_t window_left = -1;  // of prefill and training
  std::int64_t window_right = -1;
  std::optional<double> scale;  // unset: 1/sqrt(head_dim_qk)
  std::optional<double> softcap;
  bool sinks = false;
  ScoreBias bias = ScoreBias::none;
  Dims v_strides;  // of [b, h, s, d]; empty: contiguous in the layout
  std::string note;
  std::string decode_note;
};

// One matrix product and what is fused behind it: out = post(x[rows, k] * w[k, n] + bias), or for
// `gated` act(x*w_gate + b_gate) * (x*w_up + b_up). Rows of 0: the pass does not compute it.
struct GemmLayers {
  std::string name;
  std::int64_t layers = 0;
  std::int64_t rows_prefill = 0;
  std::int64_t rows_decode = 0;
  std::int64_t rows_training = 0;
  std::int64_t k = 0;
  std::int64_t n = 0;
  bool gated = false;
  bool bias = false;
  bool weight_in_out = false;      // stored [in, out]; else [out, in] as torch's Linear does
  std::optional<double> clip;      // clamp to [-clip, clip]
  std::string activation;          // spec op name, "quick_gelu", "gpt_oss_swiglu" or empty
  std::optional<double> limit;     // gpt_oss_swiglu's clamp
  std::optional<double> multiply;  // of the result
  std::optional<double> softcap;   // cap * tanh(result / cap)
  bool f32_output = false;
  // Batched over heads (absorbed MLA); strides of [heads, rows, k] and so on, in elements.
  std::int64_t heads = 1;
  Dims x_strides, w_strides, out_strides;
  std::string note;
  std::string prefill_note;
};

inline constexpr const char* kLastToken = "prefill needs the last token's logits only";

struct Architecture {
  std::string family;
  std::int64_t layers = 0;
  std::vector<AttentionLayers> attention;
  std::vector<GemmLayers> gemms;
};

// Tokens that the passes process, after the model's own limits.
struct Extent {
  std::int64_t batch = 1;
  std::int64_t seqlen = 1;
  std::int64_t context = 1;
};

// What GemmLayers::activation says for `name`, an activation as configs spell it; an error that
// names `field` when it is not known.
std::string activation_op(ModelConfig& config, const std::string& field, const std::string& name);

// seqlen and context cut to a hard limit (learned positions), with a warning when that happens.
Extent limited(ModelConfig& config, const Extent& extent, std::int64_t limit,
               const std::string& field);

// A GEMM on every token of every pass.
GemmLayers token_gemm(std::string name, std::int64_t layers, const Extent& extent, std::int64_t k,
                      std::int64_t n, bool bias);

bool is_decoder_type(const std::string& model_type);
Architecture derive_decoder(ModelConfig& config, const std::string& model_type,
                            const Extent& extent);

bool is_encoder_type(const std::string& model_type);
Architecture derive_encoder(ModelConfig& config, const std::string& model_type,
                            const Extent& extent);

std::vector<std::string> decoder_types();
std::vector<std::string> encoder_types();

// Appends the spec documents of `architecture` for every pass of `options`.
void append_workloads(const Architecture& architecture, const ModelOptions& options,
                      const std::string& dtype, const std::string& prefix, Model& model);

}  // namespace lawson::front
