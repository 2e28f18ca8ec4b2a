// Context parallelism against its definition: the steps of all ranks, run by the reference engine
// on their parts of the data and put together, are the attention of the whole. What rows and
// columns a step has is said here once more, independently of what makes its spec.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <tuple>

#include "engine/reference/reference.h"
#include "front/context_parallel.h"

namespace lawson::front {
namespace {

using enum CpStrategy;
using Positions = std::vector<std::int64_t>;  // in a sequence

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// One side (q or kv) of a graph: for each sequence, what its tensor has in memory, and the part
// that takes part.
struct Side {
  std::vector<Positions> memory;
  std::vector<std::size_t> begin;   // in memory, where the part begins
  std::vector<std::int64_t> count;  // of the part, valid or not
  std::vector<std::int64_t> valid;  // of the part: a prefix
  bool ragged = false;

  // The position that a logical index (batch, s) stands for.
  std::pair<std::size_t, std::int64_t> at(std::int64_t b, std::int64_t s) const {
    auto n = static_cast<std::size_t>(b);
    auto i = static_cast<std::size_t>(s);
    if (!ragged) return {n, memory[n][i]};
    for (n = 0; n < memory.size(); i -= memory[n++].size()) {
      if (i < memory[n].size()) return {n, memory[n][i]};
    }
    return {n, -1};  // behind the last sequence
  }
  std::int64_t longest() const { return *std::max_element(count.begin(), count.end()); }
  std::int64_t tokens() const {
    return std::accumulate(memory.begin(), memory.end(), std::int64_t{0},
                           [](std::int64_t sum, const Positions& positions) {
                             return sum + static_cast<std::int64_t>(positions.size());
                           });
  }
};

struct Part {
  Side q;
  Side kv;
  std::int64_t head = 0;  // of the whole, that its first head is
};

using Index = std::tuple<std::string, std::size_t, std::int64_t, std::int64_t, std::int64_t>;
// Values by tensor, sequence, head, position and the last index: of the whole and of all parts.
using Values = std::map<Index, double>;

struct Case {
  std::string name;
  AttentionSpec spec;
  std::vector<std::int64_t> room;  // of each sequence
  std::vector<std::int64_t> valid_q;
  std::vector<std::int64_t> valid_kv;
};

class Composition {
 public:
  Composition(const Case& item, CpStrategy strategy, std::int64_t size)
      : case_{item}, strategy_{strategy}, size_{size}, engine_{make_reference_engine()} {
    ragged_ = item.spec.layout == "thd";
  }

  void check() {
    const Part whole{whole_side(case_.valid_q), whole_side(case_.valid_kv), 0};
    AttentionSpec spec = case_.spec;
    spec.pass = Pass::training;
    given_ = {};
    const Values forward = run(spec, Pass::forward, whole);
    given_ = forward;
    const Values backward = run(spec, Pass::backward, whole);

    Values sum;
    std::map<Index, std::vector<std::pair<double, Index>>> merged;  // o by position: its steps
    std::map<Index, std::vector<std::pair<double, double>>> rows;   // (lse, o) of each step
    for (std::int64_t rank = 0; rank < size_; ++rank) {
      auto steps = cp_step_configs(spec, strategy_, size_, rank);
      ASSERT_TRUE(steps.ok()) << steps.error().message;
      for (const CpStep& step : *steps) {
        SCOPED_TRACE(step.name);
        const Part part = part_of(rank, step.step);
        expect_sizes(step.spec, part);
        if (testing::Test::HasFailure()) return;
        given_ = {};
        const Values out = run(step.spec, Pass::forward, part);
        for (const auto& [index, value] : out) {
          if (std::get<0>(index) != "o") continue;
          Index row = index;
          std::get<0>(row) = "stats";
          std::get<4>(row) = 0;
          rows[index].emplace_back(out.at(row), value);
        }
        given_ = forward;
        for (const auto& [index, value] : run(step.spec, Pass::backward, part)) sum[index] += value;
      }
    }
    compare(forward, merge(rows), "forward");
    compare(backward, sum, "backward");
  }

 private:
  Side whole_side(const std::vector<std::int64_t>& valid) const {
    Side side;
    side.ragged = ragged_;
    for (std::size_t n = 0; n < case_.room.size(); ++n) {
      Positions all(static_cast<std::size_t>(case_.room[n]));
      std::iota(all.begin(), all.end(), 0);
      add(side, all, 0, all.size(), valid[n]);
    }
    return side;
  }

  static void add(Side& side, const Positions& memory, std::size_t begin, std::size_t count,
                  std::int64_t valid) {
    const auto first = memory.begin() + static_cast<std::ptrdiff_t>(begin);
    const auto last = first + static_cast<std::ptrdiff_t>(count);
    const auto is_valid = [&](std::int64_t position) { return position < valid; };
    EXPECT_TRUE(std::is_partitioned(first, last, is_valid)) << "padding in between";
    side.memory.push_back(memory);
    side.begin.push_back(begin);
    side.count.push_back(static_cast<std::int64_t>(count));
    side.valid.push_back(std::count_if(first, last, is_valid));
  }

  Positions chunks(std::size_t n, std::initializer_list<std::int64_t> which) const {
    const std::int64_t chunk = case_.room[n] / (2 * size_);
    Positions all;
    for (const std::int64_t c : which) {
      for (std::int64_t i = 0; i < chunk; ++i) all.push_back(c * chunk + i);
    }
    return all;
  }

  std::pair<std::int64_t, std::int64_t> bounds() const {
    const bool causal = case_.spec.mask.find("causal") != std::string::npos;
    return {case_.spec.window_left, causal ? 0 : case_.spec.window_right};
  }

  Part part_of(std::int64_t rank, std::int64_t step) const {
    if (size_ == 1) return {whole_side(case_.valid_q), whole_side(case_.valid_kv), 0};
    if (strategy_ == all_to_all) {
      return {whole_side(case_.valid_q), whole_side(case_.valid_kv),
              rank * case_.spec.heads / size_};
    }
    Part part;
    part.q.ragged = part.kv.ragged = ragged_;
    const std::int64_t last = 2 * size_ - 1;
    for (std::size_t n = 0; n < case_.room.size(); ++n) {
      if (strategy_ == ring) {
        const std::int64_t from = (rank - step + size_) % size_;
        const bool causal = bounds() == std::pair<std::int64_t, std::int64_t>{-1, 0};
        Positions q = chunks(n, {rank, last - rank});
        Positions kv = chunks(n, {from, last - from});
        if (causal && step > rank) q = chunks(n, {last - rank});
        if (causal && step > 0 && step <= rank) kv = chunks(n, {from});
        add(part.q, q, 0, q.size(), case_.valid_q[n]);
        add(part.kv, kv, 0, kv.size(), case_.valid_kv[n]);
      } else {
        all_gather_part(part, n, rank, step);
      }
    }
    return part;
  }

  void all_gather_part(Part& part, std::size_t n, std::int64_t rank, std::int64_t step) const {
    const std::int64_t last = 2 * size_ - 1;
    const Positions q = chunks(n, {step == 0 ? rank : last - rank});
    const auto [left, right] = bounds();
    std::int64_t start = case_.room[n];
    std::int64_t end = 0;
    for (const std::int64_t row : q) {
      for (std::int64_t column = 0; column < case_.room[n]; ++column) {
        if (left != -1 && column < row - left) continue;
        if (right != -1 && column > row + right) continue;
        start = std::min(start, column);
        end = std::max(end, column + 1);
      }
    }
    if (!ragged_) {
      Positions kv(static_cast<std::size_t>(end - start));
      std::iota(kv.begin(), kv.end(), start);
      add(part.q, q, 0, q.size(), case_.valid_q[n]);
      add(part.kv, kv, 0, kv.size(), case_.valid_kv[n]);
      return;
    }
    const Positions both = chunks(n, {rank, last - rank});
    Positions all(static_cast<std::size_t>(case_.room[n]));
    std::iota(all.begin(), all.end(), 0);
    add(part.q, both, step == 0 ? 0 : q.size(), q.size(), case_.valid_q[n]);
    add(part.kv, all, 0, static_cast<std::size_t>(end), case_.valid_kv[n]);
  }

  void expect_sizes(const AttentionSpec& spec, const Part& part) const {
    EXPECT_FALSE(spec.context_parallel.has_value());
    EXPECT_EQ(spec.heads, case_.spec.heads / (strategy_ == all_to_all ? size_ : 1));
    EXPECT_EQ(spec.seqlen_q, part.q.longest());
    if (!ragged_) {
      EXPECT_EQ(spec.seqlen_kv, part.kv.longest());
      return;
    }
    EXPECT_GE(spec.seqlen_kv, part.kv.longest());
    EXPECT_GE(spec.total_q == 0 ? spec.batch * spec.seqlen_q : spec.total_q, part.q.tokens());
    EXPECT_GE(spec.total_kv == 0 ? spec.batch * spec.seqlen_kv : spec.total_kv, part.kv.tokens());
  }

  // The same for the whole and for every part.
  double value_of(const Index& index) const {
    const std::string& name = std::get<0>(index);
    std::uint64_t hash = std::hash<std::string>{}(name);
    for (const std::int64_t i : {static_cast<std::int64_t>(std::get<1>(index)), std::get<2>(index),
                                 std::get<3>(index), std::get<4>(index)}) {
      hash = (hash ^ static_cast<std::uint64_t>(i)) * 0x9E3779B97F4A7C15U;
      hash ^= hash >> 29;
    }
    std::minstd_rand random{static_cast<std::uint32_t>(hash >> 32)};
    random.discard(2);
    if (name == "mask") return random() % 3 != 0 ? 1 : 0;
    return std::normal_distribution<double>{}(random);
  }

  double input(const ir::Tensor& tensor, const Dims& i, const Part& part) const {
    const std::string& name = tensor.name;
    if (tensor.by_value) return tensor.values[0];
    if (name.starts_with("seqlen_") || name.starts_with("cu_seqlens_")) {
      const bool kv = name.find("_kv") != std::string::npos;
      return length(kv ? part.kv : part.q, name, static_cast<std::size_t>(i[0]));
    }
    const std::int64_t head = part.head + i[1];
    if (name == "slopes") {
      return std::exp2(-8.0 * static_cast<double>(head + 1) /
                       static_cast<double>(case_.spec.heads));
    }
    if (name == "sink") return value_of({name, 0, head, 0, 0});
    if (name == "bias" || name == "mask") {
      return value_of({name, 0, tensor.shape[1] == 1 ? 0 : head, part.q.at(0, i[2]).second,
                       part.kv.at(0, i[3]).second});
    }
    const bool kv = name == "k" || name == "v";
    const auto [n, position] = (kv ? part.kv : part.q).at(i[0], i[2]);
    if (position < 0) return 0;
    const std::int64_t group = case_.spec.heads / case_.spec.kv_heads;
    const Index index{name, n, kv ? part.head / group + i[1] : head, position, i[3]};
    const auto it = given_.find(index);
    return it != given_.end() ? it->second : value_of(index);
  }

  // The tail of a bucket has length 0 and the last offset.
  static double length(const Side& side, const std::string& name, std::size_t n) {
    if (!name.starts_with("cu_")) return static_cast<double>(side.valid[n]);
    std::int64_t sum = 0;
    const bool memory = name.ends_with("_padded");
    for (std::size_t i = 0; i < std::min(n, side.valid.size()); ++i) {
      sum += memory ? static_cast<std::int64_t>(side.memory[i].size()) : side.valid[i];
    }
    if (memory && n < side.begin.size()) sum += static_cast<std::int64_t>(side.begin[n]);
    return static_cast<double>(sum);
  }

  Values run(const AttentionSpec& spec, Pass pass, const Part& part) const {
    Values values;
    auto built = attention_graph(spec, pass);
    EXPECT_TRUE(built.ok()) << built.error().message;
    if (!built.ok()) return values;
    const ir::Graph& graph = *built;
    std::vector<std::vector<std::byte>> memory;
    std::vector<Binding> bindings;
    for (ir::TensorId id = 0; id < graph.input_count + graph.output_count; ++id) {
      const ir::Tensor& tensor = graph.tensor(id);
      memory.emplace_back(byte_size(tensor.dtype, *storage_extent(tensor.shape, tensor.strides)));
      bindings.push_back({ir::Graph::uid(id), memory.back().data()});
      if (!graph.is_input(id)) continue;
      each(tensor, [&](const Dims& index, std::int64_t offset) {
        store_element(memory.back().data(), tensor.dtype, offset, input(tensor, index, part));
      });
    }
    const Device device = cpu_device();
    auto plan = engine_->compile(graph, device, {}, std::nullopt, {});
    EXPECT_TRUE(plan.ok()) << plan.error().message;
    auto loaded = engine_->load(*plan, device);
    EXPECT_TRUE(loaded.ok()) << loaded.error().message;
    const Status status = engine_->execute(**loaded, bindings, nullptr, nullptr);
    EXPECT_TRUE(status.ok()) << status.error().message;
    for (ir::TensorId id = graph.input_count; id < graph.input_count + graph.output_count; ++id) {
      const ir::Tensor& tensor = graph.tensor(id);
      each(tensor, [&](const Dims& index, std::int64_t offset) {
        if (const auto place = output_place(tensor.name, index, part)) {
          values[*place] =
              load_element(memory[static_cast<std::size_t>(id)].data(), tensor.dtype, offset);
        }
      });
    }
    return values;
  }

  template <typename Visit>
  static void each(const ir::Tensor& tensor, const Visit& visit) {
    if (element_count(tensor.shape) == 0) return;
    Dims index(tensor.shape.size(), 0);
    do {
      visit(index, offset_of(index, tensor.strides));
    } while (next_index(index, tensor.shape));
  }

  // nullopt: not of a sequence, or of memory that takes no part in this step.
  std::optional<Index> output_place(const std::string& name, const Dims& i,
                                    const Part& part) const {
    const std::int64_t head = part.head + i[1];
    if (name == "dsink") return Index{name, 0, head, 0, 0};
    if (name == "dbias") {
      return Index{name, 0, head, part.q.at(0, i[2]).second, part.kv.at(0, i[3]).second};
    }
    const bool kv = name == "dk" || name == "dv";
    const Side& side = kv ? part.kv : part.q;
    const auto [n, position] = side.at(i[0], i[2]);
    if (position < 0) return std::nullopt;
    const auto first = side.memory[n].begin() + static_cast<std::ptrdiff_t>(side.begin[n]);
    const auto end = first + side.count[n];
    if (std::find(first, end, position) == end) return std::nullopt;
    // What is behind a ragged sequence's length is nobody's.
    if (side.ragged && position >= (kv ? case_.valid_kv : case_.valid_q)[n]) return std::nullopt;
    const std::int64_t group = case_.spec.heads / case_.spec.kv_heads;
    return Index{name, n, kv ? part.head / group + i[1] : head, position, i[3]};
  }

  static Values merge(const std::map<Index, std::vector<std::pair<double, double>>>& rows) {
    Values merged;
    for (const auto& [index, steps] : rows) {
      double most = -kInfinity;
      for (const auto& [lse, o] : steps) most = std::max(most, lse);
      double sum = 0;
      double weighted = 0;
      for (const auto& [lse, o] : steps) {
        const double weight = most == -kInfinity ? 0 : std::exp(lse - most);
        sum += weight;
        weighted += weight * o;
      }
      Index stats = index;
      std::get<0>(stats) = "stats";
      std::get<4>(stats) = 0;
      merged[index] = sum == 0 ? 0 : weighted / sum;
      merged[stats] = steps.size() == 1 ? most : most + std::log(sum);
    }
    return merged;
  }

  static void compare(const Values& expected, const Values& actual, const char* pass) {
    ASSERT_FALSE(expected.empty());
    int shown = 0;
    for (const auto& [index, value] : expected) {
      const auto& [name, n, head, position, last] = index;
      const auto it = actual.find(index);
      // A column that no step has is one that no row sees.
      const double got = it == actual.end() && name.starts_with("d") ? 0
                         : it == actual.end()                        ? std::nan("")
                                                                     : it->second;
      const double roundoff = name == "dsink" ? 0x1p-21 : 1e-11;  // f32, of each step
      if (got == value || std::abs(got - value) <= roundoff * (1 + std::abs(value))) continue;
      if (++shown > 3) return;
      ADD_FAILURE() << pass << ": " << name << " of sequence " << n << ", head " << head
                    << ", position " << position << ", " << last << ": " << got << ", expected "
                    << value;
    }
    for (const auto& [index, value] : actual) {
      ASSERT_TRUE(expected.contains(index)) << std::get<0>(index) << " " << std::get<3>(index);
    }
  }

  const Case& case_;
  const CpStrategy strategy_;
  const std::int64_t size_;
  bool ragged_ = false;
  std::shared_ptr<Engine> engine_;
  Values given_;  // o and stats of the whole, that every step's backward gets
};

Case dense(const std::string& name, const std::string& mask = "none") {
  Case item{name, {}, {16, 16}, {16, 16}, {16, 16}};
  AttentionSpec& spec = item.spec;
  spec.dtype = DType::f64;
  spec.batch = 2;
  spec.heads = 2;
  spec.kv_heads = 1;
  spec.seqlen_q = spec.seqlen_kv = 16;
  spec.head_dim_qk = 3;
  spec.head_dim_v = 2;
  spec.mask = mask;
  return item;
}

Case padded(const std::string& name, const std::string& mask) {
  Case item = dense(name, mask);
  item.valid_q = item.valid_kv = {11, 2};
  return item;
}

Case ragged(const std::string& name, const std::string& mask) {
  Case item = dense(name, mask);
  item.room = {16, 8, 24};
  item.valid_q = item.valid_kv = {13, 8, 0};
  item.spec.batch = 3;
  item.spec.layout = "thd";
  item.spec.seqlen_q = item.spec.seqlen_kv = 24;
  item.spec.total_q = item.spec.total_kv = 48;
  item.spec.has_padded_offsets = true;
  return item;
}

template <typename Change>
Case with(Case item, const Change& change) {
  change(item.spec);
  return item;
}

Case windowed(Case item, std::int64_t left, std::int64_t right) {
  item.spec.window_left = left;
  item.spec.window_right = right;
  return item;
}

void check(CpStrategy strategy, const std::vector<Case>& cases) {
  for (const Case& item : cases) {
    for (const std::int64_t size : {1, 2, 4}) {
      SCOPED_TRACE(item.name + ", size " + std::to_string(size));
      Composition(item, strategy, size).check();
    }
  }
}

const auto kBias = [](AttentionSpec& spec) {
  spec.bias = BiasKind::post_scale;
  spec.bias_shape = {1, spec.heads, spec.seqlen_q, spec.seqlen_kv};
  spec.bias_grad = true;
};
const auto kMask = [](AttentionSpec& spec) {
  spec.attn_mask = MaskTensor{DType::boolean, {1, 1, spec.seqlen_q, spec.seqlen_kv}};
};
const auto kSink = [](AttentionSpec& spec) { spec.softmax = ir::SoftmaxKind::learnable; };
const auto kOffByOne = [](AttentionSpec& spec) { spec.softmax = ir::SoftmaxKind::off_by_one; };
const auto kAlibi = [](AttentionSpec& spec) { spec.bias = BiasKind::alibi; };

TEST(ContextParallelOracle, Ring) {
  check(ring, {dense("full"), dense("causal", "causal"), dense("same", "causal_bottom_right"),
               windowed(dense("causal window"), -1, 0), padded("padding", "padding"),
               padded("padding causal", "padding_causal"), with(dense("bias", "causal"), kBias),
               with(dense("full bias"), kBias), with(dense("mask", "causal"), kMask)});
}

TEST(ContextParallelOracle, RingOfRaggedSequences) {
  check(ring, {ragged("full", "padding"), ragged("causal", "padding_causal")});
}

TEST(ContextParallelOracle, AllGather) {
  check(all_gather,
        {dense("full"), dense("causal", "causal"), windowed(dense("window", "causal"), 3, -1),
         windowed(dense("wide window", "causal"), 100, 0), windowed(dense("two sides"), 2, 3),
         windowed(dense("ahead"), 0, 5), windowed(dense("behind"), 4, -1),
         windowed(dense("left free"), -1, 3), padded("padding", "padding"),
         padded("padding causal", "padding_causal"),
         windowed(padded("padding causal window", "padding_causal"), 3, 0),
         windowed(padded("padding two sides", "padding"), 2, 3), with(dense("bias"), kBias),
         with(dense("causal bias", "causal"), kBias), with(dense("mask", "causal"), kMask),
         with(dense("sink", "causal"), kSink), with(dense("off by one"), kOffByOne),
         with(dense("alibi", "causal"), kAlibi)});
}

TEST(ContextParallelOracle, AllGatherOfRaggedSequences) {
  check(all_gather, {ragged("full", "padding"), ragged("causal", "padding_causal"),
                     windowed(ragged("window", "padding_causal"), 3, 0)});
}

TEST(ContextParallelOracle, AllToAll) {
  std::vector<Case> cases{dense("full"),
                          dense("causal", "causal"),
                          windowed(dense("window"), 2, 3),
                          padded("padding", "padding_causal_bottom_right"),
                          dense("bias"),
                          with(dense("sink", "causal"), kSink),
                          with(dense("alibi", "causal"), kAlibi),
                          ragged("ragged", "padding_causal")};
  for (Case& item : cases) {
    item.spec.heads = 8;
    item.spec.kv_heads = 4;
    if (item.name == "bias") kBias(item.spec);
  }
  check(all_to_all, cases);
}

}  // namespace
}  // namespace lawson::front
