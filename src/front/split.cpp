#include "front/split.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>

#include "ir/op_text.h"
#include "ir/simplify.h"

namespace lawson::front {
namespace {

using ir::Graph;
using ir::Node;
using ir::Tensor;
using ir::TensorId;

// Ops of a graph from which cuts are tried: beyond, the number of cuts is no help to anybody.
constexpr std::size_t kMaxNodes = 512;

using NodeSet = std::vector<bool>;

bool is_view(const Node& node) {
  return std::holds_alternative<ir::Transpose>(node.op) ||
         std::holds_alternative<ir::Slice>(node.op) ||
         std::holds_alternative<ir::Reshape>(node.op) ||
         std::holds_alternative<ir::Broadcast>(node.op);
}

std::string size_text(std::int64_t bytes) {
  constexpr std::array kUnits{"KiB", "MiB", "GiB", "TiB"};
  if (bytes < 1024) return fmt::format("{} bytes", bytes);
  double amount = static_cast<double>(bytes) / 1024;
  std::size_t unit = 0;
  for (; amount >= 1024 && unit + 1 < kUnits.size(); ++unit) amount /= 1024;
  const std::string number = fmt::format("{:.1f}", amount);
  return fmt::format("{} {}", number.ends_with(".0") ? number.substr(0, number.size() - 2) : number,
                     kUnits[unit]);
}

std::int64_t bytes_of(const Tensor& tensor) {
  return static_cast<std::int64_t>(
      byte_size(tensor.dtype, element_count(tensor.shape).value_or(0)));
}

class Cutter {
 public:
  explicit Cutter(const Graph& graph) : graph_{graph}, producer_(graph.tensors.size(), kNobody) {
    for (std::size_t n = 0; n < graph.nodes.size(); ++n) {
      for (const TensorId id : graph.nodes[n].outputs) {
        if (id != ir::kNone) producer_[at(id)] = n;
      }
    }
    for (const Node& node : graph.nodes) free_.push_back(is_free(node));
  }

  std::vector<Split> run(std::size_t limit) {
    const std::size_t count = graph_.nodes.size();
    if (count < 2 || count > kMaxNodes) return {};
    NodeSet prefix(count, false);
    for (std::size_t n = 0; n + 1 < count; ++n) {
      prefix[n] = true;
      consider(prefix);
      consider(needed_by(n));
    }
    std::stable_sort(cuts_.begin(), cuts_.end(), [](const Cut& a, const Cut& b) {
      if (a.bytes != b.bytes) return a.bytes < b.bytes;
      return a.ops > b.ops;  // more in the first kernel: epilogues, not prologues
    });
    std::vector<Split> splits;
    for (const Cut& cut : cuts_) {
      if (splits.size() == limit) break;
      auto split = write(cut);
      if (split) splits.push_back(*std::move(split));
    }
    return splits;
  }

 private:
  static constexpr std::size_t kNobody = static_cast<std::size_t>(-1);

  struct Cut {
    NodeSet first;
    NodeSet second;  // constants and alike may be in both
    std::vector<TensorId> crossing;
    std::int64_t bytes = 0;
    std::int64_t ops = 0;  // of the first part
  };

  static std::size_t at(TensorId id) { return static_cast<std::size_t>(id); }

  // Constants, and what views make of them and of inputs: no kernel stores these for another.
  bool is_free(const Node& node) const {
    if (graph_.is_output(node.outputs[0])) return false;
    if (std::holds_alternative<ir::Constant>(node.op) ||
        std::holds_alternative<ir::Iota>(node.op)) {
      return true;
    }
    if (!is_view(node)) return false;
    const std::size_t from = producer_[at(node.inputs[0])];
    return from == kNobody || free_[from];
  }

  // A view or a conversion that makes its operand larger: cheaper to do behind the cut.
  bool grows(const Node& node) const {
    if (graph_.is_output(node.outputs[0])) return false;
    if (!is_view(node) && !std::holds_alternative<ir::Convert>(node.op)) return false;
    return bytes_of(graph_.tensor(node.outputs[0])) > bytes_of(graph_.tensor(node.inputs[0]));
  }

  NodeSet needed_by(std::size_t last) const {
    NodeSet set(graph_.nodes.size(), false);
    set[last] = true;
    for (std::size_t n = last + 1; n-- > 0;) {
      if (!set[n]) continue;
      for (const TensorId id : graph_.nodes[n].inputs) {
        if (id != ir::kNone && producer_[at(id)] != kNobody) set[producer_[at(id)]] = true;
      }
    }
    return set;
  }

  bool reads(std::size_t node, std::size_t from) const {
    const auto& inputs = graph_.nodes[node].inputs;
    return std::any_of(inputs.begin(), inputs.end(),
                       [&](TensorId id) { return id != ir::kNone && producer_[at(id)] == from; });
  }

  // The cut itself; with what grows moved behind it; with views behind it moved before it.
  void consider(const NodeSet& first) {
    add(first);
    NodeSet less = first;
    for (std::size_t n = less.size(); n-- > 0;) {
      if (!less[n] || !(grows(graph_.nodes[n]) || is_view(graph_.nodes[n]))) continue;
      if (graph_.is_output(graph_.nodes[n].outputs[0])) continue;
      bool read_before = false;
      for (std::size_t m = n + 1; m < less.size(); ++m) read_before |= less[m] && reads(m, n);
      if (!read_before) less[n] = false;
    }
    if (less != first) add(less);
    NodeSet more = first;
    for (std::size_t n = 0; n < more.size(); ++n) {
      if (more[n] || !is_view(graph_.nodes[n])) continue;
      const std::size_t from = producer_[at(graph_.nodes[n].inputs[0])];
      if (from != kNobody && more[from] && !free_[from]) more[n] = true;
    }
    if (more != first) add(more);
  }

  void add(const NodeSet& first) {
    Cut cut;
    cut.first = first;
    cut.second.assign(first.size(), false);
    bool works_first = false;
    bool works_second = false;
    for (std::size_t n = first.size(); n-- > 0;) {
      if (!first[n]) cut.second[n] = true;
      // What is free is made again where it is read.
      for (std::size_t m = n + 1; free_[n] && m < first.size(); ++m) {
        if (cut.second[m] && reads(m, n)) cut.second[n] = true;
      }
      const bool work = !free_[n] && !is_view(graph_.nodes[n]);
      works_first = works_first || (first[n] && work);
      works_second = works_second || (!first[n] && work);
      cut.ops += first[n] ? 1 : 0;
    }
    if (!works_first || !works_second) return;
    std::set<TensorId> crossing;
    for (std::size_t n = 0; n < first.size(); ++n) {
      if (!cut.second[n]) continue;
      for (const TensorId id : graph_.nodes[n].inputs) {
        if (id == ir::kNone || producer_[at(id)] == kNobody) continue;
        if (!cut.second[producer_[at(id)]]) crossing.insert(id);
      }
    }
    for (const TensorId id : crossing) cut.bytes += bytes_of(graph_.tensor(id));
    cut.crossing.assign(crossing.begin(), crossing.end());
    const auto same = [&](const Cut& other) {
      return other.first == cut.first && other.second == cut.second;
    };
    if (std::none_of(cuts_.begin(), cuts_.end(), same)) cuts_.push_back(std::move(cut));
  }

  std::optional<Split> write(const Cut& cut) const {
    auto first = part(cut.first, cut.crossing);
    auto second = part(cut.second, {});
    if (!first.ok() || !second.ok()) return std::nullopt;
    Split split;
    split.bytes = cut.bytes;
    split.text = "after " + last_of(cut);
    split.parts.push_back(*std::move(first));
    split.parts.push_back(*std::move(second));
    return split;
  }

  // The op behind which the cut is: what makes the last tensor that crosses, or, where none does,
  // the last op of the first part.
  std::string last_of(const Cut& cut) const {
    std::size_t last = 0;
    for (std::size_t n = 0; n < cut.first.size(); ++n) {
      if (cut.first[n] && !free_[n]) last = n;
    }
    if (!cut.crossing.empty()) {
      last = 0;
      for (const TensorId id : cut.crossing) last = std::max(last, producer_[at(id)]);
    }
    return ir::op_text(graph_, graph_.nodes[last]);
  }

  // The nodes of a set as a graph of their own. Outputs: those of the whole that it computes, and
  // `stored`.
  Result<Graph> part(NodeSet set, const std::vector<TensorId>& stored) const {
    const auto kept = [&](TensorId id) {
      return id != ir::kNone &&
             (graph_.is_output(id) || std::find(stored.begin(), stored.end(), id) != stored.end());
    };
    // What is free may have been needed in the other part only.
    for (std::size_t n = set.size(); n-- > 0;) {
      const auto& outputs = graph_.nodes[n].outputs;
      bool live = std::any_of(outputs.begin(), outputs.end(), kept);
      for (std::size_t m = n + 1; !live && m < set.size(); ++m) live = set[m] && reads(m, n);
      set[n] = set[n] && live;
    }
    std::set<TensorId> read;
    std::set<TensorId> made;
    for (std::size_t n = 0; n < set.size(); ++n) {
      if (!set[n]) continue;
      const Node& node = graph_.nodes[n];
      for (const TensorId id : node.inputs) {
        if (id != ir::kNone && !made.contains(id)) read.insert(id);
      }
      for (const TensorId id : node.outputs) {
        if (id != ir::kNone) made.insert(id);
      }
    }
    ir::Builder builder(graph_.name);
    builder.strict(graph_.strict);
    std::map<TensorId, TensorId> ids;
    for (const TensorId id : read) {
      LAWSON_TRY(ids[id], builder.input(graph_.tensor(id)));
    }
    for (std::size_t n = 0; n < set.size(); ++n) {
      if (!set[n]) continue;
      const Node& node = graph_.nodes[n];
      std::vector<TensorId> in;
      for (const TensorId id : node.inputs) in.push_back(id == ir::kNone ? id : ids.at(id));
      std::vector<ir::Builder::ResultSpec> results;
      for (const TensorId id : node.outputs) {
        if (id == ir::kNone) {
          results.push_back({{}, std::nullopt, false});
        } else {
          results.push_back({graph_.tensor(id).name, graph_.tensor(id).dtype, true});
        }
      }
      builder.source(node.source);
      LAWSON_TRY(const auto out, builder.add(node.op, std::move(in), std::move(results)));
      for (std::size_t i = 0; i < out.size(); ++i) {
        if (out[i] != ir::kNone) ids[node.outputs[i]] = out[i];
      }
    }
    for (const TensorId id : made) {
      if (!kept(id)) continue;
      const Tensor& tensor = graph_.tensor(id);
      LAWSON_CHECK(builder.output(ids.at(id), tensor.strides, tensor.alignment));
    }
    return std::move(builder).finish();
  }

  const Graph& graph_;
  std::vector<std::size_t> producer_;
  std::vector<bool> free_;
  std::vector<Cut> cuts_;
};

void finish_split(Split& split, const std::string& graph, const std::vector<std::string>& places) {
  split.text = fmt::format("cut {}: {} kernels, {} between", fmt::join(places, " and "),
                           split.parts.size() == 2 ? "two" : "three", size_text(split.bytes));
  for (std::size_t i = 0; i < split.parts.size(); ++i) {
    split.parts[i].name = fmt::format("{}-{}", graph, i + 1);
  }
}

std::vector<Split> unnamed_splits(const Graph& graph, std::size_t limit) {
  return Cutter(graph).run(limit);
}

class Search {
 public:
  Search(std::size_t limit, const std::function<bool(const Graph&)>& supported)
      : limit_{limit}, supported_{supported} {}

  SplitSearch run(const Graph& graph) {
    SplitSearch result;
    result.split = search(graph);
    result.probes = probes_;
    return result;
  }

 private:
  struct Half {
    Split split;
    std::size_t refused = 0;
  };

  std::optional<Split> search(const Graph& graph) {
    std::vector<Half> halves;
    // The other probes are for cutting a half again.
    const std::size_t all = limit_;
    limit_ = (all * 2 + 2) / 3;
    for (Split& split : unnamed_splits(graph, all)) {
      const auto first = ask(split.parts[0]);
      const auto second = ask(split.parts[1]);
      if (!first || !second) break;
      if (*first && *second) {
        finish_split(split, graph.name, {split.text});
        return std::move(split);
      }
      if (*first != *second) halves.push_back({std::move(split), *first ? 1U : 0U});
    }
    limit_ = all;
    for (const Half& half : halves) {
      const Graph& refused = half.split.parts[half.refused];
      for (const Split& inner : unnamed_splits(refused, all)) {
        const auto first = ask(inner.parts[0]);
        const auto second = first && *first ? ask(inner.parts[1]) : first;
        if (!second) return std::nullopt;
        if (!*second) continue;
        return joined(half, inner, graph.name);
      }
    }
    return std::nullopt;
  }

  static Split joined(const Half& half, const Split& inner, const std::string& name) {
    Split split;
    split.bytes = half.split.bytes + inner.bytes;
    std::vector<std::string> places{half.split.text, inner.text};
    if (half.refused == 0) std::swap(places[0], places[1]);
    split.parts = inner.parts;
    const auto at = half.refused == 0 ? split.parts.end() : split.parts.begin();
    split.parts.insert(at, half.split.parts[1 - half.refused]);
    finish_split(split, name, places);
    return split;
  }

  // Nothing when there is no probe left.
  std::optional<bool> ask(const Graph& graph) {
    const std::string text = ir::canonical_text(graph);
    const auto known = answers_.find(text);
    if (known != answers_.end()) return known->second;
    if (probes_ >= limit_) return std::nullopt;
    ++probes_;
    return answers_[text] = supported_(graph);
  }

  std::size_t limit_;
  const std::function<bool(const Graph&)>& supported_;
  std::size_t probes_ = 0;
  std::map<std::string, bool> answers_;
};

}  // namespace

std::vector<Split> two_way_splits(const Graph& graph, std::size_t limit) {
  const Graph simple = ir::simplify(graph);
  std::vector<Split> splits = unnamed_splits(simple, limit);
  for (Split& split : splits) finish_split(split, graph.name, {split.text});
  return splits;
}

SplitSearch find_split(const Graph& graph, std::size_t limit,
                       const std::function<bool(const Graph&)>& supported) {
  const Graph simple = ir::simplify(graph);
  return Search(limit, supported).run(simple);
}

}  // namespace lawson::front
