// Forward and backward params: named tensors, run-time scalars, and where to run.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "capi/attention.h"
#include "capi/guard.h"
#include "capi/handles.h"

namespace lawson::capi {
namespace {

using Kind = ValueKind;

constexpr unsigned kForward = 1;
constexpr unsigned kBackward = 2;
constexpr unsigned kBoth = kForward | kBackward;

constexpr std::array<TensorAttribute, kTensorCount> kTensors{{
    {LAWSON_PARAM_Q, "q", kBoth},
    {LAWSON_PARAM_K, "k", kBoth},
    {LAWSON_PARAM_V, "v", kBoth},
    {LAWSON_PARAM_O, "o", kBoth},
    {LAWSON_PARAM_STATS, "stats", kBoth},
    {LAWSON_PARAM_MAX_LOGIT, "max_logit", kForward},
    {LAWSON_PARAM_BIAS, "bias", kBoth},
    {LAWSON_PARAM_SINK, "sink", kBoth},
    {LAWSON_PARAM_MASK, "mask", kBoth},
    {LAWSON_PARAM_SLOPES, "slopes", kBoth},
    {LAWSON_PARAM_SEQLEN_Q, "seqlen_q", kBoth},
    {LAWSON_PARAM_SEQLEN_KV, "seqlen_kv", kBoth},
    {LAWSON_PARAM_CU_SEQLENS_Q, "cu_seqlens_q", kBoth},
    {LAWSON_PARAM_CU_SEQLENS_KV, "cu_seqlens_kv", kBoth},
    {LAWSON_PARAM_CU_SEQLENS_Q_PADDED, "cu_seqlens_q_padded", kBoth},
    {LAWSON_PARAM_CU_SEQLENS_KV_PADDED, "cu_seqlens_kv_padded", kBoth},
    {LAWSON_PARAM_PAGE_TABLE_K, "page_table_k", kBoth},
    {LAWSON_PARAM_PAGE_TABLE_V, "page_table_v", kBoth},
    {LAWSON_PARAM_SEED, "seed", kBoth},
    {LAWSON_PARAM_OFFSET, "offset", kBoth},
    {LAWSON_PARAM_DROPOUT_MASK, "dropout_mask", kBoth},
    {LAWSON_PARAM_DROPPED, "dropped", kForward},
    {LAWSON_PARAM_K_NEW, "k_new", kForward},
    {LAWSON_PARAM_V_NEW, "v_new", kForward},
    {LAWSON_PARAM_DO, "do", kBackward},
    {LAWSON_PARAM_DQ, "dq", kBackward},
    {LAWSON_PARAM_DK, "dk", kBackward},
    {LAWSON_PARAM_DV, "dv", kBackward},
    {LAWSON_PARAM_DBIAS, "dbias", kBackward},
    {LAWSON_PARAM_DSINK, "dsink", kBackward},
    {LAWSON_PARAM_DESCALE_Q, "descale_q", kBoth},
    {LAWSON_PARAM_DESCALE_K, "descale_k", kBoth},
    {LAWSON_PARAM_DESCALE_V, "descale_v", kBoth},
    {LAWSON_PARAM_DESCALE_S, "descale_s", kBoth},
    {LAWSON_PARAM_DESCALE_O, "descale_o", kBackward},
    {LAWSON_PARAM_DESCALE_DO, "descale_do", kBackward},
    {LAWSON_PARAM_DESCALE_DP, "descale_dp", kBackward},
    {LAWSON_PARAM_SCALE_S, "scale_s", kBoth},
    {LAWSON_PARAM_SCALE_O, "scale_o", kForward},
    {LAWSON_PARAM_SCALE_DP, "scale_dp", kBackward},
    {LAWSON_PARAM_SCALE_DQ, "scale_dq", kBackward},
    {LAWSON_PARAM_SCALE_DK, "scale_dk", kBackward},
    {LAWSON_PARAM_SCALE_DV, "scale_dv", kBackward},
    {LAWSON_PARAM_AMAX_S, "amax_s", kForward},
    {LAWSON_PARAM_AMAX_O, "amax_o", kForward},
    {LAWSON_PARAM_AMAX_DP, "amax_dp", kBackward},
    {LAWSON_PARAM_AMAX_DQ, "amax_dq", kBackward},
    {LAWSON_PARAM_AMAX_DK, "amax_dk", kBackward},
    {LAWSON_PARAM_AMAX_DV, "amax_dv", kBackward},
}};

// From an attribute's number to its tensor.
constexpr std::size_t kNumbers = LAWSON_PARAM_AMAX_DV + 1;
constexpr std::array<std::uint8_t, kNumbers> kIndexOf = [] {
  std::array<std::uint8_t, kNumbers> table{};
  table.fill(static_cast<std::uint8_t>(kNoTensor));
  for (std::size_t i = 0; i < kTensors.size(); ++i) {
    table[static_cast<std::size_t>(kTensors[i].id)] = static_cast<std::uint8_t>(i);
  }
  return table;
}();

struct ScalarAttribute {
  std::int32_t id;
  std::string_view name;
  ValueKind kind;
};
constexpr std::array kScalars{
    ScalarAttribute{LAWSON_PARAM_CONFIG, "config", Kind::handle},
    ScalarAttribute{LAWSON_PARAM_DEVICE, "device", Kind::handle},
    ScalarAttribute{LAWSON_PARAM_ENGINE, "engine", Kind::text},
    ScalarAttribute{LAWSON_PARAM_WORKSPACE_LIMIT, "workspace_limit", Kind::integer},
    ScalarAttribute{LAWSON_PARAM_DETERMINISTIC, "deterministic", Kind::flag},
    ScalarAttribute{LAWSON_PARAM_SCALE, "scale", Kind::number},
    ScalarAttribute{LAWSON_PARAM_SEQUENCES, "sequences", Kind::integer},
    ScalarAttribute{LAWSON_PARAM_TUNING, "tuning", Kind::integer},
};

std::string_view pass_text(const AttentionParams& params) {
  return params.pass == front::Pass::backward ? "backward" : "forward";
}

// kNoTensor: a scalar attribute.
Result<std::size_t> find_tensor(const AttentionParams& params, std::int32_t id) {
  const std::size_t index = tensor_index(id);
  if (index == kNoTensor) return index;
  const unsigned pass = params.pass == front::Pass::backward ? kBackward : kForward;
  if ((kTensors[index].passes & pass) != 0) return index;
  return invalid("attribute {} ({}) is none of {} params", id, kTensors[index].name,
                 pass_text(params));
}

Result<const ScalarAttribute*> find_scalar(const AttentionParams& params, std::int32_t id) {
  for (const ScalarAttribute& scalar : kScalars) {
    if (scalar.id == id) return &scalar;
  }
  return invalid("attribute {} is none of {} params; those are {} ({}) to {} ({})", id,
                 pass_text(params), kScalars.front().id, kScalars.front().name, kTensors.back().id,
                 kTensors.back().name);
}

Status check_tensor(std::string_view name, const lawson_tensor& tensor) {
  if (tensor.rank < 0 || tensor.rank > LAWSON_MAX_RANK) {
    return invalid("tensor '{}': rank {} is not in [0, {}]", name, tensor.rank, LAWSON_MAX_RANK);
  }
  const bool has_type = dtype_of(tensor.dtype).has_value();
  if (!has_type && (tensor.dtype != LAWSON_DTYPE_UNSET || tensor.rank > 0)) {
    return invalid("tensor '{}': dtype {} is not an element type of lawson_dtype", name,
                   tensor.dtype);
  }
  const Dims shape(tensor.shape, tensor.shape + tensor.rank);
  const Dims strides(tensor.strides, tensor.strides + tensor.rank);
  if (!element_count(shape)) {
    return invalid("tensor '{}': shape {} has a negative size or overflows", name,
                   to_string(shape));
  }
  if (!storage_extent(shape, strides)) {
    return invalid("tensor '{}': strides {} of shape {} are negative or overflow", name,
                   to_string(strides), to_string(shape));
  }
  return {};
}

bool same_description(const lawson_tensor& a, const lawson_tensor& b) {
  return a.struct_size == b.struct_size && a.dtype == b.dtype && a.rank == b.rank &&
         std::equal(a.shape, a.shape + a.rank, b.shape) &&
         std::equal(a.strides, a.strides + a.rank, b.strides);
}

void forget_plan(const AttentionParams& params) {
  const std::lock_guard lock{params.mutex};
  params.resolved = nullptr;
}

Status set_tensor(AttentionParams& params, std::size_t index, const void* value, std::size_t size) {
  const std::string_view name = kTensors[index].name;
  lawson_tensor& tensor = params.tensors[index];
  if (size == 0) {
    tensor = {};
    forget_plan(params);
    return {};
  }
  LAWSON_CHECK(require(value, "value"));
  const auto* given = static_cast<const lawson_tensor*>(value);
  if (size < sizeof(std::size_t) || given->struct_size != size) {
    return invalid(
        "tensor '{}': a value of {} bytes was given; it is a lawson_tensor of {}, with "
        "its struct_size",
        name, size, sizeof(lawson_tensor));
  }
  lawson_tensor next{};
  LAWSON_CHECK(read_struct(given, next, "lawson_tensor", std::array<std::size_t, 0>{}));
  LAWSON_CHECK(check_tensor(name, next));
  if (!same_description(tensor, next)) forget_plan(params);
  tensor = next;
  return {};
}

template <typename Handle>
Result<const Handle*> read_handle(const void* value, std::string_view name) {
  const Handle* handle = nullptr;
  std::memcpy(&handle, value, sizeof(void*));
  LAWSON_CHECK(require(handle, name));
  return handle;
}

Status set_scalar(AttentionParams& params, const ScalarAttribute& scalar, const void* value,
                  std::size_t size) {
  LAWSON_CHECK(check_value(scalar.name, scalar.kind, value, size));
  std::int64_t integer = 0;
  std::int32_t flag = 0;
  double number = 0;
  if (scalar.kind == Kind::integer) std::memcpy(&integer, value, sizeof(integer));
  if (scalar.kind == Kind::flag) std::memcpy(&flag, value, sizeof(flag));
  if (scalar.kind == Kind::number) std::memcpy(&number, value, sizeof(number));
  switch (scalar.id) {
    case LAWSON_PARAM_CONFIG: {
      LAWSON_TRY(const auto* config, read_handle<lawson_attention_config>(value, scalar.name));
      params.config = config->document;
      break;
    }
    case LAWSON_PARAM_DEVICE: {
      LAWSON_TRY(const auto* device, read_handle<lawson_device>(value, scalar.name));
      set_device(params, *device);
      break;
    }
    case LAWSON_PARAM_ENGINE:
      params.engine.assign(static_cast<const char*>(value), size);
      break;
    case LAWSON_PARAM_WORKSPACE_LIMIT:
      params.options.workspace_limit = integer < 0 ? -1 : integer;
      break;
    case LAWSON_PARAM_DETERMINISTIC:
      if (flag != 0 && flag != 1) {
        return invalid("attribute '{}': {} is not a flag; expected 0 or 1", scalar.name, flag);
      }
      params.options.deterministic = flag != 0;
      break;
    case LAWSON_PARAM_TUNING: {
      if (integer < LAWSON_TUNING_OFF || integer > LAWSON_TUNING_EXHAUSTIVE) {
        return invalid(
            "attribute '{}': {} is not allowed; expected LAWSON_TUNING_OFF (0), "
            "LAWSON_TUNING_QUICK (1) or LAWSON_TUNING_EXHAUSTIVE (2)",
            scalar.name, integer);
      }
      params.options.tuning = static_cast<Tuning>(integer);
      break;
    }
    case LAWSON_PARAM_SCALE:
      if (std::isinf(number)) {
        return invalid("attribute '{}': {} is not finite", scalar.name, number);
      }
      params.scale = number;
      return {};  // selects no plan
    default:
      if (integer < -1 || integer > std::numeric_limits<std::int32_t>::max()) {
        return invalid("attribute '{}': {} is not in [-1, 2^31)", scalar.name, integer);
      }
      params.sequences = integer;
      if (params.config) return {};  // else the config comes from the tensors, and this
  }
  forget_plan(params);
  return {};
}

// Copies into the handle that `value` points to.
template <typename Handle, typename Content>
Status give_handle(std::string_view name, const Content& content,
                   void (Handle::*set)(const Content&), void* value, std::size_t capacity,
                   std::size_t* size_written) {
  if (value != nullptr) {
    if (capacity < sizeof(Handle*)) {
      return invalid("attribute '{}': its value has {} bytes; there is room for {}", name,
                     sizeof(Handle*), capacity);
    }
    Handle* target = nullptr;
    std::memcpy(&target, value, sizeof(void*));
    if (target == nullptr) {
      return invalid("attribute '{}' is copied into a handle of the caller, and '*value' is NULL",
                     name);
    }
    (target->*set)(content);
  }
  if (size_written != nullptr) *size_written = sizeof(Handle*);
  return {};
}

Status get_scalar(const AttentionParams& params, const ScalarAttribute& scalar, void* value,
                  std::size_t capacity, std::size_t* size_written) {
  const auto give = [&](const void* source, std::size_t size) {
    return give_value(scalar.name, source, size, value, capacity, size_written);
  };
  switch (scalar.id) {
    case LAWSON_PARAM_CONFIG:
      if (!params.config) return give(nullptr, 0);
      return give_handle(scalar.name, *params.config, &lawson_attention_config::set, value,
                         capacity, size_written);
    case LAWSON_PARAM_DEVICE:
      return give_handle(scalar.name, params.device, &lawson_device::set, value, capacity,
                         size_written);
    case LAWSON_PARAM_ENGINE:
      return give(params.engine.data(), params.engine.size());
    case LAWSON_PARAM_WORKSPACE_LIMIT:
      return give(&params.options.workspace_limit, sizeof(std::int64_t));
    case LAWSON_PARAM_DETERMINISTIC: {
      const std::int32_t flag = params.options.deterministic ? 1 : 0;
      return give(&flag, sizeof(flag));
    }
    case LAWSON_PARAM_TUNING: {
      const auto tuning = static_cast<std::int64_t>(params.options.tuning);
      return give(&tuning, sizeof(tuning));
    }
    case LAWSON_PARAM_SCALE:
      return give(&params.scale, sizeof(params.scale));
    default:
      return give(&params.sequences, sizeof(params.sequences));
  }
}

}  // namespace

void set_device(AttentionParams& params, const lawson_device& device) {
  params.device = device.device;
  params.known_device = device.known();
}

const std::array<TensorAttribute, kTensorCount>& tensor_attributes() {
  return kTensors;
}

std::size_t tensor_index(std::int32_t id) {
  const auto number = static_cast<std::size_t>(id);
  return id < 0 || number >= kNumbers ? kNoTensor : kIndexOf[number];
}

std::size_t tensor_index(std::string_view name) {
  const auto* const it =
      std::find_if(kTensors.begin(), kTensors.end(),
                   [&](const TensorAttribute& attribute) { return attribute.name == name; });
  return static_cast<std::size_t>(it - kTensors.begin());
}

const lawson_tensor* AttentionParams::tensor(std::string_view name) const {
  const lawson_tensor& found = tensors[tensor_index(name)];
  return found.struct_size == 0 ? nullptr : &found;
}

const lawson_tensor* AttentionParams::described(std::string_view name) const {
  const lawson_tensor* found = tensor(name);
  return found == nullptr || found->rank == 0 ? nullptr : found;
}

Status set_param(AttentionParams& params, std::int32_t id, const void* value, std::size_t size) {
  LAWSON_TRY(const std::size_t index, find_tensor(params, id));
  if (index != kNoTensor) return set_tensor(params, index, value, size);
  LAWSON_TRY(const ScalarAttribute* scalar, find_scalar(params, id));
  return set_scalar(params, *scalar, value, size);
}

Status get_param(const AttentionParams& params, std::int32_t id, void* value, std::size_t capacity,
                 std::size_t* size_written) {
  LAWSON_TRY(const std::size_t index, find_tensor(params, id));
  if (index != kNoTensor) {
    const lawson_tensor& tensor = params.tensors[index];
    return give_value(kTensors[index].name, &tensor, tensor.struct_size, value, capacity,
                      size_written);
  }
  LAWSON_TRY(const ScalarAttribute* scalar, find_scalar(params, id));
  return get_scalar(params, *scalar, value, capacity, size_written);
}

Status set_pointers(AttentionParams& params, const lawson_attention_pointer* pointers,
                    std::size_t count) {
  if (count > 0) LAWSON_CHECK(require(pointers, "pointers"));
  for (std::size_t i = 0; i < count; ++i) {
    LAWSON_TRY(const std::size_t index, find_tensor(params, pointers[i].attribute));
    if (index == kNoTensor) {
      return invalid("pointers[{}]: attribute {} is not a tensor", i, pointers[i].attribute);
    }
    if (params.tensors[index].struct_size == 0) {
      return invalid("pointers[{}]: tensor '{}' is not set", i, kTensors[index].name);
    }
  }
  for (std::size_t i = 0; i < count; ++i) {
    params.tensors[tensor_index(pointers[i].attribute)].data = pointers[i].data;
  }
  return {};
}

namespace {

template <typename Handle>
lawson_status create_params(Handle** params) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(params, "params"));
    *params = new Handle;
    return {};
  });
}

template <typename Handle>
lawson_status set_handle_attribute(Handle* handle, int32_t attribute, const void* value,
                                   size_t size) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(handle, "params"));
    return set_param(handle->params, attribute, value, size);
  });
}

template <typename Handle>
lawson_status get_handle_attribute(const Handle* handle, int32_t attribute, void* value,
                                   size_t capacity, size_t* size_written) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(handle, "params"));
    return get_param(handle->params, attribute, value, capacity, size_written);
  });
}

template <typename Handle>
lawson_status set_handle_pointers(Handle* handle, const lawson_attention_pointer* pointers,
                                  size_t count) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(handle, "params"));
    return set_pointers(handle->params, pointers, count);
  });
}

template <typename Handle>
lawson_status derive_config(const Handle* handle, lawson_attention_config** config) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(handle, "params"));
    LAWSON_CHECK(require(config, "config"));
    LAWSON_TRY(Json document, derive(handle->params));
    *config = new lawson_attention_config{std::move(document)};
    return {};
  });
}

}  // namespace
}  // namespace lawson::capi

using namespace lawson;
using namespace lawson::capi;

extern "C" {

lawson_status lawson_attention_fwd_params_create(lawson_attention_fwd_params** params) {
  return create_params(params);
}

void lawson_attention_fwd_params_destroy(lawson_attention_fwd_params* params) {
  delete params;
}

lawson_status lawson_attention_fwd_params_set_attribute(lawson_attention_fwd_params* params,
                                                        int32_t attribute, const void* value,
                                                        size_t size) {
  return set_handle_attribute(params, attribute, value, size);
}

lawson_status lawson_attention_fwd_params_get_attribute(const lawson_attention_fwd_params* params,
                                                        int32_t attribute, void* value,
                                                        size_t capacity, size_t* size_written) {
  return get_handle_attribute(params, attribute, value, capacity, size_written);
}

lawson_status lawson_attention_fwd_params_set_pointers(lawson_attention_fwd_params* params,
                                                       const lawson_attention_pointer* pointers,
                                                       size_t count) {
  return set_handle_pointers(params, pointers, count);
}

lawson_status lawson_attention_fwd_params_derive(const lawson_attention_fwd_params* params,
                                                 lawson_attention_config** config) {
  return derive_config(params, config);
}

lawson_status lawson_attention_bwd_params_create(lawson_attention_bwd_params** params) {
  return create_params(params);
}

void lawson_attention_bwd_params_destroy(lawson_attention_bwd_params* params) {
  delete params;
}

lawson_status lawson_attention_bwd_params_set_attribute(lawson_attention_bwd_params* params,
                                                        int32_t attribute, const void* value,
                                                        size_t size) {
  return set_handle_attribute(params, attribute, value, size);
}

lawson_status lawson_attention_bwd_params_get_attribute(const lawson_attention_bwd_params* params,
                                                        int32_t attribute, void* value,
                                                        size_t capacity, size_t* size_written) {
  return get_handle_attribute(params, attribute, value, capacity, size_written);
}

lawson_status lawson_attention_bwd_params_set_pointers(lawson_attention_bwd_params* params,
                                                       const lawson_attention_pointer* pointers,
                                                       size_t count) {
  return set_handle_pointers(params, pointers, count);
}

lawson_status lawson_attention_bwd_params_derive(const lawson_attention_bwd_params* params,
                                                 lawson_attention_config** config) {
  return derive_config(params, config);
}

}  // extern "C"
