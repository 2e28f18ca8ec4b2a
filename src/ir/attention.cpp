#include "ir/attention.h"

#include <cmath>

namespace lawson::ir {
namespace {

using Slot = AttentionSlots;
using Results = std::vector<Inferred>;

std::string describe(const Tensor& tensor) {
  return fmt::format("{} {}{}", tensor.name, to_string(tensor.dtype), to_string(tensor.shape));
}

// The checks of one node; its messages begin with the op's name.
class Checker {
 public:
  Checker(std::string_view op, const AttentionRule& rule, const Operands& in)
      : op_{op}, rule_{rule}, in_{in} {}

  Status run() {
    LAWSON_CHECK(check_rule());
    LAWSON_CHECK(check_values());
    LAWSON_CHECK(check_sides());
    geometry_ = attention_geometry(rule_, in_);
    LAWSON_CHECK(check_shapes());
    LAWSON_CHECK(check_lengths());
    LAWSON_CHECK(check_scores());
    return check_dropout();
  }

  template <typename... Args>
  Error wrong(fmt::format_string<Args...> format, Args&&... args) const {
    return invalid("{}: {}", op_, fmt::format(format, std::forward<Args>(args)...));
  }

  Status require(const Tensor& tensor, std::string_view role, const Dims& shape) const {
    if (tensor.shape == shape) return {};
    return wrong("{} is {}; expected shape {}", role, describe(tensor), to_string(shape));
  }

  Status require(const Tensor& tensor, std::string_view role, const Dims& shape,
                 DType dtype) const {
    LAWSON_CHECK(require(tensor, role, shape));
    if (tensor.dtype == dtype) return {};
    return wrong("operand {} must have dtype {}", describe(tensor), to_string(dtype));
  }

 private:
  bool has(Slot::Shared slot) const { return in_[slot] != nullptr; }

  Status check_rule() const {
    if (rule_.left < -1 || rule_.right < -1) {
      return wrong("window [{}, {}]: bounds are -1 (none) or at least 0", rule_.left, rule_.right);
    }
    if (!std::isfinite(rule_.softcap) || rule_.softcap < 0 || rule_.softcap > 1e30) {
      return wrong("softcap {}: expected 0 (none) or a positive number up to 1e30", rule_.softcap);
    }
    if (!(rule_.dropout >= 0 && rule_.dropout < 1)) {
      return wrong("dropout {}: expected a probability in [0, 1)", rule_.dropout);
    }
    return {};
  }

  Status check_values() const {
    for (const auto slot : {Slot::q, Slot::k, Slot::v}) {
      const Tensor& tensor = *in_[slot];
      if (tensor.shape.size() != 4) {
        return wrong("{}: expected rank 4 [b, h, s, d]", describe(tensor));
      }
      if (!is_float(tensor.dtype) || bit_width(tensor.dtype) < 8) {
        return wrong("{}: expected a float type", describe(tensor));
      }
    }
    if (in_[Slot::k]->dtype != in_[Slot::q]->dtype || in_[Slot::v]->dtype != in_[Slot::q]->dtype) {
      return wrong("{}, {}, {}: q, k and v must have one dtype", describe(*in_[Slot::q]),
                   describe(*in_[Slot::k]), describe(*in_[Slot::v]));
    }
    return {};
  }

  // Which of dense, ragged and paged each side is, and that its maximum says so.
  Status check_sides() const {
    for (const auto slot : {Slot::cu_seqlens_q, Slot::cu_seqlens_kv}) {
      if (has(slot) && (in_[slot]->shape.size() != 4 || in_[slot]->shape[0] < 1)) {
        return wrong("{}: expected shape [b+1, 1, 1, 1]", describe(*in_[slot]));
      }
    }
    for (const auto slot : {Slot::page_table_k, Slot::page_table_v}) {
      if (has(slot) && in_[slot]->shape.size() != 4) {
        return wrong("{}: expected shape [b, 1, pages per sequence, 1]", describe(*in_[slot]));
      }
    }
    const bool ragged_q = has(Slot::cu_seqlens_q);
    const bool ragged_kv = has(Slot::cu_seqlens_kv);
    const bool paged = has(Slot::page_table_k);
    if (paged != has(Slot::page_table_v)) return wrong("page tables of k and v come together");
    if (paged && ragged_kv) return wrong("k and v are paged or ragged, not both");
    const bool own_kv = ragged_kv || paged;
    if (rule_.max_q < 0 || rule_.max_q > kMaxDim || (!ragged_q && rule_.max_q != 0)) {
      return wrong("max_q {}: expected the longest sequence of a ragged q, else 0", rule_.max_q);
    }
    if (rule_.max_kv < 0 || rule_.max_kv > kMaxDim || (!own_kv && rule_.max_kv != 0)) {
      return wrong("max_kv {}: expected the longest sequence of ragged or paged k and v, else 0",
                   rule_.max_kv);
    }
    if (rule_.padding && ragged_q && ragged_kv) {
      return wrong("padding: both sides are ragged and have their lengths already");
    }
    if (paged && !rule_.padding) return wrong("paged k and v need padding: their lengths");
    for (const auto& [padded, valid] : {std::pair{Slot::cu_seqlens_q_padded, ragged_q},
                                        std::pair{Slot::cu_seqlens_kv_padded, ragged_kv}}) {
      if (has(padded) && !valid) {
        return wrong("operand {}: only a ragged side takes it", describe(*in_[padded]));
      }
    }
    if (has(Slot::sequences) && !ragged_q && !ragged_kv) {
      return wrong("operand {}: only ragged attention takes it", describe(*in_[Slot::sequences]));
    }
    return {};
  }

  Status check_shapes() const {
    const AttentionGeometry& g = geometry_;
    const Dims& q = in_[Slot::q]->shape;
    const Dims& k = in_[Slot::k]->shape;
    const Dims& v = in_[Slot::v]->shape;
    if (g.ragged_q) {
      LAWSON_CHECK(require(*in_[Slot::q], "ragged q", {1, q[1], q[2], q[3]}));
    }
    if (g.paged) {
      LAWSON_CHECK(require(*in_[Slot::k], "k", {k[0], k[1], k[2], q[3]}));
      LAWSON_CHECK(require(*in_[Slot::v], "v", {v[0], k[1], v[2], v[3]}));
      LAWSON_CHECK(check_pages(Slot::page_table_k, k[2]));
      LAWSON_CHECK(check_pages(Slot::page_table_v, v[2]));
    } else {
      const std::int64_t b = g.ragged_kv ? 1 : g.batch;
      LAWSON_CHECK(require(*in_[Slot::k], "k", {b, k[1], k[2], q[3]}));
      LAWSON_CHECK(require(*in_[Slot::v], "v", {b, k[1], k[2], v[3]}));
    }
    if (k[1] == 0 || q[1] % k[1] != 0) {
      return wrong("{} query heads are not a multiple of {} key heads", q[1], k[1]);
    }
    for (const auto slot : {Slot::cu_seqlens_q, Slot::cu_seqlens_kv, Slot::cu_seqlens_q_padded,
                            Slot::cu_seqlens_kv_padded}) {
      if (has(slot)) {
        LAWSON_CHECK(require(*in_[slot], "cumulative lengths", {g.batch + 1, 1, 1, 1}, DType::i32));
      }
    }
    return {};
  }

  Status check_pages(Slot::Shared slot, std::int64_t page_size) const {
    const Tensor& table = *in_[slot];
    LAWSON_CHECK(require(table, "page table", {geometry_.batch, 1, table.shape[2], 1}, DType::i32));
    if (page_size < 1) return wrong("pages of {} tokens: expected at least 1", page_size);
    const std::int64_t needed = (geometry_.columns + page_size - 1) / page_size;
    if (table.shape[2] < needed) {
      return wrong("{} pages of {} tokens cannot hold max_kv = {}", table.shape[2], page_size,
                   geometry_.columns);
    }
    return {};
  }

  Status check_lengths() const {
    const AttentionGeometry& g = geometry_;
    if ((rule_.padding && !g.ragged_q) != has(Slot::seqlen_q) ||
        (rule_.padding && !g.ragged_kv) != has(Slot::seqlen_kv)) {
      return wrong(
          "padding needs seqlen_q and seqlen_kv of every side that is not ragged, and nothing else "
          "takes them");
    }
    for (const auto slot : {Slot::seqlen_q, Slot::seqlen_kv}) {
      if (!has(slot)) continue;
      LAWSON_CHECK(require(*in_[slot], "sequence lengths", {g.batch, 1, 1, 1}, DType::i32));
    }
    if (has(Slot::sequences)) {
      LAWSON_CHECK(require(*in_[Slot::sequences], "sequences", {1, 1, 1, 1}, DType::i32));
      if (!in_[Slot::sequences]->by_value) return wrong("sequences must be a by-value scalar");
    }
    return {};
  }

  Status check_scores() const {
    const AttentionGeometry& g = geometry_;
    if (has(Slot::scale)) {
      const DType wide = in_[Slot::q]->dtype == DType::f64 ? DType::f64 : DType::f32;
      LAWSON_CHECK(require(*in_[Slot::scale], "scale", {1, 1, 1, 1}, wide));
      if (!in_[Slot::scale]->by_value) return wrong("scale must be a by-value scalar");
    }
    for (const auto slot : {Slot::bias, Slot::mask}) {
      if (!has(slot)) continue;
      const Tensor& tensor = *in_[slot];
      const std::string_view name = slot == Slot::bias ? "bias" : "mask";
      const bool fits =
          is_float(tensor.dtype) || (slot == Slot::mask && tensor.dtype == DType::boolean);
      if (!fits) {
        return wrong("{} {}: expected a float type{}", name, describe(tensor),
                     slot == Slot::mask ? " or bool" : "");
      }
      const auto merged = broadcast_shape(tensor.shape, g.scores());
      if (tensor.shape.size() != 4 || !merged || *merged != g.scores()) {
        return wrong("{} {} does not broadcast to {}", name, describe(tensor),
                     to_string(g.scores()));
      }
    }
    if (rule_.pre_scale_bias && !has(Slot::bias)) return wrong("pre_scale_bias without a bias");
    if (has(Slot::slopes)) {
      if (!rule_.alibi) return wrong("slopes are taken only with alibi");
      LAWSON_CHECK(require(*in_[Slot::slopes], "slopes", {1, g.heads, 1, 1}, DType::f32));
    }
    if ((rule_.softmax == SoftmaxKind::learnable) != has(Slot::sink)) {
      return wrong("the learnable softmax needs the sink operand, and nothing else takes it");
    }
    if (has(Slot::sink)) {
      LAWSON_CHECK(require(*in_[Slot::sink], "sink", {1, g.heads, 1, 1}, DType::f32));
    }
    return {};
  }

  Status check_dropout() const {
    const bool stream = has(Slot::seed) && has(Slot::offset);
    const bool partly = has(Slot::seed) || has(Slot::offset);
    const bool mask = has(Slot::dropout_mask);
    if (rule_.dropout == 0 ? partly || mask : stream == mask || partly != stream) {
      return wrong(
          "dropout takes seed and offset, or dropout_mask; without dropout nothing takes them");
    }
    for (const auto slot : {Slot::seed, Slot::offset}) {
      if (!has(slot)) continue;
      LAWSON_CHECK(require(*in_[slot], "seed and offset", {1, 1, 1, 1}, DType::i64));
    }
    if (mask) {
      LAWSON_CHECK(
          require(*in_[Slot::dropout_mask], "dropout_mask", geometry_.scores(), DType::u8));
    }
    return {};
  }

  std::string_view op_;
  const AttentionRule& rule_;
  const Operands& in_;
  AttentionGeometry geometry_;
};

DType stats_dtype(const Tensor& q) {
  return q.dtype == DType::f64 ? DType::f64 : DType::f32;
}

}  // namespace

AttentionGeometry attention_geometry(const AttentionRule& rule, const Operands& in) {
  const Dims& q = in[Slot::q]->shape;
  const Dims& k = in[Slot::k]->shape;
  AttentionGeometry g;
  g.ragged_q = in[Slot::cu_seqlens_q] != nullptr;
  g.ragged_kv = in[Slot::cu_seqlens_kv] != nullptr;
  g.paged = in[Slot::page_table_k] != nullptr;
  g.batch = g.ragged_q ? in[Slot::cu_seqlens_q]->shape[0] - 1 : q[0];
  g.heads = q[1];
  g.kv_heads = k[1];
  g.rows = g.ragged_q ? rule.max_q : q[2];
  g.columns = g.ragged_kv || g.paged ? rule.max_kv : k[2];
  g.depth = q[3];
  g.value_depth = in[Slot::v]->shape[3];
  if (g.paged) {
    g.page_size_k = k[2];
    g.page_size_v = in[Slot::v]->shape[2];
  }
  return g;
}

const AttentionRule* attention_rule(const Op& op) {
  if (const auto* forward = std::get_if<Attention>(&op)) return &forward->rule;
  if (const auto* backward = std::get_if<AttentionBackward>(&op)) return &backward->rule;
  return nullptr;
}

std::optional<AttentionGeometry> attention_geometry(const Graph& graph, const Node& node) {
  const AttentionRule* rule = attention_rule(node.op);
  if (rule == nullptr) return std::nullopt;
  Operands operands;
  for (const TensorId id : node.inputs) {
    operands.push_back(id == kNone ? nullptr : &graph.tensor(id));
  }
  return attention_geometry(*rule, operands);
}

TensorId shared_memory_input(const Graph& graph, TensorId output) {
  for (const Node& node : graph.nodes) {
    if (!std::holds_alternative<CacheAppend>(node.op) || node.outputs[0] != output) continue;
    const TensorId cache = node.inputs[CacheAppend::cache];
    return graph.is_input(cache) ? cache : kNone;
  }
  return kNone;
}

Result<Results> infer_attention(const Attention& op, const Operands& in,
                                std::optional<DType> dtype) {
  LAWSON_CHECK((Checker{"attention", op.rule, in}.run()));
  const AttentionGeometry g = attention_geometry(op.rule, in);
  const Tensor& q = *in[Slot::q];
  const Dims row{q.shape[0], g.heads, q.shape[2], 1};
  return Results{{dtype.value_or(q.dtype), {row[0], row[1], row[2], g.value_depth}},
                 {stats_dtype(q), row},
                 {stats_dtype(q), row},
                 {DType::u8, g.scores()}};
}

Result<Results> infer_attention_backward(const AttentionBackward& op, const Operands& in,
                                         std::optional<DType> dtype) {
  using Back = AttentionBackward;
  Checker checker{"attention_backward", op.rule, in};
  LAWSON_CHECK(checker.run());
  const AttentionGeometry g = attention_geometry(op.rule, in);
  if (g.paged) return checker.wrong("a paged cache has no gradients");
  const Tensor& q = *in[Slot::q];
  const Dims o{q.shape[0], g.heads, q.shape[2], g.value_depth};
  LAWSON_CHECK(checker.require(*in[Back::o], "o", o));
  LAWSON_CHECK(checker.require(*in[Back::dout], "dout", o));
  LAWSON_CHECK(checker.require(*in[Back::stats], "stats", {o[0], o[1], o[2], 1}, stats_dtype(q)));
  const DType type = dtype.value_or(q.dtype);
  const Tensor* bias = in[Slot::bias];
  return Results{{type, q.shape},
                 {type, in[Slot::k]->shape},
                 {type, in[Slot::v]->shape},
                 {bias != nullptr ? bias->dtype : type, bias != nullptr ? bias->shape : Dims{}},
                 {DType::f32, {1, g.heads, 1, 1}}};
}

Result<Results> infer_cache_append(const CacheAppend&, const Operands& in) {
  using Append = CacheAppend;
  const Tensor& cache = *in[Append::cache];
  const Tensor& fresh = *in[Append::fresh];
  const Tensor* table = in[Append::page_table];
  const auto wrong = [](const Tensor& tensor, const std::string& expected) {
    return invalid("cache_append: {}: expected {}", describe(tensor), expected);
  };
  if (cache.shape.size() != 4) return wrong(cache, "rank 4");
  if (fresh.shape.size() != 4) return wrong(fresh, "rank 4 [b, h, s, d]");
  const std::int64_t batch = fresh.shape[0];
  const Dims dense{batch, cache.shape[1], fresh.shape[2], cache.shape[3]};
  if (fresh.shape != dense) return wrong(fresh, "shape " + to_string(dense));
  if (fresh.dtype != cache.dtype)
    return wrong(fresh, fmt::format("dtype {}", to_string(cache.dtype)));
  const Tensor& lengths = *in[Append::seqlen_kv];
  if (lengths.shape != Dims{batch, 1, 1, 1} || lengths.dtype != DType::i32) {
    return wrong(lengths, "i32" + to_string(Dims{batch, 1, 1, 1}));
  }
  if (table == nullptr && cache.shape[0] != batch) {
    return wrong(cache, fmt::format("batch {}, as fresh has", batch));
  }
  if (table != nullptr) {
    const bool fits = table->dtype == DType::i32 && table->shape.size() == 4 &&
                      table->shape == Dims{batch, 1, table->shape[2], 1};
    if (!fits) return wrong(*table, fmt::format("i32 [{}, 1, pages per sequence, 1]", batch));
    if (cache.shape[2] < 1) return wrong(cache, "pages of at least 1 token");
  }
  return Results{{cache.dtype, cache.shape}};
}

}  // namespace lawson::ir
