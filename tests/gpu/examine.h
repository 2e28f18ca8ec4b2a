// One case on the live GPU: judged with and without the device, executed, compared.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "cases/cases.h"
#include "cases/judge.h"
#include "plan/planner.h"

namespace lawson::cases {

struct Machine {
  plan::Planner& planner;
  Engine& cudnn;
  Engine& reference;
  Device target;  // not present: judged in workers
  Device live;  // not present either: nothing is executed, and the deviceless verdict stands alone
};

// Where the time of a case went.
struct Seconds {
  double deviceless = 0, live = 0, compile = 0, oracle = 0, run = 0, bitwise = 0;
};

struct Row {
  Case item;
  std::string deviceless;  // supported, unsupported, undecided, error
  std::string live;
  std::vector<Reason> reasons;  // of a refusal
  std::string message;          // of an error while judging
  bool same_plans = false;
  bool same_reasons = false;
  bool must_run = false;   // it is one that XLA's tests prove
  bool tuned = false;      // its plan is chosen by timing a few
  bool not_built = false;  // accepted when judged, refused when built, with and without the device
  std::string engine;      // of the plan that ran
  std::string plan_name;
  std::string plan_id;
  std::vector<std::string> rewrites;
  std::string defect;
  std::string executed;       // ok, wrong, not built, error, "" (not accepted)
  bool context_lost = false;  // a CUDA error: the context may be of no use any more
  std::string detail;
  double ratio = 0;
  std::string bitwise;  // equal, unstable, differs, other plan, wrong, error, "" (not tried)
  // Of seed and offset: how the oracle got the mask; "repeated" where it got none (two runs gave
  // the same bits), "" where there is no such dropout.
  std::string dropout;
  double kept = 0;  // share of the weights that a dumped mask keeps
  Seconds seconds;

  bool verdicts_differ() const { return deviceless != live && deviceless != "undecided"; }
  bool is_attention() const { return item.spec.at("kind") == "attention"; }
  bool is_named() const { return item.name.starts_with("xla-") || item.name.starts_with("own-"); }
  bool is_backward() const { return item.spec.value("pass", "") == "backward"; }
};

// `bitwise`: also the plan compiled without the device, which has to give the same bits.
void examine(Machine& machine, bool bitwise, Row& row);

}  // namespace lawson::cases
