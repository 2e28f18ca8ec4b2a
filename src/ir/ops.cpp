#include "ir/ops.h"

#include <array>
#include <string>

#include "base/lazy.h"

namespace lawson::ir {
namespace {

constexpr std::array<std::string_view, kUnaryCount> kUnary{
    "neg",     "abs",  "exp",        "log",   "log1p", "expm1",    "sqrt",  "rsqrt", "reciprocal",
    "sin",     "cos",  "tan",        "tanh",  "erf",   "ceil",     "floor", "round", "sign",
    "sigmoid", "relu", "leaky_relu", "relu6", "elu",   "softplus", "silu",  "gelu",  "gelu_tanh"};
constexpr std::array<std::string_view, kBinaryCount> kBinary{"add", "sub", "mul", "div",
                                                             "pow", "min", "max", "mod"};
constexpr std::array<std::string_view, kCompareCount> kCompare{"eq", "ne", "lt", "le", "gt", "ge"};
constexpr std::array<std::string_view, kLogicalCount> kLogical{"and", "or", "not"};
constexpr std::array<std::string_view, kReduceCount> kReduce{"sum",  "max",  "min",   "mean",
                                                             "prod", "amax", "norm1", "norm2"};

// Ops whose name needs no kind.
const std::array<std::pair<std::string_view, Op>, 19>& plain_ops() {
  static Lazy<const std::array<std::pair<std::string_view, Op>, 19>> table;
  return table.get([] {
    return std::array<std::pair<std::string_view, Op>, 19>{{
        {"matmul", Matmul{}},
        {"scaled_matmul", ScaledMatmul{}},
        {"convert", Convert{}},
        {"select", Select{}},
        {"clamp", Clamp{}},
        {"iota", Iota{}},
        {"constant", Constant{}},
        {"broadcast", Broadcast{}},
        {"reshape", Reshape{}},
        {"transpose", Transpose{}},
        {"slice", Slice{}},
        {"concat", Concat{}},
        {"layer_norm", Norm{NormKind::layer, {}}},
        {"rms_norm", Norm{NormKind::rms, {}}},
        {"layer_norm_backward", NormBackward{NormKind::layer, {}}},
        {"rms_norm_backward", NormBackward{NormKind::rms, {}}},
        {"attention", Attention{}},
        {"attention_backward", AttentionBackward{}},
        {"cache_append", CacheAppend{}},
    }};
  });
}

double default_parameter(UnaryKind kind) {
  if (kind == UnaryKind::leaky_relu) return 0.01;
  return kind == UnaryKind::elu ? 1.0 : 0.0;
}

constexpr std::string_view kGradSuffix = "_grad";

std::string kinded(NormKind kind, std::string_view rest) {
  return std::string{kind == NormKind::layer ? "layer_norm" : "rms_norm"}.append(rest);
}

}  // namespace

bool has_gradient_op(UnaryKind kind) {
  switch (kind) {
    case UnaryKind::tanh:
    case UnaryKind::sigmoid:
    case UnaryKind::relu:
    case UnaryKind::leaky_relu:
    case UnaryKind::relu6:
    case UnaryKind::elu:
    case UnaryKind::softplus:
    case UnaryKind::silu:
    case UnaryKind::gelu:
    case UnaryKind::gelu_tanh:
      return true;
    default:
      return false;
  }
}

std::string_view to_string(UnaryKind kind) {
  return kUnary[static_cast<std::size_t>(kind)];
}
std::string_view to_string(BinaryKind kind) {
  return kBinary[static_cast<std::size_t>(kind)];
}
std::string_view to_string(CompareKind kind) {
  return kCompare[static_cast<std::size_t>(kind)];
}
std::string_view to_string(LogicalKind kind) {
  return kLogical[static_cast<std::size_t>(kind)];
}
std::string_view to_string(ReduceKind kind) {
  return kReduce[static_cast<std::size_t>(kind)];
}

std::string_view to_string(Alignment alignment) {
  return alignment == Alignment::top_left ? "top_left" : "bottom_right";
}

std::string_view to_string(SoftmaxKind kind) {
  switch (kind) {
    case SoftmaxKind::vanilla:
      return "vanilla";
    case SoftmaxKind::off_by_one:
      return "off_by_one";
    case SoftmaxKind::learnable:
      return "learnable";
  }
  return "vanilla";
}

std::string op_name(const Op& op) {
  return std::visit(Overloaded{
                        [](const Unary& unary) { return std::string{to_string(unary.kind)}; },
                        [](const UnaryGrad& grad) {
                          return std::string{to_string(grad.kind)}.append(kGradSuffix);
                        },
                        [](const Norm& norm) { return kinded(norm.kind, ""); },
                        [](const NormBackward& norm) { return kinded(norm.kind, "_backward"); },
                        [](const Binary& binary) { return std::string{to_string(binary.kind)}; },
                        [](const Compare& compare) {
                          return std::string{"compare_"}.append(to_string(compare.kind));
                        },
                        [](const Logical& logical) { return std::string{to_string(logical.kind)}; },
                        [](const Reduce& reduce) {
                          return std::string{"reduce_"}.append(to_string(reduce.kind));
                        },
                        [&op](const auto&) {
                          for (const auto& [name, plain] : plain_ops()) {
                            if (plain.index() == op.index()) return std::string{name};
                          }
                          return std::string{};
                        },
                    },
                    op);
}

std::optional<Op> op_from_name(std::string_view name) {
  for (const auto& [plain_name, plain] : plain_ops()) {
    if (plain_name == name) return plain;
  }
  for (std::size_t i = 0; i < kUnary.size(); ++i) {
    const auto kind = static_cast<UnaryKind>(i);
    if (kUnary[i] == name) return Unary{kind, default_parameter(kind)};
    if (has_gradient_op(kind) && name.ends_with(kGradSuffix) &&
        name.substr(0, name.size() - kGradSuffix.size()) == kUnary[i]) {
      return UnaryGrad{kind, default_parameter(kind)};
    }
  }
  for (std::size_t i = 0; i < kBinary.size(); ++i) {
    if (kBinary[i] == name) return Binary{static_cast<BinaryKind>(i)};
  }
  for (std::size_t i = 0; i < kLogical.size(); ++i) {
    if (kLogical[i] == name) return Logical{static_cast<LogicalKind>(i)};
  }
  if (name.starts_with("compare_")) {
    for (std::size_t i = 0; i < kCompare.size(); ++i) {
      if (kCompare[i] == name.substr(8)) return Compare{static_cast<CompareKind>(i)};
    }
  }
  if (name.starts_with("reduce_")) {
    for (std::size_t i = 0; i < kReduce.size(); ++i) {
      if (kReduce[i] == name.substr(7)) return Reduce{static_cast<ReduceKind>(i), {}, false};
    }
  }
  return std::nullopt;
}

std::vector<std::string_view> slot_names(const Op& op) {
  if (std::holds_alternative<CacheAppend>(op)) return {"cache", "fresh", "seqlen_kv", "page_table"};
  if (std::holds_alternative<ScaledMatmul>(op)) return {"a", "b", "a_scale", "b_scale"};
  if (std::holds_alternative<Norm>(op)) return {"x", "scale", "bias"};
  if (std::holds_alternative<NormBackward>(op)) return {"dy", "x", "scale", "mean", "inv_std"};
  const bool backward = std::holds_alternative<AttentionBackward>(op);
  if (!backward && !std::holds_alternative<Attention>(op)) return {};
  std::vector<std::string_view> names{"q",
                                      "k",
                                      "v",
                                      "scale",
                                      "bias",
                                      "seqlen_q",
                                      "seqlen_kv",
                                      "sink",
                                      "mask",
                                      "slopes",
                                      "cu_seqlens_q",
                                      "cu_seqlens_kv",
                                      "cu_seqlens_q_padded",
                                      "cu_seqlens_kv_padded",
                                      "sequences",
                                      "page_table_k",
                                      "page_table_v",
                                      "seed",
                                      "offset",
                                      "dropout_mask"};
  if (backward) names.insert(names.end(), {"o", "do", "stats"});
  return names;
}

std::vector<std::string_view> result_names(const Op& op) {
  if (std::holds_alternative<Attention>(op)) return {"o", "stats", "max_logit", "dropped"};
  if (std::holds_alternative<AttentionBackward>(op)) return {"dq", "dk", "dv", "dbias", "dsink"};
  if (std::holds_alternative<Norm>(op)) return {"y", "mean", "inv_std"};
  if (std::holds_alternative<NormBackward>(op)) return {"dx", "dscale", "dbias"};
  return {};
}

std::vector<std::string> all_op_names() {
  std::vector<std::string> names;
  for (const auto& [name, op] : plain_ops()) names.emplace_back(name);
  for (std::size_t i = 0; i < kUnary.size(); ++i) {
    names.emplace_back(kUnary[i]);
    if (has_gradient_op(static_cast<UnaryKind>(i))) {
      names.push_back(std::string{kUnary[i]}.append(kGradSuffix));
    }
  }
  for (const auto name : kBinary) names.emplace_back(name);
  for (const auto name : kCompare) names.push_back(std::string{"compare_"}.append(name));
  for (const auto name : kLogical) names.emplace_back(name);
  for (const auto name : kReduce) names.push_back(std::string{"reduce_"}.append(name));
  return names;
}

}  // namespace lawson::ir
