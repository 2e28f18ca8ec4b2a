#include "engine/cpu/expression.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "engine/cpu/pool.h"

namespace lawson::cpu {
namespace {

// Elements that one task evaluates, about.
constexpr std::int64_t kTaskElements = 1 << 14;

std::int64_t position(const Location& location, const Dims& index) {
  std::int64_t at = location.offset;
  for (std::size_t i = 0; i < index.size(); ++i) at += index[i] * location.strides[i];
  return at;
}

std::int64_t last_stride(const Location& location) {
  return location.strides.empty() ? 0 : location.strides.back();
}

void visit_locations(Expression& expression, const auto& visit) {
  for (Value& value : expression.values) {
    if (auto* location = std::get_if<Location>(&value.from)) visit(*location);
  }
  for (Sink& sink : expression.sinks) visit(sink.to);
}

// The dtypes whose values a float holds exactly and whose arithmetic is meant in f32.
bool is_narrow(DType dtype) {
  return dtype != DType::f64 && dtype != DType::i64 && dtype != DType::i32;
}

}  // namespace

Location broadcast_location(const Location& location, const Dims& own, const Dims& shape) {
  Location result = location;
  const std::size_t extra = shape.size() - own.size();
  result.strides.assign(shape.size(), 0);
  for (std::size_t i = 0; i < own.size(); ++i) {
    if (own[i] == shape[i + extra] && own[i] != 1) result.strides[i + extra] = location.strides[i];
  }
  return result;
}

int Expression::add(Value value) {
  if (!is_narrow(value.dtype)) wide = true;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i].dtype == value.dtype && values[i].from == value.from) return static_cast<int>(i);
  }
  values.push_back(std::move(value));
  return static_cast<int>(values.size()) - 1;
}

bool Expression::shares_bytes() const {
  return std::any_of(sinks.begin(), sinks.end(),
                     [](const Sink& sink) { return bit_width(sink.to.dtype) < 8; });
}

void merge_axes(Expression& expression) {
  // Axes of size 1 first, so that they do not separate others.
  for (std::size_t i = expression.shape.size(); i-- > 0;) {
    if (expression.shape[i] != 1) continue;
    const auto at = static_cast<std::ptrdiff_t>(i);
    expression.shape.erase(expression.shape.begin() + at);
    visit_locations(expression, [&](Location& l) { l.strides.erase(l.strides.begin() + at); });
  }
  for (std::size_t i = expression.shape.size(); i-- > 1;) {
    bool mergeable = true;
    visit_locations(expression, [&](const Location& l) {
      mergeable = mergeable && l.strides[i - 1] == l.strides[i] * expression.shape[i];
    });
    if (!mergeable) continue;
    const auto at = static_cast<std::ptrdiff_t>(i);
    expression.shape[i - 1] *= expression.shape[i];
    expression.shape.erase(expression.shape.begin() + at);
    visit_locations(expression, [&](Location& l) { l.strides.erase(l.strides.begin() + at - 1); });
  }
}

std::size_t evaluator_scratch(const Expression& expression) {
  const std::size_t element = expression.wide ? sizeof(double) : sizeof(float);
  return align_up(expression.values.size() * static_cast<std::size_t>(kChunk) * element);
}

template <typename T>
Evaluator<T>::Evaluator(const Kernels& kernels, const Expression& expression,
                        const std::vector<std::byte*>& roots, std::byte* scratch)
    : kernels_{kernels},
      expression_{expression},
      roots_{roots},
      slots_{reinterpret_cast<T*>(scratch)},
      at_(expression.values.size()) {
  for (std::size_t i = 0; i < expression.values.size(); ++i) {
    T* slot = slots_ + static_cast<std::int64_t>(i) * kChunk;
    at_[i] = slot;
    const auto* location = std::get_if<Location>(&expression.values[i].from);
    if (location == nullptr || location->kind != Location::Kind::constant) continue;
    std::fill(slot, slot + kChunk, static_cast<T>(location->constant));
  }
}

template <typename T>
const T* Evaluator<T>::source(const Location& location, const Value& value, T* slot,
                              const Dims& index, std::int64_t count) {
  if (location.kind == Location::Kind::constant) return slot;
  const std::int64_t first = position(location, index);
  const std::int64_t stride = last_stride(location);
  if (location.kind == Location::Kind::index) {
    for (std::int64_t i = 0; i < count; ++i) slot[i] = static_cast<T>(first + i * stride);
    round_elements(kernels_, value.dtype, count, slot);
    return slot;
  }
  const std::byte* data = roots_[static_cast<std::size_t>(location.root)];
  constexpr DType kOwn = std::is_same_v<T, float> ? DType::f32 : DType::f64;
  if (location.dtype == kOwn && (stride == 1 || count == 1)) {
    const std::byte* start = data + first * std::int64_t{sizeof(T)};
    if (reinterpret_cast<std::uintptr_t>(start) % alignof(T) == 0) {
      return reinterpret_cast<const T*>(start);
    }
  }
  load_elements(kernels_, data, location.dtype, first, stride, count, slot);
  return slot;
}

template <typename T>
void Evaluator<T>::apply(const Apply& apply, const Value& value, T* slot, std::int64_t count) {
  const MathKernels<T>& math = kernels_.math<T>();
  const auto operand = [&](std::size_t i) {
    return at_[static_cast<std::size_t>(apply.operands[i])];
  };
  const auto logical = [&](auto function) {
    const T* a = operand(0);
    const T* b = operand(1);
    for (std::int64_t i = 0; i < count; ++i) slot[i] = static_cast<T>(function(a[i], b[i]) ? 1 : 0);
  };
  std::visit(
      ir::Overloaded{
          [&](const ir::Convert&) { std::copy(operand(0), operand(0) + count, slot); },
          [&](const ir::Unary& op) {
            math.unary(op.kind, static_cast<T>(op.parameter), operand(0), slot, count);
          },
          [&](const ir::UnaryGrad& op) {
            math.unary_grad(op.kind, static_cast<T>(op.parameter), operand(0), operand(1), slot,
                            count);
          },
          [&](const ir::Binary& op) {
            math.binary(op.kind, operand(0), operand(1), slot, count);
            if (apply.integer && op.kind == ir::BinaryKind::div) {
              for (std::int64_t i = 0; i < count; ++i) slot[i] = std::trunc(slot[i]);
            }
          },
          [&](const ir::Compare& op) {
            math.compare(op.kind, operand(0), operand(1), slot, count);
          },
          [&](const ir::Logical& op) {
            switch (op.kind) {
              case ir::LogicalKind::and_:
                logical([](T a, T b) { return a != T{0} && b != T{0}; });
                return;
              case ir::LogicalKind::or_:
                logical([](T a, T b) { return a != T{0} || b != T{0}; });
                return;
              case ir::LogicalKind::not_:
                logical([](T a, T) { return a == T{0}; });
                return;
            }
          },
          [&](const ir::Select&) { math.select(operand(0), operand(1), operand(2), slot, count); },
          [&](const ir::Clamp& op) {
            math.clamp(static_cast<T>(op.min), static_cast<T>(op.max), operand(0), slot, count);
          },
          [](const auto&) {},  // never in an expression
      },
      apply.op);
  const bool is_truth = std::holds_alternative<ir::Compare>(apply.op) ||
                        std::holds_alternative<ir::Logical>(apply.op);
  if (!is_truth) round_elements(kernels_, value.dtype, count, slot);
}

template <typename T>
const T* Evaluator<T>::run(const Dims& index, std::int64_t count, const T* accumulator) {
  for (std::size_t i = 0; i < expression_.values.size(); ++i) {
    const Value& value = expression_.values[i];
    T* slot = slots_ + static_cast<std::int64_t>(i) * kChunk;
    if (const auto* location = std::get_if<Location>(&value.from)) {
      at_[i] = source(*location, value, slot, index, count);
    } else if (const auto* op = std::get_if<Apply>(&value.from)) {
      apply(*op, value, slot, count);
    } else {
      constexpr DType kOwn = std::is_same_v<T, float> ? DType::f32 : DType::f64;
      at_[i] = accumulator;
      if (value.dtype != kOwn) {
        std::copy(accumulator, accumulator + count, slot);
        round_elements(kernels_, value.dtype, count, slot);
        at_[i] = slot;
      }
    }
  }
  for (const Sink& sink : expression_.sinks) {
    store_elements(kernels_, roots_[static_cast<std::size_t>(sink.to.root)], sink.to.dtype,
                   position(sink.to, index), last_stride(sink.to), count,
                   at_[static_cast<std::size_t>(sink.value)]);
  }
  return expression_.values.empty() ? nullptr : at_[static_cast<std::size_t>(expression_.result)];
}

template class Evaluator<float>;
template class Evaluator<double>;

namespace {

template <typename T>
Status run_as(const Kernels& kernels, const Expression& expression,
              const std::vector<std::byte*>& roots) {
  const std::int64_t total = element_count(expression.shape).value_or(0);
  if (total == 0) return {};
  const std::int64_t width = expression.shape.empty() ? 1 : expression.shape.back();
  const std::int64_t pieces = (width + kChunk - 1) / kChunk;  // of one row
  const std::int64_t items = total / width * pieces;
  const std::int64_t per_task =
      expression.shares_bytes()
          ? items
          : std::max<std::int64_t>(1, kTaskElements / std::min(width, kChunk));
  return parallel_for((items + per_task - 1) / per_task, evaluator_scratch(expression),
                      [&](std::int64_t task, std::byte* scratch) {
                        Evaluator<T> evaluator{kernels, expression, roots, scratch};
                        Dims index(expression.shape.size(), 0);
                        const std::int64_t end = std::min(items, (task + 1) * per_task);
                        for (std::int64_t item = task * per_task; item < end; ++item) {
                          std::int64_t row = item / pieces;
                          const std::int64_t start = item % pieces * kChunk;
                          for (std::size_t i = index.size(); i-- > 0;) {
                            if (i + 1 == index.size()) {
                              index[i] = start;
                            } else {
                              index[i] = row % expression.shape[i];
                              row /= expression.shape[i];
                            }
                          }
                          evaluator.run(index, std::min(kChunk, width - start));
                        }
                      });
}

}  // namespace

Status run_expression(const Kernels& kernels, const Expression& expression,
                      const std::vector<std::byte*>& roots) {
  return expression.wide ? run_as<double>(kernels, expression, roots)
                         : run_as<float>(kernels, expression, roots);
}

}  // namespace lawson::cpu
