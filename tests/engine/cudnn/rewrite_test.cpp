// The attention rewrites are exact: steps before, cuDNN's attention (native_model.h), steps after
// give what the reference engine says of the graph as it was, for generated graphs of every
// feature, every variant and the defect table's repairs of several devices.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "cases/cases.h"
#include "engine/cudnn/native_model.h"
#include "engine/cudnn/step_cases.h"
#include "engine/reference/reference.h"
#include "plan/verify.h"

namespace lawson::cudnn {
namespace {

constexpr std::size_t kGuard = 64;
constexpr std::byte kGuardByte{0xC3};
constexpr std::byte kPoison{0xFF};
constexpr int kCases = 5000;
// Larger cases say nothing more about a rewrite.
constexpr std::int64_t kMostProducts = 250'000;
constexpr std::int64_t kMostBytes = 400'000;

struct Target {
  int compute_capability;
  int cudnn_version;
  bool dense_stats;
};
constexpr std::array kTargets{Target{900, 91900, false}, Target{800, 91900, true},
                              Target{1000, 91900, false}, Target{900, 92500, false}};

// Memory of Lawson's own tensors and scalars.
struct Own {
  std::vector<std::byte> bytes;
  std::size_t size = 0;

  explicit Own(std::size_t count) : bytes(count + 2 * kGuard, kGuardByte), size{count} {
    std::fill_n(data(), size, kPoison);
  }
  std::byte* data() { return bytes.data() + kGuard; }
  bool guards_intact() const {
    const auto intact = [](std::byte b) { return b == kGuardByte; };
    const auto end = bytes.begin() + static_cast<std::ptrdiff_t>(kGuard + size);
    return std::all_of(bytes.begin(), bytes.begin() + kGuard, intact) &&
           std::all_of(end, bytes.end(), intact);
  }
};

// A graph with its data and what should come out.
struct Problem {
  ir::Graph graph;
  AttentionFacts facts;
  std::vector<plan::Buffer> inputs;
  std::vector<std::vector<std::byte>> given;  // the inputs' bytes
  std::vector<OracleOutput> expected;
};

bool is_small(const ir::Graph& graph, const AttentionFacts& facts) {
  std::int64_t bytes = 0;
  for (ir::TensorId id = 0; id < graph.input_count + graph.output_count; ++id) {
    const ir::Tensor& tensor = graph.tensor(id);
    if (element_count(tensor.shape).value_or(0) == 0) return false;
    bytes += static_cast<std::int64_t>(
        byte_size(tensor.dtype, storage_extent(tensor.shape, tensor.strides).value_or(0)));
  }
  const std::int64_t depth = facts.d_qk + facts.d_v;
  return bytes <= kMostBytes &&
         facts.batch * facts.heads * facts.s_q * facts.s_kv * depth <= kMostProducts;
}

// nullopt: too large, nothing to compute, or of no type that cuDNN takes.
std::optional<Problem> problem_of(const cases::Case& item, Engine& reference) {
  auto graph = cases::graph_of(item);
  if (!graph.ok()) {
    ADD_FAILURE() << item.text() << ": " << graph.error().message;
    return std::nullopt;
  }
  Problem problem;
  problem.graph = std::move(graph).value();
  problem.facts = *attention_facts(problem.graph);
  const DType dtype = problem.facts.dtype;
  if (dtype != DType::f16 && dtype != DType::bf16 && dtype != DType::f32) return std::nullopt;
  if (!is_small(problem.graph, problem.facts)) return std::nullopt;
  auto inputs = plan::make_inputs(problem.graph, item.seed, reference, item.style);
  if (!inputs.ok()) {
    ADD_FAILURE() << item.text() << ": " << inputs.error().message;
    return std::nullopt;
  }
  problem.inputs = std::move(inputs).value();
  for (const plan::Buffer& buffer : problem.inputs) {
    problem.given.emplace_back(buffer.data(), buffer.data() + buffer.bytes());
  }
  // What is rounded here: results to their types, what the steps compute in f32, and the gradient
  // of a bias, which cuDNN writes in the type of the values.
  Arithmetic arithmetic;
  arithmetic.accumulate_roundoff = arithmetic.function_roundoff = 0x1p-24;
  arithmetic.partial_roundoff = unit_roundoff(problem.facts.dtype);
  if (problem.facts.dtype == DType::f16) arithmetic.probability_roundoff = 0x1p-11;
  auto expected =
      reference.oracle(problem.graph, plan::bindings_of(problem.inputs, {}), arithmetic);
  if (!expected.ok()) {
    ADD_FAILURE() << item.text() << ": " << expected.error().message;
    return std::nullopt;
  }
  problem.expected = std::move(expected).value();
  return problem;
}

// A NaN where the oracle would take any number: the statistics of rows that no sequence has may be
// anything.
std::string stray_nan(const ir::Graph& graph, const plan::Buffer& buffer,
                      const OracleOutput& expected) {
  const ir::Tensor& tensor = graph.tensor(buffer.id());
  if (tensor.name == "stats" || tensor.name == "max_logit") return "";
  const Dims& box = expected.there.empty() ? tensor.shape : expected.there;
  if (element_count(box).value_or(0) == 0) return "";
  const Dims logical = contiguous_strides(tensor.shape);
  Dims index(box.size(), 0);
  do {
    const auto position = static_cast<std::size_t>(offset_of(index, logical));
    const double got = load_element(buffer.data(), tensor.dtype, offset_of(index, tensor.strides));
    if (std::isnan(got) && !std::isnan(expected.values[position])) {
      return fmt::format("{} is NaN at {}", tensor.name, to_string(index));
    }
  } while (next_index(index, box));
  return "";
}

// One execution as LoadedPlan::run does it. `skipped`: the step that is left out.
class Execution {
 public:
  Execution(const Problem& problem, const NativeAttention& native)
      : problem_{problem}, native_{native}, outputs_{plan::make_outputs(problem.graph)} {
    for (std::size_t i = 0; i < problem.inputs.size(); ++i) {
      const plan::Buffer& buffer = problem.inputs[i];
      std::copy(problem.given[i].begin(), problem.given[i].end(), buffer.data());
      places_[buffer.binding().uid] = buffer.data();
    }
    for (const plan::Buffer& buffer : outputs_) {
      const ir::TensorId input = ir::shared_memory_input(problem.graph, buffer.id());
      places_[buffer.binding().uid] = input == ir::kNone
                                          ? buffer.data()
                                          : problem.inputs[static_cast<std::size_t>(input)].data();
    }
    for (const OwnTensor& tensor : native.supplies.own) {
      own_.emplace_back(static_cast<std::size_t>(tensor.bytes));
      EXPECT_TRUE(places_.emplace(tensor.uid, own_.back().data()).second) << "uid is taken";
    }
    for (const OwnScalar& scalar : native.supplies.scalars) {
      own_.emplace_back(byte_size(scalar.dtype, 1));
      store_element(own_.back().data(), scalar.dtype, 0, scalar.value);
      EXPECT_TRUE(places_.emplace(scalar.uid, own_.back().data()).second) << "uid is taken";
    }
  }

  // What is wrong, or "".
  std::string run(const Step* skipped = nullptr) {
    const Supplies& supplies = native_.supplies;
    if (Status status = steps(supplies.before, skipped); !status.ok())
      return status.error().message;
    for (std::size_t i = 0; i < supplies.own.size(); ++i) {
      if (supplies.own[i].zero) std::fill_n(own_[i].data(), own_[i].size, std::byte{0});
    }
    if (Status status = cases::run_native(native_, places_); !status.ok()) {
      return status.error().message;
    }
    if (Status status = steps(supplies.after, skipped); !status.ok()) return status.error().message;
    return difference();
  }

 private:
  Status steps(const std::vector<Step>& all, const Step* skipped) {
    for (const Step& step : all) {
      if (&step == skipped) continue;
      std::vector<void*> pointers;
      for (const std::int64_t uid : step_uids(step)) {
        const auto found = places_.find(uid);
        pointers.push_back(found == places_.end() ? nullptr : found->second);
      }
      LAWSON_CHECK(cases::run_on_host(step, pointers));
    }
    return {};
  }

  std::string difference() {
    const ir::Graph& graph = problem_.graph;
    std::set<ir::TensorId> appended;
    for (const plan::Buffer& output : outputs_) {
      const ir::TensorId input = ir::shared_memory_input(graph, output.id());
      if (input == ir::kNone) continue;
      appended.insert(input);
      std::copy_n(problem_.inputs[static_cast<std::size_t>(input)].data(), output.bytes(),
                  output.data());
    }
    for (std::size_t i = 0; i < problem_.inputs.size(); ++i) {
      const plan::Buffer& buffer = problem_.inputs[i];
      const std::string& name = graph.tensor(buffer.id()).name;
      if (!buffer.guards_intact()) return fmt::format("memory beside {} was written", name);
      if (appended.contains(buffer.id())) continue;
      if (!std::equal(problem_.given[i].begin(), problem_.given[i].end(), buffer.data())) {
        return fmt::format("{} was written", name);
      }
    }
    for (std::size_t i = 0; i < own_.size(); ++i) {
      if (!own_[i].guards_intact())
        return fmt::format("memory beside own tensor {} was written", i);
    }
    const plan::Comparison comparison = plan::compare(graph, outputs_, problem_.expected);
    if (!comparison.ok()) return comparison.text();
    for (std::size_t i = 0; i < outputs_.size(); ++i) {
      std::string nan = stray_nan(graph, outputs_[i], problem_.expected[i]);
      if (!nan.empty()) return nan;
    }
    return "";
  }

  const Problem& problem_;
  const NativeAttention& native_;
  std::vector<plan::Buffer> outputs_;
  std::vector<Own> own_;
  cases::Places places_;
};

// Head dims say little about a rewrite and cost the most.
void shrink(Json& spec) {
  if (spec.contains("strides")) return;
  const std::int64_t deep = spec.at("head_dim_qk").get<std::int64_t>();
  const bool equal = spec.value("head_dim_v", deep) == deep;
  spec["head_dim_qk"] = 8;
  spec["head_dim_v"] = equal ? 8 : 16;
}

std::vector<cases::Case> all_cases() {
  std::vector<cases::Case> list = cases::attention_cases(2026, kCases, cases::Profile::gpu);
  for (auto& more :
       {cases::attention_cases(2027, kCases, cases::Profile::any), cases::edge_cases()}) {
    list.insert(list.end(), more.begin(), more.end());
  }
  for (cases::Case& item : list) shrink(item.spec);
  return list;
}

class Rewrites : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    reference_ = make_reference_engine();
    cases_ = all_cases();
  }
  static void TearDownTestSuite() {
    cases_.clear();
    reference_.reset();
  }

  // `visit(problem, native, text)` for every rewrite of every case.
  template <typename Visit>
  static void each(std::size_t first, std::size_t step, const Visit& visit) {
    for (std::size_t i = first; i < cases_.size(); i += step) {
      const auto problem = problem_of(cases_[i], *reference_);
      if (!problem) continue;
      const Target& target = kTargets[i % kTargets.size()];
      Device device;
      device.kind = Device::Kind::cuda;
      device.compute_capability = target.compute_capability;
      RewriteOptions options;
      options.repairs = repairs_for(problem->graph, device, target.cudnn_version);
      options.dense_stats = target.dense_stats;
      for (const Variant variant : kVariants) {
        options.variant = variant;
        const auto native = rewrite_attention(problem->graph, problem->facts, options);
        if (!native.ok()) {
          EXPECT_EQ(native.error().kind, ErrorKind::unsupported) << native.error().message;
          continue;
        }
        if (!*native || !cases::refused_by_frontend(**native).empty()) continue;
        if (const auto& stats = (*native)->tensors[NativeAttention::stats];
            target.dense_stats && problem->facts.backward) {
          EXPECT_EQ(stats->offsets_uid, 0) << cases_[i].text();
        }
        visit(*problem, **native,
              fmt::format("{}, variant {}, {} / {}: {}", cases_[i].text(), int(variant),
                          target.compute_capability, target.cudnn_version,
                          fmt::join((*native)->rewrites, ", ")));
        if (testing::Test::HasFailure() && ++failures_ > 8) return;
      }
    }
  }

  static inline std::shared_ptr<Engine> reference_;
  static inline std::vector<cases::Case> cases_;
  static inline int failures_ = 0;
};

TEST_F(Rewrites, AreExact) {
  std::set<std::string> seen;
  int runs = 0;
  each(0, 1, [&](const Problem& problem, const NativeAttention& native, const std::string& text) {
    EXPECT_EQ(Execution(problem, native).run(), "") << text;
    seen.insert(native.rewrites.begin(), native.rewrites.end());
    ++runs;
  });
  EXPECT_GT(runs, 3000);
  for (const char* name : {"alibi_as_bias",         "alibi_slopes_as_bias",
                           "bias_expanded",         "bias_gradient_reduced",
                           "bool_mask_as_bias",     "bottom_right_as_shifted_bounds",
                           "bounds_as_bias",        "cache_append",
                           "dropout_mask_as_bytes", "dropout_mask_as_values",
                           "empty_rows_cleared",    "full_lengths",
                           "gaps_zeroed",           "lengths_of_cu_seqlens",
                           "mask_as_bias",          "off_by_one_as_zero_sink",
                           "pre_scale_bias_folded", "ragged_stats_as_dense",
                           "sink_gradient_scaled",  "stats_of_max_and_sum",
                           "unseen_keys_cleared"}) {
    EXPECT_TRUE(seen.contains(name)) << name;
  }
}

// The comparison notices each kind of step that is left out, so that it could notice a wrong one.
TEST_F(Rewrites, EachStepIsNeeded) {
  std::map<std::string, int> needed;
  each(0, 7, [&](const Problem& problem, const NativeAttention& native, const std::string&) {
    for (const auto* steps : {&native.supplies.before, &native.supplies.after}) {
      for (const Step& step : *steps) {
        needed[std::string{step_name(step)}] += !Execution(problem, native).run(&step).empty();
      }
    }
  });
  for (const char* name : {"ragged", "score_bias", "masked_rows", "clear_rows", "stats_of_rows",
                           "reduce_bias_gradient", "zero_gaps", "cache_append", "convert_mask"}) {
    EXPECT_GT(needed[name], 0) << name;
  }
}

}  // namespace
}  // namespace lawson::cudnn
