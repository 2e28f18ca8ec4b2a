// The rules of the steps, run on the host, against expectations that are written without them:
// plain loops in double over every element, for random shapes, strides, lengths and data. Whatever
// the expectation does not write has to stay as it was, guards included.
#include "engine/cudnn/steps.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "cases/dice.h"
#include "engine/cudnn/step_cases.h"
#include "engine/cudnn/steps_arguments.h"

namespace lawson::cudnn {
namespace {

using cases::StepBuffer;
using cases::StepCase;
using steps::Operand;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// What a case's memory should become. `tolerance` is per element of float results.
struct Expected {
  explicit Expected(const StepCase& given) : item{given} {}

  double load(const Operand& operand, const Dims& index) const {
    return load_element(item.buffer(operand).data(), operand.dtype,
                        offset_of(index, operand.strides));
  }
  std::int64_t integer(const Operand& operand, std::int64_t index) const {
    return static_cast<std::int64_t>(load(operand, {index}));
  }
  void store(const Operand& operand, const Dims& index, double value, double error = 0) {
    const std::int64_t at = offset_of(index, operand.strides);
    StepBuffer& buffer = item.buffer(operand);
    store_element(buffer.data(), operand.dtype, at, value);
    if (error > 0) {
      auto& errors = tolerance[operand.uid];
      errors.resize(std::max(errors.size(), static_cast<std::size_t>(at + 1)));
      errors[static_cast<std::size_t>(at)] = error;
    }
  }
  std::int64_t present(const Operand& sequences, std::int64_t all) const {
    if (sequences.uid == 0) return all;
    return std::clamp<std::int64_t>(
        static_cast<std::int64_t>(load_element(item.buffer(sequences).data(), sequences.dtype, 0)),
        0, all);
  }

  StepCase item;
  std::map<std::int64_t, std::vector<double>> tolerance;
};

template <typename Body>
void each(const Dims& shape, const Body& body) {
  if (element_count(shape).value_or(0) == 0) return;
  Dims index(shape.size(), 0);
  do {
    body(index);
  } while (next_index(index, shape));
}

// ---- expectations ---------------------------------------------------------------------------

void expect(const steps::Ragged& s, Expected& e) {
  const std::int64_t there = e.present(s.sequences, s.bucket);
  for (std::int64_t n = 0; n < s.bucket && s.seqlen.uid != 0; ++n) {
    std::int64_t length = 0;
    if (n < there) {
      length = s.lengths.uid != 0 ? e.integer(s.lengths, n)
                                  : e.integer(s.cu_seqlens, n + 1) - e.integer(s.cu_seqlens, n);
    }
    e.store(s.seqlen, {n}, static_cast<double>(std::clamp<std::int64_t>(length, 0, s.max_length)));
  }
  const Operand& starts = s.cu_seqlens_padded.uid != 0 ? s.cu_seqlens_padded : s.cu_seqlens;
  for (const steps::RowOffsets& out : s.outputs) {
    for (std::int64_t n = 0; n <= s.bucket; ++n) {
      e.store(out.offsets, {n},
              static_cast<double>(e.integer(starts, std::min(n, there)) * out.stride));
    }
  }
}

// ir/ops.h, AttentionRule, element by element.
bool sees(const steps::Scores& s, const Expected& e, const Dims& at) {
  const std::int64_t b = at[0];
  const std::int64_t i = at[2];
  const std::int64_t j = at[3];
  if (b >= e.present(s.sequences, s.batch)) return false;
  const auto length = [&](const Operand& operand, std::int64_t full) {
    return operand.uid == 0 ? full : std::clamp<std::int64_t>(e.integer(operand, b), 0, full);
  };
  const std::int64_t q = length(s.seqlen_q, s.rows);
  const std::int64_t kv = length(s.seqlen_kv, s.columns);
  const std::int64_t row = s.alignment == ir::Alignment::bottom_right ? i + kv - q : i;
  const bool left = s.left == -1 || row - j <= s.left;
  const bool right = s.right == -1 || j - row <= s.right;
  return i < q && j < kv && left && right;
}

struct Added {
  double sum = 0;
  double magnitude = 0;  // of the terms
  bool hidden = false;
};

// The factor that is applied is the f32 nearest to the given one.
Added added(const steps::Terms& t, const Expected& e, const Dims& at) {
  Added result;
  if (t.bias.uid != 0) {
    double factor = 1;
    if (t.factor.uid != 0) {
      factor =
          round_to(DType::f32, load_element(e.item.buffer(t.factor).data(), t.factor.dtype, 0));
    }
    result.sum = factor * e.load(t.bias, at);
    result.magnitude = std::fabs(result.sum);
    result.hidden = result.sum == -kInfinity;
  }
  if (t.mask.uid == 0) return result;
  const double mask = e.load(t.mask, at);
  if (is_float(t.mask.dtype)) {
    result.sum += mask;
    result.magnitude += std::fabs(mask);
    result.hidden = result.sum == -kInfinity;
  } else {
    result.hidden |= mask == 0;
  }
  return result;
}

double slope(std::int64_t h, std::int64_t heads) {
  // Press et al. 2022, as their own code has it: the slopes of n heads, built up recursively.
  const auto regular = [](std::int64_t n) {
    std::vector<double> slopes;
    const double start = std::pow(2.0, -8.0 / static_cast<double>(n));
    for (std::int64_t k = 0; k < n; ++k) slopes.push_back(std::pow(start, double(k + 1)));
    return slopes;
  };
  const auto power = static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(heads)));
  std::vector<double> slopes = regular(power);
  const std::vector<double> finer = regular(2 * power);
  for (std::size_t k = 0; slopes.size() < static_cast<std::size_t>(heads); k += 2) {
    slopes.push_back(finer[k]);
  }
  return slopes[static_cast<std::size_t>(h)];
}

void expect(const steps::ScoreBias& s, Expected& e) {
  const std::int64_t there = e.present(s.scores.sequences, s.scores.batch);
  const DType out = s.out.dtype;
  const double hidden = out == DType::f16 ? -65504.0 : -0x1p126;
  each({s.scores.batch, s.scores.heads, s.scores.rows, s.scores.columns}, [&](const Dims& at) {
    Added value;
    if (at[0] < there) value = added(s.terms, e, at);
    if (at[0] >= there || value.hidden || (s.hide_unseen && !sees(s.scores, e, at))) {
      return e.store(s.out, at, hidden);
    }
    if (s.alibi) {
      const auto length = [&](const Operand& operand, std::int64_t full) {
        return operand.uid == 0 ? full
                                : std::clamp<std::int64_t>(e.integer(operand, at[0]), 0, full);
      };
      std::int64_t row = at[2];
      if (s.scores.alignment == ir::Alignment::bottom_right) {
        row +=
            length(s.scores.seqlen_kv, s.scores.columns) - length(s.scores.seqlen_q, s.scores.rows);
      }
      const double per_key =
          s.slopes.uid == 0 ? slope(at[1], s.scores.heads) : e.load(s.slopes, {at[1]});
      const double ramp = per_key * static_cast<double>(at[3] - row);
      value.sum += ramp;
      value.magnitude += std::fabs(ramp);
    }
    if (!std::isfinite(value.sum)) return e.store(s.out, at, value.sum);
    // f32 arithmetic, then the result's own rounding.
    const double error = 4 * 0x1p-24 * value.magnitude + smallest_subnormal(out) +
                         2 * unit_roundoff(out) * std::fabs(value.sum);
    e.store(s.out, at, std::clamp(value.sum, hidden / 2, max_finite(out)), error);
  });
}

void expect(const steps::MaskedRows& s, Expected& e) {
  each({s.scores.batch, s.scores.heads, s.scores.rows}, [&](const Dims& row) {
    bool any = false;
    for (std::int64_t j = 0; j < s.scores.columns && !any; ++j) {
      const Dims at{row[0], row[1], row[2], j};
      any = sees(s.scores, e, at) && !added(s.terms, e, at).hidden;
    }
    e.store(s.flags, row, any ? 0 : 1);
  });
}

// Row i of sequence b in a tensor: (index along b, row), or nothing when it is behind its end.
template <typename S>
std::optional<std::pair<std::int64_t, std::int64_t>> place(const S& s, const Expected& e,
                                                           std::int64_t b, std::int64_t i) {
  if (b >= e.present(s.sequences, s.batch)) return std::nullopt;
  if (s.packing.offsets.uid == 0) return i < s.rows ? std::optional{std::pair{b, i}} : std::nullopt;
  const std::int64_t row = e.integer(s.packing.offsets, b) + i;
  if (row >= e.integer(s.packing.offsets, b + 1) || row >= s.packing.tokens) return std::nullopt;
  return std::pair{std::int64_t{0}, row};
}

void clear(const std::vector<steps::ClearedTensor>& tensors, Expected& e, std::int64_t b,
           std::int64_t h, std::int64_t row) {
  for (const steps::ClearedTensor& item : tensors) {
    for (std::int64_t d = 0; d < item.depth; ++d) e.store(item.tensor, {b, h, row, d}, 0);
  }
}

void expect(const steps::ClearRows& s, Expected& e) {
  each({s.batch, s.heads, s.rows}, [&](const Dims& at) {
    const auto found = place(s, e, at[0], at[2]);
    if (!found || e.load(s.flags, at) == 0) return;
    const auto [b, row] = *found;
    clear(s.tensors, e, b, at[1], row);
    double logit = -kInfinity;
    if (s.softmax == ir::SoftmaxKind::off_by_one) logit = 0;
    if (s.softmax == ir::SoftmaxKind::learnable) logit = e.load(s.sink, {at[1]});
    if (s.stats.uid != 0) e.store(s.stats, {b, at[1], row}, logit);
    if (s.max_logit.uid != 0) e.store(s.max_logit, {b, at[1], row}, -kInfinity);
  });
}

void expect(const steps::StatsOfRows& s, Expected& e) {
  each({s.batch, s.heads, s.rows}, [&](const Dims& at) {
    const auto found = place(s, e, at[0], at[2]);
    if (!found) {
      if (s.dense_out) e.store(s.out, at, kInfinity);
      return;
    }
    const Dims row{found->first, at[1], found->second};
    double value = e.load(s.stats, row);
    double error = 0;
    if (s.sum_exp.uid != 0) {
      const double more = std::log(e.load(s.sum_exp, row));
      error = 4 * 0x1p-24 * (std::fabs(value) + std::fabs(more));
      value += more;
    }
    const bool flagged = s.flags.uid != 0 && e.load(s.flags, at) != 0;
    e.store(s.out, s.dense_out ? at : row, flagged ? kInfinity : value, flagged ? 0 : error);
  });
}

void expect(const steps::ReduceBiasGradient& s, Expected& e) {
  const std::int64_t there = e.present(s.sequences, s.full[0]);
  const double factor =
      s.factor.uid == 0 ? 1 : load_element(e.item.buffer(s.factor).data(), s.factor.dtype, 0);
  each(s.shape, [&](const Dims& out) {
    if (s.shape[0] > 1 && out[0] >= there) return;
    double sum = 0;
    double magnitude = 0;
    Dims ranges = s.full;
    for (std::size_t axis = 0; axis < 4; ++axis) {
      if (s.shape[axis] > 1 || s.full[axis] == 1) ranges[axis] = 1;
    }
    each(ranges, [&](const Dims& offset) {
      Dims at(4);
      for (std::size_t axis = 0; axis < 4; ++axis) at[axis] = out[axis] + offset[axis];
      if (at[0] >= there) return;
      const double value = e.load(s.gradient, at);
      sum += value;
      magnitude += std::fabs(value);
    });
    // A compensated sum: one rounding of the sum, one of the product; the rest is of second order.
    const DType dtype = s.bias_gradient.dtype;
    const double error = factor * (3 * 0x1p-24 * std::fabs(sum) + 0x1p-40 * magnitude) +
                         2 * unit_roundoff(dtype) * factor * std::fabs(sum) +
                         smallest_subnormal(dtype);
    e.store(s.bias_gradient, out, factor * sum, error);
  });
}

void expect(const steps::ZeroGaps& s, Expected& e) {
  const std::int64_t there = e.present(s.sequences, s.batch);
  for (std::int64_t b = 0; b < s.batch; ++b) {
    const std::int64_t length = b < there ? std::max<std::int64_t>(e.integer(s.lengths, b), 0) : 0;
    for (std::int64_t i = length; const auto found = place(s, e, b, i); ++i) {
      for (std::int64_t h = 0; h < s.heads; ++h)
        clear(s.tensors, e, found->first, h, found->second);
    }
  }
}

void expect(const steps::ConvertMask& s, Expected& e) {
  each(s.shape, [&](const Dims& at) {
    if (!std::isnan(e.load(s.in, at))) e.store(s.out, at, e.load(s.in, at) != 0 ? 1 : 0);
  });
}

void expect(const steps::CacheAppend& s, Expected& e) {
  each({s.batch, s.heads, s.fresh_rows, s.depth}, [&](const Dims& at) {
    const std::int64_t position = e.integer(s.seqlen_kv, at[0]) - s.fresh_rows + at[2];
    if (position < 0 || position >= s.capacity) return;
    Dims to{at[0], at[1], position, at[3]};
    if (s.page_size > 0) {
      to[0] = static_cast<std::int64_t>(e.load(s.page_table, {at[0], position / s.page_size}));
      to[2] = position % s.page_size;
      if (to[0] < 0 || to[0] >= s.pages) return;
    }
    // Bits, not values: NaN stays the NaN that it is.
    const std::size_t size = byte_size(s.cache.dtype, 1);
    std::memcpy(static_cast<std::byte*>(e.item.buffer(s.cache).data()) +
                    static_cast<std::size_t>(offset_of(to, s.cache.strides)) * size,
                static_cast<const std::byte*>(std::as_const(e.item).buffer(s.fresh).data()) +
                    static_cast<std::size_t>(offset_of(at, s.fresh.strides)) * size,
                size);
  });
}

// ---- random steps ---------------------------------------------------------------------------

bool same_element(const StepBuffer& got, const StepBuffer& wanted, std::int64_t at, double error) {
  const std::size_t size = byte_size(got.dtype, 1);
  const std::size_t byte = got.begin + static_cast<std::size_t>(at) * size;
  if (std::memcmp(got.bytes.data() + byte, wanted.bytes.data() + byte, size) == 0) return true;
  const double x = load_element(got.data(), got.dtype, at);
  const double y = load_element(wanted.data(), got.dtype, at);
  if (std::isnan(x) && std::isnan(y)) return got.written;
  return std::fabs(x - y) <= error;
}

// The first difference, or "".
std::string difference(const StepCase& got, const Expected& e) {
  const auto uids = step_uids(got.step);
  for (std::size_t i = 0; i < uids.size(); ++i) {
    const StepBuffer& buffer = got.buffers[i];
    const StepBuffer& wanted = e.item.buffers[i];
    if (buffer.bytes == wanted.bytes) continue;
    if (!buffer.written) return fmt::format("input {} has changed", uids[i]);
    const std::size_t size = byte_size(buffer.dtype, 1);
    const auto found = e.tolerance.find(uids[i]);
    const auto first = -static_cast<std::int64_t>(buffer.begin / size);
    const auto count = static_cast<std::int64_t>(buffer.bytes.size() / size);
    for (std::int64_t at = first; at < first + count; ++at) {
      double error = 0;
      if (found != e.tolerance.end() && at >= 0 &&
          at < static_cast<std::int64_t>(found->second.size())) {
        error = found->second[static_cast<std::size_t>(at)];
      }
      if (same_element(buffer, wanted, at, error)) continue;
      return fmt::format("tensor {}, element {}: {} instead of {} (error allowed: {})", uids[i], at,
                         load_element(buffer.data(), buffer.dtype, at),
                         load_element(wanted.data(), buffer.dtype, at), error);
    }
  }
  return "";
}

class RandomSteps : public testing::TestWithParam<std::size_t> {};

TEST_P(RandomSteps, RulesDoWhatIsExpected) {
  int changed = 0;
  for (std::uint64_t seed = 0; seed < 150; ++seed) {
    StepCase item = cases::random_step(GetParam(), seed);
    Expected e{item};
    std::visit([&](const auto& s) { expect(s, e); }, item.step);
    std::vector<std::vector<std::byte>> before;
    for (const StepBuffer& buffer : item.buffers) before.push_back(buffer.bytes);
    const Status status = cases::run_on_host(item.step, item.pointers());
    ASSERT_TRUE(status.ok()) << status.error().message << "\n" << item.text();
    ASSERT_EQ(difference(item, e), "") << item.text();
    for (std::size_t i = 0; i < before.size(); ++i) changed += before[i] != item.buffers[i].bytes;
  }
  EXPECT_GT(changed, 100);  // the cases are about something
}

TEST_P(RandomSteps, JsonRoundTrip) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    const Step step = cases::random_step(GetParam(), seed).step;
    const Json json = step_to_json(step);
    const auto cbor = Json::to_cbor(json);
    const auto read = step_from_json(Json::from_cbor(cbor));
    ASSERT_TRUE(read.ok()) << read.error().message << "\n" << json.dump();
    ASSERT_TRUE(*read == step) << json.dump();
  }
}

// Every number of a step's JSON replaced by nonsense: an error, or a step that holds together.
void damage(Json& json, cases::Dice& dice) {
  if (json.is_structured() && !json.empty()) {
    auto at = json.begin();
    std::advance(at, dice.below(static_cast<std::int64_t>(json.size())));
    if (dice.chance(5) && json.is_object()) {
      json[at.key() + "x"] = 1;
    } else {
      damage(*at, dice);
    }
    return;
  }
  switch (dice.below(6)) {
    case 0:
      json = -1;
      break;
    case 1:
      json = std::int64_t{1} << 62;
      break;
    case 2:
      json = std::numeric_limits<std::uint64_t>::max();
      break;
    case 3:
      json = "text";
      break;
    case 4:
      json = nullptr;
      break;
    default:
      json = 256;
      break;
  }
}

TEST_P(RandomSteps, DamagedJsonIsAnErrorOrChecked) {
  cases::Dice dice{GetParam()};
  int errors = 0;
  for (std::uint64_t seed = 0; seed < 400; ++seed) {
    Json json = step_to_json(cases::random_step(GetParam(), seed % 40).step);
    damage(json, dice);
    const auto read = step_from_json(json);
    if (read.ok()) {
      EXPECT_TRUE(check_step(*read).ok()) << json.dump();
    } else {
      EXPECT_EQ(read.error().kind, ErrorKind::io) << json.dump();
      ++errors;
    }
  }
  EXPECT_GT(errors, 200);
  EXPECT_FALSE(step_from_json(Json::array()).ok());
  EXPECT_FALSE(step_from_json({{"step", "no such step"}}).ok());
}

TEST_P(RandomSteps, PointersHaveToFit) {
  StepCase item = cases::random_step(GetParam(), 1);
  std::vector<void*> pointers = item.pointers();
  ASSERT_FALSE(pointers.empty());
  auto missing = pointers;
  *std::find_if(missing.begin(), missing.end(), [](void* p) { return p != nullptr; }) = nullptr;
  for (const auto& wrong : {missing, std::vector<void*>(pointers.begin(), pointers.end() - 1)}) {
    const Status status = cases::run_on_host(item.step, wrong);
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().kind, ErrorKind::invalid_argument);
  }
}

INSTANTIATE_TEST_SUITE_P(Steps, RandomSteps,
                         testing::Range(std::size_t{0}, std::variant_size_v<Step>),
                         [](const auto& param) {
                           return std::string{step_name(cases::random_step(param.param, 0).step)};
                         });

// ---- what random data does not show ---------------------------------------------------------

TEST(Steps, HalfAndBfloatConvertAsTheBaseDoes) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
      // As wide as the widest type that the functions could be asked for.
      const std::array<std::uint16_t, 2> memory{static_cast<std::uint16_t>(bits), 0};
      const std::uint16_t* pattern = memory.data();
      const auto wanted = static_cast<float>(load_element(pattern, dtype, 0));
      const float got = steps::load_float(pattern, dtype, 0);
      ASSERT_TRUE(std::isnan(wanted) ? std::isnan(got) : got == wanted) << bits;
      ASSERT_TRUE(std::isnan(wanted) || std::signbit(wanted) == std::signbit(got)) << bits;
    }
    cases::Dice dice{7};
    for (int i = 0; i < 200000; ++i) {
      // Half of the floats lie where the format rounds: a value of it, or between two of them.
      auto bits = static_cast<std::uint32_t>(dice.below(std::int64_t{1} << 32));
      if (i % 2 == 0) {
        bits &= dtype == DType::f16 ? 0xFFFFF000U : 0xFFFF8000U;
        bits += static_cast<std::uint32_t>(dice.below(3)) - 1U;
      }
      const auto value = std::bit_cast<float>(bits);
      std::array<std::uint16_t, 2> wanted{};
      std::array<std::uint16_t, 2> got{};
      store_element(wanted.data(), dtype, 0, value);
      steps::store_float(got.data(), dtype, 0, value);
      if (std::isnan(value)) {
        ASSERT_TRUE(std::isnan(load_element(got.data(), dtype, 0))) << bits;
      } else {
        ASSERT_EQ(got, wanted) << bits;
      }
    }
  }
}

// Softmax as cuDNN computes it, in f32 and base 2.
std::vector<float> softmax(const std::vector<float>& scores) {
  const float log2e = 1.44269504F;
  const float largest = *std::max_element(scores.begin(), scores.end());
  std::vector<float> weights;
  float sum = 0;
  for (const float score : scores) {
    weights.push_back(std::exp2(score * log2e - largest * log2e));
    sum += weights.back();
  }
  for (float& weight : weights) weight /= sum;
  return weights;
}

TEST(Steps, HiddenScoresAreFiniteAndWeighNothing) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const float hidden = steps::hidden_score(dtype);
    EXPECT_EQ(round_to(dtype, hidden), hidden);
    EXPECT_EQ(round_to(dtype, steps::lowest_score(dtype)), steps::lowest_score(dtype));
    for (const float weight : softmax({hidden, hidden + 3, hidden - 40})) {
      EXPECT_TRUE(weight >= 0 && weight <= 1) << weight;
    }
    // Beside the lowest of what is not hidden, with products q.k of any usual size added.
    const float lowest = steps::finite_score(-3.4e38F, dtype);
    EXPECT_EQ(softmax({lowest - 200, hidden + 200})[1], 0.0F);
    EXPECT_EQ(steps::finite_score(-std::numeric_limits<float>::infinity(), dtype), hidden);
    EXPECT_GT(lowest, hidden);
  }
}

// The lowest finite value, twice: no -inf was given, so the score is not hidden.
TEST(Steps, OverflowingMasksDoNotHide) {
  const float lowest = std::numeric_limits<float>::lowest();
  steps::MaskedRows step;
  step.scores.batch = step.scores.heads = step.scores.rows = step.scores.columns = 1;
  step.terms.bias = {1, DType::f32, {0, 0, 0, 0}};
  step.terms.mask = {2, DType::f32, {0, 0, 0, 0}};
  step.flags = {3, DType::u8, {1, 1, 1}};
  float bias = lowest;
  float mask = lowest;
  std::uint8_t flag = 7;
  std::vector<void*> pointers;
  for (const std::int64_t uid : step_uids(step)) {
    void* const all[] = {nullptr, &bias, &mask, &flag};
    pointers.push_back(all[uid]);
  }
  ASSERT_TRUE(cases::run_on_host(step, pointers).ok());
  EXPECT_EQ(flag, 0);
  mask = -std::numeric_limits<float>::infinity();
  ASSERT_TRUE(cases::run_on_host(step, pointers).ok());
  EXPECT_EQ(flag, 1);
}

// Far more terms than a plain f32 sum stands: a million times 1 and a little.
TEST(Steps, LongSumsKeepTheirDigits) {
  steps::ReduceBiasGradient step;
  step.full = {1, 1, 1024, 1024};
  step.shape = {1, 1, 1, 1};
  step.gradient = {1, DType::f32, {1 << 20, 1 << 20, 1024, 1}};
  step.bias_gradient = {2, DType::f32, {1, 1, 1, 1}};
  std::vector<float> gradient(1 << 20, 1.0F / 3);
  gradient[12345] = 1e9F;
  float result = 0;
  const auto run = [&] {
    std::vector<void*> pointers(step_uids(step).size(), nullptr);
    const auto uids = step_uids(step);
    for (std::size_t i = 0; i < uids.size(); ++i) {
      if (uids[i] == 1) pointers[i] = gradient.data();
      if (uids[i] == 2) pointers[i] = &result;
    }
    return cases::run_on_host(step, pointers).ok();
  };
  ASSERT_TRUE(run());
  const double wanted = 1e9 + ((1 << 20) - 1) * static_cast<double>(1.0F / 3);
  EXPECT_NEAR(result, wanted, 1e9 * 0x1p-24);
  gradient[5] = -std::numeric_limits<float>::infinity();
  ASSERT_TRUE(run());
  EXPECT_EQ(result, gradient[5]);
  gradient[6] = std::numeric_limits<float>::infinity();
  ASSERT_TRUE(run());
  EXPECT_TRUE(std::isnan(result));
}

TEST(Steps, PlacesBeyondTwoToTheThirtyOne) {
  steps::ScoreBiasArguments a;
  a.batch = 64;
  a.heads = 128;
  a.sight.rows = 8192;
  a.sight.columns = 8192;
  a.sight.sequences = 64;
  a.out.strides[0] = Dims::value_type{128} * 8192 * 8192;
  a.out.strides[1] = Dims::value_type{8192} * 8192;
  a.out.strides[2] = 8192;
  const steps::ScoreBiasRow last = steps::row_of(a, steps::items(a) - 1);
  EXPECT_EQ(last.out + last.first + last.count, Dims::value_type{64} * 128 * 8192 * 8192);
}

TEST(Steps, LaunchingWithoutDriverIsUnavailable) {
  StepCase item = cases::random_step(0, 0);
  const Driver none;
  const Status status = launch(item.step, item.pointers(), nullptr, none);
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().kind, ErrorKind::unavailable);
  const std::string named = steps_are_built() ? "cuLibraryLoadData" : "LAWSON_CUDA_KERNELS";
  EXPECT_NE(status.error().message.find(named), std::string::npos) << status.error().message;
}

}  // namespace
}  // namespace lawson::cudnn
