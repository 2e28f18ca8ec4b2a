// A config from tensors: what their types, shapes and strides say, over what the params' config
// says. A field is written only where it would say something else, so deriving again changes
// nothing.
#include <algorithm>
#include <map>
#include <numeric>

#include "capi/attention.h"
#include "front/attention_layout.h"

namespace lawson::capi {
namespace {

using front::Layout;

// A tensor that is set with its description, as rank 4.
struct Seen {
  DType dtype;
  Dims shape;
  Dims strides;
};

// Where size is 0 or 1, or there are no elements, a stride says nothing.
bool same_strides(const Seen& tensor, const Dims& expected) {
  if (element_count(tensor.shape).value_or(0) == 0) return true;
  for (std::size_t i = 0; i < 4; ++i) {
    if (tensor.shape[i] > 1 && tensor.strides[i] != expected[i]) return false;
  }
  return true;
}

class Derivation {
 public:
  explicit Derivation(const AttentionParams& params)
      : params_{params}, document_(params.config.value_or(empty_attention_document())) {}

  Result<Json> run() {
    for (const char* name : {"q", "k", "v"}) {
      if (!params_.config && params_.described(name) == nullptr) {
        return invalid("tensor '{}' has no shape, and there is no config that says it", name);
      }
    }
    for (const char* name : {"q", "k", "v", "o", "do", "dq", "dk", "dv", "k_new", "bias", "mask"}) {
      LAWSON_CHECK(see(name));
    }
    pass();
    sizes();
    options();
    layout();
    LAWSON_CHECK(attention_spec(document_));
    return document_;
  }

 private:
  Status see(const std::string& name) {
    const lawson_tensor* tensor = params_.described(name);
    if (tensor == nullptr) return {};
    if (tensor->rank != 4) {
      return invalid("tensor '{}' has rank {}; a config is derived from rank 4 [b, h, s, d]", name,
                     tensor->rank);
    }
    seen_[name] = {*dtype_of(tensor->dtype), Dims(tensor->shape, tensor->shape + 4),
                   Dims(tensor->strides, tensor->strides + 4)};
    return {};
  }

  const Seen* find(const std::string& name) const {
    const auto it = seen_.find(name);
    return it == seen_.end() ? nullptr : &it->second;
  }

  bool is_set(std::string_view name) const { return params_.tensor(name) != nullptr; }

  template <typename T>
  T field(const char* name, const T& otherwise) const {
    const auto it = document_.find(name);
    return it == document_.end() ? otherwise : it->get<T>();
  }

  // Writes unless the field, or its default, says so already.
  template <typename T>
  void put(const char* name, const T& value, const T& otherwise) {
    if (field(name, otherwise) != value) document_[name] = value;
  }

  void pass() {
    const std::string own = params_.pass == front::Pass::backward ? "backward" : "forward";
    if (field<std::string>("pass", "forward") != "training")
      put<std::string>("pass", own, "forward");
  }

  Layout base_layout() const {
    return front::parse_layout(field<std::string>("layout", "bshd"))
        .value_or(*front::parse_layout("bshd"));
  }

  // Of a vector of lengths or offsets, its entries.
  std::int64_t entries(std::string_view name) const {
    const lawson_tensor* tensor = params_.described(name);
    if (tensor == nullptr) return -1;
    return element_count(Dims(tensor->shape, tensor->shape + tensor->rank)).value_or(-1);
  }

  void sizes() {
    ragged_q_ = is_set("cu_seqlens_q") || base_layout().ragged_q();
    ragged_kv_ = is_set("cu_seqlens_kv") || base_layout().ragged_kv();
    paged_ = is_set("page_table_k");
    const Seen* q = find("q");
    const Seen* k = find("k");
    const Seen* v = find("v");
    const auto dtype_text = [](DType dtype) { return std::string{lawson::to_string(dtype)}; };
    if (q != nullptr) {
      put<std::string>("dtype", dtype_text(q->dtype), "bf16");
      put<std::int64_t>("heads", q->shape[1], 0);
      put<std::int64_t>("head_dim_qk", q->shape[3], 0);
    }
    if (const Seen* o = find("o")) {
      put("output_dtype", dtype_text(o->dtype), field<std::string>("dtype", "bf16"));
    }
    if (k != nullptr) put("kv_heads", k->shape[1], field<std::int64_t>("heads", 0));
    if (v != nullptr) put("head_dim_v", v->shape[3], field<std::int64_t>("head_dim_qk", 0));
    batch(q);
    if (q != nullptr) side("seqlen_q", "total_q", q->shape[2], ragged_q_);
    if (k == nullptr || v == nullptr) return;
    if (!paged_) {
      document_.erase("paged");
      side("seqlen_kv", "total_kv", k->shape[2], ragged_kv_);
    } else {
      pages(*k, *v);
    }
  }

  void batch(const Seen* q) {
    std::int64_t batch = -1;
    if (ragged_q_ || ragged_kv_) batch = params_.sequences;
    if (batch < 0 && ragged_q_) batch = entries("cu_seqlens_q") - 1;
    if (batch < 0 && ragged_kv_) batch = entries("cu_seqlens_kv") - 1;
    if (batch < 0 && q != nullptr && !ragged_q_) batch = q->shape[0];
    if (batch >= 0) put<std::int64_t>("batch", batch, 1);
  }

  // The longest sequence of a ragged side is nothing that a tensor says: the config's, else at most
  // all tokens.
  void side(const char* longest, const char* total, std::int64_t size, bool ragged) {
    if (!ragged) {
      document_.erase(total);
      const bool is_q = std::string_view{longest} == "seqlen_q";
      put(longest, size, is_q ? std::int64_t{-1} : field<std::int64_t>("seqlen_q", -1));
      return;
    }
    if (!params_.config || !params_.config->contains("seqlen_q")) {
      if (!document_.contains(longest)) document_[longest] = size;
    }
    put<std::int64_t>(total, size, usual_total(longest));
  }

  // The tokens of a ragged side whose config does not say them.
  std::int64_t usual_total(const std::string& longest) const {
    const std::string lengths = longest == "seqlen_q" ? "seqlens_q" : "seqlens_kv";
    for (const std::string& name : {lengths + "_padded", lengths}) {
      const Dims given = field(name.c_str(), Dims{});
      if (!given.empty()) return std::accumulate(given.begin(), given.end(), std::int64_t{0});
    }
    const auto most = field<std::int64_t>("seqlen_q", 0);
    return field<std::int64_t>("batch", 1) * field<std::int64_t>(longest.c_str(), most);
  }

  void pages(const Seen& k, const Seen& v) {
    document_.erase("total_kv");
    Json paged = field("paged", Json::object());
    if (paged.value("page_size_k", std::int64_t{0}) != k.shape[2]) {
      paged["page_size_k"] = k.shape[2];
    }
    if (paged.value("page_size_v", k.shape[2]) != v.shape[2]) paged["page_size_v"] = v.shape[2];
    const std::int64_t batch = field<std::int64_t>("batch", 1);
    const std::int64_t table = entries("page_table_k");
    if (!document_.contains("seqlen_kv") && table >= 0 && batch > 0) {
      document_["seqlen_kv"] = table / batch * k.shape[2];
    }
    const std::int64_t longest =
        field<std::int64_t>("seqlen_kv", field<std::int64_t>("seqlen_q", 0));
    const std::int64_t each =
        k.shape[2] > 0 ? std::max<std::int64_t>(1, (longest + k.shape[2] - 1) / k.shape[2]) : 0;
    const std::int64_t stated = paged.value("pages", std::int64_t{0});
    if ((stated == 0 ? batch * each : stated) != k.shape[0]) paged["pages"] = k.shape[0];
    document_["paged"] = std::move(paged);
  }

  void options() {
    if (is_set("stats") && field<std::string>("pass", "forward") == "forward") {
      put("return_stats", true, false);
    }
    if (is_set("max_logit")) put("return_max_logit", true, false);
    if (is_set("sink")) put<std::string>("softmax", "learnable", "vanilla");
    if (is_set("slopes")) {
      put<std::string>("bias", "alibi", "none");
      if (!document_.contains("alibi_slopes")) document_["alibi_slopes"] = true;
    }
    if (is_set("cu_seqlens_q_padded") || is_set("cu_seqlens_kv_padded")) {
      const bool given = document_.contains("seqlens_q_padded");
      put("padded_offsets", true, given);
    }
    if (is_set("dropped")) put("return_dropout_mask", true, false);
    if (is_set("dropout_mask")) put("dropout_mask", true, false);
    if (is_set("dbias")) put("bias_grad", true, false);
    if (const Seen* fresh = find("k_new")) put<std::int64_t>("append", fresh->shape[2], 0);
    padding();
    score_tensors();
  }

  // Lengths of a dense side are those of a padding mask; pages always have them.
  void padding() {
    const bool lengths = is_set("seqlen_q") || is_set("seqlen_kv");
    const auto mask = field<std::string>("mask", "none");
    if (!lengths || paged_ || mask.starts_with("padding")) return;
    document_["mask"] = mask == "none" ? "padding" : "padding_" + mask;
  }

  void score_tensors() {
    const Dims scores{field<std::int64_t>("batch", 1), field<std::int64_t>("heads", 0),
                      field<std::int64_t>("seqlen_q", 0),
                      field<std::int64_t>("seqlen_kv", field<std::int64_t>("seqlen_q", 0))};
    if (const Seen* bias = find("bias")) {
      const auto kind = field<std::string>("bias", "none");
      if (kind != "pre_scale" && kind != "post_scale") document_["bias"] = "post_scale";
      put("bias_shape", bias->shape, Dims{1, scores[1], scores[2], scores[3]});
      put("bias_dtype", std::string{lawson::to_string(bias->dtype)},
          field<std::string>("dtype", "bf16"));
    }
    if (const Seen* mask = find("mask")) {
      Json fields = field("attn_mask", Json::object());
      const std::string dtype{lawson::to_string(mask->dtype)};
      fields["dtype"] = dtype;
      if (fields.value("shape", Dims{1, 1, scores[2], scores[3]}) != mask->shape) {
        fields["shape"] = mask->shape;
      }
      document_["attn_mask"] = std::move(fields);
    }
  }

  bool fits(const Layout& layout) const {
    const Seen& q = seen_.at("q");
    const Seen& k = seen_.at("k");
    const Seen& v = seen_.at("v");
    if (layout.ragged_q() != ragged_q_ || layout.ragged_kv() != ragged_kv_) return false;
    using Packing = Layout::Packing;
    if (layout.packing != Packing::separate) {
      if (paged_ || q.shape[3] != v.shape[3]) return false;
      const bool all = layout.packing == Packing::qkv_s3hd || layout.packing == Packing::qkv_h3d;
      if (all && (k.shape[1] != q.shape[1] || k.shape[2] != q.shape[2])) return false;
    }
    return same_strides(q, front::layout_strides(layout, 'q', q.shape)) &&
           same_strides(k, front::layout_strides(layout, 'k', k.shape)) &&
           same_strides(v, front::layout_strides(layout, 'v', v.shape));
  }

  // The config's own layout where it fits, else the first of the table; none: strides on top.
  Layout choose_layout() {
    Layout base = base_layout();
    if (fits(base)) return base;
    for (const std::string& name : layout_words()) {
      const auto layout = front::parse_layout(name);
      if (!layout || !fits(*layout)) continue;
      document_["layout"] = name;
      return *layout;
    }
    if (base.ragged_q() == ragged_q_ && base.ragged_kv() == ragged_kv_) return base;
    const std::string q = ragged_q_ ? "thd" : "bshd";
    const std::string kv = ragged_kv_ ? "thd" : "bshd";
    const std::string name = q == kv ? q : fmt::format("{}_{}_{}", q, kv, kv);
    document_["layout"] = name;
    return *front::parse_layout(name);
  }

  void layout() {
    if (find("q") == nullptr || find("k") == nullptr || find("v") == nullptr) return;
    const Layout layout = choose_layout();
    Json strides = field("strides", Json::object());
    for (const auto& [name, like] :
         {std::pair{"q", 'q'}, std::pair{"k", 'k'}, std::pair{"v", 'v'}, std::pair{"o", 'o'},
          std::pair{"do", 'o'}, std::pair{"dq", 'q'}, std::pair{"dk", 'k'}, std::pair{"dv", 'v'}}) {
      const Seen* tensor = find(name);
      if (tensor == nullptr) continue;
      const Dims natural = front::layout_strides(layout, like, tensor->shape);
      const Dims stated = strides.value(name, natural);
      if (!same_strides(*tensor, stated)) {
        Dims given = tensor->strides;
        for (std::size_t i = 0; i < 4; ++i) {
          if (tensor->shape[i] <= 1) given[i] = natural[i];
        }
        strides[name] = given;
      }
    }
    if (!strides.empty()) document_["strides"] = std::move(strides);
  }

  const AttentionParams& params_;
  Json document_;
  std::map<std::string, Seen> seen_;
  bool ragged_q_ = false;
  bool ragged_kv_ = false;
  bool paged_ = false;
};

}  // namespace

Result<Json> derive(const AttentionParams& params) {
  return Derivation(params).run();
}

}  // namespace lawson::capi
