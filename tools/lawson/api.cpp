#include "api.h"

#include <utility>

namespace lawson::cli {
namespace {

// One word for each kind, whether the library or the tool found it.
std::string kind_of(lawson_status status) {
  switch (status) {
    case LAWSON_CUDA:
      return "cuda";
    case LAWSON_CUDNN:
      return "cudnn";
    case LAWSON_IO:
      return "io";
    case LAWSON_INTERNAL:
      return "internal";
    default:
      break;
  }
  std::string kind = lawson_status_string(status);
  for (char& c : kind) c = c == ' ' || c == '-' ? '_' : c;
  return kind;
}

int exit_code_of(lawson_status status) {
  switch (status) {
    case LAWSON_OK:
      return kExitOk;
    case LAWSON_UNSUPPORTED:
      return kExitNo;
    case LAWSON_INVALID_ARGUMENT:
      return kExitInput;
    default:
      return kExitEnvironment;
  }
}

}  // namespace

Failure::Failure(std::string kind, int exit_code, std::string message)
    : kind_{std::move(kind)}, exit_code_{exit_code}, message_{std::move(message)} {}

Json Failure::json() const {
  return {{"kind", kind_}, {"message", message_}};
}

Failure bad_input(std::string message) {
  return {"invalid_argument", kExitInput, std::move(message)};
}

Failure bad_usage(std::string message) {
  return {"usage", kExitInput, std::move(message)};
}

Failure last_failure(lawson_status status) {
  return {kind_of(status), exit_code_of(status), lawson_last_error_message()};
}

void check(lawson_status status) {
  if (status != LAWSON_OK) throw last_failure(status);
}

lawson_options ProbeOptions::c() const {
  lawson_options options{};
  options.struct_size = sizeof(options);
  options.engine = engine.empty() ? nullptr : engine.c_str();
  options.strength = strength;
  options.workspace_limit = -1;
  options.deadline_ms = deadline_ms;
  if (tuning == "quick") options.tuning = LAWSON_TUNING_QUICK;
  if (tuning == "exhaustive") options.tuning = LAWSON_TUNING_EXHAUSTIVE;
  options.retune = retune ? 1 : 0;
  options.dynamic_shapes = dynamic_shapes ? 1 : 0;
  return options;
}

Device find_device(const std::string& name) {
  return make<Device>(lawson_device_find, name.c_str());
}

Spec read_spec(std::string_view text, const std::string& source) {
  return make<Spec>(lawson_spec_from_json, text.data(), text.size(), source.c_str());
}

Json probe(const Spec& spec, const Device& device, const ProbeOptions& options) {
  const lawson_options c_options = options.c();
  const Verdict verdict = make<Verdict>(lawson_probe_spec, spec.get(), device.get(), &c_options);
  return json_of(lawson_verdict_json, verdict.get());
}

std::vector<lawson_tensor_info> tensors_of(const Graph& graph) {
  std::vector<lawson_tensor_info> tensors(lawson_graph_tensor_count(graph.get()));
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    tensors[i] = {};
    tensors[i].struct_size = sizeof(lawson_tensor_info);
    check(lawson_graph_tensor(graph.get(), i, &tensors[i]));
  }
  return tensors;
}

}  // namespace lawson::cli
