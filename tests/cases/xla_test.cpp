// What XLA's tests prove of cuDNN fusions, and what they leave out, without a device: the real
// worker and the real cuDNN judge and compile for an H200. A test for each name of FUSION.md's
// list; what runs on the GPU runs in lawson-agreement.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <set>
#include <thread>

#include "cases/fusion_writer.h"
#include "cases/judge.h"
#include "cases/xla.h"
#include "engine/registry.h"
#include "ir/json.h"
#include "plan/planner.h"

namespace lawson::cases {
namespace {

using plan::Planner;

plan::PlannerConfig config() {
  plan::PlannerConfig result;
  result.engines = engines();
  result.worker_path = LAWSON_LIBEXEC "/lawson-worker";
  result.nodriver_path = LAWSON_LIBEXEC "/liblawson-nodriver.so";
  result.max_workers = 2;
  return result;
}

Planner& planner() {
  static Planner instance{config()};
  return instance;
}

// A target even on a machine that has such a GPU.
Device target(const std::string& name) {
  const auto devices = planner().devices();
  for (const Device& device : *devices) {
    if (device.name == name && !device.present()) return device;
  }
  ADD_FAILURE() << "no target " << name;
  return {};
}

Options with_strength(Strength strength) {
  Options options;
  options.strength = strength;
  return options;
}

std::string text(const std::vector<Reason>& reasons) {
  std::string all;
  for (const Reason& reason : reasons) all += "[" + reason.code + "] " + reason.message + "\n";
  return all;
}

ir::Graph graph(const Case& item) {
  auto made = graph_of(item);
  EXPECT_TRUE(made.ok()) << item.text() << ": " << (made.ok() ? "" : made.error().message);
  return std::move(made).value();
}

ir::Graph graph(const Json& spec) {
  return graph(Case{"test", spec, 1, plan::InputStyle::normal});
}

const XlaCase& the(const std::string& name) {
  static const std::vector<XlaCase> list = xla_list();
  const auto found = std::find_if(list.begin(), list.end(),
                                  [&](const XlaCase& item) { return item.item.name == name; });
  if (found == list.end()) throw std::out_of_range(name);
  return *found;
}

void expect_verdict(const XlaCase& item) {
  const auto verdict = planner().probe(graph(item.item), target(item.target), "cudnn",
                                       with_strength(Strength::built));
  ASSERT_TRUE(verdict.ok()) << item.item.text() << ": " << verdict.error().message;
  EXPECT_EQ(verdict->engine, "cudnn") << item.item.text();
  EXPECT_EQ(verdict->decision, item.expected) << item.item.text() << "\n" << text(verdict->reasons);
  EXPECT_NE(verdict->evidence, Evidence::live);
  EXPECT_FALSE(verdict->key.empty());
  if (verdict->decision == Decision::supported) {
    EXPECT_EQ(verdict->strength, Strength::built);
    EXPECT_FALSE(verdict->plan_id.empty()) << item.item.text();
    EXPECT_FALSE(verdict->plan_name.empty()) << item.item.text();
    return;
  }
  ASSERT_FALSE(verdict->reasons.empty()) << item.item.text();
  EXPECT_FALSE(verdict->reasons[0].message.empty());
  if (item.code.empty()) return;
  EXPECT_TRUE(std::any_of(verdict->reasons.begin(), verdict->reasons.end(),
                          [&](const Reason& reason) { return reason.code == item.code; }))
      << item.item.text() << "\n"
      << text(verdict->reasons);
}

// All cases whose names begin so, two at once.
void expect_verdicts(const std::string& prefix, std::size_t count) {
  std::vector<XlaCase> chosen;
  for (XlaCase& item : xla_list()) {
    if (item.item.name.starts_with(prefix)) chosen.push_back(std::move(item));
  }
  EXPECT_EQ(chosen.size(), count) << prefix;
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t i = next++; i < chosen.size(); i = next++) expect_verdict(chosen[i]);
  };
  std::jthread other(work);
  work();
}

Plan compiled_for(const ir::Graph& what, const std::string& device, const Options& options = {}) {
  auto plan = planner().compile(what, target(device), "cudnn", options);
  EXPECT_TRUE(plan.ok()) << (plan.ok() ? "" : plan.error().message);
  return plan.ok() ? std::move(*plan) : Plan{};
}

// ---- graphs ----

TEST(Xla, F32Dot) {
  expect_verdict(the("xla-f32-dot"));
}
TEST(Xla, VectorTensor) {
  expect_verdict(the("xla-vector-tensor"));
}
TEST(Xla, TensorVector) {
  expect_verdict(the("xla-tensor-vector"));
}
TEST(Xla, Bf16WithCopy) {
  expect_verdict(the("xla-bf16-with-copy"));
}
TEST(Xla, Bf16Bf16F32) {
  expect_verdict(the("xla-bf16-bf16-f32"));
}
TEST(Xla, S4Bf16) {
  expect_verdict(the("xla-s4-bf16"));
}
TEST(Xla, OutputSubtraction) {
  expect_verdict(the("xla-output-subtraction"));
}
TEST(Xla, NonDefaultLayouts) {
  expect_verdict(the("xla-non-default-layouts"));
}
TEST(Xla, RhsFusion) {
  expect_verdict(the("xla-rhs-fusion"));
}
TEST(Xla, F16Negate) {
  expect_verdict(the("xla-f16-negate"));
}
TEST(Xla, S8Bf16) {
  expect_verdict(the("xla-s8-bf16"));
}
TEST(Xla, ExactIntegerMath) {
  expect_verdict(the("xla-exact-integer-math"));
}
TEST(Xla, BroadcastOfAnOperandToDims0And1And2) {
  expect_verdicts("xla-broadcast-dim", 3);
}
TEST(Xla, BroadcastOfAnOperandToTwoDims) {
  expect_verdict(the("xla-broadcast-2-dims"));
}
TEST(Xla, BroadcastOfAnOperandToThreeDims) {
  expect_verdict(the("xla-broadcast-3-dims"));
}
TEST(Xla, Constants) {
  expect_verdict(the("xla-constants"));
}
TEST(Xla, Clamp) {
  expect_verdict(the("xla-clamp"));
}
TEST(Xla, Fp8) {
  expect_verdict(the("xla-fp8"));
}
TEST(Xla, Slicing) {
  expect_verdict(the("xla-slicing"));
}
TEST(Xla, SplitNonContractingDimsInput) {
  expect_verdict(the("xla-split-input"));
}
TEST(Xla, SplitNonContractingDimsInputAndOutput) {
  expect_verdict(the("xla-split-input-output"));
}
TEST(Xla, TwelveUnary) {
  expect_verdicts("xla-unary-", 12);
}
TEST(Xla, SevenBinary) {
  expect_verdicts("xla-binary-", 7);
}
TEST(Xla, CompareFiveTypesTimesSix) {
  expect_verdicts("xla-compare-", 30);
}
TEST(Xla, SelectTimesThree) {
  expect_verdicts("xla-select-", 3);
}
TEST(Xla, OddDimensions) {
  expect_verdict(the("xla-odd-dimensions"));
}
TEST(Xla, BlockScaledDot) {
  expect_verdicts("xla-block-scaled-dot-", 2);
}

// ---- what is no graph ----

TEST(Xla, F32GraphDump) {
  const Plan plan = compiled_for(graph(the("xla-f32-dot").item), "h200");
  const auto dumped = ir::graph_from_json(Json::parse(plan.graph_json), "the plan's graph");
  ASSERT_TRUE(dumped.ok()) << dumped.error().message;
  ASSERT_EQ(dumped->tensors.size(), 3U);
  const std::vector<Dims> shapes{{32, 96}, {96, 64}, {32, 64}};
  const std::vector<Dims> strides{{96, 1}, {64, 1}, {64, 1}};
  for (ir::TensorId id = 0; id < 3; ++id) {
    const auto at = static_cast<std::size_t>(id);
    EXPECT_EQ(ir::Graph::uid(id), id + 1);
    EXPECT_EQ(dumped->tensor(id).dtype, DType::f32);
    EXPECT_EQ(dumped->tensor(id).shape, shapes[at]);
    EXPECT_EQ(dumped->tensor(id).strides, strides[at]);
  }
  EXPECT_EQ(dumped->input_count, 2);
  EXPECT_EQ(dumped->output_count, 1);
}

TEST(Xla, WorkspaceAllocation) {
  const ir::Graph dot = graph(the("xla-f32-dot").item);
  const auto verdict =
      planner().probe(dot, target("h200"), "cudnn", with_strength(Strength::built));
  ASSERT_TRUE(verdict.ok()) << verdict.error().message;
  const Plan plan = compiled_for(dot, "h200");
  // Whoever allocates is told the size before anything runs: the one that the plan needs.
  ASSERT_TRUE(verdict->workspace_bytes.has_value());
  EXPECT_EQ(*verdict->workspace_bytes, plan.workspace_bytes);
  EXPECT_GE(plan.workspace_bytes, 0);
}

// A plan that needs a workspace gets it from its caller, or does not run.
TEST(Xla, FusionsWithWorkspace) {
  Writer w("with workspace");
  const Value x = w.input(DType::f32, {32, 96});
  const Value inner = w.unary("tanh", w.matmul(x, w.input(DType::f32, {96, 64})));
  w.output(w.matmul(inner, w.input(DType::f32, {64, 16})));
  const ir::Graph chain = graph(std::move(w).take());
  const Device cpu = cpu_device();
  const auto plan = planner().compile(chain, cpu, "cpu", {});
  ASSERT_TRUE(plan.ok()) << plan.error().message;
  ASSERT_GT(plan->workspace_bytes, 0);
  const auto loaded = planner().load(*plan, cpu);
  ASSERT_TRUE(loaded.ok()) << loaded.error().message;
  Engine& reference = *find_engine("reference");
  auto inputs = plan::make_inputs(chain, 1, reference);
  ASSERT_TRUE(inputs.ok());
  const auto outputs = plan::make_outputs(chain);
  const auto bindings = plan::bindings_of(*inputs, outputs);
  std::vector<std::byte> workspace(static_cast<std::size_t>(plan->workspace_bytes) + 64);
  const Status without = planner().execute(*plan, **loaded, bindings, nullptr, 0, nullptr);
  ASSERT_FALSE(without.ok());
  EXPECT_EQ(without.error().kind, ErrorKind::invalid_argument);
  EXPECT_NE(without.error().message.find("workspace"), std::string::npos);
  const auto address = reinterpret_cast<std::uintptr_t>(workspace.data());
  const Status with =
      planner().execute(*plan, **loaded, bindings, workspace.data() + (64 - address % 64) % 64,
                        static_cast<std::size_t>(plan->workspace_bytes), nullptr);
  EXPECT_TRUE(with.ok()) << (with.ok() ? "" : with.error().message);
  const auto judged = judge(*find_engine("cpu"), cpu, chain, reference, {});
  ASSERT_TRUE(judged.ok()) << judged.error().message;
  EXPECT_TRUE(judged->ok()) << judged->text();
}

// The output of one plan is an operand of the next: each of them fuses, and together they compute
// what one graph of both says.
TEST(Xla, DependentFusions) {
  const auto first = [](Writer& w) {
    const Value x = w.input(DType::f32, {32, 96});
    return w.matmul(x, w.input(DType::f32, {96, 64}));
  };
  Writer one("first");
  one.output(first(one));
  Writer two("second");
  const Value x = two.input(DType::f32, {96, 32}, {1, 96});
  two.output(two.matmul(x, two.input(DType::f32, {32, 64})));
  Writer both("both");
  const Value p = both.input(DType::f32, {96, 32}, {1, 96});
  const Value product = first(both);
  both.output(product);
  both.output(both.matmul(p, product));
  const ir::Graph a = graph(std::move(one).take());
  const ir::Graph b = graph(std::move(two).take());
  const ir::Graph whole = graph(std::move(both).take());
  for (const ir::Graph* part : {&a, &b}) compiled_for(*part, "h200");

  const Device cpu = cpu_device();
  Engine& reference = *find_engine("reference");
  Engine& engine = *find_engine("cpu");
  auto inputs = plan::make_inputs(whole, 3, reference);  // p, then the two of the first product
  ASSERT_TRUE(inputs.ok());
  const auto expected =
      reference.oracle(whole, plan::bindings_of(*inputs, {}), engine.arithmetic(whole));
  ASSERT_TRUE(expected.ok());
  const auto outputs = plan::make_outputs(whole);
  const auto run = [&](const ir::Graph& part, std::vector<void*> data) {
    const auto plan = planner().compile(part, cpu, "cpu", {});
    ASSERT_TRUE(plan.ok()) << plan.error().message;
    const auto loaded = planner().load(*plan, cpu);
    ASSERT_TRUE(loaded.ok()) << loaded.error().message;
    std::vector<Binding> bindings;
    for (std::size_t i = 0; i < data.size(); ++i) {
      bindings.push_back({ir::Graph::uid(static_cast<ir::TensorId>(i)), data[i]});
    }
    std::vector<std::byte> workspace(static_cast<std::size_t>(plan->workspace_bytes) + 64);
    const auto address = reinterpret_cast<std::uintptr_t>(workspace.data());
    const Status done =
        planner().execute(*plan, **loaded, bindings, workspace.data() + (64 - address % 64) % 64,
                          static_cast<std::size_t>(plan->workspace_bytes), nullptr);
    ASSERT_TRUE(done.ok()) << done.error().message;
  };
  run(a, {(*inputs)[1].data(), (*inputs)[2].data(), outputs[0].data()});
  run(b, {(*inputs)[0].data(), outputs[0].data(), outputs[1].data()});
  const auto compared = plan::compare(whole, outputs, *expected);
  EXPECT_TRUE(compared.ok()) << compared.text();
}

// XLA's "autotune level 0": nothing is timed, nobody else is asked, the choice is always the same.
TEST(Xla, NoForeignEngineAtAutotuneLevel0) {
  const ir::Graph dot = graph(the("xla-f32-dot").item);
  Options off;
  off.tuning = Tuning::off;
  const Plan first = compiled_for(dot, "h200", off);
  EXPECT_EQ(first.engine, "cudnn");
  EXPECT_FALSE(first.plan_id.empty());
  Planner second{config()};
  const auto again = second.compile(dot, target("h200"), "cudnn", off);
  ASSERT_TRUE(again.ok()) << again.error().message;
  EXPECT_EQ(again->engine, "cudnn");
  EXPECT_EQ(again->plan_id, first.plan_id);
  EXPECT_EQ(again->plan_name, first.plan_name);
}

TEST(Xla, DevicelessCompileSucceeds) {
  const Plan plan = compiled_for(graph(the("xla-f32-dot").item), "h200");
  EXPECT_FALSE(plan.bytes.empty());
  EXPECT_EQ(plan.target, "h200");
  EXPECT_EQ(plan.engine, "cudnn");
}

// The live half is lawson-agreement's ("bitwise"): here, that the binary does not depend on who
// made it. What is judged has the id of what is compiled.
TEST(Xla, DevicelessBinaryMatches) {
  const ir::Graph dot = graph(the("xla-f32-dot").item);
  const Plan plan = compiled_for(dot, "h200");
  const auto verdict =
      planner().probe(dot, target("h200"), "cudnn", with_strength(Strength::built));
  ASSERT_TRUE(verdict.ok()) << verdict.error().message;
  EXPECT_EQ(verdict->plan_id, plan.plan_id);
  EXPECT_EQ(verdict->key, plan.key);
  Planner second{config()};
  const auto again = second.compile(dot, target("h200"), "cudnn", {});
  ASSERT_TRUE(again.ok()) << again.error().message;
  EXPECT_EQ(again->plan_id, plan.plan_id);
  EXPECT_EQ(again->bytes.size(), plan.bytes.size());
  EXPECT_EQ(again->graph_json, plan.graph_json);
}

// A matmul has one precision and no algorithm to ask for: who asks is told so, by name.
TEST(Xla, RefusesNonDefaultPrecisionAndAlgorithm) {
  for (const auto& [field, value] : std::vector<std::pair<std::string, Json>>{
           {"operand_precision", {"high", "high"}}, {"algorithm", "dot_bf16_bf16_f32"}}) {
    Case item = the("xla-f32-dot").item;
    item.spec["ops"][0][field] = value;
    const auto refused = graph_of(item);
    ASSERT_FALSE(refused.ok()) << field;
    EXPECT_EQ(refused.error().kind, ErrorKind::invalid_argument);
    EXPECT_NE(refused.error().message.find(field), std::string::npos) << refused.error().message;
  }
}

// f64 is no type of cuDNN's fusions, and its cuBLASLt engine takes no negated operand.
TEST(Xla, DoesNotExecuteWhenNotSupported) {
  const XlaCase& item = the("xla-f64-not-supported");
  expect_verdict(item);
  const auto plan = planner().compile(graph(item.item), target("h200"), "cudnn", {});
  ASSERT_FALSE(plan.ok());
  EXPECT_EQ(plan.error().kind, ErrorKind::unsupported);
  ASSERT_FALSE(plan.error().reasons.empty());
  EXPECT_NE(text(plan.error().reasons).find("f64"), std::string::npos);
}

// Where XLA's autotuner has to prefer cuDNN, cuDNN is all that Lawson takes.
TEST(Xla, AutotuningPicksCudnnForS8Bf16OnHopper) {
  const XlaCase& item = the("xla-autotuning-s8-bf16");
  expect_verdict(item);
  Options quick;
  quick.tuning = Tuning::quick;
  const auto tuned = planner().compile(graph(item.item), target("h200"), "", quick);
  ASSERT_TRUE(tuned.ok()) << tuned.error().message;
  EXPECT_EQ(tuned->engine, "cudnn");
}

// ---- judged is not built ----

Verdict probed(const ir::Graph& what, Strength strength) {
  auto verdict = planner().probe(what, target("h200"), "cudnn", with_strength(strength));
  EXPECT_TRUE(verdict.ok()) << (verdict.ok() ? "" : verdict.error().message);
  return verdict.ok() ? std::move(*verdict) : Verdict{};
}

void expect_not_built(const ir::Graph& what) {
  const Verdict built = probed(what, Strength::built);
  EXPECT_EQ(built.decision, Decision::unsupported);
  ASSERT_FALSE(built.reasons.empty());
  // The plan's own: what was tried, and why it did not become a kernel.
  EXPECT_TRUE(std::any_of(built.reasons.begin(), built.reasons.end(), [](const Reason& reason) {
    return reason.code == "kernel_does_not_compile" ||
           reason.message.find("ngine") != std::string::npos;
  })) << text(built.reasons);
  const auto plan = planner().compile(what, target("h200"), "cudnn", {});
  ASSERT_FALSE(plan.ok());
  EXPECT_EQ(plan.error().kind, ErrorKind::unsupported);
  EXPECT_FALSE(plan.error().reasons.empty());
}

TEST(JudgedNotBuilt, ProductOfAProduct) {
  Writer w("chain");
  const Value x = w.input(DType::bf16, {64, 64});
  const Value inner = w.matmul(x, w.input(DType::bf16, {64, 64}));
  w.output(w.matmul(inner, w.input(DType::bf16, {64, 64})));
  expect_not_built(graph(std::move(w).take()));
}

TEST(JudgedNotBuilt, InnerStrideTwo) {
  Writer w("inner stride 2");
  const Value x = w.input(DType::bf16, {64, 64}, {128, 2});
  w.output(w.matmul(x, w.input(DType::bf16, {64, 64}), DType::f32));
  expect_not_built(graph(std::move(w).take()));
}

TEST(Undecided, F64AndMixedHalves) {
  for (const auto& [a, b] : {std::pair{DType::f64, DType::f64}, {DType::bf16, DType::f16}}) {
    Writer w("live only");
    const Value x = w.input(a, {64, 64});
    w.output(w.matmul(x, w.input(b, {64, 64})));
    const Verdict verdict = probed(graph(std::move(w).take()), Strength::built);
    EXPECT_EQ(verdict.decision, Decision::undecided) << to_string(a) << " x " << to_string(b);
    EXPECT_EQ(verdict.engine, "cudnn");
    ASSERT_FALSE(verdict.reasons.empty());
    EXPECT_NE(verdict.reasons[0].message.find("cuBLASLt"), std::string::npos)
        << verdict.reasons[0].message;
  }
}

// ---- what XLA's tests leave out ----

TEST(LeftOut, BiasAndEveryActivation) {
  expect_verdicts("own-bias-", 10);
}
TEST(LeftOut, EveryActivationsBackward) {
  expect_verdicts("own-backward-", 10);
}
TEST(LeftOut, EveryReduction) {
  expect_verdicts("own-reduce-", 24);
}

TEST(LeftOut, PlansArePerDevice) {
  const ir::Graph dot = graph(the("xla-s8-bf16").item);
  std::set<std::string> keys;
  std::set<std::string> ids;
  for (const char* name : {"a100", "h200", "b200"}) {
    const Plan plan = compiled_for(dot, name);
    EXPECT_EQ(plan.target, name);
    keys.insert(plan.key);
    ids.insert(plan.plan_id);
    // It is no plan for the processor here.
    const auto loaded = planner().load(plan, cpu_device());
    ASSERT_FALSE(loaded.ok());
    EXPECT_EQ(loaded.error().kind, ErrorKind::invalid_argument) << loaded.error().message;
  }
  EXPECT_EQ(keys.size(), 3U);
  EXPECT_EQ(ids.size(), 3U);
}

// The cap holds for what is chosen, or nothing is.
TEST(LeftOut, WorkspaceCaps) {
  int capped = 0;
  for (const char* name :
       {"xla-f32-dot", "xla-s8-bf16", "own-reduce-sum-012", "own-reduce-sum-1"}) {
    const ir::Graph what = graph(the(name).item);
    Options options = with_strength(Strength::built);
    const auto free_choice = planner().probe(what, target("h200"), "cudnn", options);
    ASSERT_TRUE(free_choice.ok()) << free_choice.error().message;
    for (const std::int64_t limit : {std::int64_t{0}, std::int64_t{4096}}) {
      options.workspace_limit = limit;
      const auto verdict = planner().probe(what, target("h200"), "cudnn", options);
      ASSERT_TRUE(verdict.ok()) << verdict.error().message;
      ++capped;
      if (verdict->decision == Decision::supported) {
        ASSERT_TRUE(verdict->workspace_bytes.has_value());
        EXPECT_LE(*verdict->workspace_bytes, limit) << name;
        const auto plan = planner().compile(what, target("h200"), "cudnn", options);
        ASSERT_TRUE(plan.ok()) << plan.error().message;
        EXPECT_LE(plan->workspace_bytes, limit) << name;
        continue;
      }
      EXPECT_TRUE(std::any_of(verdict->reasons.begin(), verdict->reasons.end(),
                              [](const Reason& reason) {
                                return reason.message.find("workspace") != std::string::npos;
                              }))
          << name << "\n"
          << text(verdict->reasons);
      EXPECT_GT(free_choice->workspace_bytes.value_or(0), limit) << name;
    }
  }
  EXPECT_EQ(capped, 8);
}

// The same answers, however many ask at once, and one plan for all of them.
TEST(LeftOut, Concurrency) {
  const std::vector<std::string> names{"xla-f32-dot",   "xla-s8-bf16",    "xla-clamp",
                                       "xla-constants", "xla-rhs-fusion", "xla-f16-negate"};
  std::map<std::string, std::string> alone;
  for (const std::string& name : names) {
    alone[name] = probed(graph(the(name).item), Strength::judged).key;
  }
  std::atomic<int> wrong{0};
  {
    std::vector<std::jthread> threads;
    for (std::size_t t = 0; t < 6; ++t) {
      threads.emplace_back([&, t] {
        for (std::size_t i = 0; i < names.size(); ++i) {
          const std::string& name = names[(i + t) % names.size()];
          const auto verdict = planner().probe(graph(the(name).item), target("h200"), "cudnn", {});
          const bool same = verdict.ok() && verdict->decision == Decision::supported &&
                            verdict->key == alone[name] && verdict->engine == "cudnn";
          if (!same) ++wrong;
        }
      });
    }
  }
  EXPECT_EQ(wrong.load(), 0);

  const ir::Graph dot = graph(the("xla-s8-bf16").item);
  std::vector<const Loaded*> plans(8);
  {
    std::vector<std::jthread> threads;
    for (const Loaded*& plan : plans) {
      threads.emplace_back([&] {
        const auto loaded = planner().acquire(dot, cpu_device(), "cpu", {}, nullptr);
        if (loaded.ok()) plan = loaded->get();
      });
    }
  }
  for (const Loaded* plan : plans) {
    ASSERT_NE(plan, nullptr);
    EXPECT_EQ(plan, plans[0]);
  }
}

// What ran is written in the plan, and is what was asked for.
TEST(LeftOut, WhichBackendReallyRan) {
  const ir::Graph dot = graph(the("xla-s8-bf16").item);
  const Device cpu = cpu_device();
  for (const std::string name : {"cpu", "reference"}) {
    const auto loaded = planner().acquire(dot, cpu, name, {}, nullptr);
    ASSERT_TRUE(loaded.ok()) << loaded.error().message;
    EXPECT_EQ((*loaded)->plan().engine, name);
    EXPECT_EQ((*loaded)->plan().target, cpu.name);
  }
  // cuDNN on the processor is no engine that falls back to another one.
  const auto verdict = planner().probe(dot, cpu, "cudnn", {});
  ASSERT_TRUE(verdict.ok()) << verdict.error().message;
  EXPECT_EQ(verdict->decision, Decision::unsupported);
  EXPECT_EQ(verdict->engine, "cudnn");
  EXPECT_FALSE(planner().compile(dot, cpu, "cudnn", {}).ok());
}

TEST(LeftOut, EveryErrorHasItsCategory) {
  const ir::Graph dot = graph(the("xla-f32-dot").item);
  const auto kind_of = [](const auto& result) {
    return result.ok() ? std::string{"none"} : std::string{to_string(result.error().kind)};
  };
  const std::string invalid_argument{to_string(ErrorKind::invalid_argument)};
  EXPECT_EQ(kind_of(planner().compile(dot, target("h200"), "cublas", {})), invalid_argument);
  // No GPU is present where only a target is named.
  Options verified = with_strength(Strength::verified);
  EXPECT_EQ(kind_of(planner().probe(dot, target("h200"), "cudnn", verified)),
            std::string{to_string(ErrorKind::unavailable)});
  // A worker that is not there is no "no".
  plan::PlannerConfig broken = config();
  broken.worker_path = "/nowhere/lawson-worker";
  Planner without{std::move(broken)};
  EXPECT_EQ(kind_of(without.probe(dot, target("h200"), "cudnn", {})),
            std::string{to_string(ErrorKind::unavailable)});
  // A plan that was cut short, or is of somebody else.
  Plan plan = compiled_for(dot, "h200");
  const auto bytes = plan_to_bytes(plan);
  const auto cut = plan_from_bytes(std::span(bytes).first(bytes.size() / 2));
  EXPECT_EQ(kind_of(cut), invalid_argument);
  Case shapes = the("xla-f32-dot").item;
  shapes.spec["inputs"][1]["shape"] = {95, 64};
  EXPECT_EQ(kind_of(graph_of(shapes)), invalid_argument);
}

}  // namespace
}  // namespace lawson::cases
