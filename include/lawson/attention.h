/* Attention through handles: a config says what is computed, params say on which tensors.
 *
 * Part of lawson.h, whose rules hold here too. A config carries everything that selects a plan; the
 * forward and backward params carry tensors and run-time scalars. The verdict of a config
 * (lawson_attention_select), the graph, the key and the plan that runs all come from one
 * derivation.
 *
 * Attributes are set and read by number. A wrong size, a value outside an enum and an unknown
 * attribute are LAWSON_INVALID_ARGUMENT, with the attribute's name in the message. Single values
 * are checked when they are set, what they mean together where the config is used.
 *   set: copies `size` bytes from `value`.
 *   get: copies the value to `value`, of `capacity` bytes; `size_written` (may be NULL) gets its
 *        size. With `value` NULL only the size is given. Texts have no NUL at their end.
 * Value types: enum and flag int32_t, integer int64_t, number double, text char[], lists of int64_t
 * or double. A list of size 0 is "not set".
 *
 * A config or params handle may be read by several threads at once; setting is for one thread
 * alone.
 */
#ifndef LAWSON_ATTENTION_H_
#define LAWSON_ATTENTION_H_

#ifndef LAWSON_LAWSON_H_
#error "include lawson/lawson.h"
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Append-only, as all enums here. Unset: what the attribute's description says. */
typedef enum lawson_dtype {
  LAWSON_DTYPE_UNSET = 0,
  LAWSON_DTYPE_F64 = 1,
  LAWSON_DTYPE_F32 = 2,
  LAWSON_DTYPE_F16 = 3,
  LAWSON_DTYPE_BF16 = 4,
  LAWSON_DTYPE_F8E4M3 = 5,
  LAWSON_DTYPE_F8E5M2 = 6,
  LAWSON_DTYPE_F8E8M0 = 7,
  LAWSON_DTYPE_F4E2M1 = 8,
  LAWSON_DTYPE_I64 = 9,
  LAWSON_DTYPE_I32 = 10,
  LAWSON_DTYPE_I8 = 11,
  LAWSON_DTYPE_U8 = 12,
  LAWSON_DTYPE_I4 = 13,
  LAWSON_DTYPE_BOOL = 14
} lawson_dtype;

/* Training: forward and backward, and both must hold. */
typedef enum lawson_attention_pass {
  LAWSON_PASS_FORWARD = 0,
  LAWSON_PASS_BACKWARD = 1,
  LAWSON_PASS_TRAINING = 2
} lawson_attention_pass;

/* Order of the dims in memory, of q, k and v: docs/spec.md. */
typedef enum lawson_attention_layout {
  LAWSON_LAYOUT_BSHD = 1,
  LAWSON_LAYOUT_SBHD = 2,
  LAWSON_LAYOUT_BHSD = 3,
  LAWSON_LAYOUT_THD = 4,
  LAWSON_LAYOUT_BS3HD = 5,
  LAWSON_LAYOUT_SB3HD = 6,
  LAWSON_LAYOUT_T3HD = 7,
  LAWSON_LAYOUT_BSH3D = 8,
  LAWSON_LAYOUT_SBH3D = 9,
  LAWSON_LAYOUT_TH3D = 10,
  LAWSON_LAYOUT_BSHD_BS2HD = 11,
  LAWSON_LAYOUT_SBHD_SB2HD = 12,
  LAWSON_LAYOUT_THD_T2HD = 13,
  LAWSON_LAYOUT_BSHD_BSH2D = 14,
  LAWSON_LAYOUT_SBHD_SBH2D = 15,
  LAWSON_LAYOUT_THD_TH2D = 16,
  LAWSON_LAYOUT_SBHD_BSHD_BSHD = 17,
  LAWSON_LAYOUT_BSHD_SBHD_SBHD = 18,
  LAWSON_LAYOUT_BSHD_BHSD_BHSD = 19,
  LAWSON_LAYOUT_BSHD_THD_THD = 20,
  LAWSON_LAYOUT_SBHD_BHSD_BHSD = 21,
  LAWSON_LAYOUT_SBHD_THD_THD = 22,
  LAWSON_LAYOUT_BHSD_BSHD_BSHD = 23,
  LAWSON_LAYOUT_BHSD_SBHD_SBHD = 24,
  LAWSON_LAYOUT_BHSD_THD_THD = 25,
  LAWSON_LAYOUT_THD_BSHD_BSHD = 26,
  LAWSON_LAYOUT_THD_SBHD_SBHD = 27,
  LAWSON_LAYOUT_THD_BHSD_BHSD = 28,
  LAWSON_LAYOUT_BSHD_BSHD_SBHD = 29,
  LAWSON_LAYOUT_BSHD_BSHD_BHSD = 30,
  LAWSON_LAYOUT_BSHD_SBHD_BSHD = 31,
  LAWSON_LAYOUT_BSHD_SBHD_BHSD = 32,
  LAWSON_LAYOUT_BSHD_BHSD_BSHD = 33,
  LAWSON_LAYOUT_BSHD_BHSD_SBHD = 34,
  LAWSON_LAYOUT_SBHD_BSHD_SBHD = 35,
  LAWSON_LAYOUT_SBHD_BSHD_BHSD = 36,
  LAWSON_LAYOUT_SBHD_SBHD_BSHD = 37,
  LAWSON_LAYOUT_SBHD_SBHD_BHSD = 38,
  LAWSON_LAYOUT_SBHD_BHSD_BSHD = 39,
  LAWSON_LAYOUT_SBHD_BHSD_SBHD = 40,
  LAWSON_LAYOUT_BHSD_BSHD_SBHD = 41,
  LAWSON_LAYOUT_BHSD_BSHD_BHSD = 42,
  LAWSON_LAYOUT_BHSD_SBHD_BSHD = 43,
  LAWSON_LAYOUT_BHSD_SBHD_BHSD = 44,
  LAWSON_LAYOUT_BHSD_BHSD_BSHD = 45,
  LAWSON_LAYOUT_BHSD_BHSD_SBHD = 46,
  LAWSON_LAYOUT_THD_BSHD_SBHD = 47,
  LAWSON_LAYOUT_THD_BSHD_BHSD = 48,
  LAWSON_LAYOUT_THD_SBHD_BSHD = 49,
  LAWSON_LAYOUT_THD_SBHD_BHSD = 50,
  LAWSON_LAYOUT_THD_BHSD_BSHD = 51,
  LAWSON_LAYOUT_THD_BHSD_SBHD = 52
} lawson_attention_layout;

/* Padding: sequences have lengths of their own. Causal: docs/spec.md. */
typedef enum lawson_attention_mask {
  LAWSON_MASK_NONE = 0,
  LAWSON_MASK_PADDING = 1,
  LAWSON_MASK_CAUSAL = 2,
  LAWSON_MASK_PADDING_CAUSAL = 3,
  LAWSON_MASK_CAUSAL_BOTTOM_RIGHT = 4,
  LAWSON_MASK_PADDING_CAUSAL_BOTTOM_RIGHT = 5
} lawson_attention_mask;

/* What is added to the scores. */
typedef enum lawson_attention_bias {
  LAWSON_BIAS_NONE = 0,
  LAWSON_BIAS_PRE_SCALE = 1,
  LAWSON_BIAS_POST_SCALE = 2,
  LAWSON_BIAS_ALIBI = 3
} lawson_attention_bias;

/* The denominator: sum, 1 + sum, or exp(sink of the head) + sum. */
typedef enum lawson_attention_softmax {
  LAWSON_SOFTMAX_VANILLA = 0,
  LAWSON_SOFTMAX_OFF_BY_ONE = 1,
  LAWSON_SOFTMAX_LEARNABLE = 2
} lawson_attention_softmax;

/* How FP8 tensors are scaled. */
typedef enum lawson_fp8_recipe {
  LAWSON_FP8_NONE = 0,
  LAWSON_FP8_DELAYED = 1,
  LAWSON_FP8_CURRENT = 2,
  LAWSON_FP8_MXFP8 = 3
} lawson_fp8_recipe;

/* Context parallelism, which is judged and not executed. */
typedef enum lawson_cp_strategy {
  LAWSON_CP_NONE = 0,
  LAWSON_CP_RING = 1,
  LAWSON_CP_ALL_GATHER = 2,
  LAWSON_CP_ALL_TO_ALL = 3
} lawson_cp_strategy;

/* ---- config ---------------------------------------------------------------------------------- */

/* Attributes of a config: the fields of an attention spec (docs/spec.md), where a default is not
 * the natural one of the word. */
typedef enum lawson_attention_attribute {
  LAWSON_ATTENTION_NAME = 1,                 /* text, for messages; "attention" */
  LAWSON_ATTENTION_PASS = 2,                 /* lawson_attention_pass */
  LAWSON_ATTENTION_DTYPE = 3,                /* lawson_dtype of q, k and v; bf16 */
  LAWSON_ATTENTION_OUTPUT_DTYPE = 4,         /* lawson_dtype of o; unset: as q */
  LAWSON_ATTENTION_BATCH = 5,                /* integer; 1 */
  LAWSON_ATTENTION_HEADS = 6,                /* integer, required */
  LAWSON_ATTENTION_KV_HEADS = 7,             /* integer; 0: as heads */
  LAWSON_ATTENTION_SEQLEN_Q = 8,             /* integer, required: the longest sequence */
  LAWSON_ATTENTION_SEQLEN_KV = 9,            /* integer; -1: as seqlen_q */
  LAWSON_ATTENTION_HEAD_DIM_QK = 10,         /* integer, required */
  LAWSON_ATTENTION_HEAD_DIM_V = 11,          /* integer; 0: as head_dim_qk */
  LAWSON_ATTENTION_LAYOUT = 12,              /* lawson_attention_layout; bshd */
  LAWSON_ATTENTION_MASK = 13,                /* lawson_attention_mask */
  LAWSON_ATTENTION_WINDOW = 14,              /* 2 integers: left, right, inclusive; -1: none */
  LAWSON_ATTENTION_BIAS = 15,                /* lawson_attention_bias */
  LAWSON_ATTENTION_BIAS_SHAPE = 16,          /* 4 integers, each full or 1; [1,h,sq,skv] */
  LAWSON_ATTENTION_BIAS_DTYPE = 17,          /* lawson_dtype; unset: as q */
  LAWSON_ATTENTION_BIAS_GRAD = 18,           /* flag: backward gives dbias */
  LAWSON_ATTENTION_ATTN_MASK_DTYPE = 19,     /* lawson_dtype of a mask tensor; unset: none */
  LAWSON_ATTENTION_ATTN_MASK_SHAPE = 20,     /* 4 integers, each full or 1; [1,1,sq,skv] */
  LAWSON_ATTENTION_ALIBI_SLOPES = 21,        /* flag: the slopes are a tensor */
  LAWSON_ATTENTION_ALIBI_SLOPE_VALUES = 22,  /* numbers, one per head; for generated data */
  LAWSON_ATTENTION_SOFTMAX = 23,             /* lawson_attention_softmax */
  LAWSON_ATTENTION_SOFTCAP = 24,             /* number; 0: none */
  LAWSON_ATTENTION_DROPOUT = 25,             /* number in [0, 1) */
  LAWSON_ATTENTION_RETURN_DROPOUT_MASK = 26, /* flag: forward gives `dropped` */
  LAWSON_ATTENTION_DROPOUT_MASK = 27,        /* flag: the mask instead of seed and offset */
  LAWSON_ATTENTION_SCALE = 28,               /* number; NaN: 1 / sqrt(head_dim_qk) */
  LAWSON_ATTENTION_DETERMINISTIC = 29,       /* flag: backward gives the same bits each time */
  LAWSON_ATTENTION_RETURN_STATS = 30,        /* flag; always on in training */
  LAWSON_ATTENTION_RETURN_MAX_LOGIT = 31,    /* flag */
  LAWSON_ATTENTION_CUDA_GRAPH = 32,          /* flag: execution has to be capturable */
  LAWSON_ATTENTION_TOTAL_Q = 33,             /* integer: tokens of a ragged q; 0: b * sq */
  LAWSON_ATTENTION_TOTAL_KV = 34,            /* integer: tokens of ragged k, v; 0: b * skv */
  LAWSON_ATTENTION_SEQLENS_Q = 35,           /* integers, one per b; for generated data */
  LAWSON_ATTENTION_SEQLENS_KV = 36,          /* integers, one per b; for generated data */
  LAWSON_ATTENTION_SEQLENS_Q_PADDED = 37,    /* integers, one per b; for generated data */
  LAWSON_ATTENTION_SEQLENS_KV_PADDED = 38,   /* integers, one per b; for generated data */
  LAWSON_ATTENTION_PADDED_OFFSETS = 39,      /* flag: cu_seqlens_*_padded are tensors */
  LAWSON_ATTENTION_PAGE_SIZE_K = 40,         /* integer: tokens; 0: not paged */
  LAWSON_ATTENTION_PAGE_SIZE_V = 41,         /* integer: tokens; 0: as page_size_k */
  LAWSON_ATTENTION_PAGES = 42,               /* integer; 0: what batch sequences can fill */
  LAWSON_ATTENTION_APPEND = 43,              /* integer: new tokens per sequence, k_new, v_new */
  LAWSON_ATTENTION_FP8_RECIPE = 44,          /* lawson_fp8_recipe */
  LAWSON_ATTENTION_CONTEXT_PARALLEL_STRATEGY = 45, /* lawson_cp_strategy */
  LAWSON_ATTENTION_CONTEXT_PARALLEL_SIZE = 46,     /* integer: ranks; 0: none */
  LAWSON_ATTENTION_STRIDES_Q = 47,                 /* 4 integers, [b,h,s,d]; from the layout */
  LAWSON_ATTENTION_STRIDES_K = 48,
  LAWSON_ATTENTION_STRIDES_V = 49,
  LAWSON_ATTENTION_STRIDES_O = 50,
  LAWSON_ATTENTION_STRIDES_DO = 51,
  LAWSON_ATTENTION_STRIDES_DQ = 52,
  LAWSON_ATTENTION_STRIDES_DK = 53,
  LAWSON_ATTENTION_STRIDES_DV = 54
} lawson_attention_attribute;

typedef struct lawson_attention_config lawson_attention_config;

LAWSON_API lawson_status lawson_attention_config_create(lawson_attention_config** config);
LAWSON_API void lawson_attention_config_destroy(lawson_attention_config* config);
LAWSON_API lawson_status lawson_attention_config_set_attribute(lawson_attention_config* config,
                                                               int32_t attribute, const void* value,
                                                               size_t size);
LAWSON_API lawson_status
lawson_attention_config_get_attribute(const lawson_attention_config* config, int32_t attribute,
                                      void* value, size_t capacity, size_t* size_written);

/* From and to a spec document of kind "attention" (docs/spec.md); the text has every default filled
 * in, and is the form in which two configs are compared. `source` names the text in messages. */
LAWSON_API lawson_status lawson_attention_config_from_spec(const char* text, size_t size,
                                                           const char* source,
                                                           lawson_attention_config** config);
LAWSON_API lawson_status lawson_attention_config_spec(const lawson_attention_config* config,
                                                      lawson_text** json);
/* The graph of one pass: LAWSON_PASS_FORWARD or LAWSON_PASS_BACKWARD. */
LAWSON_API lawson_status lawson_graph_from_attention(const lawson_attention_config* config,
                                                     int32_t pass, lawson_graph** graph);

/* Judges the config: of a training config both passes, of a context-parallel one every distinct
 * step. Leaves the config as it is, allocates nothing on a device, and compiles nothing unless
 * options->strength asks for it. */
LAWSON_API lawson_status lawson_attention_select(const lawson_attention_config* config,
                                                 const lawson_device* device,
                                                 const lawson_options* options,
                                                 lawson_verdict** verdict);

/* ---- params ---------------------------------------------------------------------------------- */

/* A tensor in the caller's memory: device memory for a GPU, host memory for the CPU. Its address is
 * a multiple of 16 bytes. Shape and strides are those of the logical tensor, whatever its order in
 * memory: q, k, v, o and their gradients [b,h,s,d], ragged ones [1,h,tokens,d], pages
 * [pages,h,page_size,d]; for the others dims of size 1 may be left out. With rank 0 the config
 * alone says what the tensor is. */
typedef struct lawson_tensor {
  size_t struct_size;
  void* data;
  int32_t dtype; /* lawson_dtype */
  int32_t rank;
  int64_t shape[LAWSON_MAX_RANK];
  int64_t strides[LAWSON_MAX_RANK]; /* elements */
} lawson_tensor;

/* Attributes of forward params (F) and backward params (B). */
typedef enum lawson_attention_param {
  /* lawson_attention_config*: copied when it is set; later changes of the config stay without
   * effect here. get copies it into the existing config that `value` points to. */
  LAWSON_PARAM_CONFIG = 1,          /* F B */
  LAWSON_PARAM_DEVICE = 2,          /* F B lawson_device*, like the config; default: the host CPU */
  LAWSON_PARAM_ENGINE = 3,          /* F B text: as in lawson_options; empty: the device's */
  LAWSON_PARAM_WORKSPACE_LIMIT = 4, /* F B integer: as in lawson_options; -1: none */
  LAWSON_PARAM_DETERMINISTIC = 5,   /* F B flag: as in lawson_options */
  LAWSON_PARAM_SCALE = 6,           /* F B number; NaN: the config's. Selects no plan */
  LAWSON_PARAM_SEQUENCES = 7,       /* F B integer: sequences of a ragged batch; -1: the config's
                                       batch. Up to its bucket it selects no plan */
  LAWSON_PARAM_TUNING = 8,          /* F B integer: a lawson_tuning, as in lawson_options */
  /* lawson_tensor; shapes where no other is said above */
  LAWSON_PARAM_Q = 16,                    /* F B */
  LAWSON_PARAM_K = 17,                    /* F B; with append also written */
  LAWSON_PARAM_V = 18,                    /* F B; with append also written */
  LAWSON_PARAM_O = 19,                    /* F written, B */
  LAWSON_PARAM_STATS = 20,                /* F written, B; f32 (f64 where q is)
                                             [b,h,sq], ragged [1,h,tokens] */
  LAWSON_PARAM_MAX_LOGIT = 21,            /* F written; like stats */
  LAWSON_PARAM_BIAS = 22,                 /* F B; bias_shape */
  LAWSON_PARAM_SINK = 23,                 /* F B; f32 [h] */
  LAWSON_PARAM_MASK = 24,                 /* F B; attn_mask_shape */
  LAWSON_PARAM_SLOPES = 25,               /* F B; f32 [h] */
  LAWSON_PARAM_SEQLEN_Q = 26,             /* F B; i32 [b] */
  LAWSON_PARAM_SEQLEN_KV = 27,            /* F B; i32 [b] */
  LAWSON_PARAM_CU_SEQLENS_Q = 28,         /* F B; i32 [b+1] */
  LAWSON_PARAM_CU_SEQLENS_KV = 29,        /* F B; i32 [b+1] */
  LAWSON_PARAM_CU_SEQLENS_Q_PADDED = 30,  /* F B; i32 [b+1] */
  LAWSON_PARAM_CU_SEQLENS_KV_PADDED = 31, /* F B; i32 [b+1] */
  LAWSON_PARAM_PAGE_TABLE_K = 32,         /* F B; i32 [b, pages per sequence] */
  LAWSON_PARAM_PAGE_TABLE_V = 33,         /* F B; i32 [b, pages per sequence] */
  LAWSON_PARAM_SEED = 34,                 /* F B; i64 [1] */
  LAWSON_PARAM_OFFSET = 35,               /* F B; i64 [1] */
  LAWSON_PARAM_DROPOUT_MASK = 36,         /* F B; u8 [b,h,sq,skv] */
  LAWSON_PARAM_DROPPED = 37,              /* F written; u8 [b,h,sq,skv] */
  LAWSON_PARAM_K_NEW = 38,                /* F; [b,h,append,d] */
  LAWSON_PARAM_V_NEW = 39,                /* F; [b,h,append,d] */
  LAWSON_PARAM_DO = 40,                   /* B */
  LAWSON_PARAM_DQ = 41,                   /* B written */
  LAWSON_PARAM_DK = 42,                   /* B written */
  LAWSON_PARAM_DV = 43,                   /* B written */
  LAWSON_PARAM_DBIAS = 44,                /* B written; bias_shape */
  LAWSON_PARAM_DSINK = 45,                /* B written; f32 [h] */
  /* FP8: f32 [1]; MXFP8: the block scales. No plan of this version takes them. */
  LAWSON_PARAM_DESCALE_Q = 64,  /* F B */
  LAWSON_PARAM_DESCALE_K = 65,  /* F B */
  LAWSON_PARAM_DESCALE_V = 66,  /* F B */
  LAWSON_PARAM_DESCALE_S = 67,  /* F B */
  LAWSON_PARAM_DESCALE_O = 68,  /* B */
  LAWSON_PARAM_DESCALE_DO = 69, /* B */
  LAWSON_PARAM_DESCALE_DP = 70, /* B */
  LAWSON_PARAM_SCALE_S = 71,    /* F B */
  LAWSON_PARAM_SCALE_O = 72,    /* F */
  LAWSON_PARAM_SCALE_DP = 73,   /* B */
  LAWSON_PARAM_SCALE_DQ = 74,   /* B */
  LAWSON_PARAM_SCALE_DK = 75,   /* B */
  LAWSON_PARAM_SCALE_DV = 76,   /* B */
  LAWSON_PARAM_AMAX_S = 77,     /* F written */
  LAWSON_PARAM_AMAX_O = 78,     /* F written */
  LAWSON_PARAM_AMAX_DP = 79,    /* B written */
  LAWSON_PARAM_AMAX_DQ = 80,    /* B written */
  LAWSON_PARAM_AMAX_DK = 81,    /* B written */
  LAWSON_PARAM_AMAX_DV = 82     /* B written */
} lawson_attention_param;

/* For calls with the same tensors at new addresses: no description is read or checked again. */
typedef struct lawson_attention_pointer {
  int32_t attribute; /* lawson_attention_param */
  void* data;
} lawson_attention_pointer;

typedef struct lawson_attention_fwd_params lawson_attention_fwd_params;
typedef struct lawson_attention_bwd_params lawson_attention_bwd_params;

LAWSON_API lawson_status lawson_attention_fwd_params_create(lawson_attention_fwd_params** params);
LAWSON_API void lawson_attention_fwd_params_destroy(lawson_attention_fwd_params* params);
/* A tensor is taken away again by setting it with size 0. */
LAWSON_API lawson_status lawson_attention_fwd_params_set_attribute(
    lawson_attention_fwd_params* params, int32_t attribute, const void* value, size_t size);
/* Of a tensor that is not set, the size is 0. */
LAWSON_API lawson_status lawson_attention_fwd_params_get_attribute(
    const lawson_attention_fwd_params* params, int32_t attribute, void* value, size_t capacity,
    size_t* size_written);
/* All or nothing; each tensor has to be set already. */
LAWSON_API lawson_status lawson_attention_fwd_params_set_pointers(
    lawson_attention_fwd_params* params, const lawson_attention_pointer* pointers, size_t count);
/* A config from the tensors: types, sizes, layout or strides, which optional tensors there are.
 * What tensors do not say (window, dropout, ...) is the params' config's, or the default. */
LAWSON_API lawson_status lawson_attention_fwd_params_derive(
    const lawson_attention_fwd_params* params, lawson_attention_config** config);
/* The plan that a call with these params runs, loaded; built unless the process has it. */
LAWSON_API lawson_status lawson_attention_fwd_params_plan(const lawson_attention_fwd_params* params,
                                                          lawson_plan** plan);
/* Bytes, of that plan: exact. */
LAWSON_API lawson_status
lawson_attention_fwd_params_workspace_size(const lawson_attention_fwd_params* params, size_t* size);

LAWSON_API lawson_status lawson_attention_bwd_params_create(lawson_attention_bwd_params** params);
LAWSON_API void lawson_attention_bwd_params_destroy(lawson_attention_bwd_params* params);
LAWSON_API lawson_status lawson_attention_bwd_params_set_attribute(
    lawson_attention_bwd_params* params, int32_t attribute, const void* value, size_t size);
LAWSON_API lawson_status lawson_attention_bwd_params_get_attribute(
    const lawson_attention_bwd_params* params, int32_t attribute, void* value, size_t capacity,
    size_t* size_written);
LAWSON_API lawson_status lawson_attention_bwd_params_set_pointers(
    lawson_attention_bwd_params* params, const lawson_attention_pointer* pointers, size_t count);
LAWSON_API lawson_status lawson_attention_bwd_params_derive(
    const lawson_attention_bwd_params* params, lawson_attention_config** config);
LAWSON_API lawson_status lawson_attention_bwd_params_plan(const lawson_attention_bwd_params* params,
                                                          lawson_plan** plan);
LAWSON_API lawson_status
lawson_attention_bwd_params_workspace_size(const lawson_attention_bwd_params* params, size_t* size);

/* Runs on `stream` (a CUstream; NULL: the default stream), asynchronously on a GPU. The config is
 * the params' own, or without one derived from the tensors; every tensor has to be as it says. The
 * first call builds the plan, which the process keeps; while `stream` captures, that is
 * LAWSON_INVALID_ARGUMENT. LAWSON_UNSUPPORTED with every reason in the message where there is no
 * plan. A workspace that is too small, misaligned (16 bytes) or NULL when needed is an error. */
LAWSON_API lawson_status lawson_attention_forward(const lawson_attention_fwd_params* params,
                                                  void* workspace, size_t workspace_size,
                                                  void* stream);
LAWSON_API lawson_status lawson_attention_backward(const lawson_attention_bwd_params* params,
                                                   void* workspace, size_t workspace_size,
                                                   void* stream);

#ifdef __cplusplus
}
#endif

#endif /* LAWSON_ATTENTION_H_ */
