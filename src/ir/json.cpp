#include "ir/json.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>

#include "ir/infer.h"

namespace lawson::ir {
namespace {

std::vector<std::string> dtype_names() {
  std::vector<std::string> names;
  for (int i = 0; i < kDTypeCount; ++i) names.emplace_back(to_string(static_cast<DType>(i)));
  return names;
}

Result<std::optional<DType>> read_dtype(ObjectReader& reader, const std::string& field) {
  LAWSON_TRY(std::string name, reader.choice_or(field, "", dtype_names()));
  if (name.empty()) return std::optional<DType>{};
  return dtype_from_string(name);
}

Result<std::string> read_name(ObjectReader& reader, const std::string& field) {
  LAWSON_TRY(std::string name, reader.string(field));
  if (name.size() > kMaxNameBytes) {
    return reader.fail(field,
                       fmt::format("a name of {} bytes; at most {}", name.size(), kMaxNameBytes));
  }
  return name;
}

Result<Tensor> read_input(const Json& item, const std::string& source, const std::string& path) {
  ObjectReader reader(item, source, path);
  Tensor tensor;
  LAWSON_TRY(tensor.name, read_name(reader, "name"));
  LAWSON_TRY(auto dtype, read_dtype(reader, "dtype"));
  if (!dtype) return reader.fail("dtype", "missing; expected a type name");
  tensor.dtype = *dtype;
  LAWSON_TRY(tensor.shape, reader.integers("shape", 0, kMaxDim));
  if (reader.has("strides")) {
    LAWSON_TRY(tensor.strides, reader.integers("strides", 0, kMaxElements));
    if (tensor.strides.size() != tensor.shape.size()) {
      return reader.fail("strides", fmt::format("{} strides for a shape of rank {}",
                                                tensor.strides.size(), tensor.shape.size()));
    }
  }
  LAWSON_TRY(auto alignment, reader.integer_or("alignment", 16, 1, 4096));
  tensor.alignment = static_cast<int>(alignment);
  LAWSON_TRY(tensor.by_value, reader.boolean_or("by_value", false));
  if (tensor.by_value && element_count(tensor.shape) != 1) {
    return reader.fail("by_value", "only a tensor of one element can be passed by value");
  }
  if (const Json* values = reader.find("values")) {
    const auto count = element_count(tensor.shape);
    if (!values->is_array() || !count || static_cast<std::int64_t>(values->size()) != *count) {
      return reader.fail_value("values", *values,
                               fmt::format("a list of {} numbers", count.value_or(0)));
    }
    for (const Json& value : *values) {
      if (!value.is_number() || !std::isfinite(value.get<double>())) {
        return reader.fail_value("values", value, "a finite number");
      }
      tensor.values.push_back(value.get<double>());
    }
  }
  if (reader.has("domain")) {
    LAWSON_TRY(Dims domain, reader.integers("domain", INT32_MIN, INT32_MAX));
    if (domain.size() != 2 || domain[0] > domain[1]) {
      return reader.fail("domain", "expected [low, high] with low <= high");
    }
    tensor.domain = std::pair{domain[0], domain[1]};
  }
  LAWSON_CHECK(reader.finish());
  return tensor;
}

Status read_rule(ObjectReader& reader, AttentionRule& rule) {
  LAWSON_TRY(rule.padding, reader.boolean_or("padding", false));
  LAWSON_TRY(std::string alignment,
             reader.choice_or("alignment", "top_left", {"top_left", "bottom_right"}));
  rule.alignment = alignment == "top_left" ? Alignment::top_left : Alignment::bottom_right;
  LAWSON_TRY(rule.left, reader.integer_or("left", -1, -1, kMaxDim));
  LAWSON_TRY(rule.right, reader.integer_or("right", -1, -1, kMaxDim));
  LAWSON_TRY(std::string softmax,
             reader.choice_or("softmax", "vanilla", {"vanilla", "off_by_one", "learnable"}));
  rule.softmax = softmax == "vanilla"      ? SoftmaxKind::vanilla
                 : softmax == "off_by_one" ? SoftmaxKind::off_by_one
                                           : SoftmaxKind::learnable;
  LAWSON_TRY(rule.softcap, reader.number_or("softcap", 0));
  LAWSON_TRY(rule.alibi, reader.boolean_or("alibi", false));
  LAWSON_TRY(rule.pre_scale_bias, reader.boolean_or("pre_scale_bias", false));
  LAWSON_TRY(rule.dropout, reader.number_or("dropout", 0));
  LAWSON_TRY(rule.max_q, reader.integer_or("max_q", 0, 0, kMaxDim));
  LAWSON_TRY(rule.max_kv, reader.integer_or("max_kv", 0, 0, kMaxDim));
  return {};
}

constexpr double kExactIntegers = 0x1p53;  // less than this a double holds every one

// The one attribute of an activation, or of its gradient.
const char* parameter_name(UnaryKind kind) {
  if (kind == UnaryKind::leaky_relu) return "slope";
  return kind == UnaryKind::elu ? "alpha" : nullptr;
}

Status read_parameter(ObjectReader& reader, UnaryKind kind, double& parameter) {
  const char* name = parameter_name(kind);
  if (name == nullptr) return {};
  LAWSON_TRY(parameter, reader.number_or(name, parameter));
  return {};
}

Status read_attributes(ObjectReader& reader, Op& op) {
  return std::visit(Overloaded{
                        [&](Unary& u) { return read_parameter(reader, u.kind, u.parameter); },
                        [&](UnaryGrad& u) { return read_parameter(reader, u.kind, u.parameter); },
                        [&](ScaledMatmul& m) -> Status {
                          LAWSON_TRY(m.block, reader.integer_or("block", 32, 1, kMaxDim));
                          LAWSON_TRY(m.swizzled, reader.boolean_or("swizzled", false));
                          return {};
                        },
                        [&](Concat& c) -> Status {
                          LAWSON_TRY(c.axis, reader.integer_or("axis", 0, 0, kMaxRank));
                          return {};
                        },
                        [&](Norm& n) -> Status {
                          LAWSON_TRY(n.axes, reader.integers("axes", 0, kMaxRank));
                          LAWSON_TRY(n.eps, reader.number_or("eps", n.eps));
                          return {};
                        },
                        [&](NormBackward& n) -> Status {
                          LAWSON_TRY(n.axes, reader.integers("axes", 0, kMaxRank));
                          return {};
                        },
                        [&](Clamp& c) -> Status {
                          for (const char* field : {"min", "max"}) {
                            if (!reader.has(field))
                              return reader.fail(field, "missing; expected a number");
                          }
                          LAWSON_TRY(c.min, reader.number_or("min", 0));
                          LAWSON_TRY(c.max, reader.number_or("max", 0));
                          return {};
                        },
                        [&](Iota& i) -> Status {
                          LAWSON_TRY(i.shape, reader.integers("shape", 0, kMaxDim));
                          LAWSON_TRY(i.axis, reader.integer_or("axis", 0, 0, kMaxRank));
                          return {};
                        },
                        [&](Constant& c) -> Status {
                          if (!reader.has("value"))
                            return reader.fail("value", "missing; expected a number");
                          LAWSON_TRY(c.value, reader.number_or("value", 0));
                          // A double holds it: another integer would be a wrong number.
                          const Json& given = *reader.find("value");
                          if (given.is_number_integer() && std::fabs(c.value) >= kExactIntegers) {
                            return reader.fail_value("value", given,
                                                     "an integer of less than 2^53, or a number "
                                                     "with a point");
                          }
                          return {};
                        },
                        [&](Broadcast& b) -> Status {
                          LAWSON_TRY(b.shape, reader.integers("shape", 0, kMaxDim));
                          return {};
                        },
                        [&](Reshape& r) -> Status {
                          LAWSON_TRY(r.shape, reader.integers("shape", 0, kMaxDim));
                          return {};
                        },
                        [&](Transpose& t) -> Status {
                          LAWSON_TRY(t.perm, reader.integers("perm", 0, kMaxRank));
                          return {};
                        },
                        [&](Slice& s) -> Status {
                          LAWSON_TRY(s.start, reader.integers("start", 0, kMaxDim));
                          LAWSON_TRY(s.limit, reader.integers("limit", 0, kMaxDim));
                          s.stride = Dims(s.start.size(), 1);
                          if (reader.has("stride")) {
                            LAWSON_TRY(s.stride, reader.integers("stride", 1, kMaxDim));
                          }
                          return {};
                        },
                        [&](Reduce& r) -> Status {
                          LAWSON_TRY(r.axes, reader.integers("axes", 0, kMaxRank));
                          LAWSON_TRY(r.keepdims, reader.boolean_or("keepdims", false));
                          return {};
                        },
                        [&](Attention& a) -> Status { return read_rule(reader, a.rule); },
                        [&](AttentionBackward& a) -> Status {
                          LAWSON_TRY(a.deterministic, reader.boolean_or("deterministic", false));
                          return read_rule(reader, a.rule);
                        },
                        [](auto&) -> Status { return {}; },
                    },
                    op);
}

bool is_name(const Json& item) {
  return item.is_string() && !item.get_ref<const std::string&>().empty() &&
         item.get_ref<const std::string&>().size() <= kMaxNameBytes &&
         !has_control(item.get_ref<const std::string&>());
}

// A name, a list of names (null: absent), or an object from slot names to names.
Result<std::vector<std::string>> read_names(ObjectReader& reader, const std::string& field,
                                            const std::vector<std::string_view>& slots) {
  constexpr std::string_view kExpected =
      "a tensor name of at most 256 bytes without control characters, or null";
  const Json* value = reader.find(field);
  std::vector<std::string> names;
  if (value == nullptr) return names;
  if (value->is_string()) {
    LAWSON_TRY(std::string name, read_name(reader, field));
    return std::vector{std::move(name)};
  }
  if (value->is_object() && !slots.empty()) {
    names.resize(slots.size());
    for (const auto& [slot, item] : value->items()) {
      const auto it = std::find(slots.begin(), slots.end(), slot);
      if (it == slots.end()) {
        return reader.fail(field, fmt::format("'{}' is not one of {}", slot.substr(0, 60),
                                              fmt::join(slots, ", ")));
      }
      if (item.is_null()) continue;
      if (!is_name(item)) return reader.fail_value(field, item, std::string{kExpected});
      names[static_cast<std::size_t>(it - slots.begin())] = item.get<std::string>();
    }
    return names;
  }
  if (!value->is_array()) return reader.fail_value(field, *value, "a name or a list of names");
  for (const Json& item : *value) {
    if (item.is_null()) {
      names.emplace_back();
    } else if (is_name(item)) {
      names.push_back(item.get<std::string>());
    } else {
      return reader.fail_value(field, item, std::string{kExpected});
    }
  }
  return names;
}

Status read_op(const Json& item, const std::string& source, const std::string& path,
               Builder& builder) {
  ObjectReader reader(item, source, path);
  LAWSON_TRY(std::string name, read_name(reader, "op"));
  LAWSON_TRY(Op op, op_from_json(name, reader));
  LAWSON_TRY(auto in, read_names(reader, "in", slot_names(op)));
  LAWSON_TRY(auto out, read_names(reader, "out", result_names(op)));
  LAWSON_TRY(auto dtype, read_dtype(reader, "dtype"));
  std::string written_at;
  if (reader.has("source")) {
    LAWSON_TRY(written_at, read_name(reader, "source"));
  }
  LAWSON_CHECK(reader.finish());
  if (auto* concat = std::get_if<Concat>(&op)) {
    concat->operands = static_cast<std::int64_t>(in.size());
  }

  const std::size_t slots = input_slots(op);
  if (in.size() > slots) {
    return reader.fail("in", fmt::format("{} takes {} operands, got {}", name, slots, in.size()));
  }
  std::vector<TensorId> inputs(slots, kNone);
  for (std::size_t i = 0; i < in.size(); ++i) {
    if (in[i].empty()) continue;
    const auto id = builder.find(in[i]);
    if (!id) {
      return reader.fail(
          "in", fmt::format("'{}' is not an input and not the result of an earlier op", in[i]));
    }
    inputs[i] = *id;
  }
  if (out.empty()) return reader.fail("out", "missing; expected a name");
  if (out.size() > output_slots(op)) {
    return reader.fail(
        "out", fmt::format("{} has {} results, got {} names", name, output_slots(op), out.size()));
  }
  std::vector<Builder::ResultSpec> results;
  for (std::size_t i = 0; i < out.size(); ++i) {
    results.push_back({out[i], i == 0 ? dtype : std::nullopt, !out[i].empty()});
  }
  builder.source(std::move(written_at));
  auto added = builder.add(std::move(op), std::move(inputs), std::move(results));
  if (!added.ok()) return invalid("{}: field '{}': {}", source, path, added.error().message);
  return {};
}

Status read_output(const Json& item, const std::string& source, const std::string& path,
                   Builder& builder) {
  const Json object = item.is_string() ? Json{{"name", item}} : item;
  ObjectReader reader(object, source, path);
  LAWSON_TRY(std::string name, read_name(reader, "name"));
  LAWSON_TRY(auto dtype, read_dtype(reader, "dtype"));
  Dims strides;
  if (reader.has("strides")) {
    LAWSON_TRY(strides, reader.integers("strides", 0, kMaxElements));
  }
  LAWSON_TRY(auto alignment, reader.integer_or("alignment", 16, 1, 4096));
  LAWSON_CHECK(reader.finish());
  auto id = builder.find(name);
  if (!id) return reader.fail("name", fmt::format("'{}' is not the result of an op", name));
  if (dtype && *dtype != builder.tensor(*id).dtype) {
    if (name.size() + 4 > kMaxNameBytes) {
      return reader.fail("name", "too long to be converted on its way out; at most 252 bytes");
    }
    auto converted = builder.add1(Convert{}, {*id}, dtype, name + ".out");
    if (!converted.ok()) return reader.fail("dtype", converted.error().message);
    id = *converted;
  }
  const Status status = builder.output(*id, std::move(strides), static_cast<int>(alignment));
  if (!status.ok()) return invalid("{}: field '{}': {}", source, path, status.error().message);
  return {};
}

void write_rule(Json& item, const AttentionRule& rule) {
  if (rule.padding) item["padding"] = true;
  if (rule.alignment != Alignment::top_left) item["alignment"] = to_string(rule.alignment);
  if (rule.left != -1) item["left"] = rule.left;
  if (rule.right != -1) item["right"] = rule.right;
  if (rule.softmax != SoftmaxKind::vanilla) item["softmax"] = to_string(rule.softmax);
  if (rule.softcap != 0) item["softcap"] = rule.softcap;
  if (rule.alibi) item["alibi"] = true;
  if (rule.pre_scale_bias) item["pre_scale_bias"] = true;
  if (rule.dropout != 0) item["dropout"] = rule.dropout;
  if (rule.max_q != 0) item["max_q"] = rule.max_q;
  if (rule.max_kv != 0) item["max_kv"] = rule.max_kv;
}

void write_parameter(Json& item, UnaryKind kind, double parameter) {
  if (const char* name = parameter_name(kind)) item[name] = parameter;
}

void write_attributes(Json& item, const Op& op) {
  std::visit(Overloaded{
                 [&](const Unary& u) { write_parameter(item, u.kind, u.parameter); },
                 [&](const UnaryGrad& u) { write_parameter(item, u.kind, u.parameter); },
                 [&](const ScaledMatmul& m) {
                   item["block"] = m.block;
                   if (m.swizzled) item["swizzled"] = true;
                 },
                 [&](const Concat& c) { item["axis"] = c.axis; },
                 [&](const Norm& n) {
                   item["axes"] = n.axes;
                   item["eps"] = n.eps;
                 },
                 [&](const NormBackward& n) { item["axes"] = n.axes; },
                 [&](const Clamp& c) {
                   item["min"] = c.min;
                   item["max"] = c.max;
                 },
                 [&](const Iota& i) {
                   item["axis"] = i.axis;
                   item["shape"] = i.shape;
                 },
                 [&](const Constant& c) { item["value"] = c.value; },
                 [&](const Broadcast& b) { item["shape"] = b.shape; },
                 [&](const Reshape& r) { item["shape"] = r.shape; },
                 [&](const Transpose& t) { item["perm"] = t.perm; },
                 [&](const Slice& s) {
                   item["start"] = s.start;
                   item["limit"] = s.limit;
                   item["stride"] = s.stride;
                 },
                 [&](const Reduce& r) {
                   item["axes"] = r.axes;
                   item["keepdims"] = r.keepdims;
                 },
                 [&](const Attention& a) { write_rule(item, a.rule); },
                 [&](const AttentionBackward& a) {
                   write_rule(item, a.rule);
                   if (a.deterministic) item["deterministic"] = true;
                 },
                 [](const Matmul&) {},
                 [](const Convert&) {},
                 [](const Binary&) {},
                 [](const Compare&) {},
                 [](const Logical&) {},
                 [](const Select&) {},
                 [](const CacheAppend&) {},
             },
             op);
}

// By slot name where the slots have names, else by position.
Json names_of(const Graph& graph, const std::vector<TensorId>& ids,
              const std::vector<std::string_view>& slots) {
  if (!slots.empty()) {
    Json names = Json::object();
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] != kNone) names[std::string{slots[i]}] = graph.tensor(ids[i]).name;
    }
    return names;
  }
  Json names = Json::array();
  for (const TensorId id : ids) names.push_back(graph.tensor(id).name);
  return names;
}

}  // namespace

Status check_size(const Graph& graph) {
  const std::pair<const char*, std::size_t> counts[] = {
      {"inputs", static_cast<std::size_t>(graph.input_count)},
      {"ops", graph.nodes.size()},
      {"outputs", static_cast<std::size_t>(graph.output_count)}};
  for (const auto& [what, count] : counts) {
    if (count <= kMaxEntries) continue;
    return invalid("graph '{}' has {} {}; at most {}", graph.name, count, what, kMaxEntries);
  }
  for (const Tensor& tensor : graph.tensors) {
    if (tensor.name.size() <= kMaxNameBytes) continue;
    return invalid("graph '{}': the name '{}...' of a tensor has {} bytes; at most {}", graph.name,
                   tensor.name.substr(0, 60), tensor.name.size(), kMaxNameBytes);
  }
  return {};
}

Result<Op> op_from_json(const std::string& name, ObjectReader& reader) {
  std::optional<Op> op = op_from_name(name);
  if (!op) {
    const std::string near = nearest_name(name, all_op_names());
    return reader.fail(
        "op", near.empty() ? fmt::format("'{}' is not an op", name)
                           : fmt::format("'{}' is not an op; did you mean '{}'?", name, near));
  }
  LAWSON_CHECK(read_attributes(reader, *op));
  return *std::move(op);
}

Result<Graph> graph_from_json(const Json& document, const std::string& source) {
  ObjectReader reader(document, source);
  LAWSON_CHECK(reader.integer("lawson", 1, 1));
  LAWSON_CHECK(reader.choice_or("kind", "graph", {"graph"}));
  std::string name = "graph";
  if (reader.has("name")) {
    LAWSON_TRY(name, read_name(reader, "name"));
  }
  LAWSON_TRY(bool strict, reader.boolean_or("strict", false));
  Builder builder(name);
  builder.strict(strict);
  const Json empty = Json::array();
  const auto list = [&](const std::string& field) -> Result<const Json*> {
    const Json* value = reader.find(field);
    if (value == nullptr) return &empty;
    if (!value->is_array()) return reader.fail_value(field, *value, "a list");
    if (value->size() > kMaxEntries) {
      return reader.fail(field, fmt::format("{} entries; at most {}", value->size(), kMaxEntries));
    }
    return value;
  };
  LAWSON_TRY(const Json* inputs, list("inputs"));
  LAWSON_TRY(const Json* ops, list("ops"));
  LAWSON_TRY(const Json* outputs, list("outputs"));
  LAWSON_CHECK(reader.finish());
  if (outputs->empty()) return reader.fail("outputs", "missing; name at least one result");
  for (std::size_t i = 0; i < inputs->size(); ++i) {
    const std::string path = fmt::format("inputs[{}]", i);
    LAWSON_TRY(Tensor tensor, read_input((*inputs)[i], source, path));
    auto added = builder.input(std::move(tensor));
    if (!added.ok()) return invalid("{}: field '{}': {}", source, path, added.error().message);
  }
  for (std::size_t i = 0; i < ops->size(); ++i) {
    LAWSON_CHECK(read_op((*ops)[i], source, fmt::format("ops[{}]", i), builder));
  }
  for (std::size_t i = 0; i < outputs->size(); ++i) {
    LAWSON_CHECK(read_output((*outputs)[i], source, fmt::format("outputs[{}]", i), builder));
  }
  return std::move(builder).finish();
}

Json graph_to_json(const Graph& graph) {
  Json document{{"lawson", 1}, {"kind", "graph"}, {"name", graph.name}};
  if (graph.strict) document["strict"] = true;
  Json inputs = Json::array();
  for (std::int32_t i = 0; i < graph.input_count; ++i) {
    const Tensor& t = graph.tensor(i);
    Json item{{"name", t.name}, {"dtype", to_string(t.dtype)}, {"shape", t.shape}};
    if (t.strides != contiguous_strides(t.shape)) item["strides"] = t.strides;
    if (t.alignment != 16) item["alignment"] = t.alignment;
    if (t.by_value) item["by_value"] = true;
    if (!t.values.empty()) item["values"] = t.values;
    if (t.domain) item["domain"] = {t.domain->first, t.domain->second};
    inputs.push_back(std::move(item));
  }
  document["inputs"] = std::move(inputs);
  Json ops = Json::array();
  for (const Node& node : graph.nodes) {
    Json item{{"op", op_name(node.op)},
              {"in", names_of(graph, node.inputs, slot_names(node.op))},
              {"out", names_of(graph, node.outputs, result_names(node.op))}};
    if (node.outputs[0] != kNone) item["dtype"] = to_string(graph.tensor(node.outputs[0]).dtype);
    write_attributes(item, node.op);
    if (!node.source.empty()) item["source"] = node.source;
    ops.push_back(std::move(item));
  }
  document["ops"] = std::move(ops);
  Json outputs = Json::array();
  for (std::int32_t i = 0; i < graph.output_count; ++i) {
    const Tensor& t = graph.tensor(graph.input_count + i);
    Json item{{"name", t.name}};
    if (t.strides != contiguous_strides(t.shape)) item["strides"] = t.strides;
    if (t.alignment != 16) item["alignment"] = t.alignment;
    outputs.push_back(std::move(item));
  }
  document["outputs"] = std::move(outputs);
  return document;
}

}  // namespace lawson::ir
