// What the steps of context parallelism are, and what is refused. That they compute the right
// thing: context_parallel_oracle_test.cpp.
#include "front/context_parallel.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "front/spec.h"

namespace lawson::front {
namespace {

using enum CpStrategy;

AttentionSpec base(const std::string& mask = "none") {
  AttentionSpec spec;
  spec.batch = 2;
  spec.heads = 16;
  spec.kv_heads = 4;
  spec.seqlen_q = spec.seqlen_kv = 4096;
  spec.head_dim_qk = spec.head_dim_v = 128;
  spec.mask = mask;
  return spec;
}

AttentionSpec ragged(const std::string& mask = "padding_causal") {
  AttentionSpec spec = base(mask);
  spec.layout = "thd";
  spec.total_q = spec.total_kv = 8192;
  return spec;
}

std::vector<CpStep> steps_of(const AttentionSpec& spec, CpStrategy strategy, std::int64_t size,
                             std::int64_t rank) {
  auto steps = cp_step_configs(spec, strategy, size, rank);
  EXPECT_TRUE(steps.ok()) << steps.error().message;
  return steps.ok() ? *steps : std::vector<CpStep>{};
}

// [rows x columns, mask, window]
std::string shape(const AttentionSpec& spec) {
  return fmt::format("{}x{} {} [{}, {}]", spec.seqlen_q, spec.seqlen_kv, spec.mask,
                     spec.window_left, spec.window_right);
}

std::vector<std::string> shapes(const std::vector<CpStep>& steps) {
  std::vector<std::string> all;
  for (const CpStep& step : steps) all.push_back(shape(step.spec));
  return all;
}

using Shapes = std::vector<std::string>;

TEST(ContextParallel, CausalRingIsDiagonalThenLowerThenUpper) {
  const std::string diagonal = "1024x1024 causal [-1, -1]";
  const std::string lower = "1024x512 none [-1, -1]";
  const std::string upper = "512x1024 none [-1, -1]";
  EXPECT_EQ(shapes(steps_of(base("causal"), ring, 4, 0)), (Shapes{diagonal, upper, upper, upper}));
  EXPECT_EQ(shapes(steps_of(base("causal"), ring, 4, 1)), (Shapes{diagonal, lower, upper, upper}));
  EXPECT_EQ(shapes(steps_of(base("causal"), ring, 4, 3)), (Shapes{diagonal, lower, lower, lower}));
}

TEST(ContextParallel, RingKeepsPaddingAndGivesStats) {
  const auto steps = steps_of(base("padding_causal"), ring, 4, 1);
  EXPECT_EQ(shapes(steps), (Shapes{"1024x1024 padding_causal [-1, -1]", "1024x512 padding [-1, -1]",
                                   "512x1024 padding [-1, -1]", "512x1024 padding [-1, -1]"}));
  for (const CpStep& step : steps) EXPECT_TRUE(step.spec.return_stats);
}

TEST(ContextParallel, FullRingHasOneKindOfStep) {
  AttentionSpec cross = base();
  cross.seqlen_q = 4;  // cross attention, and no two chunks for each rank
  EXPECT_EQ(shapes(steps_of(cross, ring, 4, 2)), Shapes(4, "1x1024 none [-1, -1]"));
  EXPECT_EQ(shapes(steps_of(base("padding"), ring, 2, 1)), Shapes(2, "2048x2048 padding [-1, -1]"));
}

TEST(ContextParallel, AllGatherCutsKvToWhatTheChunkSees) {
  EXPECT_EQ(shapes(steps_of(base(), all_gather, 4, 1)), Shapes(2, "512x4096 none [-1, -1]"));
  EXPECT_EQ(
      shapes(steps_of(base("causal"), all_gather, 4, 1)),
      (Shapes{"512x1024 causal_bottom_right [-1, -1]", "512x3584 causal_bottom_right [-1, -1]"}));
  AttentionSpec window = base("causal");
  window.window_left = 600;
  EXPECT_EQ(
      shapes(steps_of(window, all_gather, 4, 0)),
      (Shapes{"512x512 causal_bottom_right [600, 0]", "512x1112 causal_bottom_right [600, 0]"}));
}

// Chunk 3 of 8 is rows 1536 to 2047, chunk 7 the last; chunk 4 sees 100 columns to its left and 50
// to its right.
TEST(ContextParallel, AllGatherMovesAWindowWithTwoSides) {
  AttentionSpec window = base();
  window.window_left = 100;
  window.window_right = 50;
  EXPECT_EQ(shapes(steps_of(window, all_gather, 4, 3)),
            (Shapes(2, "512x662 causal_bottom_right [150, 0]")));
  EXPECT_EQ(shapes(steps_of(window, all_gather, 4, 0)),
            (Shapes{"512x562 causal_bottom_right [150, 0]", "512x612 none [0, 150]"}));
  window.mask = "padding";  // the end of a sequence is its own
  EXPECT_EQ(shapes(steps_of(window, all_gather, 4, 3)), Shapes(2, "512x662 padding [0, 150]"));
}

TEST(ContextParallel, AllToAllHasAllOfTheSequence) {
  AttentionSpec spec = base("causal");
  spec.bias = BiasKind::post_scale;
  spec.bias_shape = {1, 16, 4096, 4096};
  const auto steps = steps_of(spec, all_to_all, 4, 2);
  EXPECT_EQ(shapes(steps), Shapes{"4096x4096 causal [-1, -1]"});
  EXPECT_EQ(steps[0].spec.heads, 4);
  EXPECT_EQ(steps[0].spec.kv_heads, 1);
  EXPECT_EQ(steps[0].spec.bias_shape, (Dims{1, 4, 4096, 4096}));
  EXPECT_FALSE(steps[0].spec.return_stats);
}

TEST(ContextParallel, AllToAllGivesEachRankItsSlopes) {
  AttentionSpec spec = base();
  spec.heads = spec.kv_heads = 4;
  spec.bias = BiasKind::alibi;
  EXPECT_TRUE(steps_of(spec, all_to_all, 2, 1)[0].spec.alibi_slopes);
  spec.alibi_slopes = true;
  spec.alibi_slope_values = {1, 2, 3, 4};
  EXPECT_EQ(steps_of(spec, all_to_all, 2, 1)[0].spec.alibi_slope_values,
            (std::vector<double>{3, 4}));
}

TEST(ContextParallel, RaggedTokensAreCutAsTheSequencesAre) {
  const auto steps = steps_of(ragged(), ring, 4, 1);
  ASSERT_EQ(steps.size(), 4U);
  EXPECT_EQ(steps[0].spec.total_q, 2048);
  EXPECT_EQ(steps[0].spec.total_kv, 2048);
  EXPECT_EQ(steps[1].spec.total_kv, 1024);
  EXPECT_EQ(steps[2].spec.total_q, 1024);
  EXPECT_EQ(steps[2].spec.total_kv, 2048);
}

TEST(ContextParallel, RaggedAllGatherPassesWholeTensors) {
  AttentionSpec spec = ragged();
  spec.total_q = spec.total_kv = 0;  // batch * seqlen
  for (const CpStep& step : steps_of(spec, all_gather, 4, 1)) {
    EXPECT_EQ(shape(step.spec), "512x4096 padding_causal_bottom_right [-1, -1]");
    EXPECT_EQ(step.spec.total_q, 2048);  // both chunks of the rank
    EXPECT_EQ(step.spec.total_kv, 0);
    EXPECT_TRUE(step.spec.has_padded_offsets);
  }
}

TEST(ContextParallel, TensorsOfAStepAreTheirOwn) {
  AttentionSpec spec = base();
  spec.kv_heads = spec.heads;
  spec.layout = "sbh3d";
  EXPECT_EQ(steps_of(spec, ring, 2, 0)[0].spec.layout, "sbhd");
  spec.layout = "sbhd_bshd_bshd";
  EXPECT_EQ(steps_of(spec, ring, 2, 0)[0].spec.layout, "sbhd_bshd_bshd");
}

TEST(ContextParallel, AllElseIsKept) {
  AttentionSpec spec = base("causal");
  spec.pass = Pass::training;
  spec.dropout = 0.1;
  spec.softcap = 30;
  spec.deterministic = true;
  spec.scale = 0.5;
  spec.return_max_logit = true;
  spec.cuda_graph = true;
  spec.context_parallel = ContextParallel{ring, 4};
  for (const CpStep& step : steps_of(spec, ring, 4, 2)) {
    AttentionSpec expected = spec;
    expected.context_parallel.reset();
    expected.name = step.name;
    expected.seqlen_q = step.spec.seqlen_q;
    expected.seqlen_kv = step.spec.seqlen_kv;
    expected.mask = step.spec.mask;
    expected.return_stats = true;
    EXPECT_EQ(step.spec, expected);
  }
}

TEST(ContextParallel, OneRankSplitsNothing) {
  AttentionSpec spec = base("causal");
  spec.softmax = ir::SoftmaxKind::learnable;
  spec.seqlen_q = spec.seqlen_kv = 17;
  spec.strides["q"] = {1 << 20, 128, 4096, 1};
  for (const CpStrategy strategy : {ring, all_gather, all_to_all}) {
    const auto steps = steps_of(spec, strategy, 1, 0);
    ASSERT_EQ(steps.size(), 1U);
    AttentionSpec expected = spec;
    expected.name = steps[0].name;
    EXPECT_EQ(steps[0].spec, expected);
  }
}

TEST(ContextParallel, StepsHaveReadableNames) {
  const auto steps = steps_of(base("causal"), ring, 4, 1);
  EXPECT_EQ(steps[2].name, "ring step 2 of rank 1");
  EXPECT_EQ(steps[2].rank, 1);
  EXPECT_EQ(steps[2].step, 2);
  EXPECT_EQ(steps_of(base(), all_gather, 2, 1)[1].name, "all-gather step 1 of rank 1");
  EXPECT_EQ(steps_of(base(), all_to_all, 2, 1)[0].name, "all-to-all step 0 of rank 1");
}

// ---- refusals -----------------------------------------------------------------------------------

std::map<std::string, std::string> refused(const AttentionSpec& spec, CpStrategy strategy,
                                           std::int64_t size = 4) {
  const auto steps = cp_step_configs(spec, strategy, size, 0);
  std::map<std::string, std::string> fields;
  if (steps.ok()) return fields;
  EXPECT_EQ(steps.error().kind, ErrorKind::unsupported) << steps.error().message;
  EXPECT_FALSE(steps.error().message.empty());
  for (const Reason& reason : steps.error().reasons) fields[reason.field] = reason.message;
  return fields;
}

std::set<std::string> fields(const AttentionSpec& spec, CpStrategy strategy,
                             std::int64_t size = 4) {
  std::set<std::string> names;
  for (const auto& [field, message] : refused(spec, strategy, size)) names.insert(field);
  return names;
}

using Fields = std::set<std::string>;

TEST(ContextParallel, LengthsHaveToBeDivisible) {
  AttentionSpec spec = base("causal");
  spec.seqlen_q = spec.seqlen_kv = 4100;  // by 4, not by 8
  EXPECT_EQ(fields(spec, ring), (Fields{"seqlen_q", "seqlen_kv"}));
  EXPECT_EQ(fields(spec, all_gather), (Fields{"seqlen_q", "seqlen_kv"}));
  EXPECT_EQ(fields(spec, all_to_all), Fields{});
  EXPECT_EQ(refused(spec, ring)["seqlen_q"],
            "seqlen_q = 4100: ring context parallelism over 4 ranks needs a multiple of 8");
  spec.mask = "none";
  EXPECT_EQ(fields(spec, ring), Fields{});
  spec.seqlen_q = 4098;
  EXPECT_EQ(fields(spec, ring), Fields{"seqlen_q"});
}

TEST(ContextParallel, HeadsHaveToBeDivisible) {
  EXPECT_EQ(fields(base(), all_to_all, 8), Fields{"kv_heads"});
  AttentionSpec spec = base();
  spec.heads = spec.kv_heads = 6;
  EXPECT_EQ(fields(spec, all_to_all), (Fields{"heads", "kv_heads"}));
  EXPECT_EQ(fields(spec, ring), Fields{});
}

TEST(ContextParallel, EverySequenceHasToBeDivisible) {
  AttentionSpec spec = ragged();
  spec.total_q = spec.total_kv = 0;
  spec.seqlens_q = spec.seqlens_kv = {4000, 96};
  EXPECT_EQ(fields(spec, ring), Fields{});
  spec.seqlens_q = spec.seqlens_kv = {4000, 97};
  EXPECT_EQ(fields(spec, ring), (Fields{"total_q", "total_kv", "seqlens_q", "seqlens_kv"}));
  spec.seqlens_q_padded = spec.seqlens_kv_padded = {4000, 104};  // the room in memory is cut
  spec.has_padded_offsets = true;
  EXPECT_EQ(fields(spec, ring), Fields{});
  EXPECT_EQ(steps_of(spec, ring, 4, 0)[0].spec.total_q, 4104 / 4);
  spec.seqlens_q_padded = spec.seqlens_kv_padded = {4104, 104};
  EXPECT_EQ(fields(spec, ring), (Fields{"seqlens_q_padded", "seqlens_kv_padded"}));
}

TEST(ContextParallel, WindowsHaveNoRing) {
  AttentionSpec spec = base("causal");
  spec.window_left = 128;
  EXPECT_EQ(fields(spec, ring), Fields{"window"});
  EXPECT_EQ(fields(spec, all_gather), Fields{});
  EXPECT_EQ(fields(spec, all_to_all), Fields{});
  spec = ragged("padding");
  spec.window_left = 128;
  spec.window_right = 128;
  EXPECT_EQ(fields(spec, all_gather), Fields{"window"});
}

TEST(ContextParallel, CausalMasksAreThoseOfSelfAttention) {
  AttentionSpec spec = base("causal");
  spec.seqlen_q = 2048;
  EXPECT_EQ(fields(spec, ring), Fields{"seqlen_kv"});
  EXPECT_EQ(fields(spec, all_gather), Fields{"seqlen_kv"});
  EXPECT_EQ(fields(spec, all_to_all), Fields{});
  spec = ragged("padding_causal");
  spec.layout = "thd_bshd_bshd";
  spec.total_kv = 0;
  EXPECT_EQ(fields(spec, ring), Fields{"seqlen_kv"});
  spec.mask = "padding";
  EXPECT_EQ(fields(spec, ring), Fields{});
  spec = base("padding_causal_bottom_right");
  EXPECT_EQ(fields(spec, ring), Fields{"mask"});
  EXPECT_EQ(fields(spec, all_gather), Fields{"mask"});
  EXPECT_EQ(fields(spec, all_to_all), Fields{});
  spec = base("padding_causal");
  spec.seqlens_q = {4096, 10};
  spec.seqlens_kv = {4096, 11};
  EXPECT_EQ(fields(spec, ring), Fields{});
  EXPECT_EQ(fields(spec, all_gather), Fields{"seqlens_kv"});
}

TEST(ContextParallel, ScoresThatAStepCannotKnow) {
  AttentionSpec spec = base();
  spec.softmax = ir::SoftmaxKind::off_by_one;
  EXPECT_EQ(fields(spec, ring), Fields{"softmax"});
  EXPECT_EQ(fields(spec, all_gather), Fields{});
  spec = base("causal");
  spec.bias = BiasKind::alibi;
  EXPECT_EQ(fields(spec, ring), Fields{"bias"});
  EXPECT_EQ(fields(spec, all_gather), Fields{});
  spec.mask = "none";
  EXPECT_EQ(fields(spec, all_gather), Fields{"bias"});
  spec = ragged();
  spec.bias = BiasKind::post_scale;
  spec.bias_shape = {1, 16, 4096, 4096};
  spec.attn_mask = MaskTensor{DType::boolean, {1, 1, 4096, 4096}};
  EXPECT_EQ(fields(spec, ring), (Fields{"bias", "attn_mask"}));
  EXPECT_EQ(fields(spec, all_to_all), Fields{});
}

TEST(ContextParallel, CachesAndStridesHaveNoSteps) {
  AttentionSpec spec = base("padding");
  spec.paged = PagedCache{64, 64, 0};
  spec.append = 1;
  EXPECT_EQ(fields(spec, all_to_all), Fields{"paged"});
  spec.paged.reset();
  EXPECT_EQ(fields(spec, ring), Fields{"append"});
  spec = base();
  spec.strides["q"] = {1 << 23, 128, 2048, 1};
  EXPECT_EQ(fields(spec, ring), Fields{"strides"});
}

// One answer names all that has to change.
TEST(ContextParallel, AllReasonsAtOnce) {
  AttentionSpec spec = base("causal");
  spec.seqlen_q = spec.seqlen_kv = 4100;
  spec.window_left = 5;
  spec.softmax = ir::SoftmaxKind::learnable;
  EXPECT_EQ(fields(spec, ring, 8), (Fields{"seqlen_q", "seqlen_kv", "window", "softmax"}));
}

TEST(ContextParallel, BadUseIsAnError) {
  for (const auto& [size, rank] :
       {std::pair<std::int64_t, std::int64_t>{0, 0}, {-1, 0}, {2, 2}, {2, -1}}) {
    const auto steps = cp_step_configs(base(), ring, size, rank);
    ASSERT_FALSE(steps.ok());
    EXPECT_EQ(steps.error().kind, ErrorKind::invalid_argument);
  }
  AttentionSpec spec = base();
  spec.layout = "hdbs";
  EXPECT_EQ(cp_step_configs(spec, ring, 2, 0).error().kind, ErrorKind::invalid_argument);
  EXPECT_EQ(cp_distinct_steps(base()).error().kind, ErrorKind::invalid_argument);
  EXPECT_EQ(fields(base(), ring, kMaxRanks * 2), Fields{"context_parallel"});
}

// ---- distinct steps -----------------------------------------------------------------------------

std::vector<std::string> distinct(AttentionSpec spec, CpStrategy strategy, std::int64_t size) {
  spec.context_parallel = ContextParallel{strategy, size};
  const auto steps = cp_distinct_steps(spec);
  EXPECT_TRUE(steps.ok()) << steps.error().message;
  std::vector<std::string> names;
  if (!steps.ok()) return names;
  for (const CpStep& step : *steps) names.push_back(step.name);
  return names;
}

using Names = std::vector<std::string>;

TEST(ContextParallel, DistinctStepsAreNamedByTheFirst) {
  EXPECT_EQ(distinct(base("causal"), ring, 1), Names{"ring step 0 of rank 0"});
  EXPECT_EQ(distinct(base("causal"), ring, 8),
            (Names{"ring step 0 of rank 0", "ring step 1 of rank 0", "ring step 1 of rank 1"}));
  EXPECT_EQ(distinct(base(), ring, 8), Names{"ring step 0 of rank 0"});
  EXPECT_EQ(distinct(base(), all_gather, 8), Names{"all-gather step 0 of rank 0"});
  EXPECT_EQ(distinct(base("causal"), all_gather, 2),
            (Names{"all-gather step 0 of rank 0", "all-gather step 1 of rank 0",
                   "all-gather step 0 of rank 1", "all-gather step 1 of rank 1"}));
  EXPECT_EQ(distinct(ragged(), all_gather, 8), Names{"all-gather step 0 of rank 0"});
  AttentionSpec slopes = base();
  slopes.heads = slopes.kv_heads = 4;
  slopes.bias = BiasKind::alibi;
  slopes.alibi_slopes = true;
  slopes.alibi_slope_values = {1, 2, 3, 4};
  EXPECT_EQ(distinct(slopes, all_to_all, 4), Names{"all-to-all step 0 of rank 0"});
}

// No rank has a step that is not among the distinct ones.
TEST(ContextParallel, DistinctStepsCoverAllRanks) {
  AttentionSpec window = base("causal");
  window.window_left = 700;
  for (const AttentionSpec& spec :
       {base(), base("causal"), base("padding_causal"), window, ragged()}) {
    for (const CpStrategy strategy : {ring, all_gather, all_to_all}) {
      for (const std::int64_t size : {1, 2, 4}) {
        AttentionSpec parallel = spec;
        parallel.context_parallel = ContextParallel{strategy, size};
        const auto known = cp_distinct_steps(parallel);
        std::set<std::string> covered;
        if (!known.ok()) continue;
        for (const CpStep& step : *known) {
          EXPECT_TRUE(covered.insert(shape(step.spec)).second) << step.name;
        }
        std::set<std::string> all;
        for (std::int64_t rank = 0; rank < size; ++rank) {
          for (const std::string& text : shapes(steps_of(spec, strategy, size, rank))) {
            all.insert(text);
          }
        }
        EXPECT_EQ(covered, all);
      }
    }
  }
}

TEST(ContextParallel, ManyRanksAreQuick) {
  AttentionSpec spec = base("causal");
  spec.seqlen_q = spec.seqlen_kv = 1 << 20;
  EXPECT_EQ(distinct(spec, ring, kMaxRanks).size(), 3U);
  EXPECT_EQ(distinct(spec, all_gather, 1024).size(), 2048U);
}

// ---- specs --------------------------------------------------------------------------------------

Result<Spec> spec_of(const AttentionSpec& attention) {
  return spec_from_json(attention_to_json(attention), "test");
}

TEST(ContextParallel, ASpecStandsForItsDistinctSteps) {
  AttentionSpec attention = base("causal");
  attention.pass = Pass::training;
  attention.context_parallel = ContextParallel{ring, 4};
  const auto spec = spec_of(attention);
  ASSERT_TRUE(spec.ok()) << spec.error().message;
  ASSERT_EQ(spec->steps.size(), 3U);
  EXPECT_EQ(spec->steps[2].name, "ring step 1 of rank 1");
  ASSERT_EQ(spec->parts.size(), 6U);
  EXPECT_EQ(spec->parts[5].name, "backward");
  EXPECT_EQ(spec->parts[5].step, 2U);
  EXPECT_EQ(spec->document["context_parallel"]["size"], 4);
  // Each part is the graph of its step's own spec.
  const auto steps = cp_step_configs(attention, ring, 4, 1);
  const auto graph = attention_graph((*steps)[1].spec, Pass::backward);
  ASSERT_TRUE(graph.ok());
  EXPECT_EQ(ir::canonical_text(spec->parts[5].graph), ir::canonical_text(*graph));
}

TEST(ContextParallel, ARefusedSplitIsAnAnswer) {
  AttentionSpec attention = base("causal");
  attention.window_left = 5;
  attention.context_parallel = ContextParallel{ring, 4};
  const auto spec = spec_of(attention);
  ASSERT_TRUE(spec.ok()) << spec.error().message;
  EXPECT_TRUE(spec->parts.empty());
  EXPECT_TRUE(spec->steps.empty());
  ASSERT_EQ(spec->unsupported.size(), 1U);
  EXPECT_EQ(spec->unsupported[0].field, "window");
}

}  // namespace
}  // namespace lawson::front
