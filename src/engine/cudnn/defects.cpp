#include "engine/cudnn/defects.h"

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "engine/cudnn/defects_fusion.h"
#include "engine/cudnn/facts.h"

namespace lawson::cudnn {
namespace {

constexpr int kOpen = std::numeric_limits<int>::max();  // no release with a fix is known

// What a row may look at; `attention` is null for a fusion.
struct Question {
  const ir::Graph& graph;
  const AttentionFacts* attention;
  int compute_capability;
};

// What is done about a row's graphs.
// told: compiling the plan finds out.
enum class Remedy { bar, told, full_lengths, expand_bias, clear_rows, scale_sink_gradient };

struct Row {
  int first_version;
  int last_version;
  const char* id;
  const char* source;
  const char* field;
  Remedy remedy;
  const char* message;
  bool (*applies)(const Question&);
  const ir::Node* (*culprit)(const ir::Graph&) = nullptr;  // of a fusion: the node it is about
};

constexpr const char* kMeasured = "measured on an H200 with cuDNN 9.19.0, docs/cudnn-notes.md";

bool is_hopper(int compute_capability) {
  return compute_capability / 100 == 9;
}

// Columns past the last key are masked anyway when the right bound keeps every row below s_kv.
bool tail_is_masked(const AttentionFacts& facts) {
  if (facts.has_lengths()) return true;
  if (facts.rule->right < 0) return false;
  const std::int64_t last_row =
      facts.rule->alignment == ir::Alignment::bottom_right ? facts.s_kv - 1 : facts.s_q - 1;
  return last_row + facts.rule->right < facts.s_kv;
}

// Axes of the scores [b, h, s_q, s_kv] along which what is added to them is repeated: the bias, or
// a mask of a float type in its place.
bool bias_repeats(const Question& question, std::size_t axis) {
  const AttentionFacts& facts = *question.attention;
  ir::TensorId added = facts.bias;
  if (added == ir::kNone) added = facts.node->inputs[ir::AttentionSlots::mask];
  if (added == ir::kNone || !is_float(question.graph.tensor(added).dtype)) return false;
  const Dims full{facts.batch, facts.heads, facts.s_q, facts.s_kv};
  return question.graph.tensor(added).shape[axis] < full[axis];
}

constexpr std::array kRows{
    Row{91000, 91001, "attention-9.10", "cuDNN 9.10.2 release notes", "cudnn_version", Remedy::bar,
        "cuDNN 9.10.0 and 9.10.1 compute attention wrongly; 9.10.2 or later does not",
        [](const Question& q) { return q.attention != nullptr; }},
    Row{91400, 91400, "window-9.14.0", "cuDNN 9.14.1 release notes", "window", Remedy::bar,
        "cuDNN 9.14.0 computes windows without a right bound wrongly when seqlen_kv > 1024; 9.14.1 "
        "or later does not",
        [](const Question& q) {
          return q.attention != nullptr && q.attention->rule->left >= 0 &&
                 q.attention->rule->right < 0 && q.attention->s_kv > 1024;
        }},
    // The kernel walks keys in tiles of 128 and masks them in tiles of 64: the zero-filled half of
    // the last tile is scored 0, and exp(0 - LSE) overflows.
    Row{91501, kOpen, "hopper-backward-kv-tail", "pytorch#196678", "seqlen_kv",
        Remedy::full_lengths,
        "cuDNN's Hopper backward returns NaN in dQ for query rows whose log-sum-exp is below -88.7 "
        "when seqlen_kv mod 128 is 64; a padding mask with seqlen_kv rounded up to 128 avoids it",
        [](const Question& q) {
          return q.attention != nullptr && q.attention->backward &&
                 is_hopper(q.compute_capability) && q.attention->s_kv % 128 == 64 &&
                 !tail_is_masked(*q.attention);
        }},
    Row{92500, kOpen, "hopper-backward-one-query", "cudnn-frontend#1072", "seqlen_q",
        Remedy::full_lengths,
        "cuDNN's Hopper backward returns NaN in dK and dV for seqlen_q = 1 with a very negative "
        "log-sum-exp; a padding mask with full lengths avoids it",
        [](const Question& q) {
          return q.attention != nullptr && q.attention->backward &&
                 is_hopper(q.compute_capability) && q.attention->s_q == 1 &&
                 !q.attention->has_lengths();
        }},
    Row{0, kOpen, "many-sequences", "pytorch#180718, pytorch#181235", "batch", Remedy::bar,
        "cuDNN accepts attention with more than 65535 sequences or heads and fails to launch it",
        [](const Question& q) {
          return q.attention != nullptr && std::max(q.attention->batch, q.attention->heads) > 65535;
        }},
    Row{0, kOpen, "bias-repeated-backward", kMeasured, "bias_shape", Remedy::expand_bias,
        "cuDNN accepts a backward whose bias is repeated along seqlen_q or seqlen_kv and computes "
        "wrong gradients; a bias with its full seqlen_q and seqlen_kv avoids it",
        [](const Question& q) {
          return q.attention != nullptr && q.attention->backward &&
                 (bias_repeats(q, 2) || bias_repeats(q, 3));
        }},
    Row{0, kOpen, "bias-per-head-forward", kMeasured, "bias_shape", Remedy::expand_bias,
        "cuDNN accepts a bias that is repeated along both seqlen_q and seqlen_kv and adds the "
        "wrong elements of it; a bias with its full seqlen_q and seqlen_kv avoids it",
        [](const Question& q) {
          return q.attention != nullptr && bias_repeats(q, 2) && bias_repeats(q, 3);
        }},
    Row{0, kOpen, "dropout-mask-backward", kMeasured, "dropout_mask", Remedy::bar,
        "cuDNN accepts a backward with a dropout mask of the caller's and computes wrong dQ and "
        "dK; "
        "with a seed and an offset they are right",
        [](const Question& q) {
          return q.attention != nullptr && q.attention->backward &&
                 q.attention->node->inputs[ir::AttentionSlots::dropout_mask] != ir::kNone;
        }},
    Row{0, kOpen, "dropout-sink-gradient", kMeasured, "dropout", Remedy::scale_sink_gradient,
        "with dropout cuDNN's gradient of a sink is 1 - p times what it should be",
        [](const Question& q) {
          return q.attention != nullptr && q.attention->backward &&
                 q.attention->rule->dropout > 0 &&
                 q.attention->node->outputs[ir::AttentionBackward::dsink] != ir::kNone;
        }},
    Row{0, kOpen, "ragged-decode-stats", kMeasured, "seqlen_q", Remedy::bar,
        "with ragged queries and seqlen_q = 1 cuDNN writes the log-sum-exp and the max logit of "
        "the "
        "first head alone; with dense queries, or seqlen_q of 2 or more, they are right",
        [](const Question& q) {
          if (q.attention == nullptr || q.attention->backward || !q.attention->ragged_q ||
              q.attention->s_q != 1 || q.attention->heads == 1) {
            return false;
          }
          const auto& results = q.attention->node->outputs;
          return results[ir::Attention::max_logit] != ir::kNone ||
                 results[ir::Attention::stats] != ir::kNone;
        }},
    Row{0, kOpen, "ragged-gradient-stride", kMeasured, "strides.dq", Remedy::bar,
        "with ragged queries cuDNN writes dQ at the offsets of Q: dQ needs the stride of Q from "
        "one "
        "token to the next",
        [](const Question& q) {
          if (q.attention == nullptr || !q.attention->backward || !q.attention->ragged_q) {
            return false;
          }
          const ir::Node& node = *q.attention->node;
          return q.graph.tensor(node.outputs[ir::AttentionBackward::dq]).strides[2] !=
                 q.graph.tensor(node.inputs[ir::AttentionSlots::q]).strides[2];
        }},
    Row{0, kOpen, "paged-two-page-sizes", kMeasured, "paged.page_size_v", Remedy::bar,
        "cuDNN accepts caches of keys and values with different page sizes and reads the values of "
        "wrong pages; one page size for both is right",
        [](const Question& q) {
          if (q.attention == nullptr || !q.attention->paged) return false;
          const ir::Node& node = *q.attention->node;
          return q.graph.tensor(node.inputs[ir::AttentionSlots::k]).shape[2] !=
                 q.graph.tensor(node.inputs[ir::AttentionSlots::v]).shape[2];
        }},
    Row{0, kOpen, "pointwise-repeated-vector", kMeasured, "shape", Remedy::bar,
        "cuDNN accepts a fusion without a matmul that repeats an operand with at most one dim "
        "above "
        "1, and reads the wrong elements of it; give the operand two dims above 1, or all",
        [](const Question& q) {
          return q.attention == nullptr && !has_matmul(q.graph) &&
                 repeats_a_vector(q.graph) != nullptr;
        },
        repeats_a_vector},
    Row{0, kOpen, "mixed-operand-unaligned", kMeasured, "strides", Remedy::bar,
        "cuDNN accepts a matmul operand that is converted from an 8-bit input whose rows are not "
        "multiples of 4 bytes apart, and computes wrong products; its documentation asks for "
        "32-bit alignment: pad the rows",
        [](const Question& q) {
          return q.attention == nullptr && mixes_unaligned_operand(q.graph) != nullptr;
        },
        mixes_unaligned_operand},
    Row{0, kOpen, "products-of-two-depths", kMeasured, "in", Remedy::bar,
        "cuDNN accepts two products side by side that sum over different numbers of elements, and "
        "sums both over one; products of the same depth are right: fuse one, and add the other to "
        "it",
        [](const Question& q) {
          return q.attention == nullptr && has_products_of_two_depths(q.graph) != nullptr;
        },
        has_products_of_two_depths},
    Row{0, kOpen, "product-repeated-over-batch", kMeasured, "shape", Remedy::bar,
        "cuDNN accepts a result with more batches than the product that it is made from, and "
        "writes the first ones alone; repeat an operand of the product instead",
        [](const Question& q) {
          return q.attention == nullptr && repeats_a_product(q.graph) != nullptr;
        },
        repeats_a_product},
    Row{0, kOpen, "int4-intermediate", kMeasured, "dtype", Remedy::bar,
        "cuDNN accepts an int4 value that is made inside of a fusion, and computes others; end the "
        "fusion with it",
        [](const Question& q) { return q.attention == nullptr && makes_int4(q.graph) != nullptr; },
        makes_int4},
    Row{0, kOpen, "column-beside-its-reduction", kMeasured, "outputs", Remedy::bar,
        "cuDNN accepts a result of one column beside a reduction of it, and writes other values "
        "into "
        "the column; one of the two alone is right",
        [](const Question& q) {
          return q.attention == nullptr && reduces_a_stored_column(q.graph) != nullptr;
        },
        reduces_a_stored_column},
    Row{0, kOpen, "byte-vector-before-product", kMeasured, "dtype", Remedy::bar,
        "cuDNN accepts a bool or 8-bit vector that is repeated in what is done to a matmul's "
        "operand, and reads wrong elements of it; a vector of 16 or 32 bits is right",
        [](const Question& q) {
          return q.attention == nullptr && repeats_bytes_before_product(q.graph) != nullptr;
        },
        repeats_bytes_before_product},
    Row{0, kOpen, "f32-operand-from-8-bit-float", kMeasured, "dtype", Remedy::bar,
        "cuDNN accepts a matmul operand of f32 that is computed from an 8-bit float, and loses "
        "some "
        "percent of its accuracy; compute it in bf16 or f16",
        [](const Question& q) {
          return q.attention == nullptr && widens_bytes_to_f32(q.graph) != nullptr;
        },
        widens_bytes_to_f32},
    Row{0, kOpen, "chained-product", kMeasured, "in", Remedy::told,
        "cuDNN accepts a matmul of another matmul's result, and the kernel that it writes does not "
        "compile: a verdict that is built says no; make them two graphs",
        [](const Question& q) {
          return q.attention == nullptr && chained_product(q.graph) != nullptr;
        },
        chained_product},
    // Depend on the lengths' values, which no plan knows.
    Row{0, kOpen, "decode-empty-query", kMeasured, "seqlens_q", Remedy::clear_rows,
        "with seqlen_q = 1 cuDNN ignores the query lengths: the row of a sequence of length 0 is "
        "computed instead of being 0",
        [](const Question& q) {
          return q.attention != nullptr && !q.attention->backward && q.attention->s_q == 1 &&
                 q.attention->has_lengths();
        }},
    Row{0, kOpen, "padding-empty-keys", kMeasured, "seqlens_kv", Remedy::clear_rows,
        "cuDNN returns NaN in the rows of a sequence that has queries and no keys (length 0 in "
        "seqlens_kv)",
        [](const Question& q) {
          return q.attention != nullptr && q.attention->s_q > 1 && q.attention->has_lengths();
        }},
};

bool concerns(const Row& row, const Question& question, int cudnn_version) {
  return cudnn_version >= row.first_version && cudnn_version <= row.last_version &&
         row.applies(question);
}

}  // namespace

std::optional<Defect> known_defect(const ir::Graph& graph, const Device& device,
                                   int cudnn_version) {
  const auto facts = attention_facts(graph);
  const Question question{graph, facts ? &*facts : nullptr, device.compute_capability};
  const Row* found = nullptr;
  for (const Row& row : kRows) {
    if (!concerns(row, question, cudnn_version)) continue;
    if (found == nullptr || (row.remedy == Remedy::bar && found->remedy != Remedy::bar)) {
      found = &row;
    }
  }
  if (found == nullptr) return std::nullopt;
  Defect defect{found->id, found->message, found->source, found->field,
                found->remedy == Remedy::bar};
  if (found->culprit != nullptr) {
    const ir::Node& node = *found->culprit(graph);
    defect.message = fmt::format("{}: {}", label_of(graph, node), found->message);
    defect.field = result_of(graph, node);
  }
  return defect;
}

Repairs repairs_for(const ir::Graph& graph, const Device& device, int cudnn_version) {
  const auto facts = attention_facts(graph);
  const Question question{graph, facts ? &*facts : nullptr, device.compute_capability};
  Repairs repairs;
  for (const Row& row : kRows) {
    const bool changes = row.remedy != Remedy::bar && row.remedy != Remedy::told;
    if (!changes || !concerns(row, question, cudnn_version)) continue;
    repairs.full_lengths |= row.remedy == Remedy::full_lengths;
    repairs.expand_bias |= row.remedy == Remedy::expand_bias;
    repairs.scale_sink_gradient |= row.remedy == Remedy::scale_sink_gradient;
    repairs.defects.emplace_back(row.id);
  }
  return repairs;
}

}  // namespace lawson::cudnn
