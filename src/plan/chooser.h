// Which plan a question with tuning gets: what this process chose before, else what is stored, else
// what the tuner finds out. One tuning at a time: two would disturb each other's times.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "plan/tuned_plans.h"
#include "plan/tuner.h"

namespace lawson::plan {

class Chooser {
 public:
  // The error, if any, is that of whoever asks for tuning.
  Chooser(Result<std::shared_ptr<Store>> store, TunerConfig tuner);

  struct Engines {
    Engine& engine;
    Engine& reference;  // has the oracle
    Engine& forward;    // runs forward passes for generated data
  };
  // The device is on this machine. `retune`: times the stored candidates again, without building.
  // A deadline that passes while another question is tuned: the engine's first choice, and the
  // report says so.
  Result<Tuned> choose(const ir::Graph& graph, const Device& device, const Options& options,
                       const Engines& engines, bool retune);

  // How a plan that was chosen in this process was chosen.
  std::optional<TuningReport> report_of(std::string_view plan_id) const;

 private:
  using Id = std::pair<std::string, int>;  // the question, the device's ordinal

  std::optional<Tuned> chosen(const Id& id) const;
  Result<Tuned> find_or_tune(const TunedPlans::Question& question, const Engines& engines,
                             bool retune, double waited_ms);
  static Result<Tuned> unchosen(const ir::Graph& graph, const Device& device,
                                const Options& options, Engine& engine);

  Status environment_;  // that says where choices are stored
  TunedPlans stored_;
  TunerConfig tuner_;
  std::timed_mutex tuning_;
  mutable std::mutex mutex_;    // of what follows
  std::map<Id, Tuned> chosen_;  // without what was built beside the plan
};

}  // namespace lawson::plan
