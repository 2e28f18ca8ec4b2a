// The tuning table: which engine configs were the fastest on which device for which workload. Files
// of tuning/, written by scripts/tune-table and embedded like the target library's. It orders what
// cuDNN offers and never decides a verdict: a config that cuDNN refuses for a graph is passed over.
#pragma once

#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "engine/cudnn/workload.h"
#include "engine/device.h"

namespace lawson::cudnn {

struct RankedPlan {
  std::string name;  // as cuDNN spells it: "eng2_k24=2"
  double ms = 0;     // of one execution; 0: known to be good, not timed
};

struct TuningRow {
  std::string name;  // of the computation that was measured
  Workload workload;
  std::vector<RankedPlan> plans;  // fastest first
};

struct TuningTable {
  std::string device;          // a target's name
  int compute_capability = 0;  // 900
  std::string driver;
  std::string cudnn;  // "9.19.0"
  std::string date;   // "2026-11-30"
  std::vector<TuningRow> rows;
};

// `source`: the file's name, for messages.
Result<TuningTable> tuning_table_from_json(const Json& document, const std::string& source);
Json tuning_table_to_json(const TuningTable& table);

struct TuningFile {
  std::string name;  // "h200.json"
  std::string_view text;
};
extern const std::vector<TuningFile> kTuningFiles;
const std::vector<TuningTable>& tuning_tables();  // those files

// Whether what was measured with that cuDNN ("9.19.0") says something of this one (91901): engines
// are numbered anew by other minor versions.
bool same_family(const std::string& measured, int cudnn_version);

// How little what is fast for the one says about the other: 0 for the same, 1 for a dim twice as
// large. nullopt: nothing, since operands of other types have other kernels.
std::optional<double> distance(const Workload& a, const Workload& b);

struct NearestRow {
  const TuningTable* table = nullptr;
  const TuningRow* row = nullptr;

  std::string text() const;  // what the choice rests on, as a sentence
};

// The row whose workload is nearest to `workload`, of the tables of this device; without one, of a
// device of the same compute capability, whose kernels are the same. Only rows of the same cuDNN
// minor version (engines are numbered anew by others) count, and only those near enough that what
// is fast there says something here. nullopt: none.
std::optional<NearestRow> nearest_row(const std::vector<TuningTable>& tables, const Device& device,
                                      int cudnn_version, const Workload& workload);

// The configs that are among the fastest for any workload; none: too little was measured on such a
// device to say so.
std::set<std::string> proven_plans(const std::vector<TuningTable>& tables, const Device& device,
                                   int cudnn_version);

}  // namespace lawson::cudnn
