// Turns what cuDNN and its frontend say into a category and into sentences. cuDNN's own status
// decides the category; our wording never decides a verdict.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "engine/device.h"
#include "ir/graph.h"

namespace lawson::cudnn {

// A failed call of the frontend.
struct StageError {
  std::string stage;  // "validate", "build_operation_graph", "heuristics", "build_plan", ...
  std::string code;   // the frontend's error code by name: "GRAPH_NOT_SUPPORTED", ...
  std::string text;   // its message, with cuDNN's; may be empty
};

enum class Fault {
  unsupported,     // an answer
  undecided,       // judged without a device, and an engine can answer only on one
  compile_failed,  // a kernel did not compile: ambiguous until a control plan has been built
  caller,          // the request is wrong
  environment,     // libraries missing or mismatching
  out_of_memory,
  broken,  // cuDNN, CUDA or we
};

// `deviceless`: judged for a target, without a device.
Fault classify(const StageError& failure, bool deviceless);

// What one engine of the heuristics said.
struct EngineRefusal {
  int engine = -1;
  std::string knobs;   // "KERNEL_CFG=7"; "" when the engine was asked without knobs
  std::string status;  // without the prefix CUDNN_STATUS_
  std::string text;    // the innermost reason
};
std::vector<EngineRefusal> parse_refusals(const std::string& text);

// At least one reason; each names attribute, value and limit as far as cuDNN tells.
std::vector<Reason> explain(const StageError& failure, const ir::Graph& graph, const Device& device,
                            int cudnn_version);

// Why the engines that cannot be asked without a device are left: for Decision::undecided.
std::vector<Reason> explain_undecided(const StageError& failure, const ir::Graph& graph,
                                      const Device& device);

// The error of a failure that is no verdict.
Error to_error(const StageError& failure, Fault fault, const Device& device);

// "attention backward f32, heads 16/4, head dims 128/128, seqlens 1024/1024",
// "op 'matmul' (p, at mlp.cpp:12), bf16[1, 4, 8] x f16[1, 8, 16]".
std::string subject_of(const ir::Graph& graph);

}  // namespace lawson::cudnn
