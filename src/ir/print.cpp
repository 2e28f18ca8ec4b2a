// Text forms of a graph: canonical (for keys), readable, Graphviz.
#include <fmt/ranges.h>

#include "ir/graph.h"

namespace lawson::ir {
namespace {

void add_rule(std::vector<std::string>& out, const AttentionRule& rule) {
  if (rule.padding) out.emplace_back("padding");
  if (rule.alignment == Alignment::bottom_right) out.emplace_back("bottom_right");
  if (rule.left != -1 || rule.right != -1) {
    out.push_back(fmt::format("window=[{}, {}]", rule.left, rule.right));
  }
  if (rule.softmax != SoftmaxKind::vanilla) {
    out.push_back(fmt::format("softmax={}", to_string(rule.softmax)));
  }
  if (rule.softcap != 0) out.push_back(fmt::format("softcap={}", rule.softcap));
  if (rule.alibi) out.emplace_back("alibi");
  if (rule.pre_scale_bias) out.emplace_back("pre_scale_bias");
  if (rule.dropout != 0) out.push_back(fmt::format("dropout={}", rule.dropout));
  if (rule.max_q != 0) out.push_back(fmt::format("max_q={}", rule.max_q));
  if (rule.max_kv != 0) out.push_back(fmt::format("max_kv={}", rule.max_kv));
}

// Everything of an op that is not an operand. Numbers print in the shortest form that reads back.
std::vector<std::string> attributes(const Op& op) {
  std::vector<std::string> out;
  std::visit(
      Overloaded{
          [&](const Unary& u) {
            if (u.parameter != 0) out.push_back(fmt::format("parameter={}", u.parameter));
          },
          [&](const UnaryGrad& u) {
            if (u.parameter != 0) out.push_back(fmt::format("parameter={}", u.parameter));
          },
          [&](const ScaledMatmul& m) {
            out.push_back(fmt::format("block={}", m.block));
            if (m.swizzled) out.emplace_back("swizzled");
          },
          [&](const Concat& c) { out.push_back(fmt::format("axis={}", c.axis)); },
          [&](const Norm& n) {
            out.push_back(fmt::format("axes={}, eps={}", to_string(n.axes), n.eps));
          },
          [&](const NormBackward& n) { out.push_back("axes=" + to_string(n.axes)); },
          [&](const Clamp& c) { out.push_back(fmt::format("min={}, max={}", c.min, c.max)); },
          [&](const Iota& i) { out.push_back(fmt::format("axis={}", i.axis)); },
          [&](const Constant& c) { out.push_back(fmt::format("{}", c.value)); },
          [&](const Transpose& t) { out.push_back("perm=" + to_string(t.perm)); },
          [&](const Slice& s) {
            out.push_back(fmt::format("start={}, limit={}, stride={}", to_string(s.start),
                                      to_string(s.limit), to_string(s.stride)));
          },
          [&](const Reduce& r) {
            out.push_back("axes=" + to_string(r.axes));
            if (r.keepdims) out.emplace_back("keepdims");
          },
          [&](const Attention& a) { add_rule(out, a.rule); },
          [&](const AttentionBackward& a) {
            add_rule(out, a.rule);
            if (a.deterministic) out.emplace_back("deterministic");
          },
          [](const Matmul&) {},
          [](const Convert&) {},
          [](const Binary&) {},
          [](const Compare&) {},
          [](const Logical&) {},
          [](const Select&) {},
          [](const CacheAppend&) {},
          [](const Broadcast&) {},
          [](const Reshape&) {},  // the result's shape says it
      },
      op);
  return out;
}

std::string type_text(const Tensor& tensor, bool with_layout) {
  std::string text = fmt::format("{}{}", to_string(tensor.dtype), to_string(tensor.shape));
  if (tensor.by_value) return text + " by_value";
  if (with_layout && tensor.strides != contiguous_strides(tensor.shape)) {
    text += " strides " + to_string(tensor.strides);
  }
  if (with_layout && tensor.alignment != 16) text += fmt::format(" align {}", tensor.alignment);
  return text;
}

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out;
}

}  // namespace

std::string canonical_text(const Graph& graph) {
  std::string out = fmt::format("lawson-graph 1 in {} out {}{}\n", graph.input_count,
                                graph.output_count, graph.strict ? " strict" : "");
  for (std::size_t i = 0; i < graph.tensors.size(); ++i) {
    const auto id = static_cast<TensorId>(i);
    const Tensor& t = graph.tensors[i];
    out += fmt::format("{} {} {}", i, to_string(t.dtype), to_string(t.shape));
    if (graph.is_input(id) || graph.is_output(id)) {
      out += fmt::format(" {} {}{}", to_string(t.strides), t.alignment, t.by_value ? " value" : "");
    }
    out += '\n';
  }
  for (const Node& node : graph.nodes) {
    out += fmt::format("{} {} -> {} {{{}}}\n", op_name(node.op), fmt::join(node.inputs, " "),
                       fmt::join(node.outputs, " "), fmt::join(attributes(node.op), ", "));
  }
  return out;
}

std::string print(const Graph& graph) {
  std::string out = fmt::format("graph \"{}\"{} {{\n", graph.name, graph.strict ? " strict" : "");
  for (std::int32_t i = 0; i < graph.input_count; ++i) {
    const Tensor& t = graph.tensor(i);
    out += fmt::format("  in   {}: {}\n", t.name, type_text(t, true));
  }
  for (const Node& node : graph.nodes) {
    std::vector<std::string> results;
    for (const TensorId id : node.outputs) {
      if (id == kNone) continue;
      const Tensor& t = graph.tensor(id);
      results.push_back(fmt::format("{}: {}", t.name, type_text(t, false)));
    }
    std::vector<std::string> arguments;
    const auto slots = slot_names(node.op);
    for (std::size_t i = 0; i < node.inputs.size(); ++i) {
      if (node.inputs[i] == kNone) continue;
      const std::string& name = graph.tensor(node.inputs[i]).name;
      const bool named = !slots.empty() && name != slots[i];
      arguments.push_back(named ? fmt::format("{}: {}", slots[i], name) : name);
    }
    for (std::string& attribute : attributes(node.op)) arguments.push_back(std::move(attribute));
    out += fmt::format("  {} = {}({}){}\n", fmt::join(results, ", "), op_name(node.op),
                       fmt::join(arguments, ", "), node.source.empty() ? "" : "  # " + node.source);
  }
  for (std::int32_t i = 0; i < graph.output_count; ++i) {
    const Tensor& t = graph.tensor(graph.input_count + i);
    out += fmt::format("  out  {}: {}\n", t.name, type_text(t, true));
  }
  return out + "}\n";
}

std::string to_dot(const Graph& graph) {
  std::string out = fmt::format("digraph \"{}\" {{\n  rankdir=TB;\n", escaped(graph.name));
  for (std::size_t i = 0; i < graph.tensors.size(); ++i) {
    const auto id = static_cast<TensorId>(i);
    const bool bound = graph.is_input(id) || graph.is_output(id);
    out += fmt::format("  t{} [shape={}, label=\"{}\\n{}\"];\n", i, bound ? "box" : "plaintext",
                       escaped(graph.tensors[i].name), type_text(graph.tensors[i], bound));
  }
  for (std::size_t n = 0; n < graph.nodes.size(); ++n) {
    const Node& node = graph.nodes[n];
    out += fmt::format(
        "  n{} [shape=ellipse, label=\"{}\"];\n", n,
        escaped(fmt::format("{}{}{}", op_name(node.op), attributes(node.op).empty() ? "" : "\n",
                            fmt::join(attributes(node.op), ", "))));
    for (const TensorId id : node.inputs) {
      if (id != kNone) out += fmt::format("  t{} -> n{};\n", id, n);
    }
    for (const TensorId id : node.outputs) {
      if (id != kNone) out += fmt::format("  n{} -> t{};\n", n, id);
    }
  }
  return out + "}\n";
}

}  // namespace lawson::ir
