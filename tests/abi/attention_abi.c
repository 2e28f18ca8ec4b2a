/* The attention part of the ABI, as the C program prints it: every enum value, and of every
 * attribute the number and the size of its value. */
#include "attention_abi.h"

#include <lawson/legacy.h>
#include <stdio.h>

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

/* Every function, so that the program does not link without it. */
AbiFunction const kAttentionFunctions[] = {
    (AbiFunction)lawson_attention_config_create,
    (AbiFunction)lawson_attention_config_destroy,
    (AbiFunction)lawson_attention_config_set_attribute,
    (AbiFunction)lawson_attention_config_get_attribute,
    (AbiFunction)lawson_attention_config_from_spec,
    (AbiFunction)lawson_attention_config_spec,
    (AbiFunction)lawson_graph_from_attention,
    (AbiFunction)lawson_attention_select,
    (AbiFunction)lawson_attention_fwd_params_create,
    (AbiFunction)lawson_attention_fwd_params_destroy,
    (AbiFunction)lawson_attention_fwd_params_set_attribute,
    (AbiFunction)lawson_attention_fwd_params_get_attribute,
    (AbiFunction)lawson_attention_fwd_params_set_pointers,
    (AbiFunction)lawson_attention_fwd_params_derive,
    (AbiFunction)lawson_attention_fwd_params_plan,
    (AbiFunction)lawson_attention_fwd_params_workspace_size,
    (AbiFunction)lawson_attention_bwd_params_create,
    (AbiFunction)lawson_attention_bwd_params_destroy,
    (AbiFunction)lawson_attention_bwd_params_set_attribute,
    (AbiFunction)lawson_attention_bwd_params_get_attribute,
    (AbiFunction)lawson_attention_bwd_params_set_pointers,
    (AbiFunction)lawson_attention_bwd_params_derive,
    (AbiFunction)lawson_attention_bwd_params_plan,
    (AbiFunction)lawson_attention_bwd_params_workspace_size,
    (AbiFunction)lawson_attention_forward,
    (AbiFunction)lawson_attention_backward,
    (AbiFunction)lawson_legacy_attention_backend,
    (AbiFunction)lawson_legacy_attention_forward,
    (AbiFunction)lawson_legacy_attention_backward,
};
const size_t kAttentionFunctionCount = sizeof(kAttentionFunctions) / sizeof(kAttentionFunctions[0]);

#define VALUE(name) printf("%s %d\n", #name, (int)name)
#define ROW(name) \
  { #name, name }

static const struct {
  const char* name;
  int32_t number;
} kConfigAttributes[] =
    {
        ROW(LAWSON_ATTENTION_NAME),
        ROW(LAWSON_ATTENTION_PASS),
        ROW(LAWSON_ATTENTION_DTYPE),
        ROW(LAWSON_ATTENTION_OUTPUT_DTYPE),
        ROW(LAWSON_ATTENTION_BATCH),
        ROW(LAWSON_ATTENTION_HEADS),
        ROW(LAWSON_ATTENTION_KV_HEADS),
        ROW(LAWSON_ATTENTION_SEQLEN_Q),
        ROW(LAWSON_ATTENTION_SEQLEN_KV),
        ROW(LAWSON_ATTENTION_HEAD_DIM_QK),
        ROW(LAWSON_ATTENTION_HEAD_DIM_V),
        ROW(LAWSON_ATTENTION_LAYOUT),
        ROW(LAWSON_ATTENTION_MASK),
        ROW(LAWSON_ATTENTION_WINDOW),
        ROW(LAWSON_ATTENTION_BIAS),
        ROW(LAWSON_ATTENTION_BIAS_SHAPE),
        ROW(LAWSON_ATTENTION_BIAS_DTYPE),
        ROW(LAWSON_ATTENTION_BIAS_GRAD),
        ROW(LAWSON_ATTENTION_ATTN_MASK_DTYPE),
        ROW(LAWSON_ATTENTION_ATTN_MASK_SHAPE),
        ROW(LAWSON_ATTENTION_ALIBI_SLOPES),
        ROW(LAWSON_ATTENTION_ALIBI_SLOPE_VALUES),
        ROW(LAWSON_ATTENTION_SOFTMAX),
        ROW(LAWSON_ATTENTION_SOFTCAP),
        ROW(LAWSON_ATTENTION_DROPOUT),
        ROW(LAWSON_ATTENTION_RETURN_DROPOUT_MASK),
        ROW(LAWSON_ATTENTION_DROPOUT_MASK),
        ROW(LAWSON_ATTENTION_SCALE),
        ROW(LAWSON_ATTENTION_DETERMINISTIC),
        ROW(LAWSON_ATTENTION_RETURN_STATS),
        ROW(LAWSON_ATTENTION_RETURN_MAX_LOGIT),
        ROW(LAWSON_ATTENTION_CUDA_GRAPH),
        ROW(LAWSON_ATTENTION_TOTAL_Q),
        ROW(LAWSON_ATTENTION_TOTAL_KV),
        ROW(LAWSON_ATTENTION_SEQLENS_Q),
        ROW(LAWSON_ATTENTION_SEQLENS_KV),
        ROW(LAWSON_ATTENTION_SEQLENS_Q_PADDED),
        ROW(LAWSON_ATTENTION_SEQLENS_KV_PADDED),
        ROW(LAWSON_ATTENTION_PADDED_OFFSETS),
        ROW(LAWSON_ATTENTION_PAGE_SIZE_K),
        ROW(LAWSON_ATTENTION_PAGE_SIZE_V),
        ROW(LAWSON_ATTENTION_PAGES),
        ROW(LAWSON_ATTENTION_APPEND),
        ROW(LAWSON_ATTENTION_FP8_RECIPE),
        ROW(LAWSON_ATTENTION_CONTEXT_PARALLEL_STRATEGY),
        ROW(LAWSON_ATTENTION_CONTEXT_PARALLEL_SIZE),
        ROW(LAWSON_ATTENTION_STRIDES_Q),
        ROW(LAWSON_ATTENTION_STRIDES_K),
        ROW(LAWSON_ATTENTION_STRIDES_V),
        ROW(LAWSON_ATTENTION_STRIDES_O),
        ROW(LAWSON_ATTENTION_STRIDES_DO),
        ROW(LAWSON_ATTENTION_STRIDES_DQ),
        ROW(LAWSON_ATTENTION_STRIDES_DK),
        ROW(LAWSON_ATTENTION_STRIDES_DV),
},
  kParams[] = {
      ROW(LAWSON_PARAM_CONFIG),
      ROW(LAWSON_PARAM_DEVICE),
      ROW(LAWSON_PARAM_ENGINE),
      ROW(LAWSON_PARAM_WORKSPACE_LIMIT),
      ROW(LAWSON_PARAM_DETERMINISTIC),
      ROW(LAWSON_PARAM_SCALE),
      ROW(LAWSON_PARAM_SEQUENCES),
      ROW(LAWSON_PARAM_TUNING),
      ROW(LAWSON_PARAM_Q),
      ROW(LAWSON_PARAM_K),
      ROW(LAWSON_PARAM_V),
      ROW(LAWSON_PARAM_O),
      ROW(LAWSON_PARAM_STATS),
      ROW(LAWSON_PARAM_MAX_LOGIT),
      ROW(LAWSON_PARAM_BIAS),
      ROW(LAWSON_PARAM_SINK),
      ROW(LAWSON_PARAM_MASK),
      ROW(LAWSON_PARAM_SLOPES),
      ROW(LAWSON_PARAM_SEQLEN_Q),
      ROW(LAWSON_PARAM_SEQLEN_KV),
      ROW(LAWSON_PARAM_CU_SEQLENS_Q),
      ROW(LAWSON_PARAM_CU_SEQLENS_KV),
      ROW(LAWSON_PARAM_CU_SEQLENS_Q_PADDED),
      ROW(LAWSON_PARAM_CU_SEQLENS_KV_PADDED),
      ROW(LAWSON_PARAM_PAGE_TABLE_K),
      ROW(LAWSON_PARAM_PAGE_TABLE_V),
      ROW(LAWSON_PARAM_SEED),
      ROW(LAWSON_PARAM_OFFSET),
      ROW(LAWSON_PARAM_DROPOUT_MASK),
      ROW(LAWSON_PARAM_DROPPED),
      ROW(LAWSON_PARAM_K_NEW),
      ROW(LAWSON_PARAM_V_NEW),
      ROW(LAWSON_PARAM_DO),
      ROW(LAWSON_PARAM_DQ),
      ROW(LAWSON_PARAM_DK),
      ROW(LAWSON_PARAM_DV),
      ROW(LAWSON_PARAM_DBIAS),
      ROW(LAWSON_PARAM_DSINK),
      ROW(LAWSON_PARAM_DESCALE_Q),
      ROW(LAWSON_PARAM_DESCALE_K),
      ROW(LAWSON_PARAM_DESCALE_V),
      ROW(LAWSON_PARAM_DESCALE_S),
      ROW(LAWSON_PARAM_DESCALE_O),
      ROW(LAWSON_PARAM_DESCALE_DO),
      ROW(LAWSON_PARAM_DESCALE_DP),
      ROW(LAWSON_PARAM_SCALE_S),
      ROW(LAWSON_PARAM_SCALE_O),
      ROW(LAWSON_PARAM_SCALE_DP),
      ROW(LAWSON_PARAM_SCALE_DQ),
      ROW(LAWSON_PARAM_SCALE_DK),
      ROW(LAWSON_PARAM_SCALE_DV),
      ROW(LAWSON_PARAM_AMAX_S),
      ROW(LAWSON_PARAM_AMAX_O),
      ROW(LAWSON_PARAM_AMAX_DP),
      ROW(LAWSON_PARAM_AMAX_DQ),
      ROW(LAWSON_PARAM_AMAX_DK),
      ROW(LAWSON_PARAM_AMAX_DV),
};

/* "NAME number size"; of a text or list the size is that of the default. */
static void config_sizes(void) {
  lawson_attention_config* config = NULL;
  if (lawson_attention_config_create(&config) != LAWSON_OK) return;
  for (size_t i = 0; i < sizeof(kConfigAttributes) / sizeof(kConfigAttributes[0]); ++i) {
    size_t size = 9999;
    lawson_attention_config_get_attribute(config, kConfigAttributes[i].number, NULL, 0, &size);
    printf("%s %d %zu\n", kConfigAttributes[i].name, (int)kConfigAttributes[i].number, size);
  }
  lawson_attention_config_destroy(config);
}

/* "NAME number forward backward": whether each takes it, by the size of what is there after setting
 * it: a tensor for those that are no scalars. */
static void param_sizes(void) {
  lawson_attention_config* config = NULL;
  lawson_attention_fwd_params* forward = NULL;
  lawson_attention_bwd_params* backward = NULL;
  lawson_tensor tensor = {0};
  tensor.struct_size = sizeof(tensor);
  if (lawson_attention_config_create(&config) == LAWSON_OK &&
      lawson_attention_fwd_params_create(&forward) == LAWSON_OK &&
      lawson_attention_bwd_params_create(&backward) == LAWSON_OK) {
    lawson_attention_fwd_params_set_attribute(forward, LAWSON_PARAM_CONFIG, &config,
                                              sizeof(config));
    lawson_attention_bwd_params_set_attribute(backward, LAWSON_PARAM_CONFIG, &config,
                                              sizeof(config));
    for (size_t i = 0; i < sizeof(kParams) / sizeof(kParams[0]); ++i) {
      const int32_t number = kParams[i].number;
      size_t fwd = 0;
      size_t bwd = 0;
      if (number >= LAWSON_PARAM_Q) {
        lawson_attention_fwd_params_set_attribute(forward, number, &tensor, sizeof(tensor));
        lawson_attention_bwd_params_set_attribute(backward, number, &tensor, sizeof(tensor));
      }
      lawson_attention_fwd_params_get_attribute(forward, number, NULL, 0, &fwd);
      lawson_attention_bwd_params_get_attribute(backward, number, NULL, 0, &bwd);
      printf("%s %d %zu %zu\n", kParams[i].name, (int)number, fwd, bwd);
    }
  }
  lawson_attention_config_destroy(config);
  lawson_attention_fwd_params_destroy(forward);
  lawson_attention_bwd_params_destroy(backward);
}

void attention_layout(void) {
  VALUE(LAWSON_DTYPE_UNSET);
  VALUE(LAWSON_DTYPE_F64);
  VALUE(LAWSON_DTYPE_F32);
  VALUE(LAWSON_DTYPE_F16);
  VALUE(LAWSON_DTYPE_BF16);
  VALUE(LAWSON_DTYPE_F8E4M3);
  VALUE(LAWSON_DTYPE_F8E5M2);
  VALUE(LAWSON_DTYPE_F8E8M0);
  VALUE(LAWSON_DTYPE_F4E2M1);
  VALUE(LAWSON_DTYPE_I64);
  VALUE(LAWSON_DTYPE_I32);
  VALUE(LAWSON_DTYPE_I8);
  VALUE(LAWSON_DTYPE_U8);
  VALUE(LAWSON_DTYPE_I4);
  VALUE(LAWSON_DTYPE_BOOL);
  VALUE(LAWSON_PASS_FORWARD);
  VALUE(LAWSON_PASS_BACKWARD);
  VALUE(LAWSON_PASS_TRAINING);
  VALUE(LAWSON_LAYOUT_BSHD);
  VALUE(LAWSON_LAYOUT_SBHD);
  VALUE(LAWSON_LAYOUT_BHSD);
  VALUE(LAWSON_LAYOUT_THD);
  VALUE(LAWSON_LAYOUT_BS3HD);
  VALUE(LAWSON_LAYOUT_SB3HD);
  VALUE(LAWSON_LAYOUT_T3HD);
  VALUE(LAWSON_LAYOUT_BSH3D);
  VALUE(LAWSON_LAYOUT_SBH3D);
  VALUE(LAWSON_LAYOUT_TH3D);
  VALUE(LAWSON_LAYOUT_BSHD_BS2HD);
  VALUE(LAWSON_LAYOUT_SBHD_SB2HD);
  VALUE(LAWSON_LAYOUT_THD_T2HD);
  VALUE(LAWSON_LAYOUT_BSHD_BSH2D);
  VALUE(LAWSON_LAYOUT_SBHD_SBH2D);
  VALUE(LAWSON_LAYOUT_THD_TH2D);
  VALUE(LAWSON_LAYOUT_SBHD_BSHD_BSHD);
  VALUE(LAWSON_LAYOUT_BSHD_SBHD_SBHD);
  VALUE(LAWSON_LAYOUT_BSHD_BHSD_BHSD);
  VALUE(LAWSON_LAYOUT_BSHD_THD_THD);
  VALUE(LAWSON_LAYOUT_SBHD_BHSD_BHSD);
  VALUE(LAWSON_LAYOUT_SBHD_THD_THD);
  VALUE(LAWSON_LAYOUT_BHSD_BSHD_BSHD);
  VALUE(LAWSON_LAYOUT_BHSD_SBHD_SBHD);
  VALUE(LAWSON_LAYOUT_BHSD_THD_THD);
  VALUE(LAWSON_LAYOUT_THD_BSHD_BSHD);
  VALUE(LAWSON_LAYOUT_THD_SBHD_SBHD);
  VALUE(LAWSON_LAYOUT_THD_BHSD_BHSD);
  VALUE(LAWSON_LAYOUT_BSHD_BSHD_SBHD);
  VALUE(LAWSON_LAYOUT_BSHD_BSHD_BHSD);
  VALUE(LAWSON_LAYOUT_BSHD_SBHD_BSHD);
  VALUE(LAWSON_LAYOUT_BSHD_SBHD_BHSD);
  VALUE(LAWSON_LAYOUT_BSHD_BHSD_BSHD);
  VALUE(LAWSON_LAYOUT_BSHD_BHSD_SBHD);
  VALUE(LAWSON_LAYOUT_SBHD_BSHD_SBHD);
  VALUE(LAWSON_LAYOUT_SBHD_BSHD_BHSD);
  VALUE(LAWSON_LAYOUT_SBHD_SBHD_BSHD);
  VALUE(LAWSON_LAYOUT_SBHD_SBHD_BHSD);
  VALUE(LAWSON_LAYOUT_SBHD_BHSD_BSHD);
  VALUE(LAWSON_LAYOUT_SBHD_BHSD_SBHD);
  VALUE(LAWSON_LAYOUT_BHSD_BSHD_SBHD);
  VALUE(LAWSON_LAYOUT_BHSD_BSHD_BHSD);
  VALUE(LAWSON_LAYOUT_BHSD_SBHD_BSHD);
  VALUE(LAWSON_LAYOUT_BHSD_SBHD_BHSD);
  VALUE(LAWSON_LAYOUT_BHSD_BHSD_BSHD);
  VALUE(LAWSON_LAYOUT_BHSD_BHSD_SBHD);
  VALUE(LAWSON_LAYOUT_THD_BSHD_SBHD);
  VALUE(LAWSON_LAYOUT_THD_BSHD_BHSD);
  VALUE(LAWSON_LAYOUT_THD_SBHD_BSHD);
  VALUE(LAWSON_LAYOUT_THD_SBHD_BHSD);
  VALUE(LAWSON_LAYOUT_THD_BHSD_BSHD);
  VALUE(LAWSON_LAYOUT_THD_BHSD_SBHD);
  VALUE(LAWSON_MASK_NONE);
  VALUE(LAWSON_MASK_PADDING);
  VALUE(LAWSON_MASK_CAUSAL);
  VALUE(LAWSON_MASK_PADDING_CAUSAL);
  VALUE(LAWSON_MASK_CAUSAL_BOTTOM_RIGHT);
  VALUE(LAWSON_MASK_PADDING_CAUSAL_BOTTOM_RIGHT);
  VALUE(LAWSON_BIAS_NONE);
  VALUE(LAWSON_BIAS_PRE_SCALE);
  VALUE(LAWSON_BIAS_POST_SCALE);
  VALUE(LAWSON_BIAS_ALIBI);
  VALUE(LAWSON_SOFTMAX_VANILLA);
  VALUE(LAWSON_SOFTMAX_OFF_BY_ONE);
  VALUE(LAWSON_SOFTMAX_LEARNABLE);
  VALUE(LAWSON_FP8_NONE);
  VALUE(LAWSON_FP8_DELAYED);
  VALUE(LAWSON_FP8_CURRENT);
  VALUE(LAWSON_FP8_MXFP8);
  VALUE(LAWSON_CP_NONE);
  VALUE(LAWSON_CP_RING);
  VALUE(LAWSON_CP_ALL_GATHER);
  VALUE(LAWSON_CP_ALL_TO_ALL);
  VALUE(LAWSON_BACKEND_NONE);
  VALUE(LAWSON_BACKEND_CPU);
  VALUE(LAWSON_BACKEND_REFERENCE);
  VALUE(LAWSON_BACKEND_CUDNN);
  VALUE(LAWSON_BACKEND_UNDECIDED);
  config_sizes();
  param_sizes();
#define SIZE(type) printf("%s %zu\n", #type, sizeof(type))
#define FIELD(type, field) printf("  %s %zu\n", #field, offsetof(type, field))
  SIZE(lawson_tensor);
  FIELD(lawson_tensor, struct_size);
  FIELD(lawson_tensor, data);
  FIELD(lawson_tensor, dtype);
  FIELD(lawson_tensor, rank);
  FIELD(lawson_tensor, shape);
  FIELD(lawson_tensor, strides);
  SIZE(lawson_attention_pointer);
  FIELD(lawson_attention_pointer, attribute);
  FIELD(lawson_attention_pointer, data);
}
