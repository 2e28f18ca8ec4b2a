// The attributes of an attention config: one table, each row a field of the spec document.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/lazy.h"
#include "capi/attention.h"
#include "capi/guard.h"
#include "capi/handles.h"

namespace lawson::capi {
namespace {

using Kind = ValueKind;
using Words = std::vector<std::string>;

// Words by the enumerators' values; "" is "not set", or no value at all.
const auto& kDTypes =
    *new const Words{"",       "f64", "f32", "f16", "bf16", "f8e4m3", "f8e5m2", "f8e8m0",
                     "f4e2m1", "i64", "i32", "i8",  "u8",   "i4",     "bool"};
const auto& kPasses = *new const Words{"forward", "backward", "training"};
const auto& kLayouts = *new const Words{"",
                                        "bshd",
                                        "sbhd",
                                        "bhsd",
                                        "thd",
                                        "bs3hd",
                                        "sb3hd",
                                        "t3hd",
                                        "bsh3d",
                                        "sbh3d",
                                        "th3d",
                                        "bshd_bs2hd",
                                        "sbhd_sb2hd",
                                        "thd_t2hd",
                                        "bshd_bsh2d",
                                        "sbhd_sbh2d",
                                        "thd_th2d",
                                        "sbhd_bshd_bshd",
                                        "bshd_sbhd_sbhd",
                                        "bshd_bhsd_bhsd",
                                        "bshd_thd_thd",
                                        "sbhd_bhsd_bhsd",
                                        "sbhd_thd_thd",
                                        "bhsd_bshd_bshd",
                                        "bhsd_sbhd_sbhd",
                                        "bhsd_thd_thd",
                                        "thd_bshd_bshd",
                                        "thd_sbhd_sbhd",
                                        "thd_bhsd_bhsd",
                                        "bshd_bshd_sbhd",
                                        "bshd_bshd_bhsd",
                                        "bshd_sbhd_bshd",
                                        "bshd_sbhd_bhsd",
                                        "bshd_bhsd_bshd",
                                        "bshd_bhsd_sbhd",
                                        "sbhd_bshd_sbhd",
                                        "sbhd_bshd_bhsd",
                                        "sbhd_sbhd_bshd",
                                        "sbhd_sbhd_bhsd",
                                        "sbhd_bhsd_bshd",
                                        "sbhd_bhsd_sbhd",
                                        "bhsd_bshd_sbhd",
                                        "bhsd_bshd_bhsd",
                                        "bhsd_sbhd_bshd",
                                        "bhsd_sbhd_bhsd",
                                        "bhsd_bhsd_bshd",
                                        "bhsd_bhsd_sbhd",
                                        "thd_bshd_sbhd",
                                        "thd_bshd_bhsd",
                                        "thd_sbhd_bshd",
                                        "thd_sbhd_bhsd",
                                        "thd_bhsd_bshd",
                                        "thd_bhsd_sbhd"};
const auto& kMasks = *new const Words{"none",
                                      "padding",
                                      "causal",
                                      "padding_causal",
                                      "causal_bottom_right",
                                      "padding_causal_bottom_right"};
const auto& kBiases = *new const Words{"none", "pre_scale", "post_scale", "alibi"};
const auto& kSoftmaxes = *new const Words{"vanilla", "off_by_one", "learnable"};
const auto& kRecipes = *new const Words{"none", "delayed", "current", "mxfp8"};
const auto& kStrategies = *new const Words{"", "ring", "all_gather", "all_to_all"};

constexpr std::size_t kMaxTextBytes = 4096;

ConfigAttribute word(std::int32_t id, std::string_view name, std::string_view path,
                     const Words& words, std::int64_t unset = 0, std::int64_t low = 0) {
  return {id, name, path, Kind::word, &words, unset, low};
}

ConfigAttribute flag(std::int32_t id, std::string_view name, std::string_view path) {
  return {id, name, path, Kind::flag};
}

ConfigAttribute integer(std::int32_t id, std::string_view name, std::string_view path,
                        std::int64_t unset = 0, std::int64_t low = 0) {
  return {id, name, path, Kind::integer, nullptr, unset, low};
}

ConfigAttribute number(std::int32_t id, std::string_view name, std::string_view path) {
  return {id, name, path, Kind::number};
}

ConfigAttribute integers(std::int32_t id, std::string_view name, std::string_view path,
                         std::size_t count, std::int64_t low = 0,
                         std::int64_t high = kMaxElements) {
  return {id, name, path, Kind::integers, nullptr, 0, low, high, count};
}

Result<const ConfigAttribute*> find_attribute(std::int32_t id) {
  const auto& all = config_attributes();
  const auto it =
      std::lower_bound(all.begin(), all.end(), id,
                       [](const ConfigAttribute& a, std::int32_t b) { return a.id < b; });
  if (it != all.end() && it->id == id) return &*it;
  return invalid("attribute {} is none of an attention config; those are {} ({}) to {} ({})", id,
                 all.front().id, all.front().name, all.back().id, all.back().name);
}

Json::json_pointer pointer(const ConfigAttribute& attribute) {
  return Json::json_pointer{std::string{attribute.path}};
}

const Json* stored(const Json& document, const ConfigAttribute& attribute) {
  const auto at = pointer(attribute);
  return document.contains(at) ? &document.at(at) : nullptr;
}

// An object that has no field left says nothing.
void erase(Json& document, const ConfigAttribute& attribute) {
  if (stored(document, attribute) == nullptr) return;
  const auto at = pointer(attribute);
  const auto parent = at.parent_pointer();
  document.at(parent).erase(at.back());
  if (!parent.empty() && document.at(parent).empty()) {
    document.at(parent.parent_pointer()).erase(parent.back());
  }
}

template <typename T>
T read(const void* value) {
  T result;
  std::memcpy(&result, value, sizeof(T));
  return result;
}

template <typename T>
std::vector<T> read_list(const void* value, std::size_t size) {
  std::vector<T> list(size / sizeof(T));
  if (size > 0) std::memcpy(list.data(), value, size);
  return list;
}

Status check_integer(const ConfigAttribute& attribute, std::int64_t value) {
  if (value >= attribute.low && value <= attribute.high) return {};
  return invalid("attribute '{}': {} is not in [{}, {}]", attribute.name, value, attribute.low,
                 attribute.high);
}

Result<Json> read_word(const ConfigAttribute& attribute, std::int32_t value) {
  const Words& words = *attribute.words;
  if (value < attribute.low || value >= static_cast<std::int32_t>(words.size())) {
    return invalid("attribute '{}': {} is not in its enum, {} ({}) to {} ({})", attribute.name,
                   value, attribute.low, words[static_cast<std::size_t>(attribute.low)],
                   words.size() - 1, words.back());
  }
  const std::string& word = words[static_cast<std::size_t>(value)];
  return word.empty() ? Json{} : Json(word);
}

Result<Json> read_numbers(const ConfigAttribute& attribute, const std::vector<double>& list) {
  for (const double value : list) {
    if (!std::isfinite(value)) {
      return invalid("attribute '{}': {} is not finite", attribute.name, value);
    }
  }
  return list.empty() ? Json{} : Json(list);
}

Result<Json> read_integers(const ConfigAttribute& attribute,
                           const std::vector<std::int64_t>& list) {
  if (attribute.count != 0 && !list.empty() && list.size() != attribute.count) {
    return invalid("attribute '{}': {} integers were given; it takes {}, or none", attribute.name,
                   list.size(), attribute.count);
  }
  for (const std::int64_t value : list) LAWSON_CHECK(check_integer(attribute, value));
  return list.empty() ? Json{} : Json(list);
}

double unset_number(const ConfigAttribute& attribute) {
  return attribute.id == LAWSON_ATTENTION_SCALE ? std::numeric_limits<double>::quiet_NaN() : 0;
}

// The value as the document has it; null: not set.
Result<Json> read_value(const ConfigAttribute& attribute, const void* value, std::size_t size) {
  LAWSON_CHECK(check_value(attribute.name, attribute.kind, value, size));
  switch (attribute.kind) {
    case Kind::word:
      return read_word(attribute, read<std::int32_t>(value));
    case Kind::flag: {
      const auto given = read<std::int32_t>(value);
      if (given != 0 && given != 1) {
        return invalid("attribute '{}': {} is not a flag; expected 0 or 1", attribute.name, given);
      }
      return given == 0 ? Json{} : Json(true);
    }
    case Kind::integer: {
      const auto given = read<std::int64_t>(value);
      if (given == attribute.unset) return Json{};
      LAWSON_CHECK(check_integer(attribute, given));
      return Json(given);
    }
    case Kind::number: {
      const auto given = read<double>(value);
      const double unset = unset_number(attribute);
      if (given == unset || (std::isnan(given) && std::isnan(unset))) return Json{};
      if (std::isfinite(given)) return Json(given);
      return invalid("attribute '{}': {} is not finite", attribute.name, given);
    }
    case Kind::text:
      if (size > kMaxTextBytes) {
        return invalid("attribute '{}': {} bytes are more than {}", attribute.name, size,
                       kMaxTextBytes);
      }
      if (!is_utf8({static_cast<const char*>(value), size})) {
        return invalid("attribute '{}' is not UTF-8", attribute.name);
      }
      return size == 0 ? Json{} : Json(std::string{static_cast<const char*>(value), size});
    case Kind::integers:
      return read_integers(attribute, read_list<std::int64_t>(value, size));
    case Kind::numbers:
      return read_numbers(attribute, read_list<double>(value, size));
    case Kind::handle:
    case Kind::tensor:
      break;
  }
  return error(ErrorKind::internal, "attribute '{}' has no place in a document", attribute.name);
}

std::int32_t word_value(const ConfigAttribute& attribute, const std::string& word) {
  const Words& words = *attribute.words;
  return static_cast<std::int32_t>(std::find(words.begin(), words.end(), word) - words.begin());
}

}  // namespace

std::string_view kind_text(ValueKind kind) {
  switch (kind) {
    case Kind::word:
      return "an enum";
    case Kind::flag:
      return "a flag";
    case Kind::integer:
      return "an integer";
    case Kind::number:
      return "a number";
    case Kind::text:
      return "a text";
    case Kind::integers:
      return "integers";
    case Kind::numbers:
      return "numbers";
    case Kind::handle:
      return "a handle";
    case Kind::tensor:
      return "a lawson_tensor";
  }
  return "a value";
}

std::size_t size_of(ValueKind kind) {
  switch (kind) {
    case Kind::word:
    case Kind::flag:
      return sizeof(std::int32_t);
    case Kind::integer:
      return sizeof(std::int64_t);
    case Kind::number:
      return sizeof(double);
    case Kind::handle:
      return sizeof(void*);
    case Kind::text:
    case Kind::integers:
    case Kind::numbers:
    case Kind::tensor:
      break;
  }
  return 0;
}

const std::vector<ConfigAttribute>& config_attributes() {
  static Lazy<const std::vector<ConfigAttribute>> table;
  return table.get([] {
    return std::vector<ConfigAttribute>{
        {LAWSON_ATTENTION_NAME, "name", "/name", Kind::text},
        word(LAWSON_ATTENTION_PASS, "pass", "/pass", kPasses),
        word(LAWSON_ATTENTION_DTYPE, "dtype", "/dtype", kDTypes, LAWSON_DTYPE_BF16),
        word(LAWSON_ATTENTION_OUTPUT_DTYPE, "output_dtype", "/output_dtype", kDTypes),
        integer(LAWSON_ATTENTION_BATCH, "batch", "/batch", 1),
        integer(LAWSON_ATTENTION_HEADS, "heads", "/heads", 0, 1),
        integer(LAWSON_ATTENTION_KV_HEADS, "kv_heads", "/kv_heads", 0, 1),
        integer(LAWSON_ATTENTION_SEQLEN_Q, "seqlen_q", "/seqlen_q", -1),
        integer(LAWSON_ATTENTION_SEQLEN_KV, "seqlen_kv", "/seqlen_kv", -1),
        integer(LAWSON_ATTENTION_HEAD_DIM_QK, "head_dim_qk", "/head_dim_qk", 0, 1),
        integer(LAWSON_ATTENTION_HEAD_DIM_V, "head_dim_v", "/head_dim_v", 0, 1),
        word(LAWSON_ATTENTION_LAYOUT, "layout", "/layout", kLayouts, LAWSON_LAYOUT_BSHD,
             LAWSON_LAYOUT_BSHD),
        word(LAWSON_ATTENTION_MASK, "mask", "/mask", kMasks),
        integers(LAWSON_ATTENTION_WINDOW, "window", "/window", 2, -1, kMaxDim),
        word(LAWSON_ATTENTION_BIAS, "bias", "/bias", kBiases),
        integers(LAWSON_ATTENTION_BIAS_SHAPE, "bias_shape", "/bias_shape", 4, 0, kMaxDim),
        word(LAWSON_ATTENTION_BIAS_DTYPE, "bias_dtype", "/bias_dtype", kDTypes),
        flag(LAWSON_ATTENTION_BIAS_GRAD, "bias_grad", "/bias_grad"),
        word(LAWSON_ATTENTION_ATTN_MASK_DTYPE, "attn_mask_dtype", "/attn_mask/dtype", kDTypes),
        integers(LAWSON_ATTENTION_ATTN_MASK_SHAPE, "attn_mask_shape", "/attn_mask/shape", 4, 0,
                 kMaxDim),
        flag(LAWSON_ATTENTION_ALIBI_SLOPES, "alibi_slopes", "/alibi_slopes"),
        {LAWSON_ATTENTION_ALIBI_SLOPE_VALUES, "alibi_slope_values", "/alibi_slopes", Kind::numbers},
        word(LAWSON_ATTENTION_SOFTMAX, "softmax", "/softmax", kSoftmaxes),
        number(LAWSON_ATTENTION_SOFTCAP, "softcap", "/softcap"),
        number(LAWSON_ATTENTION_DROPOUT, "dropout", "/dropout"),
        flag(LAWSON_ATTENTION_RETURN_DROPOUT_MASK, "return_dropout_mask", "/return_dropout_mask"),
        flag(LAWSON_ATTENTION_DROPOUT_MASK, "dropout_mask", "/dropout_mask"),
        number(LAWSON_ATTENTION_SCALE, "scale", "/scale"),
        flag(LAWSON_ATTENTION_DETERMINISTIC, "deterministic", "/deterministic"),
        flag(LAWSON_ATTENTION_RETURN_STATS, "return_stats", "/return_stats"),
        flag(LAWSON_ATTENTION_RETURN_MAX_LOGIT, "return_max_logit", "/return_max_logit"),
        flag(LAWSON_ATTENTION_CUDA_GRAPH, "cuda_graph", "/cuda_graph"),
        integer(LAWSON_ATTENTION_TOTAL_Q, "total_q", "/total_q"),
        integer(LAWSON_ATTENTION_TOTAL_KV, "total_kv", "/total_kv"),
        integers(LAWSON_ATTENTION_SEQLENS_Q, "seqlens_q", "/seqlens_q", 0),
        integers(LAWSON_ATTENTION_SEQLENS_KV, "seqlens_kv", "/seqlens_kv", 0),
        integers(LAWSON_ATTENTION_SEQLENS_Q_PADDED, "seqlens_q_padded", "/seqlens_q_padded", 0),
        integers(LAWSON_ATTENTION_SEQLENS_KV_PADDED, "seqlens_kv_padded", "/seqlens_kv_padded", 0),
        flag(LAWSON_ATTENTION_PADDED_OFFSETS, "padded_offsets", "/padded_offsets"),
        integer(LAWSON_ATTENTION_PAGE_SIZE_K, "page_size_k", "/paged/page_size_k", 0, 1),
        integer(LAWSON_ATTENTION_PAGE_SIZE_V, "page_size_v", "/paged/page_size_v", 0, 1),
        integer(LAWSON_ATTENTION_PAGES, "pages", "/paged/pages"),
        integer(LAWSON_ATTENTION_APPEND, "append", "/append"),
        word(LAWSON_ATTENTION_FP8_RECIPE, "fp8_recipe", "/fp8/recipe", kRecipes),
        word(LAWSON_ATTENTION_CONTEXT_PARALLEL_STRATEGY, "context_parallel_strategy",
             "/context_parallel/strategy", kStrategies),
        integer(LAWSON_ATTENTION_CONTEXT_PARALLEL_SIZE, "context_parallel_size",
                "/context_parallel/size", 0, 1),
        integers(LAWSON_ATTENTION_STRIDES_Q, "strides_q", "/strides/q", 4),
        integers(LAWSON_ATTENTION_STRIDES_K, "strides_k", "/strides/k", 4),
        integers(LAWSON_ATTENTION_STRIDES_V, "strides_v", "/strides/v", 4),
        integers(LAWSON_ATTENTION_STRIDES_O, "strides_o", "/strides/o", 4),
        integers(LAWSON_ATTENTION_STRIDES_DO, "strides_do", "/strides/do", 4),
        integers(LAWSON_ATTENTION_STRIDES_DQ, "strides_dq", "/strides/dq", 4),
        integers(LAWSON_ATTENTION_STRIDES_DK, "strides_dk", "/strides/dk", 4),
        integers(LAWSON_ATTENTION_STRIDES_DV, "strides_dv", "/strides/dv", 4),
    };
  });
}

const std::vector<std::string>& layout_words() {
  return kLayouts;
}

Status check_value(std::string_view name, ValueKind kind, const void* value, std::size_t size) {
  const std::size_t fixed = size_of(kind);
  const bool list = kind == Kind::integers || kind == Kind::numbers;
  if (fixed != 0 && size != fixed) {
    return invalid("attribute '{}': a value of {} bytes was given; {} has {}", name, size,
                   kind_text(kind), fixed);
  }
  if (list && size % sizeof(std::int64_t) != 0) {
    return invalid("attribute '{}': a value of {} bytes was given; {} have {} bytes each", name,
                   size, kind_text(kind), sizeof(std::int64_t));
  }
  if (size > 0) return require(value, "value");
  return {};
}

Status give_value(std::string_view name, const void* source, std::size_t size, void* value,
                  std::size_t capacity, std::size_t* size_written) {
  if (value != nullptr) {
    if (capacity < size) {
      return invalid("attribute '{}': its value has {} bytes; there is room for {}", name, size,
                     capacity);
    }
    if (size > 0) std::memcpy(value, source, size);
  }
  if (size_written != nullptr) *size_written = size;
  return {};
}

Json empty_attention_document() {
  return {{"lawson", 1}, {"kind", "attention"}};
}

Status set_config_attribute(Json& document, std::int32_t id, const void* value, std::size_t size) {
  LAWSON_TRY(const ConfigAttribute* attribute, find_attribute(id));
  LAWSON_TRY(Json given, read_value(*attribute, value, size));
  if (given.is_null()) {
    erase(document, *attribute);
    return {};
  }
  // Given slopes are a tensor already.
  const Json* before = stored(document, *attribute);
  if (attribute->kind == Kind::flag && before != nullptr && before->is_array()) return {};
  document[pointer(*attribute)] = std::move(given);
  return {};
}

Status get_config_attribute(const Json& document, std::int32_t id, void* value,
                            std::size_t capacity, std::size_t* size_written) {
  LAWSON_TRY(const ConfigAttribute* attribute, find_attribute(id));
  const Json* field = stored(document, *attribute);
  const auto give = [&](const void* source, std::size_t size) {
    return give_value(attribute->name, source, size, value, capacity, size_written);
  };
  switch (attribute->kind) {
    case Kind::word: {
      const auto found = field == nullptr
                             ? static_cast<std::int32_t>(attribute->unset)
                             : word_value(*attribute, field->get_ref<const std::string&>());
      return give(&found, sizeof(found));
    }
    case Kind::flag: {
      const std::int32_t found = field != nullptr && (!field->is_boolean() || field->get<bool>());
      return give(&found, sizeof(found));
    }
    case Kind::integer: {
      const std::int64_t found = field == nullptr ? attribute->unset : field->get<std::int64_t>();
      return give(&found, sizeof(found));
    }
    case Kind::number: {
      const double found = field == nullptr ? unset_number(*attribute) : field->get<double>();
      return give(&found, sizeof(found));
    }
    case Kind::text: {
      const std::string found = field == nullptr ? "attention" : field->get<std::string>();
      return give(found.data(), found.size());
    }
    case Kind::integers: {
      const Dims none = id == LAWSON_ATTENTION_WINDOW ? Dims{-1, -1} : Dims{};
      const Dims found = field == nullptr ? none : field->get<Dims>();
      return give(found.data(), found.size() * sizeof(std::int64_t));
    }
    case Kind::numbers: {
      std::vector<double> found;
      if (field != nullptr && field->is_array()) found = field->get<std::vector<double>>();
      return give(found.data(), found.size() * sizeof(double));
    }
    case Kind::handle:
    case Kind::tensor:
      break;
  }
  return error(ErrorKind::internal, "attribute '{}' has no place in a document", attribute->name);
}

std::int32_t dtype_number(DType dtype) {
  const std::string_view name = lawson::to_string(dtype);
  return static_cast<std::int32_t>(std::find(kDTypes.begin(), kDTypes.end(), name) -
                                   kDTypes.begin());
}

std::optional<DType> dtype_of(std::int32_t number) {
  if (number < 0 || number >= static_cast<std::int32_t>(kDTypes.size())) return std::nullopt;
  return dtype_from_string(kDTypes[static_cast<std::size_t>(number)]);
}

}  // namespace lawson::capi
