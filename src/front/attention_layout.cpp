#include "front/attention_layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "base/lazy.h"

namespace lawson::front {
namespace {

using Packing = Layout::Packing;

const auto& kWords = *new const std::vector<std::string>{"bshd", "sbhd", "bhsd", "thd"};

// Layouts in which q, k and v, or k and v, share memory.
const std::map<std::string, Layout, std::less<>>& packed_layouts() {
  static Lazy<const std::map<std::string, Layout, std::less<>>> table;
  return table.get([] {
    std::map<std::string, Layout, std::less<>> layouts;
    for (const std::string axes : {"bs", "sb", "t"}) {
      const std::string word = axes + "hd";
      const std::array<std::string, 3> words{word, word, word};
      layouts[axes + "3hd"] = {words, Packing::qkv_s3hd};
      layouts[axes + "h3d"] = {words, Packing::qkv_h3d};
      layouts[fmt::format("{}_{}2hd", word, axes)] = {words, Packing::kv_s2hd};
      layouts[fmt::format("{}_{}h2d", word, axes)] = {words, Packing::kv_h2d};
    }
    return layouts;
  });
}

// Strides of a [b,h,s,d] tensor whose memory is laid out as `axes` says; '3' and '2' stand for the
// tensors that share it, one behind the other.
Dims strides_of(std::string_view axes, const Dims& shape) {
  Dims stored;
  for (const char axis : axes) {
    const std::size_t at = std::string_view{"bhsd"}.find(axis == 't' ? 's' : axis);
    stored.push_back(at == std::string_view::npos ? axis - '0' : shape[at]);
  }
  // The sizes are not checked yet, and contiguous_strides() takes any.
  const Dims packed = contiguous_strides(stored);
  Dims strides;
  for (const char axis : {'b', 'h', 's', 'd'}) {
    std::size_t at = axes.find(axis);
    if (at == std::string_view::npos && axis == 's') at = axes.find('t');
    // A ragged tensor has one b, over everything. Unsigned: the sizes are not checked yet.
    strides.push_back(at == std::string_view::npos
                          ? static_cast<std::int64_t>(static_cast<std::uint64_t>(packed[0]) *
                                                      static_cast<std::uint64_t>(stored[0]))
                          : packed[at]);
  }
  return strides;
}

std::string shared_axes(const std::string& word, Packing packing) {
  const std::string outer = word.substr(0, word.size() - 2);  // "bs", "sb", "t"
  switch (packing) {
    case Packing::qkv_s3hd:
      return outer + "3hd";
    case Packing::qkv_h3d:
      return outer + "h3d";
    case Packing::kv_s2hd:
      return outer + "2hd";
    case Packing::kv_h2d:
      return outer + "h2d";
    case Packing::separate:
      break;
  }
  return word;
}

}  // namespace

const std::vector<std::string>& layout_names() {
  static Lazy<const std::vector<std::string>> names;
  return names.get([] {
    std::vector<std::string> list = kWords;
    for (const auto& [name, layout] : packed_layouts()) list.push_back(name);
    return list;
  });
}

std::optional<Layout> parse_layout(std::string_view layout) {
  if (const auto it = packed_layouts().find(layout); it != packed_layouts().end()) {
    return it->second;
  }
  Layout result;
  std::size_t count = 0;
  for (std::size_t start = 0;; ++count) {
    const std::size_t end = layout.find('_', start);
    const std::string word{layout.substr(start, end - start)};
    if (count >= 3 || std::find(kWords.begin(), kWords.end(), word) == kWords.end()) {
      return std::nullopt;
    }
    result.words[count] = word;
    if (end == std::string_view::npos) break;
    start = end + 1;
  }
  if (count == 0) result.words[1] = result.words[2] = result.words[0];
  if (count == 1) return std::nullopt;
  // k and v have one length per sequence.
  if ((result.words[1] == "thd") != (result.words[2] == "thd")) return std::nullopt;
  return result;
}

Dims layout_strides(const Layout& layout, char tensor, const Dims& shape) {
  const bool kv = tensor == 'k' || tensor == 'v';
  const std::string& word = layout.words[tensor == 'v' ? 2 : kv ? 1 : 0];
  const bool all = layout.packing == Packing::qkv_s3hd || layout.packing == Packing::qkv_h3d;
  const bool shares = tensor != 'o' && (kv || all);
  return strides_of(shares ? shared_axes(word, layout.packing) : word, shape);
}

}  // namespace lawson::front
