// What is asked of an attention config: its spec, its graphs, its verdict.
#include "capi/attention.h"
#include "capi/guard.h"
#include "capi/handles.h"
#include "front/spec.h"

namespace lawson::capi {
namespace {

const auto& kSource = *new const std::string{"attention config"};  // never destroyed

std::string_view pass_text(front::Pass pass) {
  return pass == front::Pass::backward ? "backward" : "forward";
}

}  // namespace

Result<front::AttentionSpec> attention_spec(const Json& document) {
  return front::attention_from_json(document, kSource);
}

Result<Json> attention_document_from_text(std::string_view text, const std::string& source) {
  LAWSON_TRY(const Json document, parse_json(text, source));
  LAWSON_TRY(front::AttentionSpec spec, front::attention_from_json(document, source));
  // "bshd_bshd_bshd" is spelled "bshd" where numbers stand for layouts.
  const auto layout = front::parse_layout(spec.layout);
  const bool alike = layout && layout->packing == front::Layout::Packing::separate &&
                     layout->words[0] == layout->words[1] && layout->words[1] == layout->words[2];
  if (alike) spec.layout = layout->words[0];
  const bool given_scale = spec.scale.has_value();
  Json result = front::attention_to_json(spec);
  if (!given_scale) result.erase("scale");
  return result;
}

Result<ir::Graph> attention_graph(const Json& document, front::Pass pass) {
  LAWSON_TRY(const front::AttentionSpec spec, attention_spec(document));
  if (spec.context_parallel) {
    return invalid(
        "{}: field 'context_parallel': a config of a whole context-parallel run is judged, not "
        "executed; each rank's steps have configs of their own",
        kSource);
  }
  if (spec.pass != front::Pass::training && spec.pass != pass) {
    return invalid("{}: field 'pass': '{}' was asked for, and the config is of pass '{}'", kSource,
                   pass_text(pass), pass_text(spec.pass));
  }
  auto graph = front::attention_graph(spec, pass);
  if (!graph.ok() && graph.error().kind == ErrorKind::invalid_argument) {
    return invalid("{}: {}", kSource, graph.error().message);
  }
  return graph;
}

Result<SpecVerdict> select(const Json& document, const Device& device, const Asked& asked,
                           plan::Planner& planner) {
  LAWSON_TRY(const front::Spec spec, front::spec_from_json(document, kSource));
  return judge_spec(spec, device, asked, planner);
}

Result<std::shared_ptr<const ConfigQuestion>> ConfigQuestion::make(const Json& document) {
  auto question = std::make_shared<ConfigQuestion>();
  LAWSON_TRY(question->spec_, front::spec_from_json(document, kSource));
  for (const front::SpecPart& part : question->spec_.parts) {
    question->graphs_.emplace_back(part.graph);
  }
  return std::shared_ptr<const ConfigQuestion>{std::move(question)};
}

std::shared_ptr<const ConfigQuestion::Joint> ConfigQuestion::last() const {
  const std::lock_guard lock{mutex_};
  return last_;
}

// The parts' verdicts are known, and are the same as before.
bool ConfigQuestion::was_told(const Joint& joint, const plan::KnownDevice& device,
                              const Asked& asked, plan::Planner& planner) const {
  for (std::size_t i = 0; i < graphs_.size(); ++i) {
    if (planner.known_verdict(graphs_[i], device, asked.engine, asked.options) != joint.parts[i]) {
      return false;
    }
  }
  return true;
}

Result<std::unique_ptr<lawson_verdict>> ConfigQuestion::ask(const plan::KnownDevice& device,
                                                            const Asked& asked,
                                                            plan::Planner& planner) const {
  if (graphs_.size() == 1 && spec_.steps.empty()) {
    LAWSON_TRY(auto verdict, planner.verdict(graphs_.front(), device, asked.engine, asked.options));
    return std::make_unique<lawson_verdict>(lawson_verdict{std::move(verdict), nullptr});
  }
  if (const auto joint = last(); joint != nullptr && was_told(*joint, device, asked, planner)) {
    for (const plan::KnownGraph& graph : graphs_) {
      LAWSON_CHECK(planner.verdict(graph, device, asked.engine, asked.options));
    }
    return make_verdict_handle(joint->verdict);
  }
  auto joint = std::make_shared<Joint>();
  joint->parts.resize(graphs_.size());
  const auto probe = [&](const ir::Graph& graph) -> Result<Verdict> {
    for (std::size_t i = 0; i < graphs_.size(); ++i) {
      if (&spec_.parts[i].graph != &graph) continue;
      LAWSON_TRY(joint->parts[i], planner.verdict(graphs_[i], device, asked.engine, asked.options));
      return *joint->parts[i];
    }
    return error(ErrorKind::internal, "a graph of no part of the config was to be judged");
  };
  LAWSON_TRY(SpecVerdict judged, judge_spec(spec_, device.device(), asked, planner, probe));
  joint->verdict = std::make_shared<const SpecVerdict>(std::move(judged));
  if (!graphs_.empty()) {
    const std::lock_guard lock{mutex_};
    last_ = joint;
  }
  return make_verdict_handle(joint->verdict);
}

}  // namespace lawson::capi

using namespace lawson;
using namespace lawson::capi;

extern "C" {

lawson_status lawson_attention_config_create(lawson_attention_config** config) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(config, "config"));
    *config = new lawson_attention_config{empty_attention_document()};
    return {};
  });
}

void lawson_attention_config_destroy(lawson_attention_config* config) {
  delete config;
}

lawson_status lawson_attention_config_set_attribute(lawson_attention_config* config,
                                                    int32_t attribute, const void* value,
                                                    size_t size) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(config, "config"));
    config->memo.reset();
    return set_config_attribute(config->document, attribute, value, size);
  });
}

lawson_status lawson_attention_config_get_attribute(const lawson_attention_config* config,
                                                    int32_t attribute, void* value, size_t capacity,
                                                    size_t* size_written) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(config, "config"));
    return get_config_attribute(config->document, attribute, value, capacity, size_written);
  });
}

lawson_status lawson_attention_config_from_spec(const char* text, size_t size, const char* source,
                                                lawson_attention_config** config) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(text, "text"));
    LAWSON_CHECK(require(config, "config"));
    const std::string name = source == nullptr || *source == '\0' ? "spec" : source;
    LAWSON_TRY(Json document, attention_document_from_text({text, size}, name));
    *config = new lawson_attention_config{std::move(document)};
    return {};
  });
}

lawson_status lawson_attention_config_spec(const lawson_attention_config* config,
                                           lawson_text** json) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(config, "config"));
    LAWSON_CHECK(require(json, "json"));
    LAWSON_TRY(const front::AttentionSpec spec, attention_spec(config->document));
    return give_text(dump(front::attention_to_json(spec)), json);
  });
}

lawson_status lawson_graph_from_attention(const lawson_attention_config* config, int32_t pass,
                                          lawson_graph** graph) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(config, "config"));
    LAWSON_CHECK(require(graph, "graph"));
    if (pass != LAWSON_PASS_FORWARD && pass != LAWSON_PASS_BACKWARD) {
      return invalid(
          "argument 'pass': {} is not allowed; expected LAWSON_PASS_FORWARD (0) or "
          "LAWSON_PASS_BACKWARD (1)",
          pass);
    }
    LAWSON_TRY(ir::Graph made,
               capi::attention_graph(config->document, static_cast<front::Pass>(pass)));
    *graph = new lawson_graph{std::move(made)};
    return {};
  });
}

lawson_status lawson_attention_select(const lawson_attention_config* config,
                                      const lawson_device* device, const lawson_options* options,
                                      lawson_verdict** verdict) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(config, "config"));
    LAWSON_CHECK(require(device, "device"));
    LAWSON_CHECK(require(verdict, "verdict"));
    LAWSON_TRY(Asked asked, read_options(options));
    LAWSON_TRY(plan::Planner * planner, capi::planner());
    auto question = config->memo.current();
    if (question == nullptr) {
      LAWSON_TRY(auto made, ConfigQuestion::make(config->document));
      question = config->memo.get([&] { return std::move(made); });
    }
    const auto known = device->known();
    LAWSON_TRY(auto answer, question->ask(*known, asked, *planner));
    *verdict = answer.release();
    return {};
  });
}

}  // extern "C"
