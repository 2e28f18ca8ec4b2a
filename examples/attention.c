/* Plain C: one causal attention forward and backward on the host CPU, through the handles. The
 * config is judged first; what runs is the plan of that verdict.
 * Exit 0: ran, and the plan is the one that was judged. */
#include <lawson/lawson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kBatch = 2, kHeads = 4, kKvHeads = 2, kLength = 48, kDim = 16 };
enum { kQ = kBatch * kLength * kHeads * kDim, kKv = kBatch * kLength * kKvHeads * kDim };

/* 16-byte alignment is what the library asks of a tensor's address. */
static _Alignas(64) float q[kQ], k[kKv], v[kKv], o[kQ], grad_o[kQ], dq[kQ], dk[kKv], dv[kKv];
static _Alignas(64) float stats[kBatch * kHeads * kLength];

static void check(lawson_status status) {
  if (status == LAWSON_OK) return;
  fprintf(stderr, "%s: %s\n", lawson_status_string(status), lawson_last_error_message());
  exit(3);
}

/* [example: config] */
static lawson_attention_config* make_config(void) {
  const struct {
    int32_t attribute;
    int64_t value;
  } sizes[] = {{LAWSON_ATTENTION_BATCH, kBatch},
               {LAWSON_ATTENTION_HEADS, kHeads},
               {LAWSON_ATTENTION_KV_HEADS, kKvHeads},
               {LAWSON_ATTENTION_SEQLEN_Q, kLength},
               {LAWSON_ATTENTION_HEAD_DIM_QK, kDim}};
  const struct {
    int32_t attribute;
    int32_t value;
  } words[] = {{LAWSON_ATTENTION_PASS, LAWSON_PASS_TRAINING},
               {LAWSON_ATTENTION_DTYPE, LAWSON_DTYPE_F32},
               {LAWSON_ATTENTION_LAYOUT, LAWSON_LAYOUT_BSHD},
               {LAWSON_ATTENTION_MASK, LAWSON_MASK_CAUSAL}};
  lawson_attention_config* config = NULL;
  check(lawson_attention_config_create(&config));
  for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); ++i) {
    check(lawson_attention_config_set_attribute(config, sizes[i].attribute, &sizes[i].value,
                                                sizeof(sizes[i].value)));
  }
  for (size_t i = 0; i < sizeof(words) / sizeof(words[0]); ++i) {
    check(lawson_attention_config_set_attribute(config, words[i].attribute, &words[i].value,
                                                sizeof(words[i].value)));
  }
  return config;
}
/* [example: end] */

/* [example: forward] */
static lawson_attention_fwd_params* make_forward(const lawson_attention_config* config) {
  /* No shapes: the config says what lies there. */
  const struct {
    int32_t attribute;
    void* data;
  } tensors[] = {{LAWSON_PARAM_Q, q},
                 {LAWSON_PARAM_K, k},
                 {LAWSON_PARAM_V, v},
                 {LAWSON_PARAM_O, o},
                 {LAWSON_PARAM_STATS, stats}};
  lawson_attention_fwd_params* params = NULL;
  check(lawson_attention_fwd_params_create(&params));
  check(lawson_attention_fwd_params_set_attribute(params, LAWSON_PARAM_CONFIG, &config,
                                                  sizeof(config)));
  for (size_t i = 0; i < sizeof(tensors) / sizeof(tensors[0]); ++i) {
    const lawson_tensor tensor = {.struct_size = sizeof(tensor), .data = tensors[i].data};
    check(lawson_attention_fwd_params_set_attribute(params, tensors[i].attribute, &tensor,
                                                    sizeof(tensor)));
  }
  return params;
}
/* [example: end] */

static lawson_attention_bwd_params* make_backward(const lawson_attention_config* config) {
  const struct {
    int32_t attribute;
    void* data;
  } tensors[] = {{LAWSON_PARAM_Q, q},   {LAWSON_PARAM_K, k},       {LAWSON_PARAM_V, v},
                 {LAWSON_PARAM_O, o},   {LAWSON_PARAM_DO, grad_o}, {LAWSON_PARAM_STATS, stats},
                 {LAWSON_PARAM_DQ, dq}, {LAWSON_PARAM_DK, dk},     {LAWSON_PARAM_DV, dv}};
  lawson_attention_bwd_params* params = NULL;
  check(lawson_attention_bwd_params_create(&params));
  check(lawson_attention_bwd_params_set_attribute(params, LAWSON_PARAM_CONFIG, &config,
                                                  sizeof(config)));
  for (size_t i = 0; i < sizeof(tensors) / sizeof(tensors[0]); ++i) {
    const lawson_tensor tensor = {.struct_size = sizeof(tensor), .data = tensors[i].data};
    check(lawson_attention_bwd_params_set_attribute(params, tensors[i].attribute, &tensor,
                                                    sizeof(tensor)));
  }
  return params;
}

int main(void) {
  for (int i = 0; i < kQ; ++i) q[i] = sinf((float)i), grad_o[i] = cosf((float)(3 * i));
  for (int i = 0; i < kKv; ++i) k[i] = sinf((float)(7 * i)), v[i] = cosf((float)i);

  lawson_device* device = NULL;
  lawson_verdict* verdict = NULL;
  lawson_attention_config* config = make_config();
  check(lawson_device_find("cpu", &device));
  check(lawson_attention_select(config, device, NULL, &verdict));
  for (size_t i = 0; i < lawson_verdict_reason_count(verdict); ++i) {
    printf("%s\n", lawson_verdict_reason_message(verdict, i));
  }
  if (lawson_verdict_decision(verdict) != LAWSON_SUPPORTED) return 1;

  /* [example: run] */
  lawson_attention_fwd_params* fwd = make_forward(config);
  lawson_attention_bwd_params* bwd = make_backward(config);
  size_t fwd_size = 0;
  size_t bwd_size = 0;
  check(lawson_attention_fwd_params_workspace_size(fwd, &fwd_size));
  check(lawson_attention_bwd_params_workspace_size(bwd, &bwd_size));
  const size_t size = fwd_size > bwd_size ? fwd_size : bwd_size;
  void* workspace = aligned_alloc(64, (size / 64 + 1) * 64);
  check(lawson_attention_forward(fwd, workspace, fwd_size, NULL));
  check(lawson_attention_backward(bwd, workspace, bwd_size, NULL));
  /* [example: end] */

  lawson_plan* plan = NULL;
  check(lawson_attention_fwd_params_plan(fwd, &plan));
  printf("plan %s of engine %s\n", lawson_plan_id(plan), lawson_plan_engine(plan));
  lawson_text* json = NULL;
  check(lawson_verdict_json(verdict, &json));
  const int judged = strstr(lawson_text_data(json), lawson_plan_id(plan)) != NULL;
  /* The first row sees one column only: its output is v's first row. */
  const int right = fabsf(o[0] - v[0]) < 1e-6F && isfinite(dq[0]) && dv[0] != 0;
  printf("%s\n", judged && right ? "the plan that was judged, with the right result" : "wrong");

  lawson_text_destroy(json);
  lawson_plan_destroy(plan);
  free(workspace);
  lawson_attention_fwd_params_destroy(fwd);
  lawson_attention_bwd_params_destroy(bwd);
  lawson_attention_config_destroy(config);
  lawson_verdict_destroy(verdict);
  lawson_device_destroy(device);
  return judged && right ? 0 : 1;
}
