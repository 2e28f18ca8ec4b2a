// The check for people: a table, then every reason once, with where it applies and what would help.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <optional>
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
  // What tells layers apart comes first: the end may be cut off.
  std::vector<std::string> parts{fmt::format("h{}", pair_text(heads, number("kv_heads", heads))),
                                 fmt::format("d{}", pair_text(d, number("head_dim_v", d)))};
  if (const auto softmax = word("softmax", "vanilla"); !softmax.empty()) {
    parts.push_back(softmax == "learnable" ? "sinks" : softmax);
  }
  if (spec.value("softcap", 0.0) != 0) {
    parts.push_back(fmt::format("cap{}", spec["softcap"].get<double>()));
  }
  if (const auto bias = word("bias", "none"); !bias.empty()) {
    parts.push_back(bias == "alibi" ? bias : "bias");
  }
  if (spec.contains("window") && spec["window"] != Json::array({-1, -1})) {
    parts.push_back("w" + spec["window"][0].dump());
  }
  if (const auto mask = word("mask", "none"); !mask.empty()) parts.push_back(mask);
  if (const std::int64_t batch = number("batch", 1); batch != 1) {
    parts.push_back(fmt::format("b{}", batch));
  }
  parts.push_back(fmt::format("{}×{}", q, number("seqlen_kv", q)));
  if (const auto it = spec.find("context_parallel"); it != spec.end() && it->is_object()) {
    parts.push_back(fmt::format("{} over {}", it->value("strategy", std::string{"ring"}),
                                it->value("size", std::int64_t{1})));
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

// ---- reasons ------------------------------------------------------------------------------------

struct Use {
  std::size_t row;
  std::size_t target;
};

// One distinct reason, with every cell that it explains first of all.
struct Footnote {
  std::string message;            // with kTarget and kCapability for what differs between targets
  std::vector<std::string> also;  // what else is in the way in some of those cells
  std::vector<Use> uses;
};

constexpr std::string_view kTarget = "\x01";
constexpr std::string_view kCapability = "\x02";

void replace_all(std::string& text, std::string_view what, std::string_view with) {
  for (std::size_t at = text.find(what); at != std::string::npos; at = text.find(what, at)) {
    text.replace(at, what.size(), with);
    at += with.size();
  }
}

// A spec of pass `training` has two graphs, and names the one that refuses; a graph's op is named
// with the types of its operands, which differ from row to row and stand in the table.
std::string without_place(std::string message) {
  for (const std::string_view prefix : {"forward: ", "backward: "}) {
    if (message.starts_with(prefix)) message.erase(0, prefix.size());
  }
  const std::size_t colon = message.find(": ");
  const std::size_t bracket = message.find('[');
  if (colon != std::string::npos && bracket < colon && message.find(" = ") > colon) {
    message.erase(0, colon + 2);
  }
  return message;
}

class Footnotes {
 public:
  explicit Footnotes(const Check& check) : check_{check} {
    for (std::size_t r = 0; r < check.rows.size(); ++r) {
      for (std::size_t t = 0; t < check.targets.size(); ++t) add({r, t});
    }
  }

  const std::vector<Footnote>& list() const { return list_; }
  // The number of a cell's footnote, from 1; 0 when it has none.
  std::size_t of(std::size_t row, std::size_t target) const {
    const auto it = by_cell_.find({row, target});
    return it == by_cell_.end() ? 0 : it->second;
  }

 private:
  void add(const Use& use) {
    const Json& verdict = check_.cell(check_.rows[use.row], use.target).verdict;
    if (verdict.contains("error")) {
      note(use, verdict["error"].value("message", ""));
      return;
    }
    if (decision_of(verdict) == "supported") return;
    bool first = true;
    for (const Json& reason : verdict.value("reasons", Json::array())) {
      const std::string message = general(reason.value("message", std::string{}), use.target);
      if (first) {
        note(use, message);
      } else if (reason.contains("field")) {  // others are an engine's own words: --json has them
        Footnote& footnote = list_[by_cell_[{use.row, use.target}] - 1];
        auto& also = footnote.also;
        if (message != footnote.message &&
            std::find(also.begin(), also.end(), message) == also.end()) {
          also.push_back(message);
        }
      }
      first = false;
    }
  }

  void note(const Use& use, const std::string& message) {
    const auto [it, added] = index_.emplace(message, list_.size() + 1);
    if (added) list_.push_back({message, {}, {}});
    by_cell_[{use.row, use.target}] = it->second;
    list_[it->second - 1].uses.push_back(use);
  }

  // The same reason on two targets is one footnote.
  std::string general(const std::string& message, std::size_t target) const {
    std::string text = without_place(message);
    replace_all(text, check_.targets[target] + " ", std::string{kTarget} + " ");
    const std::string& capability = check_.capabilities[target];
    if (!capability.empty()) {
      replace_all(text, "compute capability " + capability,
                  fmt::format("compute capability {}", kCapability));
      replace_all(text, fmt::format("{} has {}", kTarget, capability),
                  fmt::format("{} has {}", kTarget, kCapability));
    }
    return text;
  }

  const Check& check_;
  std::vector<Footnote> list_;
  std::map<std::string, std::size_t> index_;
  std::map<std::pair<std::size_t, std::size_t>, std::size_t> by_cell_;
};

std::string message_text(const Check& check, std::string message,
                         const std::set<std::size_t>& targets) {
  std::vector<std::string> names;
  std::vector<std::string> capabilities;
  for (const std::size_t t : targets) {
    names.push_back(check.targets[t]);
    const std::string& capability = check.capabilities[t];
    if (std::find(capabilities.begin(), capabilities.end(), capability) == capabilities.end()) {
      capabilities.push_back(capability);
    }
  }
  replace_all(message, kTarget, fmt::format("{}", fmt::join(names, ", ")));
  replace_all(message, kCapability, fmt::format("{}", fmt::join(capabilities, ", ")));
  return message;
}

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

// One change, with the targets of the footnote on which it helps.
struct Change {
  std::string text;
  std::set<std::size_t> helps;
  std::size_t helped = 0;  // cells
};

// The changes of the workload that fuse, those first that help most cells; then the other targets.
struct Help {
  std::vector<Change> changes;
  std::vector<std::string> targets;
  std::size_t tried = 0;
};

Help help_for(const Check& check, const Footnote& footnote) {
  Help help;
  for (const Use& use : footnote.uses) {
    const CheckCell& cell = check.cell(check.rows[use.row], use.target);
    help.tried = std::max(help.tried, cell.tried);
    for (const Json& neighbour : cell.neighbours) {
      if (neighbour.value("kind", "") == "target") {
        const auto name = neighbour["verdict"].value("target", std::string{});
        if (std::find(help.targets.begin(), help.targets.end(), name) == help.targets.end()) {
          help.targets.push_back(name);
        }
        continue;
      }
      const auto text = neighbour.value("change", std::string{});
      auto it = std::find_if(help.changes.begin(), help.changes.end(),
                             [&](const Change& change) { return change.text == text; });
      if (it == help.changes.end()) it = help.changes.insert(it, Change{text, {}, 0});
      it->helps.insert(use.target);
      ++it->helped;
    }
  }
  std::stable_sort(help.changes.begin(), help.changes.end(),
                   [](const Change& a, const Change& b) { return a.helped > b.helped; });
  return help;
}

std::string help_text(const Check& check, const Footnote& footnote,
                      const std::set<std::size_t>& targets) {
  const Help help = help_for(check, footnote);
  const std::string mark = "      " + paint("✓", Style::good) + " ";
  std::string out;
  for (std::size_t i = 0; i < std::min(help.changes.size(), kNeighboursShown); ++i) {
    const Change& change = help.changes[i];
    out += paragraph(mark, change.helps == targets
                               ? change.text
                               : change.text + " · " + targets_text(check, change.helps));
  }
  if (!help.targets.empty()) {
    std::vector<std::string> shown = help.targets;
    shown.resize(std::min(shown.size(), kNeighboursShown));
    out += paragraph(mark, fmt::format("on {}", fmt::join(shown, ", ")));
  }
  if (out.empty() && help.tried > 0) {
    out = paragraph("      ", counted(help.tried, "nearby change") + " probed, none fuses");
  }
  return out;
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
    out += '\n' + paragraph(fmt::format("  {:>2}  ", n + 1),
                            message_text(check, footnote.message, targets));
    for (std::size_t i = 0; i < std::min<std::size_t>(footnote.also.size(), 2); ++i) {
      out += paragraph("      also: ", message_text(check, footnote.also[i], targets));
    }
    out += paragraph("      ",
                     fmt::format("{} · {}", targets_text(check, targets), rows_text(check, rows)));
    out += help_text(check, footnote, targets);
  }
  return out;
}

// ---- the table ----------------------------------------------------------------------------------

Cell verdict_cell(const Json& verdict, std::size_t footnote) {
  const std::string mark = footnote == 0 ? "" : superscript(footnote);
  const std::string decision = decision_of(verdict);
  if (decision == "supported") return {"yes", Style::good};
  if (decision == "unsupported") return {"no" + mark, Style::bad};
  if (decision == "undecided") return {"?" + mark, Style::warning};
  return {"!" + mark, Style::bad};
}

// Workloads of one layer that differ only in the pass, with equal answers, share a line.
struct Line {
  std::size_t row;  // the first of them
  std::string name;
  std::string passes;
  std::string computes;
};

// "4096×512×64" and "1×512×64" -> "4096|1×512×64"; nullopt when more than the start differs.
std::optional<std::string> joined_sizes(const std::string& a, const std::string& b) {
  if (a == b) return a;
  const std::size_t end_a = a.find("×");
  const std::size_t end_b = b.find("×");
  if (end_a == std::string::npos || end_b == std::string::npos) return std::nullopt;
  if (a.substr(end_a) != b.substr(end_b)) return std::nullopt;
  const std::string starts = a.substr(0, end_a) + b.substr(0, end_b);
  if (starts.find_first_not_of("0123456789|") != std::string::npos) return std::nullopt;
  return a.substr(0, end_a) + "|" + b;
}

// "vision.gemm.qkv.prefill" -> "vision.qkv", "prefill": what is a product is seen by its sizes.
Line line_of(const CheckRow& row, std::size_t index) {
  Line line{index, row.name, "", describe_spec(row.spec)};
  if (row.group == "spec") return line;
  const std::size_t dot = line.name.rfind('.');
  if (dot != std::string::npos) {
    line.passes = line.name.substr(dot + 1);
    line.name.erase(dot);
  }
  if (row.group == "gemm") {
    if (const std::size_t gemm = line.name.find("gemm."); gemm != std::string::npos) {
      line.name.erase(gemm, 5);
    }
  }
  return line;
}

std::vector<Line> lines_of(const Check& check, const Footnotes& footnotes) {
  std::vector<Line> lines;
  for (std::size_t r = 0; r < check.rows.size(); ++r) {
    Line line = line_of(check.rows[r], r);
    const auto shares = [&](const Line& other) {
      const CheckRow& a = check.rows[other.row];
      const CheckRow& b = check.rows[r];
      if (a.model != b.model || a.layers != b.layers || other.name != line.name) return false;
      if (a.group == "spec" || !joined_sizes(other.computes, line.computes)) return false;
      for (std::size_t t = 0; t < check.targets.size(); ++t) {
        if (decision_of(check.cell(a, t).verdict) != decision_of(check.cell(b, t).verdict) ||
            footnotes.of(other.row, t) != footnotes.of(r, t)) {
          return false;
        }
      }
      return true;
    };
    const auto it = std::find_if(lines.begin(), lines.end(), shares);
    if (it == lines.end()) {
      lines.push_back(std::move(line));
    } else {
      it->passes += " " + line.passes;
      it->computes = *joined_sizes(it->computes, line.computes);
    }
  }
  return lines;
}

Table table_of(const Check& check, const Footnotes& footnotes) {
  Table table;
  table.column("workload");
  table.column("layers", Table::Align::right);
  table.column("pass");
  table.column("computes", Table::Align::left, true);
  for (const std::string& target : check.targets) table.column(target);
  std::size_t model = check.models.size();
  for (const Line& line : lines_of(check, footnotes)) {
    const CheckRow& row = check.rows[line.row];
    if (row.model != model) {
      model = row.model;
      const CheckModel& of = check.models[model];
      const auto layers = static_cast<std::size_t>(of.layers);
      table.section(of.name, of.model_type.empty()
                                 ? ""
                                 : fmt::format("{} · {}", of.model_type, counted(layers, "layer")));
    }
    std::vector<Cell> cells{{line.name},
                            {row.group == "spec" ? "" : fmt::format("{}", row.layers)},
                            {line.passes},
                            {line.computes, Style::dim}};
    for (std::size_t t = 0; t < check.targets.size(); ++t) {
      cells.push_back(verdict_cell(check.cell(row, t).verdict, footnotes.of(line.row, t)));
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

// How to read the column "computes".
std::string legend(const Check& check) {
  bool attention = false;
  bool products = false;
  for (const CheckRow& row : check.rows) {
    (row.spec.value("kind", "") == "attention" ? attention : products) = true;
  }
  std::string text;
  if (attention) {
    text =
        "attention: heads h (of Q / of K and V), head dim d, window w, softcap cap, rows × columns";
  }
  if (products) {
    text += (attention ? "; " : "") +
            std::string{"products: M|M of the passes × K × N, then the other ops"};
  }
  return text + ".";
}

}  // namespace

std::string describe_spec(const Json& spec) {
  return spec.value("kind", "") == "attention" ? describe_attention(spec) : describe_graph(spec);
}

std::string report_text(const Check& check) {
  const Footnotes footnotes(check);
  std::string out = table_of(check, footnotes).text() + '\n' + paragraph("", legend(check));
  if (!footnotes.list().empty()) {
    out += '\n' + paint("Why not, and what fuses nearby (each ✓ was probed)", Style::bold) + '\n';
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
