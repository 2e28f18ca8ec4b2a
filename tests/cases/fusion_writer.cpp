#include "cases/fusion_writer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "ir/infer.h"

namespace lawson::cases {
namespace {

struct Range {
  double low, high;
};

Range hull(std::initializer_list<double> points) {
  return {std::min(points), std::max(points)};
}

// Where f of most elements lies; what is not listed stays in the operand's range.
Range unary_range(std::string_view f, const Value& x, double parameter) {
  const auto both = [&](double (*of)(double)) { return Range{of(x.low), of(x.high)}; };
  if (f == "neg") return {-x.high, -x.low};
  if (f == "abs") return {x.low > 0 ? x.low : 0, x.peak()};
  if (f == "exp") return both(std::exp);
  if (f == "expm1") return both(std::expm1);
  if (f == "log") return both(std::log);
  if (f == "log1p") return both(std::log1p);
  if (f == "sqrt") return both(std::sqrt);
  if (f == "rsqrt") return {1 / std::sqrt(x.high), 1 / std::sqrt(x.low)};
  if (f == "reciprocal") return {1 / x.high, 1 / x.low};
  if (f == "sin" || f == "cos" || f == "erf" || f == "tanh" || f == "sign") return {-1, 1};
  if (f == "tan") return {-3.1, 3.1};
  if (f == "ceil" || f == "floor" || f == "round") return {x.low - 1, x.high + 1};
  if (f == "sigmoid") return both([](double t) { return 1 / (1 + std::exp(-t)); });
  if (f == "relu") return {std::max(x.low, 0.0), std::max(x.high, 0.0)};
  if (f == "relu6") return {std::clamp(x.low, 0.0, 6.0), std::clamp(x.high, 0.0, 6.0)};
  if (f == "leaky_relu") return hull({x.low, x.high, parameter * x.low, 0});
  if (f == "elu") return hull({x.high, 0, -std::fabs(parameter)});
  if (f == "softplus") return both([](double t) { return t > 30 ? t : std::log1p(std::exp(t)); });
  if (f == "silu" || f == "gelu" || f == "gelu_tanh") return {-0.3, std::max(x.high, 0.0)};
  return {x.low, x.high};
}

Range binary_range(std::string_view f, const Value& a, const Value& b) {
  if (f == "add") return {a.low + b.low, a.high + b.high};
  if (f == "sub") return {a.low - b.high, a.high - b.low};
  if (f == "mul") return hull({a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high});
  if (f == "div") return hull({a.low / b.low, a.low / b.high, a.high / b.low, a.high / b.high});
  if (f == "min") return {std::min(a.low, b.low), std::min(a.high, b.high)};
  if (f == "max") return {std::max(a.low, b.low), std::max(a.high, b.high)};
  if (f == "mod") return hull({0, a.low, a.high, b.peak(), -b.peak()});
  return hull({std::pow(a.low, b.low), std::pow(a.low, b.high), std::pow(a.high, b.low),
               std::pow(a.high, b.high)});
}

}  // namespace

double Value::peak() const {
  return std::max(std::fabs(low), std::fabs(high));
}

std::int64_t Value::count() const {
  return element_count(shape).value_or(0);
}

bool is_counted(std::string_view op) {
  return op != "constant" && op != "convert" && op != "matmul" && op != "scaled_matmul";
}

Dims reduced_shape(const Dims& shape, const Dims& axes, bool keepdims) {
  Dims result;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    const bool reduced =
        std::find(axes.begin(), axes.end(), static_cast<std::int64_t>(i)) != axes.end();
    if (!reduced) result.push_back(shape[i]);
    if (reduced && keepdims) result.push_back(1);
  }
  return result;
}

Writer::Writer(const std::string& name)
    : document_{{"lawson", 1},          {"kind", "graph"},
                {"name", name},         {"inputs", Json::array()},
                {"ops", Json::array()}, {"outputs", Json::array()}} {}

Value Writer::input(DType dtype, const Dims& shape, const Dims& strides) {
  Value value{fmt::format("x{}", count_++), dtype, shape};
  if (dtype == DType::f8e8m0) value.low = 0.25;  // what generated inputs of that type hold
  if (is_integer(dtype)) {
    value.low = dtype == DType::u8 ? 0 : -8;
    value.high = dtype == DType::u8 ? 15 : 7;
  }
  if (dtype == DType::boolean) value.low = 0, value.high = 1;
  Json item{{"name", value.name}, {"dtype", to_string(dtype)}, {"shape", shape}};
  if (!strides.empty()) item["strides"] = strides;
  document_["inputs"].push_back(std::move(item));
  return value;
}

void Writer::given(const Value& input, Json values) {
  for (Json& item : document_["inputs"]) {
    if (item["name"] == input.name) item["values"] = std::move(values);
  }
}

Value Writer::constant(double number, DType dtype) {
  return op("constant", {}, {"", dtype, {}, number, number}, DType::f32, {{"value", number}});
}

Value Writer::op(std::string_view op, const std::vector<Value>& in, Value result, DType inferred,
                 Json attributes) {
  result.name = fresh();
  Json item = std::move(attributes);
  item["op"] = op;
  item["in"] = Json::array();
  for (const Value& operand : in) item["in"].push_back(operand.name);
  item["out"] = result.name;
  if (result.dtype != inferred || op == "convert") item["dtype"] = to_string(result.dtype);
  document_["ops"].push_back(std::move(item));
  counted_ += is_counted(op) ? 1 : 0;
  return result;
}

void Writer::named(std::string_view op, Json in, Json out, Json attributes) {
  attributes["op"] = op;
  attributes["in"] = std::move(in);
  attributes["out"] = std::move(out);
  document_["ops"].push_back(std::move(attributes));
  counted_ += is_counted(op) ? 1 : 0;
}

Value Writer::unary(std::string_view name, const Value& x, Json attributes) {
  double parameter = 0;
  for (const char* field : {"slope", "alpha"}) parameter = attributes.value(field, parameter);
  const Range range = unary_range(name, x, parameter);
  return op(name, {x}, {"", x.dtype, x.shape, range.low, range.high}, x.dtype,
            std::move(attributes));
}

Value Writer::binary(std::string_view name, const Value& a, const Value& b,
                     std::optional<DType> dtype) {
  const DType inferred = ir::promote(a.dtype, b.dtype);
  const Range range = binary_range(name, a, b);
  return op(name, {a, b},
            {"", dtype.value_or(inferred), broadcast_shape(a.shape, b.shape).value(), range.low,
             range.high},
            inferred);
}

Value Writer::clamp(const Value& x, double low, double high) {
  return op("clamp", {x}, {"", x.dtype, x.shape, std::max(x.low, low), std::min(x.high, high)},
            x.dtype, {{"min", low}, {"max", high}});
}

Value Writer::convert(const Value& x, DType dtype) {
  if (x.dtype == dtype) return x;
  Value result = x;
  result.dtype = dtype;
  return op("convert", {x}, std::move(result), dtype);
}

Value Writer::compare(std::string_view name, const Value& a, const Value& b) {
  return op(name, {a, b}, {"", DType::boolean, broadcast_shape(a.shape, b.shape).value(), 0, 1},
            DType::boolean);
}

Value Writer::select(const Value& predicate, const Value& a, const Value& b) {
  const DType dtype = ir::promote(a.dtype, b.dtype);
  const Dims both = broadcast_shape(a.shape, b.shape).value();
  return op("select", {predicate, a, b},
            {"", dtype, broadcast_shape(predicate.shape, both).value(), std::min(a.low, b.low),
             std::max(a.high, b.high)},
            dtype);
}

Value Writer::reduce(std::string_view kind, const Value& x, const Dims& axes, bool keepdims,
                     std::optional<DType> dtype) {
  Value result{"", dtype.value_or(x.dtype), reduced_shape(x.shape, axes, keepdims), x.low, x.high};
  const double n = static_cast<double>(x.count()) /
                   static_cast<double>(std::max<std::int64_t>(result.count(), 1));
  if (kind == "sum") {
    result.low = x.low > 0 ? x.low : n * x.low;
    result.high = n * std::max(x.high, 0.0);
  } else if (kind == "norm1" || kind == "norm2") {
    result.low = 0;
    result.high = kind == "norm1" ? n * x.peak() : std::sqrt(n) * x.peak();
  } else if (kind == "amax") {
    result.low = 0;
    result.high = x.peak();
  } else if (kind == "prod") {
    result.high = std::pow(std::max(x.peak(), 1.0), std::min(n, 100.0));
    result.low = x.low > 0 ? 0 : -result.high;
  }
  return op(fmt::format("reduce_{}", kind), {x}, std::move(result), x.dtype,
            {{"axes", axes}, {"keepdims", keepdims}});
}

Value Writer::matmul(const Value& a, const Value& b, std::optional<DType> dtype) {
  const auto batch = [](const Dims& shape) { return Dims(shape.begin(), shape.end() - 2); };
  Dims shape = broadcast_shape(batch(a.shape), batch(b.shape)).value();
  shape.push_back(a.shape[a.shape.size() - 2]);
  shape.push_back(b.shape.back());
  const DType inferred = is_float(a.dtype) ? ir::promote(a.dtype, b.dtype) : DType::i32;
  // Four deviations of a sum of independent products of half of the peaks.
  const double size = std::sqrt(static_cast<double>(a.shape.back())) * a.peak() * b.peak();
  const bool positive = a.low >= 0 && b.low >= 0;
  return op("matmul", {a, b},
            {"", dtype.value_or(inferred), shape, positive ? 0 : -size, positive ? 2 * size : size},
            inferred);
}

Value Writer::reshape(const Value& x, const Dims& shape) {
  return op("reshape", {x}, {"", x.dtype, shape, x.low, x.high}, x.dtype, {{"shape", shape}});
}

Value Writer::transpose(const Value& x, const Dims& perm) {
  Value result = x;
  for (std::size_t i = 0; i < perm.size(); ++i) {
    result.shape[i] = x.shape[static_cast<std::size_t>(perm[i])];
  }
  return op("transpose", {x}, std::move(result), x.dtype, {{"perm", perm}});
}

void Writer::output(const Value& x, const Dims& strides, int alignment) {
  Json item{{"name", x.name}};
  if (!strides.empty()) item["strides"] = strides;
  if (alignment != 16) item["alignment"] = alignment;
  document_["outputs"].push_back(std::move(item));
}

bool Writer::may_be_output(const Value& x) const {
  const auto is_named = [&](const Json& item) { return item["name"] == x.name; };
  return std::none_of(document_["inputs"].begin(), document_["inputs"].end(), is_named) &&
         std::none_of(document_["outputs"].begin(), document_["outputs"].end(), is_named);
}

}  // namespace lawson::cases
