#include "gpu/tables.h"

#include <algorithm>
#include <set>

namespace lawson::cases {
namespace {

bool has_zero(const Json& spec, const char* field) {
  return spec.contains(field) &&
         std::any_of(spec[field].begin(), spec[field].end(), [](const Json& n) { return n == 0; });
}

std::vector<std::string> features_of(const Case& item) {
  const Json& spec = item.spec;
  const auto text = [&](const char* field, const char* none) {
    return spec.value(field, std::string{none});
  };
  const auto number = [&](const char* field, double none) { return spec.value(field, none); };
  const double heads = number("heads", 1);
  const double kv_heads = number("kv_heads", heads);
  const double depth = number("head_dim_qk", 1);
  std::vector<std::string> features{
      "dtype " + text("dtype", "bf16"), "layout " + text("layout", "bshd"),
      "mask " + text("mask", "none"),   "softmax " + text("softmax", "vanilla"),
      "bias " + text("bias", "none"),   fmt::format("input {}", plan::to_string(item.style))};
  const auto add = [&](bool there, const std::string& word) {
    if (there) features.push_back(word);
  };
  add(kv_heads == 1 && heads > 1, "heads mqa");
  add(kv_heads > 1 && kv_heads < heads, "heads gqa");
  add(kv_heads == heads, "heads mha");
  add(depth > 256, "head_dim > 256");
  add(depth > 128 && depth <= 256, "head_dim 129-256");
  add(depth <= 128, "head_dim <= 128");
  add(number("head_dim_v", depth) != depth, "head_dim_v other");
  add(spec.contains("window"), "window");
  if (spec.contains("attn_mask")) {
    features.push_back("attn_mask " + spec["attn_mask"].value("dtype", std::string{"bool"}));
  }
  add(spec.value("bias_grad", false), "bias_grad");
  add(spec.contains("alibi_slopes"), "alibi_slopes");
  add(number("softcap", 0) > 0, "softcap");
  add(has_zero(spec, "seqlens_q") || has_zero(spec, "seqlens_kv"), "zero lengths");
  add(spec.contains("seqlens_q_padded") || spec.contains("seqlens_kv_padded"), "gaps");
  add(spec.contains("paged"), "paged");
  add(number("append", 0) > 0, "append");
  add(spec.contains("strides"), "strides");
  add(spec.value("deterministic", false), "deterministic");
  add(spec.value("return_stats", false), "stats");
  add(spec.value("return_max_logit", false), "max_logit");
  if (number("dropout", 0) > 0) {
    features.emplace_back(spec.value("dropout_mask", false)          ? "dropout mask given"
                          : spec.value("return_dropout_mask", false) ? "dropout mask dumped"
                                                                     : "dropout");
  }
  add(number("batch", 1) == 0 || number("seqlen_q", 1) == 0 || number("seqlen_kv", 1) == 0,
      "empty");
  add(number("seqlen_q", 1) > number("seqlen_kv", number("seqlen_q", 1)), "more queries");
  return features;
}

struct Tally {
  int accepted = 0, refused = 0, wrong = 0;
};

void count(const Row& row, Tally& tally) {
  ++(row.live == "supported" ? tally.accepted : tally.refused);
  if (row.executed != "ok" && !row.executed.empty()) ++tally.wrong;
}

Json to_json(const Tally& tally) {
  return {tally.accepted, tally.refused, tally.wrong};
}

}  // namespace

Json feature_table(const std::vector<Row>& rows) {
  std::map<std::string, std::map<bool, Tally>> table;
  for (const Row& row : rows) {
    if (!row.is_attention()) continue;
    for (const std::string& feature : features_of(row.item)) {
      count(row, table[feature][row.is_backward()]);
    }
  }
  Json list = Json::array();
  for (auto& [feature, passes] : table) {
    Json item{{"feature", feature}};
    for (const bool backward : {false, true}) {
      item[backward ? "backward" : "forward"] = to_json(passes[backward]);
    }
    list.push_back(std::move(item));
  }
  return list;
}

Json op_table(const std::vector<Row>& rows) {
  std::map<std::string, Tally> table;
  for (const Row& row : rows) {
    if (row.is_attention() || row.live.empty()) continue;
    std::set<std::string> names;
    for (const Json& op : row.item.spec.at("ops")) names.insert(op.at("op").get<std::string>());
    for (const std::string& name : names) count(row, table[name]);
  }
  Json list = Json::array();
  for (const auto& [name, tally] : table) {
    list.push_back({{"op", name}, {"fusions", to_json(tally)}});
  }
  return list;
}

Json reason_table(const std::vector<Row>& rows) {
  struct Entry {
    int count = 0;
    std::string example;
  };
  std::map<std::string, Entry> table;
  for (const Row& row : rows) {
    for (const Reason& reason : row.reasons) {
      Entry& entry = table[fmt::format("{} {}", reason.code, reason.field)];
      ++entry.count;
      if (entry.example.empty() || reason.message.size() < entry.example.size()) {
        entry.example = reason.message;
      }
    }
  }
  Json list = Json::array();
  for (const auto& [reason, entry] : table) {
    list.push_back({{"reason", reason}, {"count", entry.count}, {"example", entry.example}});
  }
  return list;
}

}  // namespace lawson::cases
