// What graphs become: which ops share a step, what is copied, how much workspace is asked for.
#include "engine/cpu/program.h"

#include "helpers.h"

namespace lawson::cpu {
namespace {

using ir::BinaryKind;
using ir::UnaryKind;

Program program_of(const ir::Graph& graph) {
  return make_program(graph, kernels_for(Isa::generic)[0]);
}

TEST(Program, AnEpilogueIsPartOfItsMatmul) {
  GraphOf g;
  const auto a = g.input("a", DType::bf16, {64, 32});
  const auto b = g.input("b", DType::bf16, {32, 48});
  const auto bias = g.input("bias", DType::f32, {48});
  auto c = g.op(ir::Matmul{}, {a, b}, DType::f32);
  c = g.op(ir::Binary{BinaryKind::add}, {c, bias});
  c = g.op(ir::Unary{UnaryKind::gelu}, {c});
  c = g.op(ir::Convert{}, {c}, DType::bf16);
  const Program program = program_of(g.finish({c}));
  ASSERT_EQ(program.steps.size(), 1U);
  EXPECT_TRUE(std::holds_alternative<MatmulStep>(program.steps[0]));
  // Only the packed right operand: nothing of the size of C.
  EXPECT_EQ(program.workspace_bytes, 32 * 48 * 4);
}

TEST(Program, ConversionsOfOperandsHappenWhilePacking) {
  GraphOf g;
  const auto x = g.input("x", DType::i8, {2, 16, 16});
  const auto y = g.input("y", DType::bf16, {2, 16, 16});
  const auto z = g.input("z", DType::f32, {2, 16, 16});
  const auto a = g.op(ir::Convert{}, {x}, DType::bf16);
  const auto c = g.op(ir::Convert{}, {g.op(ir::Matmul{}, {a, y})}, DType::f32);
  const Program program = program_of(g.finish({g.op(ir::Binary{BinaryKind::add}, {c, z})}));
  EXPECT_EQ(program.steps.size(), 1U);
}

TEST(Program, GatedUnitsAreTwoMatmuls) {
  GraphOf g;
  const auto x = g.input("x", DType::bf16, {32, 64});
  const auto w = g.input("w", DType::bf16, {64, 96});
  const auto v = g.input("v", DType::bf16, {64, 96});
  const auto gate = g.op(ir::Unary{UnaryKind::silu}, {g.op(ir::Matmul{}, {x, w}, DType::f32)});
  const auto up = g.op(ir::Matmul{}, {x, v}, DType::f32);
  const Program program = program_of(g.finish({g.op(ir::Binary{BinaryKind::mul}, {gate, up})}));
  EXPECT_EQ(program.steps.size(), 2U);
}

TEST(Program, AReductionReadsItsOperandOnTheWay) {
  GraphOf g;
  const auto x = g.input("x", DType::f32, {8, 100});
  const auto y = g.op(ir::Binary{BinaryKind::mul}, {x, x});
  const Program program =
      program_of(g.finish({g.op(ir::Reduce{ir::ReduceKind::mean, {1}, true}, {y})}));
  EXPECT_EQ(program.steps.size(), 1U);
  EXPECT_EQ(program.workspace_bytes, 0);
}

TEST(Program, ViewsAreStrides) {
  GraphOf g;
  const auto x = g.input("x", DType::f32, {4, 6, 10});
  auto y = g.op(ir::Transpose{{2, 0, 1}}, {x});
  y = g.op(ir::Slice{{1, 0, 2}, {9, 4, 6}, {2, 1, 3}}, {y});
  y = g.op(ir::Reshape{{4, 1, 4, 2}}, {y});
  y = g.op(ir::Broadcast{{3, 4, 5, 4, 2}}, {y});
  const Program program = program_of(g.finish({g.op(ir::Unary{UnaryKind::neg}, {y})}));
  EXPECT_EQ(program.steps.size(), 1U);
  EXPECT_EQ(program.workspace_bytes, 0);
}

TEST(Program, AReshapeThatStridesCannotSayIsACopy) {
  GraphOf g;
  const auto x = g.input("x", DType::f32, {4, 6});
  auto y = g.op(ir::Reshape{{24}}, {g.op(ir::Transpose{{1, 0}}, {x})});
  const Program program = program_of(g.finish({g.op(ir::Unary{UnaryKind::neg}, {y})}));
  EXPECT_EQ(program.steps.size(), 2U);
  EXPECT_EQ(program.workspace_bytes, 128);
}

// Parts are stored where the concatenation has them, also in one inside another.
TEST(Program, ConcatenationsAreNotCopies) {
  GraphOf g;
  const auto a = g.input("a", DType::f32, {24, 16});
  const auto b = g.input("b", DType::f32, {16, 16});
  const auto x = g.input("x", DType::f32, {24, 20});
  const auto product = g.op(ir::Unary{UnaryKind::relu}, {g.op(ir::Matmul{}, {a, b})});
  const auto inner = g.op(ir::Concat{1, 2}, {product, g.op(ir::Unary{UnaryKind::tanh}, {x})});
  const auto sum = g.op(ir::Reduce{ir::ReduceKind::sum, {1}, true}, {inner});
  const Program program = program_of(g.finish({g.op(ir::Concat{1, 2}, {inner, sum})}));
  ASSERT_EQ(program.steps.size(), 3U);
  EXPECT_TRUE(std::holds_alternative<MatmulStep>(program.steps[0]));
  EXPECT_TRUE(std::holds_alternative<PointwiseStep>(program.steps[1]));
  EXPECT_TRUE(std::holds_alternative<ReduceStep>(program.steps[2]));
  // Nothing but the packed right operand.
  EXPECT_EQ(program.workspace_bytes, 16 * 16 * 4);
}

TEST(Program, BlockScalesAreAppliedWhilePacking) {
  GraphOf g;
  const auto a = g.input("a", DType::f8e4m3, {128, 64});
  const auto b = g.input("b", DType::f8e4m3, {64, 128});
  const auto a_scale = g.input("a_scale", DType::f8e8m0, {128, 4});
  const auto b_scale = g.input("b_scale", DType::f8e8m0, {4, 128});
  auto c = g.op(ir::ScaledMatmul{32, true}, {a, b, a_scale, b_scale});
  c = g.op(ir::Unary{UnaryKind::gelu}, {c});
  const Program program = program_of(g.finish({c}));
  EXPECT_EQ(program.steps.size(), 1U);
  EXPECT_EQ(program.workspace_bytes, 64 * 128 * 4);
}

TEST(Program, FewRowsNeedNoPackedOperand) {
  for (const std::int64_t m : {1, 16, 17}) {
    GraphOf g;
    const auto a = g.input("a", DType::bf16, {m, 32});
    const auto b = g.input("b", DType::bf16, {32, 48});
    const Program program = program_of(g.finish({g.op(ir::Matmul{}, {a, b})}));
    EXPECT_EQ(program.workspace_bytes, m > 16 ? 32 * 48 * 4 : 0);
  }
}

TEST(Program, ANormIsAStepBetweenPointwiseOnes) {
  GraphOf g;
  const auto x = g.input("x", DType::bf16, {6, 5, 40});
  const auto scale = g.input("scale", DType::f32, {40});
  const auto y = g.op(ir::Binary{BinaryKind::add}, {x, x});
  const auto out =
      g.results(ir::Norm{ir::NormKind::rms, {2}}, {y, scale, ir::kNone}, {true, false, false});
  const Program program = program_of(g.finish({g.op(ir::Unary{UnaryKind::relu}, {out[0]})}));
  ASSERT_EQ(program.steps.size(), 3U);
  const auto* norm = std::get_if<NormStep>(&program.steps[1]);
  ASSERT_NE(norm, nullptr);
  EXPECT_EQ(norm->kept, Dims{30});
  EXPECT_EQ(norm->slice, Dims{40});
}

TEST(Program, IntermediatesShareWorkspace) {
  GraphOf g;
  auto x = g.input("x", DType::f32, {64, 64});
  for (int i = 0; i < 6; ++i) {
    const auto sum = g.op(ir::Reduce{ir::ReduceKind::max, {1}, true}, {x});
    x = g.op(ir::Binary{BinaryKind::sub}, {x, sum});
  }
  const Program program = program_of(g.finish({x}));
  // Two of the matrices and a column, not six.
  EXPECT_LE(program.workspace_bytes, 2 * 64 * 64 * 4 + 2 * 64 * 4);
}

TEST(Program, AttentionNeedsMemoryLinearInItsLength) {
  const auto bytes = [](std::int64_t length, bool backward) {
    GraphOf g;
    const auto q = g.input("q", DType::bf16, {1, 1, length, 64});
    if (!backward) {
      return program_of(g.finish(g.ops(ir::Attention{}, {q, q, q}, 2))).workspace_bytes;
    }
    const auto stats = g.input("stats", DType::f32, {1, 1, length, 1});
    const auto bias = g.input("bias", DType::f32, {1, 1, length, length});
    return program_of(
               g.finish(g.ops(ir::AttentionBackward{},
                              backward_operands({q, q, q, ir::kNone, bias}, q, q, stats), 4)))
        .workspace_bytes;
  };
  for (const bool backward : {false, true}) {
    const std::int64_t base = bytes(960, backward);
    EXPECT_GT(base, 0);
    EXPECT_LE(bytes(9600, backward), 11 * base);
    // Nothing of the size of the scores.
    EXPECT_LT(bytes(96000, backward), std::int64_t{96000} * 96000 / 8);
  }
}

}  // namespace
}  // namespace lawson::cpu
