// The data of one check: rows (workloads of models), distinct questions, answers per target.
#pragma once

#include <string>
#include <vector>

#include "api.h"

namespace lawson::cli {

struct CheckRow {
  std::size_t model = 0;  // index of Check::models
  std::string name;
  std::string group;  // "attention", "gemm" or "spec"
  std::int64_t layers = 0;
  std::string note;
  Json spec;
  std::size_t question = 0;  // equal specs are one question
};

struct CheckModel {
  std::string name;
  std::string model_type;  // empty for a spec file
  std::int64_t layers = 0;
};

// What is known of one question on one target.
struct CheckCell {
  Json verdict;           // the library's, or {"error": {"kind", "message"}}
  Json neighbours;        // those that fuse, as lawson_explain lists them; only where it is a "no"
  std::size_t tried = 0;  // neighbours probed
};

struct Check {
  std::vector<CheckModel> models;
  std::vector<CheckRow> rows;
  std::vector<std::string> targets;
  std::vector<std::string> capabilities;  // compute capability of each target: "9.0"; "" for cpu
  std::vector<std::vector<CheckCell>> cells;  // [question][target]
  std::size_t probes = 0;                     // verdicts asked for, neighbours included
  double seconds = 0;

  const CheckCell& cell(const CheckRow& row, std::size_t target) const {
    return cells[row.question][target];
  }
};

// "supported", "unsupported", "undecided" or "error".
std::string decision_of(const Json& verdict);

// The table, the reasons, the neighbours; for people.
std::string report_text(const Check& check);

// What a workload computes, in a few words: "32/8 heads d128 4096x4096 causal", "4096x4096x6144
// +add".
std::string describe_spec(const Json& spec);

// One {"model", "targets", "workloads"} per model; a list when there are several.
Json report_json(const Check& check);

}  // namespace lawson::cli
