// Attention cases by hand: what broke somebody's kernel once.
#include <fmt/ranges.h>

#include "base/dims.h"
#include "cases/cases.h"

namespace lawson::cases {
namespace {

Json base(const std::string& dtype, std::int64_t q, std::int64_t kv, std::int64_t d) {
  return {{"lawson", 1}, {"kind", "attention"}, {"dtype", dtype},  {"batch", 2},
          {"heads", 2},  {"seqlen_q", q},       {"seqlen_kv", kv}, {"head_dim_qk", d}};
}

using plan::InputStyle;

// Adds a spec for both passes, or for one.
class EdgeList {
 public:
  void add(const std::string& name, Json spec, InputStyle style = InputStyle::normal) {
    forward(name, spec, style);
    backward(name, std::move(spec), style);
  }
  void forward(const std::string& name, Json spec, InputStyle style = InputStyle::normal) {
    spec["pass"] = "forward";
    spec["return_stats"] = true;
    push("edge-" + name + "-forward", std::move(spec), style);
  }
  void backward(const std::string& name, Json spec, InputStyle style = InputStyle::normal) {
    spec["pass"] = "backward";
    push("edge-" + name + "-backward", std::move(spec), style);
  }
  void push(const std::string& name, Json spec, InputStyle style) {
    spec["name"] = name;
    cases_.push_back({name, std::move(spec), 11, style});
  }
  std::vector<Case> take() && { return std::move(cases_); }

 private:
  std::vector<Case> cases_;
};

void styles(EdgeList& list) {
  for (const std::string dtype : {"bf16", "f16", "f32"}) {
    for (const auto& [word, style] :
         {std::pair{"large-logits", InputStyle::large_logits},
          std::pair{"one-hot", InputStyle::one_hot}, std::pair{"denormal", InputStyle::denormal}}) {
      list.add(fmt::format("{}-{}", word, dtype), base(dtype, 64, 192, 64), style);
      Json causal = base(dtype, 128, 128, 64);
      causal["mask"] = "causal";
      list.add(fmt::format("{}-causal-{}", word, dtype), causal, style);
    }
  }
  Json cap = base("f16", 64, 64, 64);
  cap["softcap"] = 5.0;
  cap["mask"] = "causal";
  list.add("softcap-large", cap, InputStyle::large_logits);
}

void shapes(EdgeList& list) {
  for (const std::int64_t length : {1, 63, 64, 65, 127, 128, 129, 191, 192, 193}) {
    Json spec = base("bf16", length, length, 32);
    spec["mask"] = "causal";
    list.add(fmt::format("tile-{}", length), spec);
    list.add(fmt::format("decode-{}", length), base("bf16", 1, length, 32));
  }
  for (std::int64_t d = 8; d <= 512; d += 8) {
    list.add(fmt::format("head-dim-{}", d), base("bf16", 9, 11, d));
  }
  for (const std::int64_t d : {1, 3, 17, 63}) {
    list.add(fmt::format("odd-head-dim-{}", d), base("f32", 19, 23, d));
  }
  Json mla = base("bf16", 48, 48, 192);
  mla["head_dim_v"] = 128;
  mla["mask"] = "causal";
  list.add("mla-192-128", mla);
  Json absorbed = base("bf16", 1, 80, 576);
  absorbed["head_dim_v"] = 512;
  absorbed["heads"] = 8;
  absorbed["kv_heads"] = 1;
  list.add("mla-576-512", absorbed);
  Json strided = base("bf16", 16, 16, 32);
  strided["strides"] = {{"q", {16 * 4096, 32, 4096, 1}},
                        {"k", {32, 64, 100000, 1}},
                        {"o", {65536 * 16, 48, 65536, 1}}};
  list.add("huge-strides", strided);
  list.add("no-keys", base("f32", 16, 0, 32));
  list.add("no-queries", base("f32", 0, 16, 32));
  Json zero = base("f32", 16, 16, 32);
  zero["batch"] = 0;
  list.add("no-batch", zero);
  Json heads = base("bf16", 40, 40, 16);  // slopes for a head count that is no power of two
  heads["heads"] = 12;
  heads["kv_heads"] = 4;
  heads["bias"] = "alibi";
  heads["mask"] = "causal";
  list.add("alibi-12-heads", heads);
}

// Rows that see nothing: for want of columns, of keys, or by an explicit mask.
void masked_rows(EdgeList& list) {
  for (const char* softmax : {"vanilla", "off_by_one", "learnable"}) {
    // More queries than keys: bottom-right alignment leaves the first rows without any column.
    Json rows = base("f32", 65, 33, 16);
    rows["mask"] = "causal_bottom_right";
    rows["softmax"] = softmax;
    list.add(fmt::format("masked-rows-{}", softmax), rows);
    Json empty = base("bf16", 17, 31, 16);
    empty["mask"] = "padding_causal_bottom_right";
    empty["softmax"] = softmax;
    empty["batch"] = 4;
    empty["seqlens_q"] = {0, 17, 5, 9};
    empty["seqlens_kv"] = {31, 0, 7, 3};
    list.add(fmt::format("empty-sequences-{}", softmax), empty);
    for (const char* dtype : {"bool", "bf16", "f32"}) {
      Json explicit_mask = base("bf16", 70, 66, 32);
      explicit_mask["softmax"] = softmax;
      explicit_mask["attn_mask"] = {{"dtype", dtype}};
      list.add(fmt::format("masked-rows-{}-{}", dtype, softmax), explicit_mask,
               InputStyle::masked_rows);
    }
  }
}

// Windows are inclusive, and their bounds do not depend on each other.
void windows(EdgeList& list) {
  for (const std::string mask : {"none", "padding", "causal", "padding_causal",
                                 "causal_bottom_right", "padding_causal_bottom_right"}) {
    for (const auto& [left, right] : {std::pair{3, 0}, std::pair{0, 0}, std::pair{3, 5},
                                      std::pair{-1, 2}, std::pair{4, -1}, std::pair{-1, 0}}) {
      Json spec = base("bf16", 21, 26, 8);
      spec["mask"] = mask;
      spec["window"] = {left, right};
      if (mask.starts_with("padding")) {
        spec["seqlens_q"] = {21, 13};
        spec["seqlens_kv"] = {17, 26};
      }
      list.add(fmt::format("defect-2-window-{}-{}-{}", left, right, mask), spec);
    }
  }
  for (const std::int64_t left : {1023, 1024, 1025}) {
    Json spec = base("bf16", 1030, 1030, 8);
    spec["batch"] = 1;
    spec["heads"] = 1;
    spec["window"] = {left, 0};
    list.add(fmt::format("defect-3-window-{}", left), spec);
  }
}

// Biases and masks that are repeated, and the gradient of what was asked for only.
void biases(EdgeList& list) {
  const std::vector<Dims> broadcasts{{3, 1, 1, 34},  {3, 4, 30, 34}, {1, 4, 30, 34}, {3, 1, 30, 34},
                                     {1, 1, 30, 34}, {1, 4, 1, 34},  {3, 4, 30, 1}};
  for (const Dims& shape : broadcasts) {
    Json spec = base("bf16", 30, 34, 32);
    spec["batch"] = 3;
    spec["heads"] = 4;
    const std::string text = fmt::format("{}", fmt::join(shape, "-"));
    Json mask = spec;
    mask["attn_mask"] = {{"dtype", "bool"}, {"shape", shape}};
    list.add("defect-4-mask-" + text, mask);
    for (const char* kind : {"post_scale", "pre_scale"}) {
      Json bias = spec;
      bias["bias"] = kind;
      bias["bias_shape"] = shape;
      list.forward(fmt::format("defect-4-{}-{}", kind, text), bias);
      bias["bias_grad"] = true;
      list.backward(fmt::format("defect-5-{}-{}", kind, text), bias);
    }
  }
  Json bias = base("bf16", 30, 34, 32);
  bias["bias"] = "post_scale";
  bias["attn_mask"] = {{"dtype", "bool"}};
  list.backward("defect-6-no-dbias", bias);
}

// Lengths and gaps, with NaN in what nobody has.
void sequences(EdgeList& list) {
  for (const auto& [word, style] :
       {std::pair{"", InputStyle::normal}, std::pair{"-poisoned", InputStyle::poisoned}}) {
    Json padded = base("bf16", 40, 70, 64);
    padded["mask"] = "padding";
    padded["batch"] = 3;
    padded["seqlens_q"] = {40, 7, 33};
    padded["seqlens_kv"] = {5, 70, 64};
    list.add(fmt::format("defect-18-lengths{}", word), padded, style);
    for (const char* layout : {"bshd_bs2hd", "bshd_bsh2d", "thd_t2hd", "thd_th2d"}) {
      Json grouped = base("bf16", 33, 47, 64);
      grouped["heads"] = 8;
      grouped["kv_heads"] = 2;
      grouped["layout"] = layout;
      if (layout[0] == 't') grouped["seqlens_kv"] = {47, 20};
      if (style == InputStyle::poisoned && layout[0] != 't') continue;
      list.add(fmt::format("defect-19-{}{}", layout, word), grouped, style);
    }
    for (const char* mask : {"none", "causal", "padding_causal_bottom_right"}) {
      Json gaps = base("bf16", 12, 12, 64);
      gaps["layout"] = "thd";
      gaps["mask"] = mask;
      gaps["batch"] = 6;
      gaps["seqlens_q"] = gaps["seqlens_kv"] = {9, 8, 8, 12, 8, 12};
      gaps["seqlens_q_padded"] = gaps["seqlens_kv_padded"] = {12, 8, 8, 12, 8, 12};
      list.add(fmt::format("defect-20-gaps-{}{}", mask, word), gaps, style);
    }
    Json example = base("bf16", 2, 2, 16);  // memory [a,P,b,b,c,P,P,d,d]
    example["layout"] = "thd";
    example["batch"] = 4;
    example["seqlens_q"] = example["seqlens_kv"] = {1, 2, 1, 2};
    example["seqlens_q_padded"] = example["seqlens_kv_padded"] = {2, 2, 3, 2};
    list.add(fmt::format("cu-seqlens-example{}", word), example, style);
    Json paged = base("bf16", 5, 50, 64);  // sequences that end in, on and before a page's edge
    paged["batch"] = 4;
    paged["paged"] = {{"page_size_k", 16}, {"page_size_v", 32}};
    paged["seqlens_q"] = {5, 1, 3, 5};
    paged["seqlens_kv"] = {50, 16, 31, 0};
    paged["mask"] = "padding_causal_bottom_right";
    list.forward(fmt::format("paged-edges{}", word), paged, style);
    paged["paged"] = {{"page_size_k", 16}};
    paged["append"] = 3;
    paged["seqlens_kv"] = {18, 16, 2, 33};  // across a page's edge; fewer than were appended
    list.forward(fmt::format("append-pages{}", word), paged, style);
    Json append = base("bf16", 1, 40, 32);
    append["mask"] = "padding";
    append["append"] = 1;
    append["seqlens_kv"] = {40, 9};
    list.forward(fmt::format("append-dense{}", word), append, style);
  }
}

// S mod 128 = 64 with a log-sum-exp below -88.7 (pytorch#196678), and its neighbours.
void nan_table(EdgeList& list) {
  for (const std::int64_t s : {128, 192, 256, 320, 448}) {
    for (const std::int64_t d : {64, 128}) {
      for (const std::string mask : {"none", "bool", "float"}) {
        for (const bool shifted : {false, true}) {
          Json spec = base("bf16", s, s, d);
          spec["pass"] = "backward";
          spec["batch"] = 1;
          spec["heads"] = 1;
          spec["layout"] = "bhsd";
          if (mask != "none") {
            spec["attn_mask"] = {{"dtype", mask == "bool" ? "bool" : "bf16"}};
          }
          const InputStyle style = !shifted          ? InputStyle::normal
                                   : mask == "float" ? InputStyle::low_mask
                                                     : InputStyle::large_logits;
          list.push(fmt::format("nan-table-{}-d{}-{}{}", s, d, mask, shifted ? "-shifted" : ""),
                    spec, style);
        }
      }
    }
  }
}

}  // namespace

std::vector<Case> attention_edge_cases() {
  EdgeList list;
  styles(list);
  shapes(list);
  masked_rows(list);
  windows(list);
  biases(list);
  sequences(list);
  nan_table(list);
  return std::move(list).take();
}

}  // namespace lawson::cases
