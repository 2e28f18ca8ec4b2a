// Choices that were tuned, on the disk: one file for each question with the report, the chosen plan
// and the other candidates that were built.
//   "LAWSONT1" | CBOR {"id", "report", "chosen", "plans"} | XXH3-128 of all before (32 hex)
// The disk is never trusted: a file that is damaged, of another question, device or engine build,
// or of another user, is one warning, and as if it were not there.
#pragma once

#include <functional>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "engine/engine.h"
#include "plan/tuner.h"

namespace lawson::plan {

class TunedPlans {
 public:
  enum class Mode { off, ro, rw };
  struct Config {
    Mode mode = Mode::off;
    std::string folder;  // of the files; created with its parents for this user only
    std::function<void(std::string_view)> warn;  // empty: to standard error
  };
  // LAWSON_CACHE (off, ro, rw; rw without it) and LAWSON_CACHE_DIR (without it
  // $XDG_CACHE_HOME/lawson, ~/.cache/lawson; without a home: off). INVALID_ARGUMENT for any other
  // LAWSON_CACHE.
  static Result<Config> environment();

  explicit TunedPlans(Config config) : config_{std::move(config)} {}

  struct Question {
    const ir::Graph& graph;
    const Device& device;
    const Engine& engine;
    const Options& options;

    // The key without the engine's build, which a plan knows and a question does not.
    std::string id() const;
  };

  // Every plan belongs to the question; whether the engine takes it, load() says.
  std::optional<Tuned> find(const Question& question);
  void keep(const Question& question, const Tuned& tuned);

  // Once for each file and process.
  void warn(const Question& question, std::string_view what);

 private:
  std::string path_of(const Question& question) const;
  Result<std::optional<Tuned>> read(const Question& question) const;
  Status write(const Question& question, const Tuned& tuned) const;

  Config config_;
  std::mutex mutex_;
  std::set<std::string> warned_;
};

}  // namespace lawson::plan
