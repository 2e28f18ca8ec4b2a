// Where attention finds its tokens and what it leaves alone: ragged tensors, paged caches, appends.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>

#include "helpers.h"

namespace lawson::cpu {
namespace {

using Slot = ir::AttentionSlots;
using Lengths = std::vector<std::int64_t>;

// Memory that ends where its page does: the process dies of touching what lies behind.
class Guarded {
 public:
  explicit Guarded(std::size_t bytes) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t used = (bytes + page - 1) / page * page;
    size_ = used + page;
    base_ = static_cast<std::byte*>(
        mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    EXPECT_EQ(mprotect(base_ + used, page, PROT_NONE), 0);
    data_ = base_ + used - bytes;
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  ~Guarded() { munmap(base_, size_); }
  std::byte* data() { return data_; }

 private:
  std::byte* base_ = nullptr;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

// [1, h, t, d] as [t, h, d] in memory.
Dims thd(std::int64_t heads, std::int64_t tokens, std::int64_t depth) {
  return {heads * tokens * depth, depth, heads * depth, 1};
}

Lengths offsets(const Lengths& lengths) {
  Lengths result{0};
  for (const std::int64_t length : lengths) result.push_back(result.back() + length);
  return result;
}

constexpr std::int64_t kHeads = 4;
constexpr std::int64_t kKvHeads = 2;
constexpr std::int64_t kDepth = 24;
constexpr std::int64_t kValueDepth = 17;
constexpr std::int64_t kMaxQ = 131;
constexpr std::int64_t kMaxKv = 141;
constexpr std::int64_t kBatch = 7;     // room for so many sequences
constexpr std::int64_t kTokens = 512;  // room for so many tokens on each side

// An operand or result [1, h, t, d] over the tokens of one side.
struct Part {
  bool keys;
  std::int64_t heads, depth;
  std::int64_t row() const { return heads * depth; }
};
constexpr Part kQ{false, kHeads, kDepth};
constexpr Part kK{true, kKvHeads, kDepth};
constexpr Part kV{true, kKvHeads, kValueDepth};
constexpr Part kO{false, kHeads, kValueDepth};
constexpr Part kStats{false, kHeads, 1};

std::vector<Part> operands_of(bool backward) {
  return backward ? std::vector<Part>{kQ, kK, kV, kO, kO, kStats} : std::vector<Part>{kQ, kK, kV};
}
std::vector<Part> results_of(bool backward) {
  return backward ? std::vector<Part>{kQ, kK, kV} : std::vector<Part>{kO, kStats, kStats};
}

// Inputs are the parts, the bias and, ragged, what tells where tokens are; results the parts and,
// backward, dbias.
ir::Graph graph_of(bool backward, bool ragged, std::int64_t q_tokens, std::int64_t kv_tokens) {
  GraphOf g;
  std::vector<ir::TensorId> parts;
  const auto tokens = [&](const Part& part) { return part.keys ? kv_tokens : q_tokens; };
  for (const Part& part : operands_of(backward)) {
    parts.push_back(g.input("part" + std::to_string(parts.size()), DType::f32,
                            {1, part.heads, tokens(part), part.depth},
                            thd(part.heads, tokens(part), part.depth)));
  }
  const Dims bias_strides{kMaxQ * kMaxKv, kMaxQ * kMaxKv, kMaxKv, 1};
  std::vector<ir::TensorId> in =
      operands({{Slot::q, parts[0]}, {Slot::k, parts[1]}, {Slot::v, parts[2]}});
  in[Slot::bias] =
      g.input("bias", DType::f32, {1, 1, ragged ? kMaxQ : q_tokens, ragged ? kMaxKv : kv_tokens},
              bias_strides);
  ir::AttentionRule rule;
  rule.alignment = ir::Alignment::bottom_right;
  rule.right = 0;
  if (ragged) {
    rule.max_q = kMaxQ;
    rule.max_kv = kMaxKv;
    for (const auto& [slot, name] : {std::pair{Slot::cu_seqlens_q, "cu_q"},
                                     {Slot::cu_seqlens_kv, "cu_kv"},
                                     {Slot::cu_seqlens_q_padded, "places_q"},
                                     {Slot::cu_seqlens_kv_padded, "places_kv"}}) {
      in[slot] = g.input(name, DType::i32, {kBatch + 1, 1, 1, 1});
    }
    in[Slot::sequences] = g.scalar("sequences", 0, DType::i32);
  }
  std::vector<ir::TensorId> out;
  if (backward) {
    out =
        g.results(ir::AttentionBackward{rule}, backward_operands(in, parts[3], parts[4], parts[5]),
                  {true, true, true, true, false});
  } else {
    out = g.results(ir::Attention{rule}, in, {true, true, true, false});
  }
  const std::vector<Part> results = results_of(backward);
  for (std::size_t i = 0; i < results.size(); ++i) {
    g.output(out[i], thd(results[i].heads, tokens(results[i]), results[i].depth));
  }
  if (backward) g.output(out[3], bias_strides);
  return g.finish();
}

// Four sequences, one without queries and one without keys, with padding behind some.
const Lengths kLengthsQ{5, 0, 131, 3};
const Lengths kLengthsKv{7, 4, 141, 0};
const Lengths kPlacesQ = offsets({9, 2, 132, 3});
const Lengths kPlacesKv = offsets({7, 6, 150, 5});

const std::byte* at_token(Execution& e, ir::TensorId id, const Part& part, std::int64_t token) {
  return e.data(id) + token * part.row() * 4;
}

class Ragged : public testing::TestWithParam<bool> {};

// Bit by bit what each sequence gives alone, with nothing read or written beyond the last one, and
// zeros between them. Padding of the operands is NaN.
TEST_P(Ragged, SequencesAreThoseOfDenseAttention) {
  const bool backward = GetParam();
  const std::vector<Part> inputs = operands_of(backward);
  const std::vector<Part> results = results_of(backward);
  Execution all{graph_of(backward, true, kTokens, kTokens)};
  std::vector<std::unique_ptr<Guarded>> memory;
  const auto bind = [&](ir::TensorId id, std::int64_t elements) {
    memory.push_back(std::make_unique<Guarded>(static_cast<std::size_t>(elements) * 4));
    all.bind(id, memory.back()->data());
  };
  const auto places = [](const Part& part) -> const Lengths& {
    return part.keys ? kPlacesKv : kPlacesQ;
  };
  std::mt19937_64 random{3};
  std::normal_distribution<double> normal;
  const auto bias = static_cast<ir::TensorId>(inputs.size());
  for (std::int64_t i = 0; i < kMaxQ * kMaxKv; ++i) all.set(bias, i, normal(random));
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const auto id = static_cast<ir::TensorId>(i);
    const std::int64_t elements = places(inputs[i]).back() * inputs[i].row();
    bind(id, elements);
    for (std::int64_t e = 0; e < elements; ++e) all.set(id, e, NAN);
  }
  const std::array<Lengths, 4> tables{offsets(kLengthsQ), offsets(kLengthsKv), kPlacesQ, kPlacesKv};
  for (std::size_t i = 0; i < tables.size(); ++i) {
    const auto id = bias + 1 + static_cast<ir::TensorId>(i);
    bind(id, static_cast<std::int64_t>(tables[i].size()));
    for (std::size_t n = 0; n < tables[i].size(); ++n) {
      all.set(id, static_cast<std::int64_t>(n), static_cast<double>(tables[i][n]));
    }
  }
  all.set(bias + 5, 0, static_cast<double>(kLengthsQ.size()));
  for (std::size_t i = 0; i < results.size(); ++i) {
    const ir::TensorId id = all.output(static_cast<int>(i));
    const std::int64_t elements = places(results[i]).back() * results[i].row();
    bind(id, elements);
    for (std::int64_t e = 0; e < elements; ++e) all.set(id, e, 77);
  }

  std::vector<std::unique_ptr<Execution>> alone;
  for (std::size_t n = 0; n < kLengthsQ.size(); ++n) {
    alone.push_back(
        std::make_unique<Execution>(graph_of(backward, false, kLengthsQ[n], kLengthsKv[n])));
    Execution& one = *alone.back();
    one.fill(20 + n);
    // A log-sum-exp above the largest score: weights stay below 1.
    for (std::int64_t i = 0; backward && i < kLengthsQ[n] * kHeads; ++i) one.set(5, i, 40);
    for (std::int64_t i = 0; i < kLengthsQ[n]; ++i) {
      for (std::int64_t j = 0; j < kLengthsKv[n]; ++j) {
        one.set(bias, i * kMaxKv + j, all.at(bias, i * kMaxKv + j));
      }
    }
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      const auto id = static_cast<ir::TensorId>(i);
      std::copy(one.bytes(id).begin(), one.bytes(id).end(),
                all.data(id) + places(inputs[i])[n] * inputs[i].row() * 4);
    }
    one.run();
  }
  all.run();

  for (std::size_t i = 0; i < results.size(); ++i) {
    const Part& part = results[i];
    const ir::TensorId id = all.output(static_cast<int>(i));
    const Lengths& lengths = part.keys ? kLengthsKv : kLengthsQ;
    for (std::size_t n = 0; n < lengths.size(); ++n) {
      const std::int64_t begin = places(part)[n];
      const std::vector<std::byte>& expected =
          alone[n]->bytes(alone[n]->output(static_cast<int>(i)));
      EXPECT_TRUE(std::equal(expected.begin(), expected.end(), at_token(all, id, part, begin)))
          << "result " << i << " of sequence " << n;
      for (const std::byte* gap = at_token(all, id, part, begin + lengths[n]);
           gap < at_token(all, id, part, places(part)[n + 1]); ++gap) {
        ASSERT_EQ(*gap, std::byte{0}) << "result " << i << " behind sequence " << n;
      }
    }
  }
  if (!backward) return;
  for (std::int64_t i = 0; i < kMaxQ; ++i) {
    for (std::int64_t j = 0; j < kMaxKv; ++j) {
      double sum = 0;
      double size = 0;
      for (std::size_t n = 0; n < kLengthsQ.size(); ++n) {
        if (i < kLengthsQ[n] && j < kLengthsKv[n]) {
          const double term = alone[n]->at(alone[n]->output(3), i * kMaxKv + j);
          sum += term;
          size += std::fabs(term);
        }
      }
      ASSERT_NEAR(all.at(all.output(3), i * kMaxKv + j), sum, 1e-5 * size) << i << ", " << j;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(CpuAttention, Ragged, testing::Bool());

TEST(CpuAttention, BadOffsetsAreErrorsThatSayWhatIsAllowed) {
  struct Bad {
    Lengths lengths, places;
    std::int64_t sequences;
    const char* words;
  };
  for (const Bad& bad : std::vector<Bad>{
           {{0, 5, 4}, {0, 8, 16}, 2, "gives sequence 1 -1 tokens; expected 0 to 131"},
           {{0, 5, 200}, {0, 8, 300}, 2, "gives sequence 1 195 tokens; expected 0 to 131"},
           {{0, 5, 9}, {0, 4, 16}, 2, "has 4 tokens of room for sequence 0, which has 5"},
           {{0, 5, 9}, {0, 8, 513}, 2, "ends with 513; the tensor has 512 tokens"},
           {{0, 5, 9}, {-1, 8, 16}, 2, "begins with -1; expected 0"},
           {{0, 5, 9}, {0, 8, 16}, 8, "'sequences' is 8; expected 0 to 7"},
           {{0, 5, 9}, {0, 8, 16}, -1, "'sequences' is -1; expected 0 to 7"}}) {
    Execution e{graph_of(false, true, kTokens, kTokens)};
    for (std::int64_t n = 0; n < 3; ++n) {
      for (const ir::TensorId table : {4, 5, 6, 7}) {
        e.set(table, n, static_cast<double>(n * 8));
      }
      e.set(4, n, static_cast<double>(bad.lengths[static_cast<std::size_t>(n)]));
      e.set(6, n, static_cast<double>(bad.places[static_cast<std::size_t>(n)]));
    }
    e.set(8, 0, static_cast<double>(bad.sequences));
    const Status status = e.try_run();
    ASSERT_FALSE(status.ok()) << bad.words;
    EXPECT_EQ(status.error().kind, ErrorKind::invalid_argument);
    EXPECT_NE(status.error().message.find(bad.words), std::string::npos) << status.error().message;
  }
}

// ---- paged caches ------------------------------------------------------------------------------

constexpr std::int64_t kPageK = 5;
constexpr std::int64_t kPageV = 32;
constexpr std::int64_t kPagesK = 60;
constexpr std::int64_t kPagesV = 11;

ir::Graph paged_graph(bool paged, DType dtype) {
  GraphOf g;
  const auto q = g.input("q", dtype, {2, kHeads, 3, kDepth});
  const auto k = paged ? g.input("k", dtype, {kPagesK, kKvHeads, kPageK, kDepth})
                       : g.input("k", dtype, {2, kKvHeads, kMaxKv, kDepth});
  const auto v = paged ? g.input("v", dtype, {kPagesV, kKvHeads, kPageV, kValueDepth})
                       : g.input("v", dtype, {2, kKvHeads, kMaxKv, kValueDepth});
  auto in = operands({{Slot::q, q}, {Slot::k, k}, {Slot::v, v}});
  in[Slot::seqlen_q] = g.input("lengths_q", DType::i32, {2, 1, 1, 1});
  in[Slot::seqlen_kv] = g.input("lengths_kv", DType::i32, {2, 1, 1, 1});
  ir::AttentionRule rule;
  rule.padding = true;
  rule.alignment = ir::Alignment::bottom_right;
  rule.right = 0;
  if (paged) {
    rule.max_kv = kMaxKv;
    in[Slot::page_table_k] = g.input("table_k", DType::i32, {2, 1, 29, 1});
    in[Slot::page_table_v] = g.input("table_v", DType::i32, {2, 1, 5, 1});
  }
  return g.finish(g.ops(ir::Attention{rule}, in, 2));
}

TEST(CpuAttention, APagedCacheIsADenseOne) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Execution dense{paged_graph(false, dtype)};
    Execution paged{paged_graph(true, dtype)};
    dense.fill(2);
    std::mt19937_64 random{5};
    // Entries behind the last page are no pages.
    for (const auto& [table, size] : {std::pair{5, 58}, {6, 10}}) {
      for (std::int64_t i = 0; i < size; ++i) paged.set(table, i, -5);
    }
    std::copy(dense.bytes(0).begin(), dense.bytes(0).end(), paged.data(0));
    const Lengths lengths{141, 38};
    for (const auto& [cache, page, pages, depth, per_sequence] :
         {std::array<std::int64_t, 5>{1, kPageK, kPagesK, kDepth, 29},
          std::array<std::int64_t, 5>{2, kPageV, kPagesV, kValueDepth, 5}}) {
      const auto id = static_cast<ir::TensorId>(cache);
      for (std::int64_t i = 0; i < pages * kKvHeads * page * depth; ++i) paged.set(id, i, NAN);
      std::vector<std::int64_t> order(static_cast<std::size_t>(pages));
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random);
      for (std::int64_t b = 0; b < 2; ++b) {
        const std::int64_t length = lengths[static_cast<std::size_t>(b)];
        for (const ir::TensorId which : {3, 4}) {
          for (Execution* e : {&dense, &paged}) {
            e->set(which, b, static_cast<double>(which == 3 ? 3 - b : length));
          }
        }
        for (std::int64_t j = 0; j < length; ++j) {
          if (j % page == 0) {
            paged.set(id + 4, b * per_sequence + j / page, static_cast<double>(order.back()));
            order.pop_back();
          }
          const auto number =
              static_cast<std::int64_t>(paged.at(id + 4, b * per_sequence + j / page));
          for (std::int64_t h = 0; h < kKvHeads; ++h) {
            for (std::int64_t c = 0; c < depth; ++c) {
              paged.set(id, ((number * kKvHeads + h) * page + j % page) * depth + c,
                        dense.at(id, ((b * kKvHeads + h) * kMaxKv + j) * depth + c));
            }
          }
        }
      }
    }
    dense.run();
    paged.run();
    for (int i = 0; i < 2; ++i) {
      EXPECT_EQ(paged.bytes(paged.output(i)), dense.bytes(dense.output(i))) << i;
    }
    paged.set(5, 3, static_cast<double>(kPagesK));
    const Status status = paged.try_run();
    ASSERT_FALSE(status.ok());
    EXPECT_NE(
        status.error().message.find("'table_k' gives page 3 of sequence 0 as 60; expected 0 to 59"),
        std::string::npos)
        << status.error().message;
  }
}

// ---- appends -----------------------------------------------------------------------------------

ir::Graph append_graph(bool paged) {
  GraphOf g;
  const Dims shape = paged ? Dims{7, 2, 4, 3} : Dims{3, 2, 8, 3};
  const auto cache = g.input("cache", DType::bf16, shape);
  const auto fresh = g.input("fresh", DType::bf16, {3, 2, 5, 3}, {30, 15, 3, 1});
  const auto lengths = g.input("lengths", DType::i32, {3, 1, 1, 1});
  const auto table = paged ? g.input("table", DType::i32, {3, 1, 2, 1}) : ir::kNone;
  return g.finish({g.op(ir::CacheAppend{}, {cache, fresh, lengths, table})});
}

TEST(CpuAttention, AppendsWriteTheLastTokensAndNothingElse) {
  for (const bool paged : {false, true}) {
    for (const bool in_place : {false, true}) {
      Execution e{append_graph(paged)};
      e.fill(9);
      const Lengths lengths{8, 3, 0};  // the second one's first two tokens have no place
      const std::vector<std::vector<std::int64_t>> pages{{6, 2}, {0, 5}, {-1, -1}};
      for (std::int64_t b = 0; b < 3; ++b) {
        e.set(2, b, static_cast<double>(lengths[static_cast<std::size_t>(b)]));
        for (std::int64_t p = 0; paged && p < 2; ++p) {
          e.set(
              3, b * 2 + p,
              static_cast<double>(pages[static_cast<std::size_t>(b)][static_cast<std::size_t>(p)]));
        }
      }
      std::vector<double> expected;
      for (std::int64_t i = 0; i < (paged ? 168 : 144); ++i) expected.push_back(e.at(0, i));
      for (std::int64_t b = 0; b < 3; ++b) {
        for (std::int64_t t = 0; t < 5; ++t) {
          const std::int64_t s = lengths[static_cast<std::size_t>(b)] - 5 + t;
          for (std::int64_t h = 0; s >= 0 && h < 2; ++h) {
            const std::int64_t row =
                paged ? (pages[static_cast<std::size_t>(b)][static_cast<std::size_t>(s / 4)] * 2 +
                         h) * 4 +
                            s % 4
                      : (b * 2 + h) * 8 + s;
            for (std::int64_t c = 0; c < 3; ++c) {
              expected[static_cast<std::size_t>(row * 3 + c)] =
                  e.at(1, ((b * 2 + h) * 5 + t) * 3 + c);
            }
          }
        }
      }
      if (in_place) e.bind(e.output(), e.data(0));
      e.run();
      for (std::size_t i = 0; i < expected.size(); ++i) {
        ASSERT_EQ(e.at(e.output(), static_cast<std::int64_t>(i)), expected[i])
            << (paged ? "paged" : "dense") << (in_place ? " in place " : " ") << i;
      }
      e.set(2, 1, 9);
      const Status status = e.try_run();
      ASSERT_FALSE(status.ok());
      EXPECT_NE(status.error().message.find("'lengths' of sequence 1 is 9; expected 0 to 8"),
                std::string::npos)
          << status.error().message;
    }
  }
}

}  // namespace
}  // namespace lawson::cpu
