// The store: plans, verdicts and tuned choices of all of a user's processes, in one folder on the
// disk, one file each (store_entry.h).
// The disk is never trusted. A file that is damaged, of another question or of another user is as
// if it were not there; a disk that is full or read-only keeps nothing; either is one warning for
// its kind and never an error of whoever asked.
// No lock: a file appears whole and under its name (rename), and one that is removed while somebody
// reads it stays readable (unlink). Two writers of one key write the same answer; the last one's
// stays. Safe from several threads and processes at once, and in the child of a fork.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "engine/engine.h"
#include "plan/store_entry.h"
#include "plan/store_upkeep.h"

namespace lawson::plan {

// Does a verdict settle what was asked with this strength? A refusal does with any.
bool settles(const Verdict& verdict, Strength at_least);

class Store {
 public:
  enum class Mode { off, ro, rw };
  struct Config {
    Mode mode = Mode::off;
    std::string folder;  // of the files; created with its parents for this user only
    std::uint64_t budget_bytes = std::uint64_t{2} << 30;  // beyond it the least recently used leave
    std::function<void(std::string_view)> warn;           // empty: to standard error
  };
  // LAWSON_CACHE (off, ro, rw; rw without it) and LAWSON_CACHE_DIR (without it
  // $XDG_CACHE_HOME/lawson, ~/.cache/lawson; without a home: off). INVALID_ARGUMENT for any other
  // LAWSON_CACHE.
  static Result<Config> environment();

  explicit Store(Config config);
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  const Config& config() const { return config_; }

  // The plan of this key, chosen with the device or without it (Plan::deviceless). Whether its
  // engine takes it, load() says; reject() if not.
  std::optional<Plan> plan(const std::string& key, bool deviceless = false);
  void keep(const Plan& plan);

  // A verdict that settles the question, from the live device or without it (Verdict::evidence).
  std::optional<Verdict> verdict(const std::string& key, Strength at_least,
                                 bool deviceless = false);
  // Undecided ones and those that name no build of an engine are not kept; neither is one that says
  // no more than what is there.
  void keep(const Verdict& verdict);

  // What TunedPlans keeps: bytes under a header (whose `lawson` is filled in).
  std::optional<std::string> content(EntryKind kind, const std::string& key);
  void keep(EntryHeader header, std::string_view content);

  // The content of an entry turned out to be of no use: the warning about bad entries.
  void reject(EntryKind kind, const std::string& key, std::string_view why);

  // For those who want to know what went wrong. UNAVAILABLE when the mode does not allow it or
  // there is no such plan, of a process with the device or else without.
  Result<Plan> find_plan(const std::string& key) const;
  Status add(const Plan& plan);
  Result<Usage> usage() const;
  Result<std::vector<StoredEntry>> list() const;
  // Reads and checks every file; `remove` takes away those that are bad.
  Result<std::vector<StoredEntry>> check(bool remove) const;
  Result<Pruned> prune(const PruneRules& rules) const;

 private:
  enum class Operation { read, write };
  enum class Fault { bad_entry, not_trusted, not_read, not_written, count };

  std::string path_of(const EntryHeader& header) const;
  // `asked`: kind, key, deviceless.
  Result<std::optional<std::string>> read(const EntryHeader& asked, bool use) const;
  Result<std::optional<Plan>> read_plan(const std::string& key, bool deviceless, bool use) const;
  Result<std::optional<Verdict>> read_verdict(const std::string& key, bool deviceless,
                                              bool use) const;
  Status write(const EntryHeader& header, std::string_view content);
  Status make_room(const StoreFolder& folder) const;
  Status check_mode(Mode needed) const;
  void warn(Operation operation, const Error& error);

  const Config config_;
  std::array<std::atomic<bool>, static_cast<std::size_t>(Fault::count)> warned_{};
  std::atomic<std::uint64_t> unsurveyed_bytes_;  // written since the folder was last surveyed
};

std::string_view to_string(Store::Mode mode);

}  // namespace lawson::plan
