// Several threads over the handles on the CPU engine: right numbers, each plan built once.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <functional>
#include <lawson/lawson.hpp>
#include <memory>
#include <thread>
#include <vector>

namespace {

void in_threads(int count, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back([&body, i] { body(i); });
  for (std::thread& thread : threads) thread.join();
}

struct Shape {
  std::int64_t batch = 2;
  std::int64_t heads = 2;
  std::int64_t length = 17;
  std::int64_t dim = 8;
  bool causal = true;

  std::size_t elements() const { return static_cast<std::size_t>(batch * heads * length * dim); }
};

lawson::AttentionConfig config_of(const Shape& shape) {
  lawson::AttentionConfig config;
  config.pass(LAWSON_PASS_TRAINING)
      .dtype(LAWSON_DTYPE_F32)
      .batch(shape.batch)
      .heads(shape.heads)
      .seqlen_q(shape.length)
      .head_dim_qk(shape.dim)
      .mask(shape.causal ? LAWSON_MASK_CAUSAL : LAWSON_MASK_NONE);
  return config;
}

// Host memory that a tensor may lie in: aligned to a cache line.
class Floats {
 public:
  explicit Floats(std::size_t count) : memory_(count + 16) {
    void* start = memory_.data();
    std::size_t space = memory_.size() * sizeof(float);
    data_ = static_cast<float*>(std::align(64, count * sizeof(float), start, space));
  }
  float* data() { return data_; }
  float& operator[](std::size_t i) { return data_[i]; }

 private:
  std::vector<float> memory_;
  float* data_;
};

// Forward and backward of one attention with its own memory; `seed` chooses the numbers.
class Attention {
 public:
  Attention(const Shape& shape, const lawson::AttentionConfig& config, const char* engine)
      : count_{shape.elements()},
        q{count_},
        k{count_},
        v{count_},
        o{count_},
        grad{count_},
        dq{count_},
        dk{count_},
        dv{count_},
        stats{count_ / static_cast<std::size_t>(shape.dim)} {
    forward_.config(config).engine(engine);
    backward_.config(config).engine(engine);
    for (const auto& [which, memory] : {std::pair{LAWSON_PARAM_Q, &q},
                                        {LAWSON_PARAM_K, &k},
                                        {LAWSON_PARAM_V, &v},
                                        {LAWSON_PARAM_O, &o},
                                        {LAWSON_PARAM_STATS, &stats}}) {
      forward_.tensor(which, memory->data());
      backward_.tensor(which, memory->data());
    }
    for (const auto& [which, memory] : {std::pair{LAWSON_PARAM_DO, &grad},
                                        {LAWSON_PARAM_DQ, &dq},
                                        {LAWSON_PARAM_DK, &dk},
                                        {LAWSON_PARAM_DV, &dv}}) {
      backward_.tensor(which, memory->data());
    }
  }

  void run(int seed) {
    for (std::size_t i = 0; i < count_; ++i) {
      const auto x = static_cast<float>(i + static_cast<std::size_t>(seed) * 31);
      q[i] = std::sin(x * 1.3F);
      k[i] = std::sin(x * 2.1F);
      v[i] = std::cos(x * 0.7F);
      grad[i] = std::cos(x * 1.9F);
    }
    Floats workspace(std::max(forward_.workspace_size(), backward_.workspace_size()) / 4 + 1);
    lawson::forward(forward_, workspace.data(), forward_.workspace_size());
    lawson::backward(backward_, workspace.data(), backward_.workspace_size());
  }

  std::vector<float> results() {
    std::vector<float> all;
    for (Floats* memory : {&o, &dq, &dk, &dv}) {
      all.insert(all.end(), memory->data(), memory->data() + count_);
    }
    return all;
  }

  std::string plan_id() const { return std::string{forward_.plan().id()}; }

 private:
  std::size_t count_;
  lawson::ForwardParams forward_;
  lawson::BackwardParams backward_;

 public:
  Floats q, k, v, o, grad, dq, dk, dv, stats;
};

std::vector<float> expected(const Shape& shape, int seed) {
  const auto config = config_of(shape);
  Attention oracle(shape, config, "reference");
  oracle.run(seed);
  return oracle.results();
}

bool close(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!(std::fabs(a[i] - b[i]) <= 2e-5F * (1 + std::fabs(b[i])))) return false;
  }
  return true;
}

TEST(AttentionThreads, TwoThreadsOverOneConfig) {
  const Shape shape;
  const auto config = config_of(shape);
  const std::vector<float> want[] = {expected(shape, 0), expected(shape, 1)};
  ASSERT_NE(want[0], want[1]);
  std::atomic<int> right{0};
  in_threads(2, [&](int thread) {
    Attention attention(shape, config, "cpu");
    for (int round = 0; round < 20; ++round) {
      attention.run(thread);
      right += close(attention.results(), want[thread]) ? 1 : 0;
    }
  });
  EXPECT_EQ(right, 40);
}

TEST(AttentionThreads, OneThreadOverTwoConfigs) {
  Shape masked;
  Shape full;
  full.causal = false;
  const auto masked_config = config_of(masked);
  const auto full_config = config_of(full);
  Attention a(masked, masked_config, "cpu");
  Attention b(full, full_config, "cpu");
  EXPECT_NE(a.plan_id(), b.plan_id());
  const auto want_a = expected(masked, 5);
  const auto want_b = expected(full, 5);
  for (int round = 0; round < 5; ++round) {
    a.run(5);
    b.run(5);
    EXPECT_TRUE(close(a.results(), want_a));
    EXPECT_TRUE(close(b.results(), want_b));
  }
}

TEST(AttentionThreads, ManyThreadsOverManyConfigs) {
  constexpr int kThreads = 64;
  constexpr int kConfigs = 200;
  std::vector<Shape> shapes;
  std::vector<std::vector<float>> want;
  for (int i = 0; i < kConfigs; ++i) {
    shapes.push_back({1, 1, 1 + i % 25, 4 * (1 + i / 25), i % 2 == 0});
    want.push_back(expected(shapes.back(), i));
  }
  std::atomic<int> wrong{0};
  std::atomic<int> ran{0};
  in_threads(kThreads, [&](int thread) {
    for (int i = 0; i < kConfigs; ++i) {
      const int number = (i * 7 + thread * 3) % kConfigs;
      const auto index = static_cast<std::size_t>(number);
      const auto config = config_of(shapes[index]);
      Attention attention(shapes[index], config, "cpu");
      attention.run(number);
      wrong += close(attention.results(), want[index]) ? 0 : 1;
      ++ran;
    }
  });
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(ran, kThreads * kConfigs);
}

// One params handle read by several threads: the plan is found once, and each call is whole.
TEST(AttentionThreads, OneParamsHandleOverManyThreads) {
  const Shape shape;
  const auto config = config_of(shape);
  Attention attention(shape, config, "cpu");
  attention.run(3);
  std::atomic<int> same{0};
  const std::string id = attention.plan_id();
  in_threads(8, [&](int) {
    for (int round = 0; round < 20; ++round) same += attention.plan_id() == id ? 1 : 0;
  });
  EXPECT_EQ(same, 160);
}

}  // namespace
