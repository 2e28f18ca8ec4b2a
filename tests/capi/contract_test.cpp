// What lawson.h promises, through lawson.hpp and through the C functions.
#include <gtest/gtest.h>
#include <lawson/lawson.hpp>

#include <array>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <set>
#include <thread>

namespace {

using Json = nlohmann::json;

// Before the library reads it: tests leave no choices behind and find none.
[[maybe_unused]] const int kNoStoredChoices = ::setenv("LAWSON_CACHE", "off", 1);

const char* const kGraph = R"({"lawson": 1, "kind": "graph", "name": "contract",
  "inputs": [{"name": "x", "dtype": "bf16", "shape": [1, 16, 8]},
             {"name": "y", "dtype": "bf16", "shape": [1, 8, 16]}],
  "ops": [{"op": "matmul", "in": ["x", "y"], "out": "m", "dtype": "f32"},
          {"op": "relu", "in": "m", "out": "z"}],
  "outputs": ["z"]})";

const char* const kTraining = R"({"lawson": 1, "kind": "attention", "name": "t", "pass": "training",
  "dtype": "f32", "heads": 2, "seqlen_q": 24, "head_dim_qk": 16, "mask": "causal"})";

lawson_status status_of(const std::function<void()>& call) {
  try {
    call();
    return LAWSON_OK;
  } catch (const lawson::Error& error) {
    EXPECT_STREQ(error.kind(), lawson_status_string(error.status()));
    EXPECT_STREQ(error.what(), lawson_last_error_message());
    return error.status();
  }
}

std::string message_of(const std::function<void()>& call) {
  EXPECT_NE(status_of(call), LAWSON_OK);
  return lawson_last_error_message();
}

bool has(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

TEST(Contract, FailedCallsLeaveOutputsUntouched) {
  auto* const untouched = reinterpret_cast<lawson_spec*>(std::uintptr_t{16});
  lawson_spec* spec = untouched;
  EXPECT_EQ(lawson_spec_from_json("{", 1, "a.json", &spec), LAWSON_INVALID_ARGUMENT);
  EXPECT_EQ(spec, untouched);
  auto* device = reinterpret_cast<lawson_device*>(untouched);
  EXPECT_NE(lawson_device_find("no-such-device", &device), LAWSON_OK);
  EXPECT_EQ(device, reinterpret_cast<lawson_device*>(untouched));
  EXPECT_TRUE(has(lawson_last_error_message(), "no-such-device"));
}

TEST(Contract, MissingArgumentsAreNamed) {
  const auto graph = lawson::Graph::from_json(kGraph);
  const auto device = lawson::Device::find("cpu");
  lawson_verdict* verdict = nullptr;
  const auto named = [](lawson_status status, const char* name) {
    EXPECT_EQ(status, LAWSON_INVALID_ARGUMENT);
    EXPECT_EQ(lawson_last_error_message(), "argument '" + std::string{name} + "' is NULL");
  };
  named(lawson_probe(nullptr, device.handle(), nullptr, &verdict), "graph");
  named(lawson_probe(graph.handle(), nullptr, nullptr, &verdict), "device");
  named(lawson_probe(graph.handle(), device.handle(), nullptr, nullptr), "verdict");
  lawson_plan* plan = nullptr;
  named(lawson_compile(graph.handle(), nullptr, nullptr, &plan), "device");
  named(lawson_plan_deserialize(nullptr, 3, &plan), "data");
  lawson_spec* spec = nullptr;
  named(lawson_spec_from_json(nullptr, 0, nullptr, &spec), "text");
  named(lawson_bundle_write("path", nullptr, 1), "plans");
  const lawson_plan* none[] = {nullptr};
  named(lawson_bundle_write("path", none, 1), "plans[0]");
  lawson::Plan compiled = lawson::compile(graph, device);
  compiled.load(device);
  named(lawson_plan_execute(compiled.handle(), nullptr, 3, nullptr, 0, nullptr), "bindings");
  EXPECT_EQ(lawson_graph_tensor(graph.handle(), 0, nullptr), LAWSON_INVALID_ARGUMENT);
}

TEST(Contract, OptionsAreChecked) {
  const auto graph = lawson::Graph::from_json(kGraph);
  const auto device = lawson::Device::find("cpu");
  lawson_verdict* verdict = nullptr;
  lawson_options options{};
  const auto probe = [&] {
    return lawson_probe(graph.handle(), device.handle(), &options, &verdict);
  };
  EXPECT_EQ(probe(), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(has(lawson_last_error_message(), "struct_size"));
  options.struct_size = sizeof(options);
  const int outside = 9;
  std::memcpy(&options.strength, &outside, sizeof(outside));
  EXPECT_EQ(probe(), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(has(lawson_last_error_message(), "strength: 9"));
  options.strength = LAWSON_JUDGED;
  options.engine = "cpuu";
  EXPECT_EQ(probe(), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(has(lawson_last_error_message(), "cpuu"));

  // An older caller that knew only the engine.
  options = {};
  options.struct_size = offsetof(lawson_options, strength);
  options.engine = "reference";
  std::memcpy(&options.strength, &outside, sizeof(outside));  // beyond its struct
  ASSERT_EQ(probe(), LAWSON_OK) << lawson_last_error_message();
  EXPECT_STREQ(lawson_verdict_engine(verdict), "reference");
  lawson_verdict_destroy(verdict);
}

TEST(Contract, OptionsOfACallerThatKnowsNoTuning) {
  const auto graph = lawson::Graph::from_json(kGraph);
  const auto device = lawson::Device::find("cpu");
  lawson_options options{};
  std::memset(&options, 0xFF, sizeof(options));  // what lies behind its struct, padding included
  options.struct_size = offsetof(lawson_options, deadline_ms);
  ASSERT_EQ(options.struct_size, 40U);
  options.engine = nullptr;
  options.strength = LAWSON_JUDGED;
  options.workspace_limit = -1;
  options.deterministic = 0;
  const auto key_of = [&](const lawson_options* given) -> std::string {
    lawson_verdict* verdict = nullptr;
    EXPECT_EQ(lawson_probe(graph.handle(), device.handle(), given, &verdict), LAWSON_OK)
        << lawson_last_error_message();
    std::string key = lawson_verdict_key(verdict);
    lawson_verdict_destroy(verdict);
    return key;
  };
  const std::string plain = key_of(nullptr);
  EXPECT_EQ(key_of(&options), plain);

  lawson_options now{};
  now.struct_size = sizeof(now);
  now.workspace_limit = -1;
  EXPECT_EQ(key_of(&now), plain);
  now.deadline_ms = 1e6;
  EXPECT_EQ(key_of(&now), plain);  // how long it may take changes no choice by itself
  now.tuning = LAWSON_TUNING_QUICK;
  const std::string quick = key_of(&now);
  EXPECT_NE(quick, plain);
  now.tuning = LAWSON_TUNING_EXHAUSTIVE;
  EXPECT_NE(key_of(&now), quick);

  lawson_verdict* verdict = nullptr;
  const int outside = 3;
  std::memcpy(&now.tuning, &outside, sizeof(outside));
  EXPECT_EQ(lawson_probe(graph.handle(), device.handle(), &now, &verdict), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(has(lawson_last_error_message(), "options.tuning: 3"));
  now.tuning = LAWSON_TUNING_OFF;
  now.deadline_ms = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(lawson_probe(graph.handle(), device.handle(), &now, &verdict), LAWSON_INVALID_ARGUMENT);
  EXPECT_TRUE(has(lawson_last_error_message(), "deadline_ms"));
}

TEST(Contract, ATunedPlanSaysHowItWasChosen) {
  const auto graph = lawson::Graph::from_json(kGraph);
  const auto device = lawson::Device::find("cpu");
  lawson::Options options;
  options.tuning = LAWSON_TUNING_EXHAUSTIVE;
  options.strength = LAWSON_BUILT;
  const auto verdict = lawson::probe(graph, device, options);
  auto plan = lawson::compile(graph, device, options);
  EXPECT_EQ(plan.id(), verdict.plan_id());
  EXPECT_EQ(plan.key(), verdict.key());
  const Json report = Json::parse(plan.tuning());
  EXPECT_EQ(report["tuning"], "exhaustive");
  EXPECT_EQ(Json::parse(verdict.json())["choice"], report["choice"]);
  ASSERT_FALSE(report["candidates"].empty());
  std::size_t chosen = 0;
  for (const Json& candidate : report["candidates"]) {
    if (candidate["standing"] != "chosen") continue;
    EXPECT_EQ(candidate["name"], plan.name());
    ++chosen;
  }
  EXPECT_EQ(chosen, 1U);
  plan.load(device);
  const Json bench = Json::parse(plan.bench(0, 3));
  EXPECT_EQ(bench["plan_id"], plan.id());
  EXPECT_EQ(bench["engine"], "cpu");
  EXPECT_EQ(bench["rounds"], 3);
  EXPECT_GT(bench["milliseconds"]["median"], 0);
}

TEST(Contract, WhatAPlanIsOfIsTheSimplifiedGraph) {
  const auto graph = lawson::Graph::from_json(R"({"lawson": 1, "kind": "graph", "name": "g",
      "inputs": [{"name": "x", "dtype": "f32", "shape": [4, 8]}],
      "ops": [{"op": "transpose", "in": ["x"], "out": "t", "perm": [1, 0]},
              {"op": "transpose", "in": ["t"], "out": "u", "perm": [1, 0]},
              {"op": "relu", "in": ["u"], "out": "y"}],
      "outputs": ["y"]})");
  const auto device = lawson::Device::find("cpu");
  auto plan = lawson::compile(graph, device);
  const auto ops = [](const lawson::Graph& of) { return Json::parse(of.json())["ops"].size(); };
  EXPECT_EQ(ops(graph), 3U);
  EXPECT_EQ(ops(plan.graph()), 1U);
  EXPECT_EQ(ops(graph.simplified()), 1U);
  EXPECT_EQ(lawson::probe(graph, device).key(), plan.key());
  plan.load(device);
  auto data = lawson::Data::generate(graph, 3);  // of the graph as it was written
  static_cast<void>(plan.run(data));
  EXPECT_TRUE(data.verify(plan).ok);
}

TEST(Contract, TrainingHasTwoPartsAndOneAnswer) {
  const auto spec = lawson::Spec::from_json(kTraining);
  EXPECT_EQ(spec.graph_count(), 2U);
  const auto device = lawson::Device::find("cpu");
  const auto verdict = lawson::probe(spec, device);
  EXPECT_TRUE(verdict.supported());
  const Json json = Json::parse(verdict.json());
  ASSERT_EQ(json["parts"].size(), 2U);
  EXPECT_EQ(json["key"], verdict.key());
  EXPECT_NE(json["parts"][0]["key"], json["key"]);
  EXPECT_THROW(static_cast<void>(spec.graph(2)), lawson::Error);
}

TEST(Contract, KeyOfVerdictAndPlanAreOne) {
  const auto graph = lawson::Graph::from_json(kGraph);
  const auto device = lawson::Device::find("cpu");
  for (const char* engine : {"cpu", "reference"}) {
    lawson::Options options;
    options.engine = engine;
    options.strength = LAWSON_BUILT;
    const auto verdict = lawson::probe(graph, device, options);
    EXPECT_EQ(verdict.strength(), LAWSON_BUILT);
    const auto plan = lawson::compile(graph, device, options);
    EXPECT_EQ(verdict.key(), plan.key()) << engine;
    EXPECT_EQ(verdict.plan_id(), plan.id()) << engine;
  }
}

TEST(Contract, VerifiedMeansExecuted) {
  lawson::Options options;
  options.strength = LAWSON_VERIFIED;
  const auto verdict =
      lawson::probe(lawson::Spec::from_json(kTraining), lawson::Device::find("cpu"), options);
  EXPECT_TRUE(verdict.supported()) << verdict.json();
  EXPECT_EQ(verdict.strength(), LAWSON_VERIFIED);
}

TEST(Contract, WhatHasNoGraphIsAnAnswer) {
  const auto spec = lawson::Spec::from_json(R"({"lawson": 1, "kind": "attention", "heads": 2,
    "seqlen_q": 24, "head_dim_qk": 16, "softmax": "off_by_one", "bias": "alibi",
    "context_parallel": {"strategy": "ring", "size": 2}})");
  EXPECT_EQ(spec.graph_count(), 0U);
  const auto device = lawson::Device::find("cpu");
  const auto verdict = lawson::probe(spec, device);
  EXPECT_EQ(verdict.decision(), LAWSON_NOT_SUPPORTED);
  ASSERT_EQ(verdict.reasons().size(), 2U);
  EXPECT_TRUE(has(verdict.reasons()[0].message + verdict.reasons()[1].message, "softmax"));
  const Json answer = Json::parse(lawson::explain(spec, device));
  EXPECT_EQ(answer["verdict"]["verdict"], "unsupported");
  EXPECT_FALSE(answer["conditions"].empty());
  lawson::Options options;
  options.engine = "nobody";
  EXPECT_THROW(static_cast<void>(lawson::probe(spec, device, options)), lawson::Error);
}

TEST(Contract, VerdictsOutliveLaterCalls) {
  const auto device = lawson::Device::find("cpu");
  const auto verdict = [&] {
    const auto spec = lawson::Spec::from_json(R"({"lawson": 1, "kind": "attention", "heads": 2,
      "seqlen_q": 25, "head_dim_qk": 16, "context_parallel": {"size": 2}})");
    return lawson::probe(spec, device);
  }();
  const std::string before = verdict.reasons().at(0).message;
  EXPECT_THROW(static_cast<void>(lawson::Spec::from_json("{")), lawson::Error);
  EXPECT_EQ(verdict.reasons().at(0).message, before);
  EXPECT_STREQ(lawson_verdict_reason_message(verdict.handle(), 99), "");
}

TEST(Plans, DamagedBytesAreRefusedAndNeverCrash) {
  const auto device = lawson::Device::find("cpu");
  const auto bytes = lawson::compile(lawson::Graph::from_json(kGraph), device).serialize();
  for (std::size_t size = 0; size < bytes.size(); size += 1 + size / 16) {
    EXPECT_EQ(status_of([&] {
                static_cast<void>(lawson::Plan::deserialize(std::span{bytes}.first(size)));
              }),
              LAWSON_INVALID_ARGUMENT)
        << size;
  }
  std::mt19937 random{1};
  for (int i = 0; i < 500; ++i) {
    auto damaged = bytes;
    damaged[random() % damaged.size()] ^= static_cast<std::byte>(1U << random() % 8);
    EXPECT_EQ(status_of([&] { static_cast<void>(lawson::Plan::deserialize(damaged)); }),
              LAWSON_INVALID_ARGUMENT);
  }
  auto longer = bytes;
  longer.push_back(std::byte{0});
  EXPECT_TRUE(has(message_of([&] { static_cast<void>(lawson::Plan::deserialize(longer)); }),
                  "not a usable plan"));
}

TEST(Plans, NeedLoadingAndAWorkspace) {
  const auto device = lawson::Device::find("cpu");
  const auto graph = lawson::Graph::from_json(kGraph);
  lawson::Plan plan = lawson::compile(graph, device);
  EXPECT_TRUE(has(message_of([&] { plan.execute({}); }), "lawson_plan_load"));
  auto data = lawson::Data::generate(graph, 1);
  EXPECT_TRUE(has(message_of([&] { plan.run(data); }), "lawson_plan_load"));
  plan.load(device);
  // Bindings missing, unknown, NULL.
  std::vector<lawson::Binding> bindings;
  for (const auto& tensor : graph.tensors()) {
    bindings.push_back({tensor.uid, data.buffer(tensor.uid).data()});
  }
  std::vector<std::byte> workspace(plan.workspace_size() + 64);
  void* aligned = workspace.data();
  std::size_t space = workspace.size();
  std::align(64, plan.workspace_size(), aligned, space);
  plan.execute(bindings, aligned, plan.workspace_size());
  EXPECT_TRUE(data.verify(plan).ok);
  EXPECT_EQ(status_of([&] {
              plan.execute(std::span{bindings}.first(2), aligned, plan.workspace_size());
            }),
            LAWSON_INVALID_ARGUMENT);
  auto with_null = bindings;
  with_null[0].data = nullptr;
  EXPECT_EQ(status_of([&] { plan.execute(with_null, aligned, plan.workspace_size()); }),
            LAWSON_INVALID_ARGUMENT);
  auto twice = bindings;
  twice.push_back(bindings[1]);
  const std::string uid = "uid " + std::to_string(bindings[1].uid) + " ";
  EXPECT_TRUE(has(message_of([&] { plan.execute(twice, aligned, plan.workspace_size()); }), uid));
  twice.pop_back();
  twice[0] = bindings[1];
  const std::string told = message_of([&] { plan.execute(twice, aligned, plan.workspace_size()); });
  EXPECT_TRUE(has(told, uid) && has(told, "bindings[0] and bindings[1]; expected once")) << told;
  if (plan.workspace_size() > 0) {
    EXPECT_EQ(status_of([&] { plan.execute(bindings, aligned, plan.workspace_size() - 1); }),
              LAWSON_INVALID_ARGUMENT);
    EXPECT_EQ(status_of([&] { plan.execute(bindings, nullptr, plan.workspace_size()); }),
              LAWSON_INVALID_ARGUMENT);
  }
}

TEST(Plans, DataOfAnotherGraphIsRefused) {
  const auto device = lawson::Device::find("cpu");
  lawson::Plan plan = lawson::compile(lawson::Graph::from_json(kGraph), device);
  plan.load(device);
  Json other = Json::parse(kGraph);
  other["inputs"][0]["shape"] = {1, 32, 8};
  auto data = lawson::Data::generate(lawson::Graph::from_json(other.dump()), 1);
  EXPECT_TRUE(has(message_of([&] { plan.run(data); }), "another graph"));
  EXPECT_TRUE(has(message_of([&] { data.verify(plan); }), "another graph"));
  auto right = lawson::Data::generate(lawson::Graph::from_json(kGraph), 1);
  EXPECT_EQ(status_of([&] { plan.run(right, -1); }), LAWSON_INVALID_ARGUMENT);
}

TEST(Data, TooLargeForTheMachineIsOutOfMemory) {
  Json huge = Json::parse(kGraph);
  huge["inputs"][0]["shape"] = {1, std::int64_t{1} << 36, 8};
  const auto graph = lawson::Graph::from_json(huge.dump());
  EXPECT_EQ(status_of([&] { static_cast<void>(lawson::Data::generate(graph, 1)); }),
            LAWSON_OUT_OF_MEMORY);
  EXPECT_TRUE(has(lawson_last_error_message(), "GiB"));
}

TEST(Data, IsTheSameForTheSameSeed) {
  const auto graph = lawson::Graph::from_json(kGraph);
  const auto bytes = [&](std::uint64_t seed) {
    auto data = lawson::Data::generate(graph, seed);
    const auto buffer = data.buffer(1);
    return std::vector<std::byte>{buffer.begin(), buffer.end()};
  };
  EXPECT_EQ(bytes(5), bytes(5));
  EXPECT_NE(bytes(5), bytes(6));
}

TEST(Specs, HugeAndMalformedDocumentsAreRefused) {
  const std::string spaces(100'000'000, ' ');
  EXPECT_TRUE(
      has(message_of([&] { static_cast<void>(lawson::Spec::from_json(spaces, "big.json")); }),
          "big.json"));
  std::string deep = "{\"lawson\":1,\"kind\":";
  for (int i = 0; i < 1'000'000; ++i) deep += '[';
  EXPECT_TRUE(has(message_of([&] { static_cast<void>(lawson::Spec::from_json(deep)); }), "64"));
  for (const char* text : {"", "nul", "[]", "3", "{}", "{\"lawson\": 1}", "\xff\xfe{}",
                           "{\"lawson\": 1, \"kind\": \"graph\"}",
                           "{\"lawson\": 1, \"kind\": \"attention\", \"heads\": 1e400}"}) {
    EXPECT_EQ(status_of([&] { static_cast<void>(lawson::Spec::from_json(text)); }),
              LAWSON_INVALID_ARGUMENT)
        << text;
  }
}

TEST(Models, OptionsAreChecked) {
  const std::string config = R"({"model_type": "llama", "hidden_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 1024,
    "vocab_size": 1000})";
  const Json all = Json::parse(lawson::model_workloads(config, "llama.json"));
  EXPECT_EQ(all["model_type"], "llama");
  EXPECT_GT(all["workloads"].size(), 3U);
  for (const Json& workload : all["workloads"]) {
    const std::string name = workload["name"];
    EXPECT_NO_THROW(static_cast<void>(lawson::Spec::from_json(workload["spec"].dump(), name)))
        << name;
  }
  lawson::ModelOptions options;
  options.passes = "decode,trainig";
  EXPECT_TRUE(
      has(message_of([&] { static_cast<void>(lawson::model_workloads(config, "c", options)); }),
          "trainig"));
  options = {};
  options.batch = -1;
  EXPECT_TRUE(
      has(message_of([&] { static_cast<void>(lawson::model_workloads(config, "c", options)); }),
          "batch: -1"));
}

TEST(Bundles, HoldPlansAndRefuseDamage) {
  const std::string path = testing::TempDir() + "lawson_capi_bundle";
  const auto device = lawson::Device::find("cpu");
  const auto first = lawson::compile(lawson::Graph::from_json(kGraph), device);
  Json other = Json::parse(kGraph);
  other["ops"][1]["op"] = "exp";
  const auto second = lawson::compile(lawson::Graph::from_json(other.dump()), device);
  const std::array<const lawson::Plan*, 2> plans{&first, &second};
  lawson::Bundle::write(path, plans);
  {
    const auto bundle = lawson::Bundle::open(path);
    ASSERT_EQ(bundle.size(), 2U);
    const std::set<std::string> ids{std::string{bundle.plan(0).id()},
                                    std::string{bundle.plan(1).id()}};
    EXPECT_EQ(ids, (std::set<std::string>{std::string{first.id()}, std::string{second.id()}}));
    EXPECT_EQ(status_of([&] { static_cast<void>(bundle.plan(2)); }), LAWSON_INVALID_ARGUMENT);
  }
  std::ofstream(path, std::ios::app) << "x";
  EXPECT_EQ(status_of([&] { static_cast<void>(lawson::Bundle::open(path)); }),
            LAWSON_INVALID_ARGUMENT);
  EXPECT_EQ(status_of([&] { static_cast<void>(lawson::Bundle::open(path + ".absent")); }),
            LAWSON_IO);
  std::remove(path.c_str());
}

TEST(Devices, AreNamedAndListed) {
  bool cpu = false;
  for (const Json& device : Json::parse(lawson::devices())) {
    cpu = cpu || (device["name"] == "cpu" && device["present"] == true);
  }
  EXPECT_TRUE(cpu);
  const Json info = Json::parse(lawson::info());
  EXPECT_EQ(info["version"], lawson::version());
  EXPECT_TRUE(info["engines"].contains("reference"));
  // Settings come before the first engine.
  EXPECT_TRUE(has(message_of([] { lawson::configure({}); }), "before"));
}

TEST(Devices, AGpuWithoutItsEngineIsUnavailable) {
  if (LAWSON_WITH_CUDNN != 0) GTEST_SKIP() << "this build has the cuDNN engine";
  EXPECT_EQ(status_of([] { static_cast<void>(lawson::Device::find("h200")); }), LAWSON_UNAVAILABLE);
  EXPECT_EQ(status_of([] { static_cast<void>(lawson::Device::find("cuda")); }), LAWSON_UNAVAILABLE);
}

}  // namespace
