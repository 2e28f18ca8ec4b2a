// The kernels of the steps: steps_rules.h over a grid. A warp takes an item, its lanes the item's
// columns; a grid of any size does all items. steps_launch.cpp has the same names and shapes.
#include "engine/cudnn/steps_rules.h"

namespace lawson::cudnn::steps {
namespace {

constexpr int kWarp = 32;
constexpr int kAtOnce = 4;  // loads in flight for each lane

__device__ int lane() {
  return static_cast<int>(threadIdx.x) % kWarp;
}

template <typename Body>
__device__ void for_each_item(Index items, const Body& body) {
  const Index warps = Index{blockDim.x / kWarp};
  for (Index item = Index{blockIdx.x} * warps + threadIdx.x / kWarp; item < items;
       item += Index{gridDim.x} * warps) {
    body(item);
  }
}

}  // namespace

extern "C" __global__ void lawson_ragged(const __grid_constant__ RaggedArguments a) {
  for_each_item(items(a), [&](Index item) {
    const Index n = item * kRaggedChunk + lane();
    if (n <= a.bucket) ragged(a, n);
  });
}

extern "C" __global__ void __launch_bounds__(256, 3)
    lawson_score_bias(const __grid_constant__ ScoreBiasArguments a) {
  for_each_item(items(a), [&](Index item) {
    const ScoreBiasRow row = row_of(a, item);
    for (Index column = lane(); column < row.count; column += kWarp * kAtOnce) {
      float values[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (column + k * kWarp < row.count) values[k] = score_bias(a, row, column + k * kWarp);
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if (column + k * kWarp < row.count) store_score(a, row, column + k * kWarp, values[k]);
      }
    }
  });
}

extern "C" __global__ void lawson_masked_rows(const __grid_constant__ MaskedRowsArguments a) {
  for_each_item(items(a), [&](Index item) {
    const MaskedRow row = row_of(a, item);
    bool sees = false;
    for (Index begin = 0; begin < row.count && !sees; begin += kWarp * kAtOnce) {
      bool any = false;
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const Index column = begin + k * kWarp + lane();
        if (column < row.count) any |= sees_column(a, row, column);
      }
      sees = __any_sync(0xFFFFFFFFU, any) != 0;
    }
    if (lane() == 0) store_flag(a, row, sees);
  });
}

extern "C" __global__ void lawson_clear_rows(const __grid_constant__ ClearRowsArguments a) {
  for_each_item(items(a), [&](Index item) {
    const RowPlace place = row_of(a, item);
    for (Index column = lane(); column < place.count; column += kWarp) clear_row(a, place, column);
  });
}

extern "C" __global__ void lawson_stats_of_rows(const __grid_constant__ StatsOfRowsArguments a) {
  for_each_item(items(a), [&](Index item) {
    const StatsPlace place = row_of(a, item);
    if (lane() < place.count) stats_of_row(a, place, lane());
  });
}

extern "C" __global__ void __launch_bounds__(kMaxReduceThreads)
    lawson_reduce_bias_gradient(const __grid_constant__ ReduceArguments a) {
  __shared__ float sums[kMaxReduceThreads];
  __shared__ float carries[kMaxReduceThreads];
  const int own = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
  const int part = static_cast<int>(threadIdx.y);
  const Index count = items(a);
  for (Index item = blockIdx.x; item < count; item += gridDim.x) {
    const ReducedElement element = element_of(a, item, threadIdx.x);
    Sum sum;
    if (element.exists) sum = part_of(a, element, part);
    for (int half = a.parts / 2; half > 0; half /= 2) {
      sums[own] = sum.sum;
      carries[own] = sum.carry;
      __syncthreads();
      if (part < half) sum.add({sums[own + half * a.lanes], carries[own + half * a.lanes]});
      __syncthreads();
    }
    if (part == 0 && element.exists) store_reduced(a, element, sum);
  }
}

extern "C" __global__ void lawson_zero_gaps(const __grid_constant__ ZeroGapsArguments a) {
  for_each_item(items(a), [&](Index item) {
    const GapPlace place = row_of(a, item);
    for (Index column = lane(); column < place.count; column += kWarp) zero_gap(a, place, column);
  });
}

extern "C" __global__ void lawson_cache_append(const __grid_constant__ CacheAppendArguments a) {
  for_each_item(items(a), [&](Index item) {
    const AppendedRow row = row_of(a, item);
    for (Index column = lane(); column < row.count; column += kWarp) append(a, row, column);
  });
}

extern "C" __global__ void lawson_convert_mask(const __grid_constant__ ConvertMaskArguments a) {
  for_each_item(items(a), [&](Index item) {
    const MaskRow row = row_of(a, item);
    for (Index column = lane(); column < row.count; column += kWarp) convert_mask(a, row, column);
  });
}

}  // namespace lawson::cudnn::steps
