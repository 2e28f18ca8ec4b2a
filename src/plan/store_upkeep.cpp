#include "plan/store_upkeep.h"

#include <algorithm>

#include "plan/atomic_file.h"
#include "plan/store_content.h"

namespace lawson::plan {
namespace {

constexpr std::int64_t kSecondNs = 1'000'000'000;
constexpr std::int64_t kSparedNs = 60 * kSecondNs;
constexpr std::int64_t kLitterNs = 3600 * kSecondNs;

Status read_head(const StoreFolder& folder, StoredEntry& entry) {
  LAWSON_TRY(const auto content, folder.read(entry.file, kMaxHeadBytes, false));
  if (!content) return error(ErrorKind::unavailable, "{}: it is gone", entry.file);
  LAWSON_TRY(EntryHead head, decode_head(content->text, content->file_bytes));
  entry.header = std::move(head.header);
  if (entry_name(entry.header) != entry.file) return invalid("it answers another question");
  return {};
}

Status read_whole(const StoreFolder& folder, StoredEntry& entry) {
  LAWSON_CHECK(read_head(folder, entry));
  LAWSON_TRY(const auto content, folder.read(entry.file, kMaxHeadBytes + kMaxContentBytes, false));
  if (!content) return error(ErrorKind::unavailable, "{}: it is gone", entry.file);
  LAWSON_TRY(const Entry whole, decode_entry(content->text));
  return check_content(whole.header, whole.content);
}

template <typename Look>
Result<std::vector<StoredEntry>> look_at_entries(const StoreFolder& folder, const Look& look) {
  LAWSON_TRY(auto files, folder.list());
  std::sort(files.begin(), files.end(),
            [](const auto& a, const auto& b) { return a.used_ns > b.used_ns; });
  std::vector<StoredEntry> entries;
  for (const StoreFolder::File& file : files) {
    const auto kind = kind_of_name(file.name);
    if (!kind) continue;
    StoredEntry entry;
    entry.kind = *kind;
    entry.file = file.name;
    entry.bytes = file.bytes;
    entry.used_ns = file.used_ns;
    look(file, entry);
    entries.push_back(std::move(entry));
  }
  return entries;
}

}  // namespace

Result<Usage> measure_entries(const StoreFolder& folder) {
  LAWSON_TRY(const auto files, folder.list());
  Usage usage;
  for (const StoreFolder::File& file : files) {
    if (!kind_of_name(file.name)) continue;
    ++usage.entries;
    usage.bytes += file.bytes;
  }
  return usage;
}

Result<std::vector<StoredEntry>> list_entries(const StoreFolder& folder) {
  return look_at_entries(folder, [&](const StoreFolder::File&, StoredEntry& entry) {
    if (const Status seen = read_head(folder, entry); !seen.ok())
      entry.defect = seen.error().message;
  });
}

Result<std::vector<StoredEntry>> check_entries(const StoreFolder& folder, bool remove) {
  return look_at_entries(folder, [&](const StoreFolder::File& file, StoredEntry& entry) {
    const Status seen = read_whole(folder, entry);
    if (seen.ok()) return;
    entry.defect = seen.error().message;
    // What could not be read now may be whole.
    const ErrorKind kind = seen.error().kind;
    if (!remove || kind == ErrorKind::io || kind == ErrorKind::out_of_memory) return;
    const auto removed = folder.remove(file);
    entry.removed = removed.ok() && *removed;
  });
}

Result<Pruned> prune_entries(const StoreFolder& folder, const PruneRules& rules) {
  LAWSON_TRY(auto files, folder.list());
  const std::int64_t now = unix_time_ns();
  Pruned pruned;
  std::erase_if(files, [&](const StoreFolder::File& file) {
    if (kind_of_name(file.name)) return false;
    if (AtomicFile::is_temporary(file.name) && now - file.used_ns > kLitterNs) {
      static_cast<void>(folder.remove(file));
    }
    return true;
  });
  std::sort(files.begin(), files.end(),
            [](const auto& a, const auto& b) { return a.used_ns < b.used_ns; });
  for (const StoreFolder::File& file : files) pruned.kept_bytes += file.bytes;
  pruned.kept = files.size();
  const bool is_full = rules.max_bytes && pruned.kept_bytes > rules.budget_bytes;
  for (const StoreFolder::File& file : files) {
    const std::int64_t age = now - file.used_ns;
    const bool leaves = (rules.max_age_ns && age > *rules.max_age_ns) ||
                        (is_full && pruned.kept_bytes > *rules.max_bytes);
    if (!leaves || (rules.spare_used && age >= 0 && age < kSparedNs)) continue;
    const auto removed = folder.remove(file);
    if (!removed.ok() && !pruned.failure) pruned.failure = removed.error();
    if (!removed.ok() || !*removed) continue;
    ++pruned.removed;
    pruned.removed_bytes += file.bytes;
    --pruned.kept;
    pruned.kept_bytes -= file.bytes;
  }
  return pruned;
}

}  // namespace lawson::plan
