// Executes one graph on one engine with generated inputs and compares with the oracle.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "plan/inputs.h"
#include "plan/verify.h"

namespace lawson::cases {

struct Judgement {
  plan::Comparison comparison;
  std::string damage;                 // what was written that is not an output; "": nothing
  Plan plan;                          // what ran
  std::vector<plan::Buffer> outputs;  // as the engine left them
  double seconds = 0;                 // of the fastest execution

  bool ok() const { return comparison.ok() && damage.empty(); }
  std::string text() const;
};

struct JudgeOptions {
  std::uint64_t seed = 1;
  plan::InputStyle style = plan::InputStyle::normal;
  int repetitions = 1;  // more than one: for timing
  bool compare = true;
  bool in_place = false;       // outputs share an input's memory where they may
  const Plan* plan = nullptr;  // execute this one instead of probing and compiling
  Options options;
};

// ErrorKind::unsupported when the engine does not take the graph. Works for engines on host memory
// and, through Engine::allocate and its copies, for those on a live GPU.
Result<Judgement> judge(Engine& engine, const Device& device, const ir::Graph& graph,
                        Engine& reference, const JudgeOptions& options);

// The same with given inputs and what is expected for them (empty: nothing is compared).
Result<Judgement> judge(Engine& engine, const Device& device, const ir::Graph& graph,
                        const Plan& plan, std::vector<plan::Buffer>& inputs,
                        std::span<const OracleOutput> expected, const JudgeOptions& options);

// The plan that probing and compiling give.
Result<Plan> compiled(Engine& engine, const Device& device, const ir::Graph& graph,
                      const Options& options);

// The device that the engine runs on here: the host CPU or its first live GPU.
Result<Device> device_of(Engine& engine);

}  // namespace lawson::cases
