#include "tuning_search.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <iostream>
#include <thread>

namespace lawson::bench {
namespace {

using cudnn::RankedPlan;
using cudnn::TuningRow;

// Of a computation that is not thorough: so many of the fastest of each of the nearest rows.
constexpr std::size_t kNearRows = 2;
constexpr std::size_t kFromNear = 8;
constexpr std::size_t kLiveFromNear = 3;  // and of those that only a device can build
constexpr std::size_t kOfHeuristics = 3;
constexpr double kLeastBuildSeconds = 10;

plan::WorkerPoolConfig worker_config(const Search::Setting& setting) {
  plan::WorkerPoolConfig config;
  config.worker_path = setting.libexec + "/lawson-worker";
  config.arguments = {"--nodriver", setting.libexec + "/liblawson-nodriver.so"};
  config.max_workers = setting.threads;
  return config;
}

}  // namespace

double Config::median() const {
  std::vector<double> sorted = times;
  std::sort(sorted.begin(), sorted.end());
  return sorted.empty() ? INFINITY : sorted[sorted.size() / 2];
}

Search::Search(Setting setting) : setting_{std::move(setting)}, workers_{worker_config(setting_)} {}

Status Search::open(const ir::Graph& any) {
  LAWSON_TRY(const Verdict verdict, setting_.has_live ? setting_.cudnn.probe(any, setting_.live, {})
                                                      : workers_.probe(any, setting_.target, {}));
  cudnn_version_ = verdict.engine_version;
  return {};
}

Result<Candidates> Search::candidates(const Computation& item, const std::vector<TuningRow>& rows) {
  std::vector<std::string> heuristics;
  if (setting_.has_live) {
    LAWSON_TRY(const Verdict verdict, setting_.cudnn.probe(item.graph, setting_.live, {}));
    if (verdict.decision != Decision::supported) {
      return error(ErrorKind::unsupported, "{}", verdict.reasons.front().message);
    }
    heuristics = verdict.plan_names;
  }
  Candidates result;
  if (!heuristics.empty()) result.first = heuristics.front();
  std::vector<std::string> names;
  if (!item.thorough) names = near_of(item, rows);
  result.all = names.empty();
  if (result.all) {
    LAWSON_TRY(names, all_of(item));
  } else {
    heuristics.resize(std::min(kOfHeuristics, heuristics.size()));
    names.insert(names.end(), heuristics.begin(), heuristics.end());
  }
  std::set<std::string> known;
  for (const std::string& name : names) {
    if (name == "?" || !known.insert(name).second) continue;
    Config& config = result.configs.emplace_back();
    config.name = name;
    config.deviceless = !live_only_.contains(name);
  }
  return result;
}

Result<std::vector<std::string>> Search::all_of(const Computation& item) {
  Result<std::vector<Candidate>> without = error(ErrorKind::internal, "not asked");
  std::vector<std::string> names;
  {
    const std::jthread asks(
        [&] { without = workers_.candidates(item.graph, setting_.target, {}); });
    if (setting_.has_live) {
      LAWSON_TRY(const auto live, setting_.cudnn.candidates(item.graph, setting_.live, {}));
      for (const Candidate& candidate : live) names.push_back(candidate.name);
    }
  }
  if (!without.ok()) {
    if (names.empty()) return std::move(without).error();
    std::cout << "  without a device: " << without.error().message << std::endl;
    return names;
  }
  std::set<std::string> deviceless;
  for (const Candidate& candidate : *without) deviceless.insert(candidate.name);
  for (const std::string& name : names) {
    if (!deviceless.contains(name)) live_only_.insert(name);
  }
  names.insert(names.end(), deviceless.begin(), deviceless.end());
  return names;
}

std::vector<std::string> Search::near_of(const Computation& item,
                                         const std::vector<TuningRow>& rows) const {
  std::vector<std::pair<double, const TuningRow*>> near;
  for (const TuningRow& row : rows) {
    const auto far = cudnn::distance(row.workload, item.workload);
    if (far && row.plans.size() > 1) near.emplace_back(*far, &row);
  }
  std::stable_sort(near.begin(), near.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<std::string> names;
  for (std::size_t i = 0; i < std::min(kNearRows, near.size()); ++i) {
    std::size_t live = 0;
    std::size_t carried = 0;
    for (const RankedPlan& plan : near[i].second->plans) {
      const bool live_only = live_only_.contains(plan.name);
      std::size_t& count = live_only ? live : carried;
      if (count++ < (live_only ? kLiveFromNear : kFromNear)) names.push_back(plan.name);
    }
  }
  return names;
}

void Search::build(std::vector<Config*> configs,
                   const std::function<Result<Plan>(const Candidate&, const Options&)>& compile) {
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t i = next++; i < configs.size(); i = next++) {
      Config& config = *configs[i];
      const double left = setting_.seconds_left();
      if (left < 0) {
        config.failure = "time is up";
        continue;
      }
      Options options;
      options.deadline_ms = 1000 * std::max(kLeastBuildSeconds, left);
      auto plan = compile({config.name}, options);
      if (plan.ok()) {
        config.plan = std::move(plan).value();
        config.failure.clear();
      } else {
        config.failure = plan.error().message;
      }
    }
  };
  std::vector<std::jthread> threads;
  for (int i = 0; i < setting_.threads; ++i) threads.emplace_back(work);
}

void Search::build_without_device(const Computation& item, std::vector<Config>& configs) {
  std::vector<Config*> list;
  for (Config& config : configs) {
    if (config.deviceless) list.push_back(&config);
  }
  build(std::move(list), [&](const Candidate& candidate, const Options& options) {
    return workers_.compile(item.graph, setting_.target, options, candidate);
  });
}

void Search::build_with_device(const Computation& item, std::vector<Config>& configs) {
  if (!setting_.has_live) return;
  std::vector<Config*> list;
  for (Config& config : configs) {
    if (config.plan) continue;
    config.deviceless = false;
    list.push_back(&config);
  }
  build(std::move(list), [&](const Candidate& candidate, const Options& options) {
    return setting_.cudnn.compile(item.graph, setting_.live, options, candidate, {});
  });
}

}  // namespace lawson::bench
