// Views, concatenation and reductions among the steps of a fusion.
#include <algorithm>
#include <cmath>

#include "cases/fusion_steps.h"

namespace lawson::cases {

Value Steps::view(Writer& writer, const std::string& op, const Value& x) {
  if (op == "broadcast") return repeated(writer, x);
  if (op == "reshape") return reshaped(writer, x);
  if (op == "slice") return sliced(writer, x);
  if (op == "concat") return joined(writer, x);
  const auto rank = static_cast<std::int64_t>(x.shape.size());
  Dims perm;
  for (std::int64_t i = 0; i < rank; ++i) perm.push_back(i);
  for (std::int64_t i = 0; i + 1 < rank; ++i) {
    std::swap(perm[static_cast<std::size_t>(i)],
              perm[static_cast<std::size_t>(i + dice_.below(rank - i))]);
  }
  return writer.transpose(x, perm);
}

Value Steps::reshaped(Writer& writer, const Value& x) {
  Dims shape = x.shape;
  const auto rank = static_cast<std::int64_t>(shape.size());
  if (rank >= 2 && dice_.chance(40)) {  // two dims as one
    const auto at = static_cast<std::ptrdiff_t>(dice_.below(rank - 1));
    shape[static_cast<std::size_t>(at)] *= shape[static_cast<std::size_t>(at) + 1];
    shape.erase(shape.begin() + at + 1);
  } else if (rank < 4 && dice_.chance(60)) {  // one as two
    const auto at = static_cast<std::size_t>(dice_.below(rank + 1));
    if (at == shape.size()) {
      shape.push_back(1);
    } else {
      const std::int64_t inner = shape[at] % 2 == 0 ? 2 : 1;
      shape[at] /= inner;
      shape.insert(shape.begin() + static_cast<std::ptrdiff_t>(at) + 1, inner);
    }
  } else {
    shape = {x.count()};
  }
  return writer.reshape(x, shape);
}

Value Steps::sliced(Writer& writer, const Value& x) {
  Dims start;
  Dims limit;
  Dims stride;
  Value result = x;
  for (std::size_t i = 0; i < x.shape.size(); ++i) {
    const std::int64_t dim = x.shape[i];
    const bool whole = dim <= 1 || dice_.chance(40);
    start.push_back(whole ? 0 : dice_.below(dim));
    limit.push_back(whole ? dim : start.back() + 1 + dice_.below(dim - start.back()));
    stride.push_back(whole || dice_.chance(60) ? 1 : 2);
    result.shape[i] = (limit.back() - start.back() + stride.back() - 1) / stride.back();
  }
  Json attributes{{"start", start}, {"limit", limit}};
  if (std::any_of(stride.begin(), stride.end(), [](std::int64_t s) { return s != 1; })) {
    attributes["stride"] = stride;
  }
  return writer.op("slice", {x}, std::move(result), x.dtype, std::move(attributes));
}

// x with itself, or with inputs that are as wide.
Value Steps::joined(Writer& writer, const Value& x) {
  if (x.shape.empty()) return writer.reshape(x, {1});
  const std::int64_t axis = dice_.below(static_cast<std::int64_t>(x.shape.size()));
  const auto at = static_cast<std::size_t>(axis);
  std::vector<Value> parts{x};
  const std::int64_t more = 1 + dice_.below(2);
  for (std::int64_t i = 0; i < more; ++i) {
    if (dice_.chance(25)) {
      parts.push_back(x);
      continue;
    }
    Dims shape = x.shape;
    shape[at] = 1 + dice_.below(9);
    parts.push_back(input(writer, x.dtype, shape));
  }
  if (dice_.chance(50)) std::swap(parts.front(), parts.back());
  Value result{"", x.dtype, x.shape, x.low, x.high};
  result.shape[at] = 0;
  for (const Value& part : parts) {
    result.shape[at] += part.shape[at];
    result.low = std::min(result.low, part.low);
    result.high = std::max(result.high, part.high);
  }
  return writer.op("concat", parts, std::move(result), x.dtype, {{"axis", axis}});
}

Value Steps::repeated(Writer& writer, const Value& x) {
  const auto to = [&](const Value& small_one, const Dims& shape) {
    return writer.op("broadcast", {small_one},
                     {"", small_one.dtype, shape, small_one.low, small_one.high}, small_one.dtype,
                     {{"shape", shape}});
  };
  if (x.count() < 2000 && x.shape.size() < 4 && dice_.chance(40)) {
    Dims shape = x.shape;
    shape.insert(shape.begin(), 2);
    for (std::int64_t& dim : shape) {
      if (dim == 1 && dice_.chance(50)) dim = 3;
    }
    return to(x, shape);
  }
  return combine(writer, x, to(other(writer, x), x.shape));
}

// ---- reductions ----

Dims Steps::axes(const Dims& shape) {
  const auto rank = static_cast<std::int64_t>(shape.size());
  Dims axes;
  if (taste_ == Taste::usual && dice_.chance(60)) return {rank - 1};
  while (axes.empty()) {
    for (std::int64_t i = 0; i < rank; ++i) {
      if (dice_.chance(45)) axes.push_back(i);
    }
  }
  return axes;
}

// A product of many needs factors near 1.
Value Steps::reducible(Writer& writer, const std::string& kind, const Value& x) {
  if (kind == "prod") return writer.clamp(x, 0.5, 1.5);
  return x;
}

// In the middle: what is reduced is put together with what it was reduced from.
Value Steps::reduced(Writer& writer, const std::string& op, const Value& x) {
  const std::string kind = op.substr(std::string{"reduce_"}.size());
  if (x.shape.empty()) return writer.unary("abs", x);
  const Dims over = axes(x.shape);
  if (kind == "max" && is_float(x.dtype) && dice_.chance(40)) {  // softmax
    const Value shifted = writer.binary("sub", x, writer.reduce("max", x, over, true));
    Value e = writer.unary("exp", shifted);
    e.low = 0;
    e.high = 1;
    Value sum = writer.reduce("sum", e, over, true);
    sum.low = 1;
    Value result = writer.binary("div", e, sum);
    result.low = 0;
    result.high = 1;
    return result;
  }
  const Value from = reducible(writer, kind, x);
  const bool keep = dice_.chance(75);
  Value r = writer.reduce(kind, from, over, keep);
  if (!keep && dice_.chance(50)) r = writer.reshape(r, reduced_shape(x.shape, over, true));
  if (r.shape.size() != x.shape.size() || dice_.chance(20)) return r;
  if (kind == "norm2" || kind == "norm1" || kind == "amax") {
    if (is_float(x.dtype) && dice_.chance(50))
      return writer.binary("div", from, positive(writer, r));
  }
  return combine(writer, from, r);
}

Value Steps::exit_reduction(Writer& writer, const Value& x) {
  if (x.shape.empty()) return writer.unary("neg", x);
  // What cuDNN has, and has in f32 alone.
  const std::vector<std::string> usual{"sum", "max", "min", "amax", "sum", "norm1"};
  std::vector<std::string> kinds = usual;
  if (taste_ == Taste::everything && is_float(x.dtype)) {
    kinds.insert(kinds.end(), {"mean", "norm2"});
    if (x.low > 0 && x.high < 2) kinds.insert(kinds.end(), {"prod", "prod"});
  }
  if (is_integer(x.dtype)) kinds = {"sum", "max", "min", "amax"};
  const bool wide = bit_width(x.dtype) < 32 && is_float(x.dtype) && dice_.chance(60);
  const std::string kind = dice_.pick(kinds);
  const Dims over = axes(x.shape);
  return writer.reduce(kind, x, over, dice_.chance(60),
                       wide ? std::optional{DType::f32} : std::nullopt);
}

}  // namespace lawson::cases
