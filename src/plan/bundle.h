// Bundles: plans to ship, in one file, with an index in front: opening reads the index alone, and a
// plan of many is found and read without the others.
//
//   header   64 bytes   "LAWSONB2" | size of the file | number of plans | size of the origins |
//                       XXH3-128 of these 32 bytes and of the index (32 hex digits)
//   index    128 bytes for each plan, by key: key (32 hex) | plan id (32 hex) | XXH3-128 of the
//            stored bytes (32 hex) | offset | stored size | size | number of its origin | 0
//            and the origins: a CBOR list of [target, engine, engine version, device fingerprint]
//   content  the plans (plan_to_bytes), each a zstd frame, one after another in the index's order
//
// Numbers are little-endian, of 8 bytes (origin and 0: of 4). Format 1 is not read.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/engine.h"

namespace lawson::plan {

// What plans are for; those of one bundle share a few.
struct BundleOrigin {
  std::string target;
  std::string engine;
  std::string engine_version;
  std::string device_fingerprint;
  bool operator==(const BundleOrigin&) const = default;
};

// Points into the bundle.
struct BundleEntry {
  std::string_view key;
  std::string_view plan_id;
  std::string_view checksum;
  const BundleOrigin* origin = nullptr;
  std::uint64_t offset = 0;  // from the start of the file
  std::uint64_t stored_bytes = 0;
  std::uint64_t bytes = 0;  // of the plan
};

// An open bundle: the index, checked, in memory of our own, and the file, from which each plan is
// read when asked for. The file is not mapped: a mapped one that is truncated meanwhile (a copy
// over it, a full network disk) would end the process with SIGBUS; and 10,000 plans have 1.3 MB of
// index, which are read in less than a millisecond. Replacing the file does not matter.
// Thread-safe.
class Bundle {
 public:
  // Every defect of the file is INVALID_ARGUMENT and named; not being able to read it, IO.
  static Result<Bundle> open(const std::string& path);
  ~Bundle();
  Bundle(Bundle&& other) noexcept;
  Bundle& operator=(Bundle&&) = delete;

  std::size_t size() const { return count_; }
  BundleEntry entry(std::size_t index) const;  // index < size()
  const std::vector<BundleOrigin>& origins() const { return origins_; }

  // The first plan with this key.
  std::optional<std::size_t> find(std::string_view key) const;
  Result<Plan> plan(std::size_t index) const;
  // The plan as it is stored, its checksum compared.
  Result<std::string> stored(std::size_t index) const;

 private:
  Bundle(std::string path, int file) : path_{std::move(path)}, file_{file} {}

  Status read_index();
  Status read_origins(std::string_view cbor);
  Status check_entries(std::uint64_t content_begin, std::uint64_t file_size) const;
  Error defect(std::string_view what) const;

  std::string path_;
  int file_ = -1;
  std::vector<char> records_;
  std::size_t count_ = 0;
  std::vector<BundleOrigin> origins_;
};

// Both write beside the target and rename over it: a reader sees the old file or the whole new one.
// Of plans with one plan id the first is written. A path that is something else than a regular
// file, and a plan whose key or id is none, are INVALID_ARGUMENT.
Status write_bundle(const std::string& path, std::span<const Plan* const> plans);
// The plans before those of the bundle at `path`, which stay as they are stored but for those with
// the plan id of one given; the same as write_bundle where there is no file. Of two that append at
// once one is lost.
Status append_to_bundle(const std::string& path, std::span<const Plan* const> plans);

}  // namespace lawson::plan
