// lawson-tuning-table: measures which engine configs of cuDNN are the fastest on this GPU and
// writes them as a file of the tuning table (src/engine/cudnn/tuning). Run by scripts/tune-table.
//
// Every computation of bench/fusions, then a grid of operand types, layouts, epilogues and sizes.
// What can be built without a device is built by workers without one, as it will be for users who
// have none; the rest in this process. A config that fails costs itself: also when it takes the
// CUDA context with it (exit code 4: start again; the journal says what to leave out). A file that
// is there is extended, and finished rows stay.
#include <fmt/chrono.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <set>
#include <thread>

#include "engine/cudnn/tuning_table.h"
#include "engine/registry.h"
#include "gpu/result.h"
#include "plan/worker_client.h"
#include "tuning_buffers.h"
#include "tuning_grid.h"

namespace lawson::bench {
namespace {

using cudnn::RankedPlan;
using cudnn::TuningRow;
using cudnn::TuningTable;
using Clock = std::chrono::steady_clock;

constexpr int kSkipped = 77;
constexpr int kContextLost = 4;
// Of a row that is not thorough: so many of the fastest of each of so many near rows.
constexpr std::size_t kFromNear = 8;
constexpr std::size_t kLiveFromNear = 3;
constexpr std::size_t kNearRows = 2;
constexpr std::size_t kOfHeuristics = 3;  // beside them
constexpr std::size_t kFinalists = 12;
constexpr double kInTheRunning = 1.5;  // times the best
// Kept of each row, and so many at least that need no device to build.
constexpr std::size_t kKept = 6;
constexpr double kLeastBuildSeconds = 10;
constexpr double kSameNumbers = 0.02;  // relative distance of the outputs

struct Flags {
  double minutes = 7;
  bool quick = false;
  bool again = false;
  std::string only;
  std::string folder = LAWSON_SOURCE_DIR "/src/engine/cudnn/tuning";
  std::string specs = LAWSON_SOURCE_DIR "/bench/fusions";
  std::string libexec;
  std::string driver;
  std::string dry;  // a target: no GPU, nothing is timed or written
  int threads = 0;
};

struct Config {
  std::string name;
  bool deviceless = false;
  std::optional<Plan> plan;
  std::string failure;
  std::shared_ptr<Loaded> loaded;
  int executions = 1;
  std::vector<double> times;

  double median() const {
    std::vector<double> sorted = times;
    std::sort(sorted.begin(), sorted.end());
    return sorted.empty() ? INFINITY : sorted[sorted.size() / 2];
  }
};

// What was being run when the process was lost, by computation.
class Journal {
 public:
  explicit Journal(std::string path) : path_{std::move(path)} {
    std::ifstream file(path_);
    std::string line;
    while (std::getline(file, line)) {
      const std::size_t tab = line.rfind('\t');
      if (tab != std::string::npos) lost_[line.substr(0, tab)].insert(line.substr(tab + 1));
    }
  }

  bool lost(const std::string& computation, const std::string& plan) const {
    const auto found = lost_.find(computation);
    return found != lost_.end() && found->second.contains(plan);
  }
  void begin(const std::string& computation, const std::string& plan) {
    lost_[computation].insert(plan);
    write();
  }
  void end(const std::string& computation, const std::string& plan) {
    lost_[computation].erase(plan);
  }
  void write() const {
    std::ofstream file(path_);
    for (const auto& [computation, plans] : lost_) {
      for (const std::string& plan : plans) file << computation << '\t' << plan << '\n';
    }
  }

 private:
  std::string path_;
  std::map<std::string, std::set<std::string>> lost_;
};

class Tuner {
 public:
  Tuner(const Flags& flags, Engine& cudnn, Device live, Device target, int threads)
      : flags_{flags},
        cudnn_{cudnn},
        live_{std::move(live)},
        target_{std::move(target)},
        threads_{threads},
        workers_{worker_config(flags, threads)},
        path_{fmt::format("{}/{}.json", flags.folder, target_.name)},
        journal_{path_ + ".journal"},
        deadline_{Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                     std::chrono::duration<double>(60 * flags.minutes))} {}

  int run();

 private:
  static plan::WorkerPoolConfig worker_config(const Flags& flags, int threads) {
    plan::WorkerPoolConfig config;
    config.worker_path = flags.libexec + "/lawson-worker";
    config.arguments = {"--nodriver", flags.libexec + "/liblawson-nodriver.so"};
    config.max_workers = threads;
    return config;
  }

  bool dry() const { return !flags_.dry.empty(); }
  double seconds_left() const {
    return std::chrono::duration<double>(deadline_ - Clock::now()).count();
  }
  static std::string title(const Computation& item) {
    return fmt::format("{} [{}]", item.name, to_string(item.workload));
  }

  Status open_table();
  Status save() const;
  bool is_there(const Computation& item) const;
  Result<std::vector<Config>> configs_of(const Computation& item);
  std::vector<std::string> near_of(const Computation& item) const;
  void build(const Computation& item, std::vector<Config>& configs);
  Status time(const Computation& item, std::vector<Config>& configs);
  Status time_once(const Computation& item, Config& config, Buffers& buffers, int rounds);
  void drop_wrong(const Computation& item, std::vector<Config*>& ranked, Buffers& buffers);
  Status tune(const Computation& item);
  bool context_works() { return cudnn_.synchronize(live_, nullptr).ok(); }

  const Flags& flags_;
  Engine& cudnn_;
  Device live_;
  Device target_;
  int threads_;
  plan::WorkerClient workers_;
  std::string path_;
  TuningTable table_;
  Journal journal_;
  Clock::time_point deadline_;
  std::map<std::string, std::string> first_;  // by computation: the heuristics' first choice
  std::map<std::string, std::vector<RankedPlan>> ranked_;  // this run's, in full
  std::set<std::string> live_only_;                        // configs that only a device can build
  int failed_ = 0;
};

Status Tuner::open_table() {
  LAWSON_TRY(std::vector<Computation> some, computations_of(flags_.specs));
  Result<Verdict> verdict = dry() ? workers_.probe(some.front().graph, target_, {})
                                  : cudnn_.probe(some.front().graph, live_, {});
  if (!verdict.ok()) return std::move(verdict).error();
  const std::string version = verdict->engine_version;
  if (std::filesystem::exists(path_)) {
    LAWSON_TRY(const std::string text, read_file(path_));
    LAWSON_TRY(const Json document, parse_json(text, path_));
    LAWSON_TRY(table_, cudnn::tuning_table_from_json(document, path_));
    if (table_.device != target_.name || table_.cudnn != version) {
      return error(ErrorKind::invalid_argument,
                   "{} is about {} with cuDNN {}; here are {} and {}: choose another --folder",
                   path_, table_.device, table_.cudnn, target_.name, version);
    }
  }
  table_.device = target_.name;
  table_.compute_capability = target_.compute_capability;
  table_.cudnn = version;
  if (!flags_.driver.empty() || table_.driver.empty()) {
    table_.driver = flags_.driver.empty() ? "unknown" : flags_.driver;
  }
  table_.date = fmt::format("{:%Y-%m-%d}", fmt::gmtime(std::time(nullptr)));
  return {};
}

Status Tuner::save() const {
  const std::string part = path_ + ".part";
  LAWSON_CHECK(cases::write_result(part, cudnn::tuning_table_to_json(table_)));
  std::error_code failure;
  std::filesystem::rename(part, path_, failure);
  if (failure) return error(ErrorKind::io, "cannot write {}: {}", path_, failure.message());
  return {};
}

bool Tuner::is_there(const Computation& item) const {
  return std::any_of(table_.rows.begin(), table_.rows.end(), [&](const TuningRow& row) {
    // A row without times was not measured here.
    return row.name == item.name && row.workload == item.workload && row.plans.front().ms > 0 &&
           row.plans.size() > 1;
  });
}

Result<std::vector<Config>> Tuner::configs_of(const Computation& item) {
  std::vector<Config> list;
  std::set<std::string> known;
  const auto add = [&](const std::string& name, bool deviceless) {
    if (name == "?" || journal_.lost(title(item), name) || !known.insert(name).second) return;
    list.emplace_back();
    list.back().name = name;
    list.back().deviceless = deviceless;
  };
  std::vector<std::string> heuristics;
  if (!dry()) {
    LAWSON_TRY(const Verdict verdict, cudnn_.probe(item.graph, live_, {}));
    if (verdict.decision != Decision::supported) {
      return error(ErrorKind::unsupported, "{}", verdict.reasons.front().message);
    }
    heuristics = verdict.plan_names;
    first_[title(item)] = heuristics.front();
  }
  const std::vector<std::string> near = item.thorough ? std::vector<std::string>{} : near_of(item);
  if (!near.empty()) {
    if (heuristics.size() > kOfHeuristics) heuristics.resize(kOfHeuristics);
    for (const std::string& name : near) add(name, !live_only_.contains(name));
    for (const std::string& name : heuristics) add(name, !live_only_.contains(name));
    return list;
  }
  Result<std::vector<Candidate>> without = error(ErrorKind::internal, "not asked");
  std::thread asks([&] { without = workers_.candidates(item.graph, target_, {}); });
  auto live = dry() ? Result<std::vector<Candidate>>{std::vector<Candidate>{}}
                    : cudnn_.candidates(item.graph, live_, {});
  asks.join();
  if (without.ok()) {
    for (const Candidate& candidate : *without) add(candidate.name, true);
  } else {
    std::cout << "  without a device: " << without.error().message << std::endl;
  }
  if (!live.ok()) return std::move(live).error();
  for (const Candidate& candidate : *live) {
    if (!known.contains(candidate.name)) live_only_.insert(candidate.name);
    add(candidate.name, false);
  }
  return list;
}

// What was fast for the nearest workloads.
std::vector<std::string> Tuner::near_of(const Computation& item) const {
  struct Near {
    double distance;
    const std::vector<RankedPlan>* plans;
  };
  std::vector<Near> rows;
  for (const TuningRow& row : table_.rows) {
    const auto far = cudnn::distance(row.workload, item.workload);
    if (!far || row.plans.size() < 2) continue;
    const auto full = ranked_.find(fmt::format("{} [{}]", row.name, to_string(row.workload)));
    rows.push_back({*far, full == ranked_.end() ? &row.plans : &full->second});
  }
  std::stable_sort(rows.begin(), rows.end(),
                   [](const Near& a, const Near& b) { return a.distance < b.distance; });
  std::vector<std::string> names;
  for (std::size_t i = 0; i < std::min(kNearRows, rows.size()); ++i) {
    std::size_t live = 0;
    std::size_t carried = 0;
    for (const RankedPlan& plan : *rows[i].plans) {
      const bool live_only = live_only_.contains(plan.name);
      if ((live_only ? live : carried) < (live_only ? kLiveFromNear : kFromNear)) {
        names.push_back(plan.name);
      }
      ++(live_only ? live : carried);
    }
  }
  return names;
}

void Tuner::build(const Computation& item, std::vector<Config>& configs) {
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t i = next++; i < configs.size(); i = next++) {
      Config& config = configs[i];
      if (seconds_left() < 0) {
        config.failure = "time is up";
        continue;
      }
      Options options;
      options.deadline_ms = 1000 * std::max(kLeastBuildSeconds, seconds_left());
      const Candidate candidate{config.name};
      Result<Plan> plan = error(ErrorKind::internal, "not built");
      if (config.deviceless) plan = workers_.compile(item.graph, target_, options, candidate);
      if (!plan.ok() && !dry()) {
        config.deviceless = false;
        plan = cudnn_.compile(item.graph, live_, options, candidate, {});
      }
      if (plan.ok()) {
        config.plan = std::move(plan).value();
      } else {
        config.failure = plan.error().message;
      }
    }
  };
  std::vector<std::jthread> threads;
  for (int i = 0; i < threads_; ++i) threads.emplace_back(work);
}

Status Tuner::time_once(const Computation& item, Config& config, Buffers& buffers, int rounds) {
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

// Those whose numbers are not those of the heuristics' first choice.
void Tuner::drop_wrong(const Computation& item, std::vector<Config*>& ranked, Buffers& buffers) {
  const auto outputs = [&](const Config& config) -> Result<std::vector<double>> {
    LAWSON_TRY(void* workspace, buffers.workspace(config.plan->workspace_bytes));
    LAWSON_CHECK(buffers.poison(item.graph));
    LAWSON_CHECK(cudnn_.execute(*config.loaded, buffers.sets().front(), workspace, nullptr));
    LAWSON_CHECK(cudnn_.synchronize(live_, nullptr));
    return buffers.outputs(item.graph);
  };
  const auto named = std::find_if(ranked.begin(), ranked.end(), [&](const Config* config) {
    return config->name == first_[title(item)];
  });
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
    std::cout << "  " << config->name << ": " << config->failure << std::endl;
    return true;
  };
  std::erase_if(ranked, wrong);
}

Status Tuner::time(const Computation& item, std::vector<Config>& configs) {
  Buffers buffers(cudnn_, live_);
  const auto cache = static_cast<std::size_t>(live_.properties.value("l2CacheSize", 64 << 20));
  LAWSON_CHECK(buffers.fill(item.graph, 3 * cache));
  const int sets = static_cast<int>(buffers.sets().size());
  std::vector<Config*> ranked;
  for (Config& config : configs) {
    if (!config.plan) continue;
    auto loaded = cudnn_.load(*config.plan, live_);
    if (!loaded.ok()) {
      config.failure = loaded.error().message;
      continue;
    }
    config.loaded = std::move(loaded).value();
    config.executions = sets;
    LAWSON_CHECK(time_once(item, config, buffers, 1));
    if (config.times.empty()) continue;
    ranked.push_back(&config);
  }
  const auto sort = [&] {
    std::erase_if(ranked, [](const Config* config) { return config->times.empty(); });
    std::stable_sort(ranked.begin(), ranked.end(),
                     [](const Config* a, const Config* b) { return a->median() < b->median(); });
  };
  sort();
  if (ranked.empty()) return {};
  // The finalists, in turn: the fastest of all and of those that need no device.
  std::vector<Config*> finalists;
  std::size_t carried = 0;
  for (Config* config : ranked) {
    const bool running = config->median() < kInTheRunning * ranked.front()->median();
    const bool fast = running && finalists.size() < kFinalists;
    const bool wanted = config->deviceless && carried < kKept;
    if (!fast && !wanted) continue;
    carried += config->deviceless ? 1 : 0;
    finalists.push_back(config);
    const double round_ms = 2;
    const int most = std::max(1, static_cast<int>(40 / sets)) * sets;
    config->executions =
        std::clamp(sets * static_cast<int>(round_ms / (config->median() * sets) + 0.5), sets, most);
    config->times.clear();
  }
  for (int turn = 0; turn < 3; ++turn) {
    for (Config* config : finalists) {
      if (config->loaded) LAWSON_CHECK(time_once(item, *config, buffers, 3));
    }
  }
  ranked = finalists;
  sort();
  if (!ranked.empty()) drop_wrong(item, ranked, buffers);
  if (!context_works()) return error(ErrorKind::cuda, "the CUDA context is lost");
  if (ranked.empty()) return {};

  std::vector<RankedPlan>& full = ranked_[title(item)];
  full.clear();
  TuningRow row{item.name, item.workload, {}};
  std::size_t without_device = 0;
  std::size_t any = 0;
  for (const Config* config : ranked) {
    full.push_back({config->name, config->median()});
    const bool keep = any < kKept || (config->deviceless && without_device < kKept - 1);
    without_device += config->deviceless ? 1 : 0;
    ++any;
    if (keep) row.plans.push_back(full.back());
  }
  std::erase_if(table_.rows, [&](const TuningRow& other) {
    return other.name == row.name && other.workload == row.workload;
  });
  const auto first_carried = std::find_if(ranked.begin(), ranked.end(),
                                          [](const Config* config) { return config->deviceless; });
  std::cout << fmt::format("  {} {:.4f} ms", ranked.front()->name, ranked.front()->median());
  if (first_carried != ranked.end()) {
    std::cout << fmt::format("; without a device {} {:.4f}", (*first_carried)->name,
                             (*first_carried)->median());
  }
  for (const Config& config : configs) {
    if (config.name == first_[title(item)] && !config.times.empty()) {
      std::cout << fmt::format("; heuristics' {} {:.4f}", config.name, config.median());
    }
  }
  std::cout << std::endl;
  table_.rows.push_back(std::move(row));
  return {};
}

Status Tuner::tune(const Computation& item) {
  const auto begin = Clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  auto configs = configs_of(item);
  if (!configs.ok()) {
    std::cout << title(item) << ": " << configs.error().message << std::endl;
    return {};
  }
  const double asked = seconds();
  build(item, *configs);
  const double built = seconds();
  const auto refused = std::count_if(configs->begin(), configs->end(),
                                     [](const Config& config) { return !config.plan; });
  Status status;
  if (!dry()) status = time(item, *configs);
  std::map<std::string, std::pair<int, std::string>> failures;  // by message: how many, a name
  for (const Config& config : *configs) {
    if (config.failure.empty()) continue;
    ++failed_;
    auto& [count, name] = failures[config.failure.substr(0, 160)];
    ++count;
    name = config.name;
  }
  std::cout << fmt::format(
      "{}: {} configs, {} not built; {:.1f} s asked, {:.1f} s built, {:.1f} s "
      "timed; {:.0f} s left\n",
      title(item), configs->size(), refused, asked, built - asked, seconds() - built,
      seconds_left());
  for (const auto& [message, who] : failures) {
    std::cout << fmt::format("  failed: {} x {} ({})\n", who.first, message, who.second);
  }
  std::cout << std::flush;
  return status;
}

int Tuner::run() {
  const auto fail = [](const Error& error) {
    std::cerr << "lawson-tuning-table: " << to_string(error.kind) << ": " << error.message << '\n';
    return 3;
  };
  if (const Status opened = open_table(); !opened.ok()) return fail(opened.error());
  auto list = computations_of(flags_.specs);
  if (!list.ok()) return fail(list.error());
  if (!flags_.quick) {
    auto more = grid();
    if (!more.ok()) return fail(more.error());
    for (Computation& item : *more) list->push_back(std::move(item));
  }
  std::size_t done = 0;
  for (const Computation& item : *list) {
    if (title(item).find(flags_.only) == std::string::npos) continue;
    if (!flags_.again && is_there(item)) {
      ++done;
      continue;
    }
    if (seconds_left() < 0) break;
    const Status tuned = tune(item);
    if (dry()) continue;
    journal_.write();
    if (!tuned.ok()) {
      std::cerr << "lawson-tuning-table: " << tuned.error().message << '\n';
      if (!context_works()) std::_Exit(kContextLost);
      continue;
    }
    ++done;
    if (const Status saved = save(); !saved.ok()) return fail(saved.error());
  }
  std::cout << fmt::format("{} of {} computations have rows in {}; {} configs failed\n", done,
                           list->size(), path_, failed_);
  std::error_code ignored;
  std::filesystem::remove(path_ + ".journal", ignored);
  return 0;
}

int run(const Flags& flags) {
  Engine* engine = find_engine("cudnn");
  const auto fail = [](const Error& error, int code) {
    std::cerr << "lawson-tuning-table: " << error.message << '\n';
    return code;
  };
  if (engine == nullptr) {
    return fail(error(ErrorKind::unavailable, "this build has no cuDNN engine"), kSkipped);
  }
  Device live;
  if (flags.dry.empty()) {
    const auto devices = engine->live_devices();
    if (!devices.ok()) return fail(devices.error(), kSkipped);
    if (devices->empty()) {
      return fail(error(ErrorKind::unavailable, "no NVIDIA GPU here"), kSkipped);
    }
    live = devices->front();
  }
  Device target;
  const std::string name = flags.dry.empty() ? live.name : flags.dry;
  for (const Device& known : engine->known_targets()) {
    if (known.name == name) target = known;
  }
  if (target.name.empty()) {
    if (!flags.dry.empty()) return fail(invalid("no target '{}'", flags.dry), 2);
    target = live;  // a GPU that the target library lacks: its properties are as good
    target.ordinal = -1;
    target.evidence = Evidence::deviceless_measured_target;
  }
  const int cores = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  return Tuner{flags, *engine, live, target, flags.threads > 0 ? flags.threads : cores}.run();
}

}  // namespace
}  // namespace lawson::bench

int main(int argc, char** argv) {
  lawson::bench::Flags flags;
  flags.libexec = LAWSON_LIBEXEC;
  CLI::App app{"Measures the tuning table's rows on this GPU."};
  app.add_option("--minutes", flags.minutes, "begin nothing after so long")
      ->check(CLI::PositiveNumber);
  app.add_flag("--quick", flags.quick, "only the computations of bench/fusions");
  app.add_flag("--again", flags.again, "measure rows that are there again");
  app.add_option("--only", flags.only, "computations whose title contains this");
  app.add_option("--folder", flags.folder, "where DEVICE.json is or will be");
  app.add_option("--specs", flags.specs, "folder of specs");
  app.add_option("--libexec", flags.libexec, "folder of the worker and the no-driver library");
  app.add_option("--driver", flags.driver, "the driver's version, for the file");
  app.add_option("--threads", flags.threads, "builds at once (default: one per core)");
  app.add_option("--dry", flags.dry, "build for this target, without a GPU; times nothing");
  CLI11_PARSE(app, argc, argv);
  return lawson::bench::run(flags);
}
