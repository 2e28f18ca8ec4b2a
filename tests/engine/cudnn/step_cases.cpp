#include "engine/cudnn/step_cases.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>

#include "cases/dice.h"
#include "engine/cudnn/steps_arguments.h"

namespace lawson::cases {
namespace {

using namespace cudnn::steps;

constexpr std::size_t kGuard = 128;
constexpr auto kFloatTypes = {DType::f32, DType::f16, DType::bf16};

// Makes operands and their memory.
class Maker {
 public:
  explicit Maker(std::uint64_t seed) : dice{seed} {}

  // A tensor with the axes of `shape` in a random order in memory, with gaps, elements from a
  // random place on.
  Operand tensor(DType dtype, const Dims& shape, bool written = false) {
    std::vector<std::size_t> order(shape.size());
    std::iota(order.begin(), order.end(), 0U);
    // The last axis is most often the one that is contiguous.
    if (!order.empty() && dice.chance(30)) std::swap(order[pick(order)], order[pick(order)]);
    Dims strides(shape.size());
    std::int64_t stride = dice.chance(10) ? 2 : 1;
    for (std::size_t i = shape.size(); i-- > 0;) {
      strides[order[i]] = stride;
      stride *= std::max<std::int64_t>(shape[order[i]], 1);
      if (dice.chance(20)) stride += dice.below(9);
    }
    return strided(dtype, shape, std::move(strides), written);
  }

  // An input that is repeated along some axes.
  Operand repeated(DType dtype, const Dims& shape) {
    Dims own = shape;
    for (std::int64_t& dim : own) dim = dice.chance(35) ? 1 : dim;
    Operand operand = tensor(dtype, own);
    for (std::size_t axis = 0; axis < shape.size(); ++axis) {
      if (own[axis] == 1) operand.strides[axis] = 0;
    }
    return operand;
  }

  Operand strided(DType dtype, const Dims& shape, Dims strides, bool written) {
    Operand operand{++last_, dtype, std::move(strides)};
    const std::int64_t extent = *storage_extent(shape, operand.strides);
    StepBuffer buffer;
    buffer.dtype = dtype;
    buffer.written = written;
    // Always a multiple of the element, and at times of 16.
    const std::size_t size = byte_size(dtype, 1);
    buffer.begin = kGuard + (dice.chance(50) ? 0 : size * static_cast<std::size_t>(dice.below(8)));
    buffer.bytes.resize(buffer.begin + byte_size(dtype, extent) + kGuard);
    if (!is_float(dtype)) {
      for (std::byte& byte : buffer.bytes) byte = static_cast<std::byte>(dice.below(256));
    } else {
      const auto count = static_cast<std::int64_t>(buffer.bytes.size() / size);
      for (std::int64_t i = 0; i < count; ++i) {
        store_element(buffer.bytes.data(), dtype, i, value(dtype));
      }
    }
    buffers[operand.uid] = std::move(buffer);
    return operand;
  }

  Operand integers(std::vector<std::int64_t> values, DType dtype = DType::i32) {
    const std::int64_t stride = dice.chance(20) ? 3 : 1;
    Operand operand = strided(dtype, {static_cast<std::int64_t>(values.size())}, {stride}, false);
    for (std::size_t i = 0; i < values.size(); ++i) {
      store_element(buffers[operand.uid].data(), dtype, static_cast<std::int64_t>(i) * stride,
                    static_cast<double>(values[i]));
    }
    return operand;
  }

  Operand scalar(DType dtype, double number) {
    Operand operand = strided(dtype, {1}, {1}, false);
    buffers[operand.uid].by_value = true;
    store_element(buffers[operand.uid].data(), dtype, 0, number);
    return operand;
  }

  // Lengths, some of them 0, full, or out of range.
  std::vector<std::int64_t> lengths(std::int64_t count, std::int64_t full) {
    std::vector<std::int64_t> values;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t draw = dice.below(10);
      values.push_back(draw == 0   ? 0
                       : draw == 1 ? full
                       : draw == 2 ? full + 1 + dice.below(5)
                       : draw == 3 ? -dice.below(4)
                                   : dice.below(full + 1));
    }
    return values;
  }

  // Ascending from `first` on, with steps of up to `most`.
  std::vector<std::int64_t> ascending(std::int64_t count, std::int64_t first, std::int64_t most) {
    std::vector<std::int64_t> values;
    for (std::int64_t at = first; static_cast<std::int64_t>(values.size()) < count;) {
      values.push_back(at);
      at += dice.chance(20) ? 0 : dice.below(most + 1);
    }
    return values;
  }

  DType float_type() { return dice.pick(kFloatTypes); }

  Dice dice;
  std::map<std::int64_t, StepBuffer> buffers;

 private:
  std::size_t pick(const std::vector<std::size_t>& order) {
    return static_cast<std::size_t>(dice.below(static_cast<std::int64_t>(order.size())));
  }

  // Mostly of the size of scores; some -inf, some that overflow, few +inf and NaN.
  double value(DType dtype) {
    const std::int64_t draw = dice.below(1000);
    const double sign = dice.chance(50) ? 1 : -1;
    if (draw < 100) return -std::numeric_limits<double>::infinity();
    if (draw < 120) return -max_finite(dtype);
    if (draw < 125) return sign * max_finite(dtype) * static_cast<double>(dice.below(100)) / 100;
    if (draw < 130) return sign * smallest_subnormal(dtype) * static_cast<double>(dice.below(50));
    if (draw == 130) return std::numeric_limits<double>::infinity();
    if (draw == 131) return std::numeric_limits<double>::quiet_NaN();
    return sign * static_cast<double>(dice.below(1 << 20)) * 0x1p-16;
  }

  std::int64_t last_ = 0;
};

Operand maybe_sequences(Maker& m, std::int64_t batch) {
  if (m.dice.chance(60)) return {};
  return m.scalar(m.dice.pick({DType::i32, DType::i64}),
                  static_cast<double>(m.dice.below(batch + 2)));
}

Scores random_scores(Maker& m) {
  Scores s;
  s.batch = 1 + m.dice.below(4);
  s.heads = 1 + m.dice.below(7);
  const bool wide = m.dice.chance(8);
  s.rows = 1 + m.dice.below(wide || m.dice.chance(20) ? 2 : 20);
  s.columns = 1 + m.dice.below(wide ? 2300 : 100);
  if (m.dice.chance(50)) s.seqlen_q = m.integers(m.lengths(s.batch, s.rows));
  if (m.dice.chance(50)) s.seqlen_kv = m.integers(m.lengths(s.batch, s.columns));
  s.sequences = maybe_sequences(m, s.batch);
  s.alignment = m.dice.pick({ir::Alignment::top_left, ir::Alignment::bottom_right});
  const auto bound = [&]() -> std::int64_t {
    if (m.dice.chance(40)) return -1;
    if (m.dice.chance(5)) return std::numeric_limits<std::int64_t>::max();
    return m.dice.below(m.dice.chance(50) ? 4 : s.columns + 3);
  };
  s.left = bound();
  s.right = bound();
  return s;
}

Terms random_terms(Maker& m, const Scores& s) {
  Terms terms;
  const Dims shape{s.batch, s.heads, s.rows, s.columns};
  if (m.dice.chance(60)) terms.bias = m.repeated(m.float_type(), shape);
  if (m.dice.chance(40)) {
    terms.factor = m.scalar(m.dice.pick({DType::f32, DType::f64}),
                            static_cast<double>(1 + m.dice.below(200)) / 100);
  }
  if (m.dice.chance(60)) {
    const DType dtype =
        m.dice.pick({DType::boolean, DType::u8, DType::f32, DType::f16, DType::bf16});
    terms.mask = m.repeated(dtype, shape);
    if (!is_float(dtype)) {
      const int kept = static_cast<int>(m.dice.below(101));
      for (std::byte& byte : m.buffers[terms.mask.uid].bytes) {
        byte = static_cast<std::byte>(m.dice.chance(kept) ? 1 + m.dice.below(255) : 0);
      }
    }
  }
  return terms;
}

// Packed sequences with room behind each; the lengths that go with them.
Packing random_packing(Maker& m, std::int64_t batch, std::int64_t rows,
                       std::vector<std::int64_t>* lengths = nullptr) {
  const auto starts = m.ascending(batch + 1, m.dice.below(3), 2 * rows);
  if (lengths != nullptr) {
    for (std::int64_t n = 0; n < batch; ++n) {
      const auto at = static_cast<std::size_t>(n);
      lengths->push_back(m.dice.below(starts[at + 1] - starts[at] + 1));
    }
  }
  // At times fewer rows than the offsets speak of: nothing may be touched behind them.
  std::int64_t tokens = starts.back() + m.dice.below(4);
  if (m.dice.chance(10)) tokens = tokens / 2;
  return {m.integers(starts), tokens};
}

Operand packed(Maker& m, DType dtype, const Dims& dense, const Packing& packing, bool written) {
  Dims shape = dense;
  if (packing.offsets.uid != 0) {
    shape[0] = 1;
    shape[2] = packing.tokens;
  }
  return m.tensor(dtype, shape, written);
}

std::vector<ClearedTensor> random_cleared(Maker& m, std::int64_t batch, std::int64_t heads,
                                          std::int64_t rows, const Packing& packing) {
  std::vector<ClearedTensor> tensors;
  const std::int64_t count = m.dice.below(4);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t depth =
        m.dice.chance(60) ? 8 * (1 + m.dice.below(20)) : 1 + m.dice.below(40);
    const DType dtype =
        m.dice.pick({DType::f32, DType::f16, DType::bf16, DType::f64, DType::f8e4m3});
    tensors.push_back({packed(m, dtype, {batch, heads, rows, depth}, packing, true), depth});
  }
  return tensors;
}

Operand random_flags(Maker& m, std::int64_t batch, std::int64_t heads, std::int64_t rows) {
  Operand flags = m.repeated(DType::u8, {batch, heads, rows});
  for (std::byte& byte : m.buffers[flags.uid].bytes) {
    byte = static_cast<std::byte>(m.dice.chance(40) ? 1 : 0);
  }
  return flags;
}

void make(Maker& m, Ragged& s) {
  s.bucket = m.dice.below(80);
  s.max_length = m.dice.below(300);
  s.sequences = maybe_sequences(m, s.bucket);
  const auto starts = m.ascending(s.bucket + 1, 0, 200);
  const bool by_lengths = m.dice.chance(20);
  if (by_lengths) {
    s.lengths = m.integers(m.lengths(s.bucket, s.max_length));
  } else {
    s.cu_seqlens = m.integers(starts);
  }
  if (m.dice.chance(40)) s.cu_seqlens_padded = m.integers(m.ascending(s.bucket + 1, 0, 400));
  if (m.dice.chance(80)) s.seqlen = m.tensor(DType::i32, {s.bucket}, true);
  const bool has_starts = !by_lengths || s.cu_seqlens_padded.uid != 0;
  const std::int64_t count =
      has_starts ? m.dice.below(static_cast<std::int64_t>(kMaxRowOffsets) + 1) : 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const DType dtype = m.dice.pick({DType::i32, DType::i64});
    const std::int64_t stride =
        dtype == DType::i64 && m.dice.chance(30) ? std::int64_t{1} << 31 : m.dice.below(5000);
    s.outputs.push_back({m.tensor(dtype, {s.bucket + 1}, true), stride});
  }
}

void make(Maker& m, ScoreBias& s) {
  s.scores = random_scores(m);
  s.terms = random_terms(m, s.scores);
  s.alibi = m.dice.chance(40);
  if (m.dice.chance(50)) s.slopes = m.repeated(DType::f32, {s.scores.heads});
  if (s.slopes.uid != 0) {
    StepBuffer& slopes = m.buffers[s.slopes.uid];
    for (std::int64_t h = 0; h < s.scores.heads; ++h) {
      store_element(slopes.data(), DType::f32, h * s.slopes.strides[0],
                    static_cast<double>(m.dice.below(1000)) / 512);
    }
  }
  s.hide_unseen = m.dice.chance(40);
  s.out = m.tensor(m.float_type(),
                   {s.scores.batch, s.scores.heads, s.scores.rows, s.scores.columns}, true);
}

void make(Maker& m, MaskedRows& s) {
  s.scores = random_scores(m);
  s.terms = random_terms(m, s.scores);
  // Rows without a key are rare in what is random: some masks are false nearly everywhere.
  if (s.terms.mask.uid != 0 && !is_float(s.terms.mask.dtype) && m.dice.chance(60)) {
    for (std::byte& byte : m.buffers[s.terms.mask.uid].bytes) {
      byte = static_cast<std::byte>(m.dice.below(s.scores.columns) == 0 ? 1 : 0);
    }
  }
  s.flags = m.tensor(DType::u8, {s.scores.batch, s.scores.heads, s.scores.rows}, true);
}

template <typename S>
void make_rows(Maker& m, S& s) {
  s.batch = 1 + m.dice.below(4);
  s.heads = 1 + m.dice.below(4);
  s.rows = 1 + m.dice.below(70);
  s.sequences = maybe_sequences(m, s.batch);
}

void make(Maker& m, ClearRows& s) {
  make_rows(m, s);
  if (m.dice.chance(50)) s.packing = random_packing(m, s.batch, s.rows);
  s.flags = random_flags(m, s.batch, s.heads, s.rows);
  s.tensors = random_cleared(m, s.batch, s.heads, s.rows, s.packing);
  const Dims rows{s.batch, s.heads, s.rows};
  if (m.dice.chance(60)) s.stats = packed(m, DType::f32, rows, s.packing, true);
  if (m.dice.chance(40)) s.max_logit = packed(m, DType::f32, rows, s.packing, true);
  s.softmax = m.dice.pick(
      {ir::SoftmaxKind::vanilla, ir::SoftmaxKind::off_by_one, ir::SoftmaxKind::learnable});
  if (s.softmax == ir::SoftmaxKind::learnable || m.dice.chance(20)) {
    s.sink = m.repeated(DType::f32, {s.heads});
  }
}

void make(Maker& m, StatsOfRows& s) {
  make_rows(m, s);
  if (m.dice.chance(50)) s.packing = random_packing(m, s.batch, s.rows);
  if (m.dice.chance(80)) s.flags = random_flags(m, s.batch, s.heads, s.rows);
  const Dims rows{s.batch, s.heads, s.rows};
  s.stats = packed(m, DType::f32, rows, s.packing, false);
  if (m.dice.chance(40)) {
    s.sum_exp = packed(m, DType::f32, rows, s.packing, false);
    StepBuffer& sums = m.buffers[s.sum_exp.uid];
    for (std::size_t i = 0; i < sums.bytes.size() / sizeof(float); ++i) {
      store_element(sums.bytes.data(), DType::f32, static_cast<std::int64_t>(i),
                    static_cast<double>(1 + m.dice.below(1 << 20)) * 0x1p-10);
    }
  }
  s.dense_out = m.dice.chance(40);
  s.out = packed(m, DType::f32, rows, s.dense_out ? Packing{} : s.packing, true);
}

void make(Maker& m, ReduceBiasGradient& s) {
  s.full = {1 + m.dice.below(4), 1 + m.dice.below(6), 1 + m.dice.below(40), 1 + m.dice.below(90)};
  s.shape = s.full;
  for (std::int64_t& dim : s.shape) dim = m.dice.chance(50) ? 1 : dim;
  s.gradient = m.tensor(m.float_type(), s.full);
  // Infinite sums have a test of their own.
  StepBuffer& gradient = m.buffers[s.gradient.uid];
  const auto count =
      static_cast<std::int64_t>(gradient.bytes.size() / byte_size(gradient.dtype, 1));
  for (std::int64_t i = 0; i < count; ++i) {
    store_element(gradient.bytes.data(), gradient.dtype, i,
                  static_cast<double>(m.dice.below(1 << 20) - (1 << 19)) * 0x1p-14);
  }
  if (m.dice.chance(50))
    s.factor = m.scalar(DType::f32, static_cast<double>(m.dice.below(300)) / 256);
  s.sequences = maybe_sequences(m, s.full[0]);
  s.bias_gradient = m.tensor(m.float_type(), s.shape, true);
}

void make(Maker& m, ZeroGaps& s) {
  make_rows(m, s);
  std::vector<std::int64_t> lengths;
  if (m.dice.chance(60)) {
    s.packing = random_packing(m, s.batch, s.rows, &lengths);
  } else {
    lengths = m.lengths(s.batch, s.rows);
  }
  s.lengths = m.integers(lengths);
  s.tensors = random_cleared(m, s.batch, s.heads, s.rows, s.packing);
}

void make(Maker& m, ConvertMask& s) {
  s.shape = {1 + m.dice.below(3), 1 + m.dice.below(3), 1 + m.dice.below(20), 1 + m.dice.below(300)};
  const auto type = [&] { return m.dice.pick({DType::u8, DType::f32, DType::f16, DType::bf16}); };
  s.in = m.tensor(type(), s.shape);
  StepBuffer& in = m.buffers[s.in.uid];
  for (std::size_t i = 0; i < in.bytes.size() / byte_size(in.dtype, 1); ++i) {
    store_element(in.bytes.data(), in.dtype, static_cast<std::int64_t>(i),
                  s.in.dtype != DType::u8 && m.dice.chance(10)
                      ? std::numeric_limits<double>::quiet_NaN()
                      : static_cast<double>(m.dice.below(2)));
  }
  s.out = m.tensor(type(), s.shape, true);
}

void make(Maker& m, CacheAppend& s) {
  s.batch = 1 + m.dice.below(4);
  s.heads = 1 + m.dice.below(4);
  s.fresh_rows = 1 + m.dice.below(9);
  s.depth = m.dice.chance(70) ? 8 * (1 + m.dice.below(16)) : 1 + m.dice.below(20);
  const DType dtype = m.dice.pick({DType::f16, DType::bf16, DType::f32, DType::f8e4m3, DType::f64});
  std::int64_t per_sequence = 0;
  if (m.dice.chance(50)) {
    s.page_size = 1 + m.dice.below(8);
    per_sequence = 1 + m.dice.below(6);
    s.capacity = s.page_size * per_sequence;
    s.pages = s.batch * per_sequence + m.dice.below(5);
    s.cache = m.tensor(dtype, {s.pages, s.heads, s.page_size, s.depth}, true);
    // Each page belongs to one sequence; some entries are no page at all.
    s.page_table = m.tensor(DType::i32, {s.batch, per_sequence});
    std::vector<std::int64_t> pages(static_cast<std::size_t>(s.pages));
    std::iota(pages.begin(), pages.end(), 0);
    for (std::size_t i = pages.size(); i > 1; --i) {
      std::swap(pages[i - 1],
                pages[static_cast<std::size_t>(m.dice.below(static_cast<std::int64_t>(i)))]);
    }
    StepBuffer& table = m.buffers[s.page_table.uid];
    for (std::int64_t b = 0; b < s.batch; ++b) {
      for (std::int64_t page = 0; page < per_sequence; ++page) {
        std::int64_t entry = pages[static_cast<std::size_t>(b * per_sequence + page)];
        if (m.dice.chance(5)) entry = m.dice.chance(50) ? s.pages + m.dice.below(3) : -1;
        store_element(table.data(), DType::i32, offset_of({b, page}, s.page_table.strides),
                      static_cast<double>(entry));
      }
    }
  } else {
    s.capacity = 1 + m.dice.below(40);
    s.cache = m.tensor(dtype, {s.batch, s.heads, s.capacity, s.depth}, true);
  }
  s.fresh = m.tensor(dtype, {s.batch, s.heads, s.fresh_rows, s.depth});
  s.seqlen_kv = m.integers(m.lengths(s.batch, s.capacity));
}

template <std::size_t I = 0>
void make_step(Maker& m, std::size_t kind, cudnn::Step& step) {
  if constexpr (I < std::variant_size_v<cudnn::Step>) {
    if (kind == I) return make(m, step.emplace<I>());
    make_step<I + 1>(m, kind, step);
  }
}

// ---- the rules in loops ---------------------------------------------------------------------

void run(const RaggedArguments& a) {
  for (Index n = 0; n <= a.bucket; ++n) ragged(a, n);
}

template <typename Arguments, typename Apply>
void run_columns(const Arguments& a, Apply apply) {
  for (Index item = 0; item < items(a); ++item) {
    const auto row = row_of(a, item);
    for (Index column = 0; column < row.count; ++column) apply(row, column);
  }
}

void run(const ScoreBiasArguments& a) {
  run_columns(a, [&](const ScoreBiasRow& row, Index column) {
    store_score(a, row, column, score_bias(a, row, column));
  });
}

void run(const MaskedRowsArguments& a) {
  for (Index item = 0; item < items(a); ++item) {
    const MaskedRow row = row_of(a, item);
    bool sees = false;
    for (Index column = 0; column < row.count; ++column) sees |= sees_column(a, row, column);
    store_flag(a, row, sees);
  }
}

void run(const ClearRowsArguments& a) {
  run_columns(a, [&](const RowPlace& row, Index column) { clear_row(a, row, column); });
}

void run(const StatsOfRowsArguments& a) {
  run_columns(a, [&](const StatsPlace& row, Index column) { stats_of_row(a, row, column); });
}

void run(const ZeroGapsArguments& a) {
  run_columns(a, [&](const GapPlace& row, Index column) { zero_gap(a, row, column); });
}

void run(const ConvertMaskArguments& a) {
  run_columns(a, [&](const MaskRow& row, Index column) { convert_mask(a, row, column); });
}

void run(const CacheAppendArguments& a) {
  run_columns(a, [&](const AppendedRow& row, Index column) { append(a, row, column); });
}

void run(const ReduceArguments& a) {
  for (Index item = 0; item < items(a); ++item) {
    for (Index lane = 0; lane < a.lanes; ++lane) {
      const ReducedElement element = element_of(a, item, lane);
      if (!element.exists) continue;
      std::vector<Sum> parts;
      for (Index part = 0; part < a.parts; ++part) parts.push_back(part_of(a, element, part));
      for (std::size_t half = parts.size() / 2; half > 0; half /= 2) {
        for (std::size_t part = 0; part < half; ++part) parts[part].add(parts[part + half]);
      }
      store_reduced(a, element, parts[0]);
    }
  }
}

}  // namespace

std::string StepCase::text() const {
  return fmt::format("seed {}: {}", seed, cudnn::step_to_json(step).dump());
}

std::vector<void*> StepCase::pointers() {
  std::vector<void*> all;
  for (StepBuffer& item : buffers) all.push_back(item.bytes.empty() ? nullptr : item.data());
  return all;
}

const StepBuffer& StepCase::buffer(const Operand& operand) const {
  const auto uids = cudnn::step_uids(step);
  const auto found = std::find(uids.begin(), uids.end(), operand.uid);
  return buffers[static_cast<std::size_t>(found - uids.begin())];
}

StepBuffer& StepCase::buffer(const Operand& operand) {
  return const_cast<StepBuffer&>(std::as_const(*this).buffer(operand));
}

StepCase random_step(std::size_t kind, std::uint64_t seed) {
  Maker maker{seed * 8 + kind};
  StepCase result;
  result.seed = seed;
  make_step(maker, kind, result.step);
  for (const std::int64_t uid : cudnn::step_uids(result.step)) {
    result.buffers.push_back(uid == 0 ? StepBuffer{} : std::move(maker.buffers[uid]));
  }
  return result;
}

Status run_on_host(const cudnn::Step& step, std::span<void* const> pointers) {
  LAWSON_CHECK(cudnn::check_step(step));
  LAWSON_TRY(const cudnn::StepArguments arguments, cudnn::step_arguments(step, pointers));
  std::visit([](const auto& a) { run(a); }, arguments);
  return {};
}

}  // namespace lawson::cases
