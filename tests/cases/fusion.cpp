// Fusion cases: what is multiplied, what comes in front of it and behind it, and graphs without a
// product. The steps are fusion_steps.h's.
#include <algorithm>

#include "cases/cases.h"
#include "cases/fusion_steps.h"
#include "cases/fusion_writer.h"

namespace lawson::cases {
namespace {

constexpr std::initializer_list<DType> kFloats{DType::f64,    DType::f32,    DType::f16,
                                               DType::bf16,   DType::f8e4m3, DType::f8e5m2,
                                               DType::f8e8m0, DType::f4e2m1};
constexpr std::initializer_list<DType> kIntegers{DType::i64, DType::i32, DType::i8, DType::u8,
                                                 DType::i4};

// Every pair that a matmul may have.
std::vector<std::pair<DType, DType>> matmul_pairs() {
  std::vector<std::pair<DType, DType>> pairs;
  for (const auto& family : {kFloats, kIntegers}) {
    for (const DType a : family) {
      for (const DType b : family) pairs.emplace_back(a, b);
    }
  }
  return pairs;
}

struct Sizes {
  Dims batch;
  std::int64_t m, n, k;
};

class Drawing {
 public:
  Drawing(std::uint64_t seed, int number, Profile profile)
      : dice_{seed * 7919 + static_cast<std::uint64_t>(number)},
        number_{number},
        gpu_{profile == Profile::gpu},
        taste_{gpu_ && dice_.chance(80) ? Taste::usual : Taste::everything},
        writer_{fmt::format("fusion-{}", number)},
        storage_{dice_.pick({DType::bf16, DType::bf16, DType::f16, DType::f16, DType::f32})},
        steps_{dice_, taste_, storage_},
        round_{taste_ == Taste::usual && dice_.chance(80)} {}

  Case draw() {
    if (!gpu_ && dice_.chance(12)) writer_.strict();
    const std::int64_t form = dice_.below(100);
    if (number_ % 4 == 0 && !gpu_) {
      every_pair();
    } else if (form < 48 || (gpu_ && form < 70)) {
      one_product();
    } else if (form < (gpu_ ? 76 : 56)) {
      two_products_of_one();
    } else if (form < (gpu_ ? 78 : 62)) {
      product_of_product();
    } else if (form < (gpu_ ? 80 : 66)) {
      sum_of_products();
    } else if (form < (gpu_ ? 88 : 79)) {
      pointwise();
    } else if (form < (gpu_ ? 93 : 86)) {
      norm();
    } else if (form < (gpu_ ? 97 : 93)) {
      norm_backward();
    } else {
      scaled_product();
    }
    return {fmt::format("fusion-{}", number_), std::move(writer_).take(), 1,
            plan::InputStyle::normal};
  }

 private:
  bool usual() const { return taste_ == Taste::usual; }

  // ---- shapes ----

  std::int64_t size(std::int64_t most) {
    if (round_) return 16 * (1 + dice_.below(most / 16));
    if (dice_.chance(20)) return dice_.pick<std::int64_t>({1, 1, 2, 3});
    const std::int64_t any = 1 + dice_.below(most);
    return dice_.chance(60) ? any | 1 : any;
  }

  Sizes sizes() {
    Sizes s;
    const std::int64_t rank = usual() ? dice_.pick<std::int64_t>({2, 2, 3, 3, 3, 3, 3, 3, 3, 4})
                                      : dice_.pick<std::int64_t>({2, 3, 3, 4});
    for (std::int64_t i = 2; i < rank; ++i) s.batch.push_back(1 + dice_.below(rank == 4 ? 3 : 4));
    const std::int64_t most = usual() ? 128 : rank == 4 ? 40 : 70;
    s.m = size(most);
    s.n = size(most);
    s.k = dice_.chance(usual() ? 3 : 8) ? 1 : size(usual() ? 160 : 100);
    return s;
  }

  Dims shape(const Sizes& s, std::int64_t rows, std::int64_t columns, bool may_broadcast) {
    Dims dims = s.batch;
    if (may_broadcast && dice_.chance(25)) {
      if (dice_.chance(40)) {
        dims.clear();
      } else {
        for (std::int64_t& dim : dims) dim = dice_.chance(70) || usual() ? 1 : dim;
      }
    }
    dims.push_back(rows);
    dims.push_back(columns);
    return dims;
  }

  // ---- operands ----

  // Rows, columns, padded rows; of rank 4 also leading dims that are no single dim.
  Value operand(const Dims& shape, DType stored) {
    Dims strides;
    if (dice_.chance(45)) strides = steps_.strides(shape, false);
    if (shape.size() == 4 && strides.empty() && dice_.chance(usual() ? 10 : 40)) {
      strides = contiguous_strides(shape);
      strides[0] += dice_.chance(50) ? strides[1] : 0;
      if (dice_.chance(30)) strides[0] = 0;
      if (dice_.chance(30)) strides[1] = 0;
    } else if (shape.size() == 3 && dice_.chance(6)) {
      if (strides.empty()) strides = contiguous_strides(shape);
      strides[0] = 0;
    }
    return writer_.input(stored, shape, strides);
  }

  // From storage to what the product multiplies.
  Value prepared(const Dims& shape, DType stored, DType compute, bool more) {
    Value x = operand(shape, stored);
    const bool pre = more && dice_.chance(usual() ? 25 : 45);
    if (pre && dice_.chance(50)) x = writer_.convert(x, compute);
    if (pre && is_float(x.dtype))
      x = steps_.before(writer_, x, 1 + static_cast<int>(dice_.below(2)));
    if (is_float(compute) != is_float(x.dtype) || stored != compute || x.dtype == DType::f64) {
      x = writer_.convert(x, compute);
    }
    return x;
  }

  DType stored_of(DType compute) {
    if (compute == DType::f64 || dice_.chance(50)) return compute;
    if (usual())
      return dice_.pick({DType::i8, DType::i8, DType::f32, DType::f8e4m3, DType::f8e5m2});
    return dice_.pick({DType::i8, DType::u8, DType::i4, DType::i32, DType::f32, DType::f16,
                       DType::bf16, DType::f8e4m3, DType::f8e5m2, DType::f4e2m1});
  }

  // ---- what follows ----

  int count() { return 1 + static_cast<int>(dice_.below(12)); }

  void store(Value x) {
    if (x.dtype == DType::f32 && dice_.chance(60)) {
      const bool small = x.peak() < 1e4;
      x = writer_.convert(
          x, small && !usual() && dice_.chance(35)
                 ? dice_.pick({DType::i8, DType::u8, DType::i4, DType::i32, DType::f8e4m3,
                               DType::f8e5m2, DType::f16, DType::f64, DType::f4e2m1})
             : small ? storage_
                     : DType::f32);
    } else if (x.dtype == DType::i32 && dice_.chance(30)) {
      x = writer_.convert(x, DType::i8);
    }
    if (!writer_.may_be_output(x)) return;
    const bool strided = x.shape.size() >= 2 && dice_.chance(usual() ? 12 : 25);
    const Dims strides = strided ? steps_.strides(x.shape, false) : Dims{};
    writer_.output(x, strides, dice_.chance(10) ? 4 : 16);
  }

  // `ops` of them, the last one a reduction now and then.
  void follow(Value x, int ops) {
    const bool reduces = dice_.chance(usual() ? 15 : 25);
    x = steps_.program(writer_, x, ops - (reduces ? 1 : 0));
    if (reduces) {
      if (x.dtype == DType::boolean) x = writer_.convert(x, DType::f32);
      if (dice_.chance(30) && writer_.may_be_output(x)) writer_.output(x);
      x = steps_.exit_reduction(writer_, x);
    }
    store(x);
  }

  // ---- forms ----

  void every_pair() {
    static const auto pairs = matmul_pairs();
    const auto [a, b] = pairs[static_cast<std::size_t>(number_ / 4) % pairs.size()];
    const Sizes s = sizes();
    const Value x = operand(shape(s, s.m, s.k, false), a);
    const Value y = operand(shape(s, s.k, s.n, true), b);
    product(x, y);
  }

  void product(const Value& a, const Value& b) {
    if (!is_float(a.dtype)) {
      Value c = writer_.matmul(a, b);
      if (dice_.chance(50)) return follow(c, count());
      const int ops = count();
      const bool first = ops > 1 && dice_.chance(30);
      if (first) c = steps_.program(writer_, c, 1);
      return follow(writer_.convert(c, DType::f32), ops - (first ? 1 : 0));
    }
    const bool wide = a.dtype == DType::f64 || b.dtype == DType::f64;
    DType dtype = wide ? DType::f64 : DType::f32;
    // As frameworks write it: the product in the operands' type, converted behind it.
    const bool half = a.dtype == b.dtype && (a.dtype == DType::bf16 || a.dtype == DType::f16);
    if (half && dice_.chance(35)) dtype = a.dtype;
    follow(writer_.matmul(a, b, dtype), count());
  }

  DType compute_type() {
    if (usual()) return dice_.pick({DType::bf16, DType::bf16, DType::f16, DType::f16, DType::f32});
    return dice_.pick({DType::bf16, DType::bf16, DType::f16, DType::f16, DType::f32, DType::f64});
  }

  void one_product() {
    const Sizes s = sizes();
    if (dice_.chance(12)) {
      const DType b = usual() || dice_.chance(60) ? DType::i8 : dice_.pick(kIntegers);
      const Value x = operand(shape(s, s.m, s.k, false), DType::i8);
      return product(x, operand(shape(s, s.k, s.n, true), b));
    }
    if (usual() && dice_.chance(8)) {
      const DType other = dice_.pick({DType::f8e4m3, DType::f8e5m2});
      const Value x = operand(shape(s, s.m, s.k, false), DType::f8e4m3);
      return product(x, operand(shape(s, s.k, s.n, true), other));
    }
    const DType compute = compute_type();
    const Value a = prepared(shape(s, s.m, s.k, false), stored_of(compute), compute, true);
    const bool mixed = dice_.chance(usual() ? 20 : 50);
    const DType stored = mixed ? stored_of(compute) : compute;
    const Value b = prepared(shape(s, s.k, s.n, true), stored, compute, mixed);
    product(a, b);
  }

  // SwiGLU and its kin.
  void two_products_of_one() {
    const Sizes s = sizes();
    const DType compute = compute_type();
    const Value a = prepared(shape(s, s.m, s.k, false), stored_of(compute), compute, false);
    const Value gate = writer_.matmul(a, operand(shape(s, s.k, s.n, true), compute), DType::f32);
    const Value up = writer_.matmul(a, operand(shape(s, s.k, s.n, true), compute), DType::f32);
    const Value on = writer_.unary(
        dice_.pick<std::string>({"silu", "gelu", "gelu_tanh", "sigmoid", "relu"}), gate);
    const Value x = writer_.binary("mul", on, up);
    if (dice_.chance(50)) return store(x);
    follow(x, 1 + static_cast<int>(dice_.below(4)));
  }

  void product_of_product() {
    Sizes s = sizes();
    const DType compute = compute_type();
    const Value a = operand(shape(s, s.m, s.k, false), compute);
    Value x = writer_.matmul(a, operand(shape(s, s.k, s.n, true), compute),
                             compute == DType::f64 ? DType::f64 : DType::f32);
    if (dice_.chance(60)) x = writer_.unary(dice_.pick<std::string>({"relu", "tanh", "silu"}), x);
    x = writer_.convert(x, compute);
    const std::int64_t columns = size(usual() ? 128 : 40);
    x = writer_.matmul(x, operand(shape(s, s.n, columns, true), compute),
                       compute == DType::f64 ? DType::f64 : DType::f32);
    if (dice_.chance(50)) return store(x);
    follow(x, 1 + static_cast<int>(dice_.below(4)));
  }

  void sum_of_products() {
    const Sizes s = sizes();
    const DType compute = compute_type();
    const DType dtype = compute == DType::f64 ? DType::f64 : DType::f32;
    const auto product_of = [&](std::int64_t k) {
      const Value a = operand(shape(s, s.m, k, false), compute);
      return writer_.matmul(a, operand(shape(s, k, s.n, true), compute), dtype);
    };
    const Value first = product_of(s.k);
    follow(writer_.binary("add", first, product_of(size(60))),
           1 + static_cast<int>(dice_.below(6)));
  }

  Dims any_shape() {
    const std::int64_t rank = dice_.pick<std::int64_t>({1, 2, 3, 3, 3, 4});
    Dims dims;
    for (std::int64_t i = 0; i < rank; ++i) {
      dims.push_back(i + 2 < rank ? 1 + dice_.below(4) : size(rank == 1 ? 200 : 48));
    }
    return dims;
  }

  void pointwise() {
    const Dims dims = any_shape();
    const DType dtype =
        usual() ? dice_.pick({DType::f32, DType::bf16, DType::f16})
                : dice_.pick({DType::f32, DType::bf16, DType::f16, DType::f64, DType::f8e4m3,
                              DType::f8e5m2, DType::i8, DType::i32, DType::u8});
    if (usual()) steps_.full_operands();
    Value x = steps_.input(writer_, dtype, dims);
    if (bit_width(dtype) < 16 || dice_.chance(50)) {
      const bool integer = is_integer(dtype) && dice_.chance(50);
      x = writer_.convert(x, integer ? DType::i32 : DType::f32);
    }
    follow(x, count());
  }

  // ---- norms ----

  struct Normed {
    Dims shape, axes, scale, stats;
    DType x, parameters, wide;
  };

  Normed normed() {
    Normed n;
    n.shape =
        usual() ? Dims{1 + dice_.below(3), size(64), 16 * (1 + dice_.below(16))} : any_shape();
    if (!usual() && n.shape.size() == 1) n.shape.insert(n.shape.begin(), size(20));
    const auto rank = static_cast<std::int64_t>(n.shape.size());
    if (dice_.chance(usual() ? 90 : 55)) {
      n.axes = {rank - 1};
    } else if (dice_.chance(50)) {
      for (std::int64_t i = std::min<std::int64_t>(1, rank - 1); i < rank; ++i) n.axes.push_back(i);
    } else {
      n.axes = steps_.axes(n.shape);
    }
    n.x = usual() ? dice_.pick({DType::bf16, DType::f16, DType::f32})
                  : dice_.pick({DType::bf16, DType::f16, DType::f32, DType::f32, DType::f64});
    n.wide = n.x == DType::f64 ? DType::f64 : DType::f32;
    n.parameters = dice_.chance(60) ? n.x : n.wide;
    for (std::size_t i = 0; i < n.shape.size(); ++i) {
      const bool reduced =
          std::find(n.axes.begin(), n.axes.end(), static_cast<std::int64_t>(i)) != n.axes.end();
      n.scale.push_back(reduced ? n.shape[i] : 1);
      n.stats.push_back(reduced ? 1 : n.shape[i]);
    }
    while (!usual() && n.scale.size() > 1 && n.scale.front() == 1 && dice_.chance(50)) {
      n.scale.erase(n.scale.begin());
    }
    return n;
  }

  struct Normal {
    Value y, mean, inv_std;
  };

  Normal apply_norm(const Normed& n, bool layer, const Value& x, const Value& scale, bool stats) {
    const auto output = [&](DType dtype, const Dims& dims, double low, double high) {
      return Value{writer_.fresh(), dtype, dims, low, high};
    };
    Json in{{"x", x.name}, {"scale", scale.name}};
    if (dice_.chance(60)) in["bias"] = writer_.input(n.parameters, n.scale).name;
    Normal result{output(n.x, n.shape, -10, 10), output(n.wide, n.stats, x.low, x.high),
                  output(n.wide, n.stats, 0, 4)};
    Json out{{"y", result.y.name}};
    if (stats && layer) out["mean"] = result.mean.name;
    if (stats) out["inv_std"] = result.inv_std.name;
    writer_.named(layer ? "layer_norm" : "rms_norm", std::move(in), std::move(out),
                  {{"axes", n.axes}, {"eps", dice_.pick({1e-5, 1e-3, 0.5})}});
    return result;
  }

  void norm() {
    const Normed n = normed();
    const bool layer = dice_.chance(50);
    const std::int64_t neighbours = usual() && dice_.chance(70) ? 0 : dice_.below(4);
    Value x = steps_.input(writer_, n.x, n.shape);
    if (neighbours == 1 && dice_.chance(60)) {  // a residual
      x = writer_.binary("add", x, steps_.input(writer_, n.x, n.shape));
      if (dice_.chance(50)) writer_.output(x);
    } else if (neighbours == 2 && n.shape.size() >= 2) {  // a projection
      Dims left = n.shape;
      left.back() = 1 + dice_.below(40);
      const Value w = steps_.input(writer_, n.x, {left.back(), n.shape.back()});
      x = writer_.matmul(steps_.input(writer_, n.x, left), w);
    }
    const Value scale = writer_.input(n.parameters, n.scale);
    const bool stats = dice_.chance(50);
    const Normal result = apply_norm(n, layer, x, scale, stats);
    if (stats && layer) writer_.output(result.mean);
    if (stats) writer_.output(result.inv_std);
    if (neighbours == 0) return writer_.output(result.y);
    if (neighbours == 3 && n.shape.size() >= 2) {  // what reads it
      writer_.output(result.y);
      const Value w = steps_.input(writer_, n.x, {n.shape.back(), 1 + dice_.below(40)});
      return store(writer_.matmul(result.y, w, n.wide));
    }
    follow(result.y, 1 + static_cast<int>(dice_.below(4)));
  }

  void norm_backward() {
    const Normed n = normed();
    const bool layer = dice_.chance(50);
    Value dy = steps_.input(writer_, n.x, n.shape);
    const Value x = steps_.input(writer_, n.x, n.shape);
    const Value scale = writer_.input(n.parameters, n.scale);
    Value mean;
    Value inv_std;
    if (dice_.chance(30)) {  // with its forward
      const Normal forward = apply_norm(n, layer, x, scale, true);
      writer_.output(forward.y);
      mean = forward.mean;
      inv_std = forward.inv_std;
    } else {
      if (layer) mean = writer_.input(n.wide, n.stats);
      inv_std = writer_.input(n.wide, n.stats);
    }
    if (dice_.chance(25)) {
      dy = steps_.before(writer_, dy, 1 + static_cast<int>(dice_.below(2)));
      dy = writer_.convert(dy, n.x);
    }
    Json in{{"dy", dy.name}, {"x", x.name}, {"scale", scale.name}, {"inv_std", inv_std.name}};
    if (layer) in["mean"] = mean.name;
    Json out = Json::object();
    const bool dx = dice_.chance(80);
    const bool dscale = !dx || dice_.chance(75);
    const bool dbias = dice_.chance(60);
    const Value gradient{writer_.fresh(), n.x, n.shape, -20, 20};
    const std::string dscale_name = writer_.fresh();
    const std::string dbias_name = writer_.fresh();
    if (dx) out["dx"] = gradient.name;
    if (dscale) out["dscale"] = dscale_name;
    if (dbias) out["dbias"] = dbias_name;
    writer_.named(layer ? "layer_norm_backward" : "rms_norm_backward", std::move(in),
                  std::move(out), {{"axes", n.axes}});
    if (dscale) writer_.output({dscale_name, n.parameters, n.scale});
    if (dbias) writer_.output({dbias_name, n.parameters, n.scale});
    if (!dx) return;
    if (dice_.chance(70)) return writer_.output(gradient);
    follow(gradient, 1 + static_cast<int>(dice_.below(4)));
  }

  // ---- block scales ----

  void scaled_product() {
    Sizes s = sizes();
    const bool fp4 = dice_.chance(30);
    const std::int64_t block = fp4 ? 16 : usual() ? 32 : dice_.pick<std::int64_t>({32, 32, 16, 8});
    if (dice_.chance(60)) s.k = block * (1 + dice_.below(4));
    const auto values = [&] {
      return fp4 ? DType::f4e2m1 : dice_.pick({DType::f8e4m3, DType::f8e4m3, DType::f8e5m2});
    };
    const DType scales = fp4 ? DType::f8e4m3 : DType::f8e8m0;
    const bool swizzled = dice_.chance(50);
    const DType a_type = values();
    const DType b_type = values();
    const Value a = operand(shape(s, s.m, s.k, false), a_type);
    const Value b = operand(shape(s, s.k, s.n, true), b_type);
    const auto up = [](std::int64_t n, std::int64_t to) { return (n + to - 1) / to * to; };
    const auto scales_of = [&](const Value& x, bool is_left) {
      Dims dims = x.shape;
      std::int64_t& blocks = dims[dims.size() - (is_left ? 1 : 2)];
      std::int64_t& rows = dims[dims.size() - (is_left ? 2 : 1)];
      blocks = up(blocks, block) / block;
      if (swizzled) {
        blocks = up(blocks, 4);
        rows = up(rows, 128);
      }
      return writer_.input(scales, dims);
    };
    const Value a_scale = scales_of(a, true);
    const Value b_scale = scales_of(b, false);
    Dims dims = s.batch;
    dims.insert(dims.end(), {s.m, s.n});
    const double peak = std::sqrt(static_cast<double>(s.k)) * 64;
    Value x{writer_.fresh(), DType::f32, dims, -peak, peak};
    Json attributes{{"block", block}};
    if (swizzled) attributes["swizzled"] = true;
    if (dice_.chance(25)) {
      x.dtype = storage_;
      attributes["dtype"] = to_string(storage_);
    }
    writer_.named(
        "scaled_matmul",
        {{"a", a.name}, {"b", b.name}, {"a_scale", a_scale.name}, {"b_scale", b_scale.name}},
        x.name, std::move(attributes));
    if (dice_.chance(40)) return store(x);
    follow(x, count());
  }

  Dice dice_;
  int number_;
  bool gpu_;
  Taste taste_;
  Writer writer_;
  DType storage_;
  Steps steps_;
  bool round_;  // sizes are multiples of 16
};

}  // namespace

std::vector<Case> fusion_cases(std::uint64_t seed, int count, Profile profile) {
  std::vector<Case> cases;
  for (int i = 0; i < count; ++i) {
    cases.push_back(Drawing(seed, i, profile).draw());
    cases.back().seed = seed + static_cast<std::uint64_t>(i);
  }
  return cases;
}

}  // namespace lawson::cases
