#include "plan/store_entry.h"

#include <algorithm>
#include <array>

#include "base/hash.h"
#include "base/json.h"
#include "plan/file_parts.h"

namespace lawson::plan {
namespace {

constexpr std::string_view kMagic = "LAWSONS1";
constexpr std::uint64_t kSchema = 1;
constexpr std::size_t kSchemaAt = 8;
constexpr std::size_t kHeaderSizeAt = 12;
constexpr std::size_t kContentSizeAt = 16;
constexpr std::size_t kChecksumAt = 24;
constexpr std::size_t kHeaderAt = kChecksumAt + kHashBytes;
constexpr std::size_t kMaxHeaderBytes = kMaxHeadBytes - kHeaderAt - kHashBytes;
constexpr std::array kKinds{EntryKind::plan, EntryKind::verdict, EntryKind::tuned};

std::optional<EntryKind> kind_from(std::string_view word) {
  const auto* found = std::find_if(kKinds.begin(), kKinds.end(),
                                   [&](EntryKind kind) { return to_string(kind) == word; });
  return found == kKinds.end() ? std::nullopt : std::optional{*found};
}

Result<EntryHeader> header_from_cbor(std::string_view cbor) {
  LAWSON_TRY(const Json document, parse_cbor(cbor));
  EntryHeader header;
  try {
    const auto word = document.at("kind").get<std::string>();
    const auto kind = kind_from(word);
    if (!kind) return invalid("its kind is none of plan, verdict and tuned");
    header.kind = *kind;
    header.key = document.at("key").get<std::string>();
    header.deviceless = document.at("deviceless").get<bool>();
    header.lawson = document.at("lawson").get<std::string>();
    header.engine = document.at("engine").get<std::string>();
    header.engine_version = document.at("engine_version").get<std::string>();
    header.target = document.at("target").get<std::string>();
  } catch (const Json::exception& e) {
    return invalid("its header is not one of an entry: {}", e.what());
  }
  return header;
}

}  // namespace

std::string_view to_string(EntryKind kind) {
  switch (kind) {
    case EntryKind::plan:
      return "plan";
    case EntryKind::verdict:
      return "verdict";
    case EntryKind::tuned:
      return "tuned";
  }
  return "plan";
}

Result<std::string> encode_entry(const EntryHeader& header, std::string_view content) {
  const Json document{{"kind", to_string(header.kind)},  {"key", header.key},
                      {"deviceless", header.deviceless}, {"lawson", header.lawson},
                      {"engine", header.engine},         {"engine_version", header.engine_version},
                      {"target", header.target}};
  const std::vector<std::uint8_t> cbor = Json::to_cbor(document);
  if (cbor.size() > kMaxHeaderBytes) {
    return invalid("an entry's header of {} bytes is not allowed; at most {}", cbor.size(),
                   kMaxHeaderBytes);
  }
  if (content.size() > kMaxContentBytes) {
    return invalid("an entry of {} bytes is not allowed; at most {}", content.size(),
                   kMaxContentBytes);
  }
  std::string text{kMagic};
  text.reserve(kHeaderAt + cbor.size() + kHashBytes + content.size());
  append_number(text, kSchema, kHeaderSizeAt - kSchemaAt);
  append_number(text, cbor.size(), kContentSizeAt - kHeaderSizeAt);
  append_number(text, content.size(), kChecksumAt - kContentSizeAt);
  text += hash_hex(content);
  text.append(reinterpret_cast<const char*>(cbor.data()), cbor.size());
  text += hash_hex(text);
  text += content;
  return text;
}

Result<EntryHead> decode_head(std::string_view text, std::uint64_t file_bytes) {
  if (text.size() < kHeaderAt) return invalid("it is truncated within its header");
  if (!text.starts_with(kMagic)) return invalid("it does not start with the magic bytes");
  const std::uint64_t schema = number_at(text, kSchemaAt, kHeaderSizeAt - kSchemaAt);
  if (schema != kSchema) {
    return invalid("its schema is {}; this library reads {}", schema, kSchema);
  }
  const std::uint64_t header_bytes = number_at(text, kHeaderSizeAt, kContentSizeAt - kHeaderSizeAt);
  if (header_bytes > kMaxHeaderBytes) {
    return invalid("its header has {} bytes; at most {} are allowed", header_bytes,
                   kMaxHeaderBytes);
  }
  EntryHead head;
  const std::size_t hashed = kHeaderAt + static_cast<std::size_t>(header_bytes);
  head.bytes = hashed + kHashBytes;
  if (text.size() < head.bytes) return invalid("it is truncated within its header");
  if (hash_hex(text.substr(0, hashed)) != text.substr(hashed, kHashBytes)) {
    return invalid("the checksum of its header does not match");
  }
  head.content_bytes = number_at(text, kContentSizeAt, kChecksumAt - kContentSizeAt);
  if (head.content_bytes > kMaxContentBytes || head.bytes + head.content_bytes != file_bytes) {
    return invalid("it has {} bytes; its header speaks of {} and {}", file_bytes, head.bytes,
                   head.content_bytes);
  }
  head.checksum = text.substr(kChecksumAt, kHashBytes);
  LAWSON_TRY(head.header, header_from_cbor(text.substr(kHeaderAt, header_bytes)));
  return head;
}

Result<Entry> decode_entry(std::string_view text) {
  LAWSON_TRY(EntryHead head, decode_head(text, text.size()));
  Entry entry{std::move(head.header), text.substr(head.bytes)};
  if (hash_hex(entry.content) != head.checksum) {
    return invalid("the checksum of its content does not match");
  }
  return entry;
}

std::string entry_name(const EntryHeader& header) {
  const std::string text = fmt::format("{} {}\n{}", header.lawson,
                                       header.deviceless ? "deviceless" : "live", header.key);
  return fmt::format("{}.{}", hash_hex(text), to_string(header.kind));
}

std::optional<EntryKind> kind_of_name(std::string_view name) {
  const std::size_t dot = name.find('.');
  if (dot == std::string_view::npos || !is_hash(name.substr(0, dot))) return std::nullopt;
  return kind_from(name.substr(dot + 1));
}

}  // namespace lawson::plan
