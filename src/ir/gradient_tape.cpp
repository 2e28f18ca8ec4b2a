#include "ir/gradient_tape.h"

#include <algorithm>

#include "ir/infer.h"

namespace lawson::ir {
namespace {

// Results that the backward of a node reads.
std::vector<std::size_t> read_by_backward(const Op& op) {
  if (std::holds_alternative<Attention>(op)) return {Attention::o, Attention::stats};
  if (const auto* norm = std::get_if<Norm>(&op)) {
    if (norm->kind == NormKind::rms) return {Norm::inv_std};
    return {Norm::mean, Norm::inv_std};
  }
  return {};
}

}  // namespace

Status Tape::write_forward(const std::vector<std::string>& gradients) {
  reserved_.insert(gradients.begin(), gradients.end());
  for (TensorId id = 0; id < forward_.input_count; ++id) {
    if (reserved_.contains(old(id).name)) {
      return invalid("the gradient '{}' has the name of an input", old(id).name);
    }
    LAWSON_TRY(values_[static_cast<std::size_t>(id)], builder_.input(old(id)));
  }
  std::vector<std::pair<TensorId, TensorId>> seeds;
  for (TensorId id = forward_.input_count; forward_.is_output(id); ++id) {
    if (!is_float(old(id).dtype)) continue;
    Tensor cotangent;
    cotangent.name = "d_" + old(id).name;
    cotangent.dtype = old(id).dtype;
    cotangent.shape = old(id).shape;
    if (builder_.find(cotangent.name) || reserved_.contains(cotangent.name)) {
      return invalid("the cotangent '{}' of output '{}' has the name of an input or of a gradient",
                     cotangent.name, old(id).name);
    }
    LAWSON_TRY(const TensorId seed, builder_.input(std::move(cotangent)));
    seeds.emplace_back(id, seed);
  }
  if (seeds.empty())
    return invalid("graph '{}' has no float output to differentiate", forward_.name);
  for (std::size_t n = 0; n < forward_.nodes.size(); ++n) LAWSON_CHECK(write_node(n));
  builder_.source({});
  for (const auto& [id, seed] : seeds) {
    if (wanted(id)) add(id, seed);
  }
  return failure_;
}

Status Tape::write_node(std::size_t n) {
  const Node& node = forward_.nodes[n];
  std::vector<TensorId> in;
  for (const TensorId id : node.inputs) in.push_back(value(id));
  const bool differentiated = std::any_of(node.outputs.begin(), node.outputs.end(),
                                          [&](TensorId id) { return wanted(id); });
  std::vector<Builder::ResultSpec> results;
  for (const TensorId id : node.outputs) {
    if (id == kNone) {
      results.push_back({{}, std::nullopt, false});
    } else {
      results.push_back({unused_name(old(id).name), old(id).dtype, true});
    }
  }
  if (differentiated) {
    for (const std::size_t slot : read_by_backward(node.op)) {
      if (results[slot].wanted) continue;
      results[slot] = {unused_name(fmt::format("{}{}", result_names(node.op)[slot], n)),
                       std::nullopt, true};
    }
  }
  builder_.source(node.source);
  LAWSON_TRY(auto ids, builder_.add(node.op, std::move(in), std::move(results)));
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (node.outputs[i] != kNone) values_[static_cast<std::size_t>(node.outputs[i])] = ids[i];
    results_[{&node, i}] = ids[i];
  }
  return {};
}

TensorId Tape::result(const Node& node, std::size_t slot) const {
  const auto it = results_.find({&node, slot});
  return it == results_.end() ? kNone : it->second;
}

std::string Tape::unused_name(std::string name) const {
  while (builder_.find(name) || reserved_.contains(name)) name += '\'';
  return name;
}

void Tape::begin(const Node& node, DType dtype) {
  builder_.source(node.source);
  dtype_ = dtype;
}

void Tape::add(TensorId old_id, TensorId part) {
  if (!wanted(old_id) || part == kNone) return;
  cotangents_[static_cast<std::size_t>(old_id)].push_back(part);
}

TensorId Tape::cotangent(TensorId old_id) {
  if (old_id == kNone) return kNone;
  auto& parts = cotangents_[static_cast<std::size_t>(old_id)];
  if (parts.empty()) return kNone;
  const Tensor& tensor = old(old_id);
  const DType dtype = work(tensor.dtype);
  TensorId sum = kNone;
  for (const TensorId part : parts) {
    const TensorId next = sum_to(convert(part, dtype), tensor.shape, dtype);
    sum = sum == kNone ? next : emit(Binary{BinaryKind::add}, {sum, next}, dtype);
  }
  parts = {sum};
  return sum;
}

TensorId Tape::gradient(TensorId input) {
  const Tensor& tensor = old(input);
  const auto& parts = cotangents_[static_cast<std::size_t>(input)];
  if (parts.empty()) return broadcast(emit(Constant{0}, {}, tensor.dtype), tensor.shape);
  if (parts.size() > 1) return cotangent(input);
  // A sum is rounded as it is stored: kernels end with a reduction, not with what follows one.
  return sum_to(convert(parts[0], work(tensor.dtype)), tensor.shape, tensor.dtype);
}

TensorId Tape::emit(Op op, std::vector<TensorId> in, DType dtype) {
  if (!failure_.ok()) return kNone;
  const auto next = unused_name("g" + std::to_string(emitted_++));
  auto id = builder_.add1(std::move(op), std::move(in), dtype, next);
  if (!id.ok()) {
    fail(std::move(id).error());
    return kNone;
  }
  return *id;
}

std::vector<TensorId> Tape::emit_all(Op op, std::vector<TensorId> in,
                                     const std::vector<bool>& results) {
  std::vector<TensorId> none(results.size(), kNone);
  if (!failure_.ok()) return none;
  std::vector<Builder::ResultSpec> specs;
  for (const bool is_wanted : results) {
    specs.push_back({unused_name("g" + std::to_string(emitted_++)), std::nullopt, is_wanted});
  }
  auto ids = builder_.add(std::move(op), std::move(in), std::move(specs));
  if (ids.ok()) return *std::move(ids);
  fail(std::move(ids).error());
  return none;
}

TensorId Tape::convert(TensorId x, DType to) {
  return dtype_of(x) == to ? x : emit(Convert{}, {x}, to);
}

TensorId Tape::reshape(TensorId x, const Dims& to) {
  return shape(x) == to ? x : emit(Reshape{to}, {x}, dtype_of(x));
}

TensorId Tape::broadcast(TensorId x, const Dims& to) {
  return shape(x) == to ? x : emit(Broadcast{to}, {x}, dtype_of(x));
}

TensorId Tape::sum_to(TensorId x, const Dims& to, DType dtype) {
  const Dims from = shape(x);
  if (from == to) return x;
  const std::size_t added = from.size() - std::min(from.size(), to.size());
  Dims axes;
  for (std::size_t i = 0; i < from.size(); ++i) {
    if (i < added || to[i - added] != from[i]) axes.push_back(static_cast<std::int64_t>(i));
  }
  if (!axes.empty()) x = emit(Reduce{ReduceKind::sum, axes, true}, {x}, dtype);
  return reshape(x, to);
}

TensorId Tape::concat(const std::vector<TensorId>& parts, std::size_t axis) {
  if (parts.size() == 1) return parts[0];
  const Concat op{static_cast<std::int64_t>(axis), static_cast<std::int64_t>(parts.size())};
  return emit(op, parts, dtype_of(parts[0]));
}

Dims Tape::shape(TensorId x) const {
  return x == kNone ? Dims{} : builder_.tensor(x).shape;
}

Result<Graph> Tape::finish(const std::vector<std::pair<TensorId, std::string>>& gradients) && {
  std::vector<TensorId> outputs;
  for (const auto& [id, name] : gradients) {
    const Tensor& input = old(id);
    builder_.source({});
    const TensorId stored = gradient(id);
    LAWSON_CHECK(Status{failure_});
    reserved_.erase(name);
    LAWSON_TRY(const TensorId output, builder_.add1(Convert{}, {stored}, input.dtype, name));
    outputs.push_back(output);
  }
  for (const TensorId id : outputs) LAWSON_CHECK(builder_.output(id));
  return std::move(builder_).finish();
}

namespace {

Term term(Term like, Op op, std::vector<TensorId> in) {
  return {like.tape, like.tape->emit(std::move(op), std::move(in))};
}
Term number(Term like, double value) {
  return {like.tape, like.tape->constant(value)};
}
Term binary(BinaryKind kind, Term a, Term b) {
  return term(a, Binary{kind}, {a.id, b.id});
}

}  // namespace

Term operator+(Term a, Term b) {
  return binary(BinaryKind::add, a, b);
}
Term operator-(Term a, Term b) {
  return binary(BinaryKind::sub, a, b);
}
Term operator*(Term a, Term b) {
  return binary(BinaryKind::mul, a, b);
}
Term operator/(Term a, Term b) {
  return binary(BinaryKind::div, a, b);
}
Term operator+(Term a, double b) {
  return a + number(a, b);
}
Term operator-(double a, Term b) {
  return number(b, a) - b;
}
Term operator*(double a, Term b) {
  return number(b, a) * b;
}
Term operator-(Term a) {
  return apply(UnaryKind::neg, a);
}
Term apply(UnaryKind kind, Term x) {
  return term(x, Unary{kind}, {x.id});
}
Term pow(Term a, Term b) {
  return binary(BinaryKind::pow, a, b);
}
Term compare(CompareKind kind, Term a, Term b) {
  return {a.tape, a.tape->emit(Compare{kind}, {a.id, b.id}, DType::boolean)};
}
Term compare(CompareKind kind, Term a, double b) {
  return compare(kind, a, number(a, b));
}
Term both(Term a, Term b) {
  return {a.tape, a.tape->emit(Logical{LogicalKind::and_}, {a.id, b.id}, DType::boolean)};
}
Term select(Term predicate, Term a, Term b) {
  return term(predicate, Select{}, {predicate.id, a.id, b.id});
}
Term select(Term predicate, Term a, double b) {
  return select(predicate, a, number(a, b));
}
Term select(Term predicate, double a, Term b) {
  return select(predicate, number(b, a), b);
}
Term reduce(ReduceKind kind, Term x, const Dims& axes) {
  return term(x, Reduce{kind, axes, true}, {x.id});
}

}  // namespace lawson::ir
