// A model's Hugging Face config.json -> the attention of every distinct layer and the fusable GEMM
// groups, as Lawson spec documents (kind "attention" and kind "graph"), in the order in which a
// layer runs them. Field names, defaults and window conventions are those of the transformers
// library (configuration_*.py and modeling_*.py of each family).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/status.h"

namespace lawson::front {

struct ModelOptions {
  std::int64_t batch = 1;
  std::int64_t seqlen = 4096;   // tokens per sequence in prefill and training
  std::int64_t context = 8192;  // length of the KV cache in decode
  std::vector<std::string> passes = {"prefill", "decode", "training"};
  std::string dtype;  // empty: the config's torch_dtype when that is f16 or bf16, else bf16
};

struct Workload {
  std::string name;         // "attention.sliding.prefill", "gemm.gate_up.decode"
  std::string group;        // "attention" or "gemm"
  std::int64_t layers = 0;  // how many layers have it
  std::string note;         // what was chosen on the model's behalf; may be empty
  Json spec;
};

struct Model {
  std::string name;        // the source's stem, or its folder's name for a plain "config.json"
  std::string model_type;  // as the config says
  std::string family;      // the row that it was derived by; "common" for an unknown model_type
  std::int64_t layers = 0;
  std::vector<Workload> workloads;
  std::vector<std::string> warnings;
};

// `source` is the file's name, for messages. A missing or absurd field is invalid_argument.
Result<Model> model_from_json(const Json& config, const std::string& source,
                              const ModelOptions& options);

// The values of model_type that have a row of their own, sorted.
std::vector<std::string> known_model_types();

}  // namespace lawson::front
