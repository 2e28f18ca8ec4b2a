// Graphs built op by op through the ABI. What an op is called and which attributes it has is the
// specs' rule (ir/json.h); what it takes and gives is the builder's (ir/graph.h).
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "capi/attention.h"
#include "capi/guard.h"
#include "capi/handles.h"
#include "ir/infer.h"
#include "ir/json.h"

struct lawson_graph_builder {
  explicit lawson_graph_builder(std::string name) : builder{std::move(name)} {}

  lawson::ir::Builder builder;
  std::string source;
  std::vector<lawson::ir::TensorId> inputs;
  std::vector<std::string> output_names;
  lawson::ir::TensorId tensors = 0;  // that its caller knows of: ids 0 ... tensors - 1
  std::size_t ops = 0;
  bool finished = false;
  // What tells the tensors of two builders apart.
  const std::int64_t serial = next_serial();

 private:
  static std::int64_t next_serial() {
    static std::atomic<std::int64_t> last{0};
    return ++last;
  }
};

namespace lawson::capi {
namespace {

constexpr std::array kInputPrefixes{offsetof(lawson_graph_input, strides),
                                    offsetof(lawson_graph_input, alignment),
                                    offsetof(lawson_graph_input, by_value)};
constexpr std::array kOutputPrefixes{offsetof(lawson_graph_output, strides),
                                     offsetof(lawson_graph_output, alignment)};

using ir::kMaxNameBytes;

constexpr std::size_t kMaxOperands = 4096;
constexpr int kIndexBits = 24;  // of a tensor id; above them is the builder's serial

// "mlp.c:12: ", or nothing.
std::string place(const lawson_graph_builder& builder) {
  return builder.source.empty() ? std::string{} : builder.source + ": ";
}

// What messages and graphs say of a place.
Result<std::string> read_source(const char* source) {
  std::string text = source == nullptr ? "" : source;
  if (has_control(text)) return invalid("argument 'source' has control characters");
  if (!is_utf8(text)) return invalid("argument 'source' is not UTF-8");
  // The end of a long path says more than its beginning; specs hold as much as a name.
  if (text.size() > kMaxNameBytes) {
    std::size_t begin = text.size() - kMaxNameBytes + 3;
    while ((static_cast<unsigned char>(text[begin]) & 0xC0U) == 0x80U) ++begin;  // in a character
    text = "..." + text.substr(begin);
  }
  return text;
}

Status usable(const lawson_graph_builder* builder) {
  LAWSON_CHECK(require(builder, "builder"));
  if (!builder->finished) return {};
  return invalid("the builder has finished its graph and takes nothing more; create another one");
}

Status check_name(const lawson_graph_builder& builder, std::string_view name,
                  std::string_view what) {
  if (!is_utf8(std::string{name}))
    return invalid("{}{}: a name that is not UTF-8", place(builder), what);
  if (!name.empty() && name.size() <= kMaxNameBytes && !has_control(name)) return {};
  return invalid("{}{}: a name of {} bytes; expected 1 to {} bytes without control characters",
                 place(builder), what, name.size(), kMaxNameBytes);
}

// Of inputs or ops: found here, where the caller can be told which one is too many.
Status check_count(const lawson_graph_builder& builder, std::size_t count, std::string_view what) {
  if (count < ir::kMaxEntries) return {};
  return invalid("{}the graph has {} {} already; at most {}", place(builder), count, what,
                 ir::kMaxEntries);
}

lawson_tensor_id give_id(lawson_graph_builder& builder, ir::TensorId id) {
  builder.tensors = std::max(builder.tensors, id + 1);
  return builder.serial << kIndexBits | (std::int64_t{id} + 1);
}

Result<ir::TensorId> tensor_of(const lawson_graph_builder& builder, lawson_tensor_id id,
                               std::string_view what) {
  const std::int64_t index = id & ((std::int64_t{1} << kIndexBits) - 1);
  if (id > 0 && id >> kIndexBits != builder.serial) {
    return invalid("{}{}: the tensor belongs to another builder", place(builder), what);
  }
  if (id <= 0 || index < 1 || index > builder.tensors) {
    return invalid("{}{}: {} is not a tensor of this builder", place(builder), what, id);
  }
  return static_cast<ir::TensorId>(index - 1);
}

Result<DType> read_dtype(const lawson_graph_builder& builder, std::int64_t number,
                         std::string_view what) {
  const bool fits = number >= 0 && number <= INT32_MAX;
  const auto dtype = fits ? dtype_of(static_cast<std::int32_t>(number)) : std::nullopt;
  if (dtype) return *dtype;
  return invalid("{}{}: {} is not allowed; expected a lawson_dtype but not LAWSON_DTYPE_UNSET",
                 place(builder), what, number);
}

Result<ir::Tensor> read_input(const lawson_graph_builder& builder,
                              const lawson_graph_input& given) {
  ir::Tensor tensor;
  tensor.name = given.name == nullptr ? fmt::format("x{}", builder.inputs.size()) : given.name;
  LAWSON_CHECK(check_name(builder, tensor.name, "input.name"));
  const std::string what = fmt::format("input '{}'", tensor.name);
  LAWSON_TRY(tensor.dtype, read_dtype(builder, given.dtype, what + ": dtype"));
  if (given.rank < 0 || given.rank > LAWSON_MAX_RANK) {
    return invalid("{}{}: rank {} is not allowed; expected 0 to {}", place(builder), what,
                   given.rank, LAWSON_MAX_RANK);
  }
  tensor.shape.assign(given.shape, given.shape + given.rank);
  if (given.strides != nullptr) tensor.strides.assign(given.strides, given.strides + given.rank);
  tensor.alignment = given.alignment == 0 ? 16 : given.alignment;
  tensor.by_value = given.by_value != 0;
  if (tensor.by_value && element_count(tensor.shape) != 1) {
    return invalid("{}{}: by_value: only a tensor of one element can be passed by value, not {}",
                   place(builder), what, to_string(tensor.shape));
  }
  return tensor;
}

// An attribute as the spec writes it.
Result<Json> read_attribute(const lawson_graph_builder& builder, const lawson_attribute& given,
                            const std::string& what) {
  switch (given.type) {
    case LAWSON_ATTRIBUTE_INTEGER:
      return Json(given.integer);
    case LAWSON_ATTRIBUTE_NUMBER:
      if (std::isfinite(given.number)) return Json(given.number);
      return invalid("{}{}: {} is not allowed; expected a finite number", place(builder), what,
                     given.number);
    case LAWSON_ATTRIBUTE_FLAG:
      if (given.integer == 0 || given.integer == 1) return Json(given.integer == 1);
      return invalid("{}{}: {} is not allowed; expected 0 or 1", place(builder), what,
                     given.integer);
    case LAWSON_ATTRIBUTE_DTYPE: {
      LAWSON_TRY(const DType dtype, read_dtype(builder, given.integer, what));
      return Json(to_string(dtype));
    }
    case LAWSON_ATTRIBUTE_INTEGERS: {
      if (given.integer < 0 || given.integer > LAWSON_MAX_RANK) {
        return invalid("{}{}: a list of {} integers; at most {}", place(builder), what,
                       given.integer, LAWSON_MAX_RANK);
      }
      if (given.integer > 0) LAWSON_CHECK(require(given.integers, what + ".integers"));
      Json list = Json::array();
      for (std::int64_t i = 0; i < given.integer; ++i) list.push_back(given.integers[i]);
      return list;
    }
    case LAWSON_ATTRIBUTE_TEXT:
      LAWSON_CHECK(require(given.text, what + ".text"));
      return Json(given.text);
    default:
      return invalid("{}{}: type {} is not allowed; expected a lawson_attribute_type",
                     place(builder), what, given.type);
  }
}

struct OpRequest {
  ir::Op op;
  std::optional<DType> dtype;
};

Result<OpRequest> read_op(const lawson_graph_builder& builder, const std::string& name,
                          std::span<const lawson_attribute> attributes) {
  Json object = Json::object();
  for (std::size_t i = 0; i < attributes.size(); ++i) {
    LAWSON_CHECK(require(attributes[i].name, fmt::format("attributes[{}].name", i)));
    const std::string what = fmt::format("{}: attribute '{}'", name, attributes[i].name);
    LAWSON_TRY(Json value, read_attribute(builder, attributes[i], what));
    if (object.contains(attributes[i].name)) {
      return invalid("{}{}: given twice", place(builder), what);
    }
    object[attributes[i].name] = std::move(value);
  }
  ObjectReader reader(object, builder.source.empty() ? name : builder.source + ": " + name);
  LAWSON_TRY(ir::Op op, ir::op_from_json(name, reader));
  OpRequest request{std::move(op), std::nullopt};
  if (reader.has("dtype")) {
    LAWSON_TRY(const std::string dtype, reader.string("dtype"));
    request.dtype = dtype_from_string(dtype);
    if (!request.dtype) return reader.fail_value("dtype", object["dtype"], "the name of a dtype");
  }
  LAWSON_CHECK(reader.finish());
  return request;
}

std::string describe(const ir::Builder& builder, ir::TensorId id) {
  if (id == ir::kNone) return "-";
  const ir::Tensor& tensor = builder.tensor(id);
  return fmt::format("{} {}{}", tensor.name, to_string(tensor.dtype), to_string(tensor.shape));
}

// "mlp.c:12: matmul: x bf16[4, 8] x w bf16[9, 16]: inner dims 8 and 9 differ"; the operands are
// listed where the message does not name them all.
Error op_error(const lawson_graph_builder& builder, const std::string& name,
               const std::vector<ir::TensorId>& inputs, std::string_view message) {
  std::string operands;
  bool are_named = true;
  for (const ir::TensorId id : inputs) {
    const std::string operand = describe(builder.builder, id);
    are_named = are_named && message.find(operand) != std::string_view::npos;
    operands += (operands.empty() ? "" : ", ") + operand;
  }
  if (message.starts_with(name + ": ")) message.remove_prefix(name.size() + 2);
  if (are_named) return invalid("{}{}: {}", place(builder), name, message);
  return invalid("{}{}({}): {}", place(builder), name, operands, message);
}

Status add_op(lawson_graph_builder& builder, const std::string& name,
              std::span<const lawson_tensor_id> given, std::span<const lawson_attribute> attributes,
              std::span<lawson_tensor_id* const> results) {
  LAWSON_CHECK(check_count(builder, builder.ops, "ops"));
  LAWSON_TRY(OpRequest request, read_op(builder, name, attributes));
  if (given.size() > kMaxOperands) {
    return invalid("{}{}: {} operands; at most {}", place(builder), name, given.size(),
                   kMaxOperands);
  }
  std::vector<ir::TensorId> inputs;
  for (std::size_t i = 0; i < given.size(); ++i) {
    if (given[i] == LAWSON_NO_TENSOR) {
      inputs.push_back(ir::kNone);
      continue;
    }
    LAWSON_TRY(const ir::TensorId id,
               tensor_of(builder, given[i], fmt::format("{}: inputs[{}]", name, i)));
    inputs.push_back(id);
  }
  if (auto* concat = std::get_if<ir::Concat>(&request.op)) {
    concat->operands = static_cast<std::int64_t>(inputs.size());
  }
  if (inputs.size() > ir::input_slots(request.op)) {
    return op_error(
        builder, name, inputs,
        fmt::format("takes {} operands, got {}", ir::input_slots(request.op), inputs.size()));
  }
  const std::size_t slots = ir::output_slots(request.op);
  if (results.size() > slots) {
    return op_error(builder, name, inputs,
                    fmt::format("has {} results; {} were asked for", slots, results.size()));
  }
  std::vector<ir::Builder::ResultSpec> specs;
  bool any = false;
  for (std::size_t i = 0; i < results.size(); ++i) {
    specs.push_back({"", i == 0 ? request.dtype : std::nullopt, results[i] != nullptr});
    any = any || results[i] != nullptr;
  }
  if (!any) return op_error(builder, name, inputs, "no result is asked for");
  builder.builder.source(builder.source);
  auto added = builder.builder.add(std::move(request.op), inputs, std::move(specs));
  if (!added.ok()) return op_error(builder, name, inputs, added.error().message);
  ++builder.ops;
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (results[i] != nullptr) *results[i] = give_id(builder, (*added)[i]);
  }
  return {};
}

// What every way to add an op is given.
Status check_op(const lawson_graph_builder* builder, const char* op, const lawson_tensor_id* inputs,
                std::size_t input_count, const lawson_attribute* attributes,
                std::size_t attribute_count) {
  LAWSON_CHECK(usable(builder));
  LAWSON_CHECK(require(op, "op"));
  if (input_count > 0) LAWSON_CHECK(require(inputs, "inputs"));
  if (attribute_count > 0) LAWSON_CHECK(require(attributes, "attributes"));
  return {};
}

// Outputs under the names that the caller wants; generated names give way.
Status name_outputs(ir::Graph& graph, const std::vector<std::string>& names) {
  const auto find = [&](const std::string& name) {
    return std::find_if(graph.tensors.begin(), graph.tensors.end(),
                        [&](const ir::Tensor& tensor) { return tensor.name == name; });
  };
  for (std::size_t i = 0; i < names.size(); ++i) {
    if (names[i].empty()) continue;
    const auto output = graph.tensors.begin() + graph.input_count + static_cast<std::ptrdiff_t>(i);
    if (const auto other = find(names[i]); other < graph.tensors.begin() + graph.input_count) {
      return invalid("output '{}': an input has this name", names[i]);
    } else if (other != graph.tensors.end() && other != output) {
      std::string free = other->name + "_";
      while (find(free) != graph.tensors.end()) free += '_';
      other->name = std::move(free);
    }
    output->name = names[i];
  }
  return {};
}

}  // namespace
}  // namespace lawson::capi

using namespace lawson;
using namespace lawson::capi;

extern "C" {

lawson_status lawson_graph_builder_create(const char* name, lawson_graph_builder** builder) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(builder, "builder"));
    auto made = std::make_unique<lawson_graph_builder>(name == nullptr ? "graph" : name);
    LAWSON_CHECK(check_name(*made, name == nullptr ? "graph" : name, "argument 'name'"));
    *builder = made.release();
    return {};
  });
}

void lawson_graph_builder_destroy(lawson_graph_builder* builder) {
  delete builder;
}

lawson_status lawson_graph_builder_strict(lawson_graph_builder* builder, int strict) {
  return guard([&]() -> Status {
    LAWSON_CHECK(usable(builder));
    builder->builder.strict(strict != 0);
    return {};
  });
}

lawson_status lawson_graph_builder_source(lawson_graph_builder* builder, const char* source) {
  return guard([&]() -> Status {
    LAWSON_CHECK(usable(builder));
    LAWSON_TRY(builder->source, read_source(source));
    return {};
  });
}

lawson_status lawson_graph_builder_input(lawson_graph_builder* builder,
                                         const lawson_graph_input* input,
                                         lawson_tensor_id* tensor) {
  return guard([&]() -> Status {
    LAWSON_CHECK(usable(builder));
    LAWSON_CHECK(require(input, "input"));
    LAWSON_CHECK(require(tensor, "tensor"));
    lawson_graph_input given{};
    LAWSON_CHECK(read_struct(input, given, "lawson_graph_input", kInputPrefixes));
    LAWSON_CHECK(check_count(*builder, builder->inputs.size(), "inputs"));
    LAWSON_TRY(ir::Tensor read, read_input(*builder, given));
    auto added = builder->builder.input(std::move(read));
    if (!added.ok()) return invalid("{}{}", place(*builder), added.error().message);
    builder->inputs.push_back(*added);
    *tensor = give_id(*builder, *added);
    return {};
  });
}

lawson_status lawson_graph_builder_op(lawson_graph_builder* builder, const char* op,
                                      const lawson_tensor_id* inputs, size_t input_count,
                                      const lawson_attribute* attributes, size_t attribute_count,
                                      lawson_tensor_id* result) {
  return guard([&]() -> Status {
    LAWSON_CHECK(check_op(builder, op, inputs, input_count, attributes, attribute_count));
    LAWSON_CHECK(require(result, "result"));
    lawson_tensor_id* const results[] = {result};
    return add_op(*builder, op, {inputs, input_count}, {attributes, attribute_count}, results);
  });
}

lawson_status lawson_graph_builder_op_at(lawson_graph_builder* builder, const char* source,
                                         const char* op, const lawson_tensor_id* inputs,
                                         size_t input_count, const lawson_attribute* attributes,
                                         size_t attribute_count, lawson_tensor_id* result) {
  return guard([&]() -> Status {
    LAWSON_CHECK(check_op(builder, op, inputs, input_count, attributes, attribute_count));
    LAWSON_CHECK(require(result, "result"));
    LAWSON_TRY(std::string here, read_source(source));
    struct Elsewhere {  // the source of other ops, meanwhile
      std::string& source;
      std::string kept;
      ~Elsewhere() { source = std::move(kept); }
    } const elsewhere{builder->source, std::exchange(builder->source, std::move(here))};
    lawson_tensor_id* const results[] = {result};
    return add_op(*builder, op, {inputs, input_count}, {attributes, attribute_count}, results);
  });
}

lawson_status lawson_graph_builder_op_results(lawson_graph_builder* builder, const char* op,
                                              const lawson_tensor_id* inputs, size_t input_count,
                                              const lawson_attribute* attributes,
                                              size_t attribute_count,
                                              lawson_tensor_id* const* results,
                                              size_t result_count) {
  return guard([&]() -> Status {
    LAWSON_CHECK(check_op(builder, op, inputs, input_count, attributes, attribute_count));
    LAWSON_CHECK(require(results, "results"));
    return add_op(*builder, op, {inputs, input_count}, {attributes, attribute_count},
                  {results, result_count});
  });
}

lawson_status lawson_graph_builder_tensor(const lawson_graph_builder* builder,
                                          lawson_tensor_id tensor, lawson_tensor_info* info) {
  return guard([&]() -> Status {
    LAWSON_CHECK(require(builder, "builder"));
    LAWSON_CHECK(require(info, "info"));
    LAWSON_TRY(const ir::TensorId id, tensor_of(*builder, tensor, "argument 'tensor'"));
    const auto& inputs = builder->inputs;
    const bool is_input = std::find(inputs.begin(), inputs.end(), id) != inputs.end();
    return write_tensor_info(builder->builder.tensor(id), 0, is_input, info);
  });
}

lawson_status lawson_graph_builder_output(lawson_graph_builder* builder, lawson_tensor_id tensor,
                                          const lawson_graph_output* layout) {
  return guard([&]() -> Status {
    LAWSON_CHECK(usable(builder));
    lawson_graph_output given{};
    LAWSON_CHECK(read_struct(layout, given, "lawson_graph_output", kOutputPrefixes));
    LAWSON_TRY(const ir::TensorId id, tensor_of(*builder, tensor, "output"));
    const ir::Tensor& found = builder->builder.tensor(id);
    std::string name = given.name == nullptr ? "" : given.name;
    if (given.name != nullptr) LAWSON_CHECK(check_name(*builder, name, "output.name"));
    const auto& names = builder->output_names;
    if (!name.empty() && std::find(names.begin(), names.end(), name) != names.end()) {
      return invalid("{}the name '{}' is used for two outputs", place(*builder), name);
    }
    Dims strides;
    if (given.strides != nullptr) {
      strides.assign(given.strides, given.strides + found.shape.size());
    }
    const Status added = builder->builder.output(id, std::move(strides),
                                                 given.alignment == 0 ? 16 : given.alignment);
    if (!added.ok()) return invalid("{}{}", place(*builder), added.error().message);
    builder->output_names.push_back(std::move(name));
    return {};
  });
}

lawson_status lawson_graph_builder_finish(lawson_graph_builder* builder, lawson_graph** graph) {
  return guard([&]() -> Status {
    LAWSON_CHECK(usable(builder));
    LAWSON_CHECK(require(graph, "graph"));
    ir::Builder copy = builder->builder;
    LAWSON_TRY(ir::Graph finished, std::move(copy).finish());
    LAWSON_CHECK(name_outputs(finished, builder->output_names));
    LAWSON_CHECK(ir::check_size(finished));
    auto handle = std::make_unique<lawson_graph>(lawson_graph{std::move(finished)});
    builder->finished = true;
    *graph = handle.release();
    return {};
  });
}

}  // extern "C"
