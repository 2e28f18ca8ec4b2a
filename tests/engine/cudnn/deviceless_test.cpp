// Real verdicts and compiled plans of the real cuDNN, without a device.
#include "engine/cudnn/deviceless.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <functional>

#include "engine/cudnn/lowering.h"
#include "engine/cudnn/plan_bytes.h"
#include "front/attention.h"

namespace lawson::cudnn {
namespace {

ir::Graph attention(const Json& changes) {
  Json spec{{"lawson", 1},     {"kind", "attention"}, {"name", "case"},
            {"dtype", "bf16"}, {"batch", 2},          {"heads", 8},
            {"seqlen_q", 256}, {"head_dim_qk", 64},   {"mask", "none"}};
  if (!changes.is_null()) spec.update(changes);
  auto read = front::attention_from_json(spec, "test");
  EXPECT_TRUE(read.ok()) << (read.ok() ? "" : read.error().message);
  auto graph = front::attention_graph(*read, read->pass);
  EXPECT_TRUE(graph.ok()) << (graph.ok() ? "" : graph.error().message);
  return std::move(graph).value();
}

Json input(const char* name, const char* dtype, const Dims& shape) {
  return {{"name", name}, {"dtype", dtype}, {"shape", shape}};
}

// The example that started it all: int8 -> bf16 matmul, + f32.
ir::Graph seed() {
  return graph_of({{"lawson", 1},
                   {"kind", "graph"},
                   {"name", "seed"},
                   {"inputs",
                    {input("x", "i8", {2, 16, 16}), input("y", "bf16", {2, 16, 16}),
                     input("z", "f32", {2, 16, 16})}},
                   {"ops",
                    {{{"op", "convert"}, {"in", {"x"}}, {"out", "a"}, {"dtype", "bf16"}},
                     {{"op", "matmul"}, {"in", {"a", "y"}}, {"out", "b"}},
                     {{"op", "convert"}, {"in", {"b"}}, {"out", "c"}, {"dtype", "f32"}},
                     {{"op", "add"}, {"in", {"c", "z"}}, {"out", "d"}}}},
                   {"outputs", {"d"}}});
}

ir::Graph product(const char* left, const char* right, std::int64_t m = 64, std::int64_t n = 64,
                  std::int64_t k = 64, const char* after = nullptr) {
  Json ops{{{"op", "matmul"}, {"in", {"x", "y"}}, {"out", "p"}}};
  if (after != nullptr) ops.push_back({{"op", after}, {"in", {"p"}}, {"out", "q"}});
  return graph_of({{"lawson", 1},
                   {"kind", "graph"},
                   {"name", "product"},
                   {"inputs", {input("x", left, {m, k}), input("y", right, {k, n})}},
                   {"ops", ops},
                   {"outputs", {after == nullptr ? "p" : "q"}}});
}

ir::Graph product_of_product() {
  return graph_of(
      {{"lawson", 1},
       {"kind", "graph"},
       {"name", "chain"},
       {"inputs",
        {input("x", "bf16", {64, 64}), input("y", "bf16", {64, 64}), input("z", "bf16", {64, 64})}},
       {"ops",
        {{{"op", "matmul"}, {"in", {"x", "y"}}, {"out", "p"}},
         {{"op", "matmul"}, {"in", {"p", "z"}}, {"out", "q"}}}},
       {"outputs", {"q"}}});
}

struct Row {
  std::string name;
  ir::Graph graph;
  std::string yes;  // targets, one after another
  std::string no;
  std::string code;  // of a reason of every "no"
};

void expect(const Row& row) {
  const auto each = [](std::string names, const auto& visit) {
    for (std::size_t end = 0; !names.empty(); names.erase(0, end + 1)) {
      end = std::min(names.find(' '), names.size() - 1);
      std::string one = names.substr(0, end + 1);
      while (!one.empty() && one.back() == ' ') one.pop_back();
      if (!one.empty()) visit(one);
    }
  };
  each(row.yes, [&](const std::string& name) {
    const Verdict verdict = probe(row.graph, name);
    EXPECT_EQ(verdict.decision, Decision::supported) << row.name << " on " << name << "\n"
                                                     << text(verdict.reasons);
  });
  each(row.no, [&](const std::string& name) {
    const Verdict verdict = probe(row.graph, name);
    EXPECT_EQ(verdict.decision, Decision::unsupported) << row.name << " on " << name;
    const bool named = std::any_of(verdict.reasons.begin(), verdict.reasons.end(),
                                   [&](const Reason& reason) { return reason.code == row.code; });
    EXPECT_TRUE(named) << row.name << " on " << name << ": no '" << row.code << "' in\n"
                       << text(verdict.reasons);
  });
}

TEST(Deviceless, VerdictsOfAttention) {
  const std::string all = "a100 l40s h200 b200 gb300 rtx5090";
  const std::string old = "v100 t4";
  const std::string cc = "compute_capability";
  const Json back{{"pass", "backward"}};
  const auto backward = [&](Json changes) {
    changes.update(back);
    return attention(changes);
  };
  for (const Row& row : std::vector<Row>{
           {"forward", attention({}), all, old, cc},
           {"causal, stats", attention({{"mask", "causal"}, {"return_stats", true}}), all, old, cc},
           {"grouped heads", attention({{"kv_heads", 2}, {"mask", "causal"}}), all, old, cc},
           {"bottom right",
            attention({{"mask", "causal_bottom_right"}, {"seqlen_q", 128}, {"seqlen_kv", 256}}),
            all, old, cc},
           {"padding", attention({{"mask", "padding"}}), all, old, cc},
           {"padding, causal", attention({{"mask", "padding_causal"}}), all, old, cc},
           {"window", attention({{"mask", "causal"}, {"window", {64, 0}}}), all, old, cc},
           {"window, both sides", attention({{"window", {64, 32}}}), all, old, cc},
           {"d_v", attention({{"head_dim_qk", 192}, {"head_dim_v", 128}, {"mask", "causal"}}), all,
            old, cc},
           {"latent decoding",
            attention({{"heads", 16},
                       {"kv_heads", 1},
                       {"seqlen_q", 1},
                       {"seqlen_kv", 256},
                       {"head_dim_qk", 576},
                       {"head_dim_v", 512}}),
            all, old, cc},
           {"bias", attention({{"bias", "post_scale"}}), all, old, cc},
           {"sink", attention({{"softmax", "learnable"}, {"mask", "causal"}}), all, old, cc},
           {"off by one", attention({{"softmax", "off_by_one"}, {"mask", "causal"}}), all, old, cc},
           {"softcap", attention({{"softcap", 50.0}, {"mask", "causal"}}), all, old, cc},
           {"softcap, window",
            attention({{"softcap", 50.0}, {"mask", "causal"}, {"window", {64, 0}}}), all, old, cc},
           {"alibi", attention({{"bias", "alibi"}, {"mask", "causal"}}), all, old, cc},
           {"alibi, not causal: as a bias", attention({{"bias", "alibi"}}), all, old, cc},
           {"bottom right with a bias: shifted bounds",
            attention({{"mask", "causal_bottom_right"}, {"seqlen_q", 64}, {"bias", "post_scale"}}),
            all, old, cc},
           {"more queries than keys: bounds as a bias",
            attention({{"mask", "causal_bottom_right"}, {"seqlen_q", 256}, {"seqlen_kv", 128}}),
            all, old, cc},
           {"bool mask", attention({{"attn_mask", {{"dtype", "bool"}}}}), all, old, cc},
           {"pre-scale bias", attention({{"bias", "pre_scale"}}), all, old, cc},
           {"pre-scale bias under a cap", attention({{"bias", "pre_scale"}, {"softcap", 30.0}}), "",
            "a100 h200 b200", "pre_scale_bias"},
           {"ragged", attention({{"layout", "thd"}, {"mask", "padding_causal"}}), all, old, cc},
           {"ragged queries", attention({{"layout", "thd_bshd_bshd"}}), all, old, cc},
           {"pages", attention({{"paged", {{"page_size_k", 16}}}}), all, old, cc},
           {"pages of two sizes",
            attention({{"paged", {{"page_size_k", 16}, {"page_size_v", 32}}}}), "",
            "a100 h200 b200", "known_defect"},
           {"packed", attention({{"layout", "bs3hd"}}), all, old, cc},
           {"dropout", attention({{"dropout", 0.1}}), all, old, cc},
           {"max logit", attention({{"return_max_logit", true}, {"return_stats", true}}), all, old,
            cc},
           {"backward, ragged", backward({{"layout", "thd"}, {"mask", "padding_causal"}}), all, old,
            cc},
           {"backward, ragged with a sink",
            backward({{"layout", "thd"}, {"mask", "padding_causal"}, {"softmax", "learnable"}}), "",
            "a100 h200 b200", "cudnn_version"},
           {"backward, bool mask", backward({{"attn_mask", {{"dtype", "bool"}}}}), all, old, cc},
           {"backward, bias of a row",
            backward({{"bias", "post_scale"}, {"bias_grad", true}, {"bias_shape", {1, 1, 1, 256}}}),
            all, old, cc},
           {"backward, dropout mask", backward({{"dropout", 0.1}, {"dropout_mask", true}}), "",
            "a100 h200 b200", "known_defect"},
           {"d = 100", attention({{"head_dim_qk", 100}}), "", "a100 h200 b200 v100", "head_dim"},
           {"one query and a sink",
            attention({{"seqlen_q", 1}, {"seqlen_kv", 256}, {"softmax", "learnable"}}), "",
            "a100 h200 b200", "softmax"},
           {"backward", backward({}), all, old, cc},
           {"backward, causal", backward({{"mask", "causal"}, {"kv_heads", 2}}), all, old, cc},
           {"backward, d_v",
            backward({{"head_dim_qk", 192}, {"head_dim_v", 128}, {"mask", "causal"}}), "h200 b200",
            "a100 l40s", "head_dim"},
           {"backward, d = 256", backward({{"head_dim_qk", 256}}), "h200", "a100 b200", "head_dim"},
           {"backward, sink", backward({{"softmax", "learnable"}, {"mask", "causal"}}), all, old,
            cc},
           {"backward, f32", backward({{"dtype", "f32"}}), "", "a100 h200 b200", "data_type"},
           {"f64", attention({{"dtype", "f64"}}), "", "a100 h200 b200", "data_type"},
           {"backward, softcap", backward({{"softcap", 50.0}, {"mask", "causal"}}), "h200 b200", "",
            ""},
       }) {
    expect(row);
  }
}

TEST(Deviceless, VerdictsOfFusions) {
  const std::string all = "a100 a10 l40s rtx4090 h100-sxm h100-pcie h200 b200 gb300 rtx5090";
  expect({"seed", seed(), all, "v100 t4", "compute_capability"});
  expect(
      {"gelu", product("bf16", "bf16", 512, 512, 512, "gelu"), all, "v100", "compute_capability"});
  expect({"i8 x i8", product("i8", "i8"), all, "v100", "compute_capability"});
  expect(
      {"log1p", product("bf16", "bf16", 64, 64, 64, "log1p"), "", "h200 v100", "op_not_in_cudnn"});
}

TEST(Deviceless, OldGpusNameTheCapabilityNeeded) {
  for (const char* name : {"v100", "t4"}) {
    const Verdict verdict = probe(seed(), name);
    EXPECT_NE(verdict.reasons[0].message.find("8.0 or newer"), std::string::npos)
        << text(verdict.reasons);
  }
  EXPECT_NE(text(probe(attention({}), "v100").reasons).find("CUDA 13.0 compiles for compute"),
            std::string::npos);
}

TEST(Deviceless, UndecidedNamesTheEngineThatNeedsTheDevice) {
  for (const char* name : {"a100", "h200", "b200"}) {
    for (const ir::Graph& graph : {product("f64", "f64"), product("bf16", "f16")}) {
      const Verdict verdict = probe(graph, name);
      EXPECT_EQ(verdict.decision, Decision::undecided) << name;
      ASSERT_FALSE(verdict.reasons.empty());
      EXPECT_EQ(verdict.reasons[0].code, "needs_live_device");
      EXPECT_NE(verdict.reasons[0].message.find("engine 0 (cuBLASLt)"), std::string::npos);
      EXPECT_FALSE(engine().compile(graph, target(name), {}, std::nullopt, {}).ok());
    }
  }
}

TEST(Deviceless, ProductOfAProductIsRefusedOnlyWhenBuilt) {
  const ir::Graph graph = product_of_product();
  EXPECT_EQ(probe(graph, "h200").decision, Decision::supported);
  Options build;
  build.strength = Strength::built;
  const Verdict verdict = probe(graph, "h200", build);
  EXPECT_EQ(verdict.decision, Decision::unsupported);
  EXPECT_EQ(verdict.reasons.front().code, "kernel_does_not_compile") << text(verdict.reasons);
  const auto plan = engine().compile(graph, target("h200"), {}, std::nullopt, {});
  ASSERT_FALSE(plan.ok());
  EXPECT_EQ(plan.error().kind, ErrorKind::unsupported);
  EXPECT_FALSE(plan.error().reasons.empty());
}

// Asked about f32 products for a GPU without TF32 first, cuDNN 9.19 refuses them for all others.
TEST(Deviceless, VerdictsDoNotDependOnTheOrderOfTargets) {
  const ir::Graph graph = product("f32", "f32", 64, 64, 64, "relu");
  probe(graph, "v100");
  probe(graph, "t4");
  for (const char* name : {"a100", "l40s", "h200", "b200", "rtx5090"}) {
    EXPECT_EQ(probe(graph, name).decision, Decision::supported) << name;
  }
}

void compiles(const ir::Graph& graph, const std::string& name) {
  Options options;
  options.strength = Strength::built;
  const Verdict verdict = probe(graph, name, options);
  ASSERT_EQ(verdict.decision, Decision::supported) << name << "\n" << text(verdict.reasons);
  EXPECT_EQ(verdict.strength, Strength::built);
  EXPECT_FALSE(verdict.plan_name.empty());
  ASSERT_TRUE(verdict.workspace_bytes);
  const auto plan = engine().compile(graph, target(name), options, std::nullopt, {});
  ASSERT_TRUE(plan.ok()) << plan.error().message;
  EXPECT_EQ(plan->key, verdict.key);
  EXPECT_EQ(plan->plan_id, verdict.plan_id);
  EXPECT_EQ(plan->workspace_bytes, *verdict.workspace_bytes);
  EXPECT_GT(plan->bytes.size(), 10000U);
  const auto loaded = engine().load(*plan, target(name));
  ASSERT_TRUE(loaded.ok()) << loaded.error().message;
  EXPECT_EQ((*loaded)->plan().plan_id, plan->plan_id);
  const Status executed = engine().execute(**loaded, {}, nullptr, nullptr);
  ASSERT_FALSE(executed.ok());
  EXPECT_EQ(executed.error().kind, ErrorKind::unavailable);
}

TEST(Deviceless, CompilesTheSeedForEachArchitecture) {
  for (const char* name : {"a100", "h200", "b200"}) compiles(seed(), name);
}

TEST(Deviceless, CompilesAttentionForEachArchitecture) {
  for (const char* name : {"a100", "h200", "b200"}) {
    compiles(attention({{"mask", "causal"}, {"kv_heads", 2}, {"return_stats", true}}), name);
  }
}

TEST(Deviceless, CompilesTheBackwardForEachArchitecture) {
  for (const char* name : {"a100", "h200", "b200"}) {
    compiles(attention({{"pass", "backward"}, {"mask", "causal"}, {"kv_heads", 2}}), name);
  }
}

TEST(Deviceless, CompilesEveryFeatureForHopper) {
  for (const Json& changes : std::vector<Json>{
           {{"mask", "padding_causal_bottom_right"}},
           {{"mask", "causal"}, {"window", {64, 0}}},
           {{"mask", "causal"}, {"bias", "alibi"}},
           {{"bias", "post_scale"}},
           {{"softcap", 30.0}, {"mask", "causal"}},
           {{"softmax", "learnable"}, {"mask", "causal"}},
           {{"softmax", "off_by_one"}},
           {{"pass", "backward"}, {"softcap", 30.0}, {"mask", "causal"}},
           {{"pass", "backward"}, {"softmax", "learnable"}, {"mask", "causal"}},
       }) {
    compiles(attention(changes), "h200");
  }
}

TEST(Deviceless, NoScaleIsBakedIntoAPlan) {
  const Device h200 = target("h200");
  std::vector<Plan> plans;
  for (const double scale : {0.125, 0.7431}) {
    const ir::Graph graph = attention({{"scale", scale}, {"mask", "causal"}});
    // A fresh engine each time: nothing is reused.
    const auto fresh = make_cudnn_engine();
    auto plan = fresh->compile(graph, h200, {}, std::nullopt, {});
    ASSERT_TRUE(plan.ok()) << plan.error().message;
    plans.push_back(std::move(plan).value());

    // The loaded plan asks for the scale's tensor when it executes.
    const ir::TensorId scale_id = graph.nodes[0].inputs[ir::Attention::scale];
    ASSERT_NE(scale_id, ir::kNone);
    auto unpacked = unpack_plan(plans.back().bytes);
    ASSERT_TRUE(unpacked.ok());
    std::unique_ptr<Executable> executable;
    const Failure failure = Executable::load(unpacked->bytes.data, nullptr, h200, executable);
    ASSERT_FALSE(failure) << failure->text;
    const auto& uids = executable->uids();
    EXPECT_NE(std::find(uids.begin(), uids.end(), ir::Graph::uid(scale_id)), uids.end());
  }
  EXPECT_EQ(plans[0].key, plans[1].key);
  EXPECT_EQ(plans[0].plan_id, plans[1].plan_id);
  // Not byte for byte: cuDNN writes padding that it never set.
  EXPECT_EQ(plans[0].bytes.size(), plans[1].bytes.size());
}

TEST(Deviceless, AWindowWiderThanAnIntIsNone) {
  const Device h200 = target("h200");
  std::vector<Plan> plans;
  for (const std::int64_t left : {std::int64_t{-1}, std::int64_t{1} << 32}) {
    const ir::Graph graph = attention({{"mask", "causal"}, {"window", {left, 0}}});
    auto plan = engine().compile(graph, h200, {}, std::nullopt, {});
    ASSERT_TRUE(plan.ok()) << plan.error().message;
    plans.push_back(std::move(plan).value());
  }
  EXPECT_EQ(plans[0].plan_name, plans[1].plan_name);
  EXPECT_EQ(plans[0].bytes.size(), plans[1].bytes.size());
}

TEST(Deviceless, ExplicitEngineConfigs) {
  const ir::Graph graph = product("bf16", "bf16", 1024, 1024, 1024, "gelu");
  const Device h200 = target("h200");
  const auto candidates = engine().candidates(graph, h200, {});
  ASSERT_TRUE(candidates.ok()) << candidates.error().message;
  ASSERT_FALSE(candidates->empty());
  // An engine that the heuristics do not list without a device.
  const auto plan = engine().compile(graph, h200, {}, Candidate{"eng7_k24=20"}, {});
  ASSERT_TRUE(plan.ok()) << plan.error().message;
  EXPECT_EQ(plan->plan_name, "eng7_k24=20");
  const auto first = engine().compile(graph, h200, {}, candidates->front(), {});
  ASSERT_TRUE(first.ok()) << first.error().message;
  EXPECT_EQ(first->plan_name, candidates->front().name);
  EXPECT_EQ(first->key, plan->key);
  EXPECT_NE(first->plan_id, plan->plan_id);
  for (const char* name : {"", "engine", "eng7_k24", "eng7_k24=3x", "eng99999_k24=3"}) {
    const auto wrong = engine().compile(graph, h200, {}, Candidate{name}, {});
    ASSERT_FALSE(wrong.ok()) << name;
    EXPECT_EQ(wrong.error().kind, ErrorKind::invalid_argument) << wrong.error().message;
  }
  const auto refused = engine().compile(graph, h200, {}, Candidate{"eng9_k24=3"}, {});
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.error().kind, ErrorKind::unsupported) << refused.error().message;
}

TEST(Deviceless, WorkspaceLimitIsHeldAgainstTheExactSize) {
  const ir::Graph graph = attention({{"pass", "backward"}, {"deterministic", true}});
  Options options;
  options.workspace_limit = 1 << 20;
  const Verdict no = probe(graph, "h200", options);
  EXPECT_EQ(no.decision, Decision::unsupported);
  EXPECT_EQ(no.reasons.front().code, "workspace") << text(no.reasons);
  EXPECT_NE(no.reasons.front().message.find("bytes"), std::string::npos);
  options.workspace_limit = std::int64_t{1} << 32;
  const Verdict yes = probe(graph, "h200", options);
  EXPECT_EQ(yes.decision, Decision::supported);
  ASSERT_TRUE(yes.workspace_bytes);
  options.workspace_limit = *yes.workspace_bytes;
  EXPECT_EQ(probe(graph, "h200", options).decision, Decision::supported);
  // One byte less: another plan, or none.
  options.workspace_limit = *yes.workspace_bytes - 1;
  const Verdict less = probe(graph, "h200", options);
  if (less.decision == Decision::supported) {
    EXPECT_LT(less.workspace_bytes.value_or(0), *yes.workspace_bytes);
    EXPECT_NE(less.plan_name, yes.plan_name);
  }
}

TEST(Deviceless, ForeignAndDamagedPlansAreErrors) {
  const Device h200 = target("h200");
  auto compiled = engine().compile(seed(), h200, {}, std::nullopt, {});
  ASSERT_TRUE(compiled.ok()) << compiled.error().message;
  const Plan plan = *compiled;

  const auto elsewhere = engine().load(plan, target("a100"));
  ASSERT_FALSE(elsewhere.ok());
  EXPECT_EQ(elsewhere.error().kind, ErrorKind::invalid_argument);
  EXPECT_NE(elsewhere.error().message.find("compute capability 9.0"), std::string::npos);

  auto unpacked = unpack_plan(plan.bytes);
  ASSERT_TRUE(unpacked.ok());
  Plan other = plan;
  PlanHeader header = unpacked->header;
  header.cudnn_version = 91300;
  other.bytes = pack_plan(header, unpacked->bytes);
  const auto older = engine().load(other, h200);
  ASSERT_FALSE(older.ok());
  EXPECT_EQ(older.error().kind, ErrorKind::unavailable);
  EXPECT_NE(older.error().message.find("9.13.0"), std::string::npos);

  other = plan;
  other.key = "another";
  EXPECT_FALSE(engine().load(other, h200).ok());

  other = plan;
  other.bytes.resize(other.bytes.size() / 2);
  const auto half = engine().load(other, h200);
  ASSERT_FALSE(half.ok());
  EXPECT_EQ(half.error().kind, ErrorKind::io);

  // Right checksum, wrong contents: what a bug of ours could write.
  other = plan;
  PlanBytes nonsense = unpacked->bytes;
  nonsense.data.assign(1000, 'x');
  other.bytes = pack_plan(unpacked->header, nonsense);
  EXPECT_FALSE(engine().load(other, h200).ok());
}

TEST(Deviceless, CancelledCompileSaysSo) {
  std::stop_source source;
  source.request_stop();
  const auto plan = engine().compile(seed(), target("h200"), {}, std::nullopt, source.get_token());
  ASSERT_FALSE(plan.ok());
  EXPECT_EQ(plan.error().kind, ErrorKind::cancelled);
}

TEST(Deviceless, LiveDevicesAreNotForWorkers) {
  Device device = target("h200");
  device.ordinal = 0;
  const auto verdict = engine().probe(seed(), device, {});
  ASSERT_FALSE(verdict.ok());
  EXPECT_EQ(verdict.error().kind, ErrorKind::unavailable);
  const auto live = engine().live_devices();
  ASSERT_TRUE(live.ok());
  EXPECT_TRUE(live->empty());
}

TEST(Deviceless, MissingCudnnIsNeverAVerdict) {
  setenv("LAWSON_CUDNN", "/nowhere/libcudnn.so.9", 1);
  const auto fresh = make_cudnn_engine();
  const auto verdict = fresh->probe(seed(), fresh->known_targets().front(), {});
  unsetenv("LAWSON_CUDNN");
  // In a run of all cases at once, cuDNN has been loaded by an earlier one.
  if (verdict.ok()) GTEST_SKIP() << "cuDNN was already loaded";
  EXPECT_EQ(verdict.error().kind, ErrorKind::unavailable);
  EXPECT_NE(verdict.error().message.find("/nowhere/libcudnn.so.9"), std::string::npos);
}

double milliseconds_of(const std::function<void()>& work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
      .count();
}

TEST(Deviceless, WarmProbesAreFastAndSmall) {
  probe(attention({}), "h200");
  probe(seed(), "h200");
  std::vector<double> attention_times;
  std::vector<double> fusion_times;
  for (int i = 1; i <= 15; ++i) {
    const ir::Graph one = attention({{"seqlen_q", 256 + 64 * i}, {"mask", "causal"}});
    attention_times.push_back(milliseconds_of([&] { probe(one, "h200"); }));
    const ir::Graph other = product("bf16", "bf16", 256 + 64 * i, 512, 512, "gelu");
    fusion_times.push_back(milliseconds_of([&] { probe(other, "h200"); }));
  }
  for (const Device& device : engine().known_targets()) {
    probe(attention({{"mask", "causal"}}), device.name);
    probe(product("bf16", "bf16", 512, 512, 512, "relu"), device.name);
  }
  const auto median = [](std::vector<double> times) {
    std::nth_element(times.begin(), times.begin() + 7, times.end());
    return times[7];
  };
  std::ifstream status{"/proc/self/status"};
  std::string word;
  std::int64_t kilobytes = 0;
  while (status >> word) {
    if (word == "VmRSS:") status >> kilobytes;
  }
  EXPECT_GT(kilobytes, 0);
  EXPECT_LE(kilobytes, 1500000);
  RecordProperty("attention_ms", std::to_string(median(attention_times)));
  RecordProperty("fusion_ms", std::to_string(median(fusion_times)));
  RecordProperty("rss_mb", std::to_string(kilobytes / 1000));
}

}  // namespace
}  // namespace lawson::cudnn
