#include "capi/explain.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <map>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>

#include "capi/context.h"
#include "capi/guard.h"
#include "capi/handles.h"
#include "front/neighbours.h"
#include "front/split.h"
#include "ir/json.h"

namespace lawson::capi {
namespace {

using front::Neighbour;

constexpr std::size_t kMaxTogether = 3;  // changes made at once
constexpr std::size_t kMaxTargets = 8;
constexpr std::size_t kMaxPeeled = 8;  // conditions that stand one behind the other
constexpr std::size_t kMaxErrors = 8;
constexpr std::size_t kSplitShare = 2;  // one probe of so many is for cutting a graph

// One probe: the spec with these changes, on this device.
struct Trial {
  std::vector<std::size_t> changes;  // indices of neighbours, in order; empty: another target
  std::vector<Reason> removed;       // for each change, the reason that stood before it
  std::vector<Reason> before;        // all reasons before the newest change
  const Device* device = nullptr;
  std::optional<SpecVerdict> verdict;
  std::optional<Error> error;
  Json document;

  bool supported() const { return verdict && verdict->verdict.decision == Decision::supported; }
};

Reason first_of(const std::vector<Reason>& reasons) {
  return reasons.empty() ? Reason{} : reasons.front();
}

constexpr std::string_view kAllInputTypes = "inputs.dtype";  // of all matmul operands at once

// Do both change one thing? Then the second undoes the first.
bool overlap(const Neighbour& a, const Neighbour& b) {
  const auto is_input_type = [](const std::string& field) {
    return field.starts_with("inputs[") && field.ends_with(".dtype");
  };
  return a.field == b.field || (a.field == kAllInputTypes && is_input_type(b.field)) ||
         (b.field == kAllInputTypes && is_input_type(a.field));
}

// "softmax", "inputs[0].dtype", "ops[3]" (the op's name), "outputs[1]" in a spec's document; null
// where the document leaves it out.
Json value_at(const Json& document, std::string_view field) {
  if (field == kAllInputTypes) {
    Json types = Json::array();
    for (const Json& input : document.value("inputs", Json::array())) {
      types.push_back(input.value("dtype", Json{}));
    }
    return types;
  }
  const std::size_t open = field.find('[');
  const std::size_t close = field.find(']');
  const auto found = document.find(std::string{field.substr(0, open)});
  if (found == document.end()) return {};
  if (open == std::string_view::npos || close == std::string_view::npos) return *found;
  std::size_t index = 0;
  const std::string_view digits = field.substr(open + 1, close - open - 1);
  std::from_chars(digits.data(), digits.data() + digits.size(), index);
  if (!found->is_array() || index >= found->size()) return {};
  const Json& entry = (*found)[index];
  if (!entry.is_object()) return entry;
  const std::string_view member = field.substr(close + 1);
  if (member.starts_with('.')) return entry.value(std::string{member.substr(1)}, Json{});
  return entry.value(entry.contains("op") ? "op" : "name", Json{});
}

class Explanation {
 public:
  Explanation(const front::Spec& spec, const Device& device, std::size_t limit, unsigned threads,
              const ProbeSpec& probe)
      : spec_{spec},
        device_{device},
        limit_{limit == 0 ? kDefaultExplainLimit : limit},
        threads_{std::max(threads, 1U)},
        probe_{probe} {}

  Result<Json> run(const std::vector<Device>& targets) {
    LAWSON_TRY(SpecVerdict own, probe_(spec_, device_));
    document_ = {{"verdict", own.json},
                 {"conditions", Json::array()},
                 {"neighbours", Json::array()},
                 {"probed", 0}};
    if (own.verdict.decision == Decision::supported) return document_;
    own_ = std::move(own);
    changes_ = front::neighbours(spec_);

    try_splits();
    std::vector<Trial> elsewhere = target_trials(targets);
    std::vector<Trial> singles =
        single_trials(limit_ - std::min(limit_, elsewhere.size() + probed_));
    const std::size_t single_count = singles.size();
    for (Trial& trial : elsewhere) singles.push_back(std::move(trial));
    probe_all(singles);
    elsewhere.assign(
        std::make_move_iterator(singles.begin() + static_cast<std::ptrdiff_t>(single_count)),
        std::make_move_iterator(singles.end()));
    singles.resize(single_count);

    if (!report(singles, "alone") && split_.is_null()) {
      try_together(singles, (limit_ + probed_) / 2);
      if (document_["neighbours"].empty()) peel();
    }
    report_split();
    for (const Trial& trial : elsewhere) report_target(trial);
    document_["probed"] = probed_;
    if (!errors_.empty()) document_["errors"] = errors_;
    return document_;
  }

 private:
  std::vector<Trial> target_trials(const std::vector<Device>& targets) const {
    std::vector<Trial> trials;
    const std::size_t room = std::min(kMaxTargets, std::max<std::size_t>(1, limit_ / 4));
    for (const Device& target : targets) {
      if (trials.size() == room) break;
      Trial trial;
      trial.device = &target;
      trials.push_back(std::move(trial));
    }
    return trials;
  }

  std::vector<Trial> single_trials(std::size_t room) const {
    std::vector<Trial> trials;
    for (std::size_t i = 0; i < std::min(room, changes_.size()); ++i) {
      Trial trial;
      trial.changes = {i};
      trial.device = &device_;
      trial.before = own_->verdict.reasons;
      trial.removed = {first_of(trial.before)};
      trials.push_back(std::move(trial));
    }
    return trials;
  }

  void probe_all(std::vector<Trial>& trials) {
    std::atomic<std::size_t> next{0};
    const auto work = [&] {
      for (std::size_t i = next++; i < trials.size(); i = next++) probe_one(trials[i]);
    };
    std::vector<std::jthread> helpers;
    for (std::size_t i = 1; i < std::min<std::size_t>(threads_, trials.size()); ++i) {
      helpers.emplace_back(work);
    }
    work();
    helpers.clear();  // joins
    for (const Trial& trial : trials) {
      probed_ += trial.verdict || trial.error ? 1U : 0U;
      if (trial.error && errors_.size() < kMaxErrors) {
        errors_.push_back({{"change", sentence(trial)}, {"message", trial.error->message}});
      }
    }
  }

  // An exception in a helper thread would end the process; here it is this probe's error.
  void probe_one(Trial& trial) const noexcept {
    try {
      std::vector<const Neighbour*> made;
      for (const std::size_t i : trial.changes) made.push_back(&changes_[i]);
      const auto changed = front::apply(spec_, made);
      if (!changed.ok()) return;  // these changes do not go together
      auto verdict = probe_(*changed, *trial.device);
      if (!verdict.ok()) {
        trial.error = std::move(verdict).error();
        return;
      }
      trial.document = changed->document;
      trial.verdict = std::move(verdict).value();
    } catch (const std::exception& e) {
      trial.error.emplace(Error{ErrorKind::internal, e.what(), {}});
    } catch (...) {
      trial.error.emplace();
    }
  }

  std::string sentence(const Trial& trial) const {
    if (trial.changes.empty()) return fmt::format("on {}", trial.device->title);
    std::string text;
    for (const std::size_t i : trial.changes) {
      if (!text.empty()) text += " and ";
      text += changes_[i].change;
    }
    return text;
  }

  // The supported ones become neighbours, their attributes conditions. False when none is, or only
  // one that gives up the pass: what stands in the way of the pass itself is then still open.
  bool report(const std::vector<Trial>& trials, const char* enough) {
    bool any = false;
    for (const Trial& trial : trials) {
      if (!trial.supported()) continue;
      any = any || changes_[trial.changes.front()].field != "pass";
      Json fields = Json::array();
      bool is_exact = true;
      for (std::size_t i = 0; i < trial.changes.size(); ++i) {
        const Neighbour& change = changes_[trial.changes[i]];
        fields.push_back(change.field);
        is_exact = is_exact && change.exact;
        add_condition(trial.changes[i], trial.removed[i], enough);
      }
      document_["neighbours"].push_back({{"change", sentence(trial)},
                                         {"field", fields.front()},
                                         {"fields", fields},
                                         {"kind", "attribute"},
                                         {"exact", is_exact},
                                         {"spec", trial.document},
                                         {"verdict", trial.verdict->json}});
    }
    return any;
  }

  // The attribute as the spec has it, and the reason that its change removed.
  void add_condition(std::size_t change, const Reason& removed, const char* enough) {
    const std::string& field = changes_[change].field;
    for (const Json& known : document_["conditions"]) {
      if (known["field"] == field) return;
    }
    Json condition{{"field", field},
                   {"change", changes_[change].change},
                   {"enough", enough},
                   {"code", removed.code},
                   {"message", removed.message}};
    if (Json value = value_of(field); !value.is_null()) condition["value"] = std::move(value);
    document_["conditions"].push_back(std::move(condition));
  }

  Json value_of(const std::string& field) const {
    return field == "target" ? Json(device_.name) : value_at(spec_.document, field);
  }

  void report_target(const Trial& trial) {
    if (!trial.supported()) return;
    document_["neighbours"].push_back({{"change", sentence(trial)},
                                       {"field", "target"},
                                       {"kind", "target"},
                                       {"target", trial.device->name},
                                       {"exact", true},
                                       {"verdict", trial.verdict->json}});
  }

  // Changes that brought up another reason removed a condition: the ones to build on.
  static bool moved(const Trial& trial) {
    return trial.verdict && trial.verdict->verdict.reasons != trial.before;
  }

  // Until some changes together are enough, or so many probes were made.
  void try_together(const std::vector<Trial>& singles, std::size_t limit) {
    std::vector<Trial> parents = singles;
    for (std::size_t together = 2; together <= kMaxTogether; ++together) {
      std::vector<Trial> trials;
      const std::size_t room = limit - std::min(limit, probed_);
      // Two that both moved, then one that moved with any, then any two.
      for (const int needed : {2, 1, 0}) {
        if (needed == 0 && together > 2) break;
        for (const Trial& parent : parents) {
          for (const Trial& single : singles) {
            if (trials.size() == room) break;
            if (single.supported()) continue;
            if (int{moved(parent)} + int{moved(single)} != needed && needed != 0) continue;
            if (needed == 1 && !moved(parent)) continue;
            add_joint(trials, parent, single.changes[0]);
          }
        }
      }
      if (trials.empty()) return;
      probe_all(trials);
      if (report(trials, "together")) return;
      parents = std::move(trials);
    }
  }

  // Many things are wrong at once, and an engine names the first alone: change what it names, look
  // at what it names next, and so on. Each change that removed a reason was a failing condition.
  void peel() {
    Trial current;
    current.verdict = own_;
    for (std::size_t depth = 0; depth < kMaxPeeled && !current.supported(); ++depth) {
      std::vector<Trial> trials;
      for (std::size_t i = 0; i < changes_.size(); ++i) {
        if (changes_[i].field == "pass") continue;
        if (current.changes.empty()) {
          Trial trial;
          trial.changes = {i};
          trial.device = &device_;
          trial.before = own_->verdict.reasons;
          trial.removed = {first_of(trial.before)};
          trials.push_back(std::move(trial));
        } else {
          add_joint(trials, current, i);
        }
      }
      trials.resize(std::min(trials.size(), limit_ - std::min(limit_, probed_)));
      probe_all(trials);
      const Trial* best = nullptr;
      for (const Trial& trial : trials) {
        const int rank = progress(trial);
        if (rank > 0 && (best == nullptr || rank > progress(*best))) best = &trial;
      }
      if (best == nullptr) break;
      current = *best;
    }
    if (current.supported()) {
      report({current}, "together");
      return;
    }
    for (std::size_t i = 0; i < current.changes.size(); ++i) {
      add_condition(current.changes[i], current.removed[i], "together");
    }
    if (current.changes.empty()) return;
    // Each part of a spec has its own reasons, of which many say the same.
    for (const Reason& reason : current.verdict->verdict.reasons) {
      const Json& known = document_["conditions"];
      if (std::any_of(known.begin(), known.end(), [&](const Json& c) {
            return c["field"] == reason.field && c["code"] == reason.code;
          })) {
        continue;
      }
      Json condition{{"field", reason.field},
                     {"change", ""},
                     {"enough", "unknown"},
                     {"code", reason.code},
                     {"message", reason.message}};
      if (Json value = value_of(reason.field); !value.is_null()) {
        condition["value"] = std::move(value);
      }
      document_["conditions"].push_back(std::move(condition));
    }
  }

  // 3: supported; 2: changed what the reason names, and the reason went; 1: it went otherwise.
  int progress(const Trial& trial) const {
    if (trial.supported()) return 3;
    if (!moved(trial)) return 0;
    const auto& now = trial.verdict->verdict.reasons;
    const Reason was = first_of(trial.before);
    if (std::find(now.begin(), now.end(), was) != now.end()) return 0;
    const bool named = std::any_of(trial.changes.begin(), trial.changes.end(), [&](std::size_t i) {
      return !was.field.empty() && changes_[i].field == was.field;
    });
    return named ? 2 : 1;
  }

  void add_joint(std::vector<Trial>& trials, const Trial& parent, std::size_t change) const {
    if (!parent.verdict || parent.supported()) return;
    for (const std::size_t i : parent.changes) {
      if (overlap(changes_[i], changes_[change])) return;
      if (changes_[i].structural && changes_[change].structural) return;
    }
    Trial trial;
    trial.before = parent.verdict->verdict.reasons;
    trial.changes = parent.changes;
    trial.removed = parent.removed;
    // A structural change renumbers ops, so it comes last.
    const std::ptrdiff_t from_end = changes_[parent.changes.back()].structural ? 1 : 0;
    trial.changes.insert(trial.changes.end() - from_end, change);
    trial.removed.insert(trial.removed.end() - from_end, first_of(trial.before));
    trial.device = &device_;
    const auto same = [&](const Trial& other) {
      return std::is_permutation(other.changes.begin(), other.changes.end(), trial.changes.begin(),
                                 trial.changes.end());
    };
    if (std::none_of(trials.begin(), trials.end(), same)) trials.push_back(std::move(trial));
  }

  // A graph as several kernels, with a share of the probes.
  void try_splits() {
    if (spec_.kind != "graph" || spec_.parts.size() != 1) return;
    std::map<std::string, SpecVerdict> verdicts;
    const auto supported = [&](const ir::Graph& part) {
      const auto part_spec = front::spec_from_json(ir::graph_to_json(part), "part");
      if (!part_spec.ok()) return false;
      auto verdict = probe_(*part_spec, device_);
      if (!verdict.ok()) {
        if (errors_.size() < kMaxErrors) {
          errors_.push_back({{"change", "a part of a cut"}, {"message", verdict.error().message}});
        }
        return false;
      }
      const bool is_supported = verdict->verdict.decision == Decision::supported;
      verdicts.insert_or_assign(ir::canonical_text(part), *std::move(verdict));
      return is_supported;
    };
    const auto found = front::find_split(spec_.parts[0].graph, limit_ / kSplitShare, supported);
    probed_ += found.probes;
    if (!found.split) return;
    std::vector<std::string> names;
    std::vector<Verdict> parts;
    Json specs = Json::array();
    Json jsons = Json::array();
    for (const ir::Graph& part : found.split->parts) {
      const SpecVerdict& verdict = verdicts.at(ir::canonical_text(part));
      names.push_back(part.name);
      parts.push_back(verdict.verdict);
      specs.push_back(ir::graph_to_json(part));
      jsons.push_back(verdict.json);
    }
    split_ = {{"change", found.split->text},
              {"field", "ops"},
              {"fields", {"ops"}},
              {"kind", "split"},
              {"exact", true},
              {"bytes_between", found.split->bytes},
              {"specs", std::move(specs)},
              {"verdict", verdict_to_json(combine(names, parts))},
              {"verdicts", std::move(jsons)}};
  }

  // Before what changes the computation, behind what only changes how it is stored.
  void report_split() {
    if (split_.is_null()) return;
    const Reason reason = first_of(own_->verdict.reasons);
    const std::string field = reason.field.empty() ? "ops" : reason.field;
    const Json& known = document_["conditions"];
    if (std::none_of(known.begin(), known.end(),
                     [&](const Json& c) { return c["field"] == field; })) {
      document_["conditions"].push_back({{"field", field},
                                         {"change", split_["change"]},
                                         {"enough", "alone"},
                                         {"code", reason.code},
                                         {"message", reason.message}});
    }
    Json list = Json::array();
    for (Json& neighbour : document_["neighbours"]) {
      if (!split_.is_null() && neighbour["exact"] != true) {
        list.push_back(std::exchange(split_, nullptr));
      }
      list.push_back(std::move(neighbour));
    }
    if (!split_.is_null()) list.push_back(std::move(split_));
    document_["neighbours"] = std::move(list);
  }

  const front::Spec& spec_;
  const Device& device_;
  const std::size_t limit_;
  const unsigned threads_;
  const ProbeSpec& probe_;
  std::optional<SpecVerdict> own_;
  std::vector<Neighbour> changes_;
  Json split_;
  Json document_;
  Json errors_ = Json::array();
  std::size_t probed_ = 0;
};

// Other GPUs, one for each compute capability, the nearest first.
std::vector<Device> other_targets(const std::vector<Device>& all, const Device& device) {
  std::vector<Device> others;
  for (const Device& candidate : all) {
    const auto same = [&](const Device& known) {
      return known.compute_capability == candidate.compute_capability;
    };
    if (candidate.kind != Device::Kind::cuda || same(device) ||
        std::any_of(others.begin(), others.end(), same)) {
      continue;
    }
    others.push_back(candidate);
  }
  const auto distance = [&](const Device& other) {
    return std::abs(other.compute_capability - device.compute_capability);
  };
  std::stable_sort(others.begin(), others.end(),
                   [&](const Device& a, const Device& b) { return distance(a) < distance(b); });
  return others;
}

}  // namespace

Result<Json> explain(const front::Spec& spec, const Device& device,
                     const std::vector<Device>& targets, std::size_t limit, unsigned threads,
                     const ProbeSpec& probe) {
  return Explanation(spec, device, limit, threads, probe).run(targets);
}

}  // namespace lawson::capi

using namespace lawson;
using namespace lawson::capi;

extern "C" {

lawson_status lawson_explain(const lawson_spec* spec, const lawson_device* device,
                             const lawson_options* options, size_t limit, lawson_text** json) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(spec, "spec"));
    LAWSON_CHECK(require(device, "device"));
    LAWSON_CHECK(require(json, "json"));
    LAWSON_TRY(Asked asked, read_options(options));
    LAWSON_TRY(plan::Planner * planner, capi::planner());
    std::vector<Device> targets;
    if (device->device.kind == Device::Kind::cuda) {
      LAWSON_TRY(std::vector<Device> all, planner->devices());
      targets = other_targets(all, device->device);
    }
    const unsigned threads = std::clamp(std::thread::hardware_concurrency(), 1U, 8U);
    LAWSON_TRY(Json document, explain(spec->spec, device->device, targets, limit, threads,
                                      [&](const front::Spec& changed, const Device& where) {
                                        return judge_spec(changed, where, asked);
                                      }));
    return give_text(dump(document), json);
  });
}

}  // extern "C"
