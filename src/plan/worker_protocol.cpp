#include "plan/worker_protocol.h"

#include <array>
#include <cstring>

#include "base/hash.h"
#include "ir/json.h"

namespace lawson::plan {
namespace {

// Consumed bytes stay in front of the buffer until this many have gathered.
constexpr std::size_t kCompactBytes = std::size_t{1} << 20;

constexpr std::array kVerbs{Verb::probe, Verb::candidates, Verb::compile};
constexpr std::array kErrorKinds{ErrorKind::unsupported, ErrorKind::invalid_argument,
                                 ErrorKind::unavailable, ErrorKind::out_of_memory,
                                 ErrorKind::cuda,        ErrorKind::cudnn,
                                 ErrorKind::io,          ErrorKind::cancelled,
                                 ErrorKind::internal};

template <typename F>
auto guarded(std::string_view what, F&& read) -> decltype(read()) {
  try {
    return read();
  } catch (const Json::exception& e) {
    return error(ErrorKind::internal, "{} could not be read: {}", what, e.what());
  }
}

}  // namespace

Result<std::string> encode_frame(const Json& document) {
  std::string frame(kFramePrefixBytes, '\0');
  try {
    Json::to_cbor(document, frame);
  } catch (const Json::exception& e) {
    return error(ErrorKind::internal, "a message could not be written: {}", e.what());
  }
  const std::size_t length = frame.size() - kFramePrefixBytes;
  if (length > kMaxFrameBytes) {
    return error(ErrorKind::internal, "a message of {} bytes is larger than the {} allowed", length,
                 kMaxFrameBytes);
  }
  for (std::size_t i = 0; i < kFramePrefixBytes; ++i) {
    frame[i] = static_cast<char>((std::uint64_t{length} >> (8 * i)) & 0xFF);
  }
  return frame;
}

std::optional<std::uint64_t> FrameReader::length() const {
  if (buffer_.size() - taken_ < kFramePrefixBytes) return std::nullopt;
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < kFramePrefixBytes; ++i) {
    length |= std::uint64_t{static_cast<unsigned char>(buffer_[taken_ + i])} << (8 * i);
  }
  return length;
}

Status FrameReader::feed(std::string_view bytes) {
  buffer_.append(bytes);
  if (const auto announced = length(); announced && *announced > kMaxFrameBytes) {
    return error(ErrorKind::internal,
                 "a frame announces {} bytes; at most {} are allowed: these are not frames",
                 *announced, kMaxFrameBytes);
  }
  return {};
}

Result<std::optional<Json>> FrameReader::next() {
  const auto announced = length();
  if (!announced || *announced > buffer_.size() - taken_ - kFramePrefixBytes) {
    return std::optional<Json>{};
  }
  const auto size = static_cast<std::size_t>(*announced);
  auto document = parse_cbor(std::string_view{buffer_}.substr(taken_ + kFramePrefixBytes, size));
  taken_ += kFramePrefixBytes + size;
  if (taken_ == buffer_.size() || taken_ > kCompactBytes) {
    buffer_.erase(0, taken_);
    taken_ = 0;
  }
  if (!document.ok()) return std::move(document).error();
  return std::optional<Json>{std::move(document).value()};
}

std::string_view to_string(Verb verb) {
  switch (verb) {
    case Verb::probe:
      return "probe";
    case Verb::candidates:
      return "candidates";
    case Verb::compile:
      return "compile";
  }
  return "probe";
}

Json request_to_json(Verb verb, const ir::Graph& graph, const Device& device,
                     const Options& options, const std::optional<Candidate>& candidate) {
  Json document{{"request", to_string(verb)},
                {"graph", ir::graph_to_json(graph)},
                {"graph_hash", hash_hex(ir::canonical_text(graph))},
                {"device", device_to_json(device)},
                {"options", options_to_json(options)}};
  if (candidate) document["candidate"] = candidate->name;
  return document;
}

Result<WorkerRequest> request_from_json(const Json& document) {
  return guarded("a request", [&]() -> Result<WorkerRequest> {
    WorkerRequest request;
    const auto name = document.at("request").get<std::string>();
    bool known = false;
    for (const Verb verb : kVerbs) {
      if (to_string(verb) != name) continue;
      request.verb = verb;
      known = true;
    }
    if (!known) {
      return error(ErrorKind::internal,
                   "request '{}' is unknown; known: probe, candidates, compile", name);
    }
    LAWSON_TRY(request.graph, ir::graph_from_json(document.at("graph"), "request"));
    const std::string hash = hash_hex(ir::canonical_text(request.graph));
    if (const auto sent = document.at("graph_hash").get<std::string>(); sent != hash) {
      return error(ErrorKind::internal,
                   "the graph '{}' changed on its way to the worker (hash {} was sent, {} arrived)",
                   request.graph.name, sent, hash);
    }
    LAWSON_TRY(request.device, device_from_json(document.at("device"), "request: device"));
    LAWSON_TRY(request.options, options_from_json(document.at("options")));
    if (document.contains("candidate")) {
      request.candidate = Candidate{document.at("candidate").get<std::string>()};
    }
    return request;
  });
}

Json options_to_json(const Options& options) {
  return {{"strength", to_string(options.strength)}, {"workspace_limit", options.workspace_limit},
          {"deterministic", options.deterministic},  {"tuning", to_string(options.tuning)},
          {"deadline_ms", options.deadline_ms},      {"dynamic_shapes", options.dynamic_shapes}};
}

Result<Options> options_from_json(const Json& document) {
  return guarded("a request's options", [&]() -> Result<Options> {
    Options options;
    const auto strength = document.at("strength").get<std::string>();
    for (const Strength value : {Strength::judged, Strength::built, Strength::verified}) {
      if (to_string(value) == strength) options.strength = value;
    }
    options.workspace_limit = document.at("workspace_limit").get<std::int64_t>();
    options.deterministic = document.at("deterministic").get<bool>();
    const auto word = document.at("tuning").get<std::string>();
    const auto tuning = tuning_from_string(word);
    if (!tuning)
      return error(ErrorKind::internal, "tuning '{}' is not a word of this protocol", word);
    options.tuning = *tuning;
    options.deadline_ms = document.at("deadline_ms").get<double>();
    options.dynamic_shapes = document.at("dynamic_shapes").get<bool>();
    return options;
  });
}

Json candidates_to_json(const std::vector<Candidate>& candidates) {
  Json list = Json::array();
  for (const Candidate& candidate : candidates) list.push_back(candidate.name);
  return list;
}

Result<std::vector<Candidate>> candidates_from_json(const Json& document) {
  return guarded("a list of engine configs", [&]() -> Result<std::vector<Candidate>> {
    std::vector<Candidate> candidates;
    for (const Json& name : document) candidates.push_back({name.get<std::string>()});
    return candidates;
  });
}

Json plan_to_json(const Plan& plan) {
  const std::vector<std::byte> bytes = plan_to_bytes(plan);
  std::vector<std::uint8_t> payload(bytes.size());
  std::memcpy(payload.data(), bytes.data(), bytes.size());
  return Json::binary(std::move(payload));
}

Result<Plan> plan_from_json(const Json& document) {
  return guarded("a plan", [&]() -> Result<Plan> {
    const auto& payload = document.get_binary();
    return plan_from_bytes(std::as_bytes(std::span{payload}));
  });
}

Json error_to_json(const Error& error) {
  Json reasons = Json::array();
  for (const Reason& reason : error.reasons) {
    reasons.push_back(
        {{"code", reason.code}, {"message", reason.message}, {"field", reason.field}});
  }
  return {
      {"kind", to_string(error.kind)}, {"message", error.message}, {"reasons", std::move(reasons)}};
}

Error error_from_json(const Json& document) {
  try {
    Error result;
    const auto kind = document.at("kind").get<std::string>();
    for (const ErrorKind value : kErrorKinds) {
      if (kind == to_string(value)) result.kind = value;
    }
    result.message = document.at("message").get<std::string>();
    for (const Json& item : document.at("reasons")) {
      result.reasons.push_back({item.at("code").get<std::string>(),
                                item.at("message").get<std::string>(),
                                item.at("field").get<std::string>()});
    }
    return result;
  } catch (const Json::exception& e) {
    return error(ErrorKind::internal, "the worker reported an error that cannot be read ({})",
                 e.what());
  }
}

}  // namespace lawson::plan
