// Bundles that a person put before the store (LAWSON_BUNDLE_PATH): read only, in the order given.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "engine/engine.h"

namespace lawson::plan {

class Layers {
 public:
  using Warn = std::function<void(std::string_view)>;

  // Who asks: a bundle with plans of this engine, all of them for other builds of it or for other
  // devices, is one that somebody meant to be used here.
  struct Asker {
    std::string_view engine;
    std::string_view engine_version;
    std::string_view device;  // its name, for the message
    std::string_view device_fingerprint;
  };

  // `path_list`: bundles, and folders of which every *.lawson is taken by name, separated by ':'.
  // Nothing is opened before the first look-up.
  Layers(std::string path_list, Warn warn);
  ~Layers();
  Layers(const Layers&) = delete;
  Layers& operator=(const Layers&) = delete;

  // The first bundle's plan of that key. A bundle that cannot be used, or has nothing for whoever
  // asks, is passed over, and `warn` hears of it once. Thread-safe and without a lock: a forked
  // child may ask as well.
  std::optional<Plan> plan(std::string_view key);
  std::optional<Plan> plan(std::string_view key, const Asker& asker);

 private:
  struct Layer;
  struct Opened;
  const Opened& opened();
  void tell_if_foreign(const Layer& layer, const Asker& asker) const;
  void tell(const Layer& layer, std::string_view what) const;

  std::string path_list_;
  Warn warn_;
  std::atomic<const Opened*> opened_{nullptr};
};

}  // namespace lawson::plan
