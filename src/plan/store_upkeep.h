// Upkeep of a store's folder: what is in it, what is bad, what may leave.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"
#include "plan/store_entry.h"
#include "plan/store_folder.h"

namespace lawson::plan {

struct StoredEntry {
  std::string file;
  EntryKind kind = EntryKind::plan;  // by the file's name
  EntryHeader header;                // as the file says; empty where it could not be read
  std::uint64_t bytes = 0;           // of the file
  std::int64_t used_ns = 0;
  std::string defect;  // why it is of no use; empty: nothing found
  bool removed = false;
};

// By the names of the files alone.
struct Usage {
  std::uint64_t entries = 0;
  std::uint64_t bytes = 0;
};
Result<Usage> measure_entries(const StoreFolder& folder);

// Reads the heads of all entries; the last used one first.
Result<std::vector<StoredEntry>> list_entries(const StoreFolder& folder);

// Reads all entries in full; `remove` takes away those with a defect.
Result<std::vector<StoredEntry>> check_entries(const StoreFolder& folder, bool remove);

struct PruneRules {
  // The least recently used leave until `max_bytes` are left; nothing while all are within the
  // budget.
  std::optional<std::uint64_t> max_bytes;
  std::uint64_t budget_bytes = 0;
  std::optional<std::int64_t> max_age_ns;  // what was not used for so long leaves
  bool spare_used = false;                 // not what was used within the last minute
};
struct Pruned {
  std::optional<Error> failure;  // the first file's that could not be removed
  std::uint64_t removed = 0;
  std::uint64_t removed_bytes = 0;
  std::uint64_t kept = 0;
  std::uint64_t kept_bytes = 0;
};
// Also removes what writers that were killed left more than an hour ago. Files by other names than
// a store's are left alone.
// Files in use are safe without a lock: a reader holds its file open and needs the name no more.
Result<Pruned> prune_entries(const StoreFolder& folder, const PruneRules& rules);

}  // namespace lawson::plan
