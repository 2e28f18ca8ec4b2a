#include "engine/cudnn/judging.h"

#include <fmt/ranges.h>

#include "diag/diag.h"
#include "engine/cudnn/control.h"
#include "engine/cudnn/defects.h"
#include "engine/cudnn/facts.h"
#include "engine/cudnn/handles.h"
#include "engine/cudnn/native.h"
#include "engine/cudnn/reasons.h"
#include "engine/cudnn/steps.h"
#include "engine/cudnn/turned.h"

namespace lawson::cudnn {
namespace {

// What the graph can be judged with: the right kind of process, and cuBLASLt for products (cuDNN
// aborts the process when its engine 0 cannot load it).
Status prepare(const ir::Graph& graph, const Device& device) {
  if (device.present() == is_deviceless()) {
    return error(ErrorKind::unavailable, "device '{}' {}", device.name,
                 device.present() ? "is a live one, and this process is a worker without devices"
                                  : "is not on this machine: a worker process judges for it");
  }
  if (has_matmul(graph)) LAWSON_CHECK(need_cublaslt());
  if (!device.present()) prime();
  return {};
}

// cudnn-frontend 1.32 on 8.x and 12.x: "Packed/ragged LSE is not supported for bprop thd".
bool needs_dense_stats(const Device& device) {
  return device.compute_capability / 100 == 8 || device.compute_capability / 100 == 12;
}

// Every result is empty: a batch of 0, no queries.
bool computes_nothing(const ir::Graph& graph) {
  for (std::int32_t i = 0; i < graph.output_count; ++i) {
    const ir::Tensor& tensor = graph.tensor(graph.input_count + i);
    if (element_count(tensor.shape).value_or(1) != 0) return false;
  }
  return true;
}

bool nvrtc_knows(const Device& device, const Libraries& found) {
  return device.compute_capability / 10 >= found.nvrtc_archs.front();
}

std::optional<Reason> unknown_to_nvrtc(const Device& device, const Libraries& found) {
  if (nvrtc_knows(device, found)) return std::nullopt;
  return Reason{
      "cuda_version",
      fmt::format("CUDA {} compiles for compute capability {} and newer; {} has {}",
                  found.nvrtc.version, compute_capability_text(found.nvrtc_archs.front() * 10),
                  device.name, compute_capability_text(device.compute_capability)),
      "target"};
}

using Lower = Judged::Lower;

// A graph that cuDNN took, or what it said against it; neither: nothing to try.
struct Attempt {
  std::unique_ptr<Lowered> lowered;
  Lower again;
  std::optional<Judgement> judgement;
};

Attempt against(std::vector<Reason> reasons, Decision decision = Decision::unsupported) {
  return {nullptr, {}, Judgement{nullptr, decision, std::move(reasons)}};
}

template <typename Refuse>
Judgement refuse_or_return(Judgement judgement, const Refuse& refuse) {
  if (judgement.decision == Decision::undecided) return judgement;
  return refuse(std::move(judgement.reasons));
}

Result<Attempt> ask(const Lower& lower, const ir::Graph& graph, const Device& device,
                    const Libraries& found) {
  auto lowered = lower();
  if (!lowered.ok()) {
    if (lowered.error().kind != ErrorKind::unsupported) return std::move(lowered).error();
    return against(lowered.error().reasons);
  }
  LAWSON_TRY(const Handle handle, handle_for(device));
  diag::record(diag::Event::create_graph);
  const Failure failure = (*lowered)->judge(handle.get());
  if (!failure) return Attempt{std::move(lowered).value(), lower, std::nullopt};
  const Fault fault = classify(*failure, !device.present());
  if (fault == Fault::unsupported ||
      (fault == Fault::undecided && (!nvrtc_knows(device, found) || attention_facts(graph)))) {
    return against(explain(*failure, graph, device, found.cudnn_version));
  }
  if (fault != Fault::undecided) return to_error(*failure, fault, device);
  return against(explain_undecided(*failure, graph, device), Decision::undecided);
}

// A fresh object of a fusion.
Lower lower_fusion(const ir::Graph& graph, const Device& device, const Options& options,
                   std::shared_ptr<KernelFamily> family) {
  return [graph, device, limit = options.workspace_limit,
          family = std::move(family)]() -> Result<std::unique_ptr<Lowered>> {
    LAWSON_TRY(auto lowered, Lowered::lower(graph, device, family));
    if (limit >= 0) lowered->limit_workspace(limit);
    return lowered;
  };
}

Lower lower_attention(const ir::Graph& graph, const NativeAttention& native, const Device& device,
                      const Options& options) {
  return [graph, native, device,
          limit = options.workspace_limit]() -> Result<std::unique_ptr<Lowered>> {
    LAWSON_TRY(auto lowered, Lowered::lower(graph, native, device));
    if (limit >= 0) lowered->limit_workspace(limit);
    return lowered;
  };
}

Result<Attempt> attempt_fusion(const ir::Graph& graph, const Device& device, const Options& options,
                               const Libraries& found) {
  if (auto family = options.dynamic_shapes ? kernel_family(graph, device) : nullptr) {
    // What has no plan with dynamic shapes gets one for its own, and its rewrites say so.
    LAWSON_TRY(Attempt dynamic,
               ask(lower_fusion(graph, device, options, std::move(family)), graph, device, found));
    if (dynamic.lowered) return dynamic;
  }
  return ask(lower_fusion(graph, device, options, nullptr), graph, device, found);
}

Result<Attempt> attempt_attention(const ir::Graph& graph, const AttentionFacts& facts,
                                  const RewriteOptions& rewrite, const Device& device,
                                  const Options& options, const Libraries& found) {
  auto native = rewrite_attention(graph, facts, rewrite);
  if (!native.ok()) {
    if (native.error().kind != ErrorKind::unsupported) return std::move(native).error();
    return against(native.error().reasons);
  }
  if (!*native) return Attempt{};
  const Supplies& supplies = (*native)->supplies;
  if (!steps_are_built() && !(supplies.before.empty() && supplies.after.empty())) {
    return against({{"no_kernels",
                     fmt::format("it needs Lawson's own kernels ({}), and this build has none "
                                 "(LAWSON_CUDA_KERNELS)",
                                 fmt::join((*native)->rewrites, ", ")),
                     ""}});
  }
  return ask(lower_attention(graph, **native, device, options), graph, device, found);
}

}  // namespace

Result<Judgement> Judge::judge(const ir::Graph& graph, const Device& device, const Options& options,
                               const std::string& key, const Libraries& found) {
  LAWSON_CHECK(prepare(graph, device));
  if (auto judged = judged_.find(key)) return Judgement{std::move(judged), {}, {}};
  Judgement judgement;
  auto refuse = [&](std::vector<Reason> reasons) {
    judgement.decision = Decision::unsupported;
    judgement.reasons = std::move(reasons);
    if (const auto reason = unknown_to_nvrtc(device, found)) {
      judgement.reasons.push_back(*reason);
    }
    return judgement;
  };
  if (computes_nothing(graph)) {
    judgement.judged = std::make_shared<Judged>();
    judgement.judged->plan_names = {kNothing};
    judged_.keep(key, judgement.judged);
    return judgement;
  }
  for (ir::TensorId id = 0; id < graph.input_count + graph.output_count; ++id) {
    const ir::Tensor& tensor = graph.tensor(id);
    if (element_count(tensor.shape).value_or(0) == 0) {
      return refuse({{"empty_tensor",
                      fmt::format("{} has shape {}: there is nothing to compute", tensor.name,
                                  to_string(tensor.shape)),
                      tensor.name}});
    }
  }
  const auto facts = attention_facts(graph);
  Attempt attempt;
  if (!facts) {
    LAWSON_TRY(attempt, attempt_fusion(graph, device, options, found));
    if (attempt.judgement) return refuse_or_return(std::move(*attempt.judgement), refuse);
  } else {
    // The first variant's reasons are those of the graph as it was written.
    std::optional<Judgement> refusal;
    const Repairs repairs = repairs_for(graph, device, found.cudnn_version);
    for (const Variant variant : kVariants) {
      const RewriteOptions rewrite{variant, repairs, options.deterministic,
                                   needs_dense_stats(device)};
      LAWSON_TRY(attempt, attempt_attention(graph, *facts, rewrite, device, options, found));
      if (attempt.judgement && !refusal) refusal = std::move(*attempt.judgement);
      if (attempt.lowered) break;
    }
    if (!attempt.lowered) return refuse_or_return(std::move(*refusal), refuse);
  }
  LAWSON_CHECK(check_one_cudnn());  // sublibraries are loaded by now
  if (!nvrtc_knows(device, found)) return refuse({});
  judgement.judged = std::make_shared<Judged>();
  judgement.judged->lowered = std::move(attempt.lowered);
  judgement.judged->again = std::move(attempt.again);
  if (!facts && !options.dynamic_shapes) {
    if (const auto other = turned(graph)) {
      judgement.judged->again_turned = lower_fusion(*other, device, options, nullptr);
    }
  }
  judgement.judged->plan_names = judgement.judged->lowered->plan_names();
  judged_.keep(key, judgement.judged);
  return judgement;
}

// The judged graph, or "unsupported" with the reasons.
Result<std::shared_ptr<Judged>> Judge::accepted(const ir::Graph& graph, const Device& device,
                                                const Options& options, const std::string& key,
                                                const Libraries& found) {
  LAWSON_TRY(Judgement judgement, judge(graph, device, options, key, found));
  if (judgement.decision == Decision::supported) return judgement.judged;
  if (judgement.decision == Decision::undecided) {
    return error(ErrorKind::unavailable, "{}", judgement.reasons.front().message);
  }
  Error refusal = error(ErrorKind::unsupported, "{}", judgement.reasons.front().message);
  refusal.reasons = std::move(judgement.reasons);
  return refusal;
}

}  // namespace lawson::cudnn
