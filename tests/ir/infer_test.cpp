// Shape and type inference: the results, and the refusals with what they name.
#include "ir/infer.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <optional>

namespace lawson::ir {
namespace {

Tensor tensor(DType dtype, Dims shape, std::string name = "x") {
  Tensor result;
  result.name = std::move(name);
  result.dtype = dtype;
  result.strides = contiguous_strides(shape);
  result.shape = std::move(shape);
  return result;
}

Result<std::vector<Inferred>> infer_all(const Op& op, const std::vector<Tensor>& operands,
                                        std::optional<DType> dtype = std::nullopt) {
  std::vector<const Tensor*> pointers;
  for (const Tensor& operand : operands) pointers.push_back(&operand);
  return infer(op, pointers, dtype);
}

std::string result_text(const Op& op, const std::vector<Tensor>& operands,
                        std::optional<DType> dtype = std::nullopt) {
  const auto inferred = infer_all(op, operands, dtype);
  if (!inferred.ok()) return "error: " + inferred.error().message;
  return fmt::format("{}{}", to_string((*inferred)[0].dtype), to_string((*inferred)[0].shape));
}

void expect_refused(const Op& op, const std::vector<Tensor>& operands,
                    const std::vector<std::string>& parts,
                    std::optional<DType> dtype = std::nullopt) {
  const auto inferred = infer_all(op, operands, dtype);
  ASSERT_FALSE(inferred.ok()) << op_name(op);
  EXPECT_EQ(inferred.error().kind, ErrorKind::invalid_argument);
  EXPECT_TRUE(inferred.error().message.starts_with(op_name(op) + ":")) << inferred.error().message;
  for (const std::string& part : parts) {
    EXPECT_NE(inferred.error().message.find(part), std::string::npos)
        << "'" << part << "' is not in: " << inferred.error().message;
  }
}

const Tensor kF32 = tensor(DType::f32, {2, 3, 4});

TEST(Infer, Matmul) {
  const auto a = tensor(DType::bf16, {2, 3, 4});
  EXPECT_EQ(result_text(Matmul{}, {a, tensor(DType::bf16, {2, 4, 5})}), "bf16[2, 3, 5]");
  EXPECT_EQ(result_text(Matmul{}, {a, tensor(DType::bf16, {4, 5})}), "bf16[2, 3, 5]");
  EXPECT_EQ(result_text(Matmul{}, {a, tensor(DType::f16, {1, 4, 5})}), "f32[2, 3, 5]");
  EXPECT_EQ(result_text(Matmul{}, {a, tensor(DType::bf16, {4, 5})}, DType::f32), "f32[2, 3, 5]");
  EXPECT_EQ(result_text(Matmul{}, {tensor(DType::i8, {3, 4}), tensor(DType::i8, {4, 5})}),
            "i32[3, 5]");
  expect_refused(Matmul{}, {a, tensor(DType::bf16, {2, 5, 4}, "y")}, {"4 and 5", "x", "y"});
  expect_refused(Matmul{}, {a, tensor(DType::bf16, {3, 4, 5})}, {"batch"});
  expect_refused(Matmul{}, {a, tensor(DType::bf16, {4})}, {"rank 2"});
  expect_refused(Matmul{}, {a, tensor(DType::i8, {4, 5})}, {"float with integer"});
  expect_refused(Matmul{}, {tensor(DType::boolean, {3, 4}), tensor(DType::i8, {4, 5})}, {"bool"});
}

TEST(Infer, PointwisePromotesAndBroadcasts) {
  EXPECT_EQ(result_text(Binary{}, {kF32, tensor(DType::bf16, {3, 1})}), "f32[2, 3, 4]");
  EXPECT_EQ(result_text(Binary{}, {tensor(DType::i8, {4}), tensor(DType::bf16, {3, 1})}),
            "bf16[3, 4]");
  EXPECT_EQ(result_text(Binary{}, {tensor(DType::f16, {}), tensor(DType::bf16, {})}), "f32[]");
  EXPECT_EQ(result_text(Compare{}, {kF32, kF32}), "bool[2, 3, 4]");
  EXPECT_EQ(result_text(Select{}, {tensor(DType::boolean, {3, 1}), kF32, kF32}), "f32[2, 3, 4]");
  EXPECT_EQ(result_text(Unary{UnaryKind::relu}, {tensor(DType::i8, {4})}), "i8[4]");
  EXPECT_EQ(result_text(Convert{}, {kF32}, DType::i8), "i8[2, 3, 4]");
  expect_refused(Binary{}, {kF32, tensor(DType::f32, {2, 4})}, {"[2, 3, 4]", "[2, 4]"});
  expect_refused(Binary{}, {kF32, tensor(DType::boolean, {4})}, {"bool"});
  expect_refused(Unary{UnaryKind::exp}, {tensor(DType::i8, {4})}, {"integer", "convert"});
  expect_refused(Select{}, {kF32, kF32, kF32}, {"bool"});
  expect_refused(Logical{}, {kF32, kF32}, {"bool"});
  expect_refused(Convert{}, {kF32}, {"dtype"});
  expect_refused(Clamp{2, 1}, {kF32}, {"min 2", "max 1"});
}

TEST(Infer, Reductions) {
  EXPECT_EQ(result_text(Reduce{ReduceKind::sum, {0, 2}, false}, {kF32}), "f32[3]");
  EXPECT_EQ(result_text(Reduce{ReduceKind::sum, {0, 2}, true}, {kF32}), "f32[1, 3, 1]");
  expect_refused(Reduce{ReduceKind::sum, {}, false}, {kF32}, {"axes"});
  expect_refused(Reduce{ReduceKind::sum, {0}, false}, {tensor(DType::f32, {})}, {"axes"});
  EXPECT_EQ(result_text(Reduce{ReduceKind::sum, {}, true}, {tensor(DType::f32, {})}), "f32[]");
  expect_refused(Reduce{ReduceKind::sum, {2, 0}, false}, {kF32}, {"ascending"});
  expect_refused(Reduce{ReduceKind::sum, {1, 1}, false}, {kF32}, {"unique"});
  expect_refused(Reduce{ReduceKind::sum, {3}, false}, {kF32}, {"[0, 3)"});
  expect_refused(Reduce{ReduceKind::max, {0}, false}, {tensor(DType::f32, {0, 3})}, {"empty"});
  EXPECT_EQ(result_text(Reduce{ReduceKind::sum, {0}, false}, {tensor(DType::f32, {0, 3})}),
            "f32[3]");
}

TEST(Infer, Views) {
  EXPECT_EQ(result_text(Reshape{{6, 4}}, {kF32}), "f32[6, 4]");
  EXPECT_EQ(result_text(Broadcast{{5, 2, 3, 4}}, {kF32}), "f32[5, 2, 3, 4]");
  EXPECT_EQ(result_text(Transpose{{2, 0, 1}}, {kF32}), "f32[4, 2, 3]");
  EXPECT_EQ(result_text(Slice{{0, 1, 0}, {2, 3, 4}, {1, 1, 3}}, {kF32}), "f32[2, 2, 2]");
  EXPECT_EQ(result_text(Iota{1, {2, 3}}, {}), "i32[2, 3]");
  EXPECT_EQ(result_text(Constant{2.5}, {}, DType::f16), "f16[]");
  expect_refused(Reshape{{5, 5}}, {kF32}, {"element counts"});
  expect_refused(Reshape{{INT64_MAX, INT64_MAX}}, {kF32}, {"element counts"});
  expect_refused(Broadcast{{2, 3}}, {kF32}, {"[2, 3]"});
  expect_refused(Transpose{{0, 0, 1}}, {kF32}, {"permutation"});
  expect_refused(Slice{{0, 0, 0}, {2, 3, 5}, {1, 1, 1}}, {kF32}, {"axis 2"});
  expect_refused(Slice{{0, 0, 0}, {2, 3, 4}, {1, 1, 0}}, {kF32}, {"stride"});
  expect_refused(Slice{{0}, {2}, {1}}, {kF32}, {"3 entries"});
  expect_refused(Iota{2, {2, 3}}, {}, {"axis 2"});
}

// Operands by AttentionSlots.
struct Case {
  using Slot = AttentionSlots;
  Attention op;
  Tensor q = tensor(DType::bf16, {2, 8, 16, 64}, "q");
  Tensor k = tensor(DType::bf16, {2, 2, 32, 64}, "k");
  Tensor v = tensor(DType::bf16, {2, 2, 32, 48}, "v");
  std::map<std::size_t, Tensor> others;

  void set(Slot::Shared slot, DType dtype, Dims shape, bool by_value = false) {
    others[slot] = tensor(dtype, std::move(shape), "x");
    others[slot].by_value = by_value;
  }
  std::vector<const Tensor*> operands(std::size_t count) const {
    std::vector<const Tensor*> all(count, nullptr);
    all[Slot::q] = &q;
    all[Slot::k] = &k;
    all[Slot::v] = &v;
    for (const auto& [slot, other] : others) all[slot] = &other;
    return all;
  }
  Result<std::vector<Inferred>> infer_it() const {
    return infer(op, operands(Attention::kInputs), std::nullopt);
  }
  std::string refusal() const {
    const auto inferred = infer_it();
    return inferred.ok() ? "accepted" : inferred.error().message;
  }
};

// Both sides ragged: three sequences of at most 5 queries and 7 keys.
Case ragged_case() {
  Case item;
  item.q.shape = {1, 8, 40, 64};
  item.k.shape = {1, 2, 50, 64};
  item.v.shape = {1, 2, 50, 48};
  item.op.rule.max_q = 5;
  item.op.rule.max_kv = 7;
  item.set(AttentionSlots::cu_seqlens_q, DType::i32, {4, 1, 1, 1});
  item.set(AttentionSlots::cu_seqlens_kv, DType::i32, {4, 1, 1, 1});
  return item;
}

// Two sequences of up to 30 keys in pages of 8 and 16 tokens.
Case paged_case() {
  Case item;
  item.k.shape = {9, 2, 8, 64};
  item.v.shape = {5, 2, 16, 48};
  item.op.rule.padding = true;
  item.op.rule.max_kv = 30;
  item.set(AttentionSlots::seqlen_q, DType::i32, {2, 1, 1, 1});
  item.set(AttentionSlots::seqlen_kv, DType::i32, {2, 1, 1, 1});
  item.set(AttentionSlots::page_table_k, DType::i32, {2, 1, 4, 1});
  item.set(AttentionSlots::page_table_v, DType::i32, {2, 1, 2, 1});
  return item;
}

TEST(Infer, Attention) {
  const auto inferred = Case{}.infer_it();
  ASSERT_TRUE(inferred.ok()) << inferred.error().message;
  EXPECT_EQ((*inferred)[Attention::o].shape, (Dims{2, 8, 16, 48}));
  EXPECT_EQ((*inferred)[Attention::o].dtype, DType::bf16);
  EXPECT_EQ((*inferred)[Attention::stats].shape, (Dims{2, 8, 16, 1}));
  EXPECT_EQ((*inferred)[Attention::stats].dtype, DType::f32);
}

TEST(Infer, RaggedAndPagedAttention) {
  Case item = ragged_case();
  item.op.rule.dropout = 0.5;
  item.set(AttentionSlots::seed, DType::i64, {1, 1, 1, 1});
  item.set(AttentionSlots::offset, DType::i64, {1, 1, 1, 1});
  item.set(AttentionSlots::sequences, DType::i32, {1, 1, 1, 1}, true);
  item.set(AttentionSlots::bias, DType::f32, {3, 1, 5, 7});
  auto inferred = item.infer_it();
  ASSERT_TRUE(inferred.ok()) << inferred.error().message;
  EXPECT_EQ((*inferred)[Attention::o].shape, (Dims{1, 8, 40, 48}));
  EXPECT_EQ((*inferred)[Attention::stats].shape, (Dims{1, 8, 40, 1}));
  EXPECT_EQ((*inferred)[Attention::max_logit].shape, (Dims{1, 8, 40, 1}));
  EXPECT_EQ((*inferred)[Attention::dropped].shape, (Dims{3, 8, 5, 7}));
  EXPECT_EQ((*inferred)[Attention::dropped].dtype, DType::u8);

  inferred = paged_case().infer_it();
  ASSERT_TRUE(inferred.ok()) << inferred.error().message;
  EXPECT_EQ((*inferred)[Attention::o].shape, (Dims{2, 8, 16, 48}));
  const Case paged = paged_case();
  auto operands = paged.operands(AttentionBackward::kInputs);
  operands[AttentionBackward::o] = operands[AttentionBackward::dout] = &paged.q;
  operands[AttentionBackward::stats] = &paged.q;
  const auto backward = infer(AttentionBackward{paged.op.rule}, operands, std::nullopt);
  ASSERT_FALSE(backward.ok());
  EXPECT_NE(backward.error().message.find("no gradients"), std::string::npos);
}

void refused(Case item, const std::function<void(Case&)>& change, std::string_view part) {
  change(item);
  EXPECT_NE(item.refusal().find(part), std::string::npos)
      << "'" << part << "' is not in: " << item.refusal();
}

TEST(Infer, AttentionRefusals) {
  using Slot = AttentionSlots;
  const auto dense = [](const std::function<void(Case&)>& change, std::string_view part) {
    refused(Case{}, change, part);
  };
  dense([](Case& c) { c.q.shape = {8, 16, 64}; }, "rank 4");
  dense([](Case& c) { c.k.dtype = DType::f16; }, "one dtype");
  dense([](Case& c) { c.k.shape[3] = 32; }, "[2, 2, 32, 64]");
  dense([](Case& c) { c.v.shape[2] = 31; }, "[2, 2, 32, 48]");
  dense([](Case& c) { c.k.shape[1] = c.v.shape[1] = 3; }, "multiple of 3");
  dense([](Case& c) { c.k.shape[1] = c.v.shape[1] = 0; }, "multiple of 0");
  dense([](Case& c) { c.q.dtype = c.k.dtype = c.v.dtype = DType::i8; }, "float");
  dense([](Case& c) { c.set(Slot::scale, DType::f32, {1, 1, 1, 1}); }, "by-value");
  dense([](Case& c) { c.set(Slot::scale, DType::f16, {1, 1, 1, 1}, true); }, "f32");
  dense([](Case& c) { c.set(Slot::bias, DType::f32, {2, 3, 16, 32}); }, "broadcast");
  dense([](Case& c) { c.set(Slot::bias, DType::f32, {16, 32}); }, "broadcast");
  dense([](Case& c) { c.set(Slot::bias, DType::boolean, {2, 8, 16, 32}); }, "float type");
  dense([](Case& c) { c.set(Slot::mask, DType::i32, {2, 1, 16, 32}); }, "float type or bool");
  dense([](Case& c) { c.set(Slot::mask, DType::boolean, {2, 1, 16, 31}); }, "broadcast");
  dense([](Case& c) { c.op.rule.padding = true; }, "padding needs seqlen_q and seqlen_kv");
  dense([](Case& c) { c.set(Slot::seqlen_q, DType::i32, {2, 1, 1, 1}); }, "padding needs");
  dense(
      [](Case& c) {
        c.op.rule.padding = true;
        c.set(Slot::seqlen_q, DType::i32, {2, 1, 1, 1});
        c.set(Slot::seqlen_kv, DType::i64, {2, 1, 1, 1});
      },
      "i32");
  dense([](Case& c) { c.op.rule.softmax = SoftmaxKind::learnable; }, "sink");
  dense([](Case& c) { c.set(Slot::sink, DType::f32, {1, 8, 1, 1}); }, "sink");
  dense([](Case& c) { c.set(Slot::slopes, DType::f32, {1, 8, 1, 1}); }, "alibi");
  dense([](Case& c) { c.op.rule.pre_scale_bias = true; }, "pre_scale_bias");
  dense([](Case& c) { c.op.rule.left = -2; }, "window [-2, -1]");
  dense([](Case& c) { c.op.rule.softcap = -1; }, "softcap -1");
  dense([](Case& c) { c.op.rule.dropout = 1; }, "dropout 1");
  dense([](Case& c) { c.op.rule.dropout = 0.5; }, "seed and offset");
  dense([](Case& c) { c.set(Slot::seed, DType::i64, {1, 1, 1, 1}); }, "seed and offset");
  dense([](Case& c) { c.op.rule.max_q = 3; }, "max_q 3");
  dense([](Case& c) { c.op.rule.max_kv = 3; }, "max_kv 3");
  dense([](Case& c) { c.set(Slot::sequences, DType::i32, {1, 1, 1, 1}, true); }, "only ragged");
  dense([](Case& c) { c.set(Slot::cu_seqlens_q_padded, DType::i32, {3, 1, 1, 1}); }, "ragged side");
}

TEST(Infer, RaggedAndPagedRefusals) {
  using Slot = AttentionSlots;
  const auto ragged = [](const std::function<void(Case&)>& change, std::string_view part) {
    refused(ragged_case(), change, part);
  };
  ragged([](Case& c) { c.q.shape[0] = 2; }, "ragged q");
  ragged([](Case& c) { c.k.shape[0] = c.v.shape[0] = 3; }, "expected shape [1, 2, 50, 64]");
  ragged([](Case& c) { c.set(Slot::cu_seqlens_kv, DType::i32, {5, 1, 1, 1}); }, "[4, 1, 1, 1]");
  ragged([](Case& c) { c.set(Slot::cu_seqlens_q, DType::i64, {4, 1, 1, 1}); }, "i32");
  ragged([](Case& c) { c.op.rule.padding = true; }, "both sides are ragged");
  ragged([](Case& c) { c.set(Slot::sequences, DType::i32, {1, 1, 1, 1}); }, "by-value");
  ragged([](Case& c) { c.set(Slot::bias, DType::f32, {1, 1, 16, 32}); }, "broadcast");
  const auto paged = [](const std::function<void(Case&)>& change, std::string_view part) {
    refused(paged_case(), change, part);
  };
  paged([](Case& c) { c.others.erase(Slot::page_table_v); }, "come together");
  paged([](Case& c) { c.op.rule.padding = false; }, "need padding");
  paged([](Case& c) { c.op.rule.max_kv = 33; }, "cannot hold max_kv = 33");
  paged([](Case& c) { c.set(Slot::page_table_k, DType::i32, {3, 1, 4, 1}); }, "page table");
}

TEST(Infer, CacheAppend) {
  const Tensor cache = tensor(DType::bf16, {9, 2, 8, 64}, "cache");
  const Tensor fresh = tensor(DType::bf16, {2, 2, 3, 64}, "fresh");
  const Tensor lengths = tensor(DType::i32, {2, 1, 1, 1}, "lengths");
  const Tensor table = tensor(DType::i32, {2, 1, 4, 1}, "table");
  const auto paged = infer(CacheAppend{}, {&cache, &fresh, &lengths, &table}, std::nullopt);
  ASSERT_TRUE(paged.ok()) << paged.error().message;
  EXPECT_EQ((*paged)[0].shape, cache.shape);
  expect_refused(CacheAppend{}, {cache, fresh, lengths}, {"takes 4 operands"});
  const auto dense = infer(CacheAppend{}, {&cache, &fresh, &lengths, nullptr}, std::nullopt);
  ASSERT_FALSE(dense.ok());  // a dense cache has the batch of what is new
  EXPECT_NE(dense.error().message.find("batch 2"), std::string::npos) << dense.error().message;
  const Tensor other = tensor(DType::f16, {2, 2, 3, 64}, "fresh");
  expect_refused(CacheAppend{}, {cache, other, lengths, table}, {"dtype bf16"});
}

TEST(Infer, OperandCountsAndAbsentOperands) {
  expect_refused(Matmul{}, {kF32}, {"takes 2 operands, got 1"});
  const auto inferred = infer(Matmul{}, {&kF32, nullptr}, std::nullopt);
  ASSERT_FALSE(inferred.ok());
  EXPECT_NE(inferred.error().message.find("operand 1 is missing"), std::string::npos);
}

TEST(Infer, PromotionIsSymmetricAndKeepsEqualTypes) {
  for (int i = 0; i < kDTypeCount; ++i) {
    for (int j = 0; j < kDTypeCount; ++j) {
      const auto a = static_cast<DType>(i);
      const auto b = static_cast<DType>(j);
      EXPECT_EQ(promote(a, b), promote(b, a)) << to_string(a) << " " << to_string(b);
    }
    EXPECT_EQ(promote(static_cast<DType>(i), static_cast<DType>(i)), static_cast<DType>(i));
  }
}

TEST(Ops, EveryNameReadsBack) {
  const auto names = all_op_names();
  EXPECT_GE(names.size(), 60U);
  for (const std::string& name : names) {
    const auto op = op_from_name(name);
    ASSERT_TRUE(op) << name;
    EXPECT_EQ(op_name(*op), name);
  }
  EXPECT_FALSE(op_from_name("softmax"));
  EXPECT_FALSE(op_from_name(""));
}

}  // namespace
}  // namespace lawson::ir
