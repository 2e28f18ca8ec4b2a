// An attention spec as graphs, one per pass.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "front/attention.h"
#include "front/attention_layout.h"
#include "front/buckets.h"

namespace lawson::front {
namespace {

using ir::Alignment;
using ir::SoftmaxKind;
using Slot = ir::AttentionSlots;

// Builds the operands that both passes share, in their slots.
class GraphMaker {
 public:
  GraphMaker(const AttentionSpec& spec, const char* pass)
      : spec_{spec},
        layout_{*parse_layout(spec.layout)},
        ragged_{layout_.ragged_q() || layout_.ragged_kv()},
        batch_{has_bucket(spec, layout_) ? bucket_batch(spec.batch) : spec.batch},
        total_q_{tokens(layout_.ragged_q(), spec.total_q, spec.seqlens_q, spec.seqlens_q_padded,
                        spec.seqlen_q)},
        total_kv_{tokens(layout_.ragged_kv(), spec.total_kv, spec.seqlens_kv,
                         spec.seqlens_kv_padded, spec.seqlen_kv)},
        builder_{spec.name + "." + pass} {}

  ir::Builder& builder() { return builder_; }
  ir::Builder take() && { return std::move(builder_); }

  // Of the tensor in memory: q, k, v or o, and what is shaped like one of them.
  Dims shape(char tensor) const {
    const bool kv = tensor == 'k' || tensor == 'v';
    const std::int64_t depth =
        tensor == 'q' || tensor == 'k' ? spec_.head_dim_qk : spec_.head_dim_v;
    if (kv && spec_.paged) {
      const std::int64_t size = tensor == 'k' ? spec_.paged->page_size_k : spec_.paged->page_size_v;
      const std::int64_t all = spec_.batch * pages_per_sequence(size);
      return {spec_.paged->pages > 0 ? spec_.paged->pages : all, spec_.kv_heads, size, depth};
    }
    const std::int64_t heads = kv ? spec_.kv_heads : spec_.heads;
    if (kv ? layout_.ragged_kv() : layout_.ragged_q()) {
      return {1, heads, kv ? total_kv_ : total_q_, depth};
    }
    return {batch_, heads, kv ? spec_.seqlen_kv : spec_.seqlen_q, depth};
  }

  // Strides of a tensor that lies like `like` (q, k, v or o), unless the spec gives them.
  Dims strides(const std::string& tensor, char like) const {
    if (const auto it = spec_.strides.find(tensor); it != spec_.strides.end()) return it->second;
    return layout_strides(layout_, like, shape(like));
  }

  // Of stats and the like, one number per row of o; ragged: [tokens, heads].
  Dims row_shape() const {
    Dims rows = shape('q');
    rows[3] = 1;
    return rows;
  }
  Dims row_strides() const {
    const Dims rows = row_shape();
    if (!layout_.ragged_q()) return contiguous_strides(rows);
    return {rows[1] * rows[2], 1, rows[1], 1};
  }

  Result<ir::TensorId> input(const std::string& name, char like, DType dtype) {
    return input(name, dtype, shape(like), strides(name, like));
  }

  Result<ir::TensorId> input(const std::string& name, DType dtype, Dims shape, Dims strides = {}) {
    ir::Tensor tensor;
    tensor.name = name;
    tensor.dtype = dtype;
    tensor.shape = std::move(shape);
    tensor.strides = std::move(strides);
    return builder_.input(std::move(tensor));
  }

  // The operands of AttentionSlots in `in`.
  Status shared(std::vector<ir::TensorId>& in) {
    LAWSON_TRY(in[Slot::q], input("q", 'q', spec_.dtype));
    LAWSON_TRY(in[Slot::k], input("k", 'k', spec_.dtype));
    LAWSON_TRY(in[Slot::v], input("v", 'v', spec_.dtype));
    LAWSON_TRY(
        in[Slot::scale],
        by_value("scale", spec_.dtype == DType::f64 ? DType::f64 : DType::f32,
                 spec_.scale.value_or(1.0 / std::sqrt(static_cast<double>(spec_.head_dim_qk)))));
    LAWSON_CHECK(scores(in));
    LAWSON_CHECK(lengths(in));
    LAWSON_CHECK(dropout(in));
    if (spec_.append > 0) LAWSON_CHECK(append(in));
    return {};
  }

  // Declares the appended caches as outputs; to be called behind the other outputs.
  Status cache_outputs() {
    for (const auto& [id, tensor] : {std::pair{k_out_, 'k'}, std::pair{v_out_, 'v'}}) {
      if (id != ir::kNone) {
        LAWSON_CHECK(builder_.output(id, strides(std::string{tensor}, tensor)));
      }
    }
    return {};
  }

  ir::AttentionRule rule() const {
    ir::AttentionRule rule;
    rule.padding = has_dense_lengths();
    if (spec_.mask.ends_with("bottom_right")) rule.alignment = Alignment::bottom_right;
    rule.left = spec_.window_left;
    rule.right = spec_.window_right;
    if (spec_.mask.find("causal") != std::string::npos) rule.right = 0;
    rule.softmax = spec_.softmax;
    rule.softcap = spec_.softcap;
    rule.alibi = spec_.bias == BiasKind::alibi;
    rule.pre_scale_bias = spec_.bias == BiasKind::pre_scale;
    rule.dropout = spec_.dropout;
    if (layout_.ragged_q()) rule.max_q = spec_.seqlen_q;
    if (layout_.ragged_kv() || spec_.paged) rule.max_kv = spec_.seqlen_kv;
    return rule;
  }

 private:
  // A bucket has room for more sequences than there are: only where nothing but ragged tensors and
  // lengths has a b of its own, or memory behind the caller's would be read and written.
  static bool has_bucket(const AttentionSpec& spec, const Layout& layout) {
    const bool per_sequence = (!spec.bias_shape.empty() && spec.bias_shape[0] != 1) ||
                              (spec.attn_mask && spec.attn_mask->shape[0] != 1) ||
                              spec.dropout_mask_input || spec.return_dropout_mask;
    return layout.ragged_q() && layout.ragged_kv() && !per_sequence;
  }

  // A ragged tensor's tokens, in their bucket.
  std::int64_t tokens(bool ragged, std::int64_t total, const Dims& lengths, const Dims& padded,
                      std::int64_t longest) const {
    if (!ragged) return 0;
    const Dims& given = padded.empty() ? lengths : padded;
    if (total == 0) {
      // Unsigned: an overflow is found when the tensor is added.
      total = given.empty() ? static_cast<std::int64_t>(static_cast<std::uint64_t>(spec_.batch) *
                                                        static_cast<std::uint64_t>(longest))
                            : std::accumulate(given.begin(), given.end(), std::int64_t{0});
    }
    return bucket_tokens(total);
  }

  std::int64_t pages_per_sequence(std::int64_t page_size) const {
    return std::max<std::int64_t>(1, (spec_.seqlen_kv + page_size - 1) / page_size);
  }

  bool has_dense_lengths() const {
    if (layout_.ragged_q() && layout_.ragged_kv()) return false;
    return spec_.mask.starts_with("padding") || spec_.paged;
  }

  Result<ir::TensorId> by_value(const char* name, DType dtype, double value) {
    ir::Tensor tensor;
    tensor.name = name;
    tensor.dtype = dtype;
    tensor.shape = {1, 1, 1, 1};
    tensor.alignment = 4;
    tensor.by_value = true;
    tensor.values = {value};
    return builder_.input(std::move(tensor));
  }

  Status scores(std::vector<ir::TensorId>& in) {
    if (!spec_.bias_shape.empty()) {
      LAWSON_TRY(in[Slot::bias],
                 input("bias", spec_.bias_dtype.value_or(spec_.dtype), spec_.bias_shape));
    }
    if (spec_.attn_mask) {
      LAWSON_TRY(in[Slot::mask], input("mask", spec_.attn_mask->dtype, spec_.attn_mask->shape));
    }
    if (spec_.alibi_slopes) {
      ir::Tensor slopes;
      slopes.name = "slopes";
      slopes.shape = {1, spec_.heads, 1, 1};
      slopes.values = spec_.alibi_slope_values;
      LAWSON_TRY(in[Slot::slopes], builder_.input(std::move(slopes)));
    }
    if (spec_.softmax == SoftmaxKind::learnable) {
      LAWSON_TRY(in[Slot::sink], input("sink", DType::f32, {1, spec_.heads, 1, 1}));
    }
    return {};
  }

  Status lengths(std::vector<ir::TensorId>& in) {
    if (has_dense_lengths() && !layout_.ragged_q()) {
      LAWSON_TRY(in[Slot::seqlen_q], lengths("seqlen_q", spec_.seqlen_q, spec_.seqlens_q));
    }
    if (has_dense_lengths() && !layout_.ragged_kv()) {
      LAWSON_TRY(in[Slot::seqlen_kv], lengths("seqlen_kv", spec_.seqlen_kv, spec_.seqlens_kv));
    }
    if (layout_.ragged_q()) {
      LAWSON_TRY(in[Slot::cu_seqlens_q], cumulative("cu_seqlens_q", spec_.seqlens_q));
    }
    if (layout_.ragged_kv()) {
      LAWSON_TRY(in[Slot::cu_seqlens_kv], cumulative("cu_seqlens_kv", spec_.seqlens_kv));
    }
    if (spec_.has_padded_offsets && layout_.ragged_q()) {
      LAWSON_TRY(in[Slot::cu_seqlens_q_padded],
                 cumulative("cu_seqlens_q_padded", spec_.seqlens_q_padded));
    }
    if (spec_.has_padded_offsets && layout_.ragged_kv()) {
      LAWSON_TRY(in[Slot::cu_seqlens_kv_padded],
                 cumulative("cu_seqlens_kv_padded", spec_.seqlens_kv_padded));
    }
    if (ragged_) {
      LAWSON_TRY(in[Slot::sequences],
                 by_value("sequences", DType::i32, static_cast<double>(spec_.batch)));
    }
    if (!spec_.paged) return {};
    const auto table = [&](const char* name, std::int64_t page_size) {
      return input(name, DType::i32, {batch_, 1, pages_per_sequence(page_size), 1});
    };
    LAWSON_TRY(in[Slot::page_table_k], table("page_table_k", spec_.paged->page_size_k));
    LAWSON_TRY(in[Slot::page_table_v], table("page_table_v", spec_.paged->page_size_v));
    return {};
  }

  Result<ir::TensorId> lengths(const std::string& name, std::int64_t limit, const Dims& given) {
    ir::Tensor tensor;
    tensor.name = name;
    tensor.dtype = DType::i32;
    tensor.shape = {batch_, 1, 1, 1};
    tensor.domain = std::pair{std::min<std::int64_t>(1, limit), limit};
    for (const std::int64_t length : given) tensor.values.push_back(static_cast<double>(length));
    if (!given.empty()) tensor.values.resize(static_cast<std::size_t>(batch_), 0.0);
    return builder_.input(std::move(tensor));
  }

  Result<ir::TensorId> cumulative(const std::string& name, const Dims& given) {
    ir::Tensor tensor;
    tensor.name = name;
    tensor.dtype = DType::i32;
    tensor.shape = {batch_ + 1, 1, 1, 1};
    if (!given.empty()) {
      tensor.values = {0};
      for (const std::int64_t length : given) {
        tensor.values.push_back(tensor.values.back() + static_cast<double>(length));
      }
      // The tail of a bucket has length 0 and the last offset.
      tensor.values.resize(static_cast<std::size_t>(batch_) + 1, tensor.values.back());
    }
    return builder_.input(std::move(tensor));
  }

  Status dropout(std::vector<ir::TensorId>& in) {
    if (spec_.dropout == 0) return {};
    if (spec_.dropout_mask_input) {
      ir::Tensor mask;
      mask.name = "dropout_mask";
      mask.dtype = DType::u8;
      mask.shape = {batch_, spec_.heads, spec_.seqlen_q, spec_.seqlen_kv};
      mask.domain = std::pair{std::int64_t{0}, std::int64_t{1}};
      LAWSON_TRY(in[Slot::dropout_mask], builder_.input(std::move(mask)));
      return {};
    }
    for (const auto& [slot, name] :
         {std::pair{Slot::seed, "seed"}, std::pair{Slot::offset, "offset"}}) {
      ir::Tensor tensor;
      tensor.name = name;
      tensor.dtype = DType::i64;
      tensor.shape = {1, 1, 1, 1};
      tensor.domain = std::pair{std::int64_t{0}, std::int64_t{1} << 30};
      LAWSON_TRY(in[slot], builder_.input(std::move(tensor)));
    }
    return {};
  }

  // The new tokens go into the caches first, and attention reads the result.
  Status append(std::vector<ir::TensorId>& in) {
    for (const char tensor : {'k', 'v'}) {
      const std::string name{tensor};
      const Dims fresh{spec_.batch, spec_.kv_heads, spec_.append, shape(tensor)[3]};
      Layout dense = layout_;
      dense.packing = Layout::Packing::separate;
      LAWSON_TRY(const ir::TensorId id,
                 input(name + "_new", spec_.dtype, fresh, layout_strides(dense, tensor, fresh)));
      const bool k = tensor == 'k';
      std::vector<ir::TensorId> operands(ir::CacheAppend::kInputs, ir::kNone);
      operands[ir::CacheAppend::cache] = in[k ? Slot::k : Slot::v];
      operands[ir::CacheAppend::fresh] = id;
      operands[ir::CacheAppend::seqlen_kv] = in[Slot::seqlen_kv];
      operands[ir::CacheAppend::page_table] = in[k ? Slot::page_table_k : Slot::page_table_v];
      LAWSON_TRY(const ir::TensorId result,
                 builder_.add1(ir::CacheAppend{}, operands, std::nullopt, name + "_out"));
      in[k ? Slot::k : Slot::v] = result;
      (k ? k_out_ : v_out_) = result;
    }
    return {};
  }

  const AttentionSpec& spec_;
  Layout layout_;
  bool ragged_;
  std::int64_t batch_;
  std::int64_t total_q_;
  std::int64_t total_kv_;
  ir::TensorId k_out_ = ir::kNone;
  ir::TensorId v_out_ = ir::kNone;
  ir::Builder builder_;
};

Result<ir::Graph> forward_graph(const AttentionSpec& spec, bool stats) {
  using Op = ir::Attention;
  GraphMaker maker(spec, "forward");
  std::vector<ir::TensorId> in(Op::kInputs, ir::kNone);
  LAWSON_CHECK(maker.shared(in));
  LAWSON_TRY(auto out, maker.builder().add(Op{maker.rule()}, in,
                                           {{"o", spec.output_dtype, true},
                                            {"stats", std::nullopt, stats},
                                            {"max_logit", std::nullopt, spec.return_max_logit},
                                            {"dropped", std::nullopt, spec.return_dropout_mask}}));
  LAWSON_CHECK(maker.builder().output(out[Op::o], maker.strides("o", 'o')));
  if (stats) LAWSON_CHECK(maker.builder().output(out[Op::stats], maker.row_strides()));
  if (spec.return_max_logit) {
    LAWSON_CHECK(maker.builder().output(out[Op::max_logit], maker.row_strides()));
  }
  if (spec.return_dropout_mask) LAWSON_CHECK(maker.builder().output(out[Op::dropped]));
  LAWSON_CHECK(maker.cache_outputs());
  return std::move(maker).take().finish();
}

Result<ir::Graph> backward_graph(const AttentionSpec& spec) {
  using Op = ir::AttentionBackward;
  GraphMaker maker(spec, "backward");
  std::vector<ir::TensorId> in(Op::kInputs, ir::kNone);
  LAWSON_CHECK(maker.shared(in));
  const DType output_dtype = spec.output_dtype.value_or(spec.dtype);
  LAWSON_TRY(in[Op::o], maker.input("o", 'o', output_dtype));
  LAWSON_TRY(in[Op::dout], maker.input("do", 'o', output_dtype));
  LAWSON_TRY(in[Op::stats], maker.input("stats", spec.dtype == DType::f64 ? DType::f64 : DType::f32,
                                        maker.row_shape(), maker.row_strides()));
  const bool dsink = spec.softmax == SoftmaxKind::learnable;
  LAWSON_TRY(auto out, maker.builder().add(Op{maker.rule(), spec.deterministic}, in,
                                           {{"dq", std::nullopt, true},
                                            {"dk", std::nullopt, true},
                                            {"dv", std::nullopt, true},
                                            {"dbias", std::nullopt, spec.bias_grad},
                                            {"dsink", std::nullopt, dsink}}));
  LAWSON_CHECK(maker.builder().output(out[Op::dq], maker.strides("dq", 'q')));
  LAWSON_CHECK(maker.builder().output(out[Op::dk], maker.strides("dk", 'k')));
  LAWSON_CHECK(maker.builder().output(out[Op::dv], maker.strides("dv", 'v')));
  if (spec.bias_grad) LAWSON_CHECK(maker.builder().output(out[Op::dbias]));
  if (dsink) LAWSON_CHECK(maker.builder().output(out[Op::dsink]));
  return std::move(maker).take().finish();
}

// What has no graph form, with the field.
std::vector<Reason> without_form(const AttentionSpec& spec, Pass pass) {
  std::vector<Reason> reasons;
  if (bit_width(spec.dtype) == 8 || spec.fp8 != Fp8Recipe::none) {
    reasons.push_back({"not_implemented",
                       fmt::format("dtype = {}: this version of Lawson reads the field but does "
                                   "not lower FP8 attention to a graph",
                                   to_string(spec.dtype)),
                       bit_width(spec.dtype) == 8 ? "dtype" : "fp8"});
  }
  if (pass != Pass::backward) return reasons;
  if (spec.paged) {
    reasons.push_back({"no_gradient",
                       "paged: a paged cache of keys and values has no gradients; "
                       "train with a dense or ragged layout",
                       "paged"});
  }
  if (spec.append > 0) {
    reasons.push_back({"no_gradient",
                       "append: tokens that are written into a cache have no "
                       "gradients",
                       "append"});
  }
  return reasons;
}

}  // namespace

Result<ir::Graph> attention_graph(const AttentionSpec& spec, Pass pass) {
  if (const auto wrong = check_attention(spec)) {
    return invalid("field '{}': {}", wrong->field, wrong->message);
  }
  if (spec.context_parallel) {
    return error(ErrorKind::internal, "a spec with context_parallel stands for several graphs");
  }
  if (auto reasons = without_form(spec, pass); !reasons.empty()) {
    Error result{ErrorKind::unsupported, reasons.front().message, {}};
    result.reasons = std::move(reasons);
    return result;
  }
  const bool stats = spec.return_stats || spec.pass == Pass::training;
  return pass == Pass::backward ? backward_graph(spec) : forward_graph(spec, stats);
}

}  // namespace lawson::front
