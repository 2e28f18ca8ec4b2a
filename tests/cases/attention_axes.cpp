#include "cases/attention_axes.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "base/dims.h"
#include "cases/dice.h"

namespace lawson::cases {
namespace {

using front::AttentionSpec;
using front::BiasKind;
using front::Pass;

// Multiply-adds of one case: a few 10 ms in the reference engine. Where a level asks for more (long
// sequences of deep heads) the second limit holds, and then lengths shrink.
constexpr std::int64_t kMostProducts = std::int64_t{1} << 21;
constexpr std::int64_t kMostOfAny = 18'000'000;
// Tokens of a ragged batch that still fit the smallest bucket.
constexpr std::int64_t kMostTokens = 1000;
// Elements that a tensor with huge strides may reach.
constexpr std::int64_t kMostReach = std::int64_t{1} << 22;

const std::vector<std::string> kBroadcasts{"1hqk", "bhqk", "b1qk", "11qk", "b11k",
                                           "1h1k", "bhq1", "11q1", "1111"};

std::vector<std::string> each(const std::string& word, const std::vector<std::string>& shapes) {
  std::vector<std::string> levels;
  for (const std::string& shape : shapes) levels.push_back(word + " " + shape);
  return levels;
}

std::vector<std::string> joined(std::initializer_list<std::vector<std::string>> lists) {
  std::vector<std::string> all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

// Reads a row's levels by the axes' names and makes the spec.
class Maker {
 public:
  Maker(const std::vector<Axis>& axes, const Row& row, std::uint64_t seed, Profile profile)
      : profile_{profile}, dice_{seed} {
    for (std::size_t i = 0; i < axes.size(); ++i) level_[axes[i].name] = axes[i].levels[row[i]];
  }

  std::optional<AttentionDraw> make() {
    pass();
    types();
    heads();
    head_dims();
    lengths();
    fit();
    layout();
    masks();
    scores();
    if (!sequences() || !style()) return std::nullopt;
    if (!drop_refused_lists()) return std::nullopt;
    if (level("strides") != "layout" && !strides()) return std::nullopt;
    if (!front::attention_graph(spec_, spec_.pass).ok()) return std::nullopt;
    return AttentionDraw{spec_, style_};
  }

 private:
  const std::string& level(const std::string& axis) const { return level_.at(axis); }
  bool is(const std::string& axis, const std::string& word) const { return level(axis) == word; }
  bool has(const std::string& axis, const std::string& part) const {
    return level(axis).find(part) != std::string::npos;
  }
  bool backward() const { return spec_.pass == Pass::backward; }

  // q, k and v: they have the same sequences.
  bool one_memory() const {
    using Packing = front::Layout::Packing;
    const auto layout = front::parse_layout(level("layout"));
    return layout->packing == Packing::qkv_s3hd || layout->packing == Packing::qkv_h3d;
  }

  void pass() {
    spec_.pass = has("pass", "backward") ? Pass::backward : Pass::forward;
    spec_.return_stats = has("pass", "stats");
    spec_.return_max_logit = has("pass", "max_logit");
    spec_.deterministic = has("pass", "deterministic");
  }

  void types() {
    spec_.dtype = *dtype_from_string(level("dtype"));
    if (!is("output", "same")) spec_.output_dtype = dtype_from_string(level("output"));
  }

  void heads() {
    spec_.batch = dice_.pick<std::int64_t>({1, 2, 2, 3, 5});
    if (is("heads", "mha")) {
      spec_.kv_heads = dice_.pick<std::int64_t>({2, 2, 3, 4});
      spec_.heads = spec_.kv_heads;
    } else if (is("heads", "gqa")) {
      spec_.kv_heads = dice_.pick<std::int64_t>({2, 2, 3});
      spec_.heads = spec_.kv_heads * dice_.pick<std::int64_t>({2, 2, 4});
    } else if (is("heads", "mqa")) {
      spec_.heads = dice_.pick<std::int64_t>({2, 4, 8});
    } else if (is("heads", "twelve")) {
      spec_.heads = spec_.kv_heads = 12;  // no power of two: for the slopes of ALiBi
    }
  }

  std::int64_t eights(std::int64_t low, std::int64_t high) {
    return low + 8 * dice_.below((high - low) / 8 + 1);
  }

  void head_dims() {
    static const std::map<std::string, std::pair<std::int64_t, std::int64_t>> ranges{
        {"16-56", {16, 56}},
        {"72-120", {72, 120}},
        {"136-248", {136, 248}},
        {"264-512", {264, 512}}};
    static const std::map<std::string, std::pair<std::int64_t, std::int64_t>> pairs{
        {"192/128", {192, 128}},
        {"576/512", {576, 512}},
        {"128/64", {128, 64}},
        {"64/96", {64, 96}}};
    const std::string& word = level("head_dim");
    if (const auto range = ranges.find(word); range != ranges.end()) {
      spec_.head_dim_qk = spec_.head_dim_v = eights(range->second.first, range->second.second);
    } else if (const auto pair = pairs.find(word); pair != pairs.end()) {
      std::tie(spec_.head_dim_qk, spec_.head_dim_v) = pair->second;
    } else if (word == "odd") {
      spec_.head_dim_qk = spec_.head_dim_v = 1 + dice_.below(70);
    } else if (word == "odd/odd") {
      spec_.head_dim_qk = 1 + dice_.below(70);
      spec_.head_dim_v = spec_.head_dim_qk + 1 + dice_.below(7);
    } else {
      spec_.head_dim_qk = spec_.head_dim_v = std::stoll(word);
    }
  }

  void lengths() {
    const std::string& word = level("length");
    std::int64_t& q = spec_.seqlen_q;
    std::int64_t& kv = spec_.seqlen_kv;
    const auto around = [&](std::int64_t edge) { return edge - 1 + dice_.below(3); };
    q = kv = 2 + dice_.below(47);
    if (word == "one") {
      q = kv = 1;
    } else if (word == "decode") {
      q = 1;
      kv = 2 + dice_.below(159);
    } else if (word == "edge 64") {
      q = kv = around(64);
    } else if (word == "edge 128") {
      q = kv = around(128);
    } else if (word == "edges 64 128") {
      q = around(64);
      kv = around(128);
    } else if (word == "64 mod 128") {
      q = kv = dice_.pick<std::int64_t>({192, 192, 320});
    } else if (word == "long") {
      q = kv = 257 + dice_.below(200);
    } else if (word == "more queries") {
      q = kv + 1 + dice_.below(60);
    } else if (word == "more keys") {
      kv = q + 1 + dice_.below(140);
    } else if (word == "empty") {
      // Lists of lengths need a batch; tensors of one memory have one length.
      const bool listed = !is("sequences", "generated");
      const std::int64_t which = listed ? 1 + dice_.below(2) : dice_.below(3);
      if (one_memory() || which == 0) {
        spec_.batch = 0;
      } else {
        (which == 1 ? q : kv) = 0;
      }
    } else if (word == "many") {
      spec_.batch = 33;
      q = kv = 2 + dice_.below(7);
    }
  }

  std::int64_t products() const {
    const std::int64_t all = spec_.batch * spec_.heads * spec_.seqlen_q * spec_.seqlen_kv *
                             (spec_.head_dim_qk + spec_.head_dim_v);
    return backward() ? all * 5 / 2 : all;
  }

  // Fewer sequences, then fewer heads of the same kind, then shorter sequences.
  void fit() {
    const std::int64_t longest = std::max(spec_.seqlen_q, spec_.seqlen_kv);
    // One sequence of length 0 would be all of a batch of 1.
    const bool listed = !is("sequences", "generated") && !is("sequences", "full");
    if (listed && spec_.batch == 1) spec_.batch = 2;
    const std::int64_t fewest_sequences = listed ? 2 : 1;
    while (spec_.batch > fewest_sequences && !is("length", "many") &&
           (products() > kMostProducts || spec_.batch * longest > kMostTokens)) {
      --spec_.batch;
    }
    const bool fixed = is("heads", "twelve") && is("length", "small");
    while (!fixed && products() > kMostProducts && spec_.heads > spec_.kv_heads * 2) {
      spec_.heads -= spec_.kv_heads;
    }
    const std::int64_t fewest = is("heads", "one") || is("heads", "mqa") ? 1 : 2;
    while (!fixed && products() > kMostProducts && spec_.kv_heads > fewest) {
      const std::int64_t group = spec_.heads / spec_.kv_heads;
      spec_.heads = --spec_.kv_heads * group;
    }
    while (products() > kMostOfAny) {
      std::int64_t& longer = spec_.seqlen_q >= spec_.seqlen_kv ? spec_.seqlen_q : spec_.seqlen_kv;
      const bool equal = spec_.seqlen_q == spec_.seqlen_kv;
      longer = is("length", "64 mod 128") ? std::max<std::int64_t>(longer - 128, 64) : longer / 2;
      if (equal) spec_.seqlen_q = spec_.seqlen_kv = longer;
      if (longer <= 64 && products() > kMostOfAny) break;
    }
  }

  void layout() {
    spec_.layout = level("layout");
    if (has("cache", "paged")) {
      const std::vector<std::int64_t> sizes = profile_ == Profile::gpu
                                                  ? std::vector<std::int64_t>{16, 32, 64, 128}
                                                  : std::vector<std::int64_t>{1, 3, 4, 7, 16, 64};
      front::PagedCache cache;
      cache.page_size_k = cache.page_size_v = dice_.pick(sizes);
      if (has("cache", "uneven")) {
        while (cache.page_size_v == cache.page_size_k) cache.page_size_v = dice_.pick(sizes);
      }
      if (dice_.chance(50)) {
        const std::int64_t smallest = std::min(cache.page_size_k, cache.page_size_v);
        cache.pages = spec_.batch * (spec_.seqlen_kv / smallest + 1) + dice_.below(5);
      }
      spec_.paged = cache;
    }
    if (has("cache", "append")) {
      spec_.append =
          1 + dice_.below(std::max<std::int64_t>(1, std::min<std::int64_t>(spec_.seqlen_kv, 5)));
    }
  }

  // "1hqk": 1 along b, full along h, sq and skv.
  Dims shape(const std::string& code) const {
    const Dims full{spec_.batch, spec_.heads, spec_.seqlen_q, spec_.seqlen_kv};
    Dims result;
    for (std::size_t i = 0; i < 4; ++i) result.push_back(code[i] == '1' ? 1 : full[i]);
    return result;
  }

  DType term_dtype() {
    return profile_ == Profile::any && dice_.chance(35) ? DType::f32 : spec_.dtype;
  }

  void masks() {
    spec_.mask = level("mask");
    const std::string& window = level("window");
    const std::int64_t left = dice_.pick<std::int64_t>({1, 5, spec_.seqlen_kv / 2, 63});
    const std::int64_t right = dice_.pick<std::int64_t>({1, 7, spec_.seqlen_kv / 3});
    if (window.starts_with("[L")) spec_.window_left = left;
    if (window.starts_with("[0")) spec_.window_left = 0;
    if (window.ends_with("R]")) spec_.window_right = right;
    if (window.ends_with(" 0]")) spec_.window_right = 0;
    if (window == "far") {
      spec_.window_left = spec_.seqlen_q + spec_.seqlen_kv;
      spec_.window_right = kMaxDim;
    }
    if (!is("attn_mask", "none")) {
      const bool boolean = has("attn_mask", "bool");
      spec_.attn_mask = front::MaskTensor{boolean ? DType::boolean : term_dtype(),
                                          shape(level("attn_mask").substr(boolean ? 5 : 4))};
    }
  }

  void scores() {
    const std::string& bias = level("bias");
    if (bias.starts_with("p")) {
      spec_.bias = bias.starts_with("pre") ? BiasKind::pre_scale : BiasKind::post_scale;
      spec_.bias_shape = shape(bias.substr(bias.find(' ') + 1));
      if (const DType dtype = term_dtype(); dtype != spec_.dtype) spec_.bias_dtype = dtype;
    } else if (bias.starts_with("alibi")) {
      spec_.bias = BiasKind::alibi;
      spec_.alibi_slopes = bias != "alibi";
      for (std::int64_t h = 0; bias == "alibi given" && h < spec_.heads; ++h) {
        spec_.alibi_slope_values.push_back(static_cast<double>(dice_.below(17) - 4) / 16);
      }
    }
    spec_.bias_grad = is("dbias", "yes");
    if (is("softmax", "off_by_one")) spec_.softmax = ir::SoftmaxKind::off_by_one;
    if (is("softmax", "learnable")) spec_.softmax = ir::SoftmaxKind::learnable;
    if (is("softcap", "small")) spec_.softcap = dice_.pick<double>({1.0, 5.0});
    if (is("softcap", "usual")) spec_.softcap = dice_.pick<double>({30.0, 50.0});
    if (!is("dropout", "none")) spec_.dropout = dice_.pick<double>({0.1, 0.1, 0.25, 0.5, 0.9});
    spec_.return_dropout_mask = is("dropout", "dumped");
    spec_.dropout_mask_input = is("dropout", "mask");
    if (is("scale", "given")) spec_.scale = dice_.pick<double>({0.05, 0.3, 1.0});
  }

  Dims drawn_lengths(std::int64_t longest, bool zeros) {
    Dims lengths;
    for (std::int64_t b = 0; b < spec_.batch; ++b) {
      lengths.push_back(dice_.chance(25) ? longest
                                         : std::min(longest, 1 + dice_.below(longest + 1)));
    }
    if (zeros && !lengths.empty()) {
      lengths[static_cast<std::size_t>(dice_.below(spec_.batch))] = 0;
      if (dice_.chance(30)) lengths.back() = 0;
    }
    return lengths;
  }

  Dims gapped(const Dims& lengths) {
    Dims padded;
    for (const std::int64_t length : lengths) padded.push_back(length + dice_.below(9));
    return padded;
  }

  bool sequences() {
    const std::string& word = level("sequences");
    if (word == "generated") {
      spec_.has_padded_offsets = dice_.chance(50);
      optional_ = {"padded_offsets"};
      wanted_ = 0;
      return true;
    }
    if (spec_.batch == 0) return false;
    optional_ = {"seqlens_q", "seqlens_kv"};
    if (word == "full") {
      spec_.seqlens_q.assign(static_cast<std::size_t>(spec_.batch), spec_.seqlen_q);
      spec_.seqlens_kv.assign(static_cast<std::size_t>(spec_.batch), spec_.seqlen_kv);
      return true;
    }
    const std::int64_t which = word == "zeros" ? dice_.below(3) : 2;
    spec_.seqlens_q = drawn_lengths(spec_.seqlen_q, word == "zeros" && which != 0);
    spec_.seqlens_kv = drawn_lengths(spec_.seqlen_kv, word == "zeros" && which != 1);
    const bool one = one_memory();
    if (one) spec_.seqlens_kv = spec_.seqlens_q;
    if (word == "gaps") {
      spec_.seqlens_q_padded = gapped(spec_.seqlens_q);
      spec_.seqlens_kv_padded = one ? spec_.seqlens_q_padded : gapped(spec_.seqlens_kv);
      spec_.has_padded_offsets = true;
      optional_ = {"seqlens_q_padded", "seqlens_kv_padded", "seqlens_q", "seqlens_kv"};
    } else if (word == "total") {
      const auto sum = [](const Dims& lengths) {
        return std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
      };
      spec_.total_q = sum(spec_.seqlens_q) + 1 + dice_.below(64);
      spec_.total_kv = sum(spec_.seqlens_kv) + 1 + dice_.below(64);
      optional_ = {"total_q", "total_kv", "seqlens_q", "seqlens_kv"};
    }
    return true;
  }

  // Takes back what the level gave to a side that does not take it, unless nothing of the level
  // would be left. The front says which.
  bool drop_refused_lists() {
    std::size_t kept = 2;  // of the level's own two fields, which come first
    while (const auto problem = front::check_attention(spec_)) {
      const auto at = std::find(optional_.begin(), optional_.end(), problem->field);
      if (at == optional_.end()) return false;
      if (at - optional_.begin() < 2 && kept-- == 1 && wanted_ > 0) return false;
      clear(problem->field);
    }
    return true;
  }

  void clear(const std::string& field) {
    if (field == "padded_offsets") spec_.has_padded_offsets = false;
    if (field == "total_q") spec_.total_q = 0;
    if (field == "total_kv") spec_.total_kv = 0;
    if (field == "seqlens_q") spec_.seqlens_q.clear();
    if (field == "seqlens_kv") spec_.seqlens_kv.clear();
    if (field == "seqlens_q_padded") spec_.seqlens_q_padded.clear();
    if (field == "seqlens_kv_padded") spec_.seqlens_kv_padded.clear();
  }

  // Styles that need something to show in are refused without it.
  bool style() {
    style_ = *plan::input_style_from_string(level("style"));
    const bool additive = spec_.attn_mask && spec_.attn_mask->dtype != DType::boolean;
    switch (style_) {
      case plan::InputStyle::masked_rows:
        return spec_.attn_mask.has_value();
      case plan::InputStyle::low_mask:
        return additive;
      case plan::InputStyle::poisoned: {
        const auto layout = front::parse_layout(spec_.layout);
        return spec_.mask.starts_with("padding") || spec_.paged || layout->ragged_q() ||
               layout->ragged_kv();
      }
      default:
        return true;
    }
  }

  // Strides in [b,h,s,d] order with the axes in memory in the given order, the outermost first, and
  // `room` elements behind each row and each block of rows.
  static Dims strides_in(const std::string& order, const Dims& shape, std::int64_t room) {
    Dims strides(4, 1);
    std::int64_t next = 1;
    for (auto axis = order.rbegin(); axis != order.rend(); ++axis) {
      const std::size_t at = std::string_view{"bhsd"}.find(*axis);
      strides[at] = next;
      next = next * std::max<std::int64_t>(shape[at], 1) + room;
    }
    return strides;
  }

  Dims drawn_strides(const std::string& tensor, const Dims& shape) {
    const std::string& word = level("strides");
    const std::string order = dice_.pick<std::string>({"bshd", "bhsd", "sbhd", "shbd", "hbsd"});
    if (word == "permuted") return strides_in(order, shape, 0);
    if (word == "expanded") {
      Dims strides = strides_in("bshd", shape, 0);
      if (tensor == "k" || tensor == "v") {
        strides[dice_.chance(50) ? 0 : 1] = 0;
      }
      return strides;
    }
    if (word == "huge") {
      Dims strides = strides_in("bhsd", shape, 0);
      const std::int64_t rows = std::max<std::int64_t>(1, shape[0] * shape[1] * shape[2]);
      const std::int64_t row = std::max(kMostReach / rows / 8 * 8, (shape[3] + 7) / 8 * 8);
      for (std::size_t i = 0; i < 3; ++i) strides[i] = strides[i] / shape[3] * row;
      return strides;
    }
    return strides_in(order, shape, 8 * (1 + dice_.below(2)));
  }

  bool strides() {
    const auto graph = front::attention_graph(spec_, spec_.pass);
    if (!graph.ok()) return false;
    const std::string& word = level("strides");
    for (const std::string name : {"q", "k", "v", "o", "do", "dq", "dk", "dv"}) {
      const auto tensor = std::find_if(graph->tensors.begin(), graph->tensors.end(),
                                       [&](const ir::Tensor& t) { return t.name == name; });
      if (tensor == graph->tensors.end()) continue;
      const bool input = tensor - graph->tensors.begin() < graph->input_count;
      if ((word == "inputs" && !input) || (word == "outputs" && input)) continue;
      if (word == "expanded" && name != "k" && name != "v") continue;
      spec_.strides[name] = drawn_strides(name, tensor->shape);
    }
    return true;
  }

  Profile profile_;
  Dice dice_;
  std::map<std::string, std::string> level_;
  AttentionSpec spec_;
  plan::InputStyle style_ = plan::InputStyle::normal;
  std::vector<std::string> optional_;  // fields that may be taken back
  int wanted_ = 1;                     // of the first two, at least so many stay
};

std::uint64_t hash(const Row& row, std::uint64_t seed) {
  std::uint64_t value = seed;
  for (const std::size_t level : row) value = (value ^ level) * 0x100000001b3ULL + 0x9e3779b9ULL;
  return value;
}

}  // namespace

std::vector<Axis> attention_axes(Profile profile) {
  const bool gpu = profile == Profile::gpu;
  const std::vector<std::string> narrow{"8",       "16-56",   "72-120",  "128",    "136-248", "256",
                                        "264-512", "192/128", "576/512", "128/64", "64/96"};
  const std::vector<std::string> none{"none"};
  // cuDNN multiplies masked values by 0, so what no sequence has must be finite there.
  const std::vector<std::string> finite{"normal",   "large_logits", "one_hot",
                                        "denormal", "masked_rows",  "low_mask"};
  std::vector<std::string> with_nan = finite;
  with_nan.emplace_back("poisoned");
  std::vector<Axis> axes{
      {"pass",
       {"forward stats", "forward", "forward max_logit", "forward stats max_logit", "backward",
        "backward deterministic"},
       0,
       false,
       0},
      {"dtype",
       gpu ? std::vector<std::string>{"bf16", "f16"}
           : std::vector<std::string>{"bf16", "f16", "f32", "f64"},
       0, false, 0},
      {"output", gpu ? std::vector<std::string>{"same"} : std::vector<std::string>{"same", "f32"},
       0, true, 80},
      {"heads", {"mha", "gqa", "mqa", "one", "twelve"}, 0, false, 0},
      {"layout",
       {"bshd",          "sbhd",           "bhsd",           "bs3hd",          "sb3hd",
        "bsh3d",         "sbh3d",          "bshd_bs2hd",     "sbhd_sb2hd",     "bshd_bsh2d",
        "sbhd_sbh2d",    "sbhd_bshd_bshd", "bshd_sbhd_sbhd", "bhsd_bshd_sbhd", "thd",
        "t3hd",          "th3d",           "thd_t2hd",       "thd_th2d",       "thd_bshd_bshd",
        "thd_bhsd_bhsd", "sbhd_thd_thd"},
       0,
       false,
       0},
      {"cache", {"none", "paged", "paged uneven", "append", "paged append"}, 0, true, 80},
      {"mask",
       {"padding", "none", "causal", "padding_causal", "causal_bottom_right",
        "padding_causal_bottom_right"},
       1,
       false,
       30},
      {"window",
       {"none", "[L, -1]", "[L, 0]", "[0, 0]", "[L, R]", "[-1, R]", "[-1, 0]", "far"},
       0,
       true,
       70},
      {"attn_mask", joined({each("add", kBroadcasts), each("bool", kBroadcasts), none}),
       2 * kBroadcasts.size(), true, 75},
      {"bias",
       joined({each("post_scale", kBroadcasts),
               each("pre_scale", kBroadcasts),
               {"alibi", "alibi slopes", "alibi given"},
               none}),
       2 * kBroadcasts.size() + 3, true, 65},
      {"dbias", {"no", "yes"}, 0, false, 50},
      {"softmax", {"vanilla", "off_by_one", "learnable"}, 0, true, 65},
      {"softcap", {"none", "small", "usual"}, 0, true, 80},
      {"dropout", {"none", "seed", "dumped", "mask"}, 0, true, 75},
      {"scale", {"default", "given"}, 0, false, 75},
      {"head_dim",
       joined({{"64"},
               narrow,
               gpu ? std::vector<std::string>{} : std::vector<std::string>{"odd", "odd/odd"}}),
       0, false, 20},
      {"length",
       {"small", "one", "decode", "edge 64", "edge 128", "edges 64 128", "64 mod 128", "long",
        "more queries", "more keys", "empty", "many"},
       0,
       false,
       30},
      {"sequences", {"generated", "full", "mixed", "zeros", "gaps", "total"}, 0, true, 40},
      {"strides",
       {"layout", "inputs", "outputs", "all", "huge", "permuted", "expanded"},
       0,
       true,
       70},
      {"style", gpu ? finite : with_nan, 0, true, 40},
  };
  return axes;
}

std::optional<AttentionDraw> draw_attention(const std::vector<Axis>& axes, const Row& row,
                                            std::uint64_t seed, Profile profile) {
  return Maker(axes, row, hash(row, seed), profile).make();
}

}  // namespace lawson::cases
