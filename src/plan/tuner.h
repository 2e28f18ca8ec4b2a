// Tuning: the candidates of one engine for one graph are built in parallel, timed on the live
// device with data of their own, and the fastest whose numbers are right is the plan.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/engine.h"
#include "plan/race.h"
#include "plan/scratch.h"

namespace lawson::plan {

// What became of a candidate.
enum class Standing {
  chosen,
  slower,           // than the chosen one; or as fast, and behind it in the engine's order
  not_timed,        // built, and the deadline passed or it was the only one
  not_built,        // the engine's refusal, or the deadline passed before
  workspace_limit,  // dropped: its workspace is larger than allowed
  wrong_result,     // dropped: fast, and its numbers are not those of the others
  failed,           // building, loading or running it failed
};
std::string_view to_string(Standing standing);  // "chosen", "slower", "not_timed", ...

struct CandidateReport {
  std::string name;
  Standing standing = Standing::not_built;
  std::string failure;  // why it is not a choice
  std::int64_t workspace_bytes = 0;
  int rounds = 0;  // timed; 0: no times
  double median_ms = 0;
  double min_ms = 0;
  double max_ms = 0;
};

struct TuningReport {
  Tuning tuning = Tuning::off;
  std::string choice;         // one sentence: what the choice rests on
  std::string compared_with;  // "oracle", "first plan"; empty: there was nothing to compare
  bool deadline_passed = false;
  bool stored = false;  // the choice was read from the disk, not made now
  std::size_t buffer_sets = 0;
  std::size_t buffer_bytes = 0;  // of all sets
  double build_ms = 0;
  double time_ms = 0;
  double verify_ms = 0;
  std::vector<CandidateReport> candidates;  // in the engine's order
};

Json report_to_json(const TuningReport& report);
Result<TuningReport> report_from_json(const Json& document);

struct Tuned {
  Plan plan;
  TuningReport report;
  std::vector<Plan> built;  // all that could be chosen, the plan among them, in the engine's order
};

struct TunerConfig {
  std::size_t threads = 0;  // that build; 0: one per core
  std::uint64_t seed = 1;
  RaceRules race;
  ScratchLimits scratch;
  // Multiply-adds and elements up to which numbers are compared with the oracle.
  double oracle_work = 3e7;
};

class Tuner {
 public:
  // `reference` has the oracle; `forward` runs forward passes for generated data.
  Tuner(Engine& engine, Engine& reference, Engine& forward, TunerConfig config = {})
      : engine_{engine}, reference_{reference}, forward_{forward}, config_{config} {}

  // The fastest right plan among the first eight candidates (quick; more where none of them can be
  // used) or all (exhaustive). With a deadline that passes: the best so far, and at least one plan
  // is built; the winner's numbers are checked however late it is. An error when no candidate can
  // be used: unsupported with every reason if the engine refused all, else the first fault.
  // `waited_ms` of the deadline are over already.
  Result<Tuned> tune(const ir::Graph& graph, const Device& device, const Options& options,
                     double waited_ms = 0);

  // The same with plans that were built before, in the engine's order.
  Result<Tuned> tune_again(const ir::Graph& graph, const Device& device, const Options& options,
                           std::vector<Plan> built, double waited_ms = 0);

 private:
  Engine& engine_;
  Engine& reference_;
  Engine& forward_;
  TunerConfig config_;
};

}  // namespace lawson::plan
