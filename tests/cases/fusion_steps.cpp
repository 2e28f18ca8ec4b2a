#include "cases/fusion_steps.h"

#include <algorithm>
#include <cmath>

#include "ir/infer.h"

namespace lawson::cases {
namespace {

// Above it a value is brought back before anything else follows.
double most(DType dtype) {
  return bit_width(dtype) <= 16 ? 500 : 1e5;
}

bool is_one_of(const std::string& op, std::initializer_list<const char*> names) {
  return std::find(names.begin(), names.end(), op) != names.end();
}

Dims broadcastable(Dice& dice, const Dims& shape) {
  Dims result = shape;
  for (std::int64_t& dim : result) {
    if (dice.chance(40)) dim = 1;
  }
  while (!result.empty() && result.front() == 1 && dice.chance(50)) result.erase(result.begin());
  return result;
}

}  // namespace

const std::vector<std::string>& step_names(Taste taste, bool integers) {
  static const std::vector<std::string> usual{"relu",
                                              "leaky_relu",
                                              "relu6",
                                              "elu",
                                              "softplus",
                                              "silu",
                                              "gelu",
                                              "gelu_tanh",
                                              "sigmoid",
                                              "tanh",
                                              "erf",
                                              "exp",
                                              "neg",
                                              "abs",
                                              "sqrt",
                                              "rsqrt",
                                              "reciprocal",
                                              "log",
                                              "sin",
                                              "cos",
                                              "ceil",
                                              "floor",
                                              "add",
                                              "add",
                                              "add",
                                              "sub",
                                              "mul",
                                              "mul",
                                              "div",
                                              "pow",
                                              "min",
                                              "max",
                                              "select",
                                              "clamp",
                                              "compare_lt",
                                              "compare_ge",
                                              "compare_eq",
                                              "gelu_grad",
                                              "silu_grad",
                                              "relu_grad",
                                              "tanh_grad",
                                              "sigmoid_grad",
                                              "gelu_tanh_grad",
                                              "elu_grad",
                                              "softplus_grad",
                                              "convert"};
  static const std::vector<std::string> integer{
      "add",        "sub",        "mul",        "min",        "max",        "div",
      "mod",        "neg",        "abs",        "sign",       "relu",       "clamp",
      "compare_eq", "compare_ne", "compare_lt", "compare_le", "compare_gt", "compare_ge",
      "select",     "transpose",  "reshape",    "slice",      "concat",     "broadcast",
      "reduce_sum", "reduce_max", "reduce_min", "reduce_amax"};
  static const std::vector<std::string> usual_integer{"add",  "sub", "mul", "min",  "max",
                                                      "relu", "abs", "neg", "clamp"};
  static const std::vector<std::string> everything = [] {
    std::vector<std::string> names;
    for (const std::string& name : ir::all_op_names()) {
      const bool product = name.find("matmul") != std::string::npos;
      const bool norm = name.find("_norm") != std::string::npos && !name.starts_with("reduce_");
      const bool attention = name.starts_with("attention") || name == "cache_append";
      if (!product && !norm && !attention) names.push_back(name);
    }
    return names;
  }();
  if (integers) return taste == Taste::usual ? usual_integer : integer;
  return taste == Taste::usual ? usual : everything;
}

// ---- programs ----

Value Steps::program(Writer& writer, Value x, int count) {
  const int end = writer.counted() + count;
  while (writer.counted() < end) {
    const bool integers = is_integer(x.dtype);
    Writer trial = writer;
    Value next = step(trial, dice_.pick(step_names(taste_, integers)), x);
    if (next.peak() > most(next.dtype) && !is_integer(next.dtype)) next = small(trial, next, 4);
    const bool large =
        next.count() > std::max<std::int64_t>(30000, x.count()) || next.shape.size() > 5;
    if (trial.counted() > end || large || !std::isfinite(next.peak())) continue;
    writer = std::move(trial);
    x = std::move(next);
    earlier_.push_back(x);
    const bool again = writer.counted() < end && x.dtype != DType::boolean;
    if (again && dice_.chance(taste_ == Taste::usual ? 5 : 12) && writer.may_be_output(x)) {
      writer.output(x, dice_.chance(30) ? strides(x.shape, false) : Dims{});
    }
  }
  return x;
}

Value Steps::before(Writer& writer, Value x, int count) {
  const int end = writer.counted() + count;
  const Dims shape = x.shape;
  while (writer.counted() < end) {
    Writer trial = writer;
    Value next = step(trial, dice_.pick(step_names(Taste::usual, is_integer(x.dtype))), x);
    if (trial.counted() > end || next.shape != shape || !std::isfinite(next.peak()) ||
        next.peak() > 100) {
      continue;
    }
    writer = std::move(trial);
    x = std::move(next);
  }
  return x;
}

Value Steps::step(Writer& writer, const std::string& op, const Value& x) {
  const bool integers = is_integer(x.dtype);
  if (op.ends_with("_grad")) return gradient(writer, op, x);
  if (op.starts_with("reduce_")) return reduced(writer, op, x);
  if (is_one_of(op, {"broadcast", "reshape", "transpose", "slice", "concat"})) {
    return view(writer, op, x);
  }
  if (is_one_of(op, {"add", "sub", "mul", "div", "pow", "min", "max", "mod"})) {
    return integers ? integer_binary(writer, op, x) : binary(writer, op, x);
  }
  if (op.starts_with("compare_") || is_one_of(op, {"and", "or", "not", "select"})) {
    return chosen(writer, op, x);
  }
  if (op == "clamp") {
    if (integers) return writer.clamp(x, -5, 20);
    return dice_.chance(50) ? writer.clamp(x, -1.5, 2) : writer.clamp(x, 0, 6);
  }
  if (op == "iota") return index(writer, x);
  if (op == "constant")
    return combine(writer, x, writer.constant(dice_.pick({0.5, -1.25, 3.0}), x.dtype));
  if (op == "convert") return converted(writer, x);
  return unary(writer, op, x);
}

// ---- ops of floats ----

Value Steps::positive(Writer& writer, const Value& x) {
  if (x.low >= 0.2) return x;
  if (!is_float(x.dtype)) return positive(writer, writer.convert(x, DType::f32));
  if (dice_.chance(50)) return writer.binary("max", x, writer.constant(0.25, x.dtype));
  const Value magnitude = writer.unary("abs", x);
  return writer.binary("add", magnitude, writer.constant(0.5, x.dtype));
}

Value Steps::small(Writer& writer, const Value& x, double limit) {
  if (x.peak() <= limit) return x;
  if (!is_float(x.dtype)) return small(writer, writer.convert(x, DType::f32), limit);
  switch (dice_.below(3)) {
    case 0:
      if (limit >= 1) return writer.unary("tanh", x);
      [[fallthrough]];
    case 1: {
      // A power of two, which every type holds.
      const double factor = std::exp2(std::floor(std::log2(limit / x.peak())));
      if (factor > 1e-4) return writer.binary("mul", x, writer.constant(factor, x.dtype));
      [[fallthrough]];
    }
    default:
      return writer.clamp(x, -limit, limit);
  }
}

Value Steps::unary(Writer& writer, const std::string& op, Value x) {
  const bool keeps_integers = is_one_of(op, {"neg", "abs", "sign", "relu"});
  if (is_integer(x.dtype) && !keeps_integers) x = writer.convert(x, DType::f32);
  if (is_one_of(op, {"log", "sqrt", "rsqrt", "reciprocal", "log1p"})) x = positive(writer, x);
  if (is_one_of(op, {"exp", "expm1"})) x = small(writer, x, 4);
  if (is_one_of(op, {"sin", "cos"})) x = small(writer, x, 64);
  if (op == "tan") x = small(writer, x, 1.25);
  if (op == "leaky_relu") return writer.unary(op, x, {{"slope", dice_.pick({0.1, 0.01, -0.5})}});
  if (op == "elu") return writer.unary(op, x, {{"alpha", dice_.pick({1.0, 0.3})}});
  return writer.unary(op, x);
}

Value Steps::gradient(Writer& writer, const std::string& op, const Value& x) {
  Value dy = other(writer, x);
  if (!is_float(dy.dtype)) dy = writer.convert(dy, DType::f32);
  Value at = is_float(x.dtype) ? x : writer.convert(x, DType::f32);
  if (dice_.chance(30) && dy.shape == at.shape) std::swap(dy, at);
  const DType dtype = ir::promote(dy.dtype, at.dtype);
  Json attributes = Json::object();
  if (op == "leaky_relu_grad") attributes["slope"] = 0.1;
  if (op == "elu_grad") attributes["alpha"] = 0.7;
  return writer.op(
      op, {dy, at},
      {"", dtype, broadcast_shape(dy.shape, at.shape).value(), -1.2 * dy.peak(), 1.2 * dy.peak()},
      dtype, std::move(attributes));
}

Value Steps::other(Writer& writer, const Value& x) {
  if (!earlier_.empty() && dice_.chance(25)) {
    const Value again = dice_.pick(earlier_);
    const auto both = broadcast_shape(again.shape, x.shape);
    if (both && *both == x.shape && again.dtype != DType::boolean &&
        is_float(again.dtype) == is_float(x.dtype)) {
      return again;
    }
  }
  const DType wide = is_float(x.dtype) ? DType::f32 : DType::i32;
  std::vector<DType> dtypes{x.dtype, x.dtype, wide};
  if (is_float(x.dtype)) {
    dtypes.insert(dtypes.end(), {storage_, storage_});
    if (taste_ == Taste::everything) {
      dtypes.insert(dtypes.end(), {DType::bf16, DType::f16, DType::f8e4m3, DType::f8e5m2, DType::i8,
                                   DType::u8, DType::i32, DType::i4});
    }
  } else if (taste_ == Taste::everything) {
    dtypes.insert(dtypes.end(), {DType::i8, DType::u8});
  }
  const DType dtype = dice_.pick(dtypes);
  const bool full = full_operands_ && dice_.chance(85);
  return input(writer, dtype, full ? x.shape : broadcastable(dice_, x.shape));
}

Value Steps::binary(Writer& writer, const std::string& op, const Value& x) {
  if (op == "pow") {
    Value base = positive(writer, x);
    if (base.peak() > 8) base = writer.binary("min", base, writer.constant(6, base.dtype));
    if (dice_.chance(50)) {
      const double exponent = dice_.pick({2.0, 0.5, -1.0, 3.0});
      return writer.binary(op, base, writer.constant(exponent, base.dtype));
    }
    return writer.binary(op, base, small(writer, other(writer, x), 2));
  }
  Value a = x;
  Value b = dice_.chance(12) ? writer.constant(dice_.pick({2.0, -0.75, 0.125}), x.dtype)
                             : other(writer, x);
  if (op == "div") {
    b = positive(writer, b);
  } else if (op == "mod") {
    b = positive(writer, b);
    a = small(writer, a, 64);
  } else if (op == "sub" && dice_.chance(50) && a.shape == b.shape) {
    std::swap(a, b);
  }
  const DType dtype = ir::promote(a.dtype, b.dtype);
  // Now and then the result is asked for in a wider type than the operands have.
  if (dice_.chance(8) && bit_width(dtype) == 16) return writer.binary(op, a, b, DType::f32);
  return writer.binary(op, a, b);
}

Value Steps::combine(Writer& writer, const Value& x, const Value& y) {
  const bool large = x.peak() * y.peak() > most(x.dtype);
  return writer.binary(dice_.pick<std::string>({"add", "sub", large ? "min" : "mul", "min", "max"}),
                       x, y);
}

Value Steps::converted(Writer& writer, const Value& x) {
  if (!is_float(x.dtype)) return writer.convert(x, DType::f32);
  if (taste_ == Taste::usual || dice_.chance(60)) {
    const DType to =
        x.peak() > 1e4 ? DType::f32 : dice_.pick({DType::bf16, DType::f16, DType::f32});
    return writer.convert(x, to);
  }
  // There and back: what quantisation does.
  const DType narrow = dice_.pick({DType::f8e4m3, DType::f8e5m2, DType::i8, DType::u8, DType::i4});
  return writer.convert(writer.convert(x, narrow), x.dtype);
}

// An index along an axis, compared or added.
Value Steps::index(Writer& writer, const Value& x) {
  if (x.shape.empty()) return combine(writer, x, writer.constant(1.5, x.dtype));
  const auto along = [&] {
    const std::int64_t axis = dice_.below(static_cast<std::int64_t>(x.shape.size()));
    const DType dtype = dice_.chance(50) ? DType::i32 : DType::f32;
    const auto last = static_cast<double>(x.shape[static_cast<std::size_t>(axis)]);
    return writer.op("iota", {}, {"", dtype, x.shape, 0, last}, DType::i32,
                     {{"shape", x.shape}, {"axis", axis}});
  };
  if (dice_.chance(50)) {  // as a causal mask
    const Value row = along();
    const Value column = along();
    const std::string kind = dice_.pick<std::string>({"compare_ge", "compare_lt"});
    const Value keep = writer.compare(kind, row, column);
    return writer.select(keep, x, writer.constant(dice_.chance(50) ? 0 : -2, x.dtype));
  }
  return combine(writer, x, writer.convert(along(), x.dtype));
}

// ---- predicates ----

Value Steps::predicate(Writer& writer, const std::string& op, const Value& x) {
  if (op.empty() && dice_.chance(60)) {
    return input(writer, DType::boolean, broadcastable(dice_, x.shape));
  }
  const std::string name =
      op.empty() ? dice_.pick<std::string>({"compare_lt", "compare_ge", "compare_ne"}) : op;
  return writer.compare(name, x, other(writer, x));
}

Value Steps::chosen(Writer& writer, const std::string& op, const Value& x) {
  Value keep;
  if (op == "and" || op == "or") {
    const Value a = predicate(writer, "", x);
    const Value b = predicate(writer, "", x);
    keep =
        writer.op(op, {a, b}, {"", DType::boolean, broadcast_shape(a.shape, b.shape).value(), 0, 1},
                  DType::boolean);
  } else if (op == "not") {
    const Value a = predicate(writer, "", x);
    keep = writer.op(op, {a}, {"", DType::boolean, a.shape, 0, 1}, DType::boolean);
  } else {
    keep = predicate(writer, op == "select" ? "" : op, x);
  }
  if (op != "select" && dice_.chance(20) && keep.shape == x.shape) {
    return writer.binary("mul", x, writer.convert(keep, x.dtype));
  }
  if (op != "select" && dice_.chance(10) && taste_ == Taste::everything) writer.output(keep);
  const Value otherwise =
      dice_.chance(40) ? writer.constant(dice_.chance(50) ? 0 : -1, x.dtype) : other(writer, x);
  return dice_.chance(50) ? writer.select(keep, x, otherwise) : writer.select(keep, otherwise, x);
}

// ---- ops of integers ----

Value Steps::integer_binary(Writer& writer, const std::string& op, const Value& x) {
  // Narrow integers would wrap; what is above 2^24 a float does not hold.
  Value a = bit_width(x.dtype) < 32 ? writer.convert(x, DType::i32) : x;
  Value b = other(writer, a);
  if (op == "div" || op == "mod") {
    b = writer.binary("max", b, writer.constant(3, b.dtype));
  } else if (op == "mul" && a.peak() * b.peak() > 1e6) {
    return writer.binary("add", a, b);
  }
  return writer.binary(op, a, b);
}

// ---- inputs ----

Value Steps::input(Writer& writer, DType dtype, const Dims& shape) {
  return writer.input(
      dtype, shape,
      dice_.chance(taste_ == Taste::usual ? 12 : 30) ? strides(shape, dice_.chance(40)) : Dims{});
}

Dims Steps::strides(const Dims& shape, bool may_repeat) {
  const std::size_t r = shape.size();
  if (r < 2) return contiguous_strides(shape);
  std::vector<std::size_t> order(r);  // the innermost last
  for (std::size_t i = 0; i < r; ++i) order[i] = i;
  const std::int64_t kind = dice_.below(4);
  if (kind == 0) std::swap(order[r - 1], order[r - 2]);
  if (kind == 1 && r > 2 && taste_ == Taste::everything) {
    std::swap(order[0], order[static_cast<std::size_t>(1 + dice_.below(2))]);
  }
  const bool padded = kind == 2;
  Dims result(r, 0);
  std::int64_t step = 1;
  for (std::size_t i = r; i-- > 0;) {
    const std::size_t axis = order[i];
    result[axis] = step;
    std::int64_t length = std::max<std::int64_t>(shape[axis], 1);
    if (padded && i == r - 1)
      length += dice_.pick<std::int64_t>({8, 16, taste_ == Taste::usual ? 32 : 3});
    if (padded && i == r - 2 && r > 2 && dice_.chance(30)) length += 2;
    step *= length;
  }
  if (may_repeat) {
    for (std::size_t axis = 0; axis < r; ++axis) {
      if (dice_.chance(35)) result[axis] = 0;
    }
  }
  return result;
}

}  // namespace lawson::cases
