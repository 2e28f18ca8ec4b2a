#include "front/attention.h"

#include <algorithm>
#include <cmath>

namespace lawson::front {
namespace {

using ir::Alignment;
using ir::SoftmaxKind;

const std::vector<std::string> kPasses{"forward", "backward", "training"};
const std::vector<std::string> kMasks{"none",
                                      "padding",
                                      "causal",
                                      "padding_causal",
                                      "causal_bottom_right",
                                      "padding_causal_bottom_right"};
const std::vector<std::string> kBiases{"none", "pre_scale", "post_scale", "alibi"};
const std::vector<std::string> kSoftmaxes{"vanilla", "off_by_one", "learnable"};
const std::vector<std::string> kDenseWords{"bshd", "sbhd", "bhsd"};
const std::vector<std::string> kDTypes{"f16", "bf16", "f32", "f64", "f8e4m3", "f8e5m2"};

// Every layout of the spec; those with 3, 2 or t are ragged or packed.
const std::vector<std::string> kOtherLayouts{
    "thd",        "bs3hd",      "sb3hd",    "t3hd",       "bsh3d",      "sbh3d",   "th3d",
    "bshd_bs2hd", "sbhd_sb2hd", "thd_t2hd", "bshd_bsh2d", "sbhd_sbh2d", "thd_th2d"};

template <typename Enum>
Enum pick(const std::string& word, const std::vector<std::string>& words) {
  const auto it = std::find(words.begin(), words.end(), word);
  return static_cast<Enum>(it - words.begin());
}

// One word per tensor q, k, v; a single word stands for all three.
std::vector<std::string> layout_words(const std::string& layout) {
  std::vector<std::string> words;
  std::size_t start = 0;
  while (true) {
    const std::size_t end = layout.find('_', start);
    words.push_back(layout.substr(start, end - start));
    if (end == std::string::npos) break;
    start = end + 1;
  }
  if (words.size() == 1) words.resize(3, words[0]);
  return words;
}

bool is_dense(const std::string& layout) {
  const auto words = layout_words(layout);
  return words.size() == 3 && std::all_of(words.begin(), words.end(), [](const std::string& word) {
           return std::find(kDenseWords.begin(), kDenseWords.end(), word) != kDenseWords.end();
         });
}

bool is_known_layout(const std::string& layout) {
  if (is_dense(layout)) return true;
  if (std::find(kOtherLayouts.begin(), kOtherLayouts.end(), layout) != kOtherLayouts.end()) {
    return true;
  }
  const auto words = layout_words(layout);
  return words.size() == 3 && std::all_of(words.begin(), words.end(), [](const std::string& word) {
           return word == "thd" ||
                  std::find(kDenseWords.begin(), kDenseWords.end(), word) != kDenseWords.end();
         });
}

// Strides of a tensor of `shape` [b,h,s,d] stored as `word` says. The sizes are not checked yet,
// and contiguous_strides() takes any.
Dims strides_of(const std::string& word, const Dims& shape) {
  Dims stored;
  for (const char axis : word) stored.push_back(shape[std::string_view{"bhsd"}.find(axis)]);
  const Dims packed = contiguous_strides(stored);
  Dims strides;
  for (const char axis : {'b', 'h', 's', 'd'}) strides.push_back(packed[word.find(axis)]);
  return strides;
}

Status read_shapes(ObjectReader& reader, AttentionSpec& spec) {
  LAWSON_TRY(spec.batch, reader.integer_or("batch", 1, 0, kMaxDim));
  LAWSON_TRY(spec.heads, reader.integer("heads", 1, kMaxDim));
  LAWSON_TRY(spec.kv_heads, reader.integer_or("kv_heads", spec.heads, 1, kMaxDim));
  LAWSON_TRY(spec.seqlen_q, reader.integer("seqlen_q", 0, kMaxDim));
  LAWSON_TRY(spec.seqlen_kv, reader.integer_or("seqlen_kv", spec.seqlen_q, 0, kMaxDim));
  LAWSON_TRY(spec.head_dim_qk, reader.integer("head_dim_qk", 1, kMaxDim));
  LAWSON_TRY(spec.head_dim_v, reader.integer_or("head_dim_v", spec.head_dim_qk, 1, kMaxDim));
  if (spec.heads % spec.kv_heads != 0) {
    return reader.fail("kv_heads", fmt::format("{} is not allowed; heads = {} must be a multiple",
                                               spec.kv_heads, spec.heads));
  }
  return {};
}

Status read_window(ObjectReader& reader, AttentionSpec& spec) {
  if (!reader.has("window")) return {};
  LAWSON_TRY(Dims window, reader.integers("window", -1, kMaxDim));
  if (window.size() != 2) {
    return reader.fail("window",
                       fmt::format("expected [left, right], got {} entries", window.size()));
  }
  spec.window_left = window[0];
  spec.window_right = window[1];
  return {};
}

Status read_bias(ObjectReader& reader, AttentionSpec& spec) {
  LAWSON_TRY(std::string bias, reader.choice_or("bias", "none", kBiases));
  spec.bias = pick<BiasKind>(bias, kBiases);
  LAWSON_TRY(std::string dtype, reader.choice_or("bias_dtype", "", {"f16", "bf16", "f32", "f64"}));
  if (!dtype.empty()) spec.bias_dtype = dtype_from_string(dtype);
  LAWSON_TRY(spec.bias_grad, reader.boolean_or("bias_grad", false));
  const bool tensor = spec.bias == BiasKind::pre_scale || spec.bias == BiasKind::post_scale;
  if (tensor) spec.bias_shape = {1, spec.heads, spec.seqlen_q, spec.seqlen_kv};
  if (reader.has("bias_shape")) {
    LAWSON_TRY(Dims shape, reader.integers("bias_shape", 0, kMaxDim));
    const Dims full{spec.batch, spec.heads, spec.seqlen_q, spec.seqlen_kv};
    bool fits = shape.size() == 4;
    for (std::size_t i = 0; fits && i < 4; ++i) fits = shape[i] == full[i] || shape[i] == 1;
    if (!fits) {
      return reader.fail("bias_shape",
                         fmt::format("{} is not allowed; each entry of {} is full or 1",
                                     to_string(shape), to_string(full)));
    }
    if (!tensor) return reader.fail("bias_shape", "given without a pre_scale or post_scale bias");
    spec.bias_shape = shape;
  }
  if (spec.bias_grad && !tensor) {
    return reader.fail("bias_grad", "true without a pre_scale or post_scale bias");
  }
  return {};
}

Status read_lengths(ObjectReader& reader, AttentionSpec& spec) {
  const bool padding = spec.mask.starts_with("padding");
  for (const auto& [field, lengths, limit] :
       {std::tuple{"seqlens_q", &spec.seqlens_q, spec.seqlen_q},
        std::tuple{"seqlens_kv", &spec.seqlens_kv, spec.seqlen_kv}}) {
    if (!reader.has(field)) continue;
    LAWSON_TRY(*lengths, reader.integers(field, 0, limit));
    if (static_cast<std::int64_t>(lengths->size()) != spec.batch) {
      return reader.fail(field,
                         fmt::format("{} lengths for batch {}", lengths->size(), spec.batch));
    }
    if (!padding) return reader.fail(field, "lengths are used only with a padding mask");
  }
  return {};
}

Status read_strides(ObjectReader& reader, AttentionSpec& spec) {
  const Json* strides = reader.find("strides");
  if (strides == nullptr) return {};
  ObjectReader entries(*strides, reader.source(), "strides");
  for (const char* tensor : {"q", "k", "v", "o", "do", "dq", "dk", "dv"}) {
    if (!entries.has(tensor)) continue;
    LAWSON_TRY(Dims values, entries.integers(tensor, 0, kMaxElements));
    if (values.size() != 4) {
      return entries.fail(tensor, "expected 4 strides, in [b, h, s, d] order");
    }
    spec.strides[tensor] = values;
  }
  return entries.finish();
}

// Fields that belong to the spec and that no engine is given yet.
Status read_not_lowered(ObjectReader& reader, AttentionSpec& spec) {
  for (const char* field : {"paged", "fp8", "total_q", "total_kv", "seqlens_q_padded",
                            "seqlens_kv_padded", "attn_mask", "alibi_slopes", "context_parallel"}) {
    if (const Json* value = reader.find(field)) {
      spec.not_lowered.emplace_back(field, value->dump(-1, ' ', true).substr(0, 60));
    }
  }
  if (!is_dense(spec.layout)) spec.not_lowered.emplace_back("layout", spec.layout);
  if (spec.dtype == DType::f8e4m3 || spec.dtype == DType::f8e5m2) {
    spec.not_lowered.emplace_back("dtype", to_string(spec.dtype));
  }
  if (spec.bias == BiasKind::pre_scale) spec.not_lowered.emplace_back("bias", "pre_scale");
  if (spec.dropout > 0) spec.not_lowered.emplace_back("dropout", fmt::format("{}", spec.dropout));
  if (spec.return_max_logit) spec.not_lowered.emplace_back("return_max_logit", "true");
  return {};
}

// Builds the operands that both passes share, in the slots of `Slots`.
class GraphMaker {
 public:
  GraphMaker(const AttentionSpec& spec, const char* pass)
      : spec_{spec}, words_{layout_words(spec.layout)}, builder_{spec.name + "." + pass} {}

  ir::Builder& builder() { return builder_; }
  ir::Builder take() && { return std::move(builder_); }

  Dims shape(char tensor) const {
    const bool is_kv = tensor == 'k' || tensor == 'v';
    return {spec_.batch, is_kv ? spec_.kv_heads : spec_.heads,
            is_kv ? spec_.seqlen_kv : spec_.seqlen_q,
            tensor == 'q' || tensor == 'k' ? spec_.head_dim_qk : spec_.head_dim_v};
  }

  // Strides of a tensor shaped and stored like `like` (q, k, v or o), unless the spec gives them.
  Dims strides(const std::string& tensor, char like) const {
    if (const auto it = spec_.strides.find(tensor); it != spec_.strides.end()) return it->second;
    const std::size_t word = like == 'k' ? 1U : like == 'v' ? 2U : 0U;
    return strides_of(words_[word], shape(like));
  }

  Result<ir::TensorId> input(const std::string& name, char like, DType dtype) {
    ir::Tensor tensor;
    tensor.name = name;
    tensor.dtype = dtype;
    tensor.shape = shape(like);
    tensor.strides = strides(name, like);
    return builder_.input(std::move(tensor));
  }

  Result<ir::TensorId> stats() {
    ir::Tensor tensor;
    tensor.name = "stats";
    tensor.dtype = spec_.dtype == DType::f64 ? DType::f64 : DType::f32;
    tensor.shape = {spec_.batch, spec_.heads, spec_.seqlen_q, 1};
    return builder_.input(std::move(tensor));
  }

  template <typename Slots>
  Status shared(std::vector<ir::TensorId>& in) {
    LAWSON_TRY(in[Slots::q], input("q", 'q', spec_.dtype));
    LAWSON_TRY(in[Slots::k], input("k", 'k', spec_.dtype));
    LAWSON_TRY(in[Slots::v], input("v", 'v', spec_.dtype));
    ir::Tensor scale;
    scale.name = "scale";
    scale.shape = {1, 1, 1, 1};
    scale.alignment = 4;
    scale.by_value = true;
    scale.values = {spec_.scale.value_or(1.0 / std::sqrt(static_cast<double>(spec_.head_dim_qk)))};
    LAWSON_TRY(in[Slots::scale], builder_.input(std::move(scale)));
    if (spec_.bias == BiasKind::post_scale) {
      ir::Tensor bias;
      bias.name = "bias";
      bias.dtype = spec_.bias_dtype.value_or(spec_.dtype);
      bias.shape = spec_.bias_shape;
      LAWSON_TRY(in[Slots::bias], builder_.input(std::move(bias)));
    }
    if (spec_.mask.starts_with("padding")) {
      LAWSON_TRY(in[Slots::seqlen_q], lengths("seqlen_q", spec_.seqlen_q, spec_.seqlens_q));
      LAWSON_TRY(in[Slots::seqlen_kv], lengths("seqlen_kv", spec_.seqlen_kv, spec_.seqlens_kv));
    }
    if (spec_.softmax == SoftmaxKind::learnable) {
      ir::Tensor sink;
      sink.name = "sink";
      sink.shape = {1, spec_.heads, 1, 1};
      LAWSON_TRY(in[Slots::sink], builder_.input(std::move(sink)));
    }
    return {};
  }

  ir::AttentionRule rule() const {
    ir::AttentionRule rule;
    rule.padding = spec_.mask.starts_with("padding");
    if (spec_.mask.ends_with("bottom_right")) rule.alignment = Alignment::bottom_right;
    rule.left = spec_.window_left;
    rule.right = spec_.window_right;
    if (spec_.mask.find("causal") != std::string::npos) rule.right = 0;
    rule.softmax = spec_.softmax;
    rule.softcap = spec_.softcap;
    rule.alibi = spec_.bias == BiasKind::alibi;
    return rule;
  }

 private:
  Result<ir::TensorId> lengths(const std::string& name, std::int64_t limit, const Dims& given) {
    ir::Tensor tensor;
    tensor.name = name;
    tensor.dtype = DType::i32;
    tensor.shape = {spec_.batch, 1, 1, 1};
    tensor.domain = std::pair{std::min<std::int64_t>(1, limit), limit};
    for (const std::int64_t length : given) tensor.values.push_back(static_cast<double>(length));
    return builder_.input(std::move(tensor));
  }

  const AttentionSpec& spec_;
  std::vector<std::string> words_;
  ir::Builder builder_;
};

Result<ir::Graph> forward_graph(const AttentionSpec& spec, bool stats) {
  GraphMaker maker(spec, "forward");
  std::vector<ir::TensorId> in(ir::Attention::kInputs, ir::kNone);
  LAWSON_CHECK(maker.shared<ir::Attention>(in));
  LAWSON_TRY(auto out,
             maker.builder().add(ir::Attention{maker.rule()}, in,
                                 {{"o", spec.output_dtype, true}, {"stats", std::nullopt, stats}}));
  LAWSON_CHECK(maker.builder().output(out[ir::Attention::o], maker.strides("o", 'o')));
  if (stats) LAWSON_CHECK(maker.builder().output(out[ir::Attention::stats]));
  return std::move(maker).take().finish();
}

Result<ir::Graph> backward_graph(const AttentionSpec& spec) {
  using Slot = ir::AttentionBackward;
  GraphMaker maker(spec, "backward");
  std::vector<ir::TensorId> in(Slot::kInputs, ir::kNone);
  LAWSON_CHECK(maker.shared<Slot>(in));
  const DType output_dtype = spec.output_dtype.value_or(spec.dtype);
  LAWSON_TRY(in[Slot::o], maker.input("o", 'o', output_dtype));
  LAWSON_TRY(in[Slot::dout], maker.input("do", 'o', output_dtype));
  LAWSON_TRY(in[Slot::stats], maker.stats());
  const bool dsink = spec.softmax == SoftmaxKind::learnable;
  LAWSON_TRY(auto out, maker.builder().add(Slot{maker.rule(), spec.deterministic}, in,
                                           {{"dq", std::nullopt, true},
                                            {"dk", std::nullopt, true},
                                            {"dv", std::nullopt, true},
                                            {"dbias", std::nullopt, spec.bias_grad},
                                            {"dsink", std::nullopt, dsink}}));
  LAWSON_CHECK(maker.builder().output(out[Slot::dq], maker.strides("dq", 'q')));
  LAWSON_CHECK(maker.builder().output(out[Slot::dk], maker.strides("dk", 'k')));
  LAWSON_CHECK(maker.builder().output(out[Slot::dv], maker.strides("dv", 'v')));
  if (spec.bias_grad) LAWSON_CHECK(maker.builder().output(out[Slot::dbias]));
  if (dsink) LAWSON_CHECK(maker.builder().output(out[Slot::dsink]));
  return std::move(maker).take().finish();
}

}  // namespace

Result<AttentionSpec> attention_from_json(const Json& document, const std::string& source) {
  ObjectReader reader(document, source);
  AttentionSpec spec;
  LAWSON_CHECK(reader.integer("lawson", 1, 1));
  LAWSON_CHECK(reader.choice_or("kind", "attention", {"attention"}));
  LAWSON_TRY(spec.name, reader.string_or("name", "attention"));
  // Its graphs' names, with ".backward" at the end, are names of at most 256 bytes too.
  if (spec.name.size() > 240) return reader.fail("name", "longer than 240 bytes");
  LAWSON_TRY(std::string pass, reader.choice_or("pass", "forward", kPasses));
  spec.pass = pick<Pass>(pass, kPasses);
  LAWSON_TRY(std::string dtype, reader.choice_or("dtype", "bf16", kDTypes));
  spec.dtype = *dtype_from_string(dtype);
  LAWSON_TRY(std::string output_dtype, reader.choice_or("output_dtype", "", kDTypes));
  if (!output_dtype.empty()) spec.output_dtype = dtype_from_string(output_dtype);
  LAWSON_CHECK(read_shapes(reader, spec));
  LAWSON_TRY(spec.layout, reader.string_or("layout", "bshd"));
  if (!is_known_layout(spec.layout)) {
    std::vector<std::string> known = kDenseWords;
    known.insert(known.end(), kOtherLayouts.begin(), kOtherLayouts.end());
    return reader.fail("layout",
                       fmt::format("'{}' is not a layout; expected one of {}, or three of bshd, "
                                   "sbhd, bhsd, thd joined by '_'",
                                   spec.layout.substr(0, 60), fmt::join(known, ", ")));
  }
  LAWSON_TRY(spec.mask, reader.choice_or("mask", "none", kMasks));
  LAWSON_CHECK(read_window(reader, spec));
  LAWSON_CHECK(read_bias(reader, spec));
  LAWSON_TRY(std::string softmax, reader.choice_or("softmax", "vanilla", kSoftmaxes));
  spec.softmax = pick<SoftmaxKind>(softmax, kSoftmaxes);
  LAWSON_TRY(spec.softcap, reader.number_or("softcap", 0));
  if (spec.softcap < 0)
    return reader.fail("softcap", "negative; expected 0 (none) or a positive number");
  LAWSON_TRY(spec.dropout, reader.number_or("dropout", 0));
  if (spec.dropout < 0 || spec.dropout >= 1) {
    return reader.fail("dropout", fmt::format("{} is not in [0, 1)", spec.dropout));
  }
  if (reader.has("scale")) {
    LAWSON_TRY(spec.scale, reader.number_or("scale", 1));
  }
  LAWSON_TRY(spec.deterministic, reader.boolean_or("deterministic", false));
  LAWSON_TRY(spec.return_stats, reader.boolean_or("return_stats", false));
  LAWSON_TRY(spec.return_max_logit, reader.boolean_or("return_max_logit", false));
  LAWSON_TRY(spec.cuda_graph, reader.boolean_or("cuda_graph", false));
  LAWSON_CHECK(read_lengths(reader, spec));
  LAWSON_CHECK(read_strides(reader, spec));
  LAWSON_CHECK(read_not_lowered(reader, spec));
  LAWSON_CHECK(reader.finish());
  return spec;
}

Json attention_to_json(const AttentionSpec& spec) {
  Json document{
      {"lawson", 1},
      {"kind", "attention"},
      {"name", spec.name},
      {"pass", kPasses[static_cast<std::size_t>(spec.pass)]},
      {"dtype", to_string(spec.dtype)},
      {"batch", spec.batch},
      {"heads", spec.heads},
      {"kv_heads", spec.kv_heads},
      {"seqlen_q", spec.seqlen_q},
      {"seqlen_kv", spec.seqlen_kv},
      {"head_dim_qk", spec.head_dim_qk},
      {"head_dim_v", spec.head_dim_v},
      {"layout", spec.layout},
      {"mask", spec.mask},
      {"window", {spec.window_left, spec.window_right}},
      {"bias", kBiases[static_cast<std::size_t>(spec.bias)]},
      {"softmax", to_string(spec.softmax)},
      {"softcap", spec.softcap},
      {"dropout", spec.dropout},
      {"scale", spec.scale.value_or(1.0 / std::sqrt(static_cast<double>(spec.head_dim_qk)))},
      {"deterministic", spec.deterministic},
      {"return_stats", spec.return_stats},
      {"return_max_logit", spec.return_max_logit},
      {"cuda_graph", spec.cuda_graph}};
  if (spec.output_dtype) document["output_dtype"] = to_string(*spec.output_dtype);
  if (!spec.bias_shape.empty()) document["bias_shape"] = spec.bias_shape;
  if (spec.bias_dtype) document["bias_dtype"] = to_string(*spec.bias_dtype);
  if (spec.bias_grad) document["bias_grad"] = true;
  if (!spec.seqlens_q.empty()) document["seqlens_q"] = spec.seqlens_q;
  if (!spec.seqlens_kv.empty()) document["seqlens_kv"] = spec.seqlens_kv;
  for (const auto& [tensor, strides] : spec.strides) document["strides"][tensor] = strides;
  return document;
}

Result<ir::Graph> attention_graph(const AttentionSpec& spec, Pass pass) {
  if (!spec.not_lowered.empty()) {
    Error result{ErrorKind::unsupported, "", {}};
    for (const auto& [field, value] : spec.not_lowered) {
      result.reasons.push_back({"not_implemented",
                                fmt::format("{} = {}: this version of Lawson reads the field but "
                                            "does not lower it to a graph",
                                            field, value),
                                field});
    }
    result.message = result.reasons.front().message;
    return result;
  }
  const bool stats = spec.return_stats || spec.pass == Pass::training;
  return pass == Pass::backward ? backward_graph(spec) : forward_graph(spec, stats);
}

}  // namespace lawson::front
