// The ops of traced functions, under the names of the specs (docs/spec.md says what each computes).
// Part of lawson.hpp. Where an op takes a dtype, LAWSON_DTYPE_UNSET is what inference gives.
#ifndef LAWSON_OPS_HPP_
#define LAWSON_OPS_HPP_

#include <lawson/trace.hpp>

namespace lawson {

namespace detail {
// Axes counted from the front; the error names the op and its place.
inline Dims counted(const char* op, const Place& place, std::size_t rank, const Dims& given) {
  try {
    return counted(rank, given);
  } catch (const Error& error) {
    throw Error(error.status(), place.text() + ": " + op + ": " + error.what());
  }
}
inline Dims axes_of(const char* op, const Place& place, std::size_t rank, const Dims& given) {
  return axes_of(rank, counted(op, place, rank, given));
}
}  // namespace detail

// [.., M, K] x [.., K, N] -> [.., M, N]; accumulates in f32, or in i32 for integers.
inline Tensor matmul(Operand a, Operand b, lawson_dtype dtype = LAWSON_DTYPE_UNSET) {
  return detail::call<2>("matmul", {a, b}, detail::Attributes{}.dtype(dtype));
}

struct ScaledMatmulOptions {
  std::int64_t block = 32;  // neighbours along K that share a scale
  bool swizzled = false;    // scales in the order that tensor cores read
  lawson_dtype dtype = LAWSON_DTYPE_UNSET;
};
inline Tensor scaled_matmul(Operand a, Operand b, Operand a_scale, Operand b_scale,
                            const ScaledMatmulOptions& options = {}) {
  return detail::call<4>("scaled_matmul", {a, b, a_scale, b_scale},
                         detail::Attributes{}
                             .integer("block", options.block)
                             .flag("swizzled", options.swizzled)
                             .dtype(options.dtype));
}

inline Tensor convert(Operand x, lawson_dtype dtype) {
  return detail::call<1>("convert", {x}, detail::Attributes{}.dtype(dtype));
}

#define LAWSON_UNARY_(name)             \
  inline Tensor name(Operand x) {       \
    return detail::call<1>(#name, {x}); \
  }
LAWSON_UNARY_(neg)
LAWSON_UNARY_(abs)
LAWSON_UNARY_(exp)
LAWSON_UNARY_(log)
LAWSON_UNARY_(log1p)
LAWSON_UNARY_(expm1)
LAWSON_UNARY_(sqrt)
LAWSON_UNARY_(rsqrt)
LAWSON_UNARY_(reciprocal)
LAWSON_UNARY_(sin)
LAWSON_UNARY_(cos)
LAWSON_UNARY_(tan)
LAWSON_UNARY_(tanh)
LAWSON_UNARY_(erf)
LAWSON_UNARY_(ceil)
LAWSON_UNARY_(floor)
LAWSON_UNARY_(round)
LAWSON_UNARY_(sign)
LAWSON_UNARY_(sigmoid)
LAWSON_UNARY_(relu)
LAWSON_UNARY_(relu6)
LAWSON_UNARY_(softplus)
LAWSON_UNARY_(silu)
LAWSON_UNARY_(gelu)
LAWSON_UNARY_(gelu_tanh)
#undef LAWSON_UNARY_

inline Tensor leaky_relu(Operand x, double slope = 0.01) {
  return detail::call<1>("leaky_relu", {x}, detail::Attributes{}.number("slope", slope));
}
inline Tensor elu(Operand x, double alpha = 1) {
  return detail::call<1>("elu", {x}, detail::Attributes{}.number("alpha", alpha));
}

#define LAWSON_BINARY_(name)                 \
  inline Tensor name(Operand a, Operand b) { \
    return detail::call<2>(#name, {a, b});   \
  }
LAWSON_BINARY_(add)
LAWSON_BINARY_(sub)
LAWSON_BINARY_(mul)
LAWSON_BINARY_(div)
LAWSON_BINARY_(pow)
LAWSON_BINARY_(min)
LAWSON_BINARY_(max)
LAWSON_BINARY_(mod)
LAWSON_BINARY_(compare_eq)
LAWSON_BINARY_(compare_ne)
LAWSON_BINARY_(compare_lt)
LAWSON_BINARY_(compare_le)
LAWSON_BINARY_(compare_gt)
LAWSON_BINARY_(compare_ge)
// [dy, x]: dy times the derivative of the activation at x.
LAWSON_BINARY_(tanh_grad)
LAWSON_BINARY_(sigmoid_grad)
LAWSON_BINARY_(relu_grad)
LAWSON_BINARY_(relu6_grad)
LAWSON_BINARY_(softplus_grad)
LAWSON_BINARY_(silu_grad)
LAWSON_BINARY_(gelu_grad)
LAWSON_BINARY_(gelu_tanh_grad)
#undef LAWSON_BINARY_

inline Tensor leaky_relu_grad(Operand dy, Operand x, double slope = 0.01) {
  return detail::call<2>("leaky_relu_grad", {dy, x}, detail::Attributes{}.number("slope", slope));
}
inline Tensor elu_grad(Operand dy, Operand x, double alpha = 1) {
  return detail::call<2>("elu_grad", {dy, x}, detail::Attributes{}.number("alpha", alpha));
}

inline Tensor logical_and(Operand a, Operand b) {
  return detail::call<2>("and", {a, b});
}
inline Tensor logical_or(Operand a, Operand b) {
  return detail::call<2>("or", {a, b});
}
inline Tensor logical_not(Operand a) {
  return detail::call<1>("not", {a});
}

// predicate ? a : b. Numbers take the dtype of the other of a and b.
inline Tensor select(Operand predicate, Operand a, Operand b) {
  detail::Tracer& tracer = detail::Tracer::current("select");
  lawson_dtype like = tracer.dtype_of(a, "select");
  if (like == LAWSON_DTYPE_UNSET) like = tracer.dtype_of(b, "select");
  const std::array<std::int32_t, 3> inputs{tracer.operand(predicate, LAWSON_DTYPE_BOOL, "select"),
                                           tracer.operand(a, like, "select"),
                                           tracer.operand(b, like, "select")};
  return tracer.result(tracer.add({"select", inputs, {}, 1, tracer.place(predicate)}));
}

inline Tensor clamp(Operand x, double min, double max) {
  return detail::call<1>("clamp", {x}, detail::Attributes{}.number("min", min).number("max", max));
}

// The index along `axis`.
inline Tensor iota(const Dims& shape, std::int64_t axis, lawson_dtype dtype = LAWSON_DTYPE_I32,
                   const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  detail::Tracer& tracer = detail::Tracer::current("iota");
  detail::Attributes attributes;
  attributes.integers("shape", shape)
      .integer("axis", detail::counted("iota", {file, line}, shape.size(), {axis})[0])
      .dtype(dtype);
  return tracer.result(tracer.add({"iota", {}, attributes.list(), 1, {file, line}}));
}

// A scalar; an integer is less than 2^53. Beside a tensor a plain number does as well.
template <typename T>
requires(std::is_arithmetic_v<T>) inline Tensor
    constant(T value, lawson_dtype dtype = LAWSON_DTYPE_F32, const char* file = __builtin_FILE(),
             int line = __builtin_LINE()) {
  detail::Tracer& tracer = detail::Tracer::current("constant");
  const auto number = static_cast<double>(value);
  if constexpr (std::is_integral_v<T>) {
    if (std::fabs(number) >= detail::kExactIntegers) {
      throw Error(LAWSON_INVALID_ARGUMENT, detail::Place{file, line}.text() +
                                               ": constant: " + std::to_string(value) +
                                               " is not allowed; an integer is less than 2^53");
    }
  }
  detail::Attributes attributes;
  attributes.number("value", number).dtype(dtype);
  return tracer.result(tracer.add({"constant", {}, attributes.list(), 1, {file, line}}));
}

inline Tensor broadcast(Operand x, const Dims& shape) {
  return detail::call<1>("broadcast", {x}, detail::Attributes{}.integers("shape", shape));
}
inline Tensor reshape(Operand x, const Dims& shape) {
  return detail::call<1>("reshape", {x}, detail::Attributes{}.integers("shape", shape));
}
// Dim i of the result is dim perm[i] of x.
inline Tensor transpose(Operand x, const Dims& perm) {
  const Dims axes = detail::counted("transpose", detail::Tracer::place(x), perm.size(), perm);
  return detail::call<1>("transpose", {x}, detail::Attributes{}.integers("perm", axes));
}
// `stride` empty: 1.
inline Tensor slice(Operand x, const Dims& start, const Dims& limit, const Dims& stride = {}) {
  detail::Attributes attributes;
  attributes.integers("start", start).integers("limit", limit);
  if (!stride.empty()) attributes.integers("stride", stride);
  return detail::call<1>("slice", {x}, attributes);
}

inline Tensor concat(std::span<const Tensor> list, std::int64_t axis,
                     const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  detail::Tracer& tracer = detail::Tracer::current("concat");
  std::vector<std::int32_t> inputs;
  for (const Tensor& tensor : list) inputs.push_back(tracer.index_of(tensor, "concat"));
  if (!list.empty()) axis = detail::counted("concat", {file, line}, list[0].rank(), {axis})[0];
  detail::Attributes attributes;
  attributes.integer("axis", axis);
  return tracer.result(tracer.add({"concat", inputs, attributes.list(), 1, {file, line}}));
}
inline Tensor concat(std::initializer_list<Tensor> list, std::int64_t axis,
                     const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return concat(std::span{list.begin(), list.size()}, axis, file, line);
}

namespace detail {
// Over all axes where none is named.
inline Tensor reduce(const char* op, const Operand& x, const Dims& given, bool keepdims,
                     lawson_dtype dtype) {
  Tracer& tracer = Tracer::current(op);
  const std::array<std::int32_t, 1> inputs{tracer.operand(x, LAWSON_DTYPE_UNSET, op)};
  const std::size_t rank = tracer.traced(inputs[0]).shape.size();
  constexpr std::array<std::int64_t, LAWSON_MAX_RANK> kAll{0, 1, 2, 3, 4, 5, 6, 7};
  const Dims axes = given.empty() ? Dims{std::span{kAll}.first(rank)}
                                  : axes_of(op, Tracer::place(x), rank, given);
  Attributes attributes;
  attributes.integers("axes", axes).flag("keepdims", keepdims).dtype(dtype);
  return tracer.result(tracer.add({op, inputs, attributes.list(), 1, Tracer::place(x)}));
}
}  // namespace detail

#define LAWSON_REDUCE_(name)                                                  \
  inline Tensor name(Operand x, const Dims& axes = {}, bool keepdims = false, \
                     lawson_dtype dtype = LAWSON_DTYPE_UNSET) {               \
    return detail::reduce(#name, x, axes, keepdims, dtype);                   \
  }
LAWSON_REDUCE_(reduce_sum)
LAWSON_REDUCE_(reduce_max)
LAWSON_REDUCE_(reduce_min)
LAWSON_REDUCE_(reduce_mean)
LAWSON_REDUCE_(reduce_prod)
LAWSON_REDUCE_(reduce_amax)
LAWSON_REDUCE_(reduce_norm1)
LAWSON_REDUCE_(reduce_norm2)
#undef LAWSON_REDUCE_

// An attribute for op().
class Attribute {
 public:
  Attribute(const char* name, std::int64_t value) : name_{name}, integer_{value} {}
  Attribute(const char* name, int value) : Attribute{name, std::int64_t{value}} {}
  Attribute(const char* name, double value)
      : name_{name}, type_{LAWSON_ATTRIBUTE_NUMBER}, number_{value} {}
  Attribute(const char* name, bool value)
      : name_{name}, type_{LAWSON_ATTRIBUTE_FLAG}, integer_{value ? 1 : 0} {}
  Attribute(const char* name, const Dims& list)
      : name_{name},
        type_{LAWSON_ATTRIBUTE_INTEGERS},
        integer_{static_cast<std::int64_t>(list.size())},
        list_{list} {}
  Attribute(const char* name, const char* text)
      : name_{name}, type_{LAWSON_ATTRIBUTE_TEXT}, text_{text} {}
  // The dtype of the first result.
  Attribute(lawson_dtype dtype) : name_{"dtype"}, type_{LAWSON_ATTRIBUTE_DTYPE}, integer_{dtype} {}

  // Refers to this object.
  lawson_attribute c() const { return {name_, type_, integer_, number_, list_.data(), text_}; }

 private:
  const char* name_;
  std::int32_t type_ = LAWSON_ATTRIBUTE_INTEGER;
  std::int64_t integer_ = 0;
  double number_ = 0;
  Dims list_;
  const char* text_ = nullptr;
};

// Any op by its name, with its operands in slot order (Tensor{} where an optional one is absent).
// `results`: bit i asks for result i. What was not asked for is absent.
inline std::vector<Tensor> ops(const char* name, std::span<const Tensor> operands,
                               std::span<const Attribute> attributes = {},
                               std::uint32_t results = 1, const char* file = __builtin_FILE(),
                               int line = __builtin_LINE()) {
  detail::Tracer& tracer = detail::Tracer::current(name);
  std::vector<std::int32_t> inputs;
  for (const Tensor& tensor : operands) inputs.push_back(tracer.index_of(tensor, name));
  std::vector<lawson_attribute> given;
  for (const Attribute& attribute : attributes) given.push_back(attribute.c());
  std::int32_t next = tracer.add({name, inputs, given, results, {file, line}});
  std::vector<Tensor> made(static_cast<std::size_t>(std::bit_width(results)));
  for (std::size_t i = 0; i < made.size(); ++i) {
    if ((results >> i & 1U) != 0) made[i] = tracer.result(next++);
  }
  return made;
}
inline Tensor op(const char* name, std::initializer_list<Tensor> operands,
                 std::initializer_list<Attribute> attributes = {},
                 const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return ops(name, {operands.begin(), operands.size()}, {attributes.begin(), attributes.size()}, 1,
             file, line)
      .front();
}

// What a norm gives; mean and inv_std where they were asked for (an rms_norm has no mean).
struct Norm {
  Tensor y, mean, inv_std;
};

struct NormOptions {
  Dims axes{-1};
  double eps = 1e-5;
  bool statistics = false;  // give mean and inv_std, which the backward op takes
};

// [x, scale, bias?]: normed over `axes`; bias may be Tensor{}.
inline Norm layer_norm(Tensor x, Tensor scale, Tensor bias = {}, const NormOptions& options = {},
                       const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  const std::array<Tensor, 3> operands{x, scale, bias};
  const std::array<Attribute, 2> attributes{
      Attribute{"axes", detail::axes_of("layer_norm", {file, line}, x.rank(), options.axes)},
      Attribute{"eps", options.eps}};
  auto made = ops("layer_norm", operands, attributes, options.statistics ? 7U : 1U, file, line);
  made.resize(3);
  return {made[0], made[1], made[2]};
}
inline Norm rms_norm(Tensor x, Tensor scale, Tensor bias = {}, const NormOptions& options = {},
                     const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  const std::array<Tensor, 3> operands{x, scale, bias};
  const std::array<Attribute, 2> attributes{
      Attribute{"axes", detail::axes_of("rms_norm", {file, line}, x.rank(), options.axes)},
      Attribute{"eps", options.eps}};
  auto made = ops("rms_norm", operands, attributes, options.statistics ? 5U : 1U, file, line);
  made.resize(3);
  return {made[0], made[1], made[2]};
}

struct NormGradients {
  Tensor dx, dscale, dbias;
};

// Which gradients are wanted: bit 0 dx, bit 1 dscale, bit 2 dbias.
inline NormGradients layer_norm_backward(Tensor dy, Tensor x, Tensor scale, Tensor mean,
                                         Tensor inv_std, const Dims& axes = {-1},
                                         std::uint32_t wanted = 7,
                                         const char* file = __builtin_FILE(),
                                         int line = __builtin_LINE()) {
  const std::array<Tensor, 5> operands{dy, x, scale, mean, inv_std};
  const std::array<Attribute, 1> attributes{
      Attribute{"axes", detail::axes_of("layer_norm_backward", {file, line}, x.rank(), axes)}};
  auto made = ops("layer_norm_backward", operands, attributes, wanted, file, line);
  made.resize(3);
  return {made[0], made[1], made[2]};
}
inline NormGradients rms_norm_backward(Tensor dy, Tensor x, Tensor scale, Tensor inv_std,
                                       const Dims& axes = {-1}, std::uint32_t wanted = 3,
                                       const char* file = __builtin_FILE(),
                                       int line = __builtin_LINE()) {
  const std::array<Tensor, 5> operands{dy, x, scale, Tensor{}, inv_std};
  const std::array<Attribute, 1> attributes{
      Attribute{"axes", detail::axes_of("rms_norm_backward", {file, line}, x.rank(), axes)}};
  auto made = ops("rms_norm_backward", operands, attributes, wanted, file, line);
  made.resize(3);
  return {made[0], made[1], made[2]};
}

inline Tensor operator+(Operand a, Operand b) {
  return add(a, b);
}
inline Tensor operator-(Operand a, Operand b) {
  return sub(a, b);
}
inline Tensor operator*(Operand a, Operand b) {
  return mul(a, b);
}
inline Tensor operator/(Operand a, Operand b) {
  return div(a, b);
}
inline Tensor operator%(Operand a, Operand b) {
  return mod(a, b);
}
inline Tensor operator-(Operand a) {
  return neg(a);
}
inline Tensor operator==(Operand a, Operand b) {
  return compare_eq(a, b);
}
inline Tensor operator!=(Operand a, Operand b) {
  return compare_ne(a, b);
}
inline Tensor operator<(Operand a, Operand b) {
  return compare_lt(a, b);
}
inline Tensor operator<=(Operand a, Operand b) {
  return compare_le(a, b);
}
inline Tensor operator>(Operand a, Operand b) {
  return compare_gt(a, b);
}
inline Tensor operator>=(Operand a, Operand b) {
  return compare_ge(a, b);
}
inline Tensor operator&(Operand a, Operand b) {
  return logical_and(a, b);
}
inline Tensor operator|(Operand a, Operand b) {
  return logical_or(a, b);
}
inline Tensor operator!(Operand a) {
  return logical_not(a);
}

}  // namespace lawson

#endif  // LAWSON_OPS_HPP_
