// Fusion cases, as graph documents: pre-ops on the operands, a matmul, post-ops, reductions; and
// pointwise graphs without one.
#include <algorithm>
#include <map>

#include "base/dims.h"
#include "cases/cases.h"
#include "cases/dice.h"

namespace lawson::cases {
namespace {

// Writes a graph document and knows shape and dtype of what it wrote.
class Writer {
 public:
  struct Value {
    std::string name;
    std::string dtype;
    Dims shape;
  };

  explicit Writer(const std::string& name)
      : document_{{"lawson", 1},          {"kind", "graph"},
                  {"name", name},         {"inputs", Json::array()},
                  {"ops", Json::array()}, {"outputs", Json::array()}} {}

  Value input(const std::string& dtype, const Dims& shape, const Dims& strides = {}) {
    Value value{fmt::format("x{}", count_++), dtype, shape};
    Json item{{"name", value.name}, {"dtype", dtype}, {"shape", shape}};
    if (!strides.empty()) item["strides"] = strides;
    document_["inputs"].push_back(item);
    return value;
  }

  // A result of the given dtype and shape; `attributes` go into the op as they are.
  Value op(const std::string& op, const std::vector<Value>& in, const std::string& dtype,
           const Dims& shape, Json attributes = Json::object()) {
    Value value{fmt::format("t{}", count_++), dtype, shape};
    Json item = std::move(attributes);
    item["op"] = op;
    item["in"] = Json::array();
    for (const Value& operand : in) item["in"].push_back(operand.name);
    item["out"] = value.name;
    if (dtype != "bool" && op != "reshape" && op != "transpose" && op != "broadcast" &&
        op != "slice") {
      item["dtype"] = dtype;
    }
    document_["ops"].push_back(item);
    return value;
  }

  Value same(const std::string& name, const Value& x, Json attributes = Json::object()) {
    return op(name, {x}, x.dtype, x.shape, std::move(attributes));
  }
  Value convert(const Value& x, const std::string& dtype) {
    return x.dtype == dtype ? x : op("convert", {x}, dtype, x.shape);
  }
  Value constant(double number, const std::string& dtype) {
    return op("constant", {}, dtype, {}, {{"value", number}});
  }
  void output(const Value& x, const Dims& strides = {}) {
    Json item{{"name", x.name}};
    if (!strides.empty()) item["strides"] = strides;
    document_["outputs"].push_back(item);
  }
  void strict() { document_["strict"] = true; }
  Json take() && { return std::move(document_); }

 private:
  Json document_;
  int count_ = 0;
};

using Value = Writer::Value;

bool is_half(const std::string& dtype) {
  return dtype == "bf16" || dtype == "f16";
}

// Strides of a matrix operand: rows, columns, or rows with a padded leading dim.
Dims matrix_strides(Dice& dice, const Dims& shape) {
  Dims strides = contiguous_strides(shape);
  const std::size_t r = shape.size();
  const std::int64_t rows = shape[r - 2];
  const std::int64_t columns = shape[r - 1];
  const std::int64_t layout = dice.below(4);
  if (layout == 1) {
    strides[r - 2] = 1;
    strides[r - 1] = rows;
  } else if (layout == 2) {
    const std::int64_t lead = columns + 8 * (1 + dice.below(2));
    strides[r - 2] = lead;
    if (r == 3) strides[0] = lead * rows;
  }
  return strides;
}

// A shape that broadcasts to `shape`.
Dims broadcastable(Dice& dice, const Dims& shape) {
  Dims result = shape;
  for (std::int64_t& dim : result) {
    if (dice.chance(40)) dim = 1;
  }
  return result;
}

Value activation(Dice& dice, Writer& writer, const Value& x) {
  switch (dice.below(8)) {
    case 0:
      return writer.same("leaky_relu", x, {{"slope", 0.1}});
    case 1:
      return writer.same("elu", x, {{"alpha", 1.0}});
    case 2:
      return writer.same("clamp", x, {{"min", -1.5}, {"max", 2.0}});
    case 3: {  // of a value in a safe range
      const Value magnitude = writer.same("abs", x);
      const Value shifted =
          writer.op("add", {magnitude, writer.constant(0.5, x.dtype)}, x.dtype, x.shape);
      return writer.same(dice.pick<std::string>({"log", "sqrt", "rsqrt", "reciprocal", "log1p"}),
                         shifted);
    }
    case 4: {
      const Value small = writer.same("clamp", x, {{"min", -4.0}, {"max", 4.0}});
      return writer.same(dice.pick<std::string>({"exp", "expm1", "sin", "cos"}), small);
    }
    case 5:
      return writer.same(dice.pick<std::string>({"neg", "abs", "ceil", "floor", "sign"}), x);
    default:
      return writer.same(dice.pick<std::string>({"relu", "relu6", "sigmoid", "tanh", "erf", "silu",
                                                 "gelu", "gelu_tanh", "softplus"}),
                         x);
  }
}

// Two values of one dtype; x / (|y| + 1) and x ^ 2 stay in range.
Value combine(Dice& dice, Writer& writer, const Value& x, const Value& y, bool integer) {
  const std::int64_t kind = dice.below(integer ? 5 : 8);
  const std::vector<std::string> plain{"add", "sub", "mul", "min", "max"};
  if (kind < 5) {
    return writer.op(plain[static_cast<std::size_t>(kind)], {x, y}, x.dtype, x.shape);
  }
  if (kind == 5) {
    const Value magnitude = writer.same("abs", y);
    const Value divisor =
        writer.op("add", {magnitude, writer.constant(1, y.dtype)}, y.dtype, y.shape);
    return writer.op("div", {x, divisor}, x.dtype, x.shape);
  }
  if (kind == 6) {
    const Value predicate =
        writer.op(dice.pick<std::string>({"compare_lt", "compare_ge", "compare_gt", "compare_le"}),
                  {x, y}, "bool", x.shape);
    return writer.op("select", {predicate, x, y}, x.dtype, x.shape);
  }
  const Value gate = writer.same("sigmoid", y);
  return writer.op("mul", {x, gate}, x.dtype, x.shape);
}

Value reduce(Dice& dice, Writer& writer, const Value& x) {
  const auto rank = static_cast<std::int64_t>(x.shape.size());
  const std::string kind =
      dice.pick<std::string>({"sum", "max", "min", "mean", "amax", "norm1", "norm2"});
  Dims axes{dice.chance(70) ? rank - 1 : dice.below(rank)};
  if (dice.chance(20) && rank > 1) axes = {rank - 2, rank - 1};
  const bool keep = dice.chance(60);
  Dims shape;
  for (std::int64_t i = 0; i < rank; ++i) {
    const bool reduced = std::find(axes.begin(), axes.end(), i) != axes.end();
    if (!reduced) shape.push_back(x.shape[static_cast<std::size_t>(i)]);
    if (reduced && keep) shape.push_back(1);
  }
  return writer.op("reduce_" + kind, {x}, x.dtype, shape, {{"axes", axes}, {"keepdims", keep}});
}

// From storage to what the matmul multiplies.
Value operand(Dice& dice, Writer& writer, const Dims& shape, const std::string& stored,
              const std::string& compute) {
  Value x = writer.input(stored, shape, matrix_strides(dice, shape));
  x = writer.convert(x, compute);
  if (stored == compute && dice.chance(75)) return x;
  if (dice.chance(25)) x = writer.same(dice.pick<std::string>({"neg", "relu", "abs", "tanh"}), x);
  if (dice.chance(20)) {
    Dims scale_shape = shape;
    scale_shape[shape.size() - (dice.chance(50) ? 1U : 2U)] = 1;
    const Value scale =
        writer.convert(writer.input(dice.chance(50) ? compute : "f32", scale_shape), compute);
    x = writer.op("mul", {x, scale}, compute, shape);
  }
  return x;
}

Value post_ops(Dice& dice, Writer& writer, Value x, const std::string& storage) {
  const std::int64_t count = dice.below(4);
  for (std::int64_t i = 0; i < count; ++i) {
    if (dice.chance(50)) {
      x = activation(dice, writer, x);
    } else {
      const Value other = writer.convert(
          writer.input(dice.chance(50) ? storage : x.dtype, broadcastable(dice, x.shape)), x.dtype);
      x = combine(dice, writer, x, other, false);
    }
  }
  return x;
}

Case draw_matmul(Dice& dice, const std::string& name, Profile profile) {
  Writer writer(name);
  const auto size = [&](std::int64_t large) -> std::int64_t {
    if (profile == Profile::gpu && dice.chance(70)) return 16 * (1 + dice.below(8));
    if (dice.chance(15)) return dice.pick<std::int64_t>({1, 2, 3});
    return 1 + dice.below(large);
  };
  const std::int64_t m = size(100);
  const std::int64_t n = size(100);
  const std::int64_t k = size(150);
  const std::int64_t batch = dice.pick<std::int64_t>({1, 1, 2, 3});
  const bool rank3 = batch > 1 || dice.chance(60) || profile == Profile::gpu;
  const auto shape = [&](std::int64_t rows, std::int64_t columns, bool may_broadcast) {
    if (!rank3) return Dims{rows, columns};
    return Dims{may_broadcast && dice.chance(20) ? 1 : batch, rows, columns};
  };
  const Dims result = rank3 ? Dims{batch, m, n} : Dims{m, n};
  if (dice.chance(12)) {  // integers
    const Value a = writer.input("i8", shape(m, k, false), {});
    const Value b = writer.input("i8", shape(k, n, true), {});
    Value c = writer.op("matmul", {a, b}, "i32", result);
    if (dice.chance(60)) {
      c = writer.op("mul",
                    {writer.convert(c, "f32"), writer.input("f32", broadcastable(dice, result))},
                    "f32", result);
      if (dice.chance(50)) c = writer.convert(c, "i8");
    } else if (dice.chance(40)) {
      c = writer.op("add", {c, writer.input("i32", broadcastable(dice, result))}, "i32", result);
    }
    writer.output(c);
    return {name, std::move(writer).take(), 1, plan::InputStyle::normal};
  }
  const std::string compute = dice.pick<std::string>(
      {"bf16", "bf16", "f16", "f16", "f32", profile == Profile::gpu ? "bf16" : "f64"});
  const auto stored = [&]() -> std::string {
    if (compute == "f64" || dice.chance(60)) return compute;
    if (profile == Profile::any && dice.chance(15))
      return dice.pick<std::string>({"f8e4m3", "f8e5m2"});
    return dice.pick<std::string>({"i8", "i8", "f32"});
  };
  const Value a = operand(dice, writer, shape(m, k, false), stored(), compute);
  const Value b =
      operand(dice, writer, shape(k, n, true), dice.chance(70) ? compute : stored(), compute);
  Value c = writer.op("matmul", {a, b}, compute == "f64" ? "f64" : "f32", result);
  c = post_ops(dice, writer, c, is_half(compute) ? compute : c.dtype);
  if (dice.chance(20)) {
    const Value before = c;
    c = reduce(dice, writer, c);
    if (dice.chance(30)) writer.output(before);
  }
  if (c.dtype == "f32" && dice.chance(60)) {
    c = writer.convert(c, is_half(compute) && dice.chance(90)
                              ? compute
                              : dice.pick<std::string>({"bf16", "f16", "i8", "f8e4m3"}));
  }
  writer.output(c, c.shape.size() >= 2 && dice.chance(25) ? matrix_strides(dice, c.shape) : Dims{});
  if (profile == Profile::any && dice.chance(15)) writer.strict();
  return {name, std::move(writer).take(), 1, plan::InputStyle::normal};
}

Value reshaped(Dice& dice, Writer& writer, const Value& x) {
  switch (dice.below(4)) {
    case 0: {
      Dims perm{0, 1, 2};
      std::swap(perm[0], perm[static_cast<std::size_t>(dice.below(3))]);
      std::swap(perm[1], perm[static_cast<std::size_t>(1 + dice.below(2))]);
      Dims shape;
      for (const std::int64_t axis : perm) shape.push_back(x.shape[static_cast<std::size_t>(axis)]);
      return writer.op("transpose", {x}, x.dtype, shape, {{"perm", perm}});
    }
    case 1: {
      Dims start;
      Dims limit;
      Dims stride;
      Dims shape;
      for (const std::int64_t dim : x.shape) {
        start.push_back(dice.below(dim));
        limit.push_back(start.back() + 1 + dice.below(dim - start.back()));
        stride.push_back(1 + dice.below(2));
        shape.push_back((limit.back() - start.back() + stride.back() - 1) / stride.back());
      }
      return writer.op("slice", {x}, x.dtype, shape,
                       {{"start", start}, {"limit", limit}, {"stride", stride}});
    }
    case 2: {
      const Dims flat{x.shape[0] * x.shape[1], 1, x.shape[2]};
      return writer.op("reshape", {x}, x.dtype, flat, {{"shape", flat}});
    }
    default: {
      Dims shape = x.shape;
      shape.insert(shape.begin(), 2);
      const Value wide = writer.op("broadcast", {x}, x.dtype, shape, {{"shape", shape}});
      const Dims flat{2 * x.shape[0], x.shape[1], x.shape[2]};
      return writer.op("reshape", {wide}, x.dtype, flat, {{"shape", flat}});
    }
  }
}

Case draw_pointwise(Dice& dice, const std::string& name, Profile profile) {
  Writer writer(name);
  const Dims shape{1 + dice.below(3), 1 + dice.below(40), 1 + dice.below(60)};
  const std::string dtype =
      dice.pick<std::string>({"f32", "bf16", "f16", profile == Profile::any ? "f64" : "f32"});
  Value x = writer.input(dtype, shape, dice.chance(30) ? matrix_strides(dice, shape) : Dims{});
  if (dice.chance(50)) x = writer.convert(x, dtype == "f64" ? "f64" : "f32");
  if (dice.chance(30)) x = reshaped(dice, writer, x);
  if (dice.chance(20)) {
    const std::int64_t axis = dice.below(3);
    const Value index =
        writer.op("iota", {}, x.dtype, x.shape, {{"shape", x.shape}, {"axis", axis}});
    x = combine(dice, writer, x, index, false);
  }
  x = post_ops(dice, writer, x, dtype);
  x = activation(dice, writer, x);
  if (dice.chance(40)) x = reduce(dice, writer, x);
  if (dice.chance(40))
    x = writer.convert(x, dice.pick<std::string>({"bf16", "f16", "f32", "i8", "u8"}));
  writer.output(x);
  if (profile == Profile::any && dice.chance(20)) writer.strict();
  return {name, std::move(writer).take(), 1, plan::InputStyle::normal};
}

}  // namespace

std::vector<Case> fusion_cases(std::uint64_t seed, int count, Profile profile) {
  std::vector<Case> cases;
  for (int i = 0; i < count; ++i) {
    Dice dice(seed * 7919 + static_cast<std::uint64_t>(i));
    const std::string name = fmt::format("fusion-{}", i);
    const bool matmul = dice.chance(profile == Profile::gpu ? 90 : 65);
    cases.push_back(matmul ? draw_matmul(dice, name, profile)
                           : draw_pointwise(dice, name, profile));
    cases.back().seed = seed + static_cast<std::uint64_t>(i);
  }
  return cases;
}

}  // namespace lawson::cases
