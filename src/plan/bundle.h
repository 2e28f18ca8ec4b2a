// Bundles: several plans in one file, with an index in front, so that one plan of many is read
// without the others.
//   "LAWSONB1" | version (4 bytes) | index size (8) | CBOR index | XXH3-128 of all before (32 hex)
//   then the plans (plan_to_bytes) one after another. Numbers are little-endian; offsets in the
//   index count from the end of its checksum.
// Written beside the target and renamed over it: a reader sees the old file or the whole new one.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/engine.h"

namespace lawson::plan {

struct BundleEntry {
  std::string key;
  std::string plan_id;
  std::string target;
  std::string engine;
  std::uint64_t offset = 0;  // from the start of the file
  std::uint64_t size = 0;
  std::string checksum;  // XXH3-128 of the plan's bytes, 32 hex digits
};

// Of plans with one plan id the first is written. A path that is something else than a regular file
// is INVALID_ARGUMENT.
Status write_bundle(const std::string& path, std::span<const Plan* const> plans);

// An open bundle: the index, checked, and the file, from which each plan is read when asked for. A
// file that is replaced meanwhile does not matter. Thread-safe.
class Bundle {
 public:
  // Every defect of the file is INVALID_ARGUMENT and named; not being able to read it, IO.
  static Result<Bundle> open(const std::string& path);
  ~Bundle();
  Bundle(Bundle&& other) noexcept;
  Bundle& operator=(Bundle&&) = delete;

  const std::vector<BundleEntry>& entries() const { return entries_; }
  Result<Plan> plan(std::size_t index) const;
  // Of the first plan with this key.
  std::optional<std::size_t> find(std::string_view key) const;

 private:
  Bundle(std::string path, int file) : path_{std::move(path)}, file_{file} {}

  Status read_index();
  Error defect(std::string_view what) const;

  std::string path_;
  int file_ = -1;
  std::vector<BundleEntry> entries_;
};

}  // namespace lawson::plan
