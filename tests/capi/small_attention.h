// An attention that is small and has memory of its own, on the CPU engine through lawson.hpp.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <lawson/lawson.hpp>
#include <memory>
#include <vector>

namespace small {

inline lawson::AttentionConfig config_of(std::int64_t length) {
  lawson::AttentionConfig config;
  config.pass(LAWSON_PASS_FORWARD)
      .dtype(LAWSON_DTYPE_F32)
      .batch(1)
      .heads(2)
      .seqlen_q(length)
      .head_dim_qk(8)
      .mask(LAWSON_MASK_CAUSAL);
  return config;
}

class Attention {
 public:
  explicit Attention(std::int64_t length)
      : count_{static_cast<std::size_t>(length) * 16},
        memory_(4 * (count_ + 16)),
        config_{config_of(length)} {
    params_.config(config_).engine("cpu");
    int tensor = 0;
    for (const lawson_attention_param which :
         {LAWSON_PARAM_Q, LAWSON_PARAM_K, LAWSON_PARAM_V, LAWSON_PARAM_O}) {
      params_.tensor(which, at(tensor++));
    }
  }

  lawson::ForwardParams& params() { return params_; }
  const lawson::AttentionConfig& config() const { return config_; }

  void run() { run_in(params_.workspace_size()); }
  // Without asking how much it needs: one call of the library.
  void run_in(std::size_t bytes) {
    fill();
    workspace_.resize(bytes / sizeof(double) + 8);
    void* start = workspace_.data();
    std::size_t space = workspace_.size() * sizeof(double);
    lawson::forward(params_, std::align(64, bytes, start, space), bytes);
  }
  std::vector<float> output() { return {at(3), at(3) + count_}; }

 private:
  void fill() {
    for (std::size_t i = 0; i < count_; ++i) {
      const auto x = static_cast<float>(i);
      at(0)[i] = std::sin(x * 1.3F);
      at(1)[i] = std::sin(x * 2.1F);
      at(2)[i] = std::cos(x * 0.7F);
    }
  }

  float* at(int tensor) {
    void* start = memory_.data() + static_cast<std::size_t>(tensor) * (count_ + 16);
    std::size_t space = (count_ + 16) * sizeof(float);
    return static_cast<float*>(std::align(64, count_ * sizeof(float), start, space));
  }

  std::size_t count_;
  std::vector<float> memory_;
  std::vector<double> workspace_;
  lawson::AttentionConfig config_;
  lawson::ForwardParams params_;
};

}  // namespace small
