// layer_norm and rms_norm, forward and backward: parallel over slices, or for the parameters'
// gradients over pieces of a slice. All sums are in double and in an order that the number of
// threads does not change; the variance is of a second pass, around the mean.
#include <algorithm>
#include <cmath>

#include "engine/cpu/pool.h"
#include "engine/cpu/program.h"

namespace lawson::cpu {
namespace {

using Forward = ir::Norm;
using Backward = ir::NormBackward;

constexpr std::int64_t kPiece = 4096;            // elements of a slice that are at hand at once
constexpr std::int64_t kTaskElements = 1 << 14;  // of a task over slices, about
constexpr std::int64_t kParameterTasks = 64;
constexpr std::int64_t kLeastSlices = 32;  // that are worth a task of their own

// How the parameters' gradients are cut: pieces of a slice, times blocks of slices where there are
// too few pieces for many threads.
struct ParameterCut {
  std::int64_t slices = 0;
  std::int64_t length = 0;  // of a slice
  std::int64_t pieces = 0;
  std::int64_t slice_blocks = 0;
  std::int64_t block_slices = 0;

  explicit ParameterCut(const NormStep& step)
      : slices{element_count(step.kept).value_or(0)},
        length{element_count(step.slice).value_or(0)},
        pieces{blocks(length, kChunk)} {
    const std::int64_t wanted = blocks(kParameterTasks, std::max<std::int64_t>(pieces, 1));
    block_slices = std::max(kLeastSlices, blocks(slices, wanted));
    slice_blocks = std::max<std::int64_t>(1, blocks(slices, block_slices));
  }
  // Sums of each block, for dscale and for dbias; one block stores its own.
  std::int64_t partial_sums() const { return slice_blocks > 1 ? slice_blocks * 2 * length : 0; }
};

template <typename T>
class Norm {
 public:
  Norm(const Kernels& kernels, const NormStep& step, const std::vector<std::byte*>& roots)
      : kernels_{kernels},
        math_{kernels.math<T>()},
        step_{step},
        roots_{roots},
        slices_{element_count(step.kept).value_or(0)},
        length_{element_count(step.slice).value_or(0)} {}

  Status forward() const {
    return over_slices(Forward::y, [&](const Dims& slice, T* const* buffers) {
      const NormStatistics at = statistics(slice, buffers[0]);
      store_scalar(Forward::mean, slice, at.mean);
      store_scalar(Forward::inv_std, slice, at.inv_std);
      if (!step_.outputs[Forward::y]) return;
      for (std::int64_t first = 0; first < length_; first += kPiece) {
        const std::int64_t count = std::min(kPiece, length_ - first);
        const T* x = again(Forward::x, slice, first, count, buffers[0]);
        const T* scale = shared(Forward::scale, first, count, buffers[1]);
        const T* bias = shared(Forward::bias, first, count, buffers[2]);
        math_.norm_apply(x, scale, bias, buffers[3], count, at);
        store(Forward::y, slice, first, count, buffers[3]);
      }
    });
  }

  Status backward(double* partial_sums) const {
    LAWSON_CHECK(input_gradient());
    return parameter_gradients(partial_sums);
  }

 private:
  static constexpr std::int64_t kBuffers = 4;

  // Calls `visit(index of the slice, buffers of kPiece elements)` for every slice. `result` is the
  // slot of what is stored for each element.
  template <typename F>
  Status over_slices(int result, F visit) const {
    const auto most = [&](std::int64_t n) { return std::max<std::int64_t>(n, 1); };
    const std::int64_t per_task =
        shares_bytes(result) ? most(slices_) : most(kTaskElements / most(length_));
    return parallel_for(blocks(slices_, per_task), kBuffers * kPiece * sizeof(T),
                        [&](std::int64_t task, std::byte* scratch) {
                          std::array<T*, kBuffers> buffers{};
                          for (std::size_t i = 0; i < buffers.size(); ++i) {
                            buffers[i] = reinterpret_cast<T*>(scratch) + i * kPiece;
                          }
                          const std::int64_t end = std::min(slices_, (task + 1) * per_task);
                          for (std::int64_t slice = task * per_task; slice < end; ++slice) {
                            visit(index_of(slice, step_.kept), buffers.data());
                          }
                        });
  }

  static Dims index_of(std::int64_t number, const Dims& shape) {
    Dims index(shape.size(), 0);
    for (std::size_t i = shape.size(); i-- > 0;) {
      index[i] = number % shape[i];
      number /= shape[i];
    }
    return index;
  }

  std::byte* data(const Location& location) const {
    return roots_[static_cast<std::size_t>(location.root)];
  }

  std::int64_t offset(const Location& location, const Dims& slice) const {
    std::int64_t at = location.offset;
    for (std::size_t i = 0; i < slice.size(); ++i) at += slice[i] * location.strides[i];
    return at;
  }

  // Calls `visit(offset in memory, stride, elements done, count)` for the runs along the last axis
  // that make up elements [first, first + count) of a slice.
  template <typename F>
  void over_runs(const Location& location, std::int64_t base, std::int64_t first,
                 std::int64_t count, F visit) const {
    const std::size_t kept = step_.kept.size();
    const std::int64_t width = step_.slice.back();
    if (step_.slice.size() == 1) {
      visit(base + first * location.strides[kept], location.strides[kept], std::int64_t{0}, count);
      return;
    }
    for (std::int64_t done = 0; done < count;) {
      const Dims index = index_of(first + done, step_.slice);
      const std::int64_t run = std::min(count - done, width - index.back());
      std::int64_t at = base;
      for (std::size_t i = 0; i < index.size(); ++i) at += index[i] * location.strides[kept + i];
      visit(at, location.strides.back(), done, run);
      done += run;
    }
  }

  void load(const Location& location, std::int64_t base, std::int64_t first, std::int64_t count,
            T* out) const {
    over_runs(location, base, first, count,
              [&](std::int64_t at, std::int64_t stride, std::int64_t done, std::int64_t run) {
                load_elements(kernels_, data(location), location.dtype, at, stride, run,
                              out + done);
              });
  }

  const T* piece(int slot, const Dims& slice, std::int64_t first, std::int64_t count,
                 T* buffer) const {
    const Location& from = *step_.inputs[static_cast<std::size_t>(slot)];
    load(from, offset(from, slice), first, count, buffer);
    return buffer;
  }

  // The same for a later pass: still in the buffer if a slice is one piece.
  const T* again(int slot, const Dims& slice, std::int64_t first, std::int64_t count,
                 T* buffer) const {
    return length_ <= kPiece ? buffer : piece(slot, slice, first, count, buffer);
  }

  // Of an operand that all slices share; zeros where it is absent.
  const T* shared(int slot, std::int64_t first, std::int64_t count, T* buffer) const {
    const auto& from = step_.inputs[static_cast<std::size_t>(slot)];
    if (from) {
      load(*from, from->offset, first, count, buffer);
    } else {
      std::fill(buffer, buffer + count, T{0});
    }
    return buffer;
  }

  void store(int slot, const Dims& slice, std::int64_t first, std::int64_t count,
             const T* values) const {
    const Location& to = *step_.outputs[static_cast<std::size_t>(slot)];
    over_runs(to, offset(to, slice), first, count,
              [&](std::int64_t at, std::int64_t stride, std::int64_t done, std::int64_t run) {
                store_elements(kernels_, data(to), to.dtype, at, stride, run, values + done);
              });
  }

  void store_scalar(int slot, const Dims& slice, double value) const {
    const auto& to = step_.outputs[static_cast<std::size_t>(slot)];
    if (to) store_elements(kernels_, data(*to), to->dtype, offset(*to, slice), 1, 1, &value);
  }
  double load_scalar(int slot, const Dims& slice) const {
    const auto& from = step_.inputs[static_cast<std::size_t>(slot)];
    return from ? load_element(data(*from), from->dtype, offset(*from, slice)) : 0;
  }

  NormStatistics statistics(const Dims& slice, T* buffer) const {
    const auto count = static_cast<double>(length_);
    NormStatistics at;
    double sum = 0;
    double squares = 0;
    for (std::int64_t first = 0; first < length_; first += kPiece) {
      const std::int64_t n = std::min(kPiece, length_ - first);
      const T* x = piece(Forward::x, slice, first, n, buffer);
      if (step_.kind == ir::NormKind::layer) {
        sum += math_.norm_sum(x, n);
      } else {
        squares += math_.norm_squares(x, n, 0);
      }
    }
    if (step_.kind == ir::NormKind::layer) {
      at.mean = sum / count;
      for (std::int64_t first = 0; first < length_; first += kPiece) {
        const std::int64_t n = std::min(kPiece, length_ - first);
        squares += math_.norm_squares(again(Forward::x, slice, first, n, buffer), n, at.mean);
      }
    }
    at.inv_std = 1 / std::sqrt(squares / count + step_.eps);
    return at;
  }

  NormStatistics given_statistics(const Dims& slice) const {
    return {load_scalar(Backward::mean, slice), load_scalar(Backward::inv_std, slice)};
  }

  // dx = inv_std (g - mean(g) - u mean(g u)) with g = dy scale and u the normalised x; an rms norm
  // has no mean(g).
  Status input_gradient() const {
    if (!step_.outputs[Backward::dx]) return {};
    return over_slices(Backward::dx, [&](const Dims& slice, T* const* buffers) {
      const NormStatistics at = given_statistics(slice);
      const auto over_pieces = [&](auto read, auto visit) {
        for (std::int64_t first = 0; first < length_; first += kPiece) {
          const std::int64_t count = std::min(kPiece, length_ - first);
          visit(first, count, (this->*read)(Backward::dy, slice, first, count, buffers[0]),
                (this->*read)(Backward::x, slice, first, count, buffers[1]),
                shared(Backward::scale, first, count, buffers[2]));
        }
      };
      NormSums mean;
      over_pieces(&Norm::piece,
                  [&](std::int64_t, std::int64_t count, const T* dy, const T* x, const T* scale) {
                    const NormSums sums = math_.norm_sums(dy, x, scale, count, at);
                    mean.gradient += sums.gradient;
                    mean.product += sums.product;
                  });
      mean.gradient =
          step_.kind == ir::NormKind::layer ? mean.gradient / static_cast<double>(length_) : 0;
      mean.product /= static_cast<double>(length_);
      over_pieces(&Norm::again, [&](std::int64_t first, std::int64_t count, const T* dy, const T* x,
                                    const T* scale) {
        math_.norm_gradient(dy, x, scale, buffers[3], count, at, mean);
        store(Backward::dx, slice, first, count, buffers[3]);
      });
    });
  }

  Status parameter_gradients(double* partial_sums) const {
    if (!step_.outputs[Backward::dscale] && !step_.outputs[Backward::dbias]) return {};
    const ParameterCut cut{step_};
    const bool serial = shares_bytes(Backward::dscale) || shares_bytes(Backward::dbias);
    const std::int64_t tasks = cut.pieces * cut.slice_blocks;
    const bool alone = cut.slice_blocks == 1;
    // 4-bit elements of neighbouring pieces share bytes.
    const auto over_tasks = [&](std::int64_t count, bool stores, auto visit) {
      const std::int64_t per_call = stores && serial ? count : 1;
      return parallel_for(blocks(count, std::max<std::int64_t>(per_call, 1)),
                          4 * kChunk * sizeof(double), [&](std::int64_t call, std::byte* scratch) {
                            for (std::int64_t i = 0; i < per_call; ++i) {
                              visit(call * per_call + i, reinterpret_cast<double*>(scratch));
                            }
                          });
    };
    LAWSON_CHECK(over_tasks(tasks, alone, [&](std::int64_t task, double* sums) {
      const std::int64_t block = task / cut.pieces;
      const std::int64_t first = task % cut.pieces * kChunk;
      const std::int64_t count = std::min(kChunk, length_ - first);
      std::fill(sums, sums + 2 * kChunk, 0.0);
      T* dy = reinterpret_cast<T*>(sums + 2 * kChunk);
      T* x = dy + kChunk;
      const std::int64_t end = std::min(slices_, (block + 1) * cut.block_slices);
      for (std::int64_t s = block * cut.block_slices; s < end; ++s) {
        const Dims slice = index_of(s, step_.kept);
        piece(Backward::dy, slice, first, count, dy);
        piece(Backward::x, slice, first, count, x);
        math_.norm_parameters(dy, x, count, given_statistics(slice), sums, sums + kChunk);
      }
      if (alone) {
        store_parameters(first, count, sums, sums + kChunk);
      } else {
        double* partial = partial_sums + block * 2 * length_ + first;
        std::copy(sums, sums + count, partial);
        std::copy(sums + kChunk, sums + kChunk + count, partial + length_);
      }
    }));
    if (alone) return {};
    return over_tasks(cut.pieces, true, [&](std::int64_t task, double* sums) {
      const std::int64_t first = task * kChunk;
      const std::int64_t count = std::min(kChunk, length_ - first);
      std::fill(sums, sums + 2 * kChunk, 0.0);
      for (std::int64_t block = 0; block < cut.slice_blocks; ++block) {
        const double* partial = partial_sums + block * 2 * length_ + first;
        kernels_.math_f64.add(sums, partial, count);
        kernels_.math_f64.add(sums + kChunk, partial + length_, count);
      }
      store_parameters(first, count, sums, sums + kChunk);
    });
  }

  bool shares_bytes(int slot) const {
    const auto& to = step_.outputs[static_cast<std::size_t>(slot)];
    return to && bit_width(to->dtype) < 8;
  }

  void store_parameters(std::int64_t first, std::int64_t count, const double* dscale,
                        const double* dbias) const {
    store_shared(Backward::dscale, first, count, dscale);
    store_shared(Backward::dbias, first, count, dbias);
  }

  void store_shared(int slot, std::int64_t first, std::int64_t count, const double* sums) const {
    const auto& to = step_.outputs[static_cast<std::size_t>(slot)];
    if (!to) return;
    over_runs(*to, to->offset, first, count,
              [&](std::int64_t at, std::int64_t stride, std::int64_t done, std::int64_t run) {
                store_elements(kernels_, data(*to), to->dtype, at, stride, run, sums + done);
              });
  }

  const Kernels& kernels_;
  const MathKernels<T>& math_;
  const NormStep& step_;
  const std::vector<std::byte*>& roots_;
  const std::int64_t slices_;
  const std::int64_t length_;
};

template <typename T>
Status run_as(const Kernels& kernels, const NormStep& step, const std::vector<std::byte*>& roots,
              std::byte* workspace) {
  const Norm<T> norm{kernels, step, roots};
  return step.backward ? norm.backward(reinterpret_cast<double*>(workspace)) : norm.forward();
}

}  // namespace

std::size_t norm_workspace(const NormStep& step) {
  const bool sums = step.backward && (step.outputs[Backward::dscale].has_value() ||
                                      step.outputs[Backward::dbias].has_value());
  return sums ? static_cast<std::size_t>(ParameterCut{step}.partial_sums()) * sizeof(double) : 0;
}

Status run_norm(const Kernels& kernels, const NormStep& step, const std::vector<std::byte*>& roots,
                std::byte* workspace) {
  return step.wide ? run_as<double>(kernels, step, roots, workspace)
                   : run_as<float>(kernels, step, roots, workspace);
}

}  // namespace lawson::cpu
