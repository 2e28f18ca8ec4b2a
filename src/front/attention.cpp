// An attention spec as documents: read, checked, written.
#include "front/attention.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "front/attention_layout.h"

namespace lawson::front {
namespace {

using ir::SoftmaxKind;

// Never destroyed: threads may still read specs when the process ends.
const auto& kPasses = *new const std::vector<std::string>{"forward", "backward", "training"};
const auto& kMasks = *new const std::vector<std::string>{"none",
                                                         "padding",
                                                         "causal",
                                                         "padding_causal",
                                                         "causal_bottom_right",
                                                         "padding_causal_bottom_right"};
const auto& kBiases =
    *new const std::vector<std::string>{"none", "pre_scale", "post_scale", "alibi"};
const auto& kSoftmaxes = *new const std::vector<std::string>{"vanilla", "off_by_one", "learnable"};
const auto& kDTypes =
    *new const std::vector<std::string>{"f16", "bf16", "f32", "f64", "f8e4m3", "f8e5m2"};
const auto& kBiasDTypes = *new const std::vector<std::string>{"f16", "bf16", "f32", "f64"};
const auto& kMaskDTypes = *new const std::vector<std::string>{"bool", "f16", "bf16", "f32", "f64"};
const auto& kStrategies = *new const std::vector<std::string>{"ring", "all_gather", "all_to_all"};
const auto& kRecipes = *new const std::vector<std::string>{"none", "delayed", "current", "mxfp8"};
const auto& kStrided =
    *new const std::vector<std::string>{"q", "k", "v", "o", "do", "dq", "dk", "dv"};

template <typename Enum>
Enum pick(const std::string& word, const std::vector<std::string>& words) {
  const auto it = std::find(words.begin(), words.end(), word);
  return static_cast<Enum>(it - words.begin());
}

template <typename Enum>
const std::string& word_of(Enum value, const std::vector<std::string>& words) {
  return words[static_cast<std::size_t>(value)];
}

bool has_bias_tensor(const AttentionSpec& spec) {
  return spec.bias == BiasKind::pre_scale || spec.bias == BiasKind::post_scale;
}

Status read_shapes(ObjectReader& reader, AttentionSpec& spec) {
  LAWSON_TRY(spec.batch, reader.integer_or("batch", 1, 0, kMaxDim));
  LAWSON_TRY(spec.heads, reader.integer("heads", 1, kMaxDim));
  LAWSON_TRY(spec.kv_heads, reader.integer_or("kv_heads", spec.heads, 1, kMaxDim));
  LAWSON_TRY(spec.seqlen_q, reader.integer("seqlen_q", 0, kMaxDim));
  LAWSON_TRY(spec.seqlen_kv, reader.integer_or("seqlen_kv", spec.seqlen_q, 0, kMaxDim));
  LAWSON_TRY(spec.head_dim_qk, reader.integer("head_dim_qk", 1, kMaxDim));
  LAWSON_TRY(spec.head_dim_v, reader.integer_or("head_dim_v", spec.head_dim_qk, 1, kMaxDim));
  LAWSON_TRY(spec.total_q, reader.integer_or("total_q", 0, 0, kMaxDim));
  LAWSON_TRY(spec.total_kv, reader.integer_or("total_kv", 0, 0, kMaxDim));
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

Status read_scores(ObjectReader& reader, AttentionSpec& spec) {
  LAWSON_TRY(std::string bias, reader.choice_or("bias", "none", kBiases));
  spec.bias = pick<BiasKind>(bias, kBiases);
  LAWSON_TRY(std::string dtype, reader.choice_or("bias_dtype", "", kBiasDTypes));
  if (!dtype.empty()) spec.bias_dtype = dtype_from_string(dtype);
  LAWSON_TRY(spec.bias_grad, reader.boolean_or("bias_grad", false));
  if (has_bias_tensor(spec)) spec.bias_shape = {1, spec.heads, spec.seqlen_q, spec.seqlen_kv};
  if (reader.has("bias_shape")) {
    LAWSON_TRY(spec.bias_shape, reader.integers("bias_shape", 0, kMaxDim));
  }
  if (const Json* mask = reader.find("attn_mask")) {
    ObjectReader fields(*mask, reader.source(), "attn_mask");
    spec.attn_mask.emplace();
    LAWSON_TRY(std::string type, fields.choice_or("dtype", "bool", kMaskDTypes));
    spec.attn_mask->dtype = *dtype_from_string(type);
    spec.attn_mask->shape = {1, 1, spec.seqlen_q, spec.seqlen_kv};
    if (fields.has("shape")) {
      LAWSON_TRY(spec.attn_mask->shape, fields.integers("shape", 0, kMaxDim));
    }
    LAWSON_CHECK(fields.finish());
  }
  if (const Json* slopes = reader.find("alibi_slopes")) {
    if (slopes->is_boolean()) {
      spec.alibi_slopes = slopes->get<bool>();
    } else if (slopes->is_array()) {
      spec.alibi_slopes = true;
      for (const Json& value : *slopes) {
        if (!value.is_number() || !std::isfinite(value.get<double>())) {
          return reader.fail_value("alibi_slopes", value, "a finite number");
        }
        spec.alibi_slope_values.push_back(value.get<double>());
      }
    } else {
      return reader.fail_value("alibi_slopes", *slopes, "true, or one number per head");
    }
  }
  LAWSON_TRY(std::string softmax, reader.choice_or("softmax", "vanilla", kSoftmaxes));
  spec.softmax = pick<SoftmaxKind>(softmax, kSoftmaxes);
  LAWSON_TRY(spec.softcap, reader.number_or("softcap", 0));
  LAWSON_TRY(spec.dropout, reader.number_or("dropout", 0));
  LAWSON_TRY(spec.return_dropout_mask, reader.boolean_or("return_dropout_mask", false));
  LAWSON_TRY(spec.dropout_mask_input, reader.boolean_or("dropout_mask", false));
  if (reader.has("scale")) {
    LAWSON_TRY(spec.scale, reader.number_or("scale", 1));
  }
  return {};
}

Status read_lengths(ObjectReader& reader, AttentionSpec& spec) {
  for (const auto& [field, lengths] :
       {std::pair{"seqlens_q", &spec.seqlens_q}, std::pair{"seqlens_kv", &spec.seqlens_kv},
        std::pair{"seqlens_q_padded", &spec.seqlens_q_padded},
        std::pair{"seqlens_kv_padded", &spec.seqlens_kv_padded}}) {
    if (!reader.has(field)) continue;
    LAWSON_TRY(*lengths, reader.integers(field, 0, kMaxDim));
  }
  const bool padded = !spec.seqlens_q_padded.empty() || !spec.seqlens_kv_padded.empty();
  LAWSON_TRY(spec.has_padded_offsets, reader.boolean_or("padded_offsets", padded));
  return {};
}

Status read_cache(ObjectReader& reader, AttentionSpec& spec) {
  if (const Json* paged = reader.find("paged")) {
    ObjectReader fields(*paged, reader.source(), "paged");
    PagedCache cache;
    LAWSON_TRY(cache.page_size_k, fields.integer("page_size_k", 1, kMaxDim));
    LAWSON_TRY(cache.page_size_v, fields.integer_or("page_size_v", cache.page_size_k, 1, kMaxDim));
    LAWSON_TRY(cache.pages, fields.integer_or("pages", 0, 0, kMaxDim));
    LAWSON_CHECK(fields.finish());
    spec.paged = cache;
  }
  LAWSON_TRY(spec.append, reader.integer_or("append", 0, 0, kMaxDim));
  return {};
}

Status read_context(ObjectReader& reader, AttentionSpec& spec) {
  if (const Json* fp8 = reader.find("fp8")) {
    ObjectReader fields(*fp8, reader.source(), "fp8");
    LAWSON_TRY(std::string recipe, fields.choice_or("recipe", "", {"delayed", "current", "mxfp8"}));
    if (recipe.empty()) {
      return fields.fail("recipe", "missing; expected delayed, current or mxfp8");
    }
    LAWSON_CHECK(fields.finish());
    spec.fp8 = pick<Fp8Recipe>(recipe, kRecipes);
  }
  if (const Json* parallel = reader.find("context_parallel")) {
    ObjectReader fields(*parallel, reader.source(), "context_parallel");
    ContextParallel context;
    LAWSON_TRY(std::string strategy, fields.choice_or("strategy", "ring", kStrategies));
    context.strategy = pick<CpStrategy>(strategy, kStrategies);
    LAWSON_TRY(context.size, fields.integer("size", 1, 4096));
    LAWSON_CHECK(fields.finish());
    spec.context_parallel = context;
  }
  return {};
}

Status read_strides(ObjectReader& reader, AttentionSpec& spec) {
  const Json* strides = reader.find("strides");
  if (strides == nullptr) return {};
  ObjectReader entries(*strides, reader.source(), "strides");
  for (const std::string& tensor : kStrided) {
    if (!entries.has(tensor)) continue;
    LAWSON_TRY(spec.strides[tensor], entries.integers(tensor, 0, kMaxElements));
  }
  return entries.finish();
}

using Problem = std::optional<FieldProblem>;

template <typename... Args>
FieldProblem problem(std::string field, fmt::format_string<Args...> format, Args&&... args) {
  return {std::move(field), fmt::format(format, std::forward<Args>(args)...)};
}

Problem check_layout(const AttentionSpec& spec) {
  const auto layout = parse_layout(spec.layout);
  if (!layout) {
    return problem("layout",
                   "'{}' is not a layout; expected one of {}, or three of bshd, sbhd, bhsd, thd "
                   "joined by '_'",
                   spec.layout.substr(0, 60), fmt::join(layout_names(), ", "));
  }
  using Packing = Layout::Packing;
  if (layout->packing != Packing::separate && spec.head_dim_qk != spec.head_dim_v) {
    return problem("head_dim_v",
                   "{} is not allowed; k and v share the memory of layout {}, so it "
                   "is head_dim_qk = {}",
                   spec.head_dim_v, spec.layout, spec.head_dim_qk);
  }
  const bool all = layout->packing == Packing::qkv_s3hd || layout->packing == Packing::qkv_h3d;
  if (all && spec.kv_heads != spec.heads) {
    return problem("kv_heads",
                   "{} is not allowed; q, k and v share the memory of layout {}, so it "
                   "is heads = {}",
                   spec.kv_heads, spec.layout, spec.heads);
  }
  if (all && spec.seqlen_kv != spec.seqlen_q) {
    return problem("seqlen_kv",
                   "{} is not allowed; q, k and v share the memory of layout {}, so "
                   "it is seqlen_q = {}",
                   spec.seqlen_kv, spec.layout, spec.seqlen_q);
  }
  if (spec.paged && (layout->ragged_kv() || layout->packing != Packing::separate)) {
    return problem("layout",
                   "'{}' is not a layout of pages; the words of k and v are bshd, sbhd "
                   "or bhsd",
                   spec.layout);
  }
  for (const auto& [field, total, ragged] :
       {std::tuple{"total_q", spec.total_q, layout->ragged_q()},
        std::tuple{"total_kv", spec.total_kv, layout->ragged_kv()}}) {
    if (total != 0 && !ragged) {
      return problem(field, "given, and layout {} is not ragged there", spec.layout);
    }
  }
  for (const auto& [tensor, strides] : spec.strides) {
    if (std::find(kStrided.begin(), kStrided.end(), tensor) == kStrided.end()) {
      return problem("strides." + tensor, "is none of {}", fmt::join(kStrided, ", "));
    }
    if (strides.size() != 4) {
      return problem("strides." + tensor, "expected 4 strides, in [b, h, s, d] order");
    }
  }
  return std::nullopt;
}

// Full or 1 on every axis.
Problem check_broadcast(const AttentionSpec& spec, const std::string& field, const Dims& shape) {
  const Dims full{spec.batch, spec.heads, spec.seqlen_q, spec.seqlen_kv};
  bool fits = shape.size() == 4;
  for (std::size_t i = 0; fits && i < 4; ++i) fits = shape[i] == full[i] || shape[i] == 1;
  if (fits) return std::nullopt;
  return problem(field, "{} is not allowed; each entry of {} is full or 1", to_string(shape),
                 to_string(full));
}

Problem check_scores(const AttentionSpec& spec) {
  const bool tensor = has_bias_tensor(spec);
  if (tensor) {
    if (auto wrong = check_broadcast(spec, "bias_shape", spec.bias_shape)) return wrong;
  } else if (!spec.bias_shape.empty()) {
    return problem("bias_shape", "given without a pre_scale or post_scale bias");
  }
  if (spec.bias_grad && !tensor) {
    return problem("bias_grad", "true without a pre_scale or post_scale bias");
  }
  if (spec.attn_mask) {
    if (auto wrong = check_broadcast(spec, "attn_mask.shape", spec.attn_mask->shape)) return wrong;
  }
  if (spec.alibi_slopes && spec.bias != BiasKind::alibi) {
    return problem("alibi_slopes", "given without bias = alibi");
  }
  if (!spec.alibi_slope_values.empty() &&
      static_cast<std::int64_t>(spec.alibi_slope_values.size()) != spec.heads) {
    return problem("alibi_slopes", "{} slopes for {} heads", spec.alibi_slope_values.size(),
                   spec.heads);
  }
  if (!(spec.softcap >= 0 && spec.softcap <= 1e30)) {
    return problem("softcap", "{} is {}; expected 0 (none) or a positive number up to 1e30",
                   spec.softcap, spec.softcap < 0 ? "negative" : "too large");
  }
  if (!(spec.dropout >= 0 && spec.dropout < 1)) {
    return problem("dropout", "{} is not in [0, 1)", spec.dropout);
  }
  if (spec.return_dropout_mask && spec.dropout == 0) {
    return problem("return_dropout_mask", "true without dropout");
  }
  if (spec.dropout_mask_input && spec.dropout == 0) {
    return problem("dropout_mask", "true without dropout");
  }
  return std::nullopt;
}

Problem check_lengths(const AttentionSpec& spec) {
  const Layout layout = *parse_layout(spec.layout);
  const bool padding = spec.mask.starts_with("padding") || spec.paged;
  struct Side {
    const char *field, *padded_field, *total_field;
    const Dims &lengths, &padded;
    std::int64_t longest, total;
    bool ragged;
  };
  for (const Side& side :
       {Side{"seqlens_q", "seqlens_q_padded", "total_q", spec.seqlens_q, spec.seqlens_q_padded,
             spec.seqlen_q, spec.total_q, layout.ragged_q()},
        Side{"seqlens_kv", "seqlens_kv_padded", "total_kv", spec.seqlens_kv, spec.seqlens_kv_padded,
             spec.seqlen_kv, spec.total_kv, layout.ragged_kv()}}) {
    if (!side.lengths.empty() && !padding && !side.ragged) {
      return problem(side.field,
                     "lengths are used only with a padding mask, pages or a ragged "
                     "layout");
    }
    if (!side.padded.empty() && (!side.ragged || side.lengths.empty())) {
      return problem(side.padded_field, "used only with a ragged layout, beside {}", side.field);
    }
    std::int64_t tokens = 0;
    for (const auto& [field, lengths] :
         {std::pair{side.field, &side.lengths}, std::pair{side.padded_field, &side.padded}}) {
      if (lengths->empty()) continue;
      if (static_cast<std::int64_t>(lengths->size()) != spec.batch) {
        return problem(field, "{} lengths for batch {}", lengths->size(), spec.batch);
      }
      tokens = 0;
      for (std::size_t i = 0; i < lengths->size(); ++i) {
        const std::int64_t length = (*lengths)[i];
        const std::int64_t low = lengths == &side.padded ? side.lengths[i] : 0;
        const std::int64_t high = lengths == &side.padded ? kMaxDim : side.longest;
        if (length < low || length > high) {
          return problem(fmt::format("{}[{}]", field, i), "{} is not in [{}, {}]", length, low,
                         high);
        }
        tokens += length;  // at most 2^23 entries of at most 2^40
      }
    }
    if (side.total != 0 && tokens > side.total) {
      return problem(side.total_field, "{} is less than the {} tokens of {}", side.total, tokens,
                     side.padded.empty() ? side.field : side.padded_field);
    }
  }
  if (spec.has_padded_offsets && !layout.ragged_q() && !layout.ragged_kv()) {
    return problem("padded_offsets", "true, and layout {} is not ragged", spec.layout);
  }
  if (spec.append > spec.seqlen_kv) {
    return problem("append", "{} tokens are more than seqlen_kv = {}", spec.append, spec.seqlen_kv);
  }
  if (spec.append > 0 && (!padding || layout.ragged_kv() || layout.ragged_q())) {
    return problem("append",
                   "needs a cache with lengths: pages, or a dense layout with a padding "
                   "mask");
  }
  return std::nullopt;
}

}  // namespace

Problem check_attention(const AttentionSpec& spec) {
  // Its graphs' names, with ".backward" at the end, are names of at most 256 bytes too.
  if (spec.name.empty() || spec.name.size() > 240 || has_control(spec.name)) {
    return problem("name", "expected 1 to 240 bytes without control characters");
  }
  if (spec.heads < 1 || spec.kv_heads < 1 || spec.heads % spec.kv_heads != 0) {
    return problem("kv_heads", "{} is not allowed; heads = {} must be a multiple", spec.kv_heads,
                   spec.heads);
  }
  if (auto wrong = check_layout(spec)) return wrong;
  if (auto wrong = check_scores(spec)) return wrong;
  return check_lengths(spec);
}

Result<AttentionSpec> attention_from_json(const Json& document, const std::string& source) {
  ObjectReader reader(document, source);
  AttentionSpec spec;
  LAWSON_CHECK(reader.integer("lawson", 1, 1));
  LAWSON_CHECK(reader.choice_or("kind", "attention", {"attention"}));
  LAWSON_TRY(spec.name, reader.string_or("name", "attention"));
  LAWSON_TRY(std::string pass, reader.choice_or("pass", "forward", kPasses));
  spec.pass = pick<Pass>(pass, kPasses);
  LAWSON_TRY(std::string dtype, reader.choice_or("dtype", "bf16", kDTypes));
  spec.dtype = *dtype_from_string(dtype);
  LAWSON_TRY(std::string output_dtype, reader.choice_or("output_dtype", "", kDTypes));
  if (!output_dtype.empty()) spec.output_dtype = dtype_from_string(output_dtype);
  LAWSON_CHECK(read_shapes(reader, spec));
  LAWSON_TRY(spec.layout, reader.string_or("layout", "bshd"));
  LAWSON_TRY(spec.mask, reader.choice_or("mask", "none", kMasks));
  LAWSON_CHECK(read_window(reader, spec));
  LAWSON_CHECK(read_scores(reader, spec));
  LAWSON_TRY(spec.deterministic, reader.boolean_or("deterministic", false));
  LAWSON_TRY(spec.return_stats, reader.boolean_or("return_stats", false));
  LAWSON_TRY(spec.return_max_logit, reader.boolean_or("return_max_logit", false));
  LAWSON_TRY(spec.cuda_graph, reader.boolean_or("cuda_graph", false));
  LAWSON_CHECK(read_lengths(reader, spec));
  LAWSON_CHECK(read_strides(reader, spec));
  LAWSON_CHECK(read_cache(reader, spec));
  LAWSON_CHECK(read_context(reader, spec));
  LAWSON_CHECK(reader.finish());
  if (const auto wrong = check_attention(spec)) return reader.fail(wrong->field, wrong->message);
  return spec;
}

Json attention_to_json(const AttentionSpec& spec) {
  Json document{
      {"lawson", 1},
      {"kind", "attention"},
      {"name", spec.name},
      {"pass", word_of(spec.pass, kPasses)},
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
      {"bias", word_of(spec.bias, kBiases)},
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
  if (!spec.seqlens_q_padded.empty()) document["seqlens_q_padded"] = spec.seqlens_q_padded;
  if (!spec.seqlens_kv_padded.empty()) document["seqlens_kv_padded"] = spec.seqlens_kv_padded;
  if (spec.has_padded_offsets) document["padded_offsets"] = true;
  if (spec.total_q != 0) document["total_q"] = spec.total_q;
  if (spec.total_kv != 0) document["total_kv"] = spec.total_kv;
  if (spec.attn_mask) {
    document["attn_mask"] = {{"dtype", to_string(spec.attn_mask->dtype)},
                             {"shape", spec.attn_mask->shape}};
  }
  if (!spec.alibi_slope_values.empty()) {
    document["alibi_slopes"] = spec.alibi_slope_values;
  } else if (spec.alibi_slopes) {
    document["alibi_slopes"] = true;
  }
  if (spec.return_dropout_mask) document["return_dropout_mask"] = true;
  if (spec.dropout_mask_input) document["dropout_mask"] = true;
  if (spec.paged) {
    document["paged"] = {{"page_size_k", spec.paged->page_size_k},
                         {"page_size_v", spec.paged->page_size_v},
                         {"pages", spec.paged->pages}};
  }
  if (spec.append != 0) document["append"] = spec.append;
  if (spec.fp8 != Fp8Recipe::none) document["fp8"] = {{"recipe", word_of(spec.fp8, kRecipes)}};
  if (spec.context_parallel) {
    document["context_parallel"] = {
        {"strategy", word_of(spec.context_parallel->strategy, kStrategies)},
        {"size", spec.context_parallel->size}};
  }
  for (const auto& [tensor, strides] : spec.strides) document["strides"][tensor] = strides;
  return document;
}

}  // namespace lawson::front
