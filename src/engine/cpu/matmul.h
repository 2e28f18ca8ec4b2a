// What the ways to run a matmul share: reading operands element by element, dequantised if they
// have scales, and the epilogue.
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <type_traits>

#include "engine/cpu/program.h"
#include "engine/cpu/sizes.h"

namespace lawson::cpu {

inline constexpr std::int64_t kBlockDepth = 256;  // of k, that operands are read by

inline std::size_t bytes_of(std::int64_t elements, std::size_t element) {
  return align_up(static_cast<std::size_t>(elements) * element);
}

struct MatmulShape {
  std::int64_t batch;
  std::int64_t m;
  std::int64_t n;
  std::int64_t k;

  explicit MatmulShape(const MatmulStep& step);
};

// The index of matrix `batch` of C in an operand whose leading axes broadcast; its last two
// entries are 0.
Dims operand_index(std::int64_t batch, const Dims& c, const Dims& operand);

// The memory location of an operand that is read as it is.
const Location* plain_location(const Expression& operand);

enum class OperandSide : std::uint8_t { left, right };  // k is the last axis, or the one before it

// Reads runs of one operand's elements as T.
template <typename T>
class Reader {
 public:
  Reader(const Kernels& kernels, const MatmulStep& step, OperandSide side,
         const std::vector<std::byte*>& roots, std::byte* scratch)
      : kernels_{kernels},
        roots_{roots},
        side_{side},
        plain_{plain_location(side == OperandSide::left ? step.a : step.b)},
        scales_{side == OperandSide::left ? step.a_scales : step.b_scales} {
    const Expression& operand = side == OperandSide::left ? step.a : step.b;
    if (plain_ != nullptr) return;
    if (operand.wide) {
      wide_.emplace(kernels, operand, roots, scratch);
    } else {
      narrow_.emplace(kernels, operand, roots, scratch);
    }
  }

  // Whether reading down a column is as good as, or better than, along a row.
  bool prefers_columns() const {
    if (plain_ == nullptr) return false;
    const std::size_t rank = plain_->strides.size();
    return plain_->strides[rank - 2] == 1 && plain_->strides[rank - 1] != 1;
  }

  // `count` elements from `index` along the last axis (or, with `down`, the one before it).
  void read(const Dims& index, bool down, std::int64_t count, T* out) {
    if (plain_ != nullptr) {
      const std::size_t axis = plain_->strides.size() - (down ? 2 : 1);
      const std::int64_t first = plain_->offset + offset_of(index, plain_->strides);
      load_elements(kernels_, roots_[static_cast<std::size_t>(plain_->root)], plain_->dtype, first,
                    plain_->strides[axis], count, out);
    } else if (wide_) {
      evaluate(*wide_, index, count, out);
    } else {
      evaluate(*narrow_, index, count, out);
    }
    if constexpr (!std::is_integral_v<T>) {
      if (scales_) apply_scales(*scales_, index, down, count, out);
    }
  }

  // The elements from `index` on where they lie in memory as T, one after the other along the last
  // axis (or, with `down`, the one before it); else nullptr.
  const T* in_place(const Dims& index, bool down) const {
    if (plain_ == nullptr || scales_ || plain_->dtype != own_dtype()) return nullptr;
    const std::size_t axis = plain_->strides.size() - (down ? 2 : 1);
    if (plain_->strides[axis] != 1) return nullptr;
    const std::byte* data =
        roots_[static_cast<std::size_t>(plain_->root)] +
        (plain_->offset + offset_of(index, plain_->strides)) * std::int64_t{sizeof(T)};
    const bool aligned = reinterpret_cast<std::uintptr_t>(data) % alignof(T) == 0;
    return aligned ? reinterpret_cast<const T*>(data) : nullptr;
  }

 private:
  template <typename E>
  void evaluate(Evaluator<E>& evaluator, Dims index, std::int64_t count, T* out) {
    for (std::int64_t done = 0; done < count; done += kChunk) {
      const std::int64_t n = std::min(kChunk, count - done);
      const E* values = evaluator.run(index, n);
      for (std::int64_t i = 0; i < n; ++i) {
        if constexpr (std::is_integral_v<T>) {
          out[done + i] = static_cast<T>(static_cast<std::int64_t>(values[i]));
        } else {
          out[done + i] = static_cast<T>(values[i]);
        }
      }
      index.back() += n;
    }
  }

  static constexpr DType own_dtype() {
    return std::is_same_v<T, double> ? DType::f64 : std::is_integral_v<T> ? DType::i32 : DType::f32;
  }

  // Multiplies elements that were read from `index` on by the scales of their blocks.
  void apply_scales(const BlockScales& scales, const Dims& index, bool down, std::int64_t count,
                    T* out) const {
    const bool along_k = down == (side_ == OperandSide::right);
    const std::int64_t row = index[index.size() - (side_ == OperandSide::left ? 2 : 1)];
    const std::int64_t k = index[index.size() - (side_ == OperandSide::left ? 1 : 2)];
    std::array<T, static_cast<std::size_t>(kChunk)> factors;
    if (along_k) {
      for (std::int64_t done = 0; done < count;) {
        const std::int64_t block = (k + done) / scales.block;
        const std::int64_t end = std::min(count, (block + 1) * scales.block - k);
        load_scales(scales, index, row, block, 1, factors.data());
        for (; done < end; ++done) out[done] *= factors[0];
      }
      return;
    }
    for (std::int64_t done = 0; done < count; done += kChunk) {
      const std::int64_t n = std::min(kChunk, count - done);
      load_scales(scales, index, row + done, k / scales.block, n, factors.data());
      for (std::int64_t i = 0; i < n; ++i) out[done + i] *= factors[static_cast<std::size_t>(i)];
    }
  }

  // Scales of rows [row, row + count), or columns of B, at one block.
  void load_scales(const BlockScales& scales, const Dims& index, std::int64_t row,
                   std::int64_t block, std::int64_t count, T* out) const {
    const Dims& strides = scales.at.strides;
    const std::size_t rank = strides.size();
    const std::byte* data = roots_[static_cast<std::size_t>(scales.at.root)];
    std::int64_t matrix = scales.at.offset;
    for (std::size_t i = 0; i + 2 < rank; ++i) matrix += index[i] * strides[i];
    if (scales.tiles_per_row == 0) {
      const std::int64_t row_stride = strides[rank - (side_ == OperandSide::left ? 2 : 1)];
      const std::int64_t block_stride = strides[rank - (side_ == OperandSide::left ? 1 : 2)];
      load_elements(kernels_, data, scales.at.dtype,
                    matrix + row * row_stride + block * block_stride, row_stride, count, out);
      return;
    }
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t r = row + i;
      const std::int64_t tile = r / 128 * scales.tiles_per_row + block / 4;
      const std::int64_t at = tile * 512 + r % 32 * 16 + r % 128 / 32 * 4 + block % 4;
      load_elements(kernels_, data, scales.at.dtype, matrix + at, 1, 1, out + i);
    }
  }

  const Kernels& kernels_;
  const std::vector<std::byte*>& roots_;
  const OperandSide side_;
  const Location* plain_;
  const std::optional<BlockScales>& scales_;
  std::optional<Evaluator<float>> narrow_;
  std::optional<Evaluator<double>> wide_;
};

// Evaluates a matmul's epilogue on a block of sums.
template <typename T>
class Epilogue {
 public:
  Epilogue(const Kernels& kernels, const MatmulStep& step, const std::vector<std::byte*>& roots)
      : kernels_{kernels}, step_{step}, roots_{roots} {}

  static std::size_t scratch_bytes(const MatmulStep& step) {
    return kRowBytes + evaluator_scratch(step.epilogue);
  }

  // c[i * ldc + j] is the sum at row `row` + i, column `column` + j of matrix `batch`.
  void run(std::int64_t batch, std::int64_t row, std::int64_t rows, std::int64_t column,
           std::int64_t columns, const T* c, std::int64_t ldc, std::byte* scratch) const {
    if (step_.epilogue.wide) {
      run_as<double>(batch, row, rows, column, columns, c, ldc, scratch);
    } else {
      run_as<float>(batch, row, rows, column, columns, c, ldc, scratch);
    }
  }

 private:
  static constexpr std::size_t kRowBytes = static_cast<std::size_t>(kChunk) * sizeof(double);

  template <typename E>
  void run_as(std::int64_t batch, std::int64_t row, std::int64_t rows, std::int64_t column,
              std::int64_t columns, const T* c, std::int64_t ldc, std::byte* scratch) const {
    std::byte* row_buffer = scratch;
    Evaluator<E> evaluator{kernels_, step_.epilogue, roots_, scratch + kRowBytes};
    Dims index = operand_index(batch, step_.epilogue.shape, step_.epilogue.shape);
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t done = 0; done < columns; done += kChunk) {
        const std::int64_t n = std::min(kChunk, columns - done);
        const T* sums = c + i * ldc + done;
        index[index.size() - 2] = row + i;
        index.back() = column + done;
        if constexpr (std::is_same_v<T, E>) {
          evaluator.run(index, n, sums);
        } else {
          E* converted = reinterpret_cast<E*>(row_buffer);
          for (std::int64_t j = 0; j < n; ++j) {
            if constexpr (std::is_integral_v<T>) {
              converted[j] = static_cast<E>(static_cast<std::int32_t>(sums[j]));
            } else {
              converted[j] = static_cast<E>(sums[j]);
            }
          }
          evaluator.run(index, n, converted);
        }
      }
    }
  }

  const Kernels& kernels_;
  const MatmulStep& step_;
  const std::vector<std::byte*>& roots_;
};

// Whether C has so few rows that B is better read as it lies.
bool has_few_rows(const MatmulStep& step);
Status run_few_rows(const Kernels& kernels, const MatmulStep& step,
                    const std::vector<std::byte*>& roots);

}  // namespace lawson::cpu
