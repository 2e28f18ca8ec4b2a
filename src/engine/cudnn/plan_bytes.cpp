#include "engine/cudnn/plan_bytes.h"

#include <cstring>
#include <string_view>

#include "base/hash.h"
#include "base/json.h"

namespace lawson::cudnn {
namespace {

// Magic, 32 hex digits of the hash of what follows, CBOR.
constexpr std::string_view kMagic = "LAWSONC1";
constexpr std::size_t kHashDigits = 32;
constexpr std::size_t kPrefix = kMagic.size() + kHashDigits;

Error damaged(std::string_view what) {
  return error(ErrorKind::io, "the cuDNN plan is damaged: {}; compile it again", what);
}

}  // namespace

std::vector<std::byte> pack_plan(const PlanHeader& header, const PlanBytes& plan) {
  Json derived = Json::array();
  for (const DerivedBinding& binding : plan.supplies.derived) {
    derived.push_back({binding.uid, binding.source_uid, binding.byte_offset});
  }
  Json zeros = Json::array();
  for (const ZeroTensor& zero : plan.supplies.zeros) zeros.push_back({zero.uid, zero.bytes});
  const Json document{{"cudnn_version", header.cudnn_version},
                      {"compute_capability", header.compute_capability},
                      {"key", header.key},
                      {"workspace", plan.workspace},
                      {"derived", std::move(derived)},
                      {"zeros", std::move(zeros)},
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
    for (const Json& item : document.at("zeros")) {
      plan.bytes.supplies.zeros.push_back(
          {item.at(0).get<std::int64_t>(), item.at(1).get<std::int64_t>()});
    }
    plan.bytes.data = document.at("data").get_binary();
    return plan;
  } catch (const Json::exception& exception) {
    return damaged(exception.what());
  }
}

}  // namespace lawson::cudnn
