// From an attention graph to cuDNN's own form: what it has no words for becomes steps of Lawson's
// before and after the plan.
#include <algorithm>

#include "engine/cudnn/native.h"

namespace lawson::cudnn {
namespace {

using Slot = ir::AttentionSlots;
using F = ir::Attention;
using B = ir::AttentionBackward;
using N = NativeAttention;

// Offsets beyond this are 64 bits wide.
constexpr std::int64_t kMost32 = std::int64_t{1} << 31;

class Rewriter {
 public:
  Rewriter(const ir::Graph& graph, const AttentionFacts& facts, const RewriteOptions& options)
      : graph_{graph},
        facts_{facts},
        rule_{*facts.rule},
        options_{options},
        repairs_{options.repairs} {
    n_.backward = facts.backward;
    n_.deterministic = options.deterministic || facts.deterministic;
    n_.io = facts.dtype;
    n_.batch = facts.batch;
    n_.heads = facts.heads;
    n_.rows = facts.s_q;
    n_.columns = facts.s_kv;
    n_.softcap = rule_.softcap;
    n_.dropout = rule_.dropout;
  }

  Result<std::optional<NativeAttention>> run() {
    if (facts_.s_q == 0 || facts_.s_kv == 0) {
      return unsupported("empty_tensor",
                         fmt::format("the longest sequence has {} queries and {} keys: there is "
                                     "nothing to compute",
                                     facts_.s_q, facts_.s_kv),
                         facts_.s_q == 0 ? "seqlen_q" : "seqlen_kv");
    }
    // cuDNN's lengths and bounds are 32 bits wide.
    if (facts_.s_q + facts_.s_kv >= kMost32) {
      return unsupported("size",
                         fmt::format("seqlen_q = {} and seqlen_kv = {}: cuDNN counts rows and "
                                     "columns in 32 bits",
                                     facts_.s_q, facts_.s_kv),
                         facts_.s_q > facts_.s_kv ? "seqlen_q" : "seqlen_kv");
    }
    if (static_cast<float>(rule_.dropout) >= 1) {
      return unsupported(
          "dropout", fmt::format("dropout = {} is 1 in f32, in which cuDNN has it", rule_.dropout),
          "dropout");
    }
    if (n_.deterministic && facts_.backward && result(B::dsink) != nullptr) {
      return unsupported("deterministic",
                         "cuDNN adds up the gradient of a sink with atomics, in another order each "
                         "time; the other gradients can be had deterministic",
                         "deterministic");
    }
    if (!choose_bounds()) return std::optional<NativeAttention>{};
    LAWSON_CHECK(check_alignment());
    LAWSON_CHECK(append_to_caches());
    lengths();
    values();
    if (rule_.pre_scale_bias && rule_.softcap > 0) {
      return unsupported("pre_scale_bias",
                         "cuDNN caps the scores before it adds a bias; a bias before the scale "
                         "would have to be capped with them",
                         "bias");
    }
    if (n_.tensors[N::max_logit] && rule_.softmax != ir::SoftmaxKind::vanilla) {
      return unsupported("max_logit",
                         "cuDNN counts the sink among the logits whose largest it returns; ask for "
                         "max_logit with a vanilla softmax",
                         "softmax");
    }
    scores();
    rows_that_see_nothing();
    dropout();
    keys_without_queries();
    gaps();
    for (const std::string& id : repairs_.defects) note("avoids " + id);
    LAWSON_CHECK(check_steps());
    return std::optional{std::move(n_)};
  }

 private:
  // ---- operands --------------------------------------------------------------------------

  const ir::Tensor* operand(std::size_t slot) const {
    const ir::TensorId id = facts_.node->inputs[slot];
    return id == ir::kNone ? nullptr : &graph_.tensor(id);
  }
  const ir::Tensor* result(std::size_t slot) const {
    const ir::TensorId id = facts_.node->outputs[slot];
    return id == ir::kNone ? nullptr : &graph_.tensor(id);
  }
  std::int64_t operand_uid(std::size_t slot) const {
    const ir::TensorId id = facts_.node->inputs[slot];
    if (id == ir::kNone) return 0;
    // A cache that tokens are appended to is worked on in its own memory.
    const ir::TensorId shared = ir::shared_memory_input(graph_, id);
    return ir::Graph::uid(shared == ir::kNone ? id : shared);
  }
  std::int64_t result_uid(std::size_t slot) const {
    const ir::TensorId id = facts_.node->outputs[slot];
    return id == ir::kNone ? 0 : ir::Graph::uid(id);
  }

  static NativeTensor native(const ir::Tensor& tensor, std::int64_t uid) {
    return {uid, tensor.name, tensor.dtype, tensor.shape, tensor.strides, tensor.by_value, 0, {}};
  }
  void take(N::Role role, std::size_t slot) {
    if (const ir::Tensor* tensor = operand(slot)) {
      n_.tensors[role] = native(*tensor, operand_uid(slot));
    }
  }
  void give(N::Role role, std::size_t slot) {
    if (const ir::Tensor* tensor = result(slot)) {
      n_.tensors[role] = native(*tensor, result_uid(slot));
    }
  }

  void note(std::string rewrite) {
    auto& all = n_.rewrites;
    if (std::find(all.begin(), all.end(), rewrite) == all.end()) all.push_back(std::move(rewrite));
  }

  // A tensor of Lawson's own in the workspace, contiguous.
  NativeTensor own(std::string name, DType dtype, Dims shape, bool zero = false) {
    NativeTensor tensor;
    tensor.uid = next_uid_++;
    tensor.name = std::move(name);
    tensor.dtype = dtype;
    tensor.strides = contiguous_strides(shape);
    tensor.shape = std::move(shape);
    const std::int64_t count = element_count(tensor.shape).value_or(0);
    n_.supplies.own.push_back(
        {tensor.uid, static_cast<std::int64_t>(byte_size(dtype, count)), zero});
    return tensor;
  }

  // As a step's operand over the first `rank` axes; an axis of 1 is repeated.
  static steps::Operand step_operand(const NativeTensor& tensor, std::size_t rank) {
    steps::Operand operand{tensor.uid, tensor.dtype, {}};
    for (std::size_t axis = 0; axis < rank; ++axis) {
      operand.strides.push_back(tensor.shape[axis] == 1 ? 0 : tensor.strides[axis]);
    }
    return operand;
  }
  steps::Operand step_input(std::size_t slot, std::size_t rank) const {
    const ir::Tensor* tensor = operand(slot);
    if (tensor == nullptr) return {};
    return step_operand(native(*tensor, operand_uid(slot)), rank);
  }
  steps::Operand scalar_input(std::size_t slot) const {
    const ir::Tensor* tensor = operand(slot);
    if (tensor == nullptr) return {};
    return {operand_uid(slot), tensor->dtype, {}};
  }

  // Every step takes f32, f16 and bf16, and sizes that memory can have.
  Status check_steps() const {
    for (const auto* list : {&n_.supplies.before, &n_.supplies.after}) {
      for (const Step& step : *list) {
        const Status checked = check_step(step);
        if (checked.ok()) continue;
        std::string field;
        for (const auto& [slot, name] :
             {std::pair{Slot::mask, "attn_mask.dtype"}, std::pair{Slot::bias, "bias_dtype"}}) {
          if (operand(slot) != nullptr && operand(slot)->dtype == DType::f64) field = name;
        }
        return unsupported("rewrite",
                           fmt::format("the rewrite that cuDNN needs does not take it: {}",
                                       checked.error().message),
                           field);
      }
    }
    return {};
  }

  // The kernels load 16 bytes at a time, whatever alignment their descriptors declare.
  Status check_alignment() const {
    const auto check = [&](ir::TensorId id) -> Status {
      if (id == ir::kNone) return {};
      const ir::Tensor& tensor = graph_.tensor(id);
      if (tensor.by_value || tensor.shape.size() != 4 || tensor.shape[3] <= 1 ||
          tensor.alignment >= 16) {
        return {};
      }
      return unsupported(
          "alignment",
          fmt::format("{} promises an alignment of {} bytes; cuDNN's attention needs 16",
                      tensor.name, tensor.alignment),
          tensor.name);
    };
    for (const ir::TensorId id : facts_.node->inputs) LAWSON_CHECK(check(id));
    for (const ir::TensorId id : facts_.node->outputs) LAWSON_CHECK(check(id));
    return {};
  }

  // ---- bounds ----------------------------------------------------------------------------

  bool reaches(std::int64_t bound) const { return bound >= 0 && bound < facts_.s_q + facts_.s_kv; }

  // False: this variant has nothing to change.
  bool choose_bounds() {
    if (reaches(rule_.left)) n_.left = rule_.left;
    if (reaches(rule_.right)) n_.right = rule_.right;
    n_.alignment = rule_.alignment;
    n_.alibi = rule_.alibi;
    const bool bounded = n_.left || n_.right;
    const std::int64_t offset =
        rule_.alignment == ir::Alignment::bottom_right ? facts_.s_kv - facts_.s_q : 0;
    // With full lengths the two alignments differ by a constant.
    if (!facts_.has_lengths() && (offset == 0 || (!bounded && !rule_.alibi))) {
      n_.alignment = ir::Alignment::top_left;
    }
    switch (options_.variant) {
      case Variant::direct:
        return true;
      case Variant::shifted_bounds: {
        const bool possible = n_.alignment == ir::Alignment::bottom_right && bounded &&
                              !facts_.has_lengths() && !rule_.alibi &&
                              (!n_.left || *n_.left >= offset) &&
                              (!n_.right || *n_.right + offset >= 0);
        if (!possible) return false;
        if (n_.left) *n_.left -= offset;
        if (n_.right) *n_.right += offset;
        n_.alignment = ir::Alignment::top_left;
        note("bottom_right_as_shifted_bounds");
        return true;
      }
      case Variant::bounds_as_bias:
        if (!bounded && !rule_.alibi) return false;
        hide_unseen_ = bounded;
        n_.left.reset();
        n_.right.reset();
        n_.alibi = false;
        n_.alignment = ir::Alignment::top_left;
        if (bounded) note("bounds_as_bias");
        if (rule_.alibi) note("alibi_as_bias");
        return true;
    }
    return false;
  }

  // ---- caches ----------------------------------------------------------------------------

  Status append_to_caches() {
    for (const ir::Node& node : graph_.nodes) {
      if (&node == facts_.node) continue;
      if (!std::holds_alternative<ir::CacheAppend>(node.op)) {
        return unsupported("attention_with_other_ops",
                           fmt::format("the graph has {} operations besides attention; cuDNN takes "
                                       "attention alone",
                                       graph_.nodes.size() - 1));
      }
      using Append = ir::CacheAppend;
      const auto tensor = [&](std::size_t slot) -> const ir::Tensor& {
        return graph_.tensor(node.inputs[slot]);
      };
      const auto strides_of = [&](std::size_t slot, std::size_t rank) {
        return steps::Operand{
            ir::Graph::uid(node.inputs[slot]), tensor(slot).dtype,
            Dims(tensor(slot).strides.begin(),
                 tensor(slot).strides.begin() + static_cast<std::ptrdiff_t>(rank))};
      };
      const ir::Tensor& fresh = tensor(Append::fresh);
      const ir::Tensor& cache = tensor(Append::cache);
      steps::CacheAppend step;
      step.batch = fresh.shape[0];
      step.heads = fresh.shape[1];
      step.fresh_rows = fresh.shape[2];
      step.depth = fresh.shape[3];
      step.cache = strides_of(Append::cache, 4);
      step.fresh = strides_of(Append::fresh, 4);
      step.seqlen_kv = strides_of(Append::seqlen_kv, 1);
      step.capacity = cache.shape[2];
      if (node.inputs[Append::page_table] != ir::kNone) {
        const ir::Tensor& table = tensor(Append::page_table);
        step.page_size = cache.shape[2];
        step.pages = cache.shape[0];
        step.capacity = table.shape[2] * step.page_size;
        step.page_table = {ir::Graph::uid(node.inputs[Append::page_table]),
                           table.dtype,
                           {table.strides[0], table.strides[2]}};
      }
      n_.supplies.before.emplace_back(std::move(step));
      note("cache_append");
    }
    return {};
  }

  // ---- lengths and raggedness --------------------------------------------------------------

  struct Side {
    Slot::Shared cu_seqlens;
    Slot::Shared padded;
    Slot::Shared lengths;
    N::Role role;
    const char* name;
    bool ragged;
    std::int64_t longest;
    std::int64_t tokens;                                         // ragged
    std::vector<std::pair<std::int64_t, NativeTensor>> offsets;  // by row stride
    std::size_t step;                                            // in supplies.before
  };

  void lengths() {
    q_side_.ragged = facts_.ragged_q;
    kv_side_.ragged = facts_.ragged_kv;
    q_side_.longest = facts_.s_q;
    kv_side_.longest = facts_.s_kv;
    if (facts_.ragged_q) n_.tokens_q = q_side_.tokens = operand(Slot::q)->shape[2];
    if (facts_.ragged_kv) n_.tokens_kv = kv_side_.tokens = operand(Slot::k)->shape[2];
    // The frontend takes lengths of both sides or of none.
    n_.padding = facts_.has_lengths() || repairs_.full_lengths;
    if (!n_.padding) return;
    if (repairs_.full_lengths) note("full_lengths");
    for (Side* side : {&q_side_, &kv_side_}) {
      if (operand(side->lengths) != nullptr && !facts_.ragged()) {
        take(side->role, side->lengths);
        continue;
      }
      n_.tensors[side->role] = own(side->name, DType::i32, {facts_.batch, 1, 1, 1});
      steps::Ragged step;
      step.bucket = facts_.batch;
      step.max_length = side->longest;
      step.sequences = scalar_input(Slot::sequences);
      step.cu_seqlens = step_input(side->cu_seqlens, 1);
      step.cu_seqlens_padded = step_input(side->padded, 1);
      step.lengths = step_input(side->lengths, 1);
      step.seqlen = step_operand(*n_.tensors[side->role], 1);
      side->step = n_.supplies.before.size();
      n_.supplies.before.emplace_back(std::move(step));
      if (side->ragged) note("lengths_of_cu_seqlens");
    }
  }

  // A ragged tensor as cuDNN sees it: its longest sequence, and where each begins.
  void make_ragged(NativeTensor& tensor, Side& side) {
    const std::int64_t row = tensor.strides[2];
    tensor.shape[0] = facts_.batch;
    tensor.shape[2] = side.longest;
    tensor.strides[0] = row * side.longest;
    auto found = std::find_if(side.offsets.begin(), side.offsets.end(),
                              [&](const auto& known) { return known.first == row; });
    if (found == side.offsets.end()) {
      const DType dtype =
          side.tokens < kMost32 / std::max<std::int64_t>(row, 1) ? DType::i32 : DType::i64;
      side.offsets.emplace_back(row, own(fmt::format("{}_offsets_{}", side.name, row), dtype,
                                         {facts_.batch + 1, 1, 1, 1}));
      found = side.offsets.end() - 1;
      auto& step = std::get<steps::Ragged>(n_.supplies.before[side.step]);
      step.outputs.push_back({step_operand(found->second, 1), row});
    }
    tensor.offsets_uid = found->second.uid;
    tensor.offsets_dtype = found->second.dtype;
  }

  // ---- tensors that go through as they are ---------------------------------------------------

  void values() {
    take(N::q, Slot::q);
    take(N::k, Slot::k);
    take(N::v, Slot::v);
    take(N::scale, Slot::scale);
    take(N::page_table_k, Slot::page_table_k);
    take(N::page_table_v, Slot::page_table_v);
    if (facts_.paged) n_.longest_paged = facts_.s_kv;
    if (facts_.backward) {
      take(N::o, B::o);
      take(N::dout, B::dout);
      if (!(facts_.ragged_q && options_.dense_stats)) take(N::stats, B::stats);
      give(N::dq, B::dq);
      give(N::dk, B::dk);
      give(N::dv, B::dv);
      give(N::dsink, B::dsink);
    } else {
      give(N::o, F::o);
      give(N::stats, F::stats);
      give(N::max_logit, F::max_logit);
      if (n_.tensors[N::max_logit]) largest_and_sum();
    }
    for (const auto role : {N::q, N::o, N::dout, N::stats, N::max_logit, N::sum_exp, N::dq}) {
      if (facts_.ragged_q && n_.tensors[role]) make_ragged(*n_.tensors[role], q_side_);
    }
    for (const auto role : {N::k, N::v, N::dk, N::dv}) {
      if (facts_.ragged_kv && n_.tensors[role]) make_ragged(*n_.tensors[role], kv_side_);
    }
    switch (rule_.softmax) {
      case ir::SoftmaxKind::vanilla:
        break;
      case ir::SoftmaxKind::learnable:
        take(N::sink, Slot::sink);
        break;
      case ir::SoftmaxKind::off_by_one:  // a learnable sink whose logit is 0
        n_.tensors[N::sink] = own("zero_sink", DType::f32, {1, facts_.heads, 1, 1}, true);
        note("off_by_one_as_zero_sink");
        break;
    }
  }

  // cuDNN gives the log-sum-exp, or what it is made of: the largest score and the sum.
  void largest_and_sum() {
    const ir::Tensor& largest = *result(F::max_logit);
    NativeTensor sum = own("sum_exp", DType::f32, largest.shape);
    sum.strides = largest.strides;
    n_.supplies.own.back().bytes = extent_bytes(largest);
    const ir::Tensor* stats = result(F::stats);
    if (stats != nullptr) {
      steps::StatsOfRows step;
      step.batch = facts_.batch;
      step.heads = facts_.heads;
      step.rows = facts_.s_q;
      step.sequences = scalar_input(Slot::sequences);
      step.packing = packing_q();
      step.stats = row_operand(largest, result_uid(F::max_logit));
      step.sum_exp = row_operand(largest, sum.uid);
      step.out = row_operand(*stats, result_uid(F::stats));
      n_.supplies.after.emplace_back(std::move(step));
      n_.tensors[N::stats].reset();
      note("stats_of_max_and_sum");
    }
    n_.tensors[N::sum_exp] = sum;
  }

  static std::int64_t extent_bytes(const ir::Tensor& tensor) {
    return static_cast<std::int64_t>(
        byte_size(tensor.dtype, storage_extent(tensor.shape, tensor.strides).value_or(0)));
  }

  // ---- bias and masks ------------------------------------------------------------------------

  // Which rows see what, for steps: with the graph's bounds, whatever cuDNN is given.
  steps::Scores scores_of(std::int64_t batch, std::int64_t heads) const {
    steps::Scores scores;
    scores.batch = batch;
    scores.heads = heads;
    scores.rows = facts_.s_q;
    scores.columns = facts_.s_kv;
    if (n_.padding) {
      scores.seqlen_q = step_operand(*n_.tensors[N::seqlen_q], 1);
      scores.seqlen_kv = step_operand(*n_.tensors[N::seqlen_kv], 1);
    }
    scores.alignment = rule_.alignment;
    scores.left = rule_.left;
    scores.right = rule_.right;
    return scores;
  }

  static bool varies(const ir::Tensor* tensor, std::size_t axis) {
    return tensor != nullptr && tensor->shape[axis] > 1;
  }

  void scores() {
    const ir::Tensor* bias = operand(Slot::bias);
    const ir::Tensor* mask = operand(Slot::mask);
    const bool alibi = rule_.alibi && (!n_.alibi || operand(Slot::slopes) != nullptr);
    if (alibi) {
      n_.alibi = false;
      if (operand(Slot::slopes) != nullptr) note("alibi_slopes_as_bias");
    }
    const bool expanded = repairs_.expand_bias;
    const bool made = alibi || hide_unseen_ || expanded || rule_.pre_scale_bias ||
                      (mask != nullptr && (bias != nullptr || mask->dtype == DType::boolean));
    const bool wants_gradient = facts_.backward && result(B::dbias) != nullptr;
    if (!made) {
      take(N::bias, bias != nullptr ? Slot::bias : Slot::mask);
      if (!wants_gradient) return;
      give(N::dbias, B::dbias);
      // cuDNN writes the bias's gradient in the type of the values.
      if (result(B::dbias)->dtype != facts_.dtype) reduce_gradient(*n_.tensors[N::bias]);
      return;
    }
    const bool lengths_matter = (hide_unseen_ || alibi) && facts_.has_lengths() &&
                                rule_.alignment == ir::Alignment::bottom_right;
    const bool per_sequence = varies(bias, 0) || varies(mask, 0) || lengths_matter;
    const bool per_head = varies(bias, 1) || varies(mask, 1) || alibi;
    const std::int64_t batch = per_sequence ? facts_.batch : 1;
    const std::int64_t heads = per_head ? facts_.heads : 1;
    made_bias_ = true;
    NativeTensor made_bias =
        own("score_bias", made_type(bias, mask, alibi), {batch, heads, facts_.s_q, facts_.s_kv});
    steps::ScoreBias step;
    step.scores = scores_of(batch, heads);
    if (!lengths_matter) step.scores.seqlen_q = step.scores.seqlen_kv = {};
    if (per_sequence) step.scores.sequences = scalar_input(Slot::sequences);
    step.terms.bias = step_input(Slot::bias, 4);
    if (rule_.pre_scale_bias) step.terms.factor = scalar_input(Slot::scale);
    step.terms.mask = step_input(Slot::mask, 4);
    step.alibi = alibi;
    step.slopes = step_input(Slot::slopes, 2);
    if (step.slopes.uid != 0) step.slopes.strides = {step.slopes.strides[1]};
    step.hide_unseen = hide_unseen_;
    step.out = step_operand(made_bias, 4);
    n_.supplies.before.emplace_back(std::move(step));
    n_.tensors[N::bias] = made_bias;
    if (rule_.pre_scale_bias) note("pre_scale_bias_folded");
    if (mask != nullptr) note(mask->dtype == DType::boolean ? "bool_mask_as_bias" : "mask_as_bias");
    if (expanded) note("bias_expanded");
    if (wants_gradient) reduce_gradient(made_bias);
  }

  // The type in which what is added is exact, or f32.
  DType made_type(const ir::Tensor* bias, const ir::Tensor* mask, bool alibi) const {
    const bool bool_mask = mask != nullptr && mask->dtype == DType::boolean;
    if (alibi || rule_.pre_scale_bias) return DType::f32;
    // A visible score is kept above half of the hidden one, which f16 has no room for.
    const bool half = (bias != nullptr && bias->dtype == DType::f16) ||
                      (mask != nullptr && mask->dtype == DType::f16);
    if (half) return DType::f32;
    if (bias != nullptr && (mask == nullptr || bool_mask)) return bias->dtype;
    if (bias == nullptr && mask != nullptr && !bool_mask) return mask->dtype;
    return bias == nullptr ? facts_.dtype : DType::f32;
  }

  // The gradient of the bias that cuDNN was given, brought to the shape and type of the graph's.
  void reduce_gradient(const NativeTensor& bias) {
    NativeTensor gradient = own("score_bias_gradient", facts_.dtype, bias.shape);
    note("bias_gradient_reduced");
    n_.tensors[N::dbias] = gradient;
    const ir::Tensor& wanted = *result(B::dbias);
    steps::ReduceBiasGradient step;
    step.full = gradient.shape;
    step.shape = wanted.shape;
    step.gradient = step_operand(gradient, 4);
    step.gradient.strides = gradient.strides;
    if (rule_.pre_scale_bias) step.factor = scalar_input(Slot::scale);
    if (gradient.shape[0] > 1) step.sequences = scalar_input(Slot::sequences);
    step.bias_gradient = {result_uid(B::dbias), wanted.dtype, wanted.strides};
    n_.supplies.after.emplace_back(std::move(step));
  }

  // ---- rows that see nothing -------------------------------------------------------------------

  // Does some row see nothing, whatever the data?
  bool bounds_leave_rows_empty() const {
    const std::int64_t offset =
        rule_.alignment == ir::Alignment::bottom_right ? facts_.s_kv - facts_.s_q : 0;
    const bool first = reaches(rule_.right) && offset + rule_.right < 0;
    const bool last = reaches(rule_.left) && facts_.s_q - 1 + offset - rule_.left >= facts_.s_kv;
    return first || last;
  }

  steps::Packing packing_q() const {
    if (!facts_.ragged_q) return {};
    const auto slot = operand(Slot::cu_seqlens_q_padded) != nullptr ? Slot::cu_seqlens_q_padded
                                                                    : Slot::cu_seqlens_q;
    return {step_input(slot, 1), q_side_.tokens};
  }
  steps::Packing packing_kv() const {
    if (!facts_.ragged_kv) return {};
    const auto slot = operand(Slot::cu_seqlens_kv_padded) != nullptr ? Slot::cu_seqlens_kv_padded
                                                                     : Slot::cu_seqlens_kv;
    return {step_input(slot, 1), kv_side_.tokens};
  }

  steps::ClearedTensor cleared(std::size_t result_slot) const {
    const ir::Tensor& tensor = *result(result_slot);
    return {{result_uid(result_slot), tensor.dtype, tensor.strides}, tensor.shape[3]};
  }
  steps::Operand row_operand(const ir::Tensor& tensor, std::int64_t uid) const {
    return {uid, tensor.dtype, {tensor.strides[0], tensor.strides[1], tensor.strides[2]}};
  }

  void rows_that_see_nothing() {
    const ir::Tensor* mask = operand(Slot::mask);
    // A bias that cuDNN gets as it is may not be -inf over a whole row; where one is made, what was
    // -inf is finite, and the row has to be found.
    const ir::Tensor* bias = made_bias_ ? operand(Slot::bias) : nullptr;
    if (mask == nullptr && bias == nullptr && !facts_.has_lengths() && !bounds_leave_rows_empty()) {
      return;
    }
    const std::int64_t heads = varies(mask, 1) || varies(bias, 1) ? facts_.heads : 1;
    NativeTensor flags = own("empty_rows", DType::u8, {facts_.batch, heads, facts_.s_q});
    steps::MaskedRows find;
    find.scores = scores_of(facts_.batch, heads);
    find.scores.sequences = scalar_input(Slot::sequences);
    find.terms.mask = step_input(Slot::mask, 4);
    if (bias != nullptr) {
      find.terms.bias = step_input(Slot::bias, 4);
      if (rule_.pre_scale_bias) find.terms.factor = scalar_input(Slot::scale);
    }
    find.flags = step_operand(flags, 3);
    find.flags.strides = flags.strides;
    n_.supplies.before.emplace_back(std::move(find));
    const steps::Operand flagged = step_operand(flags, 3);

    steps::ClearRows clear;
    clear.batch = facts_.batch;
    clear.heads = facts_.heads;
    clear.rows = facts_.s_q;
    clear.flags = flagged;
    clear.sequences = scalar_input(Slot::sequences);
    clear.packing = packing_q();
    clear.softmax = rule_.softmax;
    if (facts_.backward) {
      const ir::Tensor& given = *operand(B::stats);
      NativeTensor copy = own("stats_of_rows", DType::f32, given.shape);
      const bool dense = facts_.ragged_q && options_.dense_stats;
      if (dense) {
        copy.shape = {facts_.batch, facts_.heads, facts_.s_q, 1};
        copy.strides = contiguous_strides(copy.shape);
        n_.supplies.own.back().bytes =
            static_cast<std::int64_t>(byte_size(DType::f32, element_count(copy.shape).value_or(0)));
        note("ragged_stats_as_dense");
      } else {
        copy.strides = given.strides;
        n_.supplies.own.back().bytes = extent_bytes(given);
      }
      steps::StatsOfRows step;
      step.batch = facts_.batch;
      step.heads = facts_.heads;
      step.rows = facts_.s_q;
      step.flags = flagged;
      step.sequences = clear.sequences;
      step.packing = clear.packing;
      step.stats = row_operand(given, operand_uid(B::stats));
      step.dense_out = dense;
      step.out = {copy.uid, DType::f32, {copy.strides[0], copy.strides[1], copy.strides[2]}};
      n_.supplies.before.emplace_back(std::move(step));
      if (facts_.ragged_q && !dense) make_ragged(copy, q_side_);
      n_.tensors[N::stats] = copy;
      clear.tensors.push_back(cleared(B::dq));
    } else {
      clear.tensors.push_back(cleared(F::o));
      if (const ir::Tensor* stats = result(F::stats)) {
        clear.stats = row_operand(*stats, result_uid(F::stats));
        if (rule_.softmax == ir::SoftmaxKind::learnable) {
          clear.sink = step_input(Slot::sink, 2);
          clear.sink.strides = {clear.sink.strides[1]};
        }
      }
      if (const ir::Tensor* largest = result(F::max_logit)) {
        clear.max_logit = row_operand(*largest, result_uid(F::max_logit));
      }
    }
    n_.supplies.after.emplace_back(std::move(clear));
    note("empty_rows_cleared");
  }

  // ---- dropout -------------------------------------------------------------------------------

  void dropout() {
    if (rule_.dropout == 0) return;
    take(N::seed, Slot::seed);
    take(N::offset, Slot::offset);
    if (!facts_.backward && result(F::dropped) != nullptr) {
      // Of the scores that no kernel looks at cuDNN gives no mask.
      n_.tensors[N::dropped] = own("dropped", DType::f32, result(F::dropped)->shape);
      n_.supplies.own.back().ones = true;
      n_.supplies.after.emplace_back(
          steps::ConvertMask{result(F::dropped)->shape, step_operand(*n_.tensors[N::dropped], 4),
                             step_operand(native(*result(F::dropped), result_uid(F::dropped)), 4)});
      note("dropout_mask_as_bytes");
    }
    if (repairs_.scale_sink_gradient) scale_sink_gradient();
    if (operand(Slot::dropout_mask) == nullptr) return;
    const ir::Tensor& mask = *operand(Slot::dropout_mask);
    n_.tensors[N::dropout_mask] = own("dropout_mask", facts_.dtype, mask.shape);
    n_.supplies.before.emplace_back(
        steps::ConvertMask{mask.shape, step_input(Slot::dropout_mask, 4),
                           step_operand(*n_.tensors[N::dropout_mask], 4)});
    note("dropout_mask_as_values");
    const auto scalar = [&](const char* name, double value) {
      NativeTensor tensor{next_uid_++, name, DType::f32, {1, 1, 1, 1}, {1, 1, 1, 1}, true, 0, {}};
      n_.supplies.scalars.push_back({tensor.uid, value, DType::f32});
      return tensor;
    };
    n_.tensors[N::dropout_scale] = scalar("dropout_scale", 1 / (1 - rule_.dropout));
    if (facts_.backward) {
      n_.tensors[N::dropout_scale_inverse] = scalar("dropout_scale_inverse", 1 - rule_.dropout);
    }
  }

  // cuDNN leaves 1 / (1 - p) out of the sink's gradient.
  void scale_sink_gradient() {
    const ir::Tensor& wanted = *result(B::dsink);
    NativeTensor gradient = own("sink_gradient", DType::f32, wanted.shape);
    n_.tensors[N::dsink] = gradient;
    n_.supplies.scalars.push_back({next_uid_, 1 / (1 - rule_.dropout), DType::f32});
    steps::ReduceBiasGradient step;
    step.full = step.shape = wanted.shape;
    step.gradient = {gradient.uid, DType::f32, gradient.strides};
    step.factor = {next_uid_++, DType::f32, {}};
    step.bias_gradient = {result_uid(B::dsink), wanted.dtype, wanted.strides};
    n_.supplies.after.emplace_back(std::move(step));
    note("sink_gradient_scaled");
  }

  // ---- gaps between sequences ------------------------------------------------------------------

  void gaps() {
    const auto zero = [&](const std::vector<std::size_t>& results, const Side& side,
                          const steps::Packing& packing, std::int64_t heads) {
      steps::ZeroGaps step;
      step.batch = facts_.batch;
      step.heads = heads;
      step.rows = side.longest;
      step.lengths = step_operand(*n_.tensors[side.role], 1);
      step.sequences = scalar_input(Slot::sequences);
      step.packing = packing;
      for (const std::size_t slot : results) step.tensors.push_back(cleared(slot));
      n_.supplies.after.emplace_back(std::move(step));
      note("gaps_zeroed");
    };
    if (operand(Slot::cu_seqlens_q_padded) != nullptr) {
      zero({facts_.backward ? std::size_t{B::dq} : std::size_t{F::o}}, q_side_, packing_q(),
           facts_.heads);
    }
    if (facts_.backward && operand(Slot::cu_seqlens_kv_padded) != nullptr) {
      zero({std::size_t{B::dk}, std::size_t{B::dv}}, kv_side_, packing_kv(), facts_.kv_heads);
    }
  }

  // cuDNN leaves the gradients of a sequence without keys or queries as they are.
  void keys_without_queries() {
    if (!facts_.backward || !facts_.has_lengths()) return;
    NativeTensor flags = own("unseen_keys", DType::u8, {facts_.batch, 1, facts_.s_kv});
    steps::MaskedRows find;  // keys are the rows, and see the queries
    find.scores.batch = facts_.batch;
    find.scores.heads = 1;
    find.scores.rows = facts_.s_kv;
    find.scores.columns = facts_.s_q;
    find.scores.seqlen_q = step_operand(*n_.tensors[N::seqlen_kv], 1);
    find.scores.seqlen_kv = step_operand(*n_.tensors[N::seqlen_q], 1);
    find.scores.sequences = scalar_input(Slot::sequences);
    find.flags = step_operand(flags, 3);
    find.flags.strides = flags.strides;
    n_.supplies.after.emplace_back(std::move(find));
    steps::ClearRows clear;
    clear.batch = facts_.batch;
    clear.heads = facts_.kv_heads;
    clear.rows = facts_.s_kv;
    clear.flags = step_operand(flags, 3);
    clear.sequences = scalar_input(Slot::sequences);
    clear.packing = packing_kv();
    clear.tensors = {cleared(B::dk), cleared(B::dv)};
    n_.supplies.after.emplace_back(std::move(clear));
    note("unseen_keys_cleared");
  }

  const ir::Graph& graph_;
  const AttentionFacts& facts_;
  const ir::AttentionRule& rule_;
  const RewriteOptions& options_;
  const Repairs& repairs_;
  NativeAttention n_;
  std::int64_t next_uid_ = kFirstOwnUid;
  bool hide_unseen_ = false;  // bounds go into the bias
  bool made_bias_ = false;
  Side q_side_{Slot::cu_seqlens_q,
               Slot::cu_seqlens_q_padded,
               Slot::seqlen_q,
               N::seqlen_q,
               "seqlen_q",
               false,
               0,
               0,
               {},
               0};
  Side kv_side_{Slot::cu_seqlens_kv,
                Slot::cu_seqlens_kv_padded,
                Slot::seqlen_kv,
                N::seqlen_kv,
                "seqlen_kv",
                false,
                0,
                0,
                {},
                0};
};

}  // namespace

Result<std::optional<NativeAttention>> rewrite_attention(const ir::Graph& graph,
                                                         const AttentionFacts& facts,
                                                         const RewriteOptions& options) {
  return Rewriter{graph, facts, options}.run();
}

}  // namespace lawson::cudnn
