#include "plan/bundle.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <utility>

#include "base/compress.h"
#include "base/hash.h"
#include "plan/atomic_file.h"
#include "plan/bundle_format.h"

namespace lawson::plan {
namespace {

using namespace bundle_format;

// What there is of `bytes` at `offset`.
Result<std::size_t> read_at(int file, std::uint64_t offset, char* data, std::size_t bytes,
                            const std::string& path) {
  std::size_t have = 0;
  while (have < bytes) {
    const ssize_t got = ::pread(file, data + have, bytes - have, static_cast<off_t>(offset + have));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return io_error(path, "cannot be read", errno);
    if (got == 0) break;
    have += static_cast<std::size_t>(got);
  }
  return have;
}

}  // namespace

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
      records_{std::move(other.records_)},
      count_{std::exchange(other.count_, 0)},
      origins_{std::move(other.origins_)} {}

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

  std::string head(kHeaderBytes, '\0');
  LAWSON_TRY(const std::size_t have, read_at(file_, 0, head.data(), head.size(), path_));
  const std::string_view text = std::string_view{head}.substr(0, have);
  const std::size_t version_at = kMagic.size() - 1;
  if (text.size() > version_at && text.starts_with(kMagic.substr(0, version_at)) &&
      text[version_at] != kMagic[version_at] &&
      std::isdigit(static_cast<unsigned char>(text[version_at])) != 0) {
    return defect(fmt::format("it has format {}; this library reads {}: compile it again",
                              text[version_at], kMagic[version_at]));
  }
  if (!text.starts_with(kMagic.substr(0, text.size()))) {
    return defect("it does not start with a bundle's magic bytes");
  }
  if (text.size() < kHeaderBytes) return defect("shorter than the smallest bundle");

  const std::uint64_t said_size = number_at(head, kMagic.size(), 8);
  const std::uint64_t count = number_at(head, kMagic.size() + 8, 8);
  const std::uint64_t origin_bytes = number_at(head, kMagic.size() + 16, 8);
  if (count > kMaxPlans || origin_bytes > kMaxOriginBytes) {
    return defect(fmt::format("{} plans and {} bytes of origins; at most {} and {} are allowed",
                              count, origin_bytes, kMaxPlans, kMaxOriginBytes));
  }
  const std::uint64_t index_bytes = count * kRecordBytes + origin_bytes;
  if (said_size != file_size || kHeaderBytes + index_bytes > file_size) {
    return defect(fmt::format("it has {} bytes; its header speaks of {}, {} of them its index",
                              file_size, said_size, kHeaderBytes + index_bytes));
  }

  std::string hashed = head.substr(0, kHashedBytes);
  hashed.resize(kHashedBytes + index_bytes);
  LAWSON_TRY(const std::size_t index_have,
             read_at(file_, kHeaderBytes, hashed.data() + kHashedBytes, index_bytes, path_));
  if (index_have < index_bytes) return defect("truncated within its index");
  if (hash_hex(hashed) != std::string_view{head}.substr(kHashedBytes)) {
    return defect("the checksum of its index does not match");
  }
  const std::string_view index = std::string_view{hashed}.substr(kHashedBytes);
  const std::string_view records = index.substr(0, count * kRecordBytes);
  records_.assign(records.begin(), records.end());
  count_ = static_cast<std::size_t>(count);
  LAWSON_CHECK(read_origins(index.substr(records.size())));
  return check_entries(kHeaderBytes + index_bytes, file_size);
}

Status Bundle::read_origins(std::string_view cbor) {
  const auto list = parse_cbor(cbor);
  if (!list.ok()) return defect(list.error().message);
  if (!list->is_array()) return defect("its origins are not a list");
  try {
    for (const Json& fields : *list) {
      if (!fields.is_array() || fields.size() != 4) return defect("an origin is not four words");
      BundleOrigin origin;
      std::string* const words[] = {&origin.target, &origin.engine, &origin.engine_version,
                                    &origin.device_fingerprint};
      for (std::size_t i = 0; i < fields.size(); ++i) {
        *words[i] = fields[i].get<std::string>();
        if (has_control(*words[i])) return defect("an origin has a control character");
      }
      origins_.push_back(std::move(origin));
    }
  } catch (const Json::exception& e) {
    return defect(e.what());
  }
  return {};
}

// By key, and one plan after another from the end of the index to the end of the file.
Status Bundle::check_entries(std::uint64_t content_begin, std::uint64_t file_size) const {
  std::uint64_t expected = content_begin;
  std::string_view last_key;
  for (std::size_t i = 0; i < count_; ++i) {
    const std::string_view record{records_.data() + i * kRecordBytes, kRecordBytes};
    const std::string_view key = record.substr(kKeyAt, kHashBytes);
    if (!is_hash(key) || !is_hash(record.substr(kPlanIdAt, kHashBytes))) {
      return defect(fmt::format("plan {} has no key, or no plan id", i));
    }
    if (key < last_key) return defect(fmt::format("plan {} is not in its place by key", i));
    last_key = key;
    if (number_at(record, kOriginAt, 4) >= origins_.size() || number_at(record, kZeroAt, 4) != 0) {
      return defect(fmt::format("plan {} is of an origin that is not there", i));
    }
    const std::uint64_t offset = number_at(record, kOffsetAt, 8);
    const std::uint64_t stored = number_at(record, kStoredAt, 8);
    const std::uint64_t size = number_at(record, kSizeAt, 8);
    if (offset != expected || stored > file_size - offset || size > kMaxPlanBytes) {
      return defect(
          fmt::format("plan {} is said to be {} bytes, {} of them at {}", i, size, stored, offset));
    }
    expected += stored;
  }
  if (expected != file_size) {
    return defect(fmt::format("it has {} bytes; its index speaks of {}", file_size, expected));
  }
  return {};
}

BundleEntry Bundle::entry(std::size_t index) const {
  const std::string_view record{records_.data() + index * kRecordBytes, kRecordBytes};
  BundleEntry entry;
  entry.key = record.substr(kKeyAt, kHashBytes);
  entry.plan_id = record.substr(kPlanIdAt, kHashBytes);
  entry.checksum = record.substr(kChecksumAt, kHashBytes);
  entry.origin = &origins_[static_cast<std::size_t>(number_at(record, kOriginAt, 4))];
  entry.offset = number_at(record, kOffsetAt, 8);
  entry.stored_bytes = number_at(record, kStoredAt, 8);
  entry.bytes = number_at(record, kSizeAt, 8);
  return entry;
}

std::optional<std::size_t> Bundle::find(std::string_view key) const {
  std::size_t low = 0;
  std::size_t high = count_;
  while (low < high) {
    const std::size_t middle = low + (high - low) / 2;
    if (entry(middle).key < key) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  if (low == count_ || entry(low).key != key) return std::nullopt;
  return low;
}

Result<std::string> Bundle::stored(std::size_t index) const {
  if (index >= count_) return invalid("{}: plan {} of {} does not exist", path_, index, count_);
  const BundleEntry entry = this->entry(index);
  std::string bytes(static_cast<std::size_t>(entry.stored_bytes), '\0');
  LAWSON_TRY(const std::size_t have,
             read_at(file_, entry.offset, bytes.data(), bytes.size(), path_));
  if (have < bytes.size()) return defect(fmt::format("truncated within plan {}", index));
  if (hash_hex(bytes) != entry.checksum) {
    return defect(fmt::format("the checksum of plan {} does not match", index));
  }
  return bytes;
}

Result<Plan> Bundle::plan(std::size_t index) const {
  LAWSON_TRY(const std::string frame, stored(index));
  const BundleEntry entry = this->entry(index);
  const auto bytes = decompress(frame, static_cast<std::size_t>(entry.bytes));
  if (!bytes.ok()) return defect(fmt::format("plan {}: {}", index, bytes.error().message));
  auto plan = plan_from_bytes(std::as_bytes(std::span{*bytes}));
  if (!plan.ok()) return defect(fmt::format("plan {}: {}", index, plan.error().message));
  const BundleOrigin origin{plan->target, plan->engine, plan->engine_version,
                            plan->device_fingerprint};
  if (plan->key != entry.key || plan->plan_id != entry.plan_id || origin != *entry.origin) {
    return defect(fmt::format("plan {} is another one than its index says", index));
  }
  return plan;
}

}  // namespace lawson::plan
