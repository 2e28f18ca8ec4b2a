// The ten requirements on the attention handles, one test each, without a GPU.
#include <gtest/gtest.h>
#include <lawson/legacy.h>

#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <stdexcept>

#include "capi/attention.h"
#include "capi/explain.h"
#include "capi/guard.h"
#include "capi/handles.h"
#include "front/attention_layout.h"
#include "plan/fake_engine.h"

namespace lawson::capi {
namespace {

using plan::fake_gpu;
using plan::FakeEngine;

bool has(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

template <typename T>
Result<T> attribute(const Json& document, std::int32_t id) {
  T value{};
  std::size_t size = 0;
  LAWSON_CHECK(get_config_attribute(document, id, &value, sizeof(value), &size));
  EXPECT_EQ(size, sizeof(value));
  return value;
}

template <typename T>
Status set(Json& document, std::int32_t id, const T& value) {
  return set_config_attribute(document, id, &value, sizeof(value));
}

// A plausible config: training, grouped heads, distinct sizes everywhere.
Json small_config(std::int32_t layout = LAWSON_LAYOUT_BSHD) {
  Json document = empty_attention_document();
  EXPECT_TRUE(set(document, LAWSON_ATTENTION_PASS, std::int32_t{LAWSON_PASS_TRAINING}).ok());
  EXPECT_TRUE(set(document, LAWSON_ATTENTION_DTYPE, std::int32_t{LAWSON_DTYPE_F32}).ok());
  EXPECT_TRUE(set(document, LAWSON_ATTENTION_LAYOUT, layout).ok());
  EXPECT_TRUE(set(document, LAWSON_ATTENTION_BATCH, std::int64_t{3}).ok());
  EXPECT_TRUE(set(document, LAWSON_ATTENTION_HEADS, std::int64_t{4}).ok());
  EXPECT_TRUE(set(document, LAWSON_ATTENTION_SEQLEN_Q, std::int64_t{20}).ok());
  EXPECT_TRUE(set(document, LAWSON_ATTENTION_HEAD_DIM_QK, std::int64_t{16}).ok());
  return document;
}

// Memory and descriptions for every tensor of a config's graph, as a caller of its size has them.
class Tensors {
 public:
  Tensors(const ir::Graph& graph, std::int64_t batch) : batch_{batch} {
    for (ir::TensorId id = 0; id < graph.input_count + graph.output_count; ++id) {
      const ir::Tensor& tensor = graph.tensor(id);
      if (!tensor.by_value && tensor_index(tensor.name) != kNoTensor) add(tensor);
    }
  }

  void set(AttentionParams& params) const {
    for (const auto& [name, tensor] : list_) {
      const std::int32_t id = tensor_attributes()[tensor_index(name)].id;
      const Status done = set_param(params, id, &tensor, sizeof(tensor));
      EXPECT_TRUE(done.ok()) << (done.ok() ? "" : done.error().message);
    }
  }

  lawson_tensor& operator[](const std::string& name) { return list_.at(name); }
  float* floats(const std::string& name) { return static_cast<float*>(list_.at(name).data); }
  std::size_t bytes(const std::string& name) const { return memory_.at(name).size() - 64; }
  bool contains(const std::string& name) const { return list_.contains(name); }

 private:
  void add(const ir::Tensor& tensor) {
    lawson_tensor described{};
    described.struct_size = sizeof(described);
    described.dtype = dtype_number(tensor.dtype);
    described.rank = static_cast<std::int32_t>(tensor.shape.size());
    std::copy(tensor.shape.begin(), tensor.shape.end(), described.shape);
    std::copy(tensor.strides.begin(), tensor.strides.end(), described.strides);
    if (tensor.name.starts_with("cu_seqlens")) described.shape[0] = batch_ + 1;
    const auto extent = storage_extent(tensor.shape, tensor.strides).value();
    auto& memory = memory_[tensor.name];
    memory.resize(byte_size(tensor.dtype, extent) + 64);
    void* start = memory.data();
    std::size_t space = memory.size();
    described.data = std::align(64, 1, start, space);
    if (tensor.dtype == DType::f32) {
      for (std::int64_t i = 0; i < extent; ++i) {
        static_cast<float*>(described.data)[i] =
            std::sin(static_cast<float>(i * 7 + static_cast<std::int64_t>(list_.size())));
      }
    }
    list_[tensor.name] = described;
  }

  std::int64_t batch_;
  std::map<std::string, lawson_tensor> list_;
  std::map<std::string, std::vector<std::byte>> memory_;
};

// One of the engine's answers, chosen by the test; otherwise a fake GPU engine.
class Doctored : public FakeEngine {
 public:
  enum class Mode {
    fine,
    unsupported,
    unsupported_silent,
    runtime_error,
    bad_alloc,
    cuda_error,
    thrown_int,
    backward_refused
  };

  Doctored() : FakeEngine("doctored") {}

  Result<Verdict> probe(const ir::Graph& graph, const Device& device,
                        const Options& options) override {
    {
      const std::lock_guard lock{mutex_};
      graphs.push_back(graph);
    }
    const Status bad = misbehave();
    if (!bad.ok() && bad.error().kind != ErrorKind::unsupported) return bad.error();
    LAWSON_TRY(Verdict verdict, FakeEngine::probe(graph, device, options));
    const bool is_backward = has(graph.name, ".backward");
    if (!bad.ok() || (mode == Mode::backward_refused && is_backward)) {
      verdict.decision = Decision::unsupported;
      if (mode != Mode::unsupported_silent) {
        verdict.reasons = {{"head_dim", "head_dim_qk = 16: no kernel", "head_dim_qk"}};
      } else {
        verdict.reasons.clear();
      }
    }
    return verdict;
  }

  Result<Plan> compile(const ir::Graph& graph, const Device& device, const Options& options,
                       const std::optional<Candidate>& candidate, std::stop_token stop) override {
    LAWSON_CHECK(misbehave());
    return FakeEngine::compile(graph, device, options, candidate, std::move(stop));
  }

  Result<bool> capturing(const Device&, void* stream) override { return stream != nullptr; }

  Result<void*> allocate(const Device&, std::size_t) override {
    ++allocations;
    return static_cast<void*>(nullptr);
  }

  Result<std::shared_ptr<Loaded>> load(const Plan& plan, const Device& device) override {
    ++loads;
    return FakeEngine::load(plan, device);
  }

  std::atomic<Mode> mode{Mode::fine};
  std::atomic<int> allocations{0};
  std::atomic<int> loads{0};
  std::vector<ir::Graph> graphs;

 private:
  Status misbehave() const {
    switch (mode) {
      case Mode::unsupported:
        return unsupported("head_dim", "head_dim_qk = 16: no kernel", "head_dim_qk");
      case Mode::unsupported_silent:
        return Error{ErrorKind::unsupported, "", {{"", "", ""}}};
      case Mode::runtime_error:
        throw std::runtime_error("no such kernel");
      case Mode::bad_alloc:
        throw std::bad_alloc();
      case Mode::cuda_error:
        return error(ErrorKind::cuda, "error 700");
      case Mode::thrown_int:
        throw 5;
      case Mode::fine:
      case Mode::backward_refused:
        break;
    }
    return {};
  }

  std::mutex mutex_;
};

class AttentionRequirements : public testing::Test {
 protected:
  AttentionRequirements() : engine_{std::make_shared<Doctored>()}, planner_{config()} {}

  Result<SpecVerdict> judge(const Json& document, Strength strength = Strength::judged) {
    Asked asked;
    asked.options.strength = strength;
    return select(document, gpu_, asked, planner_);
  }

  std::shared_ptr<Doctored> engine_;
  plan::Planner planner_;
  Device gpu_ = fake_gpu("h200", 0);

 private:
  plan::PlannerConfig config() const {
    plan::PlannerConfig config;
    config.engines = {engine_};
    return config;
  }
};

// A value other than the default.
std::vector<std::byte> other_value(const ConfigAttribute& attribute) {
  const auto bytes_of = [](const auto& value) {
    const auto* begin = reinterpret_cast<const std::byte*>(&value);
    return std::vector<std::byte>{begin, begin + sizeof(value)};
  };
  switch (attribute.kind) {
    case ValueKind::word:
      return bytes_of(static_cast<std::int32_t>(attribute.words->size() - 1));
    case ValueKind::flag:
      return bytes_of(std::int32_t{1});
    case ValueKind::integer:
      return bytes_of(std::int64_t{6});
    case ValueKind::number:
      return bytes_of(0.25);
    case ValueKind::text: {
      const std::array<char, 2> text{'a', 'b'};
      return bytes_of(text);
    }
    case ValueKind::integers:
      if (attribute.count == 2) return bytes_of(std::array<std::int64_t, 2>{5, 0});
      return bytes_of(std::array<std::int64_t, 4>{4, 3, 2, 1});
    case ValueKind::numbers:
      return bytes_of(std::array<double, 3>{0.5, 0.25, 0.125});
    case ValueKind::handle:
    case ValueKind::tensor:
      break;
  }
  return {};
}

TEST_F(AttentionRequirements, requirement_01_every_attribute_round_trips_and_errors_are_named) {
  ASSERT_EQ(config_attributes().size(), 54U);
  std::int32_t last = 0;
  for (const ConfigAttribute& attribute : config_attributes()) {
    SCOPED_TRACE(attribute.name);
    EXPECT_EQ(attribute.id, last + 1);
    last = attribute.id;
    Json document = empty_attention_document();
    const auto get = [&] {
      std::array<std::byte, 64> value{};
      std::size_t size = 999;
      std::size_t queried = 999;
      EXPECT_TRUE(
          get_config_attribute(document, attribute.id, value.data(), value.size(), &size).ok());
      EXPECT_TRUE(get_config_attribute(document, attribute.id, nullptr, 0, &queried).ok());
      EXPECT_EQ(size, queried);
      return std::vector<std::byte>{value.begin(), value.begin() + static_cast<long>(size)};
    };
    const std::vector<std::byte> before = get();
    const std::vector<std::byte> given = other_value(attribute);
    ASSERT_NE(given, before);
    ASSERT_TRUE(set_config_attribute(document, attribute.id, given.data(), given.size()).ok());
    EXPECT_EQ(get(), given);
    // Too little room, a wrong size, no value.
    std::array<std::byte, 64> value{};
    const Status small =
        get_config_attribute(document, attribute.id, value.data(), given.size() - 1, nullptr);
    ASSERT_FALSE(small.ok());
    EXPECT_TRUE(has(small.error().message, attribute.name)) << small.error().message;
    if (attribute.kind != ValueKind::text) {
      const Status odd = set_config_attribute(document, attribute.id, given.data(), 3);
      ASSERT_FALSE(odd.ok());
      EXPECT_EQ(odd.error().kind, ErrorKind::invalid_argument);
      EXPECT_TRUE(has(odd.error().message, attribute.name)) << odd.error().message;
    }
    EXPECT_FALSE(set_config_attribute(document, attribute.id, nullptr, given.size()).ok());
    EXPECT_EQ(get(), given);
    // Back to the default.
    ASSERT_TRUE(set_config_attribute(document, attribute.id, before.data(), before.size()).ok());
    EXPECT_EQ(get(), before);
    if (attribute.kind != ValueKind::word || attribute.id == LAWSON_ATTENTION_OUTPUT_DTYPE) {
      if (attribute.kind != ValueKind::text && attribute.id != LAWSON_ATTENTION_WINDOW) {
        EXPECT_EQ(document, empty_attention_document());
      }
    }
  }
  Json document = empty_attention_document();
  for (const std::int32_t unknown : {0, -1, 55, 1 << 30}) {
    const Status bad = set(document, unknown, std::int64_t{1});
    ASSERT_FALSE(bad.ok());
    EXPECT_TRUE(has(bad.error().message, std::to_string(unknown))) << bad.error().message;
  }
  for (const std::int32_t value : {-1, 99}) {
    const Status bad = set(document, LAWSON_ATTENTION_MASK, value);
    ASSERT_FALSE(bad.ok());
    EXPECT_TRUE(has(bad.error().message, "mask") && has(bad.error().message, std::to_string(value)))
        << bad.error().message;
  }
  EXPECT_FALSE(set(document, LAWSON_ATTENTION_LAYOUT, std::int32_t{0}).ok());
  EXPECT_FALSE(set(document, LAWSON_ATTENTION_BATCH, std::int64_t{-7}).ok());
  EXPECT_FALSE(set(document, LAWSON_ATTENTION_SOFTCAP, std::nan("")).ok());
  EXPECT_FALSE(set(document, LAWSON_ATTENTION_CUDA_GRAPH, std::int32_t{2}).ok());
  EXPECT_EQ(document, empty_attention_document());

  // Params: every tensor, in the params that have it and in no others.
  int both = 0;
  for (const TensorAttribute& tensor : tensor_attributes()) {
    SCOPED_TRACE(tensor.name);
    lawson_tensor given{};
    given.struct_size = sizeof(given);
    given.data = &given;
    given.dtype = LAWSON_DTYPE_BF16;
    given.rank = 2;
    given.shape[0] = given.strides[0] = 3;
    given.shape[1] = 3;
    given.strides[1] = 1;
    int takes = 0;
    for (const front::Pass pass : {front::Pass::forward, front::Pass::backward}) {
      AttentionParams params(pass);
      std::size_t size = 999;
      if ((tensor.passes & (pass == front::Pass::forward ? 1U : 2U)) == 0) {
        const Status refused = set_param(params, tensor.id, &given, sizeof(given));
        ASSERT_FALSE(refused.ok());
        EXPECT_TRUE(has(refused.error().message, tensor.name)) << refused.error().message;
        continue;
      }
      ++takes;
      ASSERT_TRUE(get_param(params, tensor.id, nullptr, 0, &size).ok());
      EXPECT_EQ(size, 0U);
      ASSERT_TRUE(set_param(params, tensor.id, &given, sizeof(given)).ok());
      lawson_tensor back{};
      ASSERT_TRUE(get_param(params, tensor.id, &back, sizeof(back), &size).ok());
      EXPECT_EQ(size, sizeof(back));
      EXPECT_EQ(std::memcmp(&back, &given, sizeof(back)), 0);
      EXPECT_FALSE(get_param(params, tensor.id, &back, sizeof(back) - 1, &size).ok());
      ASSERT_TRUE(set_param(params, tensor.id, nullptr, 0).ok());
      ASSERT_TRUE(get_param(params, tensor.id, nullptr, 0, &size).ok());
      EXPECT_EQ(size, 0U);
    }
    EXPECT_GE(takes, 1);
    both += takes == 2 ? 1 : 0;
  }
  EXPECT_EQ(both, 25);
  lawson_tensor bad{};
  bad.struct_size = sizeof(bad);
  AttentionParams params(front::Pass::forward);
  bad.rank = 9;
  EXPECT_FALSE(set_param(params, LAWSON_PARAM_Q, &bad, sizeof(bad)).ok());
  bad.rank = 1;  // and no type
  EXPECT_FALSE(set_param(params, LAWSON_PARAM_Q, &bad, sizeof(bad)).ok());
  bad.dtype = LAWSON_DTYPE_F32;
  bad.shape[0] = -1;
  EXPECT_FALSE(set_param(params, LAWSON_PARAM_Q, &bad, sizeof(bad)).ok());
  bad.shape[0] = 2;
  bad.strides[0] = std::int64_t{1} << 62;
  EXPECT_FALSE(set_param(params, LAWSON_PARAM_Q, &bad, 8).ok());

  // Scalars and handles of params.
  lawson_attention_config config{small_config()};
  const lawson_attention_config* pointer = &config;
  ASSERT_TRUE(set_param(params, LAWSON_PARAM_CONFIG, &pointer, sizeof(pointer)).ok());
  lawson_attention_config copy;
  lawson_attention_config* target = &copy;
  ASSERT_TRUE(get_param(params, LAWSON_PARAM_CONFIG, &target, sizeof(target), nullptr).ok());
  EXPECT_EQ(copy.document, config.document);
  config.document.clear();
  ASSERT_TRUE(get_param(params, LAWSON_PARAM_CONFIG, &target, sizeof(target), nullptr).ok());
  EXPECT_NE(copy.document, config.document);  // params keep what they were given
  lawson_device device{gpu_};
  const lawson_device* device_pointer = &device;
  ASSERT_TRUE(set_param(params, LAWSON_PARAM_DEVICE, &device_pointer, sizeof(device_pointer)).ok());
  lawson_device device_copy{cpu_device()};
  lawson_device* device_target = &device_copy;
  ASSERT_TRUE(
      get_param(params, LAWSON_PARAM_DEVICE, &device_target, sizeof(device_target), nullptr).ok());
  EXPECT_EQ(device_copy.device.name, "h200");
  const double scale = 0.5;
  const std::int64_t limit = 4096;
  const std::int32_t on = 1;
  const std::int64_t quick = LAWSON_TUNING_QUICK;
  const std::int64_t fastest = 3;
  ASSERT_TRUE(set_param(params, LAWSON_PARAM_TUNING, &quick, sizeof(quick)).ok());
  const Status refused = set_param(params, LAWSON_PARAM_TUNING, &fastest, sizeof(fastest));
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().message,
            "attribute 'tuning': 3 is not allowed; expected LAWSON_TUNING_OFF (0), "
            "LAWSON_TUNING_QUICK (1) or LAWSON_TUNING_EXHAUSTIVE (2)");
  ASSERT_TRUE(set_param(params, LAWSON_PARAM_SCALE, &scale, sizeof(scale)).ok());
  ASSERT_TRUE(set_param(params, LAWSON_PARAM_WORKSPACE_LIMIT, &limit, sizeof(limit)).ok());
  ASSERT_TRUE(set_param(params, LAWSON_PARAM_SEQUENCES, &limit, sizeof(limit)).ok());
  ASSERT_TRUE(set_param(params, LAWSON_PARAM_DETERMINISTIC, &on, sizeof(on)).ok());
  ASSERT_TRUE(set_param(params, LAWSON_PARAM_ENGINE, "cpu", 3).ok());
  double scale_back = 0;
  std::int64_t integer = 0;
  std::int32_t flag = 0;
  std::array<char, 8> text{};
  std::size_t size = 0;
  ASSERT_TRUE(get_param(params, LAWSON_PARAM_SCALE, &scale_back, sizeof(double), &size).ok());
  EXPECT_EQ(scale_back, scale);
  ASSERT_TRUE(get_param(params, LAWSON_PARAM_WORKSPACE_LIMIT, &integer, 8, &size).ok());
  EXPECT_EQ(integer, limit);
  integer = 0;
  ASSERT_TRUE(get_param(params, LAWSON_PARAM_SEQUENCES, &integer, 8, &size).ok());
  EXPECT_EQ(integer, limit);
  ASSERT_TRUE(get_param(params, LAWSON_PARAM_TUNING, &integer, 8, &size).ok());
  EXPECT_EQ(integer, quick);
  ASSERT_TRUE(get_param(params, LAWSON_PARAM_DETERMINISTIC, &flag, 4, &size).ok());
  EXPECT_EQ(flag, 1);
  ASSERT_TRUE(get_param(params, LAWSON_PARAM_ENGINE, text.data(), text.size(), &size).ok());
  EXPECT_EQ(std::string_view(text.data(), size), "cpu");
}

// Tensors as a caller has them for this config, without the config.
Result<Json> derived_from(const Json& config, front::Pass pass, const Json* base) {
  LAWSON_TRY(const ir::Graph graph, attention_graph(config, pass));
  Tensors tensors(graph, config.value("batch", std::int64_t{1}));
  AttentionParams params(pass);
  tensors.set(params);
  if (base != nullptr) params.config = *base;
  return derive(params);
}

Json derived_again(const Json& config, front::Pass pass, const Json& base) {
  const auto derived = derived_from(config, pass, &base);
  EXPECT_TRUE(derived.ok()) << (derived.ok() ? "" : derived.error().message);
  return derived.ok() ? *derived : Json{};
}

std::string spec_text(const Json& document) {
  const auto spec = attention_spec(document);
  EXPECT_TRUE(spec.ok()) << (spec.ok() ? "" : spec.error().message);
  return spec.ok() ? front::attention_to_json(*spec).dump(1) : "";
}

TEST_F(AttentionRequirements, requirement_02_a_config_from_params_is_the_hand_built_one) {
  int layouts = 0;
  for (std::size_t number = 1; number < layout_words().size(); ++number) {
    SCOPED_TRACE(layout_words()[number]);
    const auto layout = front::parse_layout(layout_words()[number]);
    ASSERT_TRUE(layout.has_value());
    ++layouts;
    Json config = small_config(static_cast<std::int32_t>(number));
    using Packing = front::Layout::Packing;
    const bool all = layout->packing == Packing::qkv_s3hd || layout->packing == Packing::qkv_h3d;
    if (!all) {
      ASSERT_TRUE(set(config, LAWSON_ATTENTION_KV_HEADS, std::int64_t{2}).ok());
      ASSERT_TRUE(set(config, LAWSON_ATTENTION_SEQLEN_KV, std::int64_t{28}).ok());
    }
    if (layout->packing == Packing::separate) {
      ASSERT_TRUE(set(config, LAWSON_ATTENTION_HEAD_DIM_V, std::int64_t{8}).ok());
    }
    const bool ragged = layout->ragged_q() || layout->ragged_kv();
    // Exactly one bucket of tokens, so that the graph's tensors are the caller's.
    if (layout->ragged_q()) {
      ASSERT_TRUE(set(config, LAWSON_ATTENTION_TOTAL_Q, std::int64_t{1024}).ok());
    }
    if (layout->ragged_kv()) {
      ASSERT_TRUE(set(config, LAWSON_ATTENTION_TOTAL_KV, std::int64_t{1024}).ok());
    }
    if (ragged) {
      ASSERT_TRUE(set(config, LAWSON_ATTENTION_BATCH, std::int64_t{32}).ok());
    }
    for (const front::Pass pass : {front::Pass::forward, front::Pass::backward}) {
      // What no tensor says: that it is training, and the longest sequence of a ragged side.
      Json base = empty_attention_document();
      base["pass"] = "training";
      if (layout->ragged_q()) base["seqlen_q"] = config["seqlen_q"];
      if (layout->ragged_kv()) base["seqlen_kv"] = config.value("seqlen_kv", config["seqlen_q"]);
      const auto derived = derived_from(config, pass, &base);
      ASSERT_TRUE(derived.ok()) << derived.error().message;
      EXPECT_EQ(spec_text(*derived), spec_text(config));
      EXPECT_EQ(ir::canonical_text(attention_graph(*derived, pass).value()),
                ir::canonical_text(attention_graph(config, pass).value()));
      // Deriving again, from the result and from the config itself.
      EXPECT_EQ(derived_again(*derived, pass, *derived), *derived);
      EXPECT_EQ(derived_again(config, pass, config), config);
    }
  }
  EXPECT_EQ(layouts, 52);

  // Strides that are no layout's, and those of every gradient.
  Json strided = small_config();
  for (const char* name : {"q", "k", "v", "o", "do", "dq", "dk", "dv"}) {
    strided["strides"][name] = Dims{4 * 20 * 24, 24, 4 * 24, 1};
  }
  strided["strides"].erase("do");
  for (const front::Pass pass : {front::Pass::forward, front::Pass::backward}) {
    const auto derived = derived_from(strided, pass, nullptr);
    ASSERT_TRUE(derived.ok()) << derived.error().message;
    Json training = *derived;
    training["pass"] = "training";
    EXPECT_EQ(ir::canonical_text(attention_graph(training, pass).value()),
              ir::canonical_text(attention_graph(strided, pass).value()));
    EXPECT_EQ(derived_again(*derived, pass, *derived), *derived);
  }

  // Optional tensors are features; what tensors do not say is the base's.
  Json rich = small_config();
  rich.update(Json{{"mask", "padding_causal"},
                   {"bias", "pre_scale"},
                   {"bias_shape", {1, 4, 20, 20}},
                   {"bias_dtype", "bf16"},
                   {"bias_grad", true},
                   {"attn_mask", {{"dtype", "bool"}, {"shape", {3, 1, 1, 20}}}},
                   {"softmax", "learnable"},
                   {"dropout", 0.25},
                   {"return_max_logit", true},
                   {"window", {7, -1}}});
  Json base{{"lawson", 1},       {"kind", "attention"}, {"pass", "training"},
            {"mask", "causal"},  {"bias", "pre_scale"}, {"dropout", 0.25},
            {"window", {7, -1}}, {"bias_grad", true},   {"return_max_logit", true}};
  const auto derived = derived_from(rich, front::Pass::forward, &base);
  ASSERT_TRUE(derived.ok()) << derived.error().message;
  EXPECT_EQ(spec_text(*derived), spec_text(rich));

  // What cuDNN would refuse is derived all the same.
  for (const std::int64_t dim : {1, 7, 513, 4096}) {
    Json odd = small_config();
    odd["head_dim_qk"] = dim;
    odd["head_dim_v"] = dim + 3;
    odd["seqlen_q"] = 1;
    odd["mask"] = "causal_bottom_right";
    odd["dropout"] = 0.5;
    for (const front::Pass pass : {front::Pass::forward, front::Pass::backward}) {
      const auto made = derived_from(odd, pass, &odd);
      ASSERT_TRUE(made.ok()) << made.error().message;
      EXPECT_EQ(*made, odd);
    }
  }
}

TEST_F(AttentionRequirements, requirement_03_a_probe_changes_and_allocates_nothing) {
  lawson_attention_config config{small_config()};
  const Json before = config.document;
  const auto verdict = judge(config.document);
  ASSERT_TRUE(verdict.ok()) << verdict.error().message;
  EXPECT_EQ(verdict->verdict.decision, Decision::supported);
  EXPECT_EQ(config.document, before);
  EXPECT_EQ(engine_->builds, 0);
  EXPECT_EQ(engine_->loads, 0);
  EXPECT_EQ(engine_->allocations, 0);
  EXPECT_EQ(planner_.cache().size(), 0U);
  // Only when it is asked for: both passes.
  ASSERT_TRUE(judge(config.document, Strength::built).ok());
  EXPECT_EQ(engine_->builds, 2);
  EXPECT_EQ(engine_->allocations, 0);
  EXPECT_EQ(config.document, before);
}

TEST_F(AttentionRequirements, requirement_04_training_judges_both_passes_with_real_gradients) {
  Json config = small_config(LAWSON_LAYOUT_BS3HD);
  config["strides"]["do"] = Dims{4 * 20 * 24, 24, 4 * 24, 1};
  const auto verdict = judge(config);
  ASSERT_TRUE(verdict.ok());
  EXPECT_EQ(verdict->verdict.decision, Decision::supported);
  ASSERT_EQ(engine_->graphs.size(), 2U);
  const bool first_is_backward = has(engine_->graphs[0].name, ".backward");
  const ir::Graph& backward = engine_->graphs[first_is_backward ? 0 : 1];
  const auto strides = [&](const std::string& name) {
    for (const ir::Tensor& tensor : backward.tensors) {
      if (tensor.name == name) return tensor.strides;
    }
    return Dims{};
  };
  const Dims packed{20 * 3 * 64, 16, 3 * 64, 1};
  EXPECT_EQ(strides("q"), packed);
  for (const char* gradient : {"dq", "dk", "dv"}) EXPECT_EQ(strides(gradient), packed) << gradient;
  EXPECT_EQ(strides("do"), (Dims{4 * 20 * 24, 24, 4 * 24, 1}));
  EXPECT_EQ(strides("o"), (Dims{20 * 64, 16, 64, 1}));

  engine_->mode = Doctored::Mode::backward_refused;
  const auto refused = judge(config, Strength::built);  // what was judged stays
  ASSERT_TRUE(refused.ok());
  EXPECT_EQ(refused->verdict.decision, Decision::unsupported);
  ASSERT_FALSE(refused->verdict.reasons.empty());
  EXPECT_TRUE(has(refused->verdict.reasons[0].message, "backward"));
  config["pass"] = "forward";
  EXPECT_EQ(judge(config)->verdict.decision, Decision::supported);
}

TEST_F(AttentionRequirements, requirement_05_only_not_supported_becomes_a_verdict) {
  Json config = small_config();
  config["pass"] = "forward";
  AttentionParams params(front::Pass::forward);
  Tensors tensors(attention_graph(config, front::Pass::forward).value(), 3);
  tensors.set(params);
  config["return_stats"] = true;
  params.config = config;
  params.device = gpu_;
  lawson_tensor stats{};
  stats.struct_size = sizeof(stats);
  alignas(64) static std::array<float, 3 * 4 * 20> memory;
  stats.data = memory.data();
  ASSERT_TRUE(set_param(params, LAWSON_PARAM_STATS, &stats, sizeof(stats)).ok());
  const auto probe = [&](Strength strength, Verdict* verdict) {
    return guard([&]() -> Status {
      LAWSON_TRY(const SpecVerdict judged, judge(config, strength));
      *verdict = judged.verdict;
      return {};
    });
  };
  const auto execute = [&] {
    return guard([&] { return run(params, planner_, memory.data(), sizeof(memory), nullptr); });
  };
  using Mode = Doctored::Mode;
  struct Case {
    Mode mode;
    lawson_status status;
    const char* message;
  };
  for (const Case& item : {Case{Mode::runtime_error, LAWSON_INTERNAL, "no such kernel"},
                           Case{Mode::bad_alloc, LAWSON_OUT_OF_MEMORY, "out of memory"},
                           Case{Mode::cuda_error, LAWSON_CUDA, "error 700"},
                           Case{Mode::thrown_int, LAWSON_INTERNAL, "not a std::exception"}}) {
    engine_->mode = item.mode;
    Verdict verdict;
    for (const Strength strength : {Strength::judged, Strength::built}) {
      EXPECT_EQ(probe(strength, &verdict), item.status) << item.message;
      EXPECT_TRUE(has(lawson_last_error_message(), item.message)) << lawson_last_error_message();
    }
    EXPECT_EQ(execute(), item.status) << item.message;
    EXPECT_EQ(planner_.cache().size(), 0U);
  }
  for (const Mode mode : {Mode::unsupported, Mode::unsupported_silent}) {
    engine_->mode = mode;
    Verdict verdict;
    ASSERT_EQ(probe(Strength::judged, &verdict), LAWSON_OK) << lawson_last_error_message();
    EXPECT_EQ(verdict.decision, Decision::unsupported);
    ASSERT_FALSE(verdict.reasons.empty());
    EXPECT_FALSE(verdict.reasons[0].message.empty());
    EXPECT_FALSE(verdict.reasons[0].code.empty());
    EXPECT_EQ(execute(), LAWSON_UNSUPPORTED);
    EXPECT_FALSE(std::string_view{lawson_last_error_message()}.empty());
  }
  // An answer stays; it is none to another question.
  engine_->mode = Mode::fine;
  EXPECT_EQ(execute(), LAWSON_UNSUPPORTED);
  const std::int64_t limit = 1 << 20;
  ASSERT_TRUE(set_param(params, LAWSON_PARAM_WORKSPACE_LIMIT, &limit, sizeof(limit)).ok());
  EXPECT_EQ(execute(), LAWSON_OK) << lawson_last_error_message();
}

TEST_F(AttentionRequirements, requirement_06_all_failing_conditions_are_found_and_named) {
  // Like cuDNN: stops at the first condition that fails, of three.
  const auto stubborn = [](const front::Spec& spec, const Device&) -> Result<SpecVerdict> {
    const Json& fields = spec.document;
    Verdict verdict;
    verdict.decision = Decision::unsupported;
    if (fields.at("head_dim_qk").get<std::int64_t>() > 128) {
      verdict.reasons = {{"head_dim", "head_dim_qk = 192: at most 128 on sm_90", "head_dim_qk"}};
    } else if (fields.at("dropout").get<double>() > 0) {
      verdict.reasons = {{"dropout", "dropout = 0.1: not with this cuDNN", "dropout"}};
    } else if (fields.at("mask") != "none") {
      verdict.reasons = {{"mask", "mask = causal: not with this layout", "mask"}};
    } else {
      verdict.decision = Decision::supported;
    }
    return SpecVerdict{verdict, verdict_to_json(verdict)};
  };
  Json config = small_config();
  config["pass"] = "forward";
  config["head_dim_qk"] = 192;
  config["dropout"] = 0.1;
  config["mask"] = "causal";
  const auto spec = front::spec_from_json(config, "config");
  ASSERT_TRUE(spec.ok());
  const auto answer = explain(*spec, gpu_, {}, 400, 2, stubborn);
  ASSERT_TRUE(answer.ok()) << answer.error().message;
  std::vector<std::string> found;
  for (const Json& condition : (*answer)["conditions"]) {
    found.push_back(condition["field"]);
    EXPECT_FALSE(condition["message"].get<std::string>().empty());
    EXPECT_TRUE(condition.contains("value")) << condition;
    EXPECT_FALSE(condition["change"].get<std::string>().empty());
  }
  for (const char* field : {"head_dim_qk", "dropout", "mask"}) {
    EXPECT_NE(std::find(found.begin(), found.end(), field), found.end()) << answer->dump(1);
  }
}

TEST_F(AttentionRequirements, requirement_07_a_message_belongs_to_its_verdict) {
  engine_->mode = Doctored::Mode::unsupported;
  Json config = small_config();
  auto first = judge(config);
  ASSERT_TRUE(first.ok());
  const lawson_verdict handle{std::make_shared<const Verdict>(first->verdict),
                              std::make_shared<const Json>(first->json)};
  const char* message = lawson_verdict_reason_message(&handle, 0);
  const std::string before = message;
  EXPECT_FALSE(before.empty());
  engine_->mode = Doctored::Mode::backward_refused;
  for (int i = 0; i < 20; ++i) {
    config["seqlen_q"] = 21 + i;
    ASSERT_TRUE(judge(config).ok());
    lawson_attention_config* unused = nullptr;
    EXPECT_EQ(lawson_attention_config_from_spec("{", 1, "x", &unused), LAWSON_INVALID_ARGUMENT);
  }
  EXPECT_EQ(lawson_verdict_reason_message(&handle, 0), message);
  EXPECT_EQ(before, message);
}

TEST_F(AttentionRequirements, requirement_08_the_workspace_is_exact) {
  Json config = small_config();
  Tensors tensors(attention_graph(config, front::Pass::backward).value(), 3);
  AttentionParams params(front::Pass::backward);
  tensors.set(params);
  params.config = config;
  const auto planner = capi::planner();
  ASSERT_TRUE(planner.ok());
  const auto loaded = plan_of(params, **planner, nullptr);
  ASSERT_TRUE(loaded.ok()) << loaded.error().message;
  const auto needed = static_cast<std::size_t>((*loaded)->plan().workspace_bytes);
  ASSERT_GT(needed, 0U);
  std::vector<std::byte> memory(needed + 128, std::byte{0x5A});
  void* start = memory.data();
  std::size_t space = memory.size();
  auto* workspace = static_cast<std::byte*>(std::align(16, needed, start, space));
  EXPECT_TRUE(run(params, **planner, workspace, needed, nullptr).ok());
  for (const std::byte* guard = workspace + needed; guard < memory.data() + memory.size();
       ++guard) {
    ASSERT_EQ(*guard, std::byte{0x5A});
  }
  for (const auto& [pointer, size] : {std::pair<void*, std::size_t>{workspace, needed - 1},
                                      {nullptr, needed},
                                      {nullptr, 0},
                                      {workspace + 8, needed}}) {
    const Status refused = run(params, **planner, pointer, size, nullptr);
    ASSERT_FALSE(refused.ok());
    EXPECT_EQ(refused.error().kind, ErrorKind::invalid_argument);
    EXPECT_TRUE(has(refused.error().message, "workspace"));
  }
}

TEST_F(AttentionRequirements, requirement_09_aux_outputs_are_named_and_shift_nothing) {
  const auto planner = capi::planner();
  ASSERT_TRUE(planner.ok());
  std::vector<std::vector<float>> seen;
  for (const bool max_logit : {false, true}) {
    Json config = small_config();
    config["softmax"] = "learnable";
    config["bias"] = "post_scale";
    config["bias_shape"] = Dims{1, 4, 20, 20};
    config["return_max_logit"] = max_logit;
    Tensors tensors(attention_graph(config, front::Pass::forward).value(), 3);
    AttentionParams params(front::Pass::forward);
    tensors.set(params);
    params.config = config;
    // Inputs that do not depend on which other tensors there are.
    for (const char* name : {"q", "k", "v", "bias", "sink"}) {
      for (std::size_t i = 0; i < tensors.bytes(name) / 4; ++i) {
        tensors.floats(name)[i] = std::sin(static_cast<float>(i * 3 + std::strlen(name)));
      }
    }
    std::vector<std::byte> workspace(
        static_cast<std::size_t>(
            plan_of(params, **planner, nullptr).value()->plan().workspace_bytes) +
        64);
    void* start = workspace.data();
    std::size_t space = workspace.size();
    void* aligned = std::align(16, workspace.size() - 64, start, space);
    const Status done = run(params, **planner, aligned, workspace.size() - 64, nullptr);
    ASSERT_TRUE(done.ok()) << done.error().message;
    std::vector<float> values;
    for (const char* name : {"o", "stats"}) {
      values.insert(values.end(), tensors.floats(name),
                    tensors.floats(name) + tensors.bytes(name) / 4);
    }
    seen.push_back(std::move(values));
    if (max_logit) {
      // Below the log-sum-exp of the row, which has the sink on top.
      for (std::size_t i = 0; i < tensors.bytes("stats") / 4; ++i) {
        EXPECT_LT(tensors.floats("max_logit")[i], tensors.floats("stats")[i]);
      }
    }
    // The backward takes the same names.
    const auto backward = attention_graph(config, front::Pass::backward);
    for (const char* aux : {"stats", "bias", "sink"}) {
      bool is_there = false;
      for (ir::TensorId id = 0; id < backward->input_count; ++id) {
        is_there = is_there || backward->tensor(id).name == aux;
      }
      EXPECT_TRUE(is_there) << aux;
    }
  }
  EXPECT_EQ(seen[0], seen[1]);
  // A tensor that the config has no use for is an error, not a shift.
  Json config = small_config();
  AttentionParams params(front::Pass::forward);
  Tensors tensors(attention_graph(config, front::Pass::forward).value(), 3);
  tensors.set(params);
  params.config = config;
  lawson_tensor extra = tensors["stats"];
  ASSERT_TRUE(set_param(params, LAWSON_PARAM_MAX_LOGIT, &extra, sizeof(extra)).ok());
  const auto refused = plan_of(params, **planner, nullptr);
  ASSERT_FALSE(refused.ok());
  EXPECT_TRUE(has(refused.error().message, "max_logit")) << refused.error().message;
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

// The same attention through the flat calls; q, k, v and do are the tensors' own.
void run_legacy(Tensors& t, const Json& config, bool backward) {
  const auto at = [&](const char* name) { return t.contains(name) ? &t[name] : nullptr; };
  std::size_t size = 0;
  void* aligned = nullptr;
  std::vector<std::byte> memory;
  const auto word = [&](std::int32_t id) { return attribute<std::int32_t>(config, id).value(); };
  const auto layout = word(LAWSON_ATTENTION_LAYOUT);
  const auto bias = word(LAWSON_ATTENTION_BIAS);
  const auto mask = word(LAWSON_ATTENTION_MASK);
  const auto softmax = word(LAWSON_ATTENTION_SOFTMAX);
  const auto window =
      attribute<std::array<std::int64_t, 2>>(config, LAWSON_ATTENTION_WINDOW).value();
  const auto dropout = attribute<double>(config, LAWSON_ATTENTION_DROPOUT).value();
  const std::int64_t sq = config["seqlen_q"];
  const std::int64_t skv = config.value("seqlen_kv", sq);
  const double scale = std::nan("");
  const auto call = [&] {
    return backward ? lawson_legacy_attention_backward(
                          at("q"), at("k"), at("v"), at("o"), at("do"), at("stats"), at("bias"),
                          at("sink"), at("dq"), at("dk"), at("dv"), at("dbias"), at("dsink"),
                          at("seqlen_q"), at("seqlen_kv"), at("cu_seqlens_q"), at("cu_seqlens_kv"),
                          at("cu_seqlens_q_padded"), at("cu_seqlens_kv_padded"), at("seed"),
                          at("offset"), sq, skv, 0, 0, scale, dropout, layout, bias, mask, softmax,
                          window[0], window[1], nullptr, aligned, &size, nullptr)
                    : lawson_legacy_attention_forward(
                          at("q"), at("k"), at("v"), at("bias"), at("sink"), at("o"), at("stats"),
                          at("max_logit"), at("seqlen_q"), at("seqlen_kv"), at("cu_seqlens_q"),
                          at("cu_seqlens_kv"), at("cu_seqlens_q_padded"),
                          at("cu_seqlens_kv_padded"), at("page_table_k"), at("page_table_v"),
                          at("seed"), at("offset"), sq, skv, 1, 0, scale, dropout, layout, bias,
                          mask, softmax, window[0], window[1], nullptr, aligned, &size, nullptr);
  };
  ASSERT_EQ(call(), LAWSON_OK) << lawson_last_error_message();
  memory.resize(size + 128);
  aligned = memory.data();
  std::size_t space = memory.size();
  aligned = std::align(64, size + 1, aligned, space);
  ASSERT_EQ(call(), LAWSON_OK) << lawson_last_error_message();
}

TEST_F(AttentionRequirements, requirement_10_legacy_calls_have_the_same_plan_and_result) {
  const auto planner = capi::planner();
  ASSERT_TRUE(planner.ok());
  Json causal = small_config();
  causal["mask"] = "causal";
  Json window = small_config(LAWSON_LAYOUT_SBHD);
  window["window"] = Dims{5, 2};
  Json packed = small_config(LAWSON_LAYOUT_BS3HD);
  Json sink = small_config(LAWSON_LAYOUT_BHSD);
  sink["softmax"] = "learnable";
  Json bias = small_config();
  bias["bias"] = "post_scale";
  bias["bias_shape"] = Dims{1, 4, 20, 20};
  Json padding = small_config();
  padding["mask"] = "padding_causal";
  Json ragged = small_config(LAWSON_LAYOUT_THD);
  ragged["mask"] = "causal_bottom_right";
  ragged["total_q"] = ragged["total_kv"] = 1024;
  for (const Json& config : {causal, window, packed, sink, bias, padding, ragged}) {
    SCOPED_TRACE(config.dump());
    std::map<std::string, std::vector<float>> by_handles;
    for (const bool legacy : {false, true}) {
      for (const bool backward : {false, true}) {
        const auto pass = backward ? front::Pass::backward : front::Pass::forward;
        const ir::Graph graph = attention_graph(config, pass).value();
        Tensors tensors(graph, 3);
        const std::array<std::int32_t, 3> lengths{20, 7, 0};
        const std::array<std::int32_t, 4> offsets{0, 20, 27, 40};
        for (const char* name : {"seqlen_q", "seqlen_kv"}) {
          if (tensors.contains(name)) std::memcpy(tensors[name].data, lengths.data(), 12);
        }
        for (const char* name : {"cu_seqlens_q", "cu_seqlens_kv"}) {
          if (tensors.contains(name)) std::memcpy(tensors[name].data, offsets.data(), 16);
        }
        const std::uint64_t builds = (*planner)->cache().counters().builds;
        if (legacy) {
          run_legacy(tensors, config, backward);
          EXPECT_EQ((*planner)->cache().counters().builds, builds) << "another plan";
        } else {
          AttentionParams params(pass);
          tensors.set(params);
          params.config = config;
          const auto loaded = plan_of(params, **planner, nullptr);
          ASSERT_TRUE(loaded.ok()) << loaded.error().message;
          const auto size = static_cast<std::size_t>((*loaded)->plan().workspace_bytes);
          std::vector<std::byte> memory(size + 64);
          void* start = memory.data();
          std::size_t space = memory.size();
          void* workspace = std::align(64, size, start, space);
          const Status done = run(params, **planner, workspace, size, nullptr);
          ASSERT_TRUE(done.ok()) << done.error().message;
        }
        for (const char* output : {"o", "stats", "dq", "dk", "dv", "dsink"}) {
          if (!tensors.contains(output) || (backward && output[0] != 'd')) continue;
          const float* values = tensors.floats(output);
          std::vector<float> copy(values, values + tensors.bytes(output) / 4);
          if (!legacy) {
            by_handles[output] = std::move(copy);
          } else {
            EXPECT_EQ(std::memcmp(copy.data(), by_handles[output].data(), copy.size() * 4), 0)
                << output;
          }
        }
      }
    }
  }

  // The flat question: the verdict is that of the handles, for one batch size.
  const auto ask = [&](std::int64_t batch, std::int32_t kv_dtype, std::int32_t* backend,
                       lawson_verdict** verdict) {
    return lawson_legacy_attention_backend(1, LAWSON_DTYPE_F32, kv_dtype, LAWSON_LAYOUT_BSHD,
                                           LAWSON_BIAS_NONE, LAWSON_MASK_CAUSAL,
                                           LAWSON_SOFTMAX_VANILLA, 0, batch, 4, 4, 20, 20, 16, 16,
                                           -1, -1, 0, 0, 0, nullptr, backend, verdict);
  };
  std::int32_t backend = -1;
  lawson_verdict* verdict = nullptr;
  ASSERT_EQ(ask(3, LAWSON_DTYPE_F32, &backend, &verdict), LAWSON_OK) << lawson_last_error_message();
  EXPECT_EQ(backend, LAWSON_BACKEND_CPU);
  const auto by_handles = select(causal, cpu_device(), {}, **planner);
  ASSERT_TRUE(by_handles.ok());
  EXPECT_EQ(by_handles->verdict.plan_id, lawson_verdict_plan_id(verdict));
  EXPECT_FALSE(by_handles->verdict.plan_id.empty());
  lawson_verdict_destroy(verdict);
  // Tensors that contradict the arguments are not obeyed silently.
  Tensors tensors(attention_graph(bias, front::Pass::forward).value(), 3);
  std::size_t size = 0;
  EXPECT_EQ(
      lawson_legacy_attention_forward(
          &tensors["q"], &tensors["k"], &tensors["v"], &tensors["bias"], nullptr, &tensors["o"],
          &tensors["stats"], nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
          nullptr, nullptr, nullptr, 20, 20, 1, 0, 1.0, 0.0, LAWSON_LAYOUT_BSHD, LAWSON_BIAS_NONE,
          LAWSON_MASK_NONE, LAWSON_SOFTMAX_VANILLA, -1, -1, nullptr, nullptr, &size, nullptr),
      LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(has(lawson_last_error_message(), "'bias'")) << lawson_last_error_message();
  EXPECT_EQ(ask(0, LAWSON_DTYPE_F32, &backend, nullptr), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(has(lawson_last_error_message(), "batch"));
  EXPECT_EQ(ask(3, LAWSON_DTYPE_F16, &backend, nullptr), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(has(lawson_last_error_message(), "kv_dtype"));
}

#pragma GCC diagnostic pop

// Forward params with memory, for a config of pass forward.
class OnGpu {
 public:
  OnGpu(const Json& config, const Device& device)
      : tensors_(attention_graph(config, front::Pass::forward).value(), 3),
        params_{front::Pass::forward} {
    tensors_.set(params_);
    params_.config = config;
    params_.device = device;
  }
  const AttentionParams& params() const { return params_; }

 private:
  Tensors tensors_;
  AttentionParams params_;
};

TEST_F(AttentionRequirements, nothing_is_built_while_the_stream_captures) {
  OnGpu call(small_config(), gpu_);
  alignas(64) std::array<std::byte, 64> workspace{};
  int stream = 0;
  const auto execute = [&](void* on) {
    return guard(
        [&] { return run(call.params(), planner_, workspace.data(), workspace.size(), on); });
  };
  EXPECT_EQ(execute(&stream), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(has(lawson_last_error_message(), "captured")) << lawson_last_error_message();
  EXPECT_TRUE(has(lawson_last_error_message(), "run it once")) << lawson_last_error_message();
  EXPECT_EQ(engine_->builds + engine_->loads, 0);
  EXPECT_EQ(execute(nullptr), LAWSON_OK) << lawson_last_error_message();
  EXPECT_EQ(execute(&stream), LAWSON_OK) << lawson_last_error_message();
  // Other params of the same config find it too.
  OnGpu other(small_config(), gpu_);
  EXPECT_TRUE(plan_of(other.params(), planner_, &stream).ok());
  EXPECT_EQ(engine_->builds, 1);
}

TEST_F(AttentionRequirements, two_devices_never_share_a_plan) {
  OnGpu first(small_config(), fake_gpu("h200", 0));
  OnGpu second(small_config(), fake_gpu("h200", 1));
  const auto a = plan_of(first.params(), planner_, nullptr);
  const auto b = plan_of(second.params(), planner_, nullptr);
  ASSERT_TRUE(a.ok() && b.ok());
  EXPECT_NE(*a, *b);
  EXPECT_EQ(engine_->loads, 2);
  EXPECT_EQ(plan_of(first.params(), planner_, nullptr).value(), *a);
  EXPECT_EQ(plan_of(second.params(), planner_, nullptr).value(), *b);
}

}  // namespace
}  // namespace lawson::capi
