// Writing bundles: plans given, and plans of a bundle that is there.
#include <sys/stat.h>

#include <algorithm>
#include <set>
#include <vector>

#include "base/compress.h"
#include "base/hash.h"
#include "plan/atomic_file.h"
#include "plan/bundle.h"
#include "plan/bundle_format.h"

namespace lawson::plan {
namespace {

using namespace bundle_format;

// One plan to be written: its frame, or where it is stored.
struct Item {
  std::string key;
  std::string plan_id;
  std::string checksum;
  std::size_t origin = 0;
  std::uint64_t stored_bytes = 0;
  std::uint64_t bytes = 0;
  std::string frame;
  std::optional<std::size_t> kept;  // its number in the bundle that is there
};

class Writer {
 public:
  explicit Writer(std::string path) : path_{std::move(path)} {}

  Status add(const Plan& plan) {
    for (const auto& [name, value] : {std::pair{"key", &plan.key}, {"plan id", &plan.plan_id}}) {
      if (is_hash(*value)) continue;
      return invalid("{}: a plan's {} is '{}'; expected 32 hex digits", path_, name, *value);
    }
    const std::vector<std::byte> bytes = plan_to_bytes(plan);
    if (bytes.size() > kMaxPlanBytes) {
      return invalid("{}: plan {} has {} bytes; at most {} are allowed", path_, plan.plan_id,
                     bytes.size(), kMaxPlanBytes);
    }
    if (!ids_.insert(plan.plan_id).second) return {};
    Item item;
    item.key = plan.key;
    item.plan_id = plan.plan_id;
    LAWSON_TRY(item.frame, compress({reinterpret_cast<const char*>(bytes.data()), bytes.size()}));
    item.checksum = hash_hex(item.frame);
    LAWSON_TRY(item.origin, origin_number({plan.target, plan.engine, plan.engine_version,
                                           plan.device_fingerprint}));
    item.stored_bytes = item.frame.size();
    item.bytes = bytes.size();
    items_.push_back(std::move(item));
    return {};
  }

  // What `bundle`, which outlives this, has beside.
  Status keep(const Bundle& bundle) {
    kept_ = &bundle;
    for (std::size_t i = 0; i < bundle.size(); ++i) {
      const BundleEntry entry = bundle.entry(i);
      if (!ids_.emplace(entry.plan_id).second) continue;
      LAWSON_TRY(const std::size_t origin, origin_number(*entry.origin));
      items_.push_back({std::string{entry.key}, std::string{entry.plan_id},
                        std::string{entry.checksum}, origin, entry.stored_bytes, entry.bytes, "",
                        i});
    }
    return {};
  }

  Status write() {
    if (items_.size() > kMaxPlans) {
      return invalid("{}: {} plans; a bundle has at most {}", path_, items_.size(), kMaxPlans);
    }
    // Of plans with one key the one that was given first is found first.
    std::stable_sort(items_.begin(), items_.end(),
                     [](const Item& a, const Item& b) { return a.key < b.key; });
    AtomicFile file(path_, 0666);
    LAWSON_CHECK(file.write(head()));
    for (const Item& item : items_) {
      if (item.kept) {
        LAWSON_TRY(const std::string frame, kept_->stored(*item.kept));
        LAWSON_CHECK(file.write(frame));
      } else {
        LAWSON_CHECK(file.write(item.frame));
      }
    }
    return file.publish();
  }

 private:
  Result<std::size_t> origin_number(const BundleOrigin& origin) {
    for (const std::string* word :
         {&origin.target, &origin.engine, &origin.engine_version, &origin.device_fingerprint}) {
      if (has_control(*word)) {
        return invalid("{}: a plan's target, engine or device has a control character", path_);
      }
    }
    const auto found = std::find(origins_.begin(), origins_.end(), origin);
    if (found != origins_.end()) return static_cast<std::size_t>(found - origins_.begin());
    origins_.push_back(origin);
    return origins_.size() - 1;
  }

  std::string head() const {
    Json list = Json::array();
    for (const BundleOrigin& origin : origins_) {
      list.push_back(
          {origin.target, origin.engine, origin.engine_version, origin.device_fingerprint});
    }
    const std::vector<std::uint8_t> cbor = Json::to_cbor(list);
    const std::uint64_t content_begin = kHeaderBytes + items_.size() * kRecordBytes + cbor.size();
    std::uint64_t offset = content_begin;
    std::string index;
    for (const Item& item : items_) {
      index += item.key + item.plan_id + item.checksum;
      for (const std::uint64_t number : {offset, item.stored_bytes, item.bytes}) {
        append_number(index, number, 8);
      }
      append_number(index, item.origin, 4);
      append_number(index, 0, 4);
      offset += item.stored_bytes;
    }
    index.append(reinterpret_cast<const char*>(cbor.data()), cbor.size());

    std::string header{kMagic};
    for (const std::uint64_t number : {offset, items_.size(), cbor.size()}) {
      append_number(header, number, 8);
    }
    header += hash_hex(header + index);
    return header + index;
  }

  std::string path_;
  std::vector<Item> items_;
  std::set<std::string> ids_;
  std::vector<BundleOrigin> origins_;
  const Bundle* kept_ = nullptr;
};

// A rename would replace a device file such as /dev/null.
Result<bool> is_there(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) return false;
  if (S_ISREG(info.st_mode)) return true;
  return invalid("{}: cannot be replaced by a bundle: it is not a regular file", path);
}

}  // namespace

Status write_bundle(const std::string& path, std::span<const Plan* const> plans) {
  LAWSON_CHECK(is_there(path));
  Writer writer{path};
  for (const Plan* plan : plans) LAWSON_CHECK(writer.add(*plan));
  return writer.write();
}

Status append_to_bundle(const std::string& path, std::span<const Plan* const> plans) {
  LAWSON_TRY(const bool exists, is_there(path));
  if (!exists) return write_bundle(path, plans);
  LAWSON_TRY(const Bundle bundle, Bundle::open(path));
  Writer writer{path};
  for (const Plan* plan : plans) LAWSON_CHECK(writer.add(*plan));
  LAWSON_CHECK(writer.keep(bundle));
  return writer.write();
}

}  // namespace lawson::plan
