#include "plan/layers.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "plan/bundle.h"

namespace lawson::plan {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kExtension = ".lawson";

std::vector<std::string> split(std::string_view list) {
  std::vector<std::string> parts;
  while (!list.empty()) {
    const std::size_t end = std::min(list.find(':'), list.size());
    if (end > 0) parts.emplace_back(list.substr(0, end));
    list.remove_prefix(std::min(end + 1, list.size()));
  }
  return parts;
}

// A folder's bundles by name; anything else is a bundle itself, or will be found not to be one.
std::vector<std::string> bundles_of(const std::string& path, std::vector<std::string>& complaints) {
  std::error_code code;
  if (!fs::is_directory(path, code)) return {path};
  std::vector<std::string> found;
  for (fs::directory_iterator it{path, code}, end; !code && it != end; it.increment(code)) {
    if (it->path().extension() == kExtension) found.push_back(it->path().string());
  }
  if (code) complaints.push_back(fmt::format("{}: cannot be listed: {}", path, code.message()));
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace

struct Layers::Layer {
  Layer(std::string file, Bundle&& read) : path{std::move(file)}, bundle{std::move(read)} {}

  std::string path;
  Bundle bundle;
  mutable std::atomic<bool> told{false};
};

struct Layers::Opened {
  std::vector<std::unique_ptr<const Layer>> layers;
  std::vector<std::string> complaints;
};

Layers::Layers(std::string path_list, Warn warn)
    : path_list_{std::move(path_list)}, warn_{std::move(warn)} {}

Layers::~Layers() {
  delete opened_.load();
}

// Threads that come first together all open; one of them is heard.
const Layers::Opened& Layers::opened() {
  if (const Opened* ready = opened_.load(std::memory_order_acquire)) return *ready;
  auto fresh = std::make_unique<Opened>();
  for (const std::string& part : split(path_list_)) {
    for (const std::string& path : bundles_of(part, fresh->complaints)) {
      auto bundle = Bundle::open(path);
      if (bundle.ok()) {
        fresh->layers.push_back(std::make_unique<const Layer>(path, std::move(bundle).value()));
      } else {
        fresh->complaints.push_back(bundle.error().message);
      }
    }
  }
  const Opened* expected = nullptr;
  if (!opened_.compare_exchange_strong(expected, fresh.get())) return *expected;
  if (warn_) {
    for (const std::string& complaint : fresh->complaints) {
      warn_(fmt::format("LAWSON_BUNDLE_PATH: {}; it is skipped", complaint));
    }
  }
  return *fresh.release();
}

void Layers::tell(const Layer& layer, std::string_view what) const {
  if (warn_ && !layer.told.exchange(true)) warn_(fmt::format("LAWSON_BUNDLE_PATH: {}", what));
}

// A bundle with plans for the asker's engine that are all for something else was meant to be used,
// and is not.
void Layers::tell_if_foreign(const Layer& layer, const Asker& asker) const {
  if (layer.told.load(std::memory_order_relaxed)) return;
  std::vector<std::string> others;
  for (const BundleOrigin& origin : layer.bundle.origins()) {
    if (origin.engine != asker.engine) continue;
    if (origin.engine_version == asker.engine_version &&
        origin.device_fingerprint == asker.device_fingerprint) {
      return;
    }
    others.push_back(
        fmt::format("{} {} on {}", origin.engine, origin.engine_version, origin.target));
  }
  if (others.empty()) return;
  tell(layer,
       fmt::format("{}: its plans are for {}; here is {} {} on {}: it is skipped", layer.path,
                   fmt::join(others, ", "), asker.engine, asker.engine_version, asker.device));
}

std::optional<Plan> Layers::plan(std::string_view key) {
  return plan(key, {});
}

std::optional<Plan> Layers::plan(std::string_view key, const Asker& asker) {
  if (path_list_.empty()) return std::nullopt;
  for (const auto& layer : opened().layers) {
    const auto index = layer->bundle.find(key);
    if (!index) {
      tell_if_foreign(*layer, asker);
      continue;
    }
    auto plan = layer->bundle.plan(*index);
    if (plan.ok()) return std::move(plan).value();
    tell(*layer, plan.error().message);
  }
  return std::nullopt;
}

}  // namespace lawson::plan
