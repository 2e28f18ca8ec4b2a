#include "capi/context.h"

#include <dlfcn.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <mutex>
#include <new>

#include "base/lazy.h"
#include "base/process.h"
#include "capi/guard.h"
#include "diag/settings.h"
#include "engine/registry.h"

namespace lawson::capi {
namespace {

namespace fs = std::filesystem;

// Of a process. A forked child begins with a planner of its own and the parent's settings: locks
// of the parent's may be held by threads that do not exist there, and its workers are not ours.
struct State {
  std::mutex mutex;  // held while a planner is made, and for settings
  std::string cudnn_path;
  int max_workers = 0;
  // What a forked child leaves alone.
  const State* parents = nullptr;
  const plan::Planner* parents_planner = nullptr;
};

std::atomic<State*> current_state{nullptr};
std::atomic<plan::Planner*> current_planner{nullptr};

State& state() {
  State* known = current_state.load(std::memory_order_acquire);
  if (known != nullptr) return *known;
  auto fresh = std::make_unique<State>();
  if (current_state.compare_exchange_strong(known, fresh.get())) known = fresh.release();
  return *known;
}

// What the parent had is left as it is, whatever state it is in. Copying texts allocates, which
// glibc allows in a child.
[[maybe_unused]] const bool kForks =
    at_fork({nullptr, nullptr, [] {
               const plan::Planner* planner = current_planner.exchange(nullptr);
               const State* parents = current_state.exchange(nullptr);
               if (parents == nullptr) return;
               auto* own = new (std::nothrow) State;
               if (own == nullptr) return;
               own->cudnn_path = parents->cudnn_path;
               own->max_workers = parents->max_workers;
               own->parents = parents;
               own->parents_planner = planner;
               current_state.store(own);
             }});

constexpr std::array kOptionPrefixes{
    offsetof(lawson_options, strength),      offsetof(lawson_options, workspace_limit),
    offsetof(lawson_options, deterministic), offsetof(lawson_options, deadline_ms),
    offsetof(lawson_options, tuning),        offsetof(lawson_options, retune),
    offsetof(lawson_options, dynamic_shapes)};
// A caller that was compiled without deadline_ms, or without dynamic_shapes, has the size of the
// struct up to there, with no field in its padding.
static_assert(offsetof(lawson_options, deadline_ms) == 40);
static_assert(offsetof(lawson_options, dynamic_shapes) == 56);

}  // namespace

std::string library_path() {
  Dl_info found{};
  if (dladdr(reinterpret_cast<const void*>(&library_path), &found) == 0 ||
      found.dli_fname == nullptr) {
    return {};
  }
  std::error_code ignored;
  const fs::path real = fs::canonical(found.dli_fname, ignored);
  return ignored ? std::string{found.dli_fname} : real.string();
}

std::string libexec_folder() {
  if (const char* given = std::getenv("LAWSON_LIBEXEC"); given != nullptr && *given != '\0') {
    return given;
  }
  // lib/ has libexec/ beside it; lib/<triplet>/ (Debian) has it one level up.
  const fs::path folder = fs::path{library_path()}.parent_path();
  const fs::path beside = folder.parent_path() / "libexec" / "lawson";
  const fs::path above = folder.parent_path().parent_path() / "libexec" / "lawson";
  std::error_code ignored;
  return (!fs::exists(beside, ignored) && fs::exists(above, ignored) ? above : beside).string();
}

Result<plan::Planner*> planner() {
  if (plan::Planner* ready = current_planner.load(std::memory_order_acquire)) return ready;
  State& shared = state();
  const std::lock_guard lock{shared.mutex};
  plan::Planner* made = current_planner.load(std::memory_order_acquire);
  if (made == nullptr) {
    diag::begin();
    const std::string folder = libexec_folder();
    plan::PlannerConfig config;
    config.engines = engines();
    config.worker_path = folder + "/lawson-worker";
    config.nodriver_path = folder + "/liblawson-nodriver.so";
    config.cudnn_path = shared.cudnn_path;
    if (!shared.cudnn_path.empty()) choose_cudnn(shared.cudnn_path);
    config.max_workers = shared.max_workers;
    LAWSON_TRY(config.store, plan::Store::environment());
    if (const char* bundles = std::getenv("LAWSON_BUNDLE_PATH")) config.bundle_path = bundles;
    made = new plan::Planner(std::move(config));
    current_planner.store(made, std::memory_order_release);
  }
  return made;
}

Status configure(const lawson_settings& settings) {
  diag::begin();
  LAWSON_CHECK(plan::Store::environment());
  State& shared = state();
  const std::lock_guard lock{shared.mutex};
  if (current_planner.load(std::memory_order_acquire) != nullptr) {
    return invalid(
        "lawson_configure was called after the first call that needed an engine; call "
        "it before any probe, compile or device query");
  }
  if (settings.max_workers < 0 || settings.max_workers > 1024) {
    return invalid(
        "settings.max_workers: {} is not allowed; expected 0 (one per core, at most 8) "
        "to 1024",
        settings.max_workers);
  }
  shared.cudnn_path = settings.cudnn_path == nullptr ? "" : settings.cudnn_path;
  shared.max_workers = settings.max_workers;
  return {};
}

Result<Asked> read_options(const lawson_options* options) {
  lawson_options given{};
  given.workspace_limit = -1;
  LAWSON_CHECK(read_struct(options, given, "lawson_options", kOptionPrefixes));
  Asked asked;
  asked.engine = given.engine == nullptr ? "" : given.engine;
  // A caller's value may be outside the enum, and loading it as the enum would be undefined.
  int strength = 0;
  static_assert(sizeof(strength) == sizeof(given.strength));
  std::memcpy(&strength, &given.strength, sizeof(strength));
  switch (strength) {
    case LAWSON_JUDGED:
      asked.options.strength = Strength::judged;
      break;
    case LAWSON_BUILT:
      asked.options.strength = Strength::built;
      break;
    case LAWSON_VERIFIED:
      asked.options.strength = Strength::verified;
      break;
    default:
      return invalid(
          "options.strength: {} is not allowed; expected LAWSON_JUDGED (0), "
          "LAWSON_BUILT (1) or LAWSON_VERIFIED (2)",
          strength);
  }
  asked.options.workspace_limit = given.workspace_limit < 0 ? -1 : given.workspace_limit;
  asked.options.deterministic = given.deterministic != 0;
  if (std::isnan(given.deadline_ms)) {
    return invalid("options.deadline_ms: NaN is not allowed; expected milliseconds, or 0 for none");
  }
  asked.options.deadline_ms = given.deadline_ms > 0 ? given.deadline_ms : -1;
  int tuning = 0;
  static_assert(sizeof(tuning) == sizeof(given.tuning));
  std::memcpy(&tuning, &given.tuning, sizeof(tuning));
  switch (tuning) {
    case LAWSON_TUNING_OFF:
      asked.options.tuning = Tuning::off;
      break;
    case LAWSON_TUNING_QUICK:
      asked.options.tuning = Tuning::quick;
      break;
    case LAWSON_TUNING_EXHAUSTIVE:
      asked.options.tuning = Tuning::exhaustive;
      break;
    default:
      return invalid(
          "options.tuning: {} is not allowed; expected LAWSON_TUNING_OFF (0), LAWSON_TUNING_QUICK "
          "(1) or LAWSON_TUNING_EXHAUSTIVE (2)",
          tuning);
  }
  asked.retune = given.retune != 0;
  asked.options.dynamic_shapes = given.dynamic_shapes != 0;
  return asked;
}

Status fits_in_memory(const ir::Graph& graph) {
  // Linux hands out more memory than there is, so a request is compared with the machine first.
  const double present =
      static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  double wanted = 0;
  for (const ir::Tensor& tensor : graph.tensors) {
    wanted += static_cast<double>(
        byte_size(tensor.dtype, storage_extent(tensor.shape, tensor.strides).value_or(0)));
  }
  if (wanted <= present) return {};
  return error(ErrorKind::out_of_memory,
               "graph '{}' needs {:.1f} GiB for its tensors; this machine has {:.1f} GiB",
               graph.name, std::ldexp(wanted, -30), std::ldexp(present, -30));
}

std::string engine_for(const Device& device, const std::string& asked) {
  if (!asked.empty()) return asked;
  return device.kind == Device::Kind::cuda ? "cudnn" : "cpu";
}

}  // namespace lawson::capi
