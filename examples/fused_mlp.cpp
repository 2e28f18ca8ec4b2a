// A fused MLP in C++: two marked computations, y = gelu(x W1 + b1) W2 + b2, each one kernel or an
// error. The numbers are compared with a plain loop.
//   fused_mlp [ENGINE]      cpu (default), or cudnn: on this machine's first GPU
// Exit 0: right numbers, 1: wrong ones, 3: an error.
#include <lawson/lawson.hpp>

#include <cmath>
#include <iostream>
#include <vector>

namespace {

constexpr std::int64_t kRows = 64, kWidth = 128, kHidden = 256;

std::vector<float> numbers(std::int64_t count, double step) {
  std::vector<float> list(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < list.size(); ++i) {
    list[i] = static_cast<float>(std::sin(step * static_cast<double>(i)) / 8);
  }
  return list;
}

// y = f(x W + b), in double.
std::vector<float> layer(const std::vector<float>& x, const std::vector<float>& w,
                         const std::vector<float>& b, double (*f)(double)) {
  const std::size_t columns = b.size();
  const std::size_t depth = w.size() / columns;
  std::vector<float> y(x.size() / depth * columns);
  for (std::size_t i = 0; i < y.size(); ++i) {
    double sum = b[i % columns];
    for (std::size_t k = 0; k < depth; ++k) {
      sum += double{x[i / columns * depth + k]} * double{w[k * columns + i % columns]};
    }
    y[i] = static_cast<float>(f(sum));
  }
  return y;
}

int run(const std::string& engine) {
  // [example: mark]
  using lawson::Tensor;
  auto up = lawson::fuse(
      [](Tensor x, Tensor w, Tensor b) { return lawson::gelu(lawson::matmul(x, w) + b); },
      {.name = "mlp-up", .engines = {engine}, .inputs = {"x", "w", "b"}, .outputs = {"h"}});
  auto down = lawson::fuse(
      [](Tensor h, Tensor w, Tensor b) { return lawson::matmul(h, w) + b; },
      {.name = "mlp-down", .engines = {engine}, .inputs = {"h", "w", "b"}, .outputs = {"y"}});
  // [example: end]

  const auto x = numbers(kRows * kWidth, 0.37);
  const auto w1 = numbers(kWidth * kHidden, 0.71);
  const auto b1 = numbers(kHidden, 1.3);
  const auto w2 = numbers(kHidden * kWidth, 0.53);
  const auto b2 = numbers(kWidth, 0.9);

  // [example: inspect]
  using namespace lawson::dtypes;
  const auto plan =
      up.plan({{f32, {1, kRows, kWidth}}, {f32, {1, kWidth, kHidden}}, {f32, {1, 1, kHidden}}});
  std::cout << plan->graph().print();
  std::cout << "plan " << plan->plan().id() << " of engine " << plan->engine() << " for "
            << plan->device().name() << '\n';
  // [example: end]

  // Device memory of where the engine runs; host memory for the CPU.
  const auto place = [&plan](const std::vector<float>& values) {
    lawson::Memory memory{plan->device(), values.size() * sizeof(float)};
    memory.write(std::span{values});
    return memory;
  };
  const auto dx = place(x), dw1 = place(w1), db1 = place(b1), dw2 = place(w2), db2 = place(b2);
  std::vector<float> y(x.size());
  const lawson::Memory dh{plan->device(), kRows * kHidden * sizeof(float)};
  const lawson::Memory dy{plan->device(), y.size() * sizeof(float)};

  for (int step = 0; step < 3; ++step) {  // traced and built once
    // [example: run]
    up({{dx.data(), f32, {1, kRows, kWidth}},
        {dw1.data(), f32, {1, kWidth, kHidden}},
        {db1.data(), f32, {1, 1, kHidden}}},
       {{dh.data(), f32, {1, kRows, kHidden}}});
    down({{dh.data(), f32, {1, kRows, kHidden}},
          {dw2.data(), f32, {1, kHidden, kWidth}},
          {db2.data(), f32, {1, 1, kWidth}}},
         {{dy.data(), f32, {1, kRows, kWidth}}});
    // [example: end]
  }
  dy.read(std::span{y});

  const auto gelu = [](double v) { return v / 2 * std::erfc(-v / std::sqrt(2.0)); };
  const auto want = layer(layer(x, w1, b1, gelu), w2, b2, [](double v) { return v; });
  double worst = 0;
  for (std::size_t i = 0; i < y.size(); ++i) {
    worst = std::max(worst, std::fabs(double{y[i]} - double{want[i]}));
  }
  // A GPU multiplies f32 in TF32, with 11 bits.
  const double allowed = engine == "cudnn" ? 2e-3 : 1e-5;
  std::cout << "largest error " << worst << ", allowed " << allowed << '\n';
  return worst <= allowed ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc > 1 ? argv[1] : "cpu");
  } catch (const lawson::Error& error) {
    std::cerr << error.kind() << ": " << error.what() << '\n';
    return 3;
  }
}
