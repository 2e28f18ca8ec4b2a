// The tensors of attention by the names that specs, graphs and frontends give them.
#ifndef LAWSON_PYTHON_SHARED_ATTENTION_PARAMS_H_
#define LAWSON_PYTHON_SHARED_ATTENTION_PARAMS_H_

#include <lawson/lawson.hpp>

#include <array>
#include <optional>
#include <string_view>
#include <utility>

namespace lawson::python {

inline constexpr std::array kAttentionParams{
    std::pair{"q", LAWSON_PARAM_Q},
    std::pair{"k", LAWSON_PARAM_K},
    std::pair{"v", LAWSON_PARAM_V},
    std::pair{"o", LAWSON_PARAM_O},
    std::pair{"stats", LAWSON_PARAM_STATS},
    std::pair{"max_logit", LAWSON_PARAM_MAX_LOGIT},
    std::pair{"bias", LAWSON_PARAM_BIAS},
    std::pair{"sink", LAWSON_PARAM_SINK},
    std::pair{"mask", LAWSON_PARAM_MASK},
    std::pair{"slopes", LAWSON_PARAM_SLOPES},
    std::pair{"seqlen_q", LAWSON_PARAM_SEQLEN_Q},
    std::pair{"seqlen_kv", LAWSON_PARAM_SEQLEN_KV},
    std::pair{"cu_seqlens_q", LAWSON_PARAM_CU_SEQLENS_Q},
    std::pair{"cu_seqlens_kv", LAWSON_PARAM_CU_SEQLENS_KV},
    std::pair{"cu_seqlens_q_padded", LAWSON_PARAM_CU_SEQLENS_Q_PADDED},
    std::pair{"cu_seqlens_kv_padded", LAWSON_PARAM_CU_SEQLENS_KV_PADDED},
    std::pair{"page_table_k", LAWSON_PARAM_PAGE_TABLE_K},
    std::pair{"page_table_v", LAWSON_PARAM_PAGE_TABLE_V},
    std::pair{"seed", LAWSON_PARAM_SEED},
    std::pair{"offset", LAWSON_PARAM_OFFSET},
    std::pair{"dropout_mask", LAWSON_PARAM_DROPOUT_MASK},
    std::pair{"dropped", LAWSON_PARAM_DROPPED},
    std::pair{"k_new", LAWSON_PARAM_K_NEW},
    std::pair{"v_new", LAWSON_PARAM_V_NEW},
    std::pair{"do", LAWSON_PARAM_DO},
    std::pair{"dq", LAWSON_PARAM_DQ},
    std::pair{"dk", LAWSON_PARAM_DK},
    std::pair{"dv", LAWSON_PARAM_DV},
    std::pair{"dbias", LAWSON_PARAM_DBIAS},
    std::pair{"dsink", LAWSON_PARAM_DSINK},
};

inline std::optional<lawson_attention_param> attention_param(std::string_view name) {
  for (const auto& [known, param] : kAttentionParams) {
    if (name == known) return param;
  }
  return std::nullopt;
}

}  // namespace lawson::python

#endif  // LAWSON_PYTHON_SHARED_ATTENTION_PARAMS_H_
