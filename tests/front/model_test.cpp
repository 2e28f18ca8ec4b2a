// Model configs -> workloads: golden renderings of real models, hand-checked facts, bad input.
// LAWSON_UPDATE_GOLDEN=1 rewrites tests/golden/models/*.txt: read the difference before keeping it.
#include "front/model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "front/spec.h"

namespace lawson::front {
namespace {

namespace fs = std::filesystem;

fs::path root() {
  return LAWSON_SOURCE_DIR;
}

Json example(const std::string& name) {
  const fs::path path = root() / "examples" / "models" / (name + ".json");
  auto text = read_file(path.string());
  EXPECT_TRUE(text.ok()) << text.error().message;
  auto json = parse_json(*text, path.filename().string());
  EXPECT_TRUE(json.ok()) << json.error().message;
  return *json;
}

Model derive(const Json& config, const std::string& name, const ModelOptions& options = {}) {
  auto model = model_from_json(config, name + ".json", options);
  EXPECT_TRUE(model.ok()) << model.error().message;
  return model.ok() ? *std::move(model) : Model{};
}

Model derive(const std::string& name, const ModelOptions& options = {}) {
  return derive(example(name), name, options);
}

const Workload* find(const Model& model, const std::string& name) {
  for (const Workload& workload : model.workloads) {
    if (workload.name == name) return &workload;
  }
  ADD_FAILURE() << model.name << " has no workload " << name;
  return nullptr;
}

Json spec(const Model& model, const std::string& name) {
  const Workload* workload = find(model, name);
  return workload == nullptr ? Json::object() : workload->spec;
}

std::int64_t layers(const Model& model, const std::string& name) {
  const Workload* workload = find(model, name);
  return workload == nullptr ? -1 : workload->layers;
}

bool has(const Model& model, const std::string& name) {
  return std::any_of(model.workloads.begin(), model.workloads.end(),
                     [&](const Workload& workload) { return workload.name == name; });
}

double scale(const Json& attention) {
  return attention.value("scale", 1.0 / std::sqrt(attention.at("head_dim_qk").get<double>()));
}

// --- rendering ---------------------------------------------------------------------------------

std::string render_attention(const Json& s) {
  std::string text = fmt::format(
      "{} {} b{} h{}/{} d{}/{} s{}x{} {} scale {:.6g}", s.at("pass").get<std::string>(),
      s.at("dtype").get<std::string>(), s.at("batch").get<int>(), s.at("heads").get<int>(),
      s.at("kv_heads").get<int>(), s.at("head_dim_qk").get<int>(), s.at("head_dim_v").get<int>(),
      s.at("seqlen_q").get<int>(), s.at("seqlen_kv").get<int>(), s.at("mask").get<std::string>(),
      scale(s));
  if (s.contains("window")) text += " window " + s.at("window").dump();
  if (s.contains("softcap")) text += fmt::format(" softcap {}", s.at("softcap").get<double>());
  if (s.contains("softmax")) text += " softmax " + s.at("softmax").get<std::string>();
  if (s.contains("bias")) text += " bias " + s.at("bias").get<std::string>();
  if (s.contains("bias_shape")) text += s.at("bias_shape").dump();
  if (s.contains("bias_grad")) text += " dbias";
  if (s.contains("return_stats")) text += " stats";
  if (s.contains("strides")) text += " strides " + s.at("strides").dump();
  return text;
}

std::string render_input(const Json& input) {
  const auto shape = input.at("shape").get<Dims>();
  std::string text =
      fmt::format("{}[{}]", input.at("name").get<std::string>(), fmt::join(shape, ","));
  if (!input.contains("strides")) return text;
  const auto strides = input.at("strides").get<Dims>();
  const bool column = strides == Dims{shape[1] * shape[2], 1, shape[1]};
  return text + (column ? "^T" : fmt::format("@{}", fmt::join(strides, ",")));
}

std::string render_graph(const Json& s) {
  std::string text;
  for (const Json& input : s.at("inputs")) text += render_input(input) + " ";
  text += "->";
  for (const Json& op : s.at("ops")) {
    text += " " + op.at("op").get<std::string>();
    if (op.contains("value")) text += fmt::format("({:.6g})", op.at("value").get<double>());
    if (op.contains("min")) {
      text += fmt::format("({},{})", op.at("min").get<double>(), op.at("max").get<double>());
    }
    if (op.at("op") == "convert") text += ":" + op.at("dtype").get<std::string>();
  }
  const Json& output = s.at("outputs").at(0);
  if (output.contains("strides")) text += " @" + output.at("strides").dump();
  return text;
}

std::string render(const Model& model) {
  std::string text = fmt::format("{} ({}), {} layers\n", model.name, model.family, model.layers);
  for (const std::string& warning : model.warnings) text += "! " + warning + "\n";
  for (const Workload& w : model.workloads) {
    text += fmt::format("{} x{}: {}\n", w.name, w.layers,
                        w.group == "attention" ? render_attention(w.spec) : render_graph(w.spec));
    if (!w.note.empty()) text += "    # " + w.note + "\n";
  }
  return text;
}

std::vector<std::string> example_names() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(root() / "examples" / "models")) {
    if (entry.path().extension() == ".json") names.push_back(entry.path().stem().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

class Example : public testing::TestWithParam<std::string> {};

TEST_P(Example, MatchesItsGoldenDerivation) {
  const std::string got = render(derive(GetParam()));
  const fs::path path = root() / "tests" / "golden" / "models" / (GetParam() + ".txt");
  if (std::getenv("LAWSON_UPDATE_GOLDEN") != nullptr) std::ofstream(path) << got;
  std::ifstream file(path);
  ASSERT_TRUE(file.good()) << path << " is missing";
  std::stringstream want;
  want << file.rdbuf();
  EXPECT_EQ(got, want.str());
}

TEST_P(Example, EverySpecReadsBack) {
  const Model model = derive(GetParam());
  EXPECT_FALSE(model.workloads.empty());
  std::set<std::string> names;
  for (const Workload& workload : model.workloads) {
    EXPECT_TRUE(names.insert(workload.name).second) << workload.name << " twice";
    EXPECT_GE(workload.layers, 1) << workload.name;
    auto parsed = spec_from_json(workload.spec, workload.name);
    EXPECT_TRUE(parsed.ok()) << workload.name << ": " << parsed.error().message;
  }
}

TEST_P(Example, PassesSelectTheWorkloads) {
  ModelOptions options;
  options.passes = {"decode"};
  for (const Workload& workload : derive(GetParam(), options).workloads) {
    EXPECT_TRUE(workload.name.ends_with(".decode")) << workload.name;
  }
  options.passes = {"training"};
  for (const Workload& workload : derive(GetParam(), options).workloads) {
    EXPECT_TRUE(workload.name.ends_with(".training")) << workload.name;
  }
}

std::string test_name(const testing::TestParamInfo<std::string>& example) {
  std::string name = example.param;
  std::replace_if(
      name.begin(), name.end(), [](char c) { return c == '-' || c == '.'; }, '_');
  return name;
}
INSTANTIATE_TEST_SUITE_P(Models, Example, testing::ValuesIn(example_names()), test_name);

// --- facts from the models' own papers and configs -----------------------------------------------

void expect_attention(const Json& s, std::int64_t heads, std::int64_t kv_heads, std::int64_t d_qk,
                      std::int64_t d_v) {
  EXPECT_EQ(s.at("heads"), heads);
  EXPECT_EQ(s.at("kv_heads"), kv_heads);
  EXPECT_EQ(s.at("head_dim_qk"), d_qk);
  EXPECT_EQ(s.at("head_dim_v"), d_v);
}

void expect_weight(const Json& graph, std::int64_t k, std::int64_t n) {
  EXPECT_EQ(graph.at("inputs").at(1).at("shape"), Json({1, k, n}));
}

std::vector<std::string> op_names(const Json& graph) {
  std::vector<std::string> names;
  for (const Json& op : graph.at("ops")) names.push_back(op.at("op"));
  return names;
}

using Ops = std::vector<std::string>;

TEST(ModelFacts, Llama31) {
  const Model model = derive("llama-3.1-8b");
  EXPECT_EQ(model.layers, 32);
  EXPECT_EQ(layers(model, "attention.full.prefill"), 32);
  const Json prefill = spec(model, "attention.full.prefill");
  expect_attention(prefill, 32, 8, 128, 128);
  EXPECT_EQ(prefill.at("mask"), "causal");
  EXPECT_FALSE(prefill.contains("window"));
  const Json decode = spec(model, "attention.full.decode");
  EXPECT_EQ(decode.at("seqlen_q"), 1);
  EXPECT_EQ(decode.at("seqlen_kv"), 8192);
  EXPECT_EQ(decode.at("mask"), "padding");
  EXPECT_EQ(spec(model, "attention.full.training").at("pass"), "training");
  expect_weight(spec(model, "gemm.qkv.prefill"), 4096, 6144);
  const Json gate_up = spec(model, "gemm.gate_up.prefill");
  expect_weight(gate_up, 4096, 14336);
  EXPECT_EQ(gate_up.at("inputs").at(1).at("strides"), Json({4096 * 14336, 1, 4096}));
  EXPECT_EQ(op_names(gate_up), (Ops{"matmul", "matmul", "silu", "mul", "convert"}));
  expect_weight(spec(model, "gemm.down.prefill"), 14336, 4096);
  expect_weight(spec(model, "gemm.lm_head.prefill"), 4096, 128256);
  EXPECT_TRUE(model.warnings.empty());
}

TEST(ModelFacts, Mistral7BWindowCountsTheTokenItself) {
  const Model model = derive("mistral-7b");
  EXPECT_EQ(layers(model, "attention.sliding.prefill"), 32);
  EXPECT_FALSE(has(model, "attention.full.prefill"));
  EXPECT_EQ(spec(model, "attention.sliding.prefill").at("window"), Json({4095, 0}));
  EXPECT_EQ(spec(model, "attention.sliding.decode").at("seqlen_kv"), 4096);
}

TEST(ModelFacts, Mixtral) {
  const Model model = derive("mixtral-8x7b");
  EXPECT_EQ(layers(model, "attention.full.prefill"), 32);
  expect_weight(spec(model, "gemm.router.prefill"), 4096, 8);
  const Json expert = spec(model, "gemm.expert.gate_up.prefill");
  EXPECT_EQ(expert.at("inputs").at(0).at("shape"), Json({1, 4096 * 2 / 8, 4096}));
  EXPECT_FALSE(has(model, "gemm.gate_up.prefill"));
}

TEST(ModelFacts, Qwen) {
  const Model qwen2 = derive("qwen2.5-7b");
  expect_attention(spec(qwen2, "attention.full.prefill"), 28, 4, 128, 128);
  EXPECT_EQ(op_names(spec(qwen2, "gemm.qkv.prefill")), (Ops{"matmul", "add", "convert"}));
  EXPECT_EQ(op_names(spec(qwen2, "gemm.o.prefill")), (Ops{"matmul", "convert"}));
  const Model qwen3 = derive("qwen3-30b-a3b");
  expect_attention(spec(qwen3, "attention.full.prefill"), 32, 4, 128, 128);
  EXPECT_EQ(layers(qwen3, "gemm.expert.down.prefill"), 48);
  expect_weight(spec(qwen3, "gemm.expert.gate_up.prefill"), 2048, 768);
  expect_weight(spec(qwen3, "gemm.o.prefill"), 4096, 2048);
  const Model moe = derive("qwen1.5-moe-a2.7b");
  expect_weight(spec(moe, "gemm.shared_expert.gate_up.prefill"), 2048, 5632);
  EXPECT_EQ(op_names(spec(moe, "gemm.shared_expert.gate.prefill")),
            (Ops{"matmul", "sigmoid", "convert"}));
}

TEST(ModelFacts, Gemma2) {
  const Model model = derive("gemma-2-9b");
  EXPECT_EQ(model.layers, 42);
  EXPECT_EQ(layers(model, "attention.sliding.prefill"), 21);
  EXPECT_EQ(layers(model, "attention.full.prefill"), 21);
  const Json sliding = spec(model, "attention.sliding.prefill");
  expect_attention(sliding, 16, 8, 256, 256);
  EXPECT_EQ(sliding.at("window"), Json({4095, 0}));
  EXPECT_EQ(sliding.at("softcap"), 50.0);
  EXPECT_DOUBLE_EQ(scale(sliding), 1.0 / 16.0);
  EXPECT_FALSE(spec(model, "attention.full.prefill").contains("window"));
  EXPECT_EQ(op_names(spec(model, "gemm.gate_up.prefill")),
            (Ops{"matmul", "matmul", "gelu_tanh", "mul", "convert"}));
  EXPECT_EQ(op_names(spec(model, "gemm.lm_head.prefill")),
            (Ops{"matmul", "constant", "mul", "tanh", "constant", "mul", "convert"}));
}

TEST(ModelFacts, Gemma2Of27BScalesByHiddenOverHeads) {
  Json config = example("gemma-2-9b");
  config.update({{"hidden_size", 4608},
                 {"num_attention_heads", 32},
                 {"num_key_value_heads", 16},
                 {"head_dim", 128},
                 {"query_pre_attn_scalar", 144}});
  const Json full = spec(derive(config, "gemma-2-27b"), "attention.full.prefill");
  EXPECT_DOUBLE_EQ(full.at("scale").get<double>(), 1.0 / 12.0);
}

TEST(ModelFacts, Gemma3TakesTheFamilysDefaultsInsideItsWrapper) {
  const Model model = derive("gemma-3-4b");
  EXPECT_EQ(model.family, "gemma3_text");
  EXPECT_EQ(model.layers, 34);
  EXPECT_EQ(layers(model, "attention.sliding.prefill"), 29);
  EXPECT_EQ(layers(model, "attention.full.prefill"), 5);
  expect_attention(spec(model, "attention.full.prefill"), 8, 4, 256, 256);
  EXPECT_EQ(spec(model, "attention.sliding.prefill").at("window"), Json({1023, 0}));
  const Json vision = spec(model, "vision.attention.encoder.prefill");
  expect_attention(vision, 16, 16, 72, 72);
  EXPECT_EQ(vision.at("seqlen_q"), 4096);
  EXPECT_EQ(vision.at("mask"), "none");
  ASSERT_EQ(model.warnings.size(), 1U);
  EXPECT_NE(model.warnings[0].find("text_config.num_attention_heads = 8"), std::string::npos);
}

TEST(ModelFacts, DeepSeekV3) {
  const Model model = derive("deepseek-v3");
  EXPECT_EQ(model.layers, 61);
  const Json expanded = spec(model, "attention.mla.prefill");
  expect_attention(expanded, 128, 128, 192, 128);
  const Json absorbed = spec(model, "attention.mla_absorbed.decode");
  expect_attention(absorbed, 128, 1, 576, 512);
  // 1/sqrt(192) * (0.1 * ln(40) + 1)^2, in both forms.
  EXPECT_NEAR(scale(expanded), 0.1352337788608801, 1e-12);
  EXPECT_DOUBLE_EQ(scale(absorbed), scale(expanded));
  EXPECT_FALSE(has(model, "attention.mla.decode"));
  EXPECT_FALSE(has(model, "attention.mla_absorbed.prefill"));
  EXPECT_EQ(layers(model, "gemm.gate_up.prefill"), 3);
  EXPECT_EQ(layers(model, "gemm.expert.gate_up.prefill"), 58);
  EXPECT_EQ(spec(model, "gemm.expert.gate_up.prefill").at("inputs").at(0).at("shape"),
            Json({1, 128, 7168}));  // 4096 tokens, top 8 of 256
  expect_weight(spec(model, "gemm.router.prefill"), 7168, 256);
  EXPECT_EQ(op_names(spec(model, "gemm.router.prefill")), (Ops{"matmul", "sigmoid"}));
  expect_weight(spec(model, "gemm.q_a.prefill"), 7168, 1536);
  expect_weight(spec(model, "gemm.q_b.prefill"), 1536, 24576);
  expect_weight(spec(model, "gemm.kv_a.prefill"), 7168, 576);
  expect_weight(spec(model, "gemm.kv_b.prefill"), 512, 32768);
  expect_weight(spec(model, "gemm.o.prefill"), 16384, 7168);
  EXPECT_EQ(spec(model, "gemm.absorb_q.decode").at("inputs").at(1).at("shape"),
            Json({128, 128, 512}));
  EXPECT_FALSE(has(model, "gemm.kv_b.decode"));
}

TEST(ModelFacts, DeepSeekV2LiteHasNoQueryCompression) {
  const Model model = derive("deepseek-v2-lite");
  EXPECT_EQ(model.layers, 27);
  expect_attention(spec(model, "attention.mla.prefill"), 16, 16, 192, 128);
  expect_weight(spec(model, "gemm.q.prefill"), 2048, 3072);
  EXPECT_FALSE(has(model, "gemm.q_a.prefill"));
  EXPECT_EQ(layers(model, "gemm.gate_up.prefill"), 1);
  EXPECT_EQ(layers(model, "gemm.expert.gate_up.prefill"), 26);
  expect_weight(spec(model, "gemm.shared_expert.gate_up.prefill"), 2048, 2816);
}

TEST(ModelFacts, GptOss) {
  const Model model = derive("gpt-oss-20b");
  EXPECT_EQ(model.layers, 24);
  EXPECT_EQ(layers(model, "attention.sliding.prefill"), 12);
  EXPECT_EQ(layers(model, "attention.full.prefill"), 12);
  const Json sliding = spec(model, "attention.sliding.prefill");
  expect_attention(sliding, 64, 8, 64, 64);
  EXPECT_EQ(sliding.at("window"), Json({127, 0}));
  EXPECT_EQ(sliding.at("softmax"), "learnable");
  EXPECT_EQ(spec(model, "attention.sliding.decode").at("seqlen_kv"), 128);
  expect_weight(spec(model, "gemm.qkv.prefill"), 2880, 5120);
  const Json expert = spec(model, "gemm.expert.gate_up.prefill");
  EXPECT_FALSE(expert.at("inputs").at(1).contains("strides"));  // experts are stored [in, out]
  EXPECT_EQ(op_names(expert),
            (Ops{"matmul", "add", "matmul", "add", "constant", "min", "clamp", "constant", "add",
                 "constant", "mul", "sigmoid", "mul", "mul", "convert"}));
  // Not in the file: the routed experts' rows when 4096 tokens go to 4 of 32.
  EXPECT_EQ(expert.at("inputs").at(0).at("shape"), Json({1, 512, 2880}));
}

TEST(ModelFacts, Gpt2) {
  const Model model = derive("gpt2");
  const Json prefill = spec(model, "attention.full.prefill");
  expect_attention(prefill, 12, 12, 64, 64);
  EXPECT_EQ(prefill.at("seqlen_q"), 1024);  // learned positions end there
  const Json fc1 = spec(model, "gemm.fc1.prefill");
  expect_weight(fc1, 768, 3072);  // n_inner is 4 * n_embd when it is not given
  EXPECT_FALSE(fc1.at("inputs").at(1).contains("strides"));  // Conv1D stores [in, out]
  EXPECT_EQ(op_names(fc1), (Ops{"matmul", "add", "gelu_tanh", "convert"}));
  ASSERT_EQ(model.warnings.size(), 1U);
}

TEST(ModelFacts, FalconBloomMpt) {
  const Model falcon = derive("falcon-7b");
  expect_attention(spec(falcon, "attention.full.prefill"), 71, 1, 64, 64);
  expect_weight(spec(falcon, "gemm.qkv.prefill"), 4544, 4672);
  expect_weight(spec(falcon, "gemm.fc1.prefill"), 4544, 18176);
  expect_attention(spec(derive("falcon-40b"), "attention.full.prefill"), 128, 8, 64, 64);
  Json rw = example("falcon-7b");
  rw.update({{"alibi", true},
             {"bias", true},
             {"multi_query", false},
             {"hidden_size", 2048},
             {"num_attention_heads", 32}});
  const Json old = spec(derive(rw, "falcon-rw-1b"), "attention.full.prefill");
  expect_attention(old, 32, 32, 64, 64);
  EXPECT_EQ(old.at("bias"), "alibi");

  const Model bloom = derive("bloom-560m");
  expect_attention(spec(bloom, "attention.full.prefill"), 16, 16, 64, 64);
  EXPECT_EQ(spec(bloom, "attention.full.prefill").at("bias"), "alibi");
  const Json decode = spec(bloom, "attention.full.decode");
  EXPECT_EQ(decode.at("bias"), "post_scale");
  EXPECT_EQ(decode.at("bias_shape"), Json({1, 16, 1, 8192}));
  EXPECT_EQ(op_names(spec(bloom, "gemm.fc1.prefill")),
            (Ops{"matmul", "add", "gelu_tanh", "convert"}));

  const Model mpt = derive("mpt-7b");
  expect_attention(spec(mpt, "attention.full.prefill"), 32, 32, 128, 128);
  EXPECT_EQ(spec(mpt, "attention.full.prefill").at("bias"), "alibi");
  EXPECT_EQ(op_names(spec(mpt, "gemm.fc1.prefill")), (Ops{"matmul", "gelu", "convert"}));
}

TEST(ModelFacts, EncodersDoNotDecode) {
  const Model bert = derive("bert-base");
  const Json self = spec(bert, "attention.encoder.prefill");
  expect_attention(self, 12, 12, 64, 64);
  EXPECT_EQ(self.at("mask"), "padding");
  EXPECT_EQ(self.at("seqlen_q"), 512);
  const Model vit = derive("vit-base");
  EXPECT_EQ(spec(vit, "attention.encoder.prefill").at("seqlen_q"), 197);
  EXPECT_EQ(spec(vit, "attention.encoder.prefill").at("mask"), "none");
  for (const Model& model : {bert, vit}) {
    for (const Workload& workload : model.workloads) {
      EXPECT_FALSE(workload.name.ends_with(".decode")) << workload.name;
    }
  }
}

TEST(ModelFacts, EncoderDecoders) {
  const Model whisper = derive("whisper-small");
  EXPECT_EQ(whisper.layers, 24);
  EXPECT_EQ(layers(whisper, "attention.encoder.prefill"), 12);
  EXPECT_EQ(spec(whisper, "attention.encoder.prefill").at("seqlen_q"), 1500);
  EXPECT_EQ(spec(whisper, "attention.decoder_self.prefill").at("seqlen_q"), 448);
  EXPECT_EQ(spec(whisper, "attention.decoder_self.prefill").at("mask"), "causal");
  const Json cross = spec(whisper, "attention.cross.decode");
  EXPECT_EQ(cross.at("seqlen_kv"), 1500);
  EXPECT_EQ(cross.at("mask"), "none");

  const Model t5 = derive("t5-small");
  const Json self = spec(t5, "attention.encoder.training");
  expect_attention(self, 8, 8, 64, 64);
  EXPECT_EQ(self.at("scale"), 1.0);
  EXPECT_EQ(self.at("bias"), "post_scale");
  EXPECT_EQ(self.at("bias_shape"), Json({1, 8, 4096, 4096}));
  EXPECT_EQ(self.at("bias_grad"), true);
  EXPECT_FALSE(spec(t5, "attention.cross.prefill").contains("bias"));
  EXPECT_EQ(op_names(spec(t5, "gemm.encoder.fc1.prefill")), (Ops{"matmul", "relu", "convert"}));
  Json v11 = example("t5-small");
  v11["feed_forward_proj"] = "gated-gelu";
  EXPECT_EQ(op_names(spec(derive(v11, "t5"), "gemm.encoder.gate_up.prefill")),
            (Ops{"matmul", "matmul", "gelu_tanh", "mul", "convert"}));
}

TEST(ModelFacts, CohereAndOlmo) {
  const Model command_r = derive("command-r");
  expect_attention(spec(command_r, "attention.full.prefill"), 64, 64, 128, 128);
  EXPECT_EQ(spec(command_r, "attention.full.prefill").at("dtype"), "f16");
  EXPECT_EQ(op_names(spec(command_r, "gemm.lm_head.prefill")),
            (Ops{"matmul", "constant", "mul", "convert"}));
  const Model r7b = derive("command-r7b");
  EXPECT_EQ(layers(r7b, "attention.sliding.prefill"), 24);
  EXPECT_EQ(layers(r7b, "attention.full.prefill"), 8);
  Json clipped = example("olmo-7b");
  clipped["clip_qkv"] = 8.0;
  EXPECT_EQ(op_names(spec(derive(clipped, "olmo"), "gemm.qkv.prefill")),
            (Ops{"matmul", "clamp", "convert"}));
}

// --- published parameter counts ------------------------------------------------------------------

// Elements of weights and biases that the prefill's GEMMs read, over all layers and experts.
double gemm_parameters(const Model& model, std::int64_t experts, double lm_heads) {
  double total = 0;
  for (const Workload& workload : model.workloads) {
    if (workload.group != "gemm" || !workload.name.ends_with(".prefill")) continue;
    double each = 0;
    for (const Json& input : workload.spec.at("inputs")) {
      const auto shape = input.at("shape").get<Dims>();
      if (input.at("name") != "x") each += static_cast<double>(shape[1] * shape[2]);
    }
    if (workload.name.find("gemm.expert.") != std::string::npos) {
      each *= static_cast<double>(experts);
    }
    if (workload.name == "gemm.lm_head.prefill") each *= lm_heads;
    if (workload.name == "gemm.decoder.o.prefill") each *= 2;  // self and cross attention
    total += each * static_cast<double>(workload.layers);
  }
  return total;
}

struct Published {
  const char* model;
  double millions;       // parameters, as the model's card or paper says
  std::int64_t experts;  // of a mixture layer
  double lm_heads;       // 2 where embedding and head are not tied
};

// An oracle that knows nothing of the derivation: what remains are norms, learned positions and
// convolutions: below 0.3 % of the models above 1 billion, below 2 % of the small ones.
TEST(ModelFacts, WeightsAddUpToThePublishedSizes) {
  const Published table[] = {
      {"llama-3.1-8b", 8030, 1, 2},
      {"mistral-7b", 7242, 1, 2},
      {"mixtral-8x7b", 46703, 8, 2},
      {"qwen2.5-7b", 7616, 1, 2},
      {"qwen1.5-moe-a2.7b", 14316, 60, 2},
      {"qwen3-8b", 8191, 1, 2},
      {"qwen3-30b-a3b", 30532, 128, 2},
      {"gemma-2b", 2506, 1, 1},
      {"gemma-2-9b", 9242, 1, 1},
      {"gemma-3-4b", 4300, 1, 1},
      {"phi-3-mini", 3821, 1, 2},
      {"deepseek-v2-lite", 15706, 64, 2},
      {"deepseek-v3", 671026, 256, 2},
      {"gpt-oss-20b", 20915, 32, 2},
      {"gpt2", 124.4, 1, 1},
      {"pythia-6.9b", 6857, 1, 2},
      {"falcon-7b", 6922, 1, 1},
      {"bloom-560m", 559.2, 1, 1},
      {"bloom-7b1", 7069, 1, 1},
      {"mpt-7b", 6649, 1, 1},
      {"bert-base", 109.5, 1, 1},
      {"vit-base", 86.6, 1, 1},
      {"whisper-small", 241.7, 1, 1},
      {"t5-small", 60.5, 1, 1},
      {"command-r", 34981, 1, 1},
      {"command-r7b", 8028, 1, 1},
      {"olmo-7b", 6888, 1, 2},
      {"olmo-2-7b", 7299, 1, 2},
  };
  for (const Published& row : table) {
    const double got = gemm_parameters(derive(row.model), row.experts, row.lm_heads) / 1e6;
    const double rest = row.millions > 1000 ? 0.003 : 0.02;
    EXPECT_NEAR(got / row.millions, 1.0, rest) << row.model << ": " << got << " million";
  }
}

// --- options, fallbacks --------------------------------------------------------------------------

TEST(ModelOptionsTest, LengthsBatchAndDtype) {
  ModelOptions options;
  options.batch = 4;
  options.seqlen = 512;
  options.context = 2048;
  options.dtype = "f16";
  const Model model = derive("llama-3.1-8b", options);
  const Json prefill = spec(model, "attention.full.prefill");
  EXPECT_EQ(prefill.at("batch"), 4);
  EXPECT_EQ(prefill.at("seqlen_q"), 512);
  EXPECT_EQ(prefill.at("dtype"), "f16");
  EXPECT_EQ(spec(model, "attention.full.decode").at("seqlen_kv"), 2048);
  EXPECT_EQ(spec(model, "gemm.o.prefill").at("inputs").at(0).at("shape"), Json({1, 2048, 4096}));
  EXPECT_EQ(spec(model, "gemm.o.decode").at("inputs").at(0).at("shape"), Json({1, 4, 4096}));
  EXPECT_EQ(spec(model, "gemm.lm_head.training").at("inputs").at(0).at("shape"),
            Json({1, 2048, 4096}));
}

TEST(ModelOptionsTest, BadOptionsAreNamed) {
  const auto message = [](const ModelOptions& options) {
    auto model = model_from_json(example("llama-3.1-8b"), "llama.json", options);
    EXPECT_FALSE(model.ok());
    return model.ok() ? "" : model.error().message;
  };
  ModelOptions options;
  options.batch = 0;
  EXPECT_NE(message(options).find("batch: 0"), std::string::npos);
  options = {};
  options.seqlen = std::int64_t{1} << 31;
  EXPECT_NE(message(options).find("seqlen"), std::string::npos);
  options = {};
  options.batch = options.seqlen = 1 << 20;
  EXPECT_NE(message(options).find("at most 2047"), std::string::npos);
  options = {};
  options.passes = {"decoding"};
  EXPECT_NE(message(options).find("'decoding'"), std::string::npos);
  options = {};
  options.dtype = "fp16";
  EXPECT_NE(message(options).find("'fp16'"), std::string::npos);
}

TEST(ModelFallback, UnknownModelTypeSaysSo) {
  Json config = example("mixtral-8x7b");
  config["model_type"] = "someday";
  const Model model = derive(config, "someday");
  EXPECT_EQ(model.family, "common");
  EXPECT_EQ(model.model_type, "someday");
  ASSERT_EQ(model.warnings.size(), 1U);
  EXPECT_NE(model.warnings[0].find("'someday'"), std::string::npos);
  expect_attention(spec(model, "attention.full.prefill"), 32, 8, 128, 128);
  EXPECT_TRUE(has(model, "gemm.expert.gate_up.decode"));
}

TEST(ModelFallback, UnknownKindsOfLayerAreLeftOutWithAWarning) {
  Json config = example("qwen3-8b");
  config["model_type"] = "someday";
  config["num_hidden_layers"] = 4;
  config["layer_types"] = {"linear_attention", "full_attention", "linear_attention",
                           "linear_attention"};
  const Model model = derive(config, "someday");
  EXPECT_EQ(layers(model, "attention.full.prefill"), 1);
  ASSERT_EQ(model.warnings.size(), 2U);
  EXPECT_NE((model.warnings[0] + model.warnings[1]).find("3 layers of type 'linear_attention'"),
            std::string::npos);
}

// As LLaVA 1.5 is published: nearly everything is the nested family's default.
TEST(ModelFallback, WrappedConfigsTakeTheFamilysDefaults) {
  const Json config = Json::parse(R"({
    "model_type": "llava", "torch_dtype": "float16",
    "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064},
    "vision_config": {"model_type": "clip_vision_model", "hidden_size": 1024, "image_size": 336,
      "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24,
      "patch_size": 14}})");
  const Model model = derive(config, "llava");
  EXPECT_EQ(model.layers, 32);
  expect_attention(spec(model, "attention.full.prefill"), 32, 32, 128, 128);
  EXPECT_EQ(spec(model, "attention.full.prefill").at("dtype"), "f16");
  EXPECT_EQ(spec(model, "vision.attention.encoder.prefill").at("seqlen_q"), 577);
  EXPECT_EQ(op_names(spec(model, "vision.gemm.fc1.prefill")),
            (Ops{"matmul", "add", "constant", "mul", "sigmoid", "mul", "convert"}));
}

TEST(ModelFallback, UnknownVisionTowerIsLeftOutWithAWarning) {
  Json config = example("gemma-3-4b");
  config["vision_config"]["model_type"] = "eyes";
  const Model model = derive(config, "gemma");
  EXPECT_FALSE(has(model, "vision.attention.encoder.prefill"));
  EXPECT_EQ(model.warnings.size(), 2U);
}

// --- bad input -----------------------------------------------------------------------------------

struct BadField {
  const char* model;
  const char* patch;    // merged into the example's config (null removes nothing: see removed)
  const char* removed;  // a field taken out, or ""
  std::vector<const char*> named;  // what the message must contain
};

TEST(ModelErrors, NameFileFieldAndValue) {
  const BadField table[] = {
      {"llama-3.1-8b",
       R"({"num_attention_heads": 30})",
       "",
       {"num_key_value_heads", "8", "divisor of the 30"}},
      {"llama-3.1-8b", R"({"num_attention_heads": 24})", "", {"num_attention_heads", "24", "4096"}},
      {"llama-3.1-8b", R"({"num_key_value_heads": 0})", "", {"num_key_value_heads", "0", "1 to"}},
      {"llama-3.1-8b", R"({"head_dim": 0})", "", {"head_dim", "0", "1 to"}},
      {"llama-3.1-8b", R"({"head_dim": -128})", "", {"head_dim", "-128"}},
      {"llama-3.1-8b", R"({"hidden_size": "4096"})", "", {"hidden_size", "\"4096\"", "integer"}},
      {"llama-3.1-8b", R"({"hidden_size": true})", "", {"hidden_size", "true", "integer"}},
      {"llama-3.1-8b", R"({"hidden_size": 4096.5})", "", {"hidden_size", "4096.5"}},
      {"llama-3.1-8b", R"({"hidden_size": 2147483648})", "", {"hidden_size", "2147483648"}},
      {"llama-3.1-8b", R"({"hidden_size": 18446744073709551615})", "", {"hidden_size"}},
      {"llama-3.1-8b", R"({"hidden_size": [4096]})", "", {"hidden_size", "[4096]"}},
      {"llama-3.1-8b",
       R"({"num_hidden_layers": 2000000000})",
       "",
       {"num_hidden_layers", "2000000000", "10000"}},
      {"llama-3.1-8b",
       R"({"num_attention_heads": 2000000000, "num_key_value_heads": 1,
                           "head_dim": 2000000000})",
       "",
       {"num_attention_heads", "2000000000"}},
      {"llama-3.1-8b", R"({"hidden_act": "sinus"})", "", {"hidden_act", "sinus", "silu"}},
      {"llama-3.1-8b", R"({"hidden_act": 3})", "", {"hidden_act", "3", "string"}},
      {"llama-3.1-8b", R"({"attention_bias": 1})", "", {"attention_bias", "1", "true or false"}},
      {"llama-3.1-8b", R"({"model_type": 7})", "", {"model_type", "7", "string"}},
      {"llama-3.1-8b", R"({"text_config": []})", "", {"text_config", "object"}},
      {"llama-3.1-8b", "{}", "hidden_size", {"hidden_size", "missing"}},
      {"llama-3.1-8b", "{}", "num_hidden_layers", {"num_hidden_layers", "missing"}},
      {"llama-3.1-8b", "{}", "num_attention_heads", {"num_attention_heads", "missing"}},
      {"llama-3.1-8b", "{}", "intermediate_size", {"intermediate_size", "missing"}},
      {"mistral-7b", R"({"sliding_window": 0})", "", {"sliding_window", "0"}},
      {"mixtral-8x7b", R"({"num_experts_per_tok": 9})", "", {"num_experts_per_tok", "9", "8"}},
      {"mixtral-8x7b", "{}", "num_local_experts", {"num_local_experts", "missing"}},
      {"gpt-oss-20b", R"({"num_hidden_layers": 23})", "", {"layer_types", "24 entries", "23"}},
      {"gpt-oss-20b", R"({"layer_types": "full_attention"})", "", {"layer_types"}},
      {"gpt-oss-20b",
       R"({"num_hidden_layers": 1, "layer_types": ["half"]})",
       "",
       {"layer_types[0]", "half", "sliding_attention"}},
      {"gpt-oss-20b",
       R"({"num_hidden_layers": 1, "layer_types": [null]})",
       "",
       {"layer_types[0]", "null"}},
      {"gemma-2-9b", R"({"attn_logit_softcapping": -50.0})", "", {"attn_logit_softcapping", "-50"}},
      {"gemma-2-9b", R"({"query_pre_attn_scalar": 0})", "", {"query_pre_attn_scalar", "0"}},
      {"gemma-3-4b",
       R"({"text_config": {"hidden_size": 0}})",
       "",
       {"text_config.hidden_size", "0"}},
      {"gemma-3-4b",
       R"({"vision_config": {"patch_size": 1000}})",
       "",
       {"vision_config.patch_size", "1000", "896"}},
      {"deepseek-v3", R"({"qk_rope_head_dim": "64"})", "", {"qk_rope_head_dim", "\"64\""}},
      {"deepseek-v3", R"({"rope_scaling": {"factor": "40"}})", "", {"rope_scaling.factor"}},
      {"deepseek-v3", R"({"moe_layer_freq": [1, 0]})", "", {"moe_layer_freq", "2", "61"}},
      {"mpt-7b", R"({"attn_config": 3})", "", {"attn_config", "3"}},
      {"mpt-7b", R"({"attn_config": {"alibi": "yes"}})", "", {"attn_config.alibi", "yes"}},
      {"bert-base", R"({"num_attention_heads": 7})", "", {"num_attention_heads", "7", "768"}},
      {"whisper-small", R"({"decoder_attention_heads": 7})", "", {"decoder_attention_heads", "7"}},
      {"whisper-small", "{}", "encoder_layers", {"encoder_layers", "missing"}},
      {"t5-small", R"({"feed_forward_proj": "gated-sinus"})", "", {"feed_forward_proj", "sinus"}},
  };
  for (const BadField& bad : table) {
    SCOPED_TRACE(std::string(bad.model) + " " + bad.patch + " -" + bad.removed);
    Json config = example(bad.model);
    config.update(Json::parse(bad.patch), /*merge_objects=*/true);
    config.erase(bad.removed);
    auto model = model_from_json(config, "some/config.json", {});
    ASSERT_FALSE(model.ok());
    EXPECT_EQ(model.error().kind, ErrorKind::invalid_argument);
    EXPECT_TRUE(model.error().message.starts_with("some/config.json: ")) << model.error().message;
    for (const char* part : bad.named) {
      EXPECT_NE(model.error().message.find(part), std::string::npos)
          << "no '" << part << "' in: " << model.error().message;
    }
  }
}

TEST(ModelErrors, TopLevelMustBeAnObject) {
  for (const char* text : {"[]", "3", "null", "\"llama\"", "true"}) {
    auto model = model_from_json(Json::parse(text), "x.json", {});
    ASSERT_FALSE(model.ok()) << text;
    EXPECT_EQ(model.error().kind, ErrorKind::invalid_argument);
    EXPECT_NE(model.error().message.find("object"), std::string::npos);
  }
}

// Every field of every example, replaced by every kind of wrong value: an error or a derivation
// whose specs read back, never a crash.
TEST(ModelErrors, SurviveEveryWrongValueInEveryField) {
  const std::vector<Json> values = {nullptr,       true,           -1,          0,   1,
                                    2147483647,    1e300,          0.5,         "x", Json{},
                                    Json::array(), Json::object(), Json({1, 2})};
  ModelOptions options;
  options.seqlen = 64;
  options.context = 64;
  const auto expect_no_crash = [&](const Json& config) {
    auto model = model_from_json(config, "x.json", options);
    if (model.ok()) return;
    EXPECT_EQ(model.error().kind, ErrorKind::invalid_argument);
    EXPECT_TRUE(model.error().message.starts_with("x.json: ")) << model.error().message;
  };
  for (const std::string& name : example_names()) {
    const Json config = example(name);
    const Json flat = config.flatten();  // every leaf of nested configs too
    for (const auto& [pointer, old] : flat.items()) {
      for (const Json& value : values) {
        Json changed = config;
        changed[Json::json_pointer(pointer)] = value;
        expect_no_crash(changed);
      }
    }
    for (const auto& [field, old] : config.items()) {
      for (const Json& value : values) {
        if (!old.is_structured()) continue;
        Json changed = config;
        changed[field] = value;
        expect_no_crash(changed);
      }
    }
  }
}

TEST(ModelErrors, SizesThatOverflowTogetherAreRefusedAsSpecs) {
  Json config = example("llama-3.1-8b");
  config["hidden_size"] = config["head_dim"] = 2147483647;
  config["num_attention_heads"] = config["num_key_value_heads"] = 1;
  const Json qkv = spec(derive(config, "huge"), "gemm.qkv.prefill");
  const auto read = spec_from_json(qkv, "huge.json");
  ASSERT_FALSE(read.ok());
  EXPECT_NE(read.error().message.find("inputs[1]"), std::string::npos) << read.error().message;
}

TEST(ModelNames, ComeFromTheFileOrItsFolder) {
  const Json config = example("llama-3.1-8b");
  const auto name = [&](const char* source) { return model_from_json(config, source, {})->name; };
  EXPECT_EQ(name("models/llama-3.1-8b.json"), "llama-3.1-8b");
  EXPECT_EQ(name("models/Llama-3.1-8B/config.json"), "Llama-3.1-8B");
  EXPECT_EQ(name("config.json"), "config");
}

TEST(ModelNames, KnownTypesAreSortedAndUnique) {
  const std::vector<std::string> types = known_model_types();
  EXPECT_TRUE(std::is_sorted(types.begin(), types.end()));
  EXPECT_EQ(std::adjacent_find(types.begin(), types.end()), types.end());
  EXPECT_GE(types.size(), 29U);
}

}  // namespace
}  // namespace lawson::front
