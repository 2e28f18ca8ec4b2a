#include "engine/engine.h"

#include <array>
#include <cstring>

#include "base/hash.h"
#include "ir/json.h"

namespace lawson {
namespace {

constexpr std::string_view kPlanMagic = "LAWSONP1";

template <typename Enum, std::size_t N>
Result<Enum> enum_from(const std::string& text, const std::array<Enum, N>& values) {
  for (const Enum value : values) {
    if (to_string(value) == text) return value;
  }
  return error(ErrorKind::internal, "'{}' is not a word of this protocol", text);
}

Error no_such_ability(const Engine& engine, std::string_view ability) {
  return error(ErrorKind::unavailable, "engine '{}' does not offer {}", engine.name(), ability);
}

}  // namespace

std::string_view to_string(Decision decision) {
  switch (decision) {
    case Decision::supported:
      return "supported";
    case Decision::unsupported:
      return "unsupported";
    case Decision::undecided:
      return "undecided";
  }
  return "undecided";
}

std::string_view to_string(Strength strength) {
  switch (strength) {
    case Strength::judged:
      return "judged";
    case Strength::built:
      return "built";
    case Strength::verified:
      return "verified";
  }
  return "judged";
}

std::string_view to_string(Tuning tuning) {
  switch (tuning) {
    case Tuning::off:
      return "off";
    case Tuning::quick:
      return "quick";
    case Tuning::exhaustive:
      return "exhaustive";
  }
  return "off";
}

std::optional<Tuning> tuning_from_string(std::string_view text) {
  for (const Tuning tuning : {Tuning::off, Tuning::quick, Tuning::exhaustive}) {
    if (to_string(tuning) == text) return tuning;
  }
  return std::nullopt;
}

Json verdict_to_json(const Verdict& verdict) {
  Json reasons = Json::array();
  for (const Reason& reason : verdict.reasons) {
    Json item{{"code", reason.code}, {"message", reason.message}};
    if (!reason.field.empty()) item["field"] = reason.field;
    reasons.push_back(std::move(item));
  }
  Json document{{"verdict", to_string(verdict.decision)},
                {"strength", to_string(verdict.strength)},
                {"evidence", to_string(verdict.evidence)},
                {"engine", verdict.engine},
                {"key", verdict.key},
                {"target", verdict.target},
                {"reasons", std::move(reasons)},
                {"rewrites", verdict.rewrites}};
  document[verdict.engine == "cudnn" ? "cudnn_version" : "engine_version"] = verdict.engine_version;
  if (!verdict.plan_id.empty()) document["plan_id"] = verdict.plan_id;
  if (verdict.workspace_bytes) document["workspace_bytes"] = *verdict.workspace_bytes;
  if (!verdict.plan_name.empty()) document["plan_name"] = verdict.plan_name;
  if (!verdict.plan_names.empty()) document["plan_names"] = verdict.plan_names;
  if (!verdict.defect.empty()) document["defect"] = verdict.defect;
  if (!verdict.choice.empty()) document["choice"] = verdict.choice;
  return document;
}

Result<Verdict> verdict_from_json(const Json& document) {
  Verdict verdict;
  try {
    LAWSON_TRY(verdict.decision, enum_from(document.at("verdict").get<std::string>(),
                                           std::array{Decision::supported, Decision::unsupported,
                                                      Decision::undecided}));
    LAWSON_TRY(verdict.strength,
               enum_from(document.at("strength").get<std::string>(),
                         std::array{Strength::judged, Strength::built, Strength::verified}));
    LAWSON_TRY(verdict.evidence,
               enum_from(document.at("evidence").get<std::string>(),
                         std::array{Evidence::live, Evidence::deviceless_measured_target,
                                    Evidence::deviceless_published_target}));
    verdict.engine = document.at("engine").get<std::string>();
    verdict.key = document.at("key").get<std::string>();
    verdict.target = document.at("target").get<std::string>();
    verdict.engine_version =
        document.value(verdict.engine == "cudnn" ? "cudnn_version" : "engine_version", "");
    for (const Json& item : document.at("reasons")) {
      verdict.reasons.push_back({item.at("code").get<std::string>(),
                                 item.at("message").get<std::string>(), item.value("field", "")});
    }
    verdict.rewrites = document.at("rewrites").get<std::vector<std::string>>();
    verdict.plan_id = document.value("plan_id", "");
    verdict.plan_name = document.value("plan_name", "");
    verdict.plan_names = document.value("plan_names", std::vector<std::string>{});
    verdict.defect = document.value("defect", "");
    verdict.choice = document.value("choice", "");
    if (document.contains("workspace_bytes")) {
      verdict.workspace_bytes = document.at("workspace_bytes").get<std::int64_t>();
    }
  } catch (const Json::exception& e) {
    return error(ErrorKind::internal, "a verdict could not be read: {}", e.what());
  }
  return verdict;
}

// magic | header length (8 bytes, little endian) | CBOR header | XXH3-128 of all before (32 hex)
std::string plan_graph_json(const ir::Graph& graph) {
  ir::Graph kept = graph;
  for (ir::Tensor& tensor : kept.tensors) {
    if (!tensor.by_value) tensor.values.clear();
  }
  return ir::graph_to_json(kept).dump();
}

std::vector<std::byte> plan_to_bytes(const Plan& plan) {
  std::vector<std::uint8_t> payload(plan.bytes.size());
  if (!payload.empty()) std::memcpy(payload.data(), plan.bytes.data(), payload.size());
  Json header{{"key", plan.key},
              {"plan_id", plan.plan_id},
              {"engine", plan.engine},
              {"engine_version", plan.engine_version},
              {"target", plan.target},
              {"device_fingerprint", plan.device_fingerprint},
              {"plan_name", plan.plan_name},
              {"workspace_bytes", plan.workspace_bytes},
              {"graph", plan.graph_json},
              {"bytes", Json::binary(std::move(payload))}};
  if (!plan.choice.empty()) header["choice"] = plan.choice;
  if (plan.deviceless) header["deviceless"] = true;
  const std::vector<std::uint8_t> cbor = Json::to_cbor(header);
  std::string out{kPlanMagic};
  for (int i = 0; i < 8; ++i) {
    out += static_cast<char>((static_cast<std::uint64_t>(cbor.size()) >> (8 * i)) & 0xFF);
  }
  out.append(reinterpret_cast<const char*>(cbor.data()), cbor.size());
  out += hash_hex(out);
  const auto* begin = reinterpret_cast<const std::byte*>(out.data());
  return {begin, begin + out.size()};
}

Result<Plan> plan_from_bytes(std::span<const std::byte> bytes) {
  const std::string_view text{reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  const auto bad = [](std::string_view what) { return invalid("not a usable plan: {}", what); };
  constexpr std::size_t kPrefix = kPlanMagic.size() + 8;
  constexpr std::size_t kHash = 32;
  if (text.size() < kPrefix + kHash) return bad("shorter than the smallest plan");
  if (!text.starts_with(kPlanMagic)) return bad("it does not start with a plan's magic bytes");
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < 8; ++i) {
    length |= std::uint64_t{static_cast<unsigned char>(text[kPlanMagic.size() + i])} << (8 * i);
  }
  if (length != text.size() - kPrefix - kHash) return bad("truncated, or with bytes added");
  const std::string_view content = text.substr(0, text.size() - kHash);
  if (hash_hex(content) != text.substr(content.size())) return bad("checksum mismatch");
  Plan plan;
  const auto parsed = parse_cbor(content.substr(kPrefix));
  if (!parsed.ok()) return bad(parsed.error().message);
  const Json& header = *parsed;
  try {
    plan.key = header.at("key").get<std::string>();
    plan.plan_id = header.at("plan_id").get<std::string>();
    plan.engine = header.at("engine").get<std::string>();
    plan.engine_version = header.at("engine_version").get<std::string>();
    plan.target = header.at("target").get<std::string>();
    plan.device_fingerprint = header.at("device_fingerprint").get<std::string>();
    plan.plan_name = header.at("plan_name").get<std::string>();
    plan.workspace_bytes = header.at("workspace_bytes").get<std::int64_t>();
    plan.graph_json = header.at("graph").get<std::string>();
    plan.choice = header.value("choice", "");
    plan.deviceless = header.value("deviceless", false);
    const auto& payload = header.at("bytes").get_binary();
    plan.bytes.resize(payload.size());
    if (!payload.empty()) std::memcpy(plan.bytes.data(), payload.data(), payload.size());
  } catch (const Json::exception& e) {
    return bad(e.what());
  }
  return plan;
}

// Raised by whoever changes what a plan of a graph computes (rewrites, steps, repairs of defects):
// plans of an older Lawson in bundles and stores are then none of the newer one's.
constexpr int kKeyRevision = 1;

std::string make_key(const ir::Graph& graph, const Device& device, std::string_view engine,
                     std::string_view engine_version, const Options& options) {
  std::string text =
      fmt::format("key {}\n{}\ndevice {}\nengine {} {}\nworkspace {} deterministic {}\n",
                  kKeyRevision, ir::canonical_text(graph), fingerprint(device), engine,
                  engine_version, options.workspace_limit, options.deterministic);
  if (options.tuning != Tuning::off) text += fmt::format("tuning {}\n", to_string(options.tuning));
  if (options.dynamic_shapes) text += "dynamic shapes\n";
  return hash_hex(text);
}

std::string make_plan_id(std::string_view key, std::string_view plan_name,
                         const std::vector<std::string>& rewrites) {
  std::string text = fmt::format("plan 1\n{}\n{}\n", key, plan_name);
  for (const std::string& rewrite : rewrites) text += rewrite + "\n";
  return hash_hex(text);
}

std::size_t host_bytes(const Plan& plan) {
  std::size_t bytes = sizeof(plan) + plan.bytes.capacity();
  for (const std::string* text :
       {&plan.key, &plan.plan_id, &plan.engine, &plan.engine_version, &plan.target,
        &plan.device_fingerprint, &plan.plan_name, &plan.graph_json, &plan.choice}) {
    bytes += text->capacity();
  }
  return bytes;
}

std::size_t host_bytes(const ir::Graph& graph) {
  std::size_t bytes = sizeof(graph) + graph.name.capacity();
  for (const ir::Tensor& tensor : graph.tensors) {
    bytes += sizeof(tensor) + tensor.name.capacity() + sizeof(double) * tensor.values.capacity() +
             sizeof(std::int64_t) * (tensor.shape.capacity() + tensor.strides.capacity());
  }
  for (const ir::Node& node : graph.nodes) {
    bytes += sizeof(node) + node.source.capacity() +
             sizeof(ir::TensorId) * (node.inputs.capacity() + node.outputs.capacity());
  }
  return bytes;
}

Result<std::vector<OracleOutput>> Engine::oracle(const ir::Graph&, std::span<const Binding>,
                                                 const Arithmetic&) {
  return no_such_ability(*this, "an oracle");
}

Result<std::vector<Device>> Engine::live_devices() {
  return std::vector<Device>{};
}
std::vector<Device> Engine::known_targets() const {
  return {};
}
Json Engine::info() {
  return Json::object();
}

Result<void*> Engine::allocate(const Device&, std::size_t) {
  return no_such_ability(*this, "device memory");
}
Status Engine::release(const Device&, void*) {
  return no_such_ability(*this, "device memory");
}
Status Engine::copy_to_device(const Device&, void*, const void*, std::size_t) {
  return no_such_ability(*this, "device memory");
}
Status Engine::copy_to_host(const Device&, void*, const void*, std::size_t) {
  return no_such_ability(*this, "device memory");
}
Status Engine::synchronize(const Device&, void*) {
  return {};
}
Result<std::vector<double>> Engine::measure(const Loaded&, std::span<const std::vector<Binding>>,
                                            void*, int, int) {
  return no_such_ability(*this, "measurements");
}
Status Engine::prepare_graph(const Loaded&, GraphUse, std::span<const Binding>, void*, void*) {
  return unsupported("graph_native",
                     fmt::format("engine '{}' has nothing to add to a CUDA graph", name()),
                     "engine");
}
Result<bool> Engine::capturing(const Device&, void*) {
  return false;
}

}  // namespace lawson
