#include "engine/cudnn/plan_bytes.h"

#include <cstring>
#include <string_view>

#include "base/hash.h"
#include "base/json.h"

namespace lawson::cudnn {
namespace {

// Magic, 32 hex digits of the hash of what follows, CBOR.
constexpr std::string_view kMagic = "LAWSONC2";
constexpr std::size_t kHashDigits = 32;
constexpr std::size_t kPrefix = kMagic.size() + kHashDigits;

constexpr std::int64_t kMostBytes = std::int64_t{1} << 50;

Error damaged(std::string_view what) {
  return error(ErrorKind::io, "the cuDNN plan is damaged: {}; compile it again", what);
}

Json steps_to_json(const std::vector<Step>& steps) {
  Json list = Json::array();
  for (const Step& step : steps) list.push_back(step_to_json(step));
  return list;
}

Result<std::vector<Step>> steps_from_json(const Json& list) {
  std::vector<Step> steps;
  for (const Json& item : list) {
    auto step = step_from_json(item);
    if (!step.ok()) return damaged(step.error().message);
    steps.push_back(std::move(step).value());
  }
  return steps;
}

}  // namespace

std::vector<std::byte> pack_plan(const PlanHeader& header, const PlanBytes& plan) {
  Json derived = Json::array();
  for (const DerivedBinding& binding : plan.supplies.derived) {
    derived.push_back({binding.uid, binding.source_uid, binding.byte_offset});
  }
  Json own = Json::array();
  for (const OwnTensor& tensor : plan.supplies.own) {
    own.push_back({tensor.uid, tensor.bytes, tensor.zero, tensor.ones});
  }
  Json scalars = Json::array();
  for (const OwnScalar& scalar : plan.supplies.scalars) {
    scalars.push_back({scalar.uid, scalar.value, to_string(scalar.dtype)});
  }
  const Json document{{"cudnn_version", header.cudnn_version},
                      {"compute_capability", header.compute_capability},
                      {"key", header.key},
                      {"workspace", plan.workspace},
                      {"derived", std::move(derived)},
                      {"own", std::move(own)},
                      {"scalars", std::move(scalars)},
                      {"before", steps_to_json(plan.supplies.before)},
                      {"after", steps_to_json(plan.supplies.after)},
                      {"data", Json::binary(plan.data)}};
  const std::vector<std::uint8_t> body = Json::to_cbor(document);
  const std::string hash = hash_hex({reinterpret_cast<const char*>(body.data()), body.size()});
  std::vector<std::byte> bytes(kPrefix + body.size());
  std::memcpy(bytes.data(), kMagic.data(), kMagic.size());
  std::memcpy(bytes.data() + kMagic.size(), hash.data(), kHashDigits);
  std::memcpy(bytes.data() + kPrefix, body.data(), body.size());
  return bytes;
}

Result<UnpackedPlan> unpack_plan(std::span<const std::byte> bytes) {
  const std::string_view text{reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  if (!text.starts_with(kMagic)) return damaged("it does not begin like one");
  if (text.size() <= kPrefix) return damaged(fmt::format("it ends after {} bytes", text.size()));
  const std::string_view body = text.substr(kPrefix);
  if (hash_hex(body) != text.substr(kMagic.size(), kHashDigits)) {
    return damaged("its checksum does not match");
  }
  const auto parsed = parse_cbor(body);
  if (!parsed.ok()) return damaged(parsed.error().message);
  const Json& document = *parsed;
  try {
    UnpackedPlan plan;
    plan.header.cudnn_version = document.at("cudnn_version").get<int>();
    plan.header.compute_capability = document.at("compute_capability").get<int>();
    plan.header.key = document.at("key").get<std::string>();
    plan.bytes.workspace = document.at("workspace").get<std::int64_t>();
    for (const Json& item : document.at("derived")) {
      plan.bytes.supplies.derived.push_back({item.at(0).get<std::int64_t>(),
                                             item.at(1).get<std::int64_t>(),
                                             item.at(2).get<std::int64_t>()});
    }
    for (const Json& item : document.at("own")) {
      const OwnTensor tensor{item.at(0).get<std::int64_t>(), item.at(1).get<std::int64_t>(),
                             item.at(2).get<bool>(), item.at(3).get<bool>()};
      if (tensor.bytes < 0 || tensor.bytes > kMostBytes) return damaged("a size is out of range");
      plan.bytes.supplies.own.push_back(tensor);
    }
    for (const Json& item : document.at("scalars")) {
      const auto dtype = dtype_from_string(item.at(2).get<std::string>());
      if (!dtype) return damaged("a scalar has no known dtype");
      plan.bytes.supplies.scalars.push_back(
          {item.at(0).get<std::int64_t>(), item.at(1).get<double>(), *dtype});
    }
    LAWSON_TRY(plan.bytes.supplies.before, steps_from_json(document.at("before")));
    LAWSON_TRY(plan.bytes.supplies.after, steps_from_json(document.at("after")));
    plan.bytes.data = document.at("data").get_binary();
    return plan;
  } catch (const Json::exception& exception) {
    return damaged(exception.what());
  }
}

}  // namespace lawson::cudnn
