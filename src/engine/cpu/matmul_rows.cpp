// Matmul of few rows, which reads B once and as it lies: packing would cost more than the products.
// Along rows of B, four of them at a time are added to the sums of a chunk of columns; where B's
// columns are contiguous, each sum is a dot product.
#include "engine/cpu/matmul.h"
#include "engine/cpu/pool.h"

namespace lawson::cpu {
namespace {

constexpr std::int64_t kFewRows = 16;
constexpr std::int64_t kDepth = 1024;        // of k at a time
constexpr std::int64_t kMostColumns = 1024;  // of a task
constexpr std::int64_t kGroup = 4;           // rows of B that are added at once

template <typename T>
class FewRows {
 public:
  FewRows(const Kernels& kernels, const MatmulStep& step, const std::vector<std::byte*>& roots)
      : kernels_{kernels}, step_{step}, roots_{roots}, shape_{step} {}

  Status run() const {
    if (shape_.batch * shape_.m * shape_.n == 0) return {};
    // Narrow tasks where there are few; which ones does not change any sum.
    const std::int64_t wanted = 4 * std::int64_t{thread_count()};
    const std::int64_t parts = std::max<std::int64_t>(1, wanted / shape_.batch);
    const std::int64_t width =
        std::min(kMostColumns, std::max(kChunk, round_up(blocks(shape_.n, parts), kChunk)));
    const std::int64_t chunks = blocks(shape_.n, width);
    return parallel_for(
        shape_.batch * chunks, scratch_bytes(width), [&](std::int64_t task, std::byte* scratch) {
          const std::int64_t column = task % chunks * width;
          columns(task / chunks, column, std::min(width, shape_.n - column), scratch);
        });
  }

 private:
  std::size_t c_bytes(std::int64_t width) const { return bytes_of(shape_.m * width, sizeof(T)); }
  std::size_t a_bytes() const { return bytes_of(shape_.m * kDepth, sizeof(T)); }
  std::size_t b_bytes(std::int64_t width) const {
    return bytes_of(std::max(kGroup * width, kDepth), sizeof(T));
  }
  std::size_t scratch_bytes(std::int64_t width) const {
    return c_bytes(width) + a_bytes() + b_bytes(width) + evaluator_scratch(step_.a) +
           std::max(evaluator_scratch(step_.b), Epilogue<T>::scratch_bytes(step_));
  }

  void columns(std::int64_t batch, std::int64_t column, std::int64_t count,
               std::byte* scratch) const {
    T* c = reinterpret_cast<T*>(scratch);
    T* a = reinterpret_cast<T*>(scratch += c_bytes(count));
    T* b = reinterpret_cast<T*>(scratch += a_bytes());
    Reader<T> left{kernels_, step_, OperandSide::left, roots_, scratch += b_bytes(count)};
    scratch += evaluator_scratch(step_.a);
    Reader<T> right{kernels_, step_, OperandSide::right, roots_, scratch};

    std::fill(c, c + shape_.m * count, T{0});
    Dims a_index = operand_index(batch, step_.epilogue.shape, step_.a.shape);
    Dims b_index = operand_index(batch, step_.epilogue.shape, step_.b.shape);
    b_index.back() = column;
    for (std::int64_t k = 0; k < shape_.k; k += kDepth) {
      const std::int64_t depth = std::min(kDepth, shape_.k - k);
      a_index.back() = k;
      for (std::int64_t i = 0; i < shape_.m; ++i) {
        a_index[a_index.size() - 2] = i;
        left.read(a_index, false, depth, a + i * kDepth);
      }
      b_index[b_index.size() - 2] = k;
      if (right.prefers_columns()) {
        dot_products(right, b_index, depth, count, a, b, c);
      } else {
        add_rows(right, b_index, depth, count, a, b, c);
      }
    }
    Epilogue<T>{kernels_, step_, roots_}.run(batch, 0, shape_.m, column, count, c, count, scratch);
  }

  void dot_products(Reader<T>& right, Dims index, std::int64_t depth, std::int64_t count,
                    const T* a, T* buffer, T* c) const {
    for (std::int64_t j = 0; j < count; ++j, ++index.back()) {
      const T* b = right.in_place(index, true);
      if (b == nullptr) {
        right.read(index, true, depth, buffer);
        b = buffer;
      }
      for (std::int64_t i = 0; i < shape_.m; ++i) {
        c[i * count + j] += math().dot(a + i * kDepth, b, depth);
      }
    }
  }

  void add_rows(Reader<T>& right, Dims index, std::int64_t depth, std::int64_t count, const T* a,
                T* buffer, T* c) const {
    std::array<const T*, kGroup> rows;
    for (std::int64_t k = 0; k < depth; k += kGroup) {
      const std::int64_t group = std::min(kGroup, depth - k);
      for (std::int64_t r = 0; r < group; ++r, ++index[index.size() - 2]) {
        const T*& row = rows[static_cast<std::size_t>(r)];
        row = right.in_place(index, false);
        if (row != nullptr) continue;
        right.read(index, false, count, buffer + r * count);
        row = buffer + r * count;
      }
      for (std::int64_t i = 0; i < shape_.m; ++i) {
        const T* factors = a + i * kDepth + k;
        if (group == kGroup) {
          math().add_scaled_rows(c + i * count, rows.data(), factors, count);
          continue;
        }
        for (std::int64_t r = 0; r < group; ++r) {
          math().add_scaled(c + i * count, rows[static_cast<std::size_t>(r)], count, factors[r]);
        }
      }
    }
  }

  const MathKernels<T>& math() const { return kernels_.math<T>(); }

  const Kernels& kernels_;
  const MatmulStep& step_;
  const std::vector<std::byte*>& roots_;
  const MatmulShape shape_;
};

}  // namespace

bool has_few_rows(const MatmulStep& step) {
  const MatmulShape shape{step};
  // Matrices of C that share one of B read it again each.
  const Dims& b = step.b.shape;
  const std::int64_t b_matrices = element_count(Dims(b.begin(), b.end() - 2)).value_or(0);
  const std::int64_t sharing = b_matrices == 0 ? 1 : shape.batch / b_matrices;
  return step.compute != MatmulStep::Compute::i32 &&
         shape.m * (sharing > 1 ? 4 * sharing : 1) <= kFewRows && !step.epilogue.shares_bytes();
}

Status run_few_rows(const Kernels& kernels, const MatmulStep& step,
                    const std::vector<std::byte*>& roots) {
  return step.compute == MatmulStep::Compute::f64 ? FewRows<double>{kernels, step, roots}.run()
                                                  : FewRows<float>{kernels, step, roots}.run();
}

}  // namespace lawson::cpu
