#include <algorithm>
#include <array>

#include "front/neighbours_list.h"

namespace lawson::front {
namespace {

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

bool is_bottom_right(const std::string& mask) {
  return mask.ends_with("bottom_right");
}
bool is_causal(const std::string& mask) {
  return mask.find("causal") != std::string::npos;
}

// A change of sizes makes given strides meaningless; bias dims that were full stay full.
void set_size(Json& document, const char* field, std::int64_t value, std::size_t bias_dim) {
  const Json old = document[field];
  document[field] = value;
  document.erase("strides");
  if (bias_dim < 4 && document.contains("bias_shape") && document["bias_shape"][bias_dim] == old &&
      old != 1) {
    document["bias_shape"][bias_dim] = value;
  }
}

constexpr std::size_t kNoBiasDim = 4;

class AttentionNeighbours {
 public:
  AttentionNeighbours(const AttentionSpec& spec, NeighbourList& list) : s_{spec}, list_{list} {}

  void all() {
    equal_masks();
    padded_head_dims();
    padded_lengths();
    equal_bias();
    repeated_heads();
    other_splits();
    layout();
    demands();
    mask_and_window();
    features();
    dtypes();
    smaller_sizes();
    passes();
  }

 private:
  // Masks and windows that are written in one way and could be in another.
  void equal_masks() {
    const bool padding = s_.mask.starts_with("padding");
    if (is_bottom_right(s_.mask) && !padding) {
      if (s_.seqlen_q == s_.seqlen_kv) {
        list_.exact("mask", "mask causal_bottom_right -> causal (the same for equal lengths)",
                    [](Json& d) { d["mask"] = "causal"; });
      }
      if (s_.seqlen_q == 1 && s_.window_left == -1) {
        list_.exact("mask",
                    "mask causal_bottom_right -> none (one query row sees every column anyway)",
                    [](Json& d) {
                      d["mask"] = "none";
                      d.erase("window");  // a right bound that causal overrode would come back
                    });
      }
    }
    const bool bottom = is_bottom_right(s_.mask);
    const std::int64_t last_row = bottom ? s_.seqlen_kv - 1 : s_.seqlen_q - 1;
    if (!padding && s_.window_left > 0 && s_.window_left >= last_row &&
        (s_.window_right == -1 || is_causal(s_.mask))) {
      list_.exact("window",
                  fmt::format("window [{}, {}] -> none (it reaches over the whole sequence)",
                              s_.window_left, s_.window_right),
                  [](Json& d) {
                    d["window"] = {-1, -1};
                  });
    }
    if (s_.window_left != -1 && s_.window_right == 0 &&
        (s_.mask == "none" || s_.mask == "padding")) {
      const std::string causal = padding ? "padding_causal" : "causal";
      list_.exact("mask",
                  fmt::format("mask {} -> {} (a window that ends at the diagonal is causal)",
                              s_.mask, causal),
                  [causal](Json& d) { d["mask"] = causal; });
    }
  }

  void padded_head_dims() {
    for (const std::int64_t multiple : {8, 16, 32, 64, 128}) {
      head_dims(round_up(s_.head_dim_qk, multiple), round_up(s_.head_dim_v, multiple));
    }
    const std::int64_t larger = std::max(s_.head_dim_qk, s_.head_dim_v);
    head_dims(larger, larger);
    head_dims(round_up(larger, 64), round_up(larger, 64));
  }

  void head_dims(std::int64_t qk, std::int64_t v) {
    if (qk == s_.head_dim_qk && v == s_.head_dim_v) return;
    const auto named = [](const char* field, std::int64_t from, std::int64_t to) {
      return from == to ? std::string{} : fmt::format("{} {} -> {}", field, from, to);
    };
    const std::string change_qk = named("head_dim_qk", s_.head_dim_qk, qk);
    const std::string change_v = named("head_dim_v", s_.head_dim_v, v);
    list_.exact(change_qk.empty() ? "head_dim_v" : "head_dim_qk",
                fmt::format("{}{}{} (zero padding keeps the result; the scale stays {:.6g})",
                            change_qk, change_qk.empty() || change_v.empty() ? "" : ", ", change_v,
                            s_.scale.value_or(1 / std::sqrt(static_cast<double>(s_.head_dim_qk)))),
                [qk, v](Json& d) {
                  set_size(d, "head_dim_qk", qk, kNoBiasDim);
                  set_size(d, "head_dim_v", v, kNoBiasDim);
                });
  }

  // Longer sequences whose true lengths are given: the added rows and columns are masked.
  void padded_lengths() {
    for (const std::int64_t multiple : {64, 128}) {
      const std::int64_t q = s_.seqlen_q == 1 ? 1 : round_up(s_.seqlen_q, multiple);
      const std::int64_t kv = round_up(s_.seqlen_kv, multiple);
      if (q == s_.seqlen_q && kv == s_.seqlen_kv) continue;
      const bool padding = s_.mask.starts_with("padding");
      const std::string mask = padding             ? s_.mask
                               : s_.mask == "none" ? "padding"
                                                   : "padding_" + s_.mask;
      const Dims lengths_q =
          s_.seqlens_q.empty() && !padding
              ? Dims(static_cast<std::size_t>(std::min<std::int64_t>(s_.batch, 1 << 16)),
                     s_.seqlen_q)
              : s_.seqlens_q;
      const Dims lengths_kv =
          s_.seqlens_kv.empty() && !padding ? Dims(lengths_q.size(), s_.seqlen_kv) : s_.seqlens_kv;
      list_.exact("seqlen_q",
                  fmt::format("seqlen_q {} -> {}, seqlen_kv {} -> {} with mask {} (padding that is "
                              "masked keeps the result)",
                              s_.seqlen_q, q, s_.seqlen_kv, kv, mask),
                  [q, kv, mask, lengths_q, lengths_kv](Json& d) {
                    set_size(d, "seqlen_q", q, 2);
                    set_size(d, "seqlen_kv", kv, 3);
                    d["mask"] = mask;
                    if (!lengths_q.empty()) d["seqlens_q"] = lengths_q;
                    if (!lengths_kv.empty()) d["seqlens_kv"] = lengths_kv;
                  });
    }
  }

  void equal_bias() {
    const Dims full{s_.batch, s_.heads, s_.seqlen_q, s_.seqlen_kv};
    if (s_.bias == BiasKind::alibi) {
      list_.exact(
          "bias", "bias alibi -> post_scale (the slopes written out as a bias tensor)",
          [full, own = s_.mask.starts_with("padding") && is_bottom_right(s_.mask)](Json& d) {
            d["bias"] = "post_scale";
            // Bottom-right rows count from each sequence's own end.
            d["bias_shape"] = {own ? full[0] : 1, full[1], full[2], full[3]};
            d.erase("alibi_slopes");
          });
    }
    if (s_.bias == BiasKind::pre_scale) {
      list_.exact("bias", "bias pre_scale -> post_scale (the bias multiplied by the scale before)",
                  [](Json& d) { d["bias"] = "post_scale"; });
    }
    if (s_.bias == BiasKind::post_scale || s_.bias == BiasKind::pre_scale) {
      for (const Dims& shape : {Dims{s_.bias_shape[0], s_.bias_shape[1], full[2], full[3]},
                                Dims{s_.bias_shape[0], full[1], full[2], full[3]},
                                Dims{1, full[1], full[2], full[3]}, full}) {
        if (shape == s_.bias_shape || broadcast_shape(shape, s_.bias_shape) != shape) continue;
        list_.exact("bias_shape",
                    fmt::format("bias_shape {} -> {} (broadcast in memory)",
                                to_string(s_.bias_shape), to_string(shape)),
                    [shape](Json& d) { d["bias_shape"] = shape; });
      }
      if (s_.bias_dtype && *s_.bias_dtype != s_.dtype) {
        list_.add(
            "bias_dtype",
            fmt::format("bias_dtype {} -> {}", to_string(*s_.bias_dtype), to_string(s_.dtype)),
            [dtype = s_.dtype](Json& d) { d["bias_dtype"] = to_string(dtype); });
      }
      if (s_.bias_grad) {
        list_.add("bias_grad", "bias_grad true -> false (a bias that is not trained)",
                  [](Json& d) { d.erase("bias_grad"); });
      }
    }
  }

  void repeated_heads() {
    if (s_.kv_heads == s_.heads) return;
    list_.exact("kv_heads",
                fmt::format("kv_heads {} -> {} (every key and value head repeated {} times)",
                            s_.kv_heads, s_.heads, s_.heads / s_.kv_heads),
                [heads = s_.heads](Json& d) {
                  d["kv_heads"] = heads;
                  d.erase("strides");
                });
  }

  void other_splits() {
    if (!s_.context_parallel) return;
    constexpr std::array kWords{"ring", "all_gather", "all_to_all"};
    const char* own = kWords.at(static_cast<std::size_t>(s_.context_parallel->strategy));
    for (const char* other : kWords) {
      if (other == own) continue;
      list_.exact("context_parallel", fmt::format("context_parallel {} -> {}", own, other),
                  [other](Json& d) { d["context_parallel"]["strategy"] = other; });
    }
  }

  void layout() {
    if (!s_.strides.empty()) {
      list_.exact("strides", "strides as the layout says (strided tensors copied before)",
                  [](Json& d) { d.erase("strides"); });
    }
    for (const char* layout : {"bshd", "bhsd", "sbhd"}) {
      if (s_.layout == layout) continue;
      const bool ragged = s_.layout.find('t') != std::string::npos;
      const bool padding = s_.mask.starts_with("padding");
      list_.exact("layout",
                  fmt::format("layout {} -> {} (the tensors copied{})", s_.layout, layout,
                              ragged ? " to padded ones" : ""),
                  [layout, ragged, padding](Json& d) {
                    d["layout"] = layout;
                    d.erase("strides");
                    if (!ragged) return;
                    for (const char* field :
                         {"total_q", "total_kv", "seqlens_q_padded", "seqlens_kv_padded"}) {
                      d.erase(field);
                    }
                    if (!padding) {
                      const auto mask = d["mask"].get<std::string>();
                      d["mask"] = mask == "none" ? "padding" : "padding_" + mask;
                    }
                  });
    }
  }

  // What is asked for besides the result.
  void demands() {
    if (s_.deterministic) {
      list_.add("deterministic", "deterministic true -> false",
                [](Json& d) { d["deterministic"] = false; });
    }
    if (s_.return_max_logit) {
      list_.add("return_max_logit", "return_max_logit true -> false",
                [](Json& d) { d["return_max_logit"] = false; });
    }
    if (s_.return_stats && s_.pass == Pass::forward) {
      list_.add("return_stats", "return_stats true -> false",
                [](Json& d) { d["return_stats"] = false; });
    }
    if (s_.output_dtype && *s_.output_dtype != s_.dtype) {
      list_.add(
          "output_dtype",
          fmt::format("output_dtype {} -> {}", to_string(*s_.output_dtype), to_string(s_.dtype)),
          [](Json& d) { d.erase("output_dtype"); });
    }
  }

  void mask_and_window() {
    if (s_.window_left != -1 || (s_.window_right != -1 && !is_causal(s_.mask))) {
      list_.add("window", fmt::format("window [{}, {}] -> none", s_.window_left, s_.window_right),
                [](Json& d) {
                  d["window"] = {-1, -1};
                });
      if (s_.window_right > 0 && !is_causal(s_.mask)) {
        const std::string causal = s_.mask == "padding" ? "padding_causal" : "causal";
        list_.add("window",
                  fmt::format("window [{0}, {1}] -> [{0}, 0] with mask {2}", s_.window_left,
                              s_.window_right, causal),
                  [left = s_.window_left, causal](Json& d) {
                    d["window"] = {left, 0};
                    d["mask"] = causal;
                  });
      }
    }
    std::vector<std::string> masks;
    if (is_bottom_right(s_.mask)) {
      masks.push_back(s_.mask.substr(0, s_.mask.size() - std::string{"_bottom_right"}.size()));
    }
    if (s_.mask.starts_with("padding_")) {
      masks.push_back(s_.mask.substr(std::string{"padding_"}.size()));
      masks.emplace_back("padding");
    }
    for (const char* mask : {"causal", "none"}) {
      if (s_.mask != mask) masks.emplace_back(mask);
    }
    for (const std::string& mask : masks) {
      list_.add("mask", fmt::format("mask {} -> {}", s_.mask, mask), [mask](Json& d) {
        d["mask"] = mask;
        if (!mask.starts_with("padding")) {
          d.erase("seqlens_q");
          d.erase("seqlens_kv");
        }
      });
    }
  }

  void features() {
    if (s_.bias != BiasKind::none) {
      list_.add("bias", "without the bias", [](Json& d) {
        d["bias"] = "none";
        for (const char* field : {"bias_shape", "bias_dtype", "bias_grad", "alibi_slopes"}) {
          d.erase(field);
        }
      });
    }
    if (s_.softcap != 0) {
      list_.add("softcap", fmt::format("softcap {} -> 0 (none)", s_.softcap),
                [](Json& d) { d["softcap"] = 0; });
    }
    if (s_.softmax != ir::SoftmaxKind::vanilla) {
      list_.add("softmax", fmt::format("softmax {} -> vanilla", ir::to_string(s_.softmax)),
                [](Json& d) { d["softmax"] = "vanilla"; });
    }
    if (s_.dropout > 0) {
      list_.add("dropout", fmt::format("dropout {} -> 0", s_.dropout),
                [](Json& d) { d["dropout"] = 0; });
    }
    if (s_.cuda_graph) {
      list_.add("cuda_graph", "cuda_graph true -> false", [](Json& d) { d["cuda_graph"] = false; });
    }
    for (const auto& [field, set] :
         {std::pair{"paged", s_.paged.has_value()}, std::pair{"append", s_.append > 0},
          std::pair{"attn_mask", s_.attn_mask.has_value()},
          std::pair{"alibi_slopes", s_.alibi_slopes},
          std::pair{"return_max_logit", s_.return_max_logit},
          std::pair{"return_dropout_mask", s_.return_dropout_mask},
          std::pair{"context_parallel", s_.context_parallel.has_value()},
          std::pair{"fp8", s_.fp8 != Fp8Recipe::none}}) {
      if (!set) continue;
      list_.add(field, fmt::format("without {}", field),
                [name = std::string{field}](Json& d) { d.erase(name); });
    }
  }

  void dtypes() {
    for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
      if (dtype == s_.dtype) continue;
      // f32 is nearer than 16 bits only to what is wider than 16 bits.
      if (dtype == DType::f32 && bit_width(s_.dtype) <= 16) continue;
      list_.add("dtype", fmt::format("dtype {} -> {}", to_string(s_.dtype), to_string(dtype)),
                [dtype](Json& d) {
                  d["dtype"] = to_string(dtype);
                  d.erase("output_dtype");
                  d.erase("bias_dtype");
                  d.erase("fp8");
                });
    }
  }

  void smaller_sizes() {
    for (const std::int64_t limit : {256, 192, 128, 64}) {
      const std::int64_t qk = std::min(s_.head_dim_qk, limit);
      const std::int64_t v = std::min(s_.head_dim_v, limit);
      if (qk == s_.head_dim_qk && v == s_.head_dim_v) continue;
      list_.add(qk != s_.head_dim_qk ? "head_dim_qk" : "head_dim_v",
                fmt::format("head_dim_qk {} -> {}, head_dim_v {} -> {} (another model)",
                            s_.head_dim_qk, qk, s_.head_dim_v, v),
                [qk, v](Json& d) {
                  set_size(d, "head_dim_qk", qk, kNoBiasDim);
                  set_size(d, "head_dim_v", v, kNoBiasDim);
                });
    }
    if (s_.seqlen_q == 1) {
      list_.add("seqlen_q", "seqlen_q 1 -> 2 (two query rows at once)",
                [](Json& d) { set_size(d, "seqlen_q", 2, 2); });
    }
    if (s_.seqlen_q > s_.seqlen_kv && s_.seqlen_kv > 0) {
      list_.add("seqlen_q",
                fmt::format("seqlen_q {} -> {} (as long as the keys)", s_.seqlen_q, s_.seqlen_kv),
                [kv = s_.seqlen_kv](Json& d) { set_size(d, "seqlen_q", kv, 2); });
    }
    if (s_.seqlen_q != s_.seqlen_kv && s_.seqlen_q > 1) {
      list_.add(
          "seqlen_kv",
          fmt::format("seqlen_kv {} -> {} (as long as the queries)", s_.seqlen_kv, s_.seqlen_q),
          [q = s_.seqlen_q](Json& d) { set_size(d, "seqlen_kv", q, 3); });
    }
  }

  void passes() {
    if (s_.pass == Pass::forward) return;
    list_.add("pass",
              fmt::format("pass {} -> forward (inference only)",
                          s_.pass == Pass::backward ? "backward" : "training"),
              [](Json& d) {
                d["pass"] = "forward";
                d.erase("bias_grad");
              });
  }

  const AttentionSpec& s_;
  NeighbourList& list_;
};

}  // namespace

void add_attention_neighbours(const AttentionSpec& spec, NeighbourList& list) {
  AttentionNeighbours(spec, list).all();
}

}  // namespace lawson::front
