#include "engine/cudnn/steps.h"

#include <algorithm>

#include "engine/cudnn/steps_fields.h"

namespace lawson::cudnn {
namespace {

using namespace steps;

// ---- names ----------------------------------------------------------------------------------

constexpr std::string_view name_of(const Ragged&) {
  return "ragged";
}
constexpr std::string_view name_of(const ScoreBias&) {
  return "score_bias";
}
constexpr std::string_view name_of(const MaskedRows&) {
  return "masked_rows";
}
constexpr std::string_view name_of(const ClearRows&) {
  return "clear_rows";
}
constexpr std::string_view name_of(const StatsOfRows&) {
  return "stats_of_rows";
}
constexpr std::string_view name_of(const ReduceBiasGradient&) {
  return "reduce_bias_gradient";
}
constexpr std::string_view name_of(const ZeroGaps&) {
  return "zero_gaps";
}
constexpr std::string_view name_of(const ConvertMask&) {
  return "convert_mask";
}
constexpr std::string_view name_of(const CacheAppend&) {
  return "cache_append";
}

// The default of the alternative with that name.
template <std::size_t I = 0>
Result<Step> step_named(const std::string& name) {
  if constexpr (I == std::variant_size_v<Step>) {
    return error(ErrorKind::io, "there is no step '{}'", name);
  } else {
    std::variant_alternative_t<I, Step> step;
    if (name_of(step) == name) return Step{std::move(step)};
    return step_named<I + 1>(name);
  }
}

// ---- JSON -----------------------------------------------------------------------------------

// What is as by default is left out.
template <typename T>
Json to_json(const T& value) {
  if constexpr (HasFields<const T>) {
    Json object = Json::object();
    const T plain{};
    visit_fields(value, [&](const char* name, const auto& field) {
      Json json = to_json(field);
      Json usual;
      visit_fields(plain, [&](const char* other, const auto& theirs) {
        if (std::string_view{name} == other) usual = to_json(theirs);
      });
      if (json != usual) object[name] = std::move(json);
    });
    return object;
  } else if constexpr (std::is_same_v<T, DType>) {
    return std::string{to_string(value)};
  } else if constexpr (std::is_enum_v<T>) {
    return static_cast<int>(value);
  } else if constexpr (requires { value.begin(); }) {
    Json array = Json::array();
    for (const auto& item : value) array.push_back(to_json(item));
    return array;
  } else {
    return value;
  }
}

// Throws Json::exception.
void read(const Json& json, DType& value) {
  const auto dtype = dtype_from_string(json.get<std::string>());
  if (!dtype) throw Json::other_error::create(501, "no element type: " + json.dump(), &json);
  value = *dtype;
}

template <typename T>
void read(const Json& json, T& value) {
  if constexpr (HasFields<T>) {
    if (!json.is_object()) throw Json::other_error::create(501, "no object", &json);
    std::size_t known = 0;
    visit_fields(value, [&](const char* name, auto& field) {
      const auto found = json.find(name);
      if (found == json.end()) return;
      ++known;
      read(*found, field);
    });
    if (known != json.size()) throw Json::other_error::create(501, "unknown fields", &json);
  } else if constexpr (std::is_enum_v<T>) {
    // Which of these there are, check_step() knows.
    const auto number = json.is_number_integer() ? json.get<std::int64_t>() : -1;
    if (number < 0 || number > 255) throw Json::other_error::create(501, "no choice", &json);
    value = static_cast<T>(number);
  } else if constexpr (requires { value.begin(); }) {
    if (!json.is_array()) throw Json::other_error::create(501, "no array", &json);
    for (const Json& item : json) read(item, value.emplace_back());
  } else {
    if (std::is_same_v<T, bool> ? !json.is_boolean() : !json.is_number_integer()) {
      throw Json::other_error::create(501, "neither integer nor bool: " + json.dump(), &json);
    }
    value = json.get<T>();
  }
}

// ---- checks ---------------------------------------------------------------------------------

enum class Presence : std::uint8_t { required, optional };

// Collects the first thing that is wrong with a step.
class Checker {
 public:
  explicit Checker(std::string_view step) : step_{step} {}

  void size(const char* name, std::int64_t value, std::int64_t low = 0,
            std::int64_t high = kMaxElements) {
    if (value < low || value > high) {
      refuse("{} is {}: expected {} to {}", name, value, low, high);
    }
  }

  // The product of these sizes indexes work items.
  void sizes(const char* name, const Dims& dims) {
    for (const std::int64_t dim : dims) size(name, dim);
    const auto count = element_count(dims);
    if (!count || *count > kMaxElements) refuse("{} {} are too many", name, to_string(dims));
  }

  // Along a repeated axis the stride is 0, whatever the shape says.
  void operand(const char* name, const Operand& operand, std::initializer_list<DType> dtypes,
               const Dims& shape, Presence presence) {
    if (operand.uid == 0) {
      if (presence == Presence::required) refuse("{} is absent", name);
      return;
    }
    if (dtypes.size() > 0 &&
        std::find(dtypes.begin(), dtypes.end(), operand.dtype) == dtypes.end()) {
      refuse("{} has element type {}", name, to_string(operand.dtype));
    }
    if (operand.strides.size() != shape.size()) {
      refuse("{} has {} strides: expected {}", name, operand.strides.size(), shape.size());
      return;
    }
    for (const std::int64_t stride : operand.strides) size(name, stride);
    if (storage_extent(shape, operand.strides).value_or(kMaxElements + 1) > kMaxElements) {
      refuse("{} {} with strides {} is too large", name, to_string(shape),
             to_string(operand.strides));
    }
  }

  void result(const char* name, const Operand& out, std::initializer_list<DType> dtypes,
              const Dims& shape, Presence presence = Presence::required) {
    operand(name, out, dtypes, shape, presence);
    if (out.uid == 0 || !status_.ok()) return;
    for (std::size_t axis = 0; axis < shape.size(); ++axis) {
      if (shape[axis] > 1 && out.strides[axis] == 0) {
        refuse("{} would write all {} of axis {} to one element", name, shape[axis], axis);
      }
    }
  }

  template <typename T>
  void one_of(const char* name, T value, T last) {
    if (value > last) refuse("{} is {}", name, static_cast<int>(value));
  }

  template <typename... Args>
  void refuse(fmt::format_string<Args...> format, Args&&... args) {
    if (!status_.ok()) return;
    status_ = error(ErrorKind::internal, "step '{}': {}", step_,
                    fmt::format(format, std::forward<Args>(args)...));
  }

  Status take() && { return std::move(status_); }

 private:
  std::string_view step_;
  Status status_;
};

constexpr auto kFloats = {DType::f32, DType::f16, DType::bf16};
constexpr auto kAny = std::initializer_list<DType>{};
constexpr auto kRequired = Presence::required;
constexpr auto kOptional = Presence::optional;

void check_integers(Checker& c, const char* name, const Operand& operand, std::int64_t count,
                    Presence presence) {
  c.operand(name, operand, {DType::i32}, {count}, presence);
}

void check_by_value(Checker& c, const Operand& sequences, const Operand& factor) {
  if (sequences.uid != 0 && sequences.dtype != DType::i32 && sequences.dtype != DType::i64) {
    c.refuse("sequences has element type {}", to_string(sequences.dtype));
  }
  if (factor.uid != 0 && (!is_float(factor.dtype) || bit_width(factor.dtype) < 16)) {
    c.refuse("factor has element type {}", to_string(factor.dtype));
  }
}

void check_scores(Checker& c, const Scores& s) {
  c.sizes("scores", {s.batch, s.heads, s.rows, s.columns});
  check_integers(c, "seqlen_q", s.seqlen_q, s.batch, kOptional);
  check_integers(c, "seqlen_kv", s.seqlen_kv, s.batch, kOptional);
  check_by_value(c, s.sequences, {});
  c.one_of("alignment", s.alignment, ir::Alignment::bottom_right);
  if (s.left < -1 || s.right < -1) c.refuse("the window is [{}, {}]", s.left, s.right);
}

void check_terms(Checker& c, const Terms& t, const Dims& scores) {
  c.operand("bias", t.bias, kFloats, scores, kOptional);
  check_by_value(c, {}, t.factor);
  c.operand("mask", t.mask, {DType::f32, DType::f16, DType::bf16, DType::u8, DType::boolean},
            scores, kOptional);
}

void check_packing(Checker& c, const Packing& packing, std::int64_t batch) {
  check_integers(c, "offsets", packing.offsets, batch + 1, kOptional);
  c.size("tokens", packing.tokens);
}

void check_cleared(Checker& c, const std::vector<ClearedTensor>& tensors, const Dims& rows) {
  if (tensors.size() > kMaxCleared) {
    c.refuse("{} tensors: at most {}", tensors.size(), kMaxCleared);
  }
  for (const ClearedTensor& item : tensors) {
    Dims shape = rows;
    shape.push_back(item.depth);
    c.sizes("a tensor's sizes", shape);
    c.result("a tensor", item.tensor, kAny, shape);
    if (item.tensor.uid != 0 && bit_width(item.tensor.dtype) < 8) {
      c.refuse("a tensor has element type {}", to_string(item.tensor.dtype));
    }
  }
}

void check(Checker& c, const Ragged& s) {
  c.size("bucket", s.bucket, 0, kMaxDim);
  c.size("max_length", s.max_length, 0, kMaxDim);
  check_integers(c, "cu_seqlens", s.cu_seqlens, s.bucket + 1, kOptional);
  check_integers(c, "cu_seqlens_padded", s.cu_seqlens_padded, s.bucket + 1, kOptional);
  check_integers(c, "lengths", s.lengths, s.bucket, kOptional);
  if (s.cu_seqlens.uid != 0 && s.lengths.uid != 0) {
    c.refuse("lengths come from cu_seqlens or lengths, not both");
  }
  check_by_value(c, s.sequences, {});
  c.result("seqlen", s.seqlen, {DType::i32}, {s.bucket}, kOptional);
  if (s.outputs.size() > kMaxRowOffsets) {
    c.refuse("{} outputs: at most {}", s.outputs.size(), kMaxRowOffsets);
  }
  if (!s.outputs.empty() && s.cu_seqlens.uid == 0 && s.cu_seqlens_padded.uid == 0) {
    c.refuse("offsets need cu_seqlens or cu_seqlens_padded");
  }
  for (const RowOffsets& out : s.outputs) {
    c.result("offsets", out.offsets, {DType::i32, DType::i64}, {s.bucket + 1});
    c.size("the stride of rows", out.stride);
  }
}

void check(Checker& c, const ScoreBias& s) {
  check_scores(c, s.scores);
  const Dims scores{s.scores.batch, s.scores.heads, s.scores.rows, s.scores.columns};
  check_terms(c, s.terms, scores);
  c.operand("slopes", s.slopes, {DType::f32}, {s.scores.heads}, kOptional);
  c.result("out", s.out, kFloats, scores);
}

void check(Checker& c, const MaskedRows& s) {
  check_scores(c, s.scores);
  check_terms(c, s.terms, {s.scores.batch, s.scores.heads, s.scores.rows, s.scores.columns});
  c.result("flags", s.flags, {DType::u8}, {s.scores.batch, s.scores.heads, s.scores.rows});
}

// The results [b, h, i] of a step over rows; where they are packed, b's stride is not used.
Dims rows_of(std::int64_t batch, std::int64_t heads, std::int64_t rows, const Packing& packing) {
  return {packing.offsets.uid == 0 ? batch : 1, heads,
          packing.offsets.uid == 0 ? rows : packing.tokens};
}

void check(Checker& c, const ClearRows& s) {
  const Dims rows = rows_of(s.batch, s.heads, s.rows, s.packing);
  c.sizes("rows", {s.batch, s.heads, s.rows});
  c.operand("flags", s.flags, {DType::u8}, {s.batch, s.heads, s.rows}, kRequired);
  check_by_value(c, s.sequences, {});
  check_packing(c, s.packing, s.batch);
  check_cleared(c, s.tensors, rows);
  c.result("stats", s.stats, {DType::f32}, rows, kOptional);
  c.result("max_logit", s.max_logit, {DType::f32}, rows, kOptional);
  c.one_of("softmax", s.softmax, ir::SoftmaxKind::learnable);
  const bool needs_sink = s.softmax == ir::SoftmaxKind::learnable && s.stats.uid != 0;
  c.operand("sink", s.sink, {DType::f32}, {s.heads}, needs_sink ? kRequired : kOptional);
}

void check(Checker& c, const StatsOfRows& s) {
  const Dims rows = rows_of(s.batch, s.heads, s.rows, s.packing);
  c.sizes("rows", {s.batch, s.heads, s.rows});
  const Dims dense{s.batch, s.heads, s.rows};
  c.operand("flags", s.flags, {DType::u8}, dense, kOptional);
  check_by_value(c, s.sequences, {});
  check_packing(c, s.packing, s.batch);
  c.operand("stats", s.stats, {DType::f32}, rows, kRequired);
  c.operand("sum_exp", s.sum_exp, {DType::f32}, rows, kOptional);
  c.result("out", s.out, {DType::f32}, s.dense_out ? dense : rows);
}

void check(Checker& c, const ReduceBiasGradient& s) {
  if (s.full.size() != 4 || s.shape.size() != 4) {
    c.refuse("the shapes are {} and {}: expected four axes", to_string(s.full), to_string(s.shape));
    return;
  }
  c.sizes("full", s.full);
  for (std::size_t axis = 0; axis < 4; ++axis) {
    if (s.shape[axis] != 1 && s.shape[axis] != s.full[axis]) {
      c.refuse("shape {} does not broadcast to {}", to_string(s.shape), to_string(s.full));
    }
  }
  c.operand("gradient", s.gradient, kFloats, s.full, kRequired);
  check_by_value(c, s.sequences, s.factor);
  c.result("bias_gradient", s.bias_gradient, kFloats, s.shape);
}

void check(Checker& c, const ZeroGaps& s) {
  c.sizes("rows", {s.batch, s.heads, s.rows});
  check_integers(c, "lengths", s.lengths, s.batch, kRequired);
  check_by_value(c, s.sequences, {});
  check_packing(c, s.packing, s.batch);
  check_cleared(c, s.tensors, rows_of(s.batch, s.heads, s.rows, s.packing));
}

void check(Checker& c, const ConvertMask& s) {
  if (s.shape.size() != 4)
    return c.refuse("the shape is {}: expected four axes", to_string(s.shape));
  c.sizes("shape", s.shape);
  const auto types = {DType::u8, DType::f32, DType::f16, DType::bf16};
  c.operand("in", s.in, types, s.shape, kRequired);
  c.result("out", s.out, types, s.shape);
}

void check(Checker& c, const CacheAppend& s) {
  c.sizes("fresh", {s.batch, s.heads, s.fresh_rows, s.depth});
  c.size("capacity", s.capacity, 0, kMaxDim);
  c.size("page_size", s.page_size, 0, kMaxDim);
  c.size("pages", s.pages, 0, kMaxDim);
  const bool paged = s.page_size > 0;
  if (paged && s.capacity % s.page_size != 0) {
    c.refuse("capacity {} is not a multiple of page_size {}", s.capacity, s.page_size);
  }
  c.result("cache", s.cache, kAny,
           paged ? Dims{s.pages, s.heads, s.page_size, s.depth}
                 : Dims{s.batch, s.heads, s.capacity, s.depth});
  c.operand("fresh", s.fresh, {s.cache.dtype}, {s.batch, s.heads, s.fresh_rows, s.depth},
            kRequired);
  if (bit_width(s.cache.dtype) < 8) c.refuse("element type {}", to_string(s.cache.dtype));
  check_integers(c, "seqlen_kv", s.seqlen_kv, s.batch, kRequired);
  c.operand("page_table", s.page_table, {DType::i32},
            {s.batch, paged ? s.capacity / s.page_size : 0}, paged ? kRequired : kOptional);
}

}  // namespace

std::string_view step_name(const Step& step) {
  return std::visit([](const auto& s) { return name_of(s); }, step);
}

std::vector<std::int64_t> step_uids(const Step& step) {
  std::vector<std::int64_t> uids;
  std::visit(
      [&](const auto& s) {
        visit_operands(s, [&](const Operand& operand) { uids.push_back(operand.uid); });
      },
      step);
  return uids;
}

Status check_step(const Step& step) {
  Checker checker{step_name(step)};
  std::visit([&](const auto& s) { check(checker, s); }, step);
  return std::move(checker).take();
}

Json step_to_json(const Step& step) {
  Json json = std::visit([](const auto& s) { return to_json(s); }, step);
  json["step"] = std::string{step_name(step)};
  return json;
}

Result<Step> step_from_json(const Json& json) {
  try {
    LAWSON_TRY(Step step, step_named(json.at("step").get<std::string>()));
    Json rest = json;
    rest.erase("step");
    std::visit([&](auto& s) { read(rest, s); }, step);
    const Status status = check_step(step);
    if (!status.ok()) return error(ErrorKind::io, "{}", status.error().message);
    return step;
  } catch (const Json::exception& exception) {
    return error(ErrorKind::io, "{}", exception.what());
  }
}

}  // namespace lawson::cudnn
