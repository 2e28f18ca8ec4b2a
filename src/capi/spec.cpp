// Spec documents, graphs, models.
#include <algorithm>
#include <array>
#include <cstddef>

#include "capi/guard.h"
#include "capi/handles.h"
#include "front/model.h"
#include "ir/json.h"

namespace lawson::capi {
namespace {

constexpr std::array kTensorInfoPrefixes{
    offsetof(lawson_tensor_info, name),        offsetof(lawson_tensor_info, dtype),
    offsetof(lawson_tensor_info, rank),        offsetof(lawson_tensor_info, shape),
    offsetof(lawson_tensor_info, strides),     offsetof(lawson_tensor_info, is_input),
    offsetof(lawson_tensor_info, is_by_value), offsetof(lawson_tensor_info, alignment),
    offsetof(lawson_tensor_info, size)};

constexpr std::array kModelPrefixes{
    offsetof(lawson_model_options, batch), offsetof(lawson_model_options, seqlen),
    offsetof(lawson_model_options, context), offsetof(lawson_model_options, passes),
    offsetof(lawson_model_options, dtype)};

std::string source_name(const char* source, const char* fallback) {
  return source == nullptr || *source == '\0' ? fallback : source;
}

Result<Json> read_document(const char* text, std::size_t size, const std::string& source) {
  LAWSON_CHECK(require(text, "text"));
  return parse_json({text, size}, source);
}

// "prefill,decode" -> the words; the front end says which words there are.
std::vector<std::string> split_passes(std::string_view text) {
  std::vector<std::string> words;
  while (!text.empty()) {
    const std::size_t comma = std::min(text.find(','), text.size());
    words.emplace_back(text.substr(0, comma));
    text.remove_prefix(std::min(comma + 1, text.size()));
  }
  return words;
}

Result<std::int64_t> positive_or(std::int64_t value, std::int64_t fallback, const char* name) {
  if (value < 0) {  // what is too large the front end says
    return invalid("options.{}: {} is not allowed; expected 0 (the default, {}) or more", name,
                   value, fallback);
  }
  return value == 0 ? fallback : value;
}

Result<front::ModelOptions> read_model_options(const lawson_model_options* options) {
  lawson_model_options given{};
  LAWSON_CHECK(read_struct(options, given, "lawson_model_options", kModelPrefixes));
  front::ModelOptions result;
  LAWSON_TRY(result.batch, positive_or(given.batch, result.batch, "batch"));
  LAWSON_TRY(result.seqlen, positive_or(given.seqlen, result.seqlen, "seqlen"));
  LAWSON_TRY(result.context, positive_or(given.context, result.context, "context"));
  if (given.passes != nullptr) {
    const std::vector<std::string> known = result.passes;
    result.passes = split_passes(given.passes);
    for (const std::string& pass : result.passes) {
      if (std::find(known.begin(), known.end(), pass) == known.end()) {
        return invalid("options.passes: '{}' is not a pass; expected some of {} joined by ','",
                       pass.substr(0, 60), fmt::join(known, ", "));
      }
    }
    if (result.passes.empty()) {
      return invalid("options.passes: empty; expected some of {} joined by ','",
                     fmt::join(known, ", "));
    }
  }
  if (given.dtype != nullptr) result.dtype = given.dtype;
  return result;
}

Json model_to_json(const front::Model& model) {
  Json workloads = Json::array();
  for (const front::Workload& workload : model.workloads) {
    workloads.push_back({{"name", workload.name},
                         {"group", workload.group},
                         {"layers", workload.layers},
                         {"note", workload.note},
                         {"spec", workload.spec}});
  }
  return {{"model", model.name},        {"model_type", model.model_type},
          {"family", model.family},     {"layers", model.layers},
          {"warnings", model.warnings}, {"workloads", std::move(workloads)}};
}

}  // namespace

Status write_tensor_info(const ir::Tensor& tensor, std::int64_t uid, bool is_input,
                         lawson_tensor_info* info) {
  lawson_tensor_info found{};
  found.uid = uid;
  found.name = tensor.name.c_str();
  found.dtype = to_string(tensor.dtype).data();  // a literal: NUL-terminated
  found.rank = static_cast<std::int32_t>(tensor.shape.size());
  std::copy(tensor.shape.begin(), tensor.shape.end(), found.shape);
  std::copy(tensor.strides.begin(), tensor.strides.end(), found.strides);
  found.is_input = is_input ? 1 : 0;
  found.is_by_value = tensor.by_value ? 1 : 0;
  found.alignment = tensor.alignment;
  // A checked tensor's extent is known not to overflow.
  found.size = byte_size(tensor.dtype, storage_extent(tensor.shape, tensor.strides).value_or(0));
  return write_struct(found, info, "lawson_tensor_info", kTensorInfoPrefixes);
}

}  // namespace lawson::capi

using namespace lawson;
using namespace lawson::capi;

extern "C" {

lawson_status lawson_spec_from_json(const char* text, size_t size, const char* source,
                                    lawson_spec** spec) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(spec, "spec"));
    const std::string name = source_name(source, "spec");
    LAWSON_TRY(Json document, read_document(text, size, name));
    LAWSON_TRY(front::Spec read, front::spec_from_json(document, name));
    *spec = new lawson_spec{std::move(read)};
    return {};
  });
}

void lawson_spec_destroy(lawson_spec* spec) {
  delete spec;
}

const char* lawson_spec_name(const lawson_spec* spec) {
  return spec == nullptr ? "" : spec->spec.name.c_str();
}

lawson_status lawson_spec_json(const lawson_spec* spec, lawson_text** json) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(spec, "spec"));
    LAWSON_CHECK(require(json, "json"));
    return give_text(dump(spec->spec.document), json);
  });
}

size_t lawson_spec_graph_count(const lawson_spec* spec) {
  return spec == nullptr ? 0 : spec->spec.parts.size();
}

lawson_status lawson_spec_graph(const lawson_spec* spec, size_t index, lawson_graph** graph) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(spec, "spec"));
    LAWSON_CHECK(require(graph, "graph"));
    const auto& parts = spec->spec.parts;
    if (index >= parts.size()) {
      return invalid("argument 'index': {} is not allowed; spec '{}' has {} graphs", index,
                     spec->spec.name, parts.size());
    }
    *graph = new lawson_graph{parts[index].graph};
    return {};
  });
}

lawson_status lawson_graph_from_json(const char* text, size_t size, const char* source,
                                     lawson_graph** graph) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(graph, "graph"));
    const std::string name = source_name(source, "graph");
    LAWSON_TRY(Json document, read_document(text, size, name));
    LAWSON_TRY(ir::Graph read, ir::graph_from_json(document, name));
    *graph = new lawson_graph{std::move(read)};
    return {};
  });
}

void lawson_graph_destroy(lawson_graph* graph) {
  delete graph;
}

const char* lawson_graph_name(const lawson_graph* graph) {
  return graph == nullptr ? "" : graph->graph.name.c_str();
}

lawson_status lawson_graph_json(const lawson_graph* graph, lawson_text** json) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(graph, "graph"));
    LAWSON_CHECK(require(json, "json"));
    return give_text(dump(ir::graph_to_json(graph->graph)), json);
  });
}

lawson_status lawson_graph_print(const lawson_graph* graph, lawson_text** text) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(graph, "graph"));
    LAWSON_CHECK(require(text, "text"));
    return give_text(ir::print(graph->graph), text);
  });
}

lawson_status lawson_graph_dot(const lawson_graph* graph, lawson_text** text) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(graph, "graph"));
    LAWSON_CHECK(require(text, "text"));
    return give_text(ir::to_dot(graph->graph), text);
  });
}

size_t lawson_graph_tensor_count(const lawson_graph* graph) {
  if (graph == nullptr) return 0;
  const ir::Graph& content = graph->graph;
  return static_cast<std::size_t>(content.input_count) +
         static_cast<std::size_t>(content.output_count);
}

lawson_status lawson_graph_tensor(const lawson_graph* graph, size_t index,
                                  lawson_tensor_info* info) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(graph, "graph"));
    LAWSON_CHECK(require(info, "info"));
    const std::size_t count = lawson_graph_tensor_count(graph);
    if (index >= count) {
      return invalid("argument 'index': {} is not allowed; graph '{}' has {} inputs and outputs",
                     index, graph->graph.name, count);
    }
    const auto id = static_cast<ir::TensorId>(index);
    return write_tensor_info(graph->graph.tensor(id), ir::Graph::uid(id), graph->graph.is_input(id),
                             info);
  });
}

lawson_status lawson_model_workloads(const char* text, size_t size, const char* source,
                                     const lawson_model_options* options, lawson_text** json) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(json, "json"));
    const std::string name = source_name(source, "config.json");
    LAWSON_TRY(front::ModelOptions wanted, read_model_options(options));
    LAWSON_TRY(Json config, read_document(text, size, name));
    LAWSON_TRY(front::Model model, front::model_from_json(config, name, wanted));
    return give_text(dump(model_to_json(model)), json);
  });
}

}  // extern "C"
