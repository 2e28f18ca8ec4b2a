// What forward and backward do with their tensors, on the CPU engine through lawson.hpp.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <lawson/lawson.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <vector>

namespace {

using Json = nlohmann::json;
using Sizes = std::vector<std::int64_t>;

constexpr std::int64_t kHeads = 2;
constexpr std::int64_t kDim = 8;

lawson_status status_of(const std::function<void()>& call) {
  try {
    call();
    return LAWSON_OK;
  } catch (const lawson::Error& error) {
    return error.status();
  }
}

// The message of a call that has to be refused as the caller's mistake.
std::string refusal(const std::function<void()>& call) {
  EXPECT_EQ(status_of(call), LAWSON_INVALID_ARGUMENT);
  return lawson_last_error_message();
}

bool has(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

template <typename T>
class Memory {
 public:
  explicit Memory(std::size_t count, T fill = {}) : memory_(count + 64, fill), count_{count} {
    void* start = memory_.data();
    std::size_t space = memory_.size() * sizeof(T);
    data_ = static_cast<T*>(std::align(64, count * sizeof(T), start, space));
  }
  T* data() { return data_; }
  std::size_t size() const { return count_; }
  T& operator[](std::size_t i) { return data_[i]; }
  std::vector<T> values() const { return {data_, data_ + count_}; }

 private:
  std::vector<T> memory_;
  T* data_ = nullptr;
  std::size_t count_;
};

Memory<float> numbers(std::size_t count, int seed) {
  Memory<float> memory(count);
  for (std::size_t i = 0; i < count; ++i) {
    memory[i] = std::sin(static_cast<float>(i) * 1.7F + static_cast<float>(seed));
  }
  return memory;
}

lawson::AttentionConfig dense_config(std::int64_t length) {
  lawson::AttentionConfig config;
  config.dtype(LAWSON_DTYPE_F32)
      .heads(kHeads)
      .seqlen_q(length)
      .head_dim_qk(kDim)
      .mask(LAWSON_MASK_CAUSAL);
  return config;
}

void run(const lawson::ForwardParams& params) {
  Memory<float> workspace(params.workspace_size() / sizeof(float) + 1);
  lawson::forward(params, workspace.data(), params.workspace_size());
}

// One dense batch entry with its own memory: a small forward.
struct Dense {
  explicit Dense(std::int64_t length)
      : elements{static_cast<std::size_t>(length * kHeads * kDim)},
        q{numbers(elements, 1)},
        k{numbers(elements, 2)},
        v{numbers(elements, 3)},
        o(elements) {
    params.config(dense_config(length));
    params.tensor(LAWSON_PARAM_Q, q.data())
        .tensor(LAWSON_PARAM_K, k.data())
        .tensor(LAWSON_PARAM_V, v.data())
        .tensor(LAWSON_PARAM_O, o.data());
  }

  std::size_t elements;
  Memory<float> q, k, v, o;
  lawson::ForwardParams params;
};

TEST(AttentionParams, ScaleIsBoundAtRunTime) {
  Dense dense(9);
  run(dense.params);
  const auto usual = dense.o.values();
  const std::string id{dense.params.plan().id()};
  dense.params.scale(1.0 / std::sqrt(static_cast<double>(kDim)));
  run(dense.params);
  EXPECT_EQ(dense.o.values(), usual);
  dense.params.scale(3);
  run(dense.params);
  EXPECT_NE(dense.o.values(), usual);
  EXPECT_EQ(dense.params.plan().id(), id);
  // The config's own scale is none of the plan's either.
  lawson::AttentionConfig config = dense_config(9);
  config.scale(3);
  lawson::ForwardParams other;
  const auto with_scale = dense.o.values();
  other.config(config)
      .tensor(LAWSON_PARAM_Q, dense.q.data())
      .tensor(LAWSON_PARAM_K, dense.k.data())
      .tensor(LAWSON_PARAM_V, dense.v.data())
      .tensor(LAWSON_PARAM_O, dense.o.data());
  EXPECT_EQ(other.plan().id(), id);
  dense.o[0] = 99;
  run(other);
  EXPECT_EQ(dense.o.values(), with_scale);
}

TEST(AttentionParams, PointersMoveAllOrNothing) {
  Dense dense(9);
  run(dense.params);
  const auto first = dense.o.values();
  Memory<float> q = numbers(dense.elements, 9);
  Memory<float> o(dense.elements, -1);
  const lawson_attention_pointer both[] = {{LAWSON_PARAM_Q, q.data()}, {LAWSON_PARAM_O, o.data()}};
  dense.params.pointers(both);
  run(dense.params);
  EXPECT_EQ(dense.o.values(), first);
  EXPECT_NE(o.values(), first);
  const auto second = o.values();
  const lawson_attention_pointer bad[] = {{LAWSON_PARAM_Q, dense.q.data()},
                                          {LAWSON_PARAM_BIAS, o.data()}};
  EXPECT_TRUE(has(refusal([&] { dense.params.pointers(bad); }), "'bias' is not set"));
  const lawson_attention_pointer scalar[] = {{LAWSON_PARAM_SCALE, o.data()}};
  EXPECT_TRUE(has(refusal([&] { dense.params.pointers(scalar); }), "not a tensor"));
  run(dense.params);
  EXPECT_EQ(o.values(), second);  // q is still the second one
}

TEST(AttentionParams, TensorsAreHeldAgainstTheConfig) {
  Dense dense(9);
  const Sizes shape{1, kHeads, 9, kDim};
  const Sizes strides{9 * kHeads * kDim, kDim, kHeads * kDim, 1};
  const auto refused = [&](lawson_attention_param which, const lawson_tensor& tensor) {
    Dense other(9);
    other.params.tensor(which, tensor);
    return refusal([&] { run(other.params); });
  };
  // Described as the config says, in other but equal words.
  dense.params.tensor(LAWSON_PARAM_Q,
                      lawson::tensor(dense.q.data(), LAWSON_DTYPE_F32, shape, strides));
  const Sizes squeezed{kHeads, 9, kDim};
  const Sizes squeezed_strides{kDim, kHeads * kDim, 1};
  dense.params.tensor(LAWSON_PARAM_K,
                      lawson::tensor(dense.k.data(), LAWSON_DTYPE_F32, squeezed, squeezed_strides));
  run(dense.params);

  const Sizes longer{1, kHeads, 10, kDim};
  std::string message =
      refused(LAWSON_PARAM_Q, lawson::tensor(dense.q.data(), LAWSON_DTYPE_F32, longer, strides));
  EXPECT_TRUE(has(message, "'q' is f32[1, 2, 10, 8]") && has(message, "[1, 2, 9, 8]")) << message;
  message =
      refused(LAWSON_PARAM_V, lawson::tensor(dense.v.data(), LAWSON_DTYPE_F16, shape, strides));
  EXPECT_TRUE(has(message, "'v' is f16")) << message;
  const Sizes other_order{9 * kHeads * kDim, 9 * kDim, kDim, 1};
  message =
      refused(LAWSON_PARAM_O, lawson::tensor(dense.o.data(), LAWSON_DTYPE_F32, shape, other_order));
  EXPECT_TRUE(has(message, "'o'") && has(message, "strides [144, 72, 8, 1]")) << message;
  message = refused(LAWSON_PARAM_SINK, lawson::tensor(dense.o.data()));
  EXPECT_TRUE(has(message, "'sink' is set")) << message;
  message = refused(LAWSON_PARAM_AMAX_O, lawson::tensor(dense.o.data()));
  EXPECT_TRUE(has(message, "'amax_o' is set")) << message;
  message = refused(LAWSON_PARAM_K, lawson::tensor(dense.k.data() + 1));
  EXPECT_TRUE(has(message, "'k' is at") && has(message, "multiple of 16")) << message;
  message = refused(LAWSON_PARAM_K, lawson::tensor(nullptr));
  EXPECT_TRUE(has(message, "'k'") && has(message, "null pointer")) << message;
  dense.params.remove(LAWSON_PARAM_V);
  message = refusal([&] { run(dense.params); });
  EXPECT_TRUE(has(message, "'v' is not set") && has(message, "reads")) << message;
  dense.params.tensor(LAWSON_PARAM_V, dense.v.data());
  dense.params.sequences(1);
  message = refusal([&] { run(dense.params); });
  EXPECT_TRUE(has(message, "'sequences'")) << message;
  dense.params.sequences(-1);
  run(dense.params);
}

TEST(AttentionParams, WhatACallCannotRunIsNamed) {
  Dense dense(9);
  lawson::BackwardParams backward;
  backward.config(dense_config(9));
  std::string message = refusal([&] { static_cast<void>(backward.plan()); });
  EXPECT_TRUE(has(message, "'pass'") && has(message, "backward")) << message;
  auto parallel = dense_config(16);
  parallel.context_parallel(LAWSON_CP_RING, 2);
  dense.params.config(parallel);
  message = refusal([&] { run(dense.params); });
  EXPECT_TRUE(has(message, "context_parallel")) << message;
  auto fp8 = dense_config(9);
  fp8.dtype(LAWSON_DTYPE_F8E4M3).fp8_recipe(LAWSON_FP8_DELAYED);
  dense.params.config(fp8);
  EXPECT_EQ(status_of([&] { run(dense.params); }), LAWSON_UNSUPPORTED);
  EXPECT_TRUE(has(lawson_last_error_message(), "f8e4m3")) << lawson_last_error_message();
  EXPECT_EQ(lawson::select(fp8, lawson::Device::find("cpu")).decision(), LAWSON_NOT_SUPPORTED);
  dense.params.config(dense_config(9)).workspace_limit(1);
  EXPECT_EQ(status_of([&] { run(dense.params); }), LAWSON_UNSUPPORTED);
  EXPECT_TRUE(has(lawson_last_error_message(), "workspace")) << lawson_last_error_message();
  dense.params.workspace_limit(-1).engine("nobody");
  message = refusal([&] { run(dense.params); });
  EXPECT_TRUE(has(message, "nobody")) << message;
  dense.params.engine("");
  run(dense.params);
  // Inconsistent attributes are found where the config is used, by name.
  lawson::AttentionConfig odd = dense_config(9);
  odd.kv_heads(3);
  EXPECT_TRUE(has(refusal([&] { static_cast<void>(odd.spec()); }), "'kv_heads'"));
}

TEST(AttentionParams, TensorsAloneAreEnough) {
  Dense dense(9);
  run(dense.params);
  const auto causal = dense.o.values();
  const Sizes shape{1, kHeads, 9, kDim};
  const Sizes strides{9 * kHeads * kDim, kDim, kHeads * kDim, 1};
  lawson::ForwardParams params;
  EXPECT_TRUE(has(refusal([&] { run(params); }), "'q' has no shape"));
  for (const auto& [which, data] : {std::pair{LAWSON_PARAM_Q, dense.q.data()},
                                    {LAWSON_PARAM_K, dense.k.data()},
                                    {LAWSON_PARAM_V, dense.v.data()},
                                    {LAWSON_PARAM_O, dense.o.data()}}) {
    params.tensor(which, lawson::tensor(data, LAWSON_DTYPE_F32, shape, strides));
  }
  run(params);
  EXPECT_NE(dense.o.values(), causal);  // no mask
  // The derived config says the same, and with a mask on top it is the dense one.
  lawson::AttentionConfig derived = params.derive();
  params.config(derived);
  const std::string unmasked{params.plan().id()};
  derived.mask(LAWSON_MASK_CAUSAL);
  params.config(derived);
  EXPECT_NE(params.plan().id(), unmasked);
  EXPECT_EQ(params.plan().id(), dense.params.plan().id());
  run(params);
  EXPECT_EQ(dense.o.values(), causal);
}

// The sequences of a ragged batch, each computed alone.
std::vector<float> one_by_one(const std::vector<std::int32_t>& lengths, Memory<float>& q,
                              Memory<float>& k, Memory<float>& v) {
  std::vector<float> all;
  std::size_t begin = 0;
  for (const std::int32_t length : lengths) {
    if (length == 0) continue;
    Dense dense(length);
    std::copy_n(q.data() + begin, dense.elements, dense.q.data());
    std::copy_n(k.data() + begin, dense.elements, dense.k.data());
    std::copy_n(v.data() + begin, dense.elements, dense.v.data());
    run(dense.params);
    const auto part = dense.o.values();
    all.insert(all.end(), part.begin(), part.end());
    begin += dense.elements;
  }
  return all;
}

void expect_close(const std::vector<float>& a, const std::vector<float>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], 2e-6) << i;
}

TEST(AttentionParams, ARaggedPlanServesItsWholeBucket) {
  constexpr std::int64_t kTokens = 40;
  constexpr std::size_t kElements = kTokens * kHeads * kDim;
  // Just the caller's tokens, and a canary behind.
  Memory<float> q = numbers(kElements, 4);
  Memory<float> k = numbers(kElements, 5);
  Memory<float> v = numbers(kElements, 6);
  Memory<float> o(kElements + 64, 77);
  Memory<std::int32_t> offsets(6);
  lawson::AttentionConfig config = dense_config(30);
  config.layout(LAWSON_LAYOUT_THD).batch(3).total_q(kTokens).total_kv(kTokens);
  const Sizes shape{1, kHeads, kTokens, kDim};
  const Sizes strides{kTokens * kHeads * kDim, kDim, kHeads * kDim, 1};
  lawson::ForwardParams params;
  params.config(config);
  for (const auto& [which, data] : {std::pair{LAWSON_PARAM_Q, q.data()},
                                    {LAWSON_PARAM_K, k.data()},
                                    {LAWSON_PARAM_V, v.data()},
                                    {LAWSON_PARAM_O, o.data()}}) {
    params.tensor(which, lawson::tensor(data, LAWSON_DTYPE_F32, shape, strides));
  }
  const Sizes entries{6};
  const Sizes one{1};
  for (const auto which : {LAWSON_PARAM_CU_SEQLENS_Q, LAWSON_PARAM_CU_SEQLENS_KV}) {
    params.tensor(which, lawson::tensor(offsets.data(), LAWSON_DTYPE_I32, entries, one));
  }
  const std::string id{params.plan().id()};
  for (const auto& lengths :
       {std::vector<std::int32_t>{30, 1, 9}, {5, 5}, {10, 30}, {0, 7, 0, 3, 1}}) {
    std::int32_t sum = 0;
    for (std::size_t i = 0; i < 6; ++i) {
      offsets[i] = sum;
      if (i < lengths.size()) sum += lengths[i];
    }
    std::fill_n(o.data(), o.size(), 77.0F);
    params.sequences(static_cast<std::int64_t>(lengths.size()));
    run(params);
    std::vector<float> got = o.values();
    const auto used = static_cast<std::size_t>(sum * kHeads * kDim);
    EXPECT_TRUE(std::all_of(got.begin() + static_cast<std::ptrdiff_t>(used), got.end(),
                            [](float x) { return x == 77; }));
    got.resize(used);
    expect_close(got, one_by_one(lengths, q, k, v));
    EXPECT_EQ(params.plan().id(), id);
  }
  // Another batch and token count of the same bucket is the same plan.
  lawson::AttentionConfig other = dense_config(30);
  other.layout(LAWSON_LAYOUT_THD).batch(5).total_q(kTokens + 3).total_kv(kTokens + 7);
  params.config(other);
  EXPECT_EQ(params.plan().id(), id);
  params.sequences(6);
  EXPECT_TRUE(has(refusal([&] { run(params); }), "6 sequences are more than the 5"));
  other.batch(33);
  params.config(other);
  EXPECT_NE(params.plan().id(), id);
}

TEST(AttentionParams, DropoutTakesSeedAndOffset) {
  Dense dense(24);
  auto config = dense_config(24);
  config.dropout(0.5).return_dropout_mask();
  Memory<std::int64_t> seed(1, 3);
  Memory<std::int64_t> offset(1, 0);
  Memory<std::uint8_t> dropped(24 * 24 * kHeads, 9);
  dense.params.config(config)
      .tensor(LAWSON_PARAM_SEED, seed.data())
      .tensor(LAWSON_PARAM_OFFSET, offset.data())
      .tensor(LAWSON_PARAM_DROPPED, dropped.data());
  run(dense.params);
  const auto first = dense.o.values();
  const auto first_mask = dropped.values();
  EXPECT_GT(std::count(first_mask.begin(), first_mask.end(), 0), 300);
  EXPECT_GT(std::count(first_mask.begin(), first_mask.end(), 1), 300);
  run(dense.params);
  EXPECT_EQ(dense.o.values(), first);
  seed[0] = 4;
  run(dense.params);
  EXPECT_NE(dense.o.values(), first);
  EXPECT_NE(dropped.values(), first_mask);
  // The mask itself, instead of seed and offset, gives the same.
  Memory<std::uint8_t> given(first_mask.size());
  std::copy(first_mask.begin(), first_mask.end(), given.data());
  auto masked = dense_config(24);
  masked.dropout(0.5).dropout_mask();
  dense.params.config(masked)
      .remove(LAWSON_PARAM_SEED)
      .remove(LAWSON_PARAM_OFFSET)
      .remove(LAWSON_PARAM_DROPPED)
      .tensor(LAWSON_PARAM_DROPOUT_MASK, given.data());
  run(dense.params);
  expect_close(dense.o.values(), first);
}

TEST(AttentionParams, AppendWritesTheCallersCache) {
  // One new token per step, at the end of what is there; dense cache of 12 with lengths.
  constexpr std::int64_t kCache = 12;
  constexpr std::size_t kRow = kHeads * kDim;
  Memory<float> k = numbers(kCache * kRow, 2);
  Memory<float> v = numbers(kCache * kRow, 3);
  Memory<float> q = numbers(kRow, 1);
  Memory<float> k_new = numbers(kRow, 7);
  Memory<float> v_new = numbers(kRow, 8);
  Memory<float> o(kRow);
  Memory<std::int32_t> one(1, 1);
  Memory<std::int32_t> length(1, 6);
  lawson::AttentionConfig config;
  config.dtype(LAWSON_DTYPE_F32).heads(kHeads).seqlen_q(1).seqlen_kv(kCache).head_dim_qk(kDim);
  config.mask(LAWSON_MASK_PADDING).append(1);
  lawson::ForwardParams params;
  params.config(config);
  const std::vector<std::pair<lawson_attention_param, void*>> tensors{
      {LAWSON_PARAM_Q, q.data()},          {LAWSON_PARAM_K, k.data()},
      {LAWSON_PARAM_V, v.data()},          {LAWSON_PARAM_O, o.data()},
      {LAWSON_PARAM_K_NEW, k_new.data()},  {LAWSON_PARAM_V_NEW, v_new.data()},
      {LAWSON_PARAM_SEQLEN_Q, one.data()}, {LAWSON_PARAM_SEQLEN_KV, length.data()}};
  for (const auto& [which, data] : tensors) params.tensor(which, data);
  std::vector<float> expected = k.values();
  std::copy_n(k_new.data(), kRow, expected.begin() + 5 * kRow);
  run(params);
  EXPECT_EQ(k.values(), expected);
  const auto appended = o.values();
  // The same cache without appending gives the same row.
  config.append(0);
  params.config(config).remove(LAWSON_PARAM_K_NEW).remove(LAWSON_PARAM_V_NEW);
  std::fill_n(o.data(), kRow, 0.0F);
  run(params);
  EXPECT_EQ(o.values(), appended);
}

TEST(AttentionConfig, SpecsGoInAndComeOutAndKeysAreOne) {
  const auto device = lawson::Device::find("cpu");
  int specs = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::string{LAWSON_SOURCE_DIR} + "/examples/specs")) {
    std::ifstream file(entry.path());
    std::stringstream text;
    text << file.rdbuf();
    if (Json::parse(text.str())["kind"] != "attention") continue;
    SCOPED_TRACE(entry.path().filename());
    ++specs;
    const auto config = lawson::AttentionConfig::from_spec(text.str(), entry.path().filename());
    const std::string written = config.spec();
    EXPECT_EQ(lawson::AttentionConfig::from_spec(written).spec(), written);
    const auto spec = lawson::Spec::from_json(text.str());
    EXPECT_EQ(lawson::select(config, device).key(), lawson::probe(spec, device).key());
    EXPECT_FALSE(lawson::select(config, device).key().empty());
  }
  EXPECT_GE(specs, 8);
  EXPECT_TRUE(has(refusal([] {
                    static_cast<void>(lawson::AttentionConfig::from_spec("{\"lawson\": 1}", "a.b"));
                  }),
                  "a.b"));
  lawson::AttentionConfig config = dense_config(4);
  EXPECT_EQ(config.graph(LAWSON_PASS_FORWARD).name(), "attention.forward");
  EXPECT_EQ(config.value<std::int64_t>(LAWSON_ATTENTION_HEADS), kHeads);
  EXPECT_EQ(config.value<std::int64_t>(LAWSON_ATTENTION_KV_HEADS), 0);
  lawson_graph* graph = nullptr;
  EXPECT_EQ(lawson_graph_from_attention(config.handle(), LAWSON_PASS_TRAINING, &graph),
            LAWSON_INVALID_ARGUMENT);
}

// cuDNN stops at the first condition that fails: f32 in a backward is found behind the head dim.
TEST(AttentionExplain, requirement_06_with_cudnn_all_failing_conditions_are_named) {
  if (LAWSON_WITH_CUDNN == 0) GTEST_SKIP() << "this build has no cuDNN engine";
  lawson::AttentionConfig config;
  config.pass(LAWSON_PASS_BACKWARD).dtype(LAWSON_DTYPE_F32).heads(4).seqlen_q(256);
  config.head_dim_qk(100);
  const auto device = lawson::Device::find("h200");
  const auto verdict = lawson::select(config, device);
  ASSERT_EQ(verdict.decision(), LAWSON_NOT_SUPPORTED);
  ASSERT_EQ(verdict.reasons().size(), 1U);
  EXPECT_TRUE(has(verdict.reasons()[0].message, "head_dim_qk = 100"));
  EXPECT_TRUE(has(verdict.reasons()[0].message, "multiple of 8"));
  const Json answer = Json::parse(lawson::explain(lawson::Spec::from_json(config.spec()), device));
  std::vector<std::string> fields;
  for (const Json& condition : answer["conditions"]) {
    fields.push_back(condition["field"]);
    EXPECT_TRUE(condition.contains("value")) << condition;
    EXPECT_FALSE(condition["message"].get<std::string>().empty());
    EXPECT_FALSE(condition["change"].get<std::string>().empty());
  }
  for (const char* field : {"head_dim_qk", "dtype"}) {
    EXPECT_NE(std::find(fields.begin(), fields.end(), field), fields.end()) << answer.dump(1);
  }
}

}  // namespace
