// lawson-tuning-table: measures which engine configs of cuDNN are the fastest on this GPU and
// writes them as a file of the tuning table (src/engine/cudnn/tuning). Run by scripts/tune-table.
//
// Every computation of bench/fusions, then a grid of operand types, layouts, epilogues and sizes.
// What can be built without a device is built by workers without one, as it will be for users who
// have none, while the computation before is timed; the rest in this process. A config that fails
// costs itself: also when it takes the CUDA context with it (exit code 4: start again; the journal
// says what to leave out). A file that is there is extended, and finished rows stay.
#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <future>
#include <iostream>
#include <map>
#include <mutex>
#include <thread>

#include "engine/registry.h"
#include "gpu/result.h"
#include "tuning_search.h"
#include "tuning_timer.h"

namespace lawson::bench {
namespace {

using cudnn::TuningRow;
using cudnn::TuningTable;
using Clock = std::chrono::steady_clock;

std::string today() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[sizeof("2026-11-30")];
  return {text, std::strftime(text, sizeof(text), "%Y-%m-%d", &parts)};
}

constexpr int kSkipped = 77;
constexpr int kContextLost = 4;
// Kept of each row, and so many at least that need no device to be built.
constexpr std::size_t kKept = 6;
constexpr std::size_t kCarriedKept = 5;

struct Flags {
  double minutes = 7;
  bool quick = false;
  bool again = false;
  std::string only;
  std::string folder = LAWSON_SOURCE_DIR "/src/engine/cudnn/tuning";
  std::string specs = LAWSON_SOURCE_DIR "/bench/fusions";
  std::string libexec = LAWSON_LIBEXEC;
  std::string driver;
  std::string dry;  // a target: no GPU, nothing is timed or written
  int threads = 0;
};

// A computation whose configs are built as far as that goes without a device.
struct Job {
  const Computation* item = nullptr;
  Result<Candidates> candidates = error(ErrorKind::internal, "not asked");
  double asked = 0;  // seconds
  double built = 0;
};

class Tuner {
 public:
  Tuner(const Flags& flags, Engine& cudnn, Device live, Device target, int threads)
      : flags_{flags},
        live_{std::move(live)},
        target_{std::move(target)},
        deadline_{Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                     std::chrono::duration<double>(60 * flags.minutes))},
        search_{{cudnn, live_, flags.dry.empty(), target_, flags.libexec, threads,
                 [this] { return seconds_left(); }}},
        path_{fmt::format("{}/{}.json", flags.folder, target_.name)},
        journal_{path_ + ".journal"},
        timer_{cudnn, live_, journal_} {}

  int run();

 private:
  double seconds_left() const {
    return std::chrono::duration<double>(deadline_ - Clock::now()).count();
  }
  Result<std::vector<Computation>> open();
  Status save() const;
  bool is_there(const Computation& item) const;
  Job prepare(const Computation& item);
  Status finish(Job& job);
  void keep(const Job& job, const std::vector<const Config*>& ranked);
  void report(const Job& job, double seconds) const;

  const Flags& flags_;
  Device live_;
  Device target_;
  Clock::time_point deadline_;
  Search search_;
  std::string path_;
  Journal journal_;
  Timer timer_;
  std::mutex mutex_;              // of known_
  std::vector<TuningRow> known_;  // the table's rows, this run's with all that was timed
  TuningTable table_;
};

Result<std::vector<Computation>> Tuner::open() {
  LAWSON_TRY(std::vector<Computation> list, computations_of(flags_.specs));
  if (list.empty()) return invalid("no specs in {}", flags_.specs);
  if (!flags_.quick) {
    LAWSON_TRY(std::vector<Computation> more, grid());
    for (Computation& item : more) list.push_back(std::move(item));
  }
  LAWSON_CHECK(search_.open(list.front().graph));
  if (std::filesystem::exists(path_)) {
    LAWSON_TRY(const std::string text, read_file(path_));
    LAWSON_TRY(const Json document, parse_json(text, path_));
    LAWSON_TRY(table_, cudnn::tuning_table_from_json(document, path_));
    if (table_.device != target_.name || table_.cudnn != search_.cudnn_version()) {
      return error(ErrorKind::invalid_argument,
                   "{} is about {} with cuDNN {}; here are {} and {}: choose another --folder",
                   path_, table_.device, table_.cudnn, target_.name, search_.cudnn_version());
    }
  }
  table_.device = target_.name;
  table_.compute_capability = target_.compute_capability;
  table_.cudnn = search_.cudnn_version();
  if (!flags_.driver.empty()) table_.driver = flags_.driver;
  if (table_.driver.empty()) table_.driver = "unknown";
  table_.date = today();
  known_ = table_.rows;
  return list;
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
    // One plan alone is a fact from elsewhere, not measured here.
    return row.name == item.name && row.workload == item.workload && row.plans.size() > 1;
  });
}

Job Tuner::prepare(const Computation& item) {
  const auto begin = Clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  std::vector<TuningRow> rows;
  {
    const std::lock_guard lock{mutex_};
    rows = known_;
  }
  Job job;
  job.item = &item;
  job.candidates = search_.candidates(item, rows);
  job.asked = seconds();
  if (job.candidates.ok()) search_.build_without_device(item, job.candidates->configs);
  job.built = seconds() - job.asked;
  return job;
}

void Tuner::keep(const Job& job, const std::vector<const Config*>& ranked) {
  const Computation& item = *job.item;
  TuningRow all{item.name, item.workload, {}};
  TuningRow row = all;
  std::size_t carried = 0;
  for (const Config* config : ranked) {
    all.plans.push_back({config->name, config->median()});
    const bool wanted = row.plans.size() < kKept || (config->deviceless && carried < kCarriedKept);
    carried += config->deviceless ? 1 : 0;
    if (wanted) row.plans.push_back(all.plans.back());
  }
  const auto replace = [&](std::vector<TuningRow>& rows, TuningRow fresh) {
    std::erase_if(rows, [&](const TuningRow& old) {
      return old.name == item.name && old.workload == item.workload;
    });
    rows.push_back(std::move(fresh));
  };
  replace(table_.rows, std::move(row));
  const std::lock_guard lock{mutex_};
  replace(known_, std::move(all));
}

void Tuner::report(const Job& job, double seconds) const {
  const std::vector<Config>& configs = job.candidates->configs;
  const auto without = std::count_if(configs.begin(), configs.end(),
                                     [](const Config& config) { return !config.plan; });
  std::cout << fmt::format(
      "{}: {} configs{}, {} not built; {:.1f} s asked, {:.1f} s built, "
      "{:.1f} s built here and timed; {:.0f} s left\n",
      title(*job.item), configs.size(), job.candidates->all ? " (all)" : "", without, job.asked,
      job.built, seconds, seconds_left());
  std::map<std::string, std::pair<int, std::string>> failures;  // by message: how many, a name
  for (const Config& config : configs) {
    if (config.failure.empty()) continue;
    auto& [count, name] = failures[config.failure.substr(0, 160)];
    ++count;
    name = config.name;
  }
  for (const auto& [message, who] : failures) {
    std::cout << fmt::format("  failed: {} x {} ({})\n", who.first, message, who.second);
  }
  std::cout << std::flush;
}

Status Tuner::finish(Job& job) {
  if (!job.candidates.ok()) {
    std::cout << title(*job.item) << ": " << job.candidates.error().message << std::endl;
    return {};
  }
  const auto begin = Clock::now();
  std::vector<Config>& configs = job.candidates->configs;
  search_.build_with_device(*job.item, configs);
  std::vector<const Config*> ranked;
  if (flags_.dry.empty()) {
    LAWSON_TRY(ranked, timer_.rank(*job.item, job.candidates->first, configs));
  }
  report(job, std::chrono::duration<double>(Clock::now() - begin).count());
  if (ranked.empty()) return {};
  const auto show = [](std::string_view what, const Config& config) {
    std::cout << fmt::format("  {}{} {:.4f} ms", what, config.name, config.median());
  };
  show("", *ranked.front());
  const auto carried = std::find_if(ranked.begin(), ranked.end(),
                                    [](const Config* config) { return config->deviceless; });
  if (carried != ranked.end()) show("| without a device ", **carried);
  for (const Config& config : configs) {
    if (config.name == job.candidates->first && !config.times.empty()) {
      show("| heuristics' first ", config);
    }
  }
  std::cout << std::endl;
  keep(job, ranked);
  return {};
}

int Tuner::run() {
  const auto fail = [](const Error& error) {
    std::cerr << "lawson-tuning-table: " << to_string(error.kind) << ": " << error.message << '\n';
    return 3;
  };
  const auto list = open();
  if (!list.ok()) return fail(list.error());
  std::vector<const Computation*> todo;
  for (const Computation& item : *list) {
    if (title(item).find(flags_.only) == std::string::npos) continue;
    if (flags_.again || !is_there(item)) todo.push_back(&item);
  }
  std::future<Job> next;
  const auto begin = [&](std::size_t i) {
    if (i >= todo.size() || seconds_left() < 0) return;
    next = std::async(std::launch::async, [this, item = todo[i]] { return prepare(*item); });
  };
  begin(0);
  for (std::size_t i = 0; next.valid(); ++i) {
    Job job = next.get();
    begin(i + 1);
    const Status finished = finish(job);
    if (!flags_.dry.empty()) continue;
    if (!finished.ok()) {
      std::cerr << "lawson-tuning-table: " << finished.error().message << std::endl;
      journal_.write();
      if (!timer_.context_works()) std::_Exit(kContextLost);
      continue;
    }
    if (const Status saved = save(); !saved.ok()) return fail(saved.error());
  }
  const auto done = std::count_if(list->begin(), list->end(),
                                  [&](const Computation& item) { return is_there(item); });
  std::cout << fmt::format("{} of {} computations have rows in {}\n", done, list->size(), path_);
  journal_.remove();
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
