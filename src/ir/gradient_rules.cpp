// What each op adds to the cotangents of its operands.
#include <algorithm>
#include <map>
#include <numbers>
#include <numeric>

#include "ir/gradient_tape.h"
#include "ir/op_text.h"

namespace lawson::ir {
namespace {

class Rules {
 public:
  Rules(Tape& tape, const Node& node)
      : tape_{tape}, node_{node}, dy_{&tape, tape.cotangent(node.outputs[0])} {}

  void unary(const Unary& op) {
    const Term x = in(0);
    switch (op.kind) {
      case UnaryKind::neg:
        return add(0, -dy_);
      case UnaryKind::abs:
        return add(0, dy_ * apply(UnaryKind::sign, x));
      case UnaryKind::exp:
      case UnaryKind::expm1:
        return add(0, dy_ * apply(UnaryKind::exp, x));
      case UnaryKind::log:
        return add(0, dy_ / x);
      case UnaryKind::log1p:
        return add(0, dy_ / (x + 1));
      case UnaryKind::sqrt:
        return add(0, 0.5 * (dy_ * apply(UnaryKind::rsqrt, x)));
      case UnaryKind::rsqrt:
        return add(0, -0.5 * (dy_ * apply(UnaryKind::rsqrt, x) / x));
      case UnaryKind::reciprocal: {
        const Term y = apply(UnaryKind::reciprocal, x);
        return add(0, -(dy_ * y * y));
      }
      case UnaryKind::sin:
        return add(0, dy_ * apply(UnaryKind::cos, x));
      case UnaryKind::cos:
        return add(0, -(dy_ * apply(UnaryKind::sin, x)));
      case UnaryKind::tan: {
        const Term y = apply(UnaryKind::tan, x);
        return add(0, dy_ * (y * y + 1));
      }
      case UnaryKind::erf:
        return add(0, 2 * std::numbers::inv_sqrtpi * (dy_ * apply(UnaryKind::exp, -(x * x))));
      case UnaryKind::ceil:
      case UnaryKind::floor:
      case UnaryKind::round:
      case UnaryKind::sign:
        return;  // constant wherever it has a derivative
      default:
        return add(0, term(UnaryGrad{op.kind, op.parameter}, {dy_.id, x.id}));
    }
  }

  // dy * f'(x) in both of its operands.
  void unary_grad(const UnaryGrad& op) {
    add(0, term(op, {dy_.id, in(1).id}));
    if (!tape_.wanted(node_.inputs[1])) return;
    const Term x = in(1);
    const Term slope = dy_ * in(0);
    const auto of_sigmoid = [&](Term argument, auto formula) {
      const Term s = apply(UnaryKind::sigmoid, argument);
      return slope * (s * (1 - s)) * formula(1 - 2 * s);
    };
    switch (op.kind) {
      case UnaryKind::tanh: {
        const Term y = apply(UnaryKind::tanh, x);
        return add(1, -2 * (slope * y * (1 - y * y)));
      }
      case UnaryKind::sigmoid:
        return add(1, of_sigmoid(x, [](Term fall) { return fall; }));
      case UnaryKind::softplus: {
        const Term s = apply(UnaryKind::sigmoid, x);
        return add(1, slope * (s * (1 - s)));
      }
      case UnaryKind::silu:
        return add(1, of_sigmoid(x, [&](Term fall) { return x * fall + 2; }));
      case UnaryKind::elu: {
        const Term curved = op.parameter * (slope * apply(UnaryKind::exp, x));
        return add(1, select(compare(CompareKind::lt, x, 0.0), curved, 0.0));
      }
      case UnaryKind::gelu: {
        constexpr double kDensity = std::numbers::inv_sqrtpi / std::numbers::sqrt2;
        const Term density = kDensity * apply(UnaryKind::exp, -0.5 * (x * x));
        return add(1, slope * density * (2 - x * x));
      }
      case UnaryKind::gelu_tanh: {  // x * sigmoid(u), u a polynomial of x
        constexpr double kLinear =
            2 * std::numbers::sqrt2 * std::numbers::inv_sqrtpi;  // 2 * sqrt(2 / pi)
        constexpr double kCubic = 0.044715;
        const Term square = x * x;
        const Term u = kLinear * (x * (kCubic * square + 1));
        const Term du = kLinear * (3 * kCubic * square + 1);
        const Term ddu = 6 * kCubic * kLinear * x;
        return add(1,
                   of_sigmoid(u, [&](Term fall) { return 2 * du + x * (fall * du * du + ddu); }));
      }
      default:
        return;  // relu, relu6 and leaky_relu are straight wherever they have a derivative
    }
  }

  void binary(const Binary& op) {
    const Term a = in(0);
    const Term b = in(1);
    switch (op.kind) {
      case BinaryKind::add:
        add(0, dy_);
        return add(1, dy_);
      case BinaryKind::sub:
        add(0, dy_);
        return add(1, -dy_);
      case BinaryKind::mul:
        add(0, dy_ * b);
        return add(1, dy_ * a);
      case BinaryKind::div:
        add(0, dy_ / b);
        return add(1, -(dy_ * a / (b * b)));
      case BinaryKind::pow: {
        // Exponents of 0 and bases of 0 are replaced where 0 * infinity would come of them.
        const Term less = select(compare(CompareKind::eq, b, 0.0), 1.0, b + -1);
        add(0, dy_ * b * pow(a, less));
        const Term base = select(compare(CompareKind::eq, a, 0.0), 1.0, a);
        return add(1, dy_ * pow(a, b) * apply(UnaryKind::log, base));
      }
      case BinaryKind::min:
      case BinaryKind::max: {
        const bool smaller = op.kind == BinaryKind::min;
        const Term tie = select(compare(CompareKind::eq, a, b), 0.5 * dy_, 0.0);
        for (const std::size_t side : {0U, 1U}) {
          const bool less = smaller == (side == 0);
          const CompareKind wins = less ? CompareKind::lt : CompareKind::gt;
          add(side, select(compare(wins, a, b), dy_, tie));
        }
        return;
      }
      case BinaryKind::mod: {
        add(0, dy_);
        const Term quotient = apply(UnaryKind::round, (a - term(op, {a.id, b.id})) / b);
        return add(1, -(dy_ * quotient));
      }
    }
  }

  void select_between() {
    const Term predicate = in(0);
    add(1, select(predicate, dy_, 0.0));
    add(2, select(predicate, 0.0, dy_));
  }

  void clamp(const Clamp& op) {
    const Term x = in(0);
    const Term inside =
        both(compare(CompareKind::ge, x, op.min), compare(CompareKind::le, x, op.max));
    add(0, select(inside, dy_, 0.0));
  }

  void reshape() { add(0, {&tape_, tape_.reshape(dy_.id, shape(0))}); }

  void transpose(const Transpose& op) {
    Dims inverse(op.perm.size());
    for (std::size_t i = 0; i < op.perm.size(); ++i) {
      inverse[static_cast<std::size_t>(op.perm[i])] = static_cast<std::int64_t>(i);
    }
    add(0, term(Transpose{inverse}, {dy_.id}));
  }

  // Puts zeros where the slice left elements out.
  void slice(const Slice& op) {
    TensorId dx = dy_.id;
    if (element_count(tape_.shape(dx)) == 0) return;
    for (std::size_t axis = 0; axis < shape(0).size(); ++axis) {
      const std::int64_t room = shape(0)[axis] - op.start[axis];
      if (op.stride[axis] > 1 && tape_.shape(dx)[axis] > 1) {
        dx = spread(dx, axis, op.stride[axis]);
        if (tape_.shape(dx)[axis] > room) dx = part(dx, axis, 0, room);
      }
      std::vector<TensorId> parts;
      const std::int64_t after = room - tape_.shape(dx)[axis];
      if (op.start[axis] > 0) parts.push_back(zeros_like(dx, axis, op.start[axis]));
      parts.push_back(dx);
      if (after > 0) parts.push_back(zeros_like(dx, axis, after));
      dx = tape_.concat(parts, axis);
      if (!tape_.status().ok()) return;
    }
    add(0, {&tape_, dx});
  }

  void concat(const Concat& op) {
    const auto axis = static_cast<std::size_t>(op.axis);
    std::int64_t at = 0;
    for (std::size_t i = 0; i < node_.inputs.size(); ++i) {
      const std::int64_t end = at + shape(i)[axis];
      if (tape_.wanted(node_.inputs[i])) add(i, {&tape_, part(dy_.id, axis, at, end)});
      at = end;
    }
  }

  void reduce_over(const Reduce& op) {
    const Term x = in(0);
    Dims kept = shape(0);
    double count = 1;
    for (const std::int64_t axis : op.axes) {
      std::int64_t& dim = kept[static_cast<std::size_t>(axis)];
      count *= static_cast<double>(dim);
      dim = 1;
    }
    const Term dy{&tape_, tape_.reshape(dy_.id, kept)};
    switch (op.kind) {
      case ReduceKind::sum:
        return add(0, {&tape_, tape_.broadcast(dy.id, shape(0))});
      case ReduceKind::mean: {
        const Term share = dy / Term{&tape_, tape_.constant(count)};
        return add(0, {&tape_, tape_.broadcast(share.id, shape(0))});
      }
      case ReduceKind::max:
      case ReduceKind::min:
        return add(0, to_extrema(x, op, dy));
      case ReduceKind::amax: {
        const Reduce of_magnitude{ReduceKind::max, op.axes, true};
        const Term magnitude = apply(UnaryKind::abs, x);
        return add(0, apply(UnaryKind::sign, x) * to_extrema(magnitude, of_magnitude, dy));
      }
      case ReduceKind::prod: {
        // A factor that is 0 has the product of the others; beside another 0 it has 0.
        const Term zero = compare(CompareKind::eq, x, 0.0);
        const Term others = reduce(ReduceKind::prod, select(zero, 1.0, x), op.axes);
        const Term ones{&tape_, tape_.broadcast(tape_.constant(1), shape(0))};
        const Term zeros = reduce(ReduceKind::sum, select(zero, ones, 0.0), op.axes);
        const Term only = select(compare(CompareKind::eq, zeros, 1.0), others, 0.0);
        const Term none =
            select(compare(CompareKind::eq, zeros, 0.0), others, 0.0) / select(zero, 1.0, x);
        return add(0, dy * select(zero, only, none));
      }
      case ReduceKind::norm1:
        return add(0, dy * apply(UnaryKind::sign, x));
      case ReduceKind::norm2: {
        const Term norm = reduce(ReduceKind::norm2, x, op.axes);
        return add(0, x * (dy / select(compare(CompareKind::eq, norm, 0.0), 1.0, norm)));
      }
    }
  }

  void matmul() {
    if (tape_.wanted(node_.inputs[0])) {
      const TensorId b = product_operand(turned(node_.inputs[1]));
      add(0, term(Matmul{}, {tape_.convert(dy_.id, cotangent_dtype(b)), b}));
    }
    if (tape_.wanted(node_.inputs[1])) {
      const TensorId a = product_operand(turned(node_.inputs[0]));
      add(1, term(Matmul{}, {a, tape_.convert(dy_.id, cotangent_dtype(a))}));
    }
  }

  void convert() { add(0, dy_); }
  void broadcast() { add(0, dy_); }

 private:
  Term term(Op op, std::vector<TensorId> in) const {
    return {&tape_, tape_.emit(std::move(op), std::move(in))};
  }
  Term in(std::size_t i) const { return {&tape_, tape_.value(node_.inputs[i])}; }
  const Dims& shape(std::size_t i) const { return tape_.old(node_.inputs[i]).shape; }
  void add(std::size_t i, Term part) { tape_.add(node_.inputs[i], part.id); }

  // Tensor cores multiply 16 bits by 16 bits: values of 8 bits are all in bf16, and cotangents need
  // its exponents.
  TensorId product_operand(TensorId x) const {
    const DType dtype = tape_.dtype_of(x);
    return bit_width(dtype) == 8 && is_float(dtype) ? tape_.convert(x, DType::bf16) : x;
  }
  DType cotangent_dtype(TensorId beside) const {
    const DType dtype = tape_.dtype_of(beside);
    return dtype == DType::f16 || dtype == DType::bf16 ? dtype : tape_.dtype();
  }

  // The forward tensor with its last two dims swapped. What is pointwise of inputs is computed from
  // the swapped inputs: kernels read inputs in any order, but rearrange nothing that they compute.
  TensorId turned(TensorId old) {
    const TensorId at_inputs = turned_at_inputs(old);
    return at_inputs != kNone ? at_inputs : swapped(tape_.value(old));
  }

  TensorId turned_at_inputs(TensorId old) {
    if (is_view_of_input(old)) return swapped(tape_.value(old));
    const Node* made = tape_.producer(old);
    if (std::holds_alternative<Constant>(made->op)) return tape_.value(old);
    const bool pointwise = std::visit(Overloaded{
                                          [](const Convert&) { return true; },
                                          [](const Unary&) { return true; },
                                          [](const UnaryGrad&) { return true; },
                                          [](const Binary&) { return true; },
                                          [](const Compare&) { return true; },
                                          [](const Logical&) { return true; },
                                          [](const Select&) { return true; },
                                          [](const Clamp&) { return true; },
                                          [](const auto&) { return false; },
                                      },
                                      made->op);
    if (!pointwise) return kNone;
    const auto known = turned_.find(old);
    if (known != turned_.end()) return known->second;
    std::vector<TensorId> in;
    for (const TensorId id : made->inputs) {
      in.push_back(turned_at_inputs(id));
      if (in.back() == kNone) return turned_[old] = kNone;
    }
    return turned_[old] = tape_.emit(made->op, std::move(in), tape_.old(old).dtype);
  }

  bool is_view_of_input(TensorId old) const {
    const Node* made = tape_.producer(old);
    if (made == nullptr) return true;
    const bool view =
        std::holds_alternative<Transpose>(made->op) || std::holds_alternative<Reshape>(made->op) ||
        std::holds_alternative<Slice>(made->op) || std::holds_alternative<Broadcast>(made->op);
    return view && is_view_of_input(made->inputs[0]);
  }

  // Beside matrices, a vector is a row: swapped, a column.
  TensorId swapped(TensorId x) const {
    Dims perm(tape_.shape(x).size());
    if (perm.empty()) return x;
    if (perm.size() == 1) return tape_.reshape(x, {tape_.shape(x)[0], 1});
    std::iota(perm.begin(), perm.end(), 0);
    std::swap(perm[perm.size() - 2], perm[perm.size() - 1]);
    return tape_.emit(Transpose{perm}, {x}, tape_.dtype_of(x));
  }

  // Equal parts to all elements that are the extremum.
  Term to_extrema(Term x, const Reduce& op, Term dy) const {
    const Reduce kept{op.kind, op.axes, true};
    const Term extremum{&tape_, tape_.emit(kept, {x.id}, tape_.dtype_of(x.id))};
    const Term there = compare(CompareKind::eq, x, extremum);
    const Term ones{&tape_, tape_.broadcast(tape_.constant(1), tape_.shape(x.id))};
    const Term count = reduce(ReduceKind::sum, select(there, ones, 0.0), op.axes);
    return select(there, dy / count, 0.0);
  }

  TensorId zeros_like(TensorId x, std::size_t axis, std::int64_t length) const {
    Dims dims = tape_.shape(x);
    dims[axis] = length;
    return tape_.zeros(dims);
  }

  TensorId part(TensorId x, std::size_t axis, std::int64_t begin, std::int64_t end) const {
    const Dims dims = tape_.shape(x);
    if (axis >= dims.size()) return kNone;  // after an error
    Slice op{Dims(dims.size(), 0), dims, Dims(dims.size(), 1)};
    op.start[axis] = begin;
    op.limit[axis] = end;
    return tape_.emit(op, {x}, tape_.dtype_of(x));
  }

  // `step` - 1 zeros behind each element along the axis.
  TensorId spread(TensorId x, std::size_t axis, std::int64_t step) const {
    Dims dims = tape_.shape(x);
    const auto product = [](auto begin, auto end) {
      return std::accumulate(begin, end, std::int64_t{1}, std::multiplies<>{});
    };
    const auto at = dims.begin() + static_cast<std::ptrdiff_t>(axis);
    const std::int64_t rows = product(dims.begin(), at + 1);
    const std::int64_t columns = product(at + 1, dims.end());
    const TensorId flat = tape_.reshape(x, {rows, 1, columns});
    const TensorId wide = tape_.concat({flat, zeros_like(flat, 1, step - 1)}, 1);
    dims[axis] *= step;
    return tape_.reshape(wide, dims);
  }

  Tape& tape_;
  const Node& node_;
  Term dy_;
  std::map<TensorId, TensorId> turned_;
};

Status no_gradient(const Tape& tape, const Node& node, std::string_view why) {
  return unsupported("gradient",
                     fmt::format("{} has no gradient: {}", op_text(tape.forward(), node), why),
                     op_name(node.op));
}

// Formulas compute in f64 where any tensor of the node that has a cotangent is f64.
DType dtype_of(const Tape& tape, const Node& node) {
  bool wide = false;
  for (const auto* list : {&node.inputs, &node.outputs}) {
    for (const TensorId id : *list) {
      wide = wide || (tape.wanted(id) && tape.old(id).dtype == DType::f64);
    }
  }
  return wide ? DType::f64 : DType::f32;
}

}  // namespace

Status differentiate(Tape& tape, const Node& node) {
  if (std::none_of(node.inputs.begin(), node.inputs.end(),
                   [&](TensorId id) { return tape.wanted(id); })) {
    return {};
  }
  tape.begin(node, dtype_of(tape, node));
  const bool reached = std::any_of(node.outputs.begin(), node.outputs.end(),
                                   [&](TensorId id) { return tape.cotangent(id) != kNone; });
  if (!reached) return tape.status();
  const auto rules = [&] { return Rules{tape, node}; };
  const auto done = [&](auto visit) -> Status {
    visit();
    return tape.status();
  };
  return std::visit(
      Overloaded{
          [&](const Matmul&) { return done([&] { rules().matmul(); }); },
          [&](const ScaledMatmul&) {
            return no_gradient(tape, node,
                               "its operands are quantised; differentiate the matmul "
                               "of the values before they were");
          },
          [&](const Convert&) { return done([&] { rules().convert(); }); },
          [&](const Unary& op) { return done([&] { rules().unary(op); }); },
          [&](const UnaryGrad& op) { return done([&] { rules().unary_grad(op); }); },
          [&](const Binary& op) { return done([&] { rules().binary(op); }); },
          [&](const Compare&) { return Status{}; },
          [&](const Logical&) { return Status{}; },
          [&](const Select&) { return done([&] { rules().select_between(); }); },
          [&](const Clamp& op) { return done([&] { rules().clamp(op); }); },
          [&](const Iota&) { return Status{}; },
          [&](const Constant&) { return Status{}; },
          [&](const Broadcast&) { return done([&] { rules().broadcast(); }); },
          [&](const Reshape&) { return done([&] { rules().reshape(); }); },
          [&](const Transpose& op) { return done([&] { rules().transpose(op); }); },
          [&](const Slice& op) { return done([&] { rules().slice(op); }); },
          [&](const Concat& op) { return done([&] { rules().concat(op); }); },
          [&](const Reduce& op) { return done([&] { rules().reduce_over(op); }); },
          [&](const Norm& op) { return differentiate(tape, node, op); },
          [&](const NormBackward&) {
            return no_gradient(tape, node, "second order of a norm; write it with reductions");
          },
          [&](const Attention& op) { return differentiate(tape, node, op); },
          [&](const AttentionBackward&) {
            return no_gradient(tape, node, "second order of attention");
          },
          [&](const CacheAppend&) { return no_gradient(tape, node, "it writes into a cache"); },
      },
      node.op);
}

}  // namespace lawson::ir
