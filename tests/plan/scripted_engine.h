// An engine whose candidates do what a test says: fail to build, take so long, compute so wrongly.
#pragma once

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "fake_engine.h"

namespace lawson::plan {

struct Script {
  std::string name;
  double ms = 1;
  std::int64_t workspace = 0;
  std::optional<Error> build = std::nullopt;  // what building gives instead of a plan
  std::optional<Error> load = std::nullopt;
  std::optional<Error> measure = std::nullopt;
  float error = 0;  // added to each element of relu(x)
  int build_ms = 0;
};

// relu of [2, 4] f32 on a GPU whose memory is the host's.
class ScriptedEngine : public FakeEngine {
 public:
  explicit ScriptedEngine(std::vector<Script> scripts)
      : FakeEngine("scripted"), scripts_{std::move(scripts)} {
    live = {fake_gpu("h200", 0), fake_gpu("h200", 1)};
  }

  std::atomic<int> loads{0};
  std::atomic<int> measures{0};
  std::atomic<int> building{0};
  std::atomic<int> most_building{0};
  std::atomic<std::size_t> sets{0};
  std::atomic<bool> measured_together{false};

  void change(const std::string& name, const std::function<void(Script&)>& how) {
    for (Script& script : scripts_) {
      if (script.name == name) how(script);
    }
  }

  Result<std::vector<Candidate>> candidates(const ir::Graph&, const Device&,
                                            const Options&) override {
    std::vector<Candidate> list;
    for (const Script& script : scripts_) list.push_back({script.name});
    return list;
  }

  Result<Plan> compile(const ir::Graph& graph, const Device& device, const Options& options,
                       const std::optional<Candidate>& candidate, std::stop_token stop) override {
    if (!candidate) return compile(graph, device, options, Candidate{scripts_[0].name}, stop);
    const int now = ++building;
    int most = most_building;
    while (most < now && !most_building.compare_exchange_weak(most, now)) {
    }
    const Script& script = script_of(candidate->name);
    if (script.build_ms > 0) {
      std::this_thread::sleep_for(std::chrono::milliseconds{script.build_ms});
    }
    --building;
    if (script.build) {
      ++builds;
      return *script.build;
    }
    LAWSON_TRY(Plan plan, FakeEngine::compile(graph, device, options, candidate, stop));
    plan.workspace_bytes = script.workspace;
    plan.graph_json = plan_graph_json(graph);
    return plan;
  }

  Result<std::shared_ptr<Loaded>> load(const Plan& plan, const Device& device) override {
    ++loads;
    if (const auto& failure = script_of(plan.plan_name).load) return *failure;
    return FakeEngine::load(plan, device);
  }

  Status execute(const Loaded& loaded, std::span<const Binding> bindings, void*, void*) override {
    std::array<float, 8> values{};
    std::memcpy(values.data(), bindings[0].data, sizeof(values));
    const float error = script_of(loaded.plan().plan_name).error;
    for (float& value : values) value = std::max(value, 0.F) + error;
    std::memcpy(bindings[1].data, values.data(), sizeof(values));
    return {};
  }

  // 1% of noise, the same every time.
  Result<std::vector<double>> measure(const Loaded& loaded,
                                      std::span<const std::vector<Binding>> given, void* workspace,
                                      int executions, int rounds) override {
    const std::unique_lock lock{measuring_, std::try_to_lock};
    if (!lock) measured_together = true;
    ++measures;
    sets = given.size();
    const Script& script = script_of(loaded.plan().plan_name);
    if (script.measure) return *script.measure;
    if (script.workspace > 0 && workspace == nullptr) return invalid("no workspace");
    if (executions < 1) return invalid("no executions");
    std::vector<double> times;
    for (int i = 0; i < rounds; ++i) times.push_back(script.ms * (1 + 0.001 * ((i * 7) % 10)));
    return times;
  }

  Result<void*> allocate(const Device&, std::size_t bytes) override {
    if (bytes > most_bytes) return error(ErrorKind::out_of_memory, "{} bytes are too many", bytes);
    ++blocks;
    return std::malloc(bytes);
  }
  Status release(const Device&, void* data) override {
    --blocks;
    std::free(data);
    return {};
  }
  Status copy_to_device(const Device&, void* to, const void* from, std::size_t bytes) override {
    std::memcpy(to, from, bytes);
    return {};
  }
  Status copy_to_host(const Device&, void* to, const void* from, std::size_t bytes) override {
    std::memcpy(to, from, bytes);
    return {};
  }

  std::atomic<int> blocks{0};  // allocated and not released
  std::size_t most_bytes = std::size_t{1} << 30;

 private:
  const Script& script_of(const std::string& name) const {
    for (const Script& script : scripts_) {
      if (script.name == name) return script;
    }
    std::abort();
  }

  std::vector<Script> scripts_;
  std::mutex measuring_;
};

}  // namespace lawson::plan
