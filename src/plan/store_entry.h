// The file of one entry of the store, self-describing: what it answers stands in front of it, and
// nothing of it is believed before its checksums agree. Numbers are little-endian.
//   at 0    "LAWSONS1"
//      8    schema version (4 bytes)
//      12   size of the header (4)
//      16   size of the content (8)
//      24   XXH3-128 of the content (32 hex digits)
//      56   header: CBOR {"kind", "key", "deviceless", "lawson", "engine", "engine_version",
//           "target"}
//      ...  XXH3-128 of all before (32 hex digits)
//      ...  content, to the end of the file
// Content: of a plan plan_to_bytes; of a verdict CBOR of verdict_to_json; of a tuned choice CBOR
// (tuned_plans.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/status.h"

namespace lawson::plan {

enum class EntryKind { plan, verdict, tuned };
std::string_view to_string(EntryKind kind);  // also how the file's name ends: "plan", ...

struct EntryHeader {
  EntryKind kind = EntryKind::plan;
  std::string key;     // in full; a file's name is no proof of it
  std::string lawson;  // the build that wrote it (store_build.h)
  std::string engine;
  std::string engine_version;
  std::string target;
  bool deviceless = false;  // found without the device: nothing for a process that has it

  bool operator==(const EntryHeader&) const = default;
};

inline constexpr std::size_t kMaxHeadBytes = std::size_t{8} << 10;  // all before the content
inline constexpr std::uint64_t kMaxContentBytes = std::uint64_t{512} << 20;

// INVALID_ARGUMENT for a header or content that is larger than a reader accepts.
Result<std::string> encode_entry(const EntryHeader& header, std::string_view content);

// From the first bytes of a file (kMaxHeadBytes, or all where it has fewer) and the file's size.
// Every defect is INVALID_ARGUMENT and said in words.
struct EntryHead {
  EntryHeader header;
  std::size_t bytes = 0;  // where the content begins
  std::uint64_t content_bytes = 0;
  std::string checksum;  // of the content
};
Result<EntryHead> decode_head(std::string_view text, std::uint64_t file_bytes);

// The content of a whole file, a view of `text`.
struct Entry {
  EntryHeader header;
  std::string_view content;
};
Result<Entry> decode_entry(std::string_view text);

// "HASH.KIND": of the key, Lawson's build and whether the device was there, so that builds, and
// machines with and without the device, that share a folder leave each other's entries alone.
std::string entry_name(const EntryHeader& header);
// The kind that a name is of; nullopt: the name of something else.
std::optional<EntryKind> kind_of_name(std::string_view name);

}  // namespace lawson::plan
