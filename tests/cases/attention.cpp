// Attention cases, as spec documents.
#include <algorithm>

#include "cases/cases.h"
#include "cases/dice.h"

namespace lawson::cases {
namespace {

// Keeps one case near a tenth of a second in the reference engine.
constexpr std::int64_t kMostProducts = std::int64_t{1} << 23;

std::int64_t draw_length(Dice& dice) {
  if (dice.chance(15)) return dice.pick<std::int64_t>({1, 2, 3, 5});
  if (dice.chance(25)) return dice.pick<std::int64_t>({63, 64, 65, 127, 128, 129, 192});
  return 1 + dice.below(100);
}

std::int64_t draw_head_dim(Dice& dice, Profile profile) {
  if (profile == Profile::any && dice.chance(15)) return 1 + dice.below(40);
  if (dice.chance(50)) return dice.pick<std::int64_t>({32, 64, 128});
  return 8 * (1 + dice.below(20));
}

// Strides in [b,h,s,d] order with room between heads and rows.
Dims padded_strides(Dice& dice, std::int64_t b, std::int64_t h, std::int64_t s, std::int64_t d) {
  const std::int64_t row = d + 8 * dice.below(3);
  if (dice.chance(50)) {
    const std::int64_t head = row * s + 8 * dice.below(3);
    return {head * h, head, row, 1};
  }
  (void)b;
  const std::int64_t step = row * h + 8 * dice.below(3);
  return {step * s, row, step, 1};
}

// Empty sequences are for engines that get them right: cuDNN does not (engine/cudnn/defects.cpp).
void draw_mask(Dice& dice, Json& spec, Profile profile) {
  const std::int64_t shortest = profile == Profile::gpu ? 1 : 0;
  const std::string mask =
      dice.pick<std::string>({"none", "none", "causal", "causal", "padding", "padding_causal",
                              "causal_bottom_right", "padding_causal_bottom_right"});
  if (mask != "none") spec["mask"] = mask;
  if (dice.chance(25)) {
    const std::int64_t kv = spec["seqlen_kv"];
    const std::int64_t left = dice.pick<std::int64_t>({-1, 0, 1, 5, kv / 2});
    const bool causal = mask.find("causal") != std::string::npos;
    const std::int64_t right = causal ? 0 : dice.pick<std::int64_t>({-1, 0, 1, 7});
    spec["window"] = {left, right};
  }
  if (mask.starts_with("padding") && dice.chance(70)) {
    for (const auto& [field, full] :
         {std::pair{"seqlens_q", "seqlen_q"}, std::pair{"seqlens_kv", "seqlen_kv"}}) {
      const std::int64_t limit = spec[full];
      Json lengths = Json::array();
      for (std::int64_t b = 0; b < spec["batch"].get<std::int64_t>(); ++b) {
        const std::int64_t drawn = dice.chance(20)   ? limit
                                   : dice.chance(10) ? 0
                                                     : dice.below(limit + 1);
        lengths.push_back(std::max(drawn, shortest));
      }
      spec[field] = lengths;
    }
  }
}

void draw_scores(Dice& dice, Json& spec, Profile profile) {
  const std::int64_t bias = dice.below(10);
  if (bias < 2) {
    spec["bias"] = "post_scale";
    spec["bias_shape"] = {
        dice.chance(50) ? std::int64_t{1} : spec["batch"].get<std::int64_t>(),
        dice.chance(50) ? std::int64_t{1} : spec["heads"].get<std::int64_t>(),
        dice.chance(20) ? std::int64_t{1} : spec["seqlen_q"].get<std::int64_t>(),
        dice.chance(10) ? std::int64_t{1} : spec["seqlen_kv"].get<std::int64_t>()};
    if (spec["pass"] == "backward" && dice.chance(60)) spec["bias_grad"] = true;
    if (profile == Profile::any && dice.chance(30)) spec["bias_dtype"] = "f32";
  } else if (bias == 2) {
    spec["bias"] = "alibi";
  }
  if (dice.chance(25)) spec["softmax"] = dice.pick<std::string>({"off_by_one", "learnable"});
  if (dice.chance(15)) spec["softcap"] = dice.pick<double>({1.0, 5.0, 30.0, 50.0});
  if (dice.chance(15)) spec["scale"] = dice.pick<double>({0.05, 0.3, 1.0});
}

void draw_layout(Dice& dice, Json& spec) {
  spec["layout"] = dice.pick<std::string>(
      {"bshd", "bshd", "sbhd", "bhsd", "sbhd_bshd_bshd", "bshd_sbhd_sbhd", "bhsd_bshd_sbhd"});
  if (!dice.chance(20)) return;
  const auto get = [&](const char* field) { return spec[field].get<std::int64_t>(); };
  const bool backward = spec["pass"] == "backward";
  Json strides = Json::object();
  for (const std::string tensor : {"q", "k", "v", "o", "do", "dq", "dk", "dv"}) {
    if (!backward && tensor[0] == 'd') continue;
    if (!dice.chance(60)) continue;
    const char like = tensor.back();
    const bool kv = like == 'k' || like == 'v';
    strides[tensor] =
        padded_strides(dice, get("batch"), kv ? get("kv_heads") : get("heads"),
                       kv ? get("seqlen_kv") : get("seqlen_q"),
                       like == 'q' || like == 'k' ? get("head_dim_qk") : get("head_dim_v"));
  }
  if (!strides.empty()) spec["strides"] = strides;
}

Case draw_attention(std::uint64_t seed, int index, Profile profile) {
  Dice dice(seed * 1000003 + static_cast<std::uint64_t>(index));
  Json spec{{"lawson", 1}, {"kind", "attention"}};
  const std::string name = fmt::format("attention-{}", index);
  spec["name"] = name;
  spec["pass"] = dice.chance(55) ? "forward" : "backward";
  spec["dtype"] = profile == Profile::gpu
                      ? dice.pick<std::string>({"f16", "bf16"})
                      : dice.pick<std::string>({"f16", "bf16", "bf16", "f32", "f32", "f64"});
  spec["batch"] = 1 + dice.below(3);
  const std::int64_t kv_heads = dice.pick<std::int64_t>({1, 1, 2, 3});
  spec["kv_heads"] = kv_heads;
  spec["heads"] = kv_heads * dice.pick<std::int64_t>({1, 1, 2, 4});
  std::int64_t q = draw_length(dice);
  std::int64_t kv = dice.chance(50) ? q : draw_length(dice);
  const std::int64_t d = draw_head_dim(dice, profile);
  const std::int64_t dv = dice.chance(70) ? d : draw_head_dim(dice, profile);
  const std::int64_t groups =
      spec["batch"].get<std::int64_t>() * spec["heads"].get<std::int64_t>() * (d + dv);
  while (groups * q * kv > kMostProducts) {
    (q > kv ? q : kv) /= 2;
  }
  spec["seqlen_q"] = q;
  spec["seqlen_kv"] = kv;
  spec["head_dim_qk"] = d;
  spec["head_dim_v"] = dv;
  draw_mask(dice, spec, profile);
  draw_scores(dice, spec, profile);
  draw_layout(dice, spec);
  if (spec["pass"] == "forward" && dice.chance(60)) spec["return_stats"] = true;
  if (spec["pass"] == "backward" && dice.chance(20)) spec["deterministic"] = true;
  return {name, spec, seed + static_cast<std::uint64_t>(index), plan::InputStyle::normal};
}

Json base(const std::string& pass, const std::string& dtype, std::int64_t q, std::int64_t kv,
          std::int64_t d) {
  return {{"lawson", 1}, {"kind", "attention"}, {"pass", pass},    {"dtype", dtype},  {"batch", 2},
          {"heads", 2},  {"seqlen_q", q},       {"seqlen_kv", kv}, {"head_dim_qk", d}};
}

}  // namespace

std::vector<Case> attention_cases(std::uint64_t seed, int count, Profile profile) {
  std::vector<Case> cases;
  for (int i = 0; i < count; ++i) cases.push_back(draw_attention(seed, i, profile));
  return cases;
}

std::vector<Case> attention_edge_cases() {
  std::vector<Case> cases;
  const auto add = [&](const std::string& name, Json spec,
                       plan::InputStyle style = plan::InputStyle::normal) {
    for (const char* pass : {"forward", "backward"}) {
      Json document = spec;
      document["pass"] = pass;
      if (document["pass"] == "forward") document["return_stats"] = true;
      document["name"] = fmt::format("edge-{}-{}", name, pass);
      cases.push_back({document["name"], document, 11, style});
    }
  };
  using plan::InputStyle;
  for (const std::string dtype : {"bf16", "f16", "f32"}) {
    // Sequences that are 64 mod 128 with a log-sum-exp below -88.7: a known defect of kernels.
    for (const auto& [word, style] :
         {std::pair{"large-logits", InputStyle::large_logits},
          std::pair{"one-hot", InputStyle::one_hot}, std::pair{"denormal", InputStyle::denormal}}) {
      add(fmt::format("{}-{}", word, dtype), base("", dtype, 64, 192, 64), style);
      Json causal = base("", dtype, 128, 128, 64);
      causal["mask"] = "causal";
      add(fmt::format("{}-causal-{}", word, dtype), causal, style);
    }
  }
  for (const std::int64_t length : {1, 63, 64, 65, 127, 128, 129, 191, 192, 193}) {
    Json spec = base("", "bf16", length, length, 32);
    spec["mask"] = "causal";
    add(fmt::format("tile-{}", length), spec);
    add(fmt::format("decode-{}", length), base("", "bf16", 1, length, 32));
  }
  for (const char* softmax : {"vanilla", "off_by_one", "learnable"}) {
    // More queries than keys: bottom-right alignment leaves the first rows without any column.
    Json rows = base("", "f32", 65, 33, 16);
    rows["mask"] = "causal_bottom_right";
    rows["softmax"] = softmax;
    add(fmt::format("masked-rows-{}", softmax), rows);
    Json empty = base("", "bf16", 17, 31, 16);
    empty["mask"] = "padding_causal_bottom_right";
    empty["softmax"] = softmax;
    empty["batch"] = 4;
    empty["seqlens_q"] = {0, 17, 5, 9};
    empty["seqlens_kv"] = {31, 0, 7, 3};
    add(fmt::format("empty-sequences-{}", softmax), empty);
  }
  {
    Json window = base("", "bf16", 96, 96, 32);  // [L, 0] without causal must not see the future
    window["window"] = {8, 0};
    add("window-no-future", window);
    window["window"] = {0, 0};
    add("window-diagonal", window);
    window["window"] = {-1, 3};
    window["mask"] = "padding";
    window["seqlens_q"] = {96, 41};
    window["seqlens_kv"] = {57, 96};
    add("window-right-padding", window);
  }
  for (const std::int64_t d : {8, 24, 40, 72, 96, 136, 192, 256, 512}) {
    add(fmt::format("head-dim-{}", d), base("", "bf16", 33, 47, d));
  }
  for (const std::int64_t d : {1, 3, 17, 63}) {
    add(fmt::format("odd-head-dim-{}", d), base("", "f32", 19, 23, d));
  }
  {
    Json mla = base("", "bf16", 48, 48, 192);
    mla["head_dim_v"] = 128;
    mla["mask"] = "causal";
    add("mla-192-128", mla);
    Json absorbed = base("", "bf16", 1, 80, 576);
    absorbed["head_dim_v"] = 512;
    absorbed["heads"] = 8;
    absorbed["kv_heads"] = 1;
    add("mla-576-512", absorbed);
    Json strided = base("", "bf16", 16, 16, 32);
    strided["strides"] = {{"q", {16 * 4096, 32, 4096, 1}},
                          {"k", {32, 64, 100000, 1}},
                          {"o", {65536 * 16, 48, 65536, 1}}};
    add("huge-strides", strided);
    Json zero = base("", "f32", 16, 0, 32);
    add("no-keys", zero);
    zero = base("", "f32", 0, 16, 32);
    add("no-queries", zero);
    zero = base("", "f32", 16, 16, 32);
    zero["batch"] = 0;
    add("no-batch", zero);
    Json heads = base("", "bf16", 40, 40, 16);  // slopes for a head count that is no power of two
    heads["heads"] = 12;
    heads["kv_heads"] = 4;
    heads["bias"] = "alibi";
    heads["mask"] = "causal";
    add("alibi-12-heads", heads);
    Json cap = base("", "f16", 64, 64, 64);
    cap["softcap"] = 5.0;
    cap["mask"] = "causal";
    add("softcap-large", cap, InputStyle::large_logits);
  }
  return cases;
}

}  // namespace lawson::cases
