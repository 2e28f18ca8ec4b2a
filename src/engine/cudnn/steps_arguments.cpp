#include "engine/cudnn/steps_arguments.h"

#include <algorithm>
#include <limits>

#include "engine/cudnn/steps_fields.h"

namespace lawson::cudnn {
namespace {

using namespace steps;

static_assert(kMaxOffsets == kMaxRowOffsets && kMaxRowTensors == kMaxCleared);

constexpr int kWidestUnit = 16;

// The pointers of a step's operands, asked for by operand.
class Pointers {
 public:
  Pointers(const Step& step, std::span<void* const> pointers) : pointers_{pointers} {
    std::visit(
        [&](const auto& s) {
          visit_operands(s, [&](const Operand& operand) { operands_.push_back(&operand); });
        },
        step);
  }

  Status check(std::string_view step) const {
    if (pointers_.size() != operands_.size()) {
      return invalid("step '{}' has {} operands; {} pointers are given", step, operands_.size(),
                     pointers_.size());
    }
    for (std::size_t i = 0; i < operands_.size(); ++i) {
      if (operands_[i]->uid != 0 && pointers_[i] == nullptr) {
        return invalid("no data is bound to tensor {} of step '{}'", operands_[i]->uid, step);
      }
    }
    return {};
  }

  void* of(const Operand& operand) const {
    const auto found = std::find(operands_.begin(), operands_.end(), &operand);
    return operand.uid == 0 ? nullptr
                            : pointers_[static_cast<std::size_t>(found - operands_.begin())];
  }

  Array array(const Operand& operand) const {
    Array array;
    if (operand.uid == 0) return array;
    array.data = of(operand);
    array.dtype = operand.dtype;
    std::copy_n(operand.strides.begin(), std::min<std::size_t>(operand.strides.size(), 4),
                array.strides);
    return array;
  }

  Lengths lengths(const Operand& operand) const {
    if (operand.uid == 0) return {};
    return {of(operand), operand.strides.front()};
  }

  // At most `all`.
  Index sequences(const Operand& operand, Index all) const {
    if (operand.uid == 0) return all;
    return clamped(static_cast<Index>(load_element(of(operand), operand.dtype, 0)), 0, all);
  }

  float factor(const Operand& operand) const {
    if (operand.uid == 0) return 1;
    return static_cast<float>(load_element(of(operand), operand.dtype, 0));
  }

 private:
  std::span<void* const> pointers_;
  std::vector<const Operand*> operands_;
};

// Tensors [b, h, s, depth] by bytes, all moved in the same units.
Rows rows_of(const Pointers& pointers, const Operand& operand, Index depth, int width) {
  const Index size = bit_width(operand.dtype) / 8;
  Rows rows;
  rows.data = static_cast<char*>(pointers.of(operand));
  for (std::size_t axis = 0; axis < 3; ++axis) rows.strides[axis] = operand.strides[axis] * size;
  rows.width = width;
  rows.units = depth * size / width;
  rows.unit_stride = width == size ? operand.strides[3] * size : width;
  return rows;
}

// The widest unit that every row of the tensor is made of and aligned to.
int widest_unit(const Pointers& pointers, const Operand& operand, Index depth) {
  const int size = bit_width(operand.dtype) / 8;
  if (operand.strides[3] != 1 && depth > 1) return size;
  const auto fits = [&](int width) {
    for (std::size_t axis = 0; axis < 3; ++axis) {
      if (operand.strides[axis] * size % width != 0) return false;
    }
    return depth * size % width == 0 &&
           reinterpret_cast<std::uintptr_t>(pointers.of(operand)) % static_cast<unsigned>(width) ==
               0;
  };
  int width = kWidestUnit;
  while (width > size && !fits(width)) width /= 2;
  return width;
}

SightArguments sight_of(const Pointers& pointers, const Scores& s) {
  SightArguments sight;
  sight.rows = s.rows;
  sight.columns = s.columns;
  sight.seqlen_q = pointers.lengths(s.seqlen_q);
  sight.seqlen_kv = pointers.lengths(s.seqlen_kv);
  sight.sequences = pointers.sequences(s.sequences, s.batch);
  sight.bottom_right = s.alignment == ir::Alignment::bottom_right;
  // A bound beyond every column is as good as none, and sums with it do not overflow.
  sight.left = std::min(s.left, kMaxDim);
  sight.right = std::min(s.right, kMaxDim);
  return sight;
}

TermArguments terms_of(const Pointers& pointers, const Terms& t) {
  TermArguments terms;
  terms.bias = pointers.array(t.bias);
  terms.factor = pointers.factor(t.factor);
  terms.mask = pointers.array(t.mask);
  terms.mask_is_bool = !is_float(t.mask.dtype);
  return terms;
}

PackingArguments packing_of(const Pointers& pointers, const Packing& packing,
                            const Operand& sequences, Index batch) {
  return {pointers.lengths(packing.offsets), packing.tokens, pointers.sequences(sequences, batch)};
}

void set_cleared(const Pointers& pointers, const std::vector<ClearedTensor>& tensors,
                 Rows (&rows)[kMaxRowTensors]) {
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Operand& tensor = tensors[i].tensor;
    rows[i] = rows_of(pointers, tensor, tensors[i].depth,
                      widest_unit(pointers, tensor, tensors[i].depth));
  }
}

StepArguments bind(const Pointers& pointers, const Ragged& s) {
  RaggedArguments a;
  a.bucket = s.bucket;
  a.max_length = std::min(s.max_length, Index{std::numeric_limits<std::int32_t>::max()});
  a.sequences = pointers.sequences(s.sequences, s.bucket);
  a.cu_seqlens = pointers.lengths(s.cu_seqlens);
  a.starts = pointers.lengths(s.cu_seqlens_padded.uid != 0 ? s.cu_seqlens_padded : s.cu_seqlens);
  a.lengths = pointers.lengths(s.lengths);
  a.seqlen = pointers.array(s.seqlen);
  for (std::size_t i = 0; i < s.outputs.size(); ++i) {
    a.offsets[i] = {pointers.array(s.outputs[i].offsets), s.outputs[i].stride};
  }
  return a;
}

StepArguments bind(const Pointers& pointers, const ScoreBias& s) {
  ScoreBiasArguments a;
  a.batch = s.scores.batch;
  a.heads = s.scores.heads;
  a.sight = sight_of(pointers, s.scores);
  a.terms = terms_of(pointers, s.terms);
  a.alibi = s.alibi;
  a.slopes = pointers.array(s.slopes);
  a.hide_unseen = s.hide_unseen;
  a.out = pointers.array(s.out);
  return a;
}

StepArguments bind(const Pointers& pointers, const MaskedRows& s) {
  MaskedRowsArguments a;
  a.batch = s.scores.batch;
  a.heads = s.scores.heads;
  a.sight = sight_of(pointers, s.scores);
  a.terms = terms_of(pointers, s.terms);
  a.flags = pointers.array(s.flags);
  return a;
}

StepArguments bind(const Pointers& pointers, const ClearRows& s) {
  ClearRowsArguments a;
  a.batch = s.batch;
  a.heads = s.heads;
  a.rows = s.rows;
  a.flags = pointers.array(s.flags);
  a.packing = packing_of(pointers, s.packing, s.sequences, s.batch);
  set_cleared(pointers, s.tensors, a.tensors);
  a.stats = pointers.array(s.stats);
  a.max_logit = pointers.array(s.max_logit);
  a.extra_logit = s.softmax == ir::SoftmaxKind::vanilla ? -infinity() : 0.0F;
  if (s.softmax == ir::SoftmaxKind::learnable) a.sink = pointers.array(s.sink);
  return a;
}

StepArguments bind(const Pointers& pointers, const StatsOfRows& s) {
  StatsOfRowsArguments a;
  a.batch = s.batch;
  a.heads = s.heads;
  a.rows = s.rows;
  a.flags = pointers.array(s.flags);
  a.packing = packing_of(pointers, s.packing, s.sequences, s.batch);
  a.stats = pointers.array(s.stats);
  a.sum_exp = pointers.array(s.sum_exp);
  a.out = pointers.array(s.out);
  a.dense_out = s.dense_out;
  return a;
}

StepArguments bind(const Pointers& pointers, const ReduceBiasGradient& s) {
  ReduceArguments a;
  a.gradient = pointers.array(s.gradient);
  a.bias_gradient = pointers.array(s.bias_gradient);
  a.factor = pointers.factor(s.factor);
  const Index present = pointers.sequences(s.sequences, s.full[0]);
  a.sequences = 1;
  // What is summed, axes that lie one behind the other in memory taken as one; the last is at [3].
  std::size_t at = 4;
  for (std::size_t axis = 4; axis-- > 0;) {
    if (s.shape[axis] == s.full[axis] && s.full[axis] != 1) {
      a.kept[axis] = s.full[axis];
      if (axis == 0) a.sequences = present;
      continue;
    }
    const Index size = axis == 0 ? present : s.full[axis];
    const Index stride = a.gradient.strides[axis];
    a.gradient.strides[axis] = 0;
    a.terms *= size;
    if (size <= 1) continue;
    if (at < 4 && a.steps[at] * a.summed[at] == stride) {
      a.summed[at] *= size;
      continue;
    }
    --at;
    a.summed[at] = size;
    a.steps[at] = stride;
  }
  if (a.kept[3] > 1) a.lanes = 32;
  a.parts = (a.terms >= 256 ? kMaxReduceThreads : 256) / a.lanes;
  return a;
}

StepArguments bind(const Pointers& pointers, const ZeroGaps& s) {
  ZeroGapsArguments a;
  a.batch = s.batch;
  a.heads = s.heads;
  a.rows = s.rows;
  a.lengths = pointers.lengths(s.lengths);
  a.packing = packing_of(pointers, s.packing, s.sequences, s.batch);
  set_cleared(pointers, s.tensors, a.tensors);
  return a;
}

StepArguments bind(const Pointers& pointers, const ConvertMask& s) {
  ConvertMaskArguments a;
  for (std::size_t axis = 0; axis < 4; ++axis) a.shape[axis] = s.shape[axis];
  a.in = pointers.array(s.in);
  a.out = pointers.array(s.out);
  return a;
}

StepArguments bind(const Pointers& pointers, const CacheAppend& s) {
  CacheAppendArguments a;
  a.batch = s.batch;
  a.heads = s.heads;
  a.fresh_rows = s.fresh_rows;
  a.capacity = s.capacity;
  a.page_size = s.page_size;
  a.pages = s.pages;
  const int width =
      std::min(widest_unit(pointers, s.cache, s.depth), widest_unit(pointers, s.fresh, s.depth));
  a.cache = rows_of(pointers, s.cache, s.depth, width);
  a.fresh = rows_of(pointers, s.fresh, s.depth, width);
  a.seqlen_kv = pointers.lengths(s.seqlen_kv);
  a.page_table = pointers.array(s.page_table);
  return a;
}

}  // namespace

Result<StepArguments> step_arguments(const Step& step, std::span<void* const> pointers) {
  const Pointers bound{step, pointers};
  LAWSON_CHECK(bound.check(step_name(step)));
  return std::visit([&](const auto& s) { return bind(bound, s); }, step);
}

}  // namespace lawson::cudnn
