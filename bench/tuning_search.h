// Which engine configs of a computation are worth timing, and building them.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "engine/cudnn/tuning_table.h"
#include "engine/engine.h"
#include "plan/worker_client.h"
#include "tuning_grid.h"

namespace lawson::bench {

struct Config {
  std::string name;
  bool deviceless = false;  // built without a device, as for those who have none
  std::optional<Plan> plan;
  std::string failure;
  std::shared_ptr<Loaded> loaded;
  int executions = 1;
  std::vector<double> times;

  double median() const;  // infinite without times
};

struct Candidates {
  std::string first;  // the heuristics' first choice on the device; empty: no device
  std::vector<Config> configs;
  bool all = false;  // that cuDNN has
};

class Search {
 public:
  struct Setting {
    Engine& cudnn;
    Device live;
    bool has_live = true;
    Device target;  // the same device, as those see it who have none
    std::string libexec;
    int threads = 1;
    std::function<double()> seconds_left;
  };
  explicit Search(Setting setting);

  const std::string& cudnn_version() const { return cudnn_version_; }
  Status open(const ir::Graph& any);  // finds the version

  // All configs of a thorough computation, else those that were fast in `rows` for the nearest
  // workloads, and the heuristics' first ones.
  Result<Candidates> candidates(const Computation& item, const std::vector<cudnn::TuningRow>& rows);
  // In workers, side by side; what they refuse, and the rest, in this process.
  void build_without_device(const Computation& item, std::vector<Config>& configs);
  void build_with_device(const Computation& item, std::vector<Config>& configs);

 private:
  Result<std::vector<std::string>> all_of(const Computation& item);
  std::vector<std::string> near_of(const Computation& item,
                                   const std::vector<cudnn::TuningRow>& rows) const;
  void build(std::vector<Config*> configs,
             const std::function<Result<Plan>(const Candidate&, const Options&)>& compile);

  Setting setting_;
  plan::WorkerClient workers_;
  std::string cudnn_version_;
  std::set<std::string> live_only_;  // configs that only a device can build
};

}  // namespace lawson::bench
