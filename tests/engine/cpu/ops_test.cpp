// Ops of fusions one by one: gradients of activations, concatenations, block-scaled matmuls, and
// matmuls of few rows.
#include "oracle.h"

namespace lawson::cpu {
namespace {

using ir::TensorId;
using ir::UnaryKind;

class Draw {
 public:
  explicit Draw(std::uint64_t seed) : random{seed} {}
  std::int64_t below(std::int64_t n) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(n));
  }
  bool chance(int percent) { return below(100) < percent; }
  template <typename T>
  T pick(std::initializer_list<T> items) {
    return items.begin()[below(static_cast<std::int64_t>(items.size()))];
  }
  std::mt19937_64 random;
};

TEST(CpuOps, GradientsOfActivationsInEveryFloatType) {
  Draw draw{1};
  for (int k = 0; k < ir::kUnaryCount; ++k) {
    const auto kind = static_cast<UnaryKind>(k);
    if (!ir::has_gradient_op(kind)) continue;
    for (const DType dtype : {DType::f64, DType::f32, DType::bf16, DType::f16, DType::f8e4m3}) {
      GraphOf g;
      const auto dy = g.input("dy", dtype, {3, 1, 7}, random_strides(draw.random, {3, 1, 7}));
      const auto x = g.input("x", draw.chance(50) ? dtype : DType::f32, {5, 7});
      const bool has_parameter = kind == UnaryKind::elu || kind == UnaryKind::leaky_relu;
      const auto y = g.op(ir::UnaryGrad{kind, has_parameter ? 0.3 : 0}, {dy, x});
      Execution e{g.finish({y})};
      e.fill(static_cast<std::uint64_t>(k));
      EXPECT_GT(expect_oracle(e, std::string{to_string(kind)}), 0.9);
    }
  }
}

// At a kink, where an error bound of x would span both sides.
TEST(CpuOps, GradientsAtTheKinks) {
  const auto slope = [](UnaryKind kind, double parameter, double x) {
    GraphOf g;
    const auto dy = g.input("dy", DType::f32, {1});
    const auto v = g.input("x", DType::f32, {1});
    Execution e{g.finish({g.op(ir::UnaryGrad{kind, parameter}, {dy, v})})};
    e.set(0, 0, 2);
    e.set(1, 0, x);
    e.run();
    return e.at(e.output(), 0) / 2;
  };
  EXPECT_EQ(slope(UnaryKind::relu, 0, 0), 0);
  EXPECT_EQ(slope(UnaryKind::relu6, 0, 0), 0);
  EXPECT_EQ(slope(UnaryKind::relu6, 0, 6), 0);
  EXPECT_EQ(slope(UnaryKind::relu6, 0, 5.5), 1);
  EXPECT_EQ(slope(UnaryKind::leaky_relu, 0.25, 0), 0.25);
  EXPECT_EQ(slope(UnaryKind::elu, 0.5, 0), 0.5);
}

TEST(CpuOps, ConcatenationsOfInputsViewsAndResults) {
  Draw draw{2};
  for (int i = 0; i < 120 && !testing::Test::HasFailure(); ++i) {
    GraphOf g;
    const auto dtype = static_cast<DType>(i % kDTypeCount);
    const std::int64_t rank = 1 + draw.below(4);
    Dims shape;
    for (std::int64_t r = 0; r < rank; ++r) shape.push_back(1 + draw.below(6));
    const std::int64_t axis = draw.below(rank);
    const bool computes = is_float(dtype) && dtype != DType::f8e8m0;
    std::vector<TensorId> parts;
    const std::int64_t count = 2 + draw.below(4);
    for (std::int64_t p = 0; p < count; ++p) {
      Dims own = shape;
      own[static_cast<std::size_t>(axis)] = draw.below(5);
      const std::string name = fmt::format("x{}", p);
      TensorId id = g.input(name, dtype, own, random_strides(draw.random, own));
      switch (draw.below(computes ? 5 : 2)) {
        case 1: {  // reversed axes, and back by another op
          Dims perm;
          for (std::int64_t r = rank; r-- > 0;) perm.push_back(r);
          id = g.op(ir::Transpose{perm}, {g.op(ir::Transpose{perm}, {id})});
          break;
        }
        case 2:
          id = g.op(ir::Unary{UnaryKind::tanh}, {id});
          break;
        case 3:
          id = g.op(ir::Unary{UnaryKind::neg}, {g.op(ir::Unary{UnaryKind::relu}, {id})});
          break;
        case 4:
          id = g.op(ir::Broadcast{own}, {g.op(ir::Constant{1.5}, {}, dtype)});
          break;
        default:
          break;
      }
      parts.push_back(id);
    }
    if (draw.chance(30)) parts.push_back(parts[0]);
    auto y = g.op(ir::Concat{axis, static_cast<std::int64_t>(parts.size())}, parts);
    std::vector<TensorId> outputs;
    if (draw.chance(30)) {
      outputs.push_back(y);  // read again behind
      y = g.op(ir::Concat{axis, 2}, {y, y});
    }
    if (computes && draw.chance(50)) y = g.op(ir::Unary{UnaryKind::abs}, {y});
    if (computes && draw.chance(30)) outputs.push_back(parts[1]);
    std::erase_if(outputs, [&](TensorId id) { return g.tensor(id).name[0] == 'x'; });
    g.output(y, random_strides(draw.random, g.tensor(y).shape));
    Execution e{g.finish(outputs)};
    e.fill(static_cast<std::uint64_t>(i));
    EXPECT_EQ(expect_oracle(e, fmt::format("concatenation {}", i)), 1.0);
  }
}

// Operands of a block-scaled matmul.
struct Scaled {
  std::int64_t m, n, k, block;
  DType a, b, scale;
  bool swizzled;
  Dims batch;
};

Scaled random_scaled(Draw& draw) {
  Scaled s{};
  s.m = 1 + draw.below(draw.chance(30) ? 300 : 40);
  s.n = 1 + draw.below(draw.chance(30) ? 300 : 40);
  s.k = draw.chance(5) ? 0 : 1 + draw.below(200);
  s.block = draw.pick<std::int64_t>({16, 32, 1, 7, 128});
  s.a = draw.pick({DType::f8e4m3, DType::f8e5m2, DType::f4e2m1});
  s.b = draw.pick({DType::f8e4m3, DType::f8e5m2, DType::f4e2m1});
  s.scale = draw.pick({DType::f8e8m0, DType::f8e4m3, DType::f32});
  s.swizzled = draw.chance(50);
  if (draw.chance(50)) s.batch = {draw.pick<std::int64_t>({1, 2, 3})};
  if (draw.chance(20)) s.batch = {2, 2};
  return s;
}

// Scales in (0.5, 2), and NaN in the padding of swizzled ones, which nobody may read.
void fill_scales(Execution& e, TensorId id, bool swizzled, std::int64_t rows, std::int64_t blocks,
                 bool transposed, std::mt19937_64& random) {
  const ir::Tensor& tensor = e.graph().tensor(id);
  const std::int64_t extent = storage_extent(tensor.shape, tensor.strides).value();
  std::uniform_real_distribution<double> uniform{0.5, 2};
  for (std::int64_t i = 0; i < extent; ++i) e.set(id, i, swizzled ? NAN : uniform(random));
  if (!swizzled) return;
  const std::size_t rank = tensor.shape.size();
  const std::int64_t matrix = tensor.shape[rank - 2] * tensor.shape[rank - 1];
  const std::int64_t tiles = tensor.shape[rank - (transposed ? 2 : 1)] / 4;
  for (std::int64_t at = 0; at < extent; at += matrix) {
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < blocks; ++c) {
        const std::int64_t tile = (r / 128) * tiles + c / 4;
        e.set(id, at + tile * 512 + (r % 32) * 16 + (r % 128) / 32 * 4 + c % 4, uniform(random));
      }
    }
  }
}

TEST(CpuOps, BlockScaledMatmulsMeetTheOracle) {
  Draw draw{3};
  double judged = 0;
  constexpr int kProblems = 120;
  for (int i = 0; i < kProblems && !testing::Test::HasFailure(); ++i) {
    const Scaled s = random_scaled(draw);
    const auto padded = [&](std::int64_t n, std::int64_t to) {
      return s.swizzled ? (n + to - 1) / to * to : n;
    };
    const std::int64_t blocks = (s.k + s.block - 1) / s.block;
    const auto shape = [&](std::int64_t rows, std::int64_t columns) {
      Dims result = s.batch;
      result.insert(result.end(), {rows, columns});
      return result;
    };
    GraphOf g;
    const Dims a_shape = shape(s.m, s.k);
    // B without leading dims is shared by all matrices.
    const bool shared = draw.chance(30);
    const auto b_of = [&](Dims dims) {
      return shared ? Dims(dims.end() - 2, dims.end()) : std::move(dims);
    };
    const Dims b_shape = b_of(shape(s.k, s.n));
    auto a = g.input("a", s.a, a_shape, random_strides(draw.random, a_shape));
    const auto b = g.input("b", s.b, b_shape, random_strides(draw.random, b_shape));
    const Dims a_scale_shape = shape(padded(s.m, 128), padded(blocks, 4));
    const Dims b_scale_shape = b_of(shape(padded(blocks, 4), padded(s.n, 128)));
    Dims b_strides = contiguous_strides(b_scale_shape);
    if (draw.chance(50)) {  // as a GPU has it: k is contiguous
      const std::size_t rank = b_strides.size();
      b_strides[rank - 2] = 1;
      b_strides[rank - 1] = std::max<std::int64_t>(b_scale_shape[rank - 2], 1);
    }
    const auto a_scale = g.input("a_scale", s.scale, a_scale_shape);
    const auto b_scale = g.input("b_scale", s.scale, b_scale_shape, b_strides);
    if (draw.chance(30)) a = g.op(ir::Unary{UnaryKind::relu}, {a});
    auto c = g.op(ir::ScaledMatmul{s.block, s.swizzled}, {a, b, a_scale, b_scale},
                  draw.pick({DType::f32, DType::bf16, DType::f16}));
    if (draw.chance(50)) c = g.op(ir::Unary{UnaryKind::gelu}, {c});
    Execution e{g.finish({c})};
    e.fill(static_cast<std::uint64_t>(i));
    fill_scales(e, 2, s.swizzled, s.m, blocks, false, draw.random);
    fill_scales(e, 3, s.swizzled, s.n, blocks, true, draw.random);
    judged += expect_oracle(e, fmt::format("problem {}: {}x{}x{} by {}{}", i, s.m, s.n, s.k,
                                           s.block, s.swizzled ? " swizzled" : ""));
  }
  EXPECT_GT(judged, 0.9 * kProblems);
}

// Few rows read B as it lies: by rows, by columns, converted, computed, and shared by a batch.
TEST(CpuOps, MatmulsOfFewRows) {
  Draw draw{4};
  for (const Kernels* kernels : available_kernels()) {
    for (int i = 0; i < 20 && !testing::Test::HasFailure(); ++i) {
      const std::int64_t m = 1 + draw.below(draw.chance(50) ? 5 : 17);
      const std::int64_t n = 1 + draw.below(draw.chance(15) ? 1500 : 40);
      const std::int64_t k = draw.pick<std::int64_t>({0, 1, 3, 64, 71, 1024, 1025, 2500});
      const DType dtype = draw.pick({DType::f32, DType::f32, DType::bf16, DType::f64});
      const std::int64_t batch = 1 + draw.below(3);
      GraphOf g;
      const Dims a_shape{batch, m, k};
      const Dims b_shape = draw.chance(50) ? Dims{batch, k, n} : Dims{k, n};
      const auto a = g.input("a", dtype, a_shape, random_strides(draw.random, a_shape));
      Dims b_strides = random_strides(draw.random, b_shape);
      if (draw.chance(40)) {
        const std::size_t rank = b_shape.size();
        b_strides = contiguous_strides(b_shape);
        b_strides[rank - 2] = 1;
        b_strides[rank - 1] = std::max<std::int64_t>(k, 1);
      }
      auto b = g.input("b", dtype, b_shape, b_strides);
      if (draw.chance(20)) b = g.op(ir::Unary{UnaryKind::tanh}, {b});
      auto c = g.op(ir::Matmul{}, {a, b}, dtype == DType::f64 ? DType::f64 : DType::f32);
      if (draw.chance(50)) {
        c = g.op(ir::Binary{ir::BinaryKind::add}, {c, g.input("bias", DType::f32, {n})});
      }
      Execution e{g.finish({c}), kernels->name};
      e.fill(static_cast<std::uint64_t>(i));
      EXPECT_GT(expect_oracle(e, fmt::format("{}: {}x{}x{}", kernels->name, m, n, k)), 0.9);
    }
  }
}

}  // namespace
}  // namespace lawson::cpu
