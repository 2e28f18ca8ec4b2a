// Forward and backward: config -> graph -> plan of the process's cache -> bound tensors -> run.
#include <bit>
#include <cmath>
#include <cstring>

#include "capi/attention.h"
#include "capi/guard.h"
#include "capi/handles.h"
#include "diag/diag.h"

namespace lawson::capi {

// A plan with the place of every tensor in it.
struct Resolved {
  struct Operand {
    std::int64_t uid = 0;
    std::size_t tensor = 0;  // index into AttentionParams::tensors
    int alignment = 1;
    bool is_empty = false;
  };
  std::shared_ptr<Loaded> loaded;
  std::vector<Operand> operands;
  std::int64_t scale_uid = 0;  // 0: none
  double scale = 1;
  bool wide_scale = false;
  std::int64_t sequences_uid = 0;
  std::int64_t sequences = 0;  // of the config
  std::int64_t room = 0;       // the most sequences that plan and tensors have room for
  // A ragged side whose tensors have fewer tokens than the plan has room for.
  struct Tokens {
    std::size_t offsets = 0;  // the tensor that says where the last sequence ends
    std::int64_t count = 0;
  };
  std::vector<Tokens> tokens;
};

namespace {

constexpr std::size_t kMaxBindings = kTensorCount + 4;

// Where a graph's tensor comes from: appended caches go to the caches' own memory.
std::string_view source_name(const std::string& name) {
  if (name == "k_out") return "k";
  if (name == "v_out") return "v";
  return name;
}

std::string describe(DType dtype, const Dims& shape, const Dims& strides) {
  return fmt::format("{}{} with strides {}", lawson::to_string(dtype), to_string(shape),
                     to_string(strides));
}

// Compares the caller's tensors with the graph's, and finds each one's place.
class Binder {
 public:
  Binder(const AttentionParams& params, const ir::Graph& graph) : params_{params}, graph_{graph} {}

  Result<Resolved> run() {
    LAWSON_CHECK(find_bucket());
    std::array<bool, kTensorCount> used{};
    for (ir::TensorId id = 0; id < graph_.input_count + graph_.output_count; ++id) {
      const ir::Tensor& tensor = graph_.tensor(id);
      if (tensor.by_value) {
        by_value(tensor, id);
        continue;
      }
      const std::string_view name = source_name(tensor.name);
      const std::size_t index = tensor_index(name);
      if (index == kNoTensor) {
        return error(ErrorKind::internal, "tensor '{}' of the graph is no attribute of params",
                     tensor.name);
      }
      const bool is_empty = element_count(tensor.shape).value_or(0) == 0;
      const lawson_tensor& given = params_.tensors[index];
      if (given.struct_size == 0 && !is_empty) {
        return invalid("tensor '{}' is not set; the plan of this config {} it", name,
                       graph_.is_output(id) ? "writes" : "reads");
      }
      if (given.struct_size != 0) LAWSON_CHECK(compare(given, tensor, name));
      used[index] = true;
      result_.operands.push_back({ir::Graph::uid(id), index, tensor.alignment, is_empty});
    }
    LAWSON_CHECK(all_used(used));
    return std::move(result_);
  }

 private:
  bool is_ragged() const { return ragged_q_ || ragged_kv_; }

  Status find_bucket() {
    for (ir::TensorId id = 0; id < graph_.input_count; ++id) {
      const ir::Tensor& tensor = graph_.tensor(id);
      ragged_q_ = ragged_q_ || tensor.name == "cu_seqlens_q";
      ragged_kv_ = ragged_kv_ || tensor.name == "cu_seqlens_kv";
      if (tensor.name.starts_with("cu_seqlens")) result_.room = tensor.shape[0] - 1;
    }
    if (!is_ragged() && params_.sequences >= 0) {
      return invalid("attribute 'sequences': {} is for a ragged batch, and the config is dense",
                     params_.sequences);
    }
    return {};
  }

  void by_value(const ir::Tensor& tensor, ir::TensorId id) {
    const double value = tensor.values.empty() ? 1 : tensor.values.front();
    if (tensor.name == "scale") {
      result_.scale_uid = ir::Graph::uid(id);
      result_.scale = value;
      result_.wide_scale = tensor.dtype == DType::f64;
    } else if (tensor.name == "sequences") {
      result_.sequences_uid = ir::Graph::uid(id);
      result_.sequences = static_cast<std::int64_t>(value);
    }
  }

  // A ragged plan has room for its bucket; the caller's batch or tokens may be fewer there.
  int bucketed_axis(std::string_view name) const {
    if (!is_ragged()) return -1;
    for (const char* like_q : {"q", "o", "do", "dq", "stats", "max_logit"}) {
      if (name == like_q) return ragged_q_ ? 2 : -1;
    }
    for (const char* like_k : {"k", "v", "dk", "dv"}) {
      if (name == like_k) return ragged_kv_ ? 2 : -1;
    }
    // Lengths are not read beyond the sequences that there are.
    return name.starts_with("cu_seqlens") ? 0 : -1;
  }

  // Dims of size 1 may be left out on either side, and their strides say nothing.
  Status compare(const lawson_tensor& given, const ir::Tensor& wanted, std::string_view name) {
    if (given.dtype != LAWSON_DTYPE_UNSET && dtype_of(given.dtype) != wanted.dtype) {
      return mismatch(given, wanted, name);
    }
    if (given.rank == 0) return {};
    const int bucketed = bucketed_axis(name);
    const auto rank = static_cast<std::size_t>(given.rank);
    std::size_t g = 0;
    std::size_t w = 0;
    while (g < rank || w < wanted.shape.size()) {
      const bool may_be_less = static_cast<int>(w) == bucketed && wanted.shape[w] > 1;
      if (g < rank && w < wanted.shape.size() &&
          (given.shape[g] == wanted.shape[w] ||
           (may_be_less && given.shape[g] < wanted.shape[w]))) {
        if (given.shape[g] > 1 && given.strides[g] != wanted.strides[w]) {
          return mismatch(given, wanted, name);
        }
        if (may_be_less && bucketed == 2) note_tokens(name, given.shape[g]);
        if (may_be_less && bucketed == 0) {
          const bool offsets = name.starts_with("cu_seqlens");
          result_.room = std::min(result_.room, given.shape[g] - (offsets ? 1 : 0));
        }
        ++g, ++w;
      } else if (w < wanted.shape.size() && wanted.shape[w] == 1) {
        ++w;
      } else if (g < rank && given.shape[g] == 1) {
        ++g;
      } else {
        return mismatch(given, wanted, name);
      }
    }
    return {};
  }

  // The fewest tokens that a described tensor of the side has.
  void note_tokens(std::string_view name, std::int64_t count) {
    const bool kv = name == "k" || name == "v" || name == "dk" || name == "dv";
    const auto graph_has = [&](std::string_view wanted) {
      for (ir::TensorId id = 0; id < graph_.input_count; ++id) {
        if (graph_.tensor(id).name == wanted) return true;
      }
      return false;
    };
    const std::string valid = kv ? "cu_seqlens_kv" : "cu_seqlens_q";
    const std::size_t offsets =
        tensor_index(graph_has(valid + "_padded") ? valid + "_padded" : valid);
    for (Resolved::Tokens& known : result_.tokens) {
      if (known.offsets != offsets) continue;
      known.count = std::min(known.count, count);
      return;
    }
    result_.tokens.push_back({offsets, count});
  }

  Error mismatch(const lawson_tensor& given, const ir::Tensor& wanted,
                 std::string_view name) const {
    const Dims shape(given.shape, given.shape + given.rank);
    const Dims strides(given.strides, given.strides + given.rank);
    return invalid(
        "tensor '{}' is {}; the config says {}{}; derive the config from the tensors, or change "
        "one of the two",
        name, describe(dtype_of(given.dtype).value_or(wanted.dtype), shape, strides),
        describe(wanted.dtype, wanted.shape, wanted.strides),
        is_ragged() ? " (a bucket, of which less may be there)" : "");
  }

  Status all_used(const std::array<bool, kTensorCount>& used) const {
    for (std::size_t i = 0; i < kTensorCount; ++i) {
      if (params_.tensors[i].struct_size == 0 || used[i]) continue;
      return invalid(
          "tensor '{}' is set, and the plan of this config takes none; change the config, or take "
          "the tensor away (size 0)",
          tensor_attributes()[i].name);
    }
    return {};
  }

  const AttentionParams& params_;
  const ir::Graph& graph_;
  bool ragged_q_ = false;
  bool ragged_kv_ = false;
  Resolved result_;
};

// A caller that only sees the message still sees every reason.
Error with_all_reasons(Error error) {
  if (error.kind != ErrorKind::unsupported) return error;
  std::string text;
  for (const Reason& reason : error.reasons) {
    if (reason.message.empty()) continue;
    text += (text.empty() ? "" : "; ") + reason.message;
  }
  if (!text.empty()) error.message = std::move(text);
  return error;
}

std::shared_ptr<const Resolved> known(const AttentionParams& params) {
  const std::lock_guard lock{params.mutex};
  return params.resolved;
}

Result<std::shared_ptr<const Resolved>> resolve(const AttentionParams& params,
                                                plan::Planner& planner, void* stream) {
  if (auto resolved = known(params)) return resolved;
  Result<Json> document = params.config ? Result<Json>{*params.config} : derive(params);
  if (!document.ok()) return std::move(document).error();
  auto graph = attention_graph(*document, params.pass);
  if (!graph.ok()) return with_all_reasons(std::move(graph).error());
  LAWSON_TRY(Resolved resolved, Binder(params, *graph).run());
  const plan::KnownGraph asked{*graph};
  auto loaded =
      params.known_device != nullptr
          ? planner.acquire(asked, *params.known_device, params.engine, params.options, stream)
          : planner.acquire(asked, plan::KnownDevice{params.device}, params.engine, params.options,
                            stream);
  if (!loaded.ok()) return with_all_reasons(std::move(loaded).error());
  resolved.loaded = std::move(loaded).value();
  auto shared = std::make_shared<const Resolved>(std::move(resolved));
  const std::lock_guard lock{params.mutex};
  params.resolved = shared;
  return shared;
}

Status check_address(const Resolved::Operand& operand, const void* data) {
  const std::string_view name = tensor_attributes()[operand.tensor].name;
  if (data == nullptr) return invalid("tensor '{}': its data is a null pointer", name);
  if (std::bit_cast<std::uintptr_t>(data) % static_cast<std::uintptr_t>(operand.alignment) == 0) {
    return {};
  }
  return invalid("tensor '{}' is at {}; its address has to be a multiple of {} bytes", name,
                 fmt::ptr(data), operand.alignment);
}

}  // namespace

Result<std::shared_ptr<Loaded>> plan_of(const AttentionParams& params, plan::Planner& planner,
                                        void* stream) {
  LAWSON_TRY(const auto resolved, resolve(params, planner, stream));
  return resolved->loaded;
}

Status run(const AttentionParams& params, plan::Planner& planner, void* workspace,
           std::size_t workspace_size, void* stream) {
  auto resolved = known(params);
  if (resolved != nullptr) {
    diag::record(diag::Event::hit, plan::subject_of(*resolved->loaded));
  } else {
    LAWSON_TRY(resolved, resolve(params, planner, stream));
  }
  std::array<Binding, kMaxBindings> bindings;
  std::size_t count = 0;
  for (const Resolved::Operand& operand : resolved->operands) {
    void* data = params.tensors[operand.tensor].data;
    if (!operand.is_empty) LAWSON_CHECK(check_address(operand, data));
    bindings[count++] = {operand.uid, data};
  }
  double scale = std::isnan(params.scale) ? resolved->scale : params.scale;
  auto narrow = static_cast<float>(scale);
  if (resolved->scale_uid != 0) {
    void* const given = resolved->wide_scale ? static_cast<void*>(&scale) : &narrow;
    bindings[count++] = {resolved->scale_uid, given};
  }
  if (resolved->sequences_uid == 0 && params.sequences >= 0) {
    return invalid("attribute 'sequences': {} is for a ragged batch, and the config is dense",
                   params.sequences);
  }
  const std::int64_t wanted = params.sequences < 0 ? resolved->sequences : params.sequences;
  auto sequences = static_cast<std::int32_t>(wanted);
  if (resolved->sequences_uid != 0) {
    if (wanted > resolved->room) {
      return invalid(
          "{} sequences are more than the {} that the plan and the tensors have room for", wanted,
          resolved->room);
    }
    bindings[count++] = {resolved->sequences_uid, &sequences};
  }
  // On a GPU the offsets are in its memory; on the host they can be looked at.
  if (params.device.kind == Device::Kind::cpu) {
    for (const Resolved::Tokens& side : resolved->tokens) {
      const auto* offsets = static_cast<const std::int32_t*>(params.tensors[side.offsets].data);
      if (offsets[wanted] <= side.count) continue;
      return invalid("tensor '{}' ends with {}; the tensors have {} tokens",
                     tensor_attributes()[side.offsets].name, offsets[wanted], side.count);
    }
  }
  return planner.execute(resolved->loaded->plan(), *resolved->loaded, {bindings.data(), count},
                         workspace, workspace_size, stream);
}

namespace {

template <typename Handle>
lawson_status plan_handle(const Handle* handle, lawson_plan** plan) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(handle, "params"));
    LAWSON_CHECK(require(plan, "plan"));
    LAWSON_TRY(plan::Planner * planner, capi::planner());
    LAWSON_TRY(auto loaded, plan_of(handle->params, *planner, nullptr));
    LAWSON_TRY(auto made, make_plan_handle(loaded->plan()));
    made->executable = std::make_shared<const lawson_plan::Executable>(
        lawson_plan::Executable{std::move(loaded), handle->params.device});
    *plan = made.release();
    return {};
  });
}

template <typename Handle>
lawson_status workspace_size(const Handle* handle, size_t* size) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(handle, "params"));
    LAWSON_CHECK(require(size, "size"));
    LAWSON_TRY(plan::Planner * planner, capi::planner());
    LAWSON_TRY(const auto loaded, plan_of(handle->params, *planner, nullptr));
    *size = static_cast<std::size_t>(loaded->plan().workspace_bytes);
    return {};
  });
}

template <typename Handle>
lawson_status execute(const Handle* handle, void* workspace, size_t workspace_size, void* stream) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(handle, "params"));
    LAWSON_TRY(plan::Planner * planner, capi::planner());
    return run(handle->params, *planner, workspace, workspace_size, stream);
  });
}

}  // namespace
}  // namespace lawson::capi

using namespace lawson;
using namespace lawson::capi;

extern "C" {

lawson_status lawson_attention_fwd_params_plan(const lawson_attention_fwd_params* params,
                                               lawson_plan** plan) {
  return plan_handle(params, plan);
}

lawson_status lawson_attention_bwd_params_plan(const lawson_attention_bwd_params* params,
                                               lawson_plan** plan) {
  return plan_handle(params, plan);
}

lawson_status lawson_attention_fwd_params_workspace_size(const lawson_attention_fwd_params* params,
                                                         size_t* size) {
  return workspace_size(params, size);
}

lawson_status lawson_attention_bwd_params_workspace_size(const lawson_attention_bwd_params* params,
                                                         size_t* size) {
  return workspace_size(params, size);
}

lawson_status lawson_attention_forward(const lawson_attention_fwd_params* params, void* workspace,
                                       size_t workspace_size, void* stream) {
  return execute(params, workspace, workspace_size, stream);
}

lawson_status lawson_attention_backward(const lawson_attention_bwd_params* params, void* workspace,
                                        size_t workspace_size, void* stream) {
  return execute(params, workspace, workspace_size, stream);
}

}  // extern "C"
