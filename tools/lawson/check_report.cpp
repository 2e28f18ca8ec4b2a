// The check for people: a table, then every reason once, with where it applies and what would help.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>

#include "check.h"
#include "table.h"
#include "terminal.h"

namespace lawson::cli {
namespace {

constexpr std::size_t kNamesShown = 6;
constexpr std::size_t kNeighboursShown = 3;

// ---- what a workload computes -------------------------------------------------------------------

std::string pair_text(std::int64_t a, std::int64_t b) {
  return a == b ? fmt::format("{}", a) : fmt::format("{}/{}", a, b);
}

std::string describe_attention(const Json& spec) {
  const auto number = [&](const char* field, std::int64_t fallback) {
    return spec.contains(field) && spec[field].is_number_integer() ? spec[field].get<std::int64_t>()
                                                                   : fallback;
  };
  const auto word = [&](const char* field, const char* none) {
    const auto text = spec.value(field, std::string{none});
    return text == none ? std::string{} : text;
  };
  const std::int64_t heads = number("heads", 1);
  const std::int64_t d = number("head_dim_qk", 1);
  const std::int64_t q = number("seqlen_q", 1);
  std::vector<std::string> parts{fmt::format("{}×{}", q, number("seqlen_kv", q)),
                                 fmt::format("h{}", pair_text(heads, number("kv_heads", heads))),
                                 fmt::format("d{}", pair_text(d, number("head_dim_v", d)))};
  if (const std::int64_t batch = number("batch", 1); batch != 1) {
    parts.insert(parts.begin(), fmt::format("b{}", batch));
  }
  if (const auto mask = word("mask", "none"); !mask.empty()) parts.push_back(mask);
  if (spec.contains("window") && spec["window"] != Json::array({-1, -1})) {
    parts.push_back("window " + spec["window"][0].dump());
  }
  if (spec.value("softcap", 0.0) != 0) {
    parts.push_back(fmt::format("softcap {}", spec["softcap"].get<double>()));
  }
  if (const auto softmax = word("softmax", "vanilla"); !softmax.empty()) {
    parts.push_back(softmax == "learnable" ? "sinks" : softmax);
  }
  if (const auto bias = word("bias", "none"); !bias.empty()) {
    parts.push_back(bias == "alibi" ? bias : "bias");
  }
  return fmt::format("{}", fmt::join(parts, " "));
}

// The first matmul's M×K×N, then the other ops in order.
std::string describe_graph(const Json& spec) {
  std::map<std::string, std::vector<std::int64_t>> shapes;
  for (const Json& input : spec.value("inputs", Json::array())) {
    shapes[input["name"]] = input["shape"].get<std::vector<std::int64_t>>();
  }
  std::string size;
  std::size_t matmuls = 0;
  std::vector<std::string> others;
  for (const Json& op : spec.value("ops", Json::array())) {
    const auto name = op["op"].get<std::string>();
    if (name == "convert" && op["in"].is_array() && op.contains("out")) {
      // A converted operand keeps its shape.
      const Json out = op["out"].is_array() ? op["out"][0] : op["out"];
      if (op["in"][0].is_string() && shapes.contains(op["in"][0].get<std::string>())) {
        shapes[out.get<std::string>()] = shapes[op["in"][0].get<std::string>()];
      }
    }
    if (name == "matmul" && matmuls++ == 0 && op["in"].size() == 2) {
      const auto a = shapes.find(op["in"][0].get<std::string>());
      const auto b = shapes.find(op["in"][1].get<std::string>());
      if (a != shapes.end() && b != shapes.end() && a->second.size() >= 2 &&
          b->second.size() >= 2) {
        const auto& x = a->second;
        const std::int64_t batch = x.size() > 2 ? x[x.size() - 3] : 1;
        size = fmt::format("{}{}×{}×{}", batch == 1 ? "" : fmt::format("{}·", batch),
                           x[x.size() - 2], x.back(), b->second.back());
      }
    }
    if (name == "matmul" || name == "convert" || name == "constant") continue;
    if (std::find(others.begin(), others.end(), name) == others.end()) others.push_back(name);
  }
  if (matmuls > 1) size += fmt::format(" twice");
  return fmt::format("{}{}{}", size, others.empty() || size.empty() ? "" : " ",
                     fmt::join(others, " "));
}

// ---- reasons
// -------------------------------------------------------------------------------------

struct Use {
  std::size_t row;
  std::size_t target;
};

// One distinct reason, with every cell that it explains.
struct Footnote {
  std::string message;
  std::string field;
  std::vector<Use> uses;
};

// A spec of pass `training` has two graphs, and names the one that refuses.
std::string without_pass(std::string_view message) {
  for (const std::string_view prefix : {"forward: ", "backward: "}) {
    if (message.starts_with(prefix)) return std::string{message.substr(prefix.size())};
  }
  return std::string{message};
}

class Footnotes {
 public:
  explicit Footnotes(const Check& check) : check_{check} {
    for (std::size_t r = 0; r < check.rows.size(); ++r) {
      for (std::size_t t = 0; t < check.targets.size(); ++t) add({r, t});
    }
  }

  const std::vector<Footnote>& list() const { return list_; }
  const std::vector<std::size_t>& of(std::size_t row, std::size_t target) const {
    static const std::vector<std::size_t> none;
    const auto it = by_cell_.find({row, target});
    return it == by_cell_.end() ? none : it->second;
  }

 private:
  void add(const Use& use) {
    const Json& verdict = check_.cell(check_.rows[use.row], use.target).verdict;
    if (verdict.contains("error")) {
      note(use, verdict["error"].value("message", ""), "");
    } else if (decision_of(verdict) != "supported") {
      for (const Json& reason : verdict.value("reasons", Json::array())) {
        note(use, without_pass(reason.value("message", "")), reason.value("field", ""));
      }
    }
  }

  void note(const Use& use, const std::string& message, const std::string& field) {
    const auto [it, added] = index_.emplace(message, list_.size());
    if (added) list_.push_back({message, field, {}});
    auto& cell = by_cell_[{use.row, use.target}];
    if (std::find(cell.begin(), cell.end(), it->second) != cell.end()) return;
    cell.push_back(it->second);
    list_[it->second].uses.push_back(use);
  }

  const Check& check_;
  std::vector<Footnote> list_;
  std::map<std::string, std::size_t> index_;
  std::map<std::pair<std::size_t, std::size_t>, std::vector<std::size_t>> by_cell_;
};

// "all 24 workloads", "all attention workloads", or their names.
std::string rows_text(const Check& check, const std::set<std::size_t>& rows) {
  if (rows.size() == check.rows.size()) return fmt::format("all {} workloads", rows.size());
  for (const char* group : {"attention", "gemm"}) {
    std::size_t count = 0;
    bool all = true;
    for (std::size_t r = 0; r < check.rows.size(); ++r) {
      const bool in_group = check.rows[r].group == group;
      count += in_group ? 1 : 0;
      all = all && in_group == rows.contains(r);
    }
    if (all && count > 2) return fmt::format("all {} {} workloads", count, group);
  }
  std::string out;
  std::size_t shown = 0;
  std::size_t model = check.models.size();
  for (const std::size_t r : rows) {
    if (shown == kNamesShown) return out + fmt::format(" and {} more", rows.size() - shown);
    const CheckRow& row = check.rows[r];
    if (!out.empty()) out += row.model == model ? ", " : "; ";
    if (check.models.size() > 1 && row.model != model && row.group != "spec") {
      out += check.models[row.model].name + ": ";
    }
    out += row.name;
    model = row.model;
    ++shown;
  }
  return out;
}

std::string targets_text(const Check& check, const std::set<std::size_t>& targets) {
  std::vector<std::string> names;
  for (const std::size_t t : targets) names.push_back(check.targets[t]);
  return fmt::format("{}", fmt::join(names, ", "));
}

// One change with the targets on which it was probed, for the cells of a footnote.
struct Change {
  std::string text;
  bool is_target = false;
  std::set<std::size_t> helps;
  std::size_t helped = 0;
};

std::vector<Change> changes_of(const Check& check, const Footnote& footnote) {
  std::vector<Change> changes;
  for (const Use& use : footnote.uses) {
    for (const Json& neighbour : check.cell(check.rows[use.row], use.target).neighbours) {
      const bool is_target = neighbour.value("kind", "") == "target";
      const auto text = is_target ? "on " + neighbour["verdict"].value("target", std::string{})
                                  : neighbour.value("change", std::string{});
      auto it = std::find_if(changes.begin(), changes.end(),
                             [&](const Change& change) { return change.text == text; });
      if (it == changes.end()) {
        it = changes.insert(changes.end(), Change{text, is_target, {}, 0});
      }
      if (decision_of(neighbour["verdict"]) == "supported") {
        it->helps.insert(use.target);
        ++it->helped;
      }
    }
  }
  // Changes of the workload before other targets, then those that help most cells.
  std::stable_sort(changes.begin(), changes.end(), [](const Change& a, const Change& b) {
    if ((a.helped > 0) != (b.helped > 0)) return a.helped > 0;
    if (a.is_target != b.is_target) return b.is_target;
    return a.helped > b.helped;
  });
  return changes;
}

std::string help_text(const Check& check, const Footnote& footnote,
                      const std::set<std::size_t>& targets) {
  const std::vector<Change> changes = changes_of(check, footnote);
  std::string out;
  std::size_t shown = 0;
  for (const Change& change : changes) {
    if (change.helped == 0 || shown == kNeighboursShown) break;
    // On another target, or where it helps on all: nothing to add.
    const bool everywhere = change.is_target || change.helps == targets;
    out += paragraph(
        "      " + paint("✓ ", Style::good),
        change.text + (everywhere ? ": fuses" : ": fuses on " + targets_text(check, change.helps)));
    ++shown;
  }
  if (shown > 0) return out;
  std::size_t tried = 0;
  for (const Use& use : footnote.uses) {
    tried = std::max(tried, check.cell(check.rows[use.row], use.target).tried);
  }
  return tried == 0 ? out
                    : paragraph("      ", fmt::format("{} probed, none fuses",
                                                      counted(tried, "nearby change")));
}

std::string reasons_text(const Check& check, const Footnotes& footnotes) {
  std::string out;
  for (std::size_t n = 0; n < footnotes.list().size(); ++n) {
    const Footnote& footnote = footnotes.list()[n];
    std::set<std::size_t> rows;
    std::set<std::size_t> targets;
    for (const Use& use : footnote.uses) {
      rows.insert(use.row);
      targets.insert(use.target);
    }
    out += '\n' + paragraph(fmt::format("  {:>2}  ", n + 1), footnote.message);
    out += paragraph("      ",
                     fmt::format("{} · {}", targets_text(check, targets), rows_text(check, rows)));
    out += help_text(check, footnote, targets);
  }
  return out;
}

// ---- the table ----------------------------------------------------------------------------------

Cell verdict_cell(const Json& verdict, const std::vector<std::size_t>& notes) {
  std::string marks;
  for (const std::size_t note : notes) {
    marks += (marks.empty() ? "" : "˒") + superscript(note + 1);
  }
  const std::string decision = decision_of(verdict);
  if (decision == "supported") return {"yes", Style::good};
  if (decision == "unsupported") return {"no" + marks, Style::bad};
  if (decision == "undecided") return {"?" + marks, Style::warning};
  return {"!" + marks, Style::bad};
}

Table table_of(const Check& check, const Footnotes& footnotes) {
  Table table;
  table.column("workload");
  table.column("layers", Table::Align::right);
  table.column("computes", Table::Align::left, true);
  for (const std::string& target : check.targets) table.column(target);
  std::size_t model = check.models.size();
  for (std::size_t r = 0; r < check.rows.size(); ++r) {
    const CheckRow& row = check.rows[r];
    if (row.model != model) {
      model = row.model;
      const CheckModel& of = check.models[model];
      table.section(of.name,
                    of.model_type.empty()
                        ? ""
                        : fmt::format("{} · {}", of.model_type,
                                      counted(static_cast<std::size_t>(of.layers), "layer")));
    }
    std::vector<Cell> cells{{row.name},
                            {row.group == "spec" ? "" : fmt::format("{}", row.layers)},
                            {describe_spec(row.spec), Style::dim}};
    for (std::size_t t = 0; t < check.targets.size(); ++t) {
      cells.push_back(verdict_cell(check.cell(row, t).verdict, footnotes.of(r, t)));
    }
    table.row(std::move(cells));
  }
  return table;
}

std::string tally(const Check& check) {
  std::vector<std::string> parts;
  std::string judged_by;
  bool live = false;
  for (std::size_t t = 0; t < check.targets.size(); ++t) {
    std::size_t yes = 0;
    for (const CheckRow& row : check.rows) {
      const Json& verdict = check.cell(row, t).verdict;
      if (decision_of(verdict) == "supported") ++yes;
      const auto version = verdict.value("cudnn_version", std::string{});
      if (!version.empty()) judged_by = "cuDNN " + version;
      live = live || verdict.value("evidence", "") == "live";
    }
    parts.push_back(fmt::format("{} {}/{}", check.targets[t], yes, check.rows.size()));
  }
  return fmt::format("Fuses: {}\n{} {}in {} ({})\n", fmt::join(parts, " · "),
                     judged_by.empty() ? "Judged" : "Judged by " + judged_by,
                     live ? "" : "without the GPUs, ", seconds_text(check.seconds),
                     counted(check.probes, "verdict"));
}

bool has(const Check& check, const char* decision) {
  return std::any_of(check.cells.begin(), check.cells.end(), [&](const auto& row) {
    return std::any_of(row.begin(), row.end(), [&](const CheckCell& cell) {
      return decision_of(cell.verdict) == decision;
    });
  });
}

}  // namespace

std::string describe_spec(const Json& spec) {
  return spec.value("kind", "") == "attention" ? describe_attention(spec) : describe_graph(spec);
}

std::string report_text(const Check& check) {
  const Footnotes footnotes(check);
  std::string out = table_of(check, footnotes).text();
  if (!footnotes.list().empty()) {
    out += '\n' + paint("Why not, and the nearest changes that were probed", Style::bold) + '\n';
    out += reasons_text(check, footnotes);
  }
  out += '\n';
  if (has(check, "undecided")) {
    out += "? the engines that remain can only be asked on the GPU itself\n";
  }
  if (has(check, "error")) out += "! the question could not be answered\n";
  return out + tally(check);
}

}  // namespace lawson::cli
