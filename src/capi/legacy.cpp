// The flat calls: their arguments become a config and params, and those do the work.
#include "lawson/legacy.h"

#include <initializer_list>
#include <utility>

#include "capi/attention.h"
#include "capi/guard.h"
#include "capi/handles.h"

namespace lawson::capi {
namespace {

// Arguments that say what a config says, whose names in messages are the attributes'.
class FlatConfig {
 public:
  FlatConfig& word(std::int32_t attribute, std::int32_t value) { return set(attribute, value); }
  FlatConfig& flag(std::int32_t attribute, std::int32_t value) {
    return set(attribute, std::int32_t{value != 0});
  }
  FlatConfig& integer(std::int32_t attribute, std::int64_t value) { return set(attribute, value); }
  FlatConfig& number(std::int32_t attribute, double value) { return set(attribute, value); }
  FlatConfig& window(std::int64_t left, std::int64_t right) {
    const std::array<std::int64_t, 2> bounds{left, right};
    return set(LAWSON_ATTENTION_WINDOW, bounds);
  }

  Result<Json> take() {
    if (!status_.ok()) return std::move(status_).error();
    return std::move(document_);
  }

 private:
  template <typename T>
  FlatConfig& set(std::int32_t attribute, const T& value) {
    if (status_.ok()) status_ = set_config_attribute(document_, attribute, &value, sizeof(value));
    return *this;
  }

  Json document_ = empty_attention_document();
  Status status_;
};

std::int32_t pass_of(std::int32_t is_training) {
  return is_training != 0 ? LAWSON_PASS_TRAINING : LAWSON_PASS_FORWARD;
}

using TensorArgument = std::pair<std::int32_t, const lawson_tensor*>;

// The tensors' own config, over the arguments' one, becomes the params' config. What the arguments
// state the tensors may not contradict.
Status fill(AttentionParams& params, const Json& config, double scale, const lawson_device* device,
            std::initializer_list<TensorArgument> tensors) {
  if (device != nullptr) set_device(params, *device);
  LAWSON_CHECK(set_param(params, LAWSON_PARAM_SCALE, &scale, sizeof(scale)));
  for (const auto& [attribute, tensor] : tensors) {
    if (tensor == nullptr) continue;
    if (tensor->struct_size == 0) {
      return invalid("a tensor's struct_size is 0; set it to sizeof(lawson_tensor)");
    }
    LAWSON_CHECK(set_param(params, attribute, tensor, tensor->struct_size));
  }
  params.config = config;
  LAWSON_TRY(Json derived, derive(params));
  for (const char* stated : {"layout", "bias", "mask", "softmax", "seqlen_q", "seqlen_kv"}) {
    if (!config.contains(stated) || derived.at(stated) == config.at(stated)) continue;
    return invalid("argument '{}': {} was given, and the tensors say {}", stated,
                   config.at(stated).dump(), derived.at(stated).dump());
  }
  params.config = std::move(derived);
  return {};
}

Status size_or_run(const AttentionParams& params, void* workspace, std::size_t* workspace_size,
                   void* stream) {
  LAWSON_CHECK(require(workspace_size, "workspace_size"));
  LAWSON_TRY(plan::Planner * planner, capi::planner());
  if (workspace != nullptr) return run(params, *planner, workspace, *workspace_size, stream);
  LAWSON_TRY(const auto loaded, plan_of(params, *planner, stream));
  // Never 0, so that NULL is always a question.
  *workspace_size =
      static_cast<std::size_t>(std::max<std::int64_t>(1, loaded->plan().workspace_bytes));
  return {};
}

std::int32_t backend_of(const Verdict& verdict) {
  if (verdict.decision == Decision::undecided) return LAWSON_BACKEND_UNDECIDED;
  if (verdict.decision == Decision::unsupported) return LAWSON_BACKEND_NONE;
  if (verdict.engine == "cpu") return LAWSON_BACKEND_CPU;
  return verdict.engine == "cudnn" ? LAWSON_BACKEND_CUDNN : LAWSON_BACKEND_REFERENCE;
}

}  // namespace
}  // namespace lawson::capi

using namespace lawson;
using namespace lawson::capi;

extern "C" {

lawson_status lawson_legacy_attention_backend(
    int32_t is_training, int32_t q_dtype, int32_t kv_dtype, int32_t layout, int32_t bias,
    int32_t mask, int32_t softmax, double dropout, int64_t batch, int64_t heads, int64_t kv_heads,
    int64_t max_seqlen_q, int64_t max_seqlen_kv, int64_t head_dim_qk, int64_t head_dim_v,
    int64_t window_left, int64_t window_right, int32_t return_max_logit, int32_t cuda_graph,
    int32_t deterministic, const lawson_device* device, int32_t* backend,
    lawson_verdict** verdict) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(backend, "backend"));
    if (q_dtype != kv_dtype) {
      return invalid("argument 'kv_dtype': {} is not allowed; q, k and v have one type, {}",
                     kv_dtype, q_dtype);
    }
    if (batch < 1) {
      return invalid("argument 'batch': {} is not allowed; the verdict is for one batch size",
                     batch);
    }
    LAWSON_TRY(const Json config, FlatConfig()
                                      .word(LAWSON_ATTENTION_PASS, pass_of(is_training))
                                      .word(LAWSON_ATTENTION_DTYPE, q_dtype)
                                      .word(LAWSON_ATTENTION_LAYOUT, layout)
                                      .word(LAWSON_ATTENTION_BIAS, bias)
                                      .word(LAWSON_ATTENTION_MASK, mask)
                                      .word(LAWSON_ATTENTION_SOFTMAX, softmax)
                                      .number(LAWSON_ATTENTION_DROPOUT, dropout)
                                      .integer(LAWSON_ATTENTION_BATCH, batch)
                                      .integer(LAWSON_ATTENTION_HEADS, heads)
                                      .integer(LAWSON_ATTENTION_KV_HEADS, kv_heads)
                                      .integer(LAWSON_ATTENTION_SEQLEN_Q, max_seqlen_q)
                                      .integer(LAWSON_ATTENTION_SEQLEN_KV, max_seqlen_kv)
                                      .integer(LAWSON_ATTENTION_HEAD_DIM_QK, head_dim_qk)
                                      .integer(LAWSON_ATTENTION_HEAD_DIM_V, head_dim_v)
                                      .window(window_left, window_right)
                                      .flag(LAWSON_ATTENTION_RETURN_MAX_LOGIT, return_max_logit)
                                      .flag(LAWSON_ATTENTION_CUDA_GRAPH, cuda_graph)
                                      .flag(LAWSON_ATTENTION_DETERMINISTIC, deterministic)
                                      .take());
    LAWSON_TRY(plan::Planner * planner, capi::planner());
    const Device where = device == nullptr ? cpu_device() : device->device;
    LAWSON_TRY(SpecVerdict judged, select(config, where, {}, *planner));
    const std::int32_t answer = backend_of(judged.verdict);
    if (verdict != nullptr) {
      *verdict = make_verdict_handle(std::move(judged)).release();
    }
    *backend = answer;
    return {};
  });
}

lawson_status lawson_legacy_attention_forward(
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
    size_t* workspace_size, void* stream) {
  return guard([&]() -> Status {
    LAWSON_TRY(const Json config, FlatConfig()
                                      .word(LAWSON_ATTENTION_PASS, pass_of(is_training))
                                      .word(LAWSON_ATTENTION_LAYOUT, layout)
                                      .word(LAWSON_ATTENTION_BIAS, bias)
                                      .word(LAWSON_ATTENTION_MASK, mask)
                                      .word(LAWSON_ATTENTION_SOFTMAX, softmax)
                                      .number(LAWSON_ATTENTION_DROPOUT, dropout)
                                      .integer(LAWSON_ATTENTION_SEQLEN_Q, max_seqlen_q)
                                      .integer(LAWSON_ATTENTION_SEQLEN_KV, max_seqlen_kv)
                                      .window(window_left, window_right)
                                      .flag(LAWSON_ATTENTION_CUDA_GRAPH, cuda_graph)
                                      .take());
    AttentionParams params(front::Pass::forward);
    LAWSON_CHECK(fill(params, config, scale, device,
                      {{LAWSON_PARAM_Q, q},
                       {LAWSON_PARAM_K, k},
                       {LAWSON_PARAM_V, v},
                       {LAWSON_PARAM_BIAS, bias_tensor},
                       {LAWSON_PARAM_SINK, sink},
                       {LAWSON_PARAM_O, o},
                       {LAWSON_PARAM_STATS, stats},
                       {LAWSON_PARAM_MAX_LOGIT, max_logit},
                       {LAWSON_PARAM_SEQLEN_Q, seqlen_q},
                       {LAWSON_PARAM_SEQLEN_KV, seqlen_kv},
                       {LAWSON_PARAM_CU_SEQLENS_Q, cu_seqlens_q},
                       {LAWSON_PARAM_CU_SEQLENS_KV, cu_seqlens_kv},
                       {LAWSON_PARAM_CU_SEQLENS_Q_PADDED, cu_seqlens_q_padded},
                       {LAWSON_PARAM_CU_SEQLENS_KV_PADDED, cu_seqlens_kv_padded},
                       {LAWSON_PARAM_PAGE_TABLE_K, page_table_k},
                       {LAWSON_PARAM_PAGE_TABLE_V, page_table_v},
                       {LAWSON_PARAM_SEED, seed},
                       {LAWSON_PARAM_OFFSET, offset}}));
    return size_or_run(params, workspace, workspace_size, stream);
  });
}

lawson_status lawson_legacy_attention_backward(
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
    void* stream) {
  return guard([&]() -> Status {
    LAWSON_TRY(const Json config, FlatConfig()
                                      .word(LAWSON_ATTENTION_PASS, LAWSON_PASS_TRAINING)
                                      .word(LAWSON_ATTENTION_LAYOUT, layout)
                                      .word(LAWSON_ATTENTION_BIAS, bias)
                                      .word(LAWSON_ATTENTION_MASK, mask)
                                      .word(LAWSON_ATTENTION_SOFTMAX, softmax)
                                      .number(LAWSON_ATTENTION_DROPOUT, dropout)
                                      .integer(LAWSON_ATTENTION_SEQLEN_Q, max_seqlen_q)
                                      .integer(LAWSON_ATTENTION_SEQLEN_KV, max_seqlen_kv)
                                      .window(window_left, window_right)
                                      .flag(LAWSON_ATTENTION_CUDA_GRAPH, cuda_graph)
                                      .flag(LAWSON_ATTENTION_DETERMINISTIC, deterministic)
                                      .take());
    AttentionParams params(front::Pass::backward);
    LAWSON_CHECK(fill(params, config, scale, device,
                      {{LAWSON_PARAM_Q, q},
                       {LAWSON_PARAM_K, k},
                       {LAWSON_PARAM_V, v},
                       {LAWSON_PARAM_O, o},
                       {LAWSON_PARAM_DO, dout},
                       {LAWSON_PARAM_STATS, stats},
                       {LAWSON_PARAM_BIAS, bias_tensor},
                       {LAWSON_PARAM_SINK, sink},
                       {LAWSON_PARAM_DQ, dq},
                       {LAWSON_PARAM_DK, dk},
                       {LAWSON_PARAM_DV, dv},
                       {LAWSON_PARAM_DBIAS, dbias},
                       {LAWSON_PARAM_DSINK, dsink},
                       {LAWSON_PARAM_SEQLEN_Q, seqlen_q},
                       {LAWSON_PARAM_SEQLEN_KV, seqlen_kv},
                       {LAWSON_PARAM_CU_SEQLENS_Q, cu_seqlens_q},
                       {LAWSON_PARAM_CU_SEQLENS_KV, cu_seqlens_kv},
                       {LAWSON_PARAM_CU_SEQLENS_Q_PADDED, cu_seqlens_q_padded},
                       {LAWSON_PARAM_CU_SEQLENS_KV_PADDED, cu_seqlens_kv_padded},
                       {LAWSON_PARAM_SEED, seed},
                       {LAWSON_PARAM_OFFSET, offset}}));
    return size_or_run(params, workspace, workspace_size, stream);
  });
}

}  // extern "C"
