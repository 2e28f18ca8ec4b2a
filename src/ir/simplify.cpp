#include "ir/simplify.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace lawson::ir {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
// Up to here the reference engine's float64 holds every integer.
constexpr double kExactInteger = 0x1p53;

double lowest(DType dtype) {
  return is_float(dtype) ? -max_finite(dtype) : round_to(dtype, -kInfinity);
}

// Every value of `from`, infinities and NaN too, is one of `to`.
bool holds_all(DType from, DType to) {
  if (from == to) return true;
  // e8m0 has neither signs nor zero, and f4e2m1 and integers have no NaN.
  if (to == DType::f8e8m0 || to == DType::f4e2m1 || to == DType::boolean) return false;
  if (is_float(from)) {
    return is_float(to) && unit_roundoff(to) <= unit_roundoff(from) &&
           max_finite(to) >= max_finite(from) && smallest_subnormal(to) <= smallest_subnormal(from);
  }
  const double high = max_finite(from);
  const double low = from == DType::boolean ? 0 : lowest(from);
  if (!is_float(to)) return lowest(to) <= low && high <= max_finite(to);
  // All integers of [low, high] are there when those next to its ends are.
  return high < kExactInteger && round_to(to, high) == high && round_to(to, low) == low &&
         round_to(to, high - 1) == high - 1 && unit_roundoff(to) * high < 1;
}

bool same_bits(double a, double b) {
  return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b);
}

// Equal in every bit: 0 and -0 differ, a NaN is itself.
bool same_op(const Op& a, const Op& b) {
  if (a.index() != b.index()) return false;
  return std::visit(
      Overloaded{
          [&](const Constant& c) { return same_bits(c.value, std::get<Constant>(b).value); },
          [&](const Clamp& c) {
            const auto& d = std::get<Clamp>(b);
            return same_bits(c.min, d.min) && same_bits(c.max, d.max);
          },
          [&](const Unary& u) {
            const auto& v = std::get<Unary>(b);
            return u.kind == v.kind && same_bits(u.parameter, v.parameter);
          },
          [&](const UnaryGrad& u) {
            const auto& v = std::get<UnaryGrad>(b);
            return u.kind == v.kind && same_bits(u.parameter, v.parameter);
          },
          [&](const auto&) { return a == b; },
      },
      a);
}

bool commutes(const Op& op) {
  if (const auto* binary = std::get_if<Binary>(&op)) {
    return binary->kind == BinaryKind::add || binary->kind == BinaryKind::mul;
  }
  if (const auto* compare = std::get_if<Compare>(&op)) {
    return compare->kind == CompareKind::eq || compare->kind == CompareKind::ne;
  }
  const auto* logical = std::get_if<Logical>(&op);
  return logical != nullptr && logical->kind != LogicalKind::not_;
}

// f(f(x)) = f(x), rounded in between or not.
bool idempotent(UnaryKind kind) {
  switch (kind) {
    case UnaryKind::abs:
    case UnaryKind::relu:
    case UnaryKind::relu6:
    case UnaryKind::ceil:
    case UnaryKind::floor:
    case UnaryKind::round:
    case UnaryKind::sign:
      return true;
    default:
      return false;
  }
}

bool is_attention(const Node& node) {
  return std::holds_alternative<Attention>(node.op) ||
         std::holds_alternative<AttentionBackward>(node.op);
}
// Works in the memory of its operand, so that which tensor this is matters.
bool works_in_place(const Node& node) {
  return std::holds_alternative<CacheAppend>(node.op);
}

// The one way to write what a slice of `shape` takes.
Slice canonical(Slice slice) {
  for (std::size_t i = 0; i < slice.start.size(); ++i) {
    const std::int64_t step = slice.stride[i];
    const std::int64_t count = (slice.limit[i] - slice.start[i] + step - 1) / step;
    if (count <= 1) slice.stride[i] = 1;
    if (count == 0) slice.start[i] = 0;
    slice.limit[i] = count == 0 ? 0 : slice.start[i] + (count - 1) * slice.stride[i] + 1;
  }
  return slice;
}

// First `inner`, then `outer`; both canonical.
Slice joined(const Slice& inner, const Slice& outer) {
  Slice slice = outer;
  for (std::size_t i = 0; i < slice.start.size(); ++i) {
    if (outer.limit[i] == 0) continue;  // empty
    const std::int64_t count = (outer.limit[i] - outer.start[i] - 1) / outer.stride[i] + 1;
    slice.start[i] = inner.start[i] + outer.start[i] * inner.stride[i];
    slice.stride[i] = count == 1 ? 1 : inner.stride[i] * outer.stride[i];
    slice.limit[i] = slice.start[i] + (count - 1) * slice.stride[i] + 1;
  }
  return slice;
}

// Moves dims of size 1 only.
bool keeps_order(const Dims& perm, const Dims& shape) {
  std::int64_t last = -1;
  for (const std::int64_t axis : perm) {
    if (shape[static_cast<std::size_t>(axis)] == 1) continue;
    if (axis < last) return false;
    last = axis;
  }
  return true;
}

// The exact value of an op on scalars; nothing where IEEE arithmetic would round or give no number.
std::optional<double> exact_value(const Op& op, const std::vector<double>& in, bool integer) {
  const auto of_unary = [&](UnaryKind kind) -> std::optional<double> {
    switch (kind) {
      case UnaryKind::neg:
        return -in[0];
      case UnaryKind::abs:
        return std::fabs(in[0]);
      case UnaryKind::ceil:
        return std::ceil(in[0]);
      case UnaryKind::floor:
        return std::floor(in[0]);
      case UnaryKind::round:
        return std::nearbyint(in[0]);
      case UnaryKind::sign:
        return in[0] > 0 ? 1.0 : in[0] < 0 ? -1.0 : 0.0;
      case UnaryKind::relu:
        return in[0] < 0 ? 0.0 : in[0];
      case UnaryKind::reciprocal:
        return 1.0 / in[0];
      default:
        return std::nullopt;
    }
  };
  const auto of_binary = [&](BinaryKind kind) -> std::optional<double> {
    switch (kind) {
      case BinaryKind::add:
        return in[0] + in[1];
      case BinaryKind::sub:
        return in[0] - in[1];
      case BinaryKind::mul:
        return in[0] * in[1];
      case BinaryKind::div:
        return integer ? std::trunc(in[0] / in[1]) : in[0] / in[1];
      case BinaryKind::min:
        return std::min(in[0], in[1]);
      case BinaryKind::max:
        return std::max(in[0], in[1]);
      case BinaryKind::mod:
        return std::fmod(in[0], in[1]);
      case BinaryKind::pow:
        break;
    }
    return std::nullopt;
  };
  const auto of_compare = [&](CompareKind kind) {
    switch (kind) {
      case CompareKind::eq:
        return in[0] == in[1];
      case CompareKind::ne:
        return in[0] != in[1];
      case CompareKind::lt:
        return in[0] < in[1];
      case CompareKind::le:
        return in[0] <= in[1];
      case CompareKind::gt:
        return in[0] > in[1];
      case CompareKind::ge:
        return in[0] >= in[1];
    }
    return false;
  };
  using Value = std::optional<double>;
  return std::visit(Overloaded{
                        [&](const Convert&) { return Value{in[0]}; },
                        [&](const Unary& u) { return of_unary(u.kind); },
                        [&](const Binary& b) { return of_binary(b.kind); },
                        [&](const Compare& c) { return Value{of_compare(c.kind) ? 1 : 0}; },
                        [&](const Logical& l) {
                          const bool a = in[0] != 0;
                          if (l.kind == LogicalKind::not_) return Value{a ? 0 : 1};
                          const bool b = in[1] != 0;
                          const bool both = l.kind == LogicalKind::and_;
                          return Value{(both ? a && b : a || b) ? 1 : 0};
                        },
                        [&](const Select&) { return Value{in[0] != 0 ? in[1] : in[2]}; },
                        [&](const Clamp& c) { return Value{std::clamp(in[0], c.min, c.max)}; },
                        [](const auto&) { return Value{}; },
                    },
                    op);
}

// One walk over the nodes. Ids are those of the new graph's builder unless called old.
class Pass {
 public:
  explicit Pass(const Graph& old)
      : old_{old}, builder_{old.name}, values_(old.tensors.size(), kNone) {
    builder_.strict(old.strict);
  }

  Result<Graph> run() && {
    for (TensorId id = 0; id < old_.input_count; ++id) {
      LAWSON_TRY(value(id), builder_.input(old_.tensor(id)));
    }
    for (const Node& node : old_.nodes) LAWSON_CHECK(rewrite(node));
    std::vector<TensorId> taken;
    for (std::int32_t i = 0; i < old_.output_count; ++i) {
      const Tensor& output = old_.tensor(old_.input_count + i);
      TensorId id = value(old_.input_count + i);
      if (id < old_.input_count || std::find(taken.begin(), taken.end(), id) != taken.end()) {
        LAWSON_TRY(id, builder_.add1(Convert{}, {id}, output.dtype, unused_name(output.name)));
      }
      LAWSON_CHECK(builder_.output(id, output.strides, output.alignment));
      taken.push_back(id);
    }
    LAWSON_TRY(Graph graph, std::move(builder_).finish());
    for (std::int32_t i = 0; i < old_.output_count; ++i) {
      const auto at = static_cast<std::size_t>(old_.input_count) + static_cast<std::size_t>(i);
      graph.tensors[at].name = old_.tensors[at].name;
    }
    return graph;
  }

 private:
  struct Definition {
    Op op;
    std::vector<TensorId> in;
    TensorId result = kNone;
  };

  TensorId& value(TensorId old) { return values_[static_cast<std::size_t>(old)]; }
  const Tensor& tensor(TensorId id) const { return builder_.tensor(id); }

  const Definition* definition(TensorId id) const {
    const auto it = std::find_if(definitions_.begin(), definitions_.end(),
                                 [&](const Definition& d) { return d.result == id; });
    return it == definitions_.end() ? nullptr : &*it;
  }
  // The op and first operand that made a tensor, when it is one of that kind.
  template <typename Kind>
  std::optional<std::pair<Kind, TensorId>> made_by(TensorId id) const {
    const Definition* made = definition(id);
    const Kind* op = made == nullptr ? nullptr : std::get_if<Kind>(&made->op);
    if (op == nullptr) return std::nullopt;
    return std::pair{*op, made->in[0]};
  }

  // The scalar that every element is.
  std::optional<double> constant(TensorId id) const {
    for (const Definition* made = definition(id); made != nullptr; made = definition(made->in[0])) {
      if (const auto* literal = std::get_if<Constant>(&made->op)) {
        return round_to(tensor(made->result).dtype, literal->value);
      }
      if (!std::holds_alternative<Broadcast>(made->op) &&
          !std::holds_alternative<Reshape>(made->op)) {
        break;
      }
    }
    return std::nullopt;
  }

  std::string unused_name(std::string name) const {
    while (builder_.find(name)) name += '\'';
    return name;
  }

  Status rewrite(const Node& node) {
    builder_.source(node.source);
    std::vector<TensorId> in = node.inputs;
    for (TensorId& id : in) {
      if (id != kNone) id = value(id);
    }
    if (node.outputs.size() != 1) return copy(node, std::move(in));
    const Tensor& result = old_.tensor(node.outputs[0]);
    Definition now{node.op, std::move(in), kNone};
    while (now.result == kNone && step(now, result)) {
    }
    TensorId same = now.result != kNone ? now.result : computed_before(now, result);
    if (same == kNone) {
      LAWSON_TRY(same, builder_.add1(now.op, now.in, result.dtype, unused_name(result.name)));
      now.result = same;
      definitions_.push_back(std::move(now));
    }
    value(node.outputs[0]) = same;
    return {};
  }

  // A node of several results: as it is, or as it was computed before.
  Status copy(const Node& node, std::vector<TensorId> in) {
    std::vector<Builder::ResultSpec> results;
    for (const TensorId id : node.outputs) {
      if (id == kNone) {
        results.push_back({{}, std::nullopt, false});
      } else {
        results.push_back({unused_name(old_.tensor(id).name), old_.tensor(id).dtype, true});
      }
    }
    const auto same_result = [&](TensorId id, const Builder::ResultSpec& wanted) {
      return id == kNone ? !wanted.wanted : wanted.wanted && tensor(id).dtype == wanted.dtype;
    };
    const auto before = std::find_if(copies_.begin(), copies_.end(), [&](const Node& other) {
      return other.inputs == in && same_op(other.op, node.op) &&
             std::equal(other.outputs.begin(), other.outputs.end(), results.begin(), same_result);
    });
    std::vector<TensorId> ids;
    if (before != copies_.end()) {
      ids = before->outputs;
    } else {
      LAWSON_TRY(ids, builder_.add(node.op, in, std::move(results)));
      copies_.push_back({node.op, std::move(in), ids, {}});
    }
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (node.outputs[i] != kNone) value(node.outputs[i]) = ids[i];
    }
    return {};
  }

  TensorId computed_before(const Definition& now, const Tensor& result) const {
    std::vector<TensorId> swapped = now.in;
    if (commutes(now.op)) std::reverse(swapped.begin(), swapped.end());
    for (const Definition& other : definitions_) {
      if ((other.in == now.in || other.in == swapped) && same_op(other.op, now.op) &&
          tensor(other.result).dtype == result.dtype) {
        return other.result;
      }
    }
    return kNone;
  }

  // Makes one step: another op or operands in `now`, or a value in now.result. False when there is
  // none to make.
  bool step(Definition& now, const Tensor& result) {
    if (fold(now, result)) return true;
    const bool changed =
        std::visit(Overloaded{
                       [&](const Convert&) { return convert(now, result); },
                       [&](const Transpose&) { return transpose(now, result); },
                       [&](const Reshape&) { return join<Reshape>(now, result); },
                       [&](const Broadcast&) { return join<Broadcast>(now, result); },
                       [&](const Slice&) { return slice(now, result); },
                       [&](const Reduce& r) { return reduce(now, r); },
                       [&](const Clamp& c) { return clamp(now, c, result); },
                       [&](const Unary& u) { return unary(now, u, result); },
                       [&](const Binary& b) { return binary(now, b, result); },
                       [&](const Logical& l) { return logical(now, l, result); },
                       [&](const Select&) { return select(now, result); },
                       [](const auto&) { return false; },
                   },
                   Op{now.op});
    return changed || implicit_broadcast(now, result);
  }

  // The result is `id` itself when type and shape say so.
  bool is(Definition& now, TensorId id, const Tensor& result) const {
    if (tensor(id).dtype != result.dtype || tensor(id).shape != result.shape) return false;
    now.result = id;
    return true;
  }

  bool fold(Definition& now, const Tensor& result) const {
    if (auto* literal = std::get_if<Constant>(&now.op)) {
      const double rounded = round_to(result.dtype, literal->value);
      if (!std::isfinite(rounded) || same_bits(rounded, literal->value)) return false;
      literal->value = rounded;
      return true;
    }
    if (!result.shape.empty() || now.in.empty()) return false;
    std::vector<double> in;
    bool integer = is_integer(result.dtype);
    for (const TensorId id : now.in) {
      const Definition* made = id == kNone ? nullptr : definition(id);
      if (made == nullptr || !std::holds_alternative<Constant>(made->op)) return false;
      in.push_back(*constant(id));
      integer = integer && !is_float(tensor(id).dtype);
      const bool large = !is_float(tensor(id).dtype) && std::fabs(in.back()) > kExactInteger;
      if (large || !std::isfinite(in.back())) return false;
    }
    const auto exact = exact_value(now.op, in, integer);
    if (!exact) return false;
    // What the reference engine rounds, is rounded here; elsewhere it carries every digit.
    const double rounded = round_to(result.dtype, *exact);
    const bool rounds = old_.strict && is_float(result.dtype);
    if (!std::isfinite(rounded) || (!rounds && !same_bits(rounded, *exact))) return false;
    if (!is_float(result.dtype) && std::fabs(rounded) > kExactInteger) return false;
    now.op = Constant{rounded};
    now.in.clear();
    return true;
  }

  // Over the one element of a tensor of rank 0.
  bool reduce(Definition& now, const Reduce& reduce) const {
    if (!tensor(now.in[0]).shape.empty()) return false;
    switch (reduce.kind) {
      case ReduceKind::sum:
      case ReduceKind::mean:
      case ReduceKind::max:
      case ReduceKind::min:
      case ReduceKind::prod:
        now.op = Convert{};
        return true;
      case ReduceKind::amax:
      case ReduceKind::norm1:
      case ReduceKind::norm2:
        now.op = Unary{UnaryKind::abs};
        return true;
    }
    return false;
  }

  bool convert(Definition& now, const Tensor& result) const {
    if (is(now, now.in[0], result)) return true;
    const auto inner = made_by<Convert>(now.in[0]);
    if (!inner || !holds_all(tensor(inner->second).dtype, tensor(now.in[0]).dtype)) return false;
    now.in[0] = inner->second;
    return true;
  }

  bool transpose(Definition& now, const Tensor& result) const {
    const Dims perm = std::get<Transpose>(now.op).perm;
    if (keeps_order(perm, tensor(now.in[0]).shape) && is(now, now.in[0], result)) return true;
    const auto inner = made_by<Transpose>(now.in[0]);
    if (!inner) return false;
    Dims both;
    for (const std::int64_t axis : perm) {
      both.push_back(inner->first.perm[static_cast<std::size_t>(axis)]);
    }
    now.op = Transpose{both};
    now.in[0] = inner->second;
    return true;
  }

  // Reshape and broadcast: only the last shape matters.
  template <typename View>
  bool join(Definition& now, const Tensor& result) const {
    if (is(now, now.in[0], result)) return true;
    const auto inner = made_by<View>(now.in[0]);
    if (!inner) return false;
    now.in[0] = inner->second;
    return true;
  }

  bool slice(Definition& now, const Tensor& result) const {
    if (is(now, now.in[0], result)) return true;
    const Slice& own = std::get<Slice>(now.op);
    if (const auto inner = made_by<Slice>(now.in[0])) {
      now.op = joined(inner->first, canonical(own));
      now.in[0] = inner->second;
      return true;
    }
    const Slice tidy = canonical(own);
    if (tidy == own) return false;
    now.op = tidy;
    return true;
  }

  bool clamp(Definition& now, const Clamp& own, const Tensor& result) const {
    const DType dtype = result.dtype;
    const bool all = is_float(dtype) ? own.min == -kInfinity && own.max == kInfinity
                                     : own.min <= lowest(dtype) && own.max >= max_finite(dtype);
    if (all && is(now, now.in[0], result)) return true;
    const auto inner = made_by<Clamp>(now.in[0]);
    // Rounding is monotone: what was rounded beyond a limit is where this limit is rounded to.
    const bool inside = inner && own.min <= inner->first.min && inner->first.max <= own.max;
    return inside && is(now, now.in[0], result);
  }

  bool unary(Definition& now, const Unary& own, const Tensor& result) const {
    const auto inner = made_by<Unary>(now.in[0]);
    if (!inner || inner->first.kind != own.kind) return false;
    if (idempotent(own.kind)) return is(now, now.in[0], result);
    // e8m0 has no signs, and the smallest integer no opposite.
    const bool negated = own.kind == UnaryKind::neg && is_float(result.dtype) &&
                         result.dtype != DType::f8e8m0 && tensor(now.in[0]).dtype == result.dtype;
    return negated && is(now, inner->second, result);
  }

  // Arithmetic with a constant that changes no bit, signs of zeros and NaN included.
  bool binary(Definition& now, const Binary& own, const Tensor& result) const {
    if (now.in[0] == now.in[1] && (own.kind == BinaryKind::min || own.kind == BinaryKind::max)) {
      return is(now, now.in[0], result);
    }
    const bool either = own.kind == BinaryKind::add || own.kind == BinaryKind::mul;
    for (const std::size_t side : {1U, 0U}) {
      if (side == 0 && !either) break;
      const TensorId x = now.in[1 - side];
      const auto c = constant(now.in[side]);
      const bool floating = is_float(tensor(x).dtype);
      if (!c || floating != is_float(tensor(now.in[side]).dtype)) continue;
      bool neutral = false;
      switch (own.kind) {
        case BinaryKind::mul:
        case BinaryKind::div:
        case BinaryKind::pow:
          neutral = *c == 1;
          break;
        case BinaryKind::add:
          neutral = *c == 0 && (!floating || std::signbit(*c));
          break;
        case BinaryKind::sub:
          neutral = *c == 0 && (!floating || !std::signbit(*c));
          break;
        default:
          break;
      }
      if (neutral && is(now, x, result)) return true;
    }
    return false;
  }

  bool logical(Definition& now, const Logical& own, const Tensor& result) const {
    if (own.kind != LogicalKind::not_) {
      return now.in[0] == now.in[1] && is(now, now.in[0], result);
    }
    const auto inner = made_by<Logical>(now.in[0]);
    return inner && inner->first.kind == LogicalKind::not_ && is(now, inner->second, result);
  }

  bool select(Definition& now, const Tensor& result) const {
    if (now.in[1] == now.in[2] && is(now, now.in[1], result)) return true;
    const auto predicate = constant(now.in[0]);
    return predicate && is(now, now.in[*predicate != 0 ? 1 : 2], result);
  }

  // A pointwise op broadcasts its operands itself.
  bool implicit_broadcast(Definition& now, const Tensor& result) const {
    const bool pointwise =
        std::holds_alternative<Binary>(now.op) || std::holds_alternative<Compare>(now.op) ||
        std::holds_alternative<Logical>(now.op) || std::holds_alternative<Select>(now.op);
    if (!pointwise || now.result != kNone) return false;
    for (std::size_t i = 0; i < now.in.size(); ++i) {
      const auto wide = made_by<Broadcast>(now.in[i]);
      if (!wide) continue;
      std::vector<TensorId> in = now.in;
      in[i] = wide->second;
      std::optional<Dims> shape{Dims{}};
      for (const TensorId id : in) {
        if (shape) shape = broadcast_shape(*shape, tensor(id).shape);
      }
      if (shape != result.shape) continue;
      now.in = std::move(in);
      return true;
    }
    return false;
  }

  const Graph& old_;
  Builder builder_;
  std::vector<TensorId> values_;  // of each old tensor
  std::vector<Definition> definitions_;
  std::vector<Node> copies_;
};

bool same_graph(const Graph& a, const Graph& b) {
  const auto same = [](const Node& m, const Node& n) {
    return m.inputs == n.inputs && m.outputs == n.outputs && same_op(m.op, n.op);
  };
  return std::equal(a.nodes.begin(), a.nodes.end(), b.nodes.begin(), b.nodes.end(), same);
}

}  // namespace

Graph simplify(const Graph& graph) {
  const auto& nodes = graph.nodes;
  if (std::all_of(nodes.begin(), nodes.end(), is_attention) ||
      std::any_of(nodes.begin(), nodes.end(), works_in_place)) {
    return graph;
  }
  Graph now = graph;
  // An output that became a copy may have freed a name or a node that another can use.
  constexpr int kMostPasses = 8;
  for (int i = 0; i < kMostPasses; ++i) {
    auto next = Pass(now).run();
    // A finished graph's nodes stay valid; were one not, the graph as it was is right.
    if (!next.ok() || same_graph(now, *next)) return now;
    now = *std::move(next);
  }
  return now;
}

}  // namespace lawson::ir
