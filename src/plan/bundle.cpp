#include "plan/bundle.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <set>
#include <utility>

#include "base/hash.h"
#include "plan/atomic_file.h"

namespace lawson::plan {
namespace {

constexpr std::string_view kMagic = "LAWSONB1";
constexpr std::uint64_t kVersion = 1;
constexpr std::size_t kVersionBytes = 4;
constexpr std::size_t kSizeBytes = 8;
constexpr std::size_t kPrefixBytes = kMagic.size() + kVersionBytes + kSizeBytes;
constexpr std::size_t kHashBytes = 32;
constexpr std::uint64_t kMaxIndexBytes = std::uint64_t{64} << 20;
constexpr std::uint64_t kMaxPlanBytes = std::uint64_t{1} << 30;

void append_number(std::string& out, std::uint64_t value, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i) out += static_cast<char>((value >> (8 * i)) & 0xFF);
}

std::uint64_t number_at(std::string_view text, std::size_t at, std::size_t bytes) {
  std::uint64_t value = 0;
  for (std::size_t i = 0; i < bytes; ++i) {
    value |= std::uint64_t{static_cast<unsigned char>(text[at + i])} << (8 * i);
  }
  return value;
}

// Reads exactly `bytes` at `offset`; a file that is shorter gives what there is.
Result<std::string> read_at(int file, std::uint64_t offset, std::size_t bytes,
                            const std::string& path) {
  std::string text(bytes, '\0');
  std::size_t have = 0;
  while (have < bytes) {
    const ssize_t got =
        ::pread(file, text.data() + have, bytes - have, static_cast<off_t>(offset + have));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return io_error(path, "cannot be read", errno);
    if (got == 0) break;
    have += static_cast<std::size_t>(got);
  }
  text.resize(have);
  return text;
}

// A rename would replace a device file such as /dev/null.
Status check_target(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode)) {
    return invalid("{}: cannot be replaced by a bundle: it is not a regular file", path);
  }
  return {};
}

Json entry_to_json(const BundleEntry& entry) {
  return {{"key", entry.key},          {"plan_id", entry.plan_id}, {"target", entry.target},
          {"engine", entry.engine},    {"offset", entry.offset},   {"size", entry.size},
          {"checksum", entry.checksum}};
}

BundleEntry entry_from_json(const Json& document) {
  BundleEntry entry;
  entry.key = document.at("key").get<std::string>();
  entry.plan_id = document.at("plan_id").get<std::string>();
  entry.target = document.at("target").get<std::string>();
  entry.engine = document.at("engine").get<std::string>();
  entry.offset = document.at("offset").get<std::uint64_t>();
  entry.size = document.at("size").get<std::uint64_t>();
  entry.checksum = document.at("checksum").get<std::string>();
  return entry;
}

}  // namespace

Status write_bundle(const std::string& path, std::span<const Plan* const> plans) {
  LAWSON_CHECK(check_target(path));
  std::vector<BundleEntry> entries;
  std::vector<std::vector<std::byte>> blobs;
  std::set<std::string> ids;
  std::uint64_t offset = 0;
  for (const Plan* plan : plans) {
    if (!ids.insert(plan->plan_id).second) continue;
    blobs.push_back(plan_to_bytes(*plan));
    const std::vector<std::byte>& blob = blobs.back();
    const std::string_view text{reinterpret_cast<const char*>(blob.data()), blob.size()};
    if (blob.size() > kMaxPlanBytes) {
      return invalid("{}: plan {} has {} bytes; at most {} are allowed", path, plan->plan_id,
                     blob.size(), kMaxPlanBytes);
    }
    entries.push_back({plan->key, plan->plan_id, plan->target, plan->engine, offset, blob.size(),
                       hash_hex(text)});
    offset += blob.size();
  }

  Json index = Json::array();
  for (const BundleEntry& entry : entries) index.push_back(entry_to_json(entry));
  std::string head{kMagic};
  const std::vector<std::uint8_t> cbor = Json::to_cbor(index);
  append_number(head, kVersion, kVersionBytes);
  append_number(head, cbor.size(), kSizeBytes);
  head.append(reinterpret_cast<const char*>(cbor.data()), cbor.size());
  head += hash_hex(head);

  AtomicFile file(path, 0666);
  LAWSON_CHECK(file.write(head));
  for (const auto& blob : blobs) {
    LAWSON_CHECK(file.write({reinterpret_cast<const char*>(blob.data()), blob.size()}));
  }
  return file.publish();
}

Result<Bundle> Bundle::open(const std::string& path) {
  // O_NONBLOCK: a pipe by that name must not make us wait for a writer.
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file < 0) return io_error(path, "cannot be opened", errno);
  Bundle bundle{path, file};
  LAWSON_CHECK(bundle.read_index());
  return bundle;
}

Bundle::Bundle(Bundle&& other) noexcept
    : path_{std::move(other.path_)},
      file_{std::exchange(other.file_, -1)},
      entries_{std::move(other.entries_)} {}

Bundle::~Bundle() {
  if (file_ >= 0) ::close(file_);
}

Error Bundle::defect(std::string_view what) const {
  return invalid("{}: not a usable bundle: {}", path_, what);
}

Status Bundle::read_index() {
  struct stat info {};
  if (::fstat(file_, &info) != 0) return io_error(path_, "cannot be read", errno);
  if (!S_ISREG(info.st_mode)) return defect("it is not a regular file");
  const auto file_size = static_cast<std::uint64_t>(info.st_size);

  LAWSON_TRY(std::string head, read_at(file_, 0, kPrefixBytes, path_));
  if (head.size() < kPrefixBytes) return defect("shorter than the smallest bundle");
  if (!head.starts_with(kMagic)) return defect("it does not start with a bundle's magic bytes");
  const std::uint64_t version = number_at(head, kMagic.size(), kVersionBytes);
  if (version != kVersion) {
    return defect(fmt::format("its version is {}; this library reads {}", version, kVersion));
  }
  const std::uint64_t index_size = number_at(head, kMagic.size() + kVersionBytes, kSizeBytes);
  if (index_size > kMaxIndexBytes) {
    return defect(
        fmt::format("its index has {} bytes; at most {} are allowed", index_size, kMaxIndexBytes));
  }
  const std::size_t rest = static_cast<std::size_t>(index_size) + kHashBytes;
  LAWSON_TRY(const std::string tail, read_at(file_, kPrefixBytes, rest, path_));
  if (tail.size() < rest) return defect("truncated within its index");
  head += tail;
  const std::string_view content = std::string_view{head}.substr(0, head.size() - kHashBytes);
  if (hash_hex(content) != std::string_view{head}.substr(content.size())) {
    return defect("the checksum of its index does not match");
  }

  const auto index = parse_cbor(content.substr(kPrefixBytes));
  if (!index.ok()) return defect(index.error().message);
  if (!index->is_array()) return defect("its index is not a list");
  try {
    for (const Json& item : *index) entries_.push_back(entry_from_json(item));
  } catch (const Json::exception& e) {
    return defect(e.what());
  }
  // One plan after another from the end of the index to the end of the file, nothing else.
  std::uint64_t expected = 0;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    BundleEntry& entry = entries_[i];
    if (entry.offset != expected || entry.size > kMaxPlanBytes) {
      return defect(
          fmt::format("plan {} is said to be {} bytes at {}", i, entry.size, entry.offset));
    }
    expected += entry.size;
    entry.offset += head.size();
  }
  if (head.size() + expected != file_size) {
    return defect(
        fmt::format("it has {} bytes; its index speaks of {}", file_size, head.size() + expected));
  }
  return {};
}

Result<Plan> Bundle::plan(std::size_t index) const {
  if (index >= entries_.size()) {
    return invalid("{}: plan {} of {} does not exist", path_, index, entries_.size());
  }
  const BundleEntry& entry = entries_[index];
  LAWSON_TRY(const std::string text,
             read_at(file_, entry.offset, static_cast<std::size_t>(entry.size), path_));
  if (text.size() < entry.size) return defect(fmt::format("truncated within plan {}", index));
  if (hash_hex(text) != entry.checksum) {
    return defect(fmt::format("the checksum of plan {} does not match", index));
  }
  auto plan = plan_from_bytes(std::as_bytes(std::span{text}));
  if (!plan.ok()) return defect(fmt::format("plan {}: {}", index, plan.error().message));
  if (plan->key != entry.key || plan->plan_id != entry.plan_id) {
    return defect(fmt::format("plan {} is another one than its index says", index));
  }
  return plan;
}

std::optional<std::size_t> Bundle::find(std::string_view key) const {
  const auto found = std::find_if(entries_.begin(), entries_.end(),
                                  [&](const BundleEntry& entry) { return entry.key == key; });
  if (found == entries_.end()) return std::nullopt;
  return static_cast<std::size_t>(found - entries_.begin());
}

}  // namespace lawson::plan
