// What each step does to one element, for the host and the device alike. steps.cu runs these over a
// grid, a warp for each item and a lane for each column; the tests run them in loops. Arguments are
// plain structs with the pointers in them (steps_arguments.h makes them from a step). Integers are
// 64 bits wide: a tensor may have more than 2^31 elements.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/dtype.h"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define LAWSON_HD __host__ __device__ inline
#else
#define LAWSON_HD inline
#endif

namespace lawson::cudnn::steps {

using Index = std::int64_t;

// ---- memory ---------------------------------------------------------------------------------

template <typename T>
LAWSON_HD T read(const void* data, Index index) {
#ifdef __CUDA_ARCH__
  return static_cast<const T*>(data)[index];
#else
  T value;
  std::memcpy(&value, static_cast<const char*>(data) + index * Index{sizeof(T)}, sizeof(T));
  return value;
#endif
}

template <typename T>
LAWSON_HD void write(void* data, Index index, T value) {
#ifdef __CUDA_ARCH__
  static_cast<T*>(data)[index] = value;
#else
  std::memcpy(static_cast<char*>(data) + index * Index{sizeof(T)}, &value, sizeof(T));
#endif
}

LAWSON_HD float float_of_bits(std::uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

LAWSON_HD std::uint32_t bits_of_float(float value) {
  std::uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

LAWSON_HD float infinity() {
  return float_of_bits(0x7F800000U);
}

LAWSON_HD float float_of_half(std::uint16_t half) {
#ifdef __CUDA_ARCH__
  return __half2float(__ushort_as_half(half));
#else
  const std::uint32_t sign = (half & 0x8000U) << 16;
  const std::uint32_t magnitude = half & 0x7FFFU;
  if (magnitude >= 0x7C00U) return float_of_bits(sign | 0x7F800000U | (magnitude & 0x3FFU) << 13);
  // Exponents are off by 112; a multiplication puts that right, for subnormals too.
  return float_of_bits(sign | magnitude << 13) * 0x1p112F;
#endif
}

LAWSON_HD std::uint16_t half_of_float(float value) {
#ifdef __CUDA_ARCH__
  return __half_as_ushort(__float2half_rn(value));
#else
  const std::uint32_t bits = bits_of_float(value);
  const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000U);
  const float magnitude = float_of_bits(bits & 0x7FFFFFFFU);
  if (!(magnitude <= 0x1p15F * 2)) {
    return magnitude == magnitude ? static_cast<std::uint16_t>(sign | 0x7C00U)
                                  : static_cast<std::uint16_t>(0x7FFFU);  // as the device has it
  }
  std::uint32_t rounded = 0;
  if (magnitude < 0x1p-14F) {
    // Below the normal numbers the addition rounds to multiples of 2^-24.
    rounded = bits_of_float(magnitude + 0x1p-1F) - bits_of_float(0x1p-1F);
  } else {
    const std::uint32_t normal = (bits & 0x7FFFFFFFU) - (112U << 23);
    rounded = (normal + 0xFFFU + (normal >> 13 & 1U)) >> 13;
  }
  return static_cast<std::uint16_t>(sign | rounded);
#endif
}

LAWSON_HD float float_of_bfloat(std::uint16_t value) {
  return float_of_bits(static_cast<std::uint32_t>(value) << 16);
}

LAWSON_HD std::uint16_t bfloat_of_float(float value) {
#ifdef __CUDA_ARCH__
  return __bfloat16_as_ushort(__float2bfloat16_rn(value));
#else
  const std::uint32_t bits = bits_of_float(value);
  if (value != value) return 0x7FFFU;  // as the device has it
  return static_cast<std::uint16_t>((bits + 0x7FFFU + (bits >> 16 & 1U)) >> 16);
#endif
}

// f32, f16 or bf16, as check_step() sees to.
LAWSON_HD float load_float(const void* data, DType dtype, Index index) {
  if (dtype == DType::f32) return read<float>(data, index);
  const auto bits = read<std::uint16_t>(data, index);
  return dtype == DType::f16 ? float_of_half(bits) : float_of_bfloat(bits);
}

LAWSON_HD void store_float(void* data, DType dtype, Index index, float value) {
  if (dtype == DType::f32) {
    write(data, index, value);
  } else {
    write(data, index, dtype == DType::f16 ? half_of_float(value) : bfloat_of_float(value));
  }
}

struct alignas(16) Bytes16 {
  std::uint64_t low;
  std::uint64_t high;
};

LAWSON_HD void copy_unit(void* to, const void* from, int width) {
  switch (width) {
    case 16:
      return write(to, 0, read<Bytes16>(from, 0));
    case 8:
      return write(to, 0, read<std::uint64_t>(from, 0));
    case 4:
      return write(to, 0, read<std::uint32_t>(from, 0));
    case 2:
      return write(to, 0, read<std::uint16_t>(from, 0));
    default:
      return write(to, 0, read<std::uint8_t>(from, 0));
  }
}

LAWSON_HD void zero_unit(void* to, int width) {
  switch (width) {
    case 16:
      return write(to, 0, Bytes16{0, 0});
    case 8:
      return write(to, 0, std::uint64_t{0});
    case 4:
      return write(to, 0, std::uint32_t{0});
    case 2:
      return write(to, 0, std::uint16_t{0});
    default:
      return write(to, 0, std::uint8_t{0});
  }
}

LAWSON_HD Index clamped(Index value, Index low, Index high) {
  if (value < low) return low;
  return value > high ? high : value;
}

LAWSON_HD Index blocks_of(Index count, Index size) {
  return (count + size - 1) / size;
}

// ---- shared arguments -----------------------------------------------------------------------

// A tensor by elements. `data` is null where it is absent.
struct Array {
  void* data = nullptr;
  DType dtype = DType::f32;
  Index strides[4] = {};
};

LAWSON_HD Index at3(const Array& array, Index b, Index h, Index i) {
  return b * array.strides[0] + h * array.strides[1] + i * array.strides[2];
}

struct Lengths {
  const void* data = nullptr;  // i32
  Index stride = 0;
};

LAWSON_HD Index length_of(const Lengths& lengths, Index b, Index full) {
  if (lengths.data == nullptr) return full;
  return clamped(read<std::int32_t>(lengths.data, b * lengths.stride), 0, full);
}

// A tensor [b, h, s, units] by bytes: rows are moved in the widest units that its strides allow.
struct Rows {
  char* data = nullptr;
  Index strides[3] = {};  // bytes: b, h, s
  Index unit_stride = 0;  // bytes
  Index units = 0;
  int width = 1;
};

struct PackingArguments {
  Lengths offsets;  // null: dense
  Index tokens = 0;
  Index sequences = 0;  // those behind are not there
};

// The rows of sequence b: in packed tensors `first` ... `first + count - 1` of the whole tensor, in
// dense ones 0 ... count - 1 of the sequence's own.
struct Span {
  Index first = 0;
  Index count = 0;
  Index batch = 0;  // what the strides along b are multiplied with
};

LAWSON_HD Span span_of(const PackingArguments& packing, Index b, Index rows) {
  if (b >= packing.sequences) return {};
  if (packing.offsets.data == nullptr) return {0, rows, b};
  const Index stride = packing.offsets.stride;
  const Index begin =
      clamped(read<std::int32_t>(packing.offsets.data, b * stride), 0, packing.tokens);
  const Index end =
      clamped(read<std::int32_t>(packing.offsets.data, (b + 1) * stride), begin, packing.tokens);
  return {begin, end - begin, 0};
}

// ---- scores: what a row sees, what is added -------------------------------------------------

struct SightArguments {
  Index rows = 0;
  Index columns = 0;
  Lengths seqlen_q;
  Lengths seqlen_kv;
  Index sequences = 0;
  bool bottom_right = false;
  Index left = -1;
  Index right = -1;
};

// Row i of sequence b sees the columns first ... last, none where last < first.
struct Sight {
  Index row = 0;  // i' of ir::AttentionRule
  Index first = 0;
  Index last = -1;
  bool present = false;  // the sequence is there
};

LAWSON_HD Sight sight_of(const SightArguments& a, Index b, Index i) {
  Sight sight;
  sight.row = i;
  if (b >= a.sequences) return sight;
  sight.present = true;
  const Index q = length_of(a.seqlen_q, b, a.rows);
  const Index kv = length_of(a.seqlen_kv, b, a.columns);
  if (a.bottom_right) sight.row += kv - q;
  if (i >= q) return sight;
  if (a.left >= 0 && sight.row > a.left) sight.first = sight.row - a.left;
  sight.last = kv - 1;
  if (a.right >= 0 && sight.row + a.right < sight.last) sight.last = sight.row + a.right;
  return sight;
}

struct TermArguments {
  Array bias;
  float factor = 1;
  Array mask;
  bool mask_is_bool = false;
};

// The terms of one row of scores.
struct TermRow {
  Index bias = 0;  // elements from the start
  Index mask = 0;
};

LAWSON_HD TermRow term_row(const TermArguments& a, Index b, Index h, Index i) {
  return {at3(a.bias, b, h, i), at3(a.mask, b, h, i)};
}

LAWSON_HD bool is_finite(float value) {
  return fabsf(value) < infinity();
}

// What overflowed becomes the largest that does not.
LAWSON_HD float without_overflow(float value) {
  constexpr float kLargest = 0x1.FFFFFEp127F;
  if (value > kLargest) return kLargest;
  return value < -kLargest ? -kLargest : value;
}

// -inf where the score is hidden: where a bool mask is false, or -inf is added. Finite terms never
// make it so: some masks have the lowest finite value, and that twice.
LAWSON_HD float term(const TermArguments& a, const TermRow& row, Index j) {
  float bias = 0;
  if (a.bias.data != nullptr) {
    const float given = load_float(a.bias.data, a.bias.dtype, row.bias + j * a.bias.strides[3]);
    bias = is_finite(given) ? without_overflow(a.factor * given) : a.factor * given;
  }
  if (a.mask.data == nullptr) return bias;
  const Index at = row.mask + j * a.mask.strides[3];
  if (a.mask_is_bool) return read<std::uint8_t>(a.mask.data, at) != 0 ? bias : -infinity();
  const float mask = load_float(a.mask.data, a.mask.dtype, at);
  return is_finite(bias) && is_finite(mask) ? without_overflow(bias + mask) : bias + mask;
}

LAWSON_HD bool is_hidden(float term) {
  return term == -infinity();
}

// Press et al. 2022: powers of 2^(-8/n) for n = 2^k heads; other head counts take the slopes of the
// power of two below, then every second one of twice that power.
LAWSON_HD float press_slope(Index h, Index heads) {
  Index power = 1;
  while (power * 2 <= heads) power *= 2;
  const bool regular = h < power;
  const Index step = regular ? h + 1 : 2 * (h - power) + 1;
  const Index steps = regular ? power : 2 * power;
  return static_cast<float>(exp2(-8.0 * static_cast<double>(step) / static_cast<double>(steps)));
}

// ---- ragged ---------------------------------------------------------------------------------

inline constexpr int kMaxOffsets = 6;

struct RaggedArguments {
  Index bucket = 0;
  Index max_length = 0;
  Index sequences = 0;
  Lengths cu_seqlens;
  Lengths starts;  // cu_seqlens_padded, or cu_seqlens
  Lengths lengths;
  Array seqlen;  // i32
  struct Offsets {
    Array out;  // i32 or i64
    Index row_stride = 0;
  } offsets[kMaxOffsets];
};

inline constexpr Index kRaggedChunk = 32;

LAWSON_HD Index items(const RaggedArguments& a) {
  return blocks_of(a.bucket + 1, kRaggedChunk);
}

LAWSON_HD void ragged(const RaggedArguments& a, Index n) {
  const bool present = n < a.sequences;
  if (n < a.bucket && a.seqlen.data != nullptr) {
    Index length = 0;
    if (present && a.lengths.data != nullptr) {
      length = read<std::int32_t>(a.lengths.data, n * a.lengths.stride);
    } else if (present && a.cu_seqlens.data != nullptr) {
      const Index stride = a.cu_seqlens.stride;
      length = Index{read<std::int32_t>(a.cu_seqlens.data, (n + 1) * stride)} -
               read<std::int32_t>(a.cu_seqlens.data, n * stride);
    } else if (present) {
      length = a.max_length;
    }
    write(a.seqlen.data, n * a.seqlen.strides[0],
          static_cast<std::int32_t>(clamped(length, 0, a.max_length)));
  }
  if (a.starts.data == nullptr) return;
  const Index source = present ? n : a.sequences;
  const Index start = read<std::int32_t>(a.starts.data, source * a.starts.stride);
  for (const auto& offsets : a.offsets) {
    if (offsets.out.data == nullptr) continue;
    const Index offset = start * offsets.row_stride;
    const Index at = n * offsets.out.strides[0];
    if (offsets.out.dtype == DType::i64) {
      write(offsets.out.data, at, offset);
    } else {
      write(offsets.out.data, at, static_cast<std::int32_t>(offset));
    }
  }
}

// ---- score_bias -----------------------------------------------------------------------------

struct ScoreBiasArguments {
  Index batch = 0;
  Index heads = 0;
  SightArguments sight;
  TermArguments terms;
  bool alibi = false;
  Array slopes;
  bool hide_unseen = false;
  Array out;
};

// What stands for a hidden score, so low that its softmax weight is 0 beside any that is not
// hidden: cuDNN computes exp2((x - max) * log2(e)), so the product must stay finite: half of f32's
// range does. Scores that are not hidden are kept above half of that value, so that a hidden one
// stays negligible beside the lowest bias; below that, all are equally low. f16 has its lowest
// value.
LAWSON_HD float hidden_score(DType dtype) {
  return dtype == DType::f16 ? -65504.0F : -0x1p126F;
}

LAWSON_HD float lowest_score(DType dtype) {
  return hidden_score(dtype) / 2;
}

LAWSON_HD float highest_score(DType dtype) {
  if (dtype == DType::f16) return 65504.0F;
  return float_of_bits(dtype == DType::bf16 ? 0x7F7F0000U : 0x7F7FFFFFU);
}

// +inf and NaN stay what they are.
LAWSON_HD float finite_score(float sum, DType dtype) {
  if (is_hidden(sum)) return hidden_score(dtype);
  if (sum < lowest_score(dtype)) return lowest_score(dtype);
  return sum > highest_score(dtype) && sum != infinity() ? highest_score(dtype) : sum;
}

inline constexpr Index kScoreChunk = 1024;

struct ScoreBiasRow {
  Sight sight;
  TermRow terms;
  float slope = 0;
  Index out = 0;
  Index first = 0;  // column
  Index count = 0;
};

LAWSON_HD Index items(const ScoreBiasArguments& a) {
  return a.batch * a.heads * a.sight.rows * blocks_of(a.sight.columns, kScoreChunk);
}

LAWSON_HD ScoreBiasRow row_of(const ScoreBiasArguments& a, Index item) {
  const Index chunks = blocks_of(a.sight.columns, kScoreChunk);
  const Index line = item / chunks;
  const Index i = line % a.sight.rows;
  const Index matrix = line / a.sight.rows;
  const Index h = matrix % a.heads;
  const Index b = matrix / a.heads;
  ScoreBiasRow row;
  row.sight = sight_of(a.sight, b, i);
  row.terms = term_row(a.terms, b, h, i);
  if (a.alibi) {
    row.slope = a.slopes.data == nullptr ? press_slope(h, a.heads)
                                         : read<float>(a.slopes.data, h * a.slopes.strides[0]);
  }
  row.out = at3(a.out, b, h, i);
  row.first = (item % chunks) * kScoreChunk;
  row.count = clamped(a.sight.columns - row.first, 0, kScoreChunk);
  return row;
}

LAWSON_HD float score_bias(const ScoreBiasArguments& a, const ScoreBiasRow& row, Index column) {
  const Index j = row.first + column;
  const bool unseen =
      !row.sight.present || (a.hide_unseen && (j < row.sight.first || j > row.sight.last));
  if (unseen) return hidden_score(a.out.dtype);
  float sum = term(a.terms, row.terms, j);
  if (a.alibi) sum += row.slope * static_cast<float>(j - row.sight.row);
  return finite_score(sum, a.out.dtype);
}

LAWSON_HD void store_score(const ScoreBiasArguments& a, const ScoreBiasRow& row, Index column,
                           float value) {
  store_float(a.out.data, a.out.dtype, row.out + (row.first + column) * a.out.strides[3], value);
}

// ---- masked_rows ----------------------------------------------------------------------------

struct MaskedRowsArguments {
  Index batch = 0;
  Index heads = 0;
  SightArguments sight;
  TermArguments terms;
  Array flags;
};

struct MaskedRow {
  TermRow terms;
  Index first = 0;  // columns to look at
  Index count = 0;
  Index flag = 0;
};

LAWSON_HD Index items(const MaskedRowsArguments& a) {
  return a.batch * a.heads * a.sight.rows;
}

LAWSON_HD MaskedRow row_of(const MaskedRowsArguments& a, Index item) {
  const Index i = item % a.sight.rows;
  const Index matrix = item / a.sight.rows;
  const Index h = matrix % a.heads;
  const Index b = matrix / a.heads;
  const Sight sight = sight_of(a.sight, b, i);
  MaskedRow row;
  row.terms = term_row(a.terms, b, h, i);
  row.first = sight.first;
  row.count = sight.last < sight.first ? 0 : sight.last - sight.first + 1;
  row.flag = at3(a.flags, b, h, i);
  return row;
}

LAWSON_HD bool sees_column(const MaskedRowsArguments& a, const MaskedRow& row, Index column) {
  return !is_hidden(term(a.terms, row.terms, row.first + column));
}

LAWSON_HD void store_flag(const MaskedRowsArguments& a, const MaskedRow& row, bool sees) {
  write(a.flags.data, row.flag, static_cast<std::uint8_t>(sees ? 0 : 1));
}

// ---- clear_rows, stats_of_rows, zero_gaps ---------------------------------------------------

inline constexpr int kMaxRowTensors = 3;

struct ClearRowsArguments {
  Index batch = 0;
  Index heads = 0;
  Index rows = 0;
  Array flags;
  PackingArguments packing;
  Rows tensors[kMaxRowTensors];
  Array stats;
  Array max_logit;
  float extra_logit = 0;  // without a sink
  Array sink;
};

struct RowPlace {
  Index b = 0;
  Index h = 0;
  Index row = 0;
  Index count = 0;  // columns: the units of all tensors, and two for stats and max_logit
};

LAWSON_HD Index units_of(const Rows (&tensors)[kMaxRowTensors]) {
  Index units = 0;
  for (const Rows& tensor : tensors) units += tensor.units;
  return units;
}

LAWSON_HD void zero_at(const Rows (&tensors)[kMaxRowTensors], Index b, Index h, Index row,
                       Index unit) {
  for (const Rows& tensor : tensors) {
    if (unit < tensor.units) {
      zero_unit(tensor.data + b * tensor.strides[0] + h * tensor.strides[1] +
                    row * tensor.strides[2] + unit * tensor.unit_stride,
                tensor.width);
      return;
    }
    unit -= tensor.units;
  }
}

LAWSON_HD Index items(const ClearRowsArguments& a) {
  return a.batch * a.heads * a.rows;
}

LAWSON_HD RowPlace row_of(const ClearRowsArguments& a, Index item) {
  const Index i = item % a.rows;
  const Index matrix = item / a.rows;
  const Index h = matrix % a.heads;
  const Index b = matrix / a.heads;
  if (read<std::uint8_t>(a.flags.data, at3(a.flags, b, h, i)) == 0) return {};
  const Span span = span_of(a.packing, b, a.rows);
  if (i >= span.count) return {};
  return {span.batch, h, span.first + i, units_of(a.tensors) + 2};
}

LAWSON_HD void clear_row(const ClearRowsArguments& a, const RowPlace& place, Index column) {
  if (column == 0) {
    if (a.stats.data == nullptr) return;
    const float logit = a.sink.data == nullptr
                            ? a.extra_logit
                            : read<float>(a.sink.data, place.h * a.sink.strides[0]);
    write(a.stats.data, at3(a.stats, place.b, place.h, place.row), logit);
  } else if (column == 1) {
    if (a.max_logit.data == nullptr) return;
    write(a.max_logit.data, at3(a.max_logit, place.b, place.h, place.row), -infinity());
  } else {
    zero_at(a.tensors, place.b, place.h, place.row, column - 2);
  }
}

struct StatsOfRowsArguments {
  Index batch = 0;
  Index heads = 0;
  Index rows = 0;
  Array flags;
  PackingArguments packing;
  Array stats;
  Array sum_exp;
  Array out;
  bool dense_out = false;
};

inline constexpr Index kStatsChunk = 32;

struct StatsPlace {
  Index b = 0;
  Index h = 0;
  Index first = 0;  // row of the sequence
  Index count = 0;
  Span span;
};

LAWSON_HD Index items(const StatsOfRowsArguments& a) {
  return a.batch * a.heads * blocks_of(a.rows, kStatsChunk);
}

LAWSON_HD StatsPlace row_of(const StatsOfRowsArguments& a, Index item) {
  const Index chunks = blocks_of(a.rows, kStatsChunk);
  const Index matrix = item / chunks;
  StatsPlace place;
  place.h = matrix % a.heads;
  place.b = matrix / a.heads;
  place.first = (item % chunks) * kStatsChunk;
  place.span = span_of(a.packing, place.b, a.rows);
  const Index end = a.dense_out || a.rows < place.span.count ? a.rows : place.span.count;
  place.count = clamped(end - place.first, 0, kStatsChunk);
  return place;
}

LAWSON_HD void stats_of_row(const StatsOfRowsArguments& a, const StatsPlace& place, Index column) {
  const Index i = place.first + column;
  const Index row = place.span.first + i;
  bool counts = i < place.span.count;
  if (a.flags.data != nullptr) {
    counts &= read<std::uint8_t>(a.flags.data, at3(a.flags, place.b, place.h, i)) == 0;
  }
  float value = infinity();
  if (counts) {
    value = read<float>(a.stats.data, at3(a.stats, place.span.batch, place.h, row));
    if (a.sum_exp.data != nullptr) {
      value += logf(read<float>(a.sum_exp.data, at3(a.sum_exp, place.span.batch, place.h, row)));
    }
  }
  write(a.out.data,
        a.dense_out ? at3(a.out, place.b, place.h, i) : at3(a.out, place.span.batch, place.h, row),
        value);
}

struct ZeroGapsArguments {
  Index batch = 0;
  Index heads = 0;
  Index rows = 0;
  Lengths lengths;
  PackingArguments packing;
  Rows tensors[kMaxRowTensors];
};

// A sequence's gap may be longer than `rows`, so that the items of a sequence are a fixed number,
// each of which takes every kGapItems-th row.
inline constexpr Index kGapItems = 32;

struct GapPlace {
  Index b = 0;
  Index h = 0;
  Index first = 0;  // row
  Index units = 0;
  Index count = 0;  // rows of this item * units
};

LAWSON_HD Index items(const ZeroGapsArguments& a) {
  return a.batch * a.heads * kGapItems;
}

LAWSON_HD GapPlace row_of(const ZeroGapsArguments& a, Index item) {
  const Index matrix = item / kGapItems;
  const Index b = matrix / a.heads;
  const Span span = span_of(a.packing, b, a.rows);
  const Index length = b < a.packing.sequences ? length_of(a.lengths, b, span.count) : Index{0};
  const Index skipped = length + item % kGapItems;
  GapPlace place;
  place.b = span.batch;
  place.h = matrix % a.heads;
  place.first = span.first + skipped;
  place.units = units_of(a.tensors);
  place.count =
      skipped < span.count ? blocks_of(span.count - skipped, kGapItems) * place.units : Index{0};
  return place;
}

LAWSON_HD void zero_gap(const ZeroGapsArguments& a, const GapPlace& place, Index column) {
  const Index row = place.first + column / place.units * kGapItems;
  zero_at(a.tensors, place.b, place.h, row, column % place.units);
}

// ---- reduce_bias_gradient -------------------------------------------------------------------

// Neumaier's compensated sum: the error does not grow with the number of terms.
struct Sum {
  float sum = 0;
  float carry = 0;

  LAWSON_HD void add(float x) {
    const float next = sum + x;
    carry += fabsf(sum) >= fabsf(x) ? (sum - next) + x : (x - next) + sum;
    sum = next;
  }
  LAWSON_HD void add(const Sum& other) {
    add(other.sum);
    carry += other.carry;
  }
  // An infinite sum has a carry of NaN.
  LAWSON_HD float value() const { return is_finite(sum) ? sum + carry : sum; }
};

// The sum of one element runs over up to four axes, the last of them fastest. `lanes` neighbours
// along the last axis are summed by one block of `lanes` x `parts` threads: part p takes the terms
// p, p + parts, p + 2 parts, ..., and the parts are added up as a tree.
struct ReduceArguments {
  Index kept[4] = {1, 1, 1, 1};    // sizes of the result
  Index summed[4] = {1, 1, 1, 1};  // sizes of what is summed
  Index steps[4] = {0, 0, 0, 0};   // strides of what is summed
  Index terms = 1;                 // product of `summed`
  Index sequences = 0;             // of kept[0]; later ones are left alone
  Array gradient;                  // strides of the kept axes, 0 along the others
  Array bias_gradient;
  float factor = 1;
  int lanes = 1;
  int parts = 1;
};

inline constexpr int kMaxReduceThreads = 1024;

LAWSON_HD Index items(const ReduceArguments& a) {
  return a.kept[0] * a.kept[1] * a.kept[2] * blocks_of(a.kept[3], a.lanes);
}

struct ReducedElement {
  Index gradient = 0;  // of its first term
  Index out = 0;
  Index terms = 0;
  bool exists = false;
};

LAWSON_HD ReducedElement element_of(const ReduceArguments& a, Index item, Index lane) {
  const Index chunks = blocks_of(a.kept[3], a.lanes);
  const Index j = (item % chunks) * a.lanes + lane;
  const Index line = item / chunks;
  const Index i = line % a.kept[2];
  const Index matrix = line / a.kept[2];
  const Index h = matrix % a.kept[1];
  const Index b = matrix / a.kept[1];
  return {at3(a.gradient, b, h, i) + j * a.gradient.strides[3],
          at3(a.bias_gradient, b, h, i) + j * a.bias_gradient.strides[3], a.terms,
          j < a.kept[3] && b < a.sequences};
}

LAWSON_HD Sum part_of(const ReduceArguments& a, const ReducedElement& element, Index part) {
  constexpr int kAtOnce = 4;  // loads in flight
  Index at[4];
  Index rest = part;
  for (int axis = 3; axis >= 0; --axis) {
    at[axis] = rest % a.summed[axis];
    rest /= a.summed[axis];
  }
  Sum sum;
  for (Index term = part; term < element.terms; term += Index{kAtOnce} * a.parts) {
    float values[kAtOnce];
    for (int k = 0; k < kAtOnce; ++k) {
      values[k] = 0;
      if (term + Index{k} * a.parts >= element.terms) continue;
      const Index offset =
          at[0] * a.steps[0] + at[1] * a.steps[1] + at[2] * a.steps[2] + at[3] * a.steps[3];
      values[k] = load_float(a.gradient.data, a.gradient.dtype, element.gradient + offset);
      at[3] += a.parts;
      for (int axis = 3; axis > 0 && at[axis] >= a.summed[axis]; --axis) {
        const Index carried = at[axis] / a.summed[axis];
        at[axis] -= carried * a.summed[axis];
        at[axis - 1] += carried;
      }
    }
    for (const float value : values) sum.add(value);
  }
  return sum;
}

LAWSON_HD void store_reduced(const ReduceArguments& a, const ReducedElement& element,
                             const Sum& sum) {
  store_float(a.bias_gradient.data, a.bias_gradient.dtype, element.out, a.factor * sum.value());
}

// ---- cache_append ---------------------------------------------------------------------------

struct CacheAppendArguments {
  Index batch = 0;
  Index heads = 0;
  Index fresh_rows = 0;
  Index capacity = 0;
  Index page_size = 0;  // 0: dense
  Index pages = 0;
  Rows cache;
  Rows fresh;
  Lengths seqlen_kv;
  Array page_table;
};

struct AppendedRow {
  const char* from = nullptr;
  char* to = nullptr;
  Index count = 0;  // units
};

LAWSON_HD Index items(const CacheAppendArguments& a) {
  return a.batch * a.heads * a.fresh_rows;
}

LAWSON_HD AppendedRow row_of(const CacheAppendArguments& a, Index item) {
  const Index t = item % a.fresh_rows;
  const Index matrix = item / a.fresh_rows;
  const Index h = matrix % a.heads;
  const Index b = matrix / a.heads;
  const Index length = read<std::int32_t>(a.seqlen_kv.data, b * a.seqlen_kv.stride);
  const Index position = length - a.fresh_rows + t;
  if (position < 0 || position >= a.capacity) return {};
  Index slab = b;
  Index row = position;
  if (a.page_size > 0) {
    slab =
        read<std::int32_t>(a.page_table.data, b * a.page_table.strides[0] +
                                                  position / a.page_size * a.page_table.strides[1]);
    row = position % a.page_size;
    if (slab < 0 || slab >= a.pages) return {};
  }
  return {
      a.fresh.data + b * a.fresh.strides[0] + h * a.fresh.strides[1] + t * a.fresh.strides[2],
      a.cache.data + slab * a.cache.strides[0] + h * a.cache.strides[1] + row * a.cache.strides[2],
      a.cache.units};
}

LAWSON_HD void append(const CacheAppendArguments& a, const AppendedRow& row, Index column) {
  copy_unit(row.to + column * a.cache.unit_stride, row.from + column * a.fresh.unit_stride,
            a.cache.width);
}

// ---- convert_mask ---------------------------------------------------------------------------

struct ConvertMaskArguments {
  Index shape[4] = {};
  Array in;
  Array out;
};

inline constexpr Index kMaskChunk = 256;

struct MaskRow {
  Index in = 0;
  Index out = 0;
  Index first = 0;
  Index count = 0;
};

LAWSON_HD Index items(const ConvertMaskArguments& a) {
  return a.shape[0] * a.shape[1] * a.shape[2] * blocks_of(a.shape[3], kMaskChunk);
}

LAWSON_HD MaskRow row_of(const ConvertMaskArguments& a, Index item) {
  const Index chunks = blocks_of(a.shape[3], kMaskChunk);
  MaskRow row;
  row.first = item % chunks * kMaskChunk;
  row.count = clamped(a.shape[3] - row.first, 0, kMaskChunk);
  const Index line = item / chunks;
  const Index i = line % a.shape[2];
  const Index h = line / a.shape[2] % a.shape[1];
  const Index b = line / a.shape[2] / a.shape[1];
  row.in = at3(a.in, b, h, i);
  row.out = at3(a.out, b, h, i);
  return row;
}

LAWSON_HD void convert_mask(const ConvertMaskArguments& a, const MaskRow& row, Index column) {
  const Index j = row.first + column;
  const Index from = row.in + j * a.in.strides[3];
  const float value = a.in.dtype == DType::u8
                          ? static_cast<float>(read<std::uint8_t>(a.in.data, from))
                          : load_float(a.in.data, a.in.dtype, from);
  if (value != value) return;
  const bool kept = value != 0;
  const Index to = row.out + j * a.out.strides[3];
  if (a.out.dtype == DType::u8) {
    write(a.out.data, to, static_cast<std::uint8_t>(kept ? 1 : 0));
  } else {
    store_float(a.out.data, a.out.dtype, to, kept ? 1.0F : 0.0F);
  }
}

}  // namespace lawson::cudnn::steps
