#include "engine/cpu/cpu.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <utility>

#include "engine/cpu/pool.h"
#include "engine/cpu/program.h"
#include "engine/subject.h"
#include "ir/json.h"

namespace lawson {
namespace cpu {
namespace {

constexpr std::string_view kVersion = "0.1.0";

bool is_attention(const ir::Node& node) {
  return std::holds_alternative<ir::Attention>(node.op) ||
         std::holds_alternative<ir::AttentionBackward>(node.op);
}

bool has_f64(const ir::Graph& graph) {
  return std::any_of(graph.tensors.begin(), graph.tensors.end(),
                     [](const ir::Tensor& tensor) { return tensor.dtype == DType::f64; });
}

// "cpu-flash-f32-v4": what kind of step dominates, what it computes in, which kernels.
std::string plan_name(const ir::Graph& graph, const Kernels& kernels) {
  const auto any = [&](auto test) {
    return std::any_of(graph.nodes.begin(), graph.nodes.end(), test);
  };
  const bool attention = any(is_attention);
  const bool matmul = any([](const ir::Node& node) {
    return std::holds_alternative<ir::Matmul>(node.op) ||
           std::holds_alternative<ir::ScaledMatmul>(node.op);
  });
  const bool norm = any([](const ir::Node& node) {
    return std::holds_alternative<ir::Norm>(node.op) ||
           std::holds_alternative<ir::NormBackward>(node.op);
  });
  return fmt::format("cpu-{}-{}-{}",
                     attention ? "flash"
                     : matmul  ? "matmul"
                     : norm    ? "norm"
                               : "pointwise",
                     has_f64(graph) ? "f64" : "f32", kernels.name);
}

// The kernels that a plan's name asks for.
const Kernels* kernels_of(std::string_view plan_name) {
  for (int i = 0; i < kIsaCount; ++i) {
    const Kernels* kernels = kernels_for(static_cast<Isa>(i));
    if (kernels != nullptr && plan_name.ends_with(fmt::format("-{}", kernels->name))) {
      return kernels;
    }
  }
  return nullptr;
}

// Workspace as the caller gives it has any alignment; ours starts at a cache line.
std::int64_t padded_workspace(const Program& program) {
  return program.workspace_bytes == 0 ? 0 : program.workspace_bytes + 63;
}

std::byte* aligned(void* workspace) {
  const auto address = reinterpret_cast<std::uintptr_t>(workspace);
  return static_cast<std::byte*>(workspace) + ((64 - address % 64) % 64);
}

class CpuLoaded : public Loaded {
 public:
  CpuLoaded(Plan plan, Program program) : plan_{std::move(plan)}, program_{std::move(program)} {}
  const Plan& plan() const override { return plan_; }
  const Program& program() const { return program_; }
  std::size_t host_bytes() const override {
    return lawson::host_bytes(plan_) + cpu::host_bytes(program_);
  }

 private:
  Plan plan_;
  Program program_;
};

class CpuEngine : public Engine {
 public:
  std::string_view name() const override { return "cpu"; }
  bool accepts(const Device& device) const override { return device.kind == Device::Kind::cpu; }
  Result<std::string> version() override { return std::string{kVersion}; }

  Result<Verdict> probe(const ir::Graph& graph, const Device& device,
                        const Options& options) override {
    Verdict verdict;
    verdict.engine = name();
    verdict.engine_version = kVersion;
    verdict.key = make_key(graph, device, name(), kVersion, options);
    verdict.target = device.name;
    verdict.evidence = device.evidence;
    // One way to run, and nothing is left to be built: judging is building.
    verdict.strength = std::min(options.strength, Strength::built);
    if (!accepts(device)) {
      verdict.reasons.push_back(wrong_device(device));
      return verdict;
    }
    const Kernels& kernels = best_kernels();
    const std::int64_t bytes = padded_workspace(make_program(graph, kernels));
    if (const auto reason = over_limit(bytes, options)) {
      verdict.reasons.push_back(*reason);
      return verdict;
    }
    verdict.decision = Decision::supported;
    verdict.plan_name = plan_name(graph, kernels);
    verdict.plan_names = {verdict.plan_name};
    verdict.plan_id = make_plan_id(verdict.key, verdict.plan_name, {});
    verdict.workspace_bytes = bytes;
    return verdict;
  }

  // The best kernels first, then those of older instruction sets.
  Result<std::vector<Candidate>> candidates(const ir::Graph& graph, const Device& device,
                                            const Options&) override {
    std::vector<Candidate> result;
    if (!accepts(device)) return result;
    for (int i = static_cast<int>(best_kernels().isa); i >= 0; --i) {
      const Kernels* kernels = kernels_for(static_cast<Isa>(i));
      if (kernels != nullptr) result.push_back({plan_name(graph, *kernels)});
    }
    return result;
  }

  Result<Plan> compile(const ir::Graph& graph, const Device& device, const Options& options,
                       const std::optional<Candidate>& candidate, std::stop_token) override {
    if (!accepts(device)) {
      const Reason reason = wrong_device(device);
      return unsupported(reason.code, reason.message, reason.field);
    }
    const Kernels* kernels = candidate ? kernels_of(candidate->name) : &best_kernels();
    if (kernels == nullptr || (candidate && candidate->name != plan_name(graph, *kernels))) {
      return invalid("cpu engine: no candidate '{}' for this graph and CPU", candidate->name);
    }
    Plan plan;
    plan.key = make_key(graph, device, name(), kVersion, options);
    const diag::Span span{diag::Stage::build_plans, subject_of(name(), graph, device, plan.key)};
    plan.engine = name();
    plan.engine_version = kVersion;
    plan.target = device.name;
    plan.device_fingerprint = fingerprint(device);
    plan.plan_name = plan_name(graph, *kernels);
    plan.plan_id = make_plan_id(plan.key, plan.plan_name, {});
    plan.workspace_bytes = padded_workspace(make_program(graph, *kernels));
    plan.graph_json = plan_graph_json(graph);
    if (const auto reason = over_limit(plan.workspace_bytes, options)) {
      return unsupported(reason->code, reason->message, reason->field);
    }
    return plan;
  }

  Result<std::shared_ptr<Loaded>> load(const Plan& plan, const Device& device) override {
    if (plan.engine != name() || !accepts(device)) {
      return invalid("cpu engine: a plan of engine '{}' for device '{}'", plan.engine, device.name);
    }
    if (plan.engine_version != kVersion) {
      return error(ErrorKind::unavailable, "cpu engine {}: the plan is of version {}", kVersion,
                   plan.engine_version);
    }
    const Kernels* kernels = kernels_of(plan.plan_name);
    if (kernels == nullptr) {
      return error(ErrorKind::unavailable, "cpu engine: this CPU has no kernels for plan '{}'",
                   plan.plan_name);
    }
    LAWSON_TRY(const Json document, parse_json(plan.graph_json, "plan"));
    LAWSON_TRY(const ir::Graph graph, ir::graph_from_json(document, "plan"));
    Program program = make_program(graph, *kernels);
    if (padded_workspace(program) != plan.workspace_bytes) {
      return invalid("cpu engine: plan '{}' says {} bytes of workspace; its graph needs {}",
                     plan.plan_name, plan.workspace_bytes, padded_workspace(program));
    }
    return std::shared_ptr<Loaded>{std::make_shared<CpuLoaded>(plan, std::move(program))};
  }

  Status execute(const Loaded& loaded, std::span<const Binding> bindings, void* workspace,
                 void* /*stream*/) override {
    const Program& program = static_cast<const CpuLoaded&>(loaded).program();
    const ir::Graph& graph = program.graph;
    const auto count =
        static_cast<std::size_t>(graph.input_count) + static_cast<std::size_t>(graph.output_count);
    std::vector<std::byte*> roots(graph.tensors.size(), nullptr);
    for (const Binding& binding : bindings) {
      const auto id = static_cast<std::size_t>(binding.uid - 1);
      if (binding.uid < 1 || id >= count) {
        return invalid("cpu engine: uid {} is not in [1, {}]", binding.uid, count);
      }
      roots[id] = static_cast<std::byte*>(binding.data);
    }
    // By-value scalars that are not bound have their defaults.
    std::vector<std::array<std::byte, 8>> defaults(count);
    for (std::size_t id = 0; id < count; ++id) {
      const ir::Tensor& tensor = graph.tensors[id];
      if (roots[id] != nullptr || element_count(tensor.shape).value_or(0) == 0) continue;
      if (!tensor.by_value || tensor.values.size() != 1) {
        return invalid("cpu engine: tensor '{}' (uid {}) is not bound", tensor.name, id + 1);
      }
      store_element(defaults[id].data(), tensor.dtype, 0, tensor.values[0]);
      roots[id] = defaults[id].data();
    }
    if (program.workspace_bytes > 0 && workspace == nullptr) {
      return invalid("cpu engine: the workspace of {} bytes is null", padded_workspace(program));
    }
    return run_program(program, std::move(roots),
                       workspace == nullptr ? nullptr : aligned(workspace));
  }

  Result<std::vector<double>> measure(const Loaded& loaded,
                                      std::span<const std::vector<Binding>> sets, void* workspace,
                                      int executions, int rounds) override {
    if (sets.empty()) return invalid("cpu engine: no bindings to measure with");
    std::vector<double> times;
    std::size_t next = 0;
    for (int round = -1; round < rounds; ++round) {
      const auto begin = std::chrono::steady_clock::now();
      for (int i = 0; i < executions; ++i) {
        LAWSON_CHECK(execute(loaded, sets[next++ % sets.size()], workspace, nullptr));
      }
      const std::chrono::duration<double, std::milli> elapsed =
          std::chrono::steady_clock::now() - begin;
      if (round >= 0) times.push_back(elapsed.count() / executions);
    }
    return times;
  }

  Arithmetic arithmetic(const ir::Graph& graph) const override {
    // Mixed graphs compute their f32 parts in f32.
    const bool all_f64 =
        has_f64(graph) &&
        std::none_of(graph.tensors.begin(), graph.tensors.end(), [](const ir::Tensor& tensor) {
          return is_float(tensor.dtype) && tensor.dtype != DType::f64 && !tensor.by_value;
        });
    const double unit = all_f64 ? 0x1p-53 : 0x1p-24;
    return {.operand_roundoff = 0,
            .accumulate_roundoff = unit,
            .probability_roundoff = unit,
            .function_roundoff = all_f64 ? kFunctionRoundoffF64 : kFunctionRoundoffF32};
  }

  Json info() override {
    return {{"name", name()},
            {"version", kVersion},
            {"kernels", best_kernels().name},
            {"threads", thread_count()}};
  }

 private:
  static Reason wrong_device(const Device& device) {
    return {"device_kind", fmt::format("the cpu engine runs on the host, not on '{}'", device.name),
            "target"};
  }

  static std::optional<Reason> over_limit(std::int64_t bytes, const Options& options) {
    if (options.workspace_limit < 0 || bytes <= options.workspace_limit) return std::nullopt;
    return Reason{"workspace_limit",
                  fmt::format("needs {} bytes of workspace, more than the limit of {}", bytes,
                              options.workspace_limit),
                  "workspace_limit"};
  }
};

}  // namespace
}  // namespace cpu

std::shared_ptr<Engine> make_cpu_engine() {
  return std::make_shared<cpu::CpuEngine>();
}

}  // namespace lawson
