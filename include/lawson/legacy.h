/* The flat calls of fused attention as users know them, over the handles of attention.h: the same
 * plan, the same result. For programs that are being moved; new ones take the handles, whose
 * attributes grow without breaking a caller.
 *
 * Tensors are lawson_tensor pointers, NULL where there is none; sizes and types are read off them.
 * `device` NULL: the host CPU. Enum arguments are int32_t: lawson_dtype, lawson_attention_layout,
 * lawson_attention_bias, lawson_attention_mask, lawson_attention_softmax.
 */
#ifndef LAWSON_LEGACY_H_
#define LAWSON_LEGACY_H_

#include <lawson/lawson.h>

#define LAWSON_DEPRECATED(instead) __attribute__((deprecated("use " instead)))

#ifdef __cplusplus
extern "C" {
#endif

typedef enum lawson_legacy_backend {
  LAWSON_BACKEND_NONE = 0, /* not supported; the verdict says why */
  LAWSON_BACKEND_CPU = 1,
  LAWSON_BACKEND_REFERENCE = 2,
  LAWSON_BACKEND_CUDNN = 3,
  LAWSON_BACKEND_UNDECIDED = 4 /* needs the live device to answer */
} lawson_legacy_backend;

/* Which engine runs such an attention. Training asks for forward and backward. `batch` is part of
 * the question and has to be at least 1: an answer for another batch is another answer. `verdict`
 * may be NULL. */
LAWSON_API lawson_status lawson_legacy_attention_backend(
    int32_t is_training, int32_t q_dtype, int32_t kv_dtype, int32_t layout, int32_t bias,
    int32_t mask, int32_t softmax, double dropout, int64_t batch, int64_t heads, int64_t kv_heads,
    int64_t max_seqlen_q, int64_t max_seqlen_kv, int64_t head_dim_qk, int64_t head_dim_v,
    int64_t window_left, int64_t window_right, int32_t return_max_logit, int32_t cuda_graph,
    int32_t deterministic, const lawson_device* device, int32_t* backend, lawson_verdict** verdict)
    LAWSON_DEPRECATED("lawson_attention_select");

/* `workspace` NULL: only `*workspace_size` is written, at least 1. The padding masks of dense
 * layouts take seqlen_q and seqlen_kv, ragged layouts cu_seqlens. `stats` goes with is_training. */
LAWSON_API lawson_status lawson_legacy_attention_forward(
    const lawson_tensor* q, const lawson_tensor* k, const lawson_tensor* v,
    const lawson_tensor* bias_tensor, const lawson_tensor* sink, const lawson_tensor* o,
    const lawson_tensor* stats, const lawson_tensor* max_logit, const lawson_tensor* seqlen_q,
    const lawson_tensor* seqlen_kv, const lawson_tensor* cu_seqlens_q,
    const lawson_tensor* cu_seqlens_kv, const lawson_tensor* cu_seqlens_q_padded,
    const lawson_tensor* cu_seqlens_kv_padded, const lawson_tensor* page_table_k,
    const lawson_tensor* page_table_v, const lawson_tensor* seed, const lawson_tensor* offset,
    int64_t max_seqlen_q, int64_t max_seqlen_kv, int32_t is_training, int32_t cuda_graph,
    double scale, double dropout, int32_t layout, int32_t bias, int32_t mask, int32_t softmax,
    int64_t window_left, int64_t window_right, const lawson_device* device, void* workspace,
    size_t* workspace_size, void* stream) LAWSON_DEPRECATED("lawson_attention_forward");

/* Of a forward with is_training. */
LAWSON_API lawson_status lawson_legacy_attention_backward(
    const lawson_tensor* q, const lawson_tensor* k, const lawson_tensor* v, const lawson_tensor* o,
    const lawson_tensor* dout, const lawson_tensor* stats, const lawson_tensor* bias_tensor,
    const lawson_tensor* sink, const lawson_tensor* dq, const lawson_tensor* dk,
    const lawson_tensor* dv, const lawson_tensor* dbias, const lawson_tensor* dsink,
    const lawson_tensor* seqlen_q, const lawson_tensor* seqlen_kv,
    const lawson_tensor* cu_seqlens_q, const lawson_tensor* cu_seqlens_kv,
    const lawson_tensor* cu_seqlens_q_padded, const lawson_tensor* cu_seqlens_kv_padded,
    const lawson_tensor* seed, const lawson_tensor* offset, int64_t max_seqlen_q,
    int64_t max_seqlen_kv, int32_t deterministic, int32_t cuda_graph, double scale, double dropout,
    int32_t layout, int32_t bias, int32_t mask, int32_t softmax, int64_t window_left,
    int64_t window_right, const lawson_device* device, void* workspace, size_t* workspace_size,
    void* stream) LAWSON_DEPRECATED("lawson_attention_backward");

#ifdef __cplusplus
}
#endif

#endif /* LAWSON_LEGACY_H_ */
