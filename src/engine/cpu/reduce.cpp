// Reductions: sums in double, so that their order does not show in the result; the operand's
// expression is evaluated on the way.
#include <algorithm>
#include <cmath>
#include <limits>

#include "engine/cpu/pool.h"
#include "engine/cpu/program.h"

namespace lawson::cpu {
namespace {

using ir::ReduceKind;

double initial(ReduceKind kind) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  switch (kind) {
    case ReduceKind::max:
      return -kInfinity;
    case ReduceKind::min:
      return kInfinity;
    case ReduceKind::prod:
      return 1;
    default:
      return 0;
  }
}

double nan_or(double a, double b, double chosen) {
  return std::isnan(a) || std::isnan(b) ? a + b : chosen;
}

template <ReduceKind kKind>
double combine(double sum, double v) {
  switch (kKind) {
    case ReduceKind::sum:
    case ReduceKind::mean:
      return sum + v;
    case ReduceKind::max:
      return nan_or(sum, v, sum > v ? sum : v);
    case ReduceKind::min:
      return nan_or(sum, v, sum < v ? sum : v);
    case ReduceKind::prod:
      return sum * v;
    case ReduceKind::amax:
      return nan_or(sum, v, std::max(sum, std::fabs(v)));
    case ReduceKind::norm1:
      return sum + std::fabs(v);
    case ReduceKind::norm2:
      return sum + v * v;
  }
  return sum;
}

// Folds a run of values into one sum, or into one sum each.
template <ReduceKind kKind, typename T>
void fold(const T* values, std::int64_t count, bool reduced, double* sums) {
  if (reduced) {
    double sum = sums[0];
    for (std::int64_t i = 0; i < count; ++i) {
      sum = combine<kKind>(sum, static_cast<double>(values[i]));
    }
    sums[0] = sum;
  } else {
    for (std::int64_t i = 0; i < count; ++i) {
      sums[i] = combine<kKind>(sums[i], static_cast<double>(values[i]));
    }
  }
}

template <typename T>
using Fold = void (*)(const T* values, std::int64_t count, bool reduced, double* sums);

template <typename T>
Fold<T> fold_of(ReduceKind kind) {
  switch (kind) {
    case ReduceKind::sum:
      return fold<ReduceKind::sum, T>;
    case ReduceKind::max:
      return fold<ReduceKind::max, T>;
    case ReduceKind::min:
      return fold<ReduceKind::min, T>;
    case ReduceKind::mean:
      return fold<ReduceKind::mean, T>;
    case ReduceKind::prod:
      return fold<ReduceKind::prod, T>;
    case ReduceKind::amax:
      return fold<ReduceKind::amax, T>;
    case ReduceKind::norm1:
      return fold<ReduceKind::norm1, T>;
    case ReduceKind::norm2:
      return fold<ReduceKind::norm2, T>;
  }
  return fold<ReduceKind::sum, T>;
}

// The sizes of the axes that are (not) reduced, 1 elsewhere; the last axis is left to the caller.
Dims outer_shape(const ReduceStep& step, bool reduced) {
  Dims shape = step.operand.shape;
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (step.reduced[i] != reduced || i + 1 == shape.size()) shape[i] = 1;
  }
  return shape;
}

template <typename T>
Status run_as(const Kernels& kernels, const ReduceStep& step,
              const std::vector<std::byte*>& roots) {
  const Dims& shape = step.operand.shape;
  const bool reduces_last = step.reduced.back();
  const std::int64_t width = shape.back();
  const Dims kept = outer_shape(step, false);
  const Dims folded = outer_shape(step, true);
  // One task folds one run of results: a single one, or a chunk along a kept last axis.
  const std::int64_t pieces = reduces_last ? 1 : (width + kChunk - 1) / kChunk;
  const std::int64_t items = element_count(kept).value_or(0) * pieces;
  const std::int64_t fold_count = element_count(folded).value_or(0);
  std::int64_t count = fold_count * (reduces_last ? width : 1);  // elements of one result
  const std::int64_t per_task =
      bit_width(step.to.dtype) < 8
          ? std::max<std::int64_t>(items, 1)
          : std::clamp<std::int64_t>((1 << 14) / std::max<std::int64_t>(count, 1), 1, 1 << 14);
  const Fold<T> fold = fold_of<T>(step.kind);
  return parallel_for(
      (items + per_task - 1) / per_task, evaluator_scratch(step.operand),
      [&](std::int64_t task, std::byte* scratch) {
        Evaluator<T> evaluator{kernels, step.operand, roots, scratch};
        std::array<double, kChunk> sums;
        Dims base(shape.size(), 0);
        Dims index(shape.size(), 0);
        const std::int64_t end = std::min(items, (task + 1) * per_task);
        for (std::int64_t item = task * per_task; item < end; ++item) {
          std::int64_t rest = item / pieces;
          for (std::size_t i = base.size(); i-- > 0;) {
            base[i] = rest % kept[i];
            rest /= kept[i];
          }
          const std::int64_t start = item % pieces * kChunk;
          base.back() = start;
          const std::int64_t results = reduces_last ? 1 : std::min(kChunk, width - start);
          std::fill(sums.begin(), sums.begin() + results, initial(step.kind));
          Dims inner(shape.size(), 0);
          for (std::int64_t f = 0; f < fold_count; ++f) {
            for (std::size_t i = 0; i < index.size(); ++i) index[i] = base[i] + inner[i];
            if (reduces_last) {
              for (std::int64_t done = 0; done < width; done += kChunk) {
                const std::int64_t n = std::min(kChunk, width - done);
                index.back() = done;
                fold(evaluator.run(index, n), n, true, sums.data());
              }
            } else {
              fold(evaluator.run(index, results), results, false, sums.data());
            }
            next_index(inner, folded);
          }
          for (std::int64_t i = 0; i < results; ++i) {
            double& sum = sums[static_cast<std::size_t>(i)];
            if (step.kind == ReduceKind::mean) sum /= static_cast<double>(count);
            if (step.kind == ReduceKind::norm2) sum = std::sqrt(sum);
          }
          store_elements(kernels, roots[static_cast<std::size_t>(step.to.root)], step.to.dtype,
                         step.to.offset + offset_of(base, step.to.strides),
                         reduces_last ? 1 : step.to.strides.back(), results, sums.data());
        }
      });
}

}  // namespace

Status run_reduce(const Kernels& kernels, const ReduceStep& step,
                  const std::vector<std::byte*>& roots) {
  return step.operand.wide ? run_as<double>(kernels, step, roots)
                           : run_as<float>(kernels, step, roots);
}

}  // namespace lawson::cpu
