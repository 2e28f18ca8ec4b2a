#include "tuning_timer.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>

namespace lawson::bench {
namespace {

// Timed again, in turn: what is so near to the best, at most so many; and so many of those that
// need no device to be built.
constexpr double kInTheRunning = 1.5;
constexpr std::size_t kFinalists = 12;
constexpr std::size_t kCarriedFinalists = 6;
constexpr int kTurns = 3;
constexpr int kRounds = 3;  // of a turn
constexpr double kRoundMs = 2;
constexpr int kMostExecutions = 40;
constexpr double kSameNumbers = 0.02;  // relative distance of the outputs

void sort(std::vector<Config*>& configs) {
  std::erase_if(configs, [](const Config* config) { return config->times.empty(); });
  std::stable_sort(configs.begin(), configs.end(),
                   [](const Config* a, const Config* b) { return a->median() < b->median(); });
}

std::vector<Config*> finalists_of(const std::vector<Config*>& ranked) {
  std::vector<Config*> finalists;
  std::size_t carried = 0;
  for (Config* config : ranked) {
    const bool fast = finalists.size() < kFinalists &&
                      config->median() < kInTheRunning * ranked.front()->median();
    if (!fast && !(config->deviceless && carried < kCarriedFinalists)) continue;
    carried += config->deviceless ? 1 : 0;
    finalists.push_back(config);
  }
  return finalists;
}

}  // namespace

std::string title(const Computation& item) {
  return fmt::format("{} [{}]", item.name, to_string(item.workload));
}

Journal::Journal(std::string path) : path_{std::move(path)} {
  std::ifstream file(path_);
  std::string line;
  while (std::getline(file, line)) {
    const std::size_t tab = line.rfind('\t');
    if (tab != std::string::npos) lost_[line.substr(0, tab)].insert(line.substr(tab + 1));
  }
}

bool Journal::lost(const std::string& computation, const std::string& plan) const {
  const auto found = lost_.find(computation);
  return found != lost_.end() && found->second.contains(plan);
}

void Journal::begin(const std::string& computation, const std::string& plan) {
  lost_[computation].insert(plan);
  write();
}

void Journal::end(const std::string& computation, const std::string& plan) {
  lost_[computation].erase(plan);
}

void Journal::write() const {
  std::ofstream file(path_);
  for (const auto& [computation, plans] : lost_) {
    for (const std::string& plan : plans) file << computation << '\t' << plan << '\n';
  }
}

void Journal::remove() const {
  std::error_code ignored;
  std::filesystem::remove(path_, ignored);
}

bool Timer::context_works() {
  return cudnn_.synchronize(live_, nullptr).ok();
}

Status Timer::time(const Computation& item, Config& config, Buffers& buffers, int rounds) {
  LAWSON_TRY(void* workspace, buffers.workspace(config.plan->workspace_bytes));
  journal_.begin(title(item), config.name);
  auto times = cudnn_.measure(*config.loaded, buffers.sets(), workspace, config.executions, rounds);
  if (times.ok()) {
    config.times.insert(config.times.end(), times->begin(), times->end());
  } else {
    config.failure = times.error().message;
    config.times.clear();
    config.loaded.reset();
    if (!context_works()) {
      return error(ErrorKind::cuda, "{} of {}: {}", config.name, title(item), config.failure);
    }
  }
  journal_.end(title(item), config.name);
  return {};
}

void Timer::drop_wrong(const Computation& item, const std::string& first,
                       std::vector<Config*>& ranked, Buffers& buffers) {
  const auto outputs = [&](const Config& config) -> Result<std::vector<double>> {
    LAWSON_TRY(void* workspace, buffers.workspace(config.plan->workspace_bytes));
    LAWSON_CHECK(buffers.poison(item.graph));
    LAWSON_CHECK(cudnn_.execute(*config.loaded, buffers.sets().front(), workspace, nullptr));
    LAWSON_CHECK(cudnn_.synchronize(live_, nullptr));
    return buffers.outputs(item.graph);
  };
  const auto named = std::find_if(ranked.begin(), ranked.end(),
                                  [&](const Config* config) { return config->name == first; });
  Config& reference = **(named == ranked.end() ? ranked.begin() : named);
  const auto expected = outputs(reference);
  if (!expected.ok()) return;
  const auto wrong = [&](Config* config) {
    if (config == &reference) return false;
    const auto got = outputs(*config);
    double apart = 0;
    double size = 0;
    for (std::size_t i = 0; got.ok() && i < expected->size(); ++i) {
      if (!std::isfinite((*expected)[i])) continue;
      apart += std::pow((*got)[i] - (*expected)[i], 2);
      size += std::pow((*expected)[i], 2);
    }
    if (got.ok() && std::sqrt(apart) <= kSameNumbers * std::sqrt(size)) return false;
    config->failure = got.ok() ? fmt::format("other numbers than {}: {:.3g} away", reference.name,
                                             std::sqrt(apart / size))
                               : got.error().message;
    return true;
  };
  std::erase_if(ranked, wrong);
}

Result<std::vector<const Config*>> Timer::rank(const Computation& item, const std::string& first,
                                               std::vector<Config>& configs) {
  Buffers buffers(cudnn_, live_);
  const auto cache =
      static_cast<std::size_t>(live_.properties.value("l2CacheSize", std::int64_t{64} << 20));
  LAWSON_CHECK(buffers.fill(item.graph, 3 * cache));
  const int sets = static_cast<int>(buffers.sets().size());
  std::vector<Config*> ranked;
  for (Config& config : configs) {
    if (!config.plan || journal_.lost(title(item), config.name)) continue;
    auto loaded = cudnn_.load(*config.plan, live_);
    if (!loaded.ok()) {
      config.failure = loaded.error().message;
      continue;
    }
    config.loaded = std::move(loaded).value();
    config.executions = sets;
    LAWSON_CHECK(time(item, config, buffers, 1));
    ranked.push_back(&config);
  }
  sort(ranked);
  ranked = finalists_of(ranked);
  for (Config* config : ranked) {
    const int turns = static_cast<int>(kRoundMs / (config->median() * sets) + 0.5);
    config->executions = sets * std::clamp(turns, 1, std::max(1, kMostExecutions / sets));
    config->times.clear();
  }
  for (int turn = 0; turn < kTurns; ++turn) {
    for (Config* config : ranked) {
      if (config->loaded) LAWSON_CHECK(time(item, *config, buffers, kRounds));
    }
  }
  sort(ranked);
  if (!ranked.empty()) drop_wrong(item, first, ranked, buffers);
  if (!context_works()) return error(ErrorKind::cuda, "the CUDA context is lost");
  return std::vector<const Config*>{ranked.begin(), ranked.end()};
}

}  // namespace lawson::bench
