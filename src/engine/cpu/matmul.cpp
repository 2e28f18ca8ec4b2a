// Matmul with its operands' expressions evaluated while packing and its epilogue evaluated on each
// block of C while that block is in the cache.
//
// C is cut into blocks of `tile` rows and up to kBlockColumns columns. B is packed into workspace,
// kBlockColumns columns at a time, by all threads; then every thread packs the rows of A that it
// needs, kBlockDepth of k at a time, and accumulates a block of C in its scratch memory. Of many
// small matrices each thread takes whole ones, B included.
// Every element sums its products in the same order, whatever the number of threads.
#include "engine/cpu/matmul.h"

#include "engine/cpu/pool.h"

namespace lawson::cpu {

MatmulShape::MatmulShape(const MatmulStep& step) {
  const Dims& c = step.epilogue.shape;
  batch = element_count(Dims(c.begin(), c.end() - 2)).value_or(0);
  m = c[c.size() - 2];
  n = c[c.size() - 1];
  k = step.k;
}

Dims operand_index(std::int64_t batch, const Dims& c, const Dims& operand) {
  Dims index(operand.size(), 0);
  for (std::size_t i = c.size() - 2; i-- > 0;) {
    const std::int64_t at = batch % c[i];
    batch /= c[i];
    if (i + operand.size() < c.size()) continue;
    const std::size_t axis = i + operand.size() - c.size();
    index[axis] = operand[axis] == 1 ? 0 : at;
  }
  return index;
}

const Location* plain_location(const Expression& operand) {
  if (operand.values.size() != 1) return nullptr;
  const auto* location = std::get_if<Location>(&operand.values[0].from);
  return location != nullptr && location->kind == Location::Kind::memory ? location : nullptr;
}

namespace {

constexpr std::int64_t kBlockColumns = 1024;
constexpr std::int64_t kSmallBytes = 256 << 10;  // of a packed B that a thread keeps to itself

// Packs lines of `length` elements into one panel: packed[step * width + line].
template <typename T>
void interleave(const T* lines, std::int64_t line_stride, std::int64_t line_count,
                std::int64_t width, std::int64_t length, T* packed) {
  if (line_count < width) std::fill(packed, packed + width * length, T{0});
  for (std::int64_t step = 0; step < length; ++step) {
    for (std::int64_t line = 0; line < line_count; ++line) {
      packed[step * width + line] = lines[line * line_stride + step];
    }
  }
}

template <typename T>
class Matmul {
 public:
  Matmul(const Kernels& kernels, const MatmulStep& step, const std::vector<std::byte*>& roots,
         std::byte* workspace)
      : kernels_{kernels},
        step_{step},
        roots_{roots},
        shape_{step},
        mr_{kernels.mr},
        nr_{kernels.product<T>().nr},
        tile_{kernels.tile},
        b_packed_{reinterpret_cast<T*>(workspace)} {}

  std::size_t workspace() const {
    if (shape_.batch * shape_.m * shape_.n == 0 || is_small()) return 0;
    return b_bytes();
  }

  Status run() {
    if (shape_.batch * shape_.m * shape_.n == 0) return {};
    if (is_small()) return run_small();
    for (std::int64_t first = 0; first < shape_.n; first += kBlockColumns) {
      const std::int64_t columns = std::min(kBlockColumns, shape_.n - first);
      for (std::int64_t batch = 0; batch < shape_.batch;) {
        // Matrices of C in a row that share B.
        const Dims b_index = operand_index(batch, step_.epilogue.shape, step_.b.shape);
        std::int64_t end = batch + 1;
        while (end < shape_.batch &&
               operand_index(end, step_.epilogue.shape, step_.b.shape) == b_index) {
          ++end;
        }
        LAWSON_CHECK(parallel_for(pack_parts(columns), pack_scratch(),
                                  [&](std::int64_t part, std::byte* scratch) {
                                    pack_b(b_index, first, columns, part, b_packed_, scratch);
                                  }));
        LAWSON_CHECK(multiply(batch, end, first, columns));
        batch = end;
      }
    }
    return {};
  }

 private:
  // Whether there are several matrices B, each small enough for one thread.
  bool is_small() const {
    const Dims& b = step_.b.shape;
    const std::int64_t matrices = element_count(Dims(b.begin(), b.end() - 2)).value_or(0);
    return matrices > 1 && shape_.n <= kBlockColumns &&
           b_bytes() <= static_cast<std::size_t>(kSmallBytes) && !step_.epilogue.shares_bytes();
  }

  Status run_small() {
    return parallel_for(shape_.batch, b_bytes() + std::max(pack_scratch(), block_scratch(shape_.n)),
                        [&](std::int64_t batch, std::byte* scratch) {
                          T* b = reinterpret_cast<T*>(scratch);
                          scratch += b_bytes();
                          const Dims matrix =
                              operand_index(batch, step_.epilogue.shape, step_.b.shape);
                          for (std::int64_t part = 0; part < pack_parts(shape_.n); ++part) {
                            pack_b(matrix, 0, shape_.n, part, b, scratch);
                          }
                          for (std::int64_t row = 0; row < shape_.m; row += tile_) {
                            block(batch, row, 0, 0, shape_.n, shape_.n, b, scratch);
                          }
                        });
  }

  // ---- B: panels of nr columns, all of k each, one after the other ----

  std::size_t b_bytes() const {
    const std::int64_t columns = std::min(kBlockColumns, round_up(shape_.n, nr_));
    return bytes_of(std::max<std::int64_t>(shape_.k, 1) * columns, sizeof(T));
  }
  T* b_panel(T* b, std::int64_t panel, std::int64_t k) const {
    return b + (panel * shape_.k + k) * nr_;
  }

  // Parts are some panels, so that along rows expressions are evaluated in long runs, by
  // kBlockDepth of k.
  std::int64_t part_panels() const { return std::max<std::int64_t>(1, kChunk / nr_); }
  std::int64_t pack_parts(std::int64_t columns) const {
    return blocks(blocks(columns, nr_), part_panels()) * blocks(shape_.k, kBlockDepth);
  }
  std::size_t pack_lines() const { return bytes_of(kBlockDepth * nr_, sizeof(T)); }
  std::size_t pack_scratch() const { return pack_lines() + evaluator_scratch(step_.b); }

  void pack_b(const Dims& matrix, std::int64_t first, std::int64_t columns, std::int64_t part, T* b,
              std::byte* scratch) const {
    Reader<T> reader{kernels_, step_, OperandSide::right, roots_, scratch + pack_lines()};
    T* buffer = reinterpret_cast<T*>(scratch);
    Dims index = matrix;
    std::int64_t& row = index[index.size() - 2];
    std::int64_t& column = index[index.size() - 1];
    const std::int64_t steps = blocks(shape_.k, kBlockDepth);
    const std::int64_t k_first = part % steps * kBlockDepth;
    const std::int64_t depth = std::min(kBlockDepth, shape_.k - k_first);
    const std::int64_t panel_first = part / steps * part_panels();
    const std::int64_t panel_end = std::min(blocks(columns, nr_), panel_first + part_panels());
    if (reader.prefers_columns()) {
      for (std::int64_t panel = panel_first; panel < panel_end; ++panel) {
        const std::int64_t width = std::min<std::int64_t>(nr_, columns - panel * nr_);
        for (std::int64_t j = 0; j < width; ++j) {
          row = k_first;
          column = first + panel * nr_ + j;
          reader.read(index, true, depth, buffer + j * kBlockDepth);
        }
        interleave(buffer, kBlockDepth, width, nr_, depth, b_panel(b, panel, k_first));
      }
      return;
    }
    const std::int64_t width = std::min(columns, panel_end * nr_) - panel_first * nr_;
    std::fill(buffer + width, buffer + (panel_end - panel_first) * nr_, T{0});
    column = first + panel_first * nr_;
    for (std::int64_t k = k_first; k < k_first + depth; ++k) {
      row = k;
      reader.read(index, false, width, buffer);
      for (std::int64_t panel = panel_first; panel < panel_end; ++panel) {
        const T* from = buffer + (panel - panel_first) * nr_;
        std::copy(from, from + nr_, b_panel(b, panel, k));
      }
    }
  }

  // ---- C ----

  // Columns that one task computes: all, or fewer where there are too few blocks of rows for all
  // threads.
  std::int64_t task_columns(std::int64_t row_blocks, std::int64_t columns) const {
    const std::int64_t wanted = 4 * std::int64_t{thread_count()};
    const std::int64_t parts = std::max<std::int64_t>(1, wanted / row_blocks);
    return std::min(columns, round_up(std::max(blocks(columns, parts), kChunk), nr_));
  }

  Status multiply(std::int64_t batch_first, std::int64_t batch_end, std::int64_t first,
                  std::int64_t columns) {
    const std::int64_t row_blocks = blocks(shape_.m, tile_);
    const std::int64_t all_rows = (batch_end - batch_first) * row_blocks;
    const bool serial = step_.epilogue.shares_bytes();
    const std::int64_t width = serial ? columns : task_columns(all_rows, columns);
    const std::int64_t parts = blocks(columns, width);
    const std::int64_t tasks = all_rows * parts;
    const std::int64_t per_call = serial ? tasks : 1;
    return parallel_for(
        tasks / per_call, block_scratch(width), [&](std::int64_t call, std::byte* scratch) {
          for (std::int64_t t = 0; t < per_call; ++t) {
            const std::int64_t task = call * per_call + t;
            const std::int64_t rows = task / parts;
            const std::int64_t start = task % parts * width;
            block(batch_first + rows / row_blocks, rows % row_blocks * tile_, first, start,
                  std::min(width, columns - start), width, b_packed_, scratch);
          }
        });
  }

  std::size_t c_bytes(std::int64_t width) const {
    return bytes_of(tile_ * round_up(width, nr_), sizeof(T));
  }
  std::size_t a_bytes() const { return bytes_of(tile_ * kBlockDepth, sizeof(T)); }
  std::size_t line_bytes() const { return bytes_of(mr_ * kBlockDepth, sizeof(T)); }

  std::size_t block_scratch(std::int64_t width) const {
    return c_bytes(width) + a_bytes() + line_bytes() +
           std::max(evaluator_scratch(step_.a), Epilogue<T>::scratch_bytes(step_));
  }

  // Rows [row, row + tile) and columns [start, start + columns) of the packed ones, which begin at
  // column `first` of C.
  void block(std::int64_t batch, std::int64_t row, std::int64_t first, std::int64_t start,
             std::int64_t columns, std::int64_t width, T* b, std::byte* scratch) const {
    T* c = reinterpret_cast<T*>(scratch);
    T* a = reinterpret_cast<T*>(scratch += c_bytes(width));
    T* lines = reinterpret_cast<T*>(scratch += a_bytes());
    std::byte* evaluator = scratch += line_bytes();

    const std::int64_t rows = std::min<std::int64_t>(tile_, shape_.m - row);
    TileProduct<T> product;
    product.c = c;
    product.ldc = round_up(width, nr_);
    product.a = a;
    product.m = round_up(rows, mr_);
    product.n = round_up(columns, nr_);
    product.b_panel = shape_.k * nr_;
    Reader<T> reader{kernels_, step_, OperandSide::left, roots_, evaluator};
    std::int64_t k = 0;
    do {
      const std::int64_t depth = std::min(kBlockDepth, shape_.k - k);
      pack_a(reader, batch, row, rows, k, depth, lines, a);
      product.a_panel = mr_ * depth;
      product.b = b_panel(b, start / nr_, k);
      product.k = depth;
      product.accumulate = k > 0;
      kernels_.product<T>().product[static_cast<int>(AForm::packed)](product);
      k += kBlockDepth;
    } while (k < shape_.k);

    Epilogue<T>{kernels_, step_, roots_}.run(batch, row, rows, first + start, columns, c,
                                             product.ldc, evaluator);
  }

  void pack_a(Reader<T>& reader, std::int64_t batch, std::int64_t row, std::int64_t rows,
              std::int64_t k, std::int64_t depth, T* lines, T* a) const {
    Dims index = operand_index(batch, step_.epilogue.shape, step_.a.shape);
    std::int64_t& index_row = index[index.size() - 2];
    index.back() = k;
    for (std::int64_t done = 0; done < rows; done += mr_, a += mr_ * depth) {
      const std::int64_t count = std::min<std::int64_t>(mr_, rows - done);
      if (reader.prefers_columns()) {
        std::fill(a, a + mr_ * depth, T{0});
        index_row = row + done;
        for (std::int64_t step = 0; step < depth; ++step) {
          index.back() = k + step;
          reader.read(index, true, count, a + step * mr_);
        }
        continue;
      }
      for (std::int64_t i = 0; i < count; ++i) {
        index_row = row + done + i;
        reader.read(index, false, depth, lines + i * kBlockDepth);
      }
      interleave(lines, kBlockDepth, count, mr_, depth, a);
    }
  }

  const Kernels& kernels_;
  const MatmulStep& step_;
  const std::vector<std::byte*>& roots_;
  const MatmulShape shape_;
  const std::int64_t mr_;
  const std::int64_t nr_;
  const std::int64_t tile_;
  T* b_packed_;
};

}  // namespace

std::size_t matmul_workspace(const Kernels& kernels, const MatmulStep& step) {
  if (has_few_rows(step)) return 0;
  switch (step.compute) {
    case MatmulStep::Compute::f32:
      return Matmul<float>{kernels, step, {}, nullptr}.workspace();
    case MatmulStep::Compute::f64:
      return Matmul<double>{kernels, step, {}, nullptr}.workspace();
    case MatmulStep::Compute::i32:
      return Matmul<std::uint32_t>{kernels, step, {}, nullptr}.workspace();
  }
  return 0;
}

Status run_matmul(const Kernels& kernels, const MatmulStep& step,
                  const std::vector<std::byte*>& roots, std::byte* workspace) {
  if (has_few_rows(step)) return run_few_rows(kernels, step, roots);
  switch (step.compute) {
    case MatmulStep::Compute::f32:
      return Matmul<float>{kernels, step, roots, workspace}.run();
    case MatmulStep::Compute::f64:
      return Matmul<double>{kernels, step, roots, workspace}.run();
    case MatmulStep::Compute::i32:
      return Matmul<std::uint32_t>{kernels, step, roots, workspace}.run();
  }
  return {};
}

}  // namespace lawson::cpu
