#include "engine/cudnn/native_model.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "base/philox.h"

namespace lawson::cases {
namespace {

using cudnn::NativeAttention;
using cudnn::NativeTensor;
using N = NativeAttention;
using Values = std::vector<double>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

std::size_t at(std::int64_t index) {
  return static_cast<std::size_t>(index);
}

// What one row of scores is made of; -infinity where the column is not seen.
struct Row {
  Values capped;  // tanh of the score before the cap's multiplication
  Values score;
  Values dropout;  // the weight's factor
};

class Model {
 public:
  Model(const NativeAttention& native, const Places& places) : n_{native}, places_{places} {}

  Status run() {
    LAWSON_CHECK(check());
    group_ = n_.heads / tensor(N::k).shape[1];
    depth_ = tensor(N::q).shape[3];
    wide_ = tensor(N::v).shape[3];
    if (has(N::scale)) scale_ = load(N::scale, 0, 0, 0, 0);
    if (has(N::dbias)) dbias_.assign(at(*element_count(tensor(N::dbias).shape)), 0.0);
    if (has(N::dropped)) dump_dropout();
    for (std::int64_t b = 0; b < n_.batch; ++b) {
      LAWSON_CHECK(begin_sequence(b));
      for (std::int64_t h = 0; h < n_.heads; ++h) {
        begin_head(h);
        if (n_.backward) {
          if (q_length_ > 0 && kv_length_ > 0) backward_head(h);
        } else {
          forward_head(h);
        }
      }
    }
    store_sums();
    return {};
  }

 private:
  // ---- tensors ---------------------------------------------------------------------------

  bool has(N::Role role) const { return n_.tensors[role].has_value(); }
  const NativeTensor& tensor(N::Role role) const { return *n_.tensors[role]; }
  void* pointer(std::int64_t uid) const {
    const auto found = places_.find(uid);
    return found == places_.end() ? nullptr : found->second;
  }
  static Status unbound(const NativeTensor& t) {
    return error(ErrorKind::internal, "tensor {} ({}) has no memory", t.uid, t.name);
  }

  std::int64_t index(const NativeTensor& t, std::int64_t b, std::int64_t h, std::int64_t s,
                     std::int64_t d) const {
    std::int64_t first = b * t.strides[0];
    if (t.offsets_uid != 0) {
      first = static_cast<std::int64_t>(load_element(pointer(t.offsets_uid), t.offsets_dtype, b));
    }
    return first + h * t.strides[1] + s * t.strides[2] + d * t.strides[3];
  }
  double load(N::Role role, std::int64_t b, std::int64_t h, std::int64_t s, std::int64_t d) const {
    const NativeTensor& t = tensor(role);
    return load_element(pointer(t.uid), t.dtype, index(t, b, h, s, d));
  }
  void store(N::Role role, std::int64_t b, std::int64_t h, std::int64_t s, std::int64_t d,
             double value) const {
    if (!has(role)) return;
    const NativeTensor& t = tensor(role);
    store_element(pointer(t.uid), t.dtype, index(t, b, h, s, d), value);
  }
  void load_rows(N::Role role, std::int64_t b, std::int64_t h, std::int64_t count,
                 std::int64_t depth, Values& rows) const {
    rows.resize(at(count * depth));
    for (std::int64_t i = 0; i < count; ++i) {
      for (std::int64_t d = 0; d < depth; ++d) rows[at(i * depth + d)] = load(role, b, h, i, d);
    }
  }
  void load_keys(N::Role role, N::Role table, std::int64_t h, std::int64_t depth, Values& rows) {
    if (!has(table)) return load_rows(role, b_, h, kv_length_, depth, rows);
    const std::int64_t size = tensor(role).shape[2];
    rows.resize(at(kv_length_ * depth));
    for (std::int64_t j = 0; j < kv_length_; ++j) {
      const auto page = static_cast<std::int64_t>(load(table, b_, 0, j / size, 0));
      for (std::int64_t d = 0; d < depth; ++d) {
        rows[at(j * depth + d)] = load(role, page, h, j % size, d);
      }
    }
  }

  // ---- what has to hold --------------------------------------------------------------------

  Status check() const {
    if (n_.padding != has(N::seqlen_q) || n_.padding != has(N::seqlen_kv)) {
      return error(ErrorKind::internal, "padding without lengths of both sides");
    }
    // docs/cudnn-notes.md, "Attention".
    if (has(N::dbias) && (tensor(N::dbias).dtype != n_.io || tensor(N::dbias).shape[2] != n_.rows ||
                          tensor(N::dbias).shape[3] != n_.columns)) {
      return error(ErrorKind::internal,
                   "dbias: neither another type nor a sum over rows or columns");
    }
    if (has(N::max_logit) != has(N::sum_exp) || (has(N::max_logit) && has(N::stats))) {
      return error(ErrorKind::internal, "max_logit goes with sum_exp and without stats");
    }
    if (has(N::dropout_mask) && tensor(N::dropout_mask).dtype != n_.io) {
      return error(ErrorKind::internal, "dropout_mask has the type of the values");
    }
    if (has(N::dropped) && tensor(N::dropped).dtype != DType::f32) {
      return error(ErrorKind::internal, "the mask that was used comes out as f32");
    }
    for (const auto& item : n_.tensors) {
      if (!item) continue;
      if (pointer(item->uid) == nullptr) return unbound(*item);
      if (item->offsets_uid == 0) continue;
      if (!n_.padding)
        return error(ErrorKind::internal, "{} is ragged without padding", item->name);
      if (pointer(item->offsets_uid) == nullptr) return unbound(*item);
    }
    return {};
  }

  std::int64_t length(N::Role role, std::int64_t full) const {
    return n_.padding ? static_cast<std::int64_t>(load(role, b_, 0, 0, 0)) : full;
  }

  Status begin_sequence(std::int64_t b) {
    b_ = b;
    q_length_ = length(N::seqlen_q, n_.rows);
    kv_length_ = length(N::seqlen_kv, n_.columns);
    if (q_length_ < 0 || q_length_ > n_.rows || kv_length_ < 0 || kv_length_ > n_.columns) {
      return error(ErrorKind::internal, "sequence {}: lengths {} of {}, {} of {}", b, q_length_,
                   n_.rows, kv_length_, n_.columns);
    }
    for (const auto& [role, count, tokens] :
         {std::tuple{N::q, q_length_, n_.tokens_q}, std::tuple{N::k, kv_length_, n_.tokens_kv}}) {
      if (tensor(role).offsets_uid == 0) continue;
      const std::int64_t first = index(tensor(role), b, 0, 0, 0);
      const std::int64_t row = tensor(role).strides[2];
      if (!tokens || first < 0 || first % row != 0 || first / row + count > *tokens) {
        return error(ErrorKind::internal, "sequence {} of {}: {} rows from element {} on", b,
                     tensor(role).name, count, first);
      }
    }
    return {};
  }

  // ---- scores ------------------------------------------------------------------------------

  void begin_head(std::int64_t h) {
    load_rows(N::q, b_, h, q_length_, depth_, q_);
    load_keys(N::k, N::page_table_k, h / group_, depth_, k_);
    load_keys(N::v, N::page_table_v, h / group_, wide_, v_);
    if (n_.alibi) slope_ = press(h);
  }

  double press(std::int64_t h) const {
    const auto heads = static_cast<std::uint64_t>(n_.heads);
    const auto power = static_cast<std::int64_t>(std::bit_floor(heads));
    if (h < power) return std::exp2(-8.0 * double(h + 1) / double(power));
    return std::exp2(-4.0 * double(2 * (h - power) + 1) / double(power));
  }

  bool sees(std::int64_t i, std::int64_t j) const {
    const bool bottom = n_.alignment == ir::Alignment::bottom_right;
    const std::int64_t row = i + (bottom ? kv_length_ - q_length_ : 0);
    return (!n_.left || j >= row - *n_.left) && (!n_.right || j <= row + *n_.right);
  }

  double bias(std::int64_t h, std::int64_t i, std::int64_t j) const {
    const Dims& shape = tensor(N::bias).shape;
    const bool repeats_row = shape[2] < n_.rows;
    const bool repeats_column = shape[3] < n_.columns;
    // docs/cudnn-notes.md, "Accepted and wrong".
    if (n_.backward ? repeats_row || repeats_column : repeats_row && repeats_column) return kNan;
    return load(N::bias, shape[0] == 1 ? 0 : b_, shape[1] == 1 ? 0 : h, repeats_row ? 0 : i,
                repeats_column ? 0 : j);
  }

  void kept(std::int64_t h, std::int64_t i, std::vector<std::uint8_t>& kept) const {
    kept.resize(at(n_.columns));
    const std::int64_t first = ((b_ * n_.heads + h) * n_.rows + i) * n_.columns;
    DropoutStream stream;
    stream.probability = n_.dropout;
    std::memcpy(&stream.seed, pointer(tensor(N::seed).uid), 8);
    std::memcpy(&stream.offset, pointer(tensor(N::offset).uid), 8);
    stream.fill(static_cast<std::uint64_t>(first), kept);
  }

  void dropout(std::int64_t h, std::int64_t i, Values& factors) const {
    factors.assign(at(kv_length_), 1.0);
    if (has(N::dropout_mask)) {
      for (std::int64_t j = 0; j < kv_length_; ++j) {
        factors[at(j)] = load(N::dropout_mask, b_, h, i, j) * load(N::dropout_scale, 0, 0, 0, 0);
      }
    } else if (has(N::seed)) {
      std::vector<std::uint8_t> bits;
      kept(h, i, bits);
      for (std::int64_t j = 0; j < kv_length_; ++j) factors[at(j)] = bits[at(j)] / (1 - n_.dropout);
    }
  }

  void dump_dropout() {
    std::vector<std::uint8_t> bits;
    for (b_ = 0; b_ < n_.batch; ++b_) {
      for (std::int64_t h = 0; h < n_.heads; ++h) {
        for (std::int64_t i = 0; i < n_.rows; ++i) {
          kept(h, i, bits);
          for (std::int64_t j = 0; j < n_.columns; ++j) {
            store(N::dropped, b_, h, i, j, bits[at(j)]);
          }
        }
      }
    }
  }

  void scores(std::int64_t h, std::int64_t i) {
    row_.score.assign(at(kv_length_), -kInfinity);
    row_.capped.assign(at(kv_length_), 0.0);
    dropout(h, i, row_.dropout);
    for (std::int64_t j = 0; j < kv_length_; ++j) {
      if (!sees(i, j)) continue;
      double x = scale_ * dot(q_, i, k_, j, depth_);
      if (n_.softcap > 0) {
        row_.capped[at(j)] = std::tanh(x / n_.softcap);
        x = n_.softcap * row_.capped[at(j)];
      }
      if (has(N::bias)) x += bias(h, i, j);
      if (n_.alibi) x += slope_ * static_cast<double>(j - i);
      row_.score[at(j)] = x;
    }
  }

  static double dot(const Values& a, std::int64_t i, const Values& b, std::int64_t j,
                    std::int64_t depth) {
    double sum = 0;
    for (std::int64_t d = 0; d < depth; ++d) sum += a[at(i * depth + d)] * b[at(j * depth + d)];
    return sum;
  }

  // ---- forward -----------------------------------------------------------------------------

  void forward_head(std::int64_t h) {
    const bool dense = tensor(N::q).offsets_uid == 0;
    for (std::int64_t i = 0; i < (dense ? n_.rows : q_length_); ++i) forward_row(h, i);
  }

  void forward_row(std::int64_t h, std::int64_t i) {
    double largest = -kInfinity;
    if (i < q_length_) {
      scores(h, i);
      for (const double x : row_.score) largest = x > largest || std::isnan(x) ? x : largest;
    }
    const bool blind = largest == -kInfinity;
    const double sink = has(N::sink) ? load(N::sink, 0, h, 0, 0) : -kInfinity;
    largest = std::max(largest, sink);  // the frontend's softmax takes the sink into the maximum
    double sum = std::exp(sink - largest);
    Values out(at(wide_), 0.0);
    for (std::int64_t j = 0; j < kv_length_ && !blind; ++j) {
      const double weight = std::exp(row_.score[at(j)] - largest);
      sum += weight;
      if (weight == 0) continue;
      for (std::int64_t d = 0; d < wide_; ++d) {
        out[at(d)] += row_.dropout[at(j)] * weight * v_[at(j * wide_ + d)];
      }
    }
    for (std::int64_t d = 0; d < wide_; ++d) {
      store(N::o, b_, h, i, d, blind ? kNan : out[at(d)] / sum);
    }
    store(N::stats, b_, h, i, 0, blind ? kNan : largest + std::log(sum));
    store(N::max_logit, b_, h, i, 0, blind ? kNan : largest);
    store(N::sum_exp, b_, h, i, 0, blind ? kNan : sum);
  }

  // ---- backward ----------------------------------------------------------------------------

  void backward_head(std::int64_t h) {
    if (h % group_ == 0) {
      dk_.assign(at(kv_length_ * depth_), 0.0);
      dv_.assign(at(kv_length_ * wide_), 0.0);
    }
    load_rows(N::o, b_, h, q_length_, wide_, o_);
    load_rows(N::dout, b_, h, q_length_, wide_, dout_);
    for (std::int64_t i = 0; i < q_length_; ++i) backward_row(h, i);
    if (h % group_ != group_ - 1) return;
    for (std::int64_t j = 0; j < kv_length_; ++j) {
      for (std::int64_t d = 0; d < depth_; ++d) {
        store(N::dk, b_, h / group_, j, d, dk_[at(j * depth_ + d)]);
      }
      for (std::int64_t d = 0; d < wide_; ++d) {
        store(N::dv, b_, h / group_, j, d, dv_[at(j * wide_ + d)]);
      }
    }
  }

  void backward_row(std::int64_t h, std::int64_t i) {
    scores(h, i);
    const double stats = load(N::stats, b_, h, i, 0);
    const double own = dot(dout_, i, o_, i, wide_);
    if (has(N::sink)) {
      sinks_.resize(at(n_.heads), 0.0);
      sinks_[at(h)] -= std::exp(load(N::sink, 0, h, 0, 0) - stats) * own;
    }
    Values dq(at(depth_), 0.0);
    for (std::int64_t j = 0; j < kv_length_; ++j) {
      if (!sees(i, j)) continue;
      const double probability = std::exp(row_.score[at(j)] - stats);
      const double factor = row_.dropout[at(j)];
      const double dx = probability * (factor * dot(dout_, i, v_, j, wide_) - own);
      if (has(N::dbias)) {
        const Dims& shape = tensor(N::dbias).shape;
        const std::int64_t matrix = (shape[0] == 1 ? 0 : b_) * shape[1] + (shape[1] == 1 ? 0 : h);
        dbias_[at((matrix * n_.rows + i) * n_.columns + j)] += dx;
      }
      const double ds = scale_ * dx * (1 - row_.capped[at(j)] * row_.capped[at(j)]);
      for (std::int64_t d = 0; d < depth_; ++d) {
        dq[at(d)] += ds * k_[at(j * depth_ + d)];
        dk_[at(j * depth_ + d)] += ds * q_[at(i * depth_ + d)];
      }
      for (std::int64_t d = 0; d < wide_; ++d) {
        dv_[at(j * wide_ + d)] += factor * probability * dout_[at(i * wide_ + d)];
      }
    }
    for (std::int64_t d = 0; d < depth_; ++d) store(N::dq, b_, h, i, d, dq[at(d)]);
  }

  void store_sums() {
    if (has(N::dbias)) {
      Dims index(4, 0);
      const Dims& shape = tensor(N::dbias).shape;
      std::size_t position = 0;
      do {
        store(N::dbias, index[0], index[1], index[2], index[3], dbias_[position++]);
      } while (next_index(index, shape));
    }
    // docs/cudnn-notes.md: dropout's 1 / (1 - p) is left out.
    sinks_.resize(at(n_.heads), 0.0);
    for (std::int64_t h = 0; h < n_.heads; ++h) {
      store(N::dsink, 0, h, 0, 0, (1 - n_.dropout) * sinks_[at(h)]);
    }
  }

  const NativeAttention& n_;
  const Places& places_;
  std::int64_t group_ = 1;
  std::int64_t depth_ = 0;
  std::int64_t wide_ = 0;
  double scale_ = 1;
  std::int64_t b_ = 0;
  std::int64_t q_length_ = 0;
  std::int64_t kv_length_ = 0;
  double slope_ = 0;
  Values q_, k_, v_, o_, dout_;  // of one sequence and head
  Values dk_, dv_, dbias_, sinks_;
  Row row_;
};

}  // namespace

std::string refused_by_frontend(const cudnn::NativeAttention& n) {
  if (n.alibi && (n.softcap > 0 || n.right != 0)) return "ALiBi needs a right bound of 0";
  const bool bottom_right = n.alignment == ir::Alignment::bottom_right && n.right;
  const bool dropout = n.tensors[N::seed] || n.tensors[N::dropout_mask];
  if (n.softcap == 0 && bottom_right && (n.tensors[N::bias] || n.alibi || dropout)) {
    return "bottom-right bounds go with no bias, ALiBi or dropout";
  }
  return "";
}

Status run_native(const cudnn::NativeAttention& native, const Places& places) {
  return Model(native, places).run();
}

}  // namespace lawson::cases
