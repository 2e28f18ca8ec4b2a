// An engine without arithmetic: answers by the graph's name. In tests it stands for the cuDNN
// engine, in this process and, through the fake worker, in others.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <string>
#include <utility>
#include <vector>

#include "engine/engine.h"

namespace lawson::plan {

inline Device fake_gpu(std::string name, int ordinal = -1) {
  Device device;
  device.kind = Device::Kind::cuda;
  device.name = std::move(name);
  device.title = "Fake " + device.name;
  device.aliases = {device.name + "-alias"};
  device.ordinal = ordinal;
  device.compute_capability = 900;
  device.evidence = ordinal >= 0 ? Evidence::live : Evidence::deviceless_published_target;
  device.properties = {{"deviceVer", 900}, {"multiProcessorCount", 132}};
  return device;
}

// x [2, 4] f32 -> relu(x), named as the test wants it.
inline ir::Graph relu_graph(const std::string& name) {
  ir::Builder builder(name);
  ir::Tensor x;
  x.name = "x";
  x.shape = {2, 4};
  const ir::TensorId id = builder.input(x).value();
  const ir::TensorId y =
      builder.add1(ir::Unary{ir::UnaryKind::relu, 0}, {id}, std::nullopt, "y").value();
  static_cast<void>(builder.output(y));
  return std::move(builder).finish().value();
}

class FakeEngine : public Engine {
 public:
  explicit FakeEngine(std::string where) : where_{std::move(where)} {}

  std::vector<Device> live;
  std::vector<Device> targets;
  std::atomic<int> probes{0};
  std::atomic<int> builds{0};
  std::barrier<>* build_gate = nullptr;  // all who build meet there

  std::string_view name() const override { return "cudnn"; }
  bool accepts(const Device& device) const override { return device.kind == Device::Kind::cuda; }
  Result<std::string> version() override { return std::string{"9.19.0"}; }

  Result<Verdict> probe(const ir::Graph& graph, const Device& device,
                        const Options& options) override {
    ++probes;
    if (graph.name == "broken") return error(ErrorKind::cudnn, "status 4000");
    Verdict verdict;
    verdict.decision = Decision::supported;
    if (graph.name == "refused") {
      verdict.decision = Decision::unsupported;
      verdict.reasons = {{"head_dim", "head_dim 7 is not a multiple of 8", "head_dim_qk"}};
    }
    if (graph.name == "undecided") verdict.decision = Decision::undecided;
    verdict.evidence = device.evidence;
    verdict.engine = "cudnn";
    verdict.engine_version = "9.19.0";
    verdict.target = device.name;
    verdict.key = make_key(graph, device, "cudnn", "9.19.0", options);
    if (graph.name == "wrong key") verdict.key = "0000";
    verdict.plan_name = where_;
    verdict.plan_names = {where_, "second"};
    if (graph.name == "built at once" && options.strength == Strength::built) {
      verdict.strength = Strength::built;
    }
    return verdict;
  }

  Result<std::vector<Candidate>> candidates(const ir::Graph&, const Device&,
                                            const Options&) override {
    return std::vector<Candidate>{{where_}, {"second"}};
  }

  Result<Plan> compile(const ir::Graph& graph, const Device& device, const Options& options,
                       const std::optional<Candidate>& candidate, std::stop_token) override {
    ++builds;
    if (build_gate != nullptr) build_gate->arrive_and_wait();
    if (graph.name == "does not build") {
      return unsupported("kernel_does_not_compile", "engine 7: the kernel does not compile");
    }
    if (graph.name == "build broken") return error(ErrorKind::unavailable, "no NVRTC");
    Plan plan;
    plan.key = make_key(graph, device, "cudnn", "9.19.0", options);
    plan.engine = "cudnn";
    plan.engine_version = "9.19.0";
    plan.target = device.name;
    plan.device_fingerprint = fingerprint(device);
    plan.plan_name = candidate ? candidate->name : where_;
    plan.plan_id = make_plan_id(plan.key, plan.plan_name, {});
    plan.workspace_bytes = 32;
    plan.bytes.resize(100'000, std::byte{0xA5});
    return plan;
  }

  Result<std::shared_ptr<Loaded>> load(const Plan& plan, const Device&) override {
    struct FakeLoaded : Loaded {
      explicit FakeLoaded(Plan p) : held{std::move(p)} {}
      const Plan& plan() const override { return held; }
      Plan held;
    };
    return std::shared_ptr<Loaded>{std::make_shared<FakeLoaded>(plan)};
  }

  Status execute(const Loaded&, std::span<const Binding>, void*, void*) override { return {}; }
  Arithmetic arithmetic(const ir::Graph&) const override { return {}; }
  Result<std::vector<Device>> live_devices() override { return live; }
  std::vector<Device> known_targets() const override { return targets; }
  Json info() override { return {{"where", where_}}; }

 private:
  std::string where_;
};

}  // namespace lawson::plan
